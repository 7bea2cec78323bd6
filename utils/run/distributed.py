"""Start and stop torch.distributed; World; the few collectives; the DeviceMesh.

A run takes its rank and world size from here; only the error messages read RANK by themselves. The default
group is gloo, on the CPU: it exists before any CUDA context, carries small objects (counts, error texts), and
is enough for a whole run on a machine without a GPU.
"""

import os
import re
import signal
import time
import zlib
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path
from socket import gethostname as host_name
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .errors import ConfigError, check, differences, print0
from .memory import cores
from .signals import die_with_parent

FIX = "(fix: start with torchrun, or unset it)"
START_SECONDS = 600  # how long ranks wait for each other
# The same while another rank may work for hours, such as on data that this one has in its cache.
PATIENT_SECONDS = 7 * 24 * 3600
# The variables that torch reads at its first allocation on a GPU; the first one that is set counts
# (c10/cuda/CUDAAllocatorConfig.h of torch 2.13; before 2.9 only the second).
CUDA_SETTINGS = "PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF".split()
EXPANDABLE = "expandable_segments:True"
# Backends of groups that move tensors, by device. GPUs have gloo too, for objects and for what --cpu_offload
# keeps on the host.
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
NVIDIA = Path("/dev/nvidia0")  # the first GPU, if its driver is loaded


class World(NamedTuple):
    """This process's rank among `size` ranks, and the device on which it computes. local_rank and local_size
    count all processes of this machine, also if `group` has fewer.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # of the `size` ranks; None: the group of all ranks

    @property
    def on_gpu(self) -> bool:
        """Whether this rank computes on a GPU."""
        return self.device.type == "cuda"

    @property
    def gpu_name(self) -> str:
        """CUDA's name of the GPU; "" on a CPU."""
        return torch.cuda.get_device_name(self.device) if self.on_gpu else ""


ALONE = World(0, 1, 0, 1, torch.device("cpu"))  # a single process without a group


def init_distributed(use_gpu=True) -> World:
    """Join the gloo group that torchrun's variables describe; without them, make a world of one rank. The
    group of a program that has one already is used; it must move tensors on CPUs too.

    Raises ConfigError for variables that do not fit together, a port in use, more ranks on this machine than
    GPUs, a GPU that this torch cannot use, or ranks with different code.
    """
    rank = env_int("RANK")
    size = env_int("WORLD_SIZE")
    store = None
    if dist.is_initialized():  # main() called from a program that has its own group
        rank = dist.get_rank()
        size = dist.get_world_size()
    elif rank is None and size is None:
        rank = 0
        size = 1
        store = dist.HashStore()  # a world of one needs no port
        if max(env_int("SLURM_STEP_NUM_TASKS", 1), env_int("OMPI_COMM_WORLD_SIZE", 1)) > 1:
            print0(
                "warning: each task of srun or mpirun is a run of its own"
                " (fix: one task for each machine, which starts torchrun)"
            )
    else:
        names = "RANK WORLD_SIZE MASTER_ADDR MASTER_PORT".split()
        lacks = [name for name in names if not os.environ.get(name)]
        check(not lacks, f"some of {', '.join(names)} are set, but not {', '.join(lacks)} {FIX}")
        check(rank < size, f"RANK={rank} is not below WORLD_SIZE={size} {FIX}")
    local_rank = env_int("LOCAL_RANK", rank)
    local_size = env_int("LOCAL_WORLD_SIZE", size)
    device = device_of(local_rank, local_size) if use_gpu else torch.device("cpu")
    if device.type == "cuda":
        use_expandable_segments()
        check_architecture(torch.cuda.get_device_capability(device), torch.cuda.get_arch_list())
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()  # a killed torchrun would leave its ranks running
    world = World(rank, size, local_rank, local_size, device)
    if dist.is_initialized():
        return world
    wait = timedelta(seconds=START_SECONDS)
    try:
        if not store:
            store, *_ = next(dist.rendezvous("env://", timeout=wait))
        # torchrun's own store outlives restarts: hide the keys of ranks from before the restart
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    except dist.DistNetworkError as error:
        raise ConfigError(
            f"the ranks cannot meet at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}:"
            f" {str(error).splitlines()[0][:200]}"
            " (fix: another --master_port, or torchrun --standalone)"
        ) from None
    code = {"packages": f"torch {torch.__version__}, transformers {version('transformers')}"}
    # [!.]: an editor's lock of an open file is a hidden link that leads nowhere
    for file in Path(__file__).parents[1].rglob("[!.]*.py"):
        code[f"{file.parent.name}/{file.name}"] = zlib.crc32(file.read_bytes())
    agree(world, code, "code")
    if device.type == "cuda":
        shares = torch.cuda.device_count() < local_size
        check_own_gpus(world, str(torch.cuda.get_device_properties(device).uuid) if shares else "")
    return world


def check_architecture(capability: tuple, built_for: list[str]) -> None:
    """Raise ConfigError if this torch has no kernels for a GPU of NVIDIA. built_for: "sm_80" and others.

    sm_XY runs on GPUs with major version X and minor version Y or higher; compute_XY also on later majors.
    https://docs.nvidia.com/cuda/cuda-c-programming-guide/#application-compatibility
    """
    for architecture in built_for:
        # AMD's, such as gfx942, have no digits here, and pass: torch itself says what it lacks
        kind, digits = re.match(r"(sm_|compute_|gfx\d+)(\d*)", architecture).groups()
        built = divmod(int(digits or 0), 10)  # (major, minor)
        if built <= capability and (built[0] == capability[0] or kind != "sm_"):
            return
    raise ConfigError(
        f"this GPU has compute capability {'.'.join(map(str, capability))}, and torch {torch.__version__} has"
        " no kernels for it (fix: a torch for it, pip install torch --index-url"
        " https://download.pytorch.org/whl/cu126)"
    )


def check_own_gpus(world: World, gpu: str) -> None:
    """Raise ConfigError if two ranks use the same GPU. gpu: its UUID, if the launcher does not show all GPUs
    to each rank; "" if it does, because then each rank takes its own by number.
    """
    sharing = all_gather(gpu, world).count(gpu)
    with together(world):
        check(
            not gpu or sharing == 1,
            f"{sharing} ranks have one GPU, {gpu} (fix: fewer --nproc_per_node)",
        )


def use_all_cores(world: World) -> None:
    """Divide the machine's cores among its ranks, for CPU work beside a GPU: torchrun sets 1 thread each."""
    if torch.get_num_threads() == 1:
        torch.set_num_threads(cores() // world.local_size or 1)


def stop_distributed() -> None:
    """Leave the group, if there is one. From now on a rank that has ended is not missed.

    gloo's threads may still release the last tensors, for which they need Python's GIL. Asking for it while
    Python ends aborts the process (https://github.com/pytorch/pytorch/issues/190489), so wait 0.1 s for them.
    """
    signal.set_wakeup_fd(-1)
    if dist.is_initialized():
        dist.destroy_process_group()
        time.sleep(0.1)


def set_timeout(seconds=START_SECONDS, group=None) -> None:
    """Set how long ranks wait for each other, in every group that exists now except the saver's.

    Every rank of the group calls it. As in torchtitan: distributed/utils.py, set_pg_timeouts.
    """
    dist.barrier(group)  # no rank is in an earlier collective
    _set_timeouts(seconds)


def _set_timeouts(seconds: float) -> None:
    c10d = dist.distributed_c10d
    set_one = getattr(dist, "set_timeout", c10d._set_pg_timeout)  # public from torch 2.14 on
    for group in c10d._world.pg_map:
        if group.group_desc != "saver":
            set_one(timedelta(seconds=seconds), group)


@contextmanager
def patience():
    """Within it this rank waits for the others for days, after it as long as before."""
    before = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout
    _set_timeouts(PATIENT_SECONDS)
    yield
    _set_timeouts(before.total_seconds())


def all_gather(value: object, world: World) -> list:
    """Every rank's `value`, in the order of ranks, on every rank."""
    values = [value] * world.size
    if world.size > 1:
        dist.all_gather_object(values, value, world.group)
    return values


def broadcast(value: object, world: World, source=0) -> object:
    """`value` of rank `source`, on every rank."""
    box = [value]
    if world.size > 1:
        dist.broadcast_object_list(box, group=world.group, group_src=source)
    return box[0]


def all_reduce_sum(value: torch.Tensor | float, world: World) -> float:
    """Sum of a scalar over all ranks, in double precision on the CPU (exact for counts below 2**53)."""
    total = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(total, group=world.group)
    return total.item()


def sum_on_device(value: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Sum of a () tensor over a mesh, in double precision, on its device: the host does not wait for it."""
    total = value.to(torch.float64, copy=True)
    for group in mesh.get_all_groups():
        dist.all_reduce(total, group=group)
    return total


@contextmanager
def together(world: World, patient=False):
    """Run a block in which any rank may raise ConfigError. If one does, all ranks raise a ConfigError that
    names the ranks concerned.

    So one rank may find a bad file without leaving the others in a collective. The block must not communicate
    after a point where a rank can fail. patient: the block may take hours on one machine.
    """
    errors = []  # of this rank
    try:
        yield
    except ConfigError as error:
        errors = error.lines
    ranks_of = {}  # line -> the ranks that have it
    with patience() if patient and world.size > 1 else nullcontext():
        of_ranks = all_gather(errors, world)
    for rank, lines in enumerate(of_ranks):
        for line in lines:
            ranks_of.setdefault(line, []).append(str(rank))
    if ranks_of:
        lines = [
            line if len(ranks) == world.size else f"rank {','.join(ranks)}: {line}"
            for line, ranks in ranks_of.items()
        ]
        raise ConfigError(lines, agreed=True)


def agree(world: World, values: dict, kind: str) -> None:
    """Raise ConfigError on all ranks unless every rank has the values of rank 0; name those that differ.
    kind: what they are, in one word, for the message.
    """
    with together(world):
        changed = differences(broadcast(values, world), values)
        check(
            not changed,
            f"other {kind} than on rank 0: {changed} (fix: the same {kind} on every machine)",
        )


def env_int(name: str, default: int | None = None) -> int | None:
    """An environment variable as a number; `default` if it is unset or empty. ConfigError for other text."""
    value = os.environ.get(name)
    if not value:
        return default
    check(value.isdecimal(), f"{name}={value} is not a number {FIX}")
    return int(value)


def use_expandable_segments() -> None:
    """Let torch's GPU allocator map pages as it needs them, in place of blocks of fixed size. Gaps between
    such blocks cost 10 to 25 % of the memory in published runs of FSDP2. What the user has set stays.
    """
    if os.environ.keys() & CUDA_SETTINGS:
        return
    # torch 2.11 warns about this name, but 2.9 ignores the new one (pytorch issue 183387)
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE
    print0(f"allocator PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}, since it was not set")


def device_of(local_rank: int, local_size: int) -> torch.device:
    """The GPU of a rank, or the CPU if the machine has none. Raises ConfigError for a GPU that this torch
    cannot use, and for more ranks than GPUs.
    """
    if not torch.cuda.is_available():
        check(
            os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not NVIDIA.exists(),
            f"torch {torch.__version__}, of CUDA {torch.version.cuda}, cannot use the GPU {NVIDIA}"
            " (fix: a driver and a torch that fit each other; CUDA_VISIBLE_DEVICES=-1 takes the CPU)",
        )
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 1:  # the launcher may show each rank one GPU: see check_own_gpus
        return torch.device("cuda", 0)
    check(
        local_size <= count,
        f"--nproc_per_node {local_size}: {host_name()} has {count} GPUs (fix: --nproc_per_node {count})",
    )
    return torch.device("cuda", local_rank)


def mesh_axes(ranks: int, replicate=0, shard=0) -> dict:
    """The axes of the mesh and their sizes: `shard` (FSDP), or `replicate` and `shard` (HSDP: weights are
    sharded within a group of ranks and replicated across groups).

    0: derived from the other number. Raises ConfigError if the product is not the number of ranks.
    """
    ranks_per_copy = shard or ranks // max(1, replicate) or 1
    copies = ranks // ranks_per_copy
    check(
        copies * ranks_per_copy == ranks and replicate in (0, copies),
        f"--replicate {replicate} x --shard {shard} does not make {ranks} ranks"
        f" (fix: numbers whose product is {ranks}, or 0)",
    )
    return {"shard": ranks} if copies == 1 else {"replicate": copies, "shard": ranks_per_copy}


def build_mesh(world: World, axes=None) -> DeviceMesh:
    """The device mesh with these axes, see mesh_axes; default: one axis, `shard`. On GPUs this starts NCCL.

    A world with a group of its own can have only one axis.
    """
    axes = axes or mesh_axes(world.size)
    if world.on_gpu:
        torch.cuda.set_device(world.device)
    if world.group:
        return DeviceMesh.from_group(world.group, world.device.type, mesh_dim_names=tuple(axes))
    return _mesh_of(dist.group.WORLD, world.device.type, tuple(axes), tuple(axes.values()))


@cache  # each new group adds threads that wake 100 times a second
def _mesh_of(_, device_type, names, sizes):
    backend = dict.fromkeys(names, BACKENDS[device_type])
    mesh = init_device_mesh(device_type, sizes, mesh_dim_names=names, backend_override=backend)
    _set_timeouts(START_SECONDS)  # torch gives new groups 30 minutes
    return mesh


def mesh_sentence(world: World, axes: dict) -> str:
    """The mesh in words, for the plan."""
    copies = f"{axes['replicate']} copies of " if "replicate" in axes else ""
    return f"{world.size} on {world.device.type}; {copies}every weight cut into {axes['shard']}, the data too"
