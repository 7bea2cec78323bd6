"""ConfigError, and the one place where errors reach the user.

A user sees one line on stderr, once: what is set, why it cannot work, what to write instead. Everything else
is our own fault and keeps its traceback, below a line that names the act and the rank.

Names and texts from files and flags are escaped here, in every line that is printed: a control character
moves the cursor, colours the terminal or begins a line that looks like one of ours.
"""

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from .memory import note_peak


@dataclass
class Story:
    """The current act and the planned memory, for the messages that say how a run ended."""

    act: str = "parse"
    stopped: int = 0  # the number of a signal that ends the run
    code: int = 0  # the exit code, after a signal that asked for a checkpoint
    ended: range = range(0)  # ranks that have ended as they should, before the others
    planned: str = ""  # the planned memory, as part of a message
    # finds flags that need less memory; called only if memory runs out
    less_memory: Callable = lambda: "fewer ranks, or more memory"


story = Story()

# Characters that a terminal obeys, or that break a line: C0 and C1 except the tab, line separators, marks
# that change the direction of writing, and lone surrogates, which stand for bytes that are not valid text.
CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escaped(text: object, keep="") -> str:
    """Text that is safe on a terminal and stays on one line: control characters become \\n, \\r or \\u001b,
    as in JSON. Characters in `keep` stay. Escaping twice changes nothing.
    """
    return CONTROL.sub(
        lambda found: found[0] if found[0] in keep else json.dumps(found[0])[1:-1], str(text)
    )


class ConfigError(Exception):
    """Bad input: one error, or a list of errors. Each is printed as one line.

    A line break within an error is escaped like every other control character: it comes from a name or value
    that the message quotes. agreed: all ranks raise the same error together, so only rank 0 prints it.
    """

    def __init__(self, message: str | list, agreed=False):
        messages = message if isinstance(message, list) else [message]
        self.lines = [escaped(line) for line in messages]
        super().__init__("\n".join(self.lines))
        self.agreed = agreed


def check(condition: object, message: str | list) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def act(name: str) -> None:
    """Announce the next act of the recipe, so that a log shows where a run hung or crashed. The peak memory
    of the act before it is recorded. A signal whose KeyboardInterrupt was lost, in a callback of a weak
    reference, ends the run here.
    """
    if story.stopped:
        raise KeyboardInterrupt
    note_peak(story.act)
    story.act = name
    print0(f"--- {name}")


@contextmanager
def others_code(what: object, fix=""):
    """Turn any exception of third-party code in the block into one ConfigError, `what: reason (fix: ...)`.

    It is for code that reads a config or a tokenizer, or builds a model: with unusual values that code may
    raise anything. A panic in Rust code raises a BaseException that is no Exception. Ctrl-C, exits and
    ConfigErrors pass through.
    """
    try:
        yield
    except (ConfigError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise ConfigError(
            f"{what}: {reason_of_others(error)}{f' (fix: {fix})' if fix else ''}"
        ) from error


def reason_of_others(error: BaseException) -> str:
    """The type of an exception and the first 300 characters of its text, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}".removesuffix(": ")


def say(text: object, ready=False) -> None:
    """Print a line to stdout. If the reader is gone (`| head`, a closed terminal), the run goes on silently.
    ready: the text is already escaped, and its line breaks or colours are ours.
    """
    try:
        print(text if ready else escaped(text), flush=True)
    except OSError:
        silence()


def silence() -> None:
    """Send stdout to nowhere from now on, since its reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print0(text: object, *, ready=False) -> None:
    """Print a line on rank 0. It takes one text: a second one, as print takes it, is an error. ready: as for
    say.
    """
    if not rank():
        say(text, ready)


def first_five(names: list[str]) -> str:
    """The first five names, and how many more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def differences(old: dict, new: dict, ignored: Sequence[str] = ()) -> str:
    """The fields of `new` that differ, as "lr 2e-05 -> 1e-05, ..."; "" when none does."""
    changed = [k for k in sorted(new) if k not in ignored and old.get(k) != new[k]]
    return first_five([f"{k} {str(old.get(k))[-80:]} -> {str(new[k])[-80:]}" for k in changed])


def rank() -> int:
    """This process's rank, for messages; 0 without torchrun, or if RANK is not a number."""
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdecimal() else 0


def print_once(*lines: str, agreed=False) -> None:
    """Write errors to stderr. If all ranks `agreed` on them, only rank 0 writes. Otherwise each of the other
    ranks writes too, after 5 seconds and with its number.
    """
    prefix = ""
    if rank():
        # Rank 0 most likely prints the same error, and then torchrun ends this process. If this process
        # exited first, torchrun would end rank 0 before it has printed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
        if agreed:
            return
        prefix = f"rank {rank()}: "
    write_errors(*(f"{prefix}{line}" for line in lines))


def write_errors(*lines: str) -> None:
    """Write each as a line on stderr."""
    sys.stderr.write("".join(f"error: {escaped(line)}\n" for line in lines))
    sys.stderr.flush()
