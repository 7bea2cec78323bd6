"""SIGTERM, Ctrl-C, a closed terminal, SIGUSR1 and SIGUSR2: before the training they end the process, in it
they ask for a checkpoint at the end of the step.
"""

import os
import signal
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

from .errors import print0, watchers

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
GRACE = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))  # torchrun's, from SIGTERM to SIGKILL
_received: list[tuple[int, float]] = []  # (number, when)


def stop_at_once() -> None:
    """Any of the signals, but those that nohup ignores, raises KeyboardInterrupt: all is cleaned up then."""
    for number in CAUGHT:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise)


def stop_after_step() -> None:
    """From now on a signal is only noted, for `stop_asked`; but one more after Ctrl-C leaves at once.

    It replaces what `stop_at_once` set: a program that calls a recipe's main keeps its own handlers. A thread
    does the noting, because the main one may wait for other ranks, where Python runs no handler.
    """
    _received.clear()
    if signal.getsignal(signal.SIGTERM) is _raise:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer)
        threading.Thread(target=_note, args=(reader,), daemon=True).start()
        for number in CAUGHT:
            if signal.getsignal(number) is _raise:
                signal.signal(number, lambda *_: None)


def stop_asked() -> str:
    """The name of a signal that any rank has received, or "". Every rank calls it."""
    number = torch.tensor(_received[0][0] if _received else 0)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return signal.Signals(number.item()).name if number else ""


def warn_of_grace(step_seconds: float, save_seconds: float) -> None:
    """Say so where a stop takes longer than launchers wait."""
    seconds = step_seconds + save_seconds
    if seconds > GRACE:
        times = f"a step of {step_seconds:.0f} s and a save of {save_seconds:.0f} s"
        leaves = f"more than the {GRACE} s that a SIGTERM leaves; then the checkpoint before stands"
        fix = f"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={2 * round(seconds)}, and as long in the scheduler"
        print0(f"warning: {times} are {leaves} (fix: {fix})")


def _raise(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _note(reader: int) -> None:
    while number := os.read(reader, 1):
        _received.append((number[0], time.monotonic()))
        (first, begun), (_, now) = _received[0], _received[-1]
        # At Ctrl-C the terminal and torchrun may each send one, at once; a person takes longer. At the second
        # torchrun sends SIGTERM.
        if first == signal.SIGINT and now - begun > 0.5:
            print0("second Ctrl-C: leaving at once, without a checkpoint")
            for watcher in watchers[:]:
                watcher.note(ended="stopped")
            os._exit(130)
