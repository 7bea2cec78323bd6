"""Rows that are held out of the training."""

from collections.abc import Callable
from dataclasses import replace

import torch

from ..run.errors import check, print0
from .encode import Rows


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
    rows = examples.of_rows(torch.arange(len(examples.keys)))
    held = keys.double() / 2.0**64 + 0.5 < share  # keys are hashes: even in [-2**63, 2**63)
    split = f"--eval_share {share} holds out {int(held.sum())} of {len(examples)} examples"
    check(
        0 < held.sum() < len(held),
        f"{split}; choose another share, or name an --eval_dataset",
    )
    held_out = replace(examples, rows=rows[held], dropped={}, notes={}, bad=())
    return replace(examples, rows=rows[~held]), held_out
