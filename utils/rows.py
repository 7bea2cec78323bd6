"""A .jsonl file -> rows, every line checked."""

import codecs
import itertools
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import ConfigError, check
from .formats import json_name
from .strict_json import parse_json

LONGEST = 2**26  # bytes of a line
MOST_ERRORS = 10  # errors of rows, then reading ends
NO_ROWS = "no rows; a .jsonl file holds one object a line, a .json file an array of objects"


def as_object(value: object) -> dict:
    """The row in what a file holds: an object, bytes of JSON, or the ValueError that says what is wrong."""
    if isinstance(value, bytes):
        try:
            value = parse_json(value.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: {error}") from None
    if isinstance(value, ValueError):
        raise value
    if not isinstance(value, dict):
        raise ValueError(f"expected object, got {json_name(value)}")
    return value


def read_file(path: Path) -> Iterator[tuple[str, object]]:
    """(where, bytes) of each line that is not blank."""
    check_file(path)
    with path.open("rb") as file:
        yield from read_lines(file, path)


def check_file(path: Path) -> None:
    """Refuse what is no data file, without opening what would block (a FIFO) or never end (a device)."""
    try:
        check(stat.S_ISREG(path.stat().st_mode), f"{path}: is not a regular file")
        with path.open("rb") as file:
            head = file.read(100).lstrip()
    except OSError as error:
        from .diagnose import did_you_mean

        raise ConfigError(f"{path}: {error.strerror}{did_you_mean(path)}") from None
    if head[:1] not in (b"[", b"{", b""):
        from .diagnose import impostor

        what = impostor(head)
        check(not what, f"{path}:1: {what}")


def read_lines(file: BinaryIO, path: Path) -> Iterator[tuple[str, object]]:
    """(where, bytes) of each line that is not blank. Lines end at \\n alone: U+2028 and U+0085 are text."""
    for number in itertools.count(1):
        line = file.readline(LONGEST + 1)
        where = f"{path}:{number}"
        check(len(line) <= LONGEST, f"{where}: a line of more than {LONGEST >> 20} MiB")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8) or b" "[: len(line)]
            if line.strip() == b"{" or line.startswith(b"["):
                raise ConfigError(f"{where}: not one object a line; an array belongs in a .json file")
        if not line:
            return
        if line.strip():
            yield where, line


def raise_all(errors: list[str]) -> None:
    """Raise ConfigError with the first ten of some errors, if there are any."""
    more = ["and perhaps more: nothing was read after that"] if len(errors) >= MOST_ERRORS else []
    check(not errors, "\n".join(errors[:MOST_ERRORS] + more))
