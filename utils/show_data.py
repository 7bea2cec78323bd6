"""What the data of a run holds, and what of it is taught: for a look before the run."""

import sys
from collections import Counter
from itertools import groupby

from .errors import print0
from .tokens import IGNORE


def show_data(examples, held_out, tokenizer, masks: int, global_batch: int, pack_size: int) -> None:
    """Print on rank 0 the masks of the first rows; without any, a summary of all of them.

    global_batch: rows of a step; pack_size: tokens of a pack, 0 without packing.
    """
    if masks:
        for item in (examples[i] for i in range(min(masks, len(examples)))):
            print0(f"{item.where}\n{marked(item, tokenizer)}\n")
        return
    for name, part in (("data", examples), ("held out", held_out)):
        if part:
            print0(f"{name:9} {part.summary()}")
            print0("\n".join(histogram(part.lengths.tolist())))
    rows = len(examples)
    if pack_size:
        from .packing import pack

        rows = len(pack(examples.lengths, pack_size)[1])
        full = int(examples.lengths.sum()) / rows / pack_size
        print0(f"packs     {rows:,} of {pack_size} tokens, {full:.1%} full")
    print0(f"steps     {-(-rows // global_batch):,} an epoch, of {global_batch} rows")
    print0("checked   flags, model folder, tokenizer and every row; no weight was read")


def marked(item, tokenizer) -> str:
    """A row as text, what is taught in green, or in [[brackets]] where standard output is no terminal."""
    before, after = ("\033[32m", "\033[0m") if sys.stdout.isatty() else ("[[", "]]")
    text, pairs = "", zip(item.ids, item.labels, strict=True)
    for taught, run in groupby(pairs, key=lambda pair: pair[1] != IGNORE):
        words = tokenizer.decode([token for token, _ in run])
        text += before + words + after if taught else words
    return text


def histogram(lengths: list[int]) -> list[str]:
    """Lines with how many rows are how long, by powers of two."""
    counts = Counter((length - 1).bit_length() for length in lengths)
    most = max(counts.values())
    lines = []
    for bits in range(min(counts), max(counts) + 1):
        first, n = 2 ** (bits - 1) + 1 if bits else 1, counts[bits]
        lines.append(f"  {first:>7,} - {2**bits:>7,} tokens {n:>9,} {'#' * -(-40 * n // most)}")
    return lines
