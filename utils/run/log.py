"""The console line and metrics.jsonl."""

import json
import math
import sys
from pathlib import Path

from tqdm import tqdm

from .errors import silence
from .files import disk_errors

LINE = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "bits_per_byte": "bits/byte {:.4f}",
    "eval_bits_per_byte": "bits/byte {:.4f}",
    "rewards/accuracies": "pairs {:.0%}",
    "eval_rewards/accuracies": "pairs {:.1%}",
    "accuracy": "pairs {:.0%}",
    "eval_accuracy": "pairs {:.1%}",
    "reward": "reward {:.3f}",
    "eval_reward": "eval_reward {:.3f}",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "peak_memory_gib": "peak {:.2f} GiB",
}


class RunLog:
    """Writes the numbers of a run to stdout, to folder/metrics.jsonl and to trackers.

    On a terminal it also shows a progress bar with the time left; a log file gets only whole lines. trackers:
    objects of profiling.py that get the same numbers. done: the step that the run resumed from. run: the
    number of this start, from 1; with 0 the log does nothing, as on all ranks but rank 0. Lines of
    metrics.jsonl that an earlier start wrote for later steps stay.
    """

    def __init__(self, folder: Path, total_steps, log_every=1, trackers=(), done=0, run=1):
        self.file = folder / "metrics.jsonl"
        self.total_steps = total_steps
        self.log_every = log_every
        self.run = run
        self.trackers = trackers
        self.bar = tqdm(
            total=total_steps,
            initial=done,
            unit="step",
            file=sys.stdout,
            disable=None if run else True,  # None: disabled if not a terminal
        )
        if run and self.file.exists():
            # remove an incomplete last line of a killed start, which would spoil the next line
            with open(self.file, "r+b") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

    def step(self, **numbers: float | None) -> None:
        """Record the numbers of optimizer step `step` (from 1): one JSON object, and every log_every steps
        a line on stdout.

        None is left out; NaN and infinity become null, since JSON has neither. A second call for the same
        step, with an eval_loss, adds another object and always a line.
        """
        if not self.run:
            return
        numbers = {name: value for name, value in numbers.items() if value is not None}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with disk_errors(self.file), open(self.file, "a") as file:
            file.write(json.dumps({"run": self.run, **finite}) + "\n")
        step = numbers.pop("step")
        for tracker in self.trackers:
            tracker.log(numbers, step)
        shown = [form.format(numbers[name]) for name, form in LINE.items() if name in numbers]
        try:
            self.bar.update(step - self.bar.n)
            if (
                step % self.log_every == 0
                or step == self.total_steps
                or {"eval_loss", "eval_reward"} & numbers.keys()
            ):
                # above the bar, if any
                tqdm.write("  ".join([f"step {step}/{self.total_steps}", *shown]))
                sys.stdout.flush()
        except OSError:
            # the reader of stdout is gone (`| head`, a closed terminal); the run goes on
            self.bar.disable = True
            silence()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *_) -> None:
        """Finish the bar and the trackers."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
