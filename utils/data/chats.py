"""Conversations -> ids and the loss mask, where tokens.py alone does not suffice: templates that write a turn
differently once later turns follow, tools and their calls, thoughts, texts without turns, and text that
spells a special token.
"""

import json
import re
from collections import Counter
from functools import lru_cache
from itertools import pairwise
from os.path import commonprefix
from typing import NamedTuple

from tokenizers import Encoding, Tokenizer

from .formats import THOUGHTS
from .template_check import check_parts
from .tokens import (
    MARK,
    Sequence,
    encode,
    end_patterns,
    literal_places,
    mark_trained,
    render,
    render_marked,
    renderable,
    special_text,
    spells_special,
    token_after,
    token_from,
    trained_turns,
    turn_end,
    turns_in_place,
)

SHORTENED = "rows with an answer of which the chat template leaves out a part"
SPELLED = "rows in which text spells a special token, which stays text"
SEVERAL = (
    "rows became several sequences, one for each answer: the chat template writes an answer differently once"
    " later turns follow (--train_on last_assistant trains only the last)"
)
MERGED = "rows in which an answer begins within the last token of its prompt"


def encode_rich(
    tokenizer, messages: list[dict], tools: list | None, train_on: str, notes: Counter
) -> list[Sequence]:
    """(ids, mask) of T tokens each, for any template and any messages of messages.to_messages.

    train_on: assistant, last_assistant or all; turns of weight 0 are not trained. Text in a message that
    spells a special token stays text. notes: counts what a user may want to know. ValueError names a part
    that should be trained and that the template does not write.
    """
    if messages[0]["role"] == "text":
        return [encode_text(tokenizer, messages)]
    if messages[0]["role"] == "tokens":
        ids = check_ids(messages[0]["content"], len(tokenizer))
        return [(ids, messages[0]["loss_mask"])]
    return encode_turns(tokenizer, messages, tools, train_on, notes)


def encode_turns(
    tokenizer,
    messages: list[dict],
    tools: list | None = None,
    train_on: str = "assistant",
    notes: Counter | None = None,
) -> list[Sequence]:
    """The sequences in which each trained turn stands as inference asks for it.

    Mostly that is one, the whole conversation. A turn that the template writes differently once later turns
    follow (Qwen3 drops earlier thoughts, gpt-oss ends earlier turns with another token) gets a sequence of
    its own, which ends with it.
    """
    notes = Counter() if notes is None else notes
    trained = trained_turns(messages, train_on)
    unweighted = [i for i, message in enumerate(messages) if message.get("weight", 1) == 0]
    messages = renderable(tokenizer, messages, tools)
    check_parts(tokenizer, messages, tools, trained, notes)
    notes[SPELLED] += spells_special(tokenizer, messages)
    text = render(tokenizer, messages, tools)
    if train_on == "all":
        return [encode_all(tokenizer, messages, tools, text, unweighted)]
    if not trained:
        _, ids = encode_part(tokenizer, messages, tools, text)
        return [(ids, bytearray(len(ids)))]
    turns = []
    for i in trained:
        messages_to_turn = messages[: i + 1]
        turns.append(Turn(tokenizer, messages_to_turn, tools, later=messages[i + 1 :]))
    rows = divided(text, turns)
    notes[SHORTENED] += any(turn.shortened for turn in turns)
    notes[SEVERAL] += len(rows) > 1
    sequences = []
    for row_text, row_turns in rows:
        sequences.append(encode_sequence(tokenizer, messages, tools, row_text, row_turns, notes))
    return sequences


def encode_all(tokenizer, messages, tools, text: str, unweighted: list[int]) -> Sequence:
    """All of a rendered conversation is trained, but for the messages with the indices `unweighted`."""
    encoding, ids = encode_part(tokenizer, messages, tools, text)
    mask = bytearray([1]) * len(ids)
    for i in unweighted:
        first, last = place_of(tokenizer, messages, i, tools, text)
        begin = token_after(encoding, text, first)
        end = token_from(encoding, text, last)
        mask[begin:end] = bytes(max(0, end - begin))
    return ids, mask


class Turn:
    """An assistant's turn that is trained, in the conversation that ends with it.

    text: that conversation, rendered, up to what ends the turn; its characters from `first` on are trained.
    exact: the turn begins with its generation prompt.
    """

    def __init__(self, tokenizer, messages: list[dict], tools: list | None, later: list[dict]):
        text, marks = render_marked(tokenizer, messages, tools)
        prompt = render(tokenizer, messages[:-1], tools, prompt=True)
        begin, last = place_of(tokenizer, messages, len(messages) - 1, tools, text)
        self.exact = text.startswith(prompt)
        self.prompt_ids: list[int] = []
        if self.exact:
            self.first = len(prompt)
            self.prompt_ids = prompt_ids(tokenizer, messages[:-1], tools)
        else:
            self.first = min(begin, len(commonprefix((prompt, text))))
            ends_after = [mark_begin for mark_begin, mark_end in marks if mark_end >= last]
            if ends_after:
                self.first = ends_after[0]
        self.text = text[:last] + end_of(tokenizer, messages, tools, text, last, later)
        content = messages[-1]["content"].strip()
        self.shortened = content not in text[self.first : last]


def divided(text: str, turns: list[Turn]) -> list[tuple[str, list[Turn]]]:
    """(text of a sequence, the turns that are trained in it) for as few sequences as possible.

    text: the whole conversation. A turn is trained in a longer sequence if that begins with the turn's text.
    """
    sequences: list[tuple[str, list[Turn]]] = []
    for turn in reversed(turns):
        fitting = [members for longer, members in sequences if longer.startswith(turn.text)]
        if fitting:
            fitting[0].append(turn)
        elif not sequences and text.startswith(turn.text):
            sequences.append((text, [turn]))
        else:
            sequences.append((turn.text, [turn]))
    return sequences[::-1]


def encode_sequence(
    tokenizer, messages, tools, text: str, turns: list[Turn], notes: Counter
) -> Sequence:
    """(ids, mask) of a rendered conversation in which some turns are trained. Where a turn's prompt has other
    tokens alone than as a part of the whole, the text is cut after it, as inference cuts it.
    """
    encoding, ids = encode_part(tokenizer, messages, tools, text)
    pieces = [(encoding, ids)]
    bounds = [0, len(text)]
    cuts = []
    for turn in turns:
        if turn.exact and ids[: len(turn.prompt_ids)] != turn.prompt_ids:
            cuts.append(turn.first)
    if cuts:
        bounds = [0, *sorted(cuts), len(text)]
        pieces = []
        for begin, end in pairwise(bounds):
            pieces.append(encode_part(tokenizer, messages, tools, text, begin, end))
        cut_ids = [token for _, piece_ids in pieces for token in piece_ids]
        decode = tokenizer.backend_tokenizer.decode
        if decode(cut_ids, skip_special_tokens=False) != decode(ids, skip_special_tokens=False):
            # A tokenizer that begins every text with a space: the token across the cut is trained whole.
            notes[MERGED] += 1
            pieces = [(encoding, ids)]
            bounds = [0, len(text)]
    sequence_ids: list[int] = []
    mask = bytearray()
    for begin, (piece, piece_ids) in zip(bounds, pieces, strict=False):
        piece_text = text[begin:]
        piece_mask = bytearray(len(piece_ids))
        for turn in turns:
            turn_end_char = len(turn.text) - begin
            first = token_after(piece, piece_text, max(turn.first - begin, 0))
            last = token_from(piece, piece_text, max(turn_end_char, 0))
            piece_mask[first:last] = b"\1" * (last - first)
        sequence_ids += piece_ids
        mask += piece_mask
    return sequence_ids, mask


def end_of(tokenizer, messages: list[dict], tools, text: str, last: int, later: list[dict]) -> str:
    """The text that ends the last turn of `messages`, whose content ends at text[:last]. As tokens.turn_end,
    which handles no calls. later: the messages that follow.
    """
    several, one = end_patterns(tokenizer)
    found = several.match(text, last)
    if found:
        return found[0]
    if not messages[-1].get("tool_calls"):
        return turn_end(tokenizer, tokenizer.get_chat_template(tools=tools), ("user", "assistant"))
    answer = {"role": "tool", "content": "", "name": "", "tool_call_id": ""}
    if later:
        answer = later[0]
    found = one.match(render(tokenizer, [*messages, answer], tools), last)
    return found[0] if found else ""


# --- where in a rendered conversation its messages stand


def place_of(
    tokenizer, messages, i: int, tools, text: str, prompt: bool = False
) -> tuple[int, int]:
    """The characters [first, last) of `text` that come from a message, calls included: those that differ if a
    mark replaces the message. Empty where the template leaves the message out.
    """
    mark = MARK.format("")
    content = messages[i]["content"]
    unwanted = ("tool_calls", *THOUGHTS)
    marked = {key: value for key, value in messages[i].items() if key not in unwanted}
    marked["content"] = mark
    messages_with_mark = [*messages[:i], marked, *messages[i + 1 :]]
    with_mark = render(tokenizer, messages_with_mark, tools, prompt)
    first = len(commonprefix((text, with_mark)))
    last = first
    if mark in with_mark:
        reversed_texts = (text[first:][::-1], with_mark[first:][::-1])
        same_at_end = len(commonprefix(reversed_texts))
        last = max(first, len(text) - same_at_end)
    if last > first:
        begin = content.find(text[first:last])
        text_before = text[max(0, first - begin) : first]
        if begin > 0 and text_before == content[:begin]:
            first -= begin  # the content begins with what the template itself writes before it
    return first, last


def places_of(tokenizer, messages, tools, text: str, prompt: bool = False) -> list[tuple[int, int]]:
    """The characters [first, last) of `text` that are each message's own. What the template writes around
    calls and thoughts is not; of those only the texts that stand there literally are the message's.
    """
    places = []
    for i, message in enumerate(messages):
        first, last = place_of(tokenizer, messages, i, tools, text, prompt)
        if not message.keys() & {"tool_calls", *THOUGHTS}:
            places.append((first, last))
            continue
        own_texts = [message["content"]]
        own_texts += [str(message[key]) for key in THOUGHTS if key in message]
        for call in message.get("tool_calls", []):
            own_texts += texts_in(call["function"])
        escaped_texts = [re.escape(own_text) for own_text in own_texts if own_text]
        pattern = re.compile("|".join(escaped_texts) or "(?!)")
        for found in pattern.finditer(text, first, last):
            places.append(found.span())
    return places


def texts_in(value: object) -> list[str]:
    """All texts in a value of JSON, also as JSON writes them."""
    if isinstance(value, str):
        as_ascii = json.dumps(value)
        as_unicode = json.dumps(value, ensure_ascii=False)
        return [value, as_ascii[1:-1], as_unicode[1:-1]]
    if isinstance(value, dict):
        value = list(value.values())
    texts = []
    if isinstance(value, list):
        for item in value:
            texts += texts_in(item)
    return texts


# --- text -> ids


def encode_part(
    tokenizer, messages, tools, text: str, begin: int = 0, end: int | None = None
) -> tuple[Encoding, list[int]]:
    """(encoding, ids) of the characters [begin, end) of a rendered conversation. Text in a message that
    spells a special token stays text.
    """
    if not spells_special(tokenizer, messages):
        encoding = encode(tokenizer, text[begin:end])
        return encoding, encoding.ids
    places = []
    for first, last in places_of(tokenizer, messages, tools, text):
        if last > begin:
            places.append((max(0, first - begin), last - begin))
    return encode_as_text(tokenizer, text[begin:end], places)


def check_ids(ids: list, vocabulary_size: int) -> list[int]:
    """The ids, if all of them are numbers of tokens."""
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary_size:
            shown = str(token)[:40]
            raise ValueError(
                f"input_ids[{i}]: {shown} is no token; they are 0 to {vocabulary_size - 1}"
            )
    return ids


def encode_text(tokenizer, messages: list[dict]) -> tuple[list[int], bytearray]:
    """(ids, loss_mask) of texts one after the other, without a template. weight says which of them are
    trained; the end-of-text token is trained if the last one is.

    A token that holds the end of one text and the start of the next is trained if the next text is.
    """
    text = "".join(message["content"] for message in messages)
    encoding = encode(tokenizer, text, special_as_text=True)
    ids = encoding.ids
    loss_mask = bytearray()
    end = 0
    for message in messages:
        end += len(message["content"])
        last = token_after(encoding, text, end) if end < len(text) else len(encoding)
        loss_mask += bytes([message["weight"]]) * (last - len(loss_mask))
    # A long text comes in parts: see containers.TextPart.
    is_first = getattr(messages[0]["content"], "first", True)
    is_last = getattr(messages[-1]["content"], "last", True)
    if is_first and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
        loss_mask = b"\0" + loss_mask
    if is_last and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
        loss_mask += bytes([messages[-1]["weight"]])
    return ids, loss_mask


def encode_as_text(
    tokenizer, text: str, places: list[tuple[int, int]]
) -> tuple[Encoding, list[int]]:
    """(encoding, ids) of a rendered conversation in which special tokens within `places` are text.

    ValueError where the tokenizer cannot do that.
    """
    renamed, new_names, original_ids = _renamed(tokenizer)
    special = special_text(tokenizer)
    inside = bytearray(len(text))
    for first, last in places:
        inside[first:last] = b"\1" * (last - first)

    def rename(found: re.Match) -> str:
        is_text = all(inside[found.start() : found.end()])
        return found[0] if is_text else new_names[found[0]]

    def blank(found: re.Match) -> str:
        return "x" * len(found[0]) if inside[found.start()] else found[0]

    def read(some_text: str) -> tuple[Encoding, list[int]]:
        with_new_names = special.sub(rename, some_text)
        encoding = renamed.encode(with_new_names, add_special_tokens=False)
        return encoding, [original_ids.get(token, token) for token in encoding.ids]

    # The same row without such text must have the ids that the tokenizer itself gives.
    harmless = special.sub(blank, text)
    _, harmless_ids = read(harmless)
    if harmless_ids != encode(tokenizer, harmless).ids:
        raise ValueError(
            "its text spells a special token, which this tokenizer cannot read as text"
        )
    return read(text)


@lru_cache(maxsize=2)
def _renamed(tokenizer) -> tuple[Tokenizer, dict[str, str], dict[int, int]]:
    """(the tokenizer with new names for its special tokens, of the same lengths; name -> new name; its ids ->
    the original ids).
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = [token for token in state["added_tokens"] if token["special"]]
    new_names = {}
    id_of = {}
    for number, token in enumerate(special):
        original_name = token["content"]
        name = chr(0xF0000 + number) + "\U000effff" * (len(original_name) - 1)
        new_names[original_name] = name
        id_of[name] = token["id"]
        token["content"] = name
    renamed = Tokenizer.from_str(json.dumps(state))
    original_ids = {renamed.token_to_id(name): original for name, original in id_of.items()}
    return renamed, new_names, original_ids


def prompt_ids(tokenizer, messages: list[dict], tools: list | None = None) -> list[int]:
    """The ids of the generation prompt: the conversation up to an answer, as inference asks for it. Training
    and recipes/generate.py both call this. Text in a message that spells a special token stays text.
    """
    text = render(tokenizer, messages, tools, prompt=True)
    if not spells_special(tokenizer, messages):
        return encode(tokenizer, text).ids
    places = places_of(tokenizer, messages, tools, text, prompt=True)
    _, ids = encode_as_text(tokenizer, text, places)
    return ids


# --- plain conversations


class Chat(NamedTuple):
    """A conversation as text, and the characters [first, last) of it that are trained."""

    text: str
    spans: list[tuple[int, int]]
    messages: list[dict[str, str]]


def chat_text(tokenizer, messages: list[dict[str, str]]) -> Chat | None:
    """A plain conversation as text, with the places of its trained turns.

    None where only encode_turns can find them. ValueError names the template and the role that it cannot
    render.
    """
    if spells_special(tokenizer, messages):
        return None
    roles = tuple(message["role"] for message in messages)
    turns = turns_in_place(tokenizer, tokenizer.get_chat_template(), roles)
    text = render(tokenizer, messages)
    places = literal_places(tokenizer, messages, text) if turns else []
    if not places:
        return None
    spans = []
    for i, (lead, end) in turns.items():
        first, last = places[i]
        spans.append((first - lead, last + len(end)))
    last_turn = len(messages) - 1
    if last_turn in turns:
        _, end = turns[last_turn]
        _, last = places[last_turn]
        if not text.startswith(end, last):  # the template itself ends no turn with a token
            text = text[:last] + end
    return Chat(text, spans, messages)


def encode_chats(tokenizer, chats: list[Chat]) -> list[list[Sequence]]:
    """(ids, mask) of T tokens each for some results of chat_text; mostly one for each conversation.

    The ids are those of apply_chat_template(messages), except where the end of a prompt is no token boundary
    of the whole text: there the text is cut, as inference cuts it.
    """
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = False
    encodings = backend.encode_batch([chat.text for chat in chats], add_special_tokens=False)
    found = []
    for encoding, chat in zip(encodings, chats, strict=True):
        ids = encoding.ids
        mask = bytearray(len(encoding))
        if all(
            mark_trained(tokenizer, chat.text, span, encoding, ids, mask) for span in chat.spans
        ):
            found.append([(ids, mask)])
        else:
            found.append(encode_turns(tokenizer, chat.messages))
    return found
