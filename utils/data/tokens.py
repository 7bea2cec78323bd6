"""Conversations -> ids and the loss mask, for any chat template.

An assistant's turn is trained from where the generation prompt ends to where the turn ends. The generation
prompt is what inference puts before the answer: apply_chat_template(messages up to the turn,
add_generation_prompt=True). So whatever the template writes between it and the answer is trained too (the
empty thoughts of Qwen3, "<|channel|>final<|message|>" of gpt-oss), and so is the token that ends the turn:
the trained tokens are those that the model will have to write. The loss mask is one byte for each token, 1
or 0, at the token's own position.

This file loads the tokenizer and renders conversations, and finds the trained tokens of plain conversations
in which each turn stands as inference asks for it. chats.py handles all others.
"""

import json
import os
import re
from contextlib import suppress
from functools import lru_cache
from itertools import product
from pathlib import Path

from tokenizers import Encoding
from transformers.utils.chat_template_utils import render_jinja_template

from ..run.errors import ConfigError, check, others_code, print0, reason_of_others
from ..run.files import (
    AGAIN,
    CONFIG_BYTES,
    TEMPLATE_BYTES,
    TOKENIZER_BYTES,
    file_inside,
    impostor,
    read_small_file,
    read_small_json,
    start_of,
)
from .templates import set_template

# The files of a tokenizer that transformers opens -> the most bytes that each may have.
TOKENIZER_FILES = {
    "tokenizer*.json": TOKENIZER_BYTES,
    "*.model": TOKENIZER_BYTES,
    "*.model.v*": TOKENIZER_BYTES,
    "vocab.*": TOKENIZER_BYTES,
    "merges.txt": TOKENIZER_BYTES,
    "*.tiktoken": TOKENIZER_BYTES,
    "tekken.json": TOKENIZER_BYTES,
    "added_tokens.json": TOKENIZER_BYTES,
    "special_tokens_map.json": CONFIG_BYTES,
    "config.json": CONFIG_BYTES,
    "chat_template.*": TEMPLATE_BYTES,
    "additional_chat_templates/*": TEMPLATE_BYTES,
}
TOKENIZER_VALUES = 6_000_000  # JSON values in one file

# A folder without any of these has no tokenizer.
VOCABULARY_FILES = (
    "tokenizer.json",
    "*.model",
    "vocab.*",
    "*.tiktoken",
    "tekken.json",
    "tokenizer_config.json",
)
MARK = "\ue0f0{}\ue0f1"  # stands for a text, to find out whether and where a template writes it

GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")

Sequence = tuple[list[int], bytearray]  # (ids, loss mask) of T tokens each


def load_tokenizer(folder: Path | str, chat_template: str = "", trust_remote_code: bool = False):
    """The tokenizer of a model folder, with a chat template that works.

    chat_template: "" for its own, "chatml" or "alpaca" for a built-in one, else a file. The attribute
    `template_name` says which one it is: "built-in plain" where the tokenizer had none.
    ConfigError names the folder, the file or the template.
    """
    files: list[Path] = []
    for pattern in VOCABULARY_FILES:
        files += sorted(Path(folder).glob(pattern))
    # Without these files transformers silently makes some tokenizers with an empty vocabulary.
    check(
        files,
        f"{folder}: no tokenizer here; name a folder that holds tokenizer.json or tokenizer.model",
    )
    # Imported here because it imports torch, which the processes that tokenize do not need.
    from transformers import AutoTokenizer

    check_tokenizer_files(Path(folder))
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
        usable = tokenizer.is_fast and len(tokenizer) > len(tokenizer.added_tokens_decoder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # Damaged files make it raise anything; Rust's panics are no Exceptions.
        raise ConfigError(tokenizer_damage(files, error)) from error
    check(
        usable,
        f"{folder}: its tokenizer has no vocabulary or no offsets; it needs a tokenizer.json",
    )
    # Ranks and workers use all cores already.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.template_name = f"of {folder}"
    if chat_template or not tokenizer.chat_template:
        set_template(tokenizer, chat_template or "plain")
    with others_code(f"{folder}: its chat template", "another --chat_template"):
        try:
            end_of_turn_ids(tokenizer)  # renders a conversation
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return tokenizer


def pad_id(tokenizer) -> int:
    """The pad token, else the end-of-text token, else 0. Labels are masked by position, so any will do."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return 0


def print_template_notes(tokenizer) -> None:
    """Print what a user should know about the chat template, in the plan."""
    if tokenizer.template_name == "built-in plain":
        print0(
            "template  the tokenizer has none: plain text, saved with the model (see --chat_template)"
        )
    template = tokenizer.get_chat_template()
    several, _ = end_patterns(tokenizer)
    end = turn_end(tokenizer, template, ("user", "assistant"))
    parts = _parts(tokenizer, template, ("user", "assistant"))
    if not end:
        print0(
            "warning: the chat template ends no turn with a token, so the model will not learn to stop"
        )
    elif not several.match(parts[-1]):
        print0(f"template  ends no answer with a token of its own; here {end!r} ends it")
    prompt, text_after_user = _generation_prompt(tokenizer, template)
    header = parts[2].removeprefix(text_after_user) if len(parts) > 3 else ""
    if not prompt and header.strip():
        print0(
            "warning: the chat template has no generation prompt, so the model learns to write"
            f" {header!r} itself"
        )


def end_of_turn_ids(tokenizer) -> set[int]:
    """The token that ends an assistant's turn, as turn_end has it; empty where there is none.

    The loss mask ends with it, and generation_config.eos_token_id must contain it.
    """
    template = tokenizer.get_chat_template()
    end = turn_end(tokenizer, template, ("user", "assistant"))
    return set(encode(tokenizer, end).ids[-1:]) & set(tokenizer.added_tokens_decoder)


def encode(tokenizer, text: str, special_as_text: bool = False) -> Encoding:
    """As tokenizer(text, add_special_tokens=False), without the lists that take a third of its time."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = special_as_text
    return backend.encode(text, add_special_tokens=False)


def trained_turns(messages: list[dict], train_on: str) -> list[int]:
    """The indices of the assistant's turns that are trained."""
    trained = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and message.get("weight", 1):
            trained.append(i)
    return trained[-1:] if train_on == "last_assistant" else trained


def mark_trained(
    tokenizer, text: str, span: tuple[int, int], encoding: Encoding, ids: list[int], mask
) -> bool:
    """Set the mask of the tokens in the characters [first, last) of `text`. False, and nothing is set, where
    the text before `first` has other tokens when it is encoded alone.
    """
    first, last = span
    begin = token_after(encoding, text, first)
    if begin < len(ids) and _start(encoding, begin) < first:
        return False  # within a token
    # An added token always ends a token: only the text after the last one decides how it is cut.
    at = begin
    while at and ids[at - 1] not in tokenizer.added_tokens_decoder:
        at -= 1
    at = max(at - 1, 0)
    before = text[_start(encoding, at) : first] if at else text[:first]
    if before and _ids(tokenizer, before) != tuple(ids[at:begin]):
        return False
    end = max(begin, token_from(encoding, text, last))
    mask[begin:end] = b"\1" * (end - begin)
    return True


@lru_cache(maxsize=4096)
def _ids(tokenizer, text: str) -> tuple[int, ...]:
    return tuple(encode(tokenizer, text).ids)


def token_after(encoding: Encoding, text: str, at: int) -> int:
    """The first token that ends after a character, or the number of tokens."""
    token = len(encoding)
    for char in range(at, len(text)):
        token_at_char = encoding.char_to_token(char)
        if token_at_char is not None:
            token = token_at_char
            break
    while token and encoding.token_to_chars(token - 1)[1] > at:
        token -= 1
    return token


def token_from(encoding: Encoding, text: str, at: int) -> int:
    """The first token that starts at a character or after it, or the number of tokens."""
    token = token_after(encoding, text, at)
    while token < len(encoding) and _start(encoding, token) < at:
        token += 1
    while token and _start(encoding, token - 1) >= at:
        token -= 1
    return token


def _start(encoding: Encoding, token: int) -> int:
    """The character where a token starts. Byte-level tokenizers report spaces as empty, at their end: such a
    token starts where the token before it ended.
    """
    first, last = encoding.token_to_chars(token)
    if first < last:
        return first
    _, end_before = encoding.token_to_chars(max(token - 1, 0))
    return end_before


def render(tokenizer, messages: list[dict], tools: list | None = None, prompt: bool = False) -> str:
    """The conversation as text; with `prompt`, followed by the generation prompt."""
    return render_marked(tokenizer, messages, tools, prompt)[0]


def render_marked(
    tokenizer, messages, tools=None, prompt=False
) -> tuple[str, list[tuple[int, int]]]:
    """(text, the characters [first, last) between {% generation %} marks, if the template has any)."""
    template = tokenizer.get_chat_template(tools=tools)
    if takes_parts(tokenizer, template):
        messages = in_parts(messages)
    has_marks = not prompt and GENERATION_MARK.search(template) is not None
    special_tokens = tokenizer.special_tokens_map  # bos_token, eos_token ...
    try:
        texts, spans = render_jinja_template(
            [messages],
            tools,
            None,
            template,
            has_marks,
            add_generation_prompt=prompt,
            **special_tokens,
        )
    except Exception as error:  # a template is a program from elsewhere: it may raise anything
        roles = [message["role"] for message in messages]
        if len(roles) > 1:
            render(tokenizer, messages[:-1], tools)  # raises first, if an earlier role is the cause
        raise ValueError(
            f"{template_name(tokenizer)} cannot render {', then '.join(roles)}: {error}"
        ) from error
    return texts[0], spans[0] if has_marks else []


def in_parts(messages: list[dict]) -> list[dict]:
    """The messages with their contents as lists of parts: see takes_parts."""
    return [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]


def renderable(tokenizer, messages: list[dict], tools: list | None) -> list[dict]:
    """The messages as the template takes them: without our weights, and with the arguments of calls as JSON
    text where it cannot write objects (DeepSeek-V3).
    """
    messages = [{key: value for key, value in m.items() if key != "weight"} for m in messages]
    if not any(message.get("tool_calls") for message in messages):
        return messages
    try:
        render(tokenizer, messages, tools)
        return messages
    except ValueError as first_error:
        as_text = [with_text_arguments(message) for message in messages]
        try:
            render(tokenizer, as_text, tools)
        except ValueError:
            raise first_error from None
        return as_text


def with_text_arguments(message: dict) -> dict:
    calls = []
    for call in message.get("tool_calls", []):
        function = call["function"]
        arguments = json.dumps(function["arguments"])
        calls.append(call | {"function": function | {"arguments": arguments}})
    return message | {"tool_calls": calls} if calls else message


def literal_places(tokenizer, messages, text: str) -> list[tuple[int, int]]:
    """The characters [first, last) of `text` that are each message's content; [] where they are rewritten.

    The same conversation is rendered with a unique mark for each content, because a search for the content
    itself would also find quotations of it. Putting the contents back must give `text` again.
    """
    roles = tuple(message["role"] for message in messages)
    parts = _parts(tokenizer, tokenizer.get_chat_template(), roles)
    indices = [int(part) for part in parts[1::2]]
    # A template writes each role's content as it is, or without the white space around it.
    for system, user, assistant in product((str, str.strip), repeat=3):
        as_written = {"system": system, "user": user, "assistant": assistant}
        built = parts[0]
        places = {}
        for i, literal in zip(indices, parts[2::2], strict=True):
            content = as_written[roles[i]](messages[i]["content"])
            places[i] = (len(built), len(built) + len(content))
            built += content + literal
        if built == text and len(places) == len(messages):
            return [places[i] for i in range(len(messages))]
    return []


@lru_cache(maxsize=8)
def takes_parts(tokenizer, template: str) -> bool:
    """Whether a template writes contents only in parts, [{"type": "text", "text": ...}], and no plain texts.
    Those of some vision-language models do.
    """
    special_tokens = tokenizer.special_tokens_map
    mark = MARK.format("")
    plain = [{"role": "user", "content": mark}]
    for messages in (plain, in_parts(plain)):
        with suppress(Exception):  # of the template, which is a program from elsewhere
            texts, _ = render_jinja_template([messages], None, None, template, **special_tokens)
            if mark in texts[0]:
                return messages is not plain
    return False


def template_name(tokenizer) -> str:
    return f"chat template {getattr(tokenizer, 'template_name', 'of the tokenizer')}"


def spells_special(tokenizer, messages: list[dict]) -> bool:
    """Whether a text in the messages spells a special token."""
    special = special_text(tokenizer)
    return any(special.search(str(value)) for message in messages for value in message.values())


@lru_cache(maxsize=256)
def _parts(tokenizer, template: str, roles: tuple[str, ...], prompt: bool = False) -> list[str]:
    """What `template` writes around the contents: text, index of a message, text, index, ... text."""
    marked = [{"role": role, "content": MARK.format(i)} for i, role in enumerate(roles)]
    return re.split(MARK.format(r"(\d+)"), render(tokenizer, marked, prompt=prompt))


@lru_cache(maxsize=256)
def turns_in_place(tokenizer, template: str, roles: tuple[str, ...]) -> dict[int, tuple[int, str]]:
    """Index of each assistant's turn -> (characters between the generation prompt and the content, the text
    after the content that ends the turn). {} where the template writes a turn differently once later turns
    follow, or where a turn does not begin with the generation prompt.
    """
    conversation = _parts(tokenizer, template, roles)
    turns = {}
    for i, role in enumerate(roles):
        if role != "assistant":
            continue
        prompt = _parts(tokenizer, template, roles[:i], True)
        turn = _parts(tokenizer, template, roles[: i + 1])
        n = len(prompt)
        begins = turn[: n - 1] == prompt[:-1] and turn[n - 1].startswith(prompt[-1])
        if not begins or len(turn) != n + 2 or conversation[: n + 1] != turn[: n + 1]:
            return {}
        end = turn_end(tokenizer, template, roles[: i + 1], roles[i + 1 :])
        is_last = i == len(roles) - 1
        if not is_last and not conversation[n + 1].startswith(end):
            return {}
        lead = len(turn[n - 1]) - len(prompt[-1])
        turns[i] = (lead, end)
    return turns


@lru_cache(maxsize=256)
def turn_end(tokenizer, template: str, roles: tuple[str, ...], later: tuple[str, ...] = ()) -> str:
    """The text that ends the last turn of `roles`, an assistant's: the added tokens after its content, and
    white space between them; else the token with which the next turn begins; else the end-of-text token, if
    there is one. later: the roles that follow.
    """
    several, one = end_patterns(tokenizer)
    found = several.match(_parts(tokenizer, template, roles)[-1])
    if found:
        return found[0]
    next_role = later[0] if later else "user"
    found = one.match(_parts(tokenizer, template, (*roles, next_role))[-3])
    if found:
        return found[0]
    return tokenizer.eos_token or ""


@lru_cache(maxsize=8)
def _generation_prompt(tokenizer, template: str) -> tuple[str, str]:
    """(what add_generation_prompt adds after a user's turn, what the template writes after its content)."""
    without = _parts(tokenizer, template, ("user",))[-1]
    prompt = _parts(tokenizer, template, ("user",), True)[-1]
    return prompt.removeprefix(without), prompt


@lru_cache(maxsize=8)
def end_patterns(tokenizer) -> tuple[re.Pattern, re.Pattern]:
    """Patterns of white space and, after it, several added tokens in a row; or one of them."""
    words = {token.content for token in tokenizer.added_tokens_decoder.values()}
    token = any_of(words)
    return re.compile(rf"\s*(?:{token})+"), re.compile(rf"\s*(?:{token})")


@lru_cache(maxsize=8)
def special_text(tokenizer) -> re.Pattern:
    """A pattern of the tokenizer's special tokens."""
    added = tokenizer.added_tokens_decoder.values()
    return re.compile(any_of({token.content for token in added if token.special}))


def any_of(words: set[str]) -> str:
    """A regular expression for any of some texts, the longest first; for no texts, it matches nothing."""
    longest_first = sorted(words - {""}, key=len, reverse=True)
    return "|".join(re.escape(word) for word in longest_first) or "(?!)"


def tokenizer_damage(files: list[Path], error: Exception) -> str:
    """One line that names the damaged file, if that can be found out: transformers' errors name none."""
    for file in files:
        reason = impostor(start_of(file))
        if reason:
            return f"{file}: {reason}"
    if "trust_remote_code" in str(error):
        return f"{files[0].parent}: its tokenizer is Python code; read it, then add --trust_remote_code"
    names = ", ".join(file.name for file in files)
    reason = reason_of_others(error)
    return f"{files[0].parent}: {names} cannot be read, cut short or damaged ({reason}); fetch them again"


def check_tokenizer_files(folder: Path) -> None:
    """Refuse files that transformers would open for a tokenizer and that are not regular, outside the folder
    or far too large. To be called before transformers sees the folder.
    """
    for pattern, limit in TOKENIZER_FILES.items():
        for path in sorted(Path(folder).glob(pattern)):
            file = file_inside(folder, str(path.relative_to(folder)))
            content = read_small_file(file, limit)
            if file.suffix == ".json":
                count = content.count(b",") + content.count(b"[") + content.count(b"{")
                check(
                    count <= TOKENIZER_VALUES,
                    f"{file}: more than {TOKENIZER_VALUES:,} values {AGAIN}",
                )
    settings = Path(folder) / "tokenizer_config.json"
    if settings.exists():
        try:
            values = read_small_json(settings, TOKENIZER_BYTES, TOKENIZER_VALUES)
        except ValueError as error:
            raise ConfigError(f"{settings}: {str(error)[:100]} {AGAIN}") from None
        check(
            isinstance(values, dict),
            f"{settings}: expected a JSON object, got a {type(values).__name__} {AGAIN}",
        )
        # transformers opens the files that this names.
        names = values.get("fast_tokenizer_files") or []
        valid = isinstance(names, list)
        if valid:
            valid = all(isinstance(n, str) and not re.search(r"[/\\\0]", n) for n in names)
        check(valid, f"{settings}: fast_tokenizer_files: not names of files of this folder {AGAIN}")
