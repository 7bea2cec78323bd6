"""
Save the result, a bf16 Hugging Face folder, against a full gather and DCP; save checkpoints,
against raw writes.

The reference for the result is raw_write: the same number of bytes into one file, each rank its own
range, with fsync. Data that peers leave in the page cache is synced within the time too. Ours reads
everything back and compares; write_seconds is the time without that. Afterwards, not timed, every shard
is compared bit for bit.

Checkpoints are of another model, which really trains. For the save in the background: `blocked` is how long
save blocks the training; `copy` is the time to copy the same bytes into memory that is already in use; step
and step_in_save are medians of micro-batches without and during a save. These micro-batches only accumulate
gradients, so ranks do not wait for each other. The peak is that of the first save, while training is paused.
"""

import ctypes
import gc
import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from load import ELEMENTS, compare, prepare, shards_of  # noqa: F401 (prepare is bench.py's)
from load import ours as load
from measure import MIB, Bound, Worker, anonymous_bytes, measured, run_worker
from safetensors.torch import save_file
from shards import shard_training
from tiny import build_optimizer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

from utils.model import saving
from utils.model.folder import open_weights
from utils.model.loading import plan_pieces
from utils.model.sharding import clip_gradients
from utils.run.distributed import broadcast, build_mesh
from utils.train.checkpoint import CheckpointSaver, checkpoint_tensors

CONTENDERS = {
    "ours": "utils/model/saving.py: every rank writes its shards at their places, reads back, compares",
    "raw_write": "as many bytes from one buffer, each rank its range of one file, and fsync",
    "full_gather": "get_model_state_dict(full_state_dict, cpu_offload) to rank 0, cast, save_file",
    "dcp_hf_writer": "torch.distributed.checkpoint, HuggingFaceStorageWriter with consolidation",
    "checkpoint": "utils/train/checkpoint.py: weights and AdamW's moments of a Llama",
    "checkpoint_async": "in the background, while the training goes on",
}
REFERENCES = dict.fromkeys(("ours", "raw_write", "full_gather", "dcp_hf_writer"), "raw_write")
METRICS = {
    "seconds": ("s", max),
    "write_seconds": ("s", max),
    "rate": ("MiB/s", min),
    "cpu_seconds": ("s", sum),
    "peak_bytes": ("MiB", max),
    "written_bytes": ("MiB", sum),
    "peak_of_allowed": (None, max),
    "blocked": ("ms", max),
    "copy": ("ms", max),
    "step": ("ms", max),
    "step_in_save": ("ms", max),
    "steps_in_save": ("", min),
    "blocked_of_copy": (None, max),
    "peak_of_saved": (None, max),
    "growth": (None, max),
    "slowed": (None, max),
    "raw": ("s", max),
    "of_raw": (None, max),
}
RATIOS = ("seconds", "write_seconds")
ASYNC = {"contender": "checkpoint_async"}
RAW = "time / raw write + fsync + one pass of SHA-256 of the same bytes"
BOUNDS = (
    Bound("peak_of_allowed", 1, "peak memory above the shards / 128 MiB"),
    Bound("of_raw", 1.3, RAW, timed=True, contender="checkpoint"),
    Bound(
        "blocked_of_copy", 1.2, "time that save blocks / one copy of the bytes", timed=True, **ASYNC
    ),
    Bound("peak_of_saved", 1.1, "peak memory of a save / bytes saved", **ASYNC),
    Bound("growth", 1.02, "memory after 10 saves / after 2", **ASYNC),
    Bound("slowed", 1.15, "time of a step in a save / of one without", timed=True, **ASYNC),
)
RANKS = (2,)
LIBC = ctypes.CDLL(None)
SAVES = 10  # in the background
# micro-batches between them, and at most so many within one, by --small
STEPS, WITHIN = {False: 6, True: 2}, {False: 10**6, True: 2}
REPEATS = {False: 19, True: 2}  # checkpoints in the foreground
# by --small: vocabulary, width, inner width, tokens
TRAINED = {False: (8192, 1024, 2816, 32), True: (2048, 512, 1408, 8)}


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk: read, saved, DCP's parts; bytes of memory: shards, a full gather and its cast)."""
    return int(6.3 * ELEMENTS[small]), int(11 * ELEMENTS[small]) + ranks * 2**29


def ours(worker: Worker, model: nn.Module, out: Path) -> None:
    pieces = plan_pieces(model, open_weights(worker.folder), worker.folder)
    saving.save_model(out, model, pieces, worker.world, source=worker.folder)


def raw_write(worker: Worker, model: nn.Module, out: Path) -> None:
    if worker.world.rank == 0:
        out.mkdir()
        (out / "raw").touch()
        os.truncate(out / "raw", 2 * ELEMENTS[worker.small])
    dist.barrier()
    bounds = [
        2 * ELEMENTS[worker.small] * (worker.world.rank + i) // worker.world.size for i in (0, 1)
    ]
    buffer = torch.randint(256, (16 * MIB,), dtype=torch.uint8)
    with open(out / "raw", "r+b", buffering=0) as file:
        for at in range(*bounds, len(buffer)):
            saving.transfer(os.pwritev, file, at, buffer[: bounds[1] - at])
        os.fsync(file)


def full_gather(worker: Worker, model: nn.Module, out: Path) -> None:
    whole = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if worker.world.rank == 0:
        out.mkdir()
        whole = {name: tensor.bfloat16() for name, tensor in whole.items()}
        save_file(whole, out / "model.safetensors", {"format": "pt"})


def dcp_hf_writer(worker: Worker, model: nn.Module, out: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in get_model_state_dict(model).items()}
    options = {"save_distributed": True, "enable_consolidation": True}
    options["fqn_to_index_mapping"] = dict.fromkeys(state, 1)
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(out), **options))


class Training:
    """A sharded Llama of two layers, with AdamW; each rank trains one row on one thread."""

    def __init__(self, worker: Worker):
        LIBC.mallopt(-3, 2**18)  # M_MMAP_THRESHOLD: freed memory leaves the process at once
        vocab_size, width, inner, tokens = TRAINED[worker.small]
        sizes = {"vocab_size": vocab_size, "hidden_size": width, "intermediate_size": inner}
        config = LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=8)
        model = shard_training(
            LlamaForCausalLM(config), build_mesh(worker.world), torch.float32, False
        )
        self.model, self.optimizer = model, build_optimizer(model, 1e-4, 0.0)
        self.ids = torch.randint(vocab_size, (1, tokens))
        self.step(lambda done: done < 1)
        saved = checkpoint_tensors(model, self.optimizer).values()
        self.tensors = [(t.to_local() if isinstance(t, DTensor) else t).detach() for t in saved]
        self.copies = [tensor.clone() for tensor in self.tensors]

    def step(self, more: Callable[[int], bool]) -> list[float]:
        """Run an optimizer step. Returns the seconds of each micro-batch except the first, which gathers the
        weights, and the last, which reduces the gradients: between these no rank waits for another.
        """
        times = []
        self._micro_batch(reduce=False)
        while more(len(times)):
            started = time.perf_counter()
            self._micro_batch(reduce=False)
            times.append(time.perf_counter() - started)
        self._micro_batch(reduce=True)
        clip_gradients(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return times

    def _micro_batch(self, reduce: bool) -> None:
        self.model.set_requires_gradient_sync(reduce)
        self.model.set_reshard_after_backward(reduce)
        self.model(self.ids, labels=self.ids).loss.backward()

    def copy(self) -> None:
        for copy, tensor in zip(self.copies, self.tensors, strict=True):
            copy.copy_(tensor)


def write_raw(tensors: list[torch.Tensor], path: Path) -> None:
    parts, digest = (
        [tensor.numpy().reshape(-1).view("u1").data for tensor in tensors],
        hashlib.sha256(),
    )
    with open(path, "wb", buffering=0) as file:
        file.writelines(parts)
        os.fsync(file)
    for part in parts:
        digest.update(part)


def save_in_training(training: Training, saver: CheckpointSaver, small: bool) -> dict[str, float]:
    """How the saves after the first one affect the training."""
    times, level = {key: [] for key in ("copy", "blocked", "seconds", "step", "step_in_save")}, []
    gc.freeze()  # else each collection passes over all imports

    def clock(key: str, do: Callable, *args) -> None:
        dist.barrier()
        started = time.perf_counter()
        do(*args)
        times[key].append(time.perf_counter() - started)

    for number in range(2, SAVES + 1):
        times["step"] += training.step(lambda done: done < STEPS[small])
        clock("copy", training.copy)
        clock("blocked", saver.save, number, training.model, training.optimizer, {})
        within = training.step(lambda done: done < WITHIN[small] and not saver.pending.done())
        times["step_in_save"] += within[:-1]  # the save ended during the last one
        saver.wait()
        times["seconds"].append(broadcast(saver.seconds, saver.world))  # only rank 0 knows it
        gc.collect()
        LIBC.malloc_trim(0)  # returns free memory to the system
        level.append(anonymous_bytes())
    steps_in_save = len(times["step_in_save"]) / len(level)
    times = {key: median(values) for key, values in times.items() if values}
    if steps_in_save:
        times["slowed"] = times["step_in_save"] / times["step"]
    blocked = times["blocked"] / times["copy"]
    return times | {
        "blocked_of_copy": blocked,
        "growth": level[-1] / level[0],
        "steps_in_save": steps_in_save,
    }


def contend_checkpoint(worker: Worker) -> dict[str, float]:
    training, background = Training(worker), worker.contender == "checkpoint_async"
    saver = CheckpointSaver(worker.out / "checkpoints", 1, worker.world, background)
    saved = sum(tensor.nbytes for tensor in training.tensors)
    times, raw = [], []
    for number in range(1, 2 if background else 1 + REPEATS[worker.small]):
        # In turns, so that each write reuses the disk blocks of the one before: fresh blocks cost a disk
        # more.
        dist.barrier()
        started = time.perf_counter()
        write_raw(training.tensors, worker.out / f"raw_{worker.world.rank}")
        dist.barrier()
        raw.append(time.perf_counter() - started)
        (worker.out / f"raw_{worker.world.rank}").unlink()
        with measured() as numbers:
            saver.save(number, training.model, training.optimizer, {})
            if background:
                saver.wait()
        times.append(numbers["seconds"])
        saver.wait()  # until the previous checkpoint is removed; in a run this happens during steps
    numbers["peak_of_saved"] = numbers["peak_bytes"] / saved
    if background:
        numbers |= save_in_training(training, saver, worker.small)
    else:
        numbers |= {
            "seconds": median(times),
            "raw": median(raw),
            "of_raw": median(times) / median(raw),
        }
    return numbers | {"rate": worker.world.size * saved / numbers["seconds"]}


def contend(worker: Worker) -> dict[str, float]:
    if "checkpoint" in worker.contender:
        return contend_checkpoint(worker)
    model, out = load(worker), worker.out / "model"
    verify, verify_seconds = saving.verify_chunks, 0.0

    def timed(*args) -> None:
        nonlocal verify_seconds
        started = time.perf_counter()
        verify(*args)
        verify_seconds = time.perf_counter() - started

    saving.verify_chunks = timed
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
