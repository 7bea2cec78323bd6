"""ConfigError, and the one place where errors reach the user.

A user sees one line on stderr, once: what is set, why it cannot work, what to write instead. Everything else
is our own fault and keeps its traceback, below a line that names the act and the rank.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_act = "parse"
watchers: list = []  # told of every act: acts.py's, which keeps them, and the one that measures peaks


class ConfigError(Exception):
    """Bad input. Its text is shown as it stands; several lines are several errors.

    agreed: every rank raises it together, so rank 0 alone prints it.
    """

    def __init__(self, message: str, agreed: bool = False):
        super().__init__(message)
        self.agreed = agreed


def check(condition: object, message: str) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def act(name: str) -> None:
    """Announce an act of the recipe's story, so that a log, a hang or a crash tells where it was."""
    global _act
    _act = name
    print0(f"--- {name}")
    for watcher in watchers:
        watcher.note(name)


def say(*parts: object) -> None:
    """Print a line to stdout. If who read it has gone (`| head`, a closed terminal), the run goes on in
    silence.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    line = " ".join(map(str, parts)).encode(encoding, "backslashreplace")  # a file's name holds any bytes
    try:
        print(line.decode(encoding), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print0(*parts: object) -> None:
    """Print a line on rank 0."""
    if rank() == 0:
        say(*parts)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn what escapes a recipe into one line and an exit code: 2 for bad input, 128 and its number for a
    signal, 1 for no space left and for a rank that is missing.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by who started us
    try:
        yield
    except ConfigError as error:
        print_once(str(error), error.agreed)
        sys.exit(2)
    except KeyboardInterrupt as error:  # utils/signals.py says by which
        name = str(error) or "SIGINT"
        print_once(f"stopped by {name} in act '{_act}'", agreed=True)
        sys.exit(128 + getattr(signal, name))
    except Exception as error:
        with suppress(ImportError):  # a copy may do without
            from .explain import explain

            explain(error, _act, rank(), print_once)  # returns where it knows nothing of it
        sys.stderr.write(f"error: rank {rank()} failed in act '{_act}'; its traceback follows\n")
        raise
    finally:
        gc.freeze()  # else Python visits every object of torch and transformers once more, for a second


def fault(point: str, step: int) -> None:
    """Where tests break a run; see faults.py."""
    if "FAULT" in os.environ:
        from .faults import break_at

        break_at(point, step, rank())


def first_five(names: list[str]) -> str:
    """The first five names, and how many more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def rank() -> int:
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdecimal() else 0


def print_once(message: str, agreed: bool = False) -> None:
    """Write error lines; where all ranks `agreed` on them rank 0 alone does, else each names itself."""
    by = ""
    if rank() != 0:
        # Rank 0 most likely says the same, and torchrun ends this process when it has. Leaving first would
        # cut rank 0 short.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
        if agreed:
            return
        by = f"rank {rank()}: "
    sys.stderr.write("".join(f"error: {by}{line}\n" for line in message.splitlines()))
    sys.stderr.flush()
