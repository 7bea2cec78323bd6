"""Completions and their advantages -> this rank's micro-batches, for grpo.py."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..run.units import IGNORE
from .batches import Batch, collate, deal
from .examples import Example


class Rollout(NamedTuple):
    """A prompt with one of its completions."""

    prompt: list[int]
    ids: list[int]  # of the completion
    log_probs: list[float]  # of each of them, as they were drawn
    advantage: float
    weight: float  # of each token in the loss
    where: str


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """A micro-batch of B completions, of which the tokens are trained. A filler has one row, and no trained
    token.
    """

    advantages: torch.Tensor | None = None  # (B, 1)
    weights: torch.Tensor | None = None  # (B, 1)
    drawn: torch.Tensor | None = None  # (B, T): log-probabilities of the tokens as they were drawn


def rollout_batches(
    rollouts: list[Rollout], batch_size: int, rank: int, ranks: int, pad_id: int, multiple: int
) -> list[RolloutBatch]:
    """This rank's micro-batches of all ranks' completions, those of similar length together: equally many on
    each rank, and at least one, some of them fillers.
    """
    lengths = torch.tensor([len(r.prompt) + len(r.ids) for r in rollouts], dtype=torch.int64)
    shares = deal(lengths, ranks)
    most_rows = max(1, math.ceil(len(rollouts) / ranks))
    share = [rollouts[i] for i in shares[rank]]
    filler = Rollout([pad_id], [], [], 0.0, 0.0, "filler")
    batches = []
    for start in range(0, most_rows, batch_size):
        part = share[start : start + batch_size] or [filler]
        batches.append(rollout_batch(part, pad_id, multiple))
    return batches


def rollout_batch(part: list[Rollout], pad_id: int, multiple: int) -> RolloutBatch:
    """Some completions as a micro-batch."""
    items = []
    for rollout in part:
        ids = torch.tensor(rollout.prompt + rollout.ids)
        labels = ids.clone()
        labels[: len(rollout.prompt)] = IGNORE
        items.append(Example(ids, labels, rollout.where))
    batch = collate(items, pad_id, multiple)
    length = batch.ids.shape[1]
    drawn = []
    for rollout in part:
        begin, count = len(rollout.prompt), len(rollout.log_probs)
        values = torch.tensor(rollout.log_probs)
        drawn.append(F.pad(values, (begin, length - begin - count)))
    advantages = torch.tensor([[rollout.advantage] for rollout in part])
    weights = torch.tensor([[rollout.weight] for rollout in part])
    return RolloutBatch(
        **vars(batch), advantages=advantages, weights=weights, drawn=torch.stack(drawn)
    )
