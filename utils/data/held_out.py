"""Which rows count: those of mixtures with weights, and those that are held out of the training."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..run.errors import check, print0
from .encode import Rows


def mixed_rows(examples, order_of: Callable) -> Tensor:
    """The rows (n,) of weighted sources: as many of each as its weight says, none twice, all of the one that
    is scarcest for its weight. order_of: see examples.permutation.

    What is weighed are examples as they are trained, after long rows were cut or dropped. Which ones follows
    from the source's name, so it is the same everywhere. Their order stays.
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
        parts.append(origin.first + order[: round(total * origin.weight)].sort().values)
    return torch.cat(parts)


def hold_out(examples, rows: Rows, load: Callable) -> tuple:
    """(examples, held-out ones), as rows.eval_share or rows.eval_dataset says. load: Rows -> examples."""
    if rows.eval_share:
        return split_by_hash(examples, rows.eval_share)
    held_out = load(replace(rows, dataset=rows.eval_dataset))
    own = examples.of_rows(examples.keys)
    both = torch.isin(held_out.of_rows(held_out.keys), own).sum()
    if both:
        print0(f"warning: {both:,} of {len(held_out):,} held-out rows are trained on too")
    return examples, held_out


def split_by_hash(examples, share: float) -> tuple:
    """(train, held out): about `share` of the examples are held out, each by the hash of its own ids.

    So a row stays on its side when others come, go or move, and its copies stay with it.
    """
    keys = examples.of_rows(examples.keys)
    rows = examples.numbers
    held = keys.double() / 2.0**64 + 0.5 < share  # keys are hashes: even in [-2**63, 2**63)
    split = f"--eval_share {share} holds out {int(held.sum())} of {len(examples)} examples"
    check(
        0 < held.sum() < len(held),
        f"{split}; choose another share, or name an --eval_dataset",
    )
    held_out = replace(examples, rows=rows[held], dropped={}, notes={}, bad=())
    return replace(examples, rows=rows[~held]), held_out
