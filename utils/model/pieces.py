"""Tensors of a checkpoint as boxes of parameters: which part this rank holds, and its place in a file."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from safetensors.torch import _TYPES as DTYPES
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..run.distributed import World
from .folder import SINGLE, TensorInfo

Box = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """The tensor `name` of a checkpoint is a box of the parameter `param`: from `at`, of shape `shape`.

    `shape` is info.shape, with leading 1s where the parameter has more dims: an expert of a fused (E, 2I, D).
    """

    name: str
    info: TensorInfo
    param: str
    at: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a tensor goes: bytes [begin, end) of a file."""

    file: str
    begin: int
    end: int
    dtype: torch.dtype


def local_box(parameter: torch.Tensor, piece: Piece) -> tuple[Box, Box] | None:
    """The part of a piece that this rank's shard holds: (where in the local shard, which slice of the piece).

    None where that is nothing. A plain tensor is one shard, the whole.
    """
    size, begin = parameter.shape, (0,) * parameter.ndim
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        plain = all(type(placement) in (Shard, Replicate) for placement in placements)
        assert plain, f"{piece.param}: a shard by {placements} is not a box of the whole"
        size, begin = compute_local_shape_and_global_offset(size, mesh, placements)
    local, rows = [], []
    for mine, length, at, wanted in zip(begin, size, piece.at, piece.shape, strict=True):
        low, high = max(mine, at), min(mine + length, at + wanted)
        if low >= high:
            return None
        local.append(slice(low - mine, high - mine))
        rows.append(slice(low - at, high - at))
    return tuple(local), tuple(rows)


def lay_out(
    pieces: list[Piece], save_dtype, max_file_bytes
) -> tuple[dict[str, Place], dict[str, bytes]]:
    """(place of each tensor, header of each file) by name."""
    dtypes = {}
    for piece in pieces:
        dtype = piece.info.dtype
        dtypes[piece.name] = save_dtype if save_dtype and dtype.is_floating_point else dtype
    assert len(dtypes) == len(pieces), "two pieces have one name"
    codes = {dtype: code for code, dtype in DTYPES.items()}
    files: list[dict] = [{}]
    end = 0
    # wide ones first: all are aligned
    for piece in sorted(pieces, key=lambda piece: -dtypes[piece.name].itemsize):
        dtype = dtypes[piece.name]
        shape = piece.info.shape
        size_bytes = math.prod(shape) * dtype.itemsize
        if files[-1] and end + size_bytes > max_file_bytes:
            files.append({})
            end = 0
        begin = end
        end += size_bytes
        files[-1][piece.name] = {
            "dtype": codes[dtype],
            "shape": shape,
            "data_offsets": (begin, end),
        }

    places, headers = {}, {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors" if len(files) > 1 else SINGLE
        text = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
        text += b" " * (-len(text) % 8)
        headers[file] = len(text).to_bytes(8, "little") + text
        for name, tensor in tensors.items():
            begin, end = (len(headers[file]) + offset for offset in tensor["data_offsets"])
            places[name] = Place(file, begin, end, dtypes[name])
    return places, headers


def is_writer(parameter: torch.Tensor, world: World) -> bool:
    """Of the ranks that hold the same values, the first writes them."""
    if not isinstance(parameter, DTensor):
        return world.rank == 0
    coordinates = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in coordinates if placement.is_replicate())


def runs(
    box: torch.Tensor, rows: Box, shape: tuple[int, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a box of a row-major tensor into runs without gaps: (first element, values). Whole rows: one."""
    dims = range(len(shape))
    partial_dims = [dim for dim in dims if rows[dim] != slice(0, shape[dim])]
    last_partial = max(partial_dims, default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in dims]
    for index in itertools.product(*map(range, box.shape[:last_partial])):
        first = 0
        for row, offset, stride in zip(rows, (*index, 0), strides, strict=False):
            first += (row.start + offset) * stride
        yield first, box[index].view(-1)


def transfer(call, file, at: int, data: torch.Tensor) -> int:
    """os.pwritev or os.preadv until all is done, or nothing more comes; the number of bytes."""
    view = memoryview(data.numpy())
    done = 0
    while done < len(view):
        moved = call(file.fileno(), [view[done:]], at + done)
        if not moved:
            break
        done += moved
    return done


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor; another tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def rows_of_full_shard(rows: int, shards: int) -> int:
    """Rows of the first of `shards`: torch.chunk gives each so many until there are none left."""
    return -(-rows // shards)
