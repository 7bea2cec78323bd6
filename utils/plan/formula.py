"""The trace of a step for any rows and tokens, from one run without memory.

Rows, tokens of a row and tokens of the loss's last chunk are primes in that run, and no size of the model is
a multiple of one. So the bytes of a storage tell how many times each prime is among their factors, and the
bytes for other rows and tokens follow. This holds as long as the same operations run. Where they change, as
at the width of a window, another formula begins.
"""

from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy

from .trace import Record, Trace

Sizes = tuple[int, int, int]  # rows, tokens of a row, tokens of the loss's last chunk
Part = tuple[int, bool]  # (in which segment, whether in the loss's second chunk)

LONGEST = 2**22  # tokens of a row, up to which a change of the operations is looked for
SHORTEST = 64
# where the search for primes begins
FIRST_ROWS = 101
FIRST_TOKENS = 1009
FIRST_LAST = 31
COMPARED = 2  # runs of a model that are made both on fake and on meta tensors, at different lengths


@dataclass(frozen=True)
class Products:
    """Numbers, each a factor times powers of rows, tokens of a row and tokens of the last chunk."""

    factors: numpy.ndarray  # (numbers,)
    powers: numpy.ndarray  # (3, numbers)

    def at(self, sizes: Sizes) -> numpy.ndarray:
        bases = numpy.array(sizes, dtype=float)[:, None]
        return self.factors * (bases**self.powers).prod(0)


def products_of(numbers: list[int], primes: Sizes) -> Products:
    """primes: the sizes of the run that gave the numbers; 1 where a size is fixed."""
    factors = []
    powers = []
    for number in numbers:
        factor = number
        exponents = []
        for prime in primes:
            exponent = 0
            while prime > 1 and factor > 0 and factor % prime == 0:
                factor //= prime
                exponent += 1
            exponents.append(exponent)
        factors.append(float(factor))
        powers.append(exponents)
    return Products(numpy.array(factors), columns(powers))


def columns(powers: list) -> numpy.ndarray:
    """(3, numbers), also for no numbers."""
    return numpy.array(powers).reshape(-1, 3).T


@dataclass(frozen=True)
class Sum:
    """Many numbers of a step, of which only the sum counts. Those of one part and the same powers are one."""

    products: Products
    parts: list[Part]

    def at(self, times: list[int], chunks: int, sizes: Sizes) -> float:
        """times: of each segment in a step. chunks: of the loss."""
        counts = []
        for segment, is_second_chunk in self.parts:
            # The second chunk stands for all between the first and the last.
            chunk_count = max(chunks - 2, 0) if is_second_chunk else 1
            counts.append(times[segment] * chunk_count)
        numbers = self.products.at(sizes)
        return float((numbers * counts).sum())


def summed(numbers: list[int], parts: list[Part], primes: Sizes) -> Sum:
    """parts: of each number. primes: as in products_of."""
    products = products_of(numbers, primes)
    factor_of = {}
    for i, part in enumerate(parts):
        key = (part, tuple(products.powers[:, i]))
        factor_of[key] = factor_of.get(key, 0.0) + products.factors[i]
    factors = numpy.array(list(factor_of.values()))
    powers = columns([powers for _, powers in factor_of])
    return Sum(Products(factors, powers), [part for part, _ in factor_of])


class Formula:
    """What a record says, for any sizes. primes: those of its run, as in products_of."""

    def __init__(self, record: Record, primes: Sizes):
        self.record = record
        self.bytes = products_of(record.sizes, primes)
        self.flops = summed(record.flops, record.flop_parts, primes)
        self.moved = summed(record.moved, record.moved_parts, primes)

    def trace(self, sizes: Sizes) -> Trace:
        return self.record.trace(self.bytes.at(sizes))

    def cost(self, chunks: int, sizes: Sizes) -> tuple[float, float]:
        """(floating-point operations, bytes read or written by other operations) of a micro-batch, forward
        and backward.
        """
        times = self.record.times()
        flops = self.flops.at(times, chunks, sizes)
        moved_bytes = self.moved.at(times, chunks, sizes)
        return flops, moved_bytes

    def gives(self, record: Record, sizes: Sizes) -> bool:
        """Whether this record, with the loss in one chunk, is what follows for these sizes."""
        own = self.record
        if own.events != record.events:
            return False
        if own.marks != record.marks or own.inputs != record.inputs:
            return False
        numbers = numpy.array(record.sizes, dtype=float)
        return bool((self.bytes.at(sizes) == numbers).all())


def prime_from(first: int, sizes: set[int]) -> int:
    """The first prime, from `first` on, that divides none of the sizes."""
    number = first
    while not is_prime(number) or any(size % number == 0 for size in sizes):
        number += 1
    return number


def is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, int(number**0.5) + 1))


@dataclass
class Formulas:
    """Formulas of a model's steps, each found once.

    record: runs a step of a kind, for rows, tokens, chunks of the loss, and on meta tensors or fake ones (see
    trace.record_step). sizes: all that a dimension of a tensor may be, in a step of a kind. chunk_tokens: of
    the loss. hints: tokens at which the operations may change, which are tried first.
    """

    record: Callable[[Hashable, int, int, list | None, bool], Record]
    sizes: Callable[[Hashable], set[int]]
    chunk_tokens: int
    hints: list[int]
    edges: list[int] | None = None  # tokens at which the operations change
    alone: bool = False  # whether one row is not like many
    on_meta: bool = True  # whether meta tensors have given what fake ones gave
    compared: int = 0  # times that they were compared
    known: dict = field(default_factory=dict)

    def trace(self, kind: Hashable, rows: int, tokens: int) -> Trace:
        """What trace_step gives for these, to the byte."""
        _, last = self.chunks(rows, tokens)
        formula = self.at(kind, rows, tokens)
        return formula.trace((rows, tokens, last))

    def cost(self, kind: Hashable, rows: int, tokens: int) -> tuple[float, float]:
        """See Formula.cost."""
        chunks, last = self.chunks(rows, tokens)
        formula = self.at(kind, rows, tokens)
        return formula.cost(chunks, (rows, tokens, last))

    def chunks(self, rows: int, tokens: int) -> tuple[int, int]:
        """(chunks of the loss, tokens of the last one)."""
        total = rows * tokens
        chunks = -(-total // self.chunk_tokens)  # rounded up
        last = total - (chunks - 1) * self.chunk_tokens
        return chunks, last

    def run(self, kind: Hashable, rows: int, tokens: int, bounds: list) -> Record:
        """On meta tensors, if the model's first runs give on them what they give on fake ones."""
        on_meta = None
        if self.on_meta:
            try:
                on_meta = self.record(kind, rows, tokens, bounds, True)
            except (
                Exception
            ):  # a model is someone else's program, and may look at values or devices
                self.on_meta = False
        if on_meta and self.compared == COMPARED:
            return on_meta
        on_fake = self.record(kind, rows, tokens, bounds, False)
        self.compared += 1
        self.on_meta = on_meta == on_fake
        return on_fake

    def at(self, kind: Hashable, rows: int, tokens: int) -> Formula:
        if self.edges is None:
            self.find_edges(kind)
        chunks, _ = self.chunks(rows, tokens)
        chunks = min(3, chunks)
        part = bisect_left(self.edges, tokens + 1)
        key = (kind, self.alone and rows == 1, part, chunks)
        if key not in self.known:
            self.known[key] = self.find(*key)
        if self.known[key] is None:
            key = (kind, rows, tokens)
        if key not in self.known:
            record = self.record(kind, rows, tokens, None, False)
            self.known[key] = Formula(record, (1, 1, 1))
        return self.known[key]

    def find(self, kind: Hashable, alone: bool, part: int, chunks: int) -> Formula | None:
        """None where there is no prime number of tokens between two edges."""
        bounds_of_parts = [0, *self.edges, LONGEST * 2]
        begin = bounds_of_parts[part]
        end = bounds_of_parts[part + 1]
        chunk = self.chunk_tokens
        sizes = self.sizes(kind) | {chunk}  # of dimensions
        if chunks == 1:
            last = 1
            needed = 1  # tokens of all rows
        else:
            last = prime_from(FIRST_LAST, sizes)
            needed = (chunks - 1) * chunk + last
        tokens = prime_from(max(begin, needed if alone else FIRST_TOKENS), sizes)
        if tokens >= end:
            tokens = prime_from(max(begin, min(end // 2, FIRST_TOKENS // 2)), sizes)
        rows = 1 if alone else prime_from(max(FIRST_ROWS, needed // tokens + 1), sizes)
        if tokens >= end or rows * tokens < needed:
            return None
        if chunks == 1:
            bounds = [(0, rows * tokens)]
        else:
            bounds = [(i * chunk, (i + 1) * chunk) for i in range(chunks - 1)]
            bounds.append((needed - last, needed))
        record = self.run(kind, rows, tokens, bounds)
        return Formula(record, (rows, tokens, last))

    def find_edges(self, kind: Hashable) -> None:
        """Where the operations change between SHORTEST and LONGEST tokens, if those of the two differ."""
        sizes = self.sizes(kind)
        rows = prime_from(FIRST_ROWS, sizes)
        edges = []
        begin = SHORTEST
        while True:
            tokens = prime_from(begin, sizes)
            record = self.run(kind, rows, tokens, [(0, rows * tokens)])
            formula = Formula(record, (rows, tokens, 1))
            if not self.changed(formula, kind, 1, LONGEST):
                break
            if not self.changed(formula, kind, 2, LONGEST):
                self.alone = True
                break
            begin = self.next_change(formula, kind, tokens)
            edges.append(begin)
        self.edges = edges  # not before: a run that fails leaves nothing half known

    def next_change(self, formula: Formula, kind: Hashable, tokens: int) -> int:
        """The first length after `tokens` whose operations are not those of the formula."""

        def changed(length: int) -> bool:
            return self.changed(formula, kind, 2, length)

        points = {tokens, LONGEST}
        for hint in self.hints:
            points |= {at for at in (hint, hint + 1) if tokens < at < LONGEST}
        points = sorted(points)
        place = bisect_left(points, True, lo=1, key=changed)
        between = range(points[place - 1], points[place])
        return between.start + bisect_left(between, True, lo=1, key=changed)

    def changed(self, formula: Formula, kind: Hashable, rows: int, tokens: int) -> bool:
        record = self.run(kind, rows, tokens, [(0, rows * tokens)])
        return not formula.gives(record, (rows, tokens, 1))
