"""Crash-safe sharded save; resume.py reads it back.

OUT/checkpoints/step_00000100/ holds what torch's DCP writes (one file of tensors per rank, and `.metadata`:
which rows are where), and state.json. It is written under another name and renamed at the end, so it is
complete or absent. DCP reads any sharding back into any other.

Only tensors go through DCP: it unpickles everything else, and a pickle may run what it likes.
"""

import json
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from .distributed import World, broadcast, together
from .errors import ConfigError, check

Optimizer = torch.optim.Optimizer


def save_checkpoint(
    folder: Path, step: int, model: nn.Module, optimizer: Optimizer, state: dict, keep: int, world: World
) -> Path:
    """Write folder/step_%08d after `step` optimizer steps, and keep the newest `keep` (0: all).

    Every rank calls it. state: whatever else a resume needs, as JSON. Raises ConfigError on all ranks when
    the checkpoint exists or something cannot be written; older ones stay then, and nothing half remains.
    """
    final = folder / f"step_{step:08d}"
    state = {**state, "step": step, "optimizer": getattr(optimizer, "kind", "adamw")}
    state_text = json.dumps(state, indent=1, allow_nan=False)
    with together(world):
        check(not final.exists(), f"{final} exists, and is not overwritten (fix: move it away)")
    temporary = folder / broadcast(world, f".tmp_{final.name}_{secrets.token_hex(4)}")
    try:
        with together(world):
            try:
                dcp.save(checkpoint_tensors(model, optimizer), storage_writer=dcp.FileSystemWriter(temporary))
                if world.rank == 0:
                    _publish(temporary, final, state_text)
            except (CheckpointException, OSError) as error:  # DCP raises its own on all ranks
                raise ConfigError(f"{final} cannot be written: {reason_of(error)}") from error
    finally:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
    if world.rank == 0:
        _retire(folder, final, keep)
    return final


def checkpoint_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """What trains, and the optimizer's state of it, under flat names, sharded as it is; a tied weight comes
    once. AdamW's state that is not there yet is made, as its first step (fused) makes it.
    """
    tensors = {}
    for name, parameter in ((n, p) for n, p in model.named_parameters() if p.requires_grad):
        tensors[f"model.{name}"] = parameter.detach()
        if not optimizer.state[parameter]:
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        for key, value in optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def complete_checkpoints(folder: Path) -> list[Path]:
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
    older = sorted(p for p in complete_checkpoints(folder) if p < final)
    with suppress(OSError):  # what cannot be removed must not stop the training
        for path in older[: max(0, len(older) + 1 - keep)] if keep else []:
            os.rename(path, folder / f".tmp_{path.name}")  # first: half a checkpoint must not look like one
        for path in folder.glob(".tmp_step_*"):
            shutil.rmtree(path)


def reason_of(error: BaseException) -> str:
    """One line of an OSError, or of the first rank's failure that DCP collected."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = next(iter(error.failures.items()))
    full = " (is the disk full?)" * ("unexpected pos" in str(cause))  # torch.save's words for a short write
    return f"rank {rank}: {type(cause).__name__}: {cause}".splitlines()[0] + full
