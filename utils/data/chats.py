"""Rows -> ids and the loss mask where the plain way does not do: templates that write a turn otherwise later
on, tools and their calls, thoughts, texts without turns, and text that spells a special token.
"""

import json
import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from .tokens import (
    _turns_in_place,
    encode,
    end_patterns,
    literal_places,
    mark,
    render,
    render_marked,
    special_text,
    spells_special,
    takes_parts,
    template_name,
    token_after,
    token_from,
    turn_end,
)

SHORTENED = "rows of whose answers the chat template leaves something out"
SPELLED = "rows in which text spells a special token, which stays text"
SEVERAL = (
    "rows became several sequences, one an answer: the chat template writes earlier answers otherwise than it"
    " asks for them (--train_on last_assistant trains one)"
)
MERGED = "rows in which an answer begins within a token of its prompt"
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # of a turn, beside its content
MARK = "\ue0f0{}\ue0f1"  # stands for a text, to see whether a template writes it, and where

Sequence = tuple[list[int], bytearray]


def encode_rich(
    tokenizer, messages: list[dict], tools: list | None, train_on: str, notes: Counter
) -> list[Sequence]:
    """(ids, mask) of T tokens each, for any template and any messages of messages.to_messages.

    train_on: assistant, last_assistant or all; turns of weight 0 are not trained. Text in a message that
    spells a special token stays text. notes: counts what a user may want to know. ValueError names a part
    that is to be trained and that the template does not write.
    """
    if messages[0]["role"] == "text":
        return [encode_text(tokenizer, messages)]
    if messages[0]["role"] == "tokens":
        return [(check_ids(messages[0]["content"], len(tokenizer)), messages[0]["loss_mask"])]
    return encode_turns(tokenizer, messages, tools, train_on, notes)


def encode_turns(
    tokenizer, messages: list[dict], tools: list | None = None, train_on="assistant", notes=None
) -> list[Sequence]:
    """The sequences in which each trained turn stands as inference asks for it.

    Mostly that is one, the whole conversation. A turn that the template writes otherwise once others follow
    (Qwen3 drops earlier thoughts, gpt-oss ends earlier turns with another token) gets a sequence of its own,
    which ends with it.
    """
    notes = Counter() if notes is None else notes
    trained = trained_turns(messages, train_on)
    unweighted = [i for i, message in enumerate(messages) if message.get("weight", 1) == 0]
    messages = renderable(tokenizer, messages, tools)
    check_parts(tokenizer, messages, tools, trained, notes)
    notes[SPELLED] += spells_special(tokenizer, messages)
    text = render(tokenizer, messages, tools)
    if train_on == "all" or not trained:
        encoding, ids = encode_row(tokenizer, messages, tools, text)
        mask = bytearray([train_on == "all"]) * len(ids)
        for i in unweighted:
            first, last = place_of(tokenizer, messages, i, tools, text)
            begin, end = token_after(encoding, text, first), token_from(encoding, text, last)
            mask[begin:end] = bytes(max(0, end - begin))
        return [(ids, mask)]
    turns = [Turn(tokenizer, messages[: i + 1], tools, messages[i + 1 :]) for i in trained]
    rows: list[tuple[str, list[Turn]]] = []
    for turn in reversed(turns):
        if not rows and text.startswith(turn.text):
            rows.append((text, []))
        elif not any(row.startswith(turn.text) for row, _ in rows):
            rows.append((turn.text, []))
        next(there for row, there in rows if row.startswith(turn.text)).append(turn)
    notes[SHORTENED] += any(turn.shortened for turn in turns)
    notes[SEVERAL] += len(rows) > 1
    return [encode_row_of(tokenizer, messages, tools, *row, notes) for row in reversed(rows)]


def trained_turns(messages: list[dict], train_on: str) -> list[int]:
    """The indices of the assistant's turns that are trained."""
    trained = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1)]
    return trained[-1:] if train_on == "last_assistant" else trained


class Turn:
    """An assistant's turn that is trained, in the conversation that ends with it.

    text: that conversation, rendered, up to what ends the turn; its characters from `first` on are trained.
    exact: it begins with its generation prompt.
    """

    def __init__(self, tokenizer, messages: list[dict], tools: list | None, later: list[dict]):
        self.messages, self.tools = messages, tools
        text, marks = render_marked(tokenizer, messages, tools)
        prompt = render(tokenizer, messages[:-1], tools, prompt=True)
        begin, last = place_of(tokenizer, messages, len(messages) - 1, tools, text)
        self.exact = text.startswith(prompt)
        self.first = len(prompt) if self.exact else min(begin, len(commonprefix((prompt, text))))
        if not self.exact and marks:
            self.first = next((start for start, end in marks if end >= last), self.first)
        self.prompt_ids = prompt_ids(tokenizer, messages[:-1], tools) if self.exact else []
        self.text = text[:last] + end_of(tokenizer, messages, tools, text, last, later)
        content = messages[-1]["content"].strip()
        self.shortened = content not in text[self.first : last]


def encode_row_of(
    tokenizer, messages, tools, text: str, turns: list[Turn], notes: Counter
) -> Sequence:
    """(ids, mask) of a rendered conversation in which some turns are trained. Where the prompt of a turn
    alone would be other tokens than in the whole, the text is cut there, as inference cuts it.
    """
    encoding, ids = encode_row(tokenizer, messages, tools, text)
    cuts = [
        turn.first
        for turn in turns
        if turn.exact and ids[: len(turn.prompt_ids)] != turn.prompt_ids
    ]
    bounds = [0, *sorted(cuts), len(text)]
    pieces = [encode_row(tokenizer, messages, tools, text, *pair) for pair in pairwise(bounds)]
    backend = tokenizer.backend_tokenizer
    if cuts:
        apart = [token for _, piece in pieces for token in piece]
        read = [backend.decode(some, skip_special_tokens=False) for some in (apart, ids)]
        # a tokenizer that begins every text with a space: the token is trained whole
        if read[0] != read[1]:
            notes[MERGED] += 1
            bounds, pieces = [0, len(text)], [(encoding, ids)]
    mask = bytearray()
    for first, (piece, tokens) in zip(bounds, pieces, strict=False):
        part = bytearray(len(tokens))
        for turn in turns:
            begin = token_after(piece, text[first:], max(turn.first - first, 0))
            end = token_from(piece, text[first:], max(len(turn.text) - first, 0))
            part[begin:end] = b"\1" * (end - begin)
        mask += part
    return [token for _, piece in pieces for token in piece], mask


def end_of(tokenizer, messages: list[dict], tools, text: str, last: int, later: list[dict]) -> str:
    """What ends the turn that is the last of some messages, whose content ends at text[:last]: see
    tokens.turn_end, which knows no calls.
    """
    several, one = end_patterns(tokenizer)
    if found := several.match(text, last):
        return found[0]
    if not messages[-1].get("tool_calls"):
        return turn_end(tokenizer, tokenizer.get_chat_template(tools=tools), ("user", "assistant"))
    answer = later[0] if later else {"role": "tool", "content": "", "name": "", "tool_call_id": ""}
    found = one.match(render(tokenizer, [*messages, answer], tools), last)
    return found[0] if found else ""


def renderable(tokenizer, messages: list[dict], tools: list | None) -> list[dict]:
    """Some messages as the template takes them: without our weights, and with the arguments of calls as JSON
    text where it cannot write objects (DeepSeek-V3).
    """
    messages = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
    if not any(message.get("tool_calls") for message in messages):
        return messages
    try:
        render(tokenizer, messages, tools)
        return messages
    except ValueError as first:
        as_text = [with_text_arguments(message) for message in messages]
        try:
            render(tokenizer, as_text, tools)
        except ValueError:
            raise first from None
        return as_text


def with_text_arguments(message: dict) -> dict:
    calls = [
        {**call, "function": {**(f := call["function"]), "arguments": json.dumps(f["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return message | {"tool_calls": calls} if calls else message


# --- what a template does not write


def check_parts(tokenizer, messages, tools, trained: list[int], notes: Counter) -> None:
    """Raise ValueError where the template does not write a part that is to be trained; count in `notes` what
    else it leaves out.
    """
    name = f"the {template_name(tokenizer)}"
    unthought = False
    for i in trained:
        lost = {part for at, part in lost_parts(tokenizer, messages[: i + 1], tools) if at == i}
        for part in ("tool_calls", "content"):
            what = f"{part} of turn {i + 1}: {name} does not write {part}, and the model would learn to leave"
            if part in lost:
                raise ValueError(f"{what} it out (fix: a --chat_template that does, or chatml)")
        unthought |= "reasoning_content" in lost
    if unthought:
        notes[f"rows with reasoning_content, which {name} does not write"] += 1
    shown = {
        "tools": "tools",
        "system": "system text",
        "tool": "answers of tools",
        "user": "user's text",
    }
    lost = {
        messages[i]["role"] if i >= 0 else "tools"
        for i, part in lost_parts(tokenizer, messages, tools)
    }
    for role in shown.keys() & lost:
        notes[f"rows with {shown[role]}, which {name} does not write"] += 1


def lost_parts(tokenizer, messages: list[dict], tools: list | None) -> frozenset[tuple[int, str]]:
    """(index of a message, its part) that the template does not write at all; (-1, "tools") for the tools."""
    outline = tuple(
        (
            m["role"],
            bool(m["content"]),
            tuple(key for key in (*THOUGHTS, "name", "tool_call_id") if m.get(key)),
            tuple(isinstance(c["function"]["arguments"], str) for c in m.get("tool_calls", [])),
        )
        for m in messages
    )
    return _lost_parts(tokenizer, tokenizer.get_chat_template(tools=tools), outline, bool(tools))


@lru_cache(maxsize=1024)
def _lost_parts(
    tokenizer, template: str, outline: tuple, tools: bool
) -> frozenset[tuple[int, str]]:
    """As lost_parts, from a conversation of the same outline whose texts are marks."""
    marks: list[tuple[int, str, str]] = []

    def mark(i: int, part: str) -> str:
        marks.append((i, part, MARK.format(len(marks))))
        return marks[-1][2]

    messages = []
    for i, (role, content, others, calls) in enumerate(outline):
        message = {"role": role, "content": mark(i, "content") if content else ""}
        message |= {k: mark(i, "reasoning_content") if k in THOUGHTS else "x" for k in others}
        if calls:
            message["tool_calls"] = [
                marked_call(mark(i, "tool_calls"), as_text) for as_text in calls
            ]
        messages.append(message)
    parameters = {"type": "object", "properties": {}}
    function = (
        {"name": mark(-1, "tools"), "description": "x", "parameters": parameters} if tools else {}
    )
    try:
        text = render(
            tokenizer, messages, [{"type": "function", "function": function}] if tools else None
        )
    except ValueError:  # of a template that reads the texts; the row itself can be rendered
        return frozenset()
    written = {(i, part) for i, part, word in marks if word in text}
    # Of thoughts under several keys one is enough; of several calls all are to be there.
    lost = {(i, part) for i, part, word in marks if word not in text}
    return frozenset(lost - {found for found in written if found[1] == "reasoning_content"})


def marked_call(name: str, as_text: bool) -> dict:
    arguments = "{}" if as_text else {}
    return {"type": "function", "id": "x", "function": {"name": name, "arguments": arguments}}


def prompt_problem(tokenizer, messages, tools, train_on: str, sequences: list[Sequence]) -> str:
    """What transformers would put before an answer of this row otherwise than it is trained, as a sentence
    that names the template and the difference; "" where prompt and trained tokens make the row.
    """
    trained = trained_turns(messages, train_on)
    messages = renderable(tokenizer, messages, tools)
    if takes_parts(tokenizer, tokenizer.get_chat_template(tools=tools)):
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    starts = [
        (ids, at)
        for ids, mask in sequences
        for at in range(len(ids))
        if mask[at] and not (at and mask[at - 1])
    ]
    if len(starts) != len(trained):
        # answers that follow each other without a token between; each was looked for on its own
        return ""
    for i, (ids, at) in zip(trained, starts, strict=True):
        text = tokenizer.apply_chat_template(
            messages[:i], tools=tools, add_generation_prompt=True, tokenize=False
        )
        asked, given = tokenizer.decode(encode(tokenizer, text).ids), tokenizer.decode(ids[:at])
        if asked != given:
            same = len(commonprefix((asked, given)))
            begin, after = max(0, same - 20), tokenizer.decode(ids)[same:]
            return (
                f"the {template_name(tokenizer)} ends its prompt with {asked[begin:]!r}, but in the row"
                f" {given[begin:same]!r} goes on with {after[:20]!r}: inference asks for what is not trained"
                " (fix: rows with thoughts in reasoning_content, if the prompt begins some; or a"
                " --chat_template whose answers begin with its prompt)"
            )
    return ""


# --- where in a rendered conversation its messages stand


def place_of(
    tokenizer, messages, i: int, tools, text: str, prompt: bool = False
) -> tuple[int, int]:
    """The characters [first, last) of `text` that come from a message, calls included: where the conversation
    would read otherwise if a mark stood in the message's place. Empty where the template leaves it out.
    """
    mark, message = MARK.format(""), messages[i]
    bare = {key: value for key, value in message.items() if key not in ("tool_calls", *THOUGHTS)}
    other = render(
        tokenizer, [*messages[:i], bare | {"content": mark}, *messages[i + 1 :]], tools, prompt
    )
    first = len(commonprefix((text, other)))
    after = len(commonprefix((text[first:][::-1], other[first:][::-1])))
    last = max(first, len(text) - after) if mark in other else first
    content = message["content"]
    at = content.find(text[first:last]) if last > first else -1
    if at > 0 and text[max(0, first - at) : first] == content[:at]:
        first -= at  # what the template writes by itself is also how the content begins
    return first, last


def places_of(tokenizer, messages, tools, text: str, prompt: bool = False) -> list[tuple[int, int]]:
    """The characters of `text` that are each message's own; not what the template writes around calls and
    thoughts, of which only what stands there literally is the message's.
    """
    places = []
    for i, message in enumerate(messages):
        first, last = place_of(tokenizer, messages, i, tools, text, prompt)
        if message.keys() & {"tool_calls", *THOUGHTS}:
            parts = [message["content"], *(str(message[key]) for key in THOUGHTS if key in message)]
            for call in message.get("tool_calls", []):
                parts += texts_in(call["function"])
            words = re.compile("|".join(re.escape(part) for part in parts if part) or "(?!)")
            places += [found.span() for found in words.finditer(text, first, last)]
        else:
            places.append((first, last))
    return places


def texts_in(value: object) -> list[str]:
    """All texts in a value of JSON, also as JSON writes them."""
    if isinstance(value, str):
        return [value, json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for item in items for text in texts_in(item)]


# --- text -> ids


def encode_row(
    tokenizer, messages, tools, text: str, begin: int = 0, end: int | None = None
) -> tuple[Encoding, list[int]]:
    """(encoding, ids) of the characters [begin, end) of a rendered conversation; what spells a special token
    in a message is text.
    """
    if not spells_special(tokenizer, messages):
        encoding = encode(tokenizer, text[begin:end])
        return encoding, encoding.ids
    places = places_of(tokenizer, messages, tools, text)
    places = [(max(0, first - begin), last - begin) for first, last in places if last > begin]
    return encode_as_text(tokenizer, text[begin:end], places)


def check_ids(ids: list, vocab: int) -> list[int]:
    """Some ids, if they are numbers of tokens."""
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(
                f"input_ids[{i}]: {str(token)[:40]} is no token; they are 0 to {vocab - 1}"
            )
    return ids


def encode_text(tokenizer, messages: list[dict]) -> tuple[list[int], bytearray]:
    """(ids, loss_mask) of texts one after the other, without a template; weight says which are
    trained, and the end-of-text token after the last one is.

    A token that holds the end of one text and the start of the next is trained as the next is.
    """
    text = "".join(message["content"] for message in messages)
    encoding, loss_mask, end = encode(tokenizer, text, special_as_text=True), bytearray(), 0
    for message in messages:
        end += len(message["content"])
        until = token_after(encoding, text, end) if end < len(text) else len(encoding)
        loss_mask += bytes([message["weight"]]) * (until - len(loss_mask))
    ids, (first, last) = encoding.ids, (messages[0]["content"], messages[-1]["content"])
    if getattr(first, "first", True) and tokenizer("a")["input_ids"][:1] == [
        tokenizer.bos_token_id
    ]:
        ids, loss_mask = [tokenizer.bos_token_id, *ids], b"\0" + loss_mask
    if getattr(last, "last", True) and tokenizer.eos_token_id is not None:
        ids, loss_mask = [*ids, tokenizer.eos_token_id], loss_mask + bytes([messages[-1]["weight"]])
    return ids, loss_mask


def encode_as_text(
    tokenizer, text: str, places: list[tuple[int, int]]
) -> tuple[Encoding, list[int]]:
    """(encoding, ids) of a rendered conversation in which special tokens within `places` are text.

    ValueError where the tokenizer cannot do that.
    """
    (other, names, ids), special = _renamed(tokenizer), special_text(tokenizer)
    inside = [False] * len(text)
    for first, last in places:
        inside[first:last] = [True] * (last - first)

    def rename(found: re.Match) -> str:
        return found[0] if all(inside[found.start() : found.end()]) else names[found[0]]

    def read(words: str) -> tuple[Encoding, list[int]]:
        encoding = other.encode(special.sub(rename, words), add_special_tokens=False)
        return encoding, [ids.get(token, token) for token in encoding.ids]

    # The same row without such text must read as the tokenizer itself reads it.
    harmless = special.sub(lambda m: "x" * len(m[0]) if inside[m.start()] else m[0], text)
    if read(harmless)[1] != encode(tokenizer, harmless).ids:
        raise ValueError(
            "its text spells a special token, which this tokenizer cannot read as text"
        )
    return read(text)


@lru_cache(maxsize=2)
def _renamed(tokenizer) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
    """(the tokenizer with other names for its special tokens, of the same lengths; name -> other name; its
    ids -> ours).
    """
    state, names, old = json.loads(tokenizer.backend_tokenizer.to_str()), {}, {}
    for number, token in enumerate(token for token in state["added_tokens"] if token["special"]):
        name = chr(0xF0000 + number) + "\U000effff" * (len(token["content"]) - 1)
        names[token["content"]], old[name] = name, token["id"]
        token["content"] = name
    other = Tokenizer.from_str(json.dumps(state))
    return other, names, {other.token_to_id(name): number for name, number in old.items()}


def prompt_ids(tokenizer, messages: list[dict], tools: list | None = None) -> list[int]:
    """The ids of the generation prompt: the conversation up to an answer, as inference asks for it. Training
    and recipes/generate.py both take it from here. Text in a message that spells a special token stays text.
    """
    text = render(tokenizer, messages, tools, prompt=True)
    if not spells_special(tokenizer, messages):
        return encode(tokenizer, text).ids
    return encode_as_text(
        tokenizer, text, places_of(tokenizer, messages, tools, text, prompt=True)
    )[1]


class Chat(NamedTuple):
    """A conversation as text, and the characters [first, last) of it that are trained."""

    text: str
    spans: list[tuple[int, int]]
    messages: list[dict[str, str]]


def chat_text(tokenizer, messages: list[dict[str, str]]) -> Chat | None:
    """A plain conversation as text, with what is trained.

    None where it takes more than that: see encode_turns. ValueError names the template and the
    role that it cannot render.
    """
    if spells_special(tokenizer, messages):
        return None
    roles = tuple(message["role"] for message in messages)
    turns = _turns_in_place(tokenizer, tokenizer.get_chat_template(), roles)
    text = render(tokenizer, messages)
    places = literal_places(tokenizer, messages, text) if turns else []
    if not places:
        return None
    spans = [(places[i][0] - lead, places[i][1] + len(end)) for i, (lead, end) in turns.items()]
    last = len(messages) - 1
    if last in turns and not text.startswith(turns[last][1], places[last][1]):
        # the template itself ends no turn with a token
        text = text[: places[last][1]] + turns[last][1]
    return Chat(text, spans, messages)


def encode_chats(tokenizer, chats: list[Chat]) -> list[list[tuple[list[int], bytearray]]]:
    """(ids, mask) of T tokens each for some of chat_text; mostly one for each conversation.

    The ids are those of apply_chat_template(messages), but for a prompt whose end is no token boundary of the
    whole: that one is cut there, as inference cuts it.
    """
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = False
    encodings = backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
    found = []
    for encoding, chat in zip(encodings, chats, strict=True):
        ids, mask = encoding.ids, bytearray(len(encoding))
        whole = all(mark(tokenizer, chat.text, span, encoding, ids, mask) for span in chat.spans)
        if not whole:
            found.append(encode_turns(tokenizer, chat.messages))
        else:
            found.append([(ids, mask)])
    return found
