"""Rows in arrays, packed files, tables, texts, folders, data sets, and mixtures of them.

python -m pytest tests/test_containers.py
"""

import csv
import gzip
import io
import json
import os
import random
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from generate import read_rows

from utils.data.rows import find_sources
from utils.data.tables import read_table
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
    assert values("texts") == [{"text": "one\n\nstill one"}, {"text": "two\n"}]
    assert values(write("notes.md", "# a")) == [{"text": "# a"}]
    assert "latin.txt: cannot be read: UnicodeDecodeError: 'utf-8' codec" in refusal(
        write("latin.txt", b"caf\xe9")
    )


def test_folders_and_patterns_give_their_files_in_order():
    for i, row in enumerate(ROWS):
        write(f"parts/{4 - i}.jsonl", json.dumps(row))
    assert values("parts") == values("parts/*.jsonl") == ROWS[::-1]
    assert values("parts/[01].jsonl") == [ROWS[4], ROWS[3]]
    assert "parts/*.csv: no .jsonl" in refusal("parts/*.csv")
    write("parts/x.csv", "a,b\n")
    assert "parts: files of several kinds, .csv, .jsonl" in refusal("parts")


def test_a_home_that_no_shell_has_expanded_is_found(monkeypatch, tmp_path):
    """In a configuration file, and behind --dataset=, a shell leaves ~ as it is."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write("home/parts/a.jsonl", LINES)
    for name in ("~/parts/a.jsonl", "~/parts", "~/parts/*.jsonl", "~/parts/a.jsonl:0.5"):
        assert values(name) == ROWS, name


def test_a_folder_does_not_mix_files_to_test_with_into_those_to_train_on():
    for i, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "testimonials")):
        write(f"splits/{name}.jsonl", json.dumps(ROWS[i]))
    assert sorted(values("splits"), key=ROWS.index) == ROWS[:3]
    for name in ("test-00000-of-00001", "my_val", "validation", "gsm8k-dev", "Eval"):
        write(f"splits/{name}.jsonl", json.dumps(ROWS[3]))
        assert "splits: files to test with beside others (fix: 'splits/train*'" in refusal("splits")
        assert values("splits/train*") == ROWS[:2]
        Path("splits/README.md").write_text("# as every data set has one")
        Path("splits/dataset_infos.json").write_text("{}")
        names = ", ".join(sorted({"testimonials", "train", name.partition("-0")[0]}))
        assert f"(fix: 'splits/train*', if it is one of: {names};" in refusal("splits")
        assert "or 'splits/*.jsonl*' for all)" in refusal("splits")
        assert len(values("splits/*.jsonl*")) == 4
        Path(f"splits/{name}.jsonl").unlink()
    write("held_out/test.jsonl", json.dumps(ROWS[0]))
    write("held_out/valid.jsonl", json.dumps(ROWS[1]))
    assert values("held_out") == ROWS[:2]


def test_an_empty_field_of_a_table_is_not_there():
    rows = [{"instruction": "a", "input": "", "output": "b"}]
    assert values(write_csv("a.csv", rows)) == [{"instruction": "a", "output": "b"}]
    messy = [{"messages": [{"role": "user", "content": "a", "name": None}]}, {"messages": None}]
    assert values(write_parquet("a.parquet", messy)) == [
        {"messages": [{"role": "user", "content": "a"}]},
        {},
    ]


def test_an_empty_text_of_a_table_is_a_text_as_in_jsonl():
    """Every third row of wikitext is an empty document; a tool may print nothing."""
    turns = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "Run it."},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "run"}}]},
        {"role": "tool", "content": ""},
        {"role": "assistant", "content": "It printed nothing."},
    ]
    for rows in (
        [{"text": ""}, {"text": "A document."}],
        [{"messages": turns}],
        [{"conversations": [{"from": "system", "value": ""}, {"from": "human", "value": "Hi"}]}],
        [{"prompt": "", "completion": "Once upon a time"}],
        [{"tool_calls": [{"function": {"name": "weather", "arguments": {"city": ""}}}]}],
    ):
        assert values(write_parquet("a.parquet", rows)) == rows
        datasets.Dataset.from_list(rows).save_to_disk("saved")
        assert values("saved") == rows
    assert values(write_csv("a.csv", [{"id": 1, "text": ""}])) == [{"id": "1", "text": ""}]


MIXED = [  # datasets 5 stores values whose types or fields differ from row to row as JSON
    [
        {
            "messages": [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "weight": 0},
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]},
    ],
    [
        {"text": "a", "tools": [{"name": "x", "parameters": {"city": {"type": "string"}}}]},
        {"text": "b", "tools": [{"name": "y", "parameters": {"unit": None, "n": [1, 2]}}]},
    ],
    [{"answer": 3}, {"answer": "x"}],
]


@pytest.mark.parametrize("rows", MIXED)
def test_values_that_datasets_stores_as_json_are_what_they_were(rows):
    write("rows.jsonl", "\n".join(map(json.dumps, rows)))
    made = datasets.load_dataset("json", data_files="rows.jsonl", split="train", cache_dir="cache")
    made.save_to_disk("mixed")
    made.to_parquet("mixed.parquet")
    assert values("mixed") == values("mixed.parquet") == rows


def test_numbers_that_are_none_in_pandas_are_null():
    write("a.jsonl", '{"instruction": "a", "input": NaN, "output": "b"}')
    write("a.json", '[{"instruction": "a", "input": NaN, "output": "b"}]')
    assert (
        values("a.jsonl")
        == values("a.json")
        == [{"instruction": "a", "input": None, "output": "b"}]
    )


def test_names_with_commas_and_weights_are_understood_or_refused():
    write("a.jsonl", LINES)
    write("b.jsonl", LINES)
    assert len(values("a.jsonl,b.jsonl")) == len(values("a.jsonl, b.jsonl")) == 2 * len(ROWS)
    assert [(s.name, s.weight) for s in find_sources("a.jsonl:0.7, b.jsonl:.3")] == [
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
        (
            "cut.jsonl.gz",
            gzip.compress(LINES.encode(), mtime=0)[:40],
            "cut.jsonl.gz: cannot be read: EOFError: Compr",
        ),
        (
            "cut.json.gz",
            gzip.compress(json.dumps(ROWS).encode(), mtime=0)[:-9],
            "cut.json.gz: cannot be read: EOFError: Compressed file ended",
        ),
        (
            "plain.jsonl.gz",
            LINES,
            "plain.jsonl.gz: cannot be read: BadGzipFile: Not a gzipped file",
        ),
        ("bad.jsonl.gz", gzip.compress(b'{"a": 1}\n{', mtime=0), "bad.jsonl.gz:2: not JSON"),
        (
            "ragged.csv",
            "a,b\n1,2\n3,4,5\n",
            "ragged.csv row 3: it has more fields than the first line",
        ),
        ("quote.csv", 'a,b\n"1,2\n', "quote.csv: cannot be read: Error: unexpected end of data"),
        ("empty.csv", "a,b\n", "empty.csv: no rows"),
        ("page.csv", "<html></html>", "page.csv:1: an HTML page"),
        (
            "lfs.parquet",
            "version https://git-lfs.github.com/spec/v1\n",
            "lfs.parquet:1: a git-lfs pointer",
        ),
        (
            "no.parquet",
            "a,b\n1,2\n" * 9,
            "no.parquet: cannot be read: ArrowInvalid: Parquet magic bytes not found",
        ),
    ],
)
def test_damaged_files_are_told_why(name, content, message):
    assert message in refusal(write(name, content))


def test_a_table_cut_short_or_without_rows_is_told_why():
    data = Path(write_parquet("whole.parquet", ROWS * 1000)).read_bytes()
    assert "cut.parquet: cannot be read: ArrowInvalid: Parquet" in refusal(
        write("cut.parquet", data[: len(data) // 2])
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS).slice(0, 0), "none.parquet")
    assert "none.parquet: no rows" in refusal("none.parquet")


def test_a_data_set_that_is_nowhere_is_one_line():
    assert "--dataset no/such: neither a file nor a data set that can be read: " in refusal(
        "no/such"
    )
    datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)}).save_to_disk("splits")
    assert (
        "--dataset splits: it has no split train, but test (fix: --dataset splits:test)"
        in refusal("splits")
    )
    assert values("splits:test") == ROWS
    rows = datasets.Dataset.from_list(ROWS)
    names = "train_sft test_sft train_gen test_gen".split()  # of ultrachat_200k
    datasets.DatasetDict(dict.fromkeys(names, rows)).save_to_disk("ultrachat")
    assert "(fix: --dataset ultrachat:train_sft)" in refusal("ultrachat")
    assert "--dataset splits:dev: it has no split dev, but test" in refusal("splits:dev")


def test_a_tilde_is_the_home_folder_in_each_name_of_a_mixture(tmp_path, monkeypatch):
    """A shell replaces only the one at the beginning of the flag."""
    monkeypatch.setenv("HOME", str(tmp_path))
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    write("a.jsonl", LINES)
    assert values("a.jsonl,~/saved") == ROWS + ROWS


def test_a_split_of_a_saved_data_set_without_splits_is_refused():
    for name in ("saved", "data/saved"):  # the second looks like OWNER/NAME
        datasets.Dataset.from_list(ROWS).save_to_disk(name)
        assert f"{name}:test: no .jsonl" in refusal(f"{name}:test")


def test_configuration_and_split_of_a_data_set_of_the_hub_are_chosen(tmp_path, monkeypatch):
    """From the cache of datasets, as a download leaves it; an id may look like a file's name."""
    for config in ("main", "socratic"):
        folder = tmp_path / "cache" / "owner___name-2.5" / config / "0.0.0" / "abc"
        folder.mkdir(parents=True)
        splits = datasets.SplitDict(dataset_name="name-2.5")
        for split in ("train_sft", "test_sft"):
            made = datasets.Dataset.from_list([{"text": f"{config} {split}"}])
            with datasets.arrow_writer.ArrowWriter(
                path=str(folder / f"name-2.5-{split}.arrow"), features=made.features
            ) as writer:
                writer.write(made[0])
                writer.finalize()
            splits.add(datasets.SplitInfo(split, num_examples=1))
        datasets.DatasetInfo(
            features=made.features,
            builder_name="parquet",
            dataset_name="name-2.5",
            config_name=config,
            version="0.0.0",
            splits=splits,
        ).write_to_directory(str(folder))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert values("owner/name-2.5/main:test_sft") == [{"text": "main test_sft"}]
    assert values("owner/name-2.5/socratic:train_sft") == [{"text": "socratic train_sft"}]
    said = refusal("owner/name-2.5/main")
    assert "no split train, but train_sft, test_sft (fix: --dataset owner/name-2.5/main:" in said
    said = refusal("owner/name-2.5")
    assert "main" in said
    assert "OWNER/NAME/CONFIG" in said


class Counted(io.FileIO):
    """A file that counts the bytes that are read."""

    read_bytes = 0

    def read(self, size=-1):
        content = super().read(size)
        self.read_bytes += len(content)
        return content


def test_of_a_parquet_file_with_one_group_of_rows_only_what_is_used_is_read(tmp_path):
    """pandas writes a million rows as one group: every rank held the file, for --max_rows 10 too."""
    noise = random.Random(0)
    table = {
        "text": [str(i) for i in range(8000)],
        "more": [noise.randbytes(2000) for _ in range(8000)],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "a.parquet")
    with Counted(tmp_path / "a.parquet") as file:
        rows = read_table(file, ".parquet", tmp_path / "a.parquet")
        assert next(rows)[1]["text"] == "0"
        assert file.read_bytes < file.seek(0, os.SEEK_END) / 2
