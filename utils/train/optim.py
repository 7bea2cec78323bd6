"""Gradient clipping, what stops a step (numbers that are not finite, packages that are missing), and MFU."""

import math
import os
import re
from contextlib import suppress
from importlib.util import find_spec
from shutil import which

import torch
from torch import nn

from ..run.distributed import World, gather
from ..run.errors import ConfigError, check


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients so that their global L2 norm is at most max_norm (0: leave them); returns the norm
    before.

    Every rank must call it: the norm of sharded gradients is a collective. A norm that is not finite is
    returned with the gradients scaled by it, so do not step then.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def stop_if_not_finite(
    step: int,
    loss: float,
    grad_norm: float,
    skipped: int,
    losses: list[torch.Tensor],
    batches: list,
    world: World,
) -> None:
    """Raise ConfigError on all ranks, naming the rows whose loss is not finite; for a gradient that is not,
    in fp16 only after 20 in a row. skipped: steps in a row that fp16 has left out, this one included.
    losses: () of each micro-batch.
    """
    if math.isfinite(loss) and (math.isfinite(grad_norm) or 0 < skipped < 20):
        return
    rows = []
    for value, batch in zip(losses, batches, strict=True):
        if not value.isfinite():
            rows += batch.where
    found = []
    for rank, rows_of_rank in enumerate(gather(world, rows)):
        if rows_of_rank:
            found.append(f"rank {rank}: {', '.join(rows_of_rank[:5])}")
    where = "; ".join(found) or "every loss is finite, a gradient is not"
    numbers = f"loss {loss}, gradient norm {grad_norm}"
    text = f"step {step + 1}: {numbers} ({where}); no weight was changed"
    raise ConfigError(f"{text} (fix: these rows, a lower --lr, or --dtype fp32)", agreed=True)


def check_packages(
    attn: str, optimizer: str, tensorboard: bool, wandb: bool, dtype: str, gpu: str, compile: bool
) -> None:
    """Raise ConfigError when a package that was asked for is not installed, or cannot work in this dtype or
    without a GPU, whose name is `gpu`.
    """
    for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb)):
        spec = find_spec(name) if wanted else None
        # A folder named wandb, left by an earlier run, is found as well, but has no origin.
        check(
            not wanted or (spec and spec.origin),
            f"--{name} needs a package (fix: pip install {name})",
        )
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    fix = "(fix: apt install build-essential, or CC=COMPILER)"
    check(
        not compile or any(map(which, compilers)),
        f"--compile needs a C compiler, none is here {fix}",
    )
    if attn == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        where = f"--attn {attn} computes in 16 bit on GPUs, not in {dtype} on {gpu or 'the CPU'}"
        check(gpu and dtype != "fp32", f"{where} (fix: --attn sdpa)")
        fix = "(fix: pip install flash-attn)"
        check(is_flash_attn_2_available(), f"--attn {attn}: the package is missing {fix}")
    if optimizer != "adamw":
        from .optim_8bit import import_bitsandbytes

        import_bitsandbytes(optimizer)


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


def mfu(flops: float, world: World) -> float | None:
    """Model FLOPs utilization: the share of the peak of the world's GPUs in so many FLOPs a second, of all
    ranks together. None where a GPU's peak is not known.
    """
    peak = peak_flops(world.gpu_name)
    return flops / (peak * world.size) if peak else None


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
        if parameter.ndim == 3:
            experts = parameter.shape[0]
            total += parameter.numel() * visits // experts
        else:
            total += parameter.numel()
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
