"""The losses of recipes/prefer.py and reward.py, their gradients and the means that they log are those of
TRL's trainers. Those are in trl_losses.json; record_trl.py recorded them.

python -m pytest tests/test_trl_losses.py
"""

import json
import math
from pathlib import Path

import prefer
import preference_oracle as oracle
import pytest
import reward
import torch
from tiny import in_chunks
from torch import Tensor

from utils.data.pairs import PairBatch
from utils.model.kinds import add_scores, sequence_scores
from utils.model.loss import settle_chunked_loss
from utils.train.answers import log_probs_of, means_of, sums_of

RECORDED = json.loads(Path(__file__).with_name("trl_losses.json").read_text())
LOSSES = RECORDED["losses"]
# Not ours: cpo is dpo without a reference; TRL's orpo also learns the prompt.
OTHERS = ("cpo", "orpo_with_prompt")
NAMES = [name for name in LOSSES if not name.startswith("reward") and name not in OTHERS]


def ready(model):
    """A model whose log-probabilities are taken in chunks."""
    in_chunks(model, 16)
    settle_chunked_loss(model, torch.device("cpu"))
    assert not model.full_logits
    return model


def policy_and_reference(case: str = ""):
    policy, reference = map(ready, oracle.policy_and_reference())
    return (reference, policy) if "swapped" in case else (policy, reference)


def config_of(name: str) -> prefer.Config:
    """Our flags for TRL's settings."""
    settings = LOSSES[name]["settings"]
    flags = {"loss": name.split("_")[0], "beta": settings["beta"]}
    ours = {"label_smoothing": "label_smoothing", "simpo_gamma": "margin"}
    ours |= {weight: weight for weight in ("desirable_weight", "undesirable_weight")}
    flags |= {ours[key]: value for key, value in settings.items() if key in ours}
    weight = settings.get("loss_weights", [1.0, 0.0])[1]
    return prefer.Config(**flags, sft_weight=1.0 if flags["loss"] == "orpo" else weight)


def step(name: str, batch_size: int):
    """(loss, means, gradients) of one global batch in micro-batches."""
    cfg, case = config_of(name), LOSSES[name]["case"]
    policy, reference = policy_and_reference(case)
    if cfg.loss == "kto":
        loader = oracle.label_batches(oracle.labelled(case), batch_size)
    else:
        loader = oracle.pair_batches(oracle.pairs(), batch_size)
    batches = loader.batches(0)
    pairs = sum(batch.pairs for batch in batches)
    wanted_tokens = sum(int(tokens_of_wanted(batch)) for batch in batches)
    kl = 0.0
    if cfg.loss == "kto":
        with torch.no_grad():
            drifts = [
                (log_probs_of(policy, batch) - log_probs_of(reference, batch)).sum()
                for batch in loader.mismatched(0)
            ]
        kl = (sum(drifts) / pairs).clamp(min=0)
    total, sums = 0.0, torch.zeros(9)
    for batch in batches:
        start = 0.0
        if cfg.loss in prefer.WITH_REFERENCE:
            with torch.no_grad():
                start = log_probs_of(reference, batch)
        now = log_probs_of(policy, batch)
        found = sums_of(batch, now, *prefer.preference_loss(cfg, batch, now, start, kl))
        loss = found[0] / pairs - cfg.sft_weight * found[1] / wanted_tokens
        loss.backward()
        total += loss.item()
        sums += found.detach()
    means = {
        key: float(mean) for key, mean in means_of(sums, cfg.loss != "kto", cfg.sft_weight).items()
    }
    assert means.pop("loss") == pytest.approx(total, rel=1e-5)
    if cfg.loss == "kto":
        means = {key: mean for key, mean in means.items() if not math.isnan(mean)}  # of no row
        means["kl"] = float(kl)
    if cfg.loss in ("simpo", "orpo"):  # TRL logs a token's log-probability there, as in the rewards
        for side in ("chosen", "rejected"):
            means[f"logps/{side}"] = means[f"rewards/{side}"] / cfg.beta
    return total, means, oracle.gradients(policy)


def tokens_of_wanted(batch: PairBatch) -> Tensor:
    return (batch.labels >= 0).sum(1)[: len(batch.keys)][batch.desirable].sum()


def reward_step(name: str, batch_size: int):
    """(loss, metrics, gradients) of all pairs in micro-batches."""
    model = add_scores(oracle.reward_model(), oracle.PAD)
    center = LOSSES[name]["settings"]["center_rewards_coefficient"] or 0.0
    total = torch.zeros(len(reward.MEANS))
    for batch in oracle.pair_batches(oracle.pairs(), batch_size).batches(0):
        found = reward.score_sums(sequence_scores(model, batch), center)
        (found[0] / oracle.PAIRS).backward()
        total += found.detach() / oracle.PAIRS
    metrics = dict(zip(reward.MEANS, total.tolist(), strict=True))
    return metrics.pop("loss"), metrics, oracle.gradients(model)


def compare(name: str, loss: float, metrics: dict[str, float], gradients: dict) -> None:
    """The loss and the metrics to 1e-6, or as many digits; each gradient to 1e-5 of its norm."""
    expected = LOSSES[name]
    assert loss == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
    not_ours = ("nll_loss", "min_reward", "max_reward")
    expected_metrics = {
        key: value for key, value in expected["metrics"].items() if key not in not_ours
    }
    if expected_metrics:
        assert metrics == pytest.approx(expected_metrics, rel=1e-6, abs=1e-5)
    assert gradients.keys() == expected["gradients"].keys()
    for parameter, values in gradients.items():
        norm, *_ = recorded = expected["gradients"][parameter]
        assert norm > 0
        assert values == pytest.approx(recorded, rel=0, abs=1e-5 * norm), parameter


# --- the claims


def test_the_models_and_rows_are_those_of_the_recording():
    policy, reference = oracle.policy_and_reference()
    models = {"policy": policy, "reference": reference, "reward": oracle.reward_model()}
    sums = {name: oracle.checksum(model) for name, model in models.items()}
    assert sums == pytest.approx(RECORDED["checksums"], rel=1e-12)
    assert RECORDED["seeds"] == oracle.SEEDS
    for name, rows in (("pairs", oracle.pairs()), ("labelled", oracle.labelled())):
        assert [list(row) for row in rows] == RECORDED[name]


@pytest.mark.parametrize("batch_size", [8, 3])
@pytest.mark.parametrize("name", NAMES)
def test_losses_means_and_gradients_equal_those_of_trl_in_any_micro_batches(name, batch_size):
    compare(name, *step(name, batch_size))


@pytest.mark.parametrize("batch_size", [7, 3])
def test_the_loss_of_scores_its_means_and_gradients_equal_those_of_trl(batch_size):
    compare("reward", *reward_step("reward", batch_size))


def test_the_recorded_kl_is_in_force_in_some_batches_and_clamped_in_others():
    recorded = {
        name: LOSSES[name]["metrics"]["kl"]
        for name in [name for name in LOSSES if name.startswith("kto")]
    }
    assert recorded["kto"] == 0 < min(recorded["kto_odd"], recorded["kto_swapped"])
    labels = [row[2] for row in oracle.labelled()]
    assert 0 < sum(labels) < len(labels)
    assert all(row[2] for row in oracle.labelled("desirable"))


def filled(values: list[float], **more) -> PairBatch:
    """A batch whose answers have so many tokens."""
    labels = torch.ones(len(values), 2, dtype=torch.int64)
    keys = tuple(range(len(values)))
    return PairBatch(labels, labels, labels > 0, list("ab"), desirable=labels[:, 0] > 0, keys=keys)


def test_orpo_of_a_certain_answer_is_finite_and_pushes_a_certain_rejected_one():
    scores = torch.tensor([0.0, 0.0, 0.0, -30.0], requires_grad=True)
    cfg = prefer.Config(loss="orpo", beta=0.4)
    losses, _ = prefer.preference_loss(cfg, filled([1.0] * 4), scores, 0.0, 0.0)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert scores.grad.isfinite().all()
    assert scores.grad[1] > 0


def test_a_filler_adds_nothing_to_any_loss_and_takes_part_in_the_backward():
    filler = oracle.pair_batches(oracle.pairs(), 1).batch([])
    policy, _ = policy_and_reference()
    for loss in ("dpo", "ipo", "simpo", "orpo", "kto"):
        cfg = prefer.Config(loss=loss, beta=0.2)
        now = log_probs_of(policy, filler)
        found = sums_of(filler, now, *prefer.preference_loss(cfg, filler, now, now.detach(), 0.3))
        (found[0] - found[1]).backward()
        assert not found.any()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())
