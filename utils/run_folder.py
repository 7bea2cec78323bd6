"""The run folder: which one, what it already holds, and its plan.json.

    OUT/config.yaml  OUT/metrics.jsonl  OUT/checkpoints/  OUT/model/  OUT/plan.json

A run is finished when its plan.json says what was measured. Nothing that a folder holds is overwritten.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

from .distributed import World, broadcast, together
from .errors import ConfigError

RUN_FILES = ("config.yaml", "metrics.jsonl", "plan.json", "checkpoints", "model", "adapter")


def find_output(output_dir: str, stem: str, world: World) -> Path | None:
    """The folder named by --output_dir; after an elastic restart the newest output/STEM-NNN; else None: a new
    one.
    """
    if output_dir:
        return Path(output_dir).absolute()
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    numbered = sorted(Path("output").glob(f"{stem}-[0-9][0-9][0-9]")) if restarted else []
    return broadcast(world, numbered[-1].absolute() if numbered else None)


def holds_run(out: Path | None) -> bool:
    """Whether a folder has anything of an earlier run."""
    return out is not None and any((out / name).exists() for name in RUN_FILES)


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
