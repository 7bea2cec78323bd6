"""When the kernel kills a run: OUT/acts.jsonl holds its acts and memory, and the next start tells.

A line has run (which start it is), act, time (seconds since this start took the folder), host, host_bytes,
host_limit, oom_kills and, on CUDA, device_limit and device_bytes, the most that torch has allocated in this
act so far. The first line of a start also has its flags that decide about memory and the number of ranks of
its machine; the last line has ended: finished, stopped or error.
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
BEFORE = ("folder", "data", "plan")  # acts in which nothing is written


def watch_acts(out: Path, world, holds_run: Callable[[Path], bool]) -> AbstractContextManager:
    """On rank 0, warn if the earlier run in `out` was killed, and log the acts of the block to acts.jsonl.

    That the file cannot be written is no error. If the run ends by itself before `holds_run(out)`, it is
    removed.
    """
    if world.rank:
        return nullcontext()
    warning = last_words(out)
    if warning:
        print0(warning)
    return Acts(out, world.device, holds_run, world.local_size)


class Acts:
    """Writes the file, from the act after `plan` on: in those BEFORE the run may be refused.

    errors.act calls `note` as an act begins, so its line is written before the act does anything. A thread
    looks every second, and writes when the memory in use has changed by 1 %.
    """

    def __init__(
        self, out: Path, device: torch.device, holds_run: Callable[[Path], bool], ranks: int = 0
    ):
        self.out = out
        self.device = device
        self.holds_run = holds_run
        self.ranks = ranks
        self.act = "folder"
        self.last: dict = {}  # the line that was written last
        _, last = newest_run(out)
        self.run = 1 + last.get("run", 0)
        self.begun = time.monotonic()
        self.lock = Lock()
        self.over = Event()

    def __enter__(self) -> None:
        watchers.append(self)
        with suppress(RuntimeError):  # no more threads
            Thread(target=self._look, daemon=True).start()

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        watchers.remove(self)
        if error is None:
            ended = "finished" if self.act == "save" else "stopped"
        else:
            ended = "stopped" if issubclass(error, KeyboardInterrupt) else "error"
        self.note(ended=ended)
        wrote = self.act not in BEFORE
        if wrote and not self.holds_run(self.out) and not last_words(self.out):
            with suppress(OSError):
                (self.out / "acts.jsonl").unlink()

    def note(self, act: str = "", **ended: str) -> None:
        """Write a line if an act begins, if the run has `ended`, or if the memory in use has changed."""
        with self.lock, suppress(OSError, ConfigError):
            self.act = act or self.act
            over = self.over.is_set()
            if ended:
                self.over.set()
            line = self._line(ended)
            worth_a_line = bool(act or ended) or self._has_changed(line)
            if over or self.act in BEFORE or not worth_a_line:
                return
            self.last = line
            _append_line(self.out / "acts.jsonl", line)

    def _line(self, ended: dict[str, str]) -> dict:
        seconds = round(time.monotonic() - self.begun, 1)
        line = {"run": self.run, "act": self.act, "time": seconds}
        line |= memory(self.device)
        line |= ended
        if not self.last:  # the remedies depend on the flags and the ranks
            flags = settings() or {}
            line["flags"] = {name: flags[name] for name in NAMES if name in flags}
            line["ranks"] = self.ranks
        return line

    def _has_changed(self, line: dict) -> bool:
        """Whether memory is in use that was not, or the reverse, or the last line is old."""
        if line["time"] >= self.last.get("time", 0) + ALIVE_SECONDS:
            return True
        for name in MOVING:
            before_bytes = self.last.get(name, 0)
            if abs(line.get(name, 0) - before_bytes) > before_bytes / 100:
                return True
        return False

    def _look(self) -> None:
        while not self.over.wait(1):
            self.note()


def _append_line(path: Path, line: dict) -> None:
    """Add a line of JSON. Where a kill has cut the last line, it is ended first."""
    with open_own(path, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(line).encode() + b"\n")


def newest_run(out: Path) -> tuple[dict, dict]:
    """The first and the last line of the newest run in OUT/acts.jsonl; {} and {} where there is none."""
    first: dict = {}
    last: dict = {}
    with suppress(OSError), open_own(out / "acts.jsonl", "rb") as lines:
        for text in iter(lambda: lines.readline(LONGEST), b""):
            with suppress(ValueError, TypeError, KeyError):  # cut, or damaged
                line = json.loads(text)
                _ = line["run"] + line["time"], line["act"]
                if line["run"] != last.get("run"):
                    first = line
                last = line
    return first, last


def last_words(out: Path) -> str:
    """A warning if the newest run in `out` was killed; "" if it ended by itself, or there is none.

    If the kernel killed another rank, rank 0 saw only that it was gone, and ended: then the count of kills
    tells.
    """
    first, last = newest_run(out)
    killed = "ended" not in last
    kills = _oom_kills(first, memory() if killed else last)
    finished = last.get("ended") == "finished"
    if not last or finished or not (killed or kills):
        return ""
    flags = first.get("flags", {})
    ranks = first.get("ranks", 0)
    ending = "was killed" if killed else "ended"
    words = f"the run before {ending} in act '{last['act']}', {last['time']:.0f} s after its start"
    used_gib = last.get("host_bytes", 0) / GIB
    limit_gib = last.get("host_limit", 0) / GIB
    if killed:
        words += ", without a last word"
        if limit_gib:
            words += f"; host memory was {used_gib:.1f} of {limit_gib:.1f} GiB"
    if kills:
        processes = "process" if kills == 1 else "processes"
        words += f", and the kernel has killed {kills} {processes} for memory"
    device_bytes = last.get("device_bytes", 0)
    if kills or used_gib > 0.9 * limit_gib:
        fix = less_memory(last["act"], flags, "device_limit" in last, ranks)
    elif device_bytes > 0.9 * last.get("device_limit", 0):
        words += "; the device's was nearly full"
        fix = less_memory(last["act"], flags, True, ranks, of_gpu=True)
    else:
        words += "; not for memory, as far as can be seen"
        fix = "look at the kernel's log, dmesg, and the scheduler's"
    return f"warning: {words} (fix: {fix})"


def _oom_kills(first: dict, now: dict) -> int:
    """Processes that the kernel has killed for memory since the first line of a run; 0 where not known."""
    counted = "oom_kills" in first and "oom_kills" in now
    if not counted or first.get("host") != now["host"]:
        return 0
    return max(0, now["oom_kills"] - first["oom_kills"])


class PeaksByAct:
    """The most bytes in use in each act, `found`, until `close`. `reserved`: on a GPU, the most bytes that
    torch's allocator had reserved, in use or not.

    errors.act announces the acts. On a CPU a thread looks 200 times a second, so that little is missed.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.act = "plan"
        self.over = Event()
        self.found: dict[str, int] = {}
        self.reserved: dict[str, int] = {}
        watchers.append(self)
        if device.type != "cuda":
            with suppress(RuntimeError):  # no more threads: then the peaks are less exact
                Thread(target=self._look, daemon=True).start()

    def note(self, act: str = "", **ended: str) -> None:
        """An act begins, or the last one has `ended`: the peak of the act before is known."""
        peak_bytes = peak_memory_bytes(self.device)
        self.found[self.act] = max(peak_bytes, self.found.get(self.act, 0))
        if self.device.type == "cuda":
            reserved_bytes = torch.cuda.max_memory_reserved(self.device)
            self.reserved[self.act] = max(reserved_bytes, self.reserved.get(self.act, 0))
        forget_peak(self.device)
        self.act = act

    def close(self) -> None:
        self.over.set()
        if self in watchers:
            watchers.remove(self)

    def _look(self) -> None:
        while not self.over.wait(0.005):
            peak_memory_bytes(self.device)
