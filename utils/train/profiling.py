"""Recordings beside the log: torch's profiler; TensorBoard and Weights & Biases; MFU of GPUs."""

import atexit
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from torch.cuda import memory

from ..run.distributed import World
from ..run.errors import print0, reason_of_others

PROFILED = 2  # steps


def start_profiler(folder: Path, world: World, first: int, steps: int) -> torch.profiler.profile:
    """Profile the 4th and 5th step after `first`, or the last two of a shorter run, into files in `folder`.

    Call step() on the result after every optimizer step. Each rank writes a trace of the CPU and the GPU. On
    CUDA it also writes the memory events since this call, at most the last 200,000, with their code lines.
    https://docs.pytorch.org/tutorials/recipes/recipes/profiler_recipe.html
    https://docs.pytorch.org/docs/stable/torch_cuda_memory.html
    """
    steps_left = max(1, steps - first)
    active = min(PROFILED, steps_left)
    skipped = min(3, steps_left - active)  # the first 3 allocate, compile and warm up
    name = f"rank{world.rank}_from_step_{first + skipped + 1:08d}"
    # The handler adds the time to the file name.
    write_trace = torch.profiler.tensorboard_trace_handler(folder, name, use_gzip=True)

    def write(profiler):
        write_trace(profiler)
        print0(f"profile   {folder}: open its traces at https://ui.perfetto.dev")
        if world.on_gpu:
            snapshot = folder / f"{name}.{time.time_ns()}.memory.pickle"
            memory._dump_snapshot(snapshot)
            memory._record_memory_history(enabled=None)
            print0(f"profile   {snapshot}: drop it on https://docs.pytorch.org/memory_viz")

    if world.on_gpu:
        memory._record_memory_history(max_entries=200_000)
    profiler = torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=skipped, active=active, repeat=1),
        on_trace_ready=write,
        record_shapes=True,
    )
    profiler.start()
    # Python would end in a segmentation fault if a run stops, or fails, while it records.
    atexit.register(profiler.stop)
    return profiler


class Tracker:
    """A service that receives the numbers of a run. If it fails, the run warns and goes on without it."""

    def __init__(self, name: str, start: Callable, folder: Path, done: int):
        self.name = name
        self.service = self.attempt(start, folder, done)  # (log, close), or None

    def attempt(self, call: Callable, *arguments: object) -> tuple | None:
        """call(*arguments), or a warning, after which the service is not called again."""
        try:
            return call(*arguments)
        except Exception as error:  # in a package, a disk or a network
            self.service = None
            print0(f"warning: the run goes on without {self.name}: {reason_of_others(error)}")

    def log(self, numbers: dict, step: int) -> None:
        if self.service:
            self.attempt(self.service[0], numbers, step)

    def close(self) -> None:
        if self.service:
            self.attempt(self.service[1])


def start_tensorboard(folder: Path, done: int) -> tuple:
    """(log, close) of folder/tensorboard. Steps after `done`, logged by an earlier start, are purged."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(folder / "tensorboard", purge_step=done + 1)

    def log(numbers, step):
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)

    return log, writer.close


def start_wandb(folder: Path, done: int) -> tuple:
    """(log, close) of a Weights & Biases run with the name of the folder. It ends with the process: without a
    network that may take hours, and the other ranks would not wait for rank 0 to save the result.
    """
    import wandb

    # reinit: ends that of an earlier call of main in this process
    run = wandb.init(dir=folder, name=folder.name, reinit=True)
    return run.log, lambda: atexit.register(run.finish)


def start_recording(out: Path, world: World, done: int, steps: int, options) -> tuple:
    """Start the profiler, or None, and the trackers on rank 0, as asked for. done: the step resumed from.
    options: the settings profile, tensorboard and wandb.
    """
    profiler = None
    asked = {}
    if options.profile:
        profiler = start_profiler(out / "profile", world, done, steps)
    if options.tensorboard:
        asked["TensorBoard"] = start_tensorboard
    if options.wandb:
        asked["Weights & Biases"] = start_wandb
    trackers = [Tracker(name, start, out, done) for name, start in asked.items() if world.rank == 0]
    return profiler, trackers


# Regular expression for the device name -> peak TFLOP/s of dense bf16 matrix products with fp32 accumulation;
# fp16 for V100, which has no bf16 units. From NVIDIA's data sheets and white papers, halved where
# those count sparsity. The first match counts. 0: not known.
PEAK_TFLOPS = {
    "MIG|Laptop|Ti|D": 0,  # a slice, or another chip of the same name
    "B200": 2250,
    "H[18]00 PCIe": 756,
    "H[12]00 NVL": 835,
    "H100|H200|GH200|H800": 989,
    "A100|A800": 312,
    "A10|V100": 125,
    "L40S": 362,
    "L4": 121,
    "RTX 5090": 209,
    "RTX 4090": 165,
    "A6000": 155,
    "RTX 3090": 71,
}


def mfu(flops: float, world: World) -> float:
    """Model FLOPs utilization. flops: FLOP/s of all ranks together. Returns their share of the peak of all
    GPUs; 0 if the peak is not known.
    """
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b({pattern})\b", world.gpu_name):
            return flops / (tflops * 1e12 * world.size) if tflops else 0.0
    return 0.0


def matmul_parameters(model: nn.Module) -> int:
    """The number of parameters in matrix products per token: matrices and the head, not the embedding table.

    Of a mixture of experts, stored as (experts, rows, columns), only the experts that one token visits count.
    """
    visits = getattr(model.config.get_text_config(), "num_experts_per_tok", None) or 1
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables -= {model.get_output_embeddings().weight}  # a tied embedding table is also the head
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p not in tables]
    return sum(p.numel() * visits // len(p) if p.ndim == 3 else p.numel() for p in matrices)


def flops_per_token(model: nn.Module, length: float, frozen=False) -> float:
    """Floating-point operations to train on one token, forward and backward, without recomputation. model:
    before its weights are quantized. length: mean tokens of a row. frozen: only adapters train, whose own
    operations are not counted.

    6 per matmul parameter, or 4 if frozen, plus 6 * layers * (heads * head size) * length for attention. That
    is half of PaLM's count (arXiv 2204.02311, appendix B), because attention is causal. Attention is left out
    if the config has no single size for all layers. Llama-3-8B at 4096: 48.25e9.
    """
    config = model.config.get_text_config()
    attention = 0
    with suppress(Exception):  # the config has no heads, or sizes differ by layer
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        attention = 6.0 * config.num_hidden_layers * heads * size * length
    return (4.0 if frozen else 6.0) * matmul_parameters(model) + attention
