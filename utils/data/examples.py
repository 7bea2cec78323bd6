"""Rows -> examples: tokenized, mixed by weights, held out."""

import hashlib
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from types import EllipsisType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..run.errors import check, first_five, print0
from ..run.files import replace_file
from ..run.units import IGNORE, seed_of
from .encode import TWICE, Part, Rows, chunks, encode_rows
from .formats import FORMS, IGNORED, PLAIN
from .rows import Source, find_sources

# Data of up to so many bytes is tokenized again at each start. The tokens of larger data are cached on
# disk: see cache.py.
SMALL = 2**24
SAID = 2**17  # rows after which a line is printed
ENOUGH = 100_000  # rows, of which all bad ones are found before they are an error
ARRAYS = {  # the arrays of tokenized rows: one file each, row after row
    "ids": torch.uint16,  # or int32, which read_tokens recognizes by the file's double size
    "loss_mask": torch.uint8,
    "lengths": torch.int64,
    "keys": torch.int64,
    "trained_tokens": torch.int64,
    "row_sizes": torch.int64,
}
TEXTS = ("where", "details")  # texts of each row: one file of texts, one file of sizes in bytes
FACTS = "said.json"  # counts, notes and origins of all rows
FormName = Literal["auto", *FORMS.values()]


class Origin(NamedTuple):
    """A source and its examples, [first, last)."""

    name: str
    weight: float  # 0: not set
    forms: dict  # form -> rows
    first: int
    last: int


class Texts:
    """n texts, stored one after the other in (bytes,) uint8. sizes: bytes of each, (n,) int64."""

    def __init__(self, texts: Tensor, sizes: Tensor):
        self.texts = texts
        self.ends = sizes.cumsum(0)

    def __getitem__(self, i: int) -> str:
        begin = self.ends[i - 1] if i else 0
        return bytes(self.texts[begin : self.ends[i]].numpy()).decode("utf-8", "surrogateescape")


class Example(NamedTuple):
    ids: Tensor  # (T,) int32
    labels: Tensor  # (T,) int32: the id if the token is trained, else IGNORE
    where: str


@dataclass(frozen=True, eq=False)
class Examples:
    """n tokenized rows, stored one after the other in memory-mapped files. N: tokens of all rows."""

    ids: Tensor  # (N,) int32; for documents with a small vocabulary uint16
    loss_mask: Tensor  # (N,) uint8: 1 if the token is trained; empty for documents
    bounds: Tensor  # (n + 1,) int64: row i is ids[bounds[i] : bounds[i + 1]]
    trained_tokens: Tensor  # (n,) int64: how many tokens of row i are trained
    keys: Tensor  # (n,) int64: a hash of row i's ids
    where: Sequence[str]  # the names of the n rows, such as "chat.jsonl:3"
    dropped: dict  # reason -> rows
    notes: dict  # what the user should know -> rows
    firsts: dict  # note -> the first row it is about
    # (n,) int64; its meaning depends on the task. pairs: the offset in row i of the rejected sequence, which
    # follows the chosen one. labels (KTO): the length of row i if it is desirable, else 0. documents: the
    # bytes of the text. Rows with pictures: the number of patches, or 0. Other rows: empty.
    row_sizes: Tensor
    # JSON of each row. Rows with pictures: [[source, width, height, bytes], ...]. prompts: [content,
    # columns, tools]. Other rows: empty.
    details: Texts
    unit: str  # the word for a row in the summary
    origins: Sequence[Origin]
    bad: Sequence[tuple]  # (where, reason) of each bad row that was dropped
    rows: Tensor | EllipsisType = ...  # numbers of the rows that are used; ...: all
    # 2 if the chosen and the rejected sequence of a pair are rows of their own, see pairs.sequences; `where`
    # has each pair's name once
    sides: int = 1

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Example:
        row = self.numbers[i]
        span = slice(self.bounds[row], self.bounds[row + 1])
        ids = self.ids[span]
        return Example(
            ids, ids.masked_fill(self.loss_mask[span] == 0, IGNORE), self.where[row // self.sides]
        )

    @cached_property
    def numbers(self) -> Tensor:
        """The numbers of the rows that are used, int64."""
        return torch.arange(len(self.bounds) - 1)[self.rows]

    @cached_property
    def lengths(self) -> Tensor:
        """Tokens of each row that is used, int64."""
        return self.bounds.diff()[self.rows]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all that is trained: ids, loss mask and row boundaries, in order. The path of the data
        does not matter.
        """
        digest = hashlib.sha256()
        for part in (
            self.bounds,
            self.ids,
            self.loss_mask,
            self.rows,
            self.row_sizes,
            self.details.texts,
        ):
            if isinstance(part, Tensor):
                digest.update(memoryview(part.numpy()))
        return digest.hexdigest()

    def summary(self) -> str:
        """The text that the plan prints."""
        trained = self.trained_tokens[self.rows].sum()  # 0 for prompts
        share = f", {trained / self.lengths.sum():.0%} trained" if trained else ""
        return f"{len(self):,} {self.unit}, {self.lengths.sum():,} tokens{share}{self.remarks()}"

    def remarks(self) -> str:
        """What was dropped, and what the user should know; each with a comma before it."""
        remarks = [f", {count:,} dropped: {reason}" for reason, count in self.dropped.items()]
        ignored_keys = []
        for note, count in self.notes.items():
            first = f" (the first: {self.firsts[note]})" if note in self.firsts else ""
            if note.startswith(IGNORED):
                ignored_keys.append(note.removeprefix(IGNORED))
            elif count:
                remarks.append(f", {count:,} {note}{first}")
        if ignored_keys:
            remarks.append(f", ignored keys: {first_five(sorted(ignored_keys))}")
        return "".join(remarks)

    def sources(self) -> list[str]:
        """One line per source: the forms of its rows and, if there are several sources, its share."""
        rows = self.numbers
        trained = self.trained_tokens[self.rows]
        lines = []
        for origin in self.origins:
            of_origin = (rows >= origin.first) & (rows < origin.last)
            forms = [f"{form} ({count:,} rows)" for form, count in origin.forms.items()]
            line = f"{origin.name}: {', '.join(forms) or 'no rows'}"
            if len(self.origins) > 1:
                rows_share = of_origin.sum() / len(rows)
                tokens_share = trained[of_origin].sum() / max(1, trained.sum())
                line += f", {rows_share:.1%} of rows, {tokens_share:.1%} of trained tokens"
            if origin.weight:
                line += f" (weight {origin.weight:g})"
            lines.append(line)
        return lines


def print_data(dataset: str, loader, held_out: Examples | None) -> None:
    """Print the plan's lines about the data. loader: GlobalBatches of the rows that are trained on."""
    evaluated = f"; held out: {held_out.summary()}" if held_out else ""
    print0(f"data      {dataset}: {loader.summary()}{evaluated}")
    parts = [loader.examples]
    if held_out and held_out.ids is not loader.examples.ids:  # they come from --eval_dataset
        parts.append(held_out)
    for part in parts:
        for line in part.sources():
            print0(f"form      {line}")


def longest_row(multiple: int, *parts: Examples | None) -> int:
    """Tokens of the longest row, padded to a multiple as collate does."""
    return math.ceil(max(int(part.lengths.max()) for part in parts if part) / multiple) * multiple


def check_positions(model: nn.Module, *parts: Examples | None, longest=0) -> None:
    """Refuse rows that are longer than a table of learned positions. Warn of rows that are longer than the
    model's rotary positions were trained for.

    In a pack the positions of each document begin at 0, so the longest row decides. longest: its tokens, if
    rows are not those of the parts.
    """
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or {}
    if not positions or rope.get("rope_type", "default") not in ("default", "llama3"):
        return
    longest = longest or longest_row(1, *parts)
    lengths = f"a row has {longest:,} tokens, and the model {positions:,} positions"
    tables = [name for name, _ in model.named_parameters() if re.search("wpe|pos(?!t)", name)]
    check(
        longest <= positions or not tables,
        f"{lengths}, learned ones ({first_five(tables)}) (fix: --seq_len {positions})",
    )
    if longest > positions and rope:
        print0(f"warning: {lengths} without rope scaling: it was not trained on such lengths")


def load_examples(rows: Rows, tokenizer) -> Examples:
    """Read and tokenize a data set.

    A row that has no trained token after it was cut is dropped and counted. ConfigError for bad rows (the
    first ten, and the number of others), and if all rows were dropped.
    """
    sources = find_sources(rows.dataset)
    size_bytes = sum(file.stat().st_size for source in sources for file in source.files)
    encode = partial(encode_rows, tokenizer=tokenizer, rows=rows)
    write = partial(write_tokens, sources, rows)
    small = SMALL // 16 if rows.processor else SMALL  # every picture is opened
    if size_bytes > small and not rows.max_rows:
        from .cache import cached_tokens

        return read_tokens(cached_tokens(sources, encode, write, read_tokens))
    with TemporaryDirectory() as folder:
        write(folder, partial(map, encode))
        return read_tokens(folder)


def load_data(rows: Rows, tokenizer, load=load_examples) -> tuple:
    """(examples, held-out examples or None). load: load_examples, or another function in its place. A
    tokenizer without a template of its own keeps "plain" if any row has turns: it is saved with the model.
    """
    if rows.eval_dataset:
        find_sources(rows.eval_dataset)  # a wrong name is said before all rows are tokenized
    examples = load(rows, tokenizer)
    forms = {form for origin in examples.origins for form in origin.forms}
    if not tokenizer.template_name and forms - PLAIN:  # turns were rendered with it
        tokenizer.template_name = "built-in plain"
    if rows.eval_share or rows.eval_dataset:
        from .held_out import hold_out

        return hold_out(examples, rows, lambda eval_rows: load(eval_rows, tokenizer))
    return examples, None


def write_tokens(
    sources: list[Source],
    rows: Rows,
    folder: Path | str,
    encode_chunks: Callable,
) -> None:
    """Write the files that read_tokens reads. encode_chunks: chunks of rows -> a Part of each, in order.
    ConfigError for bad rows.
    """

    def add(name, content):
        with open(Path(folder, name), "ab") as file:
            file.write(content)

    total = Part()
    origins = []
    for source in sources:
        forms = Counter()
        first = len(total.lengths)
        for part in encode_chunks(chunks(islice(source.read(), rows.max_rows or None))):
            forms.update(part.forms)
            total.join(part)
            for name in ARRAYS:
                add(name, getattr(part, name))
            for name in TEXTS:
                texts = [text.encode("utf-8", "surrogateescape") for text in getattr(part, name)]
                add(name, b"".join(texts))
                add(f"{name}_sizes", array("q", map(len, texts)))
            if total.rows % SAID < part.rows:
                print0(f"tokens    of {total.rows:,} rows are made")
            if total.bad and rows.bad_rows == "error" and total.rows > ENOUGH:
                total.close(rows)  # raises
        origins.append(Origin(source.name, source.weight, forms, first, len(total.lengths)))
    total.close(rows)
    facts = {name: getattr(total, name) for name in "dropped notes firsts bad".split()}
    facts |= {"unit": rows.task, "origins": origins}
    Path(folder, FACTS).write_text(json.dumps(facts))


def read_tokens(folder: Path | str) -> Examples:
    """The examples that write_tokens wrote. The files are memory-mapped: they may be deleted afterwards, and
    pages that are not read take no memory. With weighted sources, mixed_rows decides which rows are used.
    """

    def mapped(name, dtype):
        file = Path(folder, name)
        return torch.from_file(str(file), size=file.stat().st_size // dtype.itemsize, dtype=dtype)

    fields = {name: mapped(name, dtype) for name, dtype in ARRAYS.items()}
    for name in TEXTS:
        fields[name] = Texts(mapped(name, torch.uint8), mapped(f"{name}_sizes", torch.int64))
    fields["bounds"] = F.pad(fields.pop("lengths").cumsum(0), (1, 0))
    if len(fields["ids"]) > fields["bounds"][-1]:
        fields["ids"] = fields["ids"].view(torch.int32)
    fields |= json.loads(Path(folder, FACTS).read_text())
    fields["origins"] = [Origin(*origin) for origin in fields["origins"]]
    examples = Examples(**fields)
    if examples.unit != "documents" and any(origin.weight for origin in examples.origins):
        from .held_out import mixed_rows

        examples = replace(examples, rows=mixed_rows(examples, permutation))
    keys = examples.keys[examples.rows]
    return replace(examples, notes=examples.notes | {TWICE: len(keys) - len(keys.unique())})


@lru_cache(maxsize=4)
def permutation(rows: int, key: str) -> Tensor:
    """The numbers below `rows`, (rows,), in an order that depends only on `key`, not on the machine."""
    return torch.randperm(rows, generator=torch.Generator().manual_seed(seed_of(key)))


def write_bad_rows(out: Path, rank: int, *parts: Examples | None) -> None:
    """On rank 0, write the rows that --bad_rows drop left out to OUT/bad_rows.jsonl, if there are any."""
    bad = [row for part in parts if part for row in part.bad]
    if bad and not rank:
        lines = (json.dumps({"where": where, "why": why}) + "\n" for where, why in bad)
        replace_file(out / "bad_rows.jsonl", "".join(lines))
