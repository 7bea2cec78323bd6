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
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import tokenizers
import torch
import transformers
from tqdm import tqdm

from ..run.disk import sync_path
from ..run.errors import ConfigError, escaped, print0
from ..run.files import open_own
from ..run.units import MIB
from .encode import Checked, Part, file_of
from .rows import BadRows, Source, origins_of
from .workers import chunks, processes

ARRAYS = {"ids": torch.int32, "loss_mask": torch.uint8, "bounds": torch.int64, "keys": torch.int64}
ARRAYS |= {"trained_tokens": torch.int64, "names": torch.uint8, "ends": torch.int64}
REFUSED = ".refused"  # instead of the folder: what is wrong with the rows
SAY_SECONDS = 30  # between two lines of who tokenizes, or waits for it


class Names:
    """The places of rows, as texts back to back: text i ends before byte ends[i]."""

    def __init__(self, names: torch.Tensor, ends: torch.Tensor):
        self.names, self.ends = names, ends

    def __getitem__(self, i: int) -> str:
        begin = self.ends[i - 1] if i else 0
        return bytes(self.names[begin : self.ends[i]].tolist()).decode("utf-8", "surrogateescape")


def cached_tokens(path: object, sources: list[Source], checker: partial, encode: partial) -> dict:
    """The fields of data.Examples for the rows of some sources, mapped from the disk. checker, encode: what
    encode.py does with some rows, with its settings. ConfigError for bad rows, of which nothing is kept but
    what is wrong with them, for the other ranks and runs.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raw_fsdp" / "data"
    files = [file for source in sources for file in source.files]
    folder = cache
    try:
        folder = cache / key_of([source.name for source in sources], files, encode.keywords)
        cache.mkdir(parents=True, exist_ok=True)
        raise_refusal(folder)
        if not complete(folder):
            with locked(folder):
                raise_refusal(folder)  # of who had the lock
                if not complete(folder):
                    make(folder, path, sources, checker, encode)
    except OSError as error:
        if error.filename in map(str, files):
            raise ConfigError(f"{error.filename}: {error.strerror}") from None
        raise ConfigError(
            f"{folder}: {error.strerror} (fix: XDG_CACHE_HOME=FOLDER, with room)"
        ) from None
    print0(f"tokens    of {path} are in {folder}")
    arrays = {name: mapped(folder / name, dtype) for name, dtype in ARRAYS.items()}
    said = json.loads((folder / "said").read_text())
    return arrays_and_names(arrays) | {
        "dropped": Counter(said["dropped"]),
        "notes": Counter(said["notes"]),
        "firsts": said["firsts"],
        "problem": said["problem"],
        "origins": origins_of(sources, said["ends"], said["forms"]),
        "bad": said["bad"],
    }


def arrays_and_names(arrays: dict[str, torch.Tensor]) -> dict:
    """The arrays as fields of data.Examples."""
    return arrays | {"where": Names(arrays.pop("names"), arrays.pop("ends"))}


def raise_refusal(folder: Path) -> None:
    """Raise BadRows where these very bytes have been refused before: not each rank has to read them again."""
    with suppress(FileNotFoundError):
        raise BadRows(folder.with_suffix(REFUSED).read_text("utf-8").split("\n"))


def key_of(names: object, files: list, settings: dict) -> str:
    """The hash of all that the tokens follow from."""
    digest, tokenizer = hashlib.sha256(), settings["tokenizer"]
    code = sorted(Path(__file__).parent.glob("*.py"))
    for file in [*files, *code]:
        with open(file, "rb") as data:
            for block in iter(partial(data.read, 2**20), b""):
                digest.update(block)
    kinds = {name: value for name, value in settings.items() if name != "tokenizer"}
    words = [str(names), kinds, tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template]
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
def locked(folder: Path) -> Iterator[None]:
    """Hold a folder's lock, which ends with this process however it ends. Who waits for it says now and then
    how far the other process is.
    """
    with open_own(folder.with_suffix(".lock"), "ab") as file:
        started = said = time.monotonic()
        first = True
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if first:
                print0("tokens    another process is making them: waiting")
                first = False
            if time.monotonic() - said > SAY_SECONDS:
                said = time.monotonic()
                waited = f"waiting for {said - started:.0f} s for the process that makes them"
                print0(f"tokens    {waited}; it has written {written(folder) / MIB:,.1f} MiB")
            time.sleep(0.05)
        yield


def written(folder: Path) -> int:
    """Bytes of what is being made of a folder."""
    total = 0
    for file in folder.parent.glob(f".tmp_{folder.name}_*/*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total


class Progress:
    """A bar where standard error is a terminal, else a line now and then."""

    def __init__(self, what: str):
        self.what, self.rows, self.said = what, 0, time.monotonic()
        self.bar = tqdm(desc=what, unit=" rows", disable=None)

    def add(self, rows: int) -> None:
        self.rows += rows
        self.bar.update(rows)
        if self.bar.disable and time.monotonic() - self.said > SAY_SECONDS:
            self.said = time.monotonic()
            print0(f"tokens    {self.what}: {self.rows:,} rows so far")


def make(
    folder: Path, path: object, sources: list[Source], checker: partial, encode: partial
) -> None:
    """Write the files of ARRAYS, and "said", what there is to say of the rows; then let them appear."""
    for left in folder.parent.glob(f".tmp_{folder.name}_*"):
        shutil.rmtree(left)  # of a process that died
    temp = folder.with_name(f".tmp_{folder.name}_{secrets.token_hex(4)}")
    temp.mkdir()
    try:
        with processes(checker, encode) as run:
            try:
                forms = check_all(path, sources, encode, run)
                total, ends = encode_all(
                    temp, path, sources, forms, encode.keywords["bad_rows"], run
                )
            except BadRows as error:
                keep_refusal(folder, error)
                raise
        sizes = {name: (temp / name).stat().st_size for name in ARRAYS}
        said = {"sizes": sizes, "dropped": total.dropped, "notes": total.notes, "ends": ends}
        said |= {"firsts": total.firsts, "problem": total.problem, "forms": forms, "bad": total.bad}
        (temp / "said").write_text(json.dumps(said))
        for file in (*temp.iterdir(), temp):
            sync_path(file)
        shutil.rmtree(folder, ignore_errors=True)  # damaged, or it would have been taken
        os.rename(temp, folder)
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def keep_refusal(folder: Path, error: BadRows) -> None:
    """Let the refusal of these bytes appear, whole."""
    temp = folder.with_name(f".tmp_refused_{secrets.token_hex(8)}")
    temp.write_text(str(error), "utf-8")
    os.replace(temp, folder.with_suffix(REFUSED))


def check_all(
    path: object, sources: list[Source], encode: partial, run: Callable
) -> dict[str, str]:
    """Read all rows without tokenizing; the form of each file. ConfigError for what is wrong."""
    checked, progress = Checked(), Progress(f"checking {escaped(path)}")
    for _, part in run(
        0, ((None, rows, {}) for source in sources for rows in chunks(source.read()))
    ):
        checked.join(part)
        progress.add(part.rows)
        if checked.faults.stop(checked.rows):
            break
    checked.close(path, encode.keywords["columns"], encode.keywords["bad_rows"])
    return checked.file_forms()


def encode_all(
    temp: Path,
    path: object,
    sources: list[Source],
    forms: dict[str, str],
    bad_rows: str,
    run: Callable,
) -> tuple[Part, list[int]]:
    """(what there is to say of all rows, how many examples there are at each source's end). Tokens and places
    go into files.
    """

    def numbered() -> Iterator[tuple]:
        for number, source in enumerate(sources):
            for rows in chunks(source.read()):
                files = {file_of(where) for where, _ in rows} if bad_rows == "drop" else ()
                yield (
                    number,
                    rows,
                    {"forms": {file: forms[file] for file in files if file in forms}},
                )

    total, end, ends = Part(), 0, [0] * len(sources)
    progress = Progress(f"tokenizing {escaped(path)}")
    with ExitStack() as stack:
        files = {name: stack.enter_context(open(temp / name, "wb")) for name in ARRAYS}
        for number, part in run(1, numbered()):
            files["ids"].write(part.ids)
            files["loss_mask"].write(part.loss_mask)
            for name in (name.encode("utf-8", "surrogateescape") for name in part.where):
                end += files["names"].write(name)
                files["ends"].write(end.to_bytes(8, "little"))
            total.join(part)
            ends[number] = len(total.lengths)
            progress.add(part.rows)
            if total.faults.stop(total.rows):
                break
        total.close(path)
        bounds = torch.tensor([0, *total.lengths]).cumsum(0)
        files["bounds"].write(memoryview(bounds.numpy()))
        files["trained_tokens"].write(total.trained_tokens)
        files["keys"].write(total.keys)
    return total, ends


def mapped(file: Path, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_file(str(file), size=file.stat().st_size // dtype.itemsize, dtype=dtype)
