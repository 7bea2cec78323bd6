"""Rows -> token ids, some rows at a time. It needs no torch, so that processes that do only this start in a
second and stay small: see cache.py.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..run.errors import ConfigError, check
from .chats import encode_chat, encode_plain, render_chats
from .formats import parse_columns, renamed, to_messages
from .rows import as_object

TWICE = "the same as a row before"
CUT = "cut at --seq_len"
MOST_FAULTS = 10  # lines about rows that are wrong; of further ones the number
ROWS, BYTES = 64, 2**20  # that are tokenized at a time


@dataclass(frozen=True)
class Rows:
    """Which rows of which data are read, and how.

    format: one of formats.FORMS, or auto: told by each row. columns: see formats.parse_columns. train_on: see
    chats.render_chats. max_rows: of each source, 0: all. too_long, for rows of more than seq_len tokens:
    truncate cuts them, and plain text into pieces; drop leaves them out; error refuses them. bad_rows drop:
    rows that are wrong are left out, counted and listed. eval_share: see held_out.py. task:
    rows; or pairs or labels (KTO), see preferences.py; or documents, see documents.py; or prompts, see
    prompts.add_question.
    processor: the folder of a model that takes pictures; "": rows with pictures are refused. image_dir,
    image_max_pixels: see pictures.py.
    """

    dataset: str
    seq_len: int
    format: str = "auto"
    columns: str = ""
    bad_rows: str = "error"
    train_on: str = "assistant"
    max_rows: int = 0
    too_long: str = "truncate"
    eval_dataset: str = ""
    eval_share: float = 0.0
    task: str = "rows"
    processor: str = ""
    image_dir: str = ""
    image_max_pixels: int = 0

    def __post_init__(self):
        check(self.eval_share < 1, f"--eval_share {self.eval_share} trains on nothing (fix: 0.02)")
        check(
            not (self.eval_dataset and self.eval_share),
            "--eval_dataset or --eval_share? (fix: give one)",
        )


class Part:
    """Tokenized rows, and what the user should know about them. rows: read so far; source: the number of
    theirs.
    """

    def __init__(self, source: int = 0):
        self.rows, self.source = 0, source
        self.ids = array("i")
        self.loss_mask = bytearray()
        # of each row; row_sizes and details: see examples.Examples
        self.lengths = array("q")
        self.trained_tokens = array("q")
        self.keys = array("q")
        self.row_sizes = array("q")
        self.details: list[str] = []
        self.where: list[str] = []
        self.dropped = Counter()
        self.notes = Counter()
        self.firsts: dict[str, str] = {}  # note -> its first row
        self.forms = Counter()
        self.columns: set[str] = set()  # those of --columns that a row has
        # the first row whose prompt at inference differs from the one in training, and how
        self.problem = ""
        self.bad: list[tuple[str, str]] = []  # (where, why) of rows that are wrong

    def add(self, ids: list[int], loss_mask: bytes, where: str) -> None:
        """Add one sequence."""
        row = array(self.ids.typecode, ids)
        self.ids += row
        self.loss_mask += loss_mask
        self.lengths.append(len(row))
        self.trained_tokens.append(loss_mask.count(1))
        digest = hashlib.blake2b(row, digest_size=8).digest()
        self.keys.append(int.from_bytes(digest, "little", signed=True))
        self.where.append(where)

    def add_row(self, ids: list[int], loss_mask: bytes, where: str, rows: Rows, form: str) -> None:
        """Add a row. One of more than seq_len tokens is treated as too_long says; text is cut into pieces.
        ValueError where that is an error.
        """
        seq_len = rows.seq_len
        if len(ids) > seq_len and rows.too_long == "error":
            raise ValueError(
                f"{len(ids):,} tokens, more than --seq_len {seq_len} (fix: --too_long truncate or drop)"
            )
        if len(ids) > seq_len and rows.too_long == "drop":
            self.dropped["longer than --seq_len"] += 1
        elif loss_mask.find(1, 1, seq_len) < 0:
            self.dropped[f"no trained token in the first {seq_len} tokens"] += 1
        else:
            self.notes[CUT] += len(ids) > seq_len and form != "text"
            end = len(ids) if form == "text" else 1  # a conversation is only its first piece
            for first in range(0, end, seq_len):
                last = first + seq_len
                self.add(ids[first:last], loss_mask[first:last], where)

    def say_problem(self, problem: str, where: str) -> None:
        """Note how a row's prompt at inference differs, if it does and none did before."""
        if problem and not self.problem:
            self.problem = f"{where}: {problem}"

    def join(self, part: "Part") -> None:
        """Add what there is to say of the rows that come next, and their lengths."""
        self.firsts = part.firsts | self.firsts
        self.problem = self.problem or part.problem
        self.columns |= part.columns
        self.rows += part.rows
        self.lengths += part.lengths
        self.bad += part.bad
        self.dropped.update(part.dropped)
        self.notes.update(part.notes)

    def close(self, rows: Rows) -> None:
        """Raise ConfigError for bad rows (up to ten, and how many more), for columns that no row has, and
        where all rows were dropped.
        """
        faults = [f"{where}: {why}" for where, why in self.bad]
        if self.bad and rows.bad_rows == "error":
            more = len(faults) - MOST_FAULTS
            raise ConfigError(faults[:MOST_FAULTS] + [f"and {more:,} more"] * (more > 0))
        for ours, theirs in parse_columns(rows.columns).items():
            check(theirs in self.columns, f"--columns {ours}={theirs}: no row has {theirs!r}")
        if self.bad:
            self.dropped["bad rows"] = len(self.bad)
        why = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        first = f"; the first: {faults[0]}" if faults else ""
        text = f"{rows.dataset}: all {self.rows} rows were dropped: {why}{first}"
        check(self.lengths, f"{text} (fix: other rows, or a larger --seq_len)")


def encode_rows(work: tuple[int, list], tokenizer, rows: Rows) -> Part:
    """Tokenize (where, row) as `rows` says. work: the number of their source, and all of them."""
    if rows.processor:
        from .pictures import add_pictured as add
    elif rows.task == "documents":
        from .documents import add_document as add
    elif rows.task == "prompts":
        from .prompts import add_question as add
    elif rows.task == "rows":
        add = add_conversation
    else:
        from .preferences import add_preferences as add

    source, found = work
    part = Part(source=source)
    columns = parse_columns(rows.columns)
    for where, value in found:
        part.rows += 1
        notes: Counter = Counter()
        try:
            row = as_object(value)
            part.columns |= row.keys() & columns.values()
            row, form = renamed(row, columns)
            form = rows.format.removeprefix("auto") or form
            part.forms[add(part, tokenizer, row, where, rows, form, notes)] += 1
        except ValueError as fault:
            part.bad.append((where, str(fault)))
        part.notes.update(notes)
        for text in +notes:
            part.firsts.setdefault(text, where)
    return part


def add_conversation(
    part: Part, tokenizer, row: dict, where: str, rows: Rows, form: str, notes: Counter
) -> str:
    """Add a row to `part`; returns its form. ValueError: what is wrong with the row."""
    messages, tools = to_messages(row, form, notes)
    if messages[0]["role"] in ("text", "tokens"):
        part.add_row(*encode_plain(tokenizer, messages), where, rows, form)
        return form
    for chat in render_chats(tokenizer, messages, tools, rows.train_on, notes):
        part.add_row(*encode_chat(tokenizer, chat), where, rows, form)
        part.say_problem(chat.problem, where)
    return form


def chunks(found: Iterable) -> Iterator[list]:
    """The rows in lists of at most ROWS, of lines of about BYTES; the last list may be empty."""
    rows, size_bytes = [], 0
    for where, value in found:
        rows.append((where, value))
        size_bytes += len(value) if isinstance(value, bytes) else 0
        if len(rows) == ROWS or size_bytes > BYTES:
            yield rows
            rows, size_bytes = [], 0
    yield rows
