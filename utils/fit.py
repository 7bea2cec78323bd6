"""Will it fit, and what would: the memory of a run before it begins, and the settings that change it.

Nothing is allocated and nothing read: models are on meta. A model that cannot be traced gets its states only,
and no total.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, partial
from pathlib import Path

import torch
import yaml
from torch import nn

from .activations import keep_activations, recompute_activations
from .distributed import World, gather
from .errors import ConfigError, check
from .flops import flops_per_token, matmul_parameters
from .loading import build_model
from .loss import add_chunked_loss
from .memory import GIB, MIB, Peak, Setting, States, estimate_states, sum_of
from .metrics import peak_memory_bytes
from .replay import forward_peak, step_peak, units_of
from .trace import Trace, extrapolate, trace_step

# Not measured, since no GPU has run this yet: what CUDA, cuBLAS and NCCL take of a device, what its allocator
# loses between blocks, what a process that drives a GPU takes of the host.
FIXED_BYTES, SLACK, PROCESS_BYTES = 3 * GIB // 2, 1.03, 2 * GIB
LOAD_BYTES, SAVE_BYTES = 8 * MIB, 32 * MIB  # beside the states: loading.CHUNK and hf_format.CHUNK elements
# For the order of speeds, not for seconds: what a device of today computes and what its wires carry, in a
# second.
FLOPS, LINK_BYTES, HOST_BYTES = 200e12, 25e9, 50e9
RECOMPUTED = {"none": 0.0, "selective": 0.1, "full": 1.0}  # of a forward
METHODS = {"full": (False, "none"), "LoRA": (True, "none"), "8bit": (True, "8bit"), "4bit": (True, "4bit")}


@dataclass(frozen=True)
class Knobs:
    """What may be turned until a run fits. The names are those of the flags."""

    batch_size: int = 1
    grad_accum: int = 1
    activation_checkpointing: str = "none"
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    lora_rank: int = 0
    quantization: str = "none"

    def flags(self, others: "Knobs") -> str:
        """The flags that lead from `others` to these, as they are typed."""
        told = {name: value for name, value in asdict(self).items() if value != getattr(others, name)}
        words = {True: "", False: " false"}
        return " ".join(
            f"--{name}{words[value] if isinstance(value, bool) else f' {value}'}"
            for name, value in told.items()
        )


@dataclass(frozen=True)
class Need:
    """What a rank needs. peak: None where the model cannot be traced, and `why`. host: bytes, of one rank."""

    states: States
    peak: Peak | None
    why: str
    device: int
    host: int

    def sentence(self) -> str:
        """What the plan prints."""
        if not self.peak:
            caveat = "states only, no activations, no gathered layers"
            return f"memory    {sum_of(vars(self.states))} on the fullest rank ({caveat}); {self.why}"
        where = f"on the fullest rank, in the act train: {self.peak.phase}"
        return f"memory    {sum_of(self.peak.parts)} {where}"

    def most(self) -> str:
        """The largest part."""
        if not self.peak:
            return ""
        name, size = max(self.peak.parts.items(), key=lambda part: part[1])
        return f"most of it {name}, {size / GIB:.2f} GiB"


KNOBS = tuple(field.name for field in fields(Knobs))


@dataclass
class Planner:
    """Needs of a model under any knobs, each found once."""

    structure: tuple  # config, dtype of the parameters, attention, trust_remote_code
    dtype: torch.dtype  # to compute in
    shards: int  # ranks that a copy of the model is cut over
    seq_len: int
    local: int = 1  # ranks of one machine
    gpu: bool = True  # whether devices have a memory of their own
    optimizer: str = "adamw"
    packed: bool = False
    sync_each: bool = False
    low_cpu: bool = True
    lora: dict = field(default_factory=dict)  # options of lora.add_lora but the rank, or the adapter's folder
    quant: dict = field(default_factory=dict)  # options of quantize.quantize_linears
    known: dict = field(default_factory=dict)  # models, traces, units and sizes that were found

    def once(self, key: tuple, find: Callable):
        if key not in self.known:
            self.known[key] = find()
        return self.known[key]

    def model(self, knobs: Knobs) -> nn.Module:
        """On meta, with adapters and codes as they will be."""
        return self.once(("model", knobs.lora_rank, knobs.quantization), partial(self.build, knobs))

    def build(self, knobs: Knobs) -> nn.Module:
        model = build_model(*self.structure)
        options = {"alpha": 16.0, "targets": "all-linear"} | self.lora
        adapter = options.pop("adapter", "")
        if knobs.lora_rank or adapter:
            from .lora import add_adapter, add_lora, cast_frozen
            from .quantize import quantize_linears

            if adapter:
                add_adapter(model, Path(adapter), {})
            else:
                add_lora(model, knobs.lora_rank, **options)
            if kind := knobs.quantization.removeprefix("none"):
                mode = {} if kind == "8bit" else {"int8_mode": "dequant"}
                quantize_linears(model, kind, self.dtype, **self.quant | mode)
            cast_frozen(model, self.dtype)
        return add_chunked_loss(model)

    def trace(self, knobs: Knobs, seq_len: int) -> Trace:
        """Of the model's step; of many rows from that of four and of eight, since a loss of many is slow."""
        if knobs.batch_size > 8:
            known = {rows: self.trace(replace(knobs, batch_size=rows), seq_len) for rows in (4, 8)}
            return extrapolate(known, knobs.batch_size)
        model, mode = self.model(knobs), knobs.activation_checkpointing

        def run() -> Trace:
            if mode != "none":
                recompute_activations(model, mode)
            try:
                return trace_step(model, self.dtype, knobs.batch_size, seq_len, self.packed)
            finally:
                if mode != "none":
                    keep_activations(model)

        return self.once((id(model), mode, knobs.batch_size, seq_len), run)

    def need(self, knobs: Knobs, trace: Trace | None = None) -> Need:
        """trace: one that is known, in place of the model's own."""
        peak, why, offload = None, "", knobs.cpu_offload and self.gpu
        how = (knobs.grad_accum, knobs.reshard_after_forward, self.sync_each, offload)
        setting = Setting(self.shards, self.dtype, *how)
        states, on_host, stored, *_ = self.sizes(knobs)
        try:
            key = ("units", knobs.lora_rank, knobs.quantization, offload)
            units = self.once(key, lambda: units_of(self.model(knobs), setting))
            peak = step_peak(units, states, setting, trace or self.trace(knobs, self.seq_len))
        except Exception as error:  # a model is someone else's program
            reason = (str(error) or type(error).__name__).splitlines()[0][:120]
            why = f"its blocks cannot be traced: {type(error).__name__}: {reason}"
        device = peak.total if peak else 0 if offload else states.total
        if self.gpu:
            device = int(device * SLACK) + FIXED_BYTES
        host = PROCESS_BYTES + on_host * offload if self.gpu else device
        return Need(states, peak, why, device, host + (0 if self.low_cpu else stored))

    def sizes(self, knobs: Knobs) -> tuple[States, int, int, int, int]:
        """(states, their bytes if they are on the host; bytes of all weights as they are stored, as they are
        gathered, and of all gradients in fp32)
        """

        def find() -> tuple:
            model = self.model(knobs)
            states = estimate_states(model, self.shards, optimizer=self.optimizer)
            sizes = [(p.numel(), p.element_size(), p.requires_grad) for p in model.parameters()]
            stored = sum(count * size for count, size, _ in sizes)
            gathered = sum(count * min(size, self.dtype.itemsize) for count, size, _ in sizes)
            reduced = 4 * sum(count for count, _, trains in sizes if trains)
            return states, pinned(model, states, self.shards), stored, gathered, reduced

        return self.once(("sizes", knobs.lora_rank, knobs.quantization), find)

    def fits(self, need: Need, device_bytes: float, host_bytes: float) -> bool:
        """Whether a machine has that: device_bytes for each rank, host_bytes for all of its ranks."""
        return need.device <= device_bytes and need.host * self.local <= host_bytes

    def seconds(self, knobs: Knobs) -> float:
        """Of a step, for comparing: products, those that are recomputed too; bytes that are gathered,
        reduced, and moved between host and device.
        """
        tokens = knobs.batch_size * knobs.grad_accum * self.seq_len
        forwards = 1 + RECOMPUTED[knobs.activation_checkpointing] + (1 if knobs.lora_rank else 2)
        compute = tokens * self.flops / 3 * forwards / FLOPS
        *_, stored, gathered, reduced = self.sizes(knobs)
        gathered *= 2 if knobs.reshard_after_forward else 1
        away = (self.shards - 1) / self.shards
        wire = (gathered * knobs.grad_accum + reduced) * away / LINK_BYTES
        if not knobs.cpu_offload:
            return max(compute, wire)
        wire += (2 * knobs.grad_accum * stored + reduced) / self.shards / LINK_BYTES
        optimizer = 7 * reduced / self.shards * self.local / HOST_BYTES  # 28 bytes a parameter pass by
        return max(compute, wire) + optimizer

    @cached_property
    def flops(self) -> float:
        """To train on one token, nothing recomputed."""
        model = self.model(Knobs())
        return flops_per_token(model.config, self.seq_len, matmul_parameters(model))

    def ways(self, knobs: Knobs, any_method=False) -> Iterator[Knobs]:
        """All other knobs with the same rows in a step; with any_method LoRA, 8bit and 4bit after them."""
        rows = knobs.batch_size * knobs.grad_accum
        methods = [(knobs.lora_rank, knobs.quantization)]
        if any_method:
            methods += [(knobs.lora_rank or 16, kind) for kind in ("none", "8bit", "4bit")]
        for rank, kind in dict.fromkeys(methods):
            yield from sorted(
                (
                    Knobs(rows // accum, accum, recompute, offload, reshard, rank, kind)
                    for accum in range(1, rows + 1)
                    if rows % accum == 0
                    for recompute in RECOMPUTED
                    for offload in ((False, True) if self.gpu else (knobs.cpu_offload,))
                    for reshard in ((False, True) if self.shards > 1 else (knobs.reshard_after_forward,))
                ),
                key=self.seconds,
            )

    def fastest(self, knobs: Knobs, device_bytes: float, host_bytes: float, any_method=False) -> Knobs | None:
        """The fastest that fits, of the first method of which any does."""
        found = (k for k in self.ways(knobs, any_method) if self.holds(k, device_bytes, host_bytes))
        return next(found, None)

    def smallest_change(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> Knobs | None:
        """What fits and differs in as few flags as can be; in the method only where nothing else helps."""

        def changes(other: Knobs) -> tuple[int, float]:
            return sum(getattr(knobs, n) != getattr(other, n) for n in KNOBS), self.seconds(other)

        for any_method in (False, True):
            ways = sorted(self.ways(knobs, any_method), key=changes)
            if found := next((k for k in ways if self.holds(k, device_bytes, host_bytes)), None):
                return found
        return None

    def remedy(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> str:
        """The flags of the smallest change that fits, or what else there is to do."""
        change = self.smallest_change(knobs, device_bytes, host_bytes)
        return change.flags(knobs) if change else "more or larger GPUs, or a smaller --seq_len"

    def largest_batch(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> int:
        """The most rows of a micro-batch that fit, 0 where one does not; from one row and two."""
        known = {rows: self.trace(replace(knobs, batch_size=rows), self.seq_len) for rows in (1, 2)}
        return self.most(knobs, partial(extrapolate, known), device_bytes, host_bytes)

    def longest(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> int:
        """The longest row that fits alone, in steps of 64 tokens; 0 where none does. From two lengths, and
        from what does not grow with the rows, which is what is left at length 0.
        """
        length = max(self.seq_len, 4096)  # at which the loss works on full chunks
        one, two = (self.trace(replace(knobs, batch_size=rows), length) for rows in (1, 2))
        half = self.trace(replace(knobs, batch_size=1), length // 2)
        known = {0: extrapolate({1: one, 2: two}, 0), length // 2: half, length: one}
        return 64 * self.most(knobs, lambda n: extrapolate(known, 64 * n), device_bytes, host_bytes)

    def most(self, knobs: Knobs, trace: Callable[[int], Trace], *room: float) -> int:
        """The largest number, of at most 2**16, whose trace fits; 0 where 1 does not."""

        def too_much(number: int) -> bool:
            return not self.fits(self.need(knobs, trace(number)), *room)

        return bisect_left(range(1, 2**16 + 1), True, key=too_much)

    def holds(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> bool:
        need = self.need(knobs)
        return need.peak is not None and self.fits(need, device_bytes, host_bytes)


def pinned(model: nn.Module, states: States, shards: int) -> int:
    """Bytes on the host for offloaded states. Weights and gradients are page-locked, and the allocator of
    such memory rounds every block up to a power of two (torch's CachingHostAllocator).
    """
    total = states.optimizer
    for p in model.parameters():
        mine = -(-p.shape[0] // shards) * p[0].numel() * p.element_size()
        total += (1 << (mine - 1).bit_length()) * (2 if p.requires_grad else 1)
    return total


def plan_flags(structure: tuple, dtype: torch.dtype, shards: int, world, flags: dict, longest: int) -> tuple:
    """The fields of planned.MemoryPlan: what the flags need, or, with --fit, which flags fit."""
    device_bytes, host_bytes, what = room(world)
    length = flags["seq_len"] if flags["packing"] else min(flags["seq_len"], -(-longest // 8) * 8)
    rows = flags["global_batch_size"] // world.size or flags["batch_size"] * max(1, flags["grad_accum"])
    names = ("alpha", "targets", "dropout", "use_rslora", "use_dora", "modules_to_save")
    lora = {n: flags[n if n in flags else f"lora_{n}"] for n in names} | {"adapter": flags["adapter"]}
    quant = {"int8_mode": flags["int8_mode"], "head": flags["quantize_head"]}
    planner = Planner(
        structure, dtype, shards, length, local=world.local_size, lora=lora, quant=quant,
        gpu=world.device.type == "cuda", optimizer=flags["optimizer"], packed=flags["packing"],
        sync_each=flags["sync_each_microbatch"], low_cpu=flags["low_cpu_fsdp"],
    )  # fmt: skip
    asked = {name: flags[name] for name in KNOBS}
    knobs = Knobs(**asked | {"grad_accum": max(1, rows // flags["batch_size"])})
    chosen, lines = {}, []
    if flags["fit"] and (before := chosen_before(flags["output_dir"])):
        chosen, knobs = before, replace(knobs, **{name: before[name] for name in KNOBS})
    elif flags["fit"]:
        best = planner.fastest(knobs, device_bytes, host_bytes, flags["fit"] == "any")
        wider = "" if flags["fit"] == "any" else ", --fit any"
        check(best, f"--fit: nothing fits in {what} (fix: more or larger GPUs{wider}, a smaller --seq_len)")
        lines.append(f"fitted    {best.flags(knobs) or 'nothing had to change'}")
        chosen = asdict(best) | {"grad_accum": 0, "global_batch_size": rows * world.size}
        knobs = best
    need = planner.need(knobs)
    if flags["compile"] and need.peak:
        lines.append("memory    estimated: compiled blocks keep less than these, which are not")
    host = need.host * planner.local
    lines.append(need.sentence())
    away = f", {host / GIB:.2f} GiB of host" * planner.gpu
    lines.append(f"room      {need.device / GIB:.2f} GiB a rank{away}, reserve included; there is {what}")
    if not flags["force"] and not planner.fits(need, device_bytes, host_bytes):
        raise ConfigError(refusal(planner, knobs, need, device_bytes, host_bytes, what))
    planned = asdict(need.states) | {"device_bytes": need.device, "host_bytes": need.host}
    planned["acts"] = by_act(planner, knobs, need)
    if need.peak:
        planned |= {"peak_bytes": need.peak.total, "phase": need.peak.phase, "parts": need.peak.parts}
    base = 0 if planner.gpu else peak_memory_bytes(world.device)
    less = partial(planner.remedy, knobs, 0.9 * need.device, host_bytes)
    return "\n".join(lines), chosen, planned, base, need.most(), less


def by_act(planner: Planner, knobs: Knobs, need: Need) -> dict[str, int]:
    """Bytes of the device that the acts need at most, of those that need much."""
    states, away = need.states, knobs.cpu_offload and planner.gpu
    head = planner.model(knobs).get_output_embeddings()
    load = 0 if away else states.weights + LOAD_BYTES
    if not planner.low_cpu and not planner.gpu:
        load += planner.sizes(knobs)[2]
    if need.peak and not hasattr(head, "base_layer") and head.weight.is_floating_point():
        setting = Setting(planner.shards, planner.dtype, 1, knobs.reshard_after_forward, False, away)
        load = max(load, forward_peak(units_of(planner.model(knobs), setting), states, setting))
    save = (0 if away else states.weights + states.optimizer) + SAVE_BYTES
    acts = {"load": load, "train": need.peak and need.peak.total, "save": save}
    return {act: size for act, size in acts.items() if size}


def refusal(planner: Planner, knobs: Knobs, need: Need, device_bytes, host_bytes, what: str) -> str:
    """One line: what does not fit, its largest part, and the smallest change that does."""
    if need.device <= device_bytes:
        text = f"the ranks of a machine need {need.host * planner.local / GIB:.2f} GiB of host memory"
    else:
        text = f"a rank needs {need.device / GIB:.2f} GiB"
    text += f", {need.most()}" if need.peak else ""
    fix = planner.remedy(knobs, device_bytes, host_bytes)
    return f"this does not fit: {text}; there is {what} (fix: {fix}; or --force to try)"


def room(world: World) -> tuple[float, float, str]:
    """(bytes for each rank's device, bytes of the host for this machine's ranks, the sentence for both)."""
    from .acts import host_memory

    used, limit, _ = host_memory()
    host = min(gather(world, limit - used))  # all ranks must come to one answer
    if world.device.type != "cuda":
        share = host / world.local_size
        return share, host, f"{share / GIB:.2f} GiB a rank, of {limit / GIB:.1f} GiB of host memory"
    device = min(gather(world, torch.cuda.get_device_properties(world.device).total_memory))
    return device, host, f"{device / GIB:.2f} GiB a GPU and {host / GIB:.1f} GiB of host memory"


def chosen_before(out: str) -> dict:
    """The knobs in the config.yaml of a run folder that was begun with --fit."""
    file = Path(out, "config.yaml")
    if not out or not file.exists():
        return {}
    settings = yaml.safe_load(file.read_text())
    return {name: settings[name] for name in (*KNOBS, "global_batch_size")} if settings.get("fit") else {}
