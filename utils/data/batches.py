"""Examples -> the global batches that define a run.

The order of a run is a pure function of (fingerprint, seed, step): global batch k of an epoch is rows
[k G, (k + 1) G) of the epoch's permutation, however many ranks and micro-batches share it.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..run.units import IGNORE
from .examples import Example


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows, padded on the right to T tokens."""

    ids: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B, T) int64; the trained tokens are those != IGNORE
    mask: torch.Tensor  # (B, T) bool; false where padded
    where: list[str]
    # (B, T) int64 where rows are packs: each document counts from 0
    positions: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        """Without the padding."""
        return int(self.mask.sum())

    @property
    def trained_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device, pin_memory: bool = False) -> "Batch":
        """The batch on a device; for a GPU by way of page-locked memory, so that the copy overlaps."""
        pin = pin_memory and device.type == "cuda"

        def move(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if pin else tensor).to(device, non_blocking=pin)

        positions = None if self.positions is None else move(self.positions)
        return Batch(move(self.ids), move(self.labels), move(self.mask), self.where, positions)


def collate(items: list[Example], pad_id: int) -> Batch:
    """A batch as long as its longest example, rounded up to a multiple of 8 (for the matrix units)."""
    length = math.ceil(max(len(item.ids) for item in items) / 8) * 8
    ids = torch.full((len(items), length), pad_id)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, item in enumerate(items):
        size = len(item.ids)
        ids[row, :size] = item.ids
        labels[row, 1:size] = item.labels[1:]  # nothing comes before the first to predict it
        mask[row, :size] = True
    return Batch(ids, labels, mask, [item.where for item in items])


@lru_cache(maxsize=4)
def permutation(rows: int, key: str) -> torch.Tensor:
    """The numbers below `rows` (rows,) in an order that is a function of `key`, the same on every machine."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed))


class GlobalBatches:
    """This rank's micro-batches of each global batch; `per_epoch` global batches make an epoch.

    The last one of an epoch may be smaller: it is trained as it is. All ranks give equally many micro-batches
    for a step, because FSDP's collectives need it; a rank that has no row left gives a filler that teaches
    nothing. `rank` of `ranks` counts the ranks that share the data.
    """

    def __init__(self, examples, seed, global_batch_size, batch_size, rank, ranks, pad_id):
        self.examples, self.global_batch_size, self.batch_size = (
            examples,
            global_batch_size,
            batch_size,
        )
        self.rank, self.ranks, self.pad_id = rank, ranks, pad_id
        self.key = f"{examples.fingerprint} {seed}"
        self.per_epoch = math.ceil(self.rows() / global_batch_size)

    def rows(self) -> int:
        """Rows of an epoch."""
        return len(self.examples)

    def summary(self) -> str:
        """What the plan prints."""
        return self.examples.summary()

    def rows_of(self, step: int) -> list:
        """The rows of global batch `step`, counted from 0 over all epochs, the longest first."""
        epoch, k = divmod(step, self.per_epoch)
        order = permutation(len(self.examples), f"{self.key} {epoch}")
        rows = order[k * self.global_batch_size : (k + 1) * self.global_batch_size]
        return rows[self.examples.lengths[rows].sort(descending=True, stable=True).indices].tolist()

    def deal(self, rows: list) -> list[list]:
        """Each rank's rows, so that they work and wait alike: here by length, forth and back over the ranks.
        The loss is a sum over the global batch: it does not matter who has which row.
        """
        turns = [(rank, 2 * self.ranks - 1 - rank) for rank in range(self.ranks)]
        return [
            [row for i, row in enumerate(rows) if i % (2 * self.ranks) in turn] for turn in turns
        ]

    def batch(self, rows: list) -> Batch:
        """Some rows as a micro-batch; none as a filler."""
        filler = [Example(torch.tensor([self.pad_id]), torch.tensor([IGNORE]), "filler")]
        return collate([self.examples[row] for row in rows] or filler, self.pad_id)

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global batch `step`; rows of similar length are together."""
        rows = self.rows_of(step)
        mine, most = self.deal(rows)[self.rank], math.ceil(len(rows) / self.ranks)
        return [self.batch(mine[i : i + self.batch_size]) for i in range(0, most, self.batch_size)]
