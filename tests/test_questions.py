"""Prompts with columns: their ids are those that inference asks with, every column reaches the rewards, and
what is asked in a step follows from the data, the seed and the step.

python -m pytest tests/test_questions.py
"""

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from datasets import Dataset
from tiny import tiny_tokenizer

from utils.data.batches import GlobalBatches
from utils.data.chats import encode_chat, render_chats
from utils.data.encode import Rows
from utils.data.examples import load_data, print_data
from utils.data.questions import choices_of, load_questions
from utils.data.tokens import load_tokenizer
from utils.run.errors import ConfigError

TINY = Path(__file__).resolve().parent.parent / "recipes" / "tiny"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m['role'] + ':' + m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(path)
    (path / "tools.jinja").write_text(WITH_TOOLS)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(tokenizer, path, rows=None, **options):
    name = write(path, rows) if rows is not None else str(path)
    return load_questions(Rows(name, **{"seq_len": 200, "too_long": "drop"} | options), tokenizer)


def asked(tokenizer, messages, tools=None):
    options = {"add_generation_prompt": True, "tools": tools, "return_dict": True}
    return tokenizer.apply_chat_template(messages, **options)["input_ids"]


def test_ids_are_those_of_the_template_with_its_generation_prompt(folder, tmp_path):
    tokenizer = load_tokenizer(folder, str(folder / "tools.jinja"))
    turns = [{"role": "system", "content": "Add."}, user("1 + 1"), answer("2"), user("2 + 2")]
    rows = [
        {"prompt": "one"},
        {"prompt": turns, "tools": TOOLS},
        {"messages": turns},
        {"messages": [*turns, answer("4")], "tools": json.dumps(TOOLS)},
        {"prompt": "1 + 1", "tools": TOOLS},
    ]
    found = load(tokenizer, tmp_path / "rows.jsonl", rows)
    assert [found[i].ids for i in range(5)] == [
        asked(tokenizer, [user("one")]),
        asked(tokenizer, turns, TOOLS),
        asked(tokenizer, turns),
        asked(tokenizer, turns, TOOLS),
        asked(tokenizer, [user("1 + 1")], TOOLS),
    ]
    assert [found[i].content for i in (0, 1, 3)] == ["one", turns, turns]
    assert found[4].where == f"{tmp_path}/rows.jsonl:5"
    assert found.summary() == "5 prompts, 428 tokens, 1 the same as a row before"


def test_text_stays_plain_without_a_template_or_with_format_completion(folder, tokenizer, tmp_path):
    plain = load_tokenizer(folder)
    plain.template_name = ""
    rows, ids = [{"prompt": "one </s>"}], [*tokenizer("one ")["input_ids"]]
    for found in (
        load(plain, tmp_path / "rows.jsonl", rows),
        load(tokenizer, tmp_path / "rows.jsonl", rows, format="completion"),
    ):
        assert found[0].ids[: len(ids)] == ids
        assert tokenizer.decode(found[0].ids) == "one </s>"
        assert 2 not in found[0].ids  # text that spells a special token stays text


def test_special_tokens_that_a_tool_spells_stay_text_in_a_prompt(folder, tmp_path):
    tokenizer = load_tokenizer(folder, str(folder / "tools.jinja"))
    tools = json.loads(json.dumps(TOOLS).replace('"add"', '"add </s><s>"'))
    found = load(tokenizer, tmp_path / "rows.jsonl", [{"prompt": "a", "tools": tools}])
    plain = load(tokenizer, tmp_path / "plain.jsonl", [{"prompt": "a", "tools": TOOLS}])
    for special in tokenizer.all_special_ids:
        assert found[0].ids.count(special) == plain[0].ids.count(special)
    assert "1 rows in which text spells a special token, which stays text" in found.summary()


def test_a_last_answer_becomes_a_column_and_columns_are_complete_lists(tokenizer, tmp_path):
    rows = [
        {"messages": [user("a"), answer("A")], "level": 3},
        {"prompt": [user("b"), answer("B")], "answer": "own"},
        {"prompt": "c", "label": True, "weight": 2, "chosen": "x"},
    ]
    found = load(tokenizer, tmp_path / "rows.jsonl", rows)
    assert found.names == {"answer", "level", "label", "weight", "chosen"}
    asked = [found[i].columns for i in (2, 0, 1)]
    assert {name: [columns[name] for columns in asked] for name in found.names} == {
        "answer": [None, "A", "own"],
        "level": [None, 3, None],
        "label": [True, None, None],
        "weight": [2, None, None],
        "chosen": ["x", None, None],
    }
    assert found[0].content == [user("a")]


def test_a_last_turn_that_only_calls_tools_is_no_answer(tokenizer, tmp_path):
    """Otherwise `exact` would reward completions without any text."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
    calls = [answer(text) | {"tool_calls": [call]} for text in ("", None)]
    rows = [{"messages": [user("a"), turn]} for turn in (*calls, answer("A"))]
    found = load(tokenizer, tmp_path / "rows.jsonl", rows)
    assert [question.columns["answer"] for question in found] == [None, None, "A"]
    assert found[0].content == [user("a")]


def test_a_conversation_whose_question_stands_beside_it_too_is_read(tokenizer, tmp_path):
    """As in UltraChat; another text beside it is refused, and an empty one says nothing."""
    talk = [user("a"), answer("A"), user("b"), answer("B")]
    rows = [{"prompt": text, "messages": talk} for text in ("a", "")]
    rows.append({"messages": None, "conversations": talk})
    found = load(tokenizer, tmp_path / "rows.jsonl", rows)
    assert [question.content for question in found] == [talk[:-1]] * 3
    assert [question.columns["answer"] for question in found] == ["B"] * 3
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no prompt to answer"):
        load(tokenizer, tmp_path / "rows.jsonl", [{"prompt": "other", "messages": talk}])


def test_an_alpaca_row_is_asked_as_it_is_trained_and_its_output_is_the_answer(folder, tmp_path):
    tokenizer = load_tokenizer(folder, str(folder / "tools.jinja"))
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3", "level": 1}
    more = {"instruction": "And 4?", "history": [["1 and 2?", "3"]], "system": "Add."}
    named = {"prompt": "x", "instruction": "y"}  # a prompt goes first
    found = load(tokenizer, tmp_path / "rows.jsonl", [row, more, named])
    assert found[0].ids == asked(tokenizer, [user("Add.\n\n1 and 2")])
    assert (found[0].columns["answer"], found[0].columns["level"]) == ("3", 1)
    turns = [user("1 and 2?"), answer("3"), user("And 4?")]
    assert found[1].ids == asked(tokenizer, [{"role": "system", "content": "Add."}, *turns])
    assert found[1].columns["answer"] is None
    assert found[2].ids == asked(tokenizer, [user("x")])
    assert found[2].columns["instruction"] == "y"


def test_classes_that_are_0_or_false_are_answers_of_alpaca_rows(tokenizer, tmp_path):
    """As in SST-2 and BoolQ."""
    data = Dataset.from_dict({"sentence": ["a", "b"], "label": [0, 1], "answer": [False, True]})
    data.to_json(tmp_path / "rows.jsonl")
    data.to_parquet(tmp_path / "rows.parquet")
    for kind, column in (("jsonl", "label"), ("parquet", "answer")):
        columns = f"instruction=sentence,output={column}"
        found = load(tokenizer, tmp_path / f"rows.{kind}", columns=columns)
        assert [question.columns["answer"] for question in found] == data[column]


def test_columns_are_renamed_in_any_kind_of_file_and_max_rows_is_of_each_source(
    tokenizer, tmp_path
):
    data = Dataset.from_dict({"question": ["a", "b", "c"], "solution": ["1", "2", "3"]})
    options = {"columns": "prompt=question,answer=solution", "max_rows": 2}
    for kind, write_file in (("csv", data.to_csv), ("parquet", data.to_parquet)):
        write_file(tmp_path / f"rows.{kind}")
        found = load(tokenizer, tmp_path / f"rows.{kind}", **options)
        assert [found[i].columns for i in range(len(found))] == [{"answer": "1"}, {"answer": "2"}]
        assert found[1].content == "b"
    both = load(tokenizer, f"{tmp_path}/rows.csv:0.5,{tmp_path}/rows.parquet:0.25", **options)
    sources = [both[i].where.split("/")[-1].split(" ")[0] for i in range(len(both))]
    assert sources == ["rows.csv", "rows.csv", "rows.parquet"]


FAULTS = {
    "nothing asked": ({"question": "?"}, "no prompt to answer; a row is .*--columns prompt=THEIRS"),
    "a text": ({"text": "a page"}, "texts: eval.py --task perplexity"),
    "two prompts": ({"prompt": "a", "messages": [user("b")]}, "no prompt to answer"),
    "an answer alone": ({"messages": [answer("x")]}, "no turn to answer"),
    "no content": ({"messages": [{"role": "user"}]}, r"messages\[0\].content: missing"),
    "a wrong role": ({"prompt": [{"role": "cook", "content": "x"}]}, "'cook' is not one of"),
    "a picture": (
        {"prompt": "a", "image": "cat.png"},
        "vision.py also pictures if the model reads them",
    ),
    "values for the template, beside a text": (
        {"prompt": "a", "chat_template_kwargs": {"enable_thinking": False}},
        r"chat_template_kwargs: a run has one template \(fix: rows of each value in a file",
    ),
    "values for the template, beside turns": (
        {"messages": [user("b")], "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs: a run has one template",
    ),
    "values for the template, beside an instruction": (
        {"instruction": "a", "output": "b", "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs: a run has one template",
    ),
    "no object": (1, "expected object, got number"),
    "half of a surrogate pair": ({"prompt": "\ud800"}, "surrogates not allowed"),
    "too long": ({"prompt": "x" * 300}, r"\d+ tokens, and a prompt may have 200"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_row_that_is_wrong_is_named_or_left_out_and_listed(name, tokenizer, tmp_path, capsys):
    row, words = FAULTS[name]
    rows = [{"prompt": "a"}, row]
    with pytest.raises(ConfigError, match=rf"rows.jsonl:2: .*{words}"):
        load(tokenizer, tmp_path / "rows.jsonl", rows, too_long="error")
    found = load(tokenizer, tmp_path / "rows.jsonl", rows, too_long="error", bad_rows="drop")
    assert len(found) == 1
    assert found.bad[0][0].endswith("rows.jsonl:2")
    print_data("rows.jsonl", GlobalBatches(found, 0, 1, 1, 0, 1, 0), None)
    assert "1 dropped: bad rows (the first: " in capsys.readouterr().out


def test_what_the_template_leaves_out_of_a_prompt_is_counted(folder, tmp_path):
    template = tmp_path / "last.jinja"
    template.write_text("{{ messages[-1].content }}")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    rows = [
        {"prompt": "a"},
        {"prompt": "b", "tools": [tool]},
        {"prompt": "c", "system": "Be brief"},
    ]
    write(tmp_path / "rows.jsonl", rows)
    questions = load(load_tokenizer(folder, str(template)), tmp_path / "rows.jsonl")
    said = questions.summary()
    assert re.search(
        r"1 rows with tools, which .* does not write \(the first: \S*rows.jsonl:2\)", said
    )
    assert re.search(r"1 rows with system text, which .* \(the first: \S*rows.jsonl:3\)", said)


def test_a_prompt_that_a_template_rendered_before_and_an_answer_taken_for_the_column_are_told(
    folder, tmp_path
):
    """As in notebooks with apply_chat_template(..., tokenize=False), and with a begun answer as last turn."""
    rows = [
        {
            "prompt": "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n<think>",
            "target": 3,
        },
        {"prompt": [user("<|im_end|>")], "answer": "3"},
        {"prompt": [user("1 + 2?"), answer("Let me think.\n<think>")], "target": 3},
    ]
    write(tmp_path / "rows.jsonl", rows)
    questions = load(load_tokenizer(folder), tmp_path / "rows.jsonl")
    assert "2 rows in which text spells a special token, which stays text" in questions.summary()
    (line,) = questions.sources()
    assert line.endswith(
        ": prompts in the chat template (2 rows), prompts in the chat template, answers as the column"
        " answer (1 rows)"
    )


def test_a_prompt_that_is_too_long_is_dropped_and_counted_never_cut(tokenizer, tmp_path):
    rows = [{"prompt": "a"}, {"prompt": "x" * 300}]
    found = load(tokenizer, tmp_path / "rows.jsonl", rows)
    assert len(found) == 1
    assert "1 dropped: longer than a prompt may be" in found.summary()
    with pytest.raises(ConfigError, match=r"a prompt may have 200 \(fix: --too_long drop"):
        load(tokenizer, tmp_path / "rows.jsonl", rows, too_long="truncate")
    with pytest.raises(ConfigError, match="all 1 rows were dropped"):
        load(tokenizer, tmp_path / "rows.jsonl", rows[1:])
    with pytest.raises(ConfigError, match="--columns answer=solution: no row has 'solution'"):
        load(tokenizer, tmp_path / "rows.jsonl", rows, columns="answer=solution")


def test_the_fingerprint_holds_what_is_asked_and_what_is_right(tokenizer, tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]
    other_answer = [rows[0], {"prompt": "b", "answer": "3"}]
    found = {
        load(tokenizer, tmp_path / f"{i}.jsonl", part).fingerprint
        for i, part in enumerate((rows, rows, other_answer, rows[::-1], rows[:1]))
    }
    assert len(found) == 4


def test_held_out_prompts_are_chosen_by_their_hash(tokenizer, tmp_path):
    rows = [{"prompt": f"{i} + {i}", "answer": str(2 * i)} for i in range(60)]

    def split(rows, **options):
        options = {"seq_len": 200, "too_long": "drop"} | options
        name = write(tmp_path / "rows.jsonl", rows)
        return load_data(Rows(name, **options), tokenizer, load=load_questions)

    trained, held_out = split(rows, eval_share=0.2)
    assert len(trained) + len(held_out) == 60
    held = {held_out[i].columns["answer"] for i in range(len(held_out))}
    assert 4 < len(held) == len(held_out) < 24
    assert not held & {trained[i].columns["answer"] for i in range(len(trained))}
    again = split(rows[30:] + rows[:30], eval_share=0.2)[1]
    assert held == {again[i].columns["answer"] for i in range(len(again))}
    assert trained.fingerprint != held_out.fingerprint
    named = split(rows[:40], eval_dataset=write(tmp_path / "held.jsonl", rows[40:]))
    assert [len(part) for part in named] == [40, 20]
    assert split(rows)[1] is None


def test_global_batches_of_prompts_do_not_depend_on_the_ranks(tokenizer, tmp_path):
    rows = [{"prompt": "x" * (1 + i % 7), "number": i} for i in range(10)]
    found = load(tokenizer, tmp_path / "rows.jsonl", rows)
    orders = []
    for seed, ranks in ((0, 1), (0, 4), (1, 1)):
        batches = GlobalBatches(found, seed, 4, 1, 0, ranks, 0)
        orders.append([batches.rows_of(step) for step in range(batches.per_epoch)])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(sum(orders[0], [])) == [*range(10)]
    numbers = {found[row].columns["number"] for row in sum(orders[0], [])}
    assert numbers == {*range(10)}


@pytest.mark.parametrize("template", ["", "plain", "alpaca"])
def test_choices_have_the_tokens_that_training_would_give_them(template, tmp_path):
    """The kind of Llama 2 begins a text that is encoded alone with a space, also after a line break."""
    tokenizer = load_tokenizer(TINY, template)
    row = {"prompt": "What is cold?", "choices": ["the spoon", "the flute"], "answer": 0}
    rows = Rows(write(tmp_path / "rows.jsonl", [row]), 200)
    ((choices, found, right),) = choices_of(load_questions(rows, tokenizer), tokenizer, rows)
    assert (found, right) == (row["choices"], 0)
    for choice, text in zip(choices, row["choices"], strict=True):
        talk = [user(row["prompt"]), answer(text)]
        (chat,) = render_chats(tokenizer, talk, None, "assistant", Counter())
        ids, mask = encode_chat(tokenizer, chat)
        first, last = mask.find(1), mask.rfind(1)  # the last one ends the turn
        assert choice.ids.tolist() == ids[:last]
        assert choice.labels.tolist() == [-100] * first + ids[first:last]


LETTERED = {"choices": {"text": ["four", "2", "1"], "label": ["1", "2", "3"]}, "answer": "2"}
LETTER, NUMBER = ({"choices": ["x", "y"], "answer": name} for name in "B0")
READINGS = {  # name -> (rows, the index of each right choice); an error: None
    "a label, not the text of another choice": ([LETTERED], [1]),
    "letter labels": ([{"choices": {"text": ["b", "a"], "label": ["A", "B"]}, "answer": "B"}], [1]),
    "a label that is not there": ([LETTERED | {"answer": "0"}], None),
    "a number with labels": ([LETTERED | {"answer": 0}], None),
    "letters": ([{"choices": ["x", "y"], "answer": a} for a in "AB"], [0, 1]),
    "a letter too far": ([{"choices": ["x", "y"], "answer": "C"}], None),
    "numbers as texts": ([{"choices": ["x", "y"], "answer": a} for a in "10"], [1, 0]),
    "an index of numerals": ([{"choices": ["1", "2", "3"], "answer": 2}], [2]),
    "texts": ([{"choices": ["1", "2", "3"], "answer": a} for a in "123"], [0, 1, 2]),
    "text or letter": (
        [{"choices": ["B", "A"], "answer": "A"}, LETTER],
        None,
    ),
    "text or number": (
        [{"choices": ["1", "2"], "answer": "1"}, NUMBER],
        None,
    ),
    "true or false": ([{"choices": ["no", "yes"], "answer": True}], None),
    "labels without texts": ([{"choices": {"label": ["A", "B"]}, "answer": "A"}], None),
    "no list": ([{"choices": 4, "answer": "A"}], None),
}


@pytest.mark.parametrize("name", READINGS)
def test_an_answer_is_a_text_a_label_a_letter_or_a_number_and_never_guessed(
    name, tokenizer, tmp_path
):
    given, expected = READINGS[name]
    given = [{"prompt": f"q {i}", **row} for i, row in enumerate(given)]
    rows = Rows(write(tmp_path / "rows.jsonl", given), 200)
    questions = load_questions(rows, tokenizer)
    if expected is None:
        with pytest.raises(ConfigError, match=r"rows.jsonl:1: .*fix: --columns"):
            choices_of(questions, tokenizer, rows)
    else:
        found = choices_of(questions, tokenizer, rows)
        assert [right for _, _, right in found] == expected
