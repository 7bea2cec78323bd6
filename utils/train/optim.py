"""Parameter groups, AdamW, gradient clipping, schedules as step -> learning rate."""

import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

from ..run.distributed import World, gather
from ..run.errors import ConfigError, check

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit"]
BETAS = (0.9, 0.95)


def build_optimizer(
    model: nn.Module, lr: float, weight_decay: float, name="adamw"
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over what trains, fused; norms and biases, the 1-D
    parameters, do not decay. Or its 8-bit kind.

    Works on plain and on sharded (DTensor) parameters; AdamW's state has the parameters' dtype and sharding.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    decayed = {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay}
    others = {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0}
    groups = [group for group in (decayed, others) if group["params"]]
    if name != "adamw":
        from .optim_8bit import ShardedAdamW8bit

        return ShardedAdamW8bit(groups, lr, BETAS, paged=name.startswith("paged"))
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, fused=True)


def learning_rate(step: int, steps: int, lr: float, warmup: int, schedule: str) -> float:
    """The learning rate of optimizer step `step` (from 0) of `steps`: linear warm-up, then cosine or linear
    to 0, or constant.
    """
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)  # 0 ... just below 1
    if schedule == "cosine":
        return lr * 0.5 * (1 + math.cos(math.pi * done))
    if schedule == "linear":
        return lr * (1 - done)
    assert schedule == "constant", schedule
    return lr


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


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    lr: float,
    clip_norm: float,
    skipped: int,
    check_finite: Callable[[float, int], None],
) -> tuple[float, int]:
    """Clip the gradients, and let the optimizer step with this learning rate; they are then gone.

    Returns the gradient norm, and how many steps in a row fp16 has left out, this one included; `skipped` is
    the count before. check_finite(norm, skipped) may raise before a weight is changed.
    """
    scaler.unscale_(optimizer)
    grad_norm = clip_gradients(model, clip_norm)
    skips = scaler.is_enabled() and not math.isfinite(grad_norm)
    skipped = skipped + 1 if skips else 0
    check_finite(grad_norm, skipped)
    for group in optimizer.param_groups:
        group["lr"] = lr
    # In fp16 all ranks leave the step out together where a gradient is not finite, and halve the scale.
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return grad_norm, skipped


def stop_if_not_finite(
    step: int,
    loss: float,
    losses: list[torch.Tensor],
    batches: list,
    world: World,
    grad_norm: float,
    skipped: int,
) -> None:
    """Raise ConfigError on all ranks, naming the rows whose loss is not finite; for a gradient that is not,
    in fp16 only after 20 in a row. losses: () of each micro-batch.
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


def state_kind(optimizer: str) -> str:
    """What an optimizer's state is, by its name: paging only changes where 8-bit state lies."""
    return optimizer.removeprefix("paged_") if "8bit" in optimizer else optimizer


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
