"""The plan of memory of a training run: it is asked for here, found by decide.py, and compared at the end."""

from dataclasses import asdict

from ..run.allocator import MAPPED_BYTES_IF_TIGHT, give_back_freed_memory
from ..run.distributed import World
from ..run.errors import is_ours
from ..run.folder import at_end
from ..run.watch import PeaksByAct
from .planned import Knobs, MemoryPlan, Workload, is_tight, remember


def plan_memory(
    workload: Workload, knobs: Knobs, world: World, fit: str = "", fitted=False, force=False
) -> MemoryPlan:
    """Whether a training run fits, before anything is allocated; see fit.py.

    fit: "same" looks for knobs that fit, "any" also for LoRA and a quantized base; fitted: an earlier start
    has found them, and they stay. Raises ConfigError where it does not fit, unless force. A copy of utils
    without fit.py plans nothing.
    """
    peaks = PeaksByAct(world.device)
    at_end(peaks.close)
    flags = asdict(knobs) | {
        "async_save": workload.async_save,
        "low_cpu_fsdp": workload.low_cpu_fsdp,
        "fit": fit,
    }
    try:
        from .decide import decide
    except ModuleNotFoundError as error:
        if fit or not is_ours(error):
            raise
        text = "memory    not planned: utils/plan/fit.py or a file that it needs is not here"
        return remember(MemoryPlan(peaks, text, flags=flags))
    plan = decide(workload, knobs, world, fit, fitted, force, peaks, flags)
    if world.device.type != "cuda" and is_tight(plan.planned):
        give_back_freed_memory(MAPPED_BYTES_IF_TIGHT)
    return remember(plan)
