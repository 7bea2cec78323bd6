"""What a run left, for the recipes that use it: its settings, the structure that was trained, its weights."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from ..run.distributed import World, broadcast, together
from ..run.errors import ConfigError, check, first_five
from ..run.fields import shown
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


# Setting -> (is a value good, what it has to be).
SETTINGS: dict[str, tuple[Callable, str]] = {
    **dict.fromkeys(
        ("model", "tokenizer", "chat_template", "adapter"), (_is_text, "a line of text")
    ),
    **dict.fromkeys(("lora_targets", "lora_init", "modules_to_save"), (_is_text, "a line of text")),
    **dict.fromkeys(("lora_alpha", "lora_dropout"), (_is_number, "a finite number")),
    **dict.fromkeys(("use_rslora", "use_dora"), (_is_switch, "true or false")),
    "lora_rank": (_is_count, "a whole number"),
    "param_dtype": (lambda value: value in ("fp32", "bf16"), "fp32 or bf16"),
    "save_dtype": (lambda value: value in ("original", "bf16", "fp32"), "original, bf16 or fp32"),
}


def find_run(name: str, world: World) -> tuple[Path, dict]:
    """(checkpoint, settings of its run): rank 0 chooses, and all ranks read the same one, which the run does
    not remove while this process reads. Every rank calls it.

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
    """The checkpoint that --checkpoint means: of a run its newest, which may be removed while we look."""
    fix = "OUT, or OUT/checkpoints/step_00000500"
    for _ in range(10):
        newest = newest_checkpoint(Path(name) / "checkpoints")
        path = newest or Path(name)
        if keep_for_reading(path):
            return path
        text = f"--checkpoint {name}: there is no complete checkpoint (fix: {fix})"
        check(newest or is_complete(path), text)
    raise ConfigError(was_removed(path))


def keep_for_reading(path: Path) -> bool:
    """Keep a checkpoint from being removed until the recipe's main ends; False where it is gone already."""
    held = hold_checkpoint(path)
    if held is not None:
        at_end(held.close)
    return held is not None


def is_complete(path: Path) -> bool:
    return (path / "manifest.json").is_file()


def was_removed(path: Path) -> str:
    """The line for a checkpoint that is gone though it was there."""
    fix = "start again: the newest is taken; or a larger --keep for that run"
    return (
        f"{path} was removed while it was read: its run keeps only newer checkpoints (fix: {fix})"
    )


def check_settings(file: Path, run: object) -> dict:
    """The settings of a run as its checkpoint tells them. Raises ConfigError for those that are used and not
    of the kind that a recipe writes.
    """
    fix = "(fix: another checkpoint)"
    check(isinstance(run, dict), f"{file}: config: no settings of a run {fix}")
    run = {"lora_alpha": 16.0, "lora_targets": "all-linear"} | run
    for name, (is_good, wanted) in SETTINGS.items():
        good = name not in run or is_good(run[name])
        check(good, f"{file}: config: {name}: {shown(str(run.get(name)))} is not {wanted} {fix}")
    return run


def read_metrics(file: Path) -> list[dict]:
    """The objects of metrics.jsonl, by step, without those of an earlier start for a step taken again."""
    lines = [json.loads(line) for line in read_small_text(file, TEXT_BYTES).splitlines()]
    last = {line["step"]: line.get("run", 1) for line in lines}
    return sorted((x for x in lines if x.get("run", 1) == last[x["step"]]), key=lambda x: x["step"])


def add_run_adapter(model: nn.Module, folder: str, run: dict) -> object:
    """Put the adapter of a folder, or of a run's settings, beside the layers; its config."""
    from ..model.lora import add_adapter, add_lora

    if folder := folder or run.get("adapter"):
        return add_adapter(model, Path(folder), {})
    names = ("dropout", "use_rslora", "use_dora", "modules_to_save", "init")
    given = {name: run[key] for name in names for key in (name, f"lora_{name}") if key in run}
    return add_lora(model, run["lora_rank"], run["lora_alpha"], run["lora_targets"], **given)


def check_weights(path: Path, model: nn.Module) -> None:
    """Refuse a checkpoint that does not hold exactly what trains in the model."""
    try:
        saved = Reader(path).read_metadata().state_dict_metadata
    except ConfigError:
        check(is_complete(path), was_removed(path))
        raise
    old = {name: tuple(entry.size) for name, entry in saved.items() if name.startswith("model.")}
    new = {
        f"model.{name}": tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad
    }
    differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    fix = "the --model it was trained from"
    check(not differ, f"{path} is of another model: {first_five(differ)} (fix: {fix})")


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy a checkpoint's weights into a model that is allocated, however it is cut; no optimizer state."""
    trained = {
        f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad
    }
    try:
        dcp.load(trained, storage_reader=Reader(path))
    except CheckpointException as error:  # DCP raises it on all ranks
        text = f"{path} cannot be read: {reason_of(error)}"
        raise ConfigError(text if is_complete(path) else was_removed(path), agreed=True) from error
