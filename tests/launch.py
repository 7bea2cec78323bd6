"""A recipe that runs, to be disturbed: `with Launch("torchrun ...", cwd) as run: run.until("step 4/")`."""

import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from shell import ROOT


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
                    int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
                    == self.process.pid
                ):
                    ranks = re.findall(rb"\0RANK=(\d+)\0", (path / "environ").read_bytes())
                    self.pids |= {int(rank): int(path.name) for rank in ranks}
            except (OSError, IndexError):
                continue
        return self.pids

    def alive(self) -> list[int]:
        """The ranks whose process is there, and no mere entry that nobody has waited for."""
        return [rank for rank, pid in self.pids.items() if _state(pid) not in ("", "Z")]

    def end(self, seconds: float = 120) -> int:
        """torchrun's exit code, when it has ended and all output is read. No worker may be left."""
        until = time.monotonic() + seconds
        code = self.process.wait(seconds)
        self.reader.join(max(1, until - time.monotonic()))
        self._wait(lambda: not self.alive(), 5, "the end of all workers")
        return code

    def lines(self, start: str) -> list[str]:
        return [line for line in self.text.splitlines() if line.startswith(start)]

    def _read(self) -> None:
        for line in self.process.stdout:
            self.text += line

    def _wait(self, condition, seconds: float, what: str) -> None:
        until = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < until, f"no {what!r} within {seconds} s:\n{self.text}"
            time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
