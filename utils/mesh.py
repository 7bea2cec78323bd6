"""(replicate, shard) sizes -> a DeviceMesh, and the sentence that says so."""

import os

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .distributed import World
from .errors import check


def build_mesh(world: World, replicate: int = 1) -> DeviceMesh:
    """A mesh with the axis `shard` (FSDP), or `replicate` and `shard` for HSDP: shards within a group of
    ranks, copies across groups.

    On GPUs this is where NCCL and the CUDA context begin. Raises ConfigError where `replicate` does not fit.
    """
    fits = 0 < replicate <= world.size and world.size % replicate == 0
    check(fits, f"--replicate {replicate} does not divide {world.size} ranks (fix: a number that does)")
    axes = {"replicate": replicate} if replicate > 1 else {}
    axes["shard"] = world.size // replicate
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    backend = "nccl" if world.device.type == "cuda" else "gloo"
    names, sizes = tuple(axes), tuple(axes.values())
    backends = dict.fromkeys(names, backend)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=names, backend_override=backends)


def mesh_sentence(world: World, replicate: int = 1) -> str:
    """What the mesh does, for the plan."""
    shard = world.size // replicate
    ranks = "1 rank" if world.size == 1 else f"{world.size} ranks"
    if world.device.type == "cpu" and world.local_size > (os.cpu_count() or 1):
        ranks += f" that share {os.cpu_count()} cores"
    copies = "" if replicate == 1 else f"{replicate} copies of "
    return f"{ranks} on {world.device.type}; {copies}every weight cut into {shard}, the data too"
