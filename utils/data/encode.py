"""Rows -> token ids, some rows at a time: the work of every process that tokenizes. It needs no torch, so
that these processes start in a second and stay small.

All rows are read twice: first they are checked (JSON, form, fields), which is quick, so that a bad row is
reported at once; then they are tokenized.
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
from .tokens import Sequence

TWICE = "the same as a row before"
CUT = "cut at --seq_len"
BAD = "bad rows"
BATCH = 64  # texts that the tokenizer gets at a time: a tenth faster than one by one
FIRST = 4  # rows of each BATCH whose prompts are compared with those of transformers


@dataclass
class Checked:
    """What the first reading of rows has found."""

    rows: int = 0
    faults: Faults = field(default_factory=Faults)
    # file -> form -> [number and name of the form's first row, rows of that form]
    forms: dict[str, dict[str, list]] = field(default_factory=dict)
    columns: set[str] = field(default_factory=set)  # those of --columns that a row has
    keys: list[str] = field(default_factory=list)  # of the first row

    def join(self, checked: "Checked") -> None:
        """Add what was found in the rows that come next."""
        self.faults.join(checked.faults, self.rows)
        for file, forms in checked.forms.items():
            for form, (number, where, rows) in forms.items():
                self.add_form(file, form, self.rows + number, where, rows)
        self.rows += checked.rows
        self.columns |= checked.columns
        self.keys = self.keys or checked.keys

    def add_form(self, file: str, form: str, number: int, where: str, rows: int) -> None:
        """Count rows of a form; number and where: of the first of them."""
        counted = self.forms.setdefault(file, {}).setdefault(form, [number, where, 0])
        counted[2] += rows

    def file_forms(self) -> dict[str, str]:
        """The form of each file: that of most of its rows."""
        most_frequent = {}
        for file, forms in self.forms.items():
            most_frequent[file] = max(forms, key=lambda form: forms[form][2])
        return most_frequent

    def close(self, path: object, columns: dict[str, str], bad_rows: str) -> None:
        """Raise ConfigError for what was found, unless bad rows are to be dropped."""
        check(self.rows, f"{path}: {NO_ROWS}")
        keys = ", ".join(repr(key[:40]) for key in self.keys[:12])
        for ours, theirs in columns.items():
            check(
                theirs in self.columns or not self.keys,
                f"--columns {ours}={theirs}: no row has {theirs!r}; the first row has {keys}",
            )
        if bad_rows == "error":
            self._add_mixed_forms()
        self.faults.raise_all(self.rows)

    def _add_mixed_forms(self) -> None:
        """Add a fault for each file with rows of several forms."""
        for forms in self.forms.values():
            first_form, *further_forms = forms
            for form in further_forms:
                number, where, rows = forms[form]
                fault = f"a row in {form} form, and the file's first row is {first_form}"
                self.faults.add(number, where, fault, rows)


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
    # the first row whose prompt at inference differs from the one in training, and how
    problem: str = ""
    faults: Faults = field(default_factory=Faults)
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
            self.faults.add(self.rows, where, fault)
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

    def refuse(self, where: str, fault: ValueError, bad_rows: str) -> None:
        """Keep the fault of a row, or drop the row for it."""
        if bad_rows == "drop" and not isinstance(fault, Unreadable):
            self.bad.append((where, str(fault)))
            self.dropped[BAD] += 1
        else:
            self.faults.add(self.rows, where, fault)

    def note(self, notes: Counter, where: str) -> None:
        """Count the notes of a row."""
        self.notes.update(notes)
        for text in +notes:
            self.firsts.setdefault(text, where)

    def join(self, part: "Part") -> None:
        """Add the rows that come next, except their tokens and places, which are written already."""
        self.faults.join(part.faults, self.rows)
        self.firsts = part.firsts | self.firsts
        self.problem = self.problem or part.problem
        self.rows += part.rows
        self.lengths.extend(part.lengths)
        self.trained_tokens.extend(part.trained_tokens)
        self.keys.extend(part.keys)
        self.bad.extend(part.bad)
        self.dropped.update(part.dropped)
        self.notes.update(part.notes)

    def close(self, path: object) -> None:
        """Raise ConfigError for bad rows (up to ten faults), and where all rows were dropped."""
        self.faults.raise_all(self.rows)
        check(self.rows, f"{path}: {NO_ROWS}")
        why = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        first = f"; the first: {': '.join(self.bad[0])}" if self.bad else ""
        fix = "raise --seq_len" if self.dropped.keys() - {BAD} else "correct them"
        check(self.lengths, f"{path}: all {self.rows} rows were dropped: {why}{first}; {fix}")


def check_rows(
    found: Iterable[tuple[str, object]],
    form: str = "",
    columns: dict | None = None,
    bad_rows: str = "error",
) -> Checked:
    """Read (where, row) without tokenizing, until there are enough faults."""
    checked = Checked()
    notes: Counter = Counter()
    for where, value in found:
        try:
            row = as_object(value)
            if columns:
                checked.columns |= row.keys() & columns.values()
                checked.keys = checked.keys or list(row)
            row, kind = row_and_form(row, form, columns)
            if kind:
                checked.add_form(file_of(where), kind, checked.rows, where, rows=1)
            if not plain_messages(row, kind):
                to_messages(row, kind, notes)
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
    """Tokenize (where, row) until there are enough faults; see examples.load_examples. forms: of each file,
    by check_rows.
    """
    part = Part()
    found = iter(found)
    while not part.faults.stop(part.rows):
        values = list(islice(found, BATCH))
        if not values:
            break
        rows: list[tuple[str, Row]] = []
        for where, value in values:
            part.rows += 1
            notes: Counter = Counter()
            try:
                row = encode_row(where, value, tokenizer, train_on, form, columns, forms, notes)
                rows.append((where, row))
            except ValueError as fault:
                part.refuse(where, fault, bad_rows)
            part.note(notes, where)
        chats = [row.chat for _, row in rows if row.chat]
        encoded = iter(encode_chats(tokenizer, chats))
        for number, (where, row) in enumerate(rows):
            sequences = next(encoded) if row.chat else row.sequences
            if number < FIRST and not part.problem and row.messages and train_on != "all":
                part.problem = problem_of(tokenizer, where, row, sequences, train_on)
            for ids, mask in sequences:
                part.add_row(ids, mask, where, seq_len, too_long, is_text=row.form == "text")
    return part


class Row(NamedTuple):
    """A row that is read: a plain conversation as text, or (ids, mask) of the sequences of any other row."""

    form: str
    messages: list[dict]  # empty for a row that is no conversation
    tools: list | None
    chat: Chat | None
    sequences: list[Sequence]


def encode_row(where, value, tokenizer, train_on, form, columns, forms, notes: Counter) -> Row:
    """A row, tokenized unless it is plain: encode_chats tokenizes many plain ones at a time."""
    row, kind = row_and_form(value, form, columns)
    file_form = forms.get(file_of(where), kind) if forms else kind
    if kind and kind != file_form:
        raise ValueError(f"a row in {kind} form, and most of the file's rows are {file_form}")
    tools = None
    chat = None
    messages = plain_messages(row, kind)
    if not messages:
        messages, tools = to_messages(row, kind, notes)
    elif train_on == "assistant":
        chat = chat_text(tokenizer, messages)
    note_placeholders(messages, notes)
    turns = [] if messages[0]["role"] in ("text", "tokens") else messages
    if chat:
        return Row(kind, turns, tools, chat, [])
    sequences = encode_rich(tokenizer, messages, tools, train_on, notes)
    return Row(kind, turns, tools, None, sequences)


def problem_of(tokenizer, where: str, row: Row, sequences: list, train_on: str) -> str:
    """See template_check.prompt_problem; "" where there is none."""
    problem = prompt_problem(tokenizer, row.messages, row.tools, train_on, sequences)
    return problem and f"{where}: {problem}"


def row_and_form(value: object, form: str, columns: dict | None) -> tuple[dict, str]:
    """(the row in a value of a file, its form). ValueError where the value is no object."""
    row = as_object(value)
    if not columns:
        return row, form or form_of(row)
    row, form_by_columns = renamed(row, columns)
    return row, form or form_by_columns


def file_of(where: str) -> str:
    """The file in a row's name: "chat.jsonl" of "chat.jsonl:3"."""
    return re.sub(r"(:| row )\d+$", "", where)
