"""The run folder: which one, whose it is while a run uses it, what it already holds, and its plan.json.

    OUT/config.yaml  OUT/metrics.jsonl  OUT/checkpoints/  OUT/model/  OUT/plan.json

A run is finished when its plan.json says what was measured. Nothing that a folder holds is overwritten.
"""

import fcntl
import json
import os
from contextlib import suppress
from functools import wraps
from pathlib import Path

from .config import save_config
from .distributed import World, broadcast, gather, host_name, together
from .errors import ConfigError

RUN_FILES = ("config.yaml", "metrics.jsonl", "plan.json", "checkpoints", "model", "adapter")
_claimed: dict[Path, tuple] = {}  # folder -> (open lock file, folders that claiming it made)


def claim_output(output_dir: str, stem: str, world: World) -> Path:
    """The folder of this run, made and locked by rank 0: --output_dir; after an elastic restart the newest
    output/STEM-NNN; else the next free one, taken by making it, so no two runs share one.

    Raises ConfigError on all ranks where it cannot be made, or another run is at work in it.
    """
    restarted = any(gather(world, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))
    out = Path(output_dir).absolute() if output_dir else None
    with together(world):
        try:
            str(out).encode()
        except UnicodeEncodeError:
            fix = "another folder, or LC_ALL=C.UTF-8"
            raise ConfigError(
                f"--output_dir {ascii(output_dir)} is no text in this locale (fix: {fix})"
            ) from None
        if world.rank == 0:
            numbered = sorted(Path("output").glob(f"{stem}-[0-9][0-9][0-9]")) if restarted else []
            out = out or (numbered[-1].absolute() if numbered else None)
            try:
                out = _claim(out, stem)
            except (OSError, RuntimeError) as error:
                what = f"--output_dir {out or 'output'}: {getattr(error, 'strerror', None) or error}"
                raise ConfigError(f"{what} (fix: another folder)") from None
    out = broadcast(world, out)
    # NCCL's flight recorder: a collective that times out leaves here which rank was in which.
    flights = {"BUFFER_SIZE": "2000", "DUMP_TEMP_FILE": f"{out}/hang_rank_"}
    os.environ.update({f"TORCH_FR_{key}": value for key, value in flights.items()})
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    return out


def releases_output(main):
    """Decorate a recipe's main: however it ends, its claim ends, and a folder that is still empty goes."""

    @wraps(main)
    def released(cfg):
        try:
            return main(cfg)
        finally:
            _release()

    return released


def _release() -> None:
    while _claimed:
        out, (lock, made) = _claimed.popitem()
        with suppress(OSError):
            (out / ".lock").unlink()
            for folder in made:
                folder.rmdir()
        lock.close()


def holds_run(out: Path | None) -> bool:
    """Whether a folder has anything of an earlier run."""
    return out is not None and any((out / name).exists() for name in RUN_FILES)


def start_run(out: Path, cfg: object, planned: dict) -> int:
    """Keep the settings and the plan of this start, on rank 0; which start of the run it is, from 1.

    config.yaml is the first one's, config_002.yaml and so on are those of later ones.
    """
    run = 1 + len([*out.glob("config.yaml"), *out.glob("config_[0-9][0-9][0-9].yaml")])
    save_config(cfg, out / ("config.yaml" if run == 1 else f"config_{run:03d}.yaml"))
    write_plan(out, planned)
    return run


def write_plan(out: Path, planned: dict, measured: dict | None = None) -> None:
    """Write plan.json in one go; `measured` marks the run as finished."""
    content = {"planned": planned} | ({"measured": measured} if measured else {})
    temporary = out / ".plan.json.tmp"
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, out / "plan.json")


def _claim(out: Path | None, stem: str) -> Path:
    number = 0
    while out is None:
        number += 1
        free = Path("output", f"{stem}-{number:03d}").absolute()
        with suppress(FileExistsError):
            made = [folder for folder in (free, free.parent) if not folder.exists()]
            free.mkdir(parents=True)
            out = free
    else:
        made = [folder for folder in (out, *out.parents) if not os.path.lexists(folder)]
        out.mkdir(parents=True, exist_ok=True)
    lock = open(out / ".lock", "a+")  # noqa: SIM115 - it stays open, and is locked, until the process ends
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel undoes it, however the process ends
        if not os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
            raise BlockingIOError  # who had it has just removed it
    except BlockingIOError:
        lock.seek(0)
        who = lock.read() or "another run"
        raise ConfigError(f"--output_dir {out} is in use by {who} (fix: wait, or another folder)") from None
    except OSError:  # a file system without locks
        pass
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {host_name()}")
    lock.flush()
    _claimed[out] = lock, made
    return out
