"""What the data of a run holds, and what of it is trained: for a look before the run."""

import sys
from collections import Counter
from itertools import groupby

from ..run.errors import escaped, print0
from ..run.units import IGNORE
from .tokens import generation_prompt_ids


def show_masks(examples, tokenizer, count: int) -> None:
    """Print the first rows on rank 0, and what of them is trained."""
    for item in (examples[i] for i in range(min(count, len(examples)))):
        print0(f"{escaped(item.where)}\n{marked(item, tokenizer)}\n", ready=True)


def show_data(examples, held_out, loader) -> None:
    """Print how long the rows are, below the plan, which says everything else. loader: of the examples."""
    for name, part in (("lengths", examples), ("held out", held_out)):
        if part:
            print0(f"{name:9} {len(part):,} rows")
            print0("\n".join(histogram(part.lengths.tolist())), ready=True)
    print0(f"steps     {loader.per_epoch:,} an epoch")
    print0("checked   all that a run checks before it reads weights: flags, files and every row")


def marked(item, tokenizer) -> str:
    """A row as text: what is trained in green, or in [[brackets]] where standard output is no terminal, and
    the generation prompt before it in yellow, or in ((parentheses)). Line breaks are the row's own, other
    control characters are escaped.
    """
    colours = ("\033[33m", "\033[32m", "\033[0m")
    before, inside, after = colours if sys.stdout.isatty() else ("((", "[[", None)
    ids, labels = item.ids.tolist(), item.labels.tolist()
    asked, text, at = generation_prompt_ids(tokenizer), "", 0

    def words(first: int, last: int) -> str:
        return escaped(tokenizer.decode(ids[first:last]), keep="\n")

    for trained, run in groupby(labels, key=lambda label: label != IGNORE):
        end = at + len(list(run))
        if trained:
            text += f"{inside}{words(at, end)}{after or ']]'}"
        else:
            n = prompt_length(ids[at:end], asked) if end < len(ids) else 0
            text += words(at, end - n)
            text += f"{before}{words(end - n, end)}{after or '))'}" if n else ""
        at = end
    return text


def prompt_length(ids: list[int], asked: list[int]) -> int:
    """How many of the last ids are a generation prompt, or the beginning of one."""
    return next((n for n in range(min(len(asked), len(ids)), 0, -1) if ids[-n:] == asked[:n]), 0)


def histogram(lengths: list[int]) -> list[str]:
    """Lines with how many rows are how long, by powers of two."""
    counts = Counter((length - 1).bit_length() for length in lengths)
    most = max(counts.values())
    lines = []
    for bits in range(min(counts), max(counts) + 1):
        first, n = 2 ** (bits - 1) + 1 if bits else 1, counts[bits]
        lines.append(f"  {first:>7,} - {2**bits:>7,} tokens {n:>9,} {'#' * -(-40 * n // most)}")
    return lines
