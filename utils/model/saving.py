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

from ..run.disk import check_replaceable, check_space, disk_errors, publish, remove_siblings
from ..run.distributed import World, all_reduce_sum, broadcast, together
from ..run.errors import check
from ..run.files import file_inside
from .folder import COMPANIONS, INDEX, read_json
from .pieces import Piece, Place, is_writer, lay_out, local, local_box, runs, transfer

CHUNK = 2**23  # elements (16 to 64 MiB) that are cast, or copied from a GPU, at a time


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
    out = Path(os.path.realpath(out.parent)) / out.name  # not what a link there means
    places, headers = lay_out(pieces, save_dtype, max_file_bytes)
    # where forward left parameters gathered, FSDP2 shards them again here
    state = model.state_dict()
    mine = [piece for piece in pieces if is_writer(state[piece.param], world)]
    # so that each file is opened and synced once
    mine.sort(key=lambda piece: places[piece.name].file)

    def prepare(temp: Path, rank: int) -> int:
        if rank:
            return 0
        check_replaceable(out, source)
        _write_configs(temp, model, [place.dtype for place in places.values()], eos_ids, source)
        _write_companions(temp, tokenizer, source)
        return create_files(temp, places)

    save_folder(out, world, prepare, lambda: local_chunks(state, mine, places, headers, world))


def save_folder(
    out: Path, world: World, prepare: Callable, chunks: Callable, finish=lambda _: None
) -> None:
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


def local_chunks(
    state, pieces: list[Piece], places: dict, headers: dict, world: World
) -> Iterator[tuple]:
    """This rank's part of the files as (file, first byte, bytes as uint8, name of the tensor), cast once; on
    rank 0 also the headers.
    """
    for file, header in headers.items() if world.rank == 0 else ():
        yield file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8), "the header"
    for piece in pieces:
        parameter, place = state[piece.param], places[piece.name]
        if box := local_box(parameter, piece):
            for first, values in runs(local(parameter)[box[0]], box[1], piece.shape):
                for i in range(0, len(values), CHUNK):
                    data = (
                        values[i : i + CHUNK].to(place.dtype).cpu().contiguous().view(torch.uint8)
                    )
                    yield (
                        place.file,
                        place.begin + (first + i) * place.dtype.itemsize,
                        data,
                        piece.name,
                    )


def write_chunks(folder: Path, chunks: Iterable[tuple]) -> int:
    """Write chunks at their places, through to the disk; the number of bytes."""
    return sum(
        transfer(os.pwritev, file, at, data) for file, at, data, _ in _opened(folder, chunks, "r+b")
    )


def verify_chunks(folder: Path, chunks: Iterable[tuple]) -> None:
    """Compare chunks with the disk, bit for bit. Files are opened anew: a network file system looks again."""
    for file, at, data, tensor in _opened(folder, chunks, "rb"):
        found = torch.empty_like(data)
        same = transfer(os.preadv, file, at, found) == len(data) and torch.equal(found, data)
        check(
            same,
            f"{file.name}: {tensor} reads back other than it was written (fix: check the disk)",
        )


def _opened(folder: Path, chunks: Iterable[tuple], mode: str) -> Iterator[tuple]:
    """The chunks, with an open file in place of its name. What was written is synced as a file is left."""
    for name, group in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
        with open(folder / name, mode, buffering=0) as file:
            yield from ((file, *rest) for _, *rest in group)
            os.fsync(file)


def create_files(temp: Path, places: dict[str, Place]) -> int:
    """Every file in its full size, and the index where there are several; the bytes of all files."""
    # the last tensor of a file ends it
    sizes = {place.file: place.end for place in places.values()}
    check_space(temp, sum(sizes.values()))
    for file, size in sizes.items():
        (temp / file).touch()
        os.truncate(temp / file, size)
    if len(sizes) > 1:
        total = sum(place.end - place.begin for place in places.values())
        weight_map = {name: place.file for name, place in places.items()}
        _write_json(temp / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return sum(sizes.values())


def _write_configs(
    temp: Path, model, dtypes: list[torch.dtype], eos_ids: Iterable[int], source
) -> None:
    config = copy.deepcopy(model.config)
    # fully_shard renames the class
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.dtype = max(filter(lambda dtype: dtype.is_floating_point, dtypes), key=dtypes.count)
    # save_pretrained validates, and may refuse: too late now
    config.to_json_file(temp / "config.json")

    # Published sampling settings do not always pass transformers' check on saving: they are kept as they are.
    generation = getattr(model, "generation_config", None)
    generation = json.loads(generation.to_json_string()) if generation else {}
    if source and (Path(source) / "generation_config.json").exists():
        generation = read_json(file_inside(source, "generation_config.json"))
    eos = generation.get("eos_token_id")
    eos = eos if isinstance(eos, list) else [eos]
    generation["eos_token_id"] = [
        token for token in dict.fromkeys([*eos, *eos_ids]) if token is not None
    ]
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
