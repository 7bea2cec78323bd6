"""Explain in one line why a run failed: bad input, a full disk, too little memory, a lost rank or file.

This file is imported only when a run fails.
"""

import errno
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from .errors import ConfigError, print_once, rank, story, write_errors

LOST = re.compile(
    "[Tt]imed? ?out|[Cc]onnection (closed|refused|reset)|[Bb]roken pipe|remote process|aborted"
)
_leaving = threading.Lock()


def abort_nccl() -> None:
    """Abort the NCCL groups. Otherwise NCCL prints warnings about groups that were not destroyed, or its
    destructor waits for ranks that are gone (https://github.com/pytorch/pytorch/issues/119797).
    """
    if torch.cuda.is_initialized() and torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._abort_process_group()


def explain(error: Exception) -> None:
    """If the error comes from bad input, a full disk, too little memory, a missing rank or a file that a copy
    of utils lacks, say so in one line and end the process. Otherwise say that its traceback follows, and
    return.
    """
    if isinstance(error, ConfigError):
        print_once(*error.lines, agreed=error.agreed)
        sys.exit(2)
    name = str(error.name) if isinstance(error, ModuleNotFoundError) else ""
    if name.startswith(__package__.removesuffix("run")):
        file = name.replace(".", "/") + ".py"
        print_once(
            f"{file} is not here, and a flag or the model needs it (fix: copy it too)", agreed=True
        )
        sys.exit(2)
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun may send them meanwhile
        signal.signal(number, signal.SIG_IGN)
    text = str(error)
    if "/dev/shm/nccl" in text:
        print_once("NCCL has no room in /dev/shm (fix: a larger one, in Docker --shm-size 8g)")
        _leave()
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS):
        reason = os.strerror(code)  # errors of safetensors and torch contain the system's text
        if reason in text:
            file = getattr(error, "filename", None) or "a file"
            print_once(
                f"{reason} for {file} in act '{story.act}' (fix: room, or rights; or another --output_dir)"
            )
            _leave()
    first_line = (text or "MemoryError").splitlines()[0][:300]
    # torch's OutOfMemoryError is of GPUs; its CPU allocator raises a RuntimeError
    if type(error).__name__.endswith("MemoryError") or "can't allocate memory" in text:
        write_errors(
            f"rank {rank()} is out of memory in act '{story.act}': {first_line}{story.planned}"
            f" (fix: {story.less_memory()})"
        )
        _leave()
    if LOST.search(text):
        say_who_is_gone()
        print_once(
            f"rank {rank()} waited in vain for the others in act '{story.act}': {first_line}"
            " (fix: see what they say; of one that says nothing: after a timeout it hangs, and py-spy dump"
            " shows where; else it was killed, or its machine is gone)"
        )
        _leave()
    write_errors(f"rank {rank()} failed in act '{story.act}'; its traceback follows")


def say_who_is_gone() -> None:
    """If ranks of this machine are gone, the lowest rank that still runs says so, and this process ends.

    If several ranks still run, each waits 3 seconds before it ends. Otherwise the others would report it as
    one more rank that is gone. In the act 'parse' nothing is said: all ranks have the same command line, and
    the one that was first has said what is wrong with it.
    """
    if gone := ranks_gone():
        _leaving.acquire()  # never released: a second thread waits here until the process ends
        present = ranks_present()
        if rank() == min(present) and story.act != "parse":
            names = ", ".join(map(str, gone[:5]))
            write_errors(
                f"rank {names} is gone in act '{story.act}': if it said nothing itself, it was killed, most"
                f" likely by the kernel for lack of memory{story.planned}"
            )
        if len(present) > 1:
            time.sleep(3)
        _leave()


def ranks_gone() -> list[int]:
    """The ranks that this rank's launcher started and that no longer run."""
    present = ranks_present().union(story.ended)
    if rank() not in present:  # this rank does not find itself, so nothing is known
        return []
    first = rank() - int(os.environ.get("LOCAL_RANK", "0"))
    expected = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return [number for number in expected if number not in present]


def ranks_present() -> set[int]:
    """The ranks of the processes that this rank's launcher started and that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # behind the name of the program: its state, and its parent
            if int(stat.read_bytes().rpartition(b")")[2].split()[1]) == os.getppid():
                environment = (stat.parent / "environ").read_bytes()
                found |= {int(number) for number in re.findall(rb"\0RANK=(\d+)\0", environment)}
        except OSError:  # the process has ended, or belongs to another user
            continue
    return found


def _leave() -> None:
    """End this process at once, without waiting for a thread that saves and waits for other ranks."""
    sys.stdout.flush()  # write_errors has flushed stderr
    os._exit(1)
