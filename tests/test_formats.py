"""Rows of every form -> messages. Alone: .venv/bin/python -m pytest tests/test_formats.py"""

import json
import re
from collections import Counter

import pytest

from utils.data.formats import IGNORED, LEADING, form_of, parse_columns, renamed, to_messages

ALPACA = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
SUM = {"name": "add", "arguments": {"a": 1, "b": 2}}
CALL = {"id": "c1", "type": "function", "function": SUM}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def messages_of(row: dict, notes: Counter | None = None):
    return to_messages(row, form_of(row), Counter() if notes is None else notes)


def test_columns_of_pictures_have_any_name():
    columns = parse_columns("images=pictures,messages=talk")
    row, form = renamed({"talk": [user(), says()], "pictures": ["a.png"]}, columns)
    assert (row["images"], form) == (["a.png"], "chat")


def test_an_answer_that_is_a_text_follows_a_list_of_turns():
    """As in Llama-Nemotron's post-training data."""
    row = {"prompt": [user("1 + 1?")], "completion": "2", "system": "Be brief."}
    messages, _ = messages_of(row, Counter())
    assert [(m["role"], m["content"]) for m in messages] == [
        ("system", "Be brief."),
        ("user", "1 + 1?"),
        ("assistant", "2"),
    ]


def test_thoughts_may_be_in_a_column_of_their_own():
    """As in s1K and medical-o1-reasoning-SFT."""
    columns = parse_columns("instruction=Question,output=Response,reasoning=Complex_CoT")
    row = {"Question": "1 + 1?", "Response": "2", "Complex_CoT": "One more than one."}
    row, form = renamed(row, columns)
    (_, answer), _ = to_messages(row, form, Counter())
    assert (answer["content"], answer["reasoning_content"]) == ("2", "One more than one.")
    notes = Counter()
    messages_of({"messages": [user(), says()], "reasoning": "of which turn?"}, notes)
    assert notes[f"{IGNORED}'reasoning'"] == 1


def test_columns_decide_the_form_of_rows_that_have_them_only():
    columns = parse_columns("instruction=question,output=reply")
    assert renamed({"question": "1 + 1?", "reply": "2"}, columns)[1] == "alpaca"
    assert renamed({"messages": [user(), says()]}, columns)[1] == "chat"


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


def test_turns_may_be_json_text_as_in_a_csv():
    chat = [user(), says()]
    for key in ("messages", "conversations"):
        for columns in ({}, {key: "talk"}):
            row, form = renamed({columns.get(key, key): json.dumps(chat)}, columns)
            assert (row[key], bool(form)) == (chat, True)
    with pytest.raises(ValueError, match=r"^messages: not JSON: Expecting"):
        renamed({"messages": "[{'role': 'user'}]"}, {})


def test_turns_that_are_plain_texts_are_of_the_user_and_the_assistant_by_turns():
    """As in LIMA (conversations) and UltraChat (data)."""
    texts = ["Hi", "Hello", "And?", "Fine"]
    chat = [user("Hi"), says("Hello"), user("And?"), says("Fine")]
    assert messages_of({"conversations": texts, "source": "wikihow"}) == (chat, None)
    row, form = renamed({"id": "0", "data": texts}, {"messages": "data"})
    assert (messages_of(row), form) == ((chat, None), "chat")
    briefly = {"role": "system", "content": "Briefly"}
    assert messages_of({"messages": texts, "system": "Briefly"}) == ([briefly, *chat], None)


def test_padding_of_token_ids_is_left_out():
    row = {"input_ids": [0, 5, 6, 7, 0], "attention_mask": [0, 1, 1, 1, 0]}
    for labels, mask in (({}, [1, 1, 1]), ({"labels": [-100, -100, 6, 7, -100]}, [0, 1, 1])):
        notes = Counter()
        ((message,), _) = messages_of(row | labels, notes)
        assert (message["content"], [*message["loss_mask"]]) == ([5, 6, 7], mask)
        assert not notes
    numbered = row | {"attention_mask": [1, 1, 2, 2, 0]}
    with pytest.raises(ValueError, match="^attention_mask: it numbers documents"):
        messages_of(numbered)
    with pytest.raises(ValueError, match="^attention_mask: 1 of them for 5 input_ids"):
        messages_of(row | {"attention_mask": [1]})


def test_a_part_that_is_the_word_text_is_refused():
    with pytest.raises(ValueError, match="'text' is no text; here a row"):
        messages_of({"messages": [user(["text"]), says()]})


def test_alpaca_input_that_is_no_text_is_refused():
    for value in (0, False, [], 5):
        with pytest.raises(ValueError, match="^input: expected text"):
            messages_of({**ALPACA, "input": value})


def test_alpaca_input_may_lack():
    want = [user("Add."), says("3")]
    for row in [{}, {"input": None}, {"input": ""}, {"id": 7}, {"history": []}, {"system": ""}]:
        assert messages_of({"instruction": "Add.", "output": "3", **row}) == (want, None)
    assert messages_of(ALPACA)[0][0]["content"] == "Add.\n\n1 and 2"


def test_alpaca_with_a_system_text_and_a_history():
    messages, _ = messages_of({**ALPACA, "system": "Be brief.", "history": [["Hi", "Hello"]]})
    system = {"role": "system", "content": "Be brief."}
    assert messages == [system, user(), says(), user("Add.\n\n1 and 2"), says("3")]


def test_sharegpt_in_the_words_of_everyone():
    for human, model in (
        ("human", "gpt"),
        ("user", "assistant"),
        ("human", "chatgpt"),
        ("user", "model"),
    ):
        row = shares(("system", "S"), (human, "Hi"), (model, "Hello"))
        assert messages_of(row) == ([{"role": "system", "content": "S"}, user(), says()], None)
    row = shares(("human", "Hi"), ("gpt", "Hello"), system="S", id=3)
    assert messages_of(row)[0][0] == {"role": "system", "content": "S"}


@pytest.mark.parametrize("content", ["Adding.", [{"type": "text", "text": "Adding."}]])
def test_text_beside_a_call_is_kept(content):
    row = {"messages": [user(), says(content, tool_calls=[CALL])]}
    assert messages_of(row)[0] == [user(), says("Adding.", tool_calls=[CALL])]


@pytest.mark.parametrize("content", [None, "", " \n", [], [{"type": "text", "text": " "}]])
def test_a_call_needs_no_text_beside_it(content):
    row = {"messages": [user(), says(content, tool_calls=[CALL])]}
    assert messages_of(row)[0] == [user(), says("", tool_calls=[CALL])]


def test_a_tool_may_answer_nothing():
    assert messages_of(calling(content=""))[0][2]["content"] == ""


def test_sharegpt_with_calls_of_tools():
    calls = [
        ("human", "Hi"),
        ("function_call", json.dumps(SUM)),
        ("observation", "3"),
        ("gpt", "Hello"),
    ]
    messages, tools = messages_of(shares(*calls, tools=json.dumps(TOOLS)))
    assert tools == TOOLS
    assert messages[1:3] == [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": SUM}]},
        {"role": "tool", "content": "3"},
    ]


def test_openai_with_calls_parts_weights_and_a_developer():
    messages, tools = messages_of(calling())
    assert tools == TOOLS
    assert messages[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    assert messages[2] == {"role": "tool", "content": "3", "tool_call_id": "c1"}
    parts = [{"type": "text", "text": "Hi, "}, {"type": "text", "text": "you"}]
    row = {
        "messages": [
            {"role": "developer", "content": "S"},
            user(parts),
            says(weight=0),
            user(),
            says(),
        ]
    }
    messages, _ = messages_of(row)
    assert messages[0] == {"role": "system", "content": "S"}
    assert messages[1:3] == [user("Hi, you"), says(weight=0)]


def test_prompt_and_completion_as_texts_and_as_messages():
    assert messages_of({"prompt": "a ", "completion": "b"})[0] == [
        {"role": "text", "content": "a ", "weight": 0},
        {"role": "text", "content": "b", "weight": 1},
    ]
    row = {"prompt": [user(), says(), user("Why?")], "completion": [says("So.")]}
    assert messages_of(row)[0] == [user(), says(weight=0), user("Why?"), says("So.")]


def test_plain_text_is_taught_as_it_stands():
    assert messages_of({"text": " a\n"})[0] == [{"role": "text", "content": " a\n", "weight": 1}]


def test_the_assistants_turns_before_the_first_of_the_user_are_left_out_and_counted():
    notes = Counter()
    row = shares(("gpt", "Welcome"), ("human", "Hi"), ("gpt", "Hello"))
    assert messages_of(row, notes=notes)[0] == [user(), says()]
    assert (
        messages_of(turns("system", "assistant", "user", "assistant"), notes=notes)[0][1]["role"]
        == "user"
    )
    assert notes == {LEADING: 2}


def test_a_conversation_may_start_with_system_and_end_with_user():
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    assert [message["role"] for message in messages_of(turns(*roles))[0]] == list(roles)


@pytest.mark.parametrize(("key", "off", "on"), [("weight", 0, 1.0), ("train", False, True)])
def test_a_key_keeps_a_turn_out_of_the_loss(key, off, on):
    row = {"messages": [user(), says(**{key: off}), user("Why?"), says("So.", **{key: on})]}
    assert messages_of(row)[0] == [user(), says(weight=0), user("Why?"), says("So.", weight=1)]
    share = shares(("human", "Hi"), ("gpt", "Hello"))
    share["conversations"][1][key] = off
    assert messages_of(share)[0] == [user(), says(weight=0)]
    both = {"messages": [user(), says(weight=1, train=False)]}
    assert messages_of(both)[0] == [user(), says(weight=0)]


def test_other_keys_are_ignored_by_name():
    notes = Counter()
    row = {"messages": [user(id=3, mood="good"), says(mood="bad")], "source": "x"}
    assert messages_of(row, notes=notes)[0] == [user(), says()]
    assert notes == {f"{IGNORED}'id'": 1, f"{IGNORED}'mood'": 2, f"{IGNORED}'source'": 1}


def test_thoughts_reach_the_template_under_both_names():
    for key in ("reasoning_content", "thinking", "reasoning"):
        messages, _ = messages_of({"messages": [user(), says(**{key: "Hm."})]})
        assert messages[1] == says(**{key: "Hm.", "reasoning_content": "Hm."}), key
    assert messages_of({"messages": [user(), says(reasoning_content=None)]})[0] == [user(), says()]
    named = {"messages": [user(name="Ann"), says(name="Bob")]}
    assert messages_of(named)[0] == named["messages"]


def test_bare_tools_and_calls_are_wrapped():
    bare = {"name": "add", "parameters": {}}
    for tools in ([bare], json.dumps([bare]), TOOLS, json.dumps(TOOLS)):
        assert messages_of({**calling(), "tools": tools})[1] == TOOLS
    row = {"messages": [user(), {"role": "assistant", "tool_calls": [SUM]}]}
    called = says("", tool_calls=[{"type": "function", "function": SUM}])
    assert messages_of(row) == ([user(), called], None)


def test_tool_turns_of_trl_and_hermes():
    row = calling(tool_call_id=None, name="add")
    assert messages_of(row)[0][2] == {"role": "tool", "content": "3", "name": "add"}
    calls = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    row = shares(
        ("system", "S"),
        ("human", "Hi"),
        ("gpt", calls),
        ("tool", "3"),
        ("gpt", "Hello"),
        category="x",
    )
    assert [m["role"] for m in messages_of(row)[0]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert messages_of(row)[0][2] == says(calls)
    chat = {
        "messages": [user(), says(calls), {"role": "tool", "name": "add", "content": "3"}, says()]
    }
    assert messages_of(chat)[0] == chat["messages"]


def test_a_system_text_and_tools_beside_the_turns_are_not_lost():
    assert messages_of({"messages": [user(), says()], "system": "S"})[0][0] == {
        "role": "system",
        "content": "S",
    }
    assert messages_of({**ALPACA, "tools": json.dumps(TOOLS)})[1] == TOOLS


def test_rows_that_only_look_like_others_are_taken():
    nothing = {
        "images": [],
        "videos": None,
        "rejected": None,
        "chosen": "",
        "id": 7,
        "source": "x",
        "score": 0.5,
    }
    assert messages_of({"messages": [user(), says()], **nothing})[0] == [user(), says()]
    notes = Counter()
    assert messages_of({**ALPACA, "label": "sum", "weight": 1}, notes=notes)[0][1] == says("3")
    assert notes == {f"{IGNORED}'label'": 1, f"{IGNORED}'weight'": 1}


CHAT = {"messages": [user(), says()]}
PAIR = {"prompt": "a", "completion": "b"}
FORMS_OF_KTO = [
    {**row, **mark}
    for row in (CHAT, shares(("human", "Hi"), ("gpt", "Hello")), ALPACA, PAIR)
    for mark in (
        {"label": True},
        {"label": False},
        {"label": 0},
        {"label": "False"},
        {"kto_tag": False},
        {"kto_tag": "true"},
        {"rejected": "bad"},
    )
]
FORMS_OF_PICTURES = [
    {**row, **more}
    for row in (CHAT, ALPACA, PAIR, shares(("human", "<image>Hi"), ("gpt", "Hello")))
    for more in (
        {"images": ["a.png"]},
        {"image": "a.png"},
        {"videos": ["a.mp4"]},
        {"audios": ["a.wav"]},
    )
] + [
    {"messages": [user([{"type": kind, "value": "x"}]), says()]}
    for kind in ("image", "image_url", "video_url", "audio_url", "input_audio")
]


@pytest.mark.parametrize("row", FORMS_OF_KTO + FORMS_OF_PICTURES)
def test_labels_and_pictures_in_every_form_are_refused_by_name(row):
    with pytest.raises(ValueError, match="here a row has one text answer") as refused:
        messages_of(row)
    assert re.search("KTO|picture", str(refused.value))


def test_null_fields_of_a_turn_as_openais_client_writes_them_are_no_calls_and_no_masks():
    nothing = dict.fromkeys("function_call tool_calls refusal audio reasoning mask loss".split())
    (messages, _) = messages_of({"messages": [user(mask=None), says(**nothing, annotations=[])]})
    assert messages == [user(), says()]
    for key, value in (("mask", False), ("training", False), ("loss", 0), ("function_call", {})):
        with pytest.raises(ValueError, match=rf"^messages\[1\]\.{key}: no key of a turn here"):
            messages_of({"messages": [user(), says(**{key: value})]})


BAD = [
    ({"messages": None}, "messages: expected list, got null"),
    (
        {"conversations": [5], "source": "wikihow"},
        'conversations[0]: expected object, got number (fix: {"role": "user", "content": ...})',
    ),
    ({"conversations": ["Hi", " "]}, "conversations[1].content: empty"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role: missing; there are only 'content'"),
    (  # OpenAssistant/oasst1
        {
            "message_id": "b",
            "parent_id": "a",
            "message_tree_id": "a",
            "text": "Hi",
            "role": "prompter",
        },
        "message_tree_id: single messages of trees (fix: one row a path,",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0].content: missing"),
    ({"messages": [user(5)]}, "messages[0].content: expected text, got number"),
    ({"messages": [user({})]}, "messages[0].content: expected text, got object"),
    ({"messages": [user(None)]}, "messages[0].content: expected text, got null"),
    ({"messages": [user(" \n")]}, "messages[0].content: empty"),
    ({"messages": []}, "messages: no assistant turn"),
    (turns("user"), "messages: no assistant turn"),
    (turns("system"), "messages: no assistant turn"),
    (turns("assistant"), "messages: no assistant turn"),
    (
        turns("user", "bot"),
        "messages[1].role: 'bot' is not one of system, developer, user",
    ),
    (turns("user", "HUMAN"), "messages[1].role: 'HUMAN' is not one of"),
    ({"messages": [{"role": 5, "content": "Hi"}]}, "messages[0].role: expected text, got number"),
    (turns("user", "user"), "messages[1].role: expected assistant, got user"),
    (
        turns("user", "assistant", "assistant"),
        "messages[2].role: expected user or tool, got assistant",
    ),
    (turns("user", "system", "assistant"), "messages[1].role: expected assistant, got system"),
    (turns("system", "system", "user"), "messages[1].role: expected user, got system"),
    (turns("user", "tool"), "messages[1].role: expected assistant, got tool"),
    # Parts, calls, tools and weights.
    ({"messages": [user(["Hi"])]}, "messages[0].content[0].type: 'Hi' is no text"),
    (
        {"messages": [user([{"type": "image_url"}])]},
        "messages[0].content[0].type: 'image_url' is no text; here a row has one text answer",
    ),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text: missing"),
    ({"messages": [user([])]}, "messages[0].content: empty"),
    (calling(call={"function": {"name": "add", "arguments": "{"}}), "function.arguments: not JSON"),
    (
        calling(call={"function": {"name": "add", "arguments": "3"}}),
        "expected an object as JSON, got number",
    ),
    (calling(call={"function": {"arguments": "{}"}}), "tool_calls[0].function.name: missing"),
    (
        {"messages": [user(), says(3, tool_calls=[CALL])]},
        "messages[1].content: expected text, got number",
    ),
    (calling(call={"function": 5}), "tool_calls[0].function: expected object, got number"),
    ({**calling(), "tools": "[{"}, "tools: not JSON"),
    (
        {**calling(), "tools": [{"type": "function", "function": None}]},
        "tools[0].function: expected object, got null",
    ),
    (
        {"instruction": "a", "output": "b", "history": 5},
        "history: expected list, got number",
    ),
    ({**calling(), "tools": ["add"]}, "tools: expected a list of objects"),
    ({"messages": [user(), says(weight=0.5)]}, "messages[1].weight: expected 0 or 1, got 0.5"),
    (
        {"messages": [user(), says(loss_weight=0.5)]},
        "messages[1].loss_weight: no key of a turn here",
    ),
    ({"messages": [user(), says(train="no")]}, "messages[1].train: expected 0 or 1, got 'no'"),
    (
        {"messages": [user(), says(train_detail=[{}])]},
        "messages[1].train_detail: no key of a turn here",
    ),
    (
        {"messages": [user(), says(function_call=SUM)]},
        "messages[1].function_call: no key of a turn here",
    ),
    ({**calling(), "functions": TOOLS}, "functions: tools under another name"),
    (  # SmolTalk 2
        {**turns("user", "assistant"), "chat_template_kwargs": {"enable_thinking": False}},
        "chat_template_kwargs: a run has one template (fix: rows of each value in a file of their own,"
        " with a --chat_template FILE that sets it)",
    ),
    (
        {"messages": [user(tool_calls=[CALL]), says()]},
        "messages[0].tool_calls: expected a list, in a turn of an assistant",
    ),
    ({**turns("user", "assistant"), "weight": 0.5}, "weight: 0.5: whole rows cannot be weighted"),
    ({**turns("user", "assistant"), "train": False}, "train: False: whole rows cannot be weighted"),
    *(
        (
            {"input_ids": [5, 6], mask: [0, 1]},
            f"{mask}: [0, 1]: whole rows cannot be weighted; masks are -100 in",
        )
        for mask in ("loss_mask", "completion_mask", "assistant_masks")
    ),
    ({**turns("user", "assistant"), "tools": [{"parameters": {}}]}, "tools[0].name: missing"),
    (
        {"prompt": "a", "completion": "b", "tools": TOOLS},
        "tools: a prompt and a completion of plain text",
    ),
    (
        {"prompt": "a", "completion": "b", "system": "be short"},
        "system: a prompt and a completion of plain text",
    ),
    # ShareGPT.
    ({"conversations": None}, "conversations: expected list, got null"),
    ({"conversations": {}}, "conversations: expected list, got object"),
    ({"conversations": []}, "conversations: no assistant turn"),
    ({"conversations": [{"value": "Hi"}]}, "conversations[0].from: missing"),
    ({"conversations": [{"from": "human"}]}, "conversations[0].value: missing"),
    (
        shares(("human", "Hi"), ("bot", "Hello")),
        "conversations[1].from: 'bot' is not one of system, developer, user",
    ),
    (
        shares(("human", "Hi"), ("human", "Hi")),
        "conversations[1].from: expected assistant, got human",
    ),
    (
        shares(("human", "Hi"), ("gpt", "a"), ("gpt", "b")),
        "conversations[2].from: expected user or tool, got gpt",
    ),
    (shares(("human", "Hi"), ("function_call", "add")), "conversations[1].value: not JSON"),
    (shares(("human", "Hi"), ("function_call", "3")), "function: expected object, got number"),
    (
        shares(("system", "S"), ("human", "Hi"), ("gpt", "a"), system="T"),
        "conversations[0].from: expected user, got system",
    ),
    # Alpaca.
    ({"instruction": "Add."}, "output: missing"),
    ({"instruction": "Add.", "output": None}, "output: expected text, got null"),
    ({"instruction": "Add.", "output": ""}, "output: empty"),
    ({"instruction": 5, "output": "3"}, "instruction: expected text, got number"),
    ({"instruction": ["a"], "output": "3"}, "instruction: expected text, got list"),
    (
        {"instruction": "Add.", "input": True, "output": "3"},
        "input: expected text, got true or false",
    ),
    ({**ALPACA, "history": [["Hi"]]}, "history[0]: expected two texts"),
    # Texts.
    ({"prompt": 3, "completion": "b"}, "prompt: expected text, got number"),
    ({"prompt": "a", "completion": " "}, "completion: empty"),
    ({"prompt": "a", "completion": []}, "prompt: expected list, got text"),
    ({"text": None}, "text: expected text, got null"),
    # What is not trained.
    (
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        "chosen: preference pairs and answers with labels (KTO); here a row has one text",
    ),
    ({**ALPACA, "chosen": "b", "rejected": "c"}, "chosen: preference pairs"),
    (
        {"prompt": "a", "completion": "b", "label": True},
        "label: preference pairs and answers with labels (KTO)",
    ),
    ({"prompt": "a"}, "these are prompts without an answer"),
    ({"question": "a"}, "its keys are 'question'; the rows that can be read have messages (chat)"),
    ({}, "its keys are none"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_told_by_its_field(row, message):
    with pytest.raises(ValueError) as refused:  # noqa: PT011
        messages_of(row)
    assert message in str(refused.value)


def test_no_values_for_the_template_are_ignored():
    row = turns("user", "assistant")
    for nothing in ({}, None):
        assert messages_of({**row, "chat_template_kwargs": nothing}) == messages_of(row)


def test_the_turns_of_both_dialects_are_read_under_either_key():
    want = ([user(), says(weight=0), user("Why?"), says("So.")], None)
    openai = [user(), says(train=False), user("Why?"), says("So.")]
    share = shares(("human", "Hi"), ("gpt", "Hello"), ("human", "Why?"), ("gpt", "So."))
    share["conversations"][1]["train"] = False
    assert messages_of({"conversations": openai}) == want
    assert messages_of({"messages": share["conversations"]}) == want
    row = {"prompt": share["conversations"][:3], "completion": share["conversations"][3:]}
    assert messages_of(row) == want


def test_an_answer_under_another_name_is_hinted_at_and_pairs_are_sent_to_their_trainers():
    def refusal(row) -> str:
        with pytest.raises(ValueError) as refused:  # noqa: PT011
            messages_of(row)
        return str(refused.value)

    assert "(fix: --columns completion=response)" in refusal({"prompt": "a", "response": "b"})
    said = refusal({"conversation": CHAT["messages"]})  # as in examples of axolotl
    assert (
        "(fix: --columns messages=THEIRS, text=THEIRS, or instruction=THEIRS,output=THEIRS," in said
    )
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    for row in (pair, {**PAIR, "label": True}, {**CHAT, "kto_tag": False}):
        said = refusal(row)
        assert "here a row has one text answer (fix: recipes/prefer.py)" in said
        assert "--bad_rows" not in said


@pytest.mark.parametrize(
    ("row", "columns", "want"),
    [
        (
            {"system_prompt": "Be brief.", "question": "1 + 2?", "response": "3"},
            "instruction=question,output=response,system=system_prompt",
            [{"role": "system", "content": "Be brief."}, user("1 + 2?"), says("3")],
        ),
        (
            {"context": "CREATE TABLE t", "question": "How many?", "answer": "SELECT 1"},
            "instruction=question,output=answer,input=context",
            [user("How many?\n\nCREATE TABLE t"), says("SELECT 1")],
        ),
        ({"question": "1 + 2?", "answer": "3"}, "", [user("1 + 2?"), says("3")]),
    ],
    ids=["OpenOrca", "sql-create-context", "gsm8k"],
)
def test_questions_under_other_names_become_turns_with_the_columns_of_the_error(row, columns, want):
    with pytest.raises(ValueError, match="fix: --columns") as refused:
        messages_of(row)
    keys = (columns or "instruction=question,output=answer").split(",")
    assert all(f"{key.partition('=')[0]}=THEIRS" in str(refused.value) for key in keys)
    row, form = renamed(row, parse_columns(",".join(keys)))
    assert form == "alpaca"
    assert to_messages(row, form, Counter())[0] == want


def test_forms_are_told_by_their_keys():
    # a class, which is no matter here
    assert messages_of({"text": "a", "label": 1})[0][0]["content"] == "a"
    assert messages_of({**ALPACA, "text": "all of it"})[0][1] == says("3")
