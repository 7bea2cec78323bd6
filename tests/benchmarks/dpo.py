"""
A DPO step of prefer.py against TRL's DPOTrainer with FSDP2: same model, pairs, precision and optimizer.

With full training both compute the reference's log-probabilities before the first step; with LoRA both
compute them in each step, from the base with adapters switched off. TRL gets the recipe's own batches. Both
compute log-probabilities in chunks, without full logits. TRL also logs entropies and means of logits, as it
always does. The last step is not timed.
"""

import importlib.util
import json
import os
import random

import torch
from measure import Bound, Worker, measured, run_worker
from step import MODEL, TINY, WARM_UP, difference_to_first, median_step, step_ends
from torch.distributed.tensor import DTensor

from utils.run.errors import check

HAS_TRL = importlib.util.find_spec("trl") is not None
CONTENDERS = {"ours": "recipes/prefer.py", "ours_lora": "with --lora_rank 16"}
if HAS_TRL:
    CONTENDERS |= {
        "trl": "trl.DPOTrainer with FSDP2 through accelerate",
        "trl_lora": "the same with peft's LoraConfig, rank 16",
    }
REFERENCES = {"ours": "trl", "ours_lora": "trl_lora"}
METRICS = {
    "seconds": ("s", max),
    "cpu_seconds": ("s", sum),
    "tokens_per_second": ("", min),
    "peak_bytes": ("MiB", max),
    "loss_error": ("", max),
}
RATIOS = ("seconds", "cpu_seconds", "peak_bytes")
BOUNDS = tuple(
    Bound(metric, 1.0, f"{says}, over TRL's", over, timed, contender=name)
    for name, over in REFERENCES.items()
    for metric, says, timed in (("seconds", "time of a step", True), ("peak_bytes", "peak", False))
)
RANKS = (2,)
LR, LORA_RANK, LORA_ALPHA = 1e-5, 16, 16
TIMED = {False: 8, True: 2}  # timed steps, by --small
PAIRS, SEQ_LEN = 2, {False: 256, True: 64}


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory)."""
    return 2**29, ranks * 2**31


def prepare(folder, small: bool) -> None:
    """Write a Llama with random weights in fp32, and pairs in which both answers fill the sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL[small], num_attention_heads=8, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    with open(folder / "pairs.jsonl", "w") as file:
        for _ in range(64):
            row = {"prompt": "Go on."}
            for side in ("chosen", "rejected"):
                row[side] = "".join(draw.choices("abcdefghij ,.", k=12 * SEQ_LEN[small]))
            file.write(json.dumps(row) + "\n")


def contend(worker: Worker) -> dict[str, float]:
    steps = WARM_UP + TIMED[worker.small] + 1
    has_adapters = worker.contender.endswith("lora")
    train = _train_trl if worker.contender.startswith("trl") else _train_ours
    with measured() as run, step_ends() as ends:
        losses = train(worker, steps, has_adapters)
    seconds, cpu_seconds = median_step(ends[WARM_UP - 1 : -1])
    numbers = {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": 2 * PAIRS * worker.world.size * SEQ_LEN[worker.small] / seconds,
        "peak_bytes": run["peak_bytes"],
    }
    if not has_adapters:  # each contender draws its own adapters
        file = worker.folder / "losses.json"
        numbers["loss_error"] = difference_to_first(losses, file, 1e-4)
    return numbers


def report(results: dict) -> None:
    """If TRL is not installed, say how to get its rows."""
    if not HAS_TRL:
        print("TRL is not installed here, so it has no rows (fix: pip install trl)")


def _train_ours(worker: Worker, steps: int, has_adapters: bool) -> list[float]:
    """Train with the recipe. Returns the loss of each step."""
    from recipes import prefer

    os.environ["XDG_CACHE_HOME"] = str(worker.out)  # no run finds another run's reference
    config = prefer.Config(
        model=str(worker.folder / "model"),
        tokenizer=str(TINY),
        dataset=str(worker.folder / "pairs.jsonl"),
        loss="dpo",
        beta=0.1,
        steps=steps,
        batch_size=PAIRS,
        grad_accum=1,
        seq_len=SEQ_LEN[worker.small],
        lr=LR,
        warmup=0,
        schedule="constant",
        weight_decay=0.01,
        clip_norm=1.0,
        dtype="fp32",
        lora_rank=LORA_RANK if has_adapters else 0,
        lora_alpha=LORA_ALPHA,
        output_dir=str(worker.out / "run"),
        save_every=0,
        save_model=False,
    )
    log = prefer.main(config) / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def _train_trl(worker: Worker, steps: int, has_adapters: bool) -> list[float]:
    """Train with TRL's trainer. Returns the loss of each step."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from peft import LoraConfig
    from torch.utils.data import DataLoader
    from transformers import AutoModelForCausalLM
    from trl import DPOConfig, DPOTrainer

    from utils.data.tokens import load_tokenizer

    batches = _batches(worker, steps)

    class OnTheseBatches(DPOTrainer):
        def get_train_dataloader(self):
            return DataLoader(batches, batch_size=None)

    args = DPOConfig(
        output_dir=str(worker.out / "trl"),
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        fsdp=True,
        fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
        per_device_train_batch_size=PAIRS,
        gradient_accumulation_steps=1,
        max_length=None,
        beta=0.1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        adam_beta2=0.95,
        max_grad_norm=1.0,
    )
    # As in step.py: only this name keeps accelerate from FSDP on a CPU.
    args.distributed_state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    lora = LoraConfig(
        r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    trainer = OnTheseBatches(
        AutoModelForCausalLM.from_pretrained(worker.folder / "model", dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=load_tokenizer(TINY),
        peft_config=lora if has_adapters else None,
    )
    if not has_adapters:
        # As precompute_ref_log_probs does under FSDP: a sharded reference for these batches, then freed.
        for batch in batches:
            chosen, rejected = trainer.compute_ref_log_probs(trainer.ref_model, batch)
            batch |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        trainer.ref_model, trainer.precompute_ref_logps = None, True
    trainer.train()
    is_sharded = any(isinstance(p, DTensor) for p in trainer.model.parameters())
    check(is_sharded, "accelerate did not shard the model")
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _batches(worker: Worker, steps: int) -> list[dict]:
    """The recipe's batches of each step on this rank, in the layout of TRL's collator: first the chosen
    answers, then the rejected ones.
    """
    from utils.data.examples import Rows, load_examples
    from utils.data.pairs import PairBatches
    from utils.data.tokens import load_tokenizer, pad_id

    tokenizer, world = load_tokenizer(TINY), worker.world
    rows = Rows(str(worker.folder / "pairs.jsonl"), SEQ_LEN[worker.small], task="pairs")
    shares = (PAIRS * world.size, PAIRS, world.rank, world.size, pad_id(tokenizer))
    loader = PairBatches(load_examples(rows, tokenizer), 0, *shares)
    found = []
    for step in range(steps):
        (batch,) = loader.batches(step)
        parts = {
            "input_ids": batch.ids,
            "attention_mask": batch.mask.long(),
            "completion_mask": (batch.labels >= 0).long(),
        }
        found.append({name: torch.cat([v[0::2], v[1::2]]) for name, v in parts.items()})
    return found


if __name__ == "__main__":
    run_worker(contend)
