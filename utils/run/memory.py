"""How much memory is in use, of this process and of this machine or its cgroup."""

import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_most_seen = 0

V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control", "total_")
V2 = ("memory.current", "memory.max", "memory.events", "")


def memory(device: torch.device | None = None) -> dict:
    """This machine's part of a line: host, and those numbers that are known."""
    found = {"host": os.uname().nodename}
    with suppress(OSError, LookupError, ValueError):
        found["host_bytes"], found["host_limit"], found["oom_kills"] = host_memory()
    if device and device.type == "cuda" and torch.cuda.is_initialized():
        found["device_bytes"] = torch.cuda.max_memory_allocated(device)
        found["device_limit"] = torch.cuda.get_device_properties(device).total_memory
    return {name: value for name, value in found.items() if value is not None}


def host_memory(root: Path = Path("/")) -> tuple[int, int, int | None]:
    """(bytes in use, bytes there are, processes that the kernel has killed for memory or None): of the
    nearest cgroup, v1 or v2, that leaves this process less than the machine has, else of the machine.

    Cached files are not in use: the kernel drops them before it kills. root: where proc and sys are. Raises
    OSError where there is no proc, as on macOS.
    """
    total, free = (
        numbers(root / "proc/meminfo")[f"Mem{part}:"] * 1024 for part in ("Total", "Available")
    )
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        v1, inside = "memory" in kinds.split(","), Path(path[1:])
        used, limit, events, prefix = V1 if v1 else V2
        mount = root / "sys/fs/cgroup" / ("memory" if v1 else "")
        # a container sees the last alone
        for folder in (mount / part for part in (inside, *inside.parents)):
            with suppress(OSError, LookupError, ValueError):  # "max" is no number
                most = int((folder / limit).read_text())
                if most < total:
                    stat = numbers(folder / "memory.stat")
                    cached = stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"]
                    in_use = int((folder / used).read_text()) - cached
                    return in_use, most, numbers(folder / events).get("oom_kill")
    return total - free, total, numbers(root / "proc/vmstat").get("oom_kill")


def numbers(file: Path) -> dict[str, int]:
    """A file of lines like `MemTotal: 123 kB` or `oom_kill 1`."""
    return {words[0]: int(words[1]) for words in map(str.split, file.read_text().splitlines())}


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far, or since forget_peak: on CUDA what torch allocated, else what this
    process had for its own.

    On Linux that is RssAnon, the largest of all calls so far: VmHWM, the kernel's own peak, counts mapped
    files, so the whole checkpoint. See PeaksByAct. Elsewhere it is getrusage's peak, of the whole process.
    """
    global _most_seen
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
            1 if sys.platform == "darwin" else 1024
        )
    kib = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    _most_seen = max(_most_seen, int(kib[1]) * 1024)
    return _most_seen


def forget_peak(device: torch.device) -> None:
    """From now on peak_memory_bytes begins anew."""
    global _most_seen
    _most_seen = 0
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
