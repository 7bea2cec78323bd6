"""Rows -> ids where the plain way does not do: templates that rewrite contents, calls of tools, texts without
turns, and text that spells a special token. Imported only for those.
"""

import json
import re
from collections import Counter
from functools import lru_cache
from os.path import commonprefix

from tokenizers import Encoding, Tokenizer

from .tokens import encode, literal_places, mark_taught, render, special_text, token_after

MARK = "\ue0f0\ue0f1"
SHORTENED = "rows where the template leaves something out of earlier answers (see --train_on last_assistant)"
SPELLED = "rows in which text spells a special token, which stays text"


def encode_rich(
    tokenizer, messages: list[dict], tools: list | None, train_on: str, notes: Counter
) -> tuple[list[int], bytearray]:
    """(ids, taught) of tokens.encode_texts, for any template and any messages of more_formats.to_messages.

    train_on: assistant, last_assistant or all; turns of weight 0 are not taught. Text in a message that
    spells a special token stays text. notes: counts what a user may want to know.
    """
    if messages[0]["role"] == "text":
        return encode_text(tokenizer, messages)
    if messages[0]["role"] == "tokens":
        return check_ids(messages[0]["content"], len(tokenizer)), messages[0]["taught"]
    text, special = render(tokenizer, messages, tools)[0], special_text(tokenizer)
    plain = all(m["role"] in ("system", "user", "assistant") and "tool_calls" not in m for m in messages)
    places = literal_places(tokenizer, messages, text) if plain and not tools else []
    if not places:
        places = places_by_difference(tokenizer, messages, tools, text, notes)
    if any(special.search(message["content"]) for message in messages):
        encoding, ids = encode_as_text(tokenizer, text, places)
        notes[SPELLED] += 1
    else:
        encoding = encode(tokenizer, text)
        ids = encoding.ids
    if train_on == "all":
        return ids, bytearray(b"\1" * len(ids))
    taught = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1)]
    spans = [places[i] for i in taught[-1 if train_on == "last_assistant" else 0 :]]
    return ids, mark_taught(tokenizer, text, spans, encoding, ids)


def check_ids(ids: list, vocab: int) -> list[int]:
    """Some ids, if they are numbers of tokens."""
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocab:
            raise ValueError(f"input_ids[{i}]: {str(token)[:40]} is no token; they are 0 to {vocab - 1}")
    return ids


def encode_text(tokenizer, messages: list[dict]) -> tuple[list[int], bytearray]:
    """(ids, taught) of texts one after the other, without a template; weight says which are taught, and the
    end-of-text token after the last is.

    A token that holds the end of one text and the start of the next is taught as the next is.
    """
    text = "".join(message["content"] for message in messages)
    encoding, taught, end = encode(tokenizer, text, special_as_text=True), bytearray(), 0
    for message in messages:
        end += len(message["content"])
        until = token_after(encoding, text, end) if end < len(text) else len(encoding)
        taught += bytes([message["weight"]]) * (until - len(taught))
    ids, (first, last) = encoding.ids, (messages[0]["content"], messages[-1]["content"])
    if getattr(first, "first", True) and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        ids, taught = [tokenizer.bos_token_id, *ids], b"\0" + taught
    if getattr(last, "last", True) and tokenizer.eos_token_id is not None:
        ids, taught = [*ids, tokenizer.eos_token_id], taught + bytes([messages[-1]["weight"]])
    return ids, taught


def places_by_difference(tokenizer, messages, tools, text: str, notes: Counter) -> list[tuple[int, int]]:
    """The characters [first, last) of `text` that come from each message: where the conversation would read
    otherwise if a mark stood in the message's place. Empty where the template leaves the message out.
    """
    places, shortened = [], False
    for i, message in enumerate(messages):
        bare = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": MARK}
        other = render(tokenizer, [*messages[:i], bare, *messages[i + 1 :]], tools)[0]
        first = len(commonprefix((text, other)))
        after = len(commonprefix((text[first:][::-1], other[first:][::-1])))
        last = max(first, len(text) - after) if MARK in other else first
        content = message["content"]
        at = content.find(text[first:last]) if last > first else -1
        if at > 0 and text[max(0, first - at) : first] == content[:at]:
            first -= at  # what the template writes by itself is also how the content begins
        if message["role"] == "assistant" and not message.get("tool_calls"):
            shortened |= text[first:last].strip() != content.strip()
        places.append((first, last))
    notes[SHORTENED] += shortened
    return places


def encode_as_text(tokenizer, text: str, places: list[tuple[int, int]]) -> tuple[Encoding, list[int]]:
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
        raise ValueError("its text spells a special token, which this tokenizer cannot read as text")
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
