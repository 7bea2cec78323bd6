"""The console line, metrics.jsonl, peak memory."""

import json
import math
import os
import re
import resource
import sys
import threading
from contextlib import suppress
from pathlib import Path

import torch
from tqdm import tqdm

from .errors import watchers
from .hf_format import disk_errors

LINE = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "peak_memory_gib": "peak {:.2f} GiB",
}


class RunLog:
    """Where the numbers of a run go: a line on stdout, folder/metrics.jsonl, and trackers on demand.

    Rank 0 makes one with its folder, the others with None, and theirs does nothing. On a terminal there is a
    progress bar with the time left, in a log only whole lines. done: the step that was resumed from; run:
    which start of the run this is. Lines of later steps that an earlier start wrote stay; `read_metrics`
    (trained_run.py) leaves them out.
    """

    def __init__(self, folder: Path | None, total_steps, log_every=1, trackers=(False, False), done=0, run=1):
        self.folder, self.total_steps, self.log_every, self.run = folder, total_steps, log_every, run
        self.trackers = []
        silent = folder is None or not sys.stdout.isatty()
        self.bar = tqdm(total=total_steps, initial=done, unit="step", file=sys.stdout, disable=silent)
        if folder is None:
            return
        if (folder / "metrics.jsonl").exists():  # a last line that a kill cut in two would spoil the next
            with open(folder / "metrics.jsonl", "r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        if any(trackers):
            from .trackers import open_trackers

            self.trackers = open_trackers(folder, *trackers, done)

    def step(self, **numbers: float | None) -> None:
        """Record what is known after optimizer step `step` (from 1): one JSON object, and perhaps a line.

        None is left out; NaN and infinity become null, since JSON has neither. Called again for the same step
        with an eval_loss, it adds another object and its line.
        """
        if self.folder is None:
            return
        numbers = {name: value for name, value in numbers.items() if value is not None}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with disk_errors(self.folder / "metrics.jsonl"), open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"run": self.run, **finite}) + "\n")
        step = numbers.pop("step")
        for tracker in self.trackers:
            tracker.log(numbers, step)
        shown = [form.format(numbers[name]) for name, form in LINE.items() if name in numbers]
        try:
            self.bar.update(step - self.bar.n)
            if step % self.log_every == 0 or step == self.total_steps or "eval_loss" in numbers:
                tqdm.write("  ".join([f"step {step}/{self.total_steps}", *shown]))  # above the bar, if any
                sys.stdout.flush()
        except OSError:  # who read stdout has gone (`| head`, a closed terminal), and the run goes on
            self.bar.disable = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Finish the bar and the trackers."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()


class PeaksByAct:
    """The most memory in use in each act, `found`, as errors.act tells them, until `close`.

    On a CPU a thread looks 50 times a second, so that little is missed.
    """

    def __init__(self, device: torch.device):
        self.device, self.act, self.found, self.over = device, "plan", {}, threading.Event()
        watchers.append(self)
        if device.type != "cuda":
            with suppress(RuntimeError):  # no more threads: then the peaks are less exact
                threading.Thread(target=self._look, daemon=True).start()

    def note(self, act: str = "", **ended: str) -> None:
        """An act begins, or the last one has `ended`: the one before has had its peak."""
        self.found[self.act] = max(peak_memory_bytes(self.device), self.found.get(self.act, 0))
        forget_peak(self.device)
        self.act = act

    def close(self) -> None:
        self.over.set()
        if self in watchers:
            watchers.remove(self)

    def _look(self) -> None:
        while not self.over.wait(0.02):
            peak_memory_bytes(self.device)


_most_seen = 0


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
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    kib = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    _most_seen = max(_most_seen, int(kib[1]) * 1024)
    return _most_seen


def forget_peak(device: torch.device) -> None:
    """From now on peak_memory_bytes begins anew."""
    global _most_seen
    _most_seen = 0
    if device.type == "cuda" and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
