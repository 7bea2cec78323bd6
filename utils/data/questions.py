"""Prompts with columns, for rewards: {"prompt": TEXT or [turn, ...]} or {"messages": [turn, ...]}, and any
other keys beside them.

A last turn of the assistant becomes the column `answer`. A text is a turn of the user; it is plain text with
--format completion, and where the tokenizer has no chat template. Where they come from:
https://huggingface.co/docs/trl/dataset_formats (prompt-only), https://huggingface.co/datasets/openai/gsm8k.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from tqdm import tqdm

from ..run.errors import check, escaped
from .chats import prompt_ids
from .encode import Part, Rows
from .examples import Examples, Origin, draw
from .formats import parse_columns, renamed
from .prompts import BESIDE, Prompt, turns_of
from .rows import as_object, find_sources
from .tokens import adds_bos, encode, hidden

TOO_LONG = "longer than a prompt may be"
NO_COLUMNS = {"prompt", "messages", *BESIDE}


class Question(NamedTuple):
    ids: list[int]
    content: str | list[dict]  # a text, or messages, as the row has it
    columns: dict[str, object]  # what else rows have; None: this one does not
    where: str


@dataclass(frozen=True, eq=False)
class Questions(Examples):
    """Prompts as examples without a trained token: GlobalBatches(questions, ...).rows_of(step) says which
    prompts a step has, and questions[row] is one of them.
    """

    asked: Sequence[tuple[str | list[dict], dict]] = ()  # (content, columns), n

    def __getitem__(self, i: int) -> Question:
        row = i if self.rows is None else self.rows[i]
        ids = self.ids[self.bounds[row] : self.bounds[row + 1]].tolist()
        content, columns = self.asked[row]
        return Question(ids, content, dict.fromkeys(self.names) | columns, self.where[row])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids and the columns in their order: what is asked and how it is rewarded."""
        text = json.dumps([super().fingerprint, self.asked], default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def names(self) -> set[str]:
        """The names of all columns."""
        return {name for _, columns in self.asked for name in columns}


def load_questions(rows: Rows, tokenizer, progress: bool = False) -> Questions:
    """The prompts of a data set, for load_data(..., load=load_questions). rows.seq_len: the most tokens of a
    prompt; a longer one is dropped and counted, or an error, as rows.too_long says.

    ConfigError for bad rows (up to ten, and how many more), and where all were dropped.
    """
    check(
        rows.too_long != "truncate",
        "--too_long truncate: a prompt that is cut asks something else (fix: drop, or error)",
    )
    part, asked, origins = Part(), [], []
    for source in find_sources(rows.dataset):
        first = len(asked)
        found = islice(source.read(), rows.max_rows or None)
        title = f"tokenizing {escaped(source.name)}"
        for where, value in tqdm(found, title, unit=" rows", disable=None if progress else True):
            part.rows += 1
            try:
                add_question(part, asked, tokenizer, where, as_object(value), rows)
            except ValueError as fault:
                part.bad.append((where, str(fault)))
        forms = {"prompts": len(asked) - first}
        origins.append(Origin(source.name, source.weight, forms, first, len(asked)))
    part.close(rows)
    questions = Questions(
        ids=torch.tensor(part.ids, dtype=torch.int32),
        loss_mask=torch.tensor(part.loss_mask, dtype=torch.uint8),
        bounds=torch.tensor([0, *part.lengths]).cumsum(0),
        trained_tokens=torch.tensor(part.trained_tokens),
        keys=torch.tensor(part.keys),
        where=part.where,
        dropped=part.dropped,
        unit="prompts",
        origins=origins,
        bad=part.bad,
        asked=asked,
    )
    return draw(questions)


def is_plain(content: str | list[dict], tokenizer, rows: Rows) -> bool:
    """Whether it is asked as it stands, and is no turn of a chat."""
    chats = rows.format != "completion" and tokenizer.template_name != "built-in plain"
    return isinstance(content, str) and not chats


def add_question(part: Part, asked: list, tokenizer, where: str, row: dict, rows: Rows) -> None:
    """Add a row to `part`, and to `asked` what else it has. ValueError: what is wrong with it."""
    names = parse_columns(rows.columns)
    part.columns |= row.keys() & names.values()
    row, _ = renamed(row, names)
    content, tools, answer = turns_of(row)
    if is_plain(content, tokenizer, rows):
        bos = [tokenizer.bos_token_id] * adds_bos(tokenizer)
        ids = bos + encode(tokenizer, hidden(tokenizer, content)).ids
    else:
        ids = prompt_ids(tokenizer, Prompt(where, content).messages, tools)
    if not ids:
        raise ValueError("the prompt has no tokens")
    if len(ids) > rows.seq_len and rows.too_long == "error":
        limit = f"a prompt may have {rows.seq_len:,} (fix: --too_long drop)"
        raise ValueError(f"{len(ids):,} tokens, and {limit}")
    if len(ids) > rows.seq_len:
        part.dropped[TOO_LONG] += 1
        return
    columns = {key: row[key] for key in row if key not in NO_COLUMNS}
    if answer is not None:
        columns.setdefault("answer", answer)
    part.add(ids, bytes(len(ids)), where)
    asked.append((content, columns))
