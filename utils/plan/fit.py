"""Will it fit, and what would: the memory of a run before it begins, and the settings that change it.

Nothing is allocated and nothing read: models are on meta. A model that cannot be traced gets its states only,
and no total.

Two figures are given for a GPU. *Must* is what a step needs to end. *Comfortable* is what the caching
allocator takes when nothing limits it: each CUDA stream has a pool of its own, whose freed blocks no other
stream uses, so the pools' peaks add up, though they do not come at the same time. Between the two a run fits
tightly: the allocator has to give cached blocks back in every step, and to wait for the device each time.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import nn

from ..model.pieces import rows_of_full_shard
from ..run.distributed import World, gather
from ..run.errors import (
    ConfigError,
    advise_on_memory,
    check,
    end_act,
    escaped,
    print0,
    reason_of_others,
)
from ..run.memory import host_memory, memory_bytes, peaks, reserved_peaks
from ..run.units import GIB, MIB
from .replay import check_peak, step_peak, units_of
from .states import LEVERS, Peak, Setting, States, estimate_states, planned_model, sum_of
from .trace import Trace, trace_step

FITS, TIGHT, TOO_LARGE = "fits", "fits tightly", "does not fit"
WHY_TIGHT = "the allocator must give blocks back in every step"

# Beyond what is alive: the CUDA context, cuBLAS, and with several GPUs NCCL. In 224 runs on A100 that others
# published (foundation-model-stack/fms-acceleration, benchmark results of its FSDP and Liger plugins)
# nvidia-smi less what torch had allocated was never below 0.92 GiB on one GPU, 3.5 GiB on two.
# A part of that is cache, which is given back.
MUST_BYTES_ALONE, MUST_BYTES_OF_SEVERAL = GIB, 3 * GIB
# Chosen on nine published runs of FSDP2.
POOLS_SLACK, POOLS_BYTES = 1.08, 3 * GIB // 2
# An assumption: what a process that drives a GPU takes of the host.
PROCESS_BYTES = 2 * GIB
# Beside the states: loading.CHUNK and saving.CHUNK elements.
LOAD_BYTES, SAVE_BYTES = 8 * MIB, 32 * MIB
# On a CPU glibc keeps much of what is freed: 1.42 to 1.68 times what is alive was measured. The bytes are
# those of modules that are imported later, and of threads.
HOST_SLACK, HOST_BYTES = 1.6, 256 * MIB

RECOMPUTE = ("none", "selective", "full")
TOKENS_STEP = 64  # of the length of a row
MOST = 2**16  # rows, or steps of a row's length


@dataclass(frozen=True)
class Need:
    """What a rank needs. peak: None where the model cannot be traced, and `why`. device: bytes that must be
    there. host: bytes, of one rank. acts: bytes of the device that the acts need at most, without a reserve.
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
            return f"memory    {sum_of(asdict(self.states))} on the fullest rank ({caveat}); {self.why}"
        text = f"memory    {sum_of(self.peak.parts)} on the fullest rank, in the {self.peak.phase}"
        if self.acts["load"] > self.peak.total:
            text += f"; {self.acts['load'] / GIB:.2f} GiB in the act load"
        return text

    def largest_part(self) -> str:
        """The largest part of the peak, for a refusal."""
        if not self.peak:
            return ""
        name, size = max(self.peak.parts.items(), key=lambda part: part[1])
        return f", most of it {name}, {size / GIB:.2f} GiB"


class Room(NamedTuple):
    """Bytes for each rank's device, bytes of the host for a machine's ranks, and the words for both."""

    device: float
    host: float
    text: str


# --- what a setting needs


class Sizes(NamedTuple):
    """What does not depend on the rows. stored: bytes of all weights as they are stored."""

    states: States
    units: tuple
    stored: int
    pinned: int  # bytes of the states where they are on the host


@lru_cache(maxsize=256)
def sizes_of(setting: Setting) -> Sizes:
    """setting: of one row of one token, with all else at its default that does not matter."""
    model = planned_model(setting)
    states = estimate_states(model, setting.shards, optimizer=setting.optimizer)
    stored = sum(p.numel() * p.element_size() for p in model.parameters())
    return Sizes(states, units_of(model, setting), stored, pinned(model, states, setting.shards))


@lru_cache(maxsize=4096)
def trace_of(setting: Setting) -> Trace:
    """setting: with all at its default that no block sees."""
    return trace_step(
        planned_model(setting),
        setting.dtype,
        setting.batch_size,
        setting.seq_len,
        setting.packing,
        setting.activation_checkpointing,
    )


def need_of(setting: Setting) -> Need:
    """What a rank needs of its device and of the host."""
    if not setting.gpu:
        setting = replace(setting, cpu_offload=False)  # the device is the host
    one_token = {"batch_size": 1, "rows": 0, "seq_len": 1, "reshard_after_forward": True}
    one_token |= {"activation_checkpointing": "none", "local_ranks": 1}
    sizes = sizes_of(replace(setting, **one_token))
    peak, why = None, ""
    try:
        alone = {"shards": 1, "replicate": 1, "local_ranks": 1, "rows": 0, "optimizer": "adamw"}
        alone |= {"cpu_offload": False, "reshard_after_forward": True, "compile": False}
        trace = trace_of(replace(setting, **alone))
        peak = step_peak(sizes.units, sizes.states, setting, trace)
    except Exception as error:  # a model is someone else's program
        why = f"its blocks cannot be traced: {escaped(reason_of_others(error))[:150]}"
    copy = sizes.states.gradients + sizes.states.optimizer if setting.async_save else 0
    acts = need_by_act(setting, sizes, peak)
    if not setting.gpu:
        acts |= {"train": acts["train"] + copy, "save": acts["save"] + copy}
        device = int(max(acts.values()) * HOST_SLACK) + HOST_BYTES
        return Need(sizes.states, peak, why, device, device, device, acts)
    alive = max(acts.values())
    pools = max(alive, sum(peak.pools.values()) if peak else 0)
    must, comfortable = must_and_comfortable(alive, pools, setting.shards * setting.replicate)
    host = PROCESS_BYTES + copy
    if setting.cpu_offload:
        host += sizes.pinned
    if not setting.low_cpu_fsdp:
        host += sizes.stored
    return Need(sizes.states, peak, why, must, comfortable, host, acts)


def need_by_act(setting: Setting, sizes: Sizes, peak: Peak | None) -> dict[str, int]:
    """Bytes of the device that the acts need at most, without any reserve, by name of the act."""
    states = sizes.states
    if setting.cpu_offload:
        states = States(0, 0, 0)
    load = states.weights + LOAD_BYTES
    if not setting.low_cpu_fsdp and not setting.gpu:
        load += sizes.stored
    head = planned_model(setting).get_output_embeddings()
    if not hasattr(head, "base_layer") and head.weight.is_floating_point():
        load = max(load, check_peak(sizes.units, sizes.states, setting))
    return {
        "load": load,
        "train": peak.total if peak else states.total,
        "save": states.weights + states.optimizer + SAVE_BYTES,
    }


def pinned(model: nn.Module, states: States, shards: int) -> int:
    """Bytes on the host for offloaded states. Weights and gradients are page-locked, and the allocator of
    such memory rounds every block up to a power of two (torch's CachingHostAllocator).
    """
    total = states.optimizer
    for p in model.parameters():
        share_numel = rows_of_full_shard(p.shape[0], shards) * p[0].numel()
        share_bytes = share_numel * p.element_size()
        total += (1 << (share_bytes - 1).bit_length()) * (2 if p.requires_grad else 1)
    return total


def must_and_comfortable(alive: int, pools: int, ranks: int) -> tuple[int, int]:
    """Bytes of a GPU for so many that are alive at a time, and for the sum of the pools' peaks."""
    must = alive + (MUST_BYTES_ALONE if ranks == 1 else MUST_BYTES_OF_SEVERAL)
    return must, max(must, int(pools * POOLS_SLACK) + POOLS_BYTES)


# --- whether that fits


def bytes_missing(setting: Setting, need: Need, room: Room) -> float:
    """More than there are; 0 or less where it fits, also tightly."""
    return max(need.device - room.device, need.host * setting.local_ranks - room.host)


def answer_of(setting: Setting, need: Need, room: Room) -> str:
    """FITS, TIGHT or TOO_LARGE."""
    if bytes_missing(setting, need, room) > 0:
        return TOO_LARGE
    return TIGHT if need.comfortable > room.device else FITS


def first_that_fits(settings: Iterable[Setting], room: Room) -> Setting | None:
    """The first that fits; one that fits tightly only where no other does."""
    tight = None
    for setting in settings:
        need = need_of(setting)
        answer = answer_of(setting, need, room) if need.peak else TOO_LARGE
        if answer == FITS:
            return setting
        if answer == TIGHT:
            tight = tight or setting
    return tight


def ways(setting: Setting) -> Iterator[Setting]:
    """All settings of the same method with the same rows in a step, those first that cost less time: offload
    costs most, then recomputing, then more micro-batches, then gathering layers twice.
    """
    rows = setting.batch_size * setting.grad_accum
    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    for offload, recompute, accum, reshard in itertools.product(
        (False, True) if setting.gpu else (setting.cpu_offload,),
        RECOMPUTE,
        divisors,
        (False, True) if setting.shards > 1 else (setting.reshard_after_forward,),
    ):
        yield replace(
            setting,
            batch_size=rows // accum,
            rows=rows,
            activation_checkpointing=recompute,
            cpu_offload=offload,
            reshard_after_forward=reshard,
        )


def methods(setting: Setting) -> list[Setting]:
    """The setting, and with LoRA beside frozen weights in 16, 8 and 4 bit."""
    lora = setting.lora or replace(setting.lora, lora_rank=16)
    found = [setting]
    for kind in ("none", "8bit", "4bit"):
        found.append(replace(setting, lora=lora, quant=replace(setting.quant, quantization=kind)))
    return list(dict.fromkeys(found))


def fastest(setting: Setting, room: Room, any_method: bool = False) -> Setting | None:
    """What fits and costs least time, of the first method of which anything fits."""
    for method in methods(setting) if any_method else [setting]:
        found = first_that_fits(ways(method), room)
        if found:
            return found
    return None


def smallest_change(setting: Setting, room: Room) -> Setting | None:
    """What fits and differs in as few flags as can be; in the method only where nothing else helps."""
    before = setting.levers()

    def changes(other: Setting) -> int:
        return sum(value != before[name] for name, value in other.levers().items())

    others = itertools.chain.from_iterable(map(ways, methods(setting)[1:]))
    for candidates in (ways(setting), others):
        found = first_that_fits(sorted(candidates, key=changes), room)
        if found:
            return found
    return None


def remedy(setting: Setting, room: Room) -> str:
    """The flags of the smallest change that fits, or what else there is to do."""
    change = smallest_change(setting, room)
    if change:
        return change.flags_from(setting)
    return f"{more_memory(setting)}, or a smaller --seq_len"


def more_memory(setting: Setting) -> str:
    return "more or larger GPUs" if setting.gpu else "a machine with more memory"


def largest_batch(setting: Setting, room: Room) -> int:
    """The most rows of a micro-batch that fit, to 1 % or a row; 0 where one does not."""

    def missing(rows: int) -> float:
        more = replace(setting, batch_size=rows, rows=rows * setting.grad_accum)
        return bytes_missing(more, need_of(more), room)

    return most(missing, setting.batch_size)


def longest_row(setting: Setting, room: Room) -> int:
    """The longest row that fits alone, in steps of 64 tokens and to 1 %; 0 where none does."""

    def missing(steps: int) -> float:
        longer = replace(
            setting, batch_size=1, rows=setting.grad_accum, seq_len=TOKENS_STEP * steps
        )
        return bytes_missing(longer, need_of(longer), room)

    return TOKENS_STEP * most(missing, max(1, setting.seq_len // TOKENS_STEP))


def most(missing: Callable[[int], float], first: int) -> int:
    """The largest number of at most MOST that fits, to 1 %, and never one that does not; 0 where none does.

    missing: bytes too few, which grow with the number. A line through the last two numbers gives the next
    one. Where that has not led to the end after six, halves follow, as in bisection.
    """
    last, number = first, 2 * first
    found = {last: missing(last), number: missing(number)}
    while True:
        low = max((n for n, size in found.items() if size <= 0), default=0)
        high = min((n for n, size in found.items() if size > 0), default=MOST)
        slope = (found[number] - found[last]) / (number - last)
        guess = (low + high) // 2
        if len(found) <= 6 and slope > 0:
            guess = math.floor(number - found[number] / slope)
            guess = min(max(guess, low), high - 1)
        if guess <= low * 1.01:
            return low
        last, number = number, guess
        found[guess] = missing(guess)


# --- the plan of a run


def room_here(world: World) -> Room:
    """What this machine has. All ranks come to one answer and one text: those of the rank that has least."""
    used, limit = host_memory()
    host, limit, local_ranks = min(gather(world, (limit - used, limit, world.local_ranks)))
    if world.device.type != "cuda":
        share = host / local_ranks
        text = f"{share / GIB:.2f} GiB a rank, of {limit / GIB:.1f} GiB of host memory"
        return Room(share, host, text)
    # Asking begins this process' CUDA context, some hundred MiB, which are in the reserve too.
    free, _ = torch.cuda.mem_get_info(world.device)
    free += torch.cuda.memory_reserved(world.device) - torch.cuda.memory_allocated(world.device)
    device = min(gather(world, free))
    text = f"{device / GIB:.2f} GiB free on a GPU and {host / GIB:.1f} GiB of host memory"
    return Room(device, host, text)


@dataclass(frozen=True)
class MemoryPlan:
    """What the act `plan` found: the lines to print, the flags to go on with, what plan.json keeps.

    base: bytes that a process on a CPU had before the model came, which its measured peaks also hold.
    """

    text: str
    chosen: dict[str, object] = field(default_factory=dict)
    planned: dict[str, object] = field(default_factory=dict)
    base: int = 0

    def compare(self, world: World) -> dict:
        """What plan.json keeps of the measured peaks; prints those of the fullest rank beside the plan. All
        ranks call it, in the last act.
        """
        end_act()
        ranks, reserved = zip(*gather(world, (peaks, reserved_peaks)), strict=True)
        acts = {act: {"measured_bytes": max(rank[act] for rank in ranks)} for act in ranks[0]}
        texts = []
        for act, size in self.planned["acts"].items():
            measured, planned = acts[act]["measured_bytes"], self.base + size
            error = measured / planned - 1
            acts[act] |= {"planned_bytes": planned, "error": error}
            both = f"planned {planned / GIB:.2f}, measured {measured / GIB:.2f}"
            texts.append(f"{act} {both} ({error:+.1%})")
        if not any(reserved):
            texts[-1] += (
                f"; glibc keeps what is freed, so up to {HOST_SLACK - 1:+.0%} is planned for"
            )
        print0(f"memory    GiB on the fullest rank: {', '.join(texts)}")
        facts = {"peak_memory_bytes": [max(rank.values()) for rank in ranks], "acts": acts}
        return facts | compare_reserved(reserved, self.planned["comfortable_bytes"])


def compare_reserved(ranks: tuple[dict[str, int], ...], comfortable: int) -> dict:
    """The same of what the allocator of a GPU had reserved, by rank and act; {} on a CPU."""
    if not any(ranks):
        return {}
    most_of_ranks = [max(rank.values()) for rank in ranks]
    error = max(most_of_ranks) / comfortable - 1
    both = f"{max(most_of_ranks) / GIB:.2f} of {comfortable / GIB:.2f} that were called comfortable"
    print0(f"memory    GiB reserved {both} ({error:+.1%}), by the allocator of the fullest GPU")
    return {"peak_reserved_bytes": most_of_ranks, "reserved_error": error}


def plan_memory(
    setting: Setting, world: World, fit: str = "", fitted: bool = False, force: bool = False
) -> MemoryPlan:
    """Whether a training run fits, before anything is allocated.

    fit: "same" looks for levers that fit, "any" also for LoRA and a quantized base; fitted: an earlier start
    has found them, and they stay. Raises ConfigError with the smallest change that helps where the run does
    not fit, unless force.
    """
    room = room_here(world)
    chosen: dict[str, object] = {}
    lines = []
    if fit and not fitted:
        best = fastest(setting, room, fit == "any")
        if not best:
            wider = "" if fit == "any" else ", --fit any"
            fix = f"{more_memory(setting)}{wider}"
            raise ConfigError(
                f"--fit: nothing fits in {room.text} (fix: {fix}, a smaller --seq_len)"
            )
        before = setting.levers()
        chosen = {name: value for name, value in best.levers().items() if value != before[name]}
        rows = best.batch_size * best.grad_accum
        chosen |= {"batch_size": best.batch_size, "grad_accum": 0}
        chosen["global_batch_size"] = rows * setting.shards * setting.replicate
        lines.append(f"fitted    {best.flags_from(setting) or 'nothing had to change'}")
        setting = best
    need = need_of(setting)
    answer = answer_of(setting, need, room)
    if setting.compile and need.peak:
        lines.append("memory    estimated: compiled blocks keep less than these, which are not")
    lines += [need.sentence(), room_sentence(setting, need, room)]
    if answer == TOO_LARGE and not force:
        raise ConfigError(refusal(setting, need, room))

    def less_memory() -> str:
        """Where memory runs out all the same: what keeps a tenth less alive."""
        alive = max(need.acts.values())
        fix = remedy(setting, room._replace(device=need.device - 0.1 * alive))
        if fit and fix.startswith("--"):
            fix = f"without --fit, and {fix}"  # which would choose again what did not do
        return fix

    planned = f"planned {need.device / GIB:.2f} of {room.device / GIB:.2f} GiB a rank"
    advise_on_memory(planned, less_memory)
    peaks.clear()  # they are measured from here on
    reserved_peaks.clear()
    base = 0 if setting.gpu else memory_bytes()
    return MemoryPlan("\n".join(lines), chosen, planned_facts(need, room, answer), base)


def planned_facts(need: Need, room: Room, answer: str) -> dict[str, object]:
    """What plan.json keeps of the plan; sizes in bytes of the fullest rank."""
    facts = asdict(need.states) | {
        "device_bytes": need.device,
        "host_bytes": need.host,
        "room_bytes": room.device,
        "comfortable_bytes": need.comfortable,
        "answer": answer,
        "acts": need.acts,
    }
    if need.peak:
        facts |= asdict(need.peak) | {"peak_bytes": need.peak.total}
    return facts


def room_sentence(setting: Setting, need: Need, room: Room) -> str:
    """What the plan prints of what is needed and what there is."""
    if not setting.gpu:
        reserve = f"{HOST_SLACK} x what is alive, since glibc keeps what is freed"
        return f"room      {need.device / GIB:.2f} GiB a rank, {reserve}; there is {room.text}"
    answer = answer_of(setting, need, room)
    if answer == TIGHT:
        answer = f"{answer}, {WHY_TIGHT}"
    device = f"{need.device / GIB:.2f} GiB a rank must be there"
    comfortable = f"{need.comfortable / GIB:.2f} GiB is comfortable"
    host = f"{need.host * setting.local_ranks / GIB:.2f} GiB of host"
    return f"room      {device}, {comfortable}, {host}; there is {room.text}: {answer}"


def refusal(setting: Setting, need: Need, room: Room) -> str:
    """One line: what does not fit, its largest part, and the smallest change that does."""
    text = f"a rank needs {need.device / GIB:.2f} GiB"
    if need.device <= room.device:
        host = f"{need.host * setting.local_ranks / GIB:.2f} GiB of host memory"
        text = f"the ranks of a machine need {host}"
    text += f"{need.largest_part()}; there is {room.text}"
    return f"this does not fit: {text} (fix: {remedy(setting, room)}; or --force to try)"


def plan_parts(
    parts: dict[str, int], act: str, world: World, fix: str, force: bool = False
) -> None:
    """For a recipe that trains nothing: print what a rank needs by part, at most, in an act, and what there
    is. ConfigError with `fix` where that is less, unless force.
    """
    room = room_here(world)
    must = sum(parts.values())
    if world.device.type == "cuda":
        must, _ = must_and_comfortable(must, must, world.size)
    print0(f"memory    {sum_of(parts)} on the fullest rank, in the act {act}")
    print0(f"room      {must / GIB:.2f} GiB a rank, reserve included; there is {room.text}")
    part, size = max(parts.items(), key=lambda part: part[1])
    why = f"a rank needs {must / GIB:.2f} GiB, most of it {part}, {size / GIB:.2f} GiB"
    fits = force or must <= room.device
    check(fits, f"this does not fit: {why}; there is {room.text} (fix: {fix}; or --force to try)")


def fitted_before(out: Path) -> dict[str, object]:
    """The levers and the global batch in the config.yaml of a run folder that was begun with --fit; {} where
    there is none. Raises ConfigError naming the file.
    """
    file = out / "config.yaml"
    if not file.exists():
        return {}
    try:
        settings = yaml.safe_load(file.read_text())
        was_fitted = settings.get("fit")
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:
        reason = reason_of_others(error)
        raise ConfigError(f"{file}: {reason} (fix: another --output_dir)") from None
    names = (*LEVERS, "global_batch_size")
    return {name: settings[name] for name in names if name in settings} if was_fitted else {}


def estimate_disk(
    weights: dict, steps: int, save_every: int, keep: int, optimizer: str = "adamw"
) -> int:
    """Bytes of the final model and of as many checkpoints as there are at a time.

    weights: of the folder that is trained, as open_weights gives them. A checkpoint has fp32 weights and two
    moments of each, in fp32 or 8 bit.
    """
    saves = math.ceil(steps / save_every) if save_every else 0
    saves = min(saves, keep + 1) if keep else saves
    kept = saves * (6 if "8bit" in optimizer else 12)
    return sum(math.prod(info.shape) * (info.dtype.itemsize + kept) for info in weights.values())
