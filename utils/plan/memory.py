"""The plan of memory of a training run: it is asked for here, found by decide.py, and compared at the end."""

from dataclasses import asdict

from ..run.distributed import World
from ..run.errors import is_ours
from .planned import Knobs, MemoryPlan, Workload, remember


def plan_memory(
    workload: Workload, knobs: Knobs, world: World, fit: str = "", fitted=False, force=False
) -> MemoryPlan:
    """Whether a training run fits, before anything is allocated; see fit.py.

    fit: "same" looks for knobs that fit, "any" also for LoRA and a quantized base; fitted: an earlier start
    has found them, and they stay. Raises ConfigError where it does not fit, unless force. A copy of utils
    without fit.py plans nothing.
    """
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
        return remember(MemoryPlan(text, flags=flags))
    plan = decide(workload, knobs, world, fit, fitted, force, flags)
    return remember(plan)
