"""Crash-safe sharded checkpoints, written synchronously or in the background. resume.py reads them.

OUT/checkpoints/step_00000100/ holds the files of torch's DCP (one file of tensors per rank, and `.metadata`,
which says where each shard is), state.json, and manifest.json with the SHA-256 of each file. All
files are written to a temporary folder, synced to disk, and the folder is renamed at the end. So a checkpoint
is complete or absent. DCP can load it into any other sharding.

Only tensors go through DCP. It would unpickle everything else, and a pickle can execute any code.
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
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.serialization import config as serialization

from ..run.distributed import World, broadcast
from ..run.errors import ConfigError, print0, reason_of_others
from ..run.files import sync_path
from ..run.folder import check_space

Optimizer = torch.optim.Optimizer


class CheckpointSaver(AbstractContextManager):
    """Writes folder/step_%08d and keeps the newest `keep` checkpoints (0: all). The parent of `folder` must
    exist. Every rank creates a saver and makes the same calls. A thread removes older checkpoints during the
    next steps, because freeing large files takes a while. After the first save, the saver warns if the time
    after a SIGTERM would be too short for another save.

    background: `save` copies the tensors to host memory and returns; a thread writes them.
    timeout: seconds that ranks wait for each other in a save; some disks may be slower than others. The saver
    has its own process group, so that its collectives do not mix with those of the steps.
    """

    seconds = 0.0  # duration of the last save; only on rank 0
    pending = writer = background = None

    def __init__(self, folder: Path, keep: int, world: World, background=False, timeout=1800.0):
        self.folder = folder
        self.keep = keep
        self.world = world
        self.group = dist.new_group(
            dist.get_process_group_ranks(world.group),
            backend="gloo",
            timeout=timedelta(seconds=timeout),
            use_local_synchronization=world.group is not None,
            group_desc="saver",
        )
        self.cwd = os.getcwd()  # it may be gone by the time of a save
        if background:
            from .background import Background

            self.background = Background(world.device)
        self.token = broadcast(secrets.token_hex(4), world)  # makes its temporary folders unique
        if world.rank == 0:
            _remove_leftovers(folder)

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, state: dict) -> Path:
        """Save the checkpoint after `step` optimizer steps. state: everything else a resume needs, as JSON.

        Raises ConfigError on all ranks if there is not enough space, if a file cannot be written, or if the
        checkpoint exists. In the background, the next save or wait raises the last two. Older checkpoints
        stay, and no incomplete checkpoint remains.
        """
        self.wait()
        final = self.folder / f"step_{step:08d}"
        model.state_dict()  # reshards parameters that a forward left gathered; they have no state
        tensors = checkpoint_tensors(model, optimizer)
        # The run folder exists. A sharded tensor has the bytes of all shards.
        check_space(self.folder.parent, sum(t.nbytes for t in tensors.values()), self.world)
        temporary = self.folder / f".tmp_{final.name}_{self.token}"
        self.writer = _Writer(temporary, final, state | {"step": step, "cwd": self.cwd}, self.keep)
        save = partial(dcp.save, storage_writer=self.writer, process_group=self.group)
        if self.background:
            self.pending = self.background.submit(save, tensors)
        else:
            self._finish(partial(save, tensors))
        return final

    def wait(self) -> None:
        """Wait until the last save is published and older checkpoints are removed."""
        pending, self.pending = self.pending, None
        if pending:
            self._finish(pending.result)
        if self.writer and self.writer.removal:
            self.writer.removal.join()

    def __exit__(self, kind, *_) -> None:
        """Wait and end, but not after an error: other ranks may never reach these collectives."""
        if not kind:
            self.wait()
            dist.destroy_process_group(self.group)

    def _finish(self, save):
        """Call `save`, which returns when the checkpoint is published. Raises ConfigError on all ranks."""
        try:
            save()
        except dcp.api.CheckpointException as error:  # on all ranks: none of them still writes
            shutil.rmtree(self.writer.path, ignore_errors=True)
            raise ConfigError(
                f"{self.writer.final} cannot be written: {reason_of(error)}"
                " (fix: make room, or another --output_dir)",
                agreed=True,
            ) from error
        if not self.seconds:
            _warn_of_grace(self.writer)
        self.seconds = self.writer.seconds


def checkpoint_tensors(model: nn.Module, optimizer: Optimizer | None = None) -> dict:
    """The trained parameters and their optimizer state, under flat names, in their current sharding. A tied
    weight is included once.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensors[f"model.{name}"] = parameter  # DCP detaches it
            for key, value in optimizer.state[parameter].items() if optimizer else ():
                tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def set_seed(seed: int, step: int, world: World) -> None:
    """Seed the generators of Python and torch for a step and rank. So a resume does not need their states."""
    seed = (seed * 1_000_003 + step) * world.size + world.rank
    random.seed(seed)
    torch.manual_seed(seed % 2**63)  # it takes no larger one


def complete_checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints by step number, oldest first. Leftovers without manifest are ignored."""
    return sorted(file.parent for file in folder.glob(f"step_{8 * '[0-9]'}/manifest.json"))


def reason_of(error: dcp.api.CheckpointException) -> str:
    """One line about the first failure that DCP collected from the ranks."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {reason_of_others(cause)}"


class _Writer(dcp.FileSystemWriter):
    """DCP's file writer, which also hashes what it writes, and publishes the checkpoint at the end."""

    seconds = 0.0  # duration of the save; only on rank 0

    def __init__(self, temporary: Path, final: Path, state: dict, keep: int):
        super().__init__(temporary)
        self.fs = _HashingFiles()
        self.final = final
        self.keep = keep
        self.removal = None
        self.state_text = json.dumps(state, indent=1)
        self.step_seconds = state.get("step_seconds", 0.0)
        self.started = time.monotonic()

    def write_data(self, plan, planner) -> torch.futures.Future:
        """Write this rank's tensors. The digests reach rank 0 as the last of DCP's results."""
        try:
            # torch.save's own checksum is not needed beside SHA-256
            with serialization.patch("save.compute_crc32", False):
                results = super().write_data(plan, planner).value()
        except RuntimeError as error:  # torch.save wraps the operating system's error
            raise error.__context__ or error from None
        index = dcp.metadata.MetadataIndex("digests")
        future = torch.futures.Future()
        future.set_result([*results, dcp.storage.WriteResult(index, 0, self.fs.digests)])
        return future

    def finish(self, metadata, results: list) -> None:
        """On rank 0, after all ranks have written: sync the files, then the folder, and rename it."""
        files = {}
        for of_rank in results:
            files |= of_rank.pop().storage_data
        super().finish(metadata, results)
        state = self.path / "state.json"
        manifest = self.path / "manifest.json"
        with self.fs.create_stream(state, "wb") as file:
            file.write(self.state_text.encode())
        files |= self.fs.digests  # with those of .metadata and state.json
        manifest.write_text(json.dumps({"files": files}, indent=1))
        for path in (state, manifest, self.path):
            sync_path(path)
        self.path.rename(self.final)
        sync_path(self.final.parent)
        self.seconds = time.monotonic() - self.started
        self.removal = threading.Thread(target=_retire, args=(self.final, self.keep), daemon=True)
        self.removal.start()


class _HashingFiles(dcp.filesystem.FileSystem):
    """DCP's file system. digests: name -> SHA-256 of each file that was written."""

    def __init__(self):
        self.digests = {}

    @contextmanager
    def create_stream(self, path, mode: str) -> Iterator[io.IOBase]:
        with _HashingFile(io.FileIO(path, mode)) as stream:
            yield stream
        name = Path(path).name.removesuffix(".tmp")  # DCP renames .metadata.tmp
        self.digests[name] = {"sha256": stream.digest.hexdigest()}


class _HashingFile(io.BufferedWriter):
    def __init__(self, raw: io.FileIO):
        super().__init__(raw)
        self.digest = hashlib.sha256()

    def write(self, data) -> int:
        self.digest.update(data)
        return super().write(data)


def _warn_of_grace(writer):
    """Warn if one step and one save take longer than torchrun waits between SIGTERM and SIGKILL."""
    grace = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    seconds = writer.step_seconds + writer.seconds
    if seconds > grace:
        print0(
            f"warning: a step of {writer.step_seconds:.0f} s and a save of {writer.seconds:.0f} s are more"
            f" than the {grace} s that a SIGTERM leaves; then the checkpoint before stands"
            f" (fix: export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * round(seconds)}, like the scheduler's)"
        )


def _retire(final, keep):
    """Of the checkpoints up to `final`, remove all but the newest `keep`; 0: remove none."""
    checkpoints = [path for path in complete_checkpoints(final.parent) if path <= final]
    with suppress(OSError):  # a failed removal must not stop the training
        for path in checkpoints[:-keep]:  # none if keep is 0
            path.rename(path.with_name(f".tmp_{path.name}_{secrets.token_hex(4)}"))
    _remove_leftovers(final.parent)


def _remove_leftovers(folder):
    """Remove temporary folders, also those of killed saves and removals. No save may be going on."""
    for path in folder.glob(".tmp_*"):
        shutil.rmtree(path, ignore_errors=True)
