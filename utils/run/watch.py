"""When the kernel kills: OUT/acts.jsonl tells a run's act and memory, and the next start how it was killed.

Imported by folder.py, on demand. A line has run (which start it is), act, time (seconds since this start
took the folder), host, host_bytes, host_limit, oom_kills and, on CUDA, device_limit and device_bytes, the
most that torch has allocated in this act so far. The first line of a start also has its flags that decide
about memory and the ranks of its machine, the last one ended: finished, stopped or error.
"""

import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from threading import Event, Lock, Thread

import torch

from .errors import ConfigError, print0, watchers
from .files import open_own
from .memory import forget_peak, memory, peak_memory_bytes
from .remedies import NAMES, less_memory, settings
from .units import GIB

LONGEST = 2**16  # bytes of a line
ALIVE_SECONDS = 60  # between lines while nothing changes
MOVING = ("host_bytes", "device_bytes")  # 1 % more or less is a line


def watch_acts(out: Path, world, holds_run: Callable[[Path], bool]) -> AbstractContextManager:
    """On rank 0, say how the run before in `out` was killed, if it was; the block's acts go to acts.jsonl.

    That it cannot be written is no error. If the run ends by itself before `out` holds_run, it goes.
    """
    if world.rank:
        return nullcontext()
    if words := last_words(out):
        print0(words)
    return Acts(out, world.device, holds_run, world.local_size)


BEFORE = ("folder", "data", "plan")  # acts in which nothing is written


class Acts:
    """What writes the file, from the act after `plan` on: in those BEFORE the run may be refused.

    errors.act calls `note` as an act begins, so its line is there before it does anything. A thread looks
    every second, and writes when 1 % of the memory has come or gone.
    """

    def __init__(
        self, out: Path, device: torch.device, holds_run: Callable[[Path], bool], ranks: int = 0
    ):
        self.ranks = ranks
        self.out, self.device, self.holds_run, self.act, self.last = (
            out,
            device,
            holds_run,
            "folder",
            {},
        )
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
        if self.act not in BEFORE and not self.holds_run(self.out) and not last_words(self.out):
            with suppress(OSError):
                (self.out / "acts.jsonl").unlink()

    def note(self, act: str = "", **ended: str) -> None:
        """Write a line if an act begins, if the run has `ended`, or if memory has come or gone."""
        with self.lock, suppress(OSError, ConfigError):
            self.act, over = act or self.act, self.over.is_set()
            if ended:
                self.over.set()
            seconds, last = round(time.monotonic() - self.begun, 1), self.last
            line = {
                "run": self.run,
                "act": self.act,
                "time": seconds,
                **memory(self.device),
                **ended,
            }
            if not last:  # what helps depends on them
                flags = settings() or {}
                line["flags"] = {name: flags[name] for name in NAMES if name in flags}
                line["ranks"] = self.ranks
            moved = [abs(line.get(n, 0) - last.get(n, 0)) > last.get(n, 0) / 100 for n in MOVING]
            quiet = not any(moved) and seconds < last.get("time", 0) + ALIVE_SECONDS
            if over or self.act in BEFORE or quiet and not act and not ended:
                return
            self.last = line
            with open_own(self.out / "acts.jsonl", "a+b") as file:
                # by a kill
                cut = file.tell() and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n"
                file.write(b"\n" * bool(cut) + json.dumps(line).encode() + b"\n")

    def _look(self) -> None:
        while not self.over.wait(1):
            self.note()


def newest_run(out: Path) -> tuple[dict, dict]:
    """The first and the last line of the newest run in OUT/acts.jsonl; {} and {} where there is none."""
    first, last = {}, {}
    with suppress(OSError), open_own(out / "acts.jsonl", "rb") as lines:
        for text in iter(lambda: lines.readline(LONGEST), b""):
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
    flags, ranks = first.get("flags", {}), first.get("ranks", 0)
    words = f"the run before {'was killed' if killed else 'ended'} in act '{last['act']}', "
    words += f"{last['time']:.0f} s after its start" + ", without a last word" * killed
    used, limit = (last.get(name, 0) / GIB for name in ("host_bytes", "host_limit"))
    if limit and killed:
        words += f"; host memory was {used:.1f} of {limit:.1f} GiB"
    if kills:
        words += f", and the kernel has killed {kills} process{'es' * (kills > 1)} for memory"
    if kills or used > 0.9 * limit:
        fix = less_memory(last["act"], flags, "device_limit" in last, ranks)
    elif last.get("device_bytes", 0) > 0.9 * last.get("device_limit", 0):
        words += "; the device's was nearly full"
        fix = less_memory(last["act"], flags, True, ranks, of_gpu=True)
    else:
        words += "; not for memory, as far as can be seen"
        fix = "look at the kernel's log, dmesg, and the scheduler's"
    return f"warning: {words} (fix: {fix})"


class PeaksByAct:
    """The most memory in use in each act, `found`, as errors.act tells them, until `close`. `reserved`: on a
    GPU, the most that torch's allocator had taken of it, in use or not.

    On a CPU a thread looks 50 times a second, so that little is missed.
    """

    def __init__(self, device: torch.device):
        self.device, self.act, self.over = device, "plan", Event()
        self.found: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        watchers.append(self)
        if device.type != "cuda":
            with suppress(RuntimeError):  # no more threads: then the peaks are less exact
                Thread(target=self._look, daemon=True).start()

    def note(self, act: str = "", **ended: str) -> None:
        """An act begins, or the last one has `ended`: the one before has had its peak."""
        self.found[self.act] = max(peak_memory_bytes(self.device), self.found.get(self.act, 0))
        if self.device.type == "cuda":
            reserved = torch.cuda.max_memory_reserved(self.device)
            self.reserved[self.act] = max(reserved, self.reserved.get(self.act, 0))
        forget_peak(self.device)
        self.act = act

    def close(self) -> None:
        self.over.set()
        if self in watchers:
            watchers.remove(self)

    def _look(self) -> None:
        while not self.over.wait(0.02):
            peak_memory_bytes(self.device)
