"""Rows -> examples: tokenized, mixed by weights, held out."""

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import groupby, islice
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from tqdm import tqdm

from ..run.errors import check, escaped, first_five, print0
from ..run.files import replace_file
from ..run.units import IGNORE
from .cache import cached_tokens
from .encode import TWICE, Part, chunks, encode_rows
from .formats import FORMS, IGNORED, parse_columns
from .rows import Source, find_sources

# bytes of data that are tokenized in memory at each start; more of it is kept: see cache.py
SMALL = 2**24
MORE_ROWS = 100_000  # rows that are read after the first fault, to find others
BAD_ROWS = "bad_rows.jsonl"
FormName = Literal["auto", *FORMS.values()]


class Origin(NamedTuple):
    """A source and its examples, [first, last)."""

    name: str
    weight: float  # 0: none is set
    forms: dict[str, int]  # form -> rows
    first: int
    last: int


class Example(NamedTuple):
    ids: torch.Tensor  # (T,) int32
    labels: torch.Tensor  # (T,) int32: the id where it is trained, IGNORE elsewhere
    where: str


@dataclass(frozen=True, eq=False)
class Examples:
    """Tokenized rows, back to back in memory or in files that are mapped."""

    ids: torch.Tensor  # (N,) int32, of all rows
    loss_mask: torch.Tensor  # (N,) uint8: 1 where the token is trained
    bounds: torch.Tensor  # (n + 1,) int64: row i is ids[bounds[i] : bounds[i + 1]]
    trained_tokens: torch.Tensor  # (n,) int64: how many tokens of row i are trained
    keys: torch.Tensor  # (n,) int64: a hash of row i's ids
    where: Sequence[str]  # n
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> rows
    notes: dict[str, int] = field(default_factory=dict)  # what else is worth knowing -> rows
    firsts: dict[str, str] = field(default_factory=dict)  # note -> the first row that it is of
    # the first row that inference would ask for otherwise than it is trained, and how
    problem: str = ""
    rows: torch.Tensor | None = None  # the rows that count; None: all
    origins: Sequence[Origin] = ()
    bad: Sequence[tuple[str, str]] = ()  # (where, why) of rows that were dropped for being wrong

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Example:
        row = i if self.rows is None else self.rows[i]
        ids, loss_mask = (
            part[self.bounds[row] : self.bounds[row + 1]] for part in (self.ids, self.loss_mask)
        )
        return Example(ids, ids.masked_fill(loss_mask == 0, IGNORE), self.where[row])

    def of_rows(self, values: torch.Tensor) -> torch.Tensor:
        """Those of some values (n,) that belong to rows that count."""
        return values if self.rows is None else values[self.rows]

    @cached_property
    def lengths(self) -> torch.Tensor:
        """Tokens of each row, (n,) int64."""
        return self.of_rows(self.bounds.diff())

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the ids and labels in their order: what is learned, wherever the file lies."""
        parts = [self.bounds, self.ids, self.loss_mask, *([] if self.rows is None else [self.rows])]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(memoryview(part.numpy()))
        return digest.hexdigest()

    def summary(self) -> str:
        """What the plan prints."""
        tokens, trained = int(self.lengths.sum()), int(self.of_rows(self.trained_tokens).sum())
        notes = [f"{count:,} dropped: {reason}" for reason, count in self.dropped.items()]
        ignored = []
        for what, count in self.notes.items():
            first = f" (the first: {self.firsts[what]})" if what in self.firsts else ""
            if what.startswith(IGNORED):
                ignored.append(what.removeprefix(IGNORED))
            elif count:
                notes.append(f"{count:,} {what}{first}")
        if ignored:
            notes.append(f"ignored keys: {first_five(sorted(ignored))}")
        return ", ".join(
            [f"{len(self):,} rows, {tokens:,} tokens, {trained / tokens:.0%} trained", *notes]
        )

    def sources(self) -> list[str]:
        """Lines that say which form each source's rows have, and of several sources what each contributes."""
        rows = torch.arange(len(self.keys)) if self.rows is None else self.rows
        trained = self.of_rows(self.trained_tokens)
        lines = []
        for origin in self.origins:
            mine = (rows >= origin.first) & (rows < origin.last)
            line = f"{origin.name}: {_forms(origin)}"
            if len(self.origins) > 1:
                rows_share = int(mine.sum()) / len(rows)
                tokens_share = int(trained[mine].sum()) / max(1, int(trained.sum()))
                line += f", {rows_share:.1%} of rows, {tokens_share:.1%} of trained tokens"
            if origin.weight:
                line += f" (weight {origin.weight:g})"
            lines.append(line)
        return lines


def _forms(origin: Origin) -> str:
    """The forms of a source's rows: "chat", or "chat (20 rows), alpaca (3 rows)"."""
    if len(origin.forms) == 1:
        return next(iter(origin.forms))
    return ", ".join(f"{form} ({rows:,} rows)" for form, rows in origin.forms.items()) or "no rows"


def print_data(dataset: str, summary: str, examples: Examples, held_out: Examples | None) -> None:
    """What the plan says of the data; summary: the loader's."""
    evaluated = f"; held out: {held_out.summary()}" if held_out else ""
    print0(f"data      {dataset}: {summary}{evaluated}")
    for part in (examples, held_out if held_out and held_out.ids is not examples.ids else None):
        for line in part.sources() if part else ():
            print0(f"form      {line}")
        if part and part.problem:
            print0(f"warning: {part.problem}")
        if part and part.bad:
            where, why = part.bad[0]
            print0(f"warning: {len(part.bad):,} bad rows are left out; the first is {where}: {why}")


@dataclass(frozen=True)
class Rows:
    """Which rows of which data are read, and how; see load_examples and split_by_hash."""

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


def load_data(rows: Rows, tokenizer, progress: bool) -> tuple[Examples, Examples | None]:
    """(examples, held-out ones or None); see load_examples."""
    load = partial(
        load_examples,
        tokenizer=tokenizer,
        seq_len=rows.seq_len,
        max_rows=rows.max_rows,
        progress=progress,
        train_on=rows.train_on,
        form=rows.format.removeprefix("auto"),
        too_long=rows.too_long,
        columns=rows.columns,
        bad_rows=rows.bad_rows,
    )
    examples = load(rows.dataset)
    if rows.eval_dataset:
        return examples, load_held_out(load, rows.eval_dataset, examples)
    if rows.eval_share:
        return split_by_hash(examples, rows.eval_share)
    return examples, None


def longest_row(seq_len: int, packing: bool, *parts: Examples | None) -> int:
    """Tokens of the longest row of a batch, as collate pads it: of packs, whatever they hold, seq_len."""
    if packing:
        return seq_len
    longest = max(int(part.lengths.max()) for part in parts if part)
    return min(seq_len, math.ceil(longest / 8) * 8)


def load_examples(
    path,
    tokenizer,
    seq_len,
    max_rows=0,
    progress=False,
    train_on="assistant",
    form="",
    too_long="truncate",
    columns="",
    bad_rows="error",
) -> Examples:
    """The rows of a data set as token ids and labels. `progress`: a bar, if standard error is a terminal;
    form: one of formats.FORMS, empty: told by each row; train_on: see chats.render_chats; max_rows: of each
    source; columns: see formats.parse_columns.

    too_long, for rows of more than seq_len tokens: truncate cuts them, and plain text into pieces; drop
    leaves them out; error refuses them. A row in which no trained token is left is dropped and counted.
    ConfigError for bad rows (up to ten, and how many more), and where all were dropped. bad_rows drop: those
    rows are left out, counted and listed in Examples.bad.
    """
    settings = {"form": form, "columns": parse_columns(columns), "bad_rows": bad_rows}
    settings |= {"seq_len": seq_len, "train_on": train_on, "too_long": too_long}
    encode = partial(encode_rows, tokenizer=tokenizer, **settings)
    sources = find_sources(str(path))
    bar = tqdm(desc=f"tokenizing {escaped(path)}", unit=" rows", disable=None if progress else True)
    collect = partial(gather, path, sources, settings["columns"], max_rows, bar)
    files = [file for source in sources for file in source.files if os.path.isfile(file)]
    if sum(map(os.path.getsize, files)) > SMALL and not max_rows:
        arrays, said = cached_tokens(sources, encode, collect)
    else:
        arrays, said = in_memory(encode, collect)
    said["origins"] = [Origin(*origin) for origin in said["origins"]]
    return draw(Examples(**arrays, **said))


def gather(
    path: object,
    sources: list[Source],
    columns: dict[str, str],
    max_rows: int,
    bar: tqdm,
    run: Callable[[Iterable], Iterator[tuple[int, Part]]],
    keep: Callable[[Part], None],
) -> tuple[Part, dict]:
    """(what the rows of all sources add up to, the fields of Examples that say something of them).

    run: tokenizes (number of a source, some rows), see encode.processes; keep: is given each part, in order.
    ConfigError for bad rows.
    """
    total = Part()
    ends = [0] * len(sources)
    forms = [Counter() for _ in sources]
    last_row = math.inf
    numbered = (
        (number, rows)
        for number, source in enumerate(sources)
        for rows in chunks(islice(source.read(), max_rows or None))
    )
    for number, part in run(numbered):
        total.join(part)
        keep(part)
        forms[number].update(part.forms)
        ends[number] = len(total.lengths)
        bar.update(part.rows)
        if total.faults:
            last_row = min(last_row, total.rows + MORE_ROWS)
        if total.rows >= last_row:
            break
    bar.close()
    total.close(path, columns)
    origins = []
    for source, form, first, last in zip(sources, forms, [0, *ends], ends, strict=False):
        origins.append(Origin(source.name, source.weight, form, first, last))
    fields = ("dropped", "notes", "firsts", "problem", "bad")
    return total, {name: getattr(total, name) for name in fields} | {"origins": origins}


def in_memory(encode: Callable, collect: Callable) -> tuple[dict, dict]:
    """As cache.cached_tokens, by this process and in its memory."""
    kept = Part()

    def run(numbered: Iterable) -> Iterator[tuple[int, Part]]:
        return ((number, encode(rows)) for number, rows in numbered)

    def keep(part: Part) -> None:
        kept.ids += part.ids
        kept.loss_mask += part.loss_mask
        kept.where += part.where

    total, said = collect(run, keep)
    arrays = {
        "ids": torch.frombuffer(kept.ids, dtype=torch.int32),
        "loss_mask": torch.frombuffer(kept.loss_mask, dtype=torch.uint8),
        "bounds": torch.tensor([0, *total.lengths]).cumsum(0),
        "trained_tokens": torch.tensor(total.trained_tokens),
        "keys": torch.tensor(total.keys),
        "where": kept.where,
    }
    return arrays, said


@lru_cache(maxsize=4)
def permutation(rows: int, key: str) -> torch.Tensor:
    """The numbers below `rows`, (rows,), in an order that depends only on `key`, on every machine."""
    digest = hashlib.sha256(key.encode()).digest()
    seed = int.from_bytes(digest[:8], "little") >> 1
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(rows, generator=generator)


def draw(examples: Examples) -> Examples:
    """The examples that count: all, or of weighted sources as many of each as its weight says, none twice,
    all of the one that is scarcest for its weight.

    What is weighed are examples as they are trained, after long rows were cut or dropped. Which ones follows
    from the source's name, so it is the same everywhere. Their order stays.
    """
    drawn = None
    if any(origin.weight for origin in examples.origins):
        for origin in examples.origins:
            check(
                origin.last > origin.first,
                f"{origin.name}: no row is left of it, so nothing can be mixed",
            )
        total = min((origin.last - origin.first) / origin.weight for origin in examples.origins)
        parts = []
        for origin in examples.origins:
            order = permutation(origin.last - origin.first, origin.name)
            parts.append(origin.first + order[: round(total * origin.weight)].sort().values)
        drawn = torch.cat(parts)
        check(len(drawn), "of all sources nothing is drawn: one has almost no rows for its weight")
    examples = replace(examples, rows=drawn)
    keys = examples.of_rows(examples.keys)
    examples.notes[TWICE] = len(keys) - len(keys.unique())
    return examples


def write_bad_rows(out: Path, rank: int, *parts: Examples | None) -> None:
    """On rank 0, list the rows that --bad_rows drop has left out in OUT/bad_rows.jsonl, if there are any."""
    bad = [row for part in parts if part for row in part.bad]
    if bad and rank == 0:
        lines = (json.dumps({"where": where, "why": why}) + "\n" for where, why in bad)
        replace_file(out / BAD_ROWS, "".join(lines))


def load_held_out(load: Callable[[str], Examples], path: str, examples: Examples) -> Examples:
    """The held-out rows of a data set of their own, with a warning for those that are also trained on."""
    held_out = load(path)
    keys = held_out.of_rows(held_out.keys)
    trained_keys = examples.of_rows(examples.keys)
    both = int(torch.isin(keys, trained_keys).sum())
    if both:
        print0(f"warning: {both:,} of {len(held_out):,} held-out rows are trained on too")
    return held_out


def split_by_hash(examples, share: float) -> tuple:
    """(train, held out): about `share` of the examples are held out, each by the hash of its own ids.

    So a row stays on its side when others come, go or move, and its copies stay with it.
    """
    keys = examples.of_rows(examples.keys)
    rows = examples.of_rows(torch.arange(len(examples.keys)))
    held = keys.double() / 2.0**64 + 0.5 < share  # keys are hashes: even in [-2**63, 2**63)
    split = f"--eval_share {share} holds out {int(held.sum())} of {len(examples)} examples"
    check(0 < held.sum() < len(held), f"{split}; choose another share, or name an --eval_dataset")
    train, held_out = (replace(examples, rows=rows[which]) for which in (~held, held))
    return train, replace(held_out, dropped={}, notes={}, bad=())


def show_masks(examples, tokenizer, count: int) -> None:
    """Print the first rows on rank 0, with their trained tokens marked."""
    for i in range(min(count, len(examples))):
        item = examples[i]
        print0(f"{escaped(item.where)}\n{marked(item, tokenizer)}\n", ready=True)


def print_lengths(examples, held_out) -> None:
    """The lengths of the rows."""
    for name, part in (("lengths", examples), ("held out", held_out)):
        if part:
            half, most = int(part.lengths.median()), int(part.lengths.max())
            print0(f"{name:9} {len(part):,} rows; half have at most {half:,} tokens, all {most:,}")


def marked(item, tokenizer) -> str:
    """A row as text, its trained tokens in [[brackets]]. Line breaks are the row's own, other control
    characters are escaped.
    """
    ids = iter(item.ids.tolist())
    text = ""
    for is_trained, run in groupby(item.labels.tolist(), lambda label: label != IGNORE):
        words = escaped(tokenizer.decode([next(ids) for _ in run]), keep="\n")
        text += f"[[{words}]]" if is_trained else words
    return text
