"""Exact resume: find the checkpoint of an earlier start, check it, and load it on any number of ranks.

Imported only when a run is continued. torch's DCP unpickles the metadata of a checkpoint, and a pickle can
execute any code. So an unpickler of our own reads it, which accepts a few harmless names and refuses all
others.
"""

import hashlib
import io
import json
import pickle
import secrets
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ..run.distributed import ALONE, World, all_gather, broadcast, together
from ..run.errors import ConfigError, check, differences, others_code, print0, story
from ..run.folder import Resumed
from .checkpoint import Optimizer, checkpoint_tensors, complete_checkpoints, reason_of

REMOVED = "(fix: start again, if its run goes on and has removed it; else another checkpoint)"
# settings that may differ from those of a finished run: they change no result
NO_MATTER = """output_dir resume log_every timeout save_every keep async_save tensorboard wandb profile
    force""".split()
SAFE_NAMES = {
    "pathlib": "PosixPath",
    "pathlib._local": "PosixPath",  # as Python 3.13 calls it
    "torch": "Size",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint.metadata": "Metadata MetadataIndex StorageMeta ChunkStorageMetadata "
    "TensorStorageMetadata TensorProperties _MEM_FORMAT_ENCODING",
}


def continue_run(out: Path, resume: str, cfg: object, world: World) -> Resumed:
    """Find what to continue from: the run that `out` holds, or the checkpoint that `resume` names.

    resume: auto, none, or a path. cfg: the settings of this start, a dataclass. ConfigError on all ranks if
    `resume` is none; if `out` holds a finished run with other settings, naming the fields; or if `out` has
    newer checkpoints than the one to continue from. Changed settings of an unfinished run are only printed.
    """
    fix = "remove it, if it was copied only in part: the checkpoints are enough"
    with together(world), others_code(f"{out}: its plan.json or newest config", fix):
        check(resume != "none", f"--resume none, but {out} holds a run (fix: another --output_dir)")
        newest = max(out.glob("config*.yaml"), default=None)
        saved = yaml.safe_load(newest.read_text()) if newest else {}
        if saved.get("resume") == resume and complete_checkpoints(out / "checkpoints"):
            resume = "auto"  # the same command again: its own checkpoints are newer
        plan = out / "plan.json"
        finished = 0  # the steps after which the run ended
        if plan.exists():
            measured = json.loads(plan.read_text()).get("measured") or {}  # null until it ends
            finished = measured.get("steps", 0)
        if finished:
            saved = asdict(cfg) | saved  # it may lack newer settings
            # another recipe has other settings
            changed = differences(saved, dict.fromkeys(saved) | asdict(cfg), ignored=NO_MATTER)
            check(
                not changed,
                f"{out} holds a finished run with other settings: {changed}"
                f" (fix: another --output_dir; to go on, also --resume {out}, more epochs, steps or tokens)",
            )
            check(
                not cfg.save_model or [*out.glob("model"), *out.glob("adapter")],
                f"{out} is finished, but its model is gone (fix: recipes/export.py --checkpoint {out}"
                f" --output_dir {out / 'model'})",
            )
    if finished:
        print0(f"{out} is finished: already at step {finished}, nothing to do")
        return Resumed(finished=finished)
    checkpoint = find_checkpoint(resume, out, world)
    if not checkpoint:
        print0(f"restart   from the beginning: the run in {out} has no checkpoint")
        return Resumed()
    with together(world):
        state = read_state(checkpoint)
        if changed := differences(state["config"], asdict(cfg), ignored=("resume",)):
            print0(f"changed   since the checkpoint: {changed}")
        newer = [p for p in complete_checkpoints(out / "checkpoints") if p.name > checkpoint.name]
        if newer:
            raise ConfigError(
                f"{out} goes on to {newer[-1].name}, which a run from {checkpoint.name} would redo"
                " (fix: another --output_dir)"
            )
    return Continued(checkpoint, state)


class Continued(Resumed):
    """A checkpoint of an earlier start."""

    def check_facts(self, facts: dict, steps: int, allow_new_data: bool) -> None:
        """Raise ConfigError if the checkpoint is from another run, naming what differs, old -> new, or has
        more than `steps` steps. facts: values by name that must be the same; with allow_new_data not the data
        and the weights of its sources. Facts that the checkpoint lacks, because an older version wrote it,
        are not compared.
        """
        check(
            self.state["step"] <= steps,
            f"{self.checkpoint} has more than {steps} steps (fix: --steps {self.state['step']}, no --tokens)",
        )
        changed = differences(
            facts | self.state, facts, ignored=("data", "mixture") * allow_new_data
        )
        check(
            not changed,
            f"the checkpoint is of another run: {changed}"
            " (fix: the same flags, see the line `changed`; new data: --allow_new_data; or another"
            " --output_dir and no --resume)",
        )

    def load(self, model: nn.Module, optimizer: Optimizer, scaler, world: World) -> int:
        """Load weights, optimizer state and the scale of fp16; returns the step. See load_checkpoint."""
        print0(f"from      {self.checkpoint}")
        load_checkpoint(self.checkpoint, model, optimizer, world)
        scaler.load_state_dict(self.state["scaler"] or scaler.state_dict())  # {} if not fp16
        return self.state["step"]


def print_resume_command(stop: str, checkpoint: Path, cfg: object, world: World) -> None:
    """Print which signal stopped the run, and the command that continues it. How several machines find each
    other only torchrun knows, so these flags are left to the user. The exit code will be 128 + the signal.
    """
    story.code = 128 + signal.Signals[stop]
    words = ["torchrun", f"--nproc_per_node={world.local_size}"] if world.size > 1 else ["python"]
    words += sys.argv
    if not cfg.output_dir:
        words += ["--output_dir", str(checkpoint.parent.parent)]
    if cfg.resume == "none":
        words += ["--resume", "auto"]
    print0(f"stopped   by {stop} after step {int(checkpoint.name[5:])}: {checkpoint}")
    each = "on each machine, with its --nnodes and rendezvous: " * (world.size > world.local_size)
    print0(f"to go on  {each}{shlex.join(words)}")


def named_checkpoint(flag: str, name: str, world: World) -> Path:
    """The checkpoint that a flag names, or the newest checkpoint of the run that it names. Rank 0 chooses for
    all ranks. Raises ConfigError on all ranks if there is no complete checkpoint.
    """
    path = Path(name).absolute()
    with together(world):
        if world.rank == 0:
            path = max(complete_checkpoints(path / "checkpoints"), default=path)
            result = path / "model"
            fix = (
                f"--model {result}" if result.is_dir() else "OUT, or OUT/checkpoints/step_00000500"
            )
            check(
                (path / "manifest.json").is_file(),
                f"{flag} {name}: there is no complete checkpoint (fix: {fix})",
            )
    return broadcast(path, world)


def find_checkpoint(resume: str, out: Path, world: World) -> Path | None:
    """The checkpoint to continue from, with every file verified against its manifest; None for a fresh start.

    resume: auto takes the newest sound checkpoint of `out`, and sets damaged newer ones aside with a warning;
    otherwise the path of a checkpoint or a run. Each rank verifies a share of the files. Raises ConfigError
    on all ranks if the named checkpoint is missing or damaged, or if all checkpoints of `out` are damaged.
    """
    if resume == "auto":
        found = broadcast(complete_checkpoints(out / "checkpoints")[::-1], world)
    else:
        found = [named_checkpoint("--resume", resume, world)]
    damaged = {}  # checkpoint -> what is wrong with it
    for checkpoint in found:
        problems = sorted({*all_gather(damage(checkpoint, world.rank, world.size), world)} - {""})
        if not problems:
            break
        damaged[checkpoint] = "; ".join(problems)
    else:
        if damaged:
            raise ConfigError(
                f"no sound checkpoint: {'; '.join(damaged.values())}"
                " (fix: another checkpoint for --resume; another --output_dir starts anew)",
                agreed=True,
            )
        return None
    for path, problem in damaged.items():
        aside = path.with_name(f"damaged_{path.name}_{secrets.token_hex(4)}")
        print0(
            f"warning: {problem}; it is set aside as {aside.name}, and {checkpoint.name} is used"
        )
        with together(world):  # no rank goes on before it is renamed
            if world.rank == 0:
                path.rename(aside)
    return checkpoint


def damage(checkpoint: Path, rank: int, ranks: int) -> str:
    """What is wrong with this rank's share of a checkpoint's files; "" if they are as they were written."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        expected = [(name, file["sha256"]) for name, file in sorted(manifest["files"].items())]
    except Exception:  # a damaged file can contain anything
        return f"{checkpoint}/manifest.json is damaged"
    for name, sha256 in expected[rank::ranks]:
        try:
            with open(checkpoint / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                    return f"{checkpoint}/{name} is not what was written (SHA-256)"
        except OSError as error:
            return f"{checkpoint}/{name}: {error.strerror}"
    return ""


def read_state(path: Path) -> dict:
    """The `state` that was given to CheckpointSaver.save, and "step". Reads no tensors. Call `damage` before,
    which verifies the file.
    """
    return json.loads((path / "state.json").read_text())


def load_checkpoint(path: Path, model: nn.Module, optimizer: Optimizer, world: World) -> None:
    """Load weights and optimizer state in place, into any sharding.

    Every rank calls it, with the model sharded and allocated. Raises ConfigError on all ranks if names,
    shapes or dtypes differ, or if files are damaged.
    """
    with together(world):
        saved = {key.rpartition(".")[0] for key in Reader(path).read_metadata().state_dict_metadata}
    for name, parameter in model.named_parameters():
        if f"optimizer.{name}" in saved:
            parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # creates the state of any optimizer; its values are read below
            parameter.grad = None
    tensors = checkpoint_tensors(model, optimizer)
    with together(world):
        check_tensors(path, tensors, "--resume none")
    read_tensors(path, tensors, world)


def check_tensors(path: Path, tensors: dict, fix: str, dtypes=True) -> None:
    """Raise ConfigError if a checkpoint has other names, shapes or, with `dtypes`, other dtypes. tensors:
    from checkpoint_tensors. If they have no optimizer state, that of the checkpoint is not compared.
    """
    kinds = {name.partition(".")[0] for name in tensors}
    old = {
        name: f"{entry.properties.dtype if dtypes else ''}{list(entry.size)}"
        for name, entry in Reader(path).read_metadata().state_dict_metadata.items()
        if name.partition(".")[0] in kinds
    }
    new = {
        name: f"{tensor.dtype if dtypes else ''}{list(tensor.shape)}"
        for name, tensor in tensors.items()
    }
    absent = dict.fromkeys(old | new, "absent")
    changed = differences(absent | old, absent | new)
    check(not changed, f"{path} is of another model, then -> now: {changed} (fix: {fix})")


def read_tensors(path: Path, tensors: dict, world: World = ALONE) -> None:
    """Read a checkpoint into `tensors`, in place and in any sharding. Every rank calls it."""
    try:
        dcp.load(tensors, storage_reader=Reader(path), process_group=world.group)
    except CheckpointException as error:  # DCP raises it on all ranks
        exists = (path / "manifest.json").is_file()
        reason = (
            f"cannot be read: {reason_of(error)}" if exists else "was removed while it was read"
        )
        raise ConfigError(f"{path} {reason} {REMOVED}", agreed=True) from error


class Reader(dcp.FileSystemReader):
    """DCP's reader, with an unpickler that executes no code."""

    def read_metadata(self, *args, **kwargs) -> Metadata:
        file = Path(self.path) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(file.read_bytes())).load()
            if any("/" in info.relative_path for info in metadata.storage_data.values()):
                raise ValueError("it points outside its folder")
            metadata.storage_meta.load_id = self.load_id
        except Exception as error:  # a damaged pickle may raise anything
            raise ConfigError(
                f"{file} is gone, damaged or foreign: {type(error).__name__}: {error} {REMOVED}"
            ) from None
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> object:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and name not in SAFE_NAMES.get(module, "").split():
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)
