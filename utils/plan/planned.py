"""What a run needs: memory, planned before it and compared after it, and disk."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from ..run.allocator import MAPPED_BYTES_IF_TIGHT, give_back_freed_memory
from ..run.distributed import World, gather
from ..run.errors import is_ours, print0
from ..run.folder import at_end
from ..run.units import GIB
from ..run.watch import PeaksByAct


@dataclass(frozen=True)
class MemoryPlan:
    """What the act `plan` found: the lines to print, the flags to go on with, what plan.json keeps.

    peaks: what is measured. base: bytes that a process on a CPU had before the model came, which its measured
    peaks also hold.
    largest: which part of the planned peak is. change: finds the smallest change of flags that needs less.
    """

    peaks: PeaksByAct
    text: str
    chosen: dict[str, object] = field(default_factory=dict)
    planned: dict[str, object] = field(default_factory=dict)
    base: int = 0
    largest: str = ""
    change: Callable[[], str] | None = None
    flags: dict[str, object] = field(default_factory=dict)  # all of the run's, with the chosen ones

    def compare(self, world: World) -> dict:
        """What plan.json keeps of the measured peaks; prints those of the fullest rank beside the plan. All
        ranks call it, in the last act.
        """
        self.peaks.note("")
        ranks, reserved = zip(*gather(world, (self.peaks.found, self.peaks.reserved)), strict=True)
        acts, told = (
            {act: {"measured_bytes": max(rank[act] for rank in ranks)} for act in ranks[0]},
            [],
        )
        for act, size in self.planned.get("acts", {}).items():
            most, planned = acts[act]["measured_bytes"], self.base + size
            if planned:
                acts[act] |= {"planned_bytes": planned, "error": most / planned - 1}
                both = f"planned {planned / GIB:.2f}, measured {most / GIB:.2f}"
                told.append(f"{act} {both} ({most / planned - 1:+.1%})")
        peaks = [max(rank.values()) for rank in ranks]
        note = "; with what a process on a CPU had before" if self.base else ""
        if self.base and not is_tight(self.planned):
            note += ", and what glibc keeps where there is room"
        told = told or [f"measured {max(peaks) / GIB:.2f}"]
        print0(f"memory    GiB on the fullest rank: {', '.join(told)}{note}")
        return {"peak_memory_bytes": peaks, "acts": acts} | self.compare_reserved(reserved, acts)

    def compare_reserved(self, ranks: tuple[dict[str, int], ...], acts: dict) -> dict:
        """The same of what the allocator of a GPU had reserved by act; {} on a CPU. Adds it to `acts`."""
        if not any(ranks):
            return {}
        for act in acts:
            acts[act]["reserved_bytes"] = max(rank.get(act, 0) for rank in ranks)
        peaks = [max(rank.values()) for rank in ranks]
        told, found = f"reserved {max(peaks) / GIB:.2f}", {"peak_reserved_bytes": peaks}
        if comfortable := self.planned.get("comfortable_bytes"):
            found["reserved_error"] = error = max(peaks) / comfortable - 1
            told += f" of {comfortable / GIB:.2f} that were called comfortable ({error:+.1%})"
        print0(f"memory    GiB {told}, by the allocator of the fullest GPU")
        return found


current: MemoryPlan | None = None  # of this process, for explain.py


def plan_memory(
    structure: tuple, dtype: torch.dtype, shards: int, world, flags: dict, examples, held_out
) -> MemoryPlan:
    """Whether a run fits, before anything is allocated; see fit.py. flags: a recipe's settings by name, of
    which --fit changes some. ConfigError where it does not fit. A copy without fit.py plans nothing.
    """
    peaks = PeaksByAct(world.device)
    at_end(peaks.close)
    global current
    try:
        from .fit import plan_flags
    except ModuleNotFoundError as error:
        if flags["fit"] or not is_ours(error):
            raise
        text = "memory    not planned: utils/plan/fit.py or a file that it needs is not here"
        current = MemoryPlan(peaks, text, flags=flags)
        return current
    longest = max(int(part.lengths.max()) for part in (examples, held_out) if part)
    plan = plan_flags(structure, dtype, shards, world, flags, longest)
    current = MemoryPlan(peaks, *plan)
    if world.device.type != "cuda" and is_tight(current.planned):
        give_back_freed_memory(MAPPED_BYTES_IF_TIGHT)
    current = replace(current, flags=flags | current.chosen)
    return current


def is_tight(planned: dict) -> bool:
    """Whether a rank's share of the memory is used by more than half."""
    return 2 * planned["device_bytes"] > planned["room_bytes"]


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
