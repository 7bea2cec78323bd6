"""How a run ends that fails: what a full disk, a lack of memory or a missing rank looks like, in one line.

It is imported when that happens.
"""

import errno
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path

from .errors import print_once, rank, story, write_errors

LOST = re.compile(
    "[Tt]imed? ?out|[Cc]onnection (closed|refused|reset)|[Bb]roken pipe|remote process|aborted"
)
REFUSED = "can't allocate memory"  # of torch's CPU allocator
_leaving = threading.Lock()


def abort_nccl() -> None:
    """Else NCCL warns of groups that nobody left, beside our line, or its destructor waits for ranks that are
    gone (https://github.com/pytorch/pytorch/issues/119797).
    """
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._abort_process_group()


def explain(error: Exception) -> None:
    """Say in one line what a full disk, a lack of memory or a missing rank is, and end the process. Return
    where it is something else.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun's, while this error is looked into
        signal.signal(number, signal.SIG_IGN)
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT):
        reason = os.strerror(code)  # safetensors and torch keep the system's words
        if reason in text:
            filename = getattr(error, "filename", None)
            file = f" for {filename}" if filename else ""
            print_once(
                f"{reason}{file} in act '{story.act}': free space, or choose another --output_dir"
            )
            _leave()
    first_line = (text or "MemoryError").splitlines()[0][:300]
    if type(error).__name__ in ("MemoryError", "OutOfMemoryError") or REFUSED in text:
        what = f"rank {rank()} is out of memory in act '{story.act}': {first_line}{story.planned}"
        fix = story.less_memory() if story.less_memory else "fewer ranks, or more memory"
        write_errors(f"{what} (fix: {fix})")
        _leave()
    if LOST.search(text):
        say_who_is_gone()
        waits = f"rank {rank()} waited in vain for the others in act '{story.act}': {first_line}"
        fix = "see what they say; one that says nothing hangs: py-spy dump shows where"
        print_once(f"{waits} (fix: {fix})")
        _leave()


def say_who_is_gone() -> None:
    """Where ranks of this machine are gone, the first of the others says so; and the process ends. It stays a
    moment where there are more, which would else take one that has said so, or is silent, for one more lost.
    """
    if gone := ranks_gone():
        _leaving.acquire()  # for good: another thread that comes here too waits for the end
        present = ranks_present()
        if rank() == min(present):
            names = ", ".join(map(str, gone[:5]))
            killed = "if it said nothing itself, it was killed, most likely by the kernel for lack of memory"
            write_errors(f"rank {names} is gone in act '{story.act}': {killed}{story.planned}")
        if len(present) > 1:
            time.sleep(3)
        _leave()


def ranks_gone() -> list[int]:
    """The ranks that this one's launcher has started, and that do not run any more."""
    present = ranks_present()
    if rank() not in present:  # nothing is known
        return []
    first = rank() - int(os.environ.get("LOCAL_RANK", "0"))
    expected = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return [other for other in expected if other not in present]


def ranks_present() -> set[int]:
    """The ranks among the processes that this one's launcher has started and that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) != os.getppid() or state in "ZX":
                continue
            environment = (stat.parent / "environ").read_bytes()
        except OSError:  # it has just ended, or is another user's
            continue
        found |= {int(number) for number in re.findall(rb"\0RANK=(\d+)\0", environment)}
    return found


def _leave() -> None:
    """End this process, without waiting for a thread that saves and waits for other ranks."""
    sys.stdout.flush()  # write_errors has flushed the other
    os._exit(1)
