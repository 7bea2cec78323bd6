"""Run a command as a user would: `shell("torchrun --nproc_per_node 2 recipes/finetune.py", cwd=...)`."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QUOTED = shlex.quote(str(ROOT))  # in a command: the path may have spaces


def shell(
    command: str, cwd: Path = ROOT, seconds: float = 240, **env: str
) -> subprocess.CompletedProcess:
    """The finished process, output as text. `python` and `torchrun` are this environment's; torchrun takes a
    free port.

    The whole process group is killed when the time is up, so no rank outlives its test.
    """
    words = shlex.split(command)
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    elif words[0] == "python":
        words[0] = sys.executable
    inherited = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env={**inherited, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(words, process.returncode, out, err)
