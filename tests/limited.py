"""A real limit of memory for a command and all of its children: `with Limit(2**30) as limit: limit.run(...)`.

It is a cgroup below our own, of v1 or v2. `Limit.possible()` tells whether this machine lets us make one.
"""

import os
import secrets
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
V1 = {"limit": "memory.limit_in_bytes", "kills": "memory.oom_control"}
V2 = {"limit": "memory.max", "kills": "memory.events"}


def own_group() -> tuple[Path, dict]:
    """(folder of the cgroup of this process that counts memory, names of its files)"""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if "memory" in kinds.split(","):
            return ROOT / "memory" / path[1:], V1
        if not kinds and (ROOT / "cgroup.controllers").exists():
            return ROOT / path[1:], V2
    raise OSError("no cgroup of this process counts memory")


class Limit:
    """So many bytes for whatever `run` starts; `kills` processes were killed for more."""

    def __init__(self, size: int):
        above, self.files = own_group()
        self.folder, self.size = above / f"limited_{secrets.token_hex(4)}", size

    def __enter__(self) -> "Limit":
        self.folder.mkdir()
        try:
            (self.folder / self.files["limit"]).write_text(str(self.size))
        except OSError:
            self.folder.rmdir()
            raise
        return self

    def __exit__(self, *_) -> None:
        for _ in range(100):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            with suppress(OSError):
                self.folder.rmdir()
                return
            time.sleep(0.1)

    @staticmethod
    def possible() -> bool:
        try:
            with Limit(2**30) as limit:
                return limit.run(["true"]).returncode == 0
        except OSError:
            return False

    @property
    def kills(self) -> int:
        lines = (self.folder / self.files["kills"]).read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def set(self, size: int) -> None:
        """From now on so many bytes, which must be more than are in use."""
        (self.folder / self.files["limit"]).write_text(str(size))
        self.size = size

    def run(self, words: list[str], seconds: float = 600, on_line=None, **options):
        """The finished command, a CompletedProcess with all that it said in stdout; on_line is told each
        line. Its process group is killed when the time is up.
        """
        words = [
            "sh",
            "-c",
            'echo $$ > "$0" && exec "$@"',
            str(self.folder / "cgroup.procs"),
            *words,
        ]
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )
        timer = threading.Timer(seconds, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        said = []
        try:
            for line in process.stdout:
                said.append(line)
                if on_line:
                    on_line(line)
            process.wait()
        finally:
            timer.cancel()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return subprocess.CompletedProcess(words, process.returncode, "".join(said), "")
