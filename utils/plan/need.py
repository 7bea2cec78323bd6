"""What a training step needs of a GPU and of the host, and whether that fits.

Nothing is allocated and nothing is read: models are on meta. For a model that cannot be traced, only weights,
gradients and optimizer states are estimated.

A GPU has two figures. *Must* is the least memory with which a step can finish. *Comfortable* is what the
caching allocator reserves when nothing limits it: each CUDA stream has its own pool, and no other stream
uses the freed blocks in it, so the peaks of the pools add up, although they occur at different times.
Between the two figures a run fits tightly: in every step the allocator has to give cached blocks back, and
to wait for the device.
"""

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import nn

from ..run.errors import escaped, reason_of_others
from ..run.units import GIB, MIB
from .replay import check_peak, step_peak, units_of
from .states import Peak, Setting, States, estimate_states, planned_model, share_numel, sum_of
from .trace import Trace, record_step

FITS, TIGHT, MAYBE, TOO_LARGE = "fits", "fits tightly", "may not fit", "does not fit"
WHY_TIGHT = "the allocator must give blocks back in every step"

# The reserve above the live bytes: the CUDA context, cuBLAS, and with several GPUs NCCL. In 224 published
# runs on A100 (foundation-model-stack/fms-acceleration, benchmark results of its FSDP and Liger plugins) the
# memory in nvidia-smi less what torch had allocated was never below 0.92 GiB on one GPU, 3.5 GiB on two,
# some of it cache.
MUST_BYTES_ALONE, MUST_BYTES_OF_SEVERAL = GIB, 3 * GIB
# The slack on the pools, without weights and optimizer, which are never freed; and bytes on top. Both cover
# six of six published runs of FSDP2 with expandable segments (configs/README.md).
POOLS_SLACK, POOLS_BYTES = 1.11, 3 * GIB // 2
# In most published runs the plan's own error was up to 3 %: a run that needs more than this share may fail.
SURE = 0.97
# The least share of the live bytes that a compiled step needs: 0.85 to 0.96 in published runs.
COMPILED = 0.85
# An assumption: host memory of a process that uses a GPU.
PROCESS_BYTES = 2 * GIB
# On top of the states: loading.CHUNK and, on a CPU, saving.CHUNK elements, and imports of a save.
LOAD_BYTES, SAVE_BYTES = 8 * MIB, 48 * MIB
# On a CPU glibc keeps much of the freed memory: 1.42 to 1.68 times the live bytes were measured. The bytes on
# top are for modules that are imported later, and for threads.
HOST_SLACK, HOST_BYTES = 1.6, 256 * MIB


@dataclass(frozen=True)
class Need:
    """What a rank needs. peak: None if the model cannot be traced, for the reason `why`. device: bytes that
    must be available. host: bytes on the host. acts: peak bytes on the device by act, without a reserve.
    """

    states: States
    peak: Peak | None
    why: str
    device: int
    comfortable: int
    host: int
    acts: dict[str, int]

    def sentence(self) -> str:
        """The line that the plan prints."""
        if not self.peak:
            caveat = "states only, no activations, no gathered layers"
            return f"memory    {sum_of(asdict(self.states))} on the fullest rank ({caveat}); {self.why}"
        text = f"memory    {sum_of(self.peak.parts)} on the fullest rank, in the {self.peak.phase}"
        if self.acts["load"] > self.peak.total:
            text += f"; {self.acts['load'] / GIB:.2f} GiB in the act load"
        return text


class Room(NamedTuple):
    """Bytes for each rank's device, bytes of the host for all ranks of a machine, and both in words."""

    device: float
    host: float
    text: str


# --- what a setting needs

cached_record = lru_cache(maxsize=256)(record_step)


@lru_cache(maxsize=256)
def sizes_of(setting: Setting) -> tuple[States, tuple]:
    """(the states, the units of units_of), which do not depend on the rows.

    setting: reduced to at most two rows of one token and to defaults where they do not change the sizes, so
    that more settings share a cache entry.
    """
    model = planned_model(setting)
    states = estimate_states(model, setting.shards, optimizer=setting.optimizer)
    states = replace(states, weights=states.weights + setting.frozen_bytes)
    return states, units_of(model, setting)


def trace_of(setting: Setting) -> Trace:
    """The memory of the activations in a step with this setting."""

    def traced(batch: int, seq_len: int, scaled=int) -> Trace:
        return cached_record(
            planned_model(setting),
            setting.dtype,
            batch,
            seq_len,
            setting.masked,
            setting.activation_checkpointing,
            setting.repeats_keys,
            setting.activation_offload,
            setting.pictures,
        )(scaled=scaled)

    if setting.scaling:
        trace = setting.scaling(traced, setting.batch_size, setting.seq_len)
    else:
        trace = traced(setting.batch_size, setting.seq_len)
    if setting.pictures:
        _, before = setting.pictures.trace(
            planned_model(setting),
            setting.dtype,
            setting.batch_size,
            setting.seq_len,
            setting.activation_checkpointing,
        )
        trace = replace(trace, pictures=before)
    return trace


def need_of(setting: Setting) -> Need:
    """What a rank needs of its device and of the host."""
    if not setting.gpu:
        # on a CPU the device is the host
        setting = replace(setting, cpu_offload=False, activation_offload=False)
    states, units = sizes_of(
        replace(
            setting,
            batch_size=1,
            rows=min(2, setting.grad_accum),
            seq_len=1,
            reshard_after_forward=True,
            activation_checkpointing="none",
            scaling=None,
        )
    )
    peak, why, inputs = None, "", 0
    try:
        trace = trace_of(setting)
        peak = step_peak(units, states, setting, trace)
        if setting.activation_offload:
            inputs = len(trace.kinds) * pinned_bytes(trace.input_bytes)
    except Exception as error:  # a model is someone else's program
        why = f"its blocks cannot be traced: {escaped(reason_of_others(error))[:150]}"
    copy = states.gradients + states.optimizer if setting.async_save else 0
    model = planned_model(setting)
    # bytes of all weights, unsharded, in their own dtypes
    stored = 0 if setting.low_cpu_fsdp else sum(p.nbytes for p in model.parameters())
    on_device = States(0, 0, 0) if setting.cpu_offload else states
    load = on_device.weights + LOAD_BYTES + stored * (not setting.gpu)
    head = model.get_output_embeddings()
    checks_loss = not (setting.kind == "scores" or hasattr(head, "base_layer"))
    if checks_loss and head.weight.is_floating_point():
        load = max(load, check_peak(units, states, setting))
    steady = on_device.weights + on_device.optimizer
    acts = {
        "load": load,
        "train": (peak or on_device).total,
        "save": steady,
    }
    if not setting.gpu:
        acts |= {"train": acts["train"] + copy, "save": acts["save"] + copy + SAVE_BYTES}
    train = acts["train"]
    if setting.compile and peak:  # only the activations of the layers can shrink
        train = max(int(train * COMPILED), train - peak.parts["activations"])
    alive = max(acts["load"], train, acts["save"])
    ranks = setting.shards * setting.replicate
    must = must_be_there(alive, ranks, setting.gpu)
    if not setting.gpu:
        return Need(states, peak, why, must, must, must, acts)
    pools = max(alive, sum(peak.pools.values()) if peak else 0)
    comfortable = max(must, comfortable_of(pools, steady))
    host = PROCESS_BYTES + copy + inputs + stored
    if setting.cpu_offload:
        host += pinned(model, states, setting.shards) + setting.frozen_bytes
    return Need(states, peak, why, must, comfortable, host, acts)


@lru_cache(maxsize=256)
def pinned(model: nn.Module, states: States, shards: int) -> int:
    """Bytes on the host for offloaded states; weights and gradients are in page-locked memory."""
    total = states.optimizer
    for p in model.parameters():
        share_bytes = pinned_bytes(share_numel(p, shards) * p.element_size())
        total += share_bytes * (2 if p.requires_grad else 1)
    return total


def pinned_bytes(size: int) -> int:
    """Bytes of the page-locked block for `size` bytes: a power of two (torch's CachingHostAllocator)."""
    return 1 << (size - 1).bit_length()


def must_be_there(alive: int, ranks: int, gpu: bool) -> int:
    """Bytes that must be available on a rank's device for a peak of `alive` bytes: with the reserve."""
    if not gpu:
        return int(alive * HOST_SLACK) + HOST_BYTES
    return alive + (MUST_BYTES_ALONE if ranks == 1 else MUST_BYTES_OF_SEVERAL)


def comfortable_of(pools: int, steady: int) -> int:
    """Comfortable bytes of a GPU. pools: the sum of the pools' peaks; steady: bytes in it that
    are never freed.
    """
    return steady + int((pools - steady) * POOLS_SLACK) + POOLS_BYTES


# --- whether that fits


def bytes_missing(setting: Setting, need: Need, room: Room) -> float:
    """Bytes that are missing on the device or the host; 0 or less if the setting fits, also tightly."""
    return max(need.device - room.device, need.host * setting.local_ranks - room.host)


def answer_of(setting: Setting, need: Need, room: Room) -> str:
    """FITS, TIGHT, MAYBE or TOO_LARGE."""
    if bytes_missing(setting, need, room) > 0:
        return TOO_LARGE
    if setting.gpu and need.device > SURE * room.device:
        return MAYBE
    return TIGHT if need.comfortable > room.device else FITS
