"""(replicate, shard) sizes -> a DeviceMesh, and the sentence that says so."""

import os

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .distributed import World
from .errors import check


def mesh_axes(ranks: int, replicate: int = 1) -> dict[str, int]:
    """Sizes by axis: `shard` (FSDP), or `replicate` and `shard` (HSDP): shards within a group, copies across.

    Raises ConfigError where `replicate` does not divide the ranks.
    """
    fits = 0 < replicate <= ranks and ranks % replicate == 0
    check(fits, f"--replicate {replicate} does not divide {ranks} ranks (fix: a number that does)")
    return ({"replicate": replicate} if replicate > 1 else {}) | {"shard": ranks // replicate}


def build_mesh(world: World, replicate: int = 1) -> DeviceMesh:
    """The mesh of mesh_axes. On GPUs this is where NCCL and the CUDA context begin."""
    axes, backend = mesh_axes(world.size, replicate), "gloo"
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
        backend = "cpu:gloo,cuda:nccl"  # gloo for what --cpu_offload keeps on the host
    options = {"mesh_dim_names": tuple(axes), "backend_override": dict.fromkeys(axes, backend)}
    return init_device_mesh(world.device.type, tuple(axes.values()), **options)


def mesh_sentence(world: World, replicate: int = 1) -> str:
    """What the mesh does, for the plan."""
    shard = mesh_axes(world.size, replicate)["shard"]
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    if world.device.type == "cpu" and world.local_size > (os.cpu_count() or 1):
        ranks += f" that share {os.cpu_count()} cores"
    copies = "" if replicate == 1 else f"{replicate} copies of "
    return f"{ranks} on {world.device.type}; {copies}every weight cut into {shard}, the data too"
