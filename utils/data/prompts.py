"""Prompts to answer: the lines or rows of a file, and the ids that a model is asked with."""

from pathlib import Path
from typing import NamedTuple

import torch

from ..run.errors import ConfigError, check
from .chats import prompt_ids
from .formats import to_messages
from .rows import Row, read_rows

FORMS = 'a row is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'


class Prompt(NamedTuple):
    where: str  # the file and the line
    content: str | list[dict]  # a text, or messages
    tools: list | None = None

    @property
    def messages(self) -> list[dict]:
        """The prompt as messages; a text is a turn of the user."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        return self.content


def read_prompts(path: Path, raw: bool, system: str) -> list[Prompt]:
    """Every prompt of a file: the lines of a .txt file that are not blank, else its rows.

    raw: prompts are texts to complete, not messages. system: a system turn to put before each; "": none.
    ConfigError names the file and the line.
    """
    rows = read_rows(path)
    if path.suffix == ".txt":
        lines = enumerate(rows[0].data["text"].splitlines(), 1)
        prompts = [Prompt(f"{path}:{i}", line) for i, line in lines if line.strip()]
    else:
        prompts = [_prompt_of_row(row, raw) for row in rows]
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
    tokenizer, prompt: Prompt, raw: bool, new_tokens: int, positions: float
) -> list[int]:
    """The ids of a prompt, as the model was trained to see it, with its generation prompt; raw: of its text
    alone. ConfigError where the model has too few positions for it and `new_tokens` more.
    """
    if raw:
        ids = tokenizer(prompt.content)["input_ids"]
    else:
        try:
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


def pad_left(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, attention mask), both (B, T): the rows of a batch, padded on the left."""
    width = max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :] = torch.tensor(row)
        mask[i, width - len(row) :] = 1
    return ids, mask


def _prompt_of_row(row: Row, raw: bool) -> Prompt:
    """A row's prompt. Messages and their tools are read as for training; a last answer is left out."""
    text = row.data.get("prompt")
    messages = row.data.get("messages")
    if isinstance(text, str) and text and messages is None:
        return Prompt(row.where, text)
    has_messages = isinstance(messages, list) and text is None
    check(has_messages, f"{row.where}: no prompt to answer; {FORMS}")
    check(
        not raw,
        f"{row.where}: these are messages, and --raw completes texts (fix: without --raw)",
    )
    # to_messages asks for an answer
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    if last.get("role") != "assistant":
        messages = [*messages, {"role": "assistant", "content": "to come"}]
    check(len(messages) > 1, f"{row.where}: no turn to answer; {FORMS}")
    try:
        messages, tools = to_messages(row.data | {"messages": messages}, "chat")
    except ValueError as error:
        raise ConfigError(f"{row.where}: {error}; {FORMS}") from None
    return Prompt(row.where, messages[:-1], tools)
