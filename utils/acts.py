"""When the kernel kills: OUT/acts.jsonl tells a run's act and memory, and the next start how it was killed.

Imported by run_folder.py, on demand. A line has run (which start it is), act, time (seconds since this start
took the folder), host, host_bytes, host_limit, oom_kills and, on CUDA, device_limit and device_bytes, the
most that torch has allocated in this act so far. The last line also has ended: finished, stopped or error.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Event, Lock, Thread

import torch

from .errors import print0, watchers

ALIVE_SECONDS = 60  # between lines while nothing changes
MOVING = ("host_bytes", "device_bytes")  # 1 % more or less is a line
LOADING = "--low_cpu_fsdp, fewer ranks on this machine, or without --cpu_offload"
ON_GPU = "without --cpu_offload and --async_save, fewer ranks on this machine, or one with more memory"
ON_CPU = "a smaller --batch_size, --activation_checkpointing full, without --async_save, or fewer ranks"
V1 = ("memory.usage_in_bytes", "memory.limit_in_bytes", "memory.oom_control", "total_")
V2 = ("memory.current", "memory.max", "memory.events", "")


def watch_acts(out: Path, world, holds_run: Callable[[Path], bool]) -> AbstractContextManager:
    """On rank 0, say how the run before in `out` was killed, if it was; the block's acts go to acts.jsonl.

    That it cannot be written is no error. If the run ends by itself before `out` holds_run, it goes.
    """
    if world.rank:
        return nullcontext()
    if words := last_words(out):
        print0(words)
    return Acts(out, world.device, holds_run)


class Acts:
    """What writes the file, from the act after `plan` on: until then the run may be refused.

    errors.act calls `note` as an act begins, so its line is there before it does anything. A thread looks
    every second, and writes when 1 % of the memory has come or gone.
    """

    def __init__(self, out: Path, device: torch.device, holds_run: Callable[[Path], bool]):
        self.out, self.device, self.holds_run, self.act, self.last = out, device, holds_run, "plan", {}
        self.run = 1 + newest_run(out)[1].get("run", 0)
        self.begun, self.lock, self.over = time.monotonic(), Lock(), Event()

    def __enter__(self) -> None:
        watchers.append(self)
        with suppress(RuntimeError):  # no more threads
            Thread(target=self._look, daemon=True).start()

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        watchers.remove(self)
        stopped = issubclass(error, KeyboardInterrupt) if error else self.act != "save"
        self.note(ended="stopped" if stopped else "error" if error else "finished")
        if self.act != "plan" and not self.holds_run(self.out) and not last_words(self.out):
            with suppress(OSError):
                (self.out / "acts.jsonl").unlink()

    def note(self, act: str = "", **ended: str) -> None:
        """Write a line if an act begins, if the run has `ended`, or if memory has come or gone."""
        with self.lock, suppress(OSError):
            self.act, over = act or self.act, self.over.is_set()
            if ended:
                self.over.set()
            seconds, last = round(time.monotonic() - self.begun, 1), self.last
            line = {"run": self.run, "act": self.act, "time": seconds, **memory(self.device), **ended}
            moved = [abs(line.get(n, 0) - last.get(n, 0)) > last.get(n, 0) / 100 for n in MOVING]
            quiet = not any(moved) and seconds < last.get("time", 0) + ALIVE_SECONDS
            if over or self.act == "plan" or quiet and not act and not ended:
                return
            self.last = line
            with open(self.out / "acts.jsonl", "a+b", buffering=0) as file:
                cut = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"  # by a kill
                file.write(b"\n" * bool(cut) + json.dumps(line).encode() + b"\n")

    def _look(self) -> None:
        while not self.over.wait(1):
            self.note()


def newest_run(out: Path) -> tuple[dict, dict]:
    """The first and the last line of the newest run in OUT/acts.jsonl; {} and {} where there is none."""
    first, last = {}, {}
    with suppress(OSError), open(out / "acts.jsonl", "rb") as lines:
        for text in lines:
            with suppress(ValueError, TypeError, KeyError):  # cut, or damaged
                line = json.loads(text)
                _ = line["run"] + line["time"], line["act"]
                first, last = (first if line["run"] == last.get("run") else line), line
    return first, last


def last_words(out: Path) -> str:
    """A warning if the newest run in `out` was killed; "" if it ended by itself, or there is none.

    If the kernel killed another rank, rank 0 saw only that it was gone, and ended: then the count tells.
    """
    first, last = newest_run(out)
    killed = "ended" not in last
    now = memory() if killed else last
    counted = "oom_kills" in first and "oom_kills" in now and first.get("host") == now["host"]
    kills = max(0, now["oom_kills"] - first["oom_kills"]) if counted else 0
    if not last or last.get("ended") == "finished" or not killed and not kills:
        return ""
    words = f"the run before {'was killed' if killed else 'ended'} in act '{last['act']}', "
    words += f"{last['time']:.0f} s after its start" + ", without a last word" * killed
    used, limit = (last.get(name, 0) / 2**30 for name in ("host_bytes", "host_limit"))
    if limit and killed:
        words += f"; host memory was {used:.1f} of {limit:.1f} GiB"
    if kills:
        words += f", and the kernel has killed {kills} process{'es' * (kills > 1)} for memory"
    if kills or used > 0.9 * limit:
        training = ON_GPU if "device_limit" in last else ON_CPU
        fix = training if last["act"] in ("train", "save") else LOADING
    elif last.get("device_bytes", 0) > 0.9 * last.get("device_limit", 0):
        words += "; the device's was nearly full"
        fix = "--activation_checkpointing full, or a smaller --batch_size"
    else:
        words += "; not for memory, as far as can be seen"
        fix = "look at the kernel's log, dmesg, and the scheduler's"
    return f"warning: {words} (fix: {fix})"


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
    total, free = (numbers(root / "proc/meminfo")[f"Mem{part}:"] * 1024 for part in ("Total", "Available"))
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        v1, inside = "memory" in kinds.split(","), Path(path[1:])
        used, limit, events, prefix = V1 if v1 else V2
        mount = root / "sys/fs/cgroup" / ("memory" if v1 else "")
        for folder in (mount / part for part in (inside, *inside.parents)):  # a container sees the last alone
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
