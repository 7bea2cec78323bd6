"""The Hugging Face folder: names, index.json, each rank writes its own part.

A safetensors file is a short header and then the tensors, row-major, back to back. A shard along dim 0 is therefore one run of
bytes whose place is known before anything is written: rank 0 lays the files out, every rank writes its shards at their offsets,
and no rank ever holds the model. Format: https://huggingface.co/docs/safetensors/index#format
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from .distributed import World, all_reduce_sum, broadcast, host_name, together
from .errors import ConfigError, check
from .model_folder import DTYPES, INDEX, TensorInfo, file_inside, open_weights, read_json

CHUNK_BYTES = 64 * 2**20  # what is cast, or copied from a GPU, at a time
COMPANIONS = (
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "preprocessor_config.json",
    "processor_config.json",
)
GIB = 2**30


@dataclass(frozen=True)
class Piece:
    """One tensor of the checkpoint is the box of the parameter `param` that starts at `at` and has shape `shape`.

    `shape` is info.shape, with leading 1s where the parameter has more dims (one expert of a fused (E, 2I, D) parameter).
    """

    name: str
    info: TensorInfo
    param: str
    at: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the new folder: file name, first byte, dtype."""

    file: str
    at: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Chunk:
    """Bytes (uint8, on the CPU) that belong at byte `at` of a file, and the tensor that they are of."""

    name: str
    file: str
    at: int
    data: torch.Tensor


def local_box(parameter: torch.Tensor, piece: Piece) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """The part of a piece that this rank's shard holds: (where in the local shard, which slice of the piece); None if it is empty.

    A plain tensor counts as one shard, the whole.
    """
    begin, size = (0,) * parameter.ndim, tuple(parameter.shape)
    if isinstance(parameter, DTensor):
        known = all(type(placement) in (Shard, Replicate) for placement in parameter.placements)
        assert known, f"{piece.param}: a shard placed as {parameter.placements} is not a box of the whole"
        size, begin = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    local, rows = [], []
    for shard_begin, shard_size, piece_begin, piece_size in zip(
        begin, size, piece.at, piece.shape, strict=True
    ):
        low, high = max(shard_begin, piece_begin), min(shard_begin + shard_size, piece_begin + piece_size)
        if low >= high:
            return None
        local.append(slice(low - shard_begin, high - shard_begin))
        rows.append(slice(low - piece_begin, high - piece_begin))
    return tuple(local), tuple(rows)


def save_model(
    out: Path,
    model: torch.nn.Module,
    pieces: list[Piece],
    world: World,
    *,
    save_dtype: torch.dtype | None = None,
    tokenizer=None,
    eos_ids: Iterable[int] = (),
    source: Path | None = None,
    max_file_bytes: float = 5e9,
) -> None:
    """Write `out` as a complete Hugging Face folder, every rank its own shards; an older model at `out` is replaced.

    Tensors keep the dtype that they have in the checkpoint; save_dtype overrides it for floating-point ones. `source` is the
    folder the model came from: its generation config, licence and code come along. Everything is written into a temporary folder
    beside `out`, read back and compared with the live shards, and only then renamed. On failure all ranks raise one ConfigError
    and what was at `out` is still there. Host memory: CHUNK_BYTES above the shards. Two runs must not save to one `out` at a time.
    """
    out = Path(os.path.realpath(out))
    headers, places = lay_out(pieces, save_dtype, max_file_bytes)
    temp = out.with_name(f".tmp_{out.name}_{broadcast(world, secrets.token_hex(4))}")
    state = model.state_dict()  # FSDP2 reshards here what forward left gathered
    mine = [piece for piece in pieces if _is_writer(state[piece.param], world)]
    try:
        with together(world), disk_errors(temp):
            if world.rank == 0:
                _check_replaceable(out, source)
                _remove_leftovers(out)
                _create_files(temp, headers, places, pieces)
                _write_companions(temp, model, tokenizer, eos_ids, source, places)
        with together(world), disk_errors(temp):
            written = write_chunks(temp, local_chunks(state, mine, places))
        total = sum(_tensor_bytes(piece, places[piece.name].dtype) for piece in pieces)
        assert all_reduce_sum(written, world) == total, (
            f"this rank wrote {written} bytes of {total}, and not all were written"
        )
        with together(world), disk_errors(temp):
            verify_chunks(temp, local_chunks(state, mine, places))
        with together(world), disk_errors(temp):
            if world.rank == 0:
                _verify_headers(temp, pieces, places)
                _publish(temp, out)
    except BaseException:
        if world.rank == 0:
            shutil.rmtree(temp, ignore_errors=True)
        raise


def check_output_folder(out_dir: Path, source: Path | None, world: World, needed_bytes: int = 0) -> None:
    """Create the run folder `out_dir` (the model goes to out_dir/model) and make sure that a save will succeed there.

    All ranks call it, in the act `plan`. Raises ConfigError on all of them, and leaves nothing behind: it is the source model's
    folder, something is in the way, it cannot be written, there is less space than needed_bytes, or a rank does not see it.
    """
    out_dir = Path(os.path.abspath(out_dir))
    token = broadcast(world, secrets.token_hex(8))
    probe = out_dir / f".probe_{token}"
    created: list[Path] = []
    try:
        with together(world), disk_errors(out_dir):
            if world.rank == 0:
                _check_replaceable(out_dir / "model", source)
                _check_elsewhere(out_dir, source)
                created += [folder for folder in (out_dir, *out_dir.parents) if not os.path.lexists(folder)]
                out_dir.mkdir(parents=True, exist_ok=True)
                probe.write_text(token)  # chmod does not stop root, a read-only mount does: only trying tells
                _check_space(out_dir, needed_bytes)
        with together(world), disk_errors(out_dir):
            seen = probe.exists() and probe.read_text() == token
            where = f"{out_dir} on {host_name()} is not the folder that rank 0 sees"
            check(seen, f"{where} (fix: an --output_dir on a file system that all machines share)")
    except BaseException:
        _remove_probe(probe, created)
        raise
    _remove_probe(probe)


def lay_out(
    pieces: list[Piece], save_dtype: torch.dtype | None, max_file_bytes: float
) -> tuple[dict[str, bytes], dict[str, Place]]:
    """(header of each file by its name, place of each tensor by its name); files are filled in the order of pieces."""
    groups: list[list[tuple[Piece, torch.dtype]]] = [[]]
    room = max_file_bytes
    for piece in pieces:
        dtype = save_dtype if save_dtype and piece.info.dtype.is_floating_point else piece.info.dtype
        if groups[-1] and _tensor_bytes(piece, dtype) > room:
            groups.append([])
            room = max_file_bytes
        groups[-1].append((piece, dtype))
        room -= _tensor_bytes(piece, dtype)
    headers, places = {}, {}
    for number, group in enumerate(groups, 1):
        file = (
            f"model-{number:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        )
        group.sort(key=lambda member: -member[1].itemsize)  # wide dtypes first keeps every tensor aligned
        headers[file] = _header(group)
        at = len(headers[file])
        for piece, dtype in group:
            places[piece.name] = Place(file, at, dtype)
            at += _tensor_bytes(piece, dtype)
    assert len(places) == len(pieces), "two pieces have one name"
    return headers, places


def local_chunks(
    state: dict[str, torch.Tensor], pieces: list[Piece], places: dict[str, Place]
) -> Iterator[Chunk]:
    """This rank's part of the files, cast once to the files' dtype, at most CHUNK_BYTES at a time."""
    for piece in pieces:
        parameter, place = state[piece.param], places[piece.name]
        box = local_box(parameter, piece)
        if box is None:
            continue
        local = (parameter.to_local() if isinstance(parameter, DTensor) else parameter)[box[0]]
        for first, run in _runs(local, box[1], piece.shape):
            for skip, part in zip(itertools.count(0, CHUNK_BYTES // 8), run.split(CHUNK_BYTES // 8)):
                data = part.to(place.dtype).cpu().contiguous().view(torch.uint8)
                yield Chunk(piece.name, place.file, place.at + (first + skip) * place.dtype.itemsize, data)


def write_chunks(folder: Path, chunks: Iterable[Chunk]) -> int:
    """Write chunks at their places and through to the disk; the number of bytes."""
    written = 0
    for name, group in itertools.groupby(chunks, key=lambda chunk: chunk.file):
        with open(folder / name, "r+b", buffering=0) as file:
            for chunk in group:
                written += _transfer(os.pwritev, file.fileno(), chunk.data, chunk.at)
            os.fsync(file.fileno())
    return written


def verify_chunks(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Read chunks back and compare them bit for bit. The files are opened anew: a network file system then asks its server."""
    for name, group in itertools.groupby(chunks, key=lambda chunk: chunk.file):
        with open(folder / name, "rb", buffering=0) as file:
            for chunk in group:
                found = torch.empty_like(chunk.data)
                complete = _transfer(os.preadv, file.fileno(), found, chunk.at) == len(found)
                check(
                    complete and torch.equal(found, chunk.data),
                    f"{folder.parent}: {chunk.name}, read back from {name}, is not what was written (fix: check the disk; "
                    "an older model in its place is untouched)",
                )


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ConfigError(_no_space(path.parent)) from None
        named = error.filename or path
        raise ConfigError(f"{named}: {error.strerror or error} (fix: another --output_dir)") from None
    except Exception as error:
        if "(os error 28)" not in str(error):  # tokenizers raises a bare Exception when the disk is full
            raise
        raise ConfigError(_no_space(path.parent)) from None


def _is_writer(parameter: torch.Tensor, world: World) -> bool:
    """One rank among those that hold the same values: the first along every replicated mesh axis."""
    if not isinstance(parameter, DTensor):
        return world.rank == 0
    coordinate = parameter.device_mesh.get_coordinate()
    return all(
        position == 0
        for position, placement in zip(coordinate, parameter.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def _runs(
    box: torch.Tensor, rows: tuple[slice, ...], shape: tuple[int, ...]
) -> Iterator[tuple[int, torch.Tensor]]:
    """Cut a box of a row-major tensor of `shape` into contiguous runs: (first element, values). Whole rows make one run."""
    cut = max((dim for dim, size in enumerate(shape) if rows[dim] != slice(0, size)), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in itertools.product(*map(range, box.shape[:cut])):
        first = sum((row.start + i) * stride for row, i, stride in zip(rows, (*index, 0), strides))
        yield first, box[index].reshape(-1)


def _transfer(call: Callable, fd: int, data: torch.Tensor, at: int) -> int:
    """os.pwritev or os.preadv until all is done or nothing more comes; the number of bytes."""
    view, done = memoryview(data.numpy()), 0
    while done < len(view):
        moved = call(fd, [view[done:]], at + done)
        if moved == 0:
            break
        done += moved
    return done


def _tensor_bytes(piece: Piece, dtype: torch.dtype) -> int:
    return math.prod(piece.info.shape) * dtype.itemsize


def _header(group: list[tuple[Piece, torch.dtype]]) -> bytes:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    entries: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece, dtype in group:
        begin, end = end, end + _tensor_bytes(piece, dtype)
        shape = list(piece.info.shape)
        entries[piece.name] = {"dtype": codes[dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _create_files(
    temp: Path, headers: dict[str, bytes], places: dict[str, Place], pieces: list[Piece]
) -> None:
    """Every file at its full size, with its header and, so far, zeros."""
    sizes = {file: len(header) for file, header in headers.items()}
    for piece in pieces:
        sizes[places[piece.name].file] += _tensor_bytes(piece, places[piece.name].dtype)
    temp.parent.mkdir(parents=True, exist_ok=True)
    _check_space(temp.parent, sum(sizes.values()))
    temp.mkdir()
    for file, header in headers.items():
        (temp / file).write_bytes(header)
        os.truncate(temp / file, sizes[file])
    if len(headers) > 1:
        total = sum(sizes.values()) - sum(map(len, headers.values()))
        weight_map = {name: place.file for name, place in sorted(places.items())}
        _write_json(temp / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_companions(
    temp: Path,
    model: torch.nn.Module,
    tokenizer,
    eos_ids: Iterable[int],
    source: Path | None,
    places: dict[str, Place],
) -> None:
    """The small files: config, generation config, tokenizer, and what comes along from the source."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard renames the class
    dtypes = [place.dtype for place in places.values() if place.dtype.is_floating_point]
    config.dtype = max(set(dtypes), key=dtypes.count)
    config.to_json_file(
        temp / "config.json"
    )  # save_pretrained would validate, and refuse, after the training

    # The source's text is taken as published: some published sampling settings do not pass transformers' own check on saving.
    published = source and (Path(source) / "generation_config.json").exists()
    if published:
        generation = read_json(file_inside(source, "generation_config.json"))
    else:
        generation = json.loads(model.generation_config.to_json_string()) if model.generation_config else {}
    eos = generation.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [] if eos is None else [eos]
    generation["eos_token_id"] = list(dict.fromkeys([*eos, *eos_ids])) or None
    _write_json(temp / "generation_config.json", generation)

    if tokenizer is not None:
        tokenizer.save_pretrained(temp)
    for pattern in COMPANIONS if source else ():
        for path in Path(source).glob(pattern):
            if path.is_file() and not (temp / path.name).exists():
                shutil.copyfile(file_inside(source, path.name), temp / path.name)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")


def _verify_headers(temp: Path, pieces: list[Piece], places: dict[str, Place]) -> None:
    """Open the result the way a reader will."""
    found = open_weights(temp)
    expected = {
        piece.name: TensorInfo(temp / places[piece.name].file, places[piece.name].dtype, piece.info.shape)
        for piece in pieces
    }
    assert found == expected, f"the headers in {temp} are not those that were laid out"


def _publish(temp: Path, out: Path) -> None:
    """Put temp in place of out. At no instant is there a half folder at `out`; the old one goes when the new one is there."""
    for path in [*temp.iterdir(), temp]:
        _sync(path)
    old = out.with_name(temp.name.replace(".tmp_", ".old_", 1))
    replaces = out.exists()
    if replaces:
        os.rename(out, old)
    try:
        os.rename(temp, out)
    except OSError:
        if replaces:
            os.rename(old, out)
        raise
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _remove_leftovers(out: Path) -> None:
    """What a killed save left beside `out`; an old model that was set aside and not yet replaced goes back."""
    ours = re.compile(rf"\.(tmp|old)_{re.escape(out.name)}_[0-9a-f]{{8}}")
    for path in sorted(out.parent.iterdir()) if out.parent.is_dir() else ():
        if not ours.fullmatch(path.name):
            continue
        if path.name.startswith(".old_") and not out.exists():
            os.rename(path, out)
            print(f"{path}, set aside by a run that died, is back at {out}", flush=True)
        else:
            shutil.rmtree(path)
            print(f"removed {path}, left by a run that died", flush=True)


def _check_replaceable(out: Path, source: Path | None) -> None:
    """A save replaces the whole folder: not the source model's, and none that is not a model's."""
    _check_elsewhere(out, source)
    model = (
        not os.path.lexists(out)
        or (out / "config.json").exists()
        or (out.is_dir() and not any(out.iterdir()))
    )
    check(
        model,
        f"{out} is in the way: it is not a model folder, and a save would replace it (fix: another --output_dir)",
    )


def _check_elsewhere(out: Path, source: Path | None) -> None:
    same = source is not None and os.path.realpath(out) == os.path.realpath(source)
    check(not same, f"{out} is the folder that the model is read from (fix: another --output_dir)")


def _check_space(folder: Path, needed_bytes: int) -> None:
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    unknown = disk.f_blocks == 0  # some network file systems do not say
    check(
        unknown or needed_bytes <= free,
        f"{_no_space(folder)}: need {needed_bytes / GIB:.3f} GiB, have {free / GIB:.3f} GiB",
    )


def _no_space(folder: Path) -> str:
    return f"no space left at {folder}"


def _remove_probe(probe: Path, created: Iterable[Path] = ()) -> None:
    """Every rank tries: rank 0 may be the one that failed."""
    with suppress(OSError):
        probe.unlink(missing_ok=True)
        for folder in created:
            folder.rmdir()
