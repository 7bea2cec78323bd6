"""The formulas of the preference losses, on top of token_log_probs, give the losses, metrics and gradients
of TRL's trainers. Those are in trl_losses.json; record_trl.py recorded them.

python -m pytest tests/test_trl_losses.py
"""

import json
from dataclasses import replace
from pathlib import Path

import preference_oracle as oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from utils.model.log_probs import token_log_probs
from utils.model.loss import add_chunked_loss, check_chunked_loss
from utils.run.units import IGNORE

RECORDED = json.loads(Path(__file__).with_name("trl_losses.json").read_text())
LOSSES = RECORDED["losses"]
PAIR_LOSSES = [name for name in LOSSES if not name.startswith(("kto", "reward"))]
KTO_LOSSES = [name for name in LOSSES if name.startswith("kto")]


# --- the formulas, of P pairs or P labelled answers. c, r (P,): log pi(y|x) of the chosen and of the rejected
# answer, the sum over its tokens; ref_c, ref_r (P,): the reference's; n_c, n_r (P,): their numbers of tokens.
# Each gives (P,), where it does not say otherwise.


def smoothed(h: Tensor, label_smoothing: float) -> Tensor:
    """-log sigmoid(h), where a share of the labels is taken to be wrong: https://ericmitchell.ai/cdpo.pdf."""
    return -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)


def dpo(c, r, ref_c, ref_r, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """https://arxiv.org/abs/2305.18290, equation 7."""
    return smoothed(beta * ((c - ref_c) - (r - ref_r)), label_smoothing)


def ipo(c, r, ref_c, ref_r, n_c, n_r, beta: float) -> Tensor:
    """https://arxiv.org/abs/2310.12036, equation 17, beta = tau; with means over tokens, as TRL."""
    h = (c - ref_c) / n_c - (r - ref_r) / n_r
    return (h - 1 / (2 * beta)) ** 2


def simpo(c, r, n_c, n_r, beta: float, margin: float, label_smoothing: float = 0.0) -> Tensor:
    """https://arxiv.org/abs/2405.14734, equation 6; margin is its gamma."""
    return smoothed(beta * (c / n_c - r / n_r) - margin, label_smoothing)


def log_odds(log_p: Tensor) -> Tensor:
    """log(p / (1 - p)). A certain answer (log_p = 0) has finite odds, and a finite gradient."""
    return log_p - torch.log(-torch.expm1(log_p.clamp(max=-1e-6)))


def orpo(c, r, n_c, n_r, beta: float) -> Tensor:
    """https://arxiv.org/abs/2403.07691, equation 7, beta = lambda; sft is added with weight 1."""
    return -beta * F.logsigmoid(log_odds(c / n_c) - log_odds(r / n_r))


def kto(y, ref_y, kl, desirable, beta: float, weights: tuple[float, float]) -> Tensor:
    """https://arxiv.org/abs/2402.01306. desirable (P,) bool: the labels; kl (): of kto_kl; weights: lambda of
    the desirable and of the undesirable.
    """
    h = beta * (y - ref_y - kl)
    desirable_weight, undesirable_weight = weights
    return torch.where(
        desirable, desirable_weight * (-h).sigmoid(), undesirable_weight * h.sigmoid()
    )


def kto_kl(y, ref_y) -> Tensor:
    """z_0 of KTO, (): y, ref_y (P,) of *mismatched* answers, of the whole global batch, without a graph."""
    return (y - ref_y).mean().clamp(min=0)


def sft(c, tokens: int) -> Tensor:
    """(): the nll per token of the chosen answers, of which the global batch has `tokens`."""
    return -c.sum() / tokens


def reward(c, r, center: float = 0.0, margin: Tensor | float = 0.0) -> Tensor:
    """Of scores c, r (P,): https://arxiv.org/abs/2203.02155; center: https://arxiv.org/abs/2312.09244."""
    return -F.logsigmoid(c - r - margin) + center * (c + r) ** 2


# --- what a step does with them


def ready(model):
    """A model whose log-probabilities are taken in chunks."""
    add_chunked_loss(model, 16)
    assert check_chunked_loss(model, torch.device("cpu")) == ""
    return model


def policy_and_reference(case: str = ""):
    policy, reference = map(ready, oracle.policy_and_reference())
    return (reference, policy) if "swapped" in case else (policy, reference)


def answers(model, batch) -> Tensor:
    """The summed log-probabilities of each answer: (2 P,), or (P,) with labels, or (1,) of a filler."""
    return token_log_probs(model, batch).sum(1)


def lengths(batch) -> Tensor:
    return (batch.labels != IGNORE).sum(1)


def sides(values: Tensor, batch) -> tuple[Tensor, Tensor]:
    """(P,) of the chosen and (P,) of the rejected: of a filler, which is one sequence, nothing."""
    return values[: batch.pairs], values[batch.pairs : 2 * batch.pairs]


def losses_of(name, settings, c, r, ref_c, ref_r, n_c, n_r) -> Tensor:
    """(P,)"""
    beta = settings["beta"]
    smoothing = settings.get("label_smoothing", 0.0)
    if name.startswith("dpo"):
        return dpo(c, r, ref_c, ref_r, beta, smoothing)
    if name == "ipo":
        return ipo(c, r, ref_c, ref_r, n_c, n_r, beta)
    if name.startswith("simpo"):
        return simpo(c, r, n_c, n_r, beta, settings["simpo_gamma"], smoothing)
    if name == "cpo":
        return dpo(c, r, 0.0, 0.0, beta)
    return orpo(c, r, n_c, n_r, beta)


def sft_weight(name: str, settings: dict) -> float:
    if name.startswith(("orpo", "cpo")):
        return 1.0
    return settings.get("loss_weights", [1.0, 0.0])[1]


def with_prompt(batch):
    """The chosen half of a batch, of which every token but the first is trained."""
    labels = batch.ids.masked_fill(~batch.mask, IGNORE)
    labels[:, 0] = IGNORE
    halves = {"ids": batch.ids, "mask": batch.mask, "labels": labels}
    return replace(batch, **{key: value[: batch.pairs] for key, value in halves.items()})


def pair_step(name: str, batch_size: int):
    """(loss, metrics, gradients) of one global batch of pairs: sums over micro-batches, divided by what the
    global batch has.
    """
    settings = LOSSES[name]["settings"]
    policy, reference = policy_and_reference()
    batches = oracle.pair_batches(oracle.pairs(), batch_size).batches(0)
    pairs = sum(batch.pairs for batch in batches)
    prompts_too = name == "orpo_with_prompt"
    trained = [with_prompt(batch) if prompts_too else batch for batch in batches]
    tokens = sum(int(lengths(batch)[: batch.pairs].sum()) for batch in trained)
    total, found = 0.0, []
    for batch, whole in zip(batches, trained, strict=True):
        n_c, n_r = sides(lengths(batch), batch)
        c, r = sides(answers(policy, batch), batch)
        with torch.no_grad():
            ref_c, ref_r = sides(answers(reference, batch), batch)
        loss = losses_of(name, settings, c, r, ref_c, ref_r, n_c, n_r).sum() / pairs
        weight = sft_weight(name, settings)
        if weight:
            nll = sft(answers(policy, whole) if prompts_too else c, tokens)
            loss = loss + weight * nll
        loss.backward()
        total += loss.item()
        found.append(torch.stack([c.detach(), r.detach(), ref_c, ref_r, n_c, n_r]))
    metrics = metrics_of(name, settings["beta"], *torch.cat(found, 1))
    return total, metrics, oracle.gradients(policy)


def metrics_of(name, beta, c, r, ref_c, ref_r, n_c, n_r) -> dict[str, float]:
    """The means that TRL logs. Without a reference a reward is beta log pi. For SimPO and ORPO log pi is the
    mean over the tokens, in logps/ too.
    """
    if name.startswith(("simpo", "orpo")):
        c, r = c / n_c, r / n_r
    if name.startswith(("simpo", "orpo", "cpo")):
        ref_c, ref_r = 0.0, 0.0
    chosen, rejected = beta * (c - ref_c), beta * (r - ref_r)
    means = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/accuracies": (chosen > rejected).float(),
        "rewards/margins": chosen - rejected,
        "logps/chosen": c,
        "logps/rejected": r,
    }
    return {name: value.mean().item() for name, value in means.items()}


def kto_step(name: str, batch_size: int):
    """(loss, metrics, gradients) of one global batch of labelled answers: first the mean over the mismatched
    answers of all micro-batches, without a graph, then their losses.
    """
    case, settings = (LOSSES[name][key] for key in ("case", "settings"))
    weights = (settings["desirable_weight"], settings["undesirable_weight"])
    policy, reference = policy_and_reference(case)
    rows = oracle.labelled(case)
    loader = oracle.label_batches(rows, batch_size)
    with torch.no_grad():
        mismatched = loader.mismatched(0)
        y, ref_y = (
            torch.cat([answers(model, batch)[: batch.pairs] for batch in mismatched])
            for model in (policy, reference)
        )
    kl = kto_kl(y, ref_y)
    total, found = 0.0, []
    for batch in loader.batches(0):
        y = answers(policy, batch)[: batch.pairs]
        with torch.no_grad():
            ref_y = answers(reference, batch)[: batch.pairs]
        losses = kto(y, ref_y, kl, batch.desirable, settings["beta"], weights)
        loss = losses.sum() / len(rows)
        loss.backward()
        total += loss.item()
        found.append(
            torch.stack([y.detach(), settings["beta"] * (y.detach() - ref_y), batch.desirable])
        )
    y, rewards, desirable = torch.cat(found, 1)
    metrics = {"kl": kl.item()}
    for side, label in (("chosen", 1), ("rejected", 0)):
        if label in desirable:
            metrics[f"rewards/{side}"] = rewards[desirable == label].mean().item()
            metrics[f"logps/{side}"] = y[desirable == label].mean().item()
    if "rewards/rejected" in metrics:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return total, metrics, oracle.gradients(policy)


def reward_step(name: str):
    """(loss, metrics, gradients) of all pairs. A score is of the last token's hidden state."""
    model = oracle.reward_model()
    (batch,) = oracle.pair_batches(oracle.pairs(), oracle.PAIRS).batches(0)
    hidden = model.model(batch.ids, use_cache=False).last_hidden_state  # (2 P, T, D)
    last = batch.mask.sum(1) - 1
    scores = (hidden[torch.arange(len(last)), last] @ model.score.weight.T).squeeze(1)  # (2 P,)
    c, r = sides(scores, batch)
    margins = 0.0
    if LOSSES[name]["case"] == "margins":
        margins = torch.tensor([int(where.removeprefix("row ")) / 2 for where in batch.where])[
            : len(c)
        ]
    center = LOSSES[name]["settings"]["center_rewards_coefficient"] or 0.0
    loss = reward(c, r, center, margins).mean()
    loss.backward()
    metrics = {
        "accuracy": (c > r).float().mean().item(),
        "margin": (c - r).mean().item(),
        "min_reward": scores.min().item(),
        "mean_reward": scores.mean().item(),
        "max_reward": scores.max().item(),
    }
    return loss.item(), metrics, oracle.gradients(model)


def compare(name: str, loss: float, metrics: dict[str, float], gradients: dict) -> None:
    """The loss and the metrics to 1e-6, or as many digits; each gradient to 1e-5 of its norm."""
    expected = LOSSES[name]
    assert loss == pytest.approx(expected["loss"], rel=1e-6, abs=1e-6)
    expected_metrics = {
        key: value for key, value in expected["metrics"].items() if key != "nll_loss"
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


@pytest.mark.parametrize("batch_size", [7, 3])
@pytest.mark.parametrize("name", PAIR_LOSSES)
def test_losses_of_pairs_equal_those_of_trl_in_any_micro_batches(name, batch_size):
    compare(name, *pair_step(name, batch_size))


@pytest.mark.parametrize("batch_size", [8, 3])
@pytest.mark.parametrize("name", KTO_LOSSES)
def test_kto_with_the_kl_of_the_global_batch_equals_that_of_trl_on_one_micro_batch(
    name, batch_size
):
    compare(name, *kto_step(name, batch_size))


@pytest.mark.parametrize("name", ["reward", "reward_margin"])
def test_losses_of_scores_equal_those_of_trl(name):
    compare(name, *reward_step(name))


def test_the_recorded_kl_is_in_force_in_some_batches_and_clamped_in_others():
    recorded = {name: LOSSES[name]["metrics"]["kl"] for name in KTO_LOSSES}
    assert recorded["kto"] == 0 < min(recorded["kto_odd"], recorded["kto_swapped"])
    labels = [row[2] for row in oracle.labelled()]
    assert 0 < sum(labels) < len(labels)
    assert all(row[2] for row in oracle.labelled("desirable"))


def test_with_a_policy_that_is_the_reference_dpo_is_log_2():
    values = torch.tensor([-3.0, -50.0])
    for smoothing in (0.0, 0.3):
        found = dpo(values, values - 1, values, values - 1, 0.2, smoothing)
        assert found.tolist() == pytest.approx([0.693147, 0.693147])


def test_orpo_of_a_certain_answer_is_finite_and_pushes_a_certain_rejected_one():
    c, r = torch.zeros(2, requires_grad=True), torch.tensor([0.0, -30.0], requires_grad=True)
    losses = orpo(c, r, 2, 3, 0.4)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert c.grad.isfinite().all()
    assert r.grad.isfinite().all()
    assert r.grad[0] > 0


def test_a_filler_adds_nothing_to_any_loss_and_takes_part_in_the_backward():
    settings = {"beta": 0.2, "simpo_gamma": 0.5}
    loader = oracle.pair_batches(oracle.pairs(), 1)
    filler = loader.batch([])
    policy, _ = policy_and_reference()
    for name in ("dpo", "ipo", "simpo", "orpo"):
        c, r = sides(answers(policy, filler), filler)
        n_c, n_r = sides(lengths(filler), filler)
        loss = losses_of(name, settings, c, r, c.detach(), r.detach(), n_c, n_r).sum() + sft(c, 5)
        loss.backward()
        assert loss == 0
    y = answers(policy, filler)[:0]
    kto(y, y.detach(), 0.3, filler.desirable, 0.2, (1.0, 1.0)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())
