"""A .jsonl file -> rows, every line checked."""

import codecs
import itertools
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ..run.errors import ConfigError, check
from ..run.files import did_you_mean, impostor
from .formats import json_name
from .strict_json import parse_json

LONGEST = 2**26  # bytes of a line
MOST_ERRORS = 10  # different faults of rows, then reading ends
MORE_ROWS = 100_000  # that are read after the first fault, to count others with the same one
NO_ROWS = "no rows; a .jsonl file holds one object a line, a .json file an array of objects"


Found = Iterator[tuple[str, object]]


class BadRows(ConfigError):
    """Rows that are wrong: the same text for the same bytes, whoever reads them."""


class Unreadable(ValueError):
    """A fault after which the rest of a file cannot be read: no such row can be left out."""


class Source(NamedTuple):
    """One of the names in --dataset."""

    name: str
    weight: float  # 0: none is given
    files: list  # that its rows come from
    read: Callable[[], Found]  # (where, row) one by one, from the first


class Faults:
    """What is wrong with some rows. The same fault of many rows is one line: the first row, and how many."""

    def __init__(self):
        # kind of fault -> [number of the first row, its line, rows]
        self.found: dict[str, list] = {}

    def __len__(self) -> int:
        return len(self.found)

    def add(self, number: int, where: str, fault: object, rows: int = 1) -> None:
        """number: counts the rows, so that the first comes first."""
        kind = re.sub(r"\d[\d,]*", "0", re.sub(r"'[^']*'|\"[^\"]*\"", "''", str(fault)))
        self._take(kind, number, f"{where}: {fault}", rows)

    def join(self, other: "Faults", before: int) -> None:
        """Take in those of later rows, before which there are so many."""
        for kind, (number, line, rows) in other.found.items():
            self._take(kind, before + number, line, rows)

    def _take(self, kind: str, number: int, line: str, rows: int) -> None:
        first = self.found.setdefault(kind, [number, line, 0])
        first[2] += rows
        if number < first[0]:
            first[:2] = number, line

    def first(self) -> int:
        """The number of the first row with a fault."""
        return min(number for number, _, _ in self.found.values())

    def lines(self) -> list[str]:
        """Up to ten, in the order of the rows."""
        more = {1: "", 2: " (and 1 more row)"}
        found = sorted(self.found.values())[:MOST_ERRORS]
        return [line + more.get(rows, f" (and {rows - 1:,} more rows)") for _, line, rows in found]

    def stop(self, rows: int) -> bool:
        """Whether it is enough, so many rows having been read."""
        return len(self) >= MOST_ERRORS or bool(self.found) and rows - self.first() > MORE_ROWS

    def raise_all(self, rows: int = 0) -> None:
        """Raise BadRows, if there are any. rows: that were read."""
        more = ["and perhaps more: nothing was read after that"] if self.stop(rows) else []
        if self.found:
            raise BadRows(self.lines() + more)


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


def read_file(path: Path) -> Found:
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
        raise ConfigError(f"{path}: {error.strerror}{did_you_mean(path)}") from None
    if head[:1] not in (b"[", b"{", b""):
        what = impostor(head)
        check(not what, f"{path}:1: {what}")


def read_lines(file: BinaryIO, path: Path) -> Found:
    """(where, bytes) of each line that is not blank. Lines end at \\n alone: U+2028 and U+0085 are text."""
    for number in itertools.count(1):
        line = file.readline(LONGEST + 1)
        where = f"{path}:{number}"
        check(len(line) <= LONGEST, f"{where}: a line of more than {LONGEST >> 20} MiB")
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8) or b" "[: len(line)]
            if line.strip() == b"{" or line.startswith(b"["):
                raise ConfigError(
                    f"{where}: not one object a line; an array belongs in a .json file"
                )
        if not line:
            return
        if line.strip():
            yield where, line


class Origin(NamedTuple):
    """A source and what became of its rows."""

    name: str
    weight: float  # 0: none is given
    forms: dict[str, str]  # of its files
    first: int  # its examples are those from this one ...
    last: int  # ... to the one before this


def origins_of(sources: list[Source], ends: list[int], forms: dict[str, str]) -> list[Origin]:
    """Sources with their examples: those of each end where ends[i] says. forms: of all files."""
    origins = []
    for source, first, last in zip(sources, [0, *ends], ends, strict=False):
        names = [str(file) for file in source.files]
        mine = {name: forms[name] for name in names if name in forms}
        mine = mine or {name: form for name, form in forms.items() if name == source.name}
        origins.append(Origin(source.name, source.weight, mine, first, last))
    return origins
