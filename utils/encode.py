"""Rows -> token ids, some rows at a time: what every process does that tokenizes. It needs no torch, so that
these start in a second and stay small.
"""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from .errors import check
from .formats import form_of, plain_messages
from .rows import MOST_ERRORS, NO_ROWS, as_object, raise_all
from .tokens import chat_text, encode_texts

TWICE, CUT = "the same as a row before", "cut at --seq_len"
BATCH = 64  # texts that tokenizers gets at a time, which is a tenth faster than one by one


@dataclass
class Part:
    """Rows as they are tokenized, and what there is to say of them."""

    ids: array = field(default_factory=lambda: array("i"))
    taught: bytearray = field(default_factory=bytearray)
    lengths: array = field(default_factory=lambda: array("q"))
    keys: array = field(default_factory=lambda: array("q"))
    where: list[str] = field(default_factory=list)
    dropped: Counter = field(default_factory=Counter)
    notes: Counter = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    forms: dict[str, tuple] = field(default_factory=dict)  # file -> (form, where) of its first row
    rows: int = 0  # that were read

    def add(self, ids: list[int], taught: bytes, where: str) -> None:
        row = array("i", ids)
        self.ids += row
        self.taught += taught
        self.lengths.append(len(row))
        digest = hashlib.blake2b(row, digest_size=8).digest()
        self.keys.append(int.from_bytes(digest, "little", signed=True))
        self.where.append(where)

    def add_row(self, ids, taught, where, seq_len: int, too_long: str, is_text: bool) -> None:
        """Take a row in, as too_long says where it has more than seq_len tokens; a text comes in pieces."""
        if len(ids) > seq_len and too_long == "error":
            fix = "--too_long truncate or drop"
            self.errors.append(f"{where}: {len(ids):,} tokens, more than --seq_len {seq_len} (fix: {fix})")
        elif len(ids) > seq_len and too_long == "drop":
            self.dropped["longer than --seq_len"] += 1
        elif taught.find(1, 1, seq_len) < 0:
            self.dropped[f"nothing taught in the first {seq_len} tokens"] += 1
        else:
            self.notes[CUT] += len(ids) > seq_len and not is_text
            for at in range(0, len(ids) if is_text else 1, seq_len):
                self.add(ids[at : at + seq_len], taught[at : at + seq_len], where)

    def take_form(self, form: str, where: str) -> None:
        """A file holds rows of one form."""
        file = re.sub(r"(:| row )\d+$", "", where)
        first, _ = self.forms.setdefault(file, (form, where)) if form else (form, where)
        if form != first:
            raise ValueError(f"a row in {form} form, and the file's first row is {first}")

    def close(self, path: object) -> tuple:
        """(bounds, keys) of Examples. ConfigError for bad rows (up to ten), and where nothing is left."""
        raise_all(self.errors)
        check(self.rows, f"{path}: {NO_ROWS}")
        why = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        check(self.lengths, f"{path}: all {self.rows} rows were dropped: {why}; raise --seq_len")
        import torch

        keys = torch.tensor(self.keys)
        self.notes[TWICE] = len(keys) - len(keys.unique())
        return torch.tensor([0, *self.lengths]).cumsum(0), keys


def encode_rows(found: Iterable[tuple[str, object]], tokenizer, seq_len, train_on, form, too_long) -> Part:
    """Tokenize (where, row) as far as rows are good, or until ten are not; see data.load_examples."""
    part, found = Part(), iter(found)
    while len(part.errors) < MOST_ERRORS and (rows := list(islice(found, BATCH))):
        read = [(where, *read_row(part, where, value, tokenizer, train_on, form)) for where, value in rows]
        texts = [row for _, _, row in read if isinstance(row, tuple) and isinstance(row[0], str)]
        encoded = iter(encode_texts(tokenizer, texts))
        for where, kind, row in read:
            if isinstance(row, ValueError):
                part.errors.append(f"{where}: {row}")
            else:
                row = next(encoded) if isinstance(row[0], str) else row
                part.add_row(*row, where, seq_len, too_long, is_text=kind == "text")
    return part


def read_row(part: Part, where: str, value: object, tokenizer, train_on: str, form: str) -> tuple:
    """(form, what it holds): its text and what is taught of it, or (ids, taught), or a ValueError."""
    part.rows += 1
    try:
        row = as_object(value)
        kind = form or form_of(row)
        part.take_form(kind, where)
        messages = plain_messages(row, kind)
        plain = chat_text(tokenizer, messages) if messages and train_on == "assistant" else None
        return kind, plain or encode_any(tokenizer, row, kind, train_on, part.notes)
    except ValueError as error:
        return "", error


def encode_any(tokenizer, row: dict, form: str, train_on: str, notes: Counter) -> tuple[list[int], bytes]:
    """(ids, taught) of a row that is more than plain chat; ValueError where something is wrong with it."""
    from .more_formats import to_messages
    from .more_tokens import encode_rich

    return encode_rich(tokenizer, *to_messages(row, form, notes), train_on, notes)
