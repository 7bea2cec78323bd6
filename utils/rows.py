"""A .jsonl file -> rows, every line checked."""

import itertools
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from .errors import ConfigError, check
from .formats import json_name
from .strict_json import parse_json


class Row(NamedTuple):
    where: str  # "chat.jsonl:3", or "chat.json row 3"
    data: dict


def read_jsonl(path: Path, max_rows: int = 0) -> list[Row]:
    """The objects of a file, one a line; blank lines are skipped. See collect."""
    check_file(path)
    with path.open("rb") as file:
        return collect(path, read_lines(file, path), max_rows)


def collect(name: object, found: Iterable[tuple[str, object]], max_rows: int = 0) -> list[Row]:
    """The rows among (where, the value or a ValueError).

    max_rows: stop after so many; 0: read them all. ConfigError lists up to ten bad rows, one a line.
    """
    rows, errors = [], []
    for where, value in itertools.islice(found, max_rows or None):
        if isinstance(value, dict):
            rows.append(Row(where, value))
        elif isinstance(value, ValueError):
            errors.append(f"{where}: {value}")
        else:
            errors.append(f"{where}: expected object, got {json_name(value)}")
    raise_all(errors)
    check(rows, f"{name}: no rows; a .jsonl file holds one object a line, a .json file an array of objects")
    return rows


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


def read_lines(file: Iterable[bytes], path: Path) -> Iterator[tuple[str, object]]:
    """(where, the value or a ValueError) of each line. Lines end at \\n alone: U+2028 and U+0085 are text."""
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if number == 1 and (line.strip() == b"{" or line.startswith(b"[")):
            raise ConfigError(f"{where}: not one object a line; an array belongs in a .json file")
        try:
            yield where, parse_json(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except ValueError as error:
            yield where, error


def raise_all(errors: list[str]) -> None:
    """Raise ConfigError with the first ten of some errors, if there are any."""
    more = [f"and {len(errors) - 10} more"] if len(errors) > 10 else []
    check(not errors, "\n".join(errors[:10] + more))
