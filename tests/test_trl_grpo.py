"""The losses of recipes/grpo.py, their gradients and means are those of TRL's GRPOTrainer. Those are in
trl_grpo.json; record_trl_grpo.py recorded them. To record again, in the environment that record_trl.py
describes: PYTHONPATH=.:tests OMP_NUM_THREADS=1 python tests/record_trl_grpo.py

python -m pytest tests/test_trl_grpo.py
"""

import json
from pathlib import Path

import grpo
import preference_oracle as oracle
import pytest
import rollout_oracle as rollouts
import torch
from tiny import in_chunks
from torch.nn.utils.rnn import pad_sequence

from utils.data.rewards import Rollout, rollout_batch
from utils.model.log_probs import token_log_probs
from utils.model.loss import settle_chunked_loss
from utils.train.rollout import token_means, token_sums

RECORDED = json.loads(Path(__file__).with_name("trl_grpo.json").read_text())
LOSSES = RECORDED["losses"]


def padded(rows: list[list]) -> torch.Tensor:
    """(B, T), with 0 after each row."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def recorded(name: str) -> torch.Tensor:
    """(B, T) log-probabilities."""
    return padded(RECORDED["log_probs"][name])


def ready(model):
    """A model whose log-probabilities are taken in chunks."""
    in_chunks(model, 16)
    settle_chunked_loss(model, torch.device("cpu"))
    assert not model.full_logits
    return model


def batch_of(rows: list[rollouts.Drawn], log_probs: list[list[float]], weights: list[float]):
    """Completions as a micro-batch, with log-probabilities as those with which they were drawn."""
    found = []
    for row, values, weight in zip(rows, log_probs, weights, strict=True):
        found.append(Rollout(row.prompt, row.ids, values, row.advantage, weight, "row"))
    return rollout_batch(found, oracle.PAD, 8)


def step(name: str, batch_size: int):
    """(loss, metrics, gradients) of all completions in micro-batches."""
    loss_name, beta = rollouts.SETTINGS[name]
    sizes = {"max_new_tokens": rollouts.MAX_NEW_TOKENS, "temperature": rollouts.TEMPERATURE}
    clips = {"clip_low": rollouts.CLIP_LOW, "clip_high": rollouts.CLIP_HIGH}
    cfg = grpo.Config(loss=loss_name, kl_beta=beta, **sizes, **clips)
    rows = rollouts.completions()
    lengths = [len(row.ids) for row in rows]
    weights = grpo.weights_of(cfg, lengths)
    policy = ready(oracle.policy_and_reference()[0])
    old, start = RECORDED["log_probs"]["old"], RECORDED["log_probs"]["reference"]
    sums = torch.zeros(6)
    for first in range(0, len(rows), batch_size):
        part = slice(first, first + batch_size)
        batch = batch_of(rows[part], old[part], weights[part])
        at_start = batch_of(rows[part], start[part], weights[part]).drawn if beta else None
        now = token_log_probs(policy, batch, cfg.temperature)
        losses = grpo.policy_loss(cfg, batch, now, batch.drawn, at_start)
        found = token_sums(batch, batch.drawn, *losses)
        found[0].backward()
        sums += found.detach()
    means = token_means(sums)
    metrics = {"kl": means["kl"], "clip_ratio/region_mean": means["clip_share"]}
    return sums[0].item(), metrics, oracle.gradients(policy)


# --- the claims


def test_the_completions_are_those_of_the_recording():
    assert RECORDED["seeds"] == rollouts.SEEDS
    assert [list(row) for row in rollouts.completions()] == RECORDED["completions"]
    settings = {name: (entry["loss_type"], entry["beta"]) for name, entry in LOSSES.items()}
    assert settings == rollouts.SETTINGS


def test_tempered_log_probabilities_equal_those_of_trl_whose_prompts_are_padded_on_the_left():
    rows = rollouts.completions()
    for name, model in zip(("policy", "reference"), oracle.policy_and_reference(), strict=True):
        batch = batch_of(rows, RECORDED["log_probs"][name], [1.0] * len(rows))
        with torch.no_grad():
            found = token_log_probs(ready(model), batch, rollouts.TEMPERATURE)
        torch.testing.assert_close(found, batch.drawn, rtol=0, atol=1e-5)


def test_tokens_drifted_to_where_some_are_clipped_on_either_side_and_most_are_not():
    moved = recorded("policy") - recorded("old")
    torch.testing.assert_close(moved, padded(rollouts.drifts()), rtol=0, atol=1e-5)
    metrics = LOSSES["dapo"]["metrics"]
    low, high = metrics["clip_ratio/low_mean"], metrics["clip_ratio/high_mean"]
    assert min(low, high) > 0
    assert low + high == pytest.approx(metrics["clip_ratio/region_mean"])
    assert low + high < 0.5
    ratio = moved.exp()
    gains = torch.tensor([[row.advantage] for row in rollouts.completions()])
    assert ((ratio < 1 - rollouts.CLIP_LOW) & (gains > 0)).any()  # and those count in full
    assert ((ratio > 1 + rollouts.CLIP_HIGH) & (gains < 0)).any()


def test_advantages_have_both_signs_in_a_group_and_one_is_0_and_lengths_differ():
    rows = rollouts.completions()
    for first in range(0, len(rows), rollouts.GROUP_SIZE):
        group = rows[first : first + rollouts.GROUP_SIZE]
        assert min(row.advantage for row in group) < 0 < max(row.advantage for row in group)
    assert [row.advantage for row in rows].count(0.0) == 1
    lengths = [len(row.ids) for row in rows]
    assert len(set(lengths)) > 4
    assert max(lengths) == rollouts.MAX_NEW_TOKENS


@pytest.mark.parametrize("batch_size", [8, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_losses_means_and_gradients_equal_those_of_trl_in_any_micro_batches(name, batch_size):
    """The loss to 1e-6; each gradient to 1e-5 of its norm."""
    loss, metrics, gradients = step(name, batch_size)
    expected = LOSSES[name]
    assert loss == pytest.approx(expected["loss"], rel=0, abs=1e-6)
    for key, value in metrics.items():
        assert float(value) == pytest.approx(expected["metrics"].get(key, 0), rel=1e-5, abs=1e-6), (
            key
        )
    assert gradients.keys() == expected["gradients"].keys()
    for parameter, values in gradients.items():
        norm, *_ = of_trl = expected["gradients"][parameter]
        assert norm > 0
        assert values == pytest.approx(of_trl, rel=0, abs=1e-5 * norm), parameter
