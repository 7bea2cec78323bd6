"""Record what TRL's GRPOTrainer answers to the models of preference_oracle.py and the completions of
rollout_oracle.py, in trl_grpo.json. The environment is that of record_trl.py:

PYTHONPATH=.:tests OMP_NUM_THREADS=1 python tests/record_trl_grpo.py
"""

import json
from pathlib import Path

import preference_oracle as oracle
import rollout_oracle as rollouts
import torch
from datasets import Dataset
from record_trl import lines, made, padded, settings_of
from tiny import tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer

FILE = Path(__file__).with_name("trl_grpo.json")
METRICS = (
    *("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean"),
    *("clip_ratio/low_min", "clip_ratio/high_max"),
)
NEAR = 1e-3  # no ratio is as near as this to where it is clipped


def trainer_of(policy, loss: str, beta: float) -> GRPOTrainer:
    """TRL's trainer with its defaults, among them use_bias_correction_kl: the KL term is multiplied by the
    ratio.
    """
    settings = {
        "loss_type": loss,
        "epsilon": rollouts.CLIP_LOW,
        "epsilon_high": rollouts.CLIP_HIGH,
        "temperature": rollouts.TEMPERATURE,
        "max_completion_length": rollouts.MAX_NEW_TOKENS,
        "num_generations": rollouts.GROUP_SIZE,
    }
    size = len(rollouts.completions())
    trainer = GRPOTrainer(
        policy,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings_of(GRPOConfig, settings, per_device_train_batch_size=size),
        train_dataset=Dataset.from_list([{"prompt": "a"}]),
        processing_class=tiny_tokenizer(),
    )
    assert trainer.args.use_bias_correction_kl
    # The config's beta would load a reference from the hub. The loss needs only its log-probabilities.
    trainer.beta = beta
    trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
    return trainer


def batch_of() -> dict:
    """Prompts padded on the left, completions on the right."""
    rows = rollouts.completions()
    prompts = [row.prompt[::-1] for row in rows]
    completions = [row.ids for row in rows]
    return {
        "prompt_ids": padded(prompts, oracle.PAD).flip(1),
        "prompt_mask": padded([[1] * len(ids) for ids in prompts], 0).flip(1),
        "completion_ids": padded(completions, oracle.PAD),
        "completion_mask": padded([[1] * len(ids) for ids in completions], 0),
        "advantages": torch.tensor([row.advantage for row in rows]),
        "num_items_in_batch": torch.tensor(sum(map(len, completions))),
    }


def log_probs_of(trainer: GRPOTrainer, batch: dict) -> list[list[float]]:
    """Those of the tokens of each completion, by the trainer's model and as TRL takes them."""
    both = [
        torch.cat([batch[f"prompt_{part}"], batch[f"completion_{part}"]], 1)
        for part in ("ids", "mask")
    ]
    width = batch["completion_ids"].size(1)
    with torch.no_grad():
        found, *_ = trainer._get_per_token_logps_and_entropies(trainer.model, *both, width)
    masks = batch["completion_mask"] == 1
    return [shortened(row[mask].tolist()) for row, mask in zip(found, masks, strict=True)]


def shortened(values: list[float]) -> list[float]:
    """As many digits as fp32 has."""
    return [float(f"{value:.9g}") for value in values]


def before(log_probs: list[list[float]]) -> list[list[float]]:
    """The log-probabilities when the tokens were drawn. No rounding changes which ratios are clipped."""
    found = []
    for row, moved in zip(log_probs, rollouts.drifts(), strict=True):
        old = torch.tensor(row) - torch.tensor(moved)
        ratios = torch.exp(torch.tensor(row) - old)
        for limit in (1 - rollouts.CLIP_LOW, 1 + rollouts.CLIP_HIGH):
            assert (ratios - limit).abs().min() > NEAR, "choose another seed"
        found.append(shortened(old.tolist()))
    return found


def record(name: str, batch: dict, log_probs: dict[str, list]) -> dict:
    """The loss, metrics and gradients of one line of SETTINGS."""
    loss_name, beta = rollouts.SETTINGS[name]
    policy, _ = oracle.policy_and_reference()
    trainer = trainer_of(policy, loss_name, beta)
    inputs = batch | {"old_per_token_logps": padded(log_probs["old"], 0)}
    if beta:
        inputs["ref_per_token_logps"] = padded(log_probs["reference"], 0)
    policy.train()
    policy.zero_grad()
    loss = trainer._compute_loss(policy, inputs)
    loss.backward()
    stored = trainer._metrics["train"]
    return {
        "loss_type": loss_name,
        "beta": beta,
        "loss": loss.item(),
        "metrics": {key: stored[key][-1] for key in METRICS if key in stored},
        "gradients": {key: shortened(values) for key, values in oracle.gradients(policy).items()},
    }


def main() -> None:
    batch = batch_of()
    policy, reference = (
        log_probs_of(trainer_of(model, "dapo", 0.0), batch)
        for model in oracle.policy_and_reference()
    )
    log_probs = {"policy": policy, "reference": reference, "old": before(policy)}
    found = {
        "made": made(),
        "seeds": rollouts.SEEDS,
        "completions": rollouts.completions(),
    }
    outer = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in found.items())
    losses = {name: record(name, batch, log_probs) for name in rollouts.SETTINGS}
    outer += f'"log_probs": {lines(log_probs, 1)},\n'
    FILE.write_text("{\n" + outer + f'"losses": {lines(losses, 2)}\n' + "}\n")
    json.loads(FILE.read_text())
    for name, values in losses.items():
        print(f"{name:12} {values['loss']:.6f} {values['metrics']}")


if __name__ == "__main__":
    main()
