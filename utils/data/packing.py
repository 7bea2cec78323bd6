"""Documents -> packs: which documents share a row, so that there is little padding.

Best-fit-decreasing: documents are placed from the longest to the shortest, each into the pack in which it
leaves the least free room (Johnson 1974, https://doi.org/10.1016/S0022-0000(74)80026-7; arXiv 2404.10830
packs with it). Packs with equal room are interchangeable, so the search is over the distinct rooms, of which
there are at most `size`.
"""

import bisect
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ..run.units import IGNORE
from .batches import Batch, GlobalBatches, collate, permutation
from .examples import Example

Pack = list[int]  # document numbers


@dataclass(eq=False)
class PackedBatches(GlobalBatches):
    """GlobalBatches whose rows are packs of at most `size` tokens. Each epoch packs the documents
    differently, but into the same number of packs.
    """

    size: int
    flat: bool = False  # all packs of a batch lie in one row

    def rows(self) -> int:
        """The number of packs in an epoch."""
        return len(self.packs(0))

    @lru_cache(maxsize=2)  # noqa: B019 - of a run's data and its held-out rows
    def packs(self, epoch: int) -> list[Pack]:
        """All packs of an epoch."""
        order = permutation(len(self.examples), f"{self.key} {epoch}")
        packs = pack(self.examples.lengths[order], self.size)
        return [order[indices].tolist() for indices in packs]

    def rows_of(self, step: int) -> list[Pack]:
        """The documents of each pack of global batch `step`."""
        epoch = step // self.per_epoch
        packs = self.packs(epoch)
        order = permutation(len(packs), f"{self.key} {epoch} packs")
        return [packs[i] for i in self.of_step(order, step)]

    def costs(self, rows: list[Pack]) -> Tensor:
        """The attention cost of each pack: the sum of the squared lengths of its documents. The number of
        tokens is about the same in all packs.
        """
        return torch.stack([self.examples.lengths[documents].square().sum() for documents in rows])

    def batch(self, rows: list[Pack]) -> Batch:
        """The micro-batch of these packs, (B, T); with `flat` (1, B * T), and with `begins`. Positions count
        from 0 in each document, and again in the padding after the last.
        """
        packs = [self.items(documents) for documents in rows] or [[self.filler()]]
        batch = collate([joined(examples) for examples in packs], self.pad_id, self.multiple)
        where = [example.where for examples in packs for example in examples]
        count, length = batch.ids.shape
        positions = torch.arange(length).repeat(count, 1)  # (B, T)
        for row, examples in zip(positions, packs, strict=True):
            ends = accumulate(len(example.ids) for example in examples)
            for begin, end in pairwise([*ends, length]):
                row[begin:end] = torch.arange(end - begin)
        if not self.flat:
            return replace(batch, where=where, positions=positions)
        padded = (batch.ids, batch.labels, batch.mask, positions)
        ids, labels, mask, positions = (tensor.view(1, -1) for tensor in padded)  # (1, B * T)
        begins = (positions[0] == 0).nonzero().flatten()
        begins = F.pad(begins, (0, 1), value=positions.numel()).int()
        return Batch(ids, labels, mask, where, positions, begins, int(begins.diff().max()))

    def summary(self) -> str:
        """The text that the plan prints, with how full the packs are."""
        tokens = int(self.examples.lengths.sum())
        packs = self.rows()
        return f"{super().summary()}; {packs:,} packs of {self.size}, {tokens / packs / self.size:.1%} full"


def joined(examples: list[Example]) -> Example:
    """Concatenate examples. The first token of each gets no label, since no token before it predicts it."""
    ids = torch.cat([example.ids for example in examples])
    labels = torch.cat([example.labels for example in examples])
    begin = 0
    for example in examples:
        labels[begin] = IGNORE
        begin += len(example.labels)
    return Example(ids, labels, examples[0].where)


def pack(lengths: Tensor, size: int) -> list[Pack]:
    """Pack documents of `lengths`, (n,) int64. Returns the document indices of each pack. A pack has at most
    `size` tokens. Each document is in exactly one pack and is not cut. A million documents take about a
    second.

    Of equally long documents, the earlier one is placed first. So shuffled documents give shuffled packs.
    """
    order = lengths.argsort(descending=True, stable=True)
    packs = []
    packs_of = defaultdict(list)  # free tokens -> the packs with exactly that room
    rooms = []  # the keys of packs_of that have packs, ascending
    for document, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        i = bisect.bisect_left(rooms, length)
        if i < len(rooms):
            room = rooms[i]
            number = packs_of[room].pop()
            if not packs_of[room]:
                del rooms[i]
        else:
            room = size
            number = len(packs)
            packs.append([])
        packs[number].append(document)
        room -= length
        if not packs_of[room]:
            bisect.insort(rooms, room)
        packs_of[room].append(number)
    return packs
