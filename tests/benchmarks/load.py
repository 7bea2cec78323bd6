"""
Load 1.8 GiB of bf16 weights as fp32 shards: each rank reads its own slices. Compared with five other ways.

The time runs from the folder to a sharded model with its weights in place; it includes building, planning and
sharding. The bound is raw_pread: the same slices through one buffer, the same cast, no model. Afterwards, not
timed, every shard is compared with the checkpoint's values, bit for bit.
"""

import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from measure import MIB, Bound, Worker, measured, run_worker
from safetensors import safe_open
from shards import shard_training
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces, transfer
from utils.run.distributed import all_reduce_sum, build_mesh

CONTENDERS = {
    "ours": "utils/model/loading.py: built on meta, sharded, then each rank reads its own slices",
    "raw_pread": "the same slices by os.preadv through one buffer, the same cast; one thread, no model",
    "from_pretrained": "transformers, the whole model on every rank, then sharded",
    "rank0_broadcast": "from_pretrained on rank 0, then set_model_state_dict(broadcast_from_rank0)",
    "transformers_native": "from_pretrained(distributed_config=DistributedConfig(fsdp_size=N))",
    "dcp_hf_reader": "torch.distributed.checkpoint, HuggingFaceStorageReader into the shards",
    "accelerate": "FSDP2 plugin with cpu_ram_efficient_loading, Accelerator.prepare",
}
REFERENCES = dict.fromkeys(CONTENDERS, "raw_pread")
METRICS = {
    "seconds": ("s", max),
    "cpu_seconds": ("s", sum),
    "peak_bytes": ("MiB", max),
    "peak_sum_bytes": ("MiB", sum),
    "pss_bytes": ("MiB", max),
    "read_call_bytes": ("MiB", sum),
    "disk_bytes": ("MiB", sum),
    "peak_of_allowed": (None, max),
    "read_of_checkpoint": (None, max),
}
RATIOS = ("seconds", "cpu_seconds")
BOUNDS = (
    Bound("peak_of_allowed", 1, "peak memory / (1.05 x shard + largest slice + 64 MiB)"),
    Bound("read_of_checkpoint", 1.02, "bytes read by all ranks / bytes of the checkpoint"),
    Bound("seconds", 1.5, "time / raw_pread's", over="raw_pread", timed=True),
)
RANKS = (2, 4)
ELEMENTS = {False: 953_223_168, True: 84_157_440}  # of the model, and of the one with --small
Shards = dict[str, tuple[torch.Tensor, int]]  # name -> (rows of this rank, number of the first)


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory): the whole model on every rank needs most."""
    return int(2.1 * ELEMENTS[small]), int(4.4 * ELEMENTS[small] * ranks)


def prepare(folder: Path, small: bool) -> None:
    """Write a Llama in bf16 with seeded random weights, in four files."""
    width, layers, vocab_size = (1024, 4, 16_000) if small else (2048, 16, 32_000)
    sizes = {
        "hidden_size": width,
        "intermediate_size": width * 11 // 4,
        "num_hidden_layers": layers,
    }
    torch.manual_seed(0)
    disable_progress_bar()
    model = LlamaForCausalLM._from_config(
        LlamaConfig(vocab_size=vocab_size, **sizes), dtype=torch.bfloat16
    )
    assert model.num_parameters() == ELEMENTS[small]
    model.save_pretrained(folder, max_shard_size=int(0.55 * ELEMENTS[small]))  # bytes


def ours(worker: Worker) -> nn.Module:
    model = build_model(LlamaConfig.from_pretrained(worker.folder), torch.float32)
    pieces = plan_pieces(model, open_weights(worker.folder), worker.folder)
    shard_training(model, build_mesh(worker.world), torch.float32)
    load_pieces(model, pieces, worker.world.device)
    return model


def raw_pread(worker: Worker) -> Shards:
    plan, files, shards = [], {}, {}
    for name, info in open_weights(worker.folder).items():
        most = -(-info.shape[0] // worker.world.size)
        first = min(most * worker.world.rank, info.shape[0])
        shape = torch.Size([min(most, info.shape[0] - first), *info.shape[1:]])
        plan.append((name, info.file, info.begin + 2 * first * shape[1:].numel(), shape, first))
        files.setdefault(info.file, open(info.file, "rb", buffering=0))  # noqa: SIM115 (the process ends soon)
    buffer = torch.empty(max(shape.numel() for *_, shape, _ in plan), dtype=torch.bfloat16)
    for name, file, begin, shape, first in plan:
        part = buffer[: shape.numel()]
        transfer(os.preadv, files[file], begin, part.view(torch.uint8))
        shards[name] = torch.empty(shape).copy_(part.view(shape)), first
    return shards


def from_pretrained(worker: Worker) -> nn.Module:
    model = LlamaForCausalLM.from_pretrained(worker.folder, dtype=torch.float32)
    return shard_training(model, build_mesh(worker.world), torch.float32)


def rank0_broadcast(worker: Worker) -> nn.Module:
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    whole = {}
    if worker.world.rank == 0:
        whole = LlamaForCausalLM.from_pretrained(worker.folder, dtype=torch.float32).state_dict()
    model = empty_shards(worker)
    set_model_state_dict(model, whole, options=options)
    return model


def transformers_native(worker: Worker) -> nn.Module:
    from transformers.distributed import DistributedConfig

    config = DistributedConfig(fsdp_size=worker.world.size)
    return LlamaForCausalLM.from_pretrained(
        worker.folder, dtype=torch.float32, distributed_config=config
    )


def dcp_hf_reader(worker: Worker) -> nn.Module:
    model = empty_shards(worker)
    dcp.load(
        get_model_state_dict(model), storage_reader=dcp.HuggingFaceStorageReader(str(worker.folder))
    )
    return model


def accelerate(worker: Worker) -> nn.Module:
    from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin

    os.environ |= {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
        "FSDP_VERSION": "2",
    }
    options = {"auto_wrap_policy": "transformer_based_wrap", "cpu_ram_efficient_loading": True}
    options["transformer_cls_names_to_wrap"] = ["LlamaDecoderLayer"]
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    accelerator = Accelerator(cpu=worker.world.device.type == "cpu", fsdp_plugin=plugin)
    accelerator.state.distributed_type = DistributedType.FSDP  # on CPUs it would choose DDP
    accelerator.state.fsdp_plugin = plugin
    model = LlamaForCausalLM.from_pretrained(worker.folder, dtype=torch.float32)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[
        0
    ]  # refused without an optimizer


def empty_shards(worker: Worker) -> nn.Module:
    """The sharded model with its buffers; its weights are allocated but not filled."""
    model = build_model(LlamaConfig.from_pretrained(worker.folder), torch.float32)
    shard_training(model, build_mesh(worker.world), torch.float32)
    load_pieces(model, [], worker.world.device)
    return model


def shards_of(model: nn.Module) -> Shards:
    found: Shards = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), f"{name} is not sharded"
        where = (parameter.shape, parameter.device_mesh, parameter.placements)
        found[name] = (
            parameter.to_local().detach(),
            compute_local_shape_and_global_offset(*where)[1][0],
        )
    return found


def compare(folder: Path, shards: Shards, worker: Worker) -> None:
    """Raise an error unless the shards of all ranks together equal the folder's tensors bit for bit, with
    each value once.
    """
    held = total = 0
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                source, (local, first) = tensors.get_slice(name), shards[name]
                same = torch.equal(
                    local, source[first : first + len(local)].to(local.device, local.dtype)
                )
                assert same, f"{name}: rows from {first} differ from {file.name}"
                held, total = held + local.numel(), total + torch.Size(source.get_shape()).numel()
    held = all_reduce_sum(held, worker.world)
    assert held == total == ELEMENTS[worker.small], (
        f"the ranks hold {held} values and {folder} {total}"
    )


def contend(worker: Worker) -> dict[str, float]:
    if worker.contender == "accelerate":
        import accelerate  # noqa: F401 (importing it is not loading)
    with measured() as numbers:
        model = globals()[worker.contender](worker)
    shards = model if isinstance(model, dict) else shards_of(model)
    compare(worker.folder, shards, worker)
    elements = [local.numel() for local, _ in shards.values()]
    allowed = 1.05 * 4 * sum(elements) + 2 * max(elements) + 64 * MIB  # fp32 here, bf16 in the file
    read = [all_reduce_sum(numbers[key], worker.world) for key in ("read_call_bytes", "disk_bytes")]
    numbers |= {
        "peak_sum_bytes": numbers["peak_bytes"],
        "peak_of_allowed": numbers["peak_bytes"] / allowed,
    }
    return numbers | {"read_of_checkpoint": max(read) / (2 * ELEMENTS[worker.small])}


def report(results: dict) -> None:
    """Say so if reads through mmap could not be measured, because files stayed in the page cache."""
    runs = [
        run["values"] for run in results["runs"] if run["contender"] == "ours" and run["values"]
    ]
    if any(values["disk_bytes"] < values["read_call_bytes"] / 2 for values in runs):
        print("the page cache could not be dropped before every run: disk bytes are too low")


if __name__ == "__main__":
    run_worker(contend)
