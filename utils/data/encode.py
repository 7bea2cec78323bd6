"""Rows -> token ids, some rows at a time, in this process or in one for each core. It needs no torch, so that
these processes start in a second and stay small.
"""

import hashlib
import multiprocessing
import os
import signal
import sys
import types
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ..run.errors import ConfigError, check
from ..run.signals import die_with_parent
from .chats import Chat, encode_chats, encode_plain, render_chats
from .formats import form_of, renamed, to_messages
from .rows import as_object
from .tokens import Sequence

TWICE = "the same as a row before"
CUT = "cut at --seq_len"
BAD = "bad rows"
MOST_FAULTS = 10  # lines about rows that are wrong; of further ones the number
# What is tokenized at a time, at most: so many rows, and of rows that are lines also so many bytes.
ROWS = 256
BYTES = 2**20


@dataclass
class Part:
    """Tokenized rows, and what the user should know about them."""

    ids: array = field(default_factory=lambda: array("i"))
    loss_mask: bytearray = field(default_factory=bytearray)
    lengths: array = field(default_factory=lambda: array("q"))
    trained_tokens: array = field(default_factory=lambda: array("q"))  # of each row
    keys: array = field(default_factory=lambda: array("q"))
    where: list[str] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)  # note -> its first row
    forms: Counter = field(default_factory=Counter)
    columns: set[str] = field(default_factory=set)  # those of --columns that a row has
    # the first row whose prompt at inference differs from the one in training, and how
    problem: str = ""
    faults: list[str] = field(default_factory=list)
    # (where, why) of rows dropped by --bad_rows
    bad: list[tuple[str, str]] = field(default_factory=list)
    rows: int = 0  # read so far

    def add(self, ids: list[int], loss_mask: bytes, where: str) -> None:
        """Add one sequence."""
        row = array("i", ids)
        self.ids += row
        self.loss_mask += loss_mask
        self.lengths.append(len(row))
        self.trained_tokens.append(loss_mask.count(1))
        digest = hashlib.blake2b(row, digest_size=8).digest()
        self.keys.append(int.from_bytes(digest, "little", signed=True))
        self.where.append(where)

    def add_row(self, ids, loss_mask, where, seq_len: int, too_long: str, is_text: bool) -> None:
        """Add a row. too_long: for one of more than seq_len tokens; a plain text is then cut into pieces."""
        if len(ids) > seq_len and too_long == "error":
            fix = "--too_long truncate or drop"
            fault = f"{len(ids):,} tokens, more than --seq_len {seq_len} (fix: {fix})"
            self.faults.append(f"{where}: {fault}")
        elif len(ids) > seq_len and too_long == "drop":
            self.dropped["longer than --seq_len"] += 1
        elif loss_mask.find(1, 1, seq_len) < 0:
            self.dropped[f"no trained token in the first {seq_len} tokens"] += 1
        else:
            self.notes[CUT] += len(ids) > seq_len and not is_text
            end = len(ids) if is_text else 1  # a conversation is only its first piece
            for first in range(0, end, seq_len):
                last = first + seq_len
                self.add(ids[first:last], loss_mask[first:last], where)

    def note(self, notes: Counter, where: str) -> None:
        """Count the notes of a row."""
        self.notes.update(notes)
        for text in +notes:
            self.firsts.setdefault(text, where)

    def join(self, part: "Part") -> None:
        """Add what there is to say of the rows that come next; their tokens and places are kept elsewhere."""
        self.firsts = part.firsts | self.firsts
        self.problem = self.problem or part.problem
        self.columns |= part.columns
        self.rows += part.rows
        for name in ("lengths", "trained_tokens", "keys", "faults", "bad"):
            getattr(self, name).extend(getattr(part, name))
        for name in ("dropped", "notes", "forms"):
            getattr(self, name).update(getattr(part, name))

    def close(self, path: object, columns: dict[str, str] | None = None) -> None:
        """Raise ConfigError for bad rows (up to ten, and how many more), for columns that no row has, and
        where all rows were dropped.
        """
        for ours, theirs in (columns or {}).items():
            check(
                theirs in self.columns or self.faults,
                f"--columns {ours}={theirs}: no row has {theirs!r}",
            )
        more = len(self.faults) - MOST_FAULTS
        check(
            not self.faults,
            self.faults[:MOST_FAULTS] + ([f"and {more:,} more"] if more > 0 else []),
        )
        why = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        first = f"; the first: {': '.join(self.bad[0])}" if self.bad else ""
        fix = "raise --seq_len" if self.dropped.keys() - {BAD} else "correct them"
        check(self.lengths, f"{path}: all {self.rows} rows were dropped: {why}{first}; {fix}")


class Row(NamedTuple):
    """A row that is read: a conversation as text, or (ids, mask) of any other row."""

    where: str
    form: str
    chats: list[Chat]
    sequence: Sequence | None


def encode_rows(
    rows: Iterable[tuple[str, object]],
    tokenizer,
    seq_len: int,
    train_on: str,
    form: str,
    too_long: str,
    columns: dict | None = None,
    bad_rows: str = "error",
) -> Part:
    """Tokenize (where, row); see examples.load_examples."""
    part = Part()
    read = []
    for where, value in rows:
        part.rows += 1
        notes: Counter = Counter()
        try:
            row = as_object(value)
            part.columns |= row.keys() & (columns or {}).values()
            read.append(read_row(where, row, tokenizer, train_on, form, columns, notes))
        except ValueError as fault:
            if bad_rows == "drop":
                part.bad.append((where, str(fault)))
                part.dropped[BAD] += 1
            else:
                part.faults.append(f"{where}: {fault}")
        part.note(notes, where)
    encoded = iter(encode_chats(tokenizer, [chat for row in read for chat in row.chats]))
    for row in read:
        part.forms[row.form] += 1
        if row.sequence:
            part.add_row(*row.sequence, row.where, seq_len, too_long, row.form == "text")
        for chat in row.chats:
            part.add_row(*next(encoded), row.where, seq_len, too_long, False)
            if chat.problem and not part.problem:
                part.problem = f"{row.where}: {chat.problem}"
    return part


def read_row(where, row: dict, tokenizer, train_on, form, columns, notes: Counter) -> Row:
    """A row, tokenized unless it is a conversation: encode_chats tokenizes many of them at a time."""
    kind = form_of(row)
    if columns:
        row, kind = renamed(row, columns)
    form = form or kind
    messages, tools = to_messages(row, form, notes)
    if messages[0]["role"] in ("text", "tokens"):
        return Row(where, form, [], encode_plain(tokenizer, messages))
    return Row(where, form, render_chats(tokenizer, messages, tools, train_on, notes), None)


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


@contextmanager
def processes(function: Callable) -> Iterator[Callable]:
    """run(chunks) -> (label, function(rows)) for each (label, rows) of the chunks, in their order, by one
    process for each core.
    """
    count = len(os.sched_getaffinity(0))
    # A fork would copy the threads of torch and gloo in whatever state they are.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, _start, (function, os.getpid()))

    def run(labelled: Iterable[tuple]) -> Iterator[tuple]:
        waiting = deque()
        for label, rows in labelled:
            with no_main():
                waiting.append((label, pool.submit(_run, rows)))
            if len(waiting) > 2 * count:
                label, job = waiting.popleft()
                yield label, job.result()
        for label, job in waiting:
            yield label, job.result()

    try:
        yield run
    except BrokenProcessPool:
        raise ConfigError(
            "a process that tokenizes was killed, most likely because memory ran out"
            " (fix: more host memory, or taskset to fewer cores)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def no_main() -> Iterator[None]:
    """Processes that start within it do not import the main file of this process, as they would otherwise: a
    recipe takes seconds, and the function is all that they need.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start(function: Callable, parent: int) -> None:
    global _function
    # Ctrl-C goes to all processes of a terminal; the parent alone reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:  # the parent died while this process started
        os._exit(1)
    _function = function


def _run(rows: list) -> Part:
    return _function(rows)
