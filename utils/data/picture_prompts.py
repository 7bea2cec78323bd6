"""Prompts with pictures: rows in the forms of pictures.py, with their last answer or without."""

from collections import Counter

import torch

from .chats import Chat, renderable
from .encode import Rows
from .formats import to_messages
from .picture_batches import decoded_of, inputs_of
from .pictures import (
    NOT_WRITTEN,
    compare,
    in_parts,
    read_pictured,
    room_of,
    sized,
    turns_of_texts,
    with_room,
)
from .prompts import Prompt, turns_of
from .rows import Row
from .tokens import encode, hidden, render

READ_BY_ALPACA = ("instruction", "input", "history")


def picture_prompt(row: Row, rows: Rows) -> Prompt:
    """A row's prompt. rows: where its pictures are, and how large they may be. Where a text has no place for
    them, they stand before the first. ValueError: what is wrong.
    """

    def read(data: dict, _: str) -> tuple:
        return read_pictured(data, "texts", Counter())

    messages, tools, _, sources, _ = turns_of(with_messages(row.data), read)
    return Prompt(row.where, in_parts(messages), tools, sized(sources, row.where, rows))


def with_messages(row: dict) -> dict:
    """The row with messages in place of an instruction, or of texts."""
    if "instruction" in row:
        words = {key: row[key] for key in READ_BY_ALPACA if key in row}
        return row | {"messages": to_messages(words | {"output": "to come"})[0]}
    if not isinstance(row.get("texts"), list):
        return row
    texts = [turn | {"assistant": turn.get("assistant") or "to come"} for turn in row["texts"]]
    return row | {"messages": turns_of_texts(texts)}


def picture_prompt_ids(processor, tokenizer, prompt: Prompt) -> list[int]:
    """The ids of its generation prompt, with the tokens of each picture. ValueError: what is wrong."""
    messages = renderable(tokenizer, hidden(tokenizer, prompt.messages), prompt.tools)
    text = render(tokenizer, messages, prompt.tools, prompt=True)
    written = text.count(processor.image_token)
    if written != len(prompt.pictures):
        raise ValueError(NOT_WRITTEN.format(written, len(prompt.pictures)))
    sizes = tuple((width, height) for _, width, height in prompt.pictures)
    texts, _ = room_of(processor, sizes)
    whole, _ = with_room(Chat(text, []), processor.image_token, texts)
    compare(processor, tokenizer, text, whole.text, sizes)
    return encode(tokenizer, whole.text).ids


def picture_inputs(processor, prompts: list[Prompt], ids: torch.Tensor, rows: Rows) -> dict:
    """What the model takes beside the ids (B, T) of prompts with equally many pictures."""
    pictures = [decoded_of(prompt.pictures, prompt.where, rows) for prompt in prompts]
    return inputs_of(processor, ids, pictures)
