"""Files that others may have prepared: opened only where that cannot hang, eat memory or reach elsewhere.

What is read whole must be a regular file (a pipe waits for ever, /dev/zero never ends) and not larger than
its kind has any reason to be. What a run writes is opened without following links: one that somebody planted
in a run folder would lead the run to a file of the user's outside of it.
"""

import difflib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from .errors import ConfigError, check
from .units import MIB

AGAIN = "(fix: download the folder again)"

# Bytes of what is read whole. Published configs have up to 2 MB (21,000 labels), tokenizers up to 60 MB, and
# indexes of the largest models 20 MB.
CONFIG_BYTES, INDEX_BYTES, TOKENIZER_BYTES, TEXT_BYTES = 4 * MIB, 64 * MIB, 128 * MIB, 256 * MIB
TEMPLATE_BYTES = MIB
# Values of a JSON file, since an empty list of three bytes takes a hundred in memory.
CONFIG_VALUES, MOST_VALUES, DEEPEST = 200_000, 8_000_000, 60
LINK = "is a link, which could lead a run to overwrite what it means"
UNLINK = "(fix: remove it, or another --output_dir)"

# What a run writes into its folder. A folder named in DEEP is looked through: all in it is the run's.
OWN_FILES = re.compile(
    r"\.lock|config(_[0-9]{3})?\.yaml|metrics\.jsonl|plan\.json|bad_rows\.jsonl|hang_rank_.*"
)
OWN_FOLDERS, DEEP = ("checkpoints", "model", "adapter", "profile", "tensorboard", "wandb"), 3


def open_regular(path: Path | str, name: str = "") -> IO[bytes]:
    """A regular file, links followed, open to be read. ConfigError for anything else, without waiting for it;
    OSError where it is not there or may not be read. name: what the error calls it.
    """
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        regular = stat.S_ISREG(mode)  # to open a device may already do something
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) if regular else -1
    except ValueError as error:  # a NUL in a name that stands in a file
        raise ConfigError(f"{name or path}: {error}") from None
    check(regular, f"{name or path}: not a regular file (fix: a plain file in its place)")
    file = os.fdopen(fd, "rb")
    if not stat.S_ISREG(os.fstat(fd).st_mode):  # it was changed meanwhile
        file.close()
        raise ConfigError(f"{name or path}: not a regular file (fix: a plain file in its place)")
    return file


def read_small_file(path: Path | str, limit: int, name: str = "") -> bytes:
    """All bytes of a regular file. ConfigError names the file, or `name`, where it cannot be read, or has
    more than `limit` bytes.
    """
    try:
        with open_regular(path, name) as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(f"{name or path}: {error.strerror}") from None
    check(len(content) <= limit, f"{name or path}: more than {_size(limit)} (fix: the right file)")
    return content


def read_small_text(path: Path | str, limit: int, name: str = "", encoding: str = "utf-8") -> str:
    """The text of a file, as read_small_file reads it, with \\n for every line's end."""
    try:
        text = read_small_file(path, limit, name).decode(encoding)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name or path}: no text in {encoding}: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_small_json(path: Path | str, limit: int, values: int = CONFIG_VALUES) -> object:
    """The value in a JSON file, as read_small_file reads it. ValueError, with the words for the user, where
    it is not JSON, nested too deeply, or holds more than `values` values.
    """
    text = read_small_file(path, limit)
    if text.count(b",") + text.count(b"[") + text.count(b"{") > values:
        raise ValueError(f"more than {values:,} values")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("not JSON: nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError(impostor(text) or "not JSON: not UTF-8") from None
    except ValueError as error:
        raise ValueError(impostor(text) or f"not JSON: {error}") from None
    if depth(value) > DEEPEST:
        raise ValueError(f"nested more than {DEEPEST} deep")
    return value


def depth(value: object) -> int:
    """How many lists and objects stand in each other, at most."""
    level, deep = [value], 0
    while level := [v for v in level if isinstance(v, dict | list)]:
        deep += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return deep


def own_opener(name: str, flags: int) -> int:
    """For open(): the last part of the name may not be a link, and nothing is waited for."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def open_own(path: Path | str, mode: str) -> IO:
    """As open(path, mode), for a file of a run folder: it is never reached through a link, and is regular."""

    try:
        encoding = None if "b" in mode else "utf-8"
        file = open(path, mode, opener=own_opener, encoding=encoding)  # noqa: SIM115 - the caller closes it
    except OSError as error:
        check(error.errno != errno.ELOOP, f"{path} {LINK} {UNLINK}")
        check(
            error.errno not in (errno.ENXIO, errno.ENODEV), f"{path}: not a regular file {UNLINK}"
        )
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(f"{path}: not a regular file {UNLINK}")
    return file


def replace_file(path: Path, text: str, sync: Callable[[Path], None] = lambda _: None) -> None:
    """Write a file of a run folder in one go: it is complete, as it was, or absent. sync: called with the
    temporary file, whose name nobody can guess, before it is renamed.
    """
    check_not_linked(path)
    temporary = path.with_name(f".tmp_{path.name}_{secrets.token_hex(8)}")
    try:
        with open_own(temporary, "x") as file:
            file.write(text)
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def check_not_linked(path: Path) -> None:
    """Raise ConfigError where a link stands in the place of something that a run will write."""
    check(not path.is_symlink(), f"{path} {LINK} {UNLINK}")


def check_own_files(out: Path) -> None:
    """Refuse a run folder in which a link, or anything else but a file or a folder, stands where the run
    writes. `out` itself may be a link: the user chose it.
    """
    for entry in os.scandir(out):
        if entry.name in OWN_FOLDERS:
            check(not entry.is_symlink(), f"{entry.path} {LINK} {UNLINK}")
            check(entry.is_dir(), f"{entry.path}: not a folder {UNLINK}")
            # these are replaced whole; wandb has links
            if entry.name not in ("model", "adapter", "wandb"):
                _check_tree(entry.path, DEEP)
        elif OWN_FILES.fullmatch(entry.name):
            _check_file(entry)


def _check_tree(folder: str, deep: int) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            if deep:
                _check_tree(entry.path, deep - 1)
        else:
            _check_file(entry)


def _check_file(entry: os.DirEntry) -> None:
    check(not entry.is_symlink(), f"{entry.path} {LINK} {UNLINK}")
    check(entry.is_file(follow_symlinks=False), f"{entry.path}: not a regular file {UNLINK}")


def _size(limit: int) -> str:
    return f"{limit // MIB} MiB" if limit >= MIB else f"{limit:,} bytes"


def did_you_mean(path: Path) -> str:
    """A neighbour of almost the same name, as "; did you mean X?"; else nothing."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, set(names) - {path.name}, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def start_of(file: Path) -> bytes:
    """The first bytes of a regular file."""
    with open_regular(file) as opened:
        return opened.read(100)


def impostor(start: bytes) -> str:
    """What a download often leaves in place of a file."""
    pointer = start.startswith(b"version https://git-lfs")
    page = start.lstrip()[:1] == b"<" and "an HTML page, not the file itself"
    return "a git-lfs pointer, not the file itself; try `git lfs pull`" if pointer else page or ""


def file_inside(folder: Path, name: str) -> Path:
    """folder/name, if that is a regular file within the folder. Opens nothing: a pipe would wait forever.

    In the Hugging Face cache, files in models--x--y/snapshots/<revision> link to models--x--y/blobs: inside.
    """
    name = name.replace("\0", "\\0")
    root = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(root / name))
    cached = root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")
    written = not os.path.isabs(name) and Path(os.path.normpath(root / name)).is_relative_to(root)
    inside = written and (cached or real.is_relative_to(root))
    check(
        inside,
        f"{folder}: {name!r} leads out of the folder, and was not opened (fix: a copy inside it)",
    )
    check(real.is_file(), f"{folder}: {name} is missing, or not a regular file {AGAIN}")
    return Path(folder) / name
