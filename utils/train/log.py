"""The log of a run: metrics.jsonl, the console line, and the end of a run that is no longer finite."""

import json
import math
import sys
import time
from contextlib import AbstractContextManager

import torch
from tqdm import tqdm

from ..run.distributed import World, all_reduce_sum, together
from ..run.errors import ConfigError, check, first_five, silence
from ..run.files import disk_errors, drop_half_line
from ..run.memory import peak_memory_bytes
from ..run.units import GIB

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
    "ties": "ties {:.0%}",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "peak_memory_gib": "peak {:.2f} GiB",
}


class RunLog(AbstractContextManager):
    """Writes the numbers of a run to stdout, to folder/metrics.jsonl and to trackers; profiles it if asked.

    The loss and the gradient norm of a step are still on the device, and reading them waits for the device.
    So they are read together, for all steps since the last console line. On a terminal there is also a
    progress bar with the time left; a log file gets only whole lines.

    first: the step that the run resumed from. run: the number of this start, from 1; with 0 nothing is
    written, as on all ranks but rank 0. token_mfu: see profiling.mfu; 0: not known. options: the settings
    dtype, log_every, profile, tensorboard and wandb. seconds: the mean time of the steps that were read last.
    Lines of metrics.jsonl that an earlier start wrote for later steps stay.
    """

    skipped = 0  # steps skipped in a row, because fp16 gradients overflowed
    profiler = None
    trackers = ()

    def __init__(self, folder, steps: int, first: int, run: int, world: World, token_mfu, options):
        self.file = folder / "metrics.jsonl"
        self.total_steps = steps
        self.run = run
        self.world = world
        self.token_mfu = token_mfu
        self.options = options
        self.unread = []  # a tuple for each step whose values are still on the device, see add
        if options.profile or options.tensorboard or options.wandb:
            from .profiling import start_recording

            self.profiler, self.trackers = start_recording(folder, world, first, steps, options)
        self.bar = tqdm(
            total=steps,
            initial=first,
            unit="step",
            file=sys.stdout,
            disable=not run or None,  # None: disabled if not a terminal
        )
        for name in ("metrics.jsonl", "samples.jsonl") if run else ():
            drop_half_line(folder / name)  # it would spoil the next line

    def begin(self) -> None:
        """Call it where a step begins. The clock starts with the first step since the last read."""
        if not self.unread:
            self.started = time.monotonic()

    def add(self, loss, grad_norm, losses, batches, means, **numbers) -> None:
        """Add one step; all ranks call it. loss, grad_norm: tensors (), of all ranks. losses: () of each
        micro-batch of this rank. means: further values () of all ranks by name, still on the device. numbers:
        values that the host knows already; None: not known.
        """
        on_device = torch.stack([v.to(loss) for v in (loss, grad_norm, *means.values())])
        numbers["peak_memory_gib"] = peak_memory_bytes() / GIB
        if "tokens" not in numbers:
            numbers["tokens"] = int(
                all_reduce_sum(sum(batch.tokens for batch in batches), self.world)
            )
        self.unread.append((on_device, losses, [batch.where for batch in batches], means, numbers))
        if self.profiler:
            self.profiler.step()

    def due(self, done: int, every: int) -> bool:
        """Whether something is due after step `done`: every `every` steps (0: never), and after the last."""
        return done == self.total_steps or bool(every and done % every == 0)

    def read(self) -> None:
        """Log the steps that were added.

        All ranks call it. Raises ConfigError on all ranks if a loss or a gradient norm is not finite, naming
        the rows whose loss is not. In fp16, gradient norms raise only if 20 in a row are not finite.
        """
        values = torch.stack([on_device for on_device, *_ in self.unread]).tolist()
        self.seconds = (time.monotonic() - self.started) / len(self.unread)
        for (loss, grad_norm, *mean_values), record in zip(values, self.unread, strict=True):
            _, losses, rows, means, numbers = record
            overflows = self.options.dtype == "fp16" and not math.isfinite(grad_norm)
            self.skipped = self.skipped + 1 if overflows else 0
            goes_on = math.isfinite(grad_norm) or 0 < self.skipped < 20
            if not (math.isfinite(loss) and goes_on):
                found = f"step {numbers['step']}: loss {loss}, gradient norm {grad_norm}"
                fix = "nothing of it is saved (fix: other rows, a lower --lr, or --dtype fp32)"
                bad = [row for value, row in zip(losses, rows, strict=True) if not value.isfinite()]
                with together(self.world):
                    check(not bad, f"{found} in {first_five(sum(bad, []))}; {fix}")
                raise ConfigError(f"{found}, though every loss is finite; {fix}", agreed=True)
            per_second = numbers["tokens"] / self.seconds
            self.step(
                **numbers,
                **dict(zip(means, mean_values, strict=True)),
                loss=loss,
                grad_norm=grad_norm,
                skipped=int(overflows),
                seconds=self.seconds,
                tokens_per_second=per_second,
                mfu=self.token_mfu * per_second or None,
            )
        self.unread.clear()

    def step(self, **numbers: float | None) -> None:
        """Record the numbers of optimizer step `step` (from 1): one JSON object, and every log_every steps
        a line on stdout.

        None is left out; NaN and infinity become null, since JSON has neither. A second call for the same
        step, without a loss, adds another object and always a line.
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
            if shown and (self.due(step, self.options.log_every) or "loss" not in numbers):
                # above the bar, if any
                tqdm.write("  ".join([f"step {step}/{self.total_steps}", *shown]))
                sys.stdout.flush()
        except OSError:
            # the reader of stdout is gone (`| head`, a closed terminal); the run goes on
            self.bar.disable = True
            silence()

    def __exit__(self, *_) -> None:
        """Finish the bar and the trackers."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
