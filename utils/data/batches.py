"""Examples -> the global batches that define a run.

The order of a run is a pure function of (fingerprint, seed, step): global batch k of an epoch is rows
[k G, (k + 1) G) of the epoch's permutation, however many ranks and micro-batches share it.
"""

import heapq
import math
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..run.errors import ConfigError, check
from ..run.units import IGNORE
from .examples import Example, Examples, permutation


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B rows, padded on the right to T tokens."""

    ids: Tensor  # (B, T) int64
    labels: Tensor  # (B, T) int64; the trained tokens are those != IGNORE
    mask: Tensor  # (B, T) bool; false where padded
    where: list[str]  # the names of the rows, "chat.jsonl:3"
    positions: Tensor | None = None  # (B, T) int64 of packs: each document counts from 0
    # (N + 1,) int32 of packs in one row: where each document begins, and the last one ends
    begins: Tensor | None = None
    longest: int = 0  # tokens of a document in begins
    places: Tensor | None = None  # (n,) int64, of what predicts a trained token, in (B * T,)
    # what the model takes beside these, by its names: see PictureBatches
    extra: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Without the padding."""
        return int(self.mask.sum())

    @property
    def trained_tokens(self) -> int:
        return int((self.labels != IGNORE).sum())

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device, with its places. To a GPU it comes from page-locked memory on a stream of
        its own, while the GPU computes what was issued before.
        """

        def move(value: Tensor) -> Tensor:
            if device.type != "cuda":
                return value.to(device)
            computing, copying = torch.cuda.current_stream(device), copy_stream(device)
            with torch.cuda.stream(copying):
                value = value.pin_memory().to(device, non_blocking=True)
            computing.wait_stream(copying)
            value.record_stream(computing)  # which reads it: only then is its memory free
            return value

        after = F.pad(self.labels[:, 1:], (0, 1), value=IGNORE)
        places = (after != IGNORE).flatten().nonzero().flatten()
        fields = vars(self) | {"places": places}
        return type(self)(**tree_map_only(Tensor, move, fields))


@cache
def copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream of batches: the allocator keeps memory for each."""
    return torch.cuda.Stream(device)


def collate(items: list[Example], pad_id: int, multiple: int) -> Batch:
    """A batch as long as its longest example, rounded up to a multiple of so many tokens."""
    longest = max(len(item.ids) for item in items)
    length = math.ceil(longest / multiple) * multiple
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
    """This rank's micro-batches of each global batch; `per_epoch` global batches make an epoch.

    The last one of an epoch may be smaller: it is trained as it is. All ranks give the same number of
    micro-batches for a step, because FSDP's collectives need it; a rank without rows gives a filler, which
    has no trained token. `rank` of `ranks` counts the ranks that divide the data.
    """

    examples: Examples
    seed: int
    global_batch_size: int
    batch_size: int
    rank: int
    ranks: int
    pad_id: int
    multiple = 8  # of which rows are long, for the matrix units

    def __post_init__(self):
        self.key = f"{self.examples.fingerprint} {self.seed}"
        self.per_epoch = math.ceil(self.rows() / self.global_batch_size)

    def rows(self) -> int:
        """Rows of an epoch."""
        return len(self.examples)

    def summary(self) -> str:
        """What the plan prints."""
        return self.examples.summary()

    def rows_of(self, step: int) -> list:
        """The rows of global batch `step`, counted from 0 over all epochs, the longest first."""
        epoch = step // self.per_epoch
        order = permutation(len(self.examples), f"{self.key} {epoch}")
        rows = self.of_step(order, step)
        lengths = self.examples.lengths[rows]
        longest_first = lengths.argsort(descending=True, stable=True)
        return rows[longest_first].tolist()

    def of_step(self, order: Tensor, step: int) -> Tensor:
        """The part of an epoch's order that is global batch `step`."""
        first = step % self.per_epoch * self.global_batch_size
        return order[first : first + self.global_batch_size]

    def costs(self, rows: list) -> Tensor:
        """The work in each row, int64: here its length."""
        return self.examples.lengths[rows]

    def batch(self, rows: list) -> Batch:
        """Some rows as a micro-batch; for no rows, a filler."""
        return collate(self.items(rows) or [self.filler()], self.pad_id, self.multiple)

    def filler(self) -> Example:
        return Example(torch.tensor([self.pad_id]), torch.tensor([IGNORE]), "filler")

    def items(self, rows: list[int]) -> list[Example]:
        """The sequences of some examples."""
        return [self.examples[row] for row in rows]

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global batch `step`; rows of similar length are together. The loss is
        a sum over the global batch, so it does not matter which rank has which row.
        """
        return [self.batch(rows) for rows in self.shares(step)[self.rank]]

    def shares(self, step: int) -> list[list[list]]:
        """The rows of each micro-batch of each rank."""
        return self.dealt(self.rows_of(step))

    def dealt(self, rows: list) -> list[list[list]]:
        """Some rows as micro-batches of each rank; every rank has as many."""
        starts = range(0, math.ceil(len(rows) / self.ranks), self.batch_size)
        return [
            [[rows[i] for i in share[start : start + self.batch_size]] for start in starts]
            for share in deal(self.costs(rows), self.ranks)
        ]


def deal(costs: Tensor, ranks: int) -> list[list[int]]:
    """Each rank's rows, of which costs (n,) int64 are known: equal sums as far as possible, and numbers of
    rows that differ by at most one.

    Greedy: the most expensive row goes first, to the rank with the lowest sum so far.
    """
    most_rows = math.ceil(len(costs) / ranks)
    shares: list[list[int]] = [[] for _ in range(ranks)]
    open_ranks = [(0, rank) for rank in range(ranks)]  # a heap of (sum, rank)
    order = costs.argsort(descending=True, stable=True)
    for row, cost in zip(order.tolist(), costs[order].tolist(), strict=True):
        load, rank = heapq.heappop(open_ranks)
        shares[rank].append(row)
        if len(shares[rank]) < most_rows:
            heapq.heappush(open_ranks, (load + cost, rank))
    return shares


def divide_batch(
    batch_size: int, grad_accum: int, global_batch_size: int, ranks: int
) -> tuple[int, int]:
    """(the global batch, micro-batches of a rank in it), in sequences or packs. 0: follows from the others.

    ranks: those that divide the data. ConfigError where the sizes contradict each other names those that
    would fit.
    """
    at_once = batch_size * ranks
    global_batch_size = global_batch_size or at_once * max(1, grad_accum)
    micro_batches, remainder = divmod(global_batch_size, at_once)
    product = f"--batch_size {batch_size} x {ranks} ranks"
    if remainder:
        divisors = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
        sizes = [n // ranks for n in divisors if n % ranks == 0]
        fix = f"{', '.join(map(str, divisors))} ranks"
        if sizes:
            fix = f"--batch_size {', '.join(map(str, sizes))}"
        text = f"--global_batch_size {global_batch_size} is no multiple of {product}"
        raise ConfigError(f"{text} (fix: {fix})")
    text = f"--grad_accum {grad_accum} x {product} is not --global_batch_size {global_batch_size}"
    check(grad_accum in (0, micro_batches), f"{text} (fix: leave one of them out)")
    return global_batch_size, micro_batches
