"""Files -> rows, every row checked; rows -> examples, and the global batches that define a run.

The order of a run is a pure function of (fingerprint, seed, step): global batch k of an epoch is rows
[k G, (k + 1) G) of the epoch's permutation, however many ranks and micro-batches share it (house.md, §2).
"""

import hashlib
import math
import os
from array import array
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from .errors import check
from .formats import form_of, plain_messages
from .rows import Row, raise_all, read_jsonl
from .tokens import IGNORE, encode_chat

TWICE = "the same as a row before"


class Example(NamedTuple):
    ids: array  # T token ids of 4 bytes; a list of Python integers takes about 36 for each
    labels: array  # T ids where taught, IGNORE elsewhere
    where: str


@dataclass(frozen=True)
class Examples:
    items: list[Example]
    dropped: Counter = field(default_factory=Counter)  # reason -> rows
    truncated: int = field(default=0, kw_only=True)  # rows cut at seq_len and kept
    notes: Counter = field(default_factory=Counter, kw_only=True)  # what else is worth knowing -> rows

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids and labels in their order: what is learned, wherever the file lies."""
        digest = hashlib.sha256()
        for item in self.items:
            digest.update(len(item.ids).to_bytes(8, "little") + item.ids.tobytes() + item.labels.tobytes())
        return digest.hexdigest()

    def summary(self) -> str:
        """What the plan prints."""
        tokens = sum(len(item.ids) for item in self.items)
        taught = sum(label != IGNORE for item in self.items for label in item.labels)
        notes = [f"{self.truncated:,} cut at --seq_len"] if self.truncated else []
        notes += [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items()]
        notes += [f"{count:,} {what}" for what, count in self.notes.items() if count]
        head = f"{len(self.items):,} rows, {tokens:,} tokens, {taught / tokens:.0%} taught"
        return ", ".join([head, *notes])


# --- rows -> examples


def load_examples(
    path, tokenizer, seq_len: int, max_rows=0, progress=False, train_on="assistant", form=""
) -> Examples:
    """The rows of a file as token ids and labels. `progress`: a bar, if standard error is a terminal; form:
    one of formats.FORMS, empty: told by the rows' keys; train_on: see encode_chat.

    A longer row is cut at seq_len tokens, plain text into pieces of them; a row in which nothing taught is
    left is dropped and counted.
    ConfigError for bad rows (up to ten), for two forms of rows in one file, and where all were dropped.
    """
    rows = read_rows(path, max_rows)
    items, dropped, notes, errors, truncated, given, seen = [], Counter(), Counter(), [], 0, form, set()
    for row in tqdm(rows, f"tokenizing {path}", unit=" rows", disable=None if progress else True):
        try:
            found = given or form_of(row.data)
            form = form or found
            if found and found != form:
                raise ValueError(f"a row in {found} form, and the file's first row is {form}")
            messages = plain_messages(row.data, found)
            encoded = encode_chat(tokenizer, messages) if messages and train_on == "assistant" else None
            ids, labels = encoded or encode_any(tokenizer, row.data, found, train_on, notes)
        except ValueError as error:
            errors.append(f"{row.where}: {error}")
            continue
        if all(label == IGNORE for label in labels[1:seq_len]):
            dropped[f"nothing taught in the first {seq_len} tokens"] += 1
            continue
        truncated += len(ids) > seq_len and form != "text"
        for at in range(0, len(ids) if form == "text" else 1, seq_len):  # plain text is cut into pieces
            piece = slice(at, at + seq_len)
            items.append(Example(array("i", ids[piece]), array("i", labels[piece]), row.where))
            notes[TWICE] += (key := hash(items[-1].ids.tobytes())) in seen
            seen.add(key)
    raise_all(errors)
    why = ", ".join(f"{count} x {reason}" for reason, count in dropped.items())
    check(items, f"{path}: all {len(rows)} rows were dropped: {why}; raise --seq_len")
    return Examples(items, dropped, truncated=truncated, notes=notes)


def read_rows(name: str | Path, max_rows: int = 0) -> list[Row]:
    """The rows that --dataset names: of a .jsonl file, else see containers.py."""
    name = str(name)
    if name.endswith(".jsonl") and os.path.isfile(name):
        return read_jsonl(Path(name), max_rows)
    from .containers import read_any

    return read_any(name, max_rows)


def encode_any(tokenizer, row: dict, form: str, train_on: str, notes: Counter) -> tuple[list[int], list[int]]:
    """(ids, labels) of a row that is more than plain chat; ValueError where something is wrong with it."""
    from .more_formats import to_messages
    from .more_tokens import encode_rich

    return encode_rich(tokenizer, *to_messages(row, form, notes), train_on, notes)


# --- examples -> global batches


def divide_global_batch(global_batch_size: int, batch_size: int, grad_accum: int, ranks: int):
    """(sequences per optimizer step, micro-batches of a rank in it) from what is given; 0 means derive it.

    ConfigError where they contradict each other names what would fit.
    """
    at_once = batch_size * ranks
    if not global_batch_size:
        return at_once * max(1, grad_accum), max(1, grad_accum)
    fits = [b for b in range(1, global_batch_size // ranks + 1) if global_batch_size % (b * ranks) == 0]
    counts = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
    fix = f"--batch_size {', '.join(map(str, fits))}" if fits else f"{', '.join(map(str, counts))} ranks"
    micro_batches, rest = divmod(global_batch_size, at_once)
    product = f"--batch_size {batch_size} x {ranks} ranks"
    check(not rest, f"--global_batch_size {global_batch_size} is no multiple of {product} (fix: {fix})")
    wanted = f"--grad_accum {grad_accum} x {product} is not --global_batch_size {global_batch_size}"
    check(grad_accum in (0, micro_batches), f"{wanted} (fix: leave one of them out)")
    return global_batch_size, micro_batches


@dataclass(frozen=True)
class Batch:
    """One micro-batch of B examples, padded on the right to T tokens."""

    ids: torch.Tensor  # (B, T) int64
    labels: torch.Tensor  # (B, T) int64; the taught tokens are those != IGNORE
    mask: torch.Tensor  # (B, T) bool; false where padded
    where: list[str]

    def to(self, device: torch.device, pin_memory: bool = False) -> "Batch":
        """The batch on a device; for a GPU by way of page-locked memory, so that the copy overlaps."""
        pin = pin_memory and device.type == "cuda"
        tensors = (t.pin_memory() if pin else t for t in (self.ids, self.labels, self.mask))
        return Batch(*(t.to(device, non_blocking=pin) for t in tensors), self.where)


def collate(items: list[Example], pad_id: int) -> Batch:
    """A batch as long as its longest example, rounded up to a multiple of 8 (for the matrix units)."""
    length = math.ceil(max(len(item.ids) for item in items) / 8) * 8
    ids = torch.full((len(items), length), pad_id)
    labels = torch.full_like(ids, IGNORE)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, item in enumerate(items):
        size = len(item.ids)
        ids[row, :size] = torch.tensor(item.ids)
        labels[row, 1:size] = torch.tensor(item.labels)[1:]  # nothing comes before the first to predict it
        mask[row, :size] = True
    return Batch(ids, labels, mask, [item.where for item in items])


@lru_cache(maxsize=4)
def permutation(rows: int, key: str) -> list[int]:
    """The numbers below `rows` in an order that is a function of `key`, the same on every machine."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()


class GlobalBatches:
    """This rank's micro-batches of each global batch; `per_epoch` global batches make an epoch.

    The last one of an epoch may be smaller: it is trained as it is. All ranks give equally many micro-batches
    for a step, because FSDP's collectives need it; a rank that has no row left gives a filler that teaches
    nothing. `rank` of `ranks` counts the ranks that share the data.
    """

    def __init__(self, examples, seed, global_batch_size, batch_size, rank, ranks, pad_id):
        self.items, self.global_batch_size, self.batch_size = examples.items, global_batch_size, batch_size
        self.rank, self.ranks, self.pad_id = rank, ranks, pad_id
        self.per_epoch = math.ceil(len(self.items) / global_batch_size)
        self._key = f"{examples.fingerprint} {seed}"

    def batches(self, step: int) -> list[Batch]:
        """This rank's micro-batches of global batch `step`, counted from 0 over all epochs."""
        epoch, k = divmod(step, self.per_epoch)
        order = permutation(len(self.items), f"{self._key} {epoch}")
        first = k * self.global_batch_size
        rows = [self.items[i] for i in order[first : first + self.global_batch_size]]
        # Dealt by length, forth and back over the ranks, so that they work and wait alike. The loss is a sum
        # over the global batch: it does not matter who has which row.
        rows.sort(key=lambda item: len(item.ids), reverse=True)
        turns = (self.rank, 2 * self.ranks - 1 - self.rank)
        mine = [item for i, item in enumerate(rows) if i % (2 * self.ranks) in turns]
        filler = [Example(array("i", [self.pad_id]), array("i", [IGNORE]), "filler")]
        most = math.ceil(len(rows) / self.ranks)  # rows of the rank that has most
        parts = [mine[i : i + self.batch_size] or filler for i in range(0, most, self.batch_size)]
        return [collate(part, self.pad_id) for part in parts]
