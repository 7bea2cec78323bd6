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
        self.model = model
        self.world = world
        self.batch_of = batch_of
        self.batch_size = batch_size
        self.file = file
        self.sampling = partial(
            Sampling,
            temperature=0.0,
            end_ids=frozenset(end_ids),
            pad_id=pad_id,
        )
        lines: list[str] = []
        if file and world.rank == 0 and file.exists():
            *lines, _ = file.read_text("utf-8").split("\n")  # a kill may have cut the last
            replace_file(file, "".join(line + "\n" for line in lines))
        self.known: dict[int, dict] = {}  # rows by number
        for line in broadcast(world, lines):
            row = json.loads(line)
            self.known[row["number"]] = row

    def score(self, groups: list[list], judge: Callable) -> list[dict]:
        """A row for each group of sequences: {"number": i} | judge(i, (log-probability of the trained tokens
        in nats, how many they are, whether each is the likeliest) of each of its sequences).
        """

        def answers(batches: list[list[int]]) -> list:
            own = self.own(batches)
            sequences = []
            for i in own:
                sequences += groups[i]
            batch = self.batch_of(sequences)
            batch = batch.to(self.world.device)
            scores = iter(score_batch(self.model, batch))
            return [[next(scores) for _ in groups[i]] for i in own]

        return self.ask(groups, answers, judge)

    def complete(self, prompts: list, new: int, judge: Callable) -> list[dict]:
        """A row for each prompt, a sequence: {"number": i} | judge(i, ids of its likeliest completion of at
        most so many new tokens).
        """

        def answers(batches: list[list[int]]) -> list:
            ids = [prompts[i].ids.tolist() for batch in batches for i in batch]
            found = generate(
                self.model,
                ids,
                [(i,) for i in range(len(ids))],
                self.sampling(max_new_tokens=new, batch_size=len(batches[0])),
                self.world,
                lockstep=self.world.size > 1,
            )
            return [found[i].ids for i in sorted(found)]

        groups = [[prompt] for prompt in prompts]
        return self.ask(groups, answers, judge)

    def own(self, batches: list) -> list:
        """This rank's batch; none where there are fewer batches than ranks."""
        rank = self.world.rank
        return batches[rank] if rank < len(batches) else []

    def ask(self, groups: list[list], answers: Callable, judge: Callable) -> list[dict]:
        """The rows of all groups; those that are not known are asked for.

        Batches are cut by length from the whole list, so neither the number of ranks nor a start that was
        killed changes what is in one, nor the order of the file.
        """
        if not self.file:
            self.known = {}
        lengths = [max(len(sequence.ids) for sequence in group) for group in groups]
        longest_first = sorted(range(len(groups)), key=lambda i: -lengths[i])
        largest = max(map(len, groups), default=1)
        size = max(1, self.batch_size // largest)
        batches = []
        for start in range(0, len(groups), size):
            batch = longest_first[start : start + size]
            if not self.known.keys() >= {*batch}:
                batches.append(batch)
        bar = tqdm(
            total=len(groups),
            initial=len(groups) - sum(map(len, batches)),
            unit=" items",
            disable=True if self.world.rank else None,  # None: where it is no terminal
        )
        with bar:
            for start in range(0, len(batches), self.world.size):
                several = batches[start : start + self.world.size]
                found = answers(several)
                rows = []
                with together(self.world):
                    for i, answer in zip(self.own(several), found, strict=True):
                        rows.append({"number": i} | judge(i, answer))
                for of_rank in gather(self.world, rows):
                    self.keep(of_rank)
                bar.update(sum(map(len, several)))
        return [self.known[i] for i in range(len(groups))]

    def keep(self, rows: list[dict]) -> None:
        """Know rows, and write on rank 0 those that are new."""
        new = [row for row in rows if row["number"] not in self.known]
        for row in new:
            self.known[row["number"]] = row
        if self.file and self.world.rank == 0:
            lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in new]
            with disk_errors(self.file), open(self.file, "a", encoding="utf-8") as file:
                file.writelines(lines)


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
