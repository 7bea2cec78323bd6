"""Prompts with columns, for rewards: {"prompt": TEXT or [turn, ...]} or {"messages": [turn, ...]}. All other
keys of a row are its columns.

If the last turn is the assistant's, it becomes the column `answer`. A text is a user turn; it is plain text
with --format completion, or if the tokenizer has no chat template. Sources of these forms:
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
    columns: dict[str, object]  # the same keys for all rows; None: this row does not have it
    where: str


@dataclass(frozen=True, eq=False)
class Questions(Examples):
    """Prompts as examples without trained tokens. GlobalBatches(questions, ...).rows_of(step) gives the rows
    of a step; questions[row] is the prompt of a row.
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
    """The prompts of a data set, for load_data(..., load=load_questions). rows.seq_len: the maximum tokens of
    a prompt. With rows.too_long drop, longer prompts are dropped and counted; otherwise they are an error. No
    prompt is cut, because that would change the question.

    ConfigError for bad rows (the first ten, and the number of others), and if all rows were dropped.
    """
    return Questions(**vars(load_examples(replace(rows, task="prompts"), tokenizer, progress)))
