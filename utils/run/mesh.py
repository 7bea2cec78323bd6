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

    0: what the other leaves. Raises ConfigError where their product is not the number of ranks.
    """
    flags = []
    if replicate:
        flags.append(f"--replicate {replicate}")
    if shard:
        flags.append(f"--shard {shard}")
    product = (replicate or 1) * (shard or 1)
    fits = product == ranks if replicate and shard else ranks % product == 0
    fix = f"numbers whose product is {ranks}"
    check(fits, f"{' x '.join(flags)} does not divide {ranks} ranks (fix: {fix})")
    if not replicate:
        replicate = ranks // shard if shard else 1
    if replicate == 1:
        return {"shard": ranks}
    return {"replicate": replicate, "shard": ranks // replicate}


def build_mesh(world: World, axes: dict[str, int] | None = None) -> DeviceMesh:
    """The mesh of mesh_axes; by default one axis, `shard`. On GPUs NCCL begins here.

    Another of the same axes is the first one: threads of every group look around 100 times a second.
    """
    axes, backend = axes or mesh_axes(world.size), "gloo"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "cpu:gloo,cuda:nccl"  # gloo for what --cpu_offload keeps on the host
    key = (dist.group.WORLD, world.device.type, *axes.items())
    if key not in _built:
        options = {"mesh_dim_names": tuple(axes), "backend_override": dict.fromkeys(axes, backend)}
        _built[key] = init_device_mesh(world.device.type, tuple(axes.values()), **options)
    return _built[key]


def mesh_sentence(world: World, axes: dict[str, int]) -> str:
    """What the mesh does, for the plan."""
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    if world.device.type == "cpu" and world.local_size > (os.cpu_count() or 1):
        ranks += f" that share {os.cpu_count()} cores"
    copies = f"{axes['replicate']} copies of " if "replicate" in axes else ""
    return f"{ranks} on {world.device.type}; {copies}every weight cut into {axes['shard']}, the data too"


def data_place(world: World, axes: dict[str, int]) -> tuple[int, int]:
    """(this rank among those that read different rows, how many these are). Ranks that share a row are one.

    Copies and shards both read rows of their own. For ALONE it is the first of the run's ranks.
    """
    data_ranks = math.prod(axes[axis] for axis in ("replicate", "shard") if axis in axes)
    sharing = world.ranks // data_ranks
    return world.rank // sharing, data_ranks
