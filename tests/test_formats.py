"""Rows of every form -> messages. Alone: .venv/bin/python -m pytest tests/test_formats.py"""

import json
from collections import Counter

import pytest

from utils.formats import plain_messages
from utils.more_formats import LEADING, READERS, to_messages

ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
SUM = {"name": "add", "arguments": {"a": 1, "b": 2}}
CALL = {"id": "c1", "type": "function", "function": SUM}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def user(text="Hi", **more):
    return {"role": "user", "content": text, **more}


def says(text="Hello", **more):
    return {"role": "assistant", "content": text, **more}


def turns(*roles):
    return {"messages": [{"role": role, "content": f"text {i}"} for i, role in enumerate(roles)]}


def shares(*turns, **more):
    return {"conversations": [{"from": who, "value": value} for who, value in turns], **more}


def calling(**changes):
    """A conversation in which a tool is called."""
    answer = {"role": "tool", "tool_call_id": "c1", "content": "3"}
    call = {**CALL, "function": {**SUM, "arguments": json.dumps(SUM["arguments"])}}
    call |= changes.pop("call", {})
    return {
        "messages": [
            user(),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            answer | changes,
            says(),
        ],
        "tools": TOOLS,
    }


def test_alpaca_input_may_lack():
    want = [user("Add."), says("3")]
    for row in [{}, {"input": None}, {"input": ""}, {"id": 7}, {"history": []}, {"system": ""}]:
        assert to_messages({"instruction": "Add.", "output": "3", **row}) == (want, None)
    assert to_messages(ALPACA)[0][0]["content"] == "Add.\n\n1 and 2"


def test_alpaca_with_a_system_text_and_a_history():
    messages, _ = to_messages({**ALPACA, "system": "Be brief.", "history": [["Hi", "Hello"]]})
    system = {"role": "system", "content": "Be brief."}
    assert messages == [system, user(), says(), user("Add.\n\n1 and 2"), says("3")]


def test_sharegpt_in_the_words_of_everyone():
    for human, model in (("human", "gpt"), ("user", "assistant"), ("human", "chatgpt"), ("user", "model")):
        row = shares(("system", "S"), (human, "Hi"), (model, "Hello"))
        assert to_messages(row) == ([{"role": "system", "content": "S"}, user(), says()], None)
    row = shares(("human", "Hi"), ("gpt", "Hello"), system="S", id=3)
    assert to_messages(row)[0][0] == {"role": "system", "content": "S"}


def test_sharegpt_with_calls_of_tools():
    calls = [("human", "Hi"), ("function_call", json.dumps(SUM)), ("observation", "3"), ("gpt", "Hello")]
    messages, tools = to_messages(shares(*calls, tools=json.dumps(TOOLS)))
    assert tools == TOOLS
    assert messages[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": SUM}]},
        {"role": "tool", "content": "3"},
    ]


def test_openai_with_calls_parts_weights_and_a_developer():
    messages, tools = to_messages(calling())
    assert tools == TOOLS
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert messages[2] == {"role": "tool", "content": "3", "tool_call_id": "c1"}
    parts = [{"type": "text", "text": "Hi, "}, {"type": "text", "text": "you"}]
    row = {"messages": [{"role": "developer", "content": "S"}, user(parts), says(weight=0), user(), says()]}
    messages, _ = to_messages(row)
    assert messages[0] == {"role": "system", "content": "S"}
    assert messages[1:3] == [user("Hi, you"), says(weight=0)]


def test_prompt_and_completion_as_texts_and_as_messages():
    assert to_messages({"prompt": "a ", "completion": "b"})[0] == [
        {"role": "text", "content": "a ", "weight": 0},
        {"role": "text", "content": "b", "weight": 1},
    ]
    row = {"prompt": [user(), says(), user("Why?")], "completion": [says("So.")]}
    assert to_messages(row)[0] == [user(), says(weight=0), user("Why?"), says("So.")]


def test_plain_text_is_taught_as_it_stands():
    assert to_messages({"text": " a\n"})[0] == [{"role": "text", "content": " a\n", "weight": 1}]


def test_the_assistants_turns_before_the_first_of_the_user_are_left_out_and_counted():
    notes = Counter()
    row = shares(("gpt", "Welcome"), ("human", "Hi"), ("gpt", "Hello"))
    assert to_messages(row, notes=notes)[0] == [user(), says()]
    assert to_messages(turns("system", "assistant", "user", "assistant"), notes=notes)[0][1]["role"] == "user"
    assert notes == {LEADING: 2}


def test_a_conversation_may_start_with_system_and_end_with_user():
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    assert [message["role"] for message in to_messages(turns(*roles))[0]] == list(roles)


BAD = [
    ({"messages": None}, "messages: expected list, got null"),
    ({"messages": ["Hi"]}, "messages[0]: expected object, got text"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role: missing"),
    ({"messages": [{"role": "user"}]}, "messages[0].content: missing"),
    ({"messages": [user(5)]}, "messages[0].content: expected text, got number"),
    ({"messages": [user({})]}, "messages[0].content: expected text, got object"),
    ({"messages": [user(None)]}, "messages[0].content: expected text, got null"),
    ({"messages": [user(" \n")]}, "messages[0].content: empty"),
    ({"messages": []}, "messages: no assistant turn"),
    (turns("user"), "messages: no assistant turn"),
    (turns("system"), "messages: no assistant turn"),
    (turns("assistant"), "messages: no assistant turn"),
    (turns("user", "bot"), "messages[1].role: 'bot' is not one of system, user, assistant, tool, developer"),
    (turns("user", "HUMAN"), "messages[1].role: 'HUMAN' is not one of"),
    ({"messages": [{"role": 5, "content": "Hi"}]}, "messages[0].role: expected text, got number"),
    (turns("user", "user"), "messages[1].role: expected assistant, got user"),
    (turns("user", "assistant", "assistant"), "messages[2].role: expected user, got assistant"),
    (turns("user", "system", "assistant"), "messages[1].role: expected assistant, got system"),
    (turns("system", "system", "user"), "messages[1].role: expected user, got system"),
    (turns("user", "tool"), "messages[1].role: expected assistant, got tool"),
    # Parts, calls, tools and weights.
    ({"messages": [user(["Hi"])]}, "messages[0].content[0]: expected object, got text"),
    ({"messages": [user([{"type": "image_url"}])]}, "messages[0].content[0].type: 'image_url' is not text"),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text: missing"),
    ({"messages": [user([])]}, "messages[0].content: empty"),
    (calling(tool_call_id="c2"), "messages[2].tool_call_id: 'c2' is no call before it"),
    (calling(tool_call_id=None), "messages[2].tool_call_id: expected text, got null"),
    (calling(call={"function": {"name": "add", "arguments": "{"}}), "function.arguments: not JSON"),
    (
        calling(call={"function": {"name": "add", "arguments": "3"}}),
        "expected an object as JSON, got number",
    ),
    (calling(call={"function": {"arguments": "{}"}}), "tool_calls[0].function.name: missing"),
    ({**calling(), "tools": "[{"}, "tools: not JSON"),
    ({**calling(), "tools": ["add"]}, "tools: expected a list of objects"),
    ({"messages": [user(), says(weight=0.5)]}, "messages[1].weight: expected 0 or 1, got 0.5"),
    # ShareGPT.
    ({"conversations": None}, "conversations: expected list, got null"),
    ({"conversations": {}}, "conversations: expected list, got object"),
    ({"conversations": []}, "conversations: no assistant turn"),
    ({"conversations": [{"value": "Hi"}]}, "conversations[0].from: missing"),
    ({"conversations": [{"from": "human"}]}, "conversations[0].value: missing"),
    (
        shares(("human", "Hi"), ("bot", "Hello")),
        "conversations[1].from: 'bot' is not one of human, user, system",
    ),
    (shares(("human", "Hi"), ("human", "Hi")), "conversations[1].from: expected assistant, got human"),
    (shares(("human", "Hi"), ("gpt", "a"), ("gpt", "b")), "conversations[2].from: expected user, got gpt"),
    (shares(("human", "Hi"), ("function_call", "add")), "conversations[1].value: not JSON"),
    (shares(("human", "Hi"), ("function_call", "3")), "function: expected object, got number"),
    (
        shares(("system", "S"), ("human", "Hi"), ("gpt", "a"), system="T"),
        "system: there is a system turn too",
    ),
    # Alpaca.
    ({"instruction": "Add."}, "output: missing"),
    ({"instruction": "Add.", "output": None}, "output: expected text, got null"),
    ({"instruction": "Add.", "output": ""}, "output: empty"),
    ({"instruction": 5, "output": "3"}, "instruction: expected text, got number"),
    ({"instruction": ["a"], "output": "3"}, "instruction: expected text, got list"),
    ({"instruction": "Add.", "input": True, "output": "3"}, "input: expected text, got true or false"),
    ({**ALPACA, "history": [["Hi"]]}, "history[0]: expected two texts"),
    # Texts.
    ({"prompt": 3, "completion": "b"}, "prompt: expected text, got number"),
    ({"prompt": "a", "completion": " "}, "completion: empty"),
    ({"prompt": "a", "completion": []}, "prompt: expected list, got text"),
    ({"text": None}, "text: expected text, got null"),
    # What is not taught.
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "these are preference pairs; finetune.py teaches"),
    ({**ALPACA, "chosen": "b", "rejected": "c"}, "these are preference pairs"),
    ({"prompt": "a", "completion": "b", "label": True}, "these are answers with a label (KTO)"),
    ({"prompt": "a"}, "these are prompts without an answer"),
    ({"question": "a"}, "its keys are 'question'; the rows that can be read have messages (chat)"),
    ({}, "its keys are none"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_told_by_its_field(row, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        to_messages(row)
    assert message in str(refused.value)


def test_forms_are_told_by_their_keys():
    assert to_messages({"text": "a", "label": 1})[0][0]["content"] == "a"  # a class, which is no matter here
    assert to_messages({**ALPACA, "text": "all of it"})[0][1] == says("3")


@pytest.mark.parametrize(
    ("form", "row"),
    [
        ("chat", turns("user", "assistant")),
        ("chat", turns("system", "user", "assistant", "user")),
        ("alpaca", ALPACA),
        ("alpaca", {"instruction": " Add. ", "output": "3", "input": None}),
    ],
)
def test_the_short_way_for_plain_rows_and_the_long_one_agree(form, row):
    assert plain_messages(row, form) == READERS[form](row, Counter())[0]
