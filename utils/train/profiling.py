"""Where the time and the memory of a few steps go: torch's profiler, and on CUDA its memory snapshot."""

import os
from pathlib import Path

import torch

from ..run.distributed import World
from ..run.errors import print0
from ..run.files import check_not_linked

SKIPPED, PROFILED = 3, 2  # the first steps allocate, compile and warm up


def start_profiler(folder: Path, world: World, first: int, steps: int) -> torch.profiler.profile:
    """Profile steps 4 and 5 after `first`, or the last two of a shorter run, into files in `folder`.

    Call step() on the result after every optimizer step. Each rank writes a trace of what ran on the CPU and
    the GPU, and on CUDA every allocation of the steps, with the lines of code that made it.
    https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html
    https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    active = max(1, min(PROFILED, steps - first))
    before = max(0, min(SKIPPED, steps - first - active))
    name = f"rank{world.rank}_from_step_{first + before + 1:08d}"
    while os.path.lexists(folder / f"{name}.json.gz"):  # of an earlier start
        name += "_again"
    trace, snapshot = folder / f"{name}.json.gz", folder / f"{name}_memory.pickle"
    cuda = world.device.type == "cuda"

    def write(profiler):
        check_not_linked(folder)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        print0(f"profile   {trace}: open it at https://ui.perfetto.dev")
        if cuda:
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            print0(f"profile   {snapshot}: drop it on https://docs.pytorch.org/memory_viz")

    if cuda:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    schedule = torch.profiler.schedule(
        wait=max(0, before - 1), warmup=min(1, before), active=active, repeat=1
    )
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True)
    profiler.start()
    return profiler
