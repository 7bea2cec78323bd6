"""Tokenized data on the disk: made once on a machine by parallel processes, then mapped by every rank, so
that a gigabyte of text is never in memory.

It is named by a hash of all that it follows from: the bytes of the data, the tokenizer with its template,
the settings, and the code that tokenizes. It appears by a rename when it is complete. A lock lets one
process at a time make it; the others wait for the lock, and in no collective.
"""

import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import tokenizers
import torch
import transformers
from tqdm import tqdm

from .errors import ConfigError, print0
from .hf_format import sync_path
from .rows import MOST_ERRORS
from .workers import encoded

CODE = "batches cache containers data encode formats more_formats more_tokens rows strict_json tokens".split()
ARRAYS = {"ids": torch.int32, "taught": torch.uint8, "bounds": torch.int64, "keys": torch.int64}
ARRAYS |= {"names": torch.uint8, "ends": torch.int64}


class Names:
    """The places of rows, as texts back to back: text i ends before byte ends[i]."""

    def __init__(self, names: torch.Tensor, ends: torch.Tensor):
        self.names, self.ends = names, ends

    def __getitem__(self, i: int) -> str:
        begin = self.ends[i - 1] if i else 0
        return bytes(self.names[begin : self.ends[i]].tolist()).decode("utf-8", "surrogateescape")


def cached_tokens(path: object, files: list, found: Iterable, encode: partial) -> tuple:
    """(ids, taught, bounds, keys, where, dropped, notes) of data.Examples for the rows `found`, mapped from
    the disk. encode: data.encode_rows with its settings. ConfigError for bad rows, of which nothing is kept.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raw_fsdp" / "data"
    folder = cache
    try:
        folder = cache / key_of(path, files, encode.keywords)
        cache.mkdir(parents=True, exist_ok=True)
        if not complete(folder):
            with locked(folder.with_suffix(".lock")):
                if not complete(folder):
                    make(folder, path, found, encode)
    except OSError as error:
        if error.filename in map(str, files):
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        raise ConfigError(f"{folder}: {error.strerror} (fix: XDG_CACHE_HOME=FOLDER, with room)") from None
    print0(f"tokens    of {path} are in {folder}")
    arrays = {name: mapped(folder / name, dtype) for name, dtype in ARRAYS.items()}
    names, said = Names(arrays.pop("names"), arrays.pop("ends")), json.loads((folder / "said").read_text())
    return (*arrays.values(), names, Counter(said["dropped"]), Counter(said["notes"]))


def key_of(path: object, files: list, settings: dict) -> str:
    """The hash of all that the tokens follow from."""
    digest, tokenizer = hashlib.sha256(), settings["tokenizer"]
    for file in [*files, *(Path(__file__).with_name(f"{name}.py") for name in CODE)]:
        with open(file, "rb") as data:
            for block in iter(partial(data.read, 2**20), b""):
                digest.update(block)
    kinds = {name: value for name, value in settings.items() if name != "tokenizer"}
    words = [str(path), kinds, tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
    words += [tokenizer.special_tokens_map, transformers.__version__, tokenizers.__version__]
    digest.update(json.dumps(words, default=str).encode())
    return digest.hexdigest()[:32]


def complete(folder: Path) -> bool:
    """Whether all files are there in the size that they had."""
    try:
        sizes = json.loads((folder / "said").read_text())["sizes"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError):
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock, which ends with this process however it ends."""
    with open(path, "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print0("tokens    another process is making them: waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def make(folder: Path, path: object, found: Iterable, encode: partial) -> None:
    """Write the files of ARRAYS, and "said", what there is to say of the rows; then let them appear."""
    for left in folder.parent.glob(f".tmp_{folder.name}_*"):
        shutil.rmtree(left)  # of a process that died
    temp = folder.with_name(f".tmp_{folder.name}_{secrets.token_hex(4)}")
    temp.mkdir()
    total, end = None, 0
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(temp / name, "wb")) for name in ARRAYS}
            for part in encoded(tqdm(found, f"tokenizing {path}", unit=" rows", disable=None), encode):
                files["ids"].write(part.ids)
                files["taught"].write(part.taught)
                for name in (name.encode("utf-8", "surrogateescape") for name in part.where):
                    end += files["names"].write(name)
                    files["ends"].write(end.to_bytes(8, "little"))
                total = joined(total, part) if total else part
                if len(total.errors) >= MOST_ERRORS:
                    break
            bounds, keys = total.close(path)
            files["bounds"].write(memoryview(bounds.numpy()))
            files["keys"].write(memoryview(keys.numpy()))
        sizes = {name: (temp / name).stat().st_size for name in ARRAYS}
        said = {"sizes": sizes, "dropped": total.dropped, "notes": total.notes}
        (temp / "said").write_text(json.dumps(said))
        for file in (*temp.iterdir(), temp):
            sync_path(file)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been taken
        os.rename(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def joined(total, part):
    """Two data.Parts as one, but for the tokens and places of the second, which are written already."""
    for form, where in part.forms.values():
        try:
            total.take_form(form, where)
        except ValueError as error:
            total.errors.append(f"{where}: {error}")
    total.errors += part.errors
    total.lengths += part.lengths
    total.keys += part.keys
    total.rows += part.rows
    total.dropped.update(part.dropped)
    total.notes.update(part.notes)
    return total


def mapped(file: Path, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(str(file), size=file.stat().st_size // dtype.itemsize, dtype=dtype)
