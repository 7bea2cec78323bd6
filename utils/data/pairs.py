"""Pairs and labelled answers -> global batches for a preference loss. See preferences.py for the rows."""

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from ..run.units import IGNORE, seed_of
from .batches import Batch, GlobalBatches
from .examples import Example, Examples
from .packing import PackedBatches


@dataclass(frozen=True)
class PairBatch(Batch):
    """A micro-batch of S sequences: P pairs (S = 2 P; chosen, rejected, chosen, ...), or P labelled answers
    (S = P). A filler has P = 0 and one sequence without trained tokens.
    """

    pairs: int = 0  # P
    desirable: Tensor | None = None  # (S,) bool: true for chosen or desirable answers
    keys: tuple = ()  # (S,): a hash of each sequence; see key_of


def sequences(examples: Examples) -> Examples:
    """The 2 n sequences of n pairs: sequence 2 i is the chosen one of pair i, 2 i + 1 the rejected one. Use
    only ids, labels, lengths and names, as longest_row and check_positions do; counts are still per pair.
    """
    middles = examples.bounds[:-1] + examples.row_sizes
    return replace(
        examples,
        bounds=torch.cat([examples.bounds, middles]).sort().values,
        rows=(2 * examples.numbers[:, None] + torch.arange(2)).flatten(),
        sides=2,
    )


class Pairs:
    """Mixin: GlobalBatches whose rows are pairs. Batch sizes count pairs, or packs of pairs."""

    def __post_init__(self):
        super().__post_init__()
        self.sequences = sequences(self.examples)

    def items(self, rows: list) -> list:
        """The chosen and the rejected sequence of each pair, in turn."""
        return [self.sequences[2 * row + i] for row in rows for i in range(2)]

    def every(self, steps: int) -> Iterator[PairBatch]:
        """This rank's micro-batches with every answer that the first `steps` steps need, each once."""
        return chain.from_iterable(map(self.batches, range(min(steps, self.per_epoch))))

    def desirable(self, rows: list[int]) -> Tensor:
        """(2 P,) bool: true for the chosen sequences."""
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
    """The index of the first trained token."""
    return int((item.labels != IGNORE).nonzero()[0])


def key_of(item: Example) -> int:
    """A hash of a sequence's ids and of the index where its answer begins."""
    return seed_of(f"{begin_of_answer(item)} {item.ids.tolist()}")


@dataclass(eq=False)
class PairBatches(Pairs, GlobalBatches):
    """GlobalBatches of PairBatch."""

    packed = False


@dataclass(eq=False)
class PackedPairs(Pairs, PackedBatches):
    """PackedBatches of PairBatch. A pack holds whole pairs, so `size` must have room for two sequences."""

    packed = True


@dataclass(eq=False)
class LabelBatches(PairBatches):
    """GlobalBatches of PairBatch with labels, for KTO (https://arxiv.org/abs/2402.01306)."""

    seq_len: int
    answer_of = None  # row -> the row whose answer it gets; None: its own answer

    def summary(self) -> str:
        """The text that the plan prints, with the share of desirable answers."""
        return f"{super().summary()}; {self.desirable(slice(None)).double().mean():.0%} desirable"

    def desirable(self, rows) -> Tensor:
        """(P,) bool: the labels of these rows."""
        return self.examples.row_sizes[self.examples.numbers[rows]] > 0

    def items(self, rows: list) -> list:
        """The prompt of each row with the answer of row answer_of[row], cut to seq_len tokens."""
        items = []
        for row in rows:
            prompt = self.examples[row]
            answer = self.examples[self.answer_of[row]] if self.answer_of else prompt
            end = begin_of_answer(prompt)
            begin = begin_of_answer(answer)
            ids = torch.cat([prompt.ids[:end], answer.ids[begin:]])
            labels = torch.cat([prompt.labels[:end], answer.labels[begin:]])
            items.append(Example(ids[: self.seq_len], labels[: self.seq_len], prompt.where))
        return items

    def every(self, steps: int) -> Iterator:
        """Also the mismatched answers of each step, which differ from epoch to epoch."""
        yield from super().every(steps)
        for step in range(steps):
            yield from self.mismatched(step)

    def mismatched(self, step: int) -> list[PairBatch]:
        """The micro-batches of batches(step) with mismatched answers, for KTO's KL term. Each prompt gets the
        answer of the next row in the global batch; the last gets the answer of the first. So the pairing does
        not depend on the number of ranks. With a global batch of one, the row keeps its own answer.
        """
        rows = self.rows_of(step)
        rotated = copy(self)
        rotated.answer_of = dict(zip(rows, [*rows[1:], rows[0]], strict=True))
        return rotated.batches(step)
