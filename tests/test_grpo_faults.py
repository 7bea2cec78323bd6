"""A run of which some ranks generate ends, stops and goes on as any other, whichever rank is lost.

python -m pytest tests/test_grpo_faults.py -m ""

The oracle is the undisturbed run, as in test_faults.py.
"""

import json
import os
import re
import signal
import time

import grpo
import pytest
from launch import Forked, forked
from metrics import read_metrics
from ranks import run_ranks
from test_faults import names, results
from tiny import tiny_model_folder

from utils.train.checkpoint import complete_checkpoints

slow = pytest.mark.slow
RULES = """
import multiprocessing
import os
import signal
import time
from functools import cache

@cache
def helper():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,), daemon=True)
    process.start()

def letters(completions, **columns):
    return [sum(c.isalpha() for c in completion) for completion in completions]

def late_letters(completions, **columns):
    if "LATE" in os.environ:
        helper()  # as a pool of processes, which lives on if this process is killed
        time.sleep(float(os.environ["LATE"]))
    return letters(completions)

def timed_letters(completions, **columns):
    signal.signal(signal.SIGALRM, lambda *_: None)
    time.sleep(2)
    return letters(completions)

def fails(completions, **columns):
    raise KeyError("no such rule")
"""
RUN = {
    "steps": 5,
    "lr": 1e-3,
    "warmup": 1,
    "global_batch_size": 2,
    "group_size": 3,
    "max_new_tokens": 4,
    "seq_len": 64,
    "batch_size": 3,
    "generate_ranks": 1,
    "save_every": 2,
    "keep": 0,
}
ENDLESS = {"steps": 100_000, "schedule": "constant", "warmup": 0, "save_every": 50_000}
RANKS = {"a generator": 2, "a learner": 1, "the first learner": 0}


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("grpo_faults")
    rows = [{"prompt": f"Say {i} " * (1 + i % 3), "answer": str(i)} for i in range(6)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (root / "rules.py").write_text(RULES)
    model = tiny_model_folder(root / "model", vocab_size=271)
    rewards = f"{root}/rules.py:late_letters"
    return RUN | {"model": str(model), "dataset": f"{root}/prompts.jsonl", "rewards": rewards}


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    return results(train(3, flags, tmp_path_factory.mktemp("undisturbed") / "run"))


def train(ranks, flags, out):
    return run_ranks(_train, ranks, flags, out)[0]


def _train(world, flags, out):
    return grpo.main(grpo.Config(**flags, output_dir=str(out)))


def disturbed(flags, out, named=False):
    """The run on three ranks; a step is long enough to be disturbed."""
    return Forked(command(flags, out), named=named, LATE="0.3")


def command(flags, out, ranks=3):
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    start = f"torchrun --nproc_per_node {ranks} recipes/grpo.py"
    return f"{start} {words} --output_dir {out}"


# --- kills


@slow
@pytest.mark.parametrize("who", RANKS)
def test_a_killed_rank_is_named_and_the_same_command_goes_on_bit_for_bit(
    flags, undisturbed, tmp_path, who
):
    rank, out = RANKS[who], tmp_path / "run"
    with disturbed(flags, out, named=True) as run:
        run.until("step 3/")
        begun = time.monotonic()
        os.kill(run.pids[rank], signal.SIGKILL)
        run.until("error: ", 15)
        assert run.end(15) != 0  # no worker is left
        assert time.monotonic() - begun < 15
        said = run.error()
    assert said.startswith(f"error: rank {rank} is gone in act '")
    assert complete_checkpoints(out / "checkpoints")[-1].name in ("step_00000002", "step_00000004")
    train(3, flags, out)
    assert results(out) == undisturbed


@slow
def test_a_generator_that_is_killed_before_the_first_step_is_named(flags, tmp_path):
    with Forked(command(flags, tmp_path / "run"), named=True, FAULT="load:2:0") as run:
        assert run.end(60) != 0
        said = run.error()
    assert said.startswith("error: rank 2 is gone in act '")


# --- signals


def stopped(flags, out, send) -> int:
    """Start, let `send` disturb it after step 2, and see it save; the step after which it stopped. What
    torchrun makes of signals is in test_faults.py.
    """
    with disturbed(flags | ENDLESS, out) as run:
        run.until("step 2/")
        begun = time.monotonic()
        send(run)
        assert run.end(30) != 0  # no worker is left
        assert time.monotonic() - begun < 30
        (said,) = run.lines("stopped ")
        assert not run.lines("error: ")
    step = int(said.split("after step ")[1].split(":")[0])
    path = out / "checkpoints" / f"step_{step:08d}"
    assert said.startswith("stopped   by SIG")
    assert said.endswith(f"after step {step}: {path}")
    (again,) = run.lines("to go on  torchrun --nproc_per_node=3 ")
    assert "--generate_ranks 1" in again
    assert f"--output_dir {out}" in again
    assert names(out / "checkpoints") == [path.name]
    assert [x["step"] for x in read_metrics(out / "metrics.jsonl")] == list(range(1, step + 1))
    return step


@slow
def test_sigterm_is_a_checkpoint_and_the_resume_is_exact(flags, tmp_path):
    out = tmp_path / "run"
    step = stopped(flags, out, lambda run: run.signal(signal.SIGTERM))
    longer = flags | ENDLESS | {"steps": step + 2}
    train(3, longer, out)
    assert results(out) == results(train(3, longer, tmp_path / "undisturbed"))


SIGNALS = {
    "Ctrl-C to all": lambda run: run.signal(signal.SIGINT),
    "SIGUSR1 to a learner": lambda run: os.kill(run.pids[1], signal.SIGUSR1),
    # as where the scheduler takes a machine that only generates
    "SIGTERM to a generator": lambda run: os.kill(run.pids[2], signal.SIGTERM),
}


@slow
@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_is_a_checkpoint(flags, tmp_path, name):
    stopped(flags, tmp_path / "run", SIGNALS[name])


@slow
def test_a_timer_of_a_reward_is_no_second_ctrl_c(flags, tmp_path):
    def send(run):
        run.signal(signal.SIGINT)
        time.sleep(0.7)
        os.kill(run.pids[0], signal.SIGALRM)

    timed = flags | {"rewards": flags["rewards"].replace("late_letters", "timed_letters")}
    stopped(timed, tmp_path / "run", send)


@slow
def test_sigterm_before_the_first_step_is_one_line(flags, tmp_path):
    act = "load"
    with Forked(command(flags, tmp_path / "new" / "run"), FAULT=f"{act}:0:0:2") as run:
        run.until(f"--- {act}")
        time.sleep(1)
        run.signal(signal.SIGTERM)
        assert run.end(30) != 0
        said = run.error()
    assert said == f"error: stopped by SIGTERM in act '{act}'"
    assert names(tmp_path) == []


# --- errors


@slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_reward_that_fails_ends_the_generators_too_in_one_line(flags, tmp_path, ranks):
    failing = flags | {"rewards": flags["rewards"].replace("late_letters", "fails")}
    begun = time.monotonic()
    with Forked(command(failing, tmp_path / "run", ranks)) as run:
        run.until("error: ")
        begun = time.monotonic()
        assert run.end(15) != 0  # no worker is left
        assert time.monotonic() - begun < 15
        said = run.lines("error: ")  # of each rank whose prompt has failed
        assert not re.search(r'File ".*(recipes|utils)/', run.text)  # no traceback of ours
    assert 0 < len(said) == len({*said}) < ranks
    assert all("no such rule" in line for line in said)


def test_one_process_alone_cannot_generate_for_others(flags, tmp_path):
    words = command(flags, tmp_path / "run").split("recipes/")[1]
    run = forked(f"python recipes/{words}", apart=True)
    assert run.returncode == 2
    assert run.stderr == (
        "error: --generate_ranks 1 of 1 ranks: each rank learns or generates (fix: fewer, or torchrun"
        " with more ranks)\n"
    )
    assert names(tmp_path) == []


@slow
def test_a_signal_while_the_learners_save_is_no_sign_that_generators_were_killed(flags, tmp_path):
    """The result was thrown away: generators end before the save."""
    words = command(flags | {"steps": 1}, tmp_path / "run")
    with Forked(words, named=True, FAULT="save:0:0:5") as run:
        run.until("--- save")
        while run.processes[-1].exitcode is None:  # the generator's
            time.sleep(0.05)
        os.kill(run.pids[0], signal.SIGTERM)
        assert run.end(60) == 0
        assert not run.lines("error: ")
        assert len(run.lines("finished ")) == 1


def test_ranks_end_alike_when_all_is_done(flags, tmp_path):
    with Forked(command(flags | {"steps": 1}, tmp_path / "run")) as run:
        assert run.end(60) == 0
        assert not run.lines("error: ")
        assert len(run.lines("finished ")) == 1
