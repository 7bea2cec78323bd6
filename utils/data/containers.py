"""Rows from everything except one .jsonl file: arrays, .gz, .csv, .parquet, .txt, folders, patterns, data
sets of the hub, and mixtures of several with weights.

CSV: https://docs.python.org/3/library/csv.html. Parquet and data sets: https://huggingface.co/docs/datasets
"""

import csv
import glob
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import NamedTuple, TextIO

from ..run.errors import ConfigError, check, print0
from .formats import form_of
from .rows import (
    LONGEST,
    NO_ROWS,
    Faults,
    Found,
    Source,
    Unreadable,
    as_object,
    check_file,
    read_lines,
)
from .strict_json import DECODER, check_pairs

KINDS = (".jsonl", ".json", ".csv", ".parquet", ".txt", ".md")
SPACE = re.compile(r"[ \t\r\n]*")
HUB_SECONDS = 3  # how long to wait for the hub before its cache is used
BLOCK = 2**20  # characters of an array that are read at a time
NOT_ARRAY = "not an array, [...]; a file with one object a line is a .jsonl file"
LONG_TEXT = 2**20  # characters of a text that are tokenized at a time


class Row(NamedTuple):
    where: str  # "chat.jsonl:3", or "chat.json row 3"
    data: dict


def read_rows(name: str | Path) -> list[Row]:
    """All rows of the data that a flag names, unchanged. ConfigError lists up to ten faults, one a line."""
    rows: list[Row] = []
    faults = Faults()
    number = 0
    for where, value in chain.from_iterable(source.read() for source in find_any(str(name))):
        number += 1
        try:
            rows.append(Row(where, as_object(value)))
        except ValueError as fault:
            faults.add(number, where, fault)
        if faults.stop(number):
            break
    faults.raise_all(number)
    return rows


def find_any(name: str) -> list[Source]:
    """The sources in a name: a file, a folder, a pattern, a data set; or several of them, separated by
    commas, each with a weight: a.jsonl:0.7,b.parquet:0.3.
    """
    parts = [name] if Path(name).exists() else name.split(",")
    matches = [re.fullmatch(r"(.+?)(?::(\d*\.?\d+))?", part.strip()) for part in parts]
    check(all(matches), f"--dataset {name}: one of the names is empty")
    weights = [match[2] for match in matches]
    if any(weights):
        check(
            all(weight and float(weight) > 0 for weight in weights),
            f"--dataset {name}: give every one a weight above 0, or none"
            " (fix: a.jsonl:0.7,b.jsonl:0.3)",
        )
    sources = []
    for match in matches:
        source_name = match[1]
        read, files = open_source(source_name)
        weight = float(match[2] or 0)
        sources.append(Source(source_name, weight, files, partial(_read_all, source_name, read)))
    return sources


def open_source(name: str) -> tuple[Callable[[], Found], list[Path]]:
    """(a function that reads the rows of one name, the files from which they come)."""
    files = files_of(name)
    if files is None:
        return open_data_set(name)
    return lambda: chain.from_iterable(read_file(path) for path in files), files


def _read_all(name: str, read: Callable[[], Found]) -> Found:
    """The rows of a source; ConfigError where there are none."""
    found = read()
    first = next(found, None)
    check(first, f"{name}: {NO_ROWS}")
    yield first
    yield from found


def files_of(name: str) -> list[Path] | None:
    """The files that a name means: a file, or those of a folder or a pattern. None for a data set of the hub
    or of datasets' save_to_disk.

    ConfigError for a folder or a pattern without files, or with files of several kinds.
    """
    path = Path(name)
    if path.is_dir():
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return None  # datasets' save_to_disk wrote it
        visible = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        found = [p for p in visible if kind_of(p) in KINDS]
    elif glob.has_magic(name) and not path.exists():
        found = sorted(Path(p) for p in glob.glob(name, recursive=True) if Path(p).is_file())
    else:
        has_hub_form = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
        if has_hub_form and not path.exists() and not path.suffix:
            return None
        return [path]
    check(found, f"{name}: no {', '.join(KINDS)} files found, nor .gz of them")
    kinds = sorted({kind_of(p) for p in found})
    check(
        len(kinds) == 1,
        f"{name}: files of several kinds, {', '.join(kinds)} (fix: name those of one kind)",
    )
    return found


def kind_of(path: Path) -> str:
    """The suffix that says how to read a file, without .gz."""
    return path.with_suffix("").suffix if path.suffix == ".gz" else path.suffix


def read_file(path: Path) -> Found:
    """(where, the row or a ValueError) of each row."""
    kind = kind_of(path)
    check_file(path)
    check(kind in KINDS, f"{path}: only {', '.join(KINDS)} files can be read, and .gz of them")
    try:
        if kind == ".parquet":
            yield from _read_parquet(path)
            return
        open_file = gzip.open if path.suffix == ".gz" else open
        with open_file(path, "rb") as file:
            if kind == ".jsonl":
                yield from read_lines(file, path)
                return
            text = io.TextIOWrapper(file, "utf-8-sig", newline="" if kind == ".csv" else None)
            if kind == ".json":
                yield from read_array(text, path)
            elif kind == ".csv":
                yield from _read_csv(text, path)
            else:
                yield from _read_text(text, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path}: not gzip, or cut short: {error} (fix: fetch it again)"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None


class TextPart(str):
    """A part of a longer text. first, last: whether the text begins or ends with this part."""

    first = True
    last = True


def _read_text(file: TextIO, path: Path) -> Found:
    """The whole text as one row; a long text as several, cut at the ends of paragraphs."""
    text = ""
    is_first = True
    is_last = False
    while not is_last:
        block = file.read(LONG_TEXT)
        text += block
        is_last = len(block) < LONG_TEXT
        cut = len(text)
        if not is_last and "\n\n" in text:
            cut = text.rfind("\n\n") + 2
        part = TextPart(text[:cut])
        part.first = is_first
        part.last = is_last
        text = text[cut:]
        is_first = False
        if "\0" in part:
            yield str(path), ValueError("a NUL character: no text")
        elif part.strip():
            yield str(path), {"text": part}


def read_array(file: TextIO, path: Path) -> Found:
    """(where, the value or a ValueError) of each element. Nothing is read after a syntax error.

    Only the element that is being read is in memory.
    """
    text = ""
    row = 0
    where = str(path)
    may_grow = True  # whether the file may have more text

    def next_place(at: int) -> int:
        """The place in `text` of the next character at or after `at` that is no space, read on if needed."""
        nonlocal text, may_grow
        at = _skip_space(text, at)
        while at == len(text) and may_grow:
            text = file.read(BLOCK)
            may_grow = bool(text)
            at = _skip_space(text, 0)
        return at

    try:
        at = next_place(0)
        if at == len(text):
            return
        if text[at] == "{":
            yield from _read_object(text[at:] + file.read(LONGEST), path)
            return
        check(text[at] == "[", f"{path}: {NOT_ARRAY}")
        at = next_place(at + 1)
        ends = text[at : at + 1] == "]"
        while not ends:
            row += 1
            where = f"{path} row {row}"
            text = text[at:]
            while True:
                try:
                    value, at = _parse_at(text, 0)
                    if at < len(text) or not may_grow:  # a number at the end, as 12, may go on
                        break
                except json.JSONDecodeError as error:
                    is_cut = error.msg.startswith("Unterminated") or error.pos > len(text) - 16
                    if not may_grow or not is_cut:
                        raise
                check(
                    len(text) <= LONGEST,
                    f"{where}: an element of more than {LONGEST >> 20} Mi characters",
                )
                block = file.read(max(BLOCK, len(text)))
                text += block
                may_grow = bool(block)
            at = next_place(at)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting , or ]", text, at)
            ends = text[at] == "]"
            yield where, value
            if not ends:
                at = next_place(at + 1)
        at = next_place(at + 1)
        if at < len(text):
            raise json.JSONDecodeError("More text after the array", text, at)
    except ValueError as error:
        yield where, Unreadable(str(error))


def _read_object(text: str, path: Path) -> Found:
    """A .json file that holds one object: a row, or an object with one list of rows, {"data": [...]}."""
    check(len(text) <= LONGEST, f"{path}: an object of more than {LONGEST >> 20} Mi characters")
    value, end = _parse_at(text, 0)
    check(end == len(text), f"{path}: {NOT_ARRAY}")
    lists = [key for key, rows in value.items() if isinstance(rows, list) and rows]
    rows = value[lists[0]] if len(lists) == 1 and not form_of(value) else []
    if rows and all(isinstance(row, dict) for row in rows):
        yield from ((f"{path} row {i}", row) for i, row in enumerate(rows, start=1))
    else:
        yield f"{path} row 1", value


def _read_csv(file: TextIO, path: Path) -> Found:
    """Rows by the names in the first line; an empty field is left out."""
    csv.field_size_limit(LONGEST)
    lines = csv.reader(file, strict=True)
    try:
        names = next(lines, [])
        has_other_separator = len(names) == 1 and re.search("[;\t|]", names[0])
        check(
            not has_other_separator,
            f"{path}:1: one column, {names[:1]}: fields are separated by commas in a .csv file",
        )
        check(len(set(names)) == len(names), f"{path}:1: two columns have one name")
        for row, fields in enumerate(lines, start=2):
            where = f"{path} row {row}"
            if len(fields) == len(names):
                pairs = zip(names, fields, strict=True)
                yield where, {name: text for name, text in pairs if text}
            else:
                reason = f"{len(fields)} fields, and the first line names {len(names)} columns"
                yield where, ValueError(reason)
    except csv.Error as error:
        yield f"{path}:{lines.line_num}", Unreadable(f"not CSV: {error}")


def _read_parquet(path: Path) -> Found:
    import pyarrow
    import pyarrow.parquet

    try:
        row = 0
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(1024):
            for value in batch.to_pylist():
                row += 1
                yield f"{path} row {row}", _without_nulls(value)
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0][:120]
        raise ConfigError(
            f"{path}: not parquet, or damaged: {reason} (fix: fetch it again)"
        ) from None


def hub_silence(name: str) -> str:
    """Why the hub does not answer within HUB_SECONDS; "" where it does. It is asked once: datasets itself
    would try six times, for half a minute. Without an answer the copy in the cache may be used.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    reasons = []

    def ask() -> None:
        try:
            HfApi().dataset_info(name, timeout=HUB_SECONDS)
            reasons.append("")
        except HfHubHTTPError:
            reasons.append("")  # it has answered: datasets reports what it refuses
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:120])

    # A timeout of the hub's client holds for each try to connect, not for all of them together.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(HUB_SECONDS)
    reason = reasons[0] if reasons else f"nothing within {HUB_SECONDS} s"
    return reason and f"no such file, the hub {constants.ENDPOINT} does not answer ({reason})"


def may_be_cached(name: str) -> bool:
    """Whether one of the caches has a folder for a data set of the hub."""
    from huggingface_hub import constants

    home = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    hub = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return hub.is_dir() or (home / name.replace("/", "___")).is_dir()


def open_data_set(name: str) -> tuple[Callable[[], Found], list[Path]]:
    """As open_source, for the split "train" of a data set of the hub, or for one that save_to_disk wrote."""
    is_folder = Path(name).is_dir()
    no_answer = "" if is_folder else hub_silence(name)
    no_data_set = f"--dataset {name}: neither a file nor a data set that can be read: "
    check(not no_answer or may_be_cached(name), f"{no_data_set}{no_answer}, and its cache has none")
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    offline_before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if no_answer:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        found = datasets.load_from_disk(name) if is_folder else datasets.load_dataset(name)
    except Exception as error:  # files, network, repositories: anything
        if no_answer:
            reason = f"{no_answer}, and its cache has none that can be read"
        else:
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(no_data_set + reason) from None
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = offline_before
    if no_answer:
        print0(f"data set  {name}: the hub does not answer, so the copy in its cache is used")
    if isinstance(found, datasets.DatasetDict):
        check("train" in found, f"--dataset {name}: it has no split train, but {', '.join(found)}")
        found = found["train"]
    files = [Path(file["filename"]) for file in found.cache_files]

    def read() -> Found:
        for i, value in enumerate(found):
            yield f"{name} row {i}", _without_nulls(value)

    return read, files


def _without_nulls(value: object) -> object:
    """A row of a table without its nulls: a table has every column in every row."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _parse_at(text: str, at: int) -> tuple[object, int]:
    """(the JSON value that starts at or after `at`, the place of the next character after it)."""
    start = _skip_space(text, at)
    try:
        value, end = DECODER.raw_decode(text, start)
        check_pairs(value, text[start:end])
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, _skip_space(text, end)


def _skip_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()
