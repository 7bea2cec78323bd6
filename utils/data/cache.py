"""The cache of tokenized data on disk. One process per core tokenizes the data, once per machine. Every rank
then memory-maps the files, so the data is never loaded into memory as a whole.

A cache folder is named by a hash of everything that determines its content: the bytes of the data, the
tokenizer with its template, the settings, and the tokenizing code. It appears by a rename once it is
complete. A file lock lets one process at a time write it. The others wait for the lock, not in a collective.
"""

import fcntl
import hashlib
import json
import multiprocessing
import secrets
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import tokenizers
import transformers

from ..run.cached import cache_folder
from ..run.errors import ConfigError, check, print0, rank
from ..run.files import disk_errors, publish, remove_siblings
from ..run.memory import cores
from ..run.signals import die_with_parent
from .encode import Part
from .rows import Source


def cached_tokens(sources: list[Source], encode: partial, write: Callable, read: Callable) -> Path:
    """The cache folder with the files that `write` writes; see examples.write_tokens. encode: encode_rows
    with its settings bound; read: examples.read_tokens. If `write` raises because of bad rows, nothing is
    kept. If pictures have changed, the first process that gets the lock makes the files again.
    """
    rows = encode.keywords["rows"]
    files = [file for source in sources for file in source.files]
    folder = cache_folder("data") / key_of(files, **encode.keywords)
    with disk_errors(folder, "XDG_CACHE_HOME=FOLDER, or room in /dev/shm"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # The kernel releases the lock when this process ends, even if it is killed.
        with open(folder.with_suffix(".lock"), "ab") as lock:
            waited = False
            if rank() and not folder.exists():
                time.sleep(1)  # rank 0 shows how far it is
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                print0("tokens    another process is making them: waiting")
                fcntl.flock(lock, fcntl.LOCK_EX)
            is_stale = not folder.exists()
            if rows.processor and not (is_stale or waited):
                from .pictures import have_changed

                is_stale = have_changed(read(folder), rows)
            if is_stale:
                remove_siblings(folder, ".tmp")
                temp = folder.with_name(f".tmp_{folder.name}_{secrets.token_hex(4)}")
                temp.mkdir()
                print0(f"tokens    are made, once on this machine, in {folder}")
                try:
                    write(temp, partial(in_processes, encode))
                    check(
                        key_of(files, **encode.keywords) == folder.name,
                        f"{rows.dataset}: its files were changed while they were read (fix: run again)",
                    )
                    publish(temp, folder)
                finally:
                    shutil.rmtree(temp, ignore_errors=True)
    print0(f"tokens    are in {folder}")
    return folder


def key_of(files: list[Path], tokenizer, rows) -> str:
    """The hash of everything that determines the tokens."""
    digest = hashlib.sha256()
    # The processor's config determines the number of tokens of a picture.
    processor = sorted(Path(rows.processor).glob("*config.json")) if rows.processor else []
    for path in [*files, *sorted(Path(__file__).parent.glob("*.py")), *processor]:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    settings = [
        replace(rows, eval_dataset="", eval_share=0.0),  # these do not change the tokens
        tokenizer.backend_tokenizer.to_str(),
        tokenizer.chat_template,
        not tokenizer.template_name,
        tokenizer.special_tokens_map,
        transformers.__version__,
        tokenizers.__version__,
    ]
    digest.update(json.dumps(settings, default=str).encode())
    return digest.hexdigest()[:32]


def in_processes(function: Callable, work: Iterable) -> Iterator[Part]:
    """Yield function(item) for each item of `work`, in order, computed by one process per core. ConfigError
    also if a process ends early.

    Each process has a pipe of its own, which ends if the process is killed. The pipe of ProcessPoolExecutor
    is that of all processes: if one is killed while it writes, the reader waits without end.

    A spawned process normally imports the main file of its parent. An empty __main__ prevents this: importing
    a recipe takes seconds, and the workers need only the function.
    """
    pool = {}  # the pipe to each process -> the process
    idle = []  # pipes of processes without an item

    def ask(item):
        pipe = idle.pop()
        try:
            pipe.send(item)
            part = pipe.recv()
        except (EOFError, OSError):
            raise ConfigError(
                "a process that tokenizes is gone: if it said nothing itself, it was killed, most likely"
                " for lack of memory (fix: more; fewer cores: taskset; long .txt as rows: recipes/README.md)"
            ) from None
        idle.append(pipe)
        if isinstance(part, ConfigError):
            raise part
        return part

    # Not fork: torch and gloo have threads, and a fork would copy their locks in an unknown state.
    context = multiprocessing.get_context("spawn")
    threads = ThreadPoolExecutor(cores())  # each waits for a process
    futures = []
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        for _ in range(cores()):
            pipe, end = context.Pipe()
            process = context.Process(target=_serve, args=(end, function))
            process.start()
            end.close()
            pool[pipe] = process
        idle += pool
        for item in work:
            futures.append(threads.submit(ask, item))
            if len(futures) > 4 * len(pool):
                yield futures.pop(0).result()
        for future in futures:
            yield future.result()
    finally:
        for process in pool.values():
            process.kill()  # its thread ends, too
        sys.modules["__main__"] = main


def _serve(pipe, function):
    """Answer each item from the pipe with function(item), or with the ConfigError that it raises."""
    # Ctrl-C reaches all processes of a terminal. Only the parent reacts.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    while True:
        try:
            part = function(pipe.recv())
        except ConfigError as error:
            part = error
        pipe.send(part)
