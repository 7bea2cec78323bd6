"""What a run needs: memory, planned before it and compared after it, and disk."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .distributed import World, gather
from .errors import print0
from .metrics import PeaksByAct
from .run_folder import at_end

GIB = 2**30


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

    def compare(self, world: World) -> dict:
        """What plan.json keeps of the measured peaks; prints those of the fullest rank beside the plan. All
        ranks call it, in the last act.
        """
        self.peaks.note("")
        ranks = gather(world, self.peaks.found)
        acts, told = {act: {"measured_bytes": max(rank[act] for rank in ranks)} for act in ranks[0]}, []
        for act, size in self.planned.get("acts", {}).items():
            most, planned = acts[act]["measured_bytes"], self.base + size
            if planned:
                acts[act] |= {"planned_bytes": planned, "error": most / planned - 1}
                both = f"planned {planned / GIB:.2f}, measured {most / GIB:.2f}"
                told.append(f"{act} {both} ({most / planned - 1:+.1%})")
        peaks = [max(rank.values()) for rank in ranks]
        note = "; a process on a CPU keeps some of what it freed" if self.base else ""
        told = told or [f"measured {max(peaks) / GIB:.2f}"]
        print0(f"memory    GiB on the fullest rank: {', '.join(told)}{note}")
        return {"peak_memory_bytes": peaks, "acts": acts}


current: MemoryPlan | None = None  # of this process, for explain.py


def plan_memory(
    structure: tuple, dtype: torch.dtype, shards: int, world, flags: dict, examples, held_out
) -> MemoryPlan:
    """Whether a run fits, before anything is allocated; see fit.py. flags: a recipe's settings by name, of
    which --fit changes some. ConfigError where it does not fit. A copy without fit.py plans nothing.
    """
    peaks = PeaksByAct(world.device)
    at_end(peaks.close)
    try:
        from .fit import plan_flags
    except ModuleNotFoundError:
        return MemoryPlan(peaks, "memory    not planned: utils/fit.py is not here")
    global current
    longest = max(int(part.lengths.max()) for part in (examples, held_out) if part)
    current = MemoryPlan(peaks, *plan_flags(structure, dtype, shards, world, flags, longest))
    return current


def estimate_disk(weights: dict, steps: int, save_every: int, keep: int, optimizer: str = "adamw") -> int:
    """Bytes of the final model and of as many checkpoints as there are at a time.

    weights: of the folder that is trained, as open_weights gives them. A checkpoint has fp32 weights and two
    moments of each, in fp32 or 8 bit.
    """
    saves = math.ceil(steps / save_every) if save_every else 0
    saves = min(saves, keep + 1) if keep else saves
    kept = saves * (6 if "8bit" in optimizer else 12)
    return sum(math.prod(info.shape) * (info.dtype.itemsize + kept) for info in weights.values())
