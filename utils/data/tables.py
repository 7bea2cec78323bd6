"""Rows of .json, .csv and .parquet files, and of data sets from the Hub or written by save_to_disk.

CSV: https://docs.python.org/3/library/csv.html. Data sets: https://huggingface.co/docs/datasets
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from ..run.errors import check, others_code, print0
from .formats import form_of


def read_table(file: BinaryIO, kind: str, path: Path) -> Iterator:
    """(where, row) of each row of a file. kind: its suffix."""
    if kind == ".parquet":
        import pyarrow.parquet

        # Otherwise it reads a whole group of rows, in most files all rows.
        parquet = pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=2**20)
        rows = rows_of(parquet.iter_batches(64))
    elif kind == ".json":
        rows = rows_of_json(file.read())
    else:
        csv.field_size_limit(2**26)  # characters
        records = csv.DictReader(io.TextIOWrapper(file, "utf-8-sig", newline=""), strict=True)
        # An empty field is a missing one, but an empty text is a document.
        rows = ({k: v for k, v in record.items() if v or k == "text"} for record in records)
    return numbered(path, rows, 2 if kind == ".csv" else 1)


def numbered(path: Path | str, rows: Iterable, first: int) -> Iterator:
    """(where, row) of each row. first: the number of the first row."""
    for number, row in enumerate(rows, start=first):
        yield f"{path} row {number}", row


def rows_of_json(content: bytes) -> list:
    """The rows of a .json file: an array, one object, or an object with one list of rows, {"data": [...]}.
    Also one object a line, as in a .jsonl file.
    """
    text = content.decode("utf-8-sig") or "[]"
    try:
        value = json.loads(text, parse_constant={}.get)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data" or text.lstrip()[0] != "{":
            raise
        value = [line.encode() for line in text.split("\n") if line.strip()]  # see rows.as_object
    if isinstance(value, dict) and not form_of(value):
        lists = [rows for rows in value.values() if isinstance(rows, list)]
        value = lists[0] if len(lists) == 1 else value
    return value if isinstance(value, list) else [value]


def rows_of(tables: Iterable) -> Iterator[dict]:
    """The rows of pyarrow's tables, one after the other."""
    for table in tables:
        rows = map(without_nulls, table.to_pylist())
        if "arrow.json" in str(table.schema):
            rows = (from_json(row, table.schema) for row in rows)
        yield from rows


def from_json(value, kind):
    """A row or value of a table with what is JSON in it parsed. kind: its schema or type in pyarrow. datasets
    makes JSON of values whose types, or whose fields, differ from row to row.
    """
    if str(kind) == "extension<arrow.json>":
        return value and json.loads(value)
    if isinstance(value, dict):
        return {key: from_json(item, kind.field(key).type) for key, item in value.items()}
    if isinstance(value, list):
        return [from_json(item, kind.value_type) for item in value]
    return value


def open_data_set(name: str) -> tuple:
    """(files, a function that reads the rows) of a data set from the Hub, OWNER/NAME/CONFIG:SPLIT, or written
    by save_to_disk, FOLDER:SPLIT. Without a split "train" is read.
    """
    import datasets
    from datasets.table import embed_table_storage

    datasets.disable_progress_bars()
    path, _, split = name.partition(":")
    parts = path.split("/")
    with others_code(
        f"--dataset {name}: neither a file nor a data set that can be read",
        "a file, a folder or OWNER/NAME; of several configurations OWNER/NAME/CONFIG",
    ):
        if Path(path).is_dir():
            data_set = datasets.load_from_disk(path)
        else:
            data_set = datasets.load_dataset("/".join(parts[:2]), *parts[2:])
    if isinstance(data_set, datasets.DatasetDict):
        split = split or "train"
        print0(f"split     {path}:{split}, of {', '.join(data_set)}")
        check(
            split in data_set,
            f"--dataset {name}: it has no split {split}, but {', '.join(data_set)}"
            f" (fix: --dataset {path}:{max(data_set)})",
        )
        data_set = data_set[split]
    files = [Path(file["filename"]) for file in data_set.cache_files]

    def read():
        # Pictures come as the bytes of their files, not decoded.
        tables = map(embed_table_storage, data_set.with_format("arrow").iter(64))
        return numbered(name, rows_of(tables), 0)

    return files, read


def without_nulls(value: object) -> object:
    """Remove nulls from a row of a table: every row has every column, and every object every field."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value
