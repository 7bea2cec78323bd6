"""Write so that nothing that existed is lost: space is checked, errors are one line, files are whole."""

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


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in one line what the file system refused."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
        full = full or "(os error 28)" in str(error)  # tokenizers raises a bare Exception
        if not full and not isinstance(error, OSError):
            raise
        what = "no space left" if full else getattr(error, "strerror", None) or error
        room = ", or make room" if full else ""
        raise ConfigError(f"{path}: {what} (fix: another --output_dir{room})") from None


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
    for path in filter(lambda path: ours.fullmatch(path.name), out.parent.glob(".*")):
        shutil.rmtree(path, ignore_errors=True)
        if kind == ".tmp":
            say(f"removed {path}, which a run that died left behind")


def check_replaceable(out: Path, source: Path | None) -> None:
    """A save replaces the whole folder: not the source model's, and none that is not a model's."""
    mine = (os.path.realpath(out), os.path.realpath(out.parent))
    reads = source is not None and os.path.realpath(source) in mine
    check(
        not reads, f"{source} is the folder that the model is read from (fix: another --output_dir)"
    )
    check_not_linked(out)
    free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    model = free or (out / "config.json").exists()
    check(
        model, f"{out} is no model folder, and a save would replace it (fix: another --output_dir)"
    )


def check_space(folder: Path, needed_bytes: int, world: World = ALONE) -> None:
    """Raise ConfigError unless the disk has room.

    Where all ranks of a `world` call it, rank 0 reads the free space for all of them: two readings of a busy
    disk differ, and the error would come once for each.
    """
    free_bytes = _free_bytes(folder) if world.rank == 0 else 0
    free_bytes = broadcast(world, free_bytes)
    sizes = f"need {needed_bytes / GIB:.3f} GiB, have {free_bytes / GIB:.3f} GiB"
    text = f"no space left: {sizes} at {folder} (fix: another --output_dir, or make room)"
    if needed_bytes > free_bytes:
        raise ConfigError(text, agreed=world is not ALONE)


def _free_bytes(folder: Path) -> float:
    """Without a limit where the file system does not say it, as some of a network do not."""
    try:
        disk = os.statvfs(folder)
    except OSError:
        return math.inf
    return disk.f_bavail * disk.f_frsize if disk.f_blocks else math.inf
