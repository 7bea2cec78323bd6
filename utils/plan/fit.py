"""Will it fit, and what would: the memory of a run before it begins, and the settings that change it.

Nothing is allocated and nothing read: models are on meta. A model that cannot be traced gets its states only,
and no total.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import nn

from ..model.activations import keep_activations, recompute_activations
from ..model.loading import build_model
from ..model.loss import add_chunked_loss
from ..model.options import Lora, Quant
from ..model.pieces import rows_of_full_shard
from ..run.errors import escaped, reason_of_others
from ..run.units import GIB, MIB
from .formula import Formulas
from .planned import KNOBS, Knobs
from .replay import forward_peak, step_peak, units_of
from .reserve import FITS, TIGHT, TOO_LARGE, answer_of, must_and_comfortable
from .speed import LINK, seconds
from .states import Peak, Setting, States, estimate_states, sum_of
from .trace import Record, Trace, record_step

# Not measured, since no GPU has run this yet: what a process that drives a GPU takes of the host. What it
# takes of the device beyond what is alive: see reserve.py.
PROCESS_BYTES = 2 * GIB
# beside the states: loading.CHUNK and saving.CHUNK elements
LOAD_BYTES, SAVE_BYTES = 8 * MIB, 32 * MIB
# Chosen above what was measured on a CPU (115 MiB in 1,000 steps of the tiny model): what a process takes
# while it runs, for modules that are imported later, threads, and what glibc keeps of blocks below
# allocator.MAPPED_BYTES. See tests/fit_trials.py.
HOST_BYTES_OF_RANK, HOST_SLACK = 256 * MIB, 1.05
# Measured on a CPU: what a step of an 8-bit optimizer takes for a while, in bytes for each element of the
# largest tensor, by the bytes of one element (fp32, 16 bit).
BNB_BYTES = {4: 20, 2: 24}
RECOMPUTE = ("none", "selective", "full")
METHODS = {
    "full": (False, "none"),
    "LoRA": (True, "none"),
    "8bit": (True, "8bit"),
    "4bit": (True, "4bit"),
}


@dataclass(frozen=True)
class Need:
    """What a rank needs. peak: None where the model cannot be traced, and `why`. device: bytes that must be
    there; comfortable: with which the allocator never has to give blocks back (reserve.py). host: bytes, of
    one rank. acts: bytes of the device that the acts need at most, of those that need much.
    """

    states: States
    peak: Peak | None
    why: str
    device: int
    comfortable: int
    host: int
    acts: dict[str, int]

    def sentence(self) -> str:
        """What the plan prints."""
        if not self.peak:
            caveat = "states only, no activations, no gathered layers"
            return (
                f"memory    {sum_of(vars(self.states))} on the fullest rank ({caveat}); {self.why}"
            )
        where = f"on the fullest rank, in the act train: {self.peak.phase}"
        more = (
            f"; {self.acts['load'] / GIB:.2f} GiB in the act load"
            if self.largest_act == "load"
            else ""
        )
        return f"memory    {sum_of(self.peak.parts)} {where}{more}"

    @property
    def largest_act(self) -> str:
        return max(self.acts, key=self.acts.get, default="")

    def most(self) -> str:
        """The largest part."""
        if not self.peak:
            return ""
        if self.largest_act != "train":
            return f"in the act {self.largest_act}"
        name, size = max(self.peak.parts.items(), key=lambda part: part[1])
        return f"most of it {name}, {size / GIB:.2f} GiB"


SIZES_AND_PLACES = ("batch_size", "grad_accum", "cpu_offload", "reshard_after_forward")


@dataclass
class Planner:
    """Needs of a model under any knobs, each found once."""

    structure: tuple  # config, dtype of the parameters, attention, trust_remote_code
    dtype: torch.dtype  # to compute in
    shards: int  # ranks that a copy of the model is cut over
    seq_len: int
    local: int = 1  # ranks of one machine
    replicate: int = 1  # copies of the model
    gpu: bool = True  # whether devices have a memory of their own
    gloo: bool = False  # whether gloo moves what ranks share, and not NCCL
    optimizer: str = "adamw"
    packed: bool = False
    sync_each: bool = False
    low_cpu: bool = True
    link: float = LINK  # GB/s between two GPUs of one machine
    async_save: bool = False  # checkpoints are written from a copy on the host
    lora: Lora = Lora()  # the rank is one of the knobs
    quant: Quant = Quant()  # the kind is one of the knobs
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
        lora = replace(self.lora, lora_rank=knobs.lora_rank)
        quant = replace(self.quant, quantization=knobs.quantization)
        if quant.quantization != "8bit":
            quant = replace(quant, int8_mode="dequant")
        if lora:
            from ..model.lora import add_adapters, freeze_base

            add_adapters(model, lora)
            freeze_base(model, quant, self.dtype)
        return add_chunked_loss(model)

    def kind(self, knobs: Knobs) -> Knobs:
        """What of them the operations of a step depend on, besides its rows and tokens."""
        others = {name: getattr(Knobs, name) for name in SIZES_AND_PLACES}
        return replace(knobs, **others)

    def trace(self, knobs: Knobs, seq_len: int) -> Trace:
        """Of the model's step, run on fake tensors."""
        kind, rows = self.kind(knobs), knobs.batch_size
        return self.once(
            ("trace", kind, rows, seq_len), lambda: self.record(kind, rows, seq_len).trace()
        )

    @cached_property
    def formulas(self) -> Formulas:
        """The same for many rows and lengths, from one run for each kind of step."""

        def sizes(kind: Knobs) -> set[int]:
            return {n for parameter in self.model(kind).parameters() for n in parameter.shape}

        model = self.model(Knobs())
        fields = model.config.get_text_config().to_dict().values()
        hints = [n for n in fields if isinstance(n, int) and n > 1]
        return Formulas(self.record, sizes, model.get_output_embeddings().chunk_tokens, hints)

    def record(
        self, kind: Knobs, rows: int, seq_len: int, bounds: list | None = None, on_meta=False
    ) -> Record:
        model, mode = self.model(kind), kind.activation_checkpointing
        if mode != "none":
            recompute_activations(model, mode)
        try:
            return record_step(
                model, self.dtype, rows, seq_len, self.packed, bounds, self.gpu, on_meta
            )
        finally:
            if mode != "none":
                keep_activations(model)

    def quick(self, knobs: Knobs, seq_len: int = 0) -> Need:
        """The need, by a formula; to the byte that of a trace. For many settings."""
        length = seq_len or self.seq_len

        def trace() -> Trace:
            try:
                return self.formulas.trace(self.kind(knobs), knobs.batch_size, length)
            except Exception:
                # a model may run at this length, and not at those that a formula takes
                return self.trace(knobs, length)

        return self.need(knobs, trace)

    def need(self, knobs: Knobs, trace: Callable[[], Trace] | None = None) -> Need:
        """trace: of another length than seq_len, or found otherwise."""
        peak, why, offload = None, "", knobs.cpu_offload and self.gpu
        how = (
            knobs.grad_accum,
            knobs.reshard_after_forward,
            self.sync_each,
            offload,
            self.replicate,
            self.gloo,
        )
        setting = Setting(self.shards, self.dtype, *how)
        states, on_host, stored, *_ = self.sizes(knobs)
        try:
            key = ("units", knobs.lora_rank, knobs.quantization, offload)
            units = self.once(key, lambda: units_of(self.model(knobs), setting))
            peak = step_peak(
                units, states, setting, trace() if trace else self.trace(knobs, self.seq_len)
            )
        except Exception as error:  # a model is someone else's program
            why = f"its blocks cannot be traced: {escaped(reason_of_others(error))[:150]}"
        acts = self.acts(knobs, states, peak, setting)
        device = max(acts.values(), default=0)
        copy = self.saved_copy(knobs, states) * self.async_save
        if self.gpu:
            pools = max(device, sum(peak.pools.values()) if peak else 0)
            device, comfortable = must_and_comfortable(device, pools, self.shards * self.replicate)
            host = PROCESS_BYTES + on_host * offload + copy + (0 if self.low_cpu else stored)
        else:
            device = comfortable = host = int(device * HOST_SLACK) + HOST_BYTES_OF_RANK
        return Need(states, peak, why, device, comfortable, host, acts)

    def acts(
        self, knobs: Knobs, states: States, peak: Peak | None, setting: Setting
    ) -> dict[str, int]:
        """Bytes of the device that the acts need at most, of those that need much; without any reserve."""
        away, model = setting.cpu_offload, self.model(knobs)
        head = model.get_output_embeddings()
        load = 0 if away else states.weights + LOAD_BYTES
        if not self.low_cpu and not self.gpu:
            load += self.sizes(knobs)[2]
        if peak and not hasattr(head, "base_layer") and head.weight.is_floating_point():

            def find() -> int:  # the loss is checked when the weights are there
                one = replace(setting, micro_batches=1, sync_each_microbatch=False)
                units_key = ("units", knobs.lora_rank, knobs.quantization, away)
                units = self.once(units_key, lambda: units_of(model, one))
                return forward_peak(units, states, one)

            key = ("load", knobs.lora_rank, knobs.quantization, away, knobs.reshard_after_forward)
            load = max(load, self.once(key, find))
        train = peak.total if peak else 0 if away else states.total
        save = (0 if away else states.weights + states.optimizer) + SAVE_BYTES
        if not self.gpu:
            trains = [p for p in model.parameters() if p.requires_grad]
            shares = [share_bytes(p, self.shards) for p in trains]
            # a checkpoint is written in this act, a tensor at a time
            written = 2 * max(shares, default=0)
            copy = self.saved_copy(knobs, states) * self.async_save
            stepping = 0
            # bitsandbytes' step on a CPU, which works on whole tensors
            if self.optimizer != "adamw":
                sizes = zip(trains, shares, strict=True)
                stepping = max(
                    (BNB_BYTES[p.element_size()] * n // p.element_size() for p, n in sizes),
                    default=0,
                )
            others = states.weights + states.optimizer
            train = max(train, others + written, others + states.gradients + stepping) + copy
            save += copy
        return {
            act: size for act, size in {"load": load, "train": train, "save": save}.items() if size
        }

    def saved_copy(self, knobs: Knobs, states: States) -> int:
        """Bytes of what a checkpoint holds of a rank."""
        return states.gradients + states.optimizer  # what trains has gradients of its own size

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

    def answer(self, need: Need, device_bytes: float, host_bytes: float) -> str:
        """Whether a machine has that: device_bytes for each rank, host_bytes for all of its ranks."""
        host_fits = need.host * self.local <= host_bytes
        return answer_of(need.device, need.comfortable, device_bytes) if host_fits else TOO_LARGE

    def fits(self, need: Need, device_bytes: float, host_bytes: float) -> bool:
        """Also tightly."""
        return self.answer(need, device_bytes, host_bytes) != TOO_LARGE

    def seconds(self, knobs: Knobs) -> float:
        """Of a step, for comparing."""
        return self.once(("seconds", knobs), lambda: seconds(self, knobs))

    def ways(self, knobs: Knobs, any_method=False) -> Iterator[Knobs]:
        """All other knobs with the same rows in a step; with any_method LoRA, 8bit and 4bit after them."""
        rows = knobs.batch_size * knobs.grad_accum
        methods = [(knobs.lora_rank, knobs.quantization)]
        if any_method:
            # an adapter has its own
            rank = knobs.lora_rank or (0 if self.lora.adapter else 16)
            methods += [(rank, kind) for kind in ("none", "8bit", "4bit")]
        for rank, kind in dict.fromkeys(methods):
            yield from sorted(
                (
                    Knobs(rows // accum, accum, recompute, offload, reshard, rank, kind)
                    for accum in range(1, rows + 1)
                    if rows % accum == 0
                    for recompute in RECOMPUTE
                    for offload in ((False, True) if self.gpu else (knobs.cpu_offload,))
                    for reshard in (
                        (False, True) if self.shards > 1 else (knobs.reshard_after_forward,)
                    )
                ),
                key=self.seconds,
            )

    def fastest(
        self, knobs: Knobs, device_bytes: float, host_bytes: float, any_method=False
    ) -> Knobs | None:
        """The fastest that fits, of the first method of which any does; tightly only where no other setting
        of that method fits.
        """
        tight = None
        for way in self.ways(knobs, any_method):
            if tight and (way.lora_rank, way.quantization) != (tight.lora_rank, tight.quantization):
                return tight
            answer = self.answer_for(way, device_bytes, host_bytes)
            if answer == FITS:
                return way
            if answer == TIGHT:
                tight = tight or way
        return tight

    def smallest_change(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> Knobs | None:
        """What fits and differs in as few flags as can be; in the method only where nothing else helps, and
        tightly only where nothing else fits.
        """

        def changes(other: Knobs) -> tuple[int, float]:
            return sum(getattr(knobs, n) != getattr(other, n) for n in KNOBS), self.seconds(other)

        for any_method in (False, True):
            tight = None
            for way in sorted(self.ways(knobs, any_method), key=changes):
                answer = self.answer_for(way, device_bytes, host_bytes)
                if answer == FITS:
                    return way
                if answer == TIGHT:
                    tight = tight or way
            if tight:
                return tight
        return None

    def remedy(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> str:
        """The flags of the smallest change that fits, or what else there is to do."""
        change = self.smallest_change(knobs, device_bytes, host_bytes)
        more = "more or larger GPUs" if self.gpu else "a machine with more memory"
        return change.flags(knobs) if change else f"{more}, or a smaller --seq_len"

    def over(self, need: Need, device_bytes: float, host_bytes: float) -> float:
        """Bytes more than there are; 0 or less where it fits."""
        if need.peak is None:
            return float("inf")
        return max(need.device - device_bytes, need.host * self.local - host_bytes)

    def reserved(self, size: int) -> float:
        """With a reserve, what is added to a peak by so many bytes, at most."""
        return size * HOST_SLACK

    def answer_for(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> str:
        need = self.quick(knobs)
        return self.answer(need, device_bytes, host_bytes) if need.peak else TOO_LARGE

    def holds(self, knobs: Knobs, device_bytes: float, host_bytes: float) -> bool:
        return self.answer_for(knobs, device_bytes, host_bytes) != TOO_LARGE


def share_bytes(parameter: nn.Parameter, shards: int) -> int:
    """Of a rank, at most."""
    return (
        rows_of_full_shard(parameter.shape[0], shards)
        * parameter[0].numel()
        * parameter.element_size()
    )


def pinned(model: nn.Module, states: States, shards: int) -> int:
    """Bytes on the host for offloaded states. Weights and gradients are page-locked, and the allocator of
    such memory rounds every block up to a power of two (torch's CachingHostAllocator).
    """
    total = states.optimizer
    for p in model.parameters():
        mine = share_bytes(p, shards)
        total += (1 << (mine - 1).bit_length()) * (2 if p.requires_grad else 1)
    return total
