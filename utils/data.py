"""Files -> rows, every row checked; rows -> examples."""

import hashlib
import os
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from .errors import check
from .formats import form_of, plain_messages
from .rows import MOST_ERRORS, NO_ROWS, as_object, raise_all, read_file
from .tokens import IGNORE, encode_chat

TWICE, CUT = "the same as a row before", "cut at --seq_len"
SMALL = 2**24  # bytes of data that are tokenized in memory at each start; more of it is kept: see cache.py


class Example(NamedTuple):
    ids: torch.Tensor  # (T,) int32
    labels: torch.Tensor  # (T,) int32: the id where it is taught, IGNORE elsewhere
    where: str


@dataclass(frozen=True, eq=False)
class Examples:
    """Tokenized rows, back to back in memory or in files that are mapped."""

    ids: torch.Tensor  # (N,) int32, of all rows
    taught: torch.Tensor  # (N,) uint8: 1 where the token is taught
    bounds: torch.Tensor  # (n + 1,) int64: row i is ids[bounds[i] : bounds[i + 1]]
    keys: torch.Tensor  # (n,) int64: a hash of row i's ids
    where: Sequence[str]  # n
    dropped: Counter = field(default_factory=Counter)  # reason -> rows
    notes: Counter = field(default_factory=Counter)  # what else is worth knowing -> rows
    rows: torch.Tensor | None = None  # the rows that count; None: all

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Example:
        row = i if self.rows is None else self.rows[i]
        ids, taught = (part[self.bounds[row] : self.bounds[row + 1]] for part in (self.ids, self.taught))
        return Example(ids, ids.masked_fill(taught == 0, IGNORE), self.where[row])

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row, (n,) int64."""
        lengths = self.bounds.diff()
        return lengths if self.rows is None else lengths[self.rows]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids and labels in their order: what is learned, wherever the file lies."""
        parts = [self.bounds, self.ids, self.taught, *([] if self.rows is None else [self.rows])]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(memoryview(part.numpy()))
        return digest.hexdigest()

    def summary(self) -> str:
        """What the plan prints."""
        tokens = int(self.lengths.sum())
        taught = self.taught.sum() if self.rows is None else sum((i.labels != IGNORE).sum() for i in self)
        notes = [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items()]
        notes += [f"{count:,} {what}" for what, count in self.notes.items() if count]
        return ", ".join(
            [f"{len(self):,} rows, {tokens:,} tokens, {int(taught) / tokens:.0%} taught", *notes]
        )


# --- rows -> examples


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

    def take_form(self, form: str, where: str) -> None:
        """A file holds rows of one form."""
        file = re.sub(r"(:| row )\d+$", "", where)
        first, _ = self.forms.setdefault(file, (form, where)) if form else (form, where)
        if form != first:
            raise ValueError(f"a row in {form} form, and the file's first row is {first}")

    def close(self, path: object) -> tuple[torch.Tensor, torch.Tensor]:
        """(bounds, keys) of Examples. ConfigError for bad rows (up to ten), and where nothing is left."""
        raise_all(self.errors)
        check(self.rows, f"{path}: {NO_ROWS}")
        why = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        check(self.lengths, f"{path}: all {self.rows} rows were dropped: {why}; raise --seq_len")
        keys = torch.tensor(self.keys)
        self.notes[TWICE] = len(keys) - len(keys.unique())
        return torch.tensor([0, *self.lengths]).cumsum(0), keys


def load_examples(
    path, tokenizer, seq_len, max_rows=0, progress=False, train_on="assistant", form="", too_long="truncate"
) -> Examples:
    """The rows of a data set as token ids and labels. `progress`: a bar, if standard error is a terminal;
    form: one of formats.FORMS, empty: told by each file's rows; train_on: see more_tokens.encode_rich.

    too_long, for rows of more than seq_len tokens: truncate cuts them, and plain text into pieces; drop
    leaves them out; error refuses them. A row in which nothing taught is left is dropped and counted.
    ConfigError for bad rows (up to ten), for two forms of rows in one file, and where all were dropped.
    """
    encode = partial(encode_rows, tokenizer=tokenizer, seq_len=seq_len, train_on=train_on, form=form)
    encode = partial(encode, too_long=too_long)
    found, files = find_rows(path)
    if sum(os.path.getsize(file) for file in files if os.path.isfile(file)) > SMALL and not max_rows:
        from .cache import cached_tokens

        return Examples(*cached_tokens(path, files, found, encode))
    found = islice(found, max_rows or None)
    part = encode(tqdm(found, f"tokenizing {path}", unit=" rows", disable=None if progress else True))
    bounds, keys = part.close(path)
    ids, taught = (
        torch.frombuffer(part.ids, dtype=torch.int32),
        torch.frombuffer(part.taught, dtype=torch.uint8),
    )
    return Examples(ids, taught, bounds, keys, part.where, part.dropped, part.notes)


def encode_rows(found: Iterable[tuple[str, object]], tokenizer, seq_len, train_on, form, too_long) -> Part:
    """Tokenize (where, row) as far as rows are good, or until ten are not; see load_examples."""
    part = Part()
    for where, value in found:
        part.rows += 1
        try:
            row = as_object(value)
            kind = form or form_of(row)
            part.take_form(kind, where)
            messages = plain_messages(row, kind)
            encoded = encode_chat(tokenizer, messages) if messages and train_on == "assistant" else None
            ids, taught = encoded or encode_any(tokenizer, row, kind, train_on, part.notes)
            if len(ids) > seq_len and too_long == "error":
                fix = "--too_long truncate or drop"
                raise ValueError(f"{len(ids):,} tokens, more than --seq_len {seq_len} (fix: {fix})")
        except ValueError as error:
            part.errors.append(f"{where}: {error}")
            if len(part.errors) == MOST_ERRORS:
                break
            continue
        if len(ids) > seq_len and too_long == "drop":
            part.dropped["longer than --seq_len"] += 1
        elif not any(taught[1:seq_len]):
            part.dropped[f"nothing taught in the first {seq_len} tokens"] += 1
        else:
            text = kind == "text"  # is cut into pieces
            part.notes[CUT] += len(ids) > seq_len and not text
            for at in range(0, len(ids) if text else 1, seq_len):
                part.add(ids[at : at + seq_len], taught[at : at + seq_len], where)
    return part


def find_rows(name: str | Path) -> tuple[Iterator[tuple[str, object]], list]:
    """((where, row) of what --dataset names, not yet read, and the files that it lies in)."""
    name = str(name)
    if name.endswith(".jsonl") and os.path.isfile(name):
        return read_file(Path(name)), [name]
    from .containers import find_any

    return find_any(name)


def encode_any(tokenizer, row: dict, form: str, train_on: str, notes: Counter) -> tuple[list[int], bytes]:
    """(ids, taught) of a row that is more than plain chat; ValueError where something is wrong with it."""
    from .more_formats import to_messages
    from .more_tokens import encode_rich

    return encode_rich(tokenizer, *to_messages(row, form, notes), train_on, notes)
