"""Rows in arrays, packed files, tables, texts, folders, data sets, and mixtures of them.

python -m pytest tests/test_containers.py
"""

import csv
import gzip
import io
import json
import os
import socket
import time
from pathlib import Path

import datasets
import huggingface_hub
import pyarrow
import pyarrow.parquet
import pytest

from utils.data.containers import HUB_SECONDS, find_any, read_rows
from utils.run.errors import ConfigError

ROWS = [{"instruction": f"Add {i}.", "output": 'a, "b"\nc'} for i in range(5)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(name, content):
    os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
    with open(name, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return name


def write_csv(name, rows=ROWS, **options):
    with open(name, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), **options)
        writer.writeheader()
        writer.writerows(rows)
    return name


def write_parquet(name, rows=ROWS):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    return name


def values(name):
    return [row.data for row in read_rows(name)]


def refusal(name) -> str:
    with pytest.raises(ConfigError) as refused:
        read_rows(name)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_every_container_gives_the_same_rows():
    packed = gzip.compress(LINES.encode())
    files = [
        write("a.jsonl", LINES),
        write("a.jsonl.gz", packed),
        write("a.json", json.dumps(ROWS, indent=1)),
        write("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        write_csv("a.csv"),
        write_parquet("a.parquet"),
    ]
    write("a.csv.gz", gzip.compress(Path("a.csv").read_bytes()))
    datasets.Dataset.from_list(ROWS).save_to_disk("saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk("splits")
    for name in [*files, "a.csv.gz", "saved", "splits"]:
        assert values(name) == ROWS, name


def test_rows_are_named_by_file_and_place():
    for name in (
        write("a.jsonl.gz", gzip.compress(LINES.encode())),
        write_csv("a.csv"),
        write_parquet("a.parquet"),
    ):
        assert read_rows(name)[1].where in (f"{name}:2", f"{name} row 3", f"{name} row 2")
    assert read_rows("a.csv")[0].where == "a.csv row 2"  # the first line names the columns


def test_texts_are_one_row_a_file():
    write("texts/b.txt", "two\n")
    write("texts/a.txt", "\ufeffone\n\nstill one")
    write("texts/empty.txt", " \n")
    assert values("texts") == [{"text": "one\n\nstill one"}, {"text": "two\n"}]
    assert values(write("notes.md", "# a")) == [{"text": "# a"}]
    assert "empty.txt: no rows" in refusal("texts/empty.txt")
    assert "a NUL character" in refusal(write("bin.txt", "a\0b"))
    assert "not UTF-8" in refusal(write("latin.txt", b"caf\xe9"))


def test_folders_and_patterns_give_their_files_in_order():
    for i, row in enumerate(ROWS):
        write(f"parts/{4 - i}.jsonl", json.dumps(row))
    assert values("parts") == values("parts/*.jsonl") == ROWS[::-1]
    assert values("parts/[01].jsonl") == [ROWS[4], ROWS[3]]
    assert "parts/*.csv: no .jsonl" in refusal("parts/*.csv")
    write("parts/x.csv", "a,b\n")
    assert "parts: files of several kinds, .csv, .jsonl" in refusal("parts")


def test_an_empty_field_of_a_table_is_not_there():
    rows = [{"instruction": "a", "input": "", "output": "b"}]
    assert values(write_csv("a.csv", rows)) == [{"instruction": "a", "output": "b"}]
    messy = [{"messages": [{"role": "user", "content": "a", "name": None}]}, {"messages": None}]
    assert values(write_parquet("a.parquet", messy)) == [
        {"messages": [{"role": "user", "content": "a"}]},
        {},
    ]


def test_names_with_commas_and_weights_are_understood_or_refused():
    write("a.jsonl", LINES)
    write("b.jsonl", LINES)
    assert len(values("a.jsonl,b.jsonl")) == len(values("a.jsonl, b.jsonl")) == 2 * len(ROWS)
    assert [(s.name, s.weight) for s in find_any("a.jsonl:0.7, b.jsonl:.3")] == [
        ("a.jsonl", 0.7),
        ("b.jsonl", 0.3),
    ]
    assert "give every one a weight" in refusal("a.jsonl:0.7,b.jsonl")
    assert "give every one a weight" in refusal("a.jsonl:0,b.jsonl:1")
    assert "one of the names is empty" in refusal("a.jsonl,")
    assert values(write("odd,name.jsonl", LINES)) == ROWS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.gz", gzip.compress(LINES.encode(), mtime=0)[:40], "not gzip, or cut short"),
        (
            "cut.json.gz",
            gzip.compress(json.dumps(ROWS).encode(), mtime=0)[:-9],
            "not gzip, or cut short",
        ),
        ("plain.jsonl.gz", LINES, "plain.jsonl.gz: not gzip"),
        ("bad.jsonl.gz", gzip.compress(b'{"a": 1}\n{', mtime=0), "bad.jsonl.gz:2: Expecting"),
        (
            "ragged.csv",
            "a,b\n1,2\n3\n",
            "ragged.csv row 3: 1 fields, and the first line names 2 columns",
        ),
        (
            "semi.csv",
            "a;b\n1;2\n",
            "semi.csv:1: one column, ['a;b']: fields are separated by commas",
        ),
        ("twice.csv", "a,a\n1,2\n", "twice.csv:1: two columns have one name"),
        ("quote.csv", 'a,b\n"1,2\n', "quote.csv:2: not CSV: unexpected end of data"),
        ("empty.csv", "a,b\n", "empty.csv: no rows"),
        ("page.csv", "<html></html>", "page.csv:1: an HTML page"),
        (
            "lfs.parquet",
            "version https://git-lfs.github.com/spec/v1\n",
            "lfs.parquet:1: a git-lfs pointer",
        ),
        ("no.parquet", "a,b\n1,2\n" * 9, "no.parquet: not parquet, or damaged"),
    ],
)
def test_damaged_files_are_told_why(name, content, message):
    assert message in refusal(write(name, content))


def test_a_table_cut_short_or_without_rows_is_told_why():
    data = Path(write_parquet("whole.parquet", ROWS * 1000)).read_bytes()
    assert "not parquet, or damaged" in refusal(write("cut.parquet", data[: len(data) // 2]))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), "none.parquet")
    assert "none.parquet: no rows" in refusal("none.parquet")


def test_a_packed_file_does_not_fill_the_memory(monkeypatch):
    from utils.data import containers

    monkeypatch.setattr(containers, "LONGEST", 2**20)
    space, word = gzip.compress(b"[" + b" " * 2**24), gzip.compress(b'["' + b"a" * 2**24)
    assert "space.json.gz row 1: Expecting value" in refusal(write("space.json.gz", space))
    assert "word.json.gz row 1: an element of more than 1 Mi" in refusal(
        write("word.json.gz", word)
    )


@pytest.mark.parametrize("block", [1, 2, 7, 64])
def test_an_array_reads_the_same_wherever_its_text_is_cut(monkeypatch, block):
    from utils.data import containers

    words = 'a\u00e9\u2028 \\ "[,]'
    whole = [{"text": words}, {"text": "b", "n": [12, -1.5e3, True, None]}, {"text": ""}]
    texts = [
        json.dumps(whole),
        json.dumps(whole, indent=3),
        "[]",
        " [ ] ",
        "[1",
        "[1,]",
        "[1 2]",
        "[1]x",
    ]
    read = {text: list(containers.read_array(io.StringIO(text), Path("f"))) for text in texts}
    assert [value for _, value in read[texts[0]]] == whole
    monkeypatch.setattr(containers, "BLOCK", block)
    for text, rows in read.items():
        again = list(containers.read_array(io.StringIO(text), Path("f")))
        assert [(where, str(value).split(":")[0]) for where, value in again] == [
            (where, str(value).split(":")[0]) for where, value in rows
        ]


def test_a_hub_that_takes_the_call_and_says_nothing_is_not_waited_for(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(huggingface_hub.hf_api, "ENDPOINT", address, raising=False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        begun = time.monotonic()
        assert "does not answer (" in refusal("no/such")
        assert time.monotonic() - begun < 2 * HUB_SECONDS


def test_a_data_set_that_is_nowhere_is_one_line_and_the_hub_is_asked_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.hf_api, "ENDPOINT", address, raising=False)
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it is tried again"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    assert (
        "--dataset no/such: neither a file nor a data set that can be read: no such file, the hub"
        in refusal("no/such")
    )
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk("splits")
    assert "--dataset splits: it has no split train, but test" in refusal("splits")
