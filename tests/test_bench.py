"""tests/benchmarks/bench.py on small shapes, as a user runs it.

Alone: `.venv/bin/python -m pytest tests/test_bench.py`
"""

import importlib
import json
import multiprocessing.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import bench as driver
import load  # found by bench, as are measure and save
import pytest
import save
from launch import forked
from measure import Bound, Worker
from ranks import run_fresh_ranks
from shell import ROOT

from utils.run.errors import ConfigError

BENCH = "python tests/benchmarks/bench.py"


@contextmanager
def forks():
    """main(what, **settings) on small shapes: bench.py in this process, forked ranks in place of torchrun's.

    Its large files must be gone afterwards.
    """

    def wait_for(command, environment, folder):
        flag, *words = command[command.index("--standalone") + 1 :]
        line = f"torchrun {flag.replace('=', ' ')} {shlex.join(words)}"
        done = forked(line, seconds=600, TMPDIR=environment["TMPDIR"])
        Path(folder, "log").write_text(done.stdout)
        return done.returncode

    def main(what, **settings):
        cfg = driver.Config(
            what=what, ranks="2", repeats=1, small=True, json=f"{scratch}/out.json", **settings
        )
        is_kept = driver.main(cfg)
        results = json.loads((scratch / "out.json").read_text())
        (scratch / "out.json").unlink()
        assert not left(scratch)
        return is_kept, results

    multiprocessing.util.get_temp_dir()  # of the server of forks, which outlives this one
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        scratch = Path(folder)
        patch.setattr(tempfile, "tempdir", folder)
        patch.setattr(driver, "_wait_for", wait_for)
        patch.setattr(sys, "argv", ["bench.py"])
        yield main


@pytest.fixture
def without_trl(monkeypatch):
    """Where trl is installed, bench.py does not find it."""
    monkeypatch.setitem(sys.modules, "trl", None)
    for name in ("dpo", "rollouts"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def left(folder):
    """What a run left in its folder for temporary files, but for the cache that torch makes when imported."""
    return [path for path in folder.iterdir() if not path.name.startswith("torchinductor_")]


def row(results, name):
    return next(row for row in results["tables"][0]["rows"] if row["contender"] == name)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """(output, what --json wrote) of `bench.py load` as a user starts it, where one contender is not
    installed, and a rank of the next one is killed.
    """
    root = tmp_path_factory.mktemp("loaded")
    scratch = root / "scratch"
    scratch.mkdir()
    (root / "sitecustomize.py").write_text(
        "import sys\nsys.modules['accelerate'] = None  # as if absent\n"
    )
    flags = ["--only", "accelerate,from_pretrained,ours", "--json", f"{root}/out.json"]
    with running(scratch, *flags, PYTHONPATH=str(root)) as process:
        os.kill(max(workers(scratch, "from_pretrained")), signal.SIGKILL)
        out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err  # no bound is set on the two that fail
    assert not left(scratch)
    return out, json.loads((root / "out.json").read_text())


@pytest.mark.slow
def test_load_keeps_its_bounds_and_a_peer_that_is_not_installed_fails_alone(loaded):
    out, results = loaded
    verdicts = {bound["metric"]: bound["verdict"] for bound in results["bounds"]}
    assert verdicts["peak_of_allowed"] == verdicts["read_of_checkpoint"] == "ok"
    assert {
        "command",
        "date",
        "config",
        "machine",
        "versions",
        "runs",
        "tables",
        "bounds",
    } <= results.keys()

    run = results["runs"][2]
    assert len(run["by_rank"]) == 2
    values = run["values"]
    check_that_half_is_held_and_all_is_read(values["peak_bytes"], values["read_call_bytes"])

    failure = row(results, "accelerate")["error"]
    assert failure.startswith("failed: ModuleNotFoundError: import of accelerate halted")
    assert any(
        line.startswith("accelerate") and line.endswith(failure) for line in out.splitlines()
    )


@pytest.mark.slow
def test_a_rank_that_the_kernel_kills_is_told_as_such(loaded):
    said = "failed: a rank was ended by SIGKILL (out of memory?)"
    assert said in loaded[0]
    assert row(loaded[1], "from_pretrained")["error"] == said


def check_that_half_is_held_and_all_is_read(peak_bytes, read_call_bytes):
    """What was measured is there: each rank holds half of the model in fp32, and all of the file was read."""
    half_bytes, file_bytes = 84_157_440 * 4 / 2, 84_157_440 * 2
    assert 0.97 * half_bytes <= peak_bytes <= 1.05 * half_bytes + 2**27
    assert file_bytes <= read_call_bytes <= 1.02 * file_bytes


@pytest.fixture(scope="module")
def saved():
    """What --json wrote of every save."""
    with forks() as main:
        is_kept, results = main("save")
    assert is_kept, results["bounds"]
    assert [run["contender"] for run in results["runs"]] == list(save.CONTENDERS)
    assert not any(run["error"] for run in results["runs"])  # nor did a weight differ
    return results


@pytest.mark.slow
def test_save_writes_each_byte_once_and_leaves_nothing_behind(saved):
    ours = saved["runs"][0]["values"]
    assert ours["rate"] == pytest.approx(84_157_440 * 2 / ours["seconds"])
    assert 0 < ours["write_seconds"] < ours["seconds"]
    assert ours["written_bytes"] == pytest.approx(84_157_440 * 2, rel=0.02)
    assert ours["peak_of_allowed"] <= 1


@pytest.mark.slow
def test_checkpoints_are_measured_beside_their_raw_bytes_and_keep_their_bounds_on_memory(saved):
    names = ("checkpoint", "checkpoint_async")
    ours, background = ({k: v[0] for k, v in row(saved, name)["values"].items()} for name in names)
    size = 12 * 8_522_240  # fp32 weights and two moments
    assert ours["rate"] == pytest.approx(size / ours["seconds"], rel=1e-4)
    for numbers in (ours, background):
        assert numbers["written_bytes"] == pytest.approx(size, rel=0.01)
    # of the rank with the largest ratio, which need not be the slowest in both
    assert ours["of_raw"] >= 0.999 * ours["seconds"] / ours["raw"]
    assert ours["peak_of_saved"] < 0.1
    assert 0.9 < background["peak_of_saved"] <= 1.1  # one copy
    assert 0.9 < background["growth"] <= 1.02
    assert background["blocked_of_copy"] > 0
    assert min(background[key] for key in ("blocked", "copy", "step")) > 0
    judged = {(bound["contender"], bound["metric"]): bound["verdict"] for bound in saved["bounds"]}
    late = "not judged: --small is over too soon"
    assert judged == {
        ("ours", "peak_of_allowed"): "ok",
        ("checkpoint", "of_raw"): late,
        ("checkpoint_async", "blocked_of_copy"): late,
        ("checkpoint_async", "peak_of_saved"): "ok",
        ("checkpoint_async", "growth"): "ok",
        ("checkpoint_async", "slowed"): late,
    }


def test_contenders_take_turns_and_one_that_failed_is_not_started_again(monkeypatch):
    started = []

    def run(cfg, source, size, name, metrics):
        started.append((size, name))
        error = "failed: no memory" if (size, name) == (4, "ours") else ""
        return {"error": error, "values": {}, "load_average": 0.0, "cores_of_others": 0.0}

    monkeypatch.setattr(driver, "_run", run)
    monkeypatch.setattr(save, "prepare", lambda folder, small: None)
    cfg = driver.Config(what="save", only="ours,raw_write", ranks="2,4", repeats=2, small=True)
    assert not driver.main(cfg)  # a bound of what failed is missed
    once = [(4, "ours"), (4, "raw_write"), (4, "raw_write")]
    assert started == [(2, "ours"), (2, "raw_write")] * 2 + once


def test_a_ratio_is_formed_within_its_repeat():
    benchmark = SimpleNamespace(REFERENCES={"ours": "raw"}, RATIOS=("seconds",))
    seconds = {
        ("ours", 0): 2.0,
        ("raw", 0): 1.0,
        ("ours", 1): 9.0,
        ("raw", 1): 3.0,
        ("ours", 2): 1.0,
    }
    runs = [made(name, repeat, seconds=value) for (name, repeat), value in seconds.items()]
    runs.append(made("raw", 2, "failed: it is gone"))
    driver._add_ratios(benchmark, runs)
    assert driver._row("ours", runs)["values"]["seconds_ratio"] == (2.5, 2.0, 3.0)
    assert driver._row("raw", runs) == {
        "contender": "raw",
        "error": "failed: it is gone",
        "values": {},
    }


def test_time_is_judged_only_where_other_processes_left_the_machine_alone():
    bound = Bound("seconds", 1.5, "time", over="raw", timed=True)
    slow = {"seconds": 2.0, "seconds_ratio": 2.0}
    for others, verdict in ((0.0, "MISSED"), (1.0, "not judged: other processes used 1.0 of")):
        runs = [made("raw", 0, seconds=1.0), made("ours", 0, others=others, **slow)]
        assert driver._judge(bound, 2, runs)["verdict"].startswith(verdict)
    runs += [made("raw", 1, seconds=1.0), made("ours", 1, seconds=1.0, seconds_ratio=1.0)]
    judged = driver._judge(bound, 2, runs)  # the second repeat was quiet, and it alone counts
    assert (judged["value"], judged["verdict"]) == (1.0, "ok")


def test_bytes_are_judged_by_the_worst_repeat_on_a_busy_machine_too():
    runs = [
        made("ours", repeat, others=2.0, read=read) for repeat, read in enumerate((1.0, 1.0, 1.03))
    ]
    judged = driver._judge(Bound("read", 1.02, "bytes read"), 2, runs)
    assert judged["sentence"] == "ours, 2 ranks: bytes read: 1.03, at most 1.02: MISSED"
    assert driver._judge(Bound("read", 1.04, "bytes read"), 2, runs)["verdict"] == "ok"
    runs.append(made("ours", 3, "failed: it is gone"))
    assert driver._judge(Bound("read", 1.04, "bytes read"), 2, runs)["verdict"].startswith(
        "MISSED (failed:"
    )


def made(name, repeat, error="", others=0.0, **values):
    """A run as the driver keeps it."""
    run = {"ranks": 2, "repeat": repeat, "contender": name, "error": error, "values": values}
    return run | {"load_average": 0.0, "cores_of_others": others}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"only": "ours,theirs"}, "--only ours,theirs: load has no contender theirs "),
        ({"repeats": 0}, "write numbers above 0"),
        ({"ranks": "2,x"}, "--ranks 2,x "),
        ({"json": "nowhere/out.json"}, "--json nowhere/out.json: its folder does not exist"),
        ({"ranks": "100000"}, "GiB of memory are needed"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_written(
    flags, said, tmp_path, monkeypatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match=re.escape(said)):
        driver.main(driver.Config(what="load", **flags))
    assert not left(tmp_path)


def test_a_mistyped_benchmark_is_named(tmp_path):
    done = forked(f"{BENCH} laod", apart=True)
    assert done.returncode == 2
    names = "load, save, step, dpo, rollouts, loss, attention, quant, data, stream, gpu, memory"
    assert done.stderr == f"error: --what takes one of {names}; not 'laod'\n"


@contextmanager
def running(folder, *flags, **env):
    """`bench.py load` whose ranks of from_pretrained have been started."""
    command = [*shlex.split(f"{BENCH} load --small --ranks 2 --repeats 1"), *flags]
    command[0] = sys.executable
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "start_new_session": True,
    }
    env = {**os.environ, "TMPDIR": str(folder), **env}
    process = subprocess.Popen(command, cwd=ROOT, env=env, **options)
    try:
        deadline = time.monotonic() + 120
        while len(workers(folder, "from_pretrained")) < 3:  # torchrun and two ranks
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_ctrl_c_ends_every_process_and_removes_the_weights(tmp_path):
    with running(tmp_path, "--only", "from_pretrained") as process:
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "error: stopped by SIGINT in act 'run'"
    assert not left(tmp_path)
    time.sleep(0.5)
    assert not workers(tmp_path)


def workers(folder, contender=""):
    """Processes that work on `folder`, other than bench.py itself, whose command line does not name it."""
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                command = os.fsdecode(file.read()).split("\0")
        except OSError:
            continue
        works = any(str(folder) in word for word in command)
        if works and (not contender or contender in command):
            found.append(int(pid))
    return found


@pytest.fixture(scope="module")
def input_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("input")
    load.prepare(folder, small=True)
    return folder


def contend(world, what, contender, folder, out):
    """One rank's numbers, without bench.py around it."""
    return importlib.import_module(what).contend(Worker(world, contender, folder, out, True))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["load", "save"])
def test_every_peer_that_runs_has_the_right_weights_and_none_needs_less_memory(
    what, request, tmp_path
):
    """Each in fresh processes, as bench.py starts them. A contender fails where a weight differs."""
    peaks = {}
    for name in importlib.import_module(what).REFERENCES:
        if what == "save":  # bench.py has run all of them
            found = row(request.getfixturevalue("saved"), name)
            peaks[name] = found["values"]["peak_bytes"][0]
            continue
        input_folder = request.getfixturevalue("input_folder")
        out = tmp_path / name
        out.mkdir()
        numbers = run_fresh_ranks(contend, 2, what, name, input_folder, out)
        peaks[name] = max(of_rank["peak_bytes"] for of_rank in numbers)
        if name == "raw_pread":
            read = sum(of_rank["read_call_bytes"] for of_rank in numbers)
            check_that_half_is_held_and_all_is_read(peaks[name], read)
        shutil.rmtree(out)
    ours, raw = peaks.pop("ours"), peaks.pop("raw_pread" if what == "load" else "raw_write")
    assert raw > 0
    assert len(peaks) == {"load": 5, "save": 2}[what]
    assert all(ours <= 1.1 * peak for peak in peaks.values()), (ours, peaks)


@pytest.mark.slow
def test_a_quantized_base_keeps_its_bounds_on_memory_and_bytes():
    with forks() as main:
        is_kept, results = main("quant")
    assert is_kept, results["bounds"]
    assert [bound["verdict"] for bound in results["bounds"]] == ["ok"] * 12
    gathered = {
        name: row(results, name)["values"]["layers_gathered_bytes_ratio"][0]
        for name in ("8bit", "4bit")
    }
    assert 0.5 < gathered["8bit"] < 0.52
    assert 0.28 < gathered["4bit"] < 0.29


@pytest.mark.slow
def test_steps_of_dpo_are_timed_and_where_trl_is_absent_its_rows_are_left_out_with_a_line(
    without_trl, capsys
):
    with forks() as main:
        is_kept, results = main("dpo")
    assert is_kept, results["bounds"]
    rows = {row["contender"]: row["values"] for row in results["tables"][0]["rows"]}
    assert list(rows) == ["ours", "ours_lora"]
    for values in rows.values():
        tokens = 2 * 2 * 2 * 64  # answers, pairs of a rank, ranks
        assert values["tokens_per_second"][0] == pytest.approx(tokens / values["seconds"][0])
        assert values["peak_bytes"][0] > 0
    verdicts = {bound["verdict"] for bound in results["bounds"]}
    assert verdicts == {"not judged: trl is missing", "not judged: trl_lora is missing"}
    last = "TRL is not installed here, so it has no rows (fix: pip install trl)"
    assert capsys.readouterr().out.splitlines()[-1] == last


@pytest.mark.slow
def test_steps_of_grpo_are_timed_and_where_trl_is_absent_its_rows_are_left_out_with_a_line(
    without_trl, capsys
):
    with forks() as main:
        is_kept, results = main("rollouts")
    assert is_kept, results["bounds"]
    rows = {row["contender"]: row["values"] for row in results["tables"][0]["rows"]}
    assert list(rows) == ["ours"]
    values = {name: found[0] for name, found in rows["ours"].items()}
    tokens = 4 * 4 * 8  # prompts, completions of each, tokens of each
    assert values["tokens_per_second"] == pytest.approx(tokens / values["seconds"])
    assert 0 < values["drawing_seconds"] < values["seconds"]
    assert values["completion_length"] > 0.9 * 8
    assert {bound["verdict"] for bound in results["bounds"]} == {"not judged: trl is missing"}
    last = "TRL is not installed here, so it has no rows (fix: pip install trl)"
    assert capsys.readouterr().out.splitlines()[-1] == last
