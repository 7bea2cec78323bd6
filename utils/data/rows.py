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
MOST_ERRORS = 10  # different faults of rows; then reading ends
MORE_ROWS = 100_000  # rows that are read after the first fault, to count others with the same fault
NO_ROWS = "no rows; a .jsonl file holds one object a line, a .json file an array of objects"

# (where, the row as an object, as bytes of JSON, or as the ValueError that says what is wrong)
Found = Iterator[tuple[str, object]]


class BadRows(ConfigError):
    """Rows that are wrong. The text is the same for the same bytes, on every rank."""


class Unreadable(ValueError):
    """A fault after which the file cannot be read further, so that the row alone cannot be left out."""


class Source(NamedTuple):
    """One of the names in --dataset."""

    name: str
    weight: float  # 0: none is set
    files: list[Path]  # from which its rows come
    read: Callable[[], Found]  # (where, row) one by one, from the first


class Faults:
    """What is wrong with some rows. The same fault of many rows is one line: the first row, and how many."""

    def __init__(self):
        # kind of fault -> [number of its first row, the line about that row, number of rows]
        self.found: dict[str, list] = {}

    def __len__(self) -> int:
        return len(self.found)

    def add(self, number: int, where: str, fault: object, rows: int = 1) -> None:
        """number: of the row, so that the lines are in the order of the rows."""
        without_quotations = re.sub(r"'[^']*'|\"[^\"]*\"", "''", str(fault))
        kind = re.sub(r"\d[\d,]*", "0", without_quotations)
        self._count(kind, number, f"{where}: {fault}", rows)

    def join(self, faults: "Faults", rows_before: int) -> None:
        """Add the faults of later rows. rows_before: the number of rows before those."""
        for kind, (number, line, rows) in faults.found.items():
            self._count(kind, rows_before + number, line, rows)

    def _count(self, kind: str, number: int, line: str, rows: int) -> None:
        counted = self.found.setdefault(kind, [number, line, 0])
        counted[2] += rows
        first_number, _, _ = counted
        if number < first_number:
            counted[:2] = number, line

    def first(self) -> int:
        """The number of the first row with a fault."""
        return min(number for number, _, _ in self.found.values())

    def lines(self) -> list[str]:
        """Up to ten, in the order of the rows."""
        lines = []
        for _, line, rows in sorted(self.found.values())[:MOST_ERRORS]:
            if rows == 2:
                line += " (and 1 more row)"
            elif rows > 2:
                line += f" (and {rows - 1:,} more rows)"
            lines.append(line)
        return lines

    def stop(self, rows: int) -> bool:
        """Whether to stop reading. rows: read so far."""
        if len(self) >= MOST_ERRORS:
            return True
        return bool(self.found) and rows - self.first() > MORE_ROWS

    def raise_all(self, rows: int = 0) -> None:
        """Raise BadRows if there is any fault. rows: read so far."""
        if not self.found:
            return
        lines = self.lines()
        if self.stop(rows):
            lines.append("and perhaps more: nothing was read after that")
        raise BadRows(lines)


def as_object(value: object) -> dict:
    """The row in a value of Found. ValueError where it is none."""
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
        reason = impostor(head)
        check(not reason, f"{path}:1: {reason}")


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
    """A source and its examples, [first, last)."""

    name: str
    weight: float  # 0: none is set
    forms: dict[str, str]  # of its files
    first: int
    last: int


def origins_of(sources: list[Source], ends: list[int], forms: dict[str, str]) -> list[Origin]:
    """The sources with their examples. ends[i]: the end of source i's examples; forms: of all files."""
    origins = []
    for source, first, last in zip(sources, [0, *ends], ends, strict=False):
        names = [str(file) for file in source.files]
        forms_of_files = {name: forms[name] for name in names if name in forms}
        if not forms_of_files and source.name in forms:  # a data set without files of its own
            forms_of_files = {source.name: forms[source.name]}
        origins.append(Origin(source.name, source.weight, forms_of_files, first, last))
    return origins
