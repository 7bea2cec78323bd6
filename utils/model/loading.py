"""Build models on meta; list the pieces of a checkpoint; read its files slice by slice into the local shards.

A piece says which box of which parameter a tensor of the checkpoint is. Where each tensor goes is decided
before anything is read, as a list of pieces. Saving uses the same list in the other direction.

The order is: build on meta (no memory), shard (no memory), allocate the local shards, read. A rank opens the
checkpoint and copies the rows of its own shards, one slice at a time, and converts their dtype on the way.
No process ever holds the full model.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import IO, NamedTuple

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from ..run.distributed import World
from ..run.errors import ConfigError, check, first_five, others_code, print0
from ..run.files import AGAIN
from .folder import DTYPES, NOT_CAUSAL, TensorInfo, Weights
from .sharding import family_of

# --- tensors of a checkpoint as boxes of parameters: which part this rank holds, and its place in a file


class Piece(NamedTuple):
    """The tensor `name` of a checkpoint is a box of the parameter `param`: from `at`, of shape `shape`.

    `shape` is info.shape, with leading 1s where the parameter has more dims: an expert of a fused (E, 2I, D).
    transposed: all experts, each stored as the transpose of its matrix.
    """

    name: str
    info: TensorInfo
    param: str
    at: tuple
    shape: tuple
    transposed: bool = False


def whole(name: str, tensor: Tensor, param="") -> Piece:
    """A parameter as one piece, which is in no file. param: its name in the model, if that is another one."""
    info = TensorInfo(None, tensor.dtype, tuple(tensor.shape), 0)
    return Piece(name, info, param or name, (0,) * tensor.ndim, info.shape)


class Place(NamedTuple):
    """Where a tensor goes: bytes [begin, end) of a file."""

    file: str
    begin: int
    end: int
    dtype: torch.dtype


def local_box(parameter: Tensor, piece: Piece) -> tuple | None:
    """The part of a piece that this rank's shard holds: (where in the local shard, where in the piece).

    None if the shard holds no part of it. A plain tensor counts as one shard that holds everything.
    """
    shard_shape = parameter.shape
    shard_at = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        placements = parameter.placements
        plain = all(type(placement) in (Shard, Replicate) for placement in placements)
        assert plain, f"{piece.param}: a shard by {placements} is not a box of the whole"
        shard_shape, shard_at = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, placements
        )
    in_shard = []
    in_piece = []
    dims = zip(shard_at, shard_shape, piece.at, piece.shape, strict=True)
    for shard_begin, shard_size, piece_begin, piece_size in dims:
        begin = max(shard_begin, piece_begin)
        end = min(shard_begin + shard_size, piece_begin + piece_size)
        if begin >= end:
            return None
        in_shard.append(slice(begin - shard_begin, end - shard_begin))
        in_piece.append(slice(begin - piece_begin, end - piece_begin))
    return tuple(in_shard), tuple(in_piece)


def lay_out(pieces: list[Piece], save_dtype=None, max_file_bytes=5e9, stem="model") -> tuple:
    """(place of each tensor by its name, header of each file by the file's name), file after file.
    save_dtype: the dtype for floating-point tensors; None: as in the pieces.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    tensors = {}
    for piece in pieces:
        dtype = piece.info.dtype
        if save_dtype and dtype.is_floating_point:
            dtype = save_dtype
        tensors[piece.name] = torch.empty(piece.info.shape, dtype=dtype, device="meta")
    # The widest dtypes come first, so that all tensors are aligned.
    files = split_state_dict_into_shards_factory(
        dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize)),
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    ).filename_to_tensors
    places = {}
    headers = {}
    for file, names in files.items():
        entries = {}
        end = 0
        for name in names:
            tensor = tensors[name]
            begin = end
            end += tensor.nbytes
            entries[name] = {
                "dtype": codes[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": [begin, end],
            }
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        text += b" " * (-len(text) % 8)
        header = headers[file] = len(text).to_bytes(8, "little") + text
        for name in names:
            begin, end = (len(header) + at for at in entries[name]["data_offsets"])
            places[name] = Place(file, begin, end, tensors[name].dtype)
    return places, headers


def is_writer(parameter: Tensor, world: World) -> bool:
    """Whether this rank writes its shard: of the ranks that hold the same values, the first does."""
    if not isinstance(parameter, DTensor):
        return world.rank == 0
    axes = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return all(index == 0 or not placement.is_replicate() for index, placement in axes)


def local_parts(parameter: Tensor, piece: Piece, max_elements=2**62) -> Iterator:
    """The values of a piece that this rank's shard holds, in parts of at most `max_elements`: (index of the
    first element in the tensor as it is stored, values (n,)). The values are views of the shard, unless the
    piece is transposed.
    """
    boxes = local_box(parameter, piece)
    if not boxes:
        return
    in_shard, in_piece = boxes
    rows = local(parameter)[in_shard]
    shape = piece.shape
    if piece.transposed:
        rows = rows.mT.contiguous()
        shape = piece.info.shape
    assert rows.shape[1:] == shape[1:], f"{list(rows.shape)} are no rows of {list(shape)}"
    begin = in_piece[0].start * math.prod(shape[1:]) if shape else 0
    values = rows.view(-1)
    for start in range(0, len(values), max_elements):
        yield begin + start, values[start : start + max_elements]


def transfer(call: Callable, file: IO[bytes], at: int, data: Tensor) -> int:
    """Call os.pwritev or os.preadv until all of `data` is transferred, or a call transfers nothing. Returns
    the number of bytes.
    """
    view = memoryview(data.numpy())
    done_bytes = 0
    while moved_bytes := call(file.fileno(), [view[done_bytes:]], at + done_bytes):
        done_bytes += moved_bytes
    return done_bytes


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# --- models on meta, the pieces of their checkpoint, and reading those

KINDS = {  # by what a model reads or returns
    "text": AutoModelForCausalLM,
    "scores": AutoModelForSequenceClassification,
    "pictures": AutoModelForImageTextToText,
}
CHUNK = 2**20  # elements that are read, and converted or quantized, at a time
# How experts that are separate on disk are fused in memory: stacked along a new dim 0; gate and up are also
# concatenated along dim 1.
EXPERT_FUSIONS = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
HEADS = ("lm_head.", "embed_out.")  # names of the head in checkpoints
UNPADS = [("Inkling2UnpadVocab", None)]
TRANSPOSES = [("Transpose", None)]


def build_model(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn="auto",
    trust_remote_code=False,
    read_from="",
    kind="text",
) -> nn.Module:
    """The model of a config on meta: structure, names, shapes and ties, no memory.

    attn: sdpa, flash_attention_2, eager; auto: what transformers chooses, or `sinks`. read_from: a
    folder whose weights transformers reads at once (`--low_cpu_fsdp false`); the model is then not on meta.
    kind: a key of KINDS; all but "pictures" freeze a vision tower; "scores" is a sequence classifier with
    `score` as its head, of config.num_labels rows. Raises ConfigError if the model cannot be built.
    """
    check_kind(config, kind)
    auto_class = KINDS[kind]
    options = {
        "dtype": dtype,
        "attn_implementation": None if attn == "auto" else attn,
        "trust_remote_code": trust_remote_code,
    }
    problem = f"{config.model_type} cannot be built with --attn {attn}"
    if not read_from:
        fix = (
            f"another --attn, or other values in the config.json of {config.name_or_path or 'the model'};"
            " or --trust_remote_code, if it asks for that and you have read its code"
        )
        with others_code(problem, fix), torch.device("meta"):
            model = auto_class.from_config(config, **options)
    else:
        with others_code(problem, "--low_cpu_fsdp, which reads each rank's own slices"):
            model = auto_class.from_pretrained(
                read_from, config=config, use_safetensors=True, **options
            )
    if model.config._attn_implementation == "eager":
        from .attention import settle_attention

        settle_attention(model, attn, model.device, dtype, "sinks")
    if kind == "scores":
        check(
            hasattr(model, "score"),
            f"--model: the classifier of {config.model_type} has no layer `score` (fix: another --model)",
        )
        model.get_output_embeddings = lambda: model.score
    if kind != "pictures":  # no text reaches the vision tower, if there is one
        tower = model.get_encoder("image") or model
        tower.requires_grad_(tower is model)
    return model


def check_kind(config: PretrainedConfig, kind: str) -> None:
    """Raise ConfigError for a model that transformers does not list under this kind, a key of KINDS. Models
    that score are causal language models too.
    """
    listed = type(config) in KINDS[kind]._model_mapping
    if kind == "scores":
        check_kind(config, "text")
        wanted = "model for which transformers has a sequence classifier"
        fix = "another --model, such as llama or qwen3"
    elif kind == "text":
        for reason, families in NOT_CAUSAL.items():
            check(
                config.model_type not in families,
                f"--model: {config.model_type} is {reason}"
                " (fix: another --model, a causal language model such as llama or qwen3)",
            )
        wanted = "text-only causal model"
        fix = "recipes/vision.py, for plan.py --images 1344x896; or a text-only model, such as qwen2.5-7b"
    else:
        wanted = "model of pictures and text that is part of transformers"
        fix = "a model whose code is: MiniCPM-V 4.6 for 2.6 and OmniLMM, InternVL3-8B-hf for InternVL3-8B"
    if kind != "pictures":
        listed = listed or getattr(config, "auto_map", None)  # the folder has code of its own
    check(listed, f"--model: {config.model_type} is no {wanted} (fix: {fix})")


def plan_pieces(model: nn.Module, weights: Weights, folder: Path, new_head="") -> list[Piece]:
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
    # Buffers that older transformers stored (Llama 2, Pythia, GPT-Neo, CLIP) are computed now. The text class
    # of Llama 4 leaves out tower and projector. A layer with `eh_proj` only drafts tokens (MTP): transformers
    # knows its number in DeepSeek-V3 and GLM-4.5, but not in smaller models of the same class.
    ignored = re.compile(
        "|".join(
            {
                r"\.(inv_freq|masked_bias|attention\.bias|position_ids)$|^(vision_model|multi_modal_projector)\.",
                *re.findall(r"\S+\.layers\.\d+\.(?=eh_proj)", "\n".join(weights)),
            }
            | model._keys_to_ignore_on_load_unexpected
        )
    )
    pieces = []
    extra = []
    unread = []
    misshapen = []
    covered = dict.fromkeys(state, 0)  # elements found, by parameter
    for name, info in weights.items():
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if target not in state and name in state:
            # The rename was for older checkpoints.
            target = name
            pattern = None
        if target not in state:
            (unread if ignored.search(name) else extra).append(name)
            continue
        at = (0,) * len(info.shape)
        shape = info.shape
        parameter = state[target]
        if pattern:
            at, shape = _converted_box(name, info, pattern, converters, folder, parameter)
        # A shape of as many dims as on disk, but another one: its last two are swapped.
        transposed = len(shape) == len(info.shape) and shape != info.shape
        piece = Piece(name, info, target, at, shape, transposed)
        if not _fits(piece, parameter):
            misshapen.append(
                f"{name} {info.dtype} {list(info.shape)}"
                f" for {target} {parameter.dtype} {list(parameter.shape)}"
            )
            continue
        covered[target] += math.prod(shape)
        pieces.append(piece)
    if new_head and not covered[new_head]:
        extra = [name for name in extra if not name.startswith(HEADS)]
        covered[new_head] = state[new_head].numel()
        pieces.append(whole(new_head, state[new_head].to(next(iter(weights.values())).dtype)))
    # A tied weight may be stored under only one of its names.
    complete = {tensor for name, tensor in state.items() if covered[name] >= tensor.numel()}
    wrong = {
        "lack": [name for name, tensor in state.items() if tensor not in complete],
        "have unknown": extra,
        "have misshapen": misshapen,
        "repeat": [name for name, tensor in state.items() if covered[name] > tensor.numel()],
    }
    problems = [f"{verb} {first_five(names)}" for verb, names in wrong.items() if names]
    check(
        not problems,
        f"{folder}: the weights {'; '.join(problems)}"
        " (fix: weights and config.json of one model, before quantization if it has scales or qweight; a"
        " reward model is for reward.py and --reward_model)",
    )
    if unread:
        print0(
            f"unread    {len(unread)} tensors that transformers' model does not have, such as {unread[-1]}"
            " (recipes/README.md, Which models)"
        )
    return pieces


def _converted_box(name, info, pattern, converters, folder, parameter):
    """(at, shape) of a stored tensor within its parameter: of one expert's matrix in a parameter with all
    experts, e.g. gate_up_proj (E, 2I, D); of all experts, perhaps stored transposed as (E, D, 2I); or of a
    vocabulary without padding to cut off. Raises ConfigError for any other layout.
    """
    converter = next(c for c in converters if pattern in c.source_patterns)
    operations = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
    is_transposed = operations == TRANSPOSES and parameter.ndim == 3
    if (operations in (UNPADS, TRANSPOSES) and info.shape == parameter.shape) or (
        is_transposed and info.shape == parameter.mT.shape
    ):
        return (0,) * parameter.ndim, parameter.shape
    expert = re.search(r"\.(\d+)\.(?!.*\.\d+\.)", name)  # the last number in the name
    if operations not in EXPERT_FUSIONS or not expert or len(info.shape) != 2:
        steps = ", ".join(kind for kind, _ in operations)
        raise ConfigError(
            f"{folder}: {name} is stored in a layout that is not read in slices: {steps}"
            " (fix: load it with transformers, then save_pretrained(..., save_original_format=False))"
        )
    first_row = converter.source_patterns.index(pattern) * info.shape[0]
    return (int(expert[1]), first_row, 0), (1, *info.shape)


def _fits(piece, parameter):
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
    names=None,
) -> None:
    """Allocate this rank's shards of a meta model and fill them, some MiB at a time.

    Shards are on `device`; with cpu_offload they are on the host, and only the buffers are on `device`.
    names: the present names of each parameter, if they have changed since the pieces were planned, as with
    adapters; two names get two copies. A parameter that has no piece, or one without a file, holds arbitrary
    values afterwards, whatever it held before: fill it then.

    Peak memory above the shards: CHUNK elements, or a transposed expert. Files are read, not mapped: mapped
    pages count as memory of this process, and network file systems deliver them in small parts. Raises
    ConfigError if a file is cut short, or a tied weight is stored twice with different values.
    """
    model.to_empty(device="cpu" if cpu_offload else device)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)
    filled = set()
    staging = torch.empty(CHUNK * 8, dtype=torch.uint8, pin_memory=device.type == "cuda")
    stored = sorted(
        (piece for piece in pieces if piece.info.file),
        key=lambda piece: (str(piece.info.file), piece.info.begin),
    )
    for path, group in groupby(stored, key=lambda piece: piece.info.file):
        with open(path, "rb", buffering=0) as file:
            for piece in group:
                for name in (names or {}).get(piece.param, [piece.param]):
                    module = model.get_submodule(name.rpartition(".")[0])
                    if hasattr(module, "load_rows") and name.endswith(".weight"):
                        module.load_rows(partial(read_elements, file, piece), piece, device)
                    else:
                        _load_piece(file, piece, state[name], filled, staging)
    _fill_buffers(model, {*state.values()})
    for buffer in model.buffers():
        buffer.data = buffer.to(device)


def _load_piece(file, piece, target, filled, staging):
    """Read this rank's part of a piece into its parameter, `target`. filled: (id of a parameter, where in it)
    of all pieces read so far. staging: bytes to read into, on the host.
    """
    if piece.transposed:
        if boxes := local_box(target, piece):
            in_shard, in_piece = boxes
            for expert, matrix in enumerate(local(target)[in_shard].mT, in_piece[0].start):
                read = torch.empty(matrix.shape, dtype=piece.info.dtype)
                read_elements(file, piece, expert * read.numel(), read.view(-1))
                matrix.copy_(read)
        return
    key = (id(target), piece.at)
    twice = key in filled  # a tied weight that the checkpoint stores twice
    filled.add(key)
    for first, values in local_parts(target, piece, CHUNK):
        read = staging.view(piece.info.dtype)[: len(values)]
        read_elements(file, piece, first, read)
        read = read.to(values.device)  # still in the stored dtype: a GPU casts faster
        if twice:
            check(
                torch.equal(values, read.to(values.dtype)),
                f"{file.name}: {piece.name} is tied to another weight but holds other values"
                ' (fix: "tie_word_embeddings": false in its config.json, if both are meant)',
            )
        else:
            values.copy_(read)


def read_elements(file, piece: Piece, first: int, into: Tensor) -> None:
    """Read elements [first, first + len(into)) of a tensor in an open file."""
    at = piece.info.begin + first * into.itemsize
    data = into.view(torch.uint8)
    read_bytes = transfer(os.preadv, file, at, data)
    check(read_bytes == len(data), f"{file.name}: cut short while it was read {AGAIN}")


def _fill_buffers(model, loaded):
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
        if tensors:
            module._is_hf_initialized = loaded.issuperset(tensors)
    computed = {}
    for name, buffer in model.named_buffers():
        if buffer.numel() and buffer not in loaded:
            computed[name] = buffer.view(-1).view(torch.uint8).fill_(255)
    # transformers takes the classes that FSDP2 makes for custom code, and skips some modules of custom code.
    model.is_custom_code = family_of(model).is_custom_code
    model.initialize_weights()
    unfilled = [name for name, values in computed.items() if (values == 255).all()]
    check(
        not unfilled,
        f"{type(model).__name__}: {first_five(unfilled)}: no checkpoint holds them, and the model's own"
        " _init_weights does not fill them"
        " (fix: a model whose _init_weights fills all of its buffers, or --low_cpu_fsdp false)",
    )
