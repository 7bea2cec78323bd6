"""The run folder: choose and lock it, find what an earlier start left in it, write its plan.json.

    OUT/config.yaml  OUT/metrics.jsonl  OUT/checkpoints/  OUT/model/  OUT/plan.json

A run is finished when its plan.json has the measured figures. A later start keeps config.yaml and the lines
of metrics.jsonl.
"""

import fcntl
import json
import math
import os
import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from itertools import count
from pathlib import Path

from .distributed import ALONE, World, broadcast, host_name, together
from .errors import ConfigError, check
from .files import check_replaceable, disk_errors, replace_file
from .settings import save_config
from .units import GIB

RUN_FILES = "config.yaml metrics.jsonl plan.json checkpoints model adapter".split()
_claims = ExitStack()  # closing it releases the lock and removes folders that are still empty


def claim_output(output_dir: str, stem: str, world: World, source: Path | None = None) -> Path:
    """The folder of this run, made and locked by rank 0; all ranks call it.

    It is --output_dir if given, else the next free output/STEM-NNN. A number is taken by making its folder,
    so two runs never share one.

    Raises ConfigError on all ranks if the folder cannot be made or written, another run uses it, or a rank
    sees another folder at its path; and if a save could not replace OUT/model, see check_replaceable.
    `source`: the folder that the model is read from.
    """
    out = Path(output_dir).absolute() if output_dir else None
    owner = ""
    with together(world), disk_errors(out or Path("output")):
        check(
            out or os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0",
            "--max_restarts: a restart finds its run only in a named folder (fix: --output_dir FOLDER)",
        )
        if world.rank == 0:
            if out:
                check_replaceable(out / "model", source)
            out, owner = _claim(out, stem)
    out, owner = broadcast((out, owner), world)
    with together(world), disk_errors(out):
        check_seen(out, owner)
    return out


def check_seen(out: Path, owner: str) -> None:
    """Raise ConfigError unless this rank sees the folder that `owner`, the text in its lock, has locked."""
    lock = out / ".lock"
    check(
        lock.exists() and lock.read_text(errors="replace") == owner,
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
    """What an earlier start left in the run folder: nothing. If there is something, see train/resume.py.

    checkpoint: the folder to continue from, None for a fresh start. state: the facts stored in that
    checkpoint. finished: the number of steps of a finished run, else 0.
    """

    checkpoint: Path | None = None
    state: dict = field(default_factory=dict)
    finished: int = 0

    def check_facts(self, *_) -> None:
        """Nothing is compared."""

    def load(self, *_) -> int:
        """Nothing is loaded: the first step is 0."""
        return 0


def start_run(out: Path, cfg: object, planned: dict, world: World) -> int:
    """Rank 0 saves the settings and the plan of this start, and returns its number, from 1; other ranks: 0.

    The first start writes config.yaml, later ones config_002.yaml and so on.
    """
    if world.rank:
        return 0
    run = 1 + len([*out.glob("config*.yaml")])
    save_config(cfg, out / ("config.yaml" if run == 1 else f"config_{run:03d}.yaml"))
    write_plan(out, planned)
    return run


def write_plan(out: Path, planned: dict, measured: dict | None = None) -> None:
    """Write plan.json atomically; `measured` marks the run as finished."""
    content = {"planned": planned, "measured": measured}
    replace_file(out / "plan.json", json.dumps(content, indent=2) + "\n")


def check_space(folder: Path, needed_bytes: int, world=ALONE, counted="") -> None:
    """Raise ConfigError unless the disk has room. counted: a pattern; needed_bytes contains the files
    of the folder that match it, so their bytes count as free.

    If all ranks of a `world` call it, rank 0 reads the free space for all of them. Readings of a busy disk
    differ from rank to rank, and then the error would be printed once per rank.
    """
    disk = shutil.disk_usage(folder)
    # Some network file systems do not report their free space.
    free_bytes = disk.free if disk.total else math.inf
    if counted:
        free_bytes += sum(file.stat().st_size for file in folder.glob(counted))
    free_bytes = broadcast(free_bytes, world)
    if needed_bytes > free_bytes:
        raise ConfigError(
            f"no space left: need {needed_bytes / GIB:.3f} GiB, have {free_bytes / GIB:.3f} GiB at {folder}"
            " (fix: another --output_dir, or make room)",
            agreed=world.size > 1,
        )


def _claim(out, stem):
    """Make and lock `out`; None: the next free output/STEM-NNN. Returns (the folder, its owner: the text in
    the lock, which names this process).
    """
    for number in count(1):
        folder = out or Path("output", f"{stem}-{number:03d}").absolute()
        missing = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
        for path in reversed(missing):
            _claims.callback(_quietly, path.rmdir)
        try:
            folder.mkdir(parents=True, exist_ok=bool(out))
            break
        except FileExistsError:
            if out:
                raise
    lock = open(folder / ".lock", "a+b")  # noqa: SIM115 - closed with the claim
    _claims.enter_context(lock)
    # The lock is held until all copies of the file are closed. A process that a reward has forked may live
    # on after this one is killed.
    os.register_at_fork(after_in_child=lock.close)
    try:
        # the kernel releases the lock, however the process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(lock.fileno()), os.lstat(lock.name)):
            raise BlockingIOError  # the run that held the lock has just removed the file
    except BlockingIOError:
        lock.seek(0)
        owner = lock.read().decode(errors="replace") or "another run"
        raise ConfigError(
            f"--output_dir {out} is in use by {owner} (fix: wait, or another folder)"
        ) from None
    except OSError:  # a file system without locks
        pass
    _claims.callback(_quietly, (folder / ".lock").unlink)
    owner = f"process {os.getpid()} on {host_name()} since {datetime.now():%Y-%m-%d %H:%M:%S.%f}"
    lock.truncate(0)
    lock.write(owner.encode())
    lock.flush()
    os.fsync(lock)  # so that other machines see the text
    return folder, owner


def _quietly(call):
    """Call it, whether the file system lets it or not."""
    with suppress(OSError):
        call()
