"""Rows -> token ids, a chunk of rows at a time. This module does not import torch, so that the worker
processes of cache.py start in a second and use little memory.
"""

import hashlib
import pickle
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..run.errors import ConfigError, check, first_five
from .chats import encode_chat, render_chats
from .formats import parse_columns, renamed, to_messages
from .rows import as_object

TWICE = "the same as a row before"
CUT = "cut at --seq_len"
MOST_FAULTS = 10  # bad rows that an error lists; further ones are only counted
# The limits of a chunk. A chunk is tokenized at once.
ROWS = 64
BYTES = 2**20


@dataclass(frozen=True)
class Rows:
    """Which rows to read, and how.

    format: one of formats.FORMS, or auto: decided for each row. columns: see formats.parse_columns.
    train_on: see chats.render_chats. max_rows: limit per source; 0 means no limit.
    too_long: what happens to rows of more than seq_len tokens. truncate cuts them, but divides plain text
    into pieces; drop leaves them out; error refuses them.
    bad_rows: error, or drop, which leaves out, counts and lists the rows that are wrong.
    eval_share: see held_out.py. task: rows; pairs or labels (KTO), see preferences.py; documents, see
    documents.py; prompts, see prompts.add_question.
    processor: the folder of a model that takes pictures; if "", rows with pictures are refused. image_dir,
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
    """Tokenized rows, and what the user should know about them. rows: how many were read."""

    def __init__(self):
        self.rows = 0
        self.ids = array("i")
        self.loss_mask = bytearray()
        # one entry per row; row_sizes and details: see examples.Examples
        self.lengths = array("q")
        self.trained_tokens = array("q")
        self.keys = array("q")
        self.row_sizes = array("q")
        self.details: list[str] = []
        self.where: list[str] = []
        self.dropped = Counter()
        self.notes = Counter()
        self.firsts = {}  # note -> its first row
        self.forms = Counter()
        self.columns: set[str] = set()  # columns named in --columns that some row has
        self.bad = []  # (where, reason) of each bad row

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
        """Add a row. rows.too_long decides about a row of more than seq_len tokens: with truncate, plain text
        is divided into pieces, any other row is cut. ValueError with too_long error.
        """
        seq_len = rows.seq_len
        is_long = len(ids) > seq_len
        if is_long and rows.too_long == "error":
            raise ValueError(
                f"{len(ids):,} tokens, more than --seq_len {seq_len} (fix: --too_long truncate or drop)"
            )
        if is_long and rows.too_long == "drop":
            self.dropped["longer than --seq_len"] += 1
        elif loss_mask.find(1, 1, seq_len) < 0:
            self.dropped[f"no trained token in the first {seq_len} tokens"] += 1
        else:
            self.notes[CUT] += is_long and form != "text"
            end = len(ids) if form == "text" else 1  # other rows keep only their first piece
            for first in range(0, end, seq_len):
                last = first + seq_len
                # The first token of a piece has no label; a last piece may have no other.
                if loss_mask.find(1, first + 1, last) > 0:
                    self.add(ids[first:last], loss_mask[first:last], where)

    def join(self, part: "Part") -> None:
        """Add the counts, notes, bad rows and lengths of a later part, but not its tokens."""
        self.firsts = part.firsts | self.firsts
        self.columns |= part.columns
        self.rows += part.rows
        self.lengths += part.lengths
        self.bad += part.bad
        self.dropped.update(part.dropped)
        self.notes.update(part.notes)

    def close(self, rows: Rows) -> None:
        """Raise ConfigError for bad rows (the first ten, and the number of others), for columns that no row
        has, and if all rows were dropped.
        """
        places = {}  # reason -> where
        for where, reason in self.bad:
            places.setdefault(reason, []).append(where)
        faults = [f"{first_five(where)}: {reason}" for reason, where in places.items()]
        if self.bad and rows.bad_rows == "error":
            lines = faults[:MOST_FAULTS]
            if faults[MOST_FAULTS:]:
                lines.append(
                    f"and {len(faults) - MOST_FAULTS:,} more (recipes that train take --bad_rows drop)"
                )
            raise ConfigError(lines)
        for ours, theirs in parse_columns(rows.columns).items():
            check(theirs in self.columns, f"--columns {ours}={theirs}: no row has {theirs!r}")
        if self.bad:
            self.dropped[f"bad rows (the first: {faults[0]})"] = len(self.bad)
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        check(
            self.lengths,
            f"{rows.dataset}: all {self.rows} rows were dropped: {reasons}"
            " (fix: other rows; a larger --seq_len, if they are too long)",
        )


def encode_rows(raw_rows: list, tokenizer, rows: Rows) -> Part:
    """Tokenize a chunk of rows, [(where, row), ...]."""
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

    part = Part()
    columns = parse_columns(rows.columns)
    for where, value in raw_rows:
        part.rows += 1
        notes = Counter()
        try:
            row = as_object(value)
            part.columns |= row.keys() & columns.values()
            row, form = renamed(row, columns)
            if rows.format != "auto":
                form = rows.format
            form = add(part, tokenizer, row, where, rows, form, notes)
            part.forms[form] += 1
        except (ValueError, RecursionError) as fault:
            part.bad.append((where, str(fault)))
        part.notes.update(notes)
        for note in +notes:  # those with a count above 0
            part.firsts.setdefault(note, where)
    return part


def add_conversation(
    part: Part, tokenizer, row: dict, where: str, rows: Rows, form: str, notes: Counter
) -> str:
    """Add a row to `part` and return its form. ValueError names what is wrong with the row."""
    messages, tools = to_messages(row, form, notes)
    if messages[0]["role"] in ("text", "tokens"):
        from .documents import encode_plain

        part.add_row(*encode_plain(tokenizer, messages, notes), where, rows, form)
        return form
    for chat in render_chats(tokenizer, messages, tools, rows.train_on, notes):
        part.add_row(*encode_chat(tokenizer, chat), where, rows, form)
    return "chat" if form == "completion" else form


def chunks(raw_rows: Iterable) -> Iterator[list]:
    """Lists of at most ROWS rows and about BYTES bytes. The last list may be empty."""
    rows = []
    size_bytes = 0
    for where, value in raw_rows:
        rows.append((where, value))
        size_bytes += len(pickle.dumps(value))  # as it goes to the process that tokenizes it
        if len(rows) == ROWS or size_bytes > BYTES:
            yield rows
            rows = []
            size_bytes = 0
    yield rows
