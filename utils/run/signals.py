"""How a run ends before its time. Signals (SIGTERM, Ctrl-C, a closed terminal, SIGUSR1, SIGUSR2): before the
training they end the process, in it they ask for a checkpoint at the end of the step. Errors: each becomes
one line and an exit code. And no process outlives the one that started it.
"""

import ctypes
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .errors import ConfigError, print_once, rank, story

CAUGHT = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # linux/prctl.h
_received: list[int] = []


def stop_at_once() -> None:
    """Any of the signals, but those that nohup ignores, raises KeyboardInterrupt: all is cleaned up then.

    A thread looks at them too, because the main one may wait for other ranks where Python runs no handler.
    """
    for number in CAUGHT:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _raise)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    threading.Thread(target=_look, args=(reader,), daemon=True).start()


def stop_after_step() -> None:
    """From now on a signal is only noted, for `stop_asked`; one more after Ctrl-C leaves at once.

    It replaces what `stop_at_once` set: a program that calls a recipe's main keeps its own handlers.
    """
    _received.clear()
    for number in CAUGHT:
        if signal.getsignal(number) is _raise:
            signal.signal(number, lambda number, _: _received.append(number))


def stop_asked(group=None) -> str:
    """The name of a signal that any rank of a group has received, or "". Every rank of it calls it. None: all
    ranks.
    """
    import torch
    import torch.distributed as dist

    number = torch.tensor(_received[0] if _received else 0)
    dist.all_reduce(number, dist.ReduceOp.MAX, group)
    return signal.Signals(number.item()).name if number else ""


def _look(reader: int) -> None:
    first, begun = 0, 0.0
    while number := os.read(reader, 1):
        # torchrun sends SIGTERM when a rank has ended.
        if number[0] == signal.SIGTERM:
            from .failures import ranks_gone, say_who_is_gone

            if ranks_gone():
                time.sleep(1)  # the main thread says so, if it can
                say_who_is_gone()
        # At Ctrl-C the terminal and torchrun may each send one, at once; a person takes longer. At the second
        # torchrun sends SIGTERM.
        if first == signal.SIGINT and time.monotonic() - begun > 0.5:
            print("second Ctrl-C: leaving at once, without a checkpoint", flush=True)
            os._exit(130)
        first = first or number[0]
        begun = begun or time.monotonic()


def die_with_parent() -> None:
    """Let Linux kill this process when the one that started it ends; end it where that has happened: its new
    parent is then the first process, and no Python.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes():
        os._exit(1)


def _raise(number: int, _: FrameType | None) -> None:
    """Once: what comes while all is cleaned up is ignored."""
    for caught in CAUGHT:
        signal.signal(caught, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn what escapes a recipe into one line and an exit code: 2 for bad input, 128 and its number for a
    signal, 1 for no space left, no memory and a rank that is missing. Other errors keep their traceback.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None: closed
    try:
        yield
    except ConfigError as error:
        print_once(*error.lines, agreed=error.agreed)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != __package__.split(".")[0]:
            raise  # not a file of this package, of which a copy may leave some out
        file = error.name.replace(".", "/") + ".py"
        print_once(f"{file} is not here, and these flags need it (fix: copy it too)", agreed=True)
        sys.exit(2)
    except KeyboardInterrupt as error:  # of _raise, which says by which signal
        name = str(error) or "SIGINT"
        if name == "SIGTERM":  # torchrun sends it to the others when a rank has ended
            from .failures import say_who_is_gone

            say_who_is_gone()
        print_once(f"stopped by {name} in act '{story.act}'", agreed=True)
        sys.exit(128 + getattr(signal, name))
    except Exception as error:
        from .failures import explain

        explain(error)  # returns where it knows nothing of it
        sys.stderr.write(
            f"error: rank {rank()} failed in act '{story.act}'; its traceback follows\n"
        )
        raise
    finally:
        if sys.exc_info()[0]:
            from .failures import abort_nccl

            abort_nccl()
        # else Python visits every object of torch and transformers once more, for a second
        gc.freeze()
