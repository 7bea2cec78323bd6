"""Conversations -> ids and the loss mask, for any chat template.

An assistant's turn is trained from where the generation prompt ends to where the turn ends. The generation
prompt is what inference puts before the answer: apply_chat_template(messages up to the turn,
add_generation_prompt=True). So whatever the template writes between it and the answer is trained too (the
empty thoughts of Qwen3, "<|channel|>final<|message|>" of gpt-oss), and so is the token that ends the turn:
what is trained is what the model will have to write. The loss mask is one byte for each token, 1 or 0, at
the token's own position.

Here is the way of plain conversations whose turns stand in the row as they were asked for; chats.py has
the way of all others.
"""

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

# What transformers opens of a tokenizer, and the most bytes of it.
TOKENIZER_FILES = dict.fromkeys(
    (
        "tokenizer*.json",
        "*.model",
        "*.model.v*",
        "vocab.*",
        "merges.txt",
        "*.tiktoken",
        "tekken.json",
    ),
    TOKENIZER_BYTES,
)
TOKENIZER_FILES |= {"added_tokens.json": TOKENIZER_BYTES, "special_tokens_map.json": CONFIG_BYTES}
TOKENIZER_FILES |= {"config.json": CONFIG_BYTES, "chat_template.*": TEMPLATE_BYTES}
TOKENIZER_FILES |= {"additional_chat_templates/*": TEMPLATE_BYTES}
TOKENIZER_VALUES = 6_000_000

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
    check(
        files,
        f"{folder}: no tokenizer here; name a folder that holds tokenizer.json or tokenizer.model",
    )
    # and with it torch, which the processes that tokenize do without
    from transformers import AutoTokenizer

    check_tokenizer_files(Path(folder))
    try:
        options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        usable = tokenizer.is_fast and len(tokenizer) > len(tokenizer.added_tokens_decoder)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        # damaged files make it raise anything; Rust's panics are no Exceptions
        raise ConfigError(tokenizer_damage(files, error)) from error
    check(
        usable,
        f"{folder}: its tokenizer has no vocabulary or no offsets; it needs a tokenizer.json",
    )
    # ranks and workers share the cores already
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
    return next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)


def print_template_notes(tokenizer) -> None:
    """What a user should know of the chat template, in the plan."""
    if tokenizer.template_name == "built-in plain":
        print0(
            "template  the tokenizer has none: plain text, saved with the model (see --chat_template)"
        )
    template = tokenizer.get_chat_template()
    several, _ = end_patterns(tokenizer)
    end = turn_end(tokenizer, template, ("user", "assistant"))
    if not end:
        print0(
            "warning: the chat template ends no turn with a token, so the model will not learn to stop"
        )
    elif not several.match(_parts(tokenizer, template, ("user", "assistant"))[-1]):
        print0(f"template  ends no answer with a token of its own; here {end!r} ends it")
    prompt, asked = _generation_prompt(tokenizer, template)
    row = _parts(tokenizer, template, ("user", "assistant"))
    header = row[2].removeprefix(asked) if len(row) > 3 else ""
    if not prompt and header.strip():
        what = f"so the model learns to write {header!r} itself"
        print0(f"warning: the chat template has no generation prompt, {what}")


def end_of_turn_ids(tokenizer) -> set[int]:
    """The token that ends an assistant's turn, as turn_end has it; empty where there is none.

    The mask ends with it, and it belongs into generation_config.eos_token_id.
    """
    template = tokenizer.get_chat_template()
    end = turn_end(tokenizer, template, ("user", "assistant"))
    return set(encode(tokenizer, end).ids[-1:]) & set(tokenizer.added_tokens_decoder)


def generation_prompt_ids(tokenizer) -> list[int]:
    """What add_generation_prompt adds after a user's turn."""
    return encode(tokenizer, _generation_prompt(tokenizer, tokenizer.get_chat_template())[0]).ids


def encode(tokenizer, text: str, special_as_text: bool = False) -> Encoding:
    """What tokenizer(text, add_special_tokens=False) does, without lists that take a third of its time."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = special_as_text
    return backend.encode(text, add_special_tokens=False)


def mark(
    tokenizer, text: str, span: tuple[int, int], encoding: Encoding, ids: list[int], mask
) -> bool:
    """Set the mask of the tokens in the characters [first, last) of `text`. False, and nothing is set, where
    the text before `first` alone would be other tokens than those of the whole.
    """
    first, last = span
    begin = token_after(encoding, text, first)
    if begin < len(ids) and _start(encoding, begin) < first:
        return False  # within a token
    # of the tokens before `first`, those from the last added token on decide where they are cut
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


def render(tokenizer, messages: list[dict], tools: list | None = None, prompt: bool = False) -> str:
    """The conversation as text; with `prompt`, followed by the generation prompt."""
    return render_marked(tokenizer, messages, tools, prompt)[0]


def render_marked(
    tokenizer, messages, tools=None, prompt=False
) -> tuple[str, list[tuple[int, int]]]:
    """(text, the characters [first, last) between {% generation %} marks, if the template has any)."""
    template = tokenizer.get_chat_template(tools=tools)
    if takes_parts(tokenizer, template):
        messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
    marks = not prompt and re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None
    words = tokenizer.special_tokens_map  # bos_token, eos_token ...
    try:
        texts, spans = render_jinja_template(
            [messages], tools, None, template, marks, add_generation_prompt=prompt, **words
        )
    except Exception as error:  # a template is someone else's program: it may raise anything
        roles = [message["role"] for message in messages]
        if len(roles) > 1:
            render(tokenizer, messages[:-1], tools)  # raises first, if an earlier role is to blame
        raise ValueError(
            f"{template_name(tokenizer)} cannot render {', then '.join(roles)}: {error}"
        ) from error
    return texts[0], spans[0] if marks else []


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


@lru_cache(maxsize=8)
def takes_parts(tokenizer, template: str) -> bool:
    """Whether a template writes contents in parts, [{"type": "text", "text": ...}], and no plain texts, as
    those of some vision-language models do.
    """
    words = tokenizer.special_tokens_map
    for content in ("\ue0f0", [{"type": "text", "text": "\ue0f0"}]):
        with suppress(Exception):  # of a template, which is someone else's program
            message = {"role": "user", "content": content}
            if "\ue0f0" in render_jinja_template([[message]], None, None, template, **words)[0][0]:
                return isinstance(content, list)
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
    marked = [{"role": role, "content": f"\ue0f0{i}\ue0f1"} for i, role in enumerate(roles)]
    return re.split("\ue0f0(\\d+)\ue0f1", render(tokenizer, marked, prompt=prompt))


@lru_cache(maxsize=256)
def _turns_in_place(tokenizer, template: str, roles: tuple[str, ...]) -> dict[int, tuple[int, str]]:
    """Index of each assistant's turn -> (characters between the generation prompt and the content, the text
    after the content that ends the turn). {} where a turn stands otherwise in the whole conversation than in
    the one that it ends, or where the generation prompt is not how it begins.
    """
    whole, turns = _parts(tokenizer, template, roles), {}
    for i in (i for i, role in enumerate(roles) if role == "assistant"):
        prompt = _parts(tokenizer, template, roles[:i], True)
        turn = _parts(tokenizer, template, roles[: i + 1])
        n = len(prompt)
        begins = turn[: n - 1] == prompt[:-1] and turn[n - 1].startswith(prompt[-1])
        if not begins or len(turn) != n + 2 or whole[: n + 1] != turn[: n + 1]:
            return {}
        end = turn_end(tokenizer, template, roles[: i + 1], roles[i + 1 :])
        last = i == len(roles) - 1
        if not (last or whole[n + 1].startswith(end)):
            return {}
        turns[i] = (len(turn[n - 1]) - len(prompt[-1]), end)
    return turns


@lru_cache(maxsize=256)
def turn_end(tokenizer, template: str, roles: tuple[str, ...], later: tuple[str, ...] = ()) -> str:
    """What ends the assistant's turn that is the last of some roles: the added tokens after its content, and
    white space between; else the one with which the next turn begins; else the end-of-text token, if any.
    """
    several, one = end_patterns(tokenizer)
    if found := several.match(_parts(tokenizer, template, roles)[-1]):
        return found[0]
    found = one.match(_parts(tokenizer, template, (*roles, *(later[:1] or ("user",))))[-3])
    return found[0] if found else tokenizer.eos_token or ""


@lru_cache(maxsize=8)
def _generation_prompt(tokenizer, template: str) -> tuple[str, str]:
    """(what add_generation_prompt adds after a user's turn, what the template writes after its content)."""
    without = _parts(tokenizer, template, ("user",))[-1]
    prompt = _parts(tokenizer, template, ("user",), True)[-1]
    return (prompt.removeprefix(without) if prompt.startswith(without) else prompt), prompt


@lru_cache(maxsize=8)
def end_patterns(tokenizer) -> tuple[re.Pattern, re.Pattern]:
    """What finds, after white space, added tokens that follow each other; and one of them."""
    words = {t.content for t in tokenizer.added_tokens_decoder.values() if t.content}
    token = "|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)"
    return re.compile(rf"\s*(?:{token})+"), re.compile(rf"\s*(?:{token})")


@lru_cache(maxsize=8)
def special_text(tokenizer) -> re.Pattern:
    """What finds the tokenizer's special tokens in a text; the longest first."""
    words = {t.content for t in tokenizer.added_tokens_decoder.values() if t.special and t.content}
    return re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))) or "(?!)")


def tokenizer_damage(files: list[Path], error: Exception) -> str:
    """One line that names the damaged file, as far as that can be told: transformers' errors name none."""
    for file in files:
        if what := impostor(start_of(file)):
            return f"{file}: {what}"
    if "trust_remote_code" in str(error):
        return f"{files[0].parent}: its tokenizer is Python code; read it, then add --trust_remote_code"
    names = ", ".join(file.name for file in files)
    reason = reason_of_others(error)
    return f"{files[0].parent}: {names} cannot be read, cut short or damaged ({reason}); fetch them again"


def check_tokenizer_files(folder: Path) -> None:
    """Refuse files that transformers would open for a tokenizer and that are not regular, outside the folder
    or far too large. Comes before it sees the folder.
    """
    for pattern, limit in TOKENIZER_FILES.items():
        for path in sorted(Path(folder).glob(pattern)):
            file = file_inside(folder, str(path.relative_to(folder)))
            content = read_small_file(file, limit)
            if file.suffix == ".json":
                values = content.count(b",") + content.count(b"[") + content.count(b"{")
                check(
                    values <= TOKENIZER_VALUES,
                    f"{file}: more than {TOKENIZER_VALUES:,} values {AGAIN}",
                )
    settings = Path(folder) / "tokenizer_config.json"
    if settings.exists():
        try:
            others = read_small_json(settings, TOKENIZER_BYTES, TOKENIZER_VALUES)
        except ValueError as error:
            raise ConfigError(f"{settings}: {str(error)[:100]} {AGAIN}") from None
        check(
            isinstance(others, dict),
            f"{settings}: expected a JSON object, got a {type(others).__name__} {AGAIN}",
        )
        # transformers opens the files that this names.
        named = others.get("fast_tokenizer_files") or []
        good = isinstance(named, list) and all(
            isinstance(n, str) and not re.search(r"[/\\\0]", n) for n in named
        )
        check(good, f"{settings}: fast_tokenizer_files: not names of files of this folder {AGAIN}")
