"""Write a Hugging Face folder: each rank writes its own part of the final files.

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
import statistics
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PretrainedConfig

from ..run.distributed import World, all_reduce_sum, broadcast, together
from ..run.errors import ConfigError, check
from ..run.files import check_replaceable, disk_errors, file_inside, publish, remove_siblings
from ..run.folder import check_space
from .folder import INDEX, read_json
from .loading import Piece, Place, is_writer, lay_out, local_parts, transfer

# Files beside the weights that a save copies from the source. chat_template.json: of older processors.
COMPANIONS = """*.py LICENSE* NOTICE* USE_POLICY* *processor_config.json
    chat_template.json""".split()

GENERATION = "generation_config.json"
# Fields of a config that a run may change.
CHANGED = "architectures dtype id2label label2id bos_token_id eos_token_id pad_token_id".split()
CHUNK = 2**23  # elements (16 to 64 MiB) that are cast, or copied from a GPU, at a time
# (name of the file, first byte, the bytes as uint8, name of the tensor)
Chunk = tuple[str, int, Tensor, str]
Part = tuple[int, Tensor]  # (first element, values) of a tensor as it is stored


def save_model(
    out: Path,
    model: torch.nn.Module,
    pieces: list[Piece],
    world: World,
    *,
    source: Path,
    save_dtype: torch.dtype | None = None,
    tokenizer=None,
    eos_ids: Iterable[int] = (),
) -> None:
    """Write `out` as a complete Hugging Face folder in place of an older model; every rank writes its shards.

    Tensors keep the dtype that they have in the checkpoint; save_dtype overrides it for floating-point ones.
    `source` is the folder the model came from: its generation config, licence and code are copied; what is no
    regular file inside it, or damaged, is left out, for a save comes after hours of training. All is
    written into a temporary folder beside `out`, read back, compared with the live shards, and then renamed.
    On failure all ranks raise one ConfigError, and an older model is still there. Host memory above the
    shards: a few chunks. One run at a time may save to `out`.
    """
    # state_dict() also reshards parameters that a forward left gathered.
    state = model.state_dict()

    def prepare(temp):
        check_replaceable(out, source)
        for pattern in COMPANIONS:
            for path in source.glob(pattern):
                with suppress(ConfigError):  # a folder, or it leads out of this one
                    shutil.copyfile(file_inside(source, path.name), temp / path.name)
        config = copy.deepcopy(model.config)
        # fully_shard renames the class.
        config.architectures = [type(model).__name__.removeprefix("FSDP")]
        # AutoModelForCausalLM may load the text part alone, which has a dtype of its own.
        config.get_text_config().dtype = config.dtype = save_dtype or statistics.mode(
            p.info.dtype for p in pieces if p.info.dtype.is_floating_point
        )
        write_config(config, source, temp / "config.json")
        write_json(temp / GENERATION, generation_config(model, source, eos_ids))
        save_tokenizer(tokenizer, temp)

    parts = partial(written_parts, state, world)
    save_folder(out, world, pieces, parts, prepare, lay_out(pieces, save_dtype))


def save_folder(
    out: Path,
    world: World,
    pieces: list[Piece],
    parts: Callable,
    prepare: Callable,
    layout: tuple,
) -> None:
    """Write `out` in place of an older folder: complete or not at all.

    Rank 0 makes a temporary folder beside it, calls `prepare(temp)`, which writes all files without tensors,
    and makes the files of `layout` (see lay_out) in their full size. Every rank writes its `parts(piece)` of
    each piece, reads them back and compares. Rank 0 renames the folder. On failure all ranks raise one
    ConfigError, and an older folder is still there.
    """
    # Links in the parent are followed; `out` itself is replaced, even where it is a link.
    out = out.parent.resolve() / out.name
    unique = broadcast(secrets.token_hex(4), world)
    temp = out.with_name(f".tmp_{out.name}_{unique}")
    places, headers = layout

    def chunks():
        """This rank's part of the files, converted to the dtypes of their places, file by file."""
        for file, header in headers.items() if world.rank == 0 else ():
            yield file, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8), "the header"
        for piece in sorted(pieces, key=lambda piece: places[piece.name].file):
            place = places[piece.name]
            for first, values in parts(piece):
                data = values.to(place.dtype).cpu().contiguous().view(torch.uint8)
                yield place.file, place.begin + first * place.dtype.itemsize, data, piece.name

    try:
        with together(world), disk_errors(out):
            if world.rank == 0:
                remove_siblings(out, ".tmp")
                temp.mkdir(parents=True)
                prepare(temp)
                expected_bytes = create_files(temp, places)
        # Of the copies of HSDP only one writes, and the others wait for it.
        with together(world, patient=True), disk_errors(out):
            written_bytes = write_chunks(temp, chunks())
        written_bytes = all_reduce_sum(written_bytes, world)
        assert world.rank or expected_bytes == written_bytes, (
            f"{written_bytes} bytes were written of {expected_bytes}"
        )
        with together(world, patient=True), disk_errors(out):
            verify_chunks(temp, chunks())
        with together(world), disk_errors(out):
            if world.rank == 0:
                publish(temp, out)
    finally:
        if world.rank == 0:
            shutil.rmtree(temp, ignore_errors=True)


def written_parts(state: dict[str, Tensor], world: World, piece: Piece) -> Iterator[Part]:
    """The parts of a piece that this rank writes."""
    parameter = state[piece.param]
    if is_writer(parameter, world):
        yield from local_parts(parameter, piece, CHUNK)


def write_chunks(folder: Path, chunks: Iterable[Chunk]) -> int:
    """Write chunks at their places and sync them to the disk. Returns the number of bytes."""
    opened = _opened(folder, chunks, "wb")
    return sum(transfer(os.pwritev, file, at, data) for file, at, data, _ in opened)


def verify_chunks(folder: Path, chunks: Iterable[Chunk]) -> None:
    """Compare chunks with the disk, bit for bit. Files are opened again, so that a network file
    system reads anew.
    """
    for file, at, data, tensor in _opened(folder, chunks, "rb"):
        found = torch.empty_like(data)
        check(
            transfer(os.preadv, file, at, found) == len(data) and torch.equal(found, data),
            f"{file.name}: {tensor} reads back other than it was written (fix: check the disk)",
        )


def _opened(folder, chunks, mode):
    """The chunks, with an open file in place of its name. Each file is synced before it is closed.

    A file is not open for reading and writing at once: NFS would then write whole pages, with old bytes
    where another machine writes.
    """
    for name, group in itertools.groupby(chunks, key=lambda chunk: chunk[0]):
        with open(
            folder / name,
            mode,
            buffering=0,
            opener=lambda path, flags: os.open(path, flags & ~os.O_TRUNC),
        ) as file:
            for _, at, data, tensor in group:
                yield file, at, data, tensor
            os.fsync(file)


def create_files(temp: Path, places: dict[str, Place]) -> int:
    """Create every file in its full size, and the index if there are several. Returns the
    bytes of all files.
    """
    # A file ends with its last tensor.
    file_bytes = {place.file: place.end for place in places.values()}
    total_bytes = sum(file_bytes.values())
    check_space(temp, total_bytes)
    for file, size in file_bytes.items():
        (temp / file).touch()
        os.truncate(temp / file, size)
    if len(file_bytes) > 1:
        write_json(
            temp / INDEX,
            {
                "metadata": {"total_size": sum(p.end - p.begin for p in places.values())},
                "weight_map": {name: place.file for name, place in places.items()},
            },
        )
    return total_bytes


def write_config(config: PretrainedConfig, source: Path, file: Path) -> None:
    """Write a config: that of the source (a folder, or the file of a shape), if there is one, with new values
    of the fields in CHANGED.

    transformers 5 itself writes rope_parameters. transformers 4, and what builds on it, would silently take
    default values for them: https://github.com/vllm-project/vllm/pull/42624
    """
    # Not save_pretrained, which validates the config and may refuse it, after the training.
    config.to_json_file(file)
    written = read_json(file)
    path = source if source.is_file() else source / file.name
    stored = read_json(path) if path.exists() else {}
    # `config` may be the text part of the stored config.
    for part in (stored, stored.get("text_config", {})):
        if part.get("model_type") == config.model_type:
            texts = (part.get("text_config"), written.get("text_config"))
            for old, new in ((part, written), texts):
                if old and new:
                    old.update((name, new[name]) for name in CHANGED if name in new)
            write_json(file, part)


def generation_config(model: torch.nn.Module, source: Path, eos_ids: Iterable[int]) -> dict:
    """The generation config of the source as it is, because published sampling settings do not always pass
    transformers' check on saving. Without one, the model's own. In it `eos_ids` also end an answer.
    """
    settings = {}
    if generation := getattr(model, "generation_config", None):
        settings = json.loads(generation.to_json_string())
    with suppress(ConfigError):  # missing, or damaged: transformers ignores it too
        settings = read_json(file_inside(source, GENERATION))
    ids = settings.get("eos_token_id")
    if not isinstance(ids, list):
        ids = [ids]
    return settings | {"eos_token_id": sorted({*ids, *eos_ids} - {None}) or None}


def save_tokenizer(tokenizer, folder: Path, **changes: str) -> None:
    """Save a tokenizer, if there is one, with the chat template that the model was trained in, if any.
    changes: of its settings.

    Its own files are copied: transformers 4, and what builds on it, cannot read those that transformers 5
    writes (https://github.com/hiyouga/LlamaFactory/issues/10310).
    """
    if not tokenizer:
        return
    if not getattr(tokenizer, "template_name", True):  # no row has used its stand-in
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    for path in Path(tokenizer.name_or_path).glob("tokenizer*"):
        with suppress(ConfigError):  # it leads out of the folder
            shutil.copyfile(file_inside(path.parent, path.name), folder / path.name)
    file = folder / "tokenizer_config.json"
    # reward.py may change the pad token
    settings = read_json(file) | changes | {"pad_token": tokenizer.pad_token}
    if isinstance(tokenizer.chat_template, str):  # it may be several by name
        settings["chat_template"] = tokenizer.chat_template
        # a processor would read it, before chat_template.jinja
        (folder / "chat_template.json").unlink(missing_ok=True)
    write_json(file, settings)


def write_json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
