"""
A training step of finetune.py against a bare fully_shard loop and HF Trainer: same model, batches, precision.

For every loop a step ends when its optimizer step ends. The last step is not timed: in it the bytes of every
collective are counted, and those that FSDP2 gathers and reduces are divided by the least that it needs.
"""

import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import Bound, Worker, measured, run_worker  # also puts the repository on sys.path
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from utils.run.errors import check

TINY = Path(__file__).resolve().parents[2] / "recipes" / "tiny"  # for its tokenizer
CONTENDERS = {
    "bare_loop": "tests/benchmarks/bare_loop.py: fully_shard by hand, the same loss, clipping and log",
    "ours": "recipes/finetune.py",
    "bare_loop_bf16": "the bare loop in bf16 over fp32 shards",
    "ours_bf16": "with --dtype bf16",
    "ours_recompute": "with --activation_checkpointing full",
    "ours_accumulate": "the same global batch in twice as many micro-batches",
    "hf_trainer": "transformers.Trainer with FSDP2 through accelerate",
}
REFERENCES = {"ours": "bare_loop", "ours_bf16": "bare_loop_bf16", "hf_trainer": "ours"}
METRICS = {
    "seconds": ("s", max),
    "cpu_seconds": ("s", sum),
    "tokens_per_second": ("", min),
    "peak_bytes": ("MiB", max),
    "gathered_bytes": ("MiB", max),
    "reduced_bytes": ("MiB", max),
    "other_bytes": ("", max),
    "wire_share": ("of least", max),
    "loss_error": ("", max),
}
RATIOS = ("seconds", "cpu_seconds", "peak_bytes")
WIRE = "bytes gathered and reduced, over the least that FSDP can do"
BOUNDS = (
    Bound("seconds", 1.03, "time of a step, over the bare loop's", over="bare_loop", timed=True),
    Bound(
        "seconds",
        1.03,
        "time of a step in bf16, over the bare loop's",
        over="bare_loop_bf16",
        timed=True,
        contender="ours_bf16",
    ),
    *(
        Bound("wire_share", 1.01, WIRE, contender=name)
        for name in CONTENDERS
        if name.startswith("ours") and name != "ours_bf16"  # gathered in half the bytes
    ),
)
RANKS = (2,)
LR, WARM_UP = 3e-4, 3
TIMED = {False: 12, True: 2}  # timed steps, by --small
ROWS, SEQ_LEN = 2, {False: 256, True: 64}
MODEL = {
    False: {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 6,
    },
    True: {"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3},
}


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory)."""
    return 2**29, ranks * 2**31


def prepare(folder: Path, small: bool) -> None:
    """Write a Llama with random weights in fp32, and rows that all fill the sequence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**MODEL[small], num_attention_heads=8, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    draw = random.Random(0)
    with open(folder / "rows.jsonl", "w") as file:
        for _ in range(64):
            text = "".join(draw.choices("abcdefghij ,.", k=12 * SEQ_LEN[small]))
            turns = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": text}]
            file.write(json.dumps({"messages": turns}) + "\n")


def contend(worker: Worker) -> dict[str, float]:
    steps, wire = WARM_UP + TIMED[worker.small] + 1, WireBytes()
    micro_batches = 2 if worker.contender == "ours_accumulate" else 1

    def at_step(done: int) -> None:
        if done == steps - 1:
            wire.__enter__()
        elif done == steps:
            wire.__exit__(None, None, None)

    with measured() as run, step_ends(at_step) as ends:
        losses = _train(worker, steps, micro_batches)
    seconds, cpu_seconds = median_step(ends[WARM_UP - 1 : -1])
    bf16 = worker.contender.endswith("bf16")
    least = least_wire_bytes(worker.folder / "model", worker.world.size, micro_batches)
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "peak_bytes": run["peak_bytes"],
        "tokens_per_second": ROWS * worker.world.size * SEQ_LEN[worker.small] / seconds,
        "gathered_bytes": wire.gathered,
        "reduced_bytes": wire.reduced,
        "other_bytes": wire.other,
        "wire_share": (wire.gathered + wire.reduced) / sum(least),
        "loss_error": difference_to_first(
            losses, worker.folder / f"losses{'_bf16' * bf16}.json", 1e-3 if bf16 else 1e-5
        ),
    }


@contextmanager
def step_ends(at_step: Callable[[int], None] = lambda done: None) -> Iterator[list]:
    """(wall seconds, CPU seconds) at the end of every optimizer step in the block, for any training loop.

    at_step is called after each step with the number of steps so far.
    """
    ends = []

    def hook(*_) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ends.append((time.perf_counter(), time.process_time()))
        at_step(len(ends))

    handle = register_optimizer_step_post_hook(hook)
    try:
        yield ends
    finally:
        handle.remove()


def median_step(ends: list) -> tuple[float, float]:
    """The median (wall seconds, CPU seconds) of a step, from the ends of steps."""
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in zip(ends, ends[1:], strict=False)]
    return tuple(statistics.median(column) for column in zip(*steps, strict=True))


def difference_to_first(numbers: list[float], oracle: Path, most: float = 1e-5) -> float:
    """Largest relative difference to the numbers of the contender that ran first, which are in
    the file `oracle`.

    Raises ConfigError if it is more than `most`, and so more than rounding. Every rank calls it.
    """
    if torch.distributed.get_rank() == 0 and not oracle.exists():
        oracle.write_text(json.dumps(numbers))
    torch.distributed.barrier()
    first = json.loads(oracle.read_text())
    error = max(abs(a - b) / b for a, b in zip(numbers, first, strict=True))
    check(
        error <= most,
        f"{oracle.name} differ by {error:.1e} from the first contender's: {numbers} {first}",
    )
    return error


def _train(worker: Worker, steps: int, micro_batches: int) -> list[float]:
    """Train with the contender's loop. Returns the loss of each step."""
    folder, out, seq_len = worker.folder, worker.out, SEQ_LEN[worker.small]
    if worker.contender.startswith("ours"):
        from recipes import finetune

        recompute = "full" if worker.contender == "ours_recompute" else "none"
        config = finetune.Config(
            model=str(folder / "model"),
            tokenizer=str(TINY),
            dataset=str(folder / "rows.jsonl"),
            steps=steps,
            batch_size=ROWS // micro_batches,
            grad_accum=micro_batches,
            seq_len=seq_len,
            lr=LR,
            warmup=0,
            schedule="constant",
            weight_decay=0.01,
            clip_norm=1.0,
            dtype="bf16" if worker.contender == "ours_bf16" else "fp32",
            activation_checkpointing=recompute,
            output_dir=str(out / "run"),
            save_every=0,
            save_model=False,
        )
        log = finetune.main(config) / "metrics.jsonl"
    elif worker.contender == "hf_trainer":
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        rows = [{"input_ids": b.ids, "labels": b.labels} for b in _batches(worker, steps)]
        trainer = hf_trainer(
            model,
            rows,
            out,
            use_cpu=True,
            fsdp=True,
            logging_steps=1,
            fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
            learning_rate=LR,
            lr_scheduler_type="constant",
            weight_decay=0.01,
            adam_beta2=0.95,
        )
        sharded = any(isinstance(p, DTensor) for p in trainer.model.parameters())
        check(sharded, "accelerate did not shard the model")
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    else:
        import bare_loop

        log = out / "metrics.jsonl"
        batches = [[(b.ids, b.labels)] for b in _batches(worker, steps)]
        dtype = torch.bfloat16 if worker.contender.endswith("bf16") else None
        bare_loop.train(folder / "model", batches, LR, log, dtype)
        torch.distributed.barrier()  # rank 0 has written
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


def _batches(worker: Worker, steps: int) -> list:
    """The recipe's batches of each step, on this rank."""
    from utils.data.batches import GlobalBatches
    from utils.data.examples import Rows, load_examples
    from utils.data.tokens import load_tokenizer, pad_id

    tokenizer, world = load_tokenizer(TINY), worker.world
    examples = load_examples(
        Rows(str(worker.folder / "rows.jsonl"), SEQ_LEN[worker.small]), tokenizer
    )
    loader = GlobalBatches(
        examples, 0, ROWS * world.size, ROWS, world.rank, world.size, pad_id(tokenizer)
    )
    return [batch for step in range(steps) for batch in loader.batches(step)]


def hf_trainer(model, rows: list[dict], out: Path, micro_batches: int = 1, **options):
    """HF Trainer, after it has trained on these micro-batches in their order."""
    from accelerate.utils import DistributedType
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainingArguments

    class OnTheseRows(Trainer):
        def get_train_dataloader(self):
            return DataLoader(rows, batch_size=None)

    args = TrainingArguments(
        output_dir=str(out / "hf"),
        max_steps=len(rows) // micro_batches,
        save_strategy="no",
        report_to=[],
        per_device_train_batch_size=len(rows[0]["input_ids"]),
        gradient_accumulation_steps=micro_batches,
        disable_tqdm=True,
        **options,
    )
    if args.fsdp and args.use_cpu:
        # accelerate uses FSDP only with an accelerator, and on a CPU silently falls back to DDP. Only this
        # name keeps it from FSDP.
        args.distributed_state._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    trainer = OnTheseRows(model, args)
    trainer.train()
    return trainer


class WireBytes(TorchDispatchMode):
    """Counts, within a with block, the bytes that this rank receives in all-gathers (`gathered`) and sends in
    reduce-scatters (`reduced`). `other`: the bytes of the tensors in all other collectives.
    """

    def __init__(self):
        super().__init__()
        self.gathered = self.reduced = self.other = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor calls again with the local tensors
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.name():
            sizes = [t.nbytes for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            if "_allgather_base_" in func.name():
                self.gathered += sizes[0] - sizes[1]
            elif "_reduce_scatter_base_" in func.name():
                self.reduced += sizes[1] - sizes[0]
            else:
                self.other += sum(sizes)
        return func(*args, **(kwargs or {}))


def least_wire_bytes(
    folder: Path, ranks: int, micro_batches=1, gathered_size=4
) -> tuple[float, float]:
    """(gathered, reduced) bytes on a rank in an optimizer step: the least for FSDP that frees its layers.

    In each micro-batch a layer is gathered for its forward and again for its backward. The last layer is
    gathered only once, since its backward follows right away, and so are all other parameters. (The backward
    of an embedding does not need its table.) Gradients are reduced once in a step, in fp32. gathered_size:
    bytes of an element in the all-gather.
    """
    from transformers import AutoConfig

    from utils.model.loading import build_model
    from utils.model.sharding import decoder_layers

    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    twice = sum(p.numel() for layer in decoder_layers(model)[:-1] for p in layer.parameters())
    once = sum(p.numel() for p in model.parameters()) * (ranks - 1) / ranks
    twice *= (ranks - 1) / ranks
    return (once + twice) * gathered_size * micro_batches, once * 4


if __name__ == "__main__":
    run_worker(contend)
