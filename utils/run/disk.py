"""Write so that nothing is lost that existed: space is checked, errors are one line, files are whole."""

import errno
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .distributed import ALONE, World, broadcast
from .errors import ConfigError, check, say
from .files import check_not_linked
from .units import GIB

FULL = (errno.ENOSPC, errno.EDQUOT)
IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in one line what the file system refused while `path` was written, and what helps against it."""
    try:
        yield
    except Exception as error:
        full = is_full(error)
        if not full and not isinstance(error, OSError):
            raise
        reason = "no space left" if full else error.strerror or error
        raise ConfigError(f"{path}: {reason} (fix: {output_fix(error)})") from None


def is_full(error: Exception) -> bool:
    """Whether a disk, or the user's share of it, is full."""
    # tokenizers raises a bare Exception.
    return getattr(error, "errno", 0) in FULL or "(os error 28)" in str(error)


def output_fix(error: Exception) -> str:
    """What helps where an output folder cannot be written: room only where there is none."""
    if is_full(error):
        return "another --output_dir, or make room"
    if getattr(error, "errno", 0) in IN_THE_WAY:
        return "another --output_dir, or move the file that is in the way"
    return "another --output_dir"


def publish(temp: Path, out: Path) -> None:
    """Put temp in the place of out: never half a folder, and the old one goes when the new one is there."""
    for path in (*temp.iterdir(), temp):
        sync_path(path)
    old = out.with_name(temp.name.replace(".tmp", ".old", 1))
    if out.exists():
        os.rename(out, old)
    os.rename(temp, out)
    sync_path(out.parent)
    remove_siblings(out, ".old")


def sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def remove_siblings(out: Path, kind: str) -> None:
    """Temporary folders (.tmp) that killed saves left beside `out`; models (.old) that they had set aside."""
    ours = re.compile(re.escape(f"{kind}_{out.name}_") + "[0-9a-f]{8}")
    for path in out.parent.glob(".*"):
        if not ours.fullmatch(path.name):
            continue
        shutil.rmtree(path, ignore_errors=True)
        if kind == ".tmp":
            say(f"removed {path}, which a run that died left behind")


def check_replaceable(out: Path, source: Path | None) -> None:
    """Raise ConfigError unless a save may replace the whole folder: it is absent, empty or a model's, and not
    the source of this model.
    """
    fix = "another --output_dir"
    written = (os.path.realpath(out), os.path.realpath(out.parent))
    is_source = source is not None and os.path.realpath(source) in written
    check(not is_source, f"{source} is the folder that the model is read from (fix: {fix})")
    check_not_linked(out)
    absent = not os.path.lexists(out)
    empty = out.is_dir() and not any(out.iterdir())
    replaceable = absent or empty or (out / "config.json").exists()
    check(replaceable, f"{out} is no model folder, and a save would replace it (fix: {fix})")


def check_space(folder: Path, needed_bytes: int, world: World = ALONE) -> None:
    """Raise ConfigError unless the disk has room.

    Where all ranks of a `world` call it, rank 0 reads the free space for all of them: two readings of a busy
    disk differ, and the error would be printed once for each.
    """
    free_bytes = _free_bytes(folder) if world.rank == 0 else 0
    free_bytes = broadcast(world, free_bytes)
    sizes = f"need {needed_bytes / GIB:.3f} GiB, have {free_bytes / GIB:.3f} GiB"
    text = f"no space left: {sizes} at {folder} (fix: another --output_dir, or make room)"
    if needed_bytes > free_bytes:
        raise ConfigError(text, agreed=world is not ALONE)


def _free_bytes(folder: Path) -> float:
    """Infinite where the file system does not tell, as some network file systems do not."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return math.inf
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else math.inf
