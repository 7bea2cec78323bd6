"""Pairs and labelled answers -> the global batches of a preference loss. See preferences.py for the rows."""

import hashlib
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ..run.units import IGNORE
from .batches import Batch, GlobalBatches
from .examples import Example, Examples
from .packing import PackedBatches


@dataclass(frozen=True)
class PairBatch(Batch):
    """A micro-batch of P pairs: 2 P sequences, the chosen one of each and then its rejected one; or of P
    labelled answers. A filler has P = 0, and one sequence without a trained token.
    """

    pairs: int = 0  # P
    desirable: Tensor | None = None  # (S,) bool of its sequences: those that are wanted
    keys: tuple[int, ...] = ()  # (S,): a hash of each one's tokens


class Twice:
    """The places of the two sequences of each pair."""

    def __init__(self, where):
        self.where = where

    def __getitem__(self, i: int) -> str:
        return self.where[i // 2]


def sequences(examples: Examples) -> Examples:
    """The 2 n sequences of n pairs: 2 i is the chosen one of pair i, 2 i + 1 the rejected one. For their ids,
    labels, lengths and places, such as in longest_row and check_positions; it has no counts.
    """
    middles = examples.bounds[:-1] + examples.row_sizes
    bounds = torch.cat([examples.bounds, middles]).sort().values
    rows = examples.numbers
    rows = (2 * rows[:, None] + torch.arange(2)).flatten()
    return replace(examples, bounds=bounds, rows=rows, where=Twice(examples.where))


class Pairs:
    """What batches of pairs have beside those of examples: their sizes count pairs, or packs of pairs."""

    def __post_init__(self):
        super().__post_init__()
        self.sequences = sequences(self.examples)

    def items(self, rows: list[int]) -> list[Example]:
        return [self.sequences[2 * row + i] for row in rows for i in range(2)]

    def every(self, steps: int) -> Iterator[PairBatch]:
        """This rank's micro-batches with all answers of so many steps."""
        return chain.from_iterable(map(self.batches, range(min(steps, self.per_epoch))))

    def desirable(self, rows: list[int]) -> Tensor:
        return torch.tensor([True, False] * len(rows), dtype=torch.bool)

    def batch(self, rows: list) -> PairBatch:
        batch = super().batch(rows)
        numbers = list(chain.from_iterable(rows)) if self.packed else rows
        return PairBatch(
            **vars(batch),
            pairs=len(numbers),
            desirable=self.desirable(numbers),
            keys=tuple(map(key_of, self.items(numbers))),
        )


def begin_of_answer(item: Example) -> int:
    """The first trained token."""
    return int((item.labels != IGNORE).nonzero()[0])


def key_of(item: Example) -> int:
    """A hash of a sequence and of where its trained tokens begin."""
    begin = begin_of_answer(item)
    digest = hashlib.blake2b(item.ids.numpy(), digest_size=8, salt=begin.to_bytes(4, "little"))
    return int.from_bytes(digest.digest(), "little", signed=True)


@dataclass(eq=False)
class PairBatches(Pairs, GlobalBatches):
    """GlobalBatches of PairBatch."""

    packed = False


@dataclass(eq=False)
class PackedPairs(Pairs, PackedBatches):
    """PackedBatches of PairBatch. A pack holds whole pairs, so `size` is that of two sequences or more."""

    packed = True


@dataclass(eq=False)
class LabelBatches(PairBatches):
    """GlobalBatches of PairBatch with labels, for KTO (https://arxiv.org/abs/2402.01306)."""

    seq_len: int
    answer_of = None  # row -> the row with its answer; None: its own

    def desirable(self, rows: list[int]) -> Tensor:
        return self.examples.of_rows(self.examples.row_sizes)[rows] > 0

    def items(self, rows: list[int]) -> list[Example]:
        """Each row's prompt and the answer of row answer_of[row], cut so that both fit in seq_len tokens."""
        items = []
        for row in rows:
            other = self.answer_of[row] if self.answer_of else row
            prompt = self.examples[row]
            answer = self.examples[other]
            end, begin = begin_of_answer(prompt), begin_of_answer(answer)
            ids = torch.cat([prompt.ids[:end], answer.ids[begin:]])
            labels = torch.cat([prompt.labels[:end], answer.labels[begin:]])
            items.append(Example(ids[: self.seq_len], labels[: self.seq_len], prompt.where))
        return items

    def every(self, steps: int) -> Iterator[PairBatch]:
        yield from super().every(steps)
        for step in range(steps):
            yield from self.mismatched(step)

    def mismatched(self, step: int) -> list[PairBatch]:
        """The micro-batches of batches(step), row by row, but each prompt with the answer of the next row in
        the order of the global batch, and the last with the first one's: for KTO's KL term. They do not
        depend on the number of ranks. The row of a global batch of one keeps its own answer.
        """
        rows = self.rows_of(step)
        rotated = copy(self)
        rotated.answer_of = dict(zip(rows, [*rows[1:], rows[0]], strict=True))
        return rotated.batches(step)
