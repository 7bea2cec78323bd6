"""Which rank is gone without a word, and why most likely: what the others say when one is killed.

Each rank knows the processes of the others on its machine. One that ends by itself, however it does, leaves a
word in the store before; so who is gone and has left none was killed.
"""

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from .memory import memory
from .remedies import less_memory, settings
from .units import GIB

_me, _peers, _store, _kills = 0, [], None, None
_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def who_am_i() -> tuple[str, int]:
    """(machine, process); the machine is "" where there is no /proc to look at processes."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}", os.getpid()
    return "", os.getpid()


def remember_ranks(rank: int, peers: list[tuple[str, int]]) -> None:
    """peers: `who_am_i()` of every rank. What is counted as killed is counted from here on."""
    global _me, _peers, _store, _kills
    _me, _peers, _store = rank, peers, None
    # a connection of our own: one at a time asks, and may wait for others
    with suppress(Exception):
        _store = dist.distributed_c10d._get_default_store().clone()
    _kills = memory().get("oom_kills")


def leave_word() -> None:
    """This rank ends by itself."""
    with suppress(Exception):  # the store is gone with its process, or there was none
        if len(_peers) > 1:
            _store.set(f"ended/{_life}/{_me}", "1")


def left_word(rank: int) -> bool:
    with suppress(Exception):
        return _store.check([f"ended/{_life}/{rank}"])
    return False


def speaks_for_all() -> bool:
    """True for the first rank that asks: what all of them see is said once."""
    with suppress(Exception):
        return _store.add(f"said/{_life}", 1) == 1
    return True


def lost_ranks() -> list[int]:
    """The ranks of this machine whose process is gone, and that have left no word."""
    machine, me = who_am_i()
    here = [(rank, pid) for rank, (where, pid) in enumerate(_peers) if machine and where == machine]
    if me not in [pid for _, pid in here]:
        return []  # a process that some rank has started
    return [rank for rank, pid in here if _is_gone(pid) and not left_word(rank)]


def likely_cause(act: str) -> str:
    """Why a rank is gone, and what helps."""
    found = memory()
    used, limit = (found.get(name, 0) / GIB for name in ("host_bytes", "host_limit"))
    killed = found.get("oom_kills", 0) - (_kills or 0) if _kills is not None else 0
    if killed > 0:
        words = f"the kernel has killed {killed} process{'es' * (killed > 1)} for memory (oom_kill)"
    else:
        words = "killed, most likely for lack of memory"
        if _kills is not None:
            words += ", though the kernel has counted no such kill here"
    if limit:
        words += f"; host memory is {used:.1f} of {limit:.1f} GiB without it"
    fix = f"{less_memory(act, settings())}; torchrun --max-restarts 3 goes on by itself"
    if killed <= 0:
        fix = f"dmesg and the scheduler's log tell who did it; {fix}"
    return f"{words} (fix: {fix})"


def _is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except (OSError, IndexError):
        return True
