"""Prompts to answer: the lines or rows of a file, and the ids that a model is asked with."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..run.errors import ConfigError, check
from .chats import prompt_ids
from .formats import PICTURES, REFUSED, ROLES, to_messages
from .rows import Row, read_rows
from .tokens import adds_bos, encode, hidden

FORMS = 'a row is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
# Keys of a row that belong to its prompt, and those of pictures, which to_messages refuses.
BESIDE = ("system", "tools", *(key for key, why in REFUSED.items() if why == PICTURES))

NO_COLUMNS = {"prompt", "messages", *BESIDE}
TOO_LONG = "longer than a prompt may be"


class Prompt(NamedTuple):
    where: str  # the file and the line
    content: str | list[dict]  # a text, or messages
    tools: list | None = None
    pictures: list = []  # [[source, width, height], ...]

    @property
    def messages(self) -> list[dict]:
        """The prompt as messages; a text is a turn of the user."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        return self.content


def read_prompts(
    path: Path, raw: bool, system: str, pictured: Callable | None = None
) -> list[Prompt]:
    """Every prompt of a file: the lines of a .txt file that are not blank, else its rows.

    raw: prompts are texts to complete, not messages. system: a system turn to put before each; "": none.
    pictured: makes the prompt of a row for a model that reads pictures.
    ConfigError names the file and the line.
    """
    rows = read_rows(path)
    if path.suffix == ".txt":
        lines = enumerate(rows[0].data["text"].splitlines(), 1)
        prompts = [Prompt(f"{path}:{i}", line) for i, line in lines if line.strip()]
    else:
        prompts = [_prompt_of_row(row, raw, pictured) for row in rows]
    if not system:
        return prompts
    turn = {"role": "system", "content": system}
    for prompt in prompts:
        check(
            prompt.messages[0]["role"] != "system",
            f"{prompt.where}: has a system turn, and --system is given too",
        )
    return [prompt._replace(content=[turn, *prompt.messages]) for prompt in prompts]


def encode_prompt(
    tokenizer, prompt: Prompt, raw: bool, new_tokens: int, positions: float, pictured=None
) -> list[int]:
    """The ids of a prompt, as the model was trained to see it, with its generation prompt; raw: of its text
    alone. pictured: gives the ids of a prompt with pictures. ConfigError where the model has too few
    positions for it and `new_tokens` more.
    """
    try:
        if raw:
            ids = tokenizer(prompt.content)["input_ids"]
        elif prompt.pictures:
            ids = pictured(prompt)
        else:
            ids = prompt_ids(tokenizer, prompt.messages, prompt.tools)
    except ValueError as error:
        raise ConfigError(f"{prompt.where}: {error}") from None
    check(ids, f"{prompt.where}: the prompt has no tokens")
    needed = f"{len(ids)} tokens and --max_new_tokens {new_tokens}"
    check(
        len(ids) + new_tokens <= positions,
        f"{prompt.where}: {needed} exceed the model's {positions} positions"
        " (fix: a shorter prompt or answer)",
    )
    return ids


def turns_of(row: dict, read: Callable = to_messages) -> tuple:
    """(the text or the messages to answer, their tools, the answer that the row has) of a row.

    {"prompt": TEXT or [turn, ...]} or {"messages": [turn, ...]}, with system and tools as in formats.py. A
    last turn of the assistant is the answer, and no part of the prompt. read: gives messages, tools and what
    else is returned. ValueError: what is wrong with the row.
    """
    text, messages = row.get("prompt"), row.get("messages", row.get("conversations"))
    beside = {key: row[key] for key in BESIDE if row.get(key)}
    if isinstance(text, str) and text and messages is None:
        if not beside:
            return text, None, None
        text = [{"role": "user", "content": text}]
    if isinstance(text, list) and messages is None:
        text, messages = None, text
    if not isinstance(messages, list) or text is not None:
        raise ValueError(f"no prompt to answer; {FORMS}")
    # to_messages asks for an answer
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    is_answered = ROLES.get(last.get("role", last.get("from"))) == "assistant"
    if not is_answered:
        messages = [*messages, {"role": "assistant", "content": "to come"}]
    if len(messages) == 1:
        raise ValueError(f"no turn to answer; {FORMS}")
    messages, tools, *others = read(beside | {"messages": messages}, "chat")
    answer = messages[-1]["content"] if is_answered else None
    return messages[:-1], tools, answer, *others


def _prompt_of_row(row: Row, raw: bool, pictured: Callable | None) -> Prompt:
    """A row's prompt. Messages and their tools are read as for training; a last answer is left out."""
    is_text = isinstance(row.data.get("prompt"), str) and not {"image", "images"} & row.data.keys()
    try:
        if pictured and not is_text:
            return pictured(row)
        content, tools, _ = turns_of(row.data)
    except ValueError as error:
        raise ConfigError(f"{row.where}: {error}") from None
    check(
        not raw or isinstance(content, str),
        f"{row.where}: these are messages, and --raw completes texts (fix: without --raw)",
    )
    return Prompt(row.where, content, tools)


# --- prompts with columns: see questions.py


def is_plain(content: str | list[dict], tokenizer, rows) -> bool:
    """Whether it is asked as it stands, and is no turn of a chat. rows: an encode.Rows."""
    chats = rows.format != "completion" and tokenizer.template_name != "built-in plain"
    return isinstance(content, str) and not chats


def add_question(part, tokenizer, row: dict, where: str, rows, form: str, notes: Counter) -> str:
    """Add a row to `part`, an encode.Part; returns its form. rows: an encode.Rows. ValueError: what is wrong
    with the row.
    """
    content, tools, answer = turns_of(row)
    if is_plain(content, tokenizer, rows):
        bos = [tokenizer.bos_token_id] * adds_bos(tokenizer)
        ids = bos + encode(tokenizer, hidden(tokenizer, content)).ids
    else:
        ids = prompt_ids(tokenizer, Prompt(where, content).messages, tools)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if len(ids) > rows.seq_len and rows.too_long != "drop":
        limit = f"a prompt may have {rows.seq_len:,} (fix: --too_long drop)"
        raise ValueError(f"{len(ids):,} tokens, and {limit}")
    if len(ids) > rows.seq_len:
        part.dropped[TOO_LONG] += 1
        return "prompts"
    columns = {key: row[key] for key in row if key not in NO_COLUMNS}
    if answer is not None:
        columns.setdefault("answer", answer)
    part.add(ids, bytes(len(ids)), where)
    part.details.append(json.dumps([content, columns], default=str))
    return "prompts"
