"""The run folder: choose and lock it, find what an earlier start left in it, write its plan.json and its
metrics.jsonl, whose numbers the console shows too.

    OUT/config.yaml  OUT/metrics.jsonl  OUT/checkpoints/  OUT/model/  OUT/plan.json

A run is finished when its plan.json has the measured figures. A later start keeps config.yaml and the lines
of metrics.jsonl.
"""

import fcntl
import json
import math
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from itertools import count
from pathlib import Path

from tqdm import tqdm

from .distributed import ALONE, World, broadcast, gather, host_name, together
from .errors import ConfigError, check, silence
from .files import check_replaceable, disk_errors, replace_file
from .settings import save_config
from .units import GIB

RUN_FILES = ("config.yaml", "metrics.jsonl", "plan.json", "checkpoints", "model", "adapter")
_claims = ExitStack()  # closing it releases the lock and removes folders that are still empty


def claim_output(output_dir: str, stem: str, world: World, source: Path | None = None) -> Path:
    """The folder of this run, made and locked by rank 0; all ranks call it.

    It is --output_dir if given; after an elastic restart the newest output/STEM-NNN; else the next free
    output/STEM-NNN. A number is taken by making its folder, so two runs never share one.

    Raises ConfigError on all ranks if the folder cannot be made or written, another run uses it, or a rank
    sees another folder at its path; and if a save could not replace OUT/model, see check_replaceable.
    `source`: the folder that the model is read from.
    """
    restarted = any(gather(world, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))
    out, who = Path(output_dir).absolute() if output_dir else None, ""
    with together(world), disk_errors(out or Path("output")):
        if world.rank == 0:
            if restarted and not out:
                numbered = Path("output").absolute().glob(f"{stem}-[0-9][0-9][0-9]")
                out = max(numbered, default=None)
            if out:
                check_replaceable(out / "model", source)
            out, who = _claim(out, stem)
    out, who = broadcast(world, (out, who))
    with together(world), disk_errors(out):
        check_seen(out, who)
    # NCCL's flight recorder: when a collective times out, each rank writes here which collective it was in.
    os.environ.update(
        TORCH_NCCL_DUMP_ON_TIMEOUT="1",
        TORCH_FR_BUFFER_SIZE="2000",
        TORCH_FR_DUMP_TEMP_FILE=f"{out}/hang_rank_",
    )
    return out


def check_seen(out: Path, who: str) -> None:
    """Raise ConfigError unless this rank sees the folder that `who` has locked."""
    lock = out / ".lock"
    check(
        lock.exists() and lock.read_text(errors="replace") == who,
        f"{out} on {host_name()} is not the folder that rank 0 sees"
        " (fix: an --output_dir that all machines share)",
    )


def releases_output(main):
    """Decorate a recipe's main: however it ends, the lock is released, and a folder that this run made and
    that is still empty is removed.
    """

    @wraps(main)
    def released(cfg):
        with _claims:
            return main(cfg)

    return released


def holds_run(out: Path) -> bool:
    """Whether a folder holds files of an earlier run."""
    return any((out / name).exists() for name in RUN_FILES)


@dataclass(frozen=True)
class Resumed:
    """What an earlier start left in the run folder.

    checkpoint: the folder to continue from, None for a fresh start. state: the facts stored in that
    checkpoint. finished: the number of steps of a finished run, else 0.
    """

    checkpoint: Path | None = None
    state: dict = field(default_factory=dict)
    finished: int = 0


def start_run(out: Path, cfg: object, planned: dict) -> int:
    """Save the settings and the plan of this start; returns its number, from 1. Only rank 0 calls it.

    The first start writes config.yaml, later ones config_002.yaml and so on.
    """
    run = 1 + len([*out.glob("config*.yaml")])
    save_config(cfg, out / ("config.yaml" if run == 1 else f"config_{run:03d}.yaml"))
    write_plan(out, planned)
    return run


def write_plan(out: Path, planned: dict, measured: dict | None = None) -> None:
    """Write plan.json atomically; `measured` marks the run as finished."""
    content = {"planned": planned, "measured": measured}
    replace_file(out / "plan.json", json.dumps(content, indent=2) + "\n")


def check_space(folder: Path, needed_bytes: int, world: World = ALONE) -> None:
    """Raise ConfigError unless the disk has room.

    If all ranks of a `world` call it, rank 0 reads the free space for all of them. Readings of a busy disk
    differ from rank to rank, and then the error would be printed once per rank.
    """
    disk = shutil.disk_usage(folder)
    # Some network file systems do not report their free space.
    free_bytes = broadcast(world, disk.free if disk.total else math.inf)
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"no space left: need {needed_bytes / GIB:.3f} GiB, have {free_bytes / GIB:.3f} GiB at {folder}"
            " (fix: another --output_dir, or make room)",
            agreed=world.size > 1,
        )


def _claim(out: Path | None, stem: str) -> tuple[Path, str]:
    """Make and lock `out`; None: the next free output/STEM-NNN. Returns (the folder, the text in its lock
    file, which names this process).
    """
    for number in count(1):
        free = out or Path("output", f"{stem}-{number:03d}").absolute()
        made = [folder for folder in (free, *free.parents) if not os.path.lexists(folder)]
        for folder in reversed(made):
            _claims.callback(_quietly, folder.rmdir)
        try:
            free.mkdir(parents=True, exist_ok=bool(out))
            break
        except FileExistsError:
            if out:
                raise
    lock = open(free / ".lock", "a+b")  # noqa: SIM115 - closed with the claim
    _claims.enter_context(lock)
    try:
        # the kernel releases the lock, however the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock.fileno()), os.lstat(lock.name)):
            raise BlockingIOError  # the run that held the lock has just removed the file
    except BlockingIOError:
        lock.seek(0)
        who = lock.read().decode(errors="replace") or "another run"
        raise ConfigError(
            f"--output_dir {out} is in use by {who} (fix: wait, or another folder)"
        ) from None
    except OSError:  # a file system without locks
        pass
    _claims.callback(_quietly, (free / ".lock").unlink)
    who = f"process {os.getpid()} on {host_name()} since {datetime.now():%Y-%m-%d %H:%M:%S.%f}"
    lock.truncate(0)
    lock.write(who.encode())
    lock.flush()
    os.fsync(lock)  # so that other machines see the text
    return free, who


def _quietly(call: Callable[[], None]) -> None:
    with suppress(OSError):
        call()


# --- metrics.jsonl and the console line

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

    def __exit__(self, *_) -> None:
        """Finish the bar and the trackers."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()
