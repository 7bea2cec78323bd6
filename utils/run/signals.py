"""SIGTERM, Ctrl-C, a closed terminal, SIGUSR1 and SIGUSR2: before the training they end the process, in it
they ask for a checkpoint at the end of the step.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType

import torch
import torch.distributed as dist

from .errors import current_act, print0, watchers, write_errors
from .explain import explain_signal

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# torchrun's, from SIGTERM to SIGKILL
GRACE = int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
WAIT = 2  # seconds in which the main thread comes back to Python, if it does
_received: list[tuple[int, float]] = []  # (number, when)
_raised = False  # whether a signal has ended what the main thread did
_in_steps = False  # whether signals are only noted


def stop_at_once() -> None:
    """Any of the signals, but those that nohup ignores, raises KeyboardInterrupt: all is cleaned up then.

    A thread notes them too, because the main one may wait for other ranks, where Python runs no handler.
    """
    for number in CAUGHT:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    with suppress(RuntimeError):  # no more threads
        threading.Thread(target=_note, args=(reader,), daemon=True).start()


def stop_after_step() -> None:
    """From now on a signal is only noted, for `stop_asked`; but one more after Ctrl-C leaves at once.

    It replaces what `stop_at_once` set: a program that calls a recipe's main keeps its own handlers.
    """
    global _in_steps
    _received.clear()
    if signal.getsignal(signal.SIGTERM) is _raise:
        _in_steps = True
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
    """Once: what comes while all is cleaned up, or while an error is looked into, is told with it."""
    global _raised
    _raised, begun = True, time.monotonic()

    def again(number: int, _: FrameType | None) -> None:
        # a person does not want to wait
        if number == signal.SIGINT and time.monotonic() - begun > 0.5:
            os._exit(130)

    for caught in CAUGHT:
        if signal.getsignal(caught) is _raise:
            signal.signal(caught, again)
    raise KeyboardInterrupt(signal.Signals(number).name)


def _note(reader: int) -> None:
    while number := os.read(reader, 1):
        _received.append((number[0], time.monotonic()))
        if _in_steps:
            _leave_at_second_ctrl_c()
        elif number[0] == signal.SIGTERM:
            _leave_if_a_rank_is_lost()


def _leave_at_second_ctrl_c() -> None:
    (first, begun), (_, now) = _received[0], _received[-1]
    # At Ctrl-C the terminal and torchrun may each send one, at once; a person takes longer. At the second
    # torchrun sends SIGTERM.
    if first == signal.SIGINT and now - begun > 0.5:
        print0("second Ctrl-C: leaving at once, without a checkpoint")
        for watcher in watchers[:]:
            watcher.note(ended="stopped")
        os._exit(130)


def _leave_if_a_rank_is_lost() -> None:
    """For the main thread where it waits for that rank, in a new group for example, and hears of nothing."""
    until = time.monotonic() + WAIT
    while not _raised and time.monotonic() < until:
        time.sleep(0.05)
    if not _raised:
        explain_signal("SIGTERM", current_act(), write_errors)
