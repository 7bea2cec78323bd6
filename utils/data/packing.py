"""Documents -> packs: which documents share a row, so that few slots stay empty.

Best-fit-decreasing: the longest document that is not placed yet goes into the pack in which it leaves the
least room (Johnson 1974, https://doi.org/10.1016/S0022-0000(74)80026-7; arXiv 2404.10830 packs with it).
Packs with equal room are interchangeable, so all documents of one length are placed at once: the work grows
with the number of different lengths, not with the number of documents.
"""

import heapq
import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..run.units import IGNORE
from .batches import Batch, GlobalBatches, collate, permutation
from .examples import Example

Pack = list[int]  # the numbers of its documents


@dataclass(eq=False)
class PackedBatches(GlobalBatches):
    """GlobalBatches whose rows are packs of at most `size` tokens. Each epoch packs the documents
    differently, but into the same number of packs.
    """

    size: int
    flat: bool = False  # all packs of a batch lie in one row

    def rows(self) -> int:
        """Packs of an epoch."""
        return len(self.packs(0)[1]) - 1

    @lru_cache(maxsize=1)  # noqa: B019 - a run has one loader of packs
    def packs(self, epoch: int) -> tuple[Tensor, Tensor]:
        """(the documents pack by pack, where each pack begins and the last one ends)."""
        order = permutation(len(self.examples), f"{self.key} {epoch}")
        documents, counts = pack(self.examples.lengths[order], self.size)
        return order[documents], F.pad(counts.cumsum(0), (1, 0))

    def rows_of(self, step: int) -> list[Pack]:
        """The documents of each pack of global batch `step`."""
        epoch = step // self.per_epoch
        documents, begins = self.packs(epoch)
        order = permutation(len(begins) - 1, f"{self.key} {epoch} packs")
        return [
            documents[begins[i] : begins[i + 1]].tolist()
            for i in self.of_step(order, step).tolist()
        ]

    def deal(self, rows: list[Pack]) -> list[list[Pack]]:
        """Each rank's packs, with equal work of attention, the sum of the squared lengths of the documents:
        in tokens the packs are equally long anyway.
        """
        lengths = self.examples.lengths
        costs = torch.stack([lengths[documents].square().sum() for documents in rows])
        shares = deal(costs, self.ranks)
        return [[rows[i] for i in share] for share in shares]

    def batch(self, rows: list[Pack]) -> Batch:
        packs = [[self.examples[i] for i in documents] for documents in rows]
        batch = super().batch([])
        where = batch.where
        if packs:
            batch = collate([joined(examples) for examples in packs], self.pad_id)
            where = [example.where for examples in packs for example in examples]
        rows_padded, length = batch.ids.shape
        positions = torch.arange(length).repeat(rows_padded, 1)  # (B, T)
        for row, examples in zip(positions, packs, strict=False):  # a filler has a row and no pack
            end = 0
            for example in examples:
                end += len(example.ids)
                row[end:] = torch.arange(length - end)
        shape = (1, -1) if self.flat else batch.ids.shape  # (1, B * T), else (B, T)
        tensors = (batch.ids, batch.labels, batch.mask)
        return Batch(*(tensor.view(shape) for tensor in tensors), where, positions.view(shape))

    def summary(self) -> str:
        """What the plan prints: also how full the packs are."""
        tokens = int(self.examples.lengths.sum())
        packs = self.rows()
        fill = f"{packs:,} packs of {self.size}, {tokens / packs / self.size:.1%} full"
        return f"{super().summary()}; {fill}"


def joined(examples: list[Example]) -> Example:
    """Several examples as one. No label is left at the first token of each: nothing before it predicts it."""
    ids = torch.cat([example.ids for example in examples])
    labels = torch.cat([example.labels for example in examples])
    begin = 0
    for example in examples:
        labels[begin] = IGNORE
        begin += len(example.labels)
    return Example(ids, labels, examples[0].where)


def deal(costs: Tensor, ranks: int) -> list[list[int]]:
    """Each rank's rows, of which costs (n,) int64 are known: equal sums as far as possible, and numbers of
    rows that differ by at most one.

    Greedy: the most expensive row goes first, to the rank with the lowest sum so far.
    """
    most_rows = math.ceil(len(costs) / ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]  # a heap of (sum, rank)
    order = torch.sort(costs, descending=True, stable=True).indices
    for row, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, rank = heapq.heappop(open_ranks)
        shares[rank].append(row)
        if len(shares[rank]) < most_rows:
            heapq.heappush(open_ranks, (load + cost, rank))
    return shares


def pack(lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(documents (n,), counts (p,)): the indices of `lengths` (n,) int64 pack by pack, and how many of them
    each pack holds. A pack has at most `size` tokens; each document is in exactly one, whole.

    Of equally long documents the earlier one is placed first, so shuffled documents give shuffled packs.
    """
    order = torch.sort(lengths, descending=True, stable=True).indices
    values, counts = torch.unique_consecutive(lengths[order], return_counts=True)
    assert not len(values) or values[0] <= size, "a document is longer than a pack"
    pack_of = torch.empty(len(lengths), dtype=torch.int64)  # of each document, in the order `order`
    rooms: dict[int, Tensor] = {}  # free tokens -> the packs with exactly that room
    opened = 0
    placed = 0
    groups = zip(values.tolist(), counts.tolist(), strict=True)
    for length, unplaced in groups:
        fitting_rooms = sorted(room for room in rooms if room >= length)
        for room in [*fitting_rooms, size]:
            if not unplaced:
                break
            # Fill one pack after the other: a pack that has just got such a document fits best.
            per_pack = room // length
            wanted = -(-unplaced // per_pack)
            if room in rooms:
                candidates = rooms.pop(room)
            else:
                candidates = torch.arange(opened, opened + wanted)
                opened += wanted
            used = candidates[:wanted]
            count = min(unplaced, per_pack * len(used))
            slots = used.repeat_interleave(per_pack)
            pack_of[placed : placed + count] = slots[:count]
            full_packs, in_last_pack = divmod(count, per_pack)
            _add(rooms, room - per_pack * length, used[:full_packs])
            _add(rooms, room - in_last_pack * length, used[full_packs:])
            _add(rooms, room, candidates[wanted:])
            placed += count
            unplaced -= count
    by_pack = torch.sort(pack_of, stable=True).indices
    return order[by_pack], torch.bincount(pack_of, minlength=opened)


def _add(rooms: dict[int, Tensor], room: int, packs: Tensor) -> None:
    if room and len(packs):
        rooms[room] = torch.cat([rooms.get(room, packs[:0]), packs])
