"""Gradient clipping, and what stops a step: numbers that are not finite, packages that are missing."""

import math
from importlib.util import find_spec

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
    attn: str, optimizer: str, tensorboard: bool, wandb: bool, dtype: str, gpu: str
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
    if attn == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        where = f"--attn {attn} computes in 16 bit on GPUs, not in {dtype} on {gpu or 'the CPU'}"
        check(gpu and dtype != "fp32", f"{where} (fix: --attn sdpa)")
        fix = "(fix: pip install flash-attn)"
        check(is_flash_attn_2_available(), f"--attn {attn}: the package is missing {fix}")
    if optimizer != "adamw":
        from .optim_8bit import import_bitsandbytes

        import_bitsandbytes(optimizer)
