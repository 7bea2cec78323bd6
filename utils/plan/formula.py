"""The trace of a step for any rows and tokens, from one run on fake tensors.

Rows, tokens of a row and tokens of the loss's last chunk are primes in that run, and no size of the model is
a multiple of one. So the bytes of a storage tell how many times each is among their factors, and the bytes
for other rows and tokens follow. That holds as long as the same operations run. Where they change, as at the
width of a window, another formula begins.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy

from .trace import Record, Trace

LONGEST = 2**22  # tokens of a row, up to which a change of the operations is looked for
SHORTEST = 64
# where the search for primes begins: rows, tokens, tokens of the last chunk
FIRST = (101, 1009, 31)


@dataclass(frozen=True)
class Products:
    """Numbers, each a factor times powers of rows, tokens of a row and tokens of the last chunk."""

    factors: numpy.ndarray  # (numbers,)
    powers: numpy.ndarray  # (3, numbers)

    def at(self, rows: int, tokens: int, last: int) -> numpy.ndarray:
        bases = numpy.array([[rows], [tokens], [last]], dtype=float)
        return self.factors * (bases**self.powers).prod(0)


def products_of(numbers: list[int], primes: tuple[int, int, int]) -> Products:
    """primes: the rows, tokens and last chunk of the run that gave the numbers; 1 where one is fixed."""
    factors, powers = [], []
    for number in numbers:
        times = [0, 0, 0]
        for i, prime in enumerate(primes):
            while prime > 1 and number and number % prime == 0:
                number //= prime
                times[i] += 1
        factors.append(float(number))
        powers.append(times)
    return Products(numpy.array(factors), numpy.array(powers).reshape(-1, 3).T)


class Formula:
    """What a record says, for any rows and tokens. primes: its own, see products_of."""

    def __init__(self, record: Record, primes: tuple[int, int, int]):
        self.record = record
        self.sizes = products_of(record.sizes, primes)
        # (products, parts): of what a step computes only sums count.
        self.flops = sums_of(record.flops, record.flop_parts, primes)
        self.moved = sums_of(record.moved, record.moved_parts, primes)

    def trace(self, *at: int) -> Trace:
        return self.record.trace(self.sizes.at(*at))

    def cost(self, chunks: int, *at: int) -> tuple[float, float]:
        """(floating-point operations, bytes read or written by others) of a micro-batch, forward and
        backward.
        """
        times = self.record.times()
        found = []
        for products, parts in (self.flops, self.moved):
            counts = [times[i] * (max(chunks - 2, 0) if middle else 1) for i, middle in parts]
            found.append(float((products.at(*at) * counts).sum()))
        return found[0], found[1]

    def gives(self, other: Record, rows: int, tokens: int) -> bool:
        """Whether `other`, with the loss in one chunk, is what follows for these rows and tokens."""
        mine = self.record
        same = (mine.events, mine.marks, mine.inputs) == (other.events, other.marks, other.inputs)
        sizes = numpy.array(other.sizes, dtype=float)
        return same and bool((self.sizes.at(rows, tokens, 1) == sizes).all())


def sums_of(numbers: list[int], parts: list, primes: tuple[int, int, int]) -> tuple[Products, list]:
    """The numbers as products, those of one part and of the same powers in one; and the parts."""
    products, sums = products_of(numbers, primes), Counter()
    for factor, powers, part in zip(products.factors, products.powers.T, parts, strict=True):
        sums[part, tuple(powers)] += factor
    powers = numpy.array([power for _, power in sums]).reshape(-1, 3).T
    return Products(numpy.array(list(sums.values())), powers), [part for part, _ in sums]


def prime_from(first: int, sizes: set[int]) -> int:
    """The first prime from there on that divides none of the sizes."""
    while any(first % i == 0 for i in range(2, int(first**0.5) + 1)) or any(
        n % first == 0 for n in sizes
    ):
        first += 1
    return first


@dataclass
class Formulas:
    """Formulas of a model's steps, each found once.

    record: of a kind of step, rows, tokens, and chunks of the loss (see trace.record_step). sizes: all that a
    dimension of a tensor may be, of such a kind. chunk_tokens: of the loss. hints: tokens at which the
    operations may change, which are tried first.
    """

    record: Callable[[Hashable, int, int, list | None], Record]
    sizes: Callable[[Hashable], set[int]]
    chunk_tokens: int
    hints: list[int]
    edges: list[int] | None = None  # tokens at which the operations change
    alone: bool = False  # whether one row is not like many
    known: dict = field(default_factory=dict)

    def trace(self, kind: Hashable, rows: int, tokens: int) -> Trace:
        """What trace_step gives for these, to the byte."""
        return self.at(kind, rows, tokens).trace(rows, tokens, self.chunks(rows, tokens)[1])

    def cost(self, kind: Hashable, rows: int, tokens: int) -> tuple[float, float]:
        """See Formula.cost."""
        chunks, last = self.chunks(rows, tokens)
        return self.at(kind, rows, tokens).cost(chunks, rows, tokens, last)

    def chunks(self, rows: int, tokens: int) -> tuple[int, int]:
        """(chunks of the loss, tokens of the last one)."""
        chunks = -(-rows * tokens // self.chunk_tokens)
        return chunks, rows * tokens - (chunks - 1) * self.chunk_tokens

    def at(self, kind: Hashable, rows: int, tokens: int) -> Formula:
        if self.edges is None:
            self.find_edges(kind)
        chunks = min(3, self.chunks(rows, tokens)[0])
        key = kind, self.alone and rows == 1, bisect_left(self.edges, tokens + 1), chunks
        if key not in self.known:
            self.known[key] = self.find(*key)
        if self.known[key] is None:
            key = kind, rows, tokens
            self.known[key] = Formula(self.record(kind, rows, tokens, None), (1, 1, 1))
        return self.known[key]

    def find(self, kind: Hashable, alone: bool, part: int, chunks: int) -> Formula | None:
        """None where there is no prime number of tokens between two edges."""
        begin, end = ([0, *self.edges][part], [*self.edges, LONGEST * 2][part])
        sizes, chunk = self.sizes(kind) | {self.chunk_tokens}, self.chunk_tokens
        last = 1 if chunks == 1 else prime_from(FIRST[2], sizes)
        needed = 1 if chunks == 1 else (chunks - 1) * chunk + last
        tokens = prime_from(max(begin, needed if alone else FIRST[1]), sizes)
        if tokens >= end:
            tokens = prime_from(max(begin, min(end // 2, FIRST[1] // 2)), sizes)
        rows = 1 if alone else prime_from(max(FIRST[0], needed // tokens + 1), sizes)
        if tokens >= end or rows * tokens < needed:
            return None
        firsts = [(i * chunk, (i + 1) * chunk) for i in range(chunks - 1)]
        bounds = [*firsts, ((chunks - 1) * chunk, (chunks - 1) * chunk + last)]
        record = self.record(kind, rows, tokens, [(0, rows * tokens)] if chunks == 1 else bounds)
        return Formula(record, (rows, tokens, last))

    def find_edges(self, kind: Hashable) -> None:
        """Where the operations change between SHORTEST and LONGEST tokens, if those of the two differ."""
        sizes, edges, begin = self.sizes(kind), [], SHORTEST
        rows = prime_from(FIRST[0], sizes)
        while True:
            tokens = prime_from(begin, sizes)
            one = [(0, rows * tokens)]
            formula = Formula(self.record(kind, rows, tokens, one), (rows, tokens, 1))

            def changed(at: int, count: int, formula: Formula = formula) -> bool:
                return not formula.gives(self.record(kind, count, at, [(0, count * at)]), count, at)

            if not changed(LONGEST, 1):
                self.edges = edges  # not before: a run that fails leaves nothing half known
                return
            if not changed(LONGEST, 2):
                self.edges, self.alone = edges, True
                return
            points = sorted(
                {at + i for at in self.hints for i in (0, 1) if tokens < at + i < LONGEST}
            )
            points = [tokens, *points, LONGEST]
            place = bisect_left(points, True, lo=1, key=lambda at: changed(at, 2))
            between = range(points[place - 1], points[place])
            begin = between.start + bisect_left(between, True, lo=1, key=lambda at: changed(at, 2))
            edges.append(begin)
