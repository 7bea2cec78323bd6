"""Estimate bytes by part: the states, what a rank holds for the whole run, exact from meta shapes."""

from dataclasses import dataclass, field

import torch
from torch import nn

from ..model.pieces import rows_of_full_shard
from ..run.units import GIB, MIB


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Setting:
    """What else decides about the memory of a rank."""

    shards: int  # ranks that a copy of the model is cut over
    dtype: torch.dtype  # to compute in
    micro_batches: int = 1
    reshard_after_forward: bool = True
    sync_each_microbatch: bool = False
    cpu_offload: bool = False  # states are on the host, and the device is another
    replicate: int = 1  # copies of the model, each cut over `shards` ranks (HSDP)
    gloo: bool = False  # its reduce-scatter works on a copy of its input


@dataclass(frozen=True)
class Peak:
    """The most that is alive at a time on the fullest rank: in which phase of a step, and bytes by part.

    pools: the most in each CUDA stream's pool, at whatever time; what a caching allocator reserves.
    """

    phase: str
    parts: dict[str, int]
    pools: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def sum_of(parts: dict[str, int]) -> str:
    """The parts that count, largest first, and their sum."""
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    told = [f"{part} {size / unit:.2f}" for part, size in ordered if size >= unit / 200]
    return f"{' + '.join(told)} = {total / unit:.2f} {name}"


def estimate_states(
    model: nn.Module, shards: int, rank: int = 0, optimizer: str = "adamw"
) -> States:
    """Bytes on rank `rank` when every parameter is cut along dim 0 over `shards` ranks, as FSDP2 cuts it.

    They follow from the parameters' shapes and dtypes, so the model may be on meta, sharded or not. Rows
    are dealt as torch.chunk does, ceil(rows / shards) each until there are none left: rank 0 is the fullest,
    and FSDP2 pads weights and gradients to its size on every rank. AdamW keeps two moments of each trainable
    row, in the parameter's dtype; the other optimizers keep what optim_8bit says. Frozen parameters have
    neither; a tied weight counts once.
    """
    if optimizer != "adamw":
        from ..train.optim_8bit import state_bytes
    weights = gradients = moments = 0
    for parameter in model.parameters():
        rows, row_bytes = parameter.shape[0], parameter[0].numel() * parameter.element_size()
        most = rows_of_full_shard(rows, shards)
        mine = min(most, max(0, rows - rank * most))
        weights += most * row_bytes
        if parameter.requires_grad:
            gradients += most * row_bytes
            adamw = 2 * mine * row_bytes + 4  # and the count of steps, one fp32 for each parameter
            elements = mine * parameter[0].numel()
            moments += adamw if optimizer == "adamw" else state_bytes(parameter, elements)
    return States(weights, gradients, moments)
