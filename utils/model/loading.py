"""Build models on meta; read safetensors slice by slice into the local shards.

The order is: build on meta (no memory), shard (no memory), allocate the local shards, read. A rank opens the
checkpoint and copies the rows of its own shards, one slice at a time, and converts their dtype on the way.
No process ever holds the full model.

Where each tensor goes is decided before anything is read, as a list of pieces (pieces.Piece). Saving uses the
same list in the other direction.
"""

import os
import re
from collections.abc import Iterable
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..run.errors import ConfigError, check, first_five, others_code
from ..run.files import AGAIN
from .folder import TensorInfo, check_family
from .pieces import Piece, local, local_box, runs, transfer, whole
from .sharding import family_of

KINDS = {  # by what a model reads or returns
    "text": AutoModelForCausalLM,
    "scores": AutoModelForSequenceClassification,
    "pictures": AutoModelForImageTextToText,
}
CHUNK = 2**20  # elements that are read, and converted or quantized, at a time
# How experts that are separate on disk are fused in memory: stacked along a new dim 0; gate and up are also
# concatenated along dim 1.
KNOWN = (
    [("MergeModulelist", 0)],
    [("MergeModulelist", 0), ("Concatenate", 1)],
)
HEADS = ("lm_head.", "embed_out.")  # names of the head in checkpoints
UNPADS = [("Inkling2UnpadVocab", None)]
TRANSPOSES = [("Transpose", None)]


def build_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn="auto",
    trust_remote_code=False,
    whole: Path | str = "",
    kind="text",
) -> nn.Module:
    """The model of a config on meta: structure, names, shapes and ties, no memory.

    attn: sdpa, flash_attention_2, eager; auto lets transformers choose. whole: a folder whose weights
    transformers reads at once (`--low_cpu_fsdp false`); the model is then not on meta. kind: a key of KINDS;
    "scores" is a sequence classifier with `score` as its head, for which config.num_labels must be 1. Raises
    ConfigError if the model cannot be built.
    """
    check_kind(config, "pictures" if kind == "pictures" else "text")
    family = KINDS[kind]
    options = {
        "dtype": dtype,
        "attn_implementation": None if attn == "auto" else attn,
        "trust_remote_code": trust_remote_code,
    }
    problem = f"{config.model_type} cannot be built with --attn {attn}"
    if not whole:
        fix = f"other values in the config.json of {config.name_or_path or 'the model'}"
        with others_code(problem, fix), torch.device("meta"):
            model = family.from_config(config, **options)
    else:
        options |= {"config": config, "use_safetensors": True, "local_files_only": True}
        with others_code(problem, "--low_cpu_fsdp, which reads each rank's own slices"):
            model = family.from_pretrained(whole, **options)
    if kind == "scores":
        model.get_output_embeddings = lambda: model.score
    return model


def check_kind(config: PretrainedConfig, kind: str) -> None:
    """Raise ConfigError for a model that transformers does not list under this kind, text or pictures."""
    listed = type(config) in KINDS[kind]._model_mapping
    if kind == "text":
        check_family(config.model_type)
        what = "text-only causal model"
        fix = "recipes/vision.py, for plan.py --images 1344x896; or a text-only model, such as qwen2.5-7b"
        listed = listed or getattr(config, "auto_map", None)
    else:
        what = "model of pictures and text that is part of transformers"
        fix = "a model whose code is, such as MiniCPM-V 4.6 for MiniCPM-V 2.6 and OmniLMM"
    check(listed, f"--model: {config.model_type} is no {what} (fix: {fix})")


def plan_pieces(
    model: nn.Module, weights: dict[str, TensorInfo], folder: Path, new_head: str = ""
) -> list[Piece]:
    """Map each tensor of the checkpoint to a box of a parameter. new_head: a parameter that the checkpoint
    may lack. Then its piece has no file, and the head of the checkpoint is not read.

    Raises ConfigError unless every parameter and persistent buffer is covered exactly once, with the right
    shape. It lists the first five missing, extra, misshapen and repeated names. (transformers initializes
    missing tensors anew and goes on.)
    """
    state = model.state_dict(keep_vars=True)
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    ignored = re.compile("|".join(model._keys_to_ignore_on_load_unexpected or []) or r"(?!)")
    pieces, extra, misshapen = [], [], []
    covered: dict[str, int] = dict.fromkeys(state, 0)  # elements found, by parameter
    for name, info in weights.items():
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if target not in state and name in state:
            # The rename was for older checkpoints.
            target = name
            pattern = None
        if target not in state:
            if not ignored.search(name):
                extra.append(name)
            continue
        at = (0,) * len(info.shape)
        shape = info.shape
        parameter = state[target]
        if pattern is not None:
            at, shape = _converted_box(name, info, pattern, converters, folder, parameter)
        transposed = len(shape) == len(info.shape) and shape != info.shape
        piece = Piece(name, info, target, at, shape, transposed)
        if not _fits(piece, parameter):
            found = f"{name} {info.dtype} {list(info.shape)}"
            misshapen.append(f"{found} for {target} {parameter.dtype} {list(parameter.shape)}")
            continue
        covered[target] += torch.Size(shape).numel()
        pieces.append(piece)
    if new_head and not covered[new_head]:
        extra = [name for name in extra if not name.startswith(HEADS)]
        covered[new_head] = state[new_head].numel()
        dtype = next(iter(weights.values())).dtype
        pieces.append(whole(new_head, state[new_head].to(dtype)))
    # A tied weight may be stored under only one of its names.
    complete = {id(tensor) for name, tensor in state.items() if covered[name] >= tensor.numel()}
    missing = [name for name, tensor in state.items() if id(tensor) not in complete]
    repeated = [name for name, tensor in state.items() if covered[name] > tensor.numel()]
    wrong = {
        "lack": missing,
        "have unknown": extra,
        "have misshapen": misshapen,
        "repeat": repeated,
    }
    problems = [f"{verb} {first_five(names)}" for verb, names in wrong.items() if names]
    fix = "weights and config.json of one and the same model"
    check(not problems, f"{folder}: the weights {'; '.join(problems)} (fix: {fix})")
    return pieces


def _converted_box(
    name: str,
    info: TensorInfo,
    pattern: str,
    converters: list[WeightConverter],
    folder: Path,
    parameter: torch.Tensor,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(at, shape) of a stored tensor within its parameter: of one expert's matrix in a parameter with all
    experts, e.g. gate_up_proj (E, 2I, D); of all experts, perhaps stored transposed as (E, D, 2I); or of a
    vocabulary without padding to cut off. Raises ConfigError for any other layout.
    """
    converter = next(c for c in converters if pattern in c.source_patterns)
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    if operations in (UNPADS, TRANSPOSES) and info.shape == parameter.shape:
        return (0,) * len(info.shape), info.shape
    if operations == TRANSPOSES and info.shape == parameter.mT.shape and parameter.ndim == 3:
        return (0, 0, 0), tuple(parameter.shape)
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


def _fits(piece: Piece, parameter: torch.Tensor) -> bool:
    """Whether a piece lies inside its parameter, and both or neither are floating-point."""
    if len(piece.shape) != parameter.ndim:
        return False
    dims = zip(piece.at, piece.shape, parameter.shape, strict=True)
    is_inside = all(begin + length <= size for begin, length, size in dims)
    return is_inside and piece.info.dtype.is_floating_point == parameter.is_floating_point()


@torch.no_grad()
def load_pieces(
    model: nn.Module,
    pieces: list[Piece],
    device: torch.device,
    cpu_offload=False,
    names: dict[str, list[str]] | None = None,
) -> None:
    """Allocate this rank's shards of a meta model and fill them, some MiB at a time.

    Shards are on `device`; with cpu_offload they are on the host, and only the buffers are on `device`.
    names: the present names of each parameter, if they have changed since the pieces were planned, as with
    adapters; two names get two copies. The parameter of a piece without a file is not filled.

    Peak memory above the shards: CHUNK elements, or a transposed expert. Files are read, not mapped: mapped
    pages count as memory of this process, and network file systems deliver them in small parts. Raises
    ConfigError if a file is cut short, or a tied weight is stored twice with different values.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)
    filled: set[tuple] = set()
    staging = torch.empty(CHUNK * 8, dtype=torch.uint8, pin_memory=device.type == "cuda")
    stored = [piece for piece in pieces if piece.info.file]
    by_file = sorted(stored, key=lambda piece: (str(piece.info.file), piece.info.begin))
    for path, group in groupby(by_file, key=lambda piece: piece.info.file):
        with open(path, "rb", buffering=0) as file:
            for piece in group:
                for name in (names or {}).get(piece.param, [piece.param]):
                    module = model.get_submodule(name.rpartition(".")[0])
                    if hasattr(module, "load_rows") and name.endswith(".weight"):
                        module.load_rows(partial(read_elements, file, piece), piece, device)
                    else:
                        _load_piece(file, piece, state[name], filled, staging)
    _fill_buffers(model, state.values())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _load_piece(
    file, piece: Piece, target: torch.Tensor, filled: set[tuple], staging: torch.Tensor
) -> None:
    boxes = local_box(target, piece)
    if boxes is None:
        return
    in_shard, in_piece = boxes
    shard = local(target)[in_shard]
    key = (id(target), piece.at)
    twice = key in filled  # a tied weight that the checkpoint stores twice
    filled.add(key)
    conflict = f"{file.name}: {piece.name} is tied to another weight but holds other values"
    if piece.transposed:
        for expert, matrix in enumerate(shard.mT, in_piece[0].start):
            read = torch.empty(matrix.shape, dtype=piece.info.dtype)
            read_elements(file, piece, expert * read.numel(), read.view(-1))
            matrix.copy_(read)
        return
    for first, values in runs(shard, in_piece, piece.shape, CHUNK):
        read = staging.view(piece.info.dtype)[: len(values)]
        read_elements(file, piece, first, read)
        read = read.to(values.device)  # still in the stored dtype: a GPU casts faster
        if twice:
            check(torch.equal(values, read.to(values.dtype)), conflict)
        else:
            values.copy_(read)


def read_elements(file, piece: Piece, first: int, into: torch.Tensor) -> None:
    """Read elements [first, first + len(into)) of a tensor in an open file."""
    at = piece.info.begin + first * into.itemsize
    data = into.view(torch.uint8)
    read_bytes = transfer(os.preadv, file, at, data)
    check(read_bytes == len(data), f"{file.name}: cut short while it was read {AGAIN}")


def _fill_buffers(model: nn.Module, loaded: Iterable[torch.Tensor]) -> None:
    """Compute the buffers that no checkpoint holds: rotary frequencies, embedding scales.

    After to_empty they hold arbitrary values, and nothing warns. As in transformers' own loader, loaded
    tensors are marked, and so are modules whose tensors are all loaded; the model's own initialization
    fills the others. Before that every byte of these buffers is set to 255: ConfigError for a buffer that
    keeps this value.
    """
    for tensor in loaded:
        tensor._is_hf_initialized = True
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        module._is_hf_initialized = bool(tensors) and all(map(_is_loaded, tensors))
    computed = {}
    for name, buffer in model.named_buffers():
        if buffer.numel() and not _is_loaded(buffer):
            computed[name] = buffer.view(-1).view(torch.uint8).fill_(255)
    # transformers takes the classes that FSDP2 makes for custom code, and skips some modules of custom code.
    model.is_custom_code = family_of(model).is_custom_code
    model.initialize_weights()
    unfilled = [name for name, values in computed.items() if (values == 255).all()]
    reason = "no checkpoint holds them, and the model's own _init_weights does not fill them"
    fix = "a model whose _init_weights fills all of its buffers, or --low_cpu_fsdp false"
    check(not unfilled, f"{type(model).__name__}: {first_five(unfilled)}: {reason} (fix: {fix})")


def _is_loaded(tensor: torch.Tensor) -> bool:
    return getattr(tensor, "_is_hf_initialized", False)
