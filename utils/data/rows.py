"""The value of --dataset -> rows, one by one. It names files, folders, patterns, data sets of the Hub, or
several of these with weights. A .jsonl file is read line by line, so that an error can name the line.
"""

import glob
import gzip
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..run.errors import check, first_five, others_code
from ..run.files import did_you_mean, impostor
from .formats import TURNS, json_name

KINDS = ".jsonl .json .csv .parquet .txt .md".split()
OTHERS = ".tsv .zst .xz .bz2".split()  # also hold rows, but cannot be read
# a word in the name of a file that is not for training
HELD_OUT = "(?i)(?<![a-z])(test|val(id(ation)?)?|dev|eval(uation)?)(?![a-z])"
# how names of files without rows begin, in a folder
NOT_DATA = r"(?i)\.|readme|license|dataset_infos?\.json|state\.json"

# (where, the row as an object or as bytes of JSON); where: "chat.jsonl:3", or "chat.json row 3"
RawRows = Iterator[tuple[str, object]]


class Source(NamedTuple):
    """One of the names in --dataset."""

    name: str
    weight: float  # 0: not set
    files: list[Path]  # those that hold its rows
    read: Callable  # () -> RawRows; each call reads from the first row


def as_object(value: object) -> dict:
    """Decode a raw row. ValueError if it is no JSON object."""
    if isinstance(value, bytes):
        try:
            # NaN of pandas is null
            value = json.loads(value.decode("utf-8-sig"), parse_constant={}.get)
        except ValueError as error:
            raise ValueError(
                f"not JSON in UTF-8: {error} (fix: repair it; recipes that train also take --bad_rows drop)"
            ) from None
    if isinstance(value, list):
        value = {"messages": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected object, got {json_name(value)}")
    if None in value:  # the csv module collects surplus fields under None
        raise ValueError("it has more fields than the first line names columns")
    return value


def find_sources(name: str) -> list[Source]:
    """The sources that --dataset names: a file, a folder, a pattern or a data set; or several, separated by
    commas. Either all have a weight, a.jsonl:0.7,b.parquet:0.3, or none.
    """
    parts = [name] if os.path.exists(name) else name.split(",")
    matches = [re.fullmatch(r"(.+?)(?::(\d*\.?\d+(?:e-?\d+)?))?", part.strip()) for part in parts]
    check(
        all(matches),
        f"--dataset {name}: one of the names is empty (fix: --dataset FILE, the rows to train on)",
    )
    weights = [float(match[2] or 0) for match in matches]
    check(
        all(weights) or not any(match[2] for match in matches),
        f"--dataset {name}: give every one a weight above 0, or none (fix: a.jsonl:0.7,b.jsonl:0.3)",
    )
    sources = []
    for match, weight in zip(matches, weights, strict=True):
        source = os.path.expanduser(match[1])
        files = files_of(source)
        if files:
            read = partial(read_files, source, files)
        else:
            from .tables import open_data_set

            files, read = open_data_set(source)
        sources.append(Source(source, weight, files, read))
    return sources


def files_of(name: str) -> list[Path] | None:
    """The files that a name stands for: a file, or the files of a folder or a pattern. None for a data set of
    the Hub, or a folder written by datasets' save_to_disk.

    ConfigError for a folder or a pattern without files, or with files of several kinds; and for a folder that
    holds files to test with beside others.
    """
    path = Path(name)
    without_split = Path(name.partition(":")[0])
    if (path / "state.json").exists() or (without_split / "dataset_dict.json").exists():
        return None  # datasets' save_to_disk wrote it
    if path.is_dir():
        files = [
            p
            for p in sorted(path.iterdir())
            if kind_of(p) in KINDS + OTHERS and not re.match(NOT_DATA, p.name)
        ]
        check(
            len({re.search(HELD_OUT, p.name) is None for p in files}) < 2,
            f"{name}: files to test with beside others (fix: '{name}/train*', if it is one of:"
            f" {first_five(sorted({re.split('-0|[.]', p.name)[0] for p in files}))};"
            f" or '{name}/*{min(map(kind_of, files), default='')}*' for all)",
        )
    elif glob.has_magic(name) and not path.exists():
        files = sorted(map(Path, glob.glob(str(path), recursive=True)))
    elif (
        without_split.exists()
        or kind_of(path) in KINDS
        or not re.fullmatch(r"[\w.-]+(/[\w.-]+){1,2}(:\w+)?", name)
    ):
        files = [path]
    else:
        return None
    kinds = sorted({kind_of(p) for p in files})
    check(
        len(kinds) < 2,
        f"{name}: files of several kinds, {', '.join(kinds)} (fix: the files, separated by commas)",
    )
    nested = path.glob("*/**/*") if not files else ()
    # The folder, not a pattern of its files: a pattern would also take those of a test split.
    fixes = [
        f" (fix: '{p.parent}', or of several folders a pattern,"
        f" '{path}/**/{'train*' if 'train' in p.name else f'*{kind_of(p)}*'}')"
        for p in nested
        if kind_of(p) in KINDS and not re.search(HELD_OUT, p.name)
    ]
    check(
        files and kinds[0] in KINDS,
        f"{name}: no {', '.join(KINDS)} files found, nor .gz of them; others, as .tsv: recipes/README.md"
        f"{min(fixes, default=' (fix: a file or folder, or OWNER/NAME of the hub)')}",
    )
    for path in files:
        check(path.is_file(), f"{path}: no such file{did_you_mean(path)}")
    return files


def kind_of(path: Path) -> str:
    """The suffix that decides how a file is read, in lower case; .gz is removed first."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


def read_files(name: str, files: list[Path]) -> RawRows:
    """The rows of several files. ConfigError if a file cannot be read, or if there are no rows at all."""
    has_rows = False
    for path in files:
        # gzip, zlib, csv, json, pyarrow
        with others_code(f"{path}: cannot be read", "a whole file; UTF-8, .csv with commas"):
            for row in read_file(path):
                has_rows = True
                yield row
    check(
        has_rows,
        f"{name}: no rows; a .jsonl file holds one object a line, a .json file an array of objects",
    )


def read_file(path: Path) -> RawRows:
    """(where, row) of each row of one file; of .jsonl, the bytes of each line that is not blank."""
    open_file = gzip.open if path.suffix.lower() == ".gz" else open
    kind = kind_of(path)
    with open_file(path, "rb") as file:
        reason = impostor(file.read(100))
        # a text may begin with a tag
        check(not reason or kind in (".txt", ".md") and "HTML" in reason, f"{path}:1: {reason}")
        file.seek(0)
        if kind == ".jsonl":
            # Only \n ends a line: U+2028 and U+0085 are text.
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                if number == 1:
                    check(
                        line.strip() != b"{"
                        and (not line.startswith(b"[") or re.match(TURNS.encode(), line)),
                        f"{where}: not one object a line; an array belongs in a .json file",
                    )
                if line.strip():
                    yield where, line
        elif kind in (".json", ".csv", ".parquet"):
            from .tables import read_table

            yield from read_table(file, kind, path)
        else:
            yield str(path), {"text": file.read().decode("utf-8-sig")}
