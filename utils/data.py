"""Files -> rows, every row checked; rows -> examples."""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from .encode import encode_rows
from .rows import read_file
from .tokens import IGNORE

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


def find_rows(name: str | Path) -> tuple[Iterator[tuple[str, object]], list]:
    """((where, row) of what --dataset names, not yet read, and the files that it lies in)."""
    name = str(name)
    if name.endswith(".jsonl") and os.path.isfile(name):
        return read_file(Path(name)), [name]
    from .containers import find_any

    return find_any(name)
