"""Memory in use: by this process in each act, and by this machine or its cgroup. The cores it may use."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

peaks = {}  # peak bytes in use, by act
reserved_peaks = {}  # on a GPU: peak bytes that torch's allocator had reserved

# By folder (cgroup v1 or v2): the file of the bytes in use, the file of the limit, the prefix of names in
# memory.stat.
CGROUPS = {
    "memory": ("memory.usage_in_bytes", "memory.limit_in_bytes", "total_"),
    "": ("memory.current", "memory.max", ""),
}


def note_peak(act: str) -> None:
    """Record the peak memory of the act that ends, and reset the counters."""
    peaks[act] = max(peak_memory_bytes(), peaks.get(act, 0))
    if cuda := _cuda():
        reserved_peaks[act] = max(cuda.max_memory_reserved(), reserved_peaks.get(act, 0))
        cuda.reset_peak_memory_stats()
        return
    with suppress(OSError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc returns freed memory to the system
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; see proc(5)


def peak_memory_bytes() -> int:
    """Peak bytes in use since the act began. On CUDA: what torch allocated. Otherwise: private memory of this
    process, that is the kernel's peak (VmHWM) less the files that are mapped now.
    """
    if cuda := _cuda():
        return cuda.max_memory_allocated()
    status = read_numbers(Path("/proc/self/status"))
    return 1024 * (status["VmHWM:"] - status["RssFile:"] - status["RssShmem:"])


def memory_bytes() -> int:
    """Private memory of this process now, on the host."""
    return 1024 * read_numbers(Path("/proc/self/status"))["RssAnon:"]


def host_memory(root: Path = Path("/")) -> tuple:
    """(bytes in use, bytes in total) of the nearest cgroup, v1 or v2, with a limit below the machine's
    memory; else of the machine.

    Cached files do not count as in use: the kernel drops them before it kills a process. root: the folder
    that holds proc and sys.
    """
    meminfo = read_numbers(root / "proc/meminfo")
    total_bytes = meminfo["MemTotal:"] * 1024
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        inside = Path(path[1:])
        folder = "memory" if "memory" in kinds.split(",") else ""
        mount = root / "sys/fs/cgroup" / folder
        used_file, limit_file, prefix = CGROUPS[folder]
        # Inside a container only the last of these folders may exist.
        for part in (inside, *inside.parents):
            with suppress(OSError, LookupError, ValueError):  # "max" is no number
                limit_bytes = int((mount / part / limit_file).read_text())
                if limit_bytes < total_bytes:
                    stat = read_numbers(mount / part / "memory.stat")
                    cached_bytes = stat[f"{prefix}inactive_file"] + stat[f"{prefix}active_file"]
                    return int((mount / part / used_file).read_text()) - cached_bytes, limit_bytes
    return total_bytes - meminfo["MemAvailable:"] * 1024, total_bytes


def cores(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """CPU cores that this process may use: those of its affinity (taskset, Slurm), but no more than the quota
    of its container (docker --cpus, the limit of a pod). file: the quota and its period, cgroup v2.
    """
    count = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # "max" is no number
        quota, period = file.read_text().split()
        count = min(count, int(quota) // int(period))
    return count or 1


def read_numbers(file: Path) -> dict:
    """The number of each line such as `MemTotal: 123 kB`, by the line's first word, in the file's unit."""
    found = {}
    for line in file.read_text().splitlines():
        name, number, *_ = [*line.split(), ""]
        if number.isdecimal():
            found[name] = int(number)
    return found


def _cuda():
    """torch.cuda if this process uses a GPU, else False."""
    import torch

    return torch.cuda.is_initialized() and torch.cuda
