"""The losses of policy gradients, their gradients and means are those of TRL's GRPOTrainer. Those are in
trl_grpo.json; record_trl_grpo.py recorded them. To record again, in the environment that record_trl.py
describes: PYTHONPATH=.:tests OMP_NUM_THREADS=1 python tests/record_trl_grpo.py

python -m pytest tests/test_trl_grpo.py
"""

import json
from pathlib import Path

import preference_oracle as oracle
import pytest
import rollout_oracle as rollouts
import torch
from torch.nn.utils.rnn import pad_sequence

RECORDED = json.loads(Path(__file__).with_name("trl_grpo.json").read_text())
LOSSES = RECORDED["losses"]


def padded(rows: list[list]) -> torch.Tensor:
    """(B, T), with 0 after each row."""
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def recorded(name: str) -> torch.Tensor:
    """(B, T) log-probabilities."""
    return padded(RECORDED["log_probs"][name])


def learned(rows: list[rollouts.Drawn]) -> torch.Tensor:
    """(B, T): where a completion has a token."""
    return padded([[True] * len(row.ids) for row in rows])


def token_log_probs(model, rows: list[rollouts.Drawn]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the tokens of each completion: (log-probabilities, entropies of what they are drawn from), (B, T),
    by full logits of one completion at a time.
    """
    found = []
    for row in rows:
        logits = model(torch.tensor([row.prompt + row.ids])).logits[0, len(row.prompt) - 1 : -1]
        logs = torch.log_softmax(logits.float() / rollouts.TEMPERATURE, -1)
        log_probs = logs.gather(1, torch.tensor(row.ids)[:, None]).squeeze(1)
        found.append((log_probs, -(logs.exp() * logs).sum(1)))
    return tuple(pad_sequence(part, batch_first=True) for part in zip(*found, strict=True))


def policy_loss(
    beta: float,
    now: torch.Tensor,
    old: torch.Tensor,
    start: torch.Tensor,
    advantages: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, whether they are clipped, KL) of tokens, all (B, T), from their log-probabilities now, when
    they were drawn and at the start of the run, (B, T), and advantages (B, 1).
    """
    ratio = torch.exp(now - old)
    clipped = ratio.clamp(1 - rollouts.CLIP_LOW, 1 + rollouts.CLIP_HIGH)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    kl = (torch.exp(start - now) - (start - now) - 1) * ratio
    return losses + beta * kl, clipped * advantages < ratio * advantages, kl


def weights_of(loss: str, lengths: list[int]) -> torch.Tensor:
    """(B, 1): the weight of each token of a completion in the loss of all completions."""
    of_lengths = {
        "dapo": [1 / sum(lengths) for _ in lengths],
        "grpo": [1 / (length * len(lengths)) for length in lengths],
        "dr_grpo": [1 / (rollouts.MAX_NEW_TOKENS * len(lengths)) for _ in lengths],
    }
    return torch.tensor(of_lengths[loss])[:, None]


def step(name: str, batch_size: int):
    """(loss, metrics, gradients) of all completions in micro-batches."""
    loss_name, beta = rollouts.SETTINGS[name]
    rows = rollouts.completions()
    policy, _ = oracle.policy_and_reference()
    weights = weights_of(loss_name, [len(row.ids) for row in rows])
    advantages = torch.tensor([[row.advantage] for row in rows])
    old, start = recorded("old"), recorded("reference")
    total, sums = 0.0, torch.zeros(5)
    for first in range(0, len(rows), batch_size):
        part = slice(first, first + batch_size)
        mask = learned(rows[part])
        width = mask.size(1)
        now, entropies = token_log_probs(policy, rows[part])
        losses, clipped, kl = policy_loss(
            beta, now, old[part, :width], start[part, :width], advantages[part]
        )
        loss = (losses * weights[part] * mask).sum()
        loss.backward()
        total += loss.item()
        is_low = clipped & (advantages[part] < 0)
        means = [kl, entropies, is_low, clipped & ~is_low, clipped]
        sums += torch.stack([(values.detach() * mask).sum() for values in means])
    names = ["kl", "entropy", *(f"clip_ratio/{side}_mean" for side in ("low", "high", "region"))]
    tokens = sum(len(row.ids) for row in rows)
    return total, dict(zip(names, (sums / tokens).tolist(), strict=True)), oracle.gradients(policy)


# --- the claims


def test_the_completions_are_those_of_the_recording():
    assert RECORDED["seeds"] == rollouts.SEEDS
    assert [list(row) for row in rollouts.completions()] == RECORDED["completions"]
    settings = {name: (entry["loss_type"], entry["beta"]) for name, entry in LOSSES.items()}
    assert settings == rollouts.SETTINGS


def test_tempered_log_probabilities_equal_those_of_trl_whose_prompts_are_padded_on_the_left():
    for name, model in zip(("policy", "reference"), oracle.policy_and_reference(), strict=True):
        with torch.no_grad():
            found, _ = token_log_probs(model, rollouts.completions())
        torch.testing.assert_close(found, recorded(name), rtol=0, atol=1e-5)


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
    for key, value in expected["metrics"].items():
        if key.endswith(("_mean", "kl", "entropy")):
            assert metrics[key] == pytest.approx(value, rel=1e-5, abs=1e-6), key
    assert gradients.keys() == expected["gradients"].keys()
    for parameter, values in gradients.items():
        norm, *_ = of_trl = expected["gradients"][parameter]
        assert norm > 0
        assert values == pytest.approx(of_trl, rel=0, abs=1e-5 * norm), parameter
