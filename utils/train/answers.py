"""Log-probabilities of answers for preference losses: under the policy and under the reference model, with
their sums and means.

B batch, T tokens, S sequences (answers), P pairs.
"""

import json
from contextlib import suppress
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ..model.log_probs import per_sequence, token_log_probs
from ..model.sharding import reshard
from ..run.cached import cache_folder
from ..run.distributed import World, all_gather, all_reduce_sum, broadcast, sum_on_device, together
from ..run.errors import check, print0
from ..run.files import replace_file
from ..run.units import seed_of

KEPT = 256  # batches after which the values so far are kept
AGREE = 0.05  # tolerance, in nats per answer or relative: rounding depends on the shape of a batch


def log_probs_of(model: nn.Module, batch) -> Tensor:
    """log pi(y|x) (S,), in nats, of the answers of a PairBatch on the device. For a filler: (0,)."""
    return per_sequence(batch, token_log_probs(model, batch))[: len(batch.keys)]


def trained_tokens_of(batch) -> Tensor:
    """(S,) fp32: the number of tokens of each answer."""
    return per_sequence(batch, (batch.labels >= 0).float())[: len(batch.keys)]


class Reference:
    """log pi_ref(y|x) under the model that a run starts from. Fresh adapters are switched off for a forward
    of the base. Where all weights train, or an adapter goes on, call `score` before the first step; its
    results are then looked up.
    """

    def __init__(self, model: nn.Module, world: World):
        self.model = model
        self.world = world
        self.known = {}  # key of an answer -> nats

    def of(self, batch) -> Tensor:
        """log pi_ref(y|x) (S,) for a batch on the device."""
        if self.known:
            values = torch.tensor([self.known[key] for key in batch.keys])
            return values.to(batch.ids.device, non_blocking=True)  # else the host waits for a GPU
        from ..model.lora import adapters_off

        with torch.no_grad(), adapters_off(self.model):
            return log_probs_of(self.model, batch)

    @torch.no_grad()
    def score(self, loaders: dict, facts: dict) -> None:
        """Compute the log-probabilities of all answers with the model as it is now. loaders: PairBatches ->
        the number of its steps.

        The values are cached in a file, by a hash of each sequence, so a resume or another run with the same
        start reads them. The file is named by a hash of `facts`, the other inputs that determine the values,
        as JSON, and is written after every KEPT batches. Only batches with an answer that the file lacks, and
        as a check the first one, are computed. ConfigError if the values of the file differ.
        """
        name = seed_of(json.dumps(facts, sort_keys=True, default=str))
        file = cache_folder("reference") / f"{name}.json"
        known = {}
        with suppress(OSError, ValueError):  # it is missing, or cannot be read
            known = {int(key): value for key, value in json.loads(file.read_text()).items()}
        known = broadcast(known, self.world)

        found = {}
        computed = 0  # batches
        missing = 0  # answers that the file lacks, so far

        def keep():
            with together(self.world):
                for key in found.keys() & known:
                    value = found.pop(key)  # what a run has read from the file stays
                    check(
                        abs(known[key] - value) <= AGREE * max(1, abs(value)),
                        f"{file}: an answer has {known[key]:.3f} nats there, {value:.3f} here"
                        " (fix: remove the file)",
                    )
            for of_rank in all_gather(found, self.world):
                known.update(of_rank)
            found.clear()
            outcome = f"{'kept in' if missing else 'read from'} {file}"
            if self.world.rank == 0 and missing:
                try:
                    file.parent.mkdir(parents=True, exist_ok=True)
                    replace_file(file, json.dumps(known))
                except OSError as error:  # a resume computes them again
                    outcome = f"not kept in {file}: {error.strerror} (fix: XDG_CACHE_HOME=FOLDER, with room)"
            print0(f"reference {len(known):,} answers {outcome}")

        self.model.eval()
        for batch in chain.from_iterable(loader.every(steps) for loader, steps in loaders.items()):
            unknown = all_reduce_sum(sum(key not in known for key in batch.keys), self.world)
            if computed and not unknown:
                continue
            if unknown and not missing:
                print0("reference of all answers is computed, once")
            missing += unknown
            values = log_probs_of(self.model, batch.to(self.world.device))
            found |= zip(batch.keys, values.tolist(), strict=True)
            computed += 1
            if computed % KEPT == 0:
                keep()
        reshard(self.model)
        keep()
        self.known = known


@torch.no_grad()
def drift(model: nn.Module, reference: Reference, batches: list, mesh: DeviceMesh) -> Tensor:
    """The sum () of log pi(y'|x) / pi_ref(y'|x) over the batches of all ranks, clamped to at least 0. Each y'
    is an answer to another prompt than x. Divided by the number of answers, this is KTO's z_0.
    """
    total = torch.zeros((), device=reference.world.device)
    for batch in batches:
        batch = batch.to(total.device)
        total += (log_probs_of(model, batch) - reference.of(batch)).sum()
    return sum_on_device(total, mesh).clamp(min=0)


def sums_of(batch, policy: Tensor, losses: Tensor, rewards: Tensor) -> Tensor:
    """Sums (9,) over a batch, from policy log pi(y|x) (S,), losses (P,) and rewards (S,), with gradients.
    "Wanted" answers are the chosen or desirable ones. The sums: losses; log-probabilities of wanted, of other
    answers; tokens of wanted answers; numbers of wanted, of other answers; rewards of wanted, of other
    answers; pairs whose wanted answer has the higher reward.
    """
    wanted = batch.desirable
    others = ~wanted
    sums = [
        losses,
        policy * wanted,
        policy * others,
        trained_tokens_of(batch) * wanted,
        wanted.float(),
        others.float(),
        rewards * wanted,
        rewards * others,
        (rewards[:-1:2] > rewards[1::2]).float(),  # meaningless for labels, and unused
    ]
    return torch.stack([values.sum() for values in sums])


def means_of(sums: Tensor, of_pairs: bool, sft_weight: float) -> dict:
    """The loss and other means, with TRL's names, from the results of sums_of added over batches and ranks.
    Log-probabilities are per answer, not per token.
    """
    (
        loss,
        chosen_log_prob,
        rejected_log_prob,
        tokens,
        chosen,
        rejected,
        chosen_reward,
        rejected_reward,
        in_order,
    ) = sums
    count = chosen if of_pairs else chosen + rejected
    means = {
        "loss": loss / count - sft_weight * chosen_log_prob / tokens.clamp(min=1),
        "rewards/chosen": chosen_reward / chosen,
        "rewards/rejected": rejected_reward / rejected,
        "rewards/margins": chosen_reward / chosen - rejected_reward / rejected,
        "logps/chosen": chosen_log_prob / chosen,
        "logps/rejected": rejected_log_prob / rejected,
    }
    if of_pairs:
        means["rewards/accuracies"] = in_order / count
    return means


@torch.no_grad()
def mean_of_wanted(model: nn.Module, batches: list, world: World) -> float:
    """Mean log-probability of the wanted answers in the batches of all ranks, in nats per answer."""
    model.eval()
    total = 0.0
    for batch in batches:
        batch = batch.to(world.device)
        total += (log_probs_of(model, batch) * batch.desirable).sum()
    model.train()
    reshard(model)
    count = sum(batch.desirable.sum() for batch in batches)
    return all_reduce_sum(total, world) / max(1, all_reduce_sum(count, world))
