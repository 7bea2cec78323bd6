"""Which rank is gone without a word, and the likely cause: what the other ranks say when one is killed.

Each rank knows the processes of the others on its machine. A rank that ends by itself, in whatever way, first
leaves a word in the store; so a rank that is gone and has left none was killed.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from .memory import memory
from .remedies import less_memory, settings
from .units import GIB

_rank = 0
_processes: list[tuple[str, int]] = []  # (machine, process) of every rank
_store = None
_kills: int | None = None  # processes that the kernel had killed for memory when the run began
_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def who_am_i() -> tuple[str, int]:
    """(machine, process); the machine is "" where there is no /proc to look at processes."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    return "", os.getpid()


def remember_ranks(rank: int, peers: list[tuple[str, int]]) -> None:
    """peers: `who_am_i()` of every rank. Kills are counted from here on."""
    global _rank, _processes, _store, _kills
    _rank = rank
    _processes = peers
    _store = None
    # A connection of our own: on a shared one a request waits for those before it.
    with suppress(Exception):
        _store = dist.distributed_c10d._get_default_store().clone()
    _kills = memory().get("oom_kills")


def leave_word() -> None:
    """Say that this rank ends by itself."""
    with suppress(Exception):  # the store is gone with its process, or there was none
        if len(_processes) > 1:
            _store.set(f"ended/{_life}/{_rank}", "1")


def left_word(rank: int) -> bool:
    with suppress(Exception):
        return _store.check([f"ended/{_life}/{rank}"])
    return False


def speaks_for_all() -> bool:
    """True for the first rank that asks: what all ranks see is printed once."""
    with suppress(Exception):
        return _store.add(f"said/{_life}", 1) == 1
    return True


def lost_ranks() -> list[int]:
    """The ranks of this machine whose process is gone, and that have left no word."""
    machine, own_pid = who_am_i()
    if not machine:
        return []
    pids = {}
    for rank, (rank_machine, pid) in enumerate(_processes):
        if rank_machine == machine:
            pids[rank] = pid
    if own_pid not in pids.values():
        return []  # this is a process that some rank has started
    return [rank for rank, pid in pids.items() if _is_gone(pid) and not left_word(rank)]


def likely_cause(act: str) -> str:
    """Why a rank is gone, and what helps."""
    found = memory()
    used_gib = found.get("host_bytes", 0) / GIB
    limit_gib = found.get("host_limit", 0) / GIB
    killed = 0
    if _kills is not None:
        killed = found.get("oom_kills", 0) - _kills
    if killed > 0:
        processes = "process" if killed == 1 else "processes"
        words = f"the kernel has killed {killed} {processes} for memory (oom_kill)"
    else:
        words = "killed, most likely for lack of memory"
        if _kills is not None:
            words += ", though the kernel has counted no such kill here"
    if limit_gib:
        words += f"; host memory is {used_gib:.1f} of {limit_gib:.1f} GiB without it"
    fix = f"{less_memory(act, settings())}; torchrun --max-restarts 3 goes on by itself"
    if killed <= 0:
        fix = f"dmesg and the scheduler's log tell who did it; {fix}"
    return f"{words} (fix: {fix})"


def _is_gone(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        state, *_ = stat.rpartition(")")[2].split()  # the name before it may hold anything
        return state in "ZX"
    except (OSError, ValueError):
        return True
