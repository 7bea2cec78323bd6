"""Conversations -> ids and the loss mask, for any chat template.

The trained tokens are those that the model must write at inference: an assistant's turn from the end of the
generation prompt to the end of the turn. The generation prompt is the text that inference puts before the
answer: apply_chat_template(messages up to the turn, add_generation_prompt=True). So text that the template
writes between the generation prompt and the answer is trained too (the empty thoughts of Qwen3,
"<|channel|>final<|message|>" of gpt-oss), and so is the token that ends the turn. The loss mask has one byte
per token, 1 or 0, at the token's own position.
"""

import json
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple

from .formats import THOUGHTS, Messages
from .tokens import (
    MARK,
    SCHEMA,
    Encoded,
    IdsAndMask,
    encode,
    hidden,
    render,
    render_marked,
    sketch,
    template_name,
    turn_end,
)

SHORTENED = "rows with an answer of which the chat template leaves out a part"
DIFFERS = (
    "rows that do not begin with the prompt that the chat template gives at inference (fix: thoughts of the"
    " rows under reasoning_content, if the prompt begins thoughts; or a --chat_template whose answers begin"
    " with its prompt)"
)
SPELLED = "rows in which text spells a special token, which stays text"
SEVERAL = (
    "rows became several sequences, one for each answer: the chat template writes an answer differently once"
    " later turns follow (--train_on last_assistant trains only the last)"
)
MARKED = re.compile(MARK.format(r"(-?\d+) (\w+)( \d+)?"))
# role -> the words for its text in a note
PARTS_OF_ROLES = {
    "tools": "tools",
    "system": "system text",
    "tool": "answers of tools",
    "user": "user's text",
}


class Chat(NamedTuple):
    """A rendered conversation. spans: (first, last, exact) of each trained range of characters [first, last).
    exact: the text before `first` is a generation prompt, which inference encodes by itself.
    """

    text: str
    spans: list[tuple]


# --- messages -> text and the trained spans


def render_chats(
    tokenizer, messages: Messages, tools: list | None, train_on: str, notes: Counter
) -> list[Chat]:
    """The sequences to train for a conversation. Each trained turn appears as it does at inference.

    Usually this is one sequence, the whole conversation. Some templates write a turn differently once later
    turns follow (Qwen3 drops earlier thoughts, gpt-oss ends earlier turns with another token). Such a turn
    gets its own sequence, which ends with the turn.

    train_on: assistant, last_assistant or all. Turns of weight 0 are not trained. notes: counts what the user
    should know. ValueError if the template does not write a part that should be trained.
    """
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    candidates = answers[-1:] if train_on == "last_assistant" else answers
    trained = [i for i in candidates if messages[i].get("weight", 1)]
    if train_on == "all" and trained != answers:
        raise ValueError(
            "a turn of weight 0 or of a prompt, and --train_on all (fix: --train_on assistant)"
        )
    safe = hidden(tokenizer, [messages, tools])
    notes[SPELLED] += safe != [messages, tools]
    messages, tools = safe
    messages = renderable(tokenizer, messages, tools)
    marked = skeleton(messages)
    examine_parts(tokenizer, marked, tools, trained, notes)
    text, _ = rendered = render_marked(tokenizer, messages, tools)
    if train_on == "all":
        return [Chat(text, [(0, len(text), False)])]
    turns = [turn_of(tokenizer, messages, i, tools, marked, notes, rendered) for i in trained]
    chats = divided(text, turns)
    notes[SEVERAL] += len(chats) > 1
    return chats


def renderable(tokenizer, messages: Messages, tools: list | None) -> Messages:
    """The messages in the form that the template accepts. Some templates cannot write the arguments of tool
    calls as objects (DeepSeek-V3), or write them as Python does, {'at': True}; they get JSON text.
    """
    as_text = [with_text_arguments(message) for message in messages]
    if as_text != messages:
        objects = ""
        with suppress(ValueError):  # if neither can be rendered, the caller raises
            objects = render(tokenizer, messages, tools)
        with suppress(ValueError):
            texts = render(tokenizer, as_text, tools)
            if not objects or objects.count("{'") > texts.count("{'"):
                return as_text
    return messages


def with_text_arguments(message: dict) -> dict:
    """The message with the arguments of its tool calls as JSON text."""
    calls = []
    for call in message.get("tool_calls", []):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls} if calls else message


def skeleton(messages: Messages) -> Messages:
    """The messages with each content, thought and tool call replaced by a mark. A mark names the message
    and the part.
    """
    marked = []
    for i, message in enumerate(messages):
        copy = dict(message)
        for key in ("content", *THOUGHTS):
            if message.get(key):
                copy[key] = MARK.format(f"{i} {'content' if key == 'content' else 'thoughts'}")
        calls = []
        for number, call in enumerate(message.get("tool_calls", [])):
            no_arguments = "{}" if isinstance(call["function"]["arguments"], str) else {}
            name = MARK.format(f"{i} tool_calls {number}")
            calls.append(call | {"function": {"name": name, "arguments": no_arguments}})
        if calls:
            copy["tool_calls"] = calls
        marked.append(copy)
    return marked


def examine_parts(tokenizer, marked: Messages, tools, trained: list[int], notes: Counter) -> None:
    """Raise ValueError if the template does not write a part that should be trained. Count rows with other
    parts that it does not write in `notes`. marked: a skeleton; trained: the indices of the trained turns.
    """
    template = f"the {template_name(tokenizer)}"
    for i in trained:
        lost = lost_parts(tokenizer, marked[: i + 1], tools)
        for part in ("tool_calls", "content"):
            if (i, part) in lost:
                raise ValueError(
                    f"{part} of turn {i + 1}: {template} does not write {part}, and the model would learn to"
                    " leave it out (fix: a --chat_template that does, such as chatml or alpaca)"
                )
        if (i, "thoughts") in lost:
            notes[f"rows with reasoning_content, which {template} does not write"] = 1
    roles = {
        "tools" if i < 0 else marked[i]["role"] for i, _ in lost_parts(tokenizer, marked, tools)
    }
    for role in sorted(roles & PARTS_OF_ROLES.keys()):
        notes[f"rows with {PARTS_OF_ROLES[role]}, which {template} does not write"] += 1


def lost_parts(tokenizer, marked: Messages, tools: list | None) -> set:
    """(message index, part) of each part that the template never writes; (-1, "tools") for the tools.
    marked: a skeleton.
    """
    try:
        text, _ = sketch(tokenizer, marked, tools)
    except ValueError:  # the template parses the texts, so it rejects marks, not the row
        return set()
    marks = MARKED.finditer(json.dumps([marked, tools and SCHEMA], ensure_ascii=False))
    return {(int(mark[1]), mark[2]) for mark in marks if mark[0] not in text}


def turn_of(
    tokenizer, messages: Messages, i: int, tools, marked: Messages, notes: Counter, rendered
) -> Chat:
    """The conversation up to the end of turn i, with one span: that turn. marked: the skeleton of the whole
    conversation; rendered: render_marked of it. notes: counts a row if the template leaves out a part of the
    answer, or if the text before it is not the prompt at inference.
    """
    text, spans = rendered
    next_role = "tool" if messages[i].get("tool_calls") else "user"
    if i + 1 < len(messages):
        next_role = messages[i + 1]["role"]
        text, spans = render_marked(tokenizer, messages[: i + 1], tools)
    prompt = render(tokenizer, messages[:i], tools, prompt=True)
    answer = marked[i] | {"content": MARK.format(f"{i} content")}
    answer.pop("tool_calls", None)
    marked_turns = [*marked[:i], answer]
    tail, end = turn_end(tokenizer, marked_turns, tools, next_role)
    last = len(text.rstrip())
    if text.endswith(tail):  # otherwise the template ends tool calls differently from text
        last = len(text) - len(tail)
        text = text[:last] + end
    exact = text.startswith(prompt)
    first = len(prompt)
    if not exact:
        if begins_early(tokenizer, marked_turns, tools):
            raise ValueError(
                f"turn {i + 1}: once it is answered, the {template_name(tokenizer)} no longer begins with the"
                " prompt, so others' words would be trained (fix: another --chat_template, chatml or alpaca)"
            )
        first = len(commonprefix((prompt, text)))
        notes[DIFFERS] = 1
        # The answer begins at the latest where a text with another answer differs.
        other_text = render(tokenizer, [*messages[:i], answer], tools)
        first = min(first, len(commonprefix((other_text, text))))
        if spans:  # between {% generation %} marks
            first = spans[-1][0]
    if messages[i]["content"].strip() not in text[first:last]:
        notes[SHORTENED] = 1
    return Chat(text, [(first, len(text), exact)])


def begins_early(tokenizer, turns: Messages, tools: list | None) -> bool:
    """Whether the span of the last turn, an answer, would include content of an earlier turn. turns: a
    skeleton.
    """
    try:
        text, spans = sketch(tokenizer, turns, tools)
        prompt, _ = sketch(tokenizer, turns[:-1], tools, prompt=True)
    except ValueError:  # the template parses the texts, so it rejects marks
        return False
    first = spans[-1][0] if spans else len(commonprefix((prompt, text)))
    return any(
        mark.end() > first and int(mark[1]) != len(turns) - 1 for mark in MARKED.finditer(text)
    )


def divided(text: str, turns: list[Chat]) -> list[Chat]:
    """The smallest number of sequences that contain all trained turns.

    text: the whole conversation; turns: from turn_of. A turn is trained within a longer sequence if that
    sequence begins with the turn's text.
    """
    chats = []
    for turn in reversed(turns):
        longer = [chat for chat in chats if chat.text.startswith(turn.text)]
        if not longer:
            is_whole = not chats and text.startswith(turn.text)
            longer = [Chat(text if is_whole else turn.text, [])]
            chats += longer
        longer[0].spans.extend(turn.spans)
    return chats[::-1] or [Chat(text, [])]


# --- text -> ids


def encode_chat(tokenizer, chat: Chat) -> IdsAndMask:
    """(ids, mask) of T tokens.

    The ids are those of apply_chat_template(messages), with one exception. If a prompt does not end at a
    token boundary of the whole text, the text is cut there and encoded in pieces, as at inference.
    """
    tokens = cut_after_prompts(tokenizer, chat, encode(tokenizer, chat.text))
    mask = bytearray(len(tokens.ids))
    for first, last, exact in chat.spans:
        begin = bisect_right(tokens.ends, first)  # the first token that ends after `first`
        # Phi-3: an added token of the prompt also holds the white space that begins the answer.
        if (
            exact
            and added_ids(tokenizer) & {*tokens.ids[begin : begin + 1]}
            and tokens.starts[begin] < first
            and chat.text[first : tokens.ends[begin]].isspace()
        ):
            begin += 1
        end = bisect_left(tokens.starts, last)  # the first one that starts at `last` or later
        mask[begin:end] = b"\1" * (end - begin)
    return tokens.ids, mask


def cut_after_prompts(tokenizer, chat: Chat, tokens: Encoded) -> Encoded:
    """The tokens of a conversation, encoded in pieces if a prompt has other tokens when encoded alone."""
    cuts = [
        first
        for first, _, exact in chat.spans
        if exact and not stands_alone(tokenizer, chat.text, first, tokens)
    ]
    if not cuts:
        return tokens
    joined = Encoded([], [], [])
    for begin, end in pairwise([0, *sorted(cuts), len(chat.text)]):
        piece = encode(tokenizer, chat.text[begin:end])
        joined.ids.extend(piece.ids)
        joined.starts.extend(begin + start for start in piece.starts)
        joined.ends.extend(begin + last for last in piece.ends)
    if tokenizer.decode(joined.ids) != tokenizer.decode(tokens.ids):
        return tokens  # pieces would get extra spaces: a token across a cut stays whole, and is trained
    return joined


def stands_alone(tokenizer, text: str, first: int, tokens: Encoded) -> bool:
    """Whether the text before `first` has the same tokens when it is encoded alone."""
    begin = bisect_right(tokens.ends, first)
    # An added token is always a token boundary, so only the text after the last one must be compared.
    added = added_ids(tokenizer)
    i = begin
    while i and tokens.ids[i - 1] not in added:
        i -= 1
    i = max(i - 1, 0)
    return _ids(tokenizer, text[tokens.starts[i] if i else 0 : first]) == tokens.ids[i:begin]


@lru_cache(maxsize=4096)
def _ids(tokenizer, text):
    return encode(tokenizer, text).ids


@lru_cache(maxsize=8)
def added_ids(tokenizer) -> frozenset[int]:
    """The ids of all added tokens, special or not."""
    return frozenset(tokenizer.added_tokens_decoder)
