"""Parameter groups, AdamW, gradient clipping, schedules as step -> learning rate."""

import math

import torch
from torch import nn

SCHEDULES = ("cosine", "linear", "constant")


def build_optimizer(model: nn.Module, lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) over what trains, fused; norms and biases, the 1-D
    parameters, do not decay.

    Works on plain and on sharded (DTensor) parameters; its state has the parameters' dtype and sharding.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=(0.9, 0.95), fused=True)


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
