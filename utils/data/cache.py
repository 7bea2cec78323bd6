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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import tokenizers
import torch
import transformers

from ..run.errors import ConfigError, check, print0
from ..run.files import sync_path
from .encode import Part, processes
from .rows import Source

ARRAYS = {"ids": torch.int32, "loss_mask": torch.uint8, "bounds": torch.int64, "keys": torch.int64}
ARRAYS |= {"trained_tokens": torch.int64, "names": torch.uint8, "ends": torch.int64}


class Names:
    """The places of rows, as texts back to back: text i ends before byte ends[i]."""

    def __init__(self, names: torch.Tensor, ends: torch.Tensor):
        self.names, self.ends = names, ends

    def __getitem__(self, i: int) -> str:
        begin = self.ends[i - 1] if i else 0
        return bytes(self.names[begin : self.ends[i]].tolist()).decode("utf-8", "surrogateescape")


def cached_tokens(sources: list[Source], encode: partial, gather: Callable) -> tuple[dict, dict]:
    """(the arrays of examples.Examples for the rows of some sources, mapped from the disk; what there is to
    say of them). encode: encode_rows with its settings; gather: as examples.gather. ConfigError for bad rows,
    of which nothing is kept.
    """
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # a user without a name
        raise ConfigError(f"no folder for tokens: {error} (fix: XDG_CACHE_HOME=FOLDER)") from None
    folder = home / "raw_fsdp" / "data"
    files = [file for source in sources for file in source.files]
    try:
        before = states_of(files)
        folder /= key_of([source.name for source in sources], files, encode.keywords)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder):
            if not folder.exists():
                make(folder, encode, gather, lambda: check_unchanged(files, before))
    except OSError as error:
        if error.filename in map(str, files):
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        raise ConfigError(
            f"{folder}: {error.strerror} (fix: XDG_CACHE_HOME=FOLDER, with room)"
        ) from None
    print0(f"tokens    are in {folder}")
    arrays = {name: mapped(folder / name, dtype) for name, dtype in ARRAYS.items()}
    arrays["where"] = Names(arrays.pop("names"), arrays.pop("ends"))
    return arrays, json.loads((folder / "said").read_text())


def states_of(files: list[Path]) -> list[tuple]:
    """What changes with a file that is written or replaced."""
    found = [file.stat() for file in files]
    return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in found]


def check_unchanged(files: list[Path], before: list[tuple]) -> None:
    for file, old, new in zip(files, before, states_of(files), strict=True):
        check(old == new, f"{file}: it was changed while it was read (fix: run again)")


def key_of(names: object, files: list, settings: dict) -> str:
    """The hash of all that the tokens follow from."""
    digest, tokenizer = hashlib.sha256(), settings["tokenizer"]
    for path in [*files, *sorted(Path(__file__).parent.glob("*.py"))]:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    kinds = {name: value for name, value in settings.items() if name != "tokenizer"}
    words = [str(names), kinds, tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
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


def make(folder: Path, encode: partial, gather: Callable, verify: Callable) -> None:
    """Write the files of ARRAYS, and "said", what there is to say of the rows; then let them appear."""
    for left in folder.parent.glob(f".tmp_{folder.name}_*"):
        shutil.rmtree(left)  # of a process that died
    temp = folder.with_name(f".tmp_{folder.name}_{secrets.token_hex(4)}")
    temp.mkdir()
    print0(f"tokens    are made, once on this machine, in {folder}")
    try:
        with ExitStack() as stack:
            files = {name: stack.enter_context(open(temp / name, "wb")) for name in ARRAYS}
            end = 0

            def keep(part: Part) -> None:
                nonlocal end
                files["ids"].write(part.ids)
                files["loss_mask"].write(part.loss_mask)
                for where in part.where:
                    end += files["names"].write(where.encode("utf-8", "surrogateescape"))
                    files["ends"].write(end.to_bytes(8, "little"))

            run = stack.enter_context(processes(encode))
            total, said = gather(run, keep)
            bounds = torch.tensor([0, *total.lengths]).cumsum(0)
            files["bounds"].write(memoryview(bounds.numpy()))
            files["trained_tokens"].write(total.trained_tokens)
            files["keys"].write(total.keys)
        (temp / "said").write_text(json.dumps(said))
        for file in (*temp.iterdir(), temp):
            sync_path(file)
        verify()
        os.rename(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def mapped(file: Path, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(str(file), size=file.stat().st_size // dtype.itemsize, dtype=dtype)
