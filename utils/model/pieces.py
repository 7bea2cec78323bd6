"""Tensors of a checkpoint as boxes of parameters: which part this rank holds, and its place in a file."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import _TYPES as DTYPES
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..run.distributed import World
from .folder import TensorInfo

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """The tensor `name` of a checkpoint is a box of the parameter `param`: from `at`, of shape `shape`.

    `shape` is info.shape, with leading 1s where the parameter has more dims: an expert of a fused (E, 2I, D).
    transposed: all experts, each stored as the transpose of its matrix.
    """

    name: str
    info: TensorInfo
    param: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    transposed: bool = False


def whole(name: str, tensor: torch.Tensor, param: str = "") -> Piece:
    """A parameter as one piece, which is in no file. param: its name in the model, if that is another one."""
    info = TensorInfo(None, tensor.dtype, tuple(tensor.shape), 0)
    return Piece(name, info, param or name, (0,) * tensor.ndim, info.shape)


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: bytes [begin, end) of a file."""

    file: str
    begin: int
    end: int
    dtype: torch.dtype


def local_box(parameter: torch.Tensor, piece: Piece) -> tuple[Box, Box] | None:
    """The part of a piece that this rank's shard holds: (where in the local shard, where in the piece).

    None if the shard holds no part of it. A plain tensor counts as one shard that holds everything.
    """
    shard_shape = parameter.shape
    shard_at = (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        placements = parameter.placements
        plain = all(type(placement) in (Shard, Replicate) for placement in placements)
        assert plain, f"{piece.param}: a shard by {placements} is not a box of the whole"
        shard_shape, shard_at = compute_local_shape_and_global_offset(
            parameter.shape, mesh, placements
        )
    in_shard, in_piece = [], []
    dims = zip(shard_at, shard_shape, piece.at, piece.shape, strict=True)
    for shard_begin, shard_size, piece_begin, piece_size in dims:
        begin = max(shard_begin, piece_begin)
        end = min(shard_begin + shard_size, piece_begin + piece_size)
        if begin >= end:
            return None
        in_shard.append(slice(begin - shard_begin, end - shard_begin))
        in_piece.append(slice(begin - piece_begin, end - piece_begin))
    return tuple(in_shard), tuple(in_piece)


def lay_out(
    pieces: list[Piece],
    save_dtype: torch.dtype | None = None,
    max_file_bytes: float = 5e9,
    stem: str = "model",
) -> tuple[dict[str, Place], dict[str, bytes]]:
    """(place of each tensor by its name, header of each file by the file's name), file after file.
    save_dtype: for floating-point tensors; None: as in the pieces.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    tensors: dict[str, torch.Tensor] = {}
    for piece in pieces:
        dtype = piece.info.dtype
        if save_dtype and dtype.is_floating_point:
            dtype = save_dtype
        tensors[piece.name] = torch.empty(piece.info.shape, dtype=dtype, device="meta")
    assert len(tensors) == len(pieces), "two pieces have one name"
    # The widest dtypes come first, so that all tensors are aligned.
    widest_first = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    files = split_state_dict_into_shards_factory(
        {name: tensors[name] for name in widest_first},
        get_storage_size=lambda tensor: tensor.nbytes,
        filename_pattern=stem + "{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    ).filename_to_tensors
    places: dict[str, Place] = {}
    headers: dict[str, bytes] = {}
    for file, names in files.items():
        entries, end = {}, 0
        for name in names:
            tensor = tensors[name]
            begin, end = end, end + tensor.nbytes
            code, shape = codes[tensor.dtype], list(tensor.shape)
            entries[name] = {"dtype": code, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
        text += b" " * (-len(text) % 8)
        header = headers[file] = len(text).to_bytes(8, "little") + text
        for name in names:
            begin, end = (len(header) + at for at in entries[name]["data_offsets"])
            places[name] = Place(file, begin, end, tensors[name].dtype)
    return places, headers


def is_writer(parameter: torch.Tensor, world: World) -> bool:
    """Whether this rank writes its shard: of the ranks that hold the same values, the first does."""
    if not isinstance(parameter, DTensor):
        return world.rank == 0
    places = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return all(rank == 0 or not placement.is_replicate() for rank, placement in places)


def runs(
    rows: torch.Tensor, box: Box, shape: tuple[int, ...], most: int = 2**62
) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut `rows`, some rows of a row-major tensor of this `shape`, into runs of at most `most` elements:
    (index of the first element in the tensor, values). box: where the rows are in the tensor.
    """
    assert rows.shape[1:] == shape[1:], f"{list(rows.shape)} are no rows of {list(shape)}"
    begin = box[0].start * math.prod(shape[1:]) if box else 0
    values = rows.view(-1)
    for start in range(0, len(values), most):
        yield begin + start, values[start : start + most]


def transfer(call: Callable, file: IO[bytes], at: int, data: torch.Tensor) -> int:
    """Call os.pwritev or os.preadv until all of `data` is transferred, or a call transfers nothing. Returns
    the number of bytes.
    """
    view = memoryview(data.numpy())
    done_bytes = 0
    while done_bytes < len(view):
        moved_bytes = call(file.fileno(), [view[done_bytes:]], at + done_bytes)
        if not moved_bytes:
            break
        done_bytes += moved_bytes
    return done_bytes


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of_full_shard(rows: int, shards: int) -> int:
    """Rows of the first, fullest shard: torch.chunk gives each shard so many until none are left."""
    return -(-rows // shards)
