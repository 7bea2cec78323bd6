"""What the data of a run holds, and which of its tokens are trained: for a look before the run."""

import math
import sys
from collections import Counter
from itertools import groupby

from ..run.errors import escaped, print0
from ..run.units import IGNORE
from .tokens import generation_prompt_ids

YELLOW, GREEN, RESET = "\033[33m", "\033[32m", "\033[0m"


def show_masks(examples, tokenizer, count: int) -> None:
    """Print the first rows on rank 0, with their trained tokens marked."""
    for i in range(min(count, len(examples))):
        item = examples[i]
        print0(f"{escaped(item.where)}\n{marked(item, tokenizer)}\n", ready=True)


def show_data(examples, held_out, loader) -> None:
    """Print the lengths of the rows below the plan, which says everything else. loader: of the examples."""
    for name, part in (("lengths", examples), ("held out", held_out)):
        if part:
            print0(f"{name:9} {len(part):,} rows")
            print0("\n".join(histogram(part.lengths.tolist())), ready=True)
    print0(f"steps     {loader.per_epoch:,} an epoch")
    print0("checked   all that a run checks before it reads weights: flags, files and every row")


def marked(item, tokenizer) -> str:
    """A row as text: trained tokens in green, or in [[brackets]] where standard output is no terminal; the
    generation prompt before them in yellow, or in ((parentheses)). Line breaks are the row's own, other
    control characters are escaped.
    """
    if sys.stdout.isatty():
        prompt_style = (YELLOW, RESET)
        trained_style = (GREEN, RESET)
    else:
        prompt_style = ("((", "))")
        trained_style = ("[[", "]]")
    ids = item.ids.tolist()
    labels = item.labels.tolist()
    prompt_ids = generation_prompt_ids(tokenizer)

    def decoded(first: int, last: int, style: tuple[str, str] = ("", "")) -> str:
        before, after = style
        return before + escaped(tokenizer.decode(ids[first:last]), keep="\n") + after

    text = ""
    begin = 0
    for is_trained, run in groupby(label != IGNORE for label in labels):
        end = begin + len(list(run))
        if is_trained:
            text += decoded(begin, end, trained_style)
        elif end == len(ids):  # no answer follows
            text += decoded(begin, end)
        else:
            prompt_begin = end - prompt_length(ids[begin:end], prompt_ids)
            text += decoded(begin, prompt_begin)
            if prompt_begin < end:
                text += decoded(prompt_begin, end, prompt_style)
        begin = end
    return text


def prompt_length(ids: list[int], prompt_ids: list[int]) -> int:
    """How many of the last ids are a generation prompt, or the beginning of one."""
    for length in range(min(len(prompt_ids), len(ids)), 0, -1):
        if ids[-length:] == prompt_ids[:length]:
            return length
    return 0


def histogram(lengths: list[int]) -> list[str]:
    """Lines that say how many rows have which length, by powers of two."""
    counts = Counter((length - 1).bit_length() for length in lengths)
    most = max(counts.values())
    lines = []
    for bits in range(min(counts), max(counts) + 1):
        first = 2 ** (bits - 1) + 1 if bits else 1
        rows = counts[bits]
        bar = "#" * math.ceil(40 * rows / most)
        lines.append(f"  {first:>7,} - {2**bits:>7,} tokens {rows:>9,} {bar}")
    return lines
