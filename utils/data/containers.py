"""Rows in anything but one .jsonl file: arrays, .gz, .csv, .parquet, .txt, folders, patterns, data sets of
the hub, and several of them with weights. Imported only for those.

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
HUB_SECONDS = 3  # how long the hub may be silent before its cache has to do
BLOCK = 2**20  # characters of an array that are read at a time
NOT_ARRAY = "not an array, [...]; a file with one object a line is a .jsonl file"
LONG_TEXT = 2**20  # characters of a text that are tokenized at a time


class Row(NamedTuple):
    where: str  # "chat.jsonl:3", or "chat.json row 3"
    data: dict


def read_rows(name: str | Path) -> list[Row]:
    """All rows of what a flag names, as they are; ConfigError lists up to ten faults, one a line."""
    rows, faults, number = [], Faults(), 0
    found = (row for source in find_any(str(name)) for row in source.read())
    for number, (where, value) in enumerate(found, start=1):
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
    split = [re.fullmatch(r"(.+?)(?::(\d*\.?\d+))?", part.strip()) for part in parts]
    check(all(split), f"--dataset {name}: one of the names is empty")
    weights = [m[2] for m in split]
    good = not any(weights) or all(weights) and all(float(weight) > 0 for weight in weights)
    check(
        good,
        f"--dataset {name}: give every one a weight above 0, or none (fix: a.jsonl:0.7,b.jsonl:0.3)",
    )
    sources = []
    for match in split:
        read, files = open_source(match[1])
        sources.append(
            Source(match[1], float(match[2] or 0), files, partial(_read_part, match[1], read))
        )
    return sources


def open_source(name: str) -> tuple[Callable[[], Found], list[Path]]:
    """(what reads the rows of one name, the files that they come from)."""
    files = files_of(name)
    if files is None:
        return open_data_set(name)
    return lambda: (row for path in files for row in read_file(path)), files


def _read_part(name: str, source: Callable[[], Found]) -> Found:
    found = source()
    first = next(found, None)
    check(first, f"{name}: {NO_ROWS}")
    yield first
    yield from found


def files_of(name: str) -> list[Path] | None:
    """The files that a name means: a file, a folder's, a pattern's; None for a data set of datasets' own.

    ConfigError for a folder or a pattern without files, or with files of several kinds.
    """
    path = Path(name)
    if path.is_dir() and ((path / "state.json").exists() or (path / "dataset_dict.json").exists()):
        return None
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if p.is_file() and not p.name.startswith("."))
        found = [p for p in found if kind_of(p) in KINDS]
    elif glob.has_magic(name) and not path.exists():
        found = sorted(Path(p) for p in glob.glob(name, recursive=True) if Path(p).is_file())
    else:
        hub = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.exists() and not path.suffix
        return None if hub else [path]
    check(found, f"{name}: no {', '.join(KINDS)} files there, nor .gz of them")
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
    check(kind in KINDS, f"{path}: what can be read are {', '.join(KINDS)} files, and .gz of them")
    try:
        if kind == ".parquet":
            yield from _read_parquet(path)
            return
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            if kind == ".jsonl":
                yield from read_lines(file, path)
                return
            text = io.TextIOWrapper(file, "utf-8-sig", newline="" if kind == ".csv" else None)
            yield from {".json": read_array, ".csv": _read_csv}.get(kind, _read_text)(text, path)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{path}: not gzip, or cut short: {error} (fix: fetch it again)"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8: {error}") from None


class TextPart(str):
    """A part of a longer text. first, last: whether the text begins or ends with it."""

    first, last = True, True


def _read_text(file: TextIO, path: Path) -> Found:
    """The whole text as one row; a long one as several, which end where a paragraph does."""
    text, first, last = "", True, False
    while not last:
        text += (more := file.read(LONG_TEXT))
        last = len(more) < LONG_TEXT
        cut = len(text) if last or "\n\n" not in text else text.rfind("\n\n") + 2
        part, text = TextPart(text[:cut]), text[cut:]
        part.first, part.last, first = first, last, False
        if part.strip():
            yield (
                str(path),
                ValueError("a NUL character: no text") if "\0" in part else {"text": part},
            )


def read_array(file: TextIO, path: Path) -> Found:
    """(where, the value or a ValueError) of each element. After a syntax error there is no next one.

    Of the text only the element that is read stays in memory.
    """
    text, row, where, more = "", 0, str(path), True

    def need(at: int) -> int:
        """Skip space from `at`, and read on where the text ends; where in the text that is."""
        nonlocal text, more
        while (at := _skip_space(text, at)) == len(text) and more:
            text, at = file.read(BLOCK), 0
            more = bool(text)
        return at

    try:
        at = need(0)
        if at == len(text):
            return
        if text[at] == "{":
            yield from _read_object(text[at:] + file.read(LONGEST), path)
            return
        check(text[at] == "[", f"{path}: {NOT_ARRAY}")
        at = need(at + 1)
        ends = text[at : at + 1] == "]"
        while not ends:
            row += 1
            where, text = f"{path} row {row}", text[at:]
            while True:
                try:
                    value, at = _parse_at(text, 0)
                    if at < len(text) or not more:  # what ends with the text, as 12 does, may go on
                        break
                except json.JSONDecodeError as error:
                    cut = error.msg.startswith("Unterminated") or error.pos > len(text) - 16
                    if not more or not cut:
                        raise
                check(
                    len(text) <= LONGEST,
                    f"{where}: an element of more than {LONGEST >> 20} Mi characters",
                )
                text += (new := file.read(max(BLOCK, len(text))))
                more = bool(new)
            at = need(at)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting , or ]", text, at)
            ends = text[at] == "]"
            yield where, value
            at = at if ends else need(at + 1)
        at = need(at + 1)
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
        alone = len(names) == 1 and re.search("[;\t|]", names[0])
        check(
            not alone,
            f"{path}:1: one column, {names[:1]}: fields are separated by commas in a .csv file",
        )
        check(len(set(names)) == len(names), f"{path}:1: two columns have one name")
        for row, fields in enumerate(lines, start=2):
            ragged = ValueError(
                f"{len(fields)} fields, and the first line names {len(names)} columns"
            )
            pairs = zip(names, fields, strict=False)
            yield (
                f"{path} row {row}",
                ragged if len(fields) != len(names) else {k: v for k, v in pairs if v},
            )
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
    """Why the hub does not answer within HUB_SECONDS; "" where it does. Asked once: datasets itself would try
    six times, for half a minute. Where it does not, what is in the cache may do.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    said = []

    def ask() -> None:
        try:
            HfApi().dataset_info(name, timeout=HUB_SECONDS)
            said.append("")
        except HfHubHTTPError:
            said.append("")  # it has answered: what it refuses is told by datasets
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}".splitlines()[0][:120])

    asking = Thread(target=ask, daemon=True)  # the timeout is that of each try to connect
    asking.start()
    asking.join(HUB_SECONDS)
    reason = said[0] if said else f"nothing within {HUB_SECONDS} s"
    return reason and f"no such file, the hub {constants.ENDPOINT} does not answer ({reason})"


def may_be_cached(name: str) -> bool:
    """Whether a cache has a folder for a data set of the hub."""
    from huggingface_hub import constants

    home = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    hub = Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}"
    return hub.is_dir() or (home / name.replace("/", "___")).is_dir()


def open_data_set(name: str) -> tuple[Callable[[], Found], list[Path]]:
    """A data set of the hub, its split "train", or one that save_to_disk wrote: as open_source."""
    silent = "" if Path(name).is_dir() else hub_silence(name)
    no_data_set = f"--dataset {name}: neither a file nor a data set that can be read: "
    check(not silent or may_be_cached(name), f"{no_data_set}{silent}, and its cache has none")
    import datasets
    from huggingface_hub import constants

    datasets.disable_progress_bars()
    before = constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE
    if silent:
        constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        found = (
            datasets.load_from_disk(name) if Path(name).is_dir() else datasets.load_dataset(name)
        )
    except Exception as error:  # files, network, repositories: anything
        reason = silent and f"{silent}, and its cache has none that can be read"
        reason = reason or f"{type(error).__name__}: {error}".splitlines()[0][:200]
        raise ConfigError(no_data_set + reason) from None
    finally:
        constants.HF_HUB_OFFLINE, datasets.config.HF_HUB_OFFLINE = before
    if silent:
        print0(f"data set  {name}: the hub does not answer, so the copy in its cache is used")
    if isinstance(found, datasets.DatasetDict):
        check("train" in found, f"--dataset {name}: it has no split train, but {', '.join(found)}")
        found = found["train"]
    files = [Path(file["filename"]) for file in found.cache_files]
    return lambda: (
        (f"{name} row {i}", _without_nulls(value)) for i, value in enumerate(found)
    ), files


def _without_nulls(value: object) -> object:
    """Columns of a table exist in every row, as null where a row has nothing."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parse_at(text: str, at: int) -> tuple[object, int]:
    """The JSON value that starts at or after `at`, and where the text goes on after it."""
    start = _skip_space(text, at)
    try:
        value, end = DECODER.raw_decode(text, start)
        check_pairs(value, text[start:end])
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, _skip_space(text, end)


def _skip_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()
