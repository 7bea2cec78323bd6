"""The largest micro-batch and the longest row that fit."""

from collections.abc import Callable
from dataclasses import replace

STEP = 64  # of the length of a row
MOST = 2**16  # rows, or steps of a row's length


def largest_batch(planner, knobs, device_bytes: float, host_bytes: float) -> int:
    """The most rows of a micro-batch that fit; 0 where one does not."""

    def over(rows: int) -> float:
        more = replace(knobs, batch_size=rows)
        return planner.over(planner.quick(more), device_bytes, host_bytes)

    return most(over, 1)


def longest(planner, knobs, device_bytes: float, host_bytes: float) -> int:
    """The longest row that fits alone, in steps of 64 tokens; 0 where none does.

    The search begins at a length whose loss has three chunks, since shorter rows need a run of their own.
    """
    one, needs = replace(knobs, batch_size=1), {}

    def over(steps: int) -> float:
        needs[steps] = planner.quick(one, STEP * steps)
        return planner.over(needs[steps], device_bytes, host_bytes)

    first = min(2 * planner.formulas.chunk_tokens // STEP + 1, MOST)
    if over(first) > 0 and needs[first].peak:
        parts = needs[first].peak.parts
        tokens = parts.get("activations", 0) + parts.get("loss", 0)
        # not even with none of what grows with the tokens
        if over(first) > planner.reserved(tokens):
            return 0
    return STEP * most(over, first)


def most(over: Callable[[int], float], first: int) -> int:
    """The largest number of at most MOST that fits, 0 where 1 does not. over: bytes too many, which grow with
    the number; 0 or less fits. first: where to begin.

    A number is guessed by a line through the two that enclose it. Where that narrows them little, their
    middle follows, as in bisection.
    """
    low, high = first, MOST
    low_over, high_over = over(low), None
    if low_over > 0:
        low, high, high_over = 1, low, low_over
        low_over = over(low)
    if low_over > 0:
        return 0
    high_over = over(high) if high_over is None else high_over
    if high_over <= 0:
        return high
    halve = False
    while high - low > 1:
        before = high - low
        part = 0.5 if halve else -low_over / (high_over - low_over)
        at = min(max(low + int(before * part), low + 1), high - 1)
        at_over = over(at)
        if at_over > 0:
            high, high_over = at, at_over
        else:
            low, low_over = at, at_over
        halve = high - low > before / 2
    return low
