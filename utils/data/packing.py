"""Documents -> full rows: which go together, so that few slots stay empty. Imported only for --packing.

Best-fit-decreasing: the longest document that is left goes where it leaves least room (Johnson 1974,
https://doi.org/10.1016/S0022-0000(74)80026-7; used for packing by arXiv 2404.10830). Bins with equal room are
interchangeable, so all documents of one length are placed at once: the work grows with the lengths that there
are, not with the documents.
"""

import math
from itertools import product

import torch
import torch.nn.functional as F

from ..run.units import IGNORE
from .batches import Batch, GlobalBatches, collate, permutation
from .examples import Example


class PackedBatches(GlobalBatches):
    """GlobalBatches whose rows are packs of at most `size` tokens. Which documents go together changes with
    the epoch, how many packs there are does not.
    """

    def __init__(
        self, examples, seed, global_batch_size, batch_size, rank, ranks, pad_id, size: int
    ):
        # flat: the packs of a batch lie in one row
        self.size, self.flat, self._epoch = size, False, -1
        super().__init__(examples, seed, global_batch_size, batch_size, rank, ranks, pad_id)

    def rows(self) -> int:
        self._pack(0)
        return len(self._begins) - 1

    def _pack(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        order = permutation(len(self.examples), f"{self.key} {epoch}")
        documents, counts = pack(self.examples.lengths[order], self.size)
        self._epoch, self._documents, self._begins = (
            epoch,
            order[documents],
            F.pad(counts.cumsum(0), (1, 0)),
        )

    def rows_of(self, step: int) -> list[list[int]]:
        """The documents of each pack of global batch `step`."""
        epoch, k = divmod(step, self.per_epoch)
        self._pack(epoch)
        order = permutation(len(self._begins) - 1, f"{self.key} {epoch} packs")
        chosen = order[k * self.global_batch_size : (k + 1) * self.global_batch_size]
        spans = zip(self._begins[chosen].tolist(), self._begins[chosen + 1].tolist(), strict=True)
        return [self._documents[begin:end].tolist() for begin, end in spans]

    def deal(self, rows: list[list[int]]) -> list[list[list[int]]]:
        """By the squares of the documents' lengths, the work of attention: packs are equally long."""
        return deal(
            rows,
            [float(self.examples.lengths[row].double().square().sum()) for row in rows],
            self.ranks,
        )

    def batch(self, rows: list[list[int]]) -> Batch:
        packs = [[self.examples[i] for i in row] for row in rows]
        batch = (
            collate([joined(items) for items in packs], self.pad_id) if packs else super().batch([])
        )
        positions = torch.arange(batch.ids.shape[1]).repeat(len(batch.ids), 1)
        for row, items in zip(positions, packs, strict=False):
            end = 0
            for item in items:
                end += len(item.ids)
                row[end:] = torch.arange(len(row) - end)
        parts = (batch.ids, batch.labels, batch.mask, positions)
        ids, labels, mask, positions = (part.view(1, -1) for part in parts) if self.flat else parts
        where = [item.where for items in packs for item in items]
        return Batch(ids, labels, mask, where or batch.where, positions)

    def summary(self) -> str:
        """What the plan prints: also how full the packs are, and how evenly they are dealt."""
        tokens, packs = int(self.examples.lengths.sum()), len(self._begins) - 1
        worst = []
        for step in range(min(self.per_epoch, 32)):
            squares = [
                sum(float(self.examples.lengths[row].double().square().sum()) for row in hand)
                for hand in self.deal(self.rows_of(step))
            ]
            worst.append(max(squares) / (sum(squares) / len(squares)))
        fill = f"{packs:,} packs of {self.size}, {tokens / packs / self.size:.1%} full"
        return f"{super().summary()}; {fill}, busiest rank's attention / mean {sum(worst) / len(worst):.3f}"


def joined(items: list[Example]) -> Example:
    """Several examples as one; the first token of each has nothing before it to predict it."""
    labels = [F.pad(item.labels[1:], (1, 0), value=IGNORE) for item in items]
    return Example(torch.cat([item.ids for item in items]), torch.cat(labels), items[0].where)


def deal(rows: list, costs: list[float], ranks: int) -> list[list]:
    """Each rank's rows: costs alike, numbers that differ by at most one.

    Greedily, the dearest row first to whom has least; then rows change places between the rank that has most
    and the one that has least, while that helps.
    """
    most = math.ceil(len(rows) / ranks)
    hands, loads = [[] for _ in range(ranks)], [0.0] * ranks
    for row in sorted(range(len(rows)), key=costs.__getitem__, reverse=True):
        rank = min((r for r in range(ranks) if len(hands[r]) < most), key=loads.__getitem__)
        hands[rank].append(row)
        loads[rank] += costs[row]
    for _ in range(4 * ranks):
        low, high = (pick(range(ranks), key=loads.__getitem__) for pick in (min, max))
        gap = loads[high] - loads[low]
        pairs = product(range(len(hands[high])), range(len(hands[low])))
        swaps = {(i, j): costs[hands[high][i]] - costs[hands[low][j]] for i, j in pairs}
        i, j = min(swaps, key=lambda pair: abs(swaps[pair] - gap / 2), default=(0, 0))
        if not 0 < swaps.get((i, j), 0) < gap:
            break
        hands[high][i], hands[low][j] = hands[low][j], hands[high][i]
        loads[high], loads[low] = loads[high] - swaps[i, j], loads[low] + swaps[i, j]
    return [[rows[i] for i in hand] for hand in hands]


def pack(lengths: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(documents (n,), counts (p,)): the indices of `lengths` (n,) int64 pack by pack, and how many of them
    each pack holds. A pack has at most `size` tokens; each document is in one, whole.

    Of documents equally long the earlier one goes first, so whoever shuffles them shuffles the packs.
    """
    order = torch.sort(lengths, descending=True, stable=True).indices
    values, counts = torch.unique_consecutive(lengths[order], return_counts=True)
    assert not len(values) or values[0] <= size, "a document is longer than a pack"
    bins = torch.empty(len(lengths), dtype=torch.int64)  # of each document, in the order `order`
    rooms: dict[int, torch.Tensor] = {}  # room that is left -> the bins with so much
    opened = done = 0
    for length, left in zip(values.tolist(), counts.tolist(), strict=True):
        for room in [*sorted(r for r in rooms if r >= length), size]:
            if not left:
                break
            # fit into one bin one after the other, for there is no better one
            each = room // length
            wanted = -(-left // each)
            if room in rooms:
                found = rooms.pop(room)
            else:
                found = torch.arange(opened, opened + wanted)
                opened += wanted
            used, unused = found[:wanted], found[wanted:]
            placed = min(left, each * len(used))
            bins[done : done + placed] = used.repeat_interleave(each)[:placed]
            full, rest = divmod(placed, each)
            for remains, which in (
                (room - each * length, used[:full]),
                (room - rest * length, used[full:]),
            ):
                _add(rooms, remains, which)
            _add(rooms, room, unused)
            done, left = done + placed, left - placed
    by_bin = torch.sort(bins, stable=True).indices
    return order[by_bin], torch.bincount(bins, minlength=opened)


def _add(rooms: dict[int, torch.Tensor], room: int, bins: torch.Tensor) -> None:
    if room and len(bins):
        rooms[room] = torch.cat([rooms[room], bins]) if room in rooms else bins
