"""Rows that are held out, and their loss: imported only where a run has some."""

from collections import Counter
from dataclasses import replace

import torch
from torch import nn

from .data import load_examples
from .distributed import World, all_reduce_sum
from .errors import check, print0
from .loss import IGNORE, summed_cross_entropy
from .sharding import reshard


def hold_out(examples, path: str, share: float, tokenizer, seq_len: int, **options) -> tuple:
    """(training examples, held-out ones): those of another file, else a share of them. See load_examples."""
    if path:
        held_out = load_examples(path, tokenizer, seq_len, **options)
        both = int(torch.isin(held_out.keys, examples.keys).sum())
        if both:
            print0(f"warning: {both:,} of {len(held_out):,} held-out rows are trained on too")
        return examples, held_out
    return split_by_hash(examples, share)


def split_by_hash(examples, share: float) -> tuple:
    """(train, held out): about `share` of the examples are held out, each by the hash of its own ids.

    So a row stays on its side when others come, go or move, and its copies stay with it.
    """
    held = examples.keys.double() / 2.0**64 + 0.5 < share  # keys are hashes: even in [-2**63, 2**63)
    split = f"--eval_share {share} holds out {int(held.sum())} of {len(examples)} examples"
    check(0 < held.sum() < len(held), f"{split}; choose another share, or name an --eval_dataset")
    train, held_out = (replace(examples, rows=which.nonzero()[:, 0]) for which in (~held, held))
    return train, replace(held_out, dropped=Counter(), notes=Counter())


@torch.no_grad()
def held_out_loss(model: nn.Module, loader, world: World) -> float:
    """Mean cross-entropy over the taught tokens of one epoch of all ranks' GlobalBatches. All ranks call it:
    every batch is a collective.
    """
    model.eval()
    total, taught = torch.zeros((), dtype=torch.float64), 0
    for batch in (batch for k in range(loader.per_epoch) for batch in loader.batches(k)):
        total += summed_cross_entropy(model, batch.to(world.device)).double().cpu()
        taught += int((batch.labels != IGNORE).sum())
    model.train()
    reshard(model)
    return all_reduce_sum(total, world) / all_reduce_sum(taught, world)
