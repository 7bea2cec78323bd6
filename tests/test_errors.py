"""What escapes a recipe: one line, once, and the right exit code.

python -m pytest tests/test_errors.py
"""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from utils.errors import ConfigError, check

ROOT = Path(__file__).resolve().parent.parent


def start(body: str, rank: int = 0) -> subprocess.Popen:
    """A process in which `body` stands inside report_errors()."""
    code = "import errno, os, time\nfrom utils.errors import *\nwith report_errors():\n"
    code += "".join(f"    {line}\n" for line in body.splitlines())
    environment = os.environ | {"RANK": str(rank), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body: str, rank: int = 0) -> tuple[int, str, str]:
    process = start(body, rank)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def test_check_raises_only_where_the_condition_fails():
    check(True, "unseen")
    check([0], "unseen")
    with pytest.raises(ConfigError, match="seen"):
        check(None, "seen")


def test_bad_input_is_one_line_and_exit_code_2():
    assert run("check(False, '--lr 0 teaches nothing: try --lr 1e-5')") == (
        2,
        "",
        "error: --lr 0 teaches nothing: try --lr 1e-5\n",
    )


def test_several_errors_are_several_lines():
    assert run("raise ConfigError('one\\ntwo', agreed=True)") == (2, "", "error: one\nerror: two\n")


@pytest.mark.slow
def test_another_rank_gives_rank_0_time_to_speak_and_is_silent_where_all_agree():
    started = time.monotonic()
    agreed = start("raise ConfigError('one', agreed=True)", rank=1)
    assert run("raise ConfigError('one error: x')", rank=1) == (2, "", "error: rank 1: one error: x\n")
    assert (*agreed.communicate(timeout=60), agreed.returncode) == ("", "", 2)
    assert time.monotonic() - started > 4


def test_acts_are_announced_by_rank_0():
    assert run("act('plan')") == (0, "--- plan\n", "")
    assert run("act('plan')", rank=1) == (0, "", "")


def test_an_error_of_our_own_keeps_its_traceback_and_names_act_and_rank():
    code, _, err = run("act('shard')\nassert 1 + 1 == 3, '1 + 1'", rank=1)
    assert code == 1
    assert err.startswith("error: rank 1 failed in act 'shard'; its traceback follows\nTraceback")
    assert "AssertionError: 1 + 1" in err


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "raised",
    [
        "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), '/out/model')",
        "RuntimeError(f'I/O error: {os.strerror(errno.ENOSPC)} (os error 28)')",
    ],
)
def test_a_full_disk_is_one_line_that_names_the_act(raised):
    code, _, err = run(f"act('save')\nraise {raised}")
    assert code == 1
    assert err.startswith(f"error: {FULL}")
    assert "in act 'save': free space" in err
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_really_full_is_told_from_a_bug():
    code, _, err = run("with open('/dev/full', 'w') as file:\n    file.write('x' * 100000)")
    assert (code, len(err.splitlines())) == (1, 1)
    assert FULL in err


def test_other_failures_of_files_keep_their_traceback():
    code, _, err = run("open('/no/such/file')")
    assert code == 1
    assert "Traceback" in err


def test_ctrl_c_is_one_line_and_exit_code_130():
    process = start("act('train')\ntime.sleep(60)")
    assert process.stdout.readline() == "--- train\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: stopped by SIGINT in act 'train'\n")


def test_exit_codes_of_others_pass_through():
    assert run("raise SystemExit(7)") == (7, "", "")
