"""
LoRA on a 16-, 8- and 4-bit base: the bytes that a rank reads and holds while loading, and the
traffic of a step.

Each rank quantizes its own rows while it loads them, some MiB at a time. The 16-bit base is the reference.
Adapters have rank 4, so that their bytes do not hide those of the base.
"""

import time

import load
import torch
from measure import MIB, Bound, Worker, measured, run_worker
from shards import shard_training
from step import WireBytes
from tiny import build_optimizer
from transformers import LlamaConfig

from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import add_adapters, base_names, freeze_base, init_lora
from utils.model.loss import add_chunked_loss
from utils.model.options import Lora, Quant
from utils.model.quantize import KINDS, quantize_linears
from utils.model.sharding import decoder_layers
from utils.run.distributed import all_reduce_sum, build_mesh

CONTENDERS = {
    "16bit": "LoRA over bf16 weights",
    "8bit": "LoRA over int8 rows with fp32 scales",
    "4bit": "LoRA over nf4 in blocks of 64 with fp32 scales",
}
REFERENCES = dict.fromkeys(CONTENDERS, "16bit")
METRICS = {
    "seconds": ("s", max),
    "cpu_seconds": ("s", sum),
    "peak_bytes": ("MiB", max),
    "shard_bytes": ("MiB", max),
    "layers_gathered_bytes": ("MiB", max),
    "reduced_bytes": ("MiB", max),
    "tokens_per_second": ("/s", min),
    "quantize_of_share": ("x", max),
    "peak_of_allowed": (None, max),
    "read_of_checkpoint": (None, max),
    "reduced_of_adapters": (None, max),
}
RATIOS = ("peak_bytes", "layers_gathered_bytes", "tokens_per_second")
BOUNDS = tuple(
    Bound(metric, limit, f"{name}: {says}", over, contender=name)
    for name, wire in (("16bit", 1.0), ("8bit", 0.52), ("4bit", 0.29))
    for metric, limit, says, over in (
        ("peak_of_allowed", 1, "peak memory / (1.05 x shard + largest slice + 64 MiB)", ""),
        ("read_of_checkpoint", 1.02, "bytes read by all ranks / bytes of the checkpoint", ""),
        ("reduced_of_adapters", 1.01, "bytes reduced / the adapters' gradients", ""),
        ("layers_gathered_bytes", wire, "bytes gathered for layers / those of 16bit", "16bit"),
    )
)
RANKS = (2,)
TOKENS = {True: 16, False: 256}  # of a rank in a step, by --small: some CPUs are slow in bf16


def needs(small: bool, ranks: int) -> tuple[int, int]:
    return load.needs(True, ranks)


def prepare(folder, small: bool) -> None:
    load.prepare(folder, True)  # 84 million parameters: quantization is slow on a CPU


def contend(worker: Worker) -> dict[str, float]:
    world, kind = worker.world, worker.contender
    model = build_model(LlamaConfig.from_pretrained(worker.folder), torch.float32)
    pieces = plan_pieces(model, open_weights(worker.folder), worker.folder)
    add_adapters(model, Lora(4, 8))
    if kind in KINDS:
        quantize_linears(model, Quant(kind), torch.bfloat16)
    freeze_base(model, Quant(), torch.bfloat16)
    names = base_names(model)
    add_chunked_loss(model)
    shard_training(model, build_mesh(world), torch.bfloat16)
    with measured() as numbers:
        load_pieces(model, pieces, world.device, names=names)
        init_lora(model, 0)
    parts = [p.to_local() for p in model.parameters()]
    numbers["shard_bytes"] = sum(part.nbytes for part in parts)
    largest = max(part.numel() for part in parts) * 2
    numbers["peak_of_allowed"] = numbers["peak_bytes"] / (
        1.05 * numbers["shard_bytes"] + largest + 64 * MIB
    )
    read = [all_reduce_sum(numbers[key], world) for key in ("read_call_bytes", "disk_bytes")]
    numbers["read_of_checkpoint"] = max(read) / (2 * load.ELEMENTS[True])
    if kind in KINDS:
        numbers["quantize_of_share"] = share_of_time(
            KINDS[kind].quantize, world.size, 1 if worker.small else 3
        )

    optimizer = build_optimizer(model, 1e-4, 0.0)
    torch.manual_seed(world.rank)
    tokens = TOKENS[worker.small]
    ids = torch.randint(16_000, (1, tokens))
    for step in range(2 if worker.small else 4):
        started, wire = time.perf_counter(), WireBytes()
        with wire:
            model(ids, labels=ids).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step:  # the first one warms up
            speed = tokens * world.size / (time.perf_counter() - started)
            numbers["tokens_per_second"] = max(speed, numbers.get("tokens_per_second", 0))
    rest = {id(p): p for p in model.parameters()}
    for layer in decoder_layers(model):
        rest = {key: p for key, p in rest.items() if key not in {id(q) for q in layer.parameters()}}
    # all other units are gathered once, in bf16
    others = sum(p.numel() for p in rest.values()) * 2 * (world.size - 1) / world.size
    adapters = (
        sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)
        * (world.size - 1)
        / world.size
    )
    numbers |= {"layers_gathered_bytes": wire.gathered - others, "reduced_bytes": wire.reduced}
    return numbers | {"reduced_of_adapters": wire.reduced / adapters}


def share_of_time(quantize, ranks: int, repeats: int) -> float:
    """Time to quantize a rank's rows of a matrix, over 1/N of the time for the whole matrix; each
    the best of its repeats.
    """
    rows = torch.randn(2048, 4096).to(torch.bfloat16)

    def fastest(part: torch.Tensor) -> float:
        times = []
        for _ in range(repeats):
            started = time.process_time()
            quantize(part)
            times.append(time.process_time() - started)
        return min(times)

    return fastest(rows[: len(rows) // ranks]) * ranks / fastest(rows)


if __name__ == "__main__":
    run_worker(contend)
