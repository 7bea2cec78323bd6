"""Mixtures of experts: separate on disk, fused in memory. Imported only for a checkpoint that has some."""

import re
from pathlib import Path

from transformers.core_model_loading import WeightConverter

from ..run.errors import ConfigError
from .folder import TensorInfo

# How experts are fused: one after the other, and of gate and up one below the other.
KNOWN = (
    [("MergeModulelist", 0)],
    [("MergeModulelist", 0), ("Concatenate", 1)],
)


def expert_box(
    name: str, info: TensorInfo, pattern: str, converters: list[WeightConverter], folder: Path
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(at, shape) of one expert's matrix within the parameter that holds all experts, e.g. gate_up_proj (E,
    2I, D).
    """
    converter = next(c for c in converters if pattern in c.source_patterns)
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    expert = re.search(r"\.(\d+)\.(?!.*\.\d+\.)", name)  # the last number in the name
    if operations not in KNOWN or expert is None or len(info.shape) != 2:
        steps = ", ".join(kind for kind, _ in operations)
        fix = "load it with transformers, then save_pretrained(..., save_original_format=False)"
        raise ConfigError(
            f"{folder}: {name} is stored in a layout that is not read in slices: {steps} (fix: {fix})"
        )
    first_row = converter.source_patterns.index(pattern) * info.shape[0]
    at = (int(expert[1]), first_row, 0)
    return at, (1, *info.shape)
