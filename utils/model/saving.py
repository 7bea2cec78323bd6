"""The Hugging Face folder: names, index.json, each rank writes its own part.

A safetensors file is a short header and then the tensors, row-major, back to back. A shard along dim 0 is
thus one run of bytes whose place is known before anything is written: rank 0 lays the files out, every rank
writes its shards at their offsets, and no rank ever holds the model.
Format: https://huggingface.co/docs/safetensors/index#format
"""

import copy
import itertools
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch

from ..run.distributed import World, all_reduce_sum, broadcast, together
from ..run.errors import check
from ..run.files import check_replaceable, disk_errors, file_inside, publish, remove_siblings
from ..run.folder import check_space
from .folder import INDEX, read_json
from .pieces import Piece, Place, is_writer, lay_out, local, local_box, runs, transfer

# Files beside the weights that a save takes along.
COMPANIONS = (
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "*processor_config.json",
    "chat_template.json",  # of processors, before chat_template.jinja
)

CHUNK = 2**23  # elements (16 to 64 MiB) that are cast, or copied from a GPU, at a time
# (name of the file, first byte, the bytes as uint8, name of the tensor)
Chunk = tuple[str, int, torch.Tensor, str]


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
    """Write `out` as a complete Hugging Face folder in place of an older model; every rank writes its shards.

    Tensors keep the dtype that they have in the checkpoint; save_dtype overrides it for floating-point ones.
    `source` is the folder the model came from: its generation config, licence and code are copied. All is
    written into a temporary folder beside `out`, read back, compared with the live shards, and then renamed.
    On failure all ranks raise one ConfigError, and an older model is still there. Host memory above the
    shards: a few chunks. One run at a time may save to `out`.
    """
    # Links in the parent are followed; `out` itself is replaced, even where it is a link.
    out = Path(os.path.realpath(out.parent)) / out.name
    places, headers = lay_out(pieces, save_dtype, max_file_bytes)
    # FSDP2 shards parameters again here, where forward left them gathered.
    state = model.state_dict()
    own_pieces = [piece for piece in pieces if is_writer(state[piece.param], world)]
    # Sorted, so that each file is opened and synced once.
    own_pieces.sort(key=lambda piece: places[piece.name].file)

    def prepare(temp: Path, rank: int) -> int:
        if rank:
            return 0
        check_replaceable(out, source)
        dtypes = [place.dtype for place in places.values()]
        _write_configs(temp, model, dtypes, eos_ids, source)
        _write_companions(temp, tokenizer, source)
        return create_files(temp, places)

    def chunks() -> Iterator[Chunk]:
        return local_chunks(state, own_pieces, places, headers, world)

    save_folder(out, world, prepare, chunks)


def save_folder(
    out: Path,
    world: World,
    prepare: Callable[[Path, int], int],
    chunks: Callable[[], Iterable[Chunk]],
    finish: Callable[[Path], object] = lambda _: None,
) -> None:
    """Write `out` in place of an older folder: complete or not at all.

    Rank 0 makes a temporary folder beside it. All ranks call `prepare(temp, rank)`, which makes the files in
    their full size; rank 0 returns how many bytes will be written (0: not known). Every rank writes its
    `chunks()` (see local_chunks), reads them back and compares. Rank 0 calls `finish(temp)` and renames the
    folder. On failure all ranks raise one ConfigError, and an older folder is still there.
    """
    unique = broadcast(world, secrets.token_hex(4))
    temp = out.with_name(f".tmp_{out.name}_{unique}")
    try:
        with together(world), disk_errors(out):
            if world.rank == 0:
                remove_siblings(out, ".tmp")
                temp.mkdir(parents=True)
        with together(world), disk_errors(out):
            expected_bytes = prepare(temp, world.rank)
        with together(world), disk_errors(out):
            written_bytes = write_chunks(temp, chunks())
        written_bytes = all_reduce_sum(written_bytes, world)
        complete = not expected_bytes or expected_bytes == written_bytes
        assert complete, f"{written_bytes} bytes were written of {expected_bytes}"
        with together(world), disk_errors(out):
            verify_chunks(temp, chunks())
        with together(world), disk_errors(out):
            if world.rank == 0:
                finish(temp)
                publish(temp, out)
    finally:
        if world.rank == 0:
            shutil.rmtree(temp, ignore_errors=True)


def local_chunks(
    state: dict[str, torch.Tensor],
    pieces: list[Piece],
    places: dict[str, Place],
    headers: dict[str, bytes],
    world: World,
) -> Iterator[Chunk]:
    """This rank's part of the files, converted to the dtypes of their places; on rank 0 also the headers."""
    if world.rank == 0:
        for file, header in headers.items():
            data = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            yield file, 0, data, "the header"
    for piece in pieces:
        parameter = state[piece.param]
        place = places[piece.name]
        boxes = local_box(parameter, piece)
        if boxes is None:
            continue
        in_shard, in_piece = boxes
        box = local(parameter)[in_shard]
        if piece.transposed:
            box, in_piece = box.mT.contiguous(), (in_piece[0], in_piece[2], in_piece[1])
        for first, values in runs(
            box, in_piece, piece.info.shape if piece.transposed else piece.shape
        ):
            for start in range(0, len(values), CHUNK):
                part = values[start : start + CHUNK].to(place.dtype)
                data = part.cpu().contiguous().view(torch.uint8)
                at = place.begin + (first + start) * place.dtype.itemsize
                yield place.file, at, data, piece.name


def write_chunks(folder: Path, chunks: Iterable[Chunk]) -> int:
    """Write chunks at their places, through to the disk; the number of bytes."""
    written_bytes = 0
    for file, at, data, _ in _opened(folder, chunks, "r+b"):
        written_bytes += transfer(os.pwritev, file, at, data)
    return written_bytes


def verify_chunks(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Compare chunks with the disk, bit for bit. Files are opened anew: a network file system looks again."""
    for file, at, data, tensor in _opened(folder, chunks, "rb"):
        found = torch.empty_like(data)
        found_bytes = transfer(os.preadv, file, at, found)
        same = found_bytes == len(data) and torch.equal(found, data)
        changed = f"{tensor} reads back other than it was written"
        check(same, f"{file.name}: {changed} (fix: check the disk)")


def _opened(folder: Path, chunks: Iterable[Chunk], mode: str) -> Iterator[tuple]:
    """The chunks, with an open file in place of its name. What was written is synced as a file is left."""
    for name, group in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
        with open(folder / name, mode, buffering=0) as file:
            for _, at, data, tensor in group:
                yield file, at, data, tensor
            os.fsync(file)


def create_files(temp: Path, places: dict[str, Place]) -> int:
    """Every file in its full size, and the index where there are several; the bytes of all files."""
    # The last tensor of a file ends it.
    file_bytes = {place.file: place.end for place in places.values()}
    total_bytes = sum(file_bytes.values())
    check_space(temp, total_bytes)
    for file, size in file_bytes.items():
        (temp / file).touch()
        os.truncate(temp / file, size)
    if len(file_bytes) > 1:
        tensor_bytes = sum(place.end - place.begin for place in places.values())
        index = {
            "metadata": {"total_size": tensor_bytes},
            "weight_map": {name: place.file for name, place in places.items()},
        }
        _write_json(temp / INDEX, index)
    return total_bytes


def _write_configs(
    temp: Path,
    model: torch.nn.Module,
    dtypes: list[torch.dtype],
    eos_ids: Iterable[int],
    source: Path | None,
) -> None:
    config = copy.deepcopy(model.config)
    # fully_shard renames the class.
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    floating = [dtype for dtype in dtypes if dtype.is_floating_point]
    config.dtype = max(floating, key=dtypes.count)  # the most frequent one
    # Not save_pretrained, which validates the config and may refuse it, after the training.
    config.to_json_file(temp / "config.json")

    generation = _generation_config(model, source)
    model_eos = generation.get("eos_token_id")
    if not isinstance(model_eos, list):
        model_eos = [model_eos]
    distinct = dict.fromkeys([*model_eos, *eos_ids])
    generation["eos_token_id"] = [token for token in distinct if token is not None]
    _write_json(temp / "generation_config.json", generation)


def _generation_config(model: torch.nn.Module, source: Path | None) -> dict:
    """That of the source as it is: published sampling settings do not always pass transformers' check on
    saving. Else the model's own.
    """
    if source and (Path(source) / "generation_config.json").exists():
        return read_json(file_inside(source, "generation_config.json"))
    generation = getattr(model, "generation_config", None)
    return json.loads(generation.to_json_string()) if generation else {}


def _write_companions(temp: Path, tokenizer, source: Path | None) -> None:
    """The tokenizer, and those files of the source that belong to the model."""
    if tokenizer is not None:
        tokenizer.save_pretrained(temp)
    if not source:
        return
    for pattern in COMPANIONS:
        for path in Path(source).glob(pattern):
            target = temp / path.name
            if not target.exists():
                shutil.copyfile(file_inside(source, path.name), target)


def _write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
