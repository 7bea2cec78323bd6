"""ConfigError, and the one place where errors reach the user.

A user sees one line on stderr, once: what is set, why it cannot work, what to write instead. Everything else
is our own fault and keeps its traceback, below a line that names the act and the rank.

Names and texts from files and flags are escaped here, in every line that is printed: a control character
moves the cursor, colours the terminal or begins a line that looks like one of ours.
"""

import gc
import logging
import os
import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .faults import break_at

_act = "parse"
# told of every act: watch.py's, which keeps them, and the one that measures peaks
watchers: list = []


# What a terminal obeys or breaks a line at: C0 and C1 but the tab, separators of lines, marks that turn the
# direction of writing, and half surrogates, which stand for bytes that are no text.
CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
LONGEST_LINE = 4000  # characters of an error: a name may be a book


def escaped(text: object, keep: str = "") -> str:
    """Text that is safe on a terminal and stays on its line: control characters as \\n, \\r or \\u001b, which
    is what JSON writes. Those in `keep` stay. Escaping twice changes nothing.
    """
    return CONTROL.sub(
        lambda found: found[0] if found[0] in keep else _written(found[0]), str(text)
    )


def _written(character: str) -> str:
    return {"\n": "\\n", "\r": "\\r"}.get(character) or f"\\u{ord(character):04x}"


class ConfigError(Exception):
    """Bad input: one error, or a list of several, each of which is printed as one line.

    A line break within an error is escaped like every other control character: it came with a name.
    agreed: every rank raises it together, so rank 0 alone prints it.
    """

    def __init__(self, message: str | list[str], agreed: bool = False):
        messages = message if isinstance(message, list | tuple) else [message]
        self.lines = [_not_too_long(escaped(line)) for line in messages]
        super().__init__(self.lines)
        self.agreed = agreed

    def __str__(self) -> str:
        return "\n".join(self.lines)


def _not_too_long(line: str) -> str:
    """The remedy stands at the end, so the middle goes."""
    if len(line) <= LONGEST_LINE:
        return line
    return f"{line[: LONGEST_LINE // 2]} ... {line[-LONGEST_LINE // 2 :]}"


def check(condition: object, message: str | list[str]) -> None:
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
    fault(name, 0)


def current_act() -> str:
    """The act that was announced last."""
    return _act


@contextmanager
def others_code(what: str, fix: str = "") -> Iterator[None]:
    """Whatever the code of others raises in the block becomes one line, `what: its reason (fix: ...)`.

    For what reads a config or a tokenizer, or builds a model: with odd values it may raise anything. Rust
    code panics with an exception that is no Exception. Ctrl-C and exits pass, and so do errors of ours.
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
    """The kind and the first words of an exception, on one line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}" if words else type(error).__name__


def say(*parts: object, ready: bool = False) -> None:
    """Print a line to stdout. If who read it has gone (`| head`, a closed terminal), the run goes on in
    silence. ready: the text is escaped already, and has line breaks or colours of our own.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = " ".join(map(str, parts))
    line = (text if ready else escaped(text)).encode(encoding, "backslashreplace")
    try:
        print(line.decode(encoding), flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print0(*parts: object, ready: bool = False) -> None:
    """Print a line on rank 0."""
    if rank() == 0:
        say(*parts, ready=ready)


@contextmanager
def report_errors() -> Iterator[None]:
    """Turn what escapes a recipe into one line and an exit code: 2 for bad input, 128 and its number for a
    signal, 1 for no space left and for a rank that is missing.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - closed by who started us
    _escape_others()
    try:
        yield
        _leave_word()
    except BaseException as error:
        try:
            _say(error)
        except KeyboardInterrupt as late:  # torchrun's, while the error was looked into
            _say(late)
        raise
    finally:
        # else Python visits every object of torch and transformers once more, for a second
        gc.freeze()


def _say(error: BaseException) -> None:
    """Say what a user needs to know of an error, and end the process; return where a traceback must tell."""
    if isinstance(error, ConfigError):
        _leave_word()
        print_once(error.lines, error.agreed)
        sys.exit(2)
    if isinstance(error, ModuleNotFoundError) and is_ours(error):
        _leave_word()
        file = error.name.replace(".", "/") + ".py"
        print_once(f"{file} is not here, and these flags need it (fix: copy it too)", agreed=True)
        sys.exit(2)
    if isinstance(error, KeyboardInterrupt):  # utils/run/signals.py says by which
        name = str(error) or "SIGINT"
        # and with it torch, which the processes that tokenize do without
        from .explain import explain_signal

        explain_signal(name, _act, write_errors)  # returns if nobody is missing
        _leave_word()
        print_once(f"stopped by {name} in act '{_act}'", agreed=True)
        sys.exit(128 + getattr(signal, name))
    if isinstance(error, Exception):
        from .explain import explain

        # returns where it knows nothing of it
        explain(error, _act, rank(), print_once, write_errors)
        _leave_word()
        sys.stderr.write(f"error: rank {rank()} failed in act '{_act}'; its traceback follows\n")


def is_ours(error: ModuleNotFoundError) -> bool:
    """Whether a module of this package is missing: who copies it may leave some out."""
    return bool(error.name) and error.name.split(".")[0] == __package__.split(".")[0]


def _leave_word() -> None:
    """Tell the other ranks that this one ends by itself, if there are any."""
    if lost := sys.modules.get(f"{__package__}.lost"):
        lost.leave_word()


def fault(point: str, step: int) -> None:
    """Where tests break a run; see faults.py."""
    if "FAULT" in os.environ:
        break_at(point, step, rank())


def first_five(names: list[str]) -> str:
    """The first five names, and how many more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def rank() -> int:
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdecimal() else 0


def print_once(message: str | list[str], agreed: bool = False) -> None:
    """Write one error, or a list of them; where all ranks `agreed` on them rank 0 alone does, else each names
    itself.
    """
    by = ""
    if rank() != 0:
        # Rank 0 most likely says the same, and torchrun ends this process when it has. Leaving first would
        # cut rank 0 short.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(5)
        if agreed:
            return
        by = f"rank {rank()}: "
    write_errors([f"{by}{line}" for line in ([message] if isinstance(message, str) else message)])


def write_errors(lines: list[str]) -> None:
    """Write each as a line on stderr."""
    sys.stderr.write("".join(f"error: {escaped(line)}\n" for line in lines))
    sys.stderr.flush()


def _escape_others() -> None:
    """Warnings, log records and tracebacks of other packages quote names from files too. Their line breaks
    stay, and what follows one is indented: it cannot pass for a line of ours.
    """
    warnings.formatwarning = _format_warning
    logging.setLogRecordFactory(_Record)
    sys.excepthook = _print_traceback  # torch.distributed puts its own around it


def _indented(text: str) -> str:
    return escaped(text, keep="\n").replace("\n", "\n    ")


def _format_warning(message, category, filename, lineno, line=None) -> str:
    return f"{escaped(filename)}:{lineno}: {category.__name__}: {_indented(str(message))}\n"


class _Record(logging.LogRecord):
    def getMessage(self) -> str:  # noqa: N802 - the name that logging calls
        return _indented(super().getMessage())


def _print_traceback(kind: type[BaseException], error: BaseException, trace) -> None:
    for part in traceback.format_exception(kind, error, trace):
        frame = part.startswith("  ")
        text = part.removesuffix("\n")
        sys.stderr.write((escaped(text, keep="\n") if frame else _indented(text)) + "\n")
