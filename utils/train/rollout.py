"""Completions, drawn from the policy that is trained, and for eval.py scores of sequences and greedy answers;
all the same on any number of ranks.

A completion is a pure function of the weights, its prompt, its key and the other prompts of its batch. The
global batch alone determines these, so on a CPU any number of ranks gives the same bits. Only the temperature
changes the distribution: top-k, top-p and min-p would bias the ratio of policies
(https://github.com/huggingface/trl/issues/6789). Another inference engine would replace `generate`.

B completions in a batch, T tokens, V vocabulary.
"""

import inspect
import json
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..model.log_probs import token_log_probs
from ..model.sharding import Unit, reshard
from ..run.distributed import World, all_gather, all_reduce_sum, broadcast, patience, together
from ..run.files import disk_errors, drop_half_line
from ..run.units import IGNORE, seed_of

# --- completions

# Names of the cache that forward takes and returns, in different model families and transformers versions.
CACHES = "cache past_key_values cache_params".split()


class Sampling(NamedTuple):
    """How completions are sampled."""

    max_new_tokens: int
    temperature: float  # divides the logits; 0: greedy
    end_ids: frozenset[int]  # tokens that end a completion
    pad_id: int
    batch_size: int  # completions that a rank samples at a time


class Completion(NamedTuple):
    ids: list[int]  # including the token that ends it, if there is one
    log_probs: list[float]  # of each token, in nats, under the distribution it was sampled from


@contextmanager
def gathered(found: list[Unit], reshard_after_forward: bool):
    """All-gather every unit of a model that fully_shard has sharded, and keep them gathered within the block.
    A forward then has no collectives, so ranks may run different numbers of forwards. Memory: the whole
    model in the compute dtype.

    found: the result of `units`. reshard_after_forward: the value that the recipe gave to fully_shard, which
    is restored after the block, when the model is sharded again. Every rank calls it.
    """
    try:
        for unit in found:
            module = unit.modules[0]
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        yield
    finally:
        for unit in found:
            after = reshard_after_forward and unit.reshard_after_forward
            module = unit.modules[0]
            module.set_reshard_after_forward(after, recurse=False)
            module.reshard()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # every new length would compile again
def generate(
    model: nn.Module,
    prompts: list,
    keys: list,
    sampling: Sampling,
    world: World,
    lockstep=False,
) -> dict:
    """Sample this rank's share of the completions: {index of the prompt: Completion}.

    prompts: ids, the same list on every rank. keys: one per prompt, which determines its random numbers, such
    as (seed, step, index of the prompt, sample). Batches are cut from the whole list, sorted by length, so
    they do not depend on the number of ranks. Rank i % ranks samples batch i. Results are not exchanged:
    all_gather(found, world) gives all.

    The attention must support masks; `varlen` does not. Memory: the KV cache of one batch, and a few copies
    of (B, V) in fp32 and float64. The model is in evaluation mode meanwhile. torch's global random state is
    not used.

    lockstep: for a sharded model, whose forward has collectives. All ranks then run the same number of
    forwards; a rank that is done runs them on one token. Without lockstep, the model must be whole on each
    rank or `gathered`.
    """
    was_training = model.training
    model.eval()
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    found = {}
    for start in range(0, len(order), sampling.batch_size)[world.rank :: world.size]:
        batch = order[start : start + sampling.batch_size]
        drawn = _draw_batch(
            model, [prompts[i] for i in batch], [keys[i] for i in batch], sampling, world, lockstep
        )
        found |= zip(batch, drawn, strict=True)
    if lockstep:
        filler = torch.tensor([[sampling.pad_id]], device=world.device)
        while all_reduce_sum(0, world):
            model(filler, use_cache=False)
    if found or lockstep:  # it has run a forward
        reshard(model)
    model.train(was_training)
    return found


def draw_all(
    prompts: list,
    keys: list,
    sampling: Sampling,
    model: nn.Module,
    found: list[Unit],
    reshard_after_forward: bool,
    world: World,
) -> list[Completion]:
    """Sample the completions of all prompts; every rank gets all of them. See generate. found: the model's
    units, which are gathered once for all forwards. If it is empty, each forward gathers the layers.
    """
    with gathered(found, reshard_after_forward):
        drawn = generate(model, prompts, keys, sampling, world, lockstep=not found)
    with patience():  # another rank may draw longer completions
        for of_rank in all_gather(drawn, world):
            drawn |= of_rank
    return [drawn[i] for i in range(len(prompts))]


def _draw_batch(model, prompts, keys, sampling, world, lockstep):
    """Sample the completions of one batch; see generate. Prompts are padded on the left. A completion that
    has ended leaves the batch.
    """
    ids, mask = (tensor.to(world.device) for tensor in pad_left(prompts, sampling.pad_id))
    positions = (mask.cumsum(1) - 1).clamp(min=0)  # (B, T)
    randoms = torch.stack([random_numbers(key, sampling.max_new_tokens) for key in keys]).to(
        world.device
    )  # (B, new tokens)
    parameters = inspect.signature(type(model).forward).parameters
    cache = next(name for name in CACHES if name in parameters)
    # The load-balancing loss of mixtures of experts does not work with a cache.
    arguments = {"use_cache": True, "logits_to_keep": 1, "output_router_logits": False}
    found = active = [Completion([], []) for _ in prompts]  # active: those that have not ended
    for number in range(sampling.max_new_tokens):
        if lockstep:
            all_reduce_sum(1, world)
        arguments |= {"attention_mask": mask, "position_ids": positions}
        # Families differ; some, for example, mask their states only in the first forward.
        inputs = model.prepare_inputs_for_generation(
            ids,
            is_first_iteration=number == 0,
            **{name: arguments[name] for name in arguments if name in parameters},
        )
        output = model(**inputs)
        logits = output.logits[:, -1]  # (B, V)
        tokens, log_probs = draw_tokens(logits, randoms[:, number], sampling.temperature)
        for completion, token, log_prob in zip(
            active, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            completion.ids.append(token)
            completion.log_probs.append(log_prob)
        rows = [
            row
            for row, completion in enumerate(active)
            if completion.ids[-1] not in sampling.end_ids
        ]
        if not rows:
            break
        arguments[cache] = output[cache]
        ids = tokens[:, None]  # (B, 1)
        positions = positions[:, -1:] + 1
        mask = F.pad(mask, (0, 1), value=1)
        if len(rows) < len(active):
            active = [active[row] for row in rows]
            kept = torch.tensor(rows, device=world.device)
            arguments[cache].reorder_cache(kept)  # batch_select_indices ignores linear attention
            ids, positions, mask, randoms = (t[kept] for t in (ids, positions, mask, randoms))
    return found


def draw_tokens(logits: Tensor, randoms: Tensor, temperature: float) -> tuple:
    """(tokens (B,), their log-probabilities (B,) in fp32), from logits (B, V) and randoms (B,) in [0, 1).

    Inverse transform sampling: the token is where the number falls in the cumulative distribution, so each
    token needs one number. Temperature 0 takes the most likely token, with its log-probability at
    temperature 1.
    """
    logits = logits.float()
    if temperature:
        logits = logits / temperature
        cumulated = logits.softmax(1, dtype=torch.float64).cumsum(1)  # (B, V)
        heights = randoms[:, None] * cumulated[:, -1:]  # the sum is not exactly 1
        tokens = torch.searchsorted(cumulated, heights, right=True).flatten()
        tokens = tokens.clamp(max=logits.shape[1] - 1)  # if logits are not finite
    else:
        tokens = logits.argmax(1)
    return tokens, -F.cross_entropy(logits, tokens, reduction="none")


def random_numbers(key: tuple, count: int) -> Tensor:
    """(count,) float64 in [0, 1), determined by the key. A larger count begins with the same numbers."""
    return torch.rand(
        count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed_of(repr(key)))
    )


def pad_left(rows: list, pad: int) -> tuple:
    """(ids, attention mask), both (B, T): the rows of a batch, padded on the left."""
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = [torch.tensor(row) for row in rows]
    return padded(ids, padding_value=pad), padded([torch.ones_like(row) for row in ids])


@torch.no_grad()
def log_probs_at_start(
    model: nn.Module, reference: nn.Module | None, batch, temperature: float
) -> Tensor:
    """log pi (B, T) of the tokens of a RolloutBatch under the model that the run began with. That is
    `reference`, or, if it is None, the base without adapters.
    """
    if reference:
        found = token_log_probs(reference, batch, temperature)
        reshard(reference)  # without a backward, FSDP2 keeps some units gathered
        return found
    from ..model.lora import adapters_off

    with adapters_off(model):
        return token_log_probs(model, batch, temperature)


def write_samples(out: Path, step: int, asked: list, found: list[dict], count: int) -> None:
    """Append the first `count` completions of a step to OUT/samples.jsonl. asked: their questions; found: of
    rewards.reward_all.
    """
    append_rows(
        out / "samples.jsonl",
        [
            {"step": step, "where": question.where, "prompt": question.content, **one}
            for question, one in zip(asked[:count], found, strict=False)
        ],
    )


def token_sums(batch, old: Tensor, losses: Tensor, clipped: Tensor, kl: Tensor) -> Tensor:
    """Sums (6,) over the trained tokens of a RolloutBatch: the losses times the weights of their completions,
    with gradients; the number of clipped tokens; the KL; -old, whose mean estimates the entropy; the absolute
    difference between old and log pi at sampling; the number of tokens. Inputs are (B, T). old: log pi before
    the update.
    """
    mask = batch.labels != IGNORE
    values = (losses * batch.weights, clipped, kl.detach(), -old, (old - batch.drawn).abs(), mask)
    return torch.stack([(value * mask).sum() for value in values])


def token_means(sums: Tensor) -> dict:
    """Means over the trained tokens, by name, from the results of token_sums added over batches and ranks;
    NaN if no token is trained.
    """
    return dict(zip("clip_share kl entropy mismatch".split(), sums[1:-1] / sums[-1], strict=True))


# --- sequences scored and prompts answered, batch by batch. Each rank has the whole model, or a shard. The
# results are appended to a file, so that a run that was killed can go on.


class Asker(NamedTuple):
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

        @torch.no_grad()
        def answers(batches, numbers):
            sequences = [sequence for i in numbers for sequence in groups[i]]
            batch = self.batch_of(sequences).to(self.world.device)
            values = token_log_probs(self.model, batch, per_token=signed_cross_entropy).double()
            tokens = (batch.labels != IGNORE).sum(1)
            likeliest = (values <= 0).all(1)
            sums = -values.abs().sum(1)  # (B,), from values (B, T)
            scores = zip(sums.tolist(), tokens.tolist(), likeliest.tolist(), strict=True)
            return [[next(scores) for _ in groups[i]] for i in numbers]

        return self.ask(groups, answers, judge)

    def complete(self, prompts: list, new: int, judge: Callable) -> list[dict]:
        """One row per prompt: {"number": i} | judge(i, its greedy Completion of at most `new` tokens). A
        prompt is an Example.
        """

        def answers(batches, numbers):
            ids = [prompts[i].ids.tolist() for batch in batches for i in batch]
            found = generate(
                self.model,
                ids,
                [()] * len(ids),  # greedy completions need no random numbers
                # temperature 0: greedy
                Sampling(new, 0.0, self.end_ids, self.pad_id, batch_size=len(batches[0])),
                self.world,
                lockstep=self.world.size > 1,
            )
            return [found[i] for i in sorted(found)]

        return self.ask([[prompt] for prompt in prompts], answers, judge)

    def ask(self, groups: list[list], answers: Callable, judge: Callable) -> list[dict]:
        """The rows of all groups. Only rows that the file does not have are computed. answers: called with
        (the batches of all ranks, this rank's batch), where a batch is a list of numbers of groups; returns
        an answer for each group of this rank's batch.

        Batches are cut from the whole list, sorted by length. So the content of a batch and the order of the
        file depend neither on the number of ranks nor on an earlier run that was killed.
        """
        known = self.answered()  # rows by number
        lengths = [max(len(sequence.ids) for sequence in group) for group in groups]
        longest_first = sorted(range(len(groups)), key=lambda i: -lengths[i])
        size = max(1, self.batch_size // max(map(len, groups), default=1))
        batches = [longest_first[i : i + size] for i in range(0, len(groups), size)]
        batches = [batch for batch in batches if not known.keys() >= {*batch}]
        rank = self.world.rank
        with tqdm(
            total=len(groups),
            initial=len(groups) - sum(map(len, batches)),
            unit=" items",
            disable=True if rank else None,  # None: disabled if not a terminal
        ) as bar:
            for start in range(0, len(batches), self.world.size):
                several = batches[start : start + self.world.size]
                numbers = several[rank] if rank < len(several) else []
                found = answers(several, numbers)
                with together(self.world, patient=True):  # functions of the user may take long
                    rows = {
                        i: {"number": i} | judge(i, answer)
                        for i, answer in zip(numbers, found, strict=True)
                    }
                for of_rank in all_gather(rows, self.world):
                    new = {i: row for i, row in of_rank.items() if i not in known}
                    if self.file and rank == 0:
                        append_rows(self.file, [*new.values()])
                    known |= new
                bar.update(sum(map(len, several)))
        return [known[i] for i in range(len(groups))]

    def answered(self) -> dict:
        """The rows of the file, by number. A last line that a kill left incomplete is removed from it."""
        lines = []
        if self.file and self.world.rank == 0 and self.file.exists():
            drop_half_line(self.file)
            lines = self.file.read_bytes().splitlines()
        return {row["number"]: row for row in map(json.loads, broadcast(lines, self.world))}


def append_rows(path: Path, rows: list[dict]) -> None:
    """Append rows to a .jsonl file. Half of a surrogate pair, in an answer, becomes the escape of JSON."""
    with disk_errors(path), open(path, "a", -1, "utf-8", "backslashreplace") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def signed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """(c, V) and (c,) -> (c,): the cross-entropy, negated if the target is not the most likely token."""
    loss = F.cross_entropy(logits, targets, reduction="none")
    return torch.where(logits.argmax(1) == targets, loss, -loss)
