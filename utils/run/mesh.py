"""(replicate, shard) sizes -> a DeviceMesh, and the sentence that says so."""

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .distributed import World
from .errors import check

_built: dict[tuple, DeviceMesh] = {}


def mesh_axes(ranks: int, replicate: int = 0, shard: int = 0) -> dict[str, int]:
    """Sizes by axis: `shard` (FSDP), or `replicate` and `shard` (HSDP): shards within a group, copies across.

    0 means: derived from the other. Raises ConfigError where their product is not the number of ranks.
    """
    flags = []
    if replicate:
        flags.append(f"--replicate {replicate}")
    if shard:
        flags.append(f"--shard {shard}")
    given_ranks = (replicate or 1) * (shard or 1)
    fits = ranks % given_ranks == 0
    if replicate and shard:
        fits = ranks == given_ranks
    fix = f"numbers whose product is {ranks}"
    check(fits, f"{' x '.join(flags)} does not divide {ranks} ranks (fix: {fix})")
    if not replicate:
        replicate = ranks // shard if shard else 1
    if replicate == 1:
        return {"shard": ranks}
    return {"replicate": replicate, "shard": ranks // replicate}


def build_mesh(world: World, axes: dict[str, int] | None = None) -> DeviceMesh:
    """The mesh of mesh_axes; by default one axis, `shard`. On GPUs NCCL begins here.

    It is built once for the same axes: each group has threads that wake 100 times a second.
    """
    axes = axes or mesh_axes(world.size)
    backend = "gloo"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "cpu:gloo,cuda:nccl"  # gloo for what --cpu_offload keeps on the host
    key = (dist.group.WORLD, world.device.type, *axes.items())
    if key not in _built:
        _built[key] = init_device_mesh(
            world.device.type,
            tuple(axes.values()),
            mesh_dim_names=tuple(axes),
            backend_override=dict.fromkeys(axes, backend),
        )
    return _built[key]


def mesh_sentence(world: World, axes: dict[str, int]) -> str:
    """What the mesh does, for the plan."""
    ranks = "1 rank" if world.ranks == 1 else f"{world.ranks} ranks"
    cores = os.cpu_count()
    if world.device.type == "cpu" and world.local_ranks > (cores or 1):
        ranks += f" that share {cores} cores"
    copies = f"{axes['replicate']} copies of " if "replicate" in axes else ""
    weights = f"{copies}every weight cut into {axes['shard']}"
    return f"{ranks} on {world.device.type}; {weights}, the data too"


def data_place(world: World, axes: dict[str, int]) -> tuple[int, int]:
    """(data rank of this rank, number of data ranks). Ranks that share rows are one data rank.

    Copies and shards both read rows of their own.
    """
    data_axes = [axis for axis in ("replicate", "shard") if axis in axes]
    data_ranks = math.prod(axes[axis] for axis in data_axes)
    ranks_per_data_rank = world.ranks // data_ranks
    return world.rank // ranks_per_data_rank, data_ranks
