"""Record what TRL's trainers answer to the models and rows of preference_oracle.py, in trl_losses.json.

TRL is no dependency of the project. In an environment of its own, with tests/requirements.txt, and after
`pip install --no-deps trl accelerate` and `pip install pandas`, from the root of the repository:

PYTHONPATH=.:tests OMP_NUM_THREADS=1 python tests/record_trl.py
"""

import datetime
import json
import tempfile
from pathlib import Path

import preference_oracle as oracle
import torch
import transformers
import trl
from datasets import Dataset
from tiny import tiny_tokenizer
from torch.nn.utils.rnn import pad_sequence
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

FILE = Path(__file__).with_name("trl_losses.json")
METRICS = (  # of those that a trainer has, with TRL's names
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected", "nll_loss", "kl"),
    *("accuracy", "margin", "min_reward", "mean_reward", "max_reward"),
)
TEXT = [{"prompt": "a", "chosen": "b", "rejected": "c"}]  # trainers want rows at their start

SIGMOID = {"loss_type": ["sigmoid"], "beta": 0.2}
SIMPO = {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 0.5, "cpo_alpha": 0.0}
KTO = {"beta": 0.2, "desirable_weight": 1.2, "undesirable_weight": 0.7}
# name -> (trainer, settings, case). Cases: alone: each pair in a batch of its own, and the mean over them;
# answers: the nll is of the chosen answers without prompts; odd: the first 7 rows; swapped: the policy is the
# reference and the reverse; desirable: only those rows; margins: 0, 0.5, 1, ...
LOSSES = {
    "dpo": ("DPO", SIGMOID, ""),
    "dpo_sft": (
        "DPO",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "beta": 0.2},
        "",
    ),
    # sigmoid ignores label_smoothing. aot does not, but sorts the log-ratios of its batch. One pair needs no
    # sorting, and then aot is DPO with label smoothing.
    "dpo_smoothed": ("DPO", {"loss_type": ["aot"], "beta": 0.2, "label_smoothing": 0.1}, "alone"),
    "ipo": ("DPO", {"loss_type": ["ipo"], "beta": 0.3}, ""),
    "simpo": ("CPO", SIMPO, ""),
    "simpo_smoothed": ("CPO", SIMPO | {"label_smoothing": 0.1}, ""),
    "cpo": ("CPO", {"loss_type": "sigmoid", "beta": 0.2, "cpo_alpha": 1.0}, ""),
    "orpo": ("ORPO", {"beta": 0.4}, "answers"),
    "orpo_with_prompt": ("ORPO", {"beta": 0.4}, ""),  # as TRL trains
    "kto": ("KTO", KTO, ""),
    "kto_odd": ("KTO", KTO, "odd swapped"),
    "kto_swapped": ("KTO", KTO, "swapped"),
    "kto_desirable": ("KTO", KTO, "desirable"),
    "reward": ("Reward", {"center_rewards_coefficient": 0.01}, ""),
    "reward_margin": ("Reward", {"center_rewards_coefficient": None}, "margins"),
}


def settings_of(config, settings: dict, **more):
    return config(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        **settings,
        **more,
    )


def metrics_of(trainer) -> dict[str, float]:
    stored = getattr(trainer, "_metrics", None) or trainer._stored_metrics
    return {name: stored["train"][name][-1] for name in METRICS if name in stored["train"]}


def dpo_batches(trainer, alone: bool) -> list[dict]:
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    rows = [dict(zip(names, pair, strict=True)) for pair in oracle.pairs()]
    parts = [[row] for row in rows] if alone else [rows]
    return [trainer.data_collator(part) for part in parts]


def padded(rows: list[list[int]], value: int) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=value)


def cpo_batch(masks_prompt: bool) -> dict:
    """What TRL's collator for CPO and ORPO gives, from ids. ORPO's nll is where the attention mask is 1."""
    batch = {}
    for place, side in ((1, "chosen"), (2, "rejected")):
        prompts = [pair[0] for pair in oracle.pairs()]
        answers = [pair[place] for pair in oracle.pairs()]
        both = list(zip(prompts, answers, strict=True))
        batch[f"{side}_input_ids"] = padded([p + a for p, a in both], oracle.PAD)
        batch[f"{side}_labels"] = padded([[-100] * len(p) + a for p, a in both], -100)
        masks = [[1 - masks_prompt] * len(p) + [1] * len(a) for p, a in both]
        batch[f"{side}_attention_mask"] = padded(masks, 0)
    return batch


def without_mask(model):
    """The model, which ignores the attention mask: with padding on the right it needs none."""
    forward = model.forward
    model.forward = lambda ids, attention_mask=None, **kwargs: forward(ids, **kwargs)
    return model


def kto_data(rows: list[oracle.Labelled], tokenizer) -> list[dict]:
    """The rows as texts, the last one first: TRL gives each prompt the answer of the row before."""
    return [
        {
            "prompt": tokenizer.decode(prompt),
            "completion": tokenizer.decode(answer[:-1]),  # TRL adds EOS
            "label": label,
        }
        for prompt, answer, label in reversed(rows)
    ]


def kto_batch(trainer, rows: list[oracle.Labelled]) -> dict:
    """TRL's own batch, after a look at its ids."""
    (batch,) = trainer.get_train_dataloader()
    for ids, mask, row in zip(
        batch["input_ids"], batch["attention_mask"], reversed(rows), strict=True
    ):
        assert ids[mask == 1].tolist() == row[0] + row[1], "TRL made other ids"
    return batch


def reward_batch(trainer, has_margins: bool) -> dict:
    rows = []
    for i, (prompt, chosen, rejected) in enumerate(oracle.pairs()):
        rows.append({"chosen_ids": prompt + chosen, "rejected_ids": prompt + rejected})
        if has_margins:
            rows[-1]["margin"] = i / 2
    return trainer.data_collator(rows)


def record(name: str) -> dict:
    """The loss, metrics and gradients of one line of LOSSES."""
    kind, settings, case = LOSSES[name]
    tokenizer = tiny_tokenizer()
    policy, reference = oracle.policy_and_reference()
    if "swapped" in case:
        policy, reference = reference, policy
    tools = {"processing_class": tokenizer}
    pairs = Dataset.from_list(TEXT)
    if kind == "DPO":
        args = settings_of(DPOConfig, settings, max_length=None)
        trainer = DPOTrainer(policy, reference, args=args, train_dataset=pairs, **tools)
        batches = dpo_batches(trainer, alone=case == "alone")
    elif kind in ("CPO", "ORPO"):
        config, make = (CPOConfig, CPOTrainer) if kind == "CPO" else (ORPOConfig, ORPOTrainer)
        policy = without_mask(policy) if case == "answers" else policy
        trainer = make(policy, args=settings_of(config, settings), train_dataset=pairs, **tools)
        batches = [cpo_batch(masks_prompt=case == "answers")]
    elif kind == "KTO":
        rows = oracle.labelled(case)
        sizes = {"per_device_train_batch_size": len(rows), "max_length": None}
        args = settings_of(KTOConfig, settings, **sizes)
        data = Dataset.from_list(kto_data(rows, tokenizer))
        trainer = KTOTrainer(policy, reference, args=args, train_dataset=data, **tools)
        batches = [kto_batch(trainer, rows)]
    else:
        policy = oracle.reward_model()
        args = settings_of(RewardConfig, settings)
        data = Dataset.from_list([{"chosen_ids": [5, 2], "rejected_ids": [6, 2]}])
        trainer = RewardTrainer(policy, args=args, train_dataset=data, **tools)
        batches = [reward_batch(trainer, has_margins=case == "margins")]
    policy.train()
    policy.zero_grad()
    losses = []
    for batch in batches:
        loss = trainer.compute_loss(policy, batch)
        (loss / len(batches)).backward()
        losses.append(loss.item())
    shown = {
        key: [float(f"{value:.9g}") for value in values]
        for key, values in oracle.gradients(policy).items()
    }
    return {
        "trainer": type(trainer).__name__,
        "settings": settings,
        "case": case,
        "loss": sum(losses) / len(losses),
        "metrics": metrics_of(trainer) if len(batches) == 1 else {},
        "gradients": shown,
    }


def lines(found: dict, depth: int) -> str:
    """JSON of which only the outer levels are spread over lines."""
    if not depth:
        return json.dumps(found)
    items = [f"{json.dumps(key)}: {lines(value, depth - 1)}" for key, value in found.items()]
    return "{\n" + ",\n".join(items) + "\n}"


def made() -> dict[str, str]:
    """With what, and when, it is recorded."""
    packages = {"trl": trl, "transformers": transformers, "torch": torch}
    versions = {name: package.__version__ for name, package in packages.items()}
    return versions | {"date": str(datetime.date.today())}


def main() -> None:
    policy, reference = oracle.policy_and_reference()
    models = {"policy": policy, "reference": reference, "reward": oracle.reward_model()}
    found = {
        "made": made(),
        "seeds": oracle.SEEDS,
        "checksums": {name: oracle.checksum(model) for name, model in models.items()},
        "pairs": oracle.pairs(),
        "labelled": oracle.labelled(),
    }
    outer = "".join(f'"{key}": {json.dumps(value)},\n' for key, value in found.items())
    losses = {name: record(name) for name in LOSSES}
    FILE.write_text("{\n" + outer + f'"losses": {lines(losses, 2)}\n' + "}\n")
    json.loads(FILE.read_text())
    for name, values in losses.items():
        print(f"{name:18} {values['loss']:.6f} {values['metrics']}")


if __name__ == "__main__":
    main()
