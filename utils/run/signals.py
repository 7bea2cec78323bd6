"""How a run ends early.

Signals (SIGTERM, Ctrl-C, a closed terminal, SIGUSR1, SIGUSR2) end the process before the training; during the
training they ask for a checkpoint at the end of the step. Each error becomes one line and an exit code. No
rank outlives its launcher.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from .errors import print_once, story

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
received = []  # numbers of the signals that ask for an early end


def stop_at_once() -> None:
    """Let each of the signals raise KeyboardInterrupt, so that everything is cleaned up. A signal that is
    ignored already, as under nohup, stays ignored.

    A thread receives the signals too: while the main thread waits for other ranks, Python runs no handler.
    """
    for number in CAUGHT:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, CAUGHT),
        after_in_parent=_unblock,
        after_in_child=begin_child,
    )
    threading.Thread(target=_watch, args=(reader,), daemon=True).start()


def stop_after_step() -> None:
    """From now on a signal is only recorded, for `stop_asked`; a second Ctrl-C ends the process at once.

    Only handlers that `stop_at_once` set are replaced: a program that calls a recipe's main keeps its own.
    """
    received.clear()
    for number in CAUGHT:
        if signal.getsignal(number) is _raise:
            signal.signal(number, lambda number, _: received.append(number))


def stop_asked(group=None) -> str:
    """The name of a signal that any rank of the group has received, or "". It is a collective: every rank of
    the group calls it. None: the group of all ranks. From then on each of them counts as having received it.
    """
    import torch

    number = torch.tensor(max(received, default=0))
    torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group)
    if number := int(number):
        received.append(number)
        return signal.Signals(number).name
    return ""


def _watch(reader):
    """Act on signals that the main thread cannot handle while it waits. reader: a pipe of their numbers."""
    interrupted = 0.0  # when the first Ctrl-C came
    while number := os.read(reader, 1)[0]:
        # On Ctrl-C the terminal and torchrun may each send SIGINT, at almost the same time; a person's second
        # Ctrl-C comes later, and on it torchrun sends SIGTERM. Only these two signals count: others may be of
        # a timer in the user's code. This comes before the look for ranks that are gone: after a second
        # Ctrl-C they have left as they should.
        if 0 < interrupted < time.monotonic() - 0.5 and number in CAUGHT[:2]:
            print("second Ctrl-C: leaving at once, without a checkpoint", flush=True)
            os._exit(130)
        # torchrun sends SIGTERM when a rank has ended.
        if number == signal.SIGTERM:
            from .failures import ranks_gone, say_who_is_gone

            if ranks_gone():
                time.sleep(1)  # the main thread says so first, if it can
                say_who_is_gone()
            received.append(number)  # nobody was gone when it came
        if number == signal.SIGINT:
            interrupted = interrupted or time.monotonic()


def begin_child() -> None:
    """In a forked process, such as a reward may start: SIGTERM ends it, as its parent expects of `terminate`,
    also one that came during the fork; the other signals are the parent's matter.
    """
    signal.set_wakeup_fd(-1)  # it leads to the parent
    for number in CAUGHT:
        # SIGTERM is never ignored, not even for a moment: that would lose one that waits.
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
    _unblock()


def _unblock():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, CAUGHT)


def die_with_parent() -> None:
    """Let Linux kill this process when its parent ends. If that has happened already, exit now: its parent is
    then process 1, and no Python (in a container torchrun itself may be process 1).
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
        os._exit(1)


def _raise(number, _):
    """Raise KeyboardInterrupt once; signals that arrive during the cleanup are ignored, but for a second
    Ctrl-C, see _watch: a cleanup may wait for downloads, for hours.
    """
    for caught in CAUGHT:
        signal.signal(caught, signal.SIG_IGN)
    signal.signal(signal.SIGINT, lambda *_: None)
    story.stopped = number
    raise KeyboardInterrupt


@contextmanager
def report_errors():
    """Turn an exception that leaves a recipe into one line and an exit code: 2 for bad input, 128 + N for
    signal N (also after its checkpoint, so that no later command takes the run for a finished one), 1 for a
    full disk, too little memory or a missing rank. Other errors keep their traceback.
    """
    story.stopped = story.code = 0  # of an earlier run in a notebook
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None if it is closed
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's, for %run, lacks it
        sys.stdout.reconfigure(errors="backslashreplace")  # of characters that its encoding lacks
    gc.freeze()  # collections need not look at what the imports made
    gc.enable()
    try:
        try:
            yield
        except Exception as error:
            from .failures import explain

            explain(error)  # returns if it has no explanation
            raise
        if story.code:
            sys.exit(story.code)
    except KeyboardInterrupt:  # from _raise, at any time
        caught = signal.Signals(story.stopped or signal.SIGINT)
        if caught == signal.SIGTERM and not received:  # torchrun sends it when a rank has ended
            from .failures import say_who_is_gone

            say_who_is_gone()
        print_once(f"stopped by {caught.name} in act '{story.act}'", agreed=True)
        sys.exit(128 + caught)
    finally:
        if sys.exc_info()[0]:
            from .failures import abort_nccl

            abort_nccl()
        if "triton" in sys.modules:
            gc.unfreeze()  # since 3.9 it prints a page about its objects that were not collected
        else:
            gc.freeze()  # Python's last collection would visit all objects of torch: about a second
