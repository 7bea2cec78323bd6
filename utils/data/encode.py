"""Rows -> token ids, some rows at a time: what every process does that tokenizes. It needs no torch, so that
these start in a second and stay small.

All rows are read twice: first they are checked (JSON, form, fields), which is quick, so that a bad row is
told at once; then they are tokenized.
"""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from ..run.errors import check
from .chats import Chat, chat_text, encode_chats, encode_rich
from .formats import form_of, note_placeholders, plain_messages, renamed
from .messages import to_messages
from .rows import NO_ROWS, Faults, Unreadable, as_object
from .template_check import prompt_problem

TWICE, CUT, BAD = "the same as a row before", "cut at --seq_len", "bad rows"
BATCH = 64  # texts that tokenizers gets at a time, which is a tenth faster than one by one
FIRST = 4  # rows of each BATCH whose prompts are compared with those of transformers


@dataclass
class Checked:
    """What the first reading of rows has found."""

    rows: int = 0
    faults: Faults = field(default_factory=Faults)
    # file -> form -> [number and name of a row, rows]
    forms: dict[str, dict] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)  # of --columns that a row has
    keys: list[str] = field(default_factory=list)  # of the first row

    def join(self, other: "Checked") -> None:
        """Take in what was found in the rows that come next."""
        self.faults.join(other.faults, self.rows)
        for file, forms in other.forms.items():
            for form, (number, where, rows) in forms.items():
                mine = self.forms.setdefault(file, {}).setdefault(
                    form, [self.rows + number, where, 0]
                )
                mine[2] += rows
        self.rows += other.rows
        self.columns |= other.columns
        self.keys = self.keys or other.keys

    def file_forms(self) -> dict[str, str]:
        """The form of each file: that of most of its rows."""
        return {
            file: max(forms, key=lambda form: forms[form][2]) for file, forms in self.forms.items()
        }

    def close(self, path: object, columns: dict[str, str], bad_rows: str) -> None:
        """Raise ConfigError for what was found, as far as rows are not to be dropped for it."""
        check(self.rows, f"{path}: {NO_ROWS}")
        keys = ", ".join(repr(key[:40]) for key in self.keys[:12])
        for ours, theirs in columns.items():
            here = theirs in self.columns or not self.keys
            check(
                here, f"--columns {ours}={theirs}: no row has {theirs!r}; the first row has {keys}"
            )
        for forms in self.forms.values() if bad_rows == "error" else ():
            first, *others = forms
            for form in others:
                number, where, rows = forms[form]
                fault = f"a row in {form} form, and the file's first row is {first}"
                self.faults.add(number, where, fault, rows)
        self.faults.raise_all(self.rows)


@dataclass
class Part:
    """Rows as they are tokenized, and what there is to say of them."""

    ids: array = field(default_factory=lambda: array("i"))
    loss_mask: bytearray = field(default_factory=bytearray)
    lengths: array = field(default_factory=lambda: array("q"))
    trained_tokens: array = field(default_factory=lambda: array("q"))  # of each row
    keys: array = field(default_factory=lambda: array("q"))
    where: list[str] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    firsts: dict[str, str] = field(default_factory=dict)  # note -> the first row that it is of
    # the first row that inference would ask for otherwise than it is trained, and how
    problem: str = ""
    faults: Faults = field(default_factory=Faults)
    # (where, why) of rows dropped by --bad_rows
    bad: list[tuple[str, str]] = field(default_factory=list)
    rows: int = 0  # that were read

    def add(self, ids: list[int], loss_mask: bytes, where: str) -> None:
        row = array("i", ids)
        self.ids += row
        self.loss_mask += loss_mask
        self.lengths.append(len(row))
        self.trained_tokens.append(loss_mask.count(1))
        digest = hashlib.blake2b(row, digest_size=8).digest()
        self.keys.append(int.from_bytes(digest, "little", signed=True))
        self.where.append(where)

    def add_row(self, ids, loss_mask, where, seq_len: int, too_long: str, is_text: bool) -> None:
        """Take a row in, as too_long says where it has more than seq_len tokens; a text comes in pieces."""
        if len(ids) > seq_len and too_long == "error":
            fix = "--too_long truncate or drop"
            fault = f"{len(ids):,} tokens, more than --seq_len {seq_len} (fix: {fix})"
            self.faults.add(self.rows, where, fault)
        elif len(ids) > seq_len and too_long == "drop":
            self.dropped["longer than --seq_len"] += 1
        elif loss_mask.find(1, 1, seq_len) < 0:
            self.dropped[f"no trained token in the first {seq_len} tokens"] += 1
        else:
            self.notes[CUT] += len(ids) > seq_len and not is_text
            for at in range(0, len(ids) if is_text else 1, seq_len):
                self.add(ids[at : at + seq_len], loss_mask[at : at + seq_len], where)

    def refuse(self, where: str, fault: ValueError, bad_rows: str) -> None:
        """Keep what is wrong with a row, or drop the row for it."""
        if bad_rows == "drop" and not isinstance(fault, Unreadable):
            self.bad.append((where, str(fault)))
            self.dropped[BAD] += 1
        else:
            self.faults.add(self.rows, where, fault)

    def note(self, notes: Counter, where: str) -> None:
        """Count what there is to say of a row."""
        self.notes.update(notes)
        for what in +notes:
            self.firsts.setdefault(what, where)

    def join(self, other: "Part") -> None:
        """Take in the rows that come next, but for their tokens and places, which are written already."""
        self.faults.join(other.faults, self.rows)
        self.firsts = other.firsts | self.firsts
        self.problem = self.problem or other.problem
        self.rows += other.rows
        for name in ("lengths", "trained_tokens", "keys", "bad"):
            getattr(self, name).extend(getattr(other, name))
        self.dropped.update(other.dropped)
        self.notes.update(other.notes)

    def close(self, path: object) -> None:
        """Raise ConfigError for bad rows (up to ten faults), and where nothing is left."""
        self.faults.raise_all(self.rows)
        check(self.rows, f"{path}: {NO_ROWS}")
        why = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        first = f"; the first: {': '.join(self.bad[0])}" if self.bad else ""
        fix = "raise --seq_len" if self.dropped.keys() - {BAD} else "mend them"
        check(self.lengths, f"{path}: all {self.rows} rows were dropped: {why}{first}; {fix}")


def check_rows(
    found: Iterable[tuple[str, object]],
    form: str = "",
    columns: dict | None = None,
    bad_rows: str = "error",
) -> Checked:
    """Read (where, row) without tokenizing, until there are faults enough."""
    checked, notes = Checked(), Counter()
    for where, value in found:
        try:
            row = as_object(value)
            if columns:
                checked.columns |= row.keys() & columns.values()
                checked.keys = checked.keys or list(row)
            row, kind = row_and_form(row, form, columns)
            if kind:
                file = file_of(where)
                first = checked.forms.setdefault(file, {}).setdefault(
                    kind, [checked.rows, where, 0]
                )
                first[2] += 1
            if not plain_messages(row, kind):
                read_messages(row, kind, notes)
        except ValueError as fault:
            if bad_rows == "error" or isinstance(fault, Unreadable):
                checked.faults.add(checked.rows, where, fault)
        checked.rows += 1
        if checked.faults.stop(checked.rows):
            break
    return checked


def encode_rows(
    found: Iterable[tuple[str, object]],
    tokenizer,
    seq_len: int,
    train_on: str,
    form: str,
    too_long: str,
    columns: dict | None = None,
    bad_rows: str = "error",
    forms: dict[str, str] | None = None,
) -> Part:
    """Tokenize (where, row) until there are faults enough; see data.load_examples. forms: that of each file,
    by check_rows.
    """
    part, found = Part(), iter(found)
    while not part.faults.stop(part.rows) and (rows := list(islice(found, BATCH))):
        read: list[tuple[str, Row]] = []
        for where, value in rows:
            part.rows += 1
            notes = Counter()
            try:
                read.append(
                    (
                        where,
                        encode_row(where, value, tokenizer, train_on, form, columns, forms, notes),
                    )
                )
            except ValueError as fault:
                part.refuse(where, fault, bad_rows)
            part.note(notes, where)
        chats = [row.chat for _, row in read if row.chat]
        encoded = iter(encode_chats(tokenizer, chats))
        for number, (where, row) in enumerate(read):
            sequences = next(encoded) if row.chat else row.sequences
            if number < FIRST and not part.problem and row.messages and train_on != "all":
                part.problem = problem_of(tokenizer, where, row, sequences, train_on)
            for ids, mask in sequences:
                part.add_row(ids, mask, where, seq_len, too_long, is_text=row.form == "text")
    return part


class Row(NamedTuple):
    """A row that is read: a plain conversation as text, or the sequences of any other as (ids, mask)."""

    form: str
    messages: list[dict]  # none for a row that is no conversation
    tools: list | None
    chat: Chat | None
    sequences: list


def encode_row(where, value, tokenizer, train_on, form, columns, forms, notes: Counter) -> Row:
    row, kind = row_and_form(value, form, columns)
    usual = forms.get(file_of(where), kind) if forms else kind
    if kind and kind != usual:
        raise ValueError(f"a row in {kind} form, and most of the file's rows are {usual}")
    messages, tools = plain_messages(row, kind), None
    chat = chat_text(tokenizer, messages) if messages and train_on == "assistant" else None
    if not messages:
        messages, tools = read_messages(row, kind, notes)
    note_placeholders(messages, notes)
    turns = [] if messages[0]["role"] in ("text", "tokens") else messages
    if chat:
        return Row(kind, turns, tools, chat, [])
    return Row(kind, turns, tools, None, encode_rich(tokenizer, messages, tools, train_on, notes))


def problem_of(tokenizer, where: str, row: Row, sequences: list, train_on: str) -> str:
    """See template_check.prompt_problem; "" where there is none."""
    problem = prompt_problem(tokenizer, row.messages, row.tools, train_on, sequences)
    return problem and f"{where}: {problem}"


def row_and_form(value: object, form: str, columns: dict | None) -> tuple[dict, str]:
    """(the row in what a file holds, its form). ValueError where it is no object."""
    row = as_object(value)
    if not columns:
        return row, form or form_of(row)
    row, told = renamed(row, columns)
    return row, form or told


def read_messages(row: dict, form: str, notes: Counter) -> tuple[list[dict], list | None]:
    """(messages, tools) of a row that is more than plain chat; ValueError where something is wrong."""
    return to_messages(row, form, notes)


def file_of(where: str) -> str:
    """The file in the name of a row."""
    return re.sub(r"(:| row )\d+$", "", where)
