"""Where the time and the memory of a few steps go: torch's profiler, and on CUDA its memory snapshot."""

import os
from pathlib import Path

import torch

from ..run.distributed import World
from ..run.errors import print0

SKIPPED = 3  # steps that allocate, compile and warm up
PROFILED = 2


def start_profiler(folder: Path, world: World, first: int, steps: int) -> torch.profiler.profile:
    """Profile steps 4 and 5 after `first`, or the last two of a shorter run, into files in `folder`.

    Call step() on the result after every optimizer step. Each rank writes a trace of what ran on the CPU and
    the GPU, and on CUDA every allocation of the steps, with the lines of code that made it.
    https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html
    https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    steps_to_run = steps - first
    active = max(1, min(PROFILED, steps_to_run))
    skipped = max(0, min(SKIPPED, steps_to_run - active))
    name = f"rank{world.rank}_from_step_{first + skipped + 1:08d}"
    while os.path.lexists(folder / f"{name}.json.gz"):  # of an earlier start
        name += "_again"
    trace = folder / f"{name}.json.gz"
    snapshot = folder / f"{name}_memory.pickle"
    on_gpu = world.device.type == "cuda"

    def write(profiler: torch.profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
        print0(f"profile   {trace}: open it at https://ui.perfetto.dev")
        if on_gpu:
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            print0(f"profile   {snapshot}: drop it on https://docs.pytorch.org/memory_viz")

    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=200_000)
    schedule = torch.profiler.schedule(
        wait=max(0, skipped - 1),
        warmup=min(1, skipped),
        active=active,
        repeat=1,
    )
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write, record_shapes=True)
    profiler.start()
    return profiler
