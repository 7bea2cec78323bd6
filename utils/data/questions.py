"""Prompts with columns, for rewards: {"prompt": TEXT or [turn, ...]} or {"messages": [turn, ...]}, and any
other keys beside them.

A last turn of the assistant becomes the column `answer`. A text is a turn of the user; it is plain text with
--format completion, and where the tokenizer has no chat template. Where they come from:
https://huggingface.co/docs/trl/dataset_formats (prompt-only), https://huggingface.co/datasets/openai/gsm8k.
"""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .encode import Rows
from .examples import Examples, load_examples


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

    def __getitem__(self, i: int) -> Question:
        ids, _, where = super().__getitem__(i)
        content, columns = json.loads(self.details[self.numbers[i]])
        return Question(ids.tolist(), content, dict.fromkeys(self.names) | columns, where)

    @cached_property
    def names(self) -> set[str]:
        """The names of all columns."""
        rows = (json.loads(self.details[row]) for row in range(len(self.keys)))
        return {name for _, columns in rows for name in columns}


def load_questions(rows: Rows, tokenizer, progress: bool = False) -> Questions:
    """The prompts of a data set, for load_data(..., load=load_questions). rows.seq_len: the most tokens of a
    prompt; a longer one is dropped and counted, or with another rows.too_long an error: one that is cut asks
    something else.

    ConfigError for bad rows (up to ten, and how many more), and where all were dropped.
    """
    return Questions(**vars(load_examples(replace(rows, task="prompts"), tokenizer, progress)))
