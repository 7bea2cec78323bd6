"""Score sequences and complete prompts, batch by batch. Each rank has the whole model, or a shard. The
results are appended to a file, so that a run that was killed can go on.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from tqdm import tqdm

from ..model.log_probs import token_log_probs
from ..run.distributed import World, broadcast, gather, together
from ..run.files import disk_errors, replace_file
from ..run.units import IGNORE
from .rollout import Sampling, generate


@dataclass(frozen=True)
class Asker:
    """Scores and completes with a model of add_chunked_loss. All ranks make the same calls, and all ranks get
    all results.
    """

    model: nn.Module
    world: World
    batch_of: Callable  # sequences (Example of utils/data) -> Batch; no sequences -> a filler
    batch_size: int  # sequences per rank and forward
    end_ids: frozenset[int]  # tokens that end an answer
    pad_id: int
    file: Path | None  # rank 0 writes the results here; None: they are not written

    def score(self, groups: list[list], judge: Callable) -> list[dict]:
        """One row per group of sequences: {"number": i} | judge(i, scores). scores has for each sequence of
        the group: (log-probability of its trained tokens in nats, the number of trained tokens, whether each
        of them is the most likely token).
        """

        def answers(batches: list[list[int]], own: list[int]) -> list:
            sequences = []
            for i in own:
                sequences += groups[i]
            batch = self.batch_of(sequences)
            batch = batch.to(self.world.device)
            scores = iter(score_batch(self.model, batch))
            return [[next(scores) for _ in groups[i]] for i in own]

        return self.ask(groups, answers, judge)

    def complete(self, prompts: list, new: int, judge: Callable) -> list[dict]:
        """One row per prompt: {"number": i} | judge(i, ids of its greedy completion of at most `new`
        tokens). A prompt is an Example.
        """

        def answers(batches: list[list[int]], own: list[int]) -> list:
            ids = [prompts[i].ids.tolist() for batch in batches for i in batch]
            found = generate(
                self.model,
                ids,
                [(i,) for i in range(len(ids))],
                Sampling(
                    max_new_tokens=new,
                    temperature=0.0,
                    end_ids=self.end_ids,
                    pad_id=self.pad_id,
                    batch_size=len(batches[0]),
                ),
                self.world,
                lockstep=self.world.size > 1,
            )
            return [found[i].ids for i in sorted(found)]

        groups = [[prompt] for prompt in prompts]
        return self.ask(groups, answers, judge)

    def ask(self, groups: list[list], answers: Callable, judge: Callable) -> list[dict]:
        """The rows of all groups. Only rows that the file does not have are computed. answers: called with
        (the batches of all ranks, this rank's batch), where a batch is a list of group numbers; returns an
        answer for each group of this rank's batch.

        Batches are cut from the whole list, sorted by length. So the content of a batch and the order of the
        file depend neither on the number of ranks nor on an earlier run that was killed.
        """
        known = self.answered()  # rows by number
        lengths = [max(len(sequence.ids) for sequence in group) for group in groups]
        longest_first = sorted(range(len(groups)), key=lambda i: -lengths[i])
        largest = max(map(len, groups), default=1)
        size = max(1, self.batch_size // largest)
        batches = [longest_first[i : i + size] for i in range(0, len(groups), size)]
        batches = [batch for batch in batches if not known.keys() >= {*batch}]
        bar = tqdm(
            total=len(groups),
            initial=len(groups) - sum(map(len, batches)),
            unit=" items",
            disable=True if self.world.rank else None,  # None: disabled if not a terminal
        )
        with bar:
            for start in range(0, len(batches), self.world.size):
                several = batches[start : start + self.world.size]
                rank = self.world.rank
                own = several[rank] if rank < len(several) else []
                found = answers(several, own)
                rows = {}
                with together(self.world):
                    for i, answer in zip(own, found, strict=True):
                        rows[i] = {"number": i} | judge(i, answer)
                for of_rank in gather(self.world, rows):
                    new = [row for i, row in of_rank.items() if i not in known]
                    self.write(new)
                    known = of_rank | known
                bar.update(sum(map(len, several)))
        return [known[i] for i in range(len(groups))]

    def write(self, rows: list[dict]) -> None:
        """Append rows to the file, on rank 0."""
        if self.file and self.world.rank == 0:
            with disk_errors(self.file), open(self.file, "a", encoding="utf-8") as file:
                for row in rows:
                    line = json.dumps(row, ensure_ascii=False)
                    file.write(line + "\n")

    def answered(self) -> dict[int, dict]:
        """The rows of the file, by number. A last line that a kill left incomplete is removed from it."""
        lines: list[str] = []
        if self.file and self.world.rank == 0 and self.file.exists():
            *lines, _ = self.file.read_text("utf-8").split("\n")
            text = "".join(line + "\n" for line in lines)
            replace_file(self.file, text)
        rows = map(json.loads, broadcast(self.world, lines))
        return {row["number"]: row for row in rows}


@torch.no_grad()
def score_batch(model: nn.Module, batch) -> list[tuple[float, int, bool]]:
    """The scores of each sequence, see Asker.score. batch: on the device. All ranks call it."""
    values = token_log_probs(model, batch, per_token=signed_cross_entropy).double()  # (B, T)
    tokens = (batch.labels != IGNORE).sum(1)
    likeliest = (values <= 0).all(1)
    sums = -values.abs().sum(1)
    return list(zip(sums.tolist(), tokens.tolist(), likeliest.tolist(), strict=True))


def signed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(c, V) and (c,) -> (c,): the cross-entropy, negated if the target is not the most likely token."""
    loss = F.cross_entropy(logits, targets, reduction="none")
    return torch.where(logits.argmax(1) == targets, loss, -loss)
