"""The usual ways in which data is wrong, and what `preview.py` says about each: one table.

python -m pytest tests/test_bad_rows.py

The first column names the case. What is accepted shows how many rows it has.
"""

# ruff: noqa: E501 - one case a line
import gzip
import json
import os
import re
import socket
import sys
from dataclasses import replace

import finetune
import preview
import pyarrow
import pyarrow.parquet
import pytest
import torch
from generate import read_rows
from test_data import examples_of
from tiny import tiny_config, tiny_model_folder
from transformers import AutoModelForCausalLM

from utils.data.encode import Part
from utils.data.examples import check_positions
from utils.run.distributed import stop_distributed
from utils.run.errors import ConfigError

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
CHAT = {"messages": [USER, ANSWER]}
ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
GPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
LINE = json.dumps(CHAT)
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
HTML = "<!DOCTYPE html><html><body>404</body></html>"


def lines(*rows) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def chat(*turns, **more) -> dict:
    return {"messages": list(turns), **more}


def gpt(*turns) -> dict:
    return {"conversations": [{"from": who, "value": what} for who, what in turns]}


def parquet(rows: list) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()


def alpaca(**changes) -> dict:
    row = ALPACA | changes
    return {key: value for key, value in row.items() if value is not ...}


class Taken(str):
    """What the plan says about rows that are accepted."""


TABLE = [  # case, file's name, its content, what is said: Taken(...), else the refusal
    (
        "a last line cut short",
        "a.jsonl",
        lines(LINE, LINE) + '{"messages": [{"ro',
        "a.jsonl:3: not JSON in UTF-8: Unterminated string",
    ),
    (
        "not quite JSON",
        "a.jsonl",
        lines(LINE, '{"messages": [],}'),
        "a.jsonl:2: not JSON in UTF-8: Illegal trailing comma before end of object: line 1 column 16"
        if sys.version_info >= (3, 13)
        else "a.jsonl:2: not JSON in UTF-8: Expecting property name enclosed in double quotes: line 1 column 17",
    ),
    (
        "not quite JSON",
        "a.jsonl",
        lines(LINE, "{'messages': []}"),
        "a.jsonl:2: not JSON in UTF-8: Expecting property name enclosed in double quotes: line 1 column 2",
    ),
    (
        "not quite JSON",
        "a.jsonl",
        lines(LINE, str(chat(USER, ANSWER, x=None))),
        "a.jsonl:2: not JSON in UTF-8: Expecting property name enclosed in double quotes: line 1 column 2",
    ),
    (
        "not quite JSON",
        "a.jsonl",
        lines("// chats", LINE),
        "a.jsonl:1: not JSON in UTF-8: Expecting value",
    ),
    (
        "two rows in one line",
        "a.jsonl",
        lines(LINE, LINE + LINE),
        "a.jsonl:2: not JSON in UTF-8: Extra data: line 1 column 93 (char 92) (fix: repair it;"
        " recipes that train also take --bad_rows drop)",
    ),
    (
        "indented JSON",
        "a.jsonl",
        json.dumps([CHAT], indent=1),
        "a.jsonl:1: not one object a line; an array belongs in a .json file",
    ),
    ("indented JSON", "a.jsonl", json.dumps(CHAT, indent=1), "a.jsonl:1: not one object a line"),
    (
        "turns without a key, as nanochat's",
        "a.jsonl",
        lines([USER, ANSWER], LINE),
        Taken(": 2 rows"),
    ),
    ("the wrong extension", "a.jsonl", json.dumps([CHAT]), "an array belongs in a .json file"),
    (
        "the wrong extension",
        "a.json",
        lines(LINE, LINE),
        Taken("a.json: 2 rows"),
    ),
    (
        "a line that is no object",
        "a.jsonl",
        lines(LINE, "[]"),
        "a.jsonl:2: messages: no assistant turn",
    ),
    (
        "a line that is no object",
        "a.jsonl",
        lines(LINE, '"x"'),
        "a.jsonl:2: expected object, got text",
    ),
    (
        "a line that is no object",
        "a.jsonl",
        lines(LINE, "5"),
        "a.jsonl:2: expected object, got number",
    ),
    (
        "a line that is no object",
        "a.jsonl",
        lines(LINE, "null"),
        "a.jsonl:2: expected object, got null",
    ),
    ("empty lines", "a.jsonl", f"\n{LINE}\r\n \n{LINE}", Taken(": 2 rows")),
    ("empty lines", "a.jsonl", f"\n{LINE}\r\n \n5", "a.jsonl:4: expected object, got number"),
    ("a byte order mark", "a.jsonl", "\ufeff" + lines(LINE), Taken(": 1 rows")),
    ("a byte order mark", "a.jsonl", lines(LINE, "\ufeff" + LINE), Taken(": 2 rows")),
    ("not UTF-8", "a.jsonl", LINE.encode("utf-16"), "a.jsonl:1: not JSON in UTF-8: "),
    (
        "not UTF-8",
        "a.jsonl",
        lines(LINE).encode() + b'{"x": "caf\xe9"}',
        "a.jsonl:2: not JSON in UTF-8: 'utf-8' codec can't decode byte 0xe9 in position 10",
    ),
    ("half of a surrogate pair", "a.jsonl", lines(LINE, '{"text": "\\ud800"}'), "a.jsonl:2: "),
    (
        "a NUL",
        "a.jsonl",
        lines(chat(USER, {"role": "assistant", "content": "a\0b"})),
        Taken(": 1 rows"),
    ),
    (
        "a NUL",
        "a.jsonl",
        lines(LINE, '{"x": "a\0b"}'),
        "a.jsonl:2: not JSON in UTF-8: Invalid control character",
    ),
    (
        "unusual Unicode",
        "a.jsonl",
        lines(chat(USER, {"role": "assistant", "content": "a\u2028b\x85👩\u200d👩\u202eZ̸͕"})),
        Taken(": 1 rows"),
    ),
    (
        "a very long answer",
        "a.jsonl",
        lines(chat(USER, {"role": "assistant", "content": "word " * 40_000})),
        Taken("1 cut at --seq_len"),
    ),
    ("no rows", "a.jsonl", "", "a.jsonl: no rows"),
    ("no rows", "a.jsonl", " \n\n", "a.jsonl: no rows"),
    ("no rows", "a.json", "[]", "a.json: no rows"),
    ("no such file", "b.jsonl", LINE, "a.jsonl: no such file; did you mean b.jsonl?"),
    ("gzip", "a.jsonl.gz", gzip.compress(lines(LINE).encode(), mtime=0), Taken(": 1 rows")),
    (
        "bad gzip",
        "a.jsonl.gz",
        gzip.compress(lines(LINE).encode(), mtime=0)[:-12],
        "a.jsonl.gz: cannot be read: ",
    ),
    ("bad gzip", "a.jsonl.gz", lines(LINE), "a.jsonl.gz: cannot be read: "),
    ("a Git LFS pointer", "a.jsonl", LFS, "git lfs pull"),
    ("an HTML page", "a.json", HTML, "an HTML page"),
    ("CSV", "a.csv", 'instruction,output\n"Say\nblue",blue\n', Taken(": 1 rows")),
    ("CSV", "a.csv", "instruction,output\na,b\nc\n", "a.csv row 3: output: missing"),
    ("CSV", "a.csv", "instruction;output\na;b\n", "a.csv row 2: its keys are 'instruction;output'"),
    ("Parquet", "a.parquet", parquet([ALPACA]), Taken(": 1 rows")),
    (
        "Parquet",
        "a.parquet",
        parquet([{"question": "a", "answer": "b"}]),
        "a.parquet row 1: its keys are 'question', 'answer'; the rows that can be read have messages",
    ),
    (
        "Parquet",
        "a.parquet",
        parquet([ALPACA] * 99)[:500],
        "a.parquet: cannot be read: ArrowInvalid: Parquet",
    ),
    ("Parquet", "a.parquet", "a,b\n1,2\n", "a.parquet: cannot be read: ArrowInvalid: Parquet"),
    ("a repeated row", "a.jsonl", lines(LINE, LINE), Taken("1 the same as a row before")),
    (
        "unknown keys",
        "a.jsonl",
        lines(ALPACA, alpaca(instruction=..., text_="x")),
        "a.jsonl:2: its keys are",
    ),
    ("no output", "a.jsonl", lines(ALPACA, alpaca(output=...)), "a.jsonl:2: output: missing"),
    ("no output", "a.jsonl", lines(ALPACA, alpaca(output="")), "a.jsonl:2: output: empty"),
    (
        "no output",
        "a.jsonl",
        lines(ALPACA, alpaca(output=None)),
        "a.jsonl:2: output: expected text, got null",
    ),
    (
        "no input",
        "a.jsonl",
        lines(ALPACA, alpaca(input=...), alpaca(input=None), alpaca(input="")),
        Taken(": 4 rows"),
    ),
    (
        "an instruction of a wrong type",
        "a.jsonl",
        lines(ALPACA, alpaca(instruction=["a"])),
        "a.jsonl:2: instruction: expected text, got list",
    ),
    (
        "an instruction of a wrong type",
        "a.jsonl",
        lines(ALPACA, alpaca(instruction=5)),
        "a.jsonl:2: instruction: expected text, got number",
    ),
    ("extra keys", "a.jsonl", lines(ALPACA | {"id": 5, "source": {}}), Taken(": 1 rows")),
    (
        "no conversation",
        "a.jsonl",
        lines(GPT, {"conversations": None}),
        "a.jsonl:2: conversations: expected list, got null",
    ),
    (
        "no conversation",
        "a.jsonl",
        lines(GPT, {"conversations": {}}),
        "a.jsonl:2: conversations: expected list, got object",
    ),
    (
        "no conversation",
        "a.jsonl",
        lines(GPT, {"conversations": []}),
        "a.jsonl:2: conversations: no assistant turn",
    ),
    (
        "a turn without role or text",
        "a.jsonl",
        lines({"conversations": [{"value": "Hi"}]}),
        "a.jsonl:1: conversations[0].from: missing",
    ),
    (
        "a turn without role or text",
        "a.jsonl",
        lines({"conversations": [{"from": "human"}]}),
        "a.jsonl:1: conversations[0].value: missing",
    ),
    (
        "an unknown role",
        "a.jsonl",
        lines(gpt(("bot", "Hi"))),
        "conversations[0].from: 'bot' is not one of system, developer, user",
    ),
    (
        "an unknown role",
        "a.jsonl",
        lines(gpt(("HUMAN", "Hi"))),
        "conversations[0].from: 'HUMAN' is not one of",
    ),
    (
        "an unknown role",
        "a.jsonl",
        lines(gpt((5, "Hi"))),
        "conversations[0].from: expected text, got number",
    ),
    (
        "an answer first or a question last",
        "a.jsonl",
        lines(gpt(("gpt", "a"), ("human", "b"), ("gpt", "c"))),
        Taken("1 turns of the assistant before the first"),
    ),
    (
        "an answer first or a question last",
        "a.jsonl",
        lines(gpt(("human", "b"), ("gpt", "c"), ("human", "d"))),
        Taken(": 1 rows"),
    ),
    (
        "one role twice in a row",
        "a.jsonl",
        lines(gpt(("human", "a"), ("human", "b"))),
        "conversations[1].from: expected assistant, got human",
    ),
    (
        "one role twice in a row",
        "a.jsonl",
        lines(gpt(("human", "a"), ("gpt", "b"), ("gpt", "c"))),
        "conversations[2].from: expected user or tool, got gpt",
    ),
    (
        "a system turn in a wrong place",
        "a.jsonl",
        lines(gpt(("human", "a"), ("system", "b"))),
        "conversations[1].from: expected assistant, got system",
    ),
    (
        "a system turn in a wrong place",
        "a.jsonl",
        lines(gpt(("system", "a"), ("system", "b"))),
        "conversations[1].from: expected user, got system",
    ),
    *(
        (
            "a turn without text",
            "a.jsonl",
            lines(gpt(("human", value))),
            f"conversations[0].value: {said}",
        )
        for value, said in (
            ("", "empty"),
            (" \n", "empty"),
            (None, "expected text, got null"),
            (5, "expected text, got number"),
            ({}, "expected text, got object"),
        )
    ),
    (
        "no assistant turn",
        "a.jsonl",
        lines(chat({"role": "system", "content": "x"})),
        "messages: no assistant turn, so there is nothing to learn",
    ),
    (
        "calls in ShareGPT form",
        "a.jsonl",
        lines(
            gpt(
                ("human", "a"),
                ("function_call", '{"name": "add", "arguments": {}}'),
                ("observation", "3"),
                ("gpt", "3"),
            )
            | {"tools": "[]"}
        ),
        Taken(": 1 rows"),
    ),
    (
        "calls in OpenAI form",
        "a.jsonl",
        lines(
            chat(
                USER,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "2"},
                ANSWER,
            )
        ),
        Taken(": 1 rows"),
    ),
    (
        "arguments that are no object",
        "a.jsonl",
        lines(
            chat(
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALL | {"function": {"name": "add", "arguments": "{a: 1}"}}],
                },
                ANSWER,
            )
        ),
        "messages[1].tool_calls[0].function.arguments: not JSON",
    ),
    (
        "arguments that are no object",
        "a.jsonl",
        lines(
            chat(
                USER,
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [CALL | {"function": {"name": "add", "arguments": 5}}],
                },
                ANSWER,
            )
        ),
        "function.arguments: expected an object as JSON, got number",
    ),
    (
        "tools that are not JSON",
        "a.jsonl",
        lines(chat(USER, ANSWER, tools="add(a, b)")),
        "a.jsonl:1: tools: not JSON",
    ),
    (
        "parts that are no text",
        "a.jsonl",
        lines(chat({"role": "user", "content": [{"type": "image"}]}, ANSWER)),
        "messages[0].content[0].type: 'image' is no text; here a row has one text answer",
    ),
    (
        "parts that are no text",
        "a.jsonl",
        lines(chat({"role": "user", "content": [{"type": "text"}]}, ANSWER)),
        "messages[0].content[0].text: missing",
    ),
    (
        "special tokens in text",
        "a.jsonl",
        lines(chat({"role": "user", "content": "</s> <|im_end|>"}, ANSWER)),
        Taken("1 rows in which text spells a special token, which stays text"),
    ),
    (
        "a prompt beyond --seq_len",
        "a.jsonl",
        lines(LINE, chat({"role": "user", "content": "Hi " * 300}, ANSWER)),
        Taken("1 dropped: no trained token in the first 256 tokens"),
    ),
    (
        "a prompt beyond --seq_len",
        "a.jsonl",
        lines(chat({"role": "user", "content": "Hi " * 300}, ANSWER)),
        "all 1 rows were dropped: 1 x no trained token in the first 256 tokens (fix:",
    ),
    (
        "plain text",
        "a.txt",
        b"\x89PNG\r\n\x1a\n\0\0\0",
        "a.txt: cannot be read: UnicodeDecodeError: 'utf-8' codec",
    ),
    ("plain text", "a.txt", "word " * 2200, Taken(": 43 rows, 11,001 tokens, 100% trained")),
    (
        "plain text",
        "a.jsonl",
        lines({"text": "a"}, {"text": None}),
        "a.jsonl:2: text: expected text, got null",
    ),
    (
        "plain text",
        "a.jsonl",
        lines({"text": "some words"}, {"text": " "}),
        Taken("1 dropped: no trained token"),
    ),
    (
        "token ids",
        "a.jsonl",
        lines({"input_ids": [5, 6, 7]}),
        Taken(": 1 rows, 3 tokens, 100% trained"),
    ),
    (
        "token ids",
        "a.jsonl",
        lines({"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}),
        Taken("67% trained"),
    ),
    (
        "token ids",
        "a.jsonl",
        lines({"input_ids": [5, 6]}, {"input_ids": [5, 99999]}),
        "a.jsonl:2: input_ids[1]: 99999 is no token; they are 0 to ",
    ),
    ("token ids", "a.jsonl", lines({"input_ids": [-1]}), "a.jsonl:1: input_ids[0]: -1 is no token"),
    (
        "token ids",
        "a.jsonl",
        lines({"input_ids": [1.0]}),
        "a.jsonl:1: input_ids[0]: 1.0 is no token",
    ),
    (
        "token ids",
        "a.jsonl",
        lines({"input_ids": [1, 2], "labels": [1]}),
        "a.jsonl:1: labels: 1 of them for 2 input_ids",
    ),
    (
        "labels moved by one",
        "a.jsonl",
        lines({"input_ids": [5, 6, 7], "labels": [6, 7, -100]}),
        "a.jsonl:1: labels[0]: expected -100 or 5, the id, got 6",
    ),
    (
        "labels with another mark than -100",
        "a.jsonl",
        lines({"input_ids": [5, 6, 7], "labels": [None, 6, 7]}),
        "a.jsonl:1: labels[0]: expected -100 or 5, the id, got None",
    ),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("bad_rows") / "model", vocab_size=271)


@pytest.fixture
def said(model, tmp_path, monkeypatch, capsys):
    """said(dataset, **flags) -> what `preview.py` prints, or the one line with which it refuses."""
    monkeypatch.chdir(tmp_path)

    def run(dataset: str, **flags) -> str:
        flags = {"model": str(model), "seq_len": 256} | flags
        try:
            preview.main(preview.Config(dataset=dataset, show=0, **flags))
        except ConfigError as error:
            answer = f"refused: {error}"
        else:
            return capsys.readouterr().out
        assert "\n" not in answer
        return answer

    return run


def write(name: str, content) -> str:
    with open(name, "wb") as file:
        file.write(content if isinstance(content, bytes) else content.encode())
    return name


CALLS = ("calls in ShareGPT form", "calls in OpenAI form")


@pytest.mark.parametrize(("case", "name", "content", "expected"), TABLE)
def test_a_file_is_read_or_refused_in_one_line(said, case, name, content, expected):
    write(name, content)
    # one that writes calls of tools
    template = {"chat_template": "chatml"} if case in CALLS else {}
    answer = said("a.jsonl" if case == "no such file" else name, **template)
    assert expected in answer
    assert answer.startswith("--- world" if isinstance(expected, Taken) else "refused: ")


@pytest.mark.parametrize("case", CALLS)
def test_calls_that_the_template_does_not_write_are_refused_by_row_and_template(said, case):
    """Otherwise a model learns to say nothing in their place, as in all 153 rows of a real file."""
    write("a.jsonl", next(content for name, _, content, _ in TABLE if name == case))
    expected = (
        r"refused: a.jsonl:1: tool_calls of turn 2: the chat template of \S+/model does not write"
    )
    assert re.match(expected, said("a.jsonl"))


def test_what_is_no_file_is_refused_without_hanging(said):
    os.mkdir("empty")
    os.mkfifo("pipe.jsonl")
    os.symlink("gone.jsonl", "dangling.jsonl")
    os.symlink("loop.jsonl", "loop.jsonl")
    listening = socket.socket(socket.AF_UNIX)
    listening.bind("socket.jsonl")
    listening.close()
    for name in ("pipe.jsonl", "socket.jsonl"):
        assert f"{name}: no such file" in said(name), name
    assert "empty: no .jsonl" in said("empty")
    assert "dangling.jsonl: no such file" in said("dangling.jsonl")
    assert "loop.jsonl: no such file" in said("loop.jsonl")


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.chmod(write("secret.jsonl", LINE), 0)
    tmp_path.chmod(0o755)
    user = os.geteuid()
    os.seteuid(user or 65534)  # modes do not stop root, so it becomes another user for a moment
    try:
        with pytest.raises(
            ConfigError, match="^secret.jsonl: cannot be read: PermissionError: .*Permission denied"
        ):
            read_rows("secret.jsonl")
    finally:
        os.seteuid(user)


def test_patterns_that_match_nothing_and_folders_of_several_kinds(said):
    assert "data/*.jsonl: no .jsonl" in said("data/*.jsonl")
    os.mkdir("data")
    write("data/a.jsonl", LINE)
    write("data/b.csv", "instruction,output\na,b\n")
    assert "data: files of several kinds, .csv, .jsonl" in said("data")
    assert ": 1 rows" in said("data/*.jsonl")
    write("data/c.jsonl.zst", "(\xb5/\xfd")  # it was left out without a word
    os.remove("data/b.csv")
    assert "data: files of several kinds, .jsonl, .zst (fix: " in said("data")
    os.remove("data/a.jsonl")
    assert "data: no .jsonl, .json" in said("data")


def test_the_same_file_twice_is_counted(said):
    write("a.jsonl", LINE)
    assert "1 the same as a row before" in said("a.jsonl,a.jsonl")


def test_data_sets_of_several_forms_may_be_mixed(said):
    write("a.jsonl", lines(LINE))
    write("b.jsonl", lines(ALPACA))
    write("c.txt", "plain text")
    assert ": 3 rows" in said("a.jsonl,b.jsonl,c.txt")


def test_a_blank_text_file_is_dropped_and_counted(said):
    os.mkdir("texts")
    write("texts/a.txt", " \n")
    blank = "no trained token in the first 256 tokens"
    assert f"texts: all 1 rows were dropped: 1 x {blank}" in said("texts")
    write("texts/b.txt", "plain text")
    assert f", 1 dropped: {blank}" in said("texts")


@pytest.mark.parametrize(
    ("case", "template", "expected"),
    [
        (
            "a syntax error",
            "{% for m in messages %}{{ m.content",
            "template.jinja cannot render user",
        ),
        (
            "an exception",
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "{{ m.content }}</s>{% endfor %}",
            "template.jinja cannot render system: no system",
        ),
        (
            "a way out of the sandbox",
            "{{ ''.__class__.__mro__ }}{% for m in messages %}{{ m.content }}</s>{% endfor %}",
            "cannot render user",
        ),
    ],
)
def test_a_template_that_fails_is_named_with_the_role(said, case, template, expected):
    write("template.jinja", template)
    write("a.jsonl", lines(chat({"role": "system", "content": "x"}, USER, ANSWER)))
    answer = said("a.jsonl", chat_template="template.jinja")
    assert answer.startswith("refused: ")
    assert expected in answer


def test_rows_that_are_held_out_and_trained_on_are_counted(said):
    write("a.jsonl", lines(LINE, chat(USER, {"role": "assistant", "content": "Ho"})))
    assert "warning: 2 of 2 held-out rows are trained on too" in said(
        "a.jsonl", eval_dataset="a.jsonl"
    )


def test_labels_are_refused_by_row(said):
    write("kto.jsonl", lines(ALPACA, ALPACA | {"kto_tag": False}))
    expected = "refused: kto.jsonl:2: kto_tag: preference pairs and answers with labels (KTO)"
    assert said("kto.jsonl").startswith(expected)


def test_one_object_and_a_list_in_an_object_are_rows(said):
    write("one.json", json.dumps(CHAT, indent=1))
    assert ": 1 rows" in said("one.json")
    write("several.json", json.dumps({"version": 1, "data": [ALPACA, ALPACA | {"output": "4"}]}))
    assert ": 2 rows" in said("several.json")
    write("two_lists.json", json.dumps({"train": [ALPACA], "test": [ALPACA]}))
    assert "two_lists.json row 1: its keys are 'train', 'test'" in said("two_lists.json")


def test_the_form_and_dropped_rows_are_told(said):
    write("a.jsonl", lines(LINE, "{]", "{]", LINE))
    write("b.jsonl", lines(ALPACA))
    answer = said("a.jsonl,b.jsonl", bad_rows="drop")
    assert "form      a.jsonl: chat (2 rows), 66.7% of rows, " in answer
    assert "form      b.jsonl: alpaca (1 rows), 33.3% of rows, " in answer
    named = "a.jsonl:2, a.jsonl:3: not JSON in UTF-8: Expecting property name"
    assert f"2 dropped: bad rows (the first: {named}" in answer


def test_dolly_and_alpaca_are_read_with_the_flags_that_their_errors_name(said):
    dolly = {"instruction": "Who?", "context": "Ann did.", "response": "Ann", "category": "qa"}
    write("dolly.jsonl", lines(dolly))
    answer = said("dolly.jsonl")
    assert "dolly.jsonl:1: output: missing; the row has 'instruction', 'context'" in answer
    assert "--columns output=THEIRS; a column beside the instruction is input=THEIRS" in answer
    answer = said("dolly.jsonl", columns="output=response,input=context")
    assert ": 1 rows" in answer
    assert "context" not in answer  # no ignored key
    # Some of its answers are empty, and its "text" is the prompt with the answer.
    alpaca = [ALPACA | {"text": "### Instruction: ..."}, ALPACA | {"output": "", "text": "### ..."}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(alpaca), "alpaca.parquet")
    answer = said("alpaca.parquet")
    assert "alpaca.parquet row 2: output: empty" in answer
    assert "leave out such rows with --bad_rows drop" in answer
    answer = said("alpaca.parquet", bad_rows="drop")
    assert ": 1 rows" in answer
    assert "1 dropped: bad rows" in answer


def test_columns_of_the_command_line(said):
    write("a.csv", "question,answer\n1 + 1?,2\n")
    assert "form      a.csv: completion" in said(
        "a.csv", columns="prompt=question,completion=answer"
    )
    columns = "prompt=question,completion=anser"
    assert "a.csv row 2: completion: missing; the row has 'answer', 'prompt'" in said(
        "a.csv", columns=columns
    )
    columns = "prompt=question,completion=answer,tools=tols"
    assert "--columns tools=tols: no row has 'tols'" in said("a.csv", columns=columns)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"adapter": "nowhere"}, "nowhere: adapter_config.json is missing"),
        (
            {"global_batch_size": 12, "batch_size": 8, "grad_accum": 1},
            "--grad_accum 1 x --batch_size 8 x 1 ranks is not --global_batch_size 12 (fix: ",
        ),
        ({"lora_rank": 4, "lora_targets": "no_such_proj"}, "--lora_targets"),
        ({"lora_rank": 4, "modules_to_save": "nothing"}, "--modules_to_save"),
        ({"shard": 3}, "--shard 3 does not make 1 ranks"),
        ({"columns": "foo=bar"}, "'foo=bar' is no KEY=COLUMN"),
    ],
)
def test_the_check_refuses_what_the_run_refuses_and_leaves_nothing(said, model, flags, expected):
    write("a.jsonl", lines(LINE))
    before = sorted(os.listdir())
    answer = said("a.jsonl", **flags)
    assert answer.startswith("refused: ")
    assert expected in answer
    try:
        with pytest.raises(ConfigError) as refused:
            finetune.main(
                finetune.Config(dataset="a.jsonl", model=str(model), seq_len=256, **flags)
            )
    finally:
        stop_distributed()
    assert f"refused: {refused.value}" == answer
    assert sorted(os.listdir()) == before


def test_a_check_that_passes_leaves_nothing_and_says_what_it_has_seen(said, model):
    write(
        "a.jsonl",
        lines(*[chat(USER, {"role": "assistant", "content": "a" * i}) for i in range(1, 8)]),
    )
    before = sorted(os.listdir())
    answer = said("a.jsonl", lora_rank=4, quantization="8bit", global_batch_size=4)
    assert "4 rows: 1 ranks with 4 micro-batches of at most 1; 2 steps" in answer
    assert "checked   all that a run checks before it reads weights" in answer
    assert sorted(os.listdir()) == before


def test_an_own_model_is_not_trained_on_the_rows_of_the_demo(model, tmp_path):
    with pytest.raises(
        ConfigError, match="--dataset .*empty .fix: --dataset FILE, the rows to train"
    ):
        finetune.main(finetune.Config(model=str(model), output_dir=str(tmp_path / "run")))


def test_rows_are_not_padded_beyond_seq_len_and_learned_positions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model_folder(tmp_path / "m", "gpt2", max_position_embeddings=100, vocab_size=271)
    write("a.jsonl", lines({"text": "word " * 50}))
    settings = {"seq_len": 100, "steps": 3, "param_dtype": "fp32", "output_dir": "run"}
    finetune.main(finetune.Config(model=str(model), dataset="a.jsonl", **settings))
    with open("run/metrics.jsonl") as file:
        assert [json.loads(line)["tokens"] for line in file].count(100) == 2


@pytest.mark.parametrize(
    ("kind", "rope", "expected"),
    [
        (
            "gpt2",
            None,
            "a row has 300 tokens, and the model 256 positions, learned ones (transformer.wpe.weight) (fix: --seq_len 256)",
        ),
        (
            "llama",
            None,
            "warning: a row has 300 tokens, and the model 256 positions without rope scaling",
        ),
        ("llama", {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}, ""),
    ],
)
def test_rows_beyond_the_models_positions_are_refused_or_told(
    tmp_path, monkeypatch, capsys, kind, rope, expected
):
    config = tiny_config(kind, **({"rope_parameters": rope} if rope else {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    part = Part()
    part.rows = 2
    for length in (20, 300):
        part.add([5] * length, b"\1" * length, f"a.jsonl:{len(part.lengths) + 1}")
    examples = examples_of(part)
    if kind == "gpt2":
        with pytest.raises(ConfigError) as refused:
            check_positions(model, examples, None)
        assert str(refused.value) == expected
    else:
        check_positions(model, examples, None)
        out = capsys.readouterr().out
        assert out.startswith(expected)
        assert bool(out) == bool(expected)
    short = replace(examples, rows=torch.tensor([0]))
    check_positions(model, short, None)
    assert capsys.readouterr().out == ""
