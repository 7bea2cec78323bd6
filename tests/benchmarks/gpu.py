"""
One GPU: tokens/s, MFU and peak memory of a Llama-3-8B shape, sequence 4096, 32,768 tokens per optimizer step.

Random weights are created on the GPU. Everything is bf16, also weights and optimizer. `make gpu` runs it and
writes the results to configs/measured_<device>.md. --small uses a tiny shape, which a CPU can run.
"""

import importlib.util
import os
import re
import signal
from pathlib import Path

import torch
from measure import Worker, measured, run_worker  # also puts the repository on sys.path
from step import hf_trainer, median_step, step_ends

from utils.run.distributed import ALONE
from utils.run.memory import peak_memory_bytes
from utils.train.profiling import flops_per_token, mfu

CONTENDERS = {
    "plain": "the recipe's step, nothing recomputed; 8 micro-batches of 1 row",
    "compiled": "--compile",
    "selective": "--activation_checkpointing selective",
    "full": "--activation_checkpointing full; 2 micro-batches of 4 rows",
    "compiled_full": "the same and --compile",
    "offload_1b": "--cpu_offload, a Llama-3.2-1B shape; 2 micro-batches of 4 rows",
    "lora": "LoRA of rank 16 on all linear layers over bf16 weights; 8 micro-batches of 1 row",
    "compiled_lora": "the same and --compile",
    "lora_8bit": "lora over int8",
    "lora_4bit": "lora over nf4",
    "hf_defaults": "transformers.Trainer, TrainingArguments(bf16=True); 8 micro-batches of 1 row",
    "hf_recompute": "hf_tuned without Liger",
    "hf_tuned": "Trainer with gradient checkpointing, pure bf16, sdpa, Liger where installed; 2 of 4 rows",
}
# recomputation leaves memory for 4 rows
FOUR_ROWS = ("full", "compiled_full", "offload_1b", "hf_recompute", "hf_tuned")
REFERENCES = dict.fromkeys(("plain", "compiled", "selective"), "hf_defaults")
REFERENCES |= dict.fromkeys(("full", "compiled_full", "hf_recompute"), "hf_tuned")
REFERENCES |= dict.fromkeys(("compiled_lora", "lora_8bit", "lora_4bit"), "lora")
METRICS = {
    "tokens_per_second": ("", min),
    "mfu": ("%", min),
    "peak_bytes": ("GiB", max),
    "reserved_bytes": ("GiB", max),
    "retries": ("", max),  # how often the allocator had to give all cached blocks back
    "seconds": ("s", max),
    "host_peak_bytes": ("GiB", max),
}
RATIOS = ("tokens_per_second", "peak_bytes")
BOUNDS = ()  # none, but report() prints goals for one H200
GOALS = """Goals on one H200: plain at least 9,500 tokens/s and 1.35 x the speed of hf_defaults; full at most
0.75 x the peak of hf_tuned; lora at least 14,000 tokens/s, lora_8bit 0.90 x and lora_4bit 0.92 x of it."""
RANKS = (1,)
LIMIT = 540  # seconds for each contender, which may compile: `--only NAME` fits into ten minutes
WARM_UP, TIMED, ROWS = 2, 3, 8  # steps; rows of an optimizer step
LLAMA_3 = {
    "vocab_size": 128_256,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_theta": 5e5,
    "max_position_embeddings": 8192,
}
EIGHT_B = {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, **LLAMA_3}
ONE_B = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, **LLAMA_3}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512}
CONVENTION = """MFU counts 6 operations for each matmul parameter (with the head, without the embedding
table), or 4 under adapters, and 6 x layers x width x sequence for attention, which is causal and so half of
what PaLM counts; recomputation does not count. It is divided by the device's dense bf16 peak in NVIDIA's
data sheet. All but offload_1b and the Trainer's runs have --sync_each_microbatch."""


def unavailable(small: bool = False) -> str:
    return "" if small or torch.cuda.is_available() else "no GPU here: nothing was run"


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory): the offloaded 1B shape is on the host, in 8 bytes a parameter."""
    return 2**20, 2**30 if small else 2**34


def prepare(folder: Path, small: bool) -> None:
    """Nothing to prepare: weights and tokens are drawn from a seed."""


def contend(worker: Worker) -> dict[str, float]:
    from transformers import LlamaConfig

    from utils.model.loading import build_model

    device, name = worker.world.device, worker.contender
    shape = TINY if worker.small else ONE_B if name == "offload_1b" else EIGHT_B
    config = LlamaConfig(**shape, tie_word_embeddings=name == "offload_1b")
    seq_len = 32 if worker.small else 4096
    rows = 4 if name in FOUR_ROWS else 1  # of a micro-batch
    torch.manual_seed(0)
    count = (WARM_UP + TIMED) * ROWS // rows
    batches = [torch.randint(config.vocab_size, (rows, seq_len)) for _ in range(count)]
    train = _hf if name.startswith("hf_") else _ours
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT)
    with measured() as host, step_ends() as ends:
        train(worker, config, batches, ROWS // rows)
    signal.alarm(0)
    assert len(ends) == WARM_UP + TIMED, ends
    seconds, _ = median_step(ends[WARM_UP - 1 :])
    speed = ROWS * seq_len / seconds
    model = build_model(config, torch.bfloat16)
    flops = flops_per_token(model, seq_len, frozen="lora" in name)
    share = mfu(flops * speed, ALONE._replace(device=device))  # 0 on a CPU
    numbers = {"tokens_per_second": speed, "seconds": seconds} | ({"mfu": share} if share else {})
    if device.type == "cuda":
        numbers["reserved_bytes"] = torch.cuda.max_memory_reserved()
        numbers["retries"] = torch.cuda.memory_stats()["num_alloc_retries"]
    return numbers | {
        "peak_bytes": peak_memory_bytes(),
        "host_peak_bytes": host["peak_bytes"],
    }


def _too_long(*_) -> None:
    raise TimeoutError(f"not done after {LIMIT} s")


def _ours(
    worker: Worker, config, batches: list[torch.Tensor], micro_batches: int
) -> torch.nn.Module:
    """The acts of recipes/finetune.py from `build` to `train`, without files."""
    from shards import shard_training
    from tiny import build_optimizer

    from utils.model.attention import compile_layers, use_gpu_kernels
    from utils.model.loading import build_model, load_pieces
    from utils.model.loss import add_chunked_loss
    from utils.model.sharding import clip_gradients, recompute_activations
    from utils.run.distributed import build_mesh

    device = worker.world.device
    name = worker.contender.removeprefix("compiled_")
    offload = name == "offload_1b"
    if offload:
        torch.set_num_threads(os.cpu_count())  # the optimizer's step is on the CPU
    model = build_model(config, torch.bfloat16)
    lora, _, kind = name.partition("_")
    if lora == "lora":
        from utils.model.lora import add_adapters, freeze_base, init_lora
        from utils.model.options import Lora, Quant
        from utils.model.quantize import quantize_linears

        add_adapters(model, Lora(16, 32))
        if kind:
            quantize_linears(model, Quant(kind), torch.bfloat16)
        freeze_base(model, Quant(), torch.bfloat16)
    if device.type == "cuda":
        use_gpu_kernels(model)
    add_chunked_loss(model)
    recompute = "full" if offload else name
    if recompute in ("selective", "full"):
        recompute_activations(model, recompute)
    if worker.contender.startswith("compiled"):
        compile_layers(model)
    mesh = build_mesh(worker.world)
    shard_training(model, mesh, torch.bfloat16, cpu_offload=offload, accumulates=False)
    load_pieces(model, [], device, offload)  # memory, and the buffers
    fill(model)
    if lora == "lora":
        init_lora(model, 0)
    optimizer = build_optimizer(model, 1e-5, 0.01)

    model.train()
    for first in range(0, len(batches), micro_batches):
        trained = sum(ids.numel() - len(ids) for ids in batches[first : first + micro_batches])
        for i, ids in enumerate(batches[first : first + micro_batches], start=1):
            # --sync_each_microbatch: on one GPU it costs no traffic, and without it fp32 gradients of the
            # whole model are kept. With offload the gradients would go to the host each time.
            model.set_requires_gradient_sync(i == micro_batches or not offload)
            ids = ids.to(device)
            (model(ids, labels=ids) / trained).backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Random weights, small enough to train."""
    from utils.model.loading import local

    for shard in map(local, model.parameters()):
        if shard.dtype == torch.int32:  # the bits of fp32 scales
            shard.view(torch.float32).fill_(0.06)
        elif not shard.is_floating_point():
            shard.random_()
        else:
            shard.normal_(std=0.02) if shard.ndim > 1 else shard.fill_(1.0)


def _hf(worker: Worker, config, batches: list[torch.Tensor], micro_batches: int) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        # otherwise Trainer wraps the model in DDP, which takes memory on one rank too
        os.environ.pop(name, None)
    device, options = worker.world.device, {"bf16": True}
    if worker.contender in ("hf_recompute", "hf_tuned"):
        liger = (
            worker.contender == "hf_tuned" and importlib.util.find_spec("liger_kernel") is not None
        )
        options = {
            "gradient_checkpointing": True,
            "optim": "adamw_torch_fused",
            "use_liger_kernel": liger,
        }
    with device:  # in bf16, as from_pretrained loads such a checkpoint
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    rows = [{"input_ids": ids, "labels": ids} for ids in batches]
    options |= {"use_cpu": device.type == "cpu", "learning_rate": 1e-5}
    return hf_trainer(model, rows, worker.out, micro_batches, **options).model


def report(results: dict) -> None:
    """Print the goals; on a GPU also write configs/measured_<device>.md."""
    print(GOALS)
    if results["config"]["small"] or not torch.cuda.is_available():
        return
    device = torch.cuda.get_device_name()
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [f"# Measured on {device}", "", __doc__.strip().splitlines()[0], GOALS, CONVENTION, ""]
    lines += [f"{results['date']}; host: {results['machine']['sentence']}; {versions}.", ""]
    lines += [
        f"Command: `python {' '.join(results['command'])}`, as `make gpu` does after its tests.",
        "",
    ]
    write_table("measured_", [*lines, *table(results["tables"][0]["rows"])])


def write_table(stem: str, lines: list[str]) -> None:
    """Write configs/STEM<device>.md."""
    name = stem + re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    path = Path(__file__).resolve().parents[2] / "configs" / f"{name}.md"
    path.write_text("\n".join(lines) + "\n")
    print(f"written: {path}")


def table(rows: list[dict]) -> list[str]:
    """The lines of the table: medians, and the ratios of each run's speed and peak to its reference's."""
    head = ["run", "tokens/s", "MFU", "peak GiB", "reserved", "retries", "step, s"]
    head += ["speed and peak, over", "what it is"]
    found = [head, ["---"] * len(head)]
    for row in rows:
        name, cells = row["contender"], [row["error"], *[""] * 6]
        if not row["error"]:
            v = {key: median for key, (median, _, _) in row["values"].items()}
            ratios = [f"{v[f'{key}_ratio']:.3f} x" for key in RATIOS if f"{key}_ratio" in v]
            cells = [f"{v['tokens_per_second']:,.0f}", f"{v['mfu']:.1%}" if "mfu" in v else "-"]
            cells += [f"{v.get(f'{key}_bytes', 0) / 2**30:.1f}" for key in ("peak", "reserved")]
            cells += [f"{v.get('retries', 0):.0f}", f"{v['seconds']:.2f}"]
            cells.append(f"{', '.join(ratios)} {REFERENCES[name]}" if ratios else "")
        found.append([name, *cells, CONTENDERS[name]])
    return [f"| {' | '.join(cells)} |" for cells in found]


if __name__ == "__main__":
    run_worker(contend)
