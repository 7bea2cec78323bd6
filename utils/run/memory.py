"""How much memory is in use, of this process and of this machine or its cgroup."""

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_most_seen = 0


@dataclass(frozen=True)
class CgroupFiles:
    """What a version of cgroups calls its files, and what the names in memory.stat begin with."""

    used: str
    limit: str
    events: str
    stat_prefix: str


V1 = CgroupFiles("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control", "total_")
V2 = CgroupFiles("memory.current", "memory.max", "memory.events", "")


def memory(device: torch.device | None = None) -> dict:
    """host, and of host_bytes, host_limit, oom_kills, device_bytes and device_limit those that are known."""
    found = {"host": os.uname().nodename}
    with suppress(OSError, LookupError, ValueError):
        used_bytes, limit_bytes, oom_kills = host_memory()
        found["host_bytes"] = used_bytes
        found["host_limit"] = limit_bytes
        found["oom_kills"] = oom_kills
    if device and device.type == "cuda" and torch.cuda.is_initialized():
        found["device_bytes"] = torch.cuda.max_memory_allocated(device)
        found["device_limit"] = torch.cuda.get_device_properties(device).total_memory
    return {name: value for name, value in found.items() if value is not None}


def host_memory(root: Path = Path("/")) -> tuple[int, int, int | None]:
    """(bytes in use, bytes in all, processes that the kernel has killed for memory or None): of the nearest
    cgroup, v1 or v2, that leaves this process less than the machine has, else of the machine.

    Cached files are not in use: the kernel drops them before it kills. root: where proc and sys are. Raises
    OSError where there is no proc, as on macOS.
    """
    meminfo = numbers(root / "proc/meminfo")
    total_bytes = meminfo["MemTotal:"] * 1024
    free_bytes = meminfo["MemAvailable:"] * 1024
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        inside = Path(path[1:])
        files = V2
        mount = root / "sys/fs/cgroup"
        if "memory" in kinds.split(","):
            files = V1
            mount = mount / "memory"
        # A container sees the last of them only.
        for part in (inside, *inside.parents):
            with suppress(OSError, LookupError, ValueError):  # "max" is no number
                limit_bytes = int((mount / part / files.limit).read_text())
                if limit_bytes < total_bytes:
                    return _cgroup_memory(mount / part, files, limit_bytes)
    return total_bytes - free_bytes, total_bytes, numbers(root / "proc/vmstat").get("oom_kill")


def _cgroup_memory(
    folder: Path, files: CgroupFiles, limit_bytes: int
) -> tuple[int, int, int | None]:
    stat = numbers(folder / "memory.stat")
    cached_bytes = stat[f"{files.stat_prefix}inactive_file"]
    cached_bytes += stat[f"{files.stat_prefix}active_file"]
    used_bytes = int((folder / files.used).read_text()) - cached_bytes
    return used_bytes, limit_bytes, numbers(folder / files.events).get("oom_kill")


def numbers(file: Path) -> dict[str, int]:
    """The first number of each line, by name: lines are like `MemTotal: 123 kB` or `oom_kill 1`."""
    found = {}
    for line in file.read_text().splitlines():
        name, number, *_ = line.split()
        found[name] = int(number)
    return found


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far, or since forget_peak: on CUDA what torch allocated, else the private
    memory of this process.

    On Linux that is the largest anonymous memory of all calls so far: VmHWM, the kernel's own peak, counts
    mapped files, so the whole checkpoint. See PeaksByAct. Elsewhere it is getrusage's peak.
    """
    global _most_seen
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    statm = Path("/proc/self/statm")
    if not statm.exists():
        unit_bytes = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    _, resident, of_files, *_ = map(int, statm.read_text().split())  # in pages
    _most_seen = max(_most_seen, (resident - of_files) * PAGE_BYTES)
    return _most_seen


def forget_peak(device: torch.device) -> None:
    """Let peak_memory_bytes begin anew."""
    global _most_seen
    _most_seen = 0
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
