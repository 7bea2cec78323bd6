"""The Hugging Face folder: names, index.json, each rank writes its own part.

A safetensors file is a short header and then the tensors, row-major, back to back. A shard along dim 0 is
thus one run of bytes whose place is known before anything is written: rank 0 lays the files out, every rank
writes its shards at their offsets, and no rank ever holds the model.
Format: https://huggingface.co/docs/safetensors/index#format
"""

import copy
import errno
import itertools
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .distributed import World, all_reduce_sum, broadcast, together
from .errors import ConfigError, check
from .model_folder import DTYPES, INDEX, SINGLE, TensorInfo, file_inside, read_json

CHUNK = 2**23  # elements (16 to 64 MiB) that are cast, or copied from a GPU, at a time
COMPANIONS = ("*.py", "LICENSE*", "NOTICE*", "USE_POLICY*", "*processor_config.json")
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


def save_model(
    out: Path, model: torch.nn.Module, pieces: list[Piece], world: World, *,
    save_dtype: torch.dtype | None = None, tokenizer=None, eos_ids: Iterable[int] = (),
    source: Path | None = None, max_file_bytes: float = 5e9,
) -> None:  # fmt: skip
    """Write `out` as a complete Hugging Face folder, every rank its own shards, in place of an older model.

    Tensors keep the dtype that they have in the checkpoint; save_dtype overrides it for floating-point ones.
    `source` is the folder the model came from: its generation config, licence and code come along. All is
    written into a temporary folder beside `out`, read back, compared with the live shards, and then renamed.
    On failure all ranks raise one ConfigError, and an older model is still there. Host memory above the
    shards: a few chunks. One run at a time may save to `out`.
    """
    out = Path(os.path.realpath(out))
    places, headers = lay_out(pieces, save_dtype, max_file_bytes)
    state = model.state_dict()  # where forward left parameters gathered, FSDP2 shards them again here
    mine = [piece for piece in pieces if is_writer(state[piece.param], world)]
    mine.sort(key=lambda piece: places[piece.name].file)  # so that each file is opened and synced once

    def prepare(temp: Path, rank: int) -> int:
        if rank:
            return 0
        check_replaceable(out, source)
        _write_configs(temp, model, [place.dtype for place in places.values()], eos_ids, source)
        _write_companions(temp, tokenizer, source)
        return create_files(temp, places)

    save_folder(out, world, prepare, lambda: local_chunks(state, mine, places, headers, world))


def save_folder(out: Path, world: World, prepare: Callable, chunks: Callable, finish=lambda _: None) -> None:
    """Write `out` in place of an older folder: complete or not at all.

    Rank 0 makes a temporary folder beside it, and the ranks `prepare(temp, rank)` its files in their full
    size; what rank 0 answers is how many bytes must come (0: it does not know). Every rank writes its
    `chunks()` (see local_chunks), reads them back and compares; rank 0 may `finish(temp)`, then it is
    renamed. On failure all ranks raise one ConfigError, and an older folder is still there.
    """
    temp = out.with_name(f".tmp_{out.name}_{broadcast(world, secrets.token_hex(4))}")
    try:
        with together(world), disk_errors(out):
            if world.rank == 0:
                remove_siblings(out, ".tmp")
                temp.mkdir(parents=True)
        with together(world), disk_errors(out):
            total = prepare(temp, world.rank)
        with together(world), disk_errors(out):
            written = write_chunks(temp, chunks())
        written = all_reduce_sum(written, world)
        assert not total or total == written, f"{written} bytes were written of {total}"
        with together(world), disk_errors(out):
            verify_chunks(temp, chunks())
        with together(world), disk_errors(out):
            if world.rank == 0:
                finish(temp)
                publish(temp, out)
    finally:
        if world.rank == 0:
            shutil.rmtree(temp, ignore_errors=True)


def lay_out(pieces: list[Piece], save_dtype, max_file_bytes) -> tuple[dict[str, Place], dict[str, bytes]]:
    """(place of each tensor, header of each file) by name."""
    given = {piece.name: piece.info.dtype for piece in pieces}
    dtypes = {name: save_dtype if save_dtype and d.is_floating_point else d for name, d in given.items()}
    assert len(dtypes) == len(pieces), "two pieces have one name"
    codes = {dtype: code for code, dtype in DTYPES.items()}
    files: list[dict] = [{}]
    end = 0
    for piece in sorted(pieces, key=lambda p: -dtypes[p.name].itemsize):  # wide ones first: all are aligned
        dtype, shape = dtypes[piece.name], piece.info.shape
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        if files[-1] and end > max_file_bytes:
            files.append({})
            begin, end = 0, end - begin
        files[-1][piece.name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": (begin, end)}

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


def local_chunks(state, pieces: list[Piece], places: dict, headers: dict, world: World) -> Iterator[tuple]:
    """This rank's part of the files as (file, first byte, bytes as uint8, name of the tensor), cast once; on
    rank 0 also the headers.
    """
    for file, header in headers.items() if world.rank == 0 else ():
        yield file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8), "the header"
    for piece in pieces:
        parameter, place = state[piece.param], places[piece.name]
        if box := local_box(parameter, piece):
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            for first, values in runs(shard[box[0]], box[1], piece.shape):
                for i in range(0, len(values), CHUNK):
                    data = values[i : i + CHUNK].to(place.dtype).cpu().contiguous().view(torch.uint8)
                    yield place.file, place.begin + (first + i) * place.dtype.itemsize, data, piece.name


def write_chunks(folder: Path, chunks: Iterable[tuple]) -> int:
    """Write chunks at their places, through to the disk; the number of bytes."""
    return sum(transfer(os.pwritev, file, at, data) for file, at, data, _ in _opened(folder, chunks, "r+b"))


def verify_chunks(folder: Path, chunks: Iterable[tuple]) -> None:
    """Compare chunks with the disk, bit for bit. Files are opened anew: a network file system looks again."""
    for file, at, data, tensor in _opened(folder, chunks, "rb"):
        found = torch.empty_like(data)
        same = transfer(os.preadv, file, at, found) == len(data) and torch.equal(found, data)
        check(same, f"{file.name}: {tensor} reads back other than it was written (fix: check the disk)")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Say in one line what the file system refused."""
    try:
        yield
    except Exception as error:
        full = getattr(error, "errno", 0) in (errno.ENOSPC, errno.EDQUOT)
        full = full or "(os error 28)" in str(error)  # tokenizers raises a bare Exception
        if not full and not isinstance(error, OSError):
            raise
        what = "no space left" if full else getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: {what} (fix: another --output_dir, or make room)") from None


def is_writer(parameter: torch.Tensor, world: World) -> bool:
    """Of the ranks that hold the same values, the first writes them."""
    if not isinstance(parameter, DTensor):
        return world.rank == 0
    coordinates = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return all(coordinate == 0 for coordinate, placement in coordinates if placement.is_replicate())


def runs(box: torch.Tensor, rows: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a box of a row-major tensor into runs without gaps: (first element, values). Whole rows: one."""
    cut = max((dim for dim in range(len(shape)) if rows[dim] != slice(0, shape[dim])), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in itertools.product(*map(range, box.shape[:cut])):
        at = zip(rows, (*index, 0), strides, strict=False)
        yield sum((row.start + i) * stride for row, i, stride in at), box[index].view(-1)


def _opened(folder: Path, chunks: Iterable[tuple], mode: str) -> Iterator[tuple]:
    """The chunks, with an open file in place of its name. What was written is synced as a file is left."""
    for name, group in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
        with open(folder / name, mode, buffering=0) as file:
            yield from ((file, *rest) for _, *rest in group)
            os.fsync(file)


def transfer(call, file, at: int, data: torch.Tensor) -> int:
    """os.pwritev or os.preadv until all is done, or nothing more comes; the number of bytes."""
    view, done = memoryview(data.numpy()), 0
    while done < len(view) and (moved := call(file.fileno(), [view[done:]], at + done)):
        done += moved
    return done


def create_files(temp: Path, places: dict[str, Place]) -> int:
    """Every file in its full size, and the index where there are several; the bytes of all files."""
    sizes = {place.file: place.end for place in places.values()}  # the last tensor of a file ends it
    check_space(temp, sum(sizes.values()))
    for file, size in sizes.items():
        (temp / file).touch()
        os.truncate(temp / file, size)
    if len(sizes) > 1:
        total = sum(place.end - place.begin for place in places.values())
        weight_map = {name: place.file for name, place in places.items()}
        _write_json(temp / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return sum(sizes.values())


def _write_configs(temp: Path, model, dtypes: list[torch.dtype], eos_ids: Iterable[int], source) -> None:
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    config.dtype = max(filter(lambda dtype: dtype.is_floating_point, dtypes), key=dtypes.count)
    config.to_json_file(temp / "config.json")  # save_pretrained validates, and may refuse: too late now

    # Published sampling settings do not always pass transformers' check on saving: they are kept as they are.
    generation = getattr(model, "generation_config", None)
    generation = json.loads(generation.to_json_string()) if generation else {}
    if source and (Path(source) / "generation_config.json").exists():
        generation = read_json(file_inside(source, "generation_config.json"))
    eos = generation.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [eos]
    generation["eos_token_id"] = [token for token in dict.fromkeys([*eos, *eos_ids]) if token is not None]
    _write_json(temp / "generation_config.json", generation)


def _write_companions(temp: Path, tokenizer, source: Path | None) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(temp)
    for pattern in COMPANIONS if source else ():
        for path in Path(source).glob(pattern):
            if not (temp / path.name).exists():
                shutil.copyfile(file_inside(source, path.name), temp / path.name)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def publish(temp: Path, out: Path) -> None:
    """Put temp in the place of out: never half a folder, and the old one goes when the new one is there."""
    for path in (*temp.iterdir(), temp):
        sync_path(path)
    old = out.with_name(temp.name.replace(".tmp", ".old", 1))
    if out.exists():
        os.rename(out, old)
    os.rename(temp, out)
    sync_path(out.parent)
    remove_siblings(out, ".old")


def sync_path(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def remove_siblings(out: Path, kind: str) -> None:
    """Temporary folders (.tmp) that killed saves left beside `out`; models (.old) that they had set aside."""
    ours = re.compile(re.escape(f"{kind}_{out.name}_") + "[0-9a-f]{8}")
    for path in filter(lambda path: ours.fullmatch(path.name), out.parent.glob(".*")):
        shutil.rmtree(path, ignore_errors=True)
        if kind == ".tmp":
            print(f"removed {path}, which a run that died left behind", flush=True)


def check_replaceable(out: Path, source: Path | None) -> None:
    """A save replaces the whole folder: not the source model's, and none that is not a model's."""
    mine = (os.path.realpath(out), os.path.realpath(out.parent))
    reads = source is not None and os.path.realpath(source) in mine
    check(not reads, f"{source} is the folder that the model is read from (fix: another --output_dir)")
    free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
    model = free or (out / "config.json").exists()
    check(model, f"{out} is no model folder, and a save would replace it (fix: another --output_dir)")


def check_space(folder: Path, needed_bytes: int) -> None:
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    enough = needed_bytes <= free_bytes or disk.f_blocks == 0  # some network file systems do not say
    sizes = f"need {needed_bytes / 2**30:.3f} GiB, have {free_bytes / 2**30:.3f} GiB"
    check(enough, f"no space left: {sizes} at {folder} (fix: another --output_dir, or make room)")
