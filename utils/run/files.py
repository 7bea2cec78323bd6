"""Open files of a downloaded folder only inside it; write files completely or not at all."""

import difflib
import errno
import os
import re
import secrets
import shutil
from contextlib import contextmanager
from pathlib import Path

from .errors import ConfigError, check

AGAIN = "(fix: copy or download the folder again)"


def did_you_mean(path: Path) -> str:
    """A file of almost the same name in the same folder, as "; did you mean X?"; "" if there is none, or if
    the path exists.
    """
    near = difflib.get_close_matches(path.name, {file.name for file in path.parent.glob("*")})
    return f"; did you mean {path.with_name(near[0])}?" if near and not path.exists() else ""


def impostor(start: bytes) -> str:
    """What a download left in place of a file, judged by its first bytes: a git-lfs pointer or an HTML
    page. "" if neither.
    """
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself; try `git lfs pull`"
    return "an HTML page, not the file itself" if start.lstrip().startswith(b"<") else ""


def file_inside(folder: Path, name: str) -> Path:
    """folder/name. ConfigError unless it is a regular file inside the folder, also after links are followed.

    In the Hugging Face cache, files in models--x--y/snapshots/<revision> are links to models--x--y/blobs,
    which counts as inside.
    """
    name = name.replace("\0", "\\0")
    root = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(root / name))
    cached = root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")
    # The name itself, before links are followed, leads into the folder.
    inside = not os.path.isabs(name) and Path(os.path.normpath(root / name)).is_relative_to(root)
    check(
        inside and (cached or real.is_relative_to(root)),
        f"{folder}: {name!r} leads out of the folder, and was not opened (fix: a copy inside it)",
    )
    check(
        real.is_file(),
        f"{folder}: {name} is missing, or not a regular file (fix: copy the folder again; hf download OWNER"
        "/NAME --local-dir DIR; of a run, model/ or adapter/; of a checkpoint, generate.py --checkpoint; an"
        " adapter in .bin: peft's save_pretrained; a GGUF file: its model in safetensors)",
    )
    return folder / name


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: whatever happens, it is complete, as it was before, or absent, also after the
    machine has lost its power.
    """
    temporary = path.with_name(f".tmp_{path.name}_{secrets.token_hex(8)}")
    try:
        temporary.write_text(text, "utf-8")
        sync_path(temporary)  # a disk may take a new name earlier than what the file holds
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path, fix="another --output_dir"):
    """Turn an error of the file system while `path` is written into one ConfigError with a remedy."""
    try:
        yield
    except Exception as error:
        # tokenizers raises a plain Exception, with the number only in its text.
        number = getattr(error, "errno", 0)
        full = number in (errno.ENOSPC, errno.EDQUOT) or "(os error 28)" in str(error)
        if not full and not isinstance(error, OSError):
            raise
        reason = "no space left" if full else error.strerror or error
        room = ", or make room" if full else ""
        raise ConfigError(f"{path}: {reason} (fix: {fix}{room})") from None


def drop_half_line(path: Path) -> None:
    """Remove a last line that a kill or a full disk cut, perhaps within a character, if the file exists."""
    if path.exists():
        os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def publish(temp: Path, out: Path) -> None:
    """Move the folder `temp` to `out`. `out` is never half a folder, and the old one is deleted only when the
    new one is in place.
    """
    for path in (*temp.iterdir(), temp):
        sync_path(path)
    if out.exists():
        out.rename(out.with_name(temp.name.replace(".tmp", ".old", 1)))
    temp.rename(out)
    sync_path(out.parent)
    remove_siblings(out, ".old")


def remove_siblings(out: Path, kind: str) -> None:
    """Delete hidden folders beside `out`. kind .tmp: temporary folders of saves that were killed; .old:
    former models that a save moved aside.
    """
    for path in out.parent.glob(".*"):
        if re.fullmatch(re.escape(f"{kind}_{out.name}_") + "[0-9a-f]{8}", path.name):
            shutil.rmtree(path, ignore_errors=True)


def check_replaceable(out: Path, source: Path | None) -> None:
    """Raise ConfigError unless a save may replace the whole folder `out`: it is absent, empty or a model
    folder, and neither `out` nor its parent is `source`, the folder that the model is read from.
    """
    check(
        not source or os.path.realpath(source) not in map(os.path.realpath, (out, out.parent)),
        f"{source} is the folder that the model is read from (fix: another --output_dir)",
    )
    empty = out.is_dir() and not any(out.iterdir())
    check(
        not os.path.lexists(out) or empty or (out / "config.json").exists(),
        f"{out} is no model folder, and a save would replace it (fix: another --output_dir)",
    )
