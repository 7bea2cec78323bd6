"""Completions and their advantages -> this rank's micro-batches, for grpo.py."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..run.units import IGNORE
from .batches import Batch, GlobalBatches, collate
from .questions import scored


class Rollout(NamedTuple):
    """A prompt with one of its completions."""

    prompt: list[int]
    ids: list[int]  # ids of the completion
    log_probs: list[float]  # of each id, under the distribution it was sampled from
    advantage: float
    weight: float  # of each token in the loss
    where: str


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """A micro-batch of B completions, whose tokens are trained. A filler has one row and no trained token."""

    advantages: Tensor | None = None  # (B, 1)
    weights: Tensor | None = None  # (B, 1)
    drawn: Tensor | None = None  # (B, T): log-probabilities of the tokens when they were sampled


class RolloutBatches(GlobalBatches):
    """rows_of(step): the prompts of each step. share(rollouts): micro-batches of their completions."""

    def costs(self, rows: list[Rollout]) -> Tensor:
        return torch.tensor([len(r.prompt) + len(r.ids) for r in rows], dtype=torch.int64)

    def batch(self, rows: list[Rollout]) -> RolloutBatch:
        filler = Rollout([self.pad_id], [], [], 0.0, 0.0, "filler")
        return rollout_batch(rows or [filler], self.pad_id, self.multiple)

    def share(self, rollouts: list[Rollout]) -> list[RolloutBatch]:
        """This rank's micro-batches of the completions of all ranks. Completions of similar length share a
        micro-batch. Each rank has the same number of micro-batches, at least one; some may be fillers.
        """
        return [self.batch(rows) for rows in self.dealt(rollouts)[self.rank] or [[]]]


def rollout_batch(part: list[Rollout], pad_id: int, multiple: int) -> RolloutBatch:
    """Collate completions to a micro-batch."""
    items = [scored(r.prompt + r.ids, len(r.prompt), r.where) for r in part]
    batch = collate(items, pad_id, multiple)
    drawn = torch.zeros(batch.ids.shape)
    log_probs = [value for rollout in part for value in rollout.log_probs]
    drawn[batch.labels != IGNORE] = torch.tensor(log_probs)
    return RolloutBatch(
        **vars(batch),
        advantages=torch.tensor([[rollout.advantage] for rollout in part]),
        weights=torch.tensor([[rollout.weight] for rollout in part]),
        drawn=drawn,
    )
