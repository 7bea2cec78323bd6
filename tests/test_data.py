"""Files -> rows -> examples -> global batches. Alone: .venv/bin/python -m pytest tests/test_data.py"""

import json
import os
import sys

import pytest
import torch
from generate import read_rows
from templates import KINDS
from test_tokens import byte_level
from tiny import NO_REMARKS

from utils.data import examples as data
from utils.data.batches import GlobalBatches, collate, permutation
from utils.data.chats import DIFFERS
from utils.data.encode import Part
from utils.data.examples import (
    Example,
    Examples,
    Rows,
    load_data,
    longest_row,
    print_data,
    write_bad_rows,
)
from utils.data.held_out import split_by_hash
from utils.data.tokens import load_tokenizer
from utils.run.errors import ConfigError
from utils.run.units import IGNORE

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
LINE = json.dumps(GOOD)
TURNS = {"messages": [*GOOD["messages"], {"role": "user", "content": "And?"}]}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """write(name, content) -> the file's name, from inside its folder."""
    monkeypatch.chdir(tmp_path)

    def write_file(name, content):
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        return name

    return write_file


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_level(True).save_pretrained(folder)
    return load_tokenizer(folder)


def load_examples(path, tokenizer, seq_len: int, **settings) -> Examples:
    return data.load_examples(Rows(str(path), seq_len, **settings), tokenizer)


def refusal(call, *args, **options) -> str:
    with pytest.raises(ConfigError) as refused:
        call(*args, **options)
    return str(refused.value)


# --- files -> rows


def test_lines_keep_their_numbers(write, tokenizer):
    file = write(
        "chat.jsonl", f"\ufeff{LINE}\r\n\n  \n{LINE}"
    )  # BOM, CRLF, blank lines, no newline at the end
    assert [row.where for row in read_rows(file)] == ["chat.jsonl:1", "chat.jsonl:4"]
    assert [row.data for row in read_rows(file)] == [GOOD, GOOD]
    assert len(load_examples(file, tokenizer, 64, max_rows=1)) == 1


def test_an_array_gives_its_elements(write):
    file = write("rows.json", "\ufeff" + json.dumps([ALPACA, ALPACA], indent=2))
    assert read_rows(file)[1] == ("rows.json row 2", ALPACA)


def test_a_json_file_may_hold_one_object_a_line(write):
    file = write("rows.json", f"{LINE}\n\n" + json.dumps(ALPACA))
    assert read_rows(file) == [("rows.json row 1", GOOD), ("rows.json row 2", ALPACA)]


def test_a_bad_line_of_a_json_file_is_named_and_can_be_left_out(write, tokenizer):
    file = write("rows.json", "\n".join([LINE, LINE, "{", "[]", LINE]))
    lines = refusal(load_examples, file, tokenizer, 64).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["rows.json row 3", "rows.json row 4"]
    assert len(load_examples(file, tokenizer, 64, bad_rows="drop")) == 3


def test_only_line_feeds_end_a_line(write):
    text = "a\u2028b\x85c\u2029\x0b😀\u200d\u202e"
    file = write(
        "odd.jsonl",
        json.dumps({"instruction": text, "output": text}, ensure_ascii=False) + "\n" + LINE,
    )
    assert read_rows(file)[0].data["output"] == text
    assert read_rows(file)[1].where == "odd.jsonl:2"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": 1', "Expecting ',' delimiter"),
        ('{"a": 1,}', "trailing comma" if sys.version_info >= (3, 13) else "double quotes"),
        ("{'a': 1}", "double quotes"),
        ('{"a": 1} {"b": 2}', "Extra data"),
        ('{"a": %s}' % ("9" * 5000), "Exceeds the limit"),
        ('{"a": "\x00"}', "control character"),
        ('{"a": "tab\there"}', "control character"),
        ("\x00", "Expecting value"),
        ("12", "expected object, got number"),
        ("null", "expected object, got null"),
        ('"text"', "expected object, got text"),
        (b'{"a": "caf\xe9"}', "can't decode byte 0xe9"),
        ('{"a": 1}'.encode("utf-16"), "can't decode byte 0xff"),
    ],
)
def test_bad_json_is_refused_at_its_place(write, text, reason):
    body = text if isinstance(text, bytes) else text.encode()
    line = refusal(read_rows, write("bad.jsonl", LINE.encode() + b"\n" + body.replace(b"\n", b"")))
    assert line.startswith("bad.jsonl:2: ")
    with pytest.raises(ConfigError, match=reason):
        read_rows("bad.jsonl")


def test_half_a_surrogate_pair_is_no_text(write, tokenizer):
    half = '{"text": "a\\ud800"}\n{"instruction": "a\\ud800", "output": "b"}'
    lines = refusal(load_examples, write("half.jsonl", half), tokenizer, 64).splitlines()
    assert [line[:13] for line in lines] == ["half.jsonl:1:", "half.jsonl:2:"]
    assert all("surrogates not allowed" in line for line in lines)


def test_up_to_ten_faults_are_listed(write, tokenizer):
    values = [
        [],
        5,
        "x",
        None,
        True,
        [5],
        [{}],
        [{"role": 5}],
        [{"role": "bot"}],
        [{"role": "user"}],
    ]
    bad = ["{]", *(json.dumps({"messages": value}) for value in values), "5", "null"]
    lines = refusal(
        load_examples, write("bad.jsonl", "\n".join([LINE, *bad])), tokenizer, 64
    ).splitlines()
    assert [line.split(": ")[0] for line in lines[:10]] == [f"bad.jsonl:{n}" for n in range(2, 12)]
    assert lines[10:] == ["and 3 more (recipes that train take --bad_rows drop)"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", "a.jsonl: no rows"),
        ("a.jsonl", " \n\n", "a.jsonl: no rows"),
        ("a.json", "", "a.json: no rows"),
        ("a.json", " [ \n] ", "a.json: no rows"),
        ("a.json", LINE + "\n{", "a.json row 2: not JSON in UTF-8: Expecting"),
        ("a.json", f"[{LINE}", "a.json: cannot be read: JSONDecodeError: Expecting"),
        ("a.json", f"[{LINE}] x", "a.json: cannot be read: JSONDecodeError: Extra data"),
        ("a.json", f"[{LINE},,]", "a.json: cannot be read: JSONDecodeError: Expecting"),
        ("a.jsonl", json.dumps([GOOD], indent=2), "an array belongs in a .json file"),
        ("a.jsonl", json.dumps([GOOD]), "an array belongs in a .json file"),
        ("a.jsonl", json.dumps(GOOD, indent=2), "not one object a line"),
        ("a.jsonl", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.json", "\n<!DOCTYPE html><html></html>", "an HTML page"),
        ("a.parquet", "PAR1", "a.parquet: cannot be read: ArrowInvalid: Parquet"),
        ("a.md", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"),
        ("a.xlsx", "PK", "a.xlsx: no .jsonl, .json, .csv"),
    ],
)
def test_files_that_hold_no_rows_are_told_why(write, name, content, message):
    assert message in refusal(read_rows, write(name, content))


def test_a_text_may_begin_with_a_tag(write):
    """As many a README.md, or a document of Wikipedia's dumps."""
    write("page.md", '<p align="center">A page</p>')
    assert [row.data["text"] for row in read_rows("page.md")] == ['<p align="center">A page</p>']


def test_characters_of_private_use_are_characters(write, tokenizer):
    """As icons in the text of web pages: they once stood for a picture."""
    text = "icon \ue0f2 \ue0f0here\ue0f1"
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
    write("a.jsonl", json.dumps({"messages": turns}))
    (example,) = load_examples("a.jsonl", tokenizer, 256)
    assert tokenizer.decode(example.ids).count(text) == 2


def test_a_list_of_files_may_be_longer_than_a_files_name(write):
    names = [write(f"part_{'x' * 60}_{i}.JSONL", LINE) for i in range(8)]
    assert len(list(read_rows(",".join(map(str, names))))) == 8


def test_a_wrong_name_is_told_before_a_row_of_the_others_is_read(write, tokenizer):
    write("bad.jsonl", "no JSON")
    assert "bda.jsonl: no such file" in refusal(load_examples, "bad.jsonl,bda.jsonl", tokenizer, 64)
    rows = Rows("bad.jsonl", 64, eval_dataset="bda.jsonl")
    assert "bda.jsonl: no such file" in refusal(load_data, rows, tokenizer)


def test_what_is_no_file_is_told_with_its_neighbour(write):
    write("train.jsonl", LINE)
    assert "trian.jsonl: no such file; did you mean train.jsonl?" in refusal(
        read_rows, "trian.jsonl"
    )
    assert "no such file" in refusal(read_rows, "nothing/like/this.jsonl")
    os.mkdir("folder.jsonl")
    assert "folder.jsonl: no .jsonl, .json" in refusal(read_rows, "folder.jsonl")


def test_what_is_about_a_folder_is_not_trained(write, tokenizer):
    """As a data set of the hub is downloaded: its card stood beside data/, and was trained alone."""
    os.makedirs("hub/data")
    for name in ("README.md", "license.txt", ".gitattributes", "data/train-00000-of-00001.jsonl"):
        write(f"hub/{name}", LINE)
    assert "(fix: 'hub/data', or" in refusal(read_rows, "hub")
    assert len(load_examples("hub/data", tokenizer, 64)) == 1
    write("hub/train.jsonl", LINE)
    assert len(load_examples("hub", tokenizer, 64)) == 1


def test_the_folder_that_is_named_for_an_empty_one_does_not_train_on_its_test_split(write):
    """The fix was once 'hub/data/*', and a pattern takes the files of all splits."""
    os.makedirs("hub/a/b")
    for split in ("train", "test"):
        write(f"hub/a/b/{split}-00000-of-00001.jsonl", LINE)
    named = refusal(read_rows, "hub").split("(fix: '")[1].split("'")[0]
    assert named == "hub/a/b"
    assert "files to test with beside others" in refusal(read_rows, named)


# --- rows -> examples


def test_rows_become_examples(write, tokenizer):
    file = write("chat.jsonl", "\n".join([LINE, json.dumps(TURNS)]))
    examples = load_examples(file, tokenizer, seq_len=512)
    first = examples[0]
    assert tokenizer.decode(list(first.ids)) == "User:\nHi\n\nAssistant:\nHello</s>\n\n"
    assert tokenizer.decode([label for label in first.labels if label != IGNORE]) == "Hello</s>"
    assert [item.where for item in examples] == ["chat.jsonl:1", "chat.jsonl:2"]
    assert not examples.dropped
    assert not sum(examples.notes.values())


def test_long_rows_are_cut_or_dropped_and_counted(write, tokenizer):
    long_answer = {"instruction": "a", "output": "b " * 300}
    long_question = {"instruction": "a " * 300, "output": "b"}
    file = write("rows.json", json.dumps([ALPACA, long_answer, long_question, long_question]))
    examples = load_examples(file, tokenizer, seq_len=64)
    assert [item.where for item in examples] == ["rows.json row 1", "rows.json row 2"]
    assert max(len(item.ids) for item in examples) == 64
    assert examples.notes["cut at --seq_len"] == 1
    assert examples.dropped == {"no trained token in the first 64 tokens": 2}
    message = refusal(
        load_examples, write("long.json", json.dumps([long_question] * 3)), tokenizer, seq_len=64
    )
    assert message == (
        "long.json: all 3 rows were dropped: 3 x no trained token in the first 64 tokens"
        " (fix: other rows; a larger --seq_len, if they are too long)"
    )


def test_each_row_is_read_by_its_own_form_and_the_forms_are_told(write, tokenizer):
    file = write("mixed.jsonl", "\n".join([LINE, LINE, json.dumps(ALPACA)]))
    examples = load_examples(file, tokenizer, seq_len=64)
    assert examples.sources() == ["mixed.jsonl: chat (2 rows), alpaca (1 rows)"]


def test_a_form_that_is_given_is_not_guessed(write, tokenizer):
    both = json.dumps({**ALPACA, "text": "Add. 1 and 2. 3"})
    file = write("both.jsonl", both)
    (plain,) = load_examples(file, tokenizer, seq_len=64, format="text")
    assert tokenizer.decode(list(plain.ids)) == "Add. 1 and 2. 3</s>"
    assert list(plain.labels) == list(plain.ids)
    assert len(load_examples(file, tokenizer, seq_len=64)[0].ids) > len(plain.ids)
    line = refusal(load_examples, file, tokenizer, seq_len=64, format="chat")
    assert line.startswith(
        "both.jsonl:1: messages: missing; the row has 'instruction', 'input', 'output'"
    )


def test_what_is_left_out_is_counted_in_the_summary(write, tokenizer):
    talk = [{"from": who, "value": who} for who in ("gpt", "human", "gpt")]
    examples = load_examples(
        write("s.json", json.dumps([{"conversations": talk}] * 3)), tokenizer, 64
    )
    assert "3 turns of the assistant before the first of the user left out" in examples.summary()


def test_the_fingerprint_follows_contents_and_order(write, tokenizer):
    def fingerprint(name, *rows):
        return load_examples(
            write(name, "\n".join(map(json.dumps, rows))), tokenizer, seq_len=64
        ).fingerprint

    other = {**ALPACA, "output": "4"}
    assert fingerprint("a.jsonl", ALPACA, other) == fingerprint(
        "b.jsonl", {**ALPACA, "id": 1}, other
    )
    assert fingerprint("a.jsonl", ALPACA, other) != fingerprint("b.jsonl", other, ALPACA)


def numbered(count: int, longest: int = 40) -> Examples:
    """Example i holds the id i + 1, 1 to `longest` times."""
    part = Part()
    part.rows = count
    for i in range(count):
        length = 1 + (7 * i) % longest
        part.add([i + 1] * length, b"\1" * length, f"f:{i}")
    return examples_of(part)


def examples_of(part: Part) -> Examples:
    part.close(Rows("f", 64))
    bounds = torch.tensor([0, *part.lengths]).cumsum(0)
    ids = torch.frombuffer(part.ids, dtype=torch.int32)
    loss_mask = torch.frombuffer(part.loss_mask, dtype=torch.uint8)
    trained = torch.tensor(part.trained_tokens)
    keys = torch.tensor(part.keys)
    return Examples(ids, loss_mask, bounds, trained, keys, part.where, **NO_REMARKS)


def test_a_row_is_held_out_whatever_stands_around_it():
    examples = numbered(500)
    train, held_out = split_by_hash(examples, 0.2)
    assert 60 < len(held_out) < 140
    assert len(train) + len(held_out) == 500
    others = Part()
    others.rows = 1
    for i in (i for i in reversed(range(0, 500, 2)) for _ in range(2)):
        others.add(examples[i].ids.tolist(), b"\1" * len(examples[i].ids), f"f:{i}")
    again = split_by_hash(examples_of(others), 0.2)[1]
    assert {item.where for item in again} == {item.where for item in held_out} & {*others.where}
    assert train.fingerprint != held_out.fingerprint != examples.fingerprint
    assert "--eval_share" in refusal(split_by_hash, numbered(1), 0.5)
    assert "--eval_share" in refusal(split_by_hash, examples, 1.0)
    assert "--eval_share 5.0 trains on nothing" in refusal(Rows, "not read", 64, eval_share=5.0)


def test_plain_text_is_cut_into_pieces_and_nothing_is_lost(write, tokenizer):
    text = "one two three four five six seven " * 20
    examples = load_examples(write("a.txt", text), tokenizer, seq_len=50)
    assert [len(item.ids) for item in examples][:-1] == [50] * (len(examples) - 1)
    ids = [token for item in examples for token in item.ids]
    assert tokenizer.decode(ids) == text + "</s>"
    assert not examples.notes["cut at --seq_len"]


def test_a_last_piece_of_one_token_which_nothing_predicts_is_left_out(write, tokenizer):
    """Alone in a micro-batch it would divide by no trained token."""
    (whole,) = load_examples(write("a.txt", "one two three four"), tokenizer, seq_len=64)
    examples = load_examples("a.txt", tokenizer, seq_len=len(whole.ids) - 1)
    assert [len(item.ids) for item in examples] == [len(whole.ids) - 1]


def test_the_sequences_of_one_row_are_held_out_together_but_not_the_pieces_of_a_file(
    write,
):
    tokenizer = of_kind("empty thoughts in the last answer")
    rows = []
    for i in range(40):
        turns = [f"Hi {i}", "Hello", "And?", f"Ho {i}"]
        roles = ("user", "assistant") * 2
        talk = [{"role": r, "content": c} for r, c in zip(roles, turns, strict=True)]
        rows.append(json.dumps({"messages": talk}))
    examples = load_examples(write("a.jsonl", "\n".join(rows)), tokenizer, 256)
    assert len(examples) == 80
    train, held_out = split_by_hash(examples, 0.3)
    assert not {item.where for item in train} & {item.where for item in held_out}
    pieces = load_examples(write("a.txt", "one two three four five six " * 60), tokenizer, 16)
    assert len(split_by_hash(pieces, 0.3)[1]) > 1


def test_an_answer_that_is_not_trained_leaves_the_one_before_untrained_too(write, tokenizer):
    turns = [*TURNS["messages"], {"role": "assistant", "content": "Ho", "weight": 0}]
    file = write("a.jsonl", json.dumps({"messages": turns}))
    assert "all 1 rows were dropped" in refusal(
        load_examples, file, tokenizer, 256, train_on="last_assistant"
    )


def test_rows_that_come_again_are_counted(write, tokenizer, capsys):
    file = write("twice.jsonl", "\n".join([LINE, LINE, json.dumps(TURNS)]))
    examples = load_examples(file, tokenizer, seq_len=64)
    assert examples.summary().endswith(", 1 the same as a row before")
    load_data(Rows(file, 64, eval_dataset=write("held.jsonl", LINE)), tokenizer)
    assert capsys.readouterr().out == "warning: 1 of 1 held-out rows are trained on too\n"


def test_columns_are_renamed_and_those_that_no_row_has_are_named(write, tokenizer):
    rows = [
        {"question": "1 + 1?", "answer": "2", "label_name": "sum"},
        {"question": "2?", "answer": "2"},
    ]
    file = write("sums.jsonl", "\n".join(map(json.dumps, rows)))
    assert "its keys are 'question', 'answer'" in refusal(load_examples, file, tokenizer, 64)
    read = load_examples(file, tokenizer, 64, columns="instruction=question, output=answer")
    assert tokenizer.decode(list(read[0].ids)) == "User:\n1 + 1?\n\nAssistant:\n2</s>\n\n"
    columns = "instruction=question,output=answer,input=inpt"
    assert refusal(load_examples, file, tokenizer, 64, columns=columns) == (
        "--columns input=inpt: no row has 'inpt'"
    )
    for wrong, why in (
        ("question", "'question' is no KEY=COLUMN"),
        ("question=prompt", "'question=prompt' is no KEY=COLUMN"),
        ("prompt=a,prompt=b", "'prompt=b' is no KEY=COLUMN, its key given twice"),
    ):
        assert why in refusal(load_examples, file, tokenizer, 64, columns=wrong)


BAD = [
    '{"messages": [{"role": "user", "content": "Hi"}, {"role": "bot", "content": "Hello"}]}',
    "{]",
    json.dumps({"txt": "a"}),
    json.dumps({**GOOD, "images": ["a.png"]}),
]


def test_bad_rows_are_dropped_counted_and_listed_if_asked(write, tokenizer, tmp_path):
    file = write(
        "chat.jsonl", "\n".join([BAD[0], LINE, BAD[1], BAD[2], LINE, BAD[3], json.dumps(TURNS)])
    )
    assert len(refusal(load_examples, file, tokenizer, 64).splitlines()) == 4
    examples = load_examples(file, tokenizer, 64, bad_rows="drop")
    assert [item.where for item in examples] == ["chat.jsonl:2", "chat.jsonl:5", "chat.jsonl:7"]
    assert [*examples.dropped.values()] == [4]
    assert "4 dropped: bad rows (the first: chat.jsonl:1: messages[1].role" in examples.summary()
    write_bad_rows(tmp_path, 1, examples, None)
    assert not (tmp_path / "bad_rows.jsonl").exists()
    write_bad_rows(tmp_path, 0, examples, None)
    listed = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["where"] for row in listed] == [f"chat.jsonl:{n}" for n in (1, 3, 4, 6)]
    assert [row["why"].split(":")[0].split(";")[0] for row in listed] == [
        "messages[1].role",
        "not JSON in UTF-8",
        "its keys are 'txt'",
        "images",
    ]
    only_bad = write("only_bad.jsonl", BAD[0])
    assert (
        "all 1 rows were dropped: 1 x bad rows (the first: only_bad.jsonl:1: messages[1]"
        in refusal(load_examples, only_bad, tokenizer, 64, bad_rows="drop")
    )


def shares(examples) -> list[int]:
    """How many examples count of each source."""
    rows = examples.numbers
    return [
        int(((rows >= origin.first) & (rows < origin.last)).sum()) for origin in examples.origins
    ]


@pytest.mark.parametrize(
    "name", ["a.jsonl:0", "a.jsonl:0,b.jsonl:0", "a.jsonl:2,b.jsonl:0", "a.jsonl:2,b.jsonl"]
)
def test_a_weight_of_0_and_a_source_without_one_are_refused(write, tokenizer, name):
    write("a.jsonl", LINE)
    write("b.jsonl", LINE)
    said = refusal(load_examples, name, tokenizer, 64)
    assert said.startswith(f"--dataset {name}: give every one a weight above 0, or none")


def test_weights_count_what_is_drawn_after_long_texts_are_cut_or_dropped(write, tokenizer):
    short = [{"instruction": f"a{i}", "output": "b"} for i in range(99)]
    long = [{"instruction": "word " * 300 if i % 2 else f"c{i}", "output": "d"} for i in range(60)]
    write("a.jsonl", "\n".join(map(json.dumps, short)))
    write("b.jsonl", "\n".join(map(json.dumps, long)))  # half of them are dropped
    write("c.txt", "one two three four five " * 100)  # cut into many pieces
    mixed = load_examples("a.jsonl:0.5,b.jsonl:0.5", tokenizer, 64)
    assert shares(mixed) == [30, 30]
    assert len({item.where for item in mixed}) == 60  # none twice
    pieces = load_examples("c.txt", tokenizer, 64)
    thirds = load_examples("a.jsonl:2,c.txt:1", tokenizer, 64)
    assert len(pieces) > 10
    assert shares(thirds) == [2 * len(pieces), len(pieces)]
    again = load_examples("a.jsonl:2,c.txt:1", tokenizer, 64)
    assert again.fingerprint == thirds.fingerprint != mixed.fingerprint
    assert shares(load_examples("a.jsonl,b.jsonl", tokenizer, 64)) == [99, 30]
    train, held_out = split_by_hash(mixed, 0.3)
    assert len(train) + len(held_out) == 60  # of those that are drawn
    assert "b.jsonl: weight 0.001 is no whole row (fix: a larger one" in refusal(
        load_examples, "a.jsonl:1,b.jsonl:0.001", tokenizer, 64
    )
    write("d.jsonl", json.dumps({"instruction": "word " * 300, "output": "d"}))
    assert "d.jsonl: no row is left of it" in refusal(
        load_examples, "a.jsonl:1,d.jsonl:1", tokenizer, 64
    )


def test_the_form_and_each_sources_share_are_told(write, tokenizer):
    write("a.jsonl", "\n".join([LINE] * 3))
    write("b.jsonl", json.dumps(ALPACA))
    assert load_examples("./a.jsonl", tokenizer, 64).sources() == ["./a.jsonl: chat (3 rows)"]
    examples = load_examples("a.jsonl:3,b.jsonl:1", tokenizer, 64)
    # Trained tokens: 3 x "Hello</s>", and "3</s>".
    trained = [int((item.labels != IGNORE).sum()) for item in examples]
    first = 3 * trained[0] / sum(trained)
    assert examples.sources() == [
        f"a.jsonl: chat (3 rows), 75.0% of rows, {first:.1%} of trained tokens (weight 3)",
        f"b.jsonl: alpaca (1 rows), 25.0% of rows, {1 - first:.1%} of trained tokens (weight 1)",
    ]
    os.mkdir("both")
    write("both/1.jsonl", LINE)
    write("both/2.jsonl", json.dumps(ALPACA))
    assert load_examples("both", tokenizer, 64).sources() == [
        "both: chat (1 rows), alpaca (1 rows)"
    ]


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000,
        json.dumps(TURNS)[:-1] + ', "tools": "' + "[" * 100_000 + '"}',
        json.dumps(TURNS)[:-1] + ', "more": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
    ],
)
def test_a_row_that_is_nested_too_deeply_is_a_bad_row(write, tokenizer, line):
    file = write("chat.jsonl", "\n".join([LINE, line, LINE]))
    said = refusal(load_examples, file, tokenizer, 64)
    assert said.startswith("chat.jsonl:2: ")
    assert "maximum recursion depth exceeded" in said
    assert len(load_examples(file, tokenizer, 64, bad_rows="drop")) == 2


def test_reading_ends_at_a_fault_once_many_rows_are_read(write, tokenizer, monkeypatch):
    monkeypatch.setattr(data, "ENOUGH", 100)
    file = write("endless.jsonl", "\n".join([LINE] * 10 + [BAD[0]] * 5000))
    # of 128 rows, two chunks; rows with the same fault share a line
    first = ", ".join(f"{file}:{line}" for line in range(11, 16))
    said = refusal(load_examples, file, tokenizer, 64)
    assert said.startswith(f"{first} and 113 more: messages[1].role: 'bot' is not one of")
    assert "\n" not in said


# --- examples -> global batches


def rows_of(batches) -> list[str]:
    return sorted(where for batch in batches for where in batch.where if where != "filler")


@pytest.mark.parametrize("rows", [1, 3, 23, 64])
@pytest.mark.parametrize(
    ("ranks", "batch_size"), [(1, 16), (1, 3), (2, 8), (4, 1), (3, 2), (16, 1)]
)
def test_global_batches_do_not_depend_on_ranks_or_batch_size(rows, ranks, batch_size):
    examples, size = numbered(rows), 16
    loaders = [
        GlobalBatches(examples, 7, size, batch_size, rank, ranks, pad_id=0) for rank in range(ranks)
    ]
    steps = loaders[0].per_epoch
    assert steps == -(-rows // size)
    for epoch in range(2):
        order = permutation(rows, f"{examples.fingerprint} 7 {epoch}").tolist()
        for k in range(steps):
            dealt = [loader.batches(epoch * steps + k) for loader in loaders]
            # equally many collectives on all ranks
            assert len({len(batches) for batches in dealt}) == 1
            want = sorted(f"f:{i}" for i in order[k * size : (k + 1) * size])
            assert rows_of([batch for batches in dealt for batch in batches]) == want


def test_every_row_is_trained_once_an_epoch_in_a_new_order():
    loader = GlobalBatches(numbered(50), 0, 8, 4, 0, 1, pad_id=0)
    epochs = [[rows_of(loader.batches(step)) for step in range(e * 7, e * 7 + 7)] for e in range(2)]
    assert [len(step) for step in epochs[0]] == [8] * 6 + [2]
    assert (
        sorted(sum(epochs[0], []))
        == sorted(sum(epochs[1], []))
        == sorted(f"f:{i}" for i in range(50))
    )
    assert epochs[0] != epochs[1]
    other_seed = GlobalBatches(numbered(50), 1, 8, 4, 0, 1, pad_id=0)
    assert rows_of(other_seed.batches(0)) != epochs[0][0]


def test_the_order_is_the_same_everywhere():
    """Written down once: if this changes, a resumed run would see other rows."""
    assert permutation(10, "fingerprint 0 0").tolist() == [4, 6, 7, 8, 1, 5, 0, 2, 9, 3]


def test_a_rank_without_rows_gives_fillers_that_teach_nothing():
    loaders = [GlobalBatches(numbered(1), 0, 4, 1, rank, 2, pad_id=9) for rank in range(2)]
    real, filler = (loader.batches(0) for loader in loaders)
    assert len(real) == len(filler) == 1
    assert (filler[0].labels != IGNORE).sum() == 0
    assert filler[0].tokens == 0  # else the metrics would count them
    assert filler[0].ids.tolist() == [[9] * 8]
    assert filler[0].mask.any(dim=1).all()  # attention over nothing would be NaN


def test_lengths_are_balanced_over_ranks():
    examples = numbered(256)
    loaders = [GlobalBatches(examples, 0, 128, 2, rank, 4, pad_id=0) for rank in range(4)]
    tokens = [sum(int(batch.mask.sum()) for batch in loader.batches(0)) for loader in loaders]
    assert max(tokens) < 1.03 * min(tokens)
    shapes = [[batch.ids.shape[1] for batch in loader.batches(0)] for loader in loaders]
    assert max(abs(a - b) for a, b in zip(shapes[0], shapes[3], strict=True)) <= 8


@pytest.mark.parametrize("multiple", [8, 64])
def test_the_longest_row_is_planned_as_it_is_padded(multiple):
    examples = numbered(9)
    batch = collate(list(examples), 0, multiple)
    assert longest_row(multiple, examples, None) == batch.ids.shape[1]


def test_a_batch_is_padded_on_the_right_to_a_multiple_of_eight():
    first = Example(torch.tensor([5, 6, 7]), torch.tensor([5, IGNORE, 7]), "a")
    batch = collate([first, numbered(2)[1]], 0, 8)
    assert batch.ids.tolist() == [[5, 6, 7, 0, 0, 0, 0, 0], [2] * 8]
    assert batch.labels.tolist() == [[IGNORE, IGNORE, 7] + [IGNORE] * 5, [IGNORE] + [2] * 7]
    assert batch.mask.tolist() == [[True] * 3 + [False] * 5, [True] * 8]
    assert (batch.ids.dtype, batch.labels.dtype, batch.mask.dtype) == (
        torch.int64,
        torch.int64,
        torch.bool,
    )
    assert batch.where == ["a", "f:1"]
    assert batch.to(torch.device("meta")).ids.device.type == "meta"


# --- what inference asks for


def of_kind(kind):
    tokenizer = byte_level(False)
    tokenizer.chat_template = KINDS[kind].template
    return tokenizer


def test_a_row_that_inference_would_ask_for_otherwise_is_told_once(write, capsys):
    write("a.jsonl", f"{LINE}\n{LINE}\n")
    opened = load_examples(
        "a.jsonl", of_kind("a prompt that opens thoughts which no answer has"), 256
    )
    print_data("a.jsonl", GlobalBatches(opened, 0, 1, 1, 0, 1, 0), None)
    out = capsys.readouterr().out
    assert out.count(f", 2 {DIFFERS} (the first: a.jsonl:1)") == 1
    closed = load_examples("a.jsonl", of_kind("empty thoughts in the last answer"), 256)
    assert DIFFERS not in closed.summary()


def test_a_note_names_its_first_row(write):
    thought = {
        "messages": [GOOD["messages"][0], GOOD["messages"][1] | {"reasoning_content": "So."}]
    }
    write("a.jsonl", "\n".join([LINE, json.dumps(thought), json.dumps(thought)]))
    summary = load_examples("a.jsonl", of_kind("plain"), 256).summary()
    template = "the chat template of the tokenizer"
    assert (
        f"2 rows with reasoning_content, which {template} does not write (the first: a.jsonl:2)"
        in summary
    )


def test_each_answer_of_a_row_may_be_a_sequence_of_its_own(write):
    turns = [
        *GOOD["messages"],
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Ho"},
    ]
    write("a.jsonl", json.dumps({"messages": turns}))
    tokenizer = of_kind("empty thoughts in the last answer")
    examples = load_examples("a.jsonl", tokenizer, 256)
    assert [item.where for item in examples] == ["a.jsonl:1", "a.jsonl:1"]
    assert "1 rows became several sequences, one for each answer" in examples.summary()
    assert len(load_examples("a.jsonl", tokenizer, 256, train_on="last_assistant")) == 1
