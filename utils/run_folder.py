"""The run folder: which one, what it already holds, and its plan.json.

    OUT/config.yaml  OUT/metrics.jsonl  OUT/checkpoints/  OUT/model/  OUT/plan.json

A run is finished when its plan.json says what was measured. Nothing that a folder holds is overwritten.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from .checkpoint import newest_checkpoint, read_state
from .distributed import World, broadcast, together
from .errors import ConfigError, check

RUN_FILES = ("config.yaml", "metrics.jsonl", "plan.json", "checkpoints", "model")


def find_output(output_dir: str, stem: str, world: World) -> Path | None:
    """The folder named by --output_dir; after an elastic restart the newest output/STEM-NNN; else None: a new
    one.
    """
    if output_dir:
        return Path(output_dir).absolute()
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    numbered = sorted(Path("output").glob(f"{stem}-[0-9][0-9][0-9]")) if restarted else []
    return broadcast(world, numbered[-1].absolute() if numbered else None)


def claim_output(out: Path | None, stem: str, world: World) -> Path:
    """Create the run folder on rank 0. None: the next free output/STEM-NNN, taken by making it, so no two
    runs share one.
    """
    with together(world):
        if world.rank == 0:
            try:
                out = _make_folder(out, stem)
            except OSError as error:
                what = f"--output_dir {out or 'output'}: {error.strerror}"
                raise ConfigError(f"{what} (fix: another folder)") from None
    return broadcast(world, out)


def find_checkpoint(resume: str, out: Path | None) -> tuple[Path | None, dict]:
    """(checkpoint to continue from, its state), or (None, {}) for a fresh start.

    resume: auto continues what `out` holds, none refuses an `out` that holds a run, else the path of a
    checkpoint.
    """
    holds_run = out is not None and any((out / name).exists() for name in RUN_FILES)
    if resume == "none":
        check(not holds_run, f"--resume none, but {out} holds a run (fix: another --output_dir)")
        return None, {}
    if resume == "auto":
        found = newest_checkpoint(out / "checkpoints") if holds_run else None
    else:
        found = Path(resume).absolute()
        if (found / "checkpoints").is_dir():
            found = newest_checkpoint(found / "checkpoints") or found
        complete = found.is_dir() and (found / "state.json").exists() and (found / ".metadata").exists()
        fix = "a folder like OUT/checkpoints/step_00000500"
        check(complete, f"--resume {resume}: there is no complete checkpoint (fix: {fix})")
    return (found, read_state(found)) if found else (None, {})


def finished_at(out: Path | None) -> int:
    """The number of steps after which the run in `out` finished; 0: it has not."""
    path = out / "plan.json" if out else None
    if path is None or not path.exists():
        return 0
    try:
        return json.loads(path.read_text()).get("measured", {}).get("steps", 0)
    except ValueError:
        raise ConfigError(f"{path}: not JSON (fix: remove it, or another --output_dir)") from None


def differences(old: dict, new: dict, but: tuple[str, ...] = ()) -> str:
    """The fields that differ, as "lr 2e-05 -> 1e-05, ..."; "" when none does."""
    changed = [k for k in new if k not in but and old.get(k) != new[k]]
    return ", ".join(f"{k} {old.get(k)} -> {new[k]}" for k in changed)


def write_plan(out: Path, planned: dict, measured: dict | None = None) -> None:
    """Write plan.json in one go; `measured` marks the run as finished."""
    content = {"planned": planned} | ({"measured": measured} if measured else {})
    temporary = out / ".plan.json.tmp"
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(temporary, out / "plan.json")


def _make_folder(out: Path | None, stem: str) -> Path:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        return out
    number = 0
    while True:
        number += 1
        out = Path("output", f"{stem}-{number:03d}").absolute()
        with suppress(FileExistsError):
            out.mkdir(parents=True)
            return out
