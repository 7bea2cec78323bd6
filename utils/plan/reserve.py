"""What a GPU must hold beyond the bytes that are alive, and what a card gives.

Two figures, and three answers. *Must* is what a step needs to end. *Comfortable* is what the caching
allocator takes when nothing limits it: each CUDA stream has a pool of its own, whose freed blocks no other
stream uses, so the pools' peaks add up, though they do not come at the same time. Between the two a run fits
tightly: the allocator has to give cached blocks back in every step, and to wait for the device each time.
"""

import difflib

import torch

from ..run.distributed import World, gather
from ..run.errors import ConfigError, check
from ..run.memory import host_memory, memory_bytes
from ..run.units import GIB

FITS, TIGHT, TOO_LARGE = "fits", "fits tightly", "does not fit"
WHY_TIGHT = "the allocator must give blocks back in every step"

# Beyond what is alive: the CUDA context, cuBLAS, and with several GPUs NCCL. In 224 runs on A100 that others
# published (foundation-model-stack/fms-acceleration, benchmark results of its FSDP and Liger plugins)
# nvidia-smi less what torch had allocated was never below 0.92 GiB on one GPU, 3.5 GiB on two.
# A part of that is cache, which is given back.
MUST_BYTES_ALONE, MUST_BYTES_OF_SEVERAL = GIB, 3 * GIB
# Chosen on nine published runs of FSDP2: with it the pools cover what eight of them had reserved.
POOLS_SLACK, POOLS_BYTES = 1.08, 3 * GIB // 2

# What torch shows as a card's memory ("GPU 0 has a total capacity of ..."), in GiB, the least of several
# reports where they differ. It is less than the card's name says: part of it stays with the driver.
CARDS = {
    "a10g": 22.06,
    "l4": 22.03,  # in the out-of-memory lines of six repositories, 22.03 to 22.06
    "3090": 23.5,
    "4090": 23.5,  # 23.43 to 23.68
    "a100-40": 39.4,
    "l40s": 44.39,
    "a100-80": 79.15,
    "h100": 79.15,  # 79.14 to 79.33
    "h200": 139.72,  # 139.72 to 139.83
}


def must_and_comfortable(alive: int, pools: int, ranks: int) -> tuple[int, int]:
    """Bytes of a GPU for so many that are alive at a time, and for the sum of the pools' peaks."""
    must = alive + (MUST_BYTES_ALONE if ranks == 1 else MUST_BYTES_OF_SEVERAL)
    return must, max(must, int(pools * POOLS_SLACK) + POOLS_BYTES)


def answer_of(must: int, comfortable: int, device_bytes: float) -> str:
    """FITS, TIGHT or TOO_LARGE."""
    if must > device_bytes:
        return TOO_LARGE
    return TIGHT if comfortable > device_bytes else FITS


def check_card(name: str) -> None:
    """ConfigError with the names that are near, where no card of that name is known."""
    if name.lower() in CARDS:
        return
    check(not name.isdecimal(), f"--gpu {name} is no name of a card (did you mean --gpus {name}?)")
    near = [card for card in CARDS if card.startswith(name.lower())]
    near = near or difflib.get_close_matches(name.lower(), CARDS, 1)
    meant = f" (did you mean {' or '.join(near)}?)" if near else ""
    fix = f"one of {', '.join(CARDS)}, or --gpu_memory, the GiB that torch shows"
    raise ConfigError(f"--gpu {name} is not known{meant} (fix: {fix})")


def room(world: World) -> tuple[float, float, str]:
    """(bytes for each rank's device, bytes of the host for this machine's ranks, the sentence for both)."""
    used, limit = host_memory()
    # What the other ranks of this machine take is in use already; of a check, which is alone, it is to come.
    used += (world.local_ranks - world.local_size) * memory_bytes()
    # All ranks must come to one answer and one text: those of the rank that has least.
    host, limit, local_ranks = min(gather(world, (limit - used, limit, world.local_ranks)))
    if world.device.type != "cuda":
        share = host / local_ranks
        return share, host, f"{share / GIB:.2f} GiB a rank, of {limit / GIB:.1f} GiB of host memory"
    device = min(gather(world, free_bytes(world.device)))
    return (
        device,
        host,
        f"{device / GIB:.2f} GiB free on a GPU and {host / GIB:.1f} GiB of host memory",
    )


def free_bytes(device: torch.device) -> int:
    """What this process may still take of a GPU: what nobody has, and what its own cache holds.

    Asking begins this process' CUDA context, some hundred MiB, which are then taken; they are in the reserve
    too, so a little is counted twice.
    """
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
