"""Tokenized data, as arrays: of much data on the disk, made once on a machine by parallel processes, then
mapped by every rank, so that a gigabyte of text is never in memory.

There it is named by a hash of all that it follows from: the bytes of the data, the tokenizer with its
template, the settings, and the code that tokenizes. It appears by a rename when it is complete. A lock lets
one process at a time make it; the others wait for the lock, and in no collective.
"""

import fcntl
import hashlib
import io
import json
import math
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import tokenizers
import torch
import transformers
from tqdm import tqdm

from ..run.errors import ConfigError, check, print0
from ..run.files import sync_path
from .encode import Part, Rows, chunks, processes
from .rows import Source

ARRAYS = {"ids": torch.int32, "loss_mask": torch.uint8, "bounds": torch.int64, "keys": torch.int64}
ARRAYS |= {"trained_tokens": torch.int64, "names": torch.uint8, "ends": torch.int64}
MORE_ROWS = 100_000  # rows that are read after the first fault, to find others


class Names:
    """The places of rows, as texts back to back: text i ends before byte ends[i]."""

    def __init__(self, names: torch.Tensor, ends: torch.Tensor):
        self.names, self.ends = names, ends

    def __getitem__(self, i: int) -> str:
        begin = self.ends[i - 1] if i else 0
        return bytes(self.names[begin : self.ends[i]].tolist()).decode("utf-8", "surrogateescape")


def tokens_in_memory(sources: list[Source], encode: partial, bar: tqdm) -> tuple[dict, dict]:
    """(the arrays of examples.Examples for the rows of some sources; what there is to say of them). encode:
    encode_rows with its settings. ConfigError for bad rows.
    """

    def run(numbered: Iterable) -> Iterator[tuple[int, Part]]:
        return ((number, encode(rows)) for number, rows in numbered)

    files = {name: io.BytesIO() for name in ARRAYS}
    said = write(files, sources, encode.keywords["rows"], run, bar)

    def array(name: str, dtype: torch.dtype) -> torch.Tensor:
        return torch.frombuffer(files[name].getbuffer(), dtype=dtype)

    return arrays_of(array), said


def cached_tokens(sources: list[Source], encode: partial, bar: tqdm) -> tuple[dict, dict]:
    """As tokens_in_memory, but mapped from the disk. Of data with bad rows nothing is kept."""
    files = [file for source in sources for file in source.files]
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a name
        raise ConfigError(f"no folder for tokens: {error} (fix: XDG_CACHE_HOME=FOLDER)") from None
    folder = home / "raw_fsdp" / "data"
    try:
        before = states_of(sources)
        folder /= key_of(files, **encode.keywords)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not folder.exists():
                make(folder, sources, encode, bar, before)
    except OSError as error:
        if str(error.filename) in map(str, files):
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        raise ConfigError(
            f"{folder}: {error.strerror} (fix: XDG_CACHE_HOME=FOLDER, with room)"
        ) from None
    print0(f"tokens    are in {folder}")

    def mapped(name: str, dtype: torch.dtype) -> torch.Tensor:
        file = folder / name
        return torch.from_file(str(file), size=file.stat().st_size // dtype.itemsize, dtype=dtype)

    return arrays_of(mapped), json.loads((folder / "said").read_text())


def arrays_of(array: Callable[[str, torch.dtype], torch.Tensor]) -> dict:
    """The arrays as Examples has them."""
    arrays = {name: array(name, dtype) for name, dtype in ARRAYS.items()}
    where = Names(arrays.pop("names"), arrays.pop("ends"))
    return arrays | {"where": where}


def write(
    files: dict[str, BinaryIO], sources: list[Source], rows: Rows, run: Callable, bar: tqdm
) -> dict:
    """Write the files of ARRAYS. Returns the fields of Examples that say something of the rows.

    run: tokenizes (number of a source, some rows), see encode.processes. ConfigError for bad rows.
    """
    total = Part()
    ends = [0] * len(sources)
    forms = [Counter() for _ in sources]
    names_end = 0
    last_row = math.inf
    numbered = (
        (number, found)
        for number, source in enumerate(sources)
        for found in chunks(islice(source.read(), rows.max_rows or None))
    )
    for number, part in run(numbered):
        total.join(part)
        files["ids"].write(part.ids)
        files["loss_mask"].write(part.loss_mask)
        for where in part.where:
            names_end += files["names"].write(where.encode("utf-8", "surrogateescape"))
            files["ends"].write(names_end.to_bytes(8, "little"))
        forms[number].update(part.forms)
        ends[number] = len(total.lengths)
        bar.update(part.rows)
        if total.bad and rows.bad_rows == "error":
            last_row = min(last_row, total.rows + MORE_ROWS)
        if total.rows >= last_row:
            break
    total.close(rows)
    bounds = torch.tensor([0, *total.lengths]).cumsum(0)
    files["bounds"].write(memoryview(bounds.numpy()))
    files["trained_tokens"].write(total.trained_tokens)
    files["keys"].write(total.keys)
    said = {name: getattr(total, name) for name in ("dropped", "notes", "firsts", "problem", "bad")}
    said["origins"] = [
        (source.name, source.weight, form, first, last)
        for source, form, first, last in zip(sources, forms, [0, *ends], ends, strict=False)
    ]
    return said


def states_of(sources: list[Source]) -> list[tuple]:
    """What changes with a file that is written or replaced."""
    found = [file.stat() for source in sources for file in source.files]
    return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in found]


def key_of(files: list[Path], tokenizer, rows: Rows) -> str:
    """The hash of all that the tokens follow from."""
    digest = hashlib.sha256()
    for path in [*files, *sorted(Path(__file__).parent.glob("*.py"))]:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    words = [rows, tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    words += [tokenizer.special_tokens_map, transformers.__version__, tokenizers.__version__]
    digest.update(json.dumps(words, default=str).encode())
    return digest.hexdigest()[:32]


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with this process however it ends."""
    with open(folder.with_suffix(".lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print0("tokens    another process is making them: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(folder: Path, sources: list[Source], encode: partial, bar: tqdm, before: list) -> None:
    """Write the files of ARRAYS, and "said", what there is to say of the rows; then let them appear, if
    the data is still as `before`, see states_of.
    """
    for left in folder.parent.glob(f".tmp_{folder.name}_*"):
        shutil.rmtree(left)  # of a process that died
    temp = folder.with_name(f".tmp_{folder.name}_{secrets.token_hex(4)}")
    temp.mkdir()
    print0(f"tokens    are made, once on this machine, in {folder}")
    try:
        rows = encode.keywords["rows"]
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(temp / name, "wb")) for name in ARRAYS}
            run = stack.enter_context(processes(encode))
            said = write(files, sources, rows, run, bar)
        (temp / "said").write_text(json.dumps(said))
        for file in (*temp.iterdir(), temp):
            sync_path(file)
        check(
            states_of(sources) == before,
            f"{rows.dataset}: its files were changed while they were read (fix: run again)",
        )
        os.rename(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)
