"""What is trained is what inference asks for, for every kind of chat template.

python -m pytest tests/test_templates.py
"""

import json
from collections import Counter

import pytest
from templates import KINDS, chatml
from test_tokens import TALK, byte_level, check_prompts, encode_all, metaspace, trained_texts

from utils.data.chats import DIFFERS, render_chats
from utils.data.formats import THOUGHTS
from utils.data.prompts import Prompt, prompt_ids
from utils.data.tokens import end_of_turn_ids, load_tokenizer, print_template_notes, set_template

TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {}}}]
CALL = {"type": "function", "id": "1", "function": {"name": "look", "arguments": {"at": "sea"}}}
QUESTION, ANSWER = {"role": "user", "content": "Say blue"}, {"role": "assistant", "content": "blue"}
TWO = [
    QUESTION,
    ANSWER,
    {"role": "user", "content": "And the sea?"},
    {"role": "assistant", "content": "grey"},
]
TOOL = {"role": "tool", "content": "wet", "name": "look", "tool_call_id": "1"}
CALLS = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL]}, TOOL, ANSWER]


@pytest.fixture(scope="module", params=["byte level", "metaspace"])
def tokenizer(request):
    return metaspace() if request.param == "metaspace" else byte_level(trim_offsets=False)


@pytest.fixture(params=KINDS)
def kind(request, tokenizer):
    tokenizer.chat_template = KINDS[request.param].template
    return KINDS[request.param]


def in_parts(kind, messages):
    """As such a template's own users write messages."""
    if kind is not KINDS["contents in parts"]:
        return messages
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


def test_every_answer_is_trained_from_its_generation_prompt_to_its_end(tokenizer, kind):
    sequences = encode_all(tokenizer, TWO)
    trained = [text for sequence in sequences for text in trained_texts(tokenizer, *sequence)]
    assert trained == [f"{kind.lead}blue{kind.end}", f"{kind.lead}grey{kind.end}"]
    assert end_of_turn_ids(tokenizer) == {tokenizer.convert_tokens_to_ids(kind.end)}
    notes = Counter()
    render_chats(tokenizer, TWO, None, "assistant", notes)
    assert notes[DIFFERS] == (not kind.exact)
    if kind.exact:
        check_prompts(tokenizer, in_parts(kind, TWO), sequences)


def test_thoughts_are_trained_where_the_template_writes_them_and_named_where_it_does_not(
    tokenizer, kind
):
    rows, notes = [QUESTION, ANSWER | {"reasoning_content": "so"}], Counter()
    (sequence,) = encode_all(tokenizer, rows, notes=notes)
    said = "rows with reasoning_content, which the chat template of the tokenizer does not write"
    assert notes[said] == (kind.thought is None)
    lead = kind.lead if kind.thought is None else kind.thought
    assert trained_texts(tokenizer, *sequence) == [f"{lead}blue{kind.end}"]
    if kind.thought is not None:  # these rows begin with their prompt even where others do not
        check_prompts(tokenizer, rows, [sequence])
        sequences = encode_all(tokenizer, [m | {"reasoning_content": "so"} for m in TWO])
        trained = [text for s in sequences for text in trained_texts(tokenizer, *s)]
        assert trained == [f"{lead}blue{kind.end}", f"{lead}grey{kind.end}"]


def test_calls_are_trained_where_the_template_writes_them_and_refused_where_it_does_not(
    tokenizer, kind
):
    if kind.call is None:
        with pytest.raises(ValueError, match="tool_calls of turn 2: .*does not write tool_calls"):
            encode_all(tokenizer, CALLS, TOOLS)
        return
    notes = Counter()
    sequences = encode_all(tokenizer, CALLS, TOOLS, notes=notes)
    trained = [text for sequence in sequences for text in trained_texts(tokenizer, *sequence)]
    lead = "" if "channel" in kind.trl or kind.trl.startswith("gptoss") else kind.lead
    assert trained[0].startswith(lead + kind.call)
    assert trained[1] == f"{kind.lead}blue{kind.end}"
    assert notes["rows with tools, which the chat template of the tokenizer does not write"] == 1


def test_a_template_without_calls_is_told_of_one_that_needs_no_new_token():
    """Gemma's and Phi-4-mini's tokenizers have none of the tokens of chatml."""
    tokenizer = metaspace()
    tokenizer.chat_template = next(kind for kind in KINDS.values() if kind.call is None).template
    with pytest.raises(ValueError, match="does not write tool_calls.*chatml or alpaca"):
        encode_all(tokenizer, CALLS, TOOLS)
    set_template(tokenizer, "alpaca")
    sequences = encode_all(tokenizer, CALLS, TOOLS)
    trained = [text for sequence in sequences for text in trained_texts(tokenizer, *sequence)]
    assert any('"look"' in text for text in trained)


@pytest.mark.parametrize(
    ("message", "part"),
    [({"role": "system", "content": "Be brief."}, "system text"), (TOOL, "answers of tools")],
)
def test_parts_that_a_template_leaves_out_are_counted_by_name(tokenizer, message, part):
    """Of 153 rows with calls of tools a plain template wrote none, and nobody was told."""
    tokenizer.chat_template = KINDS["plain"].template.replace(
        "{%- for m in messages %}{%- if m.role == 'user'",
        "{%- for m in messages if m.role in ('user', 'assistant') %}{%- if m.role == 'user'",
    )
    rows = [message, *TWO] if message["role"] == "system" else CALLS
    notes = Counter()
    assert encode_all(tokenizer, rows, notes=notes)
    assert notes[f"rows with {part}, which the chat template of the tokenizer does not write"] == 1


@pytest.mark.parametrize("key", THOUGHTS)
def test_thoughts_under_any_of_their_names_reach_the_template(tokenizer, key):
    tokenizer.chat_template = KINDS["thoughts where there are some"].template.replace(
        "reasoning_content", key
    )
    (sequence,) = encode_all(tokenizer, [QUESTION, ANSWER | {key: "so"}])
    assert trained_texts(tokenizer, *sequence) == ["<think>so</think>blue<|im_end|>"]


def test_generate_asks_with_the_prompt_that_was_trained(tokenizer, kind):
    for rows, tools in ((TWO, None), *([] if kind.call is None else [(CALLS, TOOLS)])):
        last = encode_all(tokenizer, rows, tools)[-1]
        if kind.exact:
            prompt = prompt_ids(tokenizer, Prompt("", rows[:-1], tools))
            ids, mask = last
            at = mask.rfind(0, 0, mask.rfind(1)) + 1  # where the last answer begins
            assert tokenizer.decode(ids[:at]) == tokenizer.decode(prompt)
            assert ids[at - 2 : at] == prompt[-2:]


def test_text_that_spells_a_special_token_stays_text_in_prompts_and_calls(tokenizer):
    tokenizer.chat_template = KINDS["empty thoughts in the last answer"].template
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "<|im_end|>"}}}
    rows = [
        {"role": "user", "content": "What is <|im_end|>?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [call],
            "reasoning_content": "<|im_end|> is it",
        },
        TOOL,
        ANSWER,
    ]
    ids, _ = encode_all(tokenizer, rows)[-1]
    assert ids.count(end) == 4  # one a turn
    prompt = prompt_ids(tokenizer, Prompt("", rows[:1]))
    assert prompt.count(end) == 1
    assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize(
    "written",
    ["f.name }}{{- f.arguments", "f.name + f.arguments"],
)
def test_calls_are_trained_as_json_whatever_the_template_does_with_objects(tokenizer, written):
    """Written as they are, objects would be Python's text; added to a text, they cannot be written."""
    calls = (
        "{%- for call in m.tool_calls %}{%- set f = call.function %}{{- "
        + written
        + " }}{%- endfor %}"
    )
    tokenizer.chat_template = chatml(
        "{{- '<|im_start|>assistant\n' + m.content }}" + calls + "{{- '<|im_end|>\n' }}"
    )
    arguments = {"at": "蓝 <|im_end|>", "now": True}
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    rows = [QUESTION | {"content": "Not {'at': 1}"}, ANSWER | {"content": "", "tool_calls": [call]}]
    (trained,) = trained_texts(tokenizer, *encode_all(tokenizer, rows)[0])
    assert json.loads(trained.removeprefix("look").removesuffix("<|im_end|>")) == arguments
    assert "蓝 <|im_end|>" in trained


def test_marks_decide_where_the_prompt_is_not_how_the_answer_begins(tokenizer):
    kind = KINDS["a prompt that opens thoughts which no answer has"]
    marked = kind.template.replace(
        "{{- '<|im_start|>assistant\n' + m.content }}",
        "{{- '<|im_start|>' }}{% generation %}{{- 'assistant\n' + m.content }}",
    ).replace(
        "{{- '<|im_end|>\n' }}{%- endif %}{%- endfor",
        "{{- '<|im_end|>\n' }}{% endgeneration %}{%- endif %}{%- endfor",
    )
    tokenizer.chat_template = marked
    sequences = encode_all(tokenizer, TWO)
    trained = [text for sequence in sequences for text in trained_texts(tokenizer, *sequence)]
    assert trained == ["assistant\nblue<|im_end|>", "assistant\ngrey<|im_end|>"]


HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
TURN = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content }}"


@pytest.mark.parametrize(
    "moved", ["messages[-1]", "(messages | selectattr('role', 'eq', 'user') | list)[-1]"]
)
def test_a_template_whose_prompt_is_no_part_of_the_conversation_teaches_no_users_words(
    tokenizer, moved
):
    tokenizer.chat_template = (
        "{{ '<|im_start|>Answer: ' + MOVED.content + '<|im_end|>' }}{% for m in messages[:-1] %}"
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if messages[-1].role == 'assistant' %}{{ messages[-1].content + '<|im_end|>' }}{% endif %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ).replace("MOVED", moved)
    for train_on in ("assistant", "last_assistant"):
        with pytest.raises(ValueError, match="turn [24]: .* others' words would be trained"):
            encode_all(tokenizer, TWO, train_on=train_on)


@pytest.mark.parametrize("end", ["<|eot_id|>", "<|im_end|>\n"])
def test_a_header_that_always_stands_at_the_end_is_not_trained(tokenizer, capsys, end):
    """The first template of Llama 3 ended so."""
    turns = "{% for m in messages %}" + TURN + end + "{% endfor %}"
    tokenizer.chat_template = turns + "{{ '" + HEADER + "' }}"
    (sequence,) = encode_all(tokenizer, TWO)
    token = end.strip()
    assert trained_texts(tokenizer, *sequence) == [f"blue{token}", f"grey{token}"]
    check_prompts(tokenizer, TWO, [sequence])
    assert end_of_turn_ids(tokenizer) == {tokenizer.convert_tokens_to_ids(token)}
    tokenizer.template_name = "always"
    print_template_notes(tokenizer)
    assert capsys.readouterr().out == ""


def test_an_end_of_tokens_with_words_between_them_is_trained_to_its_last_token(tokenizer):
    """Kimi K3 closes a tag by its name; the first token of that also ends thoughts, so it ends no turn."""
    end = "<|im_end|>response<end_of_turn><|eot_id|>"
    turns = "{% for m in messages %}" + TURN + end + "\n{% endfor %}"
    tokenizer.chat_template = (
        turns + "{% if add_generation_prompt %}{{ '" + HEADER + "' }}{% endif %}"
    )
    (sequence,) = encode_all(tokenizer, TWO)
    assert trained_texts(tokenizer, *sequence) == [f"blue{end}", f"grey{end}"]
    assert end_of_turn_ids(tokenizer) == {tokenizer.convert_tokens_to_ids("<|eot_id|>")}


def test_of_turns_that_no_token_ends_a_header_that_always_stands_there_is_no_end(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' if m.role == 'user' else '<start_of_turn>' }}"
        "{{ m.content }}{% endfor %}{{ '<start_of_turn>' }}"
    )
    trained = [text for s in encode_all(tokenizer, TWO) for text in trained_texts(tokenizer, *s)]
    assert trained == ["blue<|im_start|>", "grey<|im_start|>"]
    assert end_of_turn_ids(tokenizer) == {tokenizer.convert_tokens_to_ids("<|im_start|>")}


def test_a_template_that_needs_tools_is_taken_and_rows_without_them_are_faults(tokenizer, tmp_path):
    tokenizer.chat_template = (
        "{%- if not tools %}{{ raise_exception('no tools') }}{% endif %}" + KINDS["plain"].template
    )
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    print_template_notes(loaded)
    assert end_of_turn_ids(loaded) == {loaded.convert_tokens_to_ids("<|im_end|>")}
    (sequence,) = encode_all(loaded, CALLS, TOOLS)
    assert trained_texts(loaded, *sequence)[-1] == "blue<|im_end|>"
    with pytest.raises(ValueError, match="no tools"):
        encode_all(loaded, TWO)


def test_every_template_of_trl_is_of_a_kind():
    names = [name for kind in KINDS.values() for name in kind.trl.split()]
    assert len(set(names)) == 41
    assert TALK
