"""Documents -> full rows: which go together, so that few slots stay empty. Imported only for --packing.

Best-fit-decreasing: the longest document that is left goes where it leaves least room (Johnson 1974,
https://doi.org/10.1016/S0022-0000(74)80026-7; used for packing by arXiv 2404.10830). Bins with equal room are
interchangeable, so all documents of one length are placed at once: the work grows with the lengths that there
are, not with the documents.
"""

import torch

from .errors import check
from .sharding import reshard


def pack(lengths: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(documents (n,), counts (p,)): the indices of `lengths` (n,) int64 pack by pack, and how many of them each
    pack holds. A pack has at most `size` tokens; each document is in one, whole.

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
            each = room // length  # fit into one bin one after the other, for there is no better one
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
            for remains, which in ((room - each * length, used[:full]), (room - rest * length, used[full:])):
                _add(rooms, remains, which)
            _add(rooms, room, unused)
            done, left = done + placed, left - placed
    by_bin = torch.sort(bins, stable=True).indices
    return order[by_bin], torch.bincount(bins, minlength=opened)


def _add(rooms: dict[int, torch.Tensor], room: int, bins: torch.Tensor) -> None:
    if room and len(bins):
        rooms[room] = torch.cat([rooms[room], bins]) if room in rooms else bins
