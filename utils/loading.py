"""Models on meta; safetensors read slice by slice into the local shard.

The order is: build on meta (no memory), shard (no memory), allocate the local shards, read. A rank opens the
checkpoint and copies the rows that its shards hold, one slice at a time, converting the dtype on the way.
Nothing ever holds the full model.

What goes where is decided before anything is read, as a list of pieces (hf_format.Piece); saving walks the
same list backwards.
"""

import re
from itertools import groupby
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from .errors import ConfigError, check, first_five
from .hf_format import Piece, local_box
from .model_folder import TensorInfo

Tensors = dict[str, torch.Tensor]


def build_model(
    config: PretrainedConfig, dtype: torch.dtype, attn: str = "auto", trust_remote_code: bool = False
) -> nn.Module:
    """The model of a config on meta: structure, names, shapes and ties, no memory.

    attn: sdpa, flash_attention_2, eager; None lets transformers choose. Raises ConfigError where the model
    cannot.
    """
    options = _options(dtype, attn, trust_remote_code)
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **options)
    except (ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{config.model_type} cannot be built with --attn {attn}: {reason}") from None


def load_whole_model(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, attn="auto", trust_remote_code: bool = False
) -> nn.Module:
    """`--low_cpu_fsdp false`: transformers' own loader, the whole model on every rank; shard it after."""
    options = _options(dtype, attn, trust_remote_code)
    options |= {"use_safetensors": True, "local_files_only": True}
    return AutoModelForCausalLM.from_pretrained(folder, config=config, **options)


def _options(dtype: torch.dtype, attn: str, trust_remote_code: bool) -> dict:
    attn = None if attn == "auto" else attn
    return {"dtype": dtype, "attn_implementation": attn, "trust_remote_code": trust_remote_code}


def plan_pieces(model: nn.Module, weights: dict[str, TensorInfo], folder: Path) -> list[Piece]:
    """Which box of which parameter each tensor of the checkpoint is.

    Raises ConfigError unless every parameter and persistent buffer is covered exactly once, with the right
    shape: missing, extra and misshapen names are listed, the first five. (transformers re-initializes what is
    missing and goes on.)
    """
    state = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or []) or r"(?!)")
    pieces, extra, misshapen = [], [], []
    covered: dict[str, int] = dict.fromkeys(state, 0)
    for name, info in weights.items():
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if target not in state and name in state:
            target, pattern = name, None  # the rename was for older checkpoints
        if target not in state:
            if not ignored.search(name):
                extra.append(name)
            continue
        at, shape = (0,) * len(info.shape), info.shape
        if pattern is not None:
            at, shape = _expert_box(name, info, pattern, converters, folder)
        full = tuple(state[target].shape)
        if len(shape) != len(full) or any(a + s > f for a, s, f in zip(at, shape, full, strict=True)):
            misshapen.append(f"{name} {list(info.shape)} for {target} {list(full)}")
            continue
        covered[target] += torch.Size(shape).numel()
        pieces.append(Piece(name, info, target, at, shape))
    tied = model.all_tied_weights_keys
    missing, repeated = [], []
    for name, tensor in state.items():
        elsewhere = tied.get(name) or next((t for t, source in tied.items() if source == name), None)
        if covered[name] < tensor.numel() and not (elsewhere and covered[elsewhere] and not covered[name]):
            missing.append(name)
        if covered[name] > tensor.numel():
            repeated.append(name)
    wrong = {"lacks": missing, "has unknown": extra, "has misshapen": misshapen, "repeats": repeated}
    problems = "; ".join(f"{what} {first_five(names)}" for what, names in wrong.items() if names)
    fix = "weights and config.json of one and the same model"
    check(not problems, f"{folder}: the weights {problems} (fix: {fix})")
    return pieces


@torch.no_grad()
def load_pieces(model: nn.Module, pieces: list[Piece], device: torch.device, cpu_offload=False) -> None:
    """Allocate this rank's shards of a meta model and fill them, one slice at a time.

    They are on `device`, or with cpu_offload on the host, and only the buffers on `device`.

    Peak memory above the shards: the largest slice. Raises ConfigError when a tied weight is stored twice
    with different values.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)
    filled: set[tuple] = set()
    by_file = sorted(pieces, key=lambda piece: str(piece.info.file))
    for file, group in groupby(by_file, key=lambda piece: piece.info.file):
        with safe_open(file, framework="pt") as tensors:
            for piece in group:
                _load_piece(tensors, piece, state[piece.param], filled)
    _fill_buffers(model, state)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _load_piece(tensors, piece: Piece, target: torch.Tensor, filled: set[tuple]) -> None:
    box = local_box(target, piece)
    if box is None:
        return
    local, rows = box
    shard = (target.to_local() if isinstance(target, DTensor) else target)[local]
    added = len(piece.shape) - len(piece.info.shape)  # leading 1s of an expert's box
    scalar = not piece.info.shape
    source = tensors.get_tensor(piece.name) if scalar else tensors.get_slice(piece.name)[rows[added:]]
    source = source.view(shard.shape)
    key = (id(target), piece.at)
    if key in filled:  # a tied weight that the checkpoint stores twice
        same = torch.equal(shard, source.to(shard.device, shard.dtype))
        check(same, f"{piece.info.file}: {piece.name} is tied to another weight but holds other values")
    else:
        filled.add(key)
        shard.copy_(source)


def _fill_buffers(model: nn.Module, state: Tensors) -> None:
    """Compute what no checkpoint holds: rotary frequencies, embedding scales.

    After to_empty they are garbage, and nothing complains. Everything that was loaded is marked, then the
    model's own initialization runs on what is left.
    """
    for tensor in state.values():
        tensor._is_hf_initialized = True
    model.initialize_weights()


def _expert_box(
    name: str, info: TensorInfo, pattern: str, converters: list[WeightConverter], folder: Path
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(at, shape) of one expert's matrix within the parameter that holds all experts, e.g. gate_up_proj (E,
    2I, D).
    """
    converter = next(c for c in converters if pattern in c.source_patterns)
    kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    number = re.search(r"\.(\d+)\.(?!.*\.\d+\.)", name)
    known = kinds in ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
    if not known or number is None or len(info.shape) != 2:
        steps = ", ".join(kind for kind, _ in kinds)
        raise ConfigError(f"{folder}: {name} is stored in a layout that cannot be cut into slices: {steps}")
    at = (int(number[1]), converter.source_patterns.index(pattern) * info.shape[0], 0)
    return at, (1, *info.shape)
