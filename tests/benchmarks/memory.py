"""
Planned against measured memory of a step, on one GPU, and on two if there are two. utils/plan/ plans 27
settings (22 with torch 2.11) before anything is allocated; torch.cuda.max_memory_allocated and
max_memory_reserved measure them after two steps.

`make gpu` runs it and writes the results to configs/planned_<device>.md. --small uses a tiny shape and three
settings. A CPU can run that, but nothing is measured on it.
"""

import gc
import statistics

import torch
from gpu import TINY, fill, write_table
from measure import Bound, Worker, run_worker  # also puts the repository on sys.path
from shards import shard_training
from tiny import build_optimizer

from utils.model.loading import load_pieces, local
from utils.model.lora import init_lora
from utils.model.options import SHARDS_INTEGERS, Lora, Quant
from utils.model.sharding import clip_gradients, recompute_activations
from utils.plan.need import Setting, _planned_model, need_of
from utils.run.distributed import World, build_mesh
from utils.run.units import GIB

CONTENDERS = {
    "settings": "recompute, rows, length, LoRA, 8bit, 4bit, offload and dtypes, alone and together"
}
# On one rank NCCL and three of FSDP2's streams have nothing to do.
REFERENCES, RATIOS, RANKS = {}, (), (1, 2) if torch.cuda.device_count() > 1 else (1,)
METRICS = {
    "count": ("", min),
    "median_error": ("%", max),
    "worst_error": ("%", max),
    "too_little": ("", max),
}
BOUNDS = (
    Bound("median_error", 0.02, "median error of the planned peak", contender="settings"),
    Bound("worst_error", 0.05, "worst error of the planned peak", contender="settings"),
    Bound(
        "too_little",
        0,
        "settings whose GPU gave more than was called comfortable",
        contender="settings",
    ),
) * torch.cuda.is_available()
ONE_B, SEVEN_B = "llama-3.2-1b", "qwen2.5-7b"
FULL, LORA = {"activation_checkpointing": "full"}, {"lora_rank": 16}
SELECTIVE, OFFLOAD = {"activation_checkpointing": "selective"}, {"cpu_offload": True}
# shape, tokens of a row, dtype of the weights, knobs
SETTINGS: list[tuple[str, int, str, dict]] = [
    (ONE_B, 2048, "fp32", {}),
    (ONE_B, 2048, "fp32", SELECTIVE),
    (ONE_B, 2048, "fp32", FULL),
    (ONE_B, 2048, "fp32", {"batch_size": 4}),
    (ONE_B, 2048, "fp32", {"batch_size": 4, **FULL}),
    (ONE_B, 8192, "fp32", {}),
    (ONE_B, 8192, "fp32", SELECTIVE),
    (ONE_B, 8192, "fp32", FULL),
    (ONE_B, 512, "fp32", {"batch_size": 16}),
    (ONE_B, 2048, "fp32", {"grad_accum": 3}),
    (ONE_B, 2048, "fp32", {"grad_accum": 3, **FULL}),
    (ONE_B, 2048, "bf16", {}),
    (ONE_B, 2048, "bf16", FULL),
    (ONE_B, 2048, "fp32", OFFLOAD),
    (ONE_B, 2048, "fp32", {**OFFLOAD, **FULL}),
    (ONE_B, 2048, "fp32", LORA),
    (ONE_B, 2048, "fp32", {**LORA, **FULL}),
    (ONE_B, 2048, "fp32", {**LORA, "quantization": "8bit"}),
    (ONE_B, 2048, "fp32", {**LORA, "quantization": "4bit"}),
    (SEVEN_B, 2048, "bf16", {}),
    (SEVEN_B, 2048, "bf16", SELECTIVE),
    (SEVEN_B, 4096, "bf16", FULL),
    (SEVEN_B, 2048, "fp32", LORA),
    (SEVEN_B, 4096, "fp32", {**LORA, **FULL}),
    (SEVEN_B, 4096, "fp32", {**LORA, "quantization": "8bit", **FULL}),
    (SEVEN_B, 2048, "fp32", {**LORA, "quantization": "4bit"}),
    (SEVEN_B, 4096, "fp32", {**LORA, "quantization": "4bit", "batch_size": 2, **FULL}),
]
SMALL = [("", 64, "fp32", knobs) for knobs in ({}, FULL, {**LORA, "quantization": "8bit"})]


def unavailable(small: bool = False) -> str:
    return "" if small or torch.cuda.is_available() else "no GPU here: nothing was run"


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory): the offloaded 1B shape is on the host, in 16 bytes a parameter."""
    return 2**20, 2**30 if small else 2**35


def prepare(folder, small: bool) -> None:
    """Nothing to prepare: weights and tokens are drawn from a seed."""


def contend(worker: Worker) -> dict:
    settings = SMALL if worker.small else SETTINGS
    if not SHARDS_INTEGERS:
        settings = [setting for setting in settings if "quantization" not in setting[3]]
    rows = [run(worker.world, *setting) for setting in settings]
    found = {"count": len(rows), "rows": rows}
    if worker.world.device.type == "cpu":
        return found
    errors = [abs(row["planned_bytes"] / row["measured_bytes"] - 1) for row in rows]
    little = [row for row in rows if row["taken_bytes"] > row["comfortable_bytes"]]
    found |= {"median_error": statistics.median(errors), "worst_error": max(errors)}
    return found | {"too_little": len(little)}


def run(world: World, shape: str, seq_len: int, param_dtype: str, knobs: dict) -> dict:
    """Run two steps of a setting. Returns its planned and measured bytes."""
    device = world.device
    gpu = device.type == "cuda"
    chosen = planned(shape, seq_len, param_dtype, knobs, gpu, world.size)
    need = need_of(chosen)
    before = settled(gpu)
    model = _planned_model.__wrapped__(chosen)  # not from its cache: the plan's own stays on meta
    if chosen.activation_checkpointing != "none":
        recompute_activations(model, chosen.activation_checkpointing)
    shard_training(
        model,
        build_mesh(world),
        torch.bfloat16,
        chosen.reshard_after_forward,
        chosen.cpu_offload,
        accumulates=chosen.grad_accum > 1,
    )
    load_pieces(model, [], device, chosen.cpu_offload)
    fill(model)
    if chosen.lora:
        init_lora(model, 0)
    held = sum(local(p).nbytes for p in model.parameters())
    assert held == need.states.weights, f"{held} bytes of weights, {need.states.weights} planned"
    optimizer = build_optimizer(model, 1e-5, 0.01)
    torch.manual_seed(0)
    model.train()
    for _ in range(2):
        for i in range(chosen.grad_accum):
            model.set_requires_gradient_sync(i == chosen.grad_accum - 1)
            ids = torch.randint(model.config.vocab_size, (chosen.batch_size, seq_len)).to(device)
            (model(ids, labels=ids) / ids.numel()).backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    measured, reserved, (free, total) = 0, 0, torch.cuda.mem_get_info() if gpu else (0, 0)
    if gpu:
        measured, reserved = (
            torch.cuda.max_memory_allocated() - before,
            torch.cuda.max_memory_reserved(),
        )
    del model, optimizer, ids
    flags = " ".join(f"--{name} {value}" for name, value in knobs.items())
    settled(gpu)
    return {
        "setting": " ".join(filter(None, [shape, f"{seq_len} tokens", param_dtype, flags])),
        "planned_bytes": need.peak.total,
        "measured_bytes": measured,
        "must_bytes": need.device,
        "comfortable_bytes": need.comfortable,
        "reserved_bytes": reserved,
        "taken_bytes": total - free,
    }


def planned(
    shape: str, seq_len: int, param_dtype: str, knobs: dict, gpu: bool, ranks: int
) -> Setting:
    """The plan's setting for these knobs on `ranks` ranks."""
    from transformers import LlamaConfig

    from recipes.plan import DTYPES, find_config

    levers = dict(knobs)
    lora = Lora(lora_rank=levers.pop("lora_rank", 0))
    quant = Quant(levers.pop("quantization", "none"))
    rows = levers.get("batch_size", 1) * levers.pop("grad_accum", 1)
    return Setting(
        config=find_config(shape, False) if shape else LlamaConfig(**TINY, num_attention_heads=4),
        param_dtype=DTYPES[param_dtype],
        dtype=torch.bfloat16,
        seq_len=seq_len,
        shards=ranks,
        local_ranks=ranks,
        gpu=gpu,
        lora=lora,
        quant=quant,
        rows=rows,
        **levers,
    )


def settled(gpu: bool) -> int:
    """Free a GPU's cached memory and reset its peak. Returns the bytes in use."""
    gc.collect()
    if not gpu:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def report(results: dict) -> None:
    """Print the table; on a GPU also write configs/planned_<device>.md."""
    names = ("planned", "measured", "must", "comfortable", "reserved", "taken")
    lines = [
        "| GPUs | setting | planned, GiB | measured | ratio | must | comfortable | reserved | given |"
    ]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for run in results["runs"]:
        for row in (run.get("by_rank") or [{"rows": []}])[0]["rows"]:
            sizes = {name: row[f"{name}_bytes"] for name in names}
            told = {name: f"{size / GIB:.2f}" for name, size in sizes.items()}
            ratio = f"{sizes['planned'] / sizes['measured']:.3f}" if sizes["measured"] > 0 else "-"
            cells = [str(run["ranks"]), row["setting"], told["planned"], told["measured"], ratio]
            lines.append(f"| {' | '.join(cells + [told[name] for name in names[2:]])} |")
    print("\n".join(lines))
    if not results["config"]["small"] and torch.cuda.is_available():
        head = [
            f"# Planned and measured memory on {torch.cuda.get_device_name()}",
            "",
            __doc__.strip(),
            "",
        ]
        command = f"python {' '.join(results['command'])}"
        head += [f"{results['date']}, `{command}`; host: {results['machine']['sentence']}.", ""]
        told = [bound["sentence"] for bound in results["bounds"]]
        write_table("planned_", [*head, *lines, "", *(f"- {sentence}" for sentence in told)])


if __name__ == "__main__":
    run_worker(contend)
