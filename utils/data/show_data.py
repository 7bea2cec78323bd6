"""What the data of a run holds, and which of its tokens are trained: for a look before the run."""

from itertools import groupby

from ..run.errors import escaped, print0
from ..run.units import IGNORE


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
