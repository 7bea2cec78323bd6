"""Sequences scored and prompts answered, batch by batch, by a model alone or cut over all ranks; answers are
kept in a file, by which a start that was killed goes on.
"""

import json
from collections.abc import Callable
from functools import partial
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


class Asker:
    """Asks a model of add_chunked_loss. All ranks ask the same, and all get every answer.

    batch_of: makes a Batch of sequences (data's Examples); of none, a filler. batch_size: sequences of a rank
    and forward. end_ids: tokens that end an answer. file: of the answers, which
    rank 0 writes; None: they are not kept.
    """

    def __init__(
        self,
        model: nn.Module,
        world: World,
        batch_of: Callable,
        batch_size: int,
        end_ids: set[int],
        pad_id: int,
        file: Path | None,
    ):
        self.model, self.world, self.batch_of = model, world, batch_of
        self.file, self.batch_size = file, batch_size
        self.greedy = partial(Sampling, temperature=0.0, end_ids=frozenset(end_ids), pad_id=pad_id)
        lines: list[str] = []
        if file and world.rank == 0 and file.exists():
            *lines, _ = file.read_text("utf-8").split("\n")  # a kill may have cut the last
            replace_file(file, "".join(line + "\n" for line in lines))
        rows = [json.loads(line) for line in broadcast(world, lines)]
        self.known: dict[int, dict] = {row["number"]: row for row in rows}

    def score(self, groups: list[list], judge: Callable) -> list[dict]:
        """A row for each group of sequences: {"number": i} | judge(i, (log-probability of the trained tokens
        in nats, how many they are, whether each is the likeliest) of each of its sequences).
        """

        def answers(batches: list[list[int]]) -> list:
            own = self.own(batches)
            batch = self.batch_of([sequence for i in own for sequence in groups[i]])
            scores = iter(score_batch(self.model, batch.to(self.world.device)))
            return [[next(scores) for _ in groups[i]] for i in own]

        return self.ask(groups, answers, judge)

    def complete(self, prompts: list, new: int, judge: Callable) -> list[dict]:
        """A row for each prompt, a sequence: {"number": i} | judge(i, ids of its likeliest completion of at
        most so many new tokens).
        """

        def answers(batches: list[list[int]]) -> list:
            ids = [prompts[i].ids.tolist() for batch in batches for i in batch]
            greedy = self.greedy(max_new_tokens=new, batch_size=len(batches[0]))
            keys = [(i,) for i in range(len(ids))]
            found = generate(self.model, ids, keys, greedy, self.world, self.world.size > 1)
            return [found[i].ids for i in sorted(found)]

        return self.ask([[prompt] for prompt in prompts], answers, judge)

    def own(self, batches: list) -> list:
        """This rank's batch; none where there are fewer batches than ranks."""
        return batches[self.world.rank] if self.world.rank < len(batches) else []

    def ask(self, groups: list[list], answers: Callable, judge: Callable) -> list[dict]:
        """The rows of all groups; those that are not known are asked for.

        Batches are cut by length from the whole list, so neither the number of ranks nor a start that was
        killed changes what is in one, nor the order of the file.
        """
        if not self.file:
            self.known = {}
        lengths = [max(len(sequence.ids) for sequence in group) for group in groups]
        order = sorted(range(len(groups)), key=lambda i: -lengths[i])
        size = max(1, self.batch_size // max(map(len, groups), default=1))
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        batches = [batch for batch in batches if any(i not in self.known for i in batch)]
        asked = sum(map(len, batches))
        quiet = None if self.world.rank == 0 else True  # None: where it is no terminal
        with tqdm(
            total=len(order), initial=len(order) - asked, unit=" items", disable=quiet
        ) as bar:
            for start in range(0, len(batches), self.world.size):
                several = batches[start : start + self.world.size]
                found = answers(several)
                with together(self.world):
                    own = zip(self.own(several), found, strict=True)
                    rows = [{"number": i} | judge(i, answer) for i, answer in own]
                self.keep(sum(gather(self.world, rows), []))
                bar.update(sum(map(len, several)))
        return [self.known[i] for i in range(len(groups))]

    def keep(self, rows: list[dict]) -> None:
        """Know rows, and write on rank 0 those that are new."""
        new = [row for row in rows if row["number"] not in self.known]
        self.known |= {row["number"]: row for row in new}
        if self.file and self.world.rank == 0:
            with disk_errors(self.file), open(self.file, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in new)


@torch.no_grad()
def score_batch(model: nn.Module, batch) -> list[tuple[float, int, bool]]:
    """See Asker.score; batch: on the device. All ranks call it."""
    values = token_log_probs(model, batch, per_token=signed_cross_entropy).double()  # (B, T)
    tokens = (batch.labels != IGNORE).sum(1)
    likeliest = (values <= 0).all(1)
    sums = -values.abs().sum(1)
    return list(zip(sums.tolist(), tokens.tolist(), likeliest.tolist(), strict=True))


def signed_cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """(c, V) and (c,) -> (c,): below 0 where the target is not the likeliest token."""
    loss = F.cross_entropy(logits, targets, reduction="none")
    return torch.where(logits.argmax(1) == targets, loss, -loss)
