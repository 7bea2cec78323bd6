"""What an error means that was not raised for the user: a full disk, no memory or threads, a rank that is
gone. errors.py imports it only then.
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
    """Say what an error that escaped a recipe in `act` means, and end the process. Return where that is
    not known.
    """
    text = str(error)
    if not LOST.search(text):
        leave_word()  # the others need not look for this rank
    # safetensors and torch wrap the system's error, but keep its words.
    for code in (errno.ENOSPC, errno.EDQUOT):
        reason = os.strerror(code)
        if reason in text:
            filename = getattr(error, "filename", None)
            file = f" for {filename}" if filename else ""
            print_once(f"{reason}{file} in act '{act}': free space, or choose another --output_dir")
            sys.exit(1)
    if os.strerror(errno.EAGAIN) in text or "start new thread" in text:
        limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        problem = f"no more threads for this user in act '{act}': ulimit -u is {limit}"
        print_once(f"{problem} (fix: raise it, or start fewer ranks)")
        sys.exit(1)
    if type(error).__name__ in ("MemoryError", "OutOfMemoryError") or REFUSED in text:
        out_of_memory(error, act, rank, say)
        sys.stderr.flush()
        # sys.exit would wait for a thread that saves; the tracebacks of other ranks do not help.
        os._exit(1)
    missing = missing_ranks(error, act)
    if missing:
        say([missing] if missing.strip() else [])
        os._exit(
            1
        )  # sys.exit would wait for a thread that saves, and that waits for the missing rank


def out_of_memory(error: Exception, act: str, rank: int, say: Say) -> None:
    """Say in one block where memory ran out, what was planned, what helps, and where more is to be found."""
    reason = (str(error) or "MemoryError").splitlines()[0][:300]
    lines = [f"rank {rank} is out of memory in act '{act}': {reason}"]
    package = __package__.rpartition(".")[0]
    planned = sys.modules.get(f"{package}.plan.planned")
    plan = getattr(planned, "current", None)
    on_gpu = torch.cuda.is_available()
    fix = less_memory("train", settings(), gpu=on_gpu, of_gpu=on_gpu)
    if plan and "peak_bytes" in plan.planned:
        planned_gib = plan.planned["device_bytes"] / GIB
        lines.append(f"planned: {planned_gib:.2f} GiB with reserve, {plan.largest}")
        with suppress(Exception):  # there is no memory to look for it
            fix = plan.change()
    lines.append(f"(fix: {fix})")
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        used_gib = torch.cuda.max_memory_allocated() / GIB
        lines.append(f"in use: {used_gib:.2f} GiB at most")
        file = os.path.abspath(f"out_of_memory_rank_{rank}.pickle")
        with suppress(Exception):  # a failure here must not hide the error
            torch.cuda.memory._dump_snapshot(file)
            lines.append(f"memory snapshot: {file}, for https://pytorch.org/memory_viz")
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if "site-packages" not in frame.filename]
    if own_frames:
        last = own_frames[-1]
        lines.append(f"at {last.filename}:{last.lineno}, in {last.name}")
    say(lines)


def explain_signal(name: str, act: str, say: Say) -> None:
    """Where torchrun stops this rank because another one was killed, say so and end the process; else return.

    torchrun sends SIGTERM to the remaining ranks, as it does when a user stops a run.
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

    Each rank that waits leaves a word in the store, which lives in the launcher; a rank that left none within
    `seconds` is dead or hangs. The first rank that finds out gets a text, the others a blank.
    """
    if not dist.is_initialized() or not LOST.search(str(error)):
        return ""
    place = _waiting_place(error)
    reason = str(error).splitlines()[0]
    rank = dist.get_rank()
    size = dist.get_world_size()
    try:
        places, ended = _waiting_ranks(rank, size, place, seconds)
    except RuntimeError:  # the launcher of rank 0 is gone, and the store with it
        return f"rank {rank} lost the others in act '{act}', in {place}: {reason}"
    lost = lost_ranks()
    leave_word()
    if not speaks_for_all():
        return " "
    places = places or {rank: place}
    waiting = ", ".join(f"rank {waiter} in {where}" for waiter, where in places.items())
    if lost:
        silent = f"rank {_first(lost)} gave no answer in act '{act}'"
        return f"{silent}; waiting: {waiting}. {_gone(lost, act)}"
    silent_ranks = [other for other in range(size) if other not in places and other not in ended]
    if silent_ranks:
        silent = f"rank {_first(silent_ranks)} gave no answer in act '{act}'"
        fix = "see above; torchrun --max-restarts 3 goes on by itself"
        return f"{silent}; waiting: {waiting}. killed, out of memory or stopped? (fix: {fix})"
    if ended:
        said = f"rank {_first(sorted(ended))} has ended, see what it says"
        return f"{said}; waiting in act '{act}': {waiting}"
    fix = "the same code, flags and data on every machine"
    return f"the ranks wait for each other in act '{act}': {waiting}: {reason} (fix: {fix})"


def _waiting_place(error: Exception) -> str:
    """The collective in which this rank waited, and the line of a recipe that called it."""
    frames = traceback.extract_tb(error.__traceback__)
    package = Path(__file__).parent.parent.name
    callers = []
    collectives = []
    for frame in frames:
        if not {"torch", package} & set(Path(frame.filename).parts):
            callers.append(frame)
        if "distributed" in frame.filename and not frame.name.startswith(("_", "wrap")):
            collectives.append(frame.name)
    caller = callers[-1] if callers else frames[-1]
    collective = collectives[-1] if collectives else caller.name
    return f"{collective} ({Path(caller.filename).name}:{caller.lineno})"


def _waiting_ranks(
    rank: int, size: int, place: str, seconds: float
) -> tuple[dict[int, str], set[int]]:
    """(where each rank waits that has said so, ranks that have ended by themselves), within `seconds`."""
    store = dist.distributed_c10d._get_default_store()
    until = time.monotonic() + seconds
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store.set(f"lost/{life}/{rank}", place)
    places: dict[int, str] = {}
    ended: set[int] = set()
    while time.monotonic() < until and len({*places, *ended, *lost_ranks()}) < size:
        time.sleep(0.2)
        places = {}
        for other in range(size):
            key = f"lost/{life}/{other}"
            if store.check([key]):
                places[other] = store.get(key).decode()
        ended = {other for other in range(size) if other not in places and left_word(other)}
    return places, ended


def _first(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:5]))


def _gone(ranks: list[int], act: str) -> str:
    processes = "Their processes are" if len(ranks) > 1 else "Its process is"
    return f"{processes} gone: {likely_cause(act)}"
