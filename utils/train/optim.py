"""Gradient clipping, the log of steps, and checks: numbers that are not finite, packages that are missing."""

import math
import os
import time
from importlib.util import find_spec
from shutil import which

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..run.distributed import World, together
from ..run.errors import ConfigError, check, first_five
from ..run.folder import RunLog
from ..run.memory import peak_memory_bytes
from ..run.units import GIB


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale the gradients so that their global L2 norm is at most max_norm (0: do not scale). Returns the
    norm before scaling, (), on the device of the gradients.

    Every rank must call it, because the norm of sharded gradients is a collective. If the norm is not finite,
    the gradients have been scaled by it: do not step then.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    # foreach: a few kernel launches instead of one per DTensor
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm, foreach=True)
    return norm


class UnreadSteps:
    """Steps whose loss and gradient norm are still on the device. Reading them waits for the device. So they
    are read together, for all steps since the last console line.
    """

    def __init__(self, log: RunLog, world: World, fp16: bool):
        self.log, self.world, self.fp16 = log, world, fp16
        self.skipped = 0  # steps skipped in a row, because fp16 gradients overflowed
        self.steps: list[tuple] = []

    def add(self, loss, grad_norm, losses, batches, means, **numbers) -> None:
        """Add one step. loss, grad_norm: tensors (), of all ranks. losses: () of each micro-batch of this
        rank. means: further values () by name, still on the device. numbers: values that the host knows
        already; None: not known.
        """
        on_device = torch.stack([v.to(loss) for v in (loss, grad_norm, *means.values())])
        numbers["peak_memory_gib"] = peak_memory_bytes() / GIB
        self.steps.append((on_device, losses, [batch.where for batch in batches], means, numbers))

    def read(self, started: float, token_mfu: float) -> float:
        """Log the steps; returns the mean seconds per step. started: time.monotonic() at the start of the
        first. token_mfu: see profiling.mfu; 0: not known.

        All ranks call it. Raises ConfigError on all ranks if a loss or a gradient norm is not finite, naming
        the rows whose loss is not. In fp16, gradient norms raise only if 20 in a row are not finite.
        """
        values = torch.stack([on_device for on_device, *_ in self.steps]).tolist()
        seconds = (time.monotonic() - started) / len(self.steps)
        for (loss, grad_norm, *others), step in zip(values, self.steps, strict=True):
            _, losses, rows, names, numbers = step
            overflows = self.fp16 and not math.isfinite(grad_norm)
            self.skipped = self.skipped + 1 if overflows else 0
            goes_on = math.isfinite(grad_norm) or 0 < self.skipped < 20
            if not (math.isfinite(loss) and goes_on):
                found = f"step {numbers['step']}: loss {loss}, gradient norm {grad_norm}"
                fix = "nothing of it is saved (fix: other rows, a lower --lr, or --dtype fp32)"
                bad = [row for value, row in zip(losses, rows, strict=True) if not value.isfinite()]
                with together(self.world):
                    check(not bad, f"{found} in {first_five(sum(bad, []))}; {fix}")
                raise ConfigError(f"{found}, though every loss is finite; {fix}", agreed=True)
            per_second = numbers["tokens"] / seconds
            self.log.step(
                **numbers,
                **dict(zip(names, others, strict=True)),
                loss=loss,
                grad_norm=grad_norm,
                skipped=int(self.skipped > 0),
                seconds=seconds,
                tokens_per_second=per_second,
                mfu=token_mfu * per_second or None,
            )
        self.steps.clear()
        return seconds


def check_packages(cfg: object, gpu: str) -> None:
    """Raise ConfigError if a package that the settings need is not installed, or does not support their dtype
    or device. gpu: the name of the GPU; "" without one.
    """
    for name, wanted in (("tensorboard", cfg.tensorboard), ("wandb", cfg.wandb)):
        if wanted:
            spec = find_spec(name)
            # A folder named wandb, left by an earlier run, is found too, but has no origin.
            check(spec and spec.origin, f"--{name} needs a package (fix: pip install {name})")
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    fix = "(fix: apt install build-essential, or CC=COMPILER)"
    check(
        not cfg.compile or any(map(which, compilers)),
        f"--compile needs a C compiler, none is here {fix}",
    )
    if cfg.attn == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        where = f"--attn {cfg.attn} computes in 16 bit on GPUs, not in {cfg.dtype} on {gpu or 'the CPU'}"
        check(gpu and cfg.dtype != "fp32", f"{where} (fix: --attn sdpa)")
        fix = "(fix: pip install flash-attn)"
        check(is_flash_attn_2_available(), f"--attn {cfg.attn}: the package is missing {fix}")
