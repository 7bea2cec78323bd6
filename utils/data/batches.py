"""Examples -> the global batches that define a run.

The order of a run is a pure function of (fingerprint, seed, step): global batch k of an epoch is rows
[k G, (k + 1) G) of the epoch's permutation, however many ranks and micro-batches share it.
"""

import heapq
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..run.errors import check
from ..run.units import IGNORE
from .examples import Example, Examples, permutation


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows, padded on the right to T tokens."""

    ids: Tensor  # (B, T) int64
    # (B, T) int64; the trained tokens are those != IGNORE, never the first of a row
    labels: Tensor
    mask: Tensor  # (B, T) bool; false where padded
    where: list[str]  # the names of the rows, "chat.jsonl:3"
    positions: Tensor | None = None  # (B, T) int64 of packs: each document counts from 0
    # (N + 1,) int32, for packs in one row: the start of each document, then the end of the last
    begins: Tensor | None = None
    longest: int = 0  # tokens of the longest document in begins
    places: Tensor | None = None  # (n,) int64: positions in (B * T,) that predict a trained token
    # further inputs of the model, by the model's argument names: see PictureBatches
    extra: dict = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of tokens without padding, 0 for a filler."""
        return int(self.mask.sum()) * (self.where != ["filler"])

    @property
    def trained_tokens(self) -> int:
        """The number of trained tokens."""
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device, with `places` filled in. A copy to a GPU goes from pinned memory, so the
        host does not wait for it.
        """

        def move(value):
            if device.type == "cuda":
                value = value.pin_memory()
            return value.to(device, non_blocking=True)

        places = (self.labels != IGNORE).flatten().nonzero().flatten() - 1
        return type(self)(**tree_map_only(Tensor, move, vars(self) | {"places": places}))


def collate(items: list[Example], pad_id: int, multiple: int) -> Batch:
    """Pad examples to one length: the longest example, rounded up to a multiple of `multiple` tokens."""
    length = math.ceil(max(len(item.ids) for item in items) / multiple) * multiple
    ids = torch.full((len(items), length), pad_id)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, item in enumerate(items):
        size = len(item.ids)
        ids[row, :size] = item.ids
        labels[row, 1:size] = item.labels[1:]  # nothing before the first token predicts it
        mask[row, :size] = True
    return Batch(ids, labels, mask, [item.where for item in items])


@dataclass(eq=False)
class GlobalBatches:
    """This rank's micro-batches of each global batch. An epoch has `per_epoch` global batches.

    The last global batch of an epoch may be smaller; it is trained as it is. All ranks make the same number
    of micro-batches in a step, because FSDP's collectives need it. A rank that has no rows left makes a
    filler micro-batch without trained tokens. `rank` and `ranks` count the ranks that divide the data.
    """

    examples: Examples
    seed: int
    global_batch_size: int
    batch_size: int
    rank: int
    ranks: int
    pad_id: int
    multiple = 8  # lengths are padded to a multiple of this, for tensor cores

    def __post_init__(self):
        self.key = f"{self.examples.fingerprint} {self.seed}"
        self.per_epoch = math.ceil(self.rows() / self.global_batch_size)

    def rows(self) -> int:
        """The number of rows in an epoch."""
        return len(self.examples)

    def summary(self) -> str:
        """The text that the plan prints."""
        return self.examples.summary()

    def rows_of(self, step: int) -> list:
        """The rows of global batch `step`, longest first. Steps count from 0 over all epochs."""
        order = permutation(len(self.examples), f"{self.key} {step // self.per_epoch}")
        rows = self.of_step(order, step)
        return rows[self.examples.lengths[rows].argsort(descending=True, stable=True)].tolist()

    def of_step(self, order: Tensor, step: int) -> Tensor:
        """The part of an epoch's order that is global batch `step`."""
        first = step % self.per_epoch * self.global_batch_size
        return order[first : first + self.global_batch_size]

    def costs(self, rows: list) -> Tensor:
        """The cost of each row, (n,), by which rows are balanced over ranks. Here: its length."""
        return self.examples.lengths[rows]

    def batch(self, rows: list) -> Batch:
        """The micro-batch of these rows. Without rows: a filler."""
        return collate(self.items(rows) or [self.filler()], self.pad_id, self.multiple)

    def filler(self) -> Example:
        """A row of one pad token, not trained."""
        return Example(torch.tensor([self.pad_id]), torch.tensor([IGNORE]), "filler")

    def items(self, rows: list[int]) -> list[Example]:
        """The examples with these row numbers."""
        return [self.examples[row] for row in rows]

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global batch `step`. Rows of similar length share a micro-batch. The
        loss is a sum over the global batch, so it does not matter which rank has which row.
        """
        return [self.batch(rows) for rows in self.shares(step)[self.rank]]

    def shares(self, step: int) -> list:
        """The rows of global batch `step` as [rank][micro-batch][row]."""
        return self.dealt(self.rows_of(step))

    def dealt(self, rows: list) -> list:
        """These rows as [rank][micro-batch][row]. Every rank has the same number of micro-batches."""
        starts = range(0, math.ceil(len(rows) / self.ranks), self.batch_size)
        return [
            [[rows[i] for i in share[start : start + self.batch_size]] for start in starts]
            for share in deal(self.costs(rows), self.ranks)
        ]


def deal(costs: Tensor, ranks: int) -> list:
    """Divide rows with these costs, (n,), among the ranks. Returns the row indices of each rank. The
    sums of costs are as equal as possible. No rank has more than ceil(n / ranks) rows; one with an expensive
    row may have fewer.

    Greedy: rows are dealt from the most to the least expensive, each to the rank with the lowest sum so far.
    """
    most_rows = math.ceil(len(costs) / ranks)
    shares = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]  # a heap of (sum, rank)
    order = costs.argsort(descending=True, stable=True)
    for row, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, rank = heapq.heappop(open_ranks)
        shares[rank].append(row)
        if len(shares[rank]) < most_rows:
            heapq.heappush(open_ranks, (load + cost, rank))
    return shares


def divide_batch(batch_size: int, grad_accum: int, global_batch_size: int, ranks: int) -> tuple:
    """(global batch size, micro-batches per rank and step). Sizes count sequences, or packs.

    A size of 0 is derived from the others. If the product of the others is larger than the global batch,
    some micro-batches have fewer rows. ranks: the number of ranks that divide the data. ConfigError if the
    sizes contradict each other.
    """
    at_once = batch_size * ranks
    global_batch_size = global_batch_size or at_once * (grad_accum or 1)
    micro_batches = math.ceil(global_batch_size / at_once)
    check(
        grad_accum in (0, micro_batches),
        f"--grad_accum {grad_accum} x --batch_size {batch_size} x {ranks} ranks is not --global_batch_size"
        f" {global_batch_size} (fix: leave one of them out)",
    )
    return global_batch_size, micro_batches
