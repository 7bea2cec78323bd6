"""Crash-safe sharded save and exact resume.

OUT/checkpoints/step_00000100/ holds what torch's DCP writes (one file of tensors per rank, and `.metadata`:
which rows are where), and state.json. It is written under another name and renamed at the end, so it is
complete or absent. DCP reads any sharding back into any other.

Only tensors go through DCP: it unpickles everything else, and a pickle may run what it likes. For that
reason, too, `.metadata` is read by an unpickler that knows a few harmless names and refuses all others.
"""

import json
import os
import pickle
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from .distributed import World, broadcast, together
from .errors import ConfigError, check

SAFE_NAMES = {
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # as Python 3.13 calls it
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta ChunkStorageMetadata "
    "TensorStorageMetadata TensorProperties _MEM_FORMAT_ENCODING",
}
Optimizer = torch.optim.Optimizer


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: Optimizer, state: dict, keep: int, world: World
) -> Path:
    """Write folder/step_%08d after `step` optimizer steps, and keep the newest `keep` (0: all).

    Every rank calls it. state: whatever else a resume needs, as JSON. Raises ConfigError on all ranks when
    the checkpoint exists or something cannot be written; older ones stay then, and nothing half remains.
    """
    final = folder / f"step_{step:08d}"
    state_text = json.dumps({**state, "step": step}, indent=1, allow_nan=False)
    with together(world):
        check(not final.exists(), f"{final} exists, and is not overwritten (fix: move it away)")
    temporary = folder / broadcast(world, f".tmp_{final.name}_{secrets.token_hex(4)}")
    try:
        with together(world):
            try:
                dcp.save(_tensors(model, optimizer), storage_writer=dcp.FileSystemWriter(temporary))
                if world.rank == 0:
                    _publish(temporary, final, state_text)
            except (CheckpointException, OSError) as error:  # DCP raises its own on all ranks
                raise ConfigError(f"{final} cannot be written: {_reason(error)}") from error
    finally:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    if world.rank == 0:
        _retire(folder, final, keep)
    return final


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest number; file times say nothing, leftovers do not count."""
    return max(_complete(folder), default=None)


def read_state(path: Path) -> dict:
    """What `save_checkpoint` was given as `state`, and "step"; reads no tensor."""
    try:
        return json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a complete checkpoint: state.json: {error}") from None


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, world: World) -> dict:
    """Load weights and optimizer state in place, whatever their sharding is now; returns `read_state(path)`.

    Every rank calls it, with the model sharded and allocated. Raises ConfigError on all ranks when names,
    shapes or dtypes differ, or files are damaged.
    """
    tensors, reader = _tensors(model, optimizer), _Reader(path)
    with together(world):
        state, saved = read_state(path), reader.read_metadata().state_dict_metadata
        old = {name: f"{entry.properties.dtype}{list(entry.size)}" for name, entry in saved.items()}
        new = {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()}
        differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        first = ", ".join(f"{n} {old.get(n, 'absent')} -> {new.get(n, 'absent')}" for n in differ[:5])
        more = f" and {len(differ) - 5} more" * (len(differ) > 5)
        check(not differ, f"{path} is of another model, then -> now: {first}{more} (fix: --resume none)")
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        raise ConfigError(f"{path} cannot be read: {_reason(error)}", agreed=True) from error
    return state


def _tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """What trains, and AdamW's state of it, under flat names, sharded as it is; a tied weight comes once.

    State that is not there yet is made, as AdamW's first step makes it; weights do not change.
    """
    tensors = {}
    for name, parameter in ((n, p) for n, p in model.named_parameters() if p.requires_grad):
        tensors[f"model.{name}"] = parameter.detach()
        if not optimizer.state[parameter]:
            device = parameter.device if optimizer.defaults["fused"] else "cpu"
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with an unpickler that runs nothing."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            with open(file, "rb") as stream:
                metadata = _Unpickler(stream).load()
            if any("/" in info.relative_path for info in metadata.storage_data.values()):
                raise ValueError("it points outside its folder")
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # a damaged pickle fails in every way there is
            raise ConfigError(f"{file} is damaged or foreign: {type(error).__name__}: {error}") from None
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in SAFE_NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def _complete(folder: Path) -> list[Path]:
    found = [p for p in folder.iterdir() if re.fullmatch(r"step_[0-9]{8}", p.name)] if folder.is_dir() else []
    return [p for p in found if (p / ".metadata").is_file() and (p / "state.json").is_file()]


def _publish(temporary: Path, final: Path, state_text: str) -> None:
    """The last file, then the rename, each on disk before the next; DCP does so with its own files."""
    (temporary / "state.json").write_text(state_text)
    _sync(temporary / "state.json")
    _sync(temporary)
    os.rename(temporary, final)
    _sync(final.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _retire(folder: Path, final: Path, keep: int) -> None:
    """Remove all but the newest `keep` up to `final`, and what killed saves left behind."""
    older = sorted(p for p in _complete(folder) if p < final)
    with suppress(OSError):  # what cannot be removed must not stop the training
        for path in older[: max(0, len(older) + 1 - keep)] if keep else []:
            os.rename(path, folder / f".tmp_{path.name}")  # first: half a checkpoint must not look like one
        for path in folder.glob(".tmp_step_*"):
            shutil.rmtree(path)


def _reason(error: BaseException) -> str:
    """One line of an OSError, or of the first rank's failure that DCP collected."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = next(iter(error.failures.items()))
    full = " (is the disk full?)" * ("unexpected pos" in str(cause))  # torch.save's words for a short write
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0] + full
