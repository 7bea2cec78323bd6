"""A run that is killed or stopped at any point continues as if nothing had happened.

python -m pytest tests/test_faults.py               the fast tests, which `make test` runs
python -m pytest -m "not gpu" tests/test_faults.py  also the slow ones

The oracle is the undisturbed run. The manifest of a checkpoint has the SHA-256 of every rank's file. These
files hold the parameters, the optimizer's tensors and the state of the random number generators, so equal
hashes mean equal bits. metrics.jsonl has losses and gradient norms, which depend on the order of the rows.
"""

import json
import math
import os
import re
import signal
import time

import finetune
import pytest
from launch import Forked, Launch
from metrics import read_metrics
from ranks import run_ranks
from test_parity import write_rows
from tiny import tiny_model_folder

from utils.run.errors import ConfigError
from utils.train.checkpoint import complete_checkpoints

FLAGS = {"steps": 6, "lr": 1e-3, "warmup": 1, "global_batch_size": 4, "save_every": 2, "keep": 0}
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("faults")
    model, rows = (
        tiny_model_folder(root / "model", vocab_size=271),
        write_rows(root / "rows.jsonl", 14),
    )
    return {**FLAGS, "model": str(model), "dataset": str(rows)}


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    return results(train(2, flags, tmp_path_factory.mktemp("undisturbed") / "run"))


def train(ranks, flags, out):
    return run_ranks(_train, ranks, flags, out)[0]


def _train(world, flags, out):
    return finetune.main(finetune.Config(**flags, output_dir=str(out)))


def command(flags, out, torchrun="", script="recipes/finetune.py"):
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    return f"torchrun --nproc_per_node 2 {torchrun} {script} {words} --output_dir {out}"


def results(out) -> dict:
    """What a run leaves: its curve, the hash of each file of its last checkpoint, and the model."""
    curve = [(x["step"], x["loss"], x["grad_norm"]) for x in read_metrics(out / "metrics.jsonl")]
    files = json.loads(
        (complete_checkpoints(out / "checkpoints")[-1] / "manifest.json").read_text()
    )["files"]
    tensors = {name: file["sha256"] for name, file in files.items() if name.endswith(".distcp")}
    return {
        "curve": curve,
        "tensors": tensors,
        "model": (out / "model" / "model.safetensors").read_bytes(),
    }


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def broken(flags, out, fault="", script="recipes/finetune.py", launch=Forked, **how) -> str:
    """The output of a run that ends within 15 s of a fault. No worker is left."""
    with launch(command(flags, out, script=script), **how, FAULT=fault) as run:
        run.until("--- train|error: ")
        begun = time.monotonic()
        assert run.end() != 0
        # 15 s from the fault, and before it the steps and the wait of torchrun
        assert time.monotonic() - begun < 45
        return run.text


def goes_on(flags, out, undisturbed, newest=None):
    """The run resumes from step `newest`, and ends with the results of the undisturbed run."""
    found = complete_checkpoints(out / "checkpoints")[-1]
    assert (found and int(found.name[-8:])) == newest
    train(2, flags, out)
    assert results(out) == undisturbed
    checkpoints = ["step_00000002", "step_00000004", "step_00000006"]
    assert names(out / "checkpoints") == checkpoints  # leftovers of the broken save are gone


# --- kills


KILLS = {  # where a rank is killed -> point:rank:step, the newest complete checkpoint afterwards
    "rank 1 in a step": ("step:1:3", 2),
    "rank 0 in a step": ("step:0:3", 2),
    "rank 0 at the start of a save": ("begin:0:4", 2),
    "rank 0 at half of the data": ("data:0:4", 2),
    "rank 0 before the metadata": ("metadata:0:4", 2),
    "rank 0 before the rename": ("rename:0:4", 2),
    "rank 0 after a save": ("published:0:4", 4),
    "rank 1 at the start of a save": ("begin:1:4", 2),
    "rank 1 at half of the data": ("data:1:4", 2),
}


AT_ONCE = "rank 1 in a step"  # the others are slow
BY_TORCHRUN = "rank 0 in a step"


@pytest.mark.parametrize(
    "kill", [kill if kill == AT_ONCE else pytest.param(kill, marks=slow) for kill in KILLS]
)
def test_a_killed_rank_costs_at_most_one_save_interval(flags, undisturbed, tmp_path, kill):
    (fault, newest), out = KILLS[kill], tmp_path / "run"
    how = {"launch": Launch} if kill == BY_TORCHRUN else {"named": True}
    said = broken(flags, out, fault, **how)
    rank = fault.split(":")[1]
    if kill in (AT_ONCE, BY_TORCHRUN):
        assert f"error: rank {rank} is gone in act 'train'" in said  # ours
    if kill == BY_TORCHRUN:
        assert f"(local_rank: {rank})" in said  # and torchrun's
        assert "-9" in said
    goes_on(flags, out, undisturbed, newest)


@slow
@pytest.mark.parametrize(
    "kill", ["rank 0 at half of the data", "rank 0 before the rename", "rank 0 after a save"]
)
def test_a_save_in_the_background_is_killed_as_safely(flags, undisturbed, tmp_path, kill):
    (fault, newest), out = KILLS[kill], tmp_path / "run"
    broken({**flags, "async_save": "true"}, out, fault)
    goes_on({**flags, "async_save": True}, out, undisturbed, newest)


@slow
def test_workers_do_not_outlive_a_killed_launcher_and_its_folder_is_free(
    flags, undisturbed, tmp_path
):
    with Launch(command(flags, tmp_path / "run"), FAULT="step:1:3:30") as run:
        run.until("step 3/")
        run.process.kill()
        run.process.wait()
        begun = time.monotonic()
        while run.alive():
            assert time.monotonic() - begun < 5
            time.sleep(0.05)
    goes_on(flags, tmp_path / "run", undisturbed, 2)


@slow
def test_a_kill_while_an_old_checkpoint_is_removed_leaves_no_half_candidate(
    flags, undisturbed, tmp_path
):
    out, kept = tmp_path / "run", {**flags, "keep": 1}
    # the first call has nothing to remove
    broken(kept, out, script="tests/inject.py retire 0 2")
    leftovers = [name for name in names(out / "checkpoints") if name.startswith(".tmp_")]
    assert leftovers
    train(2, kept, out)
    assert results(out) == undisturbed
    assert names(out / "checkpoints") == ["step_00000006"]


@slow
def test_a_kill_during_the_final_save_leaves_no_half_model(flags, undisturbed, tmp_path):
    out = tmp_path / "run"
    broken(flags, out, script="tests/inject.py export 0 1")
    assert not (out / "model").exists()
    train(2, flags, out)
    assert results(out) == undisturbed
    assert not [name for name in names(out) if name.startswith(".tmp_")]


# --- signals

ENDLESS = {"steps": 100_000, "schedule": "constant", "warmup": 0, "save_every": 50_000}


def stopped(flags, out, send, torchrun="", code=None, launch=Launch) -> int:
    """Call `send` after step 2, check that the run saves, and return the step after which it stopped."""
    with launch(command({**flags, **ENDLESS}, out, torchrun)) as run:
        run.until("step 2/")
        begun = time.monotonic()
        send(run)
        ended = run.end()
        assert time.monotonic() - begun < 30
        assert ended != 0 if code is None else ended == code
        (said,) = run.lines("stopped ")  # once, not once per rank
        assert not run.lines("error: ")
    step = int(said.split("after step ")[1].split(":")[0])
    path = out / "checkpoints" / f"step_{step:08d}"
    assert said.startswith("stopped   by SIG")
    assert said.endswith(f"after step {step}: {path}")
    (again,) = run.lines("to go on  torchrun --nproc_per_node=2 ")
    assert f"--output_dir {out}" in again
    assert names(out / "checkpoints") == [path.name]  # and no second save
    assert [x["step"] for x in read_metrics(out / "metrics.jsonl")] == list(range(1, step + 1))
    return step


def test_sigterm_is_a_checkpoint_and_the_resume_is_exact(flags, tmp_path):
    """To all ranks, as torchrun hands it on."""
    out = tmp_path / "run"
    step = stopped(flags, out, lambda run: run.signal(signal.SIGTERM), code=1, launch=Forked)
    longer = {**flags, **ENDLESS, "steps": step + 3}
    train(2, longer, out)
    assert results(out) == results(train(2, longer, tmp_path / "undisturbed"))


def everyone(run):
    """Ctrl-C in a terminal, where the ranks have no sessions of their own."""
    for pid in (*run.pids.values(), run.process.pid):
        os.kill(pid, signal.SIGINT)


SIGNALS = {
    "SIGTERM to torchrun": (lambda run: run.process.send_signal(signal.SIGTERM), "", None),
    "SIGTERM to rank 1": (lambda run: os.kill(run.pids[1], signal.SIGTERM), "", 1, Forked),
    "Ctrl-C to torchrun": (lambda run: run.process.send_signal(signal.SIGINT), "", None),
    "Ctrl-C to all": (everyone, "", None),
    "SIGUSR1 to rank 0": (lambda run: os.kill(run.pids[0], signal.SIGUSR1), "", 1, Forked),
    "a closed terminal": (lambda run: run.process.send_signal(signal.SIGHUP), "", None),
    "SIGUSR2 to rank 1": (lambda run: os.kill(run.pids[1], signal.SIGUSR2), "", 1, Forked),
    "SIGUSR1 to torchrun": (
        lambda run: run.process.send_signal(signal.SIGUSR1),
        "--signals-to-handle SIGTERM,SIGINT,SIGUSR1",
        None,
    ),
}


@slow
@pytest.mark.parametrize("name", SIGNALS)
def test_every_signal_is_a_checkpoint(flags, tmp_path, name):
    stopped(flags, tmp_path / "run", *SIGNALS[name])


@slow
def test_a_second_ctrl_c_leaves_at_once(flags, tmp_path):
    with Launch(command({**flags, **ENDLESS}, tmp_path / "run"), FAULT="step:1:5:60") as run:
        run.until("step 5/")
        run.process.send_signal(signal.SIGINT)
        time.sleep(2)
        assert run.alive() == [0, 1]  # it waits for the end of the step
        begun = time.monotonic()
        run.process.send_signal(signal.SIGINT)
        assert run.end() != 0
        assert time.monotonic() - begun < 5


@slow
@pytest.mark.parametrize("background", [False, True])
def test_a_signal_during_a_save_lets_it_end(flags, undisturbed, tmp_path, background):
    out, slower = tmp_path / "run", {**flags, "async_save": background}
    with Forked(command(slower, out), FAULT="metadata:0:2:4") as run:
        run.until("--- train")
        while not list((out / "checkpoints").glob(".tmp_step_*")):
            time.sleep(0.02)
        run.signal(signal.SIGTERM)
        run.end()
        assert len(run.lines("stopped ")) == 1
    found = names(out / "checkpoints")
    assert found[0] == "step_00000002"  # published
    # and one more, alone
    assert found[1:] in (["step_00000003"], ["step_00000004"], ["step_00000006"])
    train(2, slower, out)
    assert results(out) == undisturbed


@slow
def test_a_save_slower_than_the_grace_period_leaves_the_previous_checkpoint(
    flags, undisturbed, tmp_path
):
    out = tmp_path / "run"
    with Launch(command(flags, out, "--shutdown-timeout 4"), FAULT="rename:0:4:60") as run:
        run.until("step 4/")
        while not list((out / "checkpoints").glob(".tmp_step_00000004_*/manifest.json")):
            time.sleep(0.02)
        run.process.send_signal(signal.SIGTERM)
        assert run.end(30) != 0
    goes_on(flags, out, undisturbed, 2)


@slow
@pytest.mark.parametrize("act", ["plan", "load"])
def test_sigterm_before_the_training_leaves_nothing(flags, tmp_path, act):
    with Forked(command(flags, tmp_path / "new" / "run")) as run:
        run.until(f"--- {act}")
        run.signal(signal.SIGTERM)
        assert run.end(30) != 0
        assert len(run.lines("error: stopped by SIGTERM in act")) == 1
    assert names(tmp_path) == []


# --- ranks that hang, fail or leave


@pytest.fixture(scope="module")
def in_vain(flags, tmp_path_factory):
    """Two runs that wait at the same time. Of the first, rank 1 is stopped after step 2: the seconds until it
    says so, and its exit code. Of the second, rank 1 leaves out a collective: its exit code and output.

    torchrun would give the stopped rank 30 s, whatever its --shutdown-timeout, before it kills it.
    """
    root, endless = tmp_path_factory.mktemp("in_vain"), {**flags, **ENDLESS, "timeout": 8}
    left_out = command(endless, root / "left_out", script="tests/inject.py collective 1 20")
    with pytest.MonkeyPatch.context() as patch, Forked(left_out) as other:
        patch.setattr("launch.SHUTDOWN_SECONDS", 3)
        with Forked(command(endless, root / "stopped")) as run:
            run.until("step 2/")
            os.kill(run.pids[1], signal.SIGSTOP)
            begun = time.monotonic()
            run.until("error: rank 0 waited in vain for the others in act 'train': ")
            seconds = time.monotonic() - begun
            code = run.end()
        other.until("error: ", 60)
        return (seconds, code), (other.end(), other.text)


@slow
def test_a_stopped_rank_ends_the_run_at_the_timeout(in_vain):
    seconds, code = in_vain[0]
    assert 7 < seconds < 20
    assert code != 0


@slow
def test_a_rank_that_leaves_out_a_collective_ends_the_run_in_one_line(in_vain):
    code, said = in_vain[1]
    assert code != 0
    assert "waited in vain for the others in act 'train'" in said


@slow
def test_an_exception_on_one_rank_is_said_once_and_ends_the_run(flags, tmp_path):
    said = broken(flags, tmp_path / "run", script="tests/inject.py data 1 3", launch=Launch)
    assert said.count("RuntimeError: row 7 is corrupt") == 1
    assert "error: rank 1 failed in act 'train'" in said


@slow
def test_a_rank_that_leaves_with_0_is_blamed(flags, undisturbed, tmp_path):
    out = tmp_path / "run"
    said = broken(flags, out, "step:1:3:exit", named=True)
    assert "error: rank 1 is gone in act 'train'" in said
    goes_on(flags, out, undisturbed, 2)


@slow
def test_a_rank_out_of_memory_says_what_helps(flags, undisturbed, tmp_path):
    out = tmp_path / "run"
    said = broken(flags, out, "step:1:3:memory")
    assert "error: rank 1 is out of memory in act 'train'" in said
    there = r"GiB a rank and [\d.]+ GiB of host memory, where there was [\d.]+ GiB a rank, of [\d.]+ GiB"
    assert re.search(rf"; planned [\d.]+ {there} of host memory \(fix: ", said)
    assert "[rank1]:" not in said  # with this, torch marks the lines of a traceback
    goes_on(flags, out, undisturbed, 2)


# --- what is not a crash


def spoiled(world, flags, out):
    """The third loss of rank 1 is NaN. Returns the error, its `agreed` and how many losses there were."""
    original, calls = finetune.summed_cross_entropy, []

    def spoil(model, batch):
        calls.append(1)
        loss = original(model, batch)
        return loss * math.nan if len(calls) == 3 and world.rank == 1 else loss

    finetune.summed_cross_entropy = spoil
    try:
        _train(world, flags, out)
    except ConfigError as error:
        return str(error), error.agreed, len(calls)
    finally:
        finetune.summed_cross_entropy = original


def test_a_loss_that_is_no_number_stops_all_ranks_and_is_in_no_checkpoint(
    flags, undisturbed, tmp_path
):
    out = tmp_path / "run"
    mine = {**flags, "save_every": 1, "batch_size": 2}
    for text, agreed, calls in run_ranks(spoiled, 2, mine, out):
        assert re.match(r"rank 1: step 3: loss nan, .* in \S+\.jsonl:\d+", text)
        assert (agreed, calls) == (True, 3)
    assert complete_checkpoints(out / "checkpoints")[-1].name == "step_00000002"
