"""What other recipes read of a run: its settings, the structure that was trained, its weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ..run.distributed import World, broadcast, together
from ..run.errors import ConfigError, check, first_five
from ..run.files import TEXT_BYTES, read_small_text
from ..run.folder import at_end
from .checkpoint import hold_checkpoint, reason_of
from .resume import Reader, damage, newest_checkpoint, read_state


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_param_dtype(value: object) -> bool:
    return value in ("fp32", "bf16")


def _is_save_dtype(value: object) -> bool:
    return value in ("original", "bf16", "fp32")


TEXT = (_is_text, "a line of text")
NUMBER = (_is_number, "a finite number")
SWITCH = (_is_switch, "true or false")
# Setting -> (is a value good, what it has to be).
SETTINGS: dict[str, tuple[Callable[[object], bool], str]] = {
    "model": TEXT,
    "tokenizer": TEXT,
    "chat_template": TEXT,
    "adapter": TEXT,
    "lora_rank": (_is_count, "a whole number"),
    "lora_alpha": NUMBER,
    "lora_dropout": NUMBER,
    "lora_targets": TEXT,
    "lora_init": TEXT,
    "modules_to_save": TEXT,
    "use_rslora": SWITCH,
    "use_dora": SWITCH,
    "param_dtype": (_is_param_dtype, "fp32 or bf16"),
    "save_dtype": (_is_save_dtype, "original, bf16 or fp32"),
}


def find_run(name: str, world: World) -> tuple[Path, dict]:
    """(checkpoint, settings of its run). Rank 0 chooses the checkpoint, and all ranks read that one. The run
    does not remove it while this process reads. Every rank calls this.

    Raises ConfigError on all ranks where there is none, or a rank's share of it is damaged.
    """
    path = None
    with together(world):
        if world.rank == 0:
            path = choose_checkpoint(name)
    path = broadcast(world, path)
    with together(world):
        check(keep_for_reading(path), was_removed(path))
        damaged = damage(path, world.rank, world.size)
        check(is_complete(path), was_removed(path))
        check(not damaged, f"{damaged} (fix: another checkpoint)")
        state = read_state(path)
        run = state.get("config") if isinstance(state, dict) else None
        settings = check_settings(path / "state.json", run)
    return path, settings


def choose_checkpoint(name: str) -> Path:
    """The checkpoint that --checkpoint names; of a run the newest, which the run may remove meanwhile."""
    fix = "OUT, or OUT/checkpoints/step_00000500"
    for _ in range(10):
        newest = newest_checkpoint(Path(name) / "checkpoints")
        path = newest or Path(name)
        if keep_for_reading(path):
            return path
        exists = newest is not None or is_complete(path)
        check(exists, f"--checkpoint {name}: there is no complete checkpoint (fix: {fix})")
    raise ConfigError(was_removed(path))


def keep_for_reading(path: Path) -> bool:
    """Keep a checkpoint from being removed until the recipe's main ends; False where it is gone already."""
    lock = hold_checkpoint(path)
    if lock is None:
        return False
    at_end(lock.close)
    return True


def is_complete(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def was_removed(path: Path) -> str:
    """The error for a checkpoint that existed and no longer does."""
    fix = "start again: the newest is taken; or a larger --keep for that run"
    return (
        f"{path} was removed while it was read: its run keeps only newer checkpoints (fix: {fix})"
    )


def check_settings(file: Path, run: object) -> dict:
    """The settings of a run, read from its checkpoint. Raises ConfigError for one that is used here and is
    not of the kind that a recipe writes.
    """
    fix = "(fix: another checkpoint)"
    check(isinstance(run, dict), f"{file}: config: no settings of a run {fix}")
    run = {"lora_alpha": 16.0, "lora_targets": "all-linear"} | run
    for name, (is_good, wanted) in SETTINGS.items():
        if name not in run:
            continue
        value = run[name]
        check(is_good(value), f"{file}: config: {name}: {str(value)[:200]} is not {wanted} {fix}")
    return run


def read_metrics(file: Path) -> list[dict]:
    """The objects of metrics.jsonl, by step. Where a step was taken again after a restart, only the objects
    of the last start stay.
    """
    objects = []
    last_start: dict[int, int] = {}  # by step
    for line in read_small_text(file, TEXT_BYTES).splitlines():
        found = json.loads(line)
        objects.append(found)
        last_start[found["step"]] = found.get("run", 1)
    kept = [found for found in objects if found.get("run", 1) == last_start[found["step"]]]
    return sorted(kept, key=lambda found: found["step"])


def add_run_adapter(model: nn.Module, folder: str, run: dict) -> object:
    """Add the adapter of a folder, or the one that a run's settings describe, to the model; its config."""
    from ..model.lora import add_adapter, add_lora

    folder = folder or run.get("adapter", "")
    if folder:
        return add_adapter(model, Path(folder), {})
    return add_lora(
        model,
        run["lora_rank"],
        run["lora_alpha"],
        run["lora_targets"],
        dropout=run.get("lora_dropout", 0.0),
        use_rslora=run.get("use_rslora", False),
        use_dora=run.get("use_dora", False),
        modules_to_save=run.get("modules_to_save", ""),
        init=run.get("lora_init", "default"),
    )


def check_weights(path: Path, model: nn.Module) -> None:
    """Refuse a checkpoint that does not hold exactly what trains in the model."""
    try:
        saved = Reader(path).read_metadata().state_dict_metadata
    except ConfigError:
        check(is_complete(path), was_removed(path))
        raise
    saved_shapes = {}
    for name, entry in saved.items():
        if name.startswith("model."):
            saved_shapes[name] = tuple(entry.size)
    shapes = {name: tuple(tensor.shape) for name, tensor in _trained(model).items()}
    names = sorted(saved_shapes.keys() | shapes.keys())
    differ = [name for name in names if saved_shapes.get(name) != shapes.get(name)]
    fix = "the --model it was trained from"
    check(not differ, f"{path} is of another model: {first_five(differ)} (fix: {fix})")


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy a checkpoint's weights into a model that is allocated, for any sharding; no optimizer state."""
    try:
        dcp.load(_trained(model), storage_reader=Reader(path))
    except CheckpointException as error:  # DCP raises it on all ranks
        if is_complete(path):
            text = f"{path} cannot be read: {reason_of(error)}"
        else:
            text = was_removed(path)
        raise ConfigError(text, agreed=True) from error


def _trained(model: nn.Module) -> dict[str, torch.Tensor]:
    """What trains in a model, by its name in a checkpoint."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found[f"model.{name}"] = parameter.detach()
    return found
