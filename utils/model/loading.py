"""Models on meta; safetensors read slice by slice into the local shard.

The order is: build on meta (no memory), shard (no memory), allocate the local shards, read. A rank opens the
checkpoint and copies the rows that its shards hold, one slice at a time, converting the dtype on the way.
Nothing ever holds the full model.

What goes where is decided before anything is read, as a list of pieces (pieces.Piece); saving walks the
same list backwards.
"""

import os
import re
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..run.errors import check, first_five, others_code
from ..run.files import AGAIN
from .experts import expert_box
from .folder import TensorInfo, check_family
from .pieces import Piece, local, local_box, runs, transfer

CHUNK = 2**20  # elements that are read, and cast or quantized, at a time
Tensors = dict[str, torch.Tensor]
Names = dict[str, list[str]]


def build_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn="auto",
    trust_remote_code=False,
    whole: Path | str = "",
) -> nn.Module:
    """The model of a config on meta: structure, names, shapes and ties, no memory. whole: a folder whose
    weights are read at once, as transformers does it (`--low_cpu_fsdp false`).

    attn: sdpa, flash_attention_2, eager; auto lets transformers choose. Raises ConfigError where the model
    cannot.
    """
    check_family(config.model_type, "--model")
    check_text_model(config)
    how = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    how["attn_implementation"] = None if attn == "auto" else attn
    what = f"{config.model_type} cannot be built with --attn {attn}"
    if not whole:
        fix = f"other values in the config.json of {config.name_or_path or 'the model'}"
        with others_code(what, fix), torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, **how)
    how |= {"use_safetensors": True, "local_files_only": True}
    with others_code(what, "--low_cpu_fsdp, which reads each rank's own slices"):
        return AutoModelForCausalLM.from_pretrained(whole, config=config, **how)


def check_text_model(config: PretrainedConfig) -> None:
    """Refuse a model of pictures or sounds that transformers does not list as a causal language model."""
    listed = type(config) in AutoModelForCausalLM._model_mapping or getattr(
        config, "auto_map", None
    )
    other = [
        n for n in ("vision_config", "audio_config", "speech_config") if getattr(config, n, None)
    ]
    what = f"--model: {config.model_type} has a {' and a '.join(other)}, and is no text-only causal model"
    fix = "a text-only causal model of the family, such as qwen2.5-7b for qwen2_5_vl"
    check(listed or not other, f"{what} (fix: {fix})")


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
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if target not in state and name in state:
            target, pattern = name, None  # the rename was for older checkpoints
        if target not in state:
            if not ignored.search(name):
                extra.append(name)
            continue
        at, shape = (0,) * len(info.shape), info.shape
        if pattern is not None:
            at, shape = expert_box(name, info, pattern, converters, folder)
        full = tuple(state[target].shape)
        if len(shape) != len(full) or any(
            a + s > f for a, s, f in zip(at, shape, full, strict=True)
        ):
            misshapen.append(f"{name} {list(info.shape)} for {target} {list(full)}")
            continue
        if info.dtype.is_floating_point != state[target].is_floating_point():
            misshapen.append(f"{name} {info.dtype} for {target} {state[target].dtype}")
            continue
        covered[target] += torch.Size(shape).numel()
        pieces.append(Piece(name, info, target, at, shape))
    tied = model.all_tied_weights_keys
    missing, repeated = [], []
    for name, tensor in state.items():
        elsewhere = tied.get(name) or next(
            (t for t, source in tied.items() if source == name), None
        )
        if covered[name] < tensor.numel() and not (
            elsewhere and covered[elsewhere] and not covered[name]
        ):
            missing.append(name)
        if covered[name] > tensor.numel():
            repeated.append(name)
    wrong = {
        "lacks": missing,
        "has unknown": extra,
        "has misshapen": misshapen,
        "repeats": repeated,
    }
    problems = "; ".join(f"{what} {first_five(names)}" for what, names in wrong.items() if names)
    fix = "weights and config.json of one and the same model"
    check(not problems, f"{folder}: the weights {problems} (fix: {fix})")
    return pieces


@torch.no_grad()
def load_pieces(
    model: nn.Module,
    pieces: list[Piece],
    device: torch.device,
    cpu_offload=False,
    names: Names | None = None,
) -> None:
    """Allocate this rank's shards of a meta model and fill them, some MiB at a time.

    They are on `device`, or with cpu_offload on the host, and only the buffers on `device`. names: what a
    parameter is called now, where the model was changed since the pieces were planned; two names, two copies.

    Peak memory above the shards: CHUNK elements. Files are read, not mapped: mapped pages count as this
    process's memory, and come in small on network file systems. Raises ConfigError when a file is cut short,
    or a tied weight is stored twice with different values.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)
    filled: set[tuple] = set()
    staging = torch.empty(CHUNK * 8, dtype=torch.uint8, pin_memory=device.type == "cuda")
    by_file = sorted(pieces, key=lambda piece: (str(piece.info.file), piece.info.begin))
    for path, group in groupby(by_file, key=lambda piece: piece.info.file):
        with open(path, "rb", buffering=0) as file:
            for piece in group:
                for name in (names or {}).get(piece.param, [piece.param]):
                    module = model.get_submodule(name.rpartition(".")[0])
                    if hasattr(module, "copy_rows") and name.endswith(".weight"):
                        from .quantize import load_rows

                        load_rows(
                            partial(read_elements, file, piece), piece, state[name], module, device
                        )
                    else:
                        _load_piece(file, piece, state[name], filled, staging)
    _fill_buffers(model, state)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _load_piece(
    file, piece: Piece, target: torch.Tensor, filled: set[tuple], staging: torch.Tensor
) -> None:
    box = local_box(target, piece)
    if box is None:
        return
    shard = local(target)[box[0]]
    key = (id(target), piece.at)
    twice = key in filled  # a tied weight that the checkpoint stores twice
    filled.add(key)
    for first, values in runs(shard, box[1], piece.shape):
        for start in range(0, len(values), CHUNK):
            part = values[start : start + CHUNK]
            read = staging.view(piece.info.dtype)[: len(part)]
            read_elements(file, piece, first + start, read)
            if twice:
                same = torch.equal(part, read.to(part.device, part.dtype))
                check(
                    same,
                    f"{file.name}: {piece.name} is tied to another weight but holds other values",
                )
            else:
                part.copy_(read)


def read_elements(file, piece: Piece, first: int, into: torch.Tensor) -> None:
    """Elements [first, first + len(into)) of a tensor in an open file."""
    at, data = piece.info.begin + first * into.itemsize, into.view(torch.uint8)
    whole = transfer(os.preadv, file, at, data) == len(data)
    check(whole, f"{file.name}: cut short while it was read {AGAIN}")


def _fill_buffers(model: nn.Module, state: Tensors) -> None:
    """Compute what no checkpoint holds: rotary frequencies, embedding scales.

    After to_empty they are garbage, and nothing complains. Everything that was loaded is marked, and so are
    modules of which all was; then the model's own initialization runs on the others, twice, over zeros and
    over ones: what comes out otherwise the second time was not filled. Raises ConfigError naming it.
    """
    for tensor in state.values():
        tensor._is_hf_initialized = True
    computed = {
        n: b for n, b in model.named_buffers() if not getattr(b, "_is_hf_initialized", False)
    }
    first = {}
    for byte in (0, 255):
        for buffer in computed.values():
            fill_bytes(buffer, byte)
        for module in model.modules():
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            loaded = [getattr(tensor, "_is_hf_initialized", False) for tensor in own]
            module._is_hf_initialized = bool(loaded) and all(loaded)
        _own_code(model).initialize_weights()
        first = first or {name: buffer.clone() for name, buffer in computed.items()}
    unfilled = [
        n for n, buffer in computed.items() if not torch.equal(bytes_of(buffer), bytes_of(first[n]))
    ]
    unfilled += [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]
    what = "no checkpoint holds them, and the model's own _init_weights does not fill them"
    fix = "a model whose _init_weights fills all of its buffers, or --low_cpu_fsdp false"
    check(not unfilled, f"{type(model).__name__}: {first_five(unfilled)}: {what} (fix: {fix})")


def _own_code(model: nn.Module) -> nn.Module:
    """The model, for transformers to initialize: it takes FSDP's classes for code from elsewhere, of which it
    passes over modules without tensors of their own, though their _init_weights may fill their layers'.
    """
    if isinstance(model, FSDPModule):
        family = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
        model.is_custom_code = family.is_custom_code
    return model


def fill_bytes(tensor: torch.Tensor, byte: int) -> None:
    """Overwrite every byte; of truth values, which have two, with one of them."""
    bytes_of(tensor).fill_(min(byte, 1) if tensor.dtype == torch.bool else byte)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
