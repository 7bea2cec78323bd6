"""What a run left, for the recipes that use it: its settings, the structure that was trained, its weights."""

import json
from pathlib import Path

import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from .checkpoint import reason_of
from .distributed import World
from .errors import ConfigError, check, first_five
from .resume import Reader, damage, newest_checkpoint, read_state


def find_run(name: str, world: World) -> tuple[Path, dict]:
    """(checkpoint, settings of its run). Raises ConfigError where this rank's share of it is damaged."""
    path = newest_checkpoint(Path(name) / "checkpoints") or Path(name)
    fix = "OUT, or OUT/checkpoints/step_00000500"
    complete = (path / "manifest.json").is_file()
    check(complete, f"--checkpoint {name}: there is no complete checkpoint (fix: {fix})")
    damaged = damage(path, world.rank, world.size)
    check(not damaged, f"{damaged} (fix: another checkpoint)")
    return path, read_state(path)["config"]


def read_metrics(file: Path) -> list[dict]:
    """The objects of metrics.jsonl, by step, without those of an earlier start for a step taken again."""
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    last = {line["step"]: line.get("run", 1) for line in lines}
    return sorted((x for x in lines if x.get("run", 1) == last[x["step"]]), key=lambda x: x["step"])


def add_run_adapter(model: nn.Module, folder: str, run: dict) -> object:
    """Put the adapter of a folder, or of a run's settings, beside the layers; its config."""
    from .lora import add_adapter, add_lora

    if folder := folder or run.get("adapter"):
        return add_adapter(model, Path(folder), {})
    names = ("dropout", "use_rslora", "use_dora", "modules_to_save", "init")
    given = {name: run[key] for name in names for key in (name, f"lora_{name}") if key in run}
    return add_lora(model, run["lora_rank"], run["lora_alpha"], run["lora_targets"], **given)


def check_weights(path: Path, model: nn.Module) -> None:
    """Refuse a checkpoint that does not hold exactly what trains in the model."""
    saved = Reader(path).read_metadata().state_dict_metadata
    old = {name: tuple(entry.size) for name, entry in saved.items() if name.startswith("model.")}
    new = {f"model.{name}": tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    differ = [name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name)]
    fix = "the --model it was trained from"
    check(not differ, f"{path} is of another model: {first_five(differ)} (fix: {fix})")


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy a checkpoint's weights into a model that is allocated, however it is cut; no optimizer state."""
    trained = {f"model.{name}": p.detach() for name, p in model.named_parameters() if p.requires_grad}
    try:
        dcp.load(trained, storage_reader=Reader(path))
    except CheckpointException as error:  # DCP raises it on all ranks
        raise ConfigError(f"{path} cannot be read: {reason_of(error)}", agreed=True) from error
