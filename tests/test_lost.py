"""A rank that is killed is named by the others, in one line with the likeliest cause and what helps.

python -m pytest tests/test_lost.py -m ""
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import pytest
from launch import Forked
from shell import ROOT
from test_faults import command
from test_faults import flags as flags  # a fixture

slow = pytest.mark.slow
ACTS = "folder plan load train save".split()

RANKS = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from utils.run.distributed import all_gather, init_distributed
from utils.run.errors import act
from utils.run.signals import report_errors, stop_after_step, stop_at_once
with report_errors():
    stop_at_once()
    world = init_distributed()
    act("load")
    if world.rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # only what rank 0 says is read
        time.sleep(0.3)  # rank 0 waits by then
        {ends}
    else:
        {waits}
"""
WAITS = {
    "in a collective": "all_gather('here', world)",
    "in a new group": "dist.new_group(backend='gloo')",  # where Python runs no handler
    "at work": "time.sleep(60)",
    "about to explain": """sys.addaudithook(
            lambda event, of: event == "import" and "failures" in of[0] and os.kill(os.getpid(), 15)
        )
        all_gather("here", world)""",
    # as a rank that waits for a GPU
    "in C within a step": "stop_after_step(); torch.linalg.eigvals(torch.rand(6000, 6000))",
}
DIES = "os.kill(os.getpid(), signal.SIGKILL)"
FAILS = "raise RuntimeError('row 7 is corrupt')"


def said_by_rank_0(tmp_path, ends: str, waits: str) -> str:
    """Forked plays torchrun's part: when rank 1 has ended it sends SIGTERM to the other."""
    (tmp_path / "ranks.py").write_text(RANKS.format(ends=ends, waits=waits))
    with Forked(f"torchrun --nproc_per_node 2 {tmp_path}/ranks.py", apart=True, named=True) as run:
        assert run.end(60) == 1
        return run.errors.read_text()


@pytest.mark.parametrize(
    "waits",
    [
        pytest.param(waits, marks=slow) if waits in ("in a new group", "at work") else waits
        for waits in WAITS
    ],
)
def test_a_killed_rank_is_one_line_that_names_it_wherever_the_others_are(tmp_path, waits):
    (line,) = said_by_rank_0(tmp_path, DIES, WAITS[waits]).splitlines()
    assert line.startswith("error: rank 1 is gone in act 'load'")
    assert "memory" in line


@slow
def test_a_killed_rank_of_another_machine_is_one_line_that_says_killed_or_a_machine_gone(tmp_path):
    """Each rank is the only one of its launcher, so neither finds the other in /proc."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(ends=DIES, waits=WAITS["in a collective"]))
    ranks = []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(2):
        here = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        here |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PYTHONPATH": ROOT}
        environment = os.environ | {name: str(value) for name, value in here.items()}
        command = [sys.executable, script]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
    (line,) = ranks[0].communicate(timeout=60)[1].splitlines()
    assert ranks[1].wait(60) == -signal.SIGKILL
    assert ranks[0].returncode == 1
    assert line.startswith("error: rank 0 waited in vain for the others in act 'load': ")
    assert "closed by peer" in line or "reset by peer" in line
    assert line.endswith("else it was killed, or its machine is gone)")


def test_a_rank_that_left_at_a_second_ctrl_c_is_not_said_to_be_killed(tmp_path):
    """Both got the first one; rank 1 is the earlier to leave, and torchrun sends SIGTERM to rank 0."""
    waits = "stop_after_step(); os.kill(os.getpid(), signal.SIGINT); time.sleep(60)"
    script = tmp_path / "ranks.py"
    script.write_text(RANKS.format(ends="time.sleep(2); os._exit(130)", waits=waits))
    with Forked(f"torchrun --nproc_per_node 2 {script}", apart=True, named=True) as run:
        run.end(60)
        assert run.errors.read_text() == ""
        assert run.lines("second Ctrl-C: leaving at once, without a checkpoint")


@slow
def test_a_second_ctrl_c_ends_a_cleanup_that_waits(tmp_path):
    """As it does for the files of a model that the hub still sends."""
    waits = "from concurrent.futures import ThreadPoolExecutor as Pool\n"
    waits += "        with Pool() as pool: pool.submit(time.sleep, 60).result()"
    (tmp_path / "ranks.py").write_text(RANKS.format(ends="", waits=waits))
    with Forked(f"python {tmp_path}/ranks.py") as run:
        run.until("--- load")
        for _ in range(2):
            time.sleep(1)
            run.signal(signal.SIGINT)
        assert run.end(10) == 130
        assert run.lines("second Ctrl-C: leaving at once, without a checkpoint")


def takes_sigterm(pid: int) -> bool:
    """Whether it would end the process at once."""
    status = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"^Sig(?:Blk|Ign|Cgt):\s+(\w+)", status, re.M)
    return not any(int(mask, 16) >> (signal.SIGTERM - 1) & 1 for mask in masks)


@slow
def test_a_stop_that_rank_0_hears_after_the_others_have_ended_is_not_taken_for_a_kill(tmp_path):
    (tmp_path / "ranks.py").write_text(
        RANKS.format(ends="time.sleep(60)", waits="all_gather('here', world)")
    )
    with Forked(f"torchrun --nproc_per_node 2 {tmp_path}/ranks.py", apart=True, named=True) as run:
        run.until("--- load")
        time.sleep(1)
        run.signal(signal.SIGTERM)  # as torchrun hands on that of the scheduler
        # Rank 1 gives rank 0 five seconds to speak, which a second one cuts short.
        run._wait(lambda: takes_sigterm(run.pids[1]), 60, "rank 1 to leave")
        time.sleep(2)  # on a busy machine rank 0 looks late whether somebody is gone
        os.kill(run.pids[1], signal.SIGTERM)
        run.end(60)
        assert run.errors.read_text() == "error: stopped by SIGTERM in act 'load'\n"
    assert run.processes[0].exitcode == 128 + signal.SIGTERM


def test_a_rank_that_ended_by_itself_is_told_from_its_own_words(tmp_path):
    """Beside a process whose name Linux cuts after 15 bytes, within a character."""
    named = tmp_path / ("\u00e9" * 8)
    named.symlink_to(which("sleep"))
    with subprocess.Popen([named, "60"]) as other:
        (line,) = said_by_rank_0(tmp_path, FAILS, WAITS["in a collective"]).splitlines()
        other.kill()
    assert line.startswith("error: rank 1 is gone in act 'load'")
    assert "if it said nothing" in line


def test_a_wrong_flag_is_said_once_however_far_behind_a_rank_is(tmp_path):
    """Rank 1 still imports when rank 0 has ended and torchrun sends SIGTERM."""
    (tmp_path / "ranks.py").write_text("""
import os, time
from utils.run.errors import ConfigError
from utils.run.signals import report_errors, stop_at_once
with report_errors():
    stop_at_once()
    time.sleep(60 * int(os.environ["RANK"]))
    raise ConfigError("unknown flag --learing_rate")
""")
    with Forked(f"torchrun --nproc_per_node 2 {tmp_path}/ranks.py", apart=True, named=True) as run:
        assert run.end(60) != 0
        assert run.errors.read_text() == "error: unknown flag --learing_rate\n"


@slow
@pytest.mark.parametrize("name", ACTS)
def test_a_rank_killed_in_any_act_of_a_run_is_one_line(flags, tmp_path, name):
    with Forked(command(flags, tmp_path / "run"), named=True, FAULT=f"{name}:1:0") as run:
        assert run.end(120) != 0
        line = run.error()
    said = re.match(r"error: rank 1 is gone in act '(\w+)'", line)
    # That of rank 0, which may be behind, or further on, up to the next act in which ranks wait.
    assert said[1] == re.findall(r"^--- (\w+)", run.text, re.M)[-1]
    assert "memory" in line
    assert "KeyboardInterrupt" not in run.text
    ours = [
        line for line in run.text.splitlines() if "utils/" in line or 'recipes/finetune.py"' in line
    ]
    assert ours == []  # no traceback of ours
