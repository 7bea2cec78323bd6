"""Files -> rows, every row checked; rows -> examples, and the global batches that define a run.

The order of a run is a pure function of (fingerprint, seed, step): global batch k of an epoch is rows
[k G, (k + 1) G) of the epoch's permutation, however many ranks and micro-batches share it (house.md, section 2).
"""

import difflib
import hashlib
import json
import math
import re
import stat
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from .errors import ConfigError, check
from .formats import form_of, json_name, to_messages
from .tokens import IGNORE, encode_chat

_LINE_BYTES = 64 * 2**20  # a longer line is refused before it fills the memory
_ARRAY_BYTES = 2**30  # a .json file is parsed from memory


class Row(NamedTuple):
    where: str  # "chat.jsonl:3", or "chat.json row 3"
    data: dict


class Example(NamedTuple):
    ids: array  # T token ids of 4 bytes; a list of Python integers takes about 36 for each
    labels: array  # T ids where taught, IGNORE elsewhere
    where: str


@dataclass(frozen=True)
class Examples:
    items: list[Example]
    dropped: Counter = field(default_factory=Counter)  # reason -> rows
    truncated: int = field(default=0, kw_only=True)  # rows cut at seq_len and kept

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids and labels in their order: what is learned, wherever the file lies."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(len(item.ids).to_bytes(8, "little") + item.ids.tobytes() + item.labels.tobytes())
        return digest.hexdigest()


# --- files -> rows ---------------------------------------------------------------------------------------------


def parse_json(text: str) -> object:
    """One JSON value and nothing else. ValueError for what Python's json lets pass: NaN, 1e999, a key that stands
    twice, half a surrogate pair; and for nesting that it cannot follow."""
    start = _skip_space(text, 0)
    value, end = _parse_at(text, start)
    if end := _skip_space(text, end) - len(text):
        raise ValueError(_explain(json.JSONDecodeError("more text after the value", text, len(text) + end)))
    return value


def read_rows(path: str | Path, max_rows: int = 0) -> list[Row]:
    """The objects in a .jsonl file (one a line; blank lines are skipped) or in the array of a .json file.

    max_rows: stop after so many; 0: read them all. ConfigError lists up to ten bad rows, one a line.
    """
    _check_file(Path(path))
    rows, errors = [], []
    for where, found in _read_array(path) if str(path).endswith(".json") else _read_lines(path):
        if isinstance(found, dict):
            rows.append(Row(where, found))
        elif isinstance(found, ValueError):
            errors.append(f"{where}: {found}")
        else:
            hint = "; an array belongs in a .json file" if isinstance(found, list) else ""
            errors.append(f"{where}: expected object, got {json_name(found)}{hint}")
        if max_rows and len(rows) + len(errors) >= max_rows:
            break
    _raise_all(errors)
    check(rows, f"{path}: no rows; a .jsonl file holds one JSON object a line, a .json file an array of them")
    return rows


def _read_lines(path: str | Path) -> Iterator[tuple[str, object]]:
    """(where, its value or the ValueError) of each line. Lines end at \\n alone: U+2028 is text."""
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_LINE_BYTES), b""), start=1):
            where = f"{path}:{number}"
            check(len(line) < _LINE_BYTES, f"{where}: longer than {_LINE_BYTES >> 20} MiB; split the row")
            check(
                number > 1 or line.strip() not in (b"{", b"["),
                f"{where}: looks like one JSON value over many lines; a .jsonl file holds one object a line, "
                "an array of objects belongs in a .json file",
            )
            try:
                text = _decode(line, "utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
                found = parse_json(text) if text else None
            except ValueError as error:
                text, found = "bad", error
            if text:
                yield where, found


def _read_array(path: str | Path) -> Iterator[tuple[str, object]]:
    """(where, its value or the ValueError) of each element; the first syntax error is the last element."""
    size = Path(path).stat().st_size
    check(size <= _ARRAY_BYTES, f"{path}: {size >> 20} MiB of JSON in one array; write it as .jsonl, a row a line")
    row = 0
    try:
        text = _decode(Path(path).read_bytes(), "utf-8-sig")
        at = _skip_space(text, 0)
        if at == len(text):
            return
        check(text[at] == "[", f"{path}: expected an array, [...]; name a file with one object a line .jsonl")
        separator, at = ",", _skip_space(text, at + 1)
        if text[at : at + 1] == "]":
            separator, at = "]", at + 1
        while separator == ",":
            row += 1
            value, at = _parse_at(text, _skip_space(text, at))
            at = _skip_space(text, at)
            separator, at = text[at : at + 1], at + 1
            if separator not in (",", "]"):
                raise ValueError(_explain(json.JSONDecodeError("expected , or ]", text, at - 1)))
            yield f"{path} row {row}", value
        check(_skip_space(text, at) == len(text), f"{path}: more text after the array")
    except ValueError as error:
        yield f"{path} row {row}" if row else str(path), error


def _check_file(path: Path) -> None:
    """Refuse what is no readable data file, without opening what would block, like a FIFO."""
    try:
        mode = path.stat().st_mode
        names = [entry.name for entry in path.parent.iterdir()] if stat.S_ISDIR(mode) else []
    except FileNotFoundError:
        names = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(f"{path}: no such file{hint}") from None
    ...
