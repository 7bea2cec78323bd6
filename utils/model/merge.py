"""A LoRA adapter merged into its base, tensor by tensor; only one weight is in memory at a time.

The base stays on meta: only the adapter is loaded. Each weight that it changes is read, merged by peft's own
code, and written. So the numbers are those of merge_and_unload.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from ..run.distributed import World
from .folder import TensorInfo, read_json
from .loading import read_elements
from .lora import inject, load_adapter, match_tensors, read_lora_config
from .pieces import Piece, lay_out
from .saving import Part, save_folder, write_json
from .sharding import plain_name


@dataclass
class Merge:
    """What becomes of each tensor of the checkpoint."""

    pieces: list[Piece]
    own: dict[str, torch.Tensor]  # parameter -> the adapter's copy of it, in place of the base's
    layers: dict[str, list[tuple]]  # parameter -> (LoRA layer, name in its base), in peft's order
    untied: list[Piece]  # tied in the base but not any more: the files of the base lack them


def plan_merge(model: nn.Module, pieces: list[Piece], folder: Path) -> Merge:
    """Put the adapter, with its values, into the meta model; ConfigError names what does not fit."""
    names_of: dict[int, list[str]] = {}  # by id of a tensor
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    tied = {name: names for names in names_of.values() for name in names}
    inject(model, read_lora_config(folder, merge=True), str(folder))
    stored = match_tensors(model, folder).values()
    allocate(model, stored)
    load_adapter(model, folder)

    copies = {plain_name(name) for name in stored if ".modules_to_save." in name}
    own: dict[str, torch.Tensor] = {}
    for name in stored:
        plain, parameter = plain_name(name), model.get_parameter(name)
        if ".modules_to_save." in name:
            own[plain] = parameter
            continue
        for other in tied.get(plain, []):  # it is a parameter of the base
            own.setdefault(other, parameter)
    layers: dict[str, list[tuple]] = {}
    for path, module in model.named_modules():
        if isinstance(module, LoraLayer):
            for name, _ in module.get_base_layer().named_parameters():
                for other in tied[f"{path}.{name}"]:
                    if other not in copies:
                        layers.setdefault(other, []).append((module, name))
    return Merge(pieces, own, layers, _untied(model, pieces, copies))


def _untied(model: nn.Module, pieces: list[Piece], copies: set[str]) -> list[Piece]:
    """One piece for each weight that is no longer tied, because it or its partner was trained."""
    piece_of = {piece.param: piece for piece in pieces}
    untied = []
    for pair in model.all_tied_weights_keys.items():
        was_trained = any(name in copies for name in pair)
        if not was_trained:
            continue
        stored = next(piece_of[name] for name in pair if name in piece_of)
        for name in pair:
            if name not in piece_of:
                untied.append(replace(stored, name=name, param=name))
    return untied


@torch.no_grad()
def merged_tensor(piece: Piece, merge: Merge) -> torch.Tensor:
    """A tensor of the checkpoint with the adapter merged into it, in its own dtype and shape."""
    info = piece.info
    if piece.param in merge.own:
        dims = zip(piece.at, piece.shape, strict=True)
        box = tuple(slice(first, first + length) for first, length in dims)
        part = merge.own[piece.param][box]
        value = part.reshape(info.shape).to(info.dtype, copy=True)
    else:
        value = torch.empty(info.shape, dtype=info.dtype)
        with open(info.file, "rb", buffering=0) as file:
            read_elements(file, piece, 0, value.view(-1))
    for layer, name in merge.layers.get(piece.param, []):
        value = merge_into(layer, name, value)
    return value


def merge_into(layer: LoraLayer, name: str, value: torch.Tensor) -> torch.Tensor:
    """Merge the adapter of a layer into `value`, the value of parameter `name` of its base layer.

    peft's merge needs all parameters of the base layer: the others, such as a bias, are set to zeros.
    """
    base = layer.get_base_layer()
    for other, parameter in list(base.named_parameters()):
        used = value if other == name else torch.zeros_like(parameter, device="cpu")
        setattr(base, other, nn.Parameter(used, requires_grad=False))
    layer.merge()
    merged = base.get_parameter(name).data
    layer.merged_adapters.clear()
    base.to("meta")  # only one weight is in memory at a time
    return merged


def save_merged(
    out: Path,
    merge: Merge,
    weights: dict[str, TensorInfo],
    world: World,
    copy_companions: Callable[[Path], None],
) -> str:
    """Write `out`: the tensors `weights` of the base's files, merged or unchanged, and the untied ones.

    Each rank writes some of them. copy_companions: writes all other files into a folder; rank 0 calls it.
    Returns in words how many tensors changed.
    """
    known = {piece.name: piece for piece in merge.pieces + merge.untied}
    # Tensors that the model ignores, such as layers that only draft tokens, are copied.
    others = [Piece(n, info, "", (), info.shape) for n, info in weights.items() if n not in known]
    pieces = [*known.values(), *others]
    own = {piece.name for piece in pieces[world.rank :: world.size]}

    def prepare(temp: Path) -> None:
        copy_companions(temp)
        if merge.untied:
            config = read_json(temp / "config.json")
            config["tie_word_embeddings"] = False
            write_json(temp / "config.json", config)

    def parts(piece: Piece) -> Iterator[Part]:
        if piece.name in own:
            yield 0, merged_tensor(piece, merge).flatten()

    save_folder(out, world, pieces, parts, prepare, lay_out(pieces))
    changed = sum(p.param in merge.own or p.param in merge.layers for p in merge.pieces)
    return f"{changed} of {len(merge.pieces)} tensors changed, {len(merge.untied)} untied"


def allocate(model: nn.Module, names: Iterable[str]) -> None:
    """Allocate these parameters of a meta model on the CPU, and the other parameters of their modules."""
    for name in names:
        module = model.get_submodule(name.rpartition(".")[0])
        module.to_empty(device="cpu", recurse=False)
