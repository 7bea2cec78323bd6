"""Exact resume: what an earlier start left, and its checkpoint read back into any number of ranks.

Imported where a run is continued. torch's DCP unpickles what describes the tensors, and a pickle may run what
it likes: here an unpickler reads it that knows a few harmless names and refuses all others.
"""

import json
import pickle
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from .checkpoint import Optimizer, checkpoint_tensors, complete_checkpoints, reason_of
from .config import load_config, save_config
from .distributed import World, together
from .errors import ConfigError, check, first_five, print0
from .run_folder import holds_run

SAFE_NAMES = {
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # as Python 3.13 calls it
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta ChunkStorageMetadata "
    "TensorStorageMetadata TensorProperties _MEM_FORMAT_ENCODING",
}


def previous_run(cfg, out: Path | None, data: str) -> tuple[Path | None, dict, int]:
    """(checkpoint to continue from, its state, the steps after which the run was finished); None, {} and 0
    where there is none.

    cfg: the recipe's settings; data: the fingerprint. A folder is continued only by the run that began it:
    same data, same global batches, same kind of optimizer. Raises ConfigError naming the fields that differ.
    """
    checkpoint, state = find_checkpoint(cfg.resume, out)
    if finished := finished_at(out):
        saved = load_config(type(cfg), out / "config.yaml")
        changed = differences(asdict(saved), asdict(cfg), but=("resume", "log_every"))
        what = f"{out} holds a finished run with other settings: {changed}"
        check(not changed, f"{what} (fix: another --output_dir)")
    now = {"data": data, "seed": cfg.seed, "global_batch_size": cfg.global_batch_size}
    now["optimizer"] = cfg.optimizer.removeprefix("paged_") if "8bit" in cfg.optimizer else cfg.optimizer
    if not cfg.global_batch_size:
        now.pop("global_batch_size")  # the checkpoint says it
    changed = differences({"optimizer": "adamw"} | state, now) if state else ""
    fix = "the same flags and data, or another --output_dir"
    check(not changed, f"the checkpoint is of another run: {changed} (fix: {fix})")
    return checkpoint, state, finished


def find_checkpoint(resume: str, out: Path | None) -> tuple[Path | None, dict]:
    """(checkpoint to continue from, its state), or (None, {}) for a fresh start.

    resume: auto continues what `out` holds, none refuses an `out` that holds a run, else the path of a
    checkpoint.
    """
    if resume == "none":
        check(not holds_run(out), f"--resume none, but {out} holds a run (fix: another --output_dir)")
        return None, {}
    if resume == "auto":
        found = newest_checkpoint(out / "checkpoints") if holds_run(out) else None
    else:
        found = Path(resume).absolute()
        if (found / "checkpoints").is_dir():
            found = newest_checkpoint(found / "checkpoints") or found
        complete = found.is_dir() and (found / "state.json").exists() and (found / ".metadata").exists()
        fix = "a folder like OUT/checkpoints/step_00000500"
        check(complete, f"--resume {resume}: there is no complete checkpoint (fix: {fix})")
    return (found, read_state(found)) if found else (None, {})


def finished_at(out: Path | None) -> int:
    """The number of steps after which the run in `out` finished; 0: it has not."""
    path = out / "plan.json" if out else None
    if path is None or not path.exists():
        return 0
    try:
        return json.loads(path.read_text()).get("measured", {}).get("steps", 0)
    except ValueError:
        raise ConfigError(f"{path}: not JSON (fix: remove it, or another --output_dir)") from None


def keep_changed_config(cfg, out: Path, state: dict) -> None:
    """A restart with other flags leaves the first config.yaml and writes its own beside it."""
    changed = differences(asdict(load_config(type(cfg), out / "config.yaml")), asdict(cfg))
    if changed:
        print0(f"changed since the first start: {changed}")
        save_config(cfg, out / f"config_from_{state.get('step', 0):08d}.yaml")


def differences(old: dict, new: dict, but: tuple[str, ...] = ()) -> str:
    """The fields that differ, as "lr 2e-05 -> 1e-05, ..."; "" when none does."""
    changed = [k for k in new if k not in but and old.get(k) != new[k]]
    return ", ".join(f"{k} {old.get(k)} -> {new[k]}" for k in changed)


def newest_checkpoint(folder: Path) -> Path | None:
    """The complete checkpoint with the highest number; file times say nothing, leftovers do not count."""
    return max(complete_checkpoints(folder), default=None)


def read_state(path: Path) -> dict:
    """What `save_checkpoint` was given as `state`, "step" and "optimizer"; reads no tensor."""
    try:
        return json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a complete checkpoint: state.json: {error}") from None


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, world: World) -> dict:
    """Load weights and optimizer state in place, whatever their sharding is now; returns `read_state(path)`.

    Every rank calls it, with the model sharded and allocated. Raises ConfigError on all ranks when names,
    shapes or dtypes differ, or files are damaged.
    """
    tensors, reader = checkpoint_tensors(model, optimizer), Reader(path)
    with together(world):
        state, saved = read_state(path), reader.read_metadata().state_dict_metadata
        was, now = state.get("optimizer", "adamw"), getattr(optimizer, "kind", "adamw")
        check(was == now, f"{path} holds {was} state, not {now} (fix: --optimizer {was}, or --resume none)")
        # Scales of 8-bit state that another number of ranks saved in other shapes.
        tensors |= getattr(optimizer, "other_scales", lambda *_: {})(tensors, saved)
        old = {name: f"{entry.properties.dtype}{list(entry.size)}" for name, entry in saved.items()}
        new = {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()}
        differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
        first = first_five([f"{n} {old.get(n, 'absent')} -> {new.get(n, 'absent')}" for n in differ])
        check(not differ, f"{path} is of another model, then -> now: {first} (fix: --resume none)")
    try:
        dcp.load(tensors, storage_reader=reader)
    except CheckpointException as error:
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}", agreed=True) from error
    getattr(optimizer, "take_scales", lambda: None)()
    return state


class Reader(dcp.FileSystemReader):
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
