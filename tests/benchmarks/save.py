"""
Save fp32 shards as a bf16 Hugging Face folder: every rank its own bytes, beside a full gather and DCP.

The bound is raw_write: as many bytes into one file, each rank its range, and fsync. What the peers leave to
the page cache is synced within the time too. Ours reads everything back and compares; write_seconds is the
time without that. Afterwards, outside the time, every shard is compared with what was saved, bit for bit.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from load import ELEMENTS, compare, prepare, shards_of  # noqa: F401 (prepare is bench.py's)
from load import ours as load
from measure import MIB, Bound, Worker, measured, run_worker
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from utils import hf_format
from utils.loading import plan_pieces
from utils.model_folder import open_weights

CONTENDERS = {
    "ours": "utils/hf_format.py: every rank writes its shards at their places, reads back, compares",
    "raw_write": "as many bytes from one buffer, each rank its range of one file, and fsync",
    "full_gather": "get_model_state_dict(full_state_dict, cpu_offload) to rank 0, cast, save_file",
    "dcp_hf_writer": "torch.distributed.checkpoint, HuggingFaceStorageWriter with consolidation",
}
REFERENCES = dict.fromkeys(CONTENDERS, "raw_write")
METRICS = {
    "seconds": ("s", max), "write_seconds": ("s", max), "rate": ("MiB/s", min), "cpu_seconds": ("s", sum),
    "peak_bytes": ("MiB", max), "written_bytes": ("MiB", sum), "peak_of_allowed": (None, max),
}  # fmt: skip
RATIOS = ("seconds", "write_seconds")
BOUNDS = (Bound("peak_of_allowed", 1, "peak memory above the shards / 128 MiB"),)
RANKS = (2, 4)


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """Bytes of disk (read, saved, DCP's parts) and of memory (shards, a gather and its cast)."""
    return int(6.3 * ELEMENTS[small]), int(11 * ELEMENTS[small]) + ranks * 2**29


def ours(worker: Worker, model: nn.Module, out: Path) -> None:
    pieces = plan_pieces(model, open_weights(worker.folder), worker.folder)
    hf_format.save_model(out, model, pieces, worker.world)


def raw_write(worker: Worker, model: nn.Module, out: Path) -> None:
    if worker.world.rank == 0:
        out.mkdir()
        (out / "raw").touch()
        os.truncate(out / "raw", 2 * ELEMENTS[worker.small])
    dist.barrier()
    bounds = [2 * ELEMENTS[worker.small] * (worker.world.rank + i) // worker.world.size for i in (0, 1)]
    buffer = torch.randint(256, (16 * MIB,), dtype=torch.uint8)
    with open(out / "raw", "r+b", buffering=0) as file:
        for at in range(*bounds, len(buffer)):
            hf_format.transfer(os.pwritev, file, at, buffer[: bounds[1] - at])
        os.fsync(file)


def full_gather(worker: Worker, model: nn.Module, out: Path) -> None:
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if worker.world.rank == 0:
        out.mkdir()
        whole = {name: tensor.bfloat16() for name, tensor in whole.items()}
        save_file(whole, out / "model.safetensors", {"format": "pt"})


def dcp_hf_writer(worker: Worker, model: nn.Module, out: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in get_model_state_dict(model).items()}
    options = {"save_distributed": True, "enable_consolidation": True}
    options["fqn_to_index_mapping"] = dict.fromkeys(state, 1)
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out), **options))


def contend(worker: Worker) -> dict[str, float]:
    model, out = load(worker), worker.out / "model"
    verify, verify_seconds = hf_format.verify_chunks, 0.0

    def timed(*args) -> None:
        nonlocal verify_seconds
        started = time.perf_counter()
        verify(*args)
        verify_seconds = time.perf_counter() - started

    hf_format.verify_chunks = timed
    with measured() as numbers:
        globals()[worker.contender](worker, model, out)
        for path in out.glob("*.safetensors") if worker.world.rank == 0 else ():
            with open(path) as file:
                os.fsync(file)
    if worker.contender != "raw_write":
        compare(out, shards_of(model), worker)
    assert worker.contender != "ours" or verify_seconds, "save_model does not call verify_chunks"
    numbers["write_seconds"] = numbers["seconds"] - verify_seconds
    numbers["rate"] = 2 * ELEMENTS[worker.small] / numbers["seconds"]
    return numbers | {"peak_of_allowed": numbers["peak_bytes"] / (128 * MIB)}


if __name__ == "__main__":
    run_worker(contend)
