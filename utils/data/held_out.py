"""Which rows are used: the selection from weighted sources, and the rows held out from training."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..run.errors import check, print0
from .encode import Rows


def mixed_rows(examples, order_of: Callable) -> Tensor:
    """The row numbers (n,) selected from weighted sources. The counts are proportional to the weights. No row
    is taken twice; of the source with the fewest rows for its weight, all are taken. order_of: see
    examples.permutation.

    Counted are trained examples, after long rows were cut or dropped. The selection depends only on the name
    of the source and its number of rows, so it is the same on every machine. The order of rows is kept.
    """
    for origin in examples.origins:
        check(
            origin.last > origin.first,
            f"{origin.name}: no row is left of it, so nothing can be mixed",
        )
    total = min((origin.last - origin.first) / origin.weight for origin in examples.origins)
    parts = []
    for origin in examples.origins:
        order = order_of(origin.last - origin.first, origin.name)
        count = round(total * origin.weight)
        check(
            count,
            f"{origin.name}: weight {origin.weight:g} is no whole row (fix: a larger one, or more others)",
        )
        parts.append(origin.first + order[:count].sort().values)
    return torch.cat(parts)


def hold_out(examples, rows: Rows, load: Callable) -> tuple:
    """(examples, held-out examples) by rows.eval_share or rows.eval_dataset. load: Rows -> examples."""
    if rows.eval_share:
        return split_by_hash(examples, rows.eval_share)
    held_out = load(replace(rows, dataset=rows.eval_dataset))
    count = torch.isin(held_out.keys[held_out.rows], examples.keys[examples.rows]).sum()
    if count:
        print0(f"warning: {count:,} of {len(held_out):,} held-out rows are trained on too")
    return examples, held_out


def split_by_hash(examples, share: float) -> tuple:
    """(train, held out). A hash of an example's ids decides, so that about `share` is held out.

    A row therefore stays on its side if other rows are added, removed or moved. Duplicates stay together, and
    so do the sequences of one row, for which the last one decides.
    """
    rows = examples.numbers
    keys = examples.keys[rows]
    if examples.unit != "documents":  # these are one sequence each, and may be many millions
        names = []
        for row in rows.tolist():
            name = examples.where[row]
            # A text file is one row, but its pieces have no text in common.
            names.append(name if name[-1].isdigit() else row)
        key_of = dict(zip(names, keys.tolist(), strict=True))
        keys = torch.tensor([key_of[name] for name in names])
    is_held_out = keys.double() / 2.0**64 + 0.5 < share  # keys: hashes, uniform in [-2**63, 2**63)
    check(
        0 < is_held_out.sum() < len(rows),
        f"--eval_share {share} holds out {int(is_held_out.sum())} of {len(examples)} examples; choose"
        " another share, or name an --eval_dataset",
    )
    held_out = replace(examples, rows=rows[is_held_out], dropped={}, notes={}, bad=())
    return replace(examples, rows=rows[~is_held_out]), held_out
