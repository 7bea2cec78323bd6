"""ConfigError, and the one place where errors reach the user.

A user sees one line on stderr, once: what is set, why it cannot work, what to write instead. Everything else
is our own fault and keeps its traceback, below a line that names the act and the rank.

Names and texts from files and flags are escaped here, in every line that is printed: a control character
moves the cursor, colours the terminal or begins a line that looks like one of ours.
"""

import errno
import gc
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .memory import note_peak

_act = "parse"
_leaving = threading.Lock()
_planned = ""  # memory, as the plan has it
_less_memory: Callable[[], str] | None = None  # finds what needs less of it


# What a terminal obeys or breaks a line at: C0 and C1 but the tab, separators of lines, marks that turn the
# direction of writing, and half surrogates, which stand for bytes that are no text.
CONTROL = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
LOST = re.compile(
    "[Tt]imed? ?out|[Cc]onnection (closed|refused|reset)|[Bb]roken pipe|remote process|aborted"
)
REFUSED = "can't allocate memory"  # of torch's CPU allocator


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
        self.lines = [escaped(line) for line in messages]
        super().__init__(self.lines)
        self.agreed = agreed

    def __str__(self) -> str:
        return "\n".join(self.lines)


def check(condition: object, message: str | list[str]) -> None:
    """Raise ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def act(name: str) -> None:
    """Announce an act of the recipe's story, so that a log, a hang or a crash tells where it was."""
    global _act
    note_peak(_act)
    _act = name
    print0(f"--- {name}")


def end_act() -> None:
    """The peak of the act that goes on is known so far."""
    note_peak(_act)


def advise_on_memory(planned: str, less: Callable[[], str]) -> None:
    """What errors say where memory ran out or a rank was killed: what was planned, and what needs less."""
    global _planned, _less_memory
    _planned, _less_memory = f"; {planned}", less


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
    signal, 1 for no space left, no memory and a rank that is missing. Other errors keep their traceback.
    """
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - None: closed
    try:
        yield
    except ConfigError as error:
        print_once(error.lines, error.agreed)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != __package__.split(".")[0]:
            raise  # not a file of this package, of which a copy may leave some out
        file = error.name.replace(".", "/") + ".py"
        print_once(f"{file} is not here, and these flags need it (fix: copy it too)", agreed=True)
        sys.exit(2)
    except KeyboardInterrupt as error:  # utils/run/signals.py says by which signal
        name = str(error) or "SIGINT"
        if name == "SIGTERM":  # torchrun sends it to the others when a rank has ended
            say_who_is_gone()
        print_once(f"stopped by {name} in act '{_act}'", agreed=True)
        sys.exit(128 + getattr(signal, name))
    except Exception as error:
        explain(error)  # returns where it knows nothing of it
        sys.stderr.write(f"error: rank {rank()} failed in act '{_act}'; its traceback follows\n")
        raise
    finally:
        if sys.exc_info()[0]:
            abort_nccl()
        # else Python visits every object of torch and transformers once more, for a second
        gc.freeze()


def abort_nccl() -> None:
    """Else NCCL warns of groups that nobody left, beside our line, or its destructor waits for ranks that are
    gone (https://github.com/pytorch/pytorch/issues/119797).
    """
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized() and torch.distributed.is_initialized():
        torch.distributed.distributed_c10d._abort_process_group()


def explain(error: Exception) -> None:
    """Say in one line what a full disk, a lack of memory or a missing rank is, and end the process. Return
    where it is something else.
    """
    for number in (signal.SIGTERM, signal.SIGINT):  # torchrun's, while this error is looked into
        signal.signal(number, signal.SIG_IGN)
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT):
        reason = os.strerror(code)  # safetensors and torch keep the system's words
        if reason in text:
            filename = getattr(error, "filename", None)
            file = f" for {filename}" if filename else ""
            print_once(
                f"{reason}{file} in act '{_act}': free space, or choose another --output_dir"
            )
            _leave()
    first_line = (text or "MemoryError").splitlines()[0][:300]
    if type(error).__name__ in ("MemoryError", "OutOfMemoryError") or REFUSED in text:
        what = f"rank {rank()} is out of memory in act '{_act}': {first_line}{_planned}"
        fix = _less_memory() if _less_memory else "fewer ranks, or more memory"
        write_errors([f"{what} (fix: {fix})"])
        _leave()
    if LOST.search(text):
        say_who_is_gone()
        waits = f"rank {rank()} waited in vain for the others in act '{_act}': {first_line}"
        fix = "see what they say; one that says nothing hangs: py-spy dump shows where"
        print_once(f"{waits} (fix: {fix})")
        _leave()


def say_who_is_gone() -> None:
    """Where ranks of this machine are gone, the first of the others says so; and the process ends. It stays a
    moment where there are more, which would else take one that has said so, or is silent, for one more lost.
    """
    if gone := ranks_gone():
        _leaving.acquire()  # for good: another thread that comes here too waits for the end
        present = ranks_present()
        if rank() == min(present):
            names = ", ".join(map(str, gone[:5]))
            killed = "if it said nothing itself, it was killed, most likely by the kernel for lack of memory"
            write_errors([f"rank {names} is gone in act '{_act}': {killed}{_planned}"])
        if len(present) > 1:
            time.sleep(3)
        _leave()


def ranks_gone() -> list[int]:
    """The ranks that this one's launcher has started, and that do not run any more."""
    present = ranks_present()
    if rank() not in present:  # nothing is known
        return []
    first = rank() - int(os.environ.get("LOCAL_RANK", "0"))
    expected = range(first, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return [other for other in expected if other not in present]


def ranks_present() -> set[int]:
    """The ranks among the processes that this one's launcher has started and that still run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) != os.getppid() or state in "ZX":
                continue
            environment = (stat.parent / "environ").read_bytes()
        except OSError:  # it has just ended, or is another user's
            continue
        found |= {int(number) for number in re.findall(rb"\0RANK=(\d+)\0", environment)}
    return found


def _leave() -> None:
    """End this process, without waiting for a thread that saves and waits for other ranks."""
    sys.stdout.flush()  # write_errors has flushed the other
    os._exit(1)


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
