"""Rows -> token ids by one process for each core. It needs no torch: see encode.py."""

import multiprocessing
import os
import signal
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager

from ..run.errors import ConfigError
from ..run.signals import die_with_parent

# What a process gets at a time, at most: so many rows, and of rows that are lines also so many bytes.
ROWS = 256
BYTES = 2**20


@contextmanager
def processes(*functions: Callable) -> Iterator[Callable]:
    """run(number, chunks) -> (label, functions[number](rows, **options)) for each (label, rows, options) of
    the chunks, in their order, by one process for each core.
    """
    count = len(os.sched_getaffinity(0))
    # A fork would copy the threads of torch and gloo in whatever state they are.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _start, (functions, os.getpid()))

    def run(number: int, chunks: Iterable[tuple]) -> Iterator[tuple]:
        waiting = deque()
        for label, rows, options in chunks:
            with no_main():
                waiting.append((label, pool.submit(_run, number, rows, options)))
            if len(waiting) > 2 * count:
                label, job = waiting.popleft()
                yield label, job.result()
        while waiting:
            label, job = waiting.popleft()
            yield label, job.result()

    try:
        yield run
    except BrokenProcessPool:
        fix = "more host memory, or taskset to fewer cores"
        raise ConfigError(
            f"a process that tokenizes was killed, most likely because memory ran out (fix: {fix})"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def no_main() -> Iterator[None]:
    """Processes that start within it do not import the main file of this process, as they would otherwise: a
    recipe takes seconds, and the functions are all that they need.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def chunks(found: Iterable) -> Iterator[list]:
    """The rows in lists of at most ROWS, and of about BYTES; the last list may be empty."""
    rows = []
    size_bytes = 0
    for where, value in found:
        rows.append((where, value))
        if isinstance(value, bytes):
            size_bytes += len(value)
        if len(rows) == ROWS or size_bytes > BYTES:
            yield rows
            rows = []
            size_bytes = 0
    yield rows


def _start(functions: tuple[Callable, ...], parent: int) -> None:
    global _functions
    # Ctrl-C goes to all processes of a terminal; the parent alone reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # the parent died while this process started
        os._exit(1)
    _functions = functions


def _run(number: int, rows: list, options: dict):
    return _functions[number](rows, **options)
