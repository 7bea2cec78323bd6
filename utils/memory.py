"""Estimate bytes by part: so far the states, what a rank holds for the whole run, exact from meta shapes."""

import math
from dataclasses import dataclass

from torch import nn

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer

    def sentence(self) -> str:
        """What the plan prints."""
        unit, name = (GIB, "GiB") if self.total >= GIB else (MIB, "MiB")
        parts = " + ".join(f"{part} {size / unit:.2f}" for part, size in vars(self).items())
        caveat = "states only, no activations, no gathered layers"
        return f"memory    {parts} = {self.total / unit:.2f} {name} on the fullest rank ({caveat})"


def estimate_states(model: nn.Module, shards: int, rank: int = 0, optimizer: str = "adamw") -> States:
    """Bytes on rank `rank` when every parameter is cut along dim 0 over `shards` ranks, as FSDP2 cuts it.

    They follow from the parameters' shapes and dtypes, so the model may be on meta, sharded or not. Rows
    are dealt as torch.chunk does, ceil(rows / shards) each until there are none left: rank 0 is the fullest,
    and FSDP2 pads weights and gradients to its size on every rank. AdamW keeps two moments of each trainable
    row, in the parameter's dtype; the other optimizers keep what optim_8bit says. Frozen parameters have
    neither; a tied weight counts once.
    """
    if optimizer != "adamw":
        from .optim_8bit import state_bytes
    weights = gradients = moments = 0
    for parameter in model.parameters():
        rows, row_bytes = parameter.shape[0], parameter[0].numel() * parameter.element_size()
        most = -(-rows // shards)
        mine = min(most, max(0, rows - rank * most))
        weights += most * row_bytes
        if parameter.requires_grad:
            gradients += most * row_bytes
            adamw = 2 * mine * row_bytes + 4  # and the count of steps, one fp32 for each parameter
            moments += adamw if optimizer == "adamw" else state_bytes(parameter, optimizer, shards, rank)
    return States(weights, gradients, moments)


def estimate_disk(weights: dict, steps: int, save_every: int, keep: int, optimizer: str = "adamw") -> int:
    """Bytes of the final model and of as many checkpoints as there are at a time.

    weights: of the folder that is trained, as open_weights gives them. A checkpoint has fp32 weights and two
    moments of each, in fp32 or 8 bit.
    """
    saves = math.ceil(steps / save_every) if save_every else 0
    saves = min(saves, keep + 1) if keep else saves
    kept = saves * (6 if "8bit" in optimizer else 12)
    return sum(math.prod(info.shape) * (info.dtype.itemsize + kept) for info in weights.values())
