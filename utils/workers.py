"""Rows -> token ids by as many processes as there are cores. It needs no torch: see encode.py."""

import multiprocessing
import os
import signal
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial

from .errors import ConfigError
from .orphans import die_with_parent

ROWS, BYTES = 256, 2**20  # of a file's rows, and of lines also bytes, that a process gets at a time


def encoded(found: Iterable, encode: partial) -> Iterator:
    """encode(rows) of a few rows at a time, in their order, by as many processes as there are cores."""
    processes, waiting = len(os.sched_getaffinity(0)), deque()
    context = multiprocessing.get_context("spawn")  # a fork would copy threads of torch and gloo in any state
    pool = ProcessPoolExecutor(processes, context, _start, (encode, os.getpid()))
    try:
        for rows in chunks(found):
            with no_main():
                waiting.append(pool.submit(_encode, rows))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        fix = "more host memory, or taskset to fewer cores"
        raise ConfigError(
            f"a process that tokenizes was killed, most likely for memory (fix: {fix})"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def no_main() -> Iterator[None]:
    """Processes that start meanwhile do not import the file that this one runs, as they would: a recipe takes
    seconds, and all that they need comes with `encode`.
    """
    main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def chunks(found: Iterable) -> Iterator[list]:
    rows, size = [], 0
    for where, value in found:
        rows.append((where, value))
        size += len(value) if isinstance(value, bytes) else 0
        if len(rows) == ROWS or size > BYTES:
            yield rows
            rows, size = [], 0
    yield rows


def _start(encode: partial, parent: int) -> None:
    global _encode_rows
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes of a terminal: one answers
    die_with_parent()
    if os.getppid() != parent:  # it died while this process started
        os._exit(1)
    _encode_rows = encode


def _encode(rows: list):
    return _encode_rows(rows)
