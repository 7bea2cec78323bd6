"""What an error means that was not raised for the user: a full disk, no memory or threads, a rank that is
gone. Imported only then, by errors.py.
"""

import errno
import os
import re
import resource
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed as dist

from .lost import leave_word, left_word, likely_cause, lost_ranks, speaks_for_all
from .remedies import less_memory, settings
from .units import GIB

LOST = re.compile(
    "[Tt]imed? ?out|[Cc]onnection (closed|refused|reset)|[Bb]roken pipe|remote process|aborted"
)

REFUSED = "can't allocate memory"  # of torch's CPU allocator


Say = Callable[[list[str]], None]  # errors.write_errors: a line for each on stderr


def explain(
    error: Exception, act: str, rank: int, print_once: Callable[[str], None], say: Say
) -> None:
    """Say what an error that escaped a recipe in `act` means, and end the process; return if nobody knows."""
    if not LOST.search(str(error)):
        leave_word()  # the others need not look for this rank
    # safetensors and torch wrap the system's error, but keep its words.
    full = [
        os.strerror(code)
        for code in (errno.ENOSPC, errno.EDQUOT)
        if os.strerror(code) in str(error)
    ]
    if full:
        file = f" for {error.filename}" if getattr(error, "filename", None) else ""
        print_once(f"{full[0]}{file} in act '{act}': free space, or choose another --output_dir")
        sys.exit(1)
    if os.strerror(errno.EAGAIN) in str(error) or "start new thread" in str(error):
        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        fix = "raise it, or start fewer ranks"
        print_once(
            f"no more threads for this user in act '{act}': ulimit -u is {limit} (fix: {fix})"
        )
        sys.exit(1)
    if type(error).__name__ in ("MemoryError", "OutOfMemoryError") or REFUSED in str(error):
        out_of_memory(error, act, rank, say)
        sys.stderr.flush()
        # a thread that saves would be waited for, and other ranks' tracebacks help nobody
        os._exit(1)
    if missing := missing_ranks(error, act):
        say([missing] if missing.strip() else [])
        os._exit(1)  # a thread that saves would be waited for, and it waits for the missing rank


def out_of_memory(error: Exception, act: str, rank: int, say: Say) -> None:
    """Say where memory ran out, what was planned, what helps, and where the rest stands, in one block."""
    reason = (str(error) or "MemoryError").splitlines()[0][:300]
    lines = [f"rank {rank} is out of memory in act '{act}': {reason}"]
    plan = getattr(
        sys.modules.get(f"{__package__.rpartition('.')[0]}.plan.planned"), "current", None
    )
    on_gpu = torch.cuda.is_available()
    fix = less_memory("train", settings(), gpu=on_gpu, of_gpu=on_gpu)
    if plan and "peak_bytes" in plan.planned:
        lines.append(
            f"planned: {plan.planned['device_bytes'] / GIB:.2f} GiB with reserve, {plan.largest}"
        )
        with suppress(Exception):  # there is no memory to look for it
            fix = plan.change()
    lines.append(f"(fix: {fix})")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        lines.append(f"in use: {torch.cuda.max_memory_allocated() / GIB:.2f} GiB at most")
        file = os.path.abspath(f"out_of_memory_rank_{rank}.pickle")
        with suppress(Exception):  # what helps to look must not hide what happened
            torch.cuda.memory._dump_snapshot(file)
            lines.append(f"memory snapshot: {file}, for https://pytorch.org/memory_viz")
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename
    ]
    if frames:
        lines.append(f"at {frames[-1].filename}:{frames[-1].lineno}, in {frames[-1].name}")
    say(lines)


def explain_signal(name: str, act: str, say: Say) -> None:
    """Where torchrun stops this rank because another one was killed, say so and end the process; else return.

    torchrun says SIGTERM to all that are left, as it does when a user stops a run.
    """
    lost = lost_ranks() if name == "SIGTERM" else []
    if not lost:
        return
    leave_word()
    if speaks_for_all():
        say([f"rank {_first(lost)} gave no answer in act '{act}'. {_gone(lost, act)}"])
        sys.stderr.flush()
    os._exit(1)  # nothing is waited for


def missing_ranks(error: Exception, act: str, seconds: float = 3) -> str:
    """Where ranks waited in vain for each other, lines that name them and the collective; else "".

    Each rank that waits leaves a word in the store, which lives in the launcher; who left none within
    `seconds` is dead or hangs. The first that has found out gets a text, the others a blank.
    """
    if not dist.is_initialized() or not LOST.search(str(error)):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    own = ("torch", Path(__file__).parent.parent.name)
    last = next(
        (f for f in reversed(frames) if not set(own) & set(Path(f.filename).parts)), frames[-1]
    )
    calls = [
        f.name
        for f in frames
        if "distributed" in f.filename and not f.name.startswith(("_", "wrap"))
    ]
    mine = f"{calls[-1] if calls else last.name} ({Path(last.filename).name}:{last.lineno})"
    me, size, words, ended = dist.get_rank(), dist.get_world_size(), {}, set()
    try:
        store, until = dist.distributed_c10d._get_default_store(), time.monotonic() + seconds
        life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store.set(f"lost/{life}/{me}", mine)
        while time.monotonic() < until and len({*words, *ended, *lost_ranks()}) < size:
            time.sleep(0.2)
            words = {
                r: store.get(key) for r in range(size) if store.check([key := f"lost/{life}/{r}"])
            }
            ended = {r for r in range(size) if r not in words and left_word(r)}
    except RuntimeError:  # the launcher of rank 0 is gone, and the store with it
        return f"rank {me} lost the others in act '{act}', in {mine}: {str(error).splitlines()[0]}"
    lost = lost_ranks()
    leave_word()
    if not speaks_for_all():
        return " "
    words = words or {me: mine.encode()}
    where = ", ".join(f"rank {r} in {word.decode()}" for r, word in words.items())
    if lost:
        said = f"rank {_first(lost)} gave no answer in act '{act}'; waiting: {where}. "
        return f"{said}{_gone(lost, act)}"
    gone = [r for r in range(size) if r not in words and r not in ended]
    if gone:
        hint = (
            "killed, out of memory or stopped? (fix: see above; torchrun --max-restarts 3 goes on"
        )
        hint += " by itself)"
        return f"rank {_first(gone)} gave no answer in act '{act}'; waiting: {where}. {hint}"
    if ended:
        said = f"rank {_first(sorted(ended))} has ended, see what it says"
        return f"{said}; waiting in act '{act}': {where}"
    fix = "the same code, flags and data on every machine"
    reason = str(error).splitlines()[0]
    return f"the ranks wait for each other in act '{act}': {where}: {reason} (fix: {fix})"


def _first(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:5]))


def _gone(ranks: list[int], act: str) -> str:
    return (
        f"{'Their processes are' if len(ranks) > 1 else 'Its process is'} gone: {likely_cause(act)}"
    )
