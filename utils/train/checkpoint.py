"""Crash-safe sharded save, at once or in the background; resume.py reads it back.

OUT/checkpoints/step_00000100/ holds what torch's DCP writes (one file of tensors per rank, and `.metadata`:
which rows are where), state.json, and manifest.json: size and SHA-256 of each file. All of it is written into
a fresh folder under another name, synced to the disk, and renamed at the end, so a checkpoint is complete or
absent. DCP reads any sharding back into any other.

Only tensors go through DCP: it unpickles everything else, and a pickle may run what it likes.
"""

import hashlib
import io
import json
import os
import random
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.serialization import config as serialization

from ..model.pieces import local
from ..run.distributed import World, all_reduce_sum, broadcast
from ..run.errors import ConfigError, check, print0
from ..run.files import sync_path
from ..run.folder import check_space

Optimizer = torch.optim.Optimizer
DIGESTS = dcp.metadata.MetadataIndex("digests")


class CheckpointSaver:
    """Writes folder/step_%08d and keeps the newest `keep` (0: all). Every rank makes one, and calls alike.
    Older ones are removed by a thread, behind the steps that follow: to free a large file takes a while.
    After the first save it warns where a SIGTERM would not leave the time for another.

    background: `save` copies the tensors to host memory and returns; a thread writes them.
    timeout: seconds that ranks wait for each other in a save; one's disk may be slower than the others'. The
    saver has a group of ranks of its own, or its collectives would meet those of the steps.
    """

    def __init__(
        self, folder: Path, keep: int, world: World, background: bool = False, timeout: float = 1800
    ):
        self.folder, self.keep, self.world = folder, keep, world
        wait = timedelta(seconds=timeout)
        self.group = dist.new_group(
            dist.get_process_group_ranks(world.group),
            backend="gloo",
            timeout=wait,
            use_local_synchronization=world.group is not None,
            group_desc="saver",
        )
        self.pending = self.writer = self.background = None
        if background:
            from .background import Background

            self.background = Background(world.device)
        self.token = broadcast(world, secrets.token_hex(4))  # nobody else has its temporary folders
        self.needed_bytes = 0  # of a checkpoint, known from the first
        self.seconds = 0.0  # that the last save took until it was published; rank 0 knows

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: dict) -> Path:
        """Save what holds after `step` optimizer steps. state: whatever else a resume needs, as JSON.

        Raises ConfigError on all ranks when the checkpoint exists, space is short or something cannot be
        written, in the background from the next save or wait; older ones stay, and nothing half remains.
        """
        self.wait()
        final = self.folder / f"step_{step:08d}"
        state = state | {"step": step}
        tensors = checkpoint_tensors(model, optimizer)
        if not self.needed_bytes:
            self.needed_bytes = all_reduce_sum(
                sum(local(t).nbytes for t in tensors.values()), self.world
            )
        temporary = self.folder / f".tmp_{final.name}_{self.token}"
        self.writer = _Writer(temporary, final, state, self.keep, int(self.needed_bytes))
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        # DCP would take the plan of an earlier run of this process, whose dtypes may be others.
        planner._cached_plans_key = self.token
        how = {"storage_writer": self.writer, "planner": planner, "process_group": self.group}
        if self.background:
            self.pending = self.background.submit(dcp.save, tensors, **how)
        else:
            self._finish(lambda: dcp.save(tensors, **how))
        return final

    def wait(self) -> None:
        """Until the last save is published, and those that do not stay are removed."""
        if self.pending:
            pending, self.pending = self.pending, None
            self._finish(pending.result)
        if self.writer and self.writer.removal:
            self.writer.removal.join()

    def close(self) -> None:
        """As `wait`; there can be no other save."""
        self.wait()
        dist.destroy_process_group(self.group)

    def __enter__(self) -> "CheckpointSaver":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        """close, unless an error is on its way: the other ranks may never come to wait with this one."""
        if kind is None:
            self.close()

    def _finish(self, done) -> None:
        try:
            done()
        except dcp.api.CheckpointException as error:  # on all ranks
            (cause, _), *_ = error.failures.values()
            fix = "(fix: make room, or another --output_dir)"
            text = f"{self.writer.final} cannot be written: {reason_of(error)} {fix}"
            raise ConfigError(
                str(cause) if isinstance(cause, ConfigError) else text, agreed=True
            ) from error
        finally:
            if self.world.rank == 0:
                shutil.rmtree(self.writer.path, ignore_errors=True)
        if not self.seconds:
            _warn_of_grace(self.writer)
        self.seconds = self.writer.seconds


def checkpoint_tensors(
    model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, torch.Tensor]:
    """What trains, and the optimizer's state of it, under flat names, sharded as it is; a tied weight comes
    once. AdamW's state that is not there yet is made, as its first step (fused) makes it.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        tensors[f"model.{name}"] = parameter  # DCP detaches it
        if not optimizer:
            continue
        state = optimizer.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        for key, value in state.items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def set_seed(seed: int) -> None:
    """Of every generator. Each step has a seed of its own, so a resume needs no state of them."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were published, the oldest first; file times say nothing, leftovers do not count."""
    published = folder.glob("step_" + 8 * "[0-9]" + "/manifest.json")
    return sorted(manifest.parent for manifest in published)


def reason_of(error: dcp.api.CheckpointException) -> str:
    """One line of the first rank's failure that DCP collected."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0]


class _Writer(dcp.FileSystemWriter):
    """DCP's writer of files, which also hashes what it writes, and commits it all at the end."""

    def __init__(self, temporary: Path, final: Path, state: dict, keep: int, needed_bytes: int):
        super().__init__(temporary)
        self.fs = _HashingFiles()
        self.final, self.keep, self.needed_bytes, self.removal = final, keep, needed_bytes, None
        self.state_text = json.dumps(state, indent=1, allow_nan=False)
        self.step_seconds = state.get("step_seconds", 0.0)
        self.started, self.seconds = time.monotonic(), 0.0

    def prepare_local_plan(self, plan):
        """What can be refused before anything is written."""
        if self.rank == 0:
            free = not os.path.lexists(self.final)
            check(free, f"{self.final} exists, and is not overwritten (fix: move it away)")
            self.final.parent.mkdir(parents=True, exist_ok=True)
            check_space(self.final.parent, self.needed_bytes)
        return super().prepare_local_plan(plan)

    def write_data(self, plan, planner) -> torch.futures.Future:
        """This rank's tensors; its digests travel to rank 0 with the results."""
        try:
            # of torch.save: there is a SHA-256
            with serialization.patch("save.compute_crc32", False):
                results = super().write_data(plan, planner).value()
        except RuntimeError as error:  # torch.save hides the system's error behind its own
            raise error.__context__ or error from None
        future = torch.futures.Future()
        future.set_result([*results, dcp.storage.WriteResult(DIGESTS, 0, self.fs.digests)])
        return future

    def finish(self, metadata, results: list[list[dcp.storage.WriteResult]]) -> None:
        """On rank 0, when all have written: each file, then the folder, on disk before the rename."""
        digests = [r.storage_data for rank in results for r in rank if r.index == DIGESTS]
        files = {name: digest for of_rank in digests for name, digest in of_rank.items()}
        super().finish(metadata, [[r for r in rank if r.index != DIGESTS] for rank in results])
        state, manifest = self.path / "state.json", self.path / "manifest.json"
        with self.fs.create_stream(state, "wb") as file:
            file.write(self.state_text.encode())
        files |= self.fs.digests  # with those of .metadata and state.json
        manifest.write_text(json.dumps({"files": files}, indent=1))
        for path in (state, manifest, self.path):
            sync_path(path)
        os.rename(self.path, self.final)
        sync_path(self.final.parent)
        self.seconds = time.monotonic() - self.started
        self.removal = threading.Thread(target=_retire, args=(self.final, self.keep), daemon=True)
        self.removal.start()


class _HashingFiles(dcp.filesystem.FileSystem):
    """DCP's files; `digests` has size and SHA-256 of each that was written, by name."""

    def __init__(self):
        self.digests = {}

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        with _HashingFile(io.FileIO(path, mode)) as stream:
            yield stream
        sha256 = stream.digest.hexdigest()
        name = Path(path).name.removesuffix(".tmp")  # DCP renames .metadata.tmp
        self.digests[name] = {"bytes": os.path.getsize(path), "sha256": sha256}


class _HashingFile(io.BufferedWriter):
    def __init__(self, raw: io.FileIO):
        super().__init__(raw)
        self.digest = hashlib.sha256()

    def write(self, data) -> int:
        self.digest.update(data)
        return super().write(data)


def _warn_of_grace(writer: _Writer) -> None:
    """Say so where a stop takes longer than torchrun waits, from SIGTERM to SIGKILL."""
    grace = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    seconds = writer.step_seconds + writer.seconds
    if seconds > grace:
        times = f"a step of {writer.step_seconds:.0f} s and a save of {writer.seconds:.0f} s"
        leaves = f"more than the {grace} s that a SIGTERM leaves; then the checkpoint before stands"
        fix = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * round(seconds)}, and as long in the scheduler"
        print0(f"warning: {times} are {leaves} (fix: {fix})")


def _retire(final: Path, keep: int) -> None:
    """Remove all but the newest `keep` up to `final`, and what killed saves left behind."""
    older = [path for path in complete_checkpoints(final.parent) if path < final]
    with suppress(OSError):  # what cannot be removed must not stop the training
        for path in older[: max(0, len(older) + 1 - keep)] if keep else []:
            (path / "manifest.json").unlink()  # first: half a checkpoint must not look like one
            os.rename(path, path.with_name(f".tmp_{path.name}_{secrets.token_hex(4)}"))
        for path in final.parent.glob(".tmp_*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
