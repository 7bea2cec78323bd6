"""The parts of a model that reads pictures: vision tower, projector, language model."""

import re

import torch
from torch import nn

from ..run.errors import check, first_five
from .sharding import reads_text

PARTS = ("language", "projector", "vision")
# Names of projectors in model families. Some projectors are inside the tower.
PROJECTOR = re.compile(r"projector|connector|merger|resampler|abstractor|aligner")


def part_names(model: nn.Module) -> dict[str, list[str]]:
    """The names of the model's parameters, by part. Embedding and head belong to the language model.
    Parameters outside the language model and the tower belong to the projector, as do those that
    match PROJECTOR.
    """
    text = [reads_text(model), model.get_input_embeddings(), model.get_output_embeddings()]
    of_text = {p for module in text for p in module.parameters()}
    of_tower = set(model.get_encoder("image").parameters())
    names = {part: [] for part in PARTS}
    for name, parameter in model.named_parameters():
        if parameter in of_text:
            names["language"].append(name)
        elif parameter in of_tower and not PROJECTOR.search(name):
            names["vision"].append(name)
        else:
            names["projector"].append(name)
    return names


def tower_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the vision tower: of each ModuleList outside the language model that has more than 5 %
    of all parameters.
    """

    def numel(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters())

    layers, least = [], 0.05 * numel(model)
    seen = set(reads_text(model).modules())
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and module not in seen
        # Not of a projector: it may run once for each picture, and ranks have different numbers of pictures.
        if is_list and not PROJECTOR.search(name) and numel(module) > least:
            layers += module
            seen.update(module.modules())
    return layers


def parse_parts(text: str) -> set[str]:
    """The parts of --train language,projector, or ConfigError."""
    parts = {part.strip() for part in text.split(",")}
    unknown = first_five(sorted(parts - {*PARTS}))
    check(not unknown, f"--train {text}: {unknown} is none of {', '.join(PARTS)}")
    return parts


@torch.no_grad()
def freeze_parts(model: nn.Module, trained: set[str], dtype: torch.dtype) -> nn.Module:
    """Freeze all parts that are not in `trained`, in place, and cast them to `dtype`, that of
    the computation.
    """
    names = part_names(model)
    for part in names.keys() - trained:
        for name in names[part]:
            parameter = model.get_parameter(name).requires_grad_(False)
            parameter.data = parameter.data.to(dtype)
    return model
