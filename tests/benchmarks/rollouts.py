"""
A GRPO step of grpo.py against TRL's GRPOTrainer: same model, prompts, reward, number of completions and
tokens, precision and optimizer; no KL term, no separate generation engine.

TRL generates with transformers' generate. With FSDP2 this gathers each layer for each token; with DDP
every rank has the whole model. In both, each rank trains on its completions in one micro-batch. With
random weights the end-of-turn token is rarely drawn, so nearly all completions have the full length. The
last step is not timed.
"""

import importlib.util
import json
import os
import random
import statistics
import time

import torch
from measure import Bound, Worker, measured, run_worker
from step import MODEL, TINY, median_step, step_ends
from torch.distributed.tensor import DTensor

from utils.run.errors import check

HAS_TRL = importlib.util.find_spec("trl") is not None
CONTENDERS = {"ours": "recipes/grpo.py"}
if HAS_TRL:
    CONTENDERS |= {
        "trl": "trl.GRPOTrainer with FSDP2 through accelerate",
        "trl_ddp": "the same with DDP",
    }
REFERENCES = {"ours": "trl", "trl_ddp": "ours"}
METRICS = {
    "seconds": ("s", max),
    "drawing_seconds": ("s", max),
    "learning_seconds": ("s", max),
    "cpu_seconds": ("s", sum),
    "tokens_per_second": ("", min),
    "peak_bytes": ("MiB", max),
    "completion_length": ("", min),
}
RATIOS = ("seconds", "drawing_seconds", "learning_seconds", "cpu_seconds", "peak_bytes")
BOUNDS = (
    Bound("seconds", 1.0, "time of a step, over TRL's with FSDP2", over="trl", timed=True),
    Bound("peak_bytes", 1.0, "peak, over TRL's with FSDP2", over="trl"),
)
RANKS = (2,)
LR, TEMPERATURE, WARM_UP = 1e-5, 1.0, 1
TIMED = {False: 4, True: 2}  # timed steps, by --small
NEW_TOKENS = {False: 32, True: 8}
PROMPTS, GROUP_SIZE, PROMPT_LETTERS = 4, 4, 64


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory)."""
    return 2**29, ranks * 2**31


def prepare(folder, small: bool) -> None:
    """Write a Llama with random weights in fp32, prompts of equal length, and the reward."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL[small], num_attention_heads=8, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    with open(folder / "prompts.jsonl", "w") as file:
        for _ in range(64):
            row = {"prompt": "".join(draw.choices("abcdefghij ,.", k=PROMPT_LETTERS))}
            file.write(json.dumps(row) + "\n")
    (folder / "rules.py").write_text(
        "def letters(completions, **columns):\n    return [float(len(c)) for c in completions]\n"
    )


def contend(worker: Worker) -> dict[str, float]:
    steps = WARM_UP + TIMED[worker.small] + 1
    train = _train_trl if worker.contender.startswith("trl") else _train_ours
    with measured() as run, step_ends() as ends:
        drawing, lengths = train(worker, steps)
    seconds, cpu_seconds = median_step(ends[WARM_UP - 1 : -1])
    drawn = statistics.median(drawing[WARM_UP:-1])
    length, most = statistics.mean(lengths), NEW_TOKENS[worker.small]
    check(0.9 * most < length <= most, f"completions have {length} tokens, not {most}")
    return {
        "seconds": seconds,
        "drawing_seconds": drawn,
        "learning_seconds": seconds - drawn,
        "cpu_seconds": cpu_seconds,
        "tokens_per_second": PROMPTS * GROUP_SIZE * most / seconds,
        "peak_bytes": run["peak_bytes"],
        "completion_length": length,
    }


def report(results: dict) -> None:
    """If TRL is not installed, say how to get its rows."""
    if not HAS_TRL:
        print("TRL is not installed here, so it has no rows (fix: pip install trl)")


def _train_ours(worker: Worker, steps: int) -> tuple[list[float], list[float]]:
    """Train with the recipe. Returns, by step, (seconds of generation, mean tokens of a completion)."""
    from recipes import grpo

    completions = PROMPTS * GROUP_SIZE
    config = grpo.Config(
        model=str(worker.folder / "model"),
        tokenizer=str(TINY),
        dataset=str(worker.folder / "prompts.jsonl"),
        format="completion",
        rewards=f"{worker.folder}/rules.py:letters",
        loss="dapo",
        group_size=GROUP_SIZE,
        max_new_tokens=NEW_TOKENS[worker.small],
        temperature=TEMPERATURE,
        clip_low=0.2,
        clip_high=0.28,
        steps=steps,
        global_batch_size=PROMPTS,
        batch_size=completions // worker.world.size,
        generate_batch_size=completions // worker.world.size,
        lr=LR,
        warmup=0,
        schedule="constant",
        weight_decay=0.01,
        clip_norm=1.0,
        dtype="fp32",
        output_dir=str(worker.out / "run"),
        save_every=0,
        save_model=False,
    )
    log = (grpo.main(config) / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in log.splitlines()]
    names = ("seconds_drawing", "completion_length")
    return tuple([line[name] for line in lines] for name in names)


def _train_trl(worker: Worker, steps: int) -> tuple[list[float], list[float]]:
    """The same with TRL's trainer."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from accelerate.utils import DistributedType
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    from utils.data.tokens import load_tokenizer

    drawing, is_sharded = [], worker.contender == "trl"

    class Timed(GRPOTrainer):
        def _generate_single_turn(self, *args, **options):
            begun = time.perf_counter()
            drawn = super()._generate_single_turn(*args, **options)
            drawing.append(time.perf_counter() - begun)
            return drawn

    sharding = {
        "fsdp": True,
        "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    }
    args = GRPOConfig(
        output_dir=str(worker.out / "trl"),
        max_steps=steps,
        save_strategy="no",
        report_to=[],
        logging_steps=1,
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP_SIZE // worker.world.size,
        gradient_accumulation_steps=1,
        num_generations=GROUP_SIZE,
        max_completion_length=NEW_TOKENS[worker.small],
        temperature=TEMPERATURE,
        top_k=0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=LR,
        lr_scheduler_type="constant",
        weight_decay=0.01,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        **(sharding if is_sharded else {}),
    )
    if is_sharded:
        # As in step.py: only this name keeps accelerate from FSDP on a CPU.
        args.distributed_state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    lines = (worker.folder / "prompts.jsonl").read_text().splitlines()
    trainer = Timed(
        AutoModelForCausalLM.from_pretrained(worker.folder / "model", dtype=torch.float32),
        reward_funcs=lambda completions, **_: [float(len(c)) for c in completions],
        args=args,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=load_tokenizer(TINY),
    )
    trainer.train()
    found = any(isinstance(p, DTensor) for p in trainer.model.parameters())
    check(found == is_sharded, f"sharded: {found}")
    logs = [log for log in trainer.state.log_history if "completions/mean_length" in log]
    return drawing, [log["completions/mean_length"] for log in logs]


if __name__ == "__main__":
    run_worker(contend)
