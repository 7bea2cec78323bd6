"""A recipe that runs, to be disturbed: `with Launch("torchrun ...", cwd) as run: run.until("step 4/")`.

`Forked` takes the same command, and starts the ranks without torchrun and without their imports.
"""

import ctypes
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import faults
import torch.distributed as dist
from ranks import _context
from shell import ROOT

SHUTDOWN_SECONDS = 30  # torchrun's, between SIGTERM and SIGKILL


class Launch:
    """torchrun and its workers. When the block is left, all of them are gone, however they were ended."""

    def __init__(self, command: str, cwd: Path = ROOT, **env: str):
        words = shlex.split(command)
        assert words[0] == "torchrun", command
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        self.text, self.pids = "", {}
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        inherited = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        self.process = subprocess.Popen(
            words, cwd=cwd, env=inherited | env, start_new_session=True, **options
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def __enter__(self) -> "Launch":
        return self

    def __exit__(self, *_) -> None:
        self.workers()
        for pid in (self.process.pid, *self.pids.values()):
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self.process.wait()

    def until(self, pattern: str, seconds: float = 120) -> None:
        """Wait for a line of the output; the workers are known from then on."""
        self._wait(lambda: re.search(pattern, self.text), seconds, pattern)
        self.workers()

    def workers(self) -> dict[int, int]:
        """rank -> pid of the launcher's children, as far as they have been seen."""
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if (
                    int((path / "stat").read_bytes().rsplit(b")", 1)[1].split()[1])
                    == self.process.pid
                ):
                    ranks = re.findall(rb"\0RANK=(\d+)\0", (path / "environ").read_bytes())
                    self.pids |= {int(rank): int(path.name) for rank in ranks}
            except (OSError, IndexError):
                continue
        return self.pids

    def alive(self) -> list[int]:
        """The ranks of whose process a thread is left: until then its files are open, and locked."""
        return [rank for rank, pid in self.pids.items() if _has_threads(pid)]

    def end(self, seconds: float = 120) -> int:
        """torchrun's exit code, when it has ended and all output is read. No worker may be left."""
        until = time.monotonic() + seconds
        code = self.process.wait(seconds)
        self.reader.join(max(1, until - time.monotonic()))
        self._wait(lambda: not self.alive(), 5, "the end of all workers")
        return code

    def signal(self, number: int) -> None:
        """To torchrun, which hands it on."""
        self.process.send_signal(number)

    def lines(self, start: str) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(start)]

    def error(self) -> str:
        """The only line of error."""
        found = self.lines("error: ")
        assert len(found) == 1, self.text
        return found[0]

    def _read(self) -> None:
        for line in self.process.stdout:
            self.text += line

    def _wait(self, condition, seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"no {what!r} within {seconds} s:\n{self.text}"
            time.sleep(0.02)


class Forked(Launch):
    """The same script and flags on ranks that are forked from a process which has the imports already.

    torchrun's part is played here: when a rank has failed, the others get SIGTERM, and later SIGKILL. It is
    for claims about the ranks; what torchrun says, forwards and returns is seen with `Launch` only. With
    `apart`, what goes to stderr is in `errors`, and not in `text`. Only with `named` can a rank name one that
    is gone, as it can when torchrun has started it: /proc then shows which process is which rank.
    """

    def __init__(
        self, command: str, cwd: Path = ROOT, apart: bool = False, named: bool = False, **env: str
    ):
        launcher, *words = shlex.split(command)
        ranks, settings = 1, dict(env)
        if launcher == "torchrun":
            script = next(at for at, word in enumerate(words) if word.endswith(".py"))
            options = dict(zip(words[:script:2], words[1:script:2], strict=True))
            ranks = int(options.pop("--nproc_per_node"))
            assert options in ({}, {"--nnodes": "1"}), f"not without torchrun: {options}"
            words = words[script:]
            # As torchrun's own, it outlives every rank.
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
            settings |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
            settings |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        self.folder = Path(tempfile.mkdtemp(prefix="forked_"))
        self.output = self.folder / "output"
        self.errors = self.folder / "errors" if apart else self.output
        for file in (self.output, self.errors):
            file.touch()
        self.last_text = ""
        self.processes = []
        for rank in range(ranks):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if launcher == "torchrun" else {}
            told = (words, settings | of_rank, cwd, self.output, self.errors, named)
            process = _context.Process(target=_run_rank, args=told)
            process.start()
            self.processes.append(process)
        self.pids = {rank: process.pid for rank, process in enumerate(self.processes)}
        self.watcher = threading.Thread(target=self._end_all_when_one_fails, daemon=True)
        self.watcher.start()

    @property
    def text(self) -> str:
        if not self.output.exists():
            return self.last_text
        return self.output.read_text(errors="replace")

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.watcher.join()
        self.last_text = self.text  # tests read it afterwards too
        shutil.rmtree(self.folder)

    def workers(self) -> dict[int, int]:
        return self.pids

    def signal(self, number: int) -> None:
        for pid in self.pids.values():
            os.kill(pid, number)

    def end(self, seconds: float = 120) -> int:
        """0 if all ranks ended so, else 1, or the code of one that was started alone; they have ended."""
        self.watcher.join(seconds)
        assert not self.watcher.is_alive(), f"no end within {seconds} s:\n{self.text}"
        codes = [process.exitcode for process in self.processes]
        return codes[0] if len(codes) == 1 else int(any(codes))

    def _end_all_when_one_fails(self) -> None:
        deadline = None
        while any(process.exitcode is None for process in self.processes):
            if deadline is None and any(process.exitcode for process in self.processes):
                deadline = time.monotonic() + SHUTDOWN_SECONDS
                for process in self.processes:
                    process.terminate()
            if deadline is not None and time.monotonic() > deadline:
                for process in self.processes:
                    process.kill()
            time.sleep(0.05)


def forked(
    command: str, cwd: Path = ROOT, seconds: float = 240, apart: bool = False, **env: str
) -> subprocess.CompletedProcess:
    """shell() without the imports: the finished command, with all that it said in stdout, unless `apart`."""
    with Forked(command, cwd, apart, **env) as run:
        code = run.end(seconds)
        said = run.errors.read_text(errors="replace") if apart else ""
    return subprocess.CompletedProcess(command, code, run.text, said)


def _run_rank(
    words: list[str], env: dict[str, str], cwd: Path, output: Path, errors: Path, named: bool
) -> None:
    """What torchrun's child does with its command line, in a session of its own."""
    os.setsid()
    os.environ.update(env)
    if named:
        _show_environment(env)
    os.chdir(cwd)
    for number, file in ((1, output), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    sys.argv = words
    faults.install()
    sys.path.insert(0, str((cwd / words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _show_environment(env: dict[str, str]) -> None:
    """Let /proc/self/environ show `env`, as if this process had begun with it: ranks find each other there.

    The kernel shows the memory in which it once put the variables. proc_pid_stat(5), env_start
    """
    os.environ.update(os.environ)  # C's getenv has copies of its own from here on
    numbers = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(numbers[47]), int(numbers[48])
    shown = "".join(f"\0{name}={value}" for name, value in env.items()).encode() + b"\0"
    assert len(shown) <= end - start, "no room to show the environment"
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _has_threads(pid: int) -> bool:
    """Whether any thread is more than an entry that nobody has waited for."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with suppress(OSError):
            if stat.read_text().rsplit(")", 1)[1].split()[0] not in "ZX":
                return True
    return False
