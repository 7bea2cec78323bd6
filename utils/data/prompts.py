"""Rows -> prompts to answer; and the ids of prompts with columns, see questions.py."""

import json
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from .chats import SPELLED, examine_parts, renderable, skeleton
from .formats import PICTURES, REFUSED, ROLES, Messages, to_messages
from .tokens import adds_bos, encode, end_of_turn_ids, hidden, render

FORMS_OF_PROMPTS = (
    'a row is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    " (fix: --columns prompt=THEIRS, or instruction=THEIRS,input=THEIRS; texts: eval.py --task perplexity)"
)
# Keys that belong to the prompt beside its turns, and those that to_messages refuses.
EXTRAS = (
    "system",
    "tools",
    "chat_template_kwargs",
    *(key for key, reason in REFUSED.items() if reason == PICTURES),
)

NO_COLUMNS = {"prompt", "messages", "conversations", *EXTRAS}
OF_ALPACA = ("instruction", "input", "history", *EXTRAS)  # the keys of an alpaca row's prompt


class Prompt(NamedTuple):
    where: str  # the row name: file and line
    content: str | list[dict]  # a text, or messages
    tools: list | None = None
    pictures: list = []  # [[source, width, height, bytes], ...]

    @property
    def messages(self) -> list[dict]:
        """The prompt as messages. A text becomes a user turn."""
        if isinstance(self.content, str):
            return [{"role": "user", "content": self.content}]
        return self.content


def turns_of(row: dict, read: Callable = to_messages) -> tuple:
    """(prompt, tools, answer, ...) of a row. prompt: a text, or messages; answer: None, or empty, if the row
    has none.

    The row is {"prompt": TEXT or [turn, ...]} or {"messages": [turn, ...]}, with system and tools as in
    formats.py, or an alpaca row. The output of the latter is the answer, and so is a last turn of the
    assistant, which is no part of the prompt. read: returns (messages, tools, ...); its further values are
    returned too. ValueError names what is wrong with the row.
    """
    text = row.get("prompt")
    messages = row.get("messages") or row.get("conversations")
    if text and repr(text) in repr(messages):
        text = None  # UltraChat has the question also by itself
    if "instruction" in row and not text and not messages:
        (*messages, _), tools, *others = read(
            {key: row[key] for key in OF_ALPACA if key in row} | {"output": "to come"},
            "alpaca",
            Counter(),
        )
        return messages, tools, row.get("output"), *others
    extras = {key: row[key] for key in EXTRAS if row.get(key)}
    if text and messages is None:
        if isinstance(text, str):
            if not extras:
                return text, None, None
            text = [{"role": "user", "content": text}]
        messages = text
        text = None
    if not isinstance(messages, list) or text:
        raise ValueError(f"no prompt to answer; {FORMS_OF_PROMPTS}")
    # to_messages refuses a conversation without an answer, so a placeholder is appended
    last = messages[-1] if messages and isinstance(messages[-1], dict) else {}
    is_answered = ROLES.get(last.get("role", last.get("from"))) == "assistant"
    if not is_answered:
        messages = [*messages, {"role": "assistant", "content": "to come"}]
    if len(messages) == 1:
        raise ValueError(f"no turn to answer; {FORMS_OF_PROMPTS}")
    messages, tools, *others = read(extras | {"messages": messages}, "chat", Counter())
    answer = messages[-1]["content"] if is_answered else None
    return messages[:-1], tools, answer, *others


def prompt_of(tokenizer, messages: Messages, tools: list | None) -> str:
    """The generation prompt that inference uses: the conversation up to an answer. A special token that a
    message or a tool spells stays ordinary text.
    """
    messages, tools = hidden(tokenizer, [messages, tools])
    messages = renderable(tokenizer, messages, tools)
    return render(tokenizer, messages, tools, prompt=True)


def prompt_ids(tokenizer, prompt: Prompt) -> list[int]:
    """The ids of the generation prompt."""
    return encode(tokenizer, prompt_of(tokenizer, prompt.messages, prompt.tools)).ids


def texts_of(tokenizer, answers: list) -> list[str]:
    """The texts of answers, given their ids, without special tokens and without the token that ends a turn:
    not each tokenizer marks it as special.
    """
    ends = end_of_turn_ids(tokenizer)
    said = [[token for token in ids if token not in ends] for ids in answers]
    return tokenizer.batch_decode(said, skip_special_tokens=True)


def is_plain(content: str | list, tokenizer, rows) -> bool:
    """Whether a prompt is plain text, used without a chat template. rows: an encode.Rows."""
    return isinstance(content, str) and (rows.format == "completion" or not tokenizer.template_name)


def add_question(part, tokenizer, row: dict, where: str, rows, form: str, notes: Counter) -> str:
    """Add the prompt of a row to `part`, an encode.Part. Returns its form. rows: an encode.Rows.
    ValueError names what is wrong with the row.
    """
    content, tools, answer = turns_of(row)
    form = "prompts in the chat template"
    safe = hidden(tokenizer, [content, tools])
    notes[SPELLED] += safe != [content, tools]
    if is_plain(content, tokenizer, rows):
        form = "plain text"
        ids = encode(tokenizer, safe[0]).ids
        if adds_bos(tokenizer):
            ids = [tokenizer.bos_token_id, *ids]
    else:
        prompt = Prompt(where, content, tools)
        examine_parts(tokenizer, skeleton(prompt.messages), tools, [], notes)
        ids = prompt_ids(tokenizer, prompt)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if len(ids) > rows.seq_len:
        if rows.too_long == "drop":
            part.dropped["longer than a prompt may be"] += 1
            return form
        raise ValueError(
            f"{len(ids):,} tokens, and a prompt may have {rows.seq_len:,} (fix: --too_long drop or --seq_len)"
        )
    columns = {key: row[key] for key in row if key not in NO_COLUMNS}
    if answer or answer == 0:  # 0 and false are answers; a turn that only calls tools says nothing
        columns.setdefault("answer", answer)
        form += ", answers as the column answer"
    part.add(ids, bytes(len(ids)), where)
    part.details.append(json.dumps([content, columns, tools], default=str))
    return form
