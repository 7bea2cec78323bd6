"""Rows -> ids and labels: chat templates and the loss mask.

Taught are the assistant's words and the token that ends its turn, so that the model learns to stop; headers,
other roles and the line break after a turn are not. Which ones these are is said by one byte for each token,
1 or 0, at the token's own position.
"""

import os
import re
from functools import lru_cache
from itertools import product
from pathlib import Path

from tokenizers import Encoding
from transformers.utils.chat_template_utils import render_jinja_template

from .errors import ConfigError, check, print0

IGNORE = -100

_TOKENIZER_FILES = ["tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json"]
_TOKENIZER_FILES += ["tokenizer_config.json"]


def load_tokenizer(folder: Path | str, chat_template: str = "", trust_remote_code: bool = False):
    """The tokenizer of a model folder, with a chat template that works.

    chat_template: "" for its own, "chatml" or "alpaca" for a built-in one, else a file. The attribute
    `template_name` says which it is: "built-in plain" where the tokenizer had none, for the caller's notice.
    ConfigError names the folder, the file or the template.
    """
    files = [file for pattern in _TOKENIZER_FILES for file in sorted(Path(folder).glob(pattern))]
    # Without its files transformers makes some tokenizers up, with an empty vocabulary, and says nothing.
    check(files, f"{folder}: no tokenizer here; name a folder that holds tokenizer.json or tokenizer.model")
    from transformers import AutoTokenizer  # and with it torch, which the processes that tokenize do without

    try:
        options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except Exception as error:  # damaged files make it raise anything
        from .diagnose import tokenizer_damage

        raise ConfigError(tokenizer_damage(files, error)) from error
    usable = tokenizer.is_fast and len(tokenizer) > len(tokenizer.added_tokens_decoder)
    check(usable, f"{folder}: its tokenizer has no vocabulary or no offsets; it needs a tokenizer.json")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # ranks and workers share the cores already
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.template_name = f"of {folder}"
    if chat_template or not tokenizer.chat_template:
        from .templates import set_template

        set_template(tokenizer, chat_template or "plain")
    try:
        end_of_turn_ids(tokenizer)  # renders a conversation
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return tokenizer


def pad_id(tokenizer) -> int:
    """The pad token, else the end-of-text token, else 0. Labels are masked by position, so any will do."""
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def print_template_notes(tokenizer) -> None:
    """What a user should know of the chat template, in the plan."""
    if tokenizer.template_name == "built-in plain":
        print0("template  the tokenizer has none: plain text, saved with the model (see --chat_template)")
    if not end_of_turn_ids(tokenizer):
        print0("warning: the chat template ends no turn with a token, so the model will not learn to stop")


def end_of_turn_ids(tokenizer) -> set[int]:
    """The token that the chat template puts after the assistant's words; empty where it puts none.

    Used for the mask, and for generation_config.eos_token_id.
    """
    return set(_end_ids(tokenizer, tokenizer.get_chat_template()))


def chat_text(tokenizer, messages: list[dict[str, str]]) -> tuple[str, list[tuple[int, int]]] | None:
    """(text, spans): the conversation as text, and the characters [first, last) of it that are taught.

    None where it takes more to tell what is taught, or a content spells a special token: see more_tokens.py.
    ValueError names the template and the role that it cannot render.
    """
    if any(special_text(tokenizer).search(message["content"]) for message in messages):
        return None
    text, spans = render(tokenizer, messages, track=True)
    if not spans:
        places = literal_places(tokenizer, messages, text)
        spans = [place for place, m in zip(places, messages, strict=False) if m["role"] == "assistant"]
    return (text, spans) if spans else None


def encode_texts(tokenizer, texts: list[tuple[str, list]]) -> list[tuple[list[int], bytearray]]:
    """(ids, taught) of T tokens each for some of chat_text: the ids of apply_chat_template(messages), and 1
    where one is taught.

    A token that holds the end of a header and the start of a content is taught: the model has to write it.
    """
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = False
    encodings = backend.encode_batch([text for text, _ in texts], add_special_tokens=False)
    return [
        (ids := encoding.ids, mark_taught(tokenizer, text, spans, encoding, ids))
        for encoding, (text, spans) in zip(encodings, texts, strict=True)
    ]


def encode(tokenizer, text: str, special_as_text: bool = False) -> Encoding:
    """What tokenizer(text, add_special_tokens=False) does, without lists that take a third of its time."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = special_as_text
    return backend.encode(text, add_special_tokens=False)


def mark_taught(tokenizer, text: str, spans: list[tuple], encoding: Encoding, ids: list[int]) -> bytearray:
    """1 for the tokens in some characters [first, last) of `text` and for the end-of-turn token after them,
    else 0. ids: those of the encoding, which may have been renamed.
    """
    ends = _end_ids(tokenizer, tokenizer.get_chat_template()) | {tokenizer.eos_token_id}
    taught, place = bytearray(len(ids)), encoding.token_to_chars
    for first, last in spans:
        begin = token_after(encoding, text, first)
        i = max(begin, token_from(encoding, text, last))
        end = i  # of the words; some templates write a space between them and the end-of-turn token
        while (
            end < len(ids) and ids[end] not in ends and text[_start(encoding, end) : place(end)[1]].isspace()
        ):
            end += 1
        if end < len(ids) and ids[end] in ends and ids[i - 1] not in ends:
            i = end + 1
        taught[begin:i] = b"\1" * (i - begin)
    return taught


def token_after(encoding: Encoding, text: str, at: int) -> int:
    """The first token that ends after a character, or how many tokens there are."""
    found = (encoding.char_to_token(char) for char in range(at, len(text)))
    token = next((token for token in found if token is not None), len(encoding))
    while token and encoding.token_to_chars(token - 1)[1] > at:
        token -= 1
    return token


def token_from(encoding: Encoding, text: str, at: int) -> int:
    """The first token that starts at a character or after it, or how many tokens there are."""
    token = token_after(encoding, text, at)
    while token < len(encoding) and _start(encoding, token) < at:
        token += 1
    while token and _start(encoding, token - 1) >= at:
        token -= 1
    return token


def _start(encoding: Encoding, token: int) -> int:
    """Where a token starts. Byte-level tokenizers report spaces as empty, at their end: such a one starts
    where the one before ended.
    """
    first, last = encoding.token_to_chars(token)
    return first if first < last else encoding.token_to_chars(max(token - 1, 0))[1]


def render(tokenizer, messages, tools=None, track: bool = False) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text; with `track` also the characters between {% generation %} marks, if any."""
    template = tokenizer.get_chat_template(tools=tools)
    track = track and re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    words = tokenizer.special_tokens_map  # bos_token, eos_token ...
    try:
        texts, spans = render_jinja_template([messages], tools, None, template, track, **words)
    except Exception as error:  # a template is someone else's program: it may raise anything
        roles = [message["role"] for message in messages]
        if len(roles) > 1:
            render(tokenizer, messages[:-1], tools)  # raises first, if an earlier role is to blame
        raise ValueError(f"{_name(tokenizer)} cannot render {', then '.join(roles)}: {error}") from error
    return texts[0], spans[0] if track else []


def literal_places(tokenizer, messages, text: str) -> list[tuple[int, int]]:
    """The characters [first, last) of `text` that are each message's content; [] where they are rewritten.

    They come from the same conversation rendered with a unique mark for each content: searching for the
    content itself would find quotations of it. Putting the contents back must give `text` again.
    """
    roles = tuple(message["role"] for message in messages)
    parts = _parts(tokenizer, tokenizer.get_chat_template(), roles)
    # A template writes each role's content as it stands, or without the white space around it.
    for forms in product((str, str.strip), repeat=3):
        form = dict(zip(("system", "user", "assistant"), forms, strict=True))
        built, places = parts[0], {}
        for i, literal in zip(map(int, parts[1::2]), parts[2::2], strict=True):
            content = form[roles[i]](messages[i]["content"])
            places[i] = (len(built), len(built) + len(content))
            built += content + literal
        if built == text and len(places) == len(messages):
            return [places[i] for i in range(len(messages))]
    return []


def _name(tokenizer) -> str:
    return f"chat template {getattr(tokenizer, 'template_name', 'of the tokenizer')}"


@lru_cache(maxsize=256)
def _parts(tokenizer, template: str, roles: tuple[str, ...]) -> list[str]:
    """What `template` writes around the contents: text, index of a message, text, index, ... text."""
    marked = [{"role": role, "content": f"\ue0f0{i}\ue0f1"} for i, role in enumerate(roles)]
    return re.split("\ue0f0(\\d+)\ue0f1", render(tokenizer, marked)[0])


@lru_cache(maxsize=8)
def special_text(tokenizer) -> re.Pattern:
    """What finds the tokenizer's special tokens in a text; the longest first."""
    words = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special and t.content}
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


@lru_cache(maxsize=8)
def _end_ids(tokenizer, template: str) -> frozenset[int]:
    after = _parts(tokenizer, template, ("user", "assistant"))[-1].lstrip()
    return frozenset(encode(tokenizer, after).ids[:1]) & frozenset(tokenizer.added_tokens_decoder)
