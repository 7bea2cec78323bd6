"""Prompts with pictures: rows in the forms of pictures.py, with their last answer or without."""

from collections import Counter

import torch
from PIL import Image

from .chats import Chat, renderable
from .encode import Rows
from .formats import ROLES, form_of
from .picture_batches import BLANK, features_of, inputs_of
from .pictures import (
    compare,
    in_parts,
    process,
    read_pictured,
    room_of,
    sized,
    with_room,
)
from .prompts import FORMS, Prompt
from .rows import Row
from .tokens import encode, hidden, render


def picture_prompt(row: Row, rows: Rows) -> Prompt:
    """A row's prompt. rows: where its pictures are, and how large they may be. ValueError: what is wrong."""
    data = answered(row.data)
    messages, tools, sources, _ = read_pictured(data, form_of(data), Counter())
    if messages[-1]["role"] != "assistant" or len(messages) == 1:
        raise ValueError(f"no turn to answer; {FORMS}")
    pictures = sized(sources, row.where, rows)
    return Prompt(row.where, in_parts(messages[:-1]), tools, pictures)


def answered(row: dict) -> dict:
    """The row with an answer, where it has none: it is then read as one that is trained."""
    to_come = {"role": "assistant", "content": "to come"}
    row = {"output": "to come"} | row
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if prompt and "messages" not in row:
        row["messages"] = prompt
    for key in ("messages", "conversations"):
        turns = row.get(key)
        last = dict(turns[-1]) if turns else {}
        if last and ROLES.get(last.get("role", last.get("from"))) != "assistant":
            row[key] = [*turns, to_come]
    for turn in row.get("texts") or ():
        turn.setdefault("assistant", "to come")
    return row


def picture_prompt_ids(processor, tokenizer, prompt: Prompt) -> list[int]:
    """The ids of its generation prompt, with the tokens of each picture. ValueError: what is wrong."""
    messages = renderable(tokenizer, hidden(tokenizer, prompt.messages), prompt.tools)
    text = render(tokenizer, messages, prompt.tools, prompt=True)
    written = text.count(processor.image_token)
    if written != len(prompt.pictures):
        raise ValueError(
            f"the chat template writes {written} of {len(prompt.pictures)} pictures"
            " (fix: another --chat_template)"
        )
    sizes = tuple((width, height) for _, width, height in prompt.pictures)
    texts, _ = room_of(processor, sizes)
    whole, _ = with_room(Chat(text, []), processor.image_token, texts)
    ids = encode(tokenizer, whole.text).ids
    compare(processor, text, ids, sizes)
    return ids


def picture_inputs(processor, prompts: list[Prompt], ids: torch.Tensor, rows: Rows) -> dict:
    """What the model takes beside the ids (B, T) of prompts with equally many pictures."""
    features = [features_of(processor, p.pictures, p.where, rows) for p in prompts]
    return inputs_of(processor, process(processor, [Image.new("RGB", BLANK)]), ids, features)
