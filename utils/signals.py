"""SIGTERM, Ctrl-C, SIGUSR1 and SIGUSR2: before the training they end the process, in it they ask for a
checkpoint at the end of the step.
"""

import os
import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from .errors import print0, say

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
GRACE = 30  # seconds from SIGTERM to SIGKILL, of torchrun and of Kubernetes, unless they are told otherwise
_received: list[tuple[int, float]] = []  # (number, when)


def stop_at_once() -> None:
    """Any of the signals raises KeyboardInterrupt, so that the process cleans up behind itself."""
    for number in CAUGHT:
        signal.signal(number, _raise)


def stop_after_step() -> None:
    """From now on a signal is only noted, for `stop_asked`; but a second Ctrl-C leaves at once.

    It replaces what `stop_at_once` set: a program that calls a recipe's main keeps its own handlers.
    """
    _received.clear()
    for number in CAUGHT:
        if signal.getsignal(number) is _raise:
            signal.signal(number, _note)


def stop_asked() -> str:
    """The name of a signal that any rank has received, or "". Every rank calls it."""
    number = torch.tensor(_received[0][0] if _received else 0)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return signal.Signals(number.item()).name if number else ""


def warn_of_grace(step_seconds: float, save_seconds: float) -> None:
    """Say so where a stop takes longer than launchers wait."""
    seconds = step_seconds + save_seconds
    if seconds > GRACE:
        both = (
            f"a step of {step_seconds:.0f} s and a save of {save_seconds:.0f} s are more than the {GRACE} s"
        )
        fix = f"torchrun --shutdown-timeout {2 * round(seconds)}, and as long in the scheduler"
        print0(f"warning: {both} that a SIGTERM leaves; then the checkpoint before stands (fix: {fix})")


def _raise(number: int, _: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _note(number: int, _: FrameType | None) -> None:
    now = time.monotonic()
    # The terminal and torchrun may each send one; a person takes longer.
    if number == signal.SIGINT and any(n == number and now - at > 0.5 for n, at in _received):
        say("second Ctrl-C: leaving at once, without a checkpoint")
        os._exit(130)
    _received.append((number, now))
