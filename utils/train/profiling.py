"""What may be recorded beside the log: torch's profiler; TensorBoard and Weights & Biases; MFU of GPUs."""

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from ..run.distributed import World
from ..run.errors import print0, reason_of_others

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
    # It adds the time to the name.
    write_trace = torch.profiler.tensorboard_trace_handler(str(folder), name, use_gzip=True)
    on_gpu = world.device.type == "cuda"

    def write(profiler: torch.profiler.profile) -> None:
        write_trace(profiler)
        print0(f"profile   {folder}: open its traces at https://ui.perfetto.dev")
        if on_gpu:
            snapshot = folder / f"{name}.{time.time_ns()}.memory.pickle"
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


class Tracker:
    """A service that gets the numbers of a run. Where it fails, a warning says so, and the run goes on."""

    def __init__(self, name: str, start: Callable, folder: Path, done: int):
        self.name = name
        self.service = self.attempt(start, folder, done)  # (log, close), or None

    def attempt(self, call: Callable, *arguments: object) -> tuple | None:
        try:
            return call(*arguments)
        except Exception as error:  # of a package, a disk, a network
            self.service = None
            print0(f"warning: the run goes on without {self.name}: {reason_of_others(error)}")

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.service:
            self.attempt(self.service[0], numbers, step)

    def close(self) -> None:
        if self.service:
            self.attempt(self.service[1])


def start_tensorboard(folder: Path, done: int) -> tuple[Callable, Callable]:
    """A log in folder/tensorboard; steps after `done`, of an earlier start, are purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def log(numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def start_wandb(folder: Path, done: int) -> tuple[Callable, Callable]:
    """A run of Weights & Biases, named like the folder."""
    import wandb

    run = wandb.init(dir=folder, name=folder.name)
    return lambda numbers, step: run.log(numbers, step=step), run.finish


def start_recording(
    out: Path, world: World, done: int, steps: int, profile: bool, tensorboard: bool, wandb: bool
) -> tuple[torch.profiler.profile | None, list[Tracker]]:
    """What is wanted of a profiler and, on rank 0, of trackers. done: the step that was resumed from."""
    trackers = []
    if tensorboard and world.rank == 0:
        trackers.append(Tracker("TensorBoard", start_tensorboard, out, done))
    if wandb and world.rank == 0:
        trackers.append(Tracker("Weights & Biases", start_wandb, out, done))
    return start_profiler(out / "profile", world, done, steps) if profile else None, trackers


# Name of a device, as a regular expression -> TFLOP/s. Dense bf16 products summed in fp32, from NVIDIA's data
# sheets and white papers (halved where they count sparsity); fp16 for V100 and T4, which have no bf16 units.
# The first match counts.
PEAK_TFLOPS = {
    "B200": 2250,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100|H200|GH200|H800": 989,
    "A100|A800": 312,
    "A10|V100": 125,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "T4": 65,
}


def mfu(flops: float, world: World) -> float:
    """Model FLOPs utilization: the share of the peak of the world's GPUs in so many FLOPs a second, of all
    ranks together. 0 where a GPU's peak is not known.
    """
    peak = peak_flops(world.gpu_name)
    return flops / (peak * world.size) if peak else 0.0


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that multiply each token: matrices and the head, without the embedding table.

    Of the experts of a mixture, stored as (experts, rows, columns), those that one token visits.
    """
    visits = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    # a tied table is looked up, and also multiplied with
    tables.discard(model.get_output_embeddings().weight)
    total = 0
    for parameter in model.parameters():
        if parameter.ndim < 2 or parameter in tables:
            continue
        numel = parameter.numel()
        total += numel * visits // len(parameter) if parameter.ndim == 3 else numel
    return total


def flops_per_token(model: nn.Module, seq_len: int) -> float:
    """Floating-point operations to train on one token, forward and backward, without recomputation. model: as
    it is before its weights are quantized.

    6 for each matmul parameter; and 6 * layers * (heads * head size) * seq_len for attention, which is
    causal, so half of what PaLM counts (arXiv 2204.02311, appendix B); where the config has one size for all
    layers. Llama-3-8B at 4096: 48.25e9.
    """
    config = model.config.get_text_config()
    attention = 0
    with suppress(Exception):  # a config has no heads, or sizes that differ by layer
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        attention = config.num_hidden_layers * heads * size * seq_len
    return 6.0 * matmul_parameters(model) + 6.0 * attention


def peak_flops(name: str) -> float | None:
    """The peak of the device that torch.cuda.get_device_name calls `name`; None for a part of a device (MIG),
    a laptop's, and a name that is not known.
    """
    if re.search(r"\b(MIG|Laptop|Ti)\b", name):
        return None
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b({pattern})\b", name):
            return tflops * 1e12
    return None
