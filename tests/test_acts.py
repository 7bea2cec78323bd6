"""A run that the kernel kills leaves its act and its memory, and the next start says what helps.

python -m pytest tests/test_acts.py
"""

import json
import os
import signal
import time
from pathlib import Path

import finetune
import pytest
from launch import Launch
from ranks import run_ranks
from shell import shell
from test_parity import write_rows
from tiny import tiny_model_folder

from utils.run import errors
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError, act
from utils.run.folder import claim_output, releases_output
from utils.run.memory import host_memory, memory
from utils.run.watch import last_words, newest_run

ACTS = ["build", "shard", "load", "optimizer", "resume", "train", "save"]  # in which a run writes
DMESG = "; not for memory, as far as can be seen (fix: look at the kernel's log, dmesg, and the scheduler's)"


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("acts")
    model, rows = (
        tiny_model_folder(root / "model", vocab_size=271),
        write_rows(root / "rows.jsonl", 8),
    )
    return {
        "model": str(model),
        "dataset": str(rows),
        "steps": 3,
        "batch_size": 2,
        "save_model": False,
    }


def lines(out) -> list[dict]:
    return [json.loads(line) for line in (out / "acts.jsonl").read_text().splitlines()]


def claims(_, out, *then):
    """A recipe without a model: the acts of `then`, or what it raises or does in the last one."""

    @releases_output
    def main(_):
        act("plan")
        claim_output(str(out), "finetune", ALONE)
        for what in then:
            act(what) if isinstance(what, str) else what(out)

    return main(None)


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_load(out):
    with pytest.raises(AssertionError, match="the process died"):
        run_ranks(claims, 1, out, "build", "load", die)


# --- whole runs


@pytest.mark.slow
def test_a_run_that_is_killed_is_named_at_the_next_start_once_and_one_that_ends_is_not(
    flags, tmp_path
):
    out = tmp_path / "run"
    words = " ".join(f"--{name} {value}" for name, value in flags.items()) + f" --output_dir {out}"
    result = shell(f"python recipes/finetune.py {words}", FAULT="step:0:1")
    assert result.returncode == -signal.SIGKILL
    assert [line["act"] for line in lines(out) if "ended" not in line][-1] == "train"
    assert "ended" not in lines(out)[-1]
    result = shell(f"python recipes/finetune.py {words}")
    assert result.returncode == 0, result.stderr
    (said,) = [line for line in result.stdout.splitlines() if line.startswith("warning")]
    assert said.startswith("warning: the run before was killed in act 'train', ")
    assert " s after its start, without a last word; host memory was " in said
    second = [line for line in lines(out) if line["run"] == 2]
    assert list(dict.fromkeys(line["act"] for line in second)) == ACTS
    assert (second[0]["act"], second[-1]["ended"]) == ("build", "finished")
    assert last_words(out) == ""
    before = (out / "acts.jsonl").read_bytes()
    finetune.main(finetune.Config(**flags, output_dir=str(out)))  # has nothing to do
    assert (out / "acts.jsonl").read_bytes() == before


@pytest.mark.slow
@pytest.mark.parametrize("presses", [1, 2])
def test_a_run_that_ctrl_c_stopped_once_or_twice_ended_by_itself(flags, tmp_path, presses):
    out, fault = tmp_path / "run", "step:0:2:60" if presses == 2 else ""
    words = " ".join(f"--{name} {value}" for name, value in (flags | {"steps": 100_000}).items())
    command = f"torchrun --nproc_per_node 2 recipes/finetune.py {words} --output_dir {out}"
    with Launch(command, FAULT=fault) as run:
        run.until("step 2/")
        for _ in range(presses):
            run.process.send_signal(signal.SIGINT)
            time.sleep(2)
        run.end()
    assert lines(out)[-1]["ended"] == "stopped"
    assert last_words(out) == ""


@pytest.mark.slow
def test_a_refused_start_leaves_no_folder_and_changes_no_file(flags, tmp_path):
    killed_in_load(tmp_path / "run")
    before = (tmp_path / "run" / "acts.jsonl").read_bytes()
    for out in (tmp_path / "run", tmp_path / "new" / "run"):
        # said after the claim
        with pytest.raises(ConfigError, match="there is no complete checkpoint"):
            finetune.main(finetune.Config(**flags, output_dir=str(out), resume="no/such"))
    assert os.listdir(tmp_path) == ["run"]
    assert (tmp_path / "run" / "acts.jsonl").read_bytes() == before
    assert errors.watchers == []


# --- what is written


def test_a_run_killed_while_it_loads_leaves_its_acts_and_the_same_command_starts_again(
    tmp_path, capsys
):
    out = tmp_path / "run"
    killed_in_load(out)
    assert [line["act"] for line in lines(out)] == ["build", "load"]
    with open(out / "acts.jsonl", "a") as file:
        file.write('{"run": 1, "act": "lo')  # what another kill has cut
    claims(None, out, "build", "save", lambda out: (out / "metrics.jsonl").touch())
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("---")]
    assert len(said) == 1
    assert said[0].startswith(
        "warning: the run before was killed in act 'load', 0 s after its start"
    )
    assert newest_run(out)[1]["run"] == 2
    assert newest_run(out)[1]["ended"] == "finished"


ENDS = {"stopped": KeyboardInterrupt("SIGINT"), "error": ConfigError("a disk is full")}


@pytest.mark.parametrize("ended", ENDS)
def test_a_run_that_ends_by_itself_says_so_and_leaves_nothing_if_it_had_not_begun(tmp_path, ended):
    def fails(out):
        raise ENDS[ended]

    with pytest.raises(type(ENDS[ended])):
        claims(None, tmp_path / "run", "build", "load", fails)
    assert os.listdir(tmp_path) == []
    with pytest.raises(type(ENDS[ended])):
        claims(
            None,
            tmp_path / "run",
            "build",
            "train",
            lambda out: (out / "metrics.jsonl").touch(),
            fails,
        )
    assert lines(tmp_path / "run")[-1]["ended"] == ended
    assert last_words(tmp_path / "run") == ""


def test_memory_that_comes_is_a_line_within_seconds_and_nothing_new_is_none(tmp_path):
    def grows(out):
        (before,) = [line["host_bytes"] for line in lines(out)]
        held = bytearray(before // 5)
        held[::4096] = b"1" * len(held[::4096])
        until = time.monotonic() + 10
        while lines(out)[-1]["host_bytes"] < 1.05 * before and time.monotonic() < until:
            time.sleep(0.1)  # others on this machine may give some back meanwhile
        (out / "metrics.jsonl").touch()

    claims(None, tmp_path / "run", "train", grows)
    found = [line["host_bytes"] for line in lines(tmp_path / "run")]
    assert max(found) >= 1.05 * found[0]
    assert len(found) < 14  # one a second


@pytest.mark.parametrize("target", ["/dev/full", "/no/such/folder/file", "/proc"])
def test_a_disk_that_takes_nothing_does_not_end_the_run(tmp_path, target, capsys):
    (tmp_path / "metrics.jsonl").touch()

    def full(out):
        (out / "acts.jsonl").symlink_to(target)

    claims(None, tmp_path, full, "build", "train", "save")
    assert [
        line for line in capsys.readouterr().out.splitlines() if not line.startswith("---")
    ] == []


# --- what is said


GIB = 2**30
LINE = {"run": 1, "act": "train", "time": 3.4, "host": os.uname().nodename}
FULL = {"host_bytes": int(23.1 * GIB), "host_limit": 24 * GIB}
FREE = {"host_bytes": 2 * GIB, "host_limit": 24 * GIB}
DEVICE = {"device_bytes": 79 * GIB, "device_limit": 80 * GIB}
KILLED = "warning: the run before was killed in act '{}', 3 s after its start, without a last word"
WORDS = {
    "load": (
        FULL | {"act": "load"},
        "23.1 of 24.0 GiB (fix: --low_cpu_fsdp, fewer ranks on this machine, or ",
    ),
    "train on a GPU": (
        FULL | DEVICE,
        "23.1 of 24.0 GiB (fix: without --cpu_offload and --async_save, ",
    ),
    "train on the CPU": (FULL, "23.1 of 24.0 GiB (fix: a smaller --batch_size, "),
    "device": (
        FREE | DEVICE,
        "2.0 of 24.0 GiB; the device's was nearly full (fix: --activation_checkp",
    ),
    "neither": (FREE, f"2.0 of 24.0 GiB{DMESG}"),
}


def leaves(out, *said: dict) -> str:
    (out / "acts.jsonl").write_text("".join(json.dumps(LINE | line) + "\n" for line in said))
    return last_words(out)


@pytest.mark.parametrize("case", WORDS)
def test_the_remedy_is_of_the_act_and_of_the_memory_that_was_nearly_full(tmp_path, case):
    line, words = WORDS[case]
    said = leaves(tmp_path, {"run": 0, "act": "save", "ended": "finished"}, line)
    act = line.get("act", "train")
    assert said.startswith(f"{KILLED.format(act)}; host memory was {words}")


def test_the_kernels_count_tells_of_this_process_and_of_another_rank(tmp_path):
    count = memory().get("oom_kills")
    if count is None:
        pytest.skip("this kernel does not count")
    before = FREE | {"oom_kills": count - 1}
    assert "and the kernel has killed 1 process for memory (fix: a " in leaves(
        tmp_path, before, before
    )
    assert leaves(tmp_path, before | {"host": "another"}).endswith(DMESG)
    said = leaves(tmp_path, before, FREE | {"oom_kills": count + 1, "ended": "error"})
    assert said.startswith(
        "warning: the run before ended in act 'train', 3 s after its start, and the kernel"
    )
    assert " has killed 2 processes for memory (fix: " in said
    assert leaves(tmp_path, before, FREE | {"oom_kills": count + 1, "ended": "finished"}) == ""


def test_a_damaged_file_says_nothing(tmp_path):
    for content in (
        b"",
        b"\xff\n",
        b"[]\n",
        b'{"run": "1", "act": "load", "time": 1}\n',
        b'{"run": 1}\n',
        b"3\n",
    ):
        (tmp_path / "acts.jsonl").write_bytes(content)
        assert last_words(tmp_path) == ""


# --- where memory is counted


MEMINFO = "MemTotal:       32768 kB\nMemFree:         1024 kB\nMemAvailable:   24576 kB\n"
MIB = 2**20


def machine(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Made-up proc and sys, with 8 of 32 MiB in use."""
    files = {
        "proc/self/cgroup": cgroup,
        "proc/meminfo": MEMINFO,
        "proc/vmstat": "nr_free 1\noom_kill 7\n",
    } | files
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(folder: str, limit: object) -> dict[str, str]:
    files = {"current": f"{6 * MIB}\n", "max": f"{limit}\n", "events": "oom 5\noom_kill 2\n"}
    files["stat"] = f"anon {MIB}\ninactive_file {2 * MIB}\nactive_file {MIB}\n"
    return {f"sys/fs/cgroup/{folder}memory.{name}": text for name, text in files.items()}


def v1(folder: str, limit: object) -> dict[str, str]:
    files = {"usage_in_bytes": f"{6 * MIB}\n", "limit_in_bytes": f"{limit}\n"}
    files["oom_control"] = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    files["stat"] = (
        f"inactive_file 0\nactive_file 0\ntotal_inactive_file {2 * MIB}\ntotal_active_file {MIB}\n"
    )
    return {f"sys/fs/cgroup/memory/{folder}memory.{name}": text for name, text in files.items()}


OF_V1 = "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu:/\n0::/\n"
UNLIMITED = 9223372036854771712
OURS, MACHINES = (3 * MIB, 16 * MIB, 2), (8 * MIB, 32 * MIB, 7)
TREES = {
    "v2": ("0::/job/task\n", v2("job/task/", 16 * MIB), OURS),
    "v2, the one above": ("0::/job/task\n", v2("job/task/", "max") | v2("job/", 16 * MIB), OURS),
    "v2, a container": ("0::/\n", v2("", 16 * MIB), OURS),
    "v2, without a limit": ("0::/job\n", v2("job/", "max"), MACHINES),
    "v2, more than there is": ("0::/job\n", v2("job/", 64 * MIB), MACHINES),
    "v1": (OF_V1, v1("docker/abc/", 16 * MIB), OURS),
    "v1, a container": (OF_V1, v1("", 16 * MIB), OURS),
    "v1, without a limit": (OF_V1, v1("docker/abc/", UNLIMITED) | v1("", UNLIMITED), MACHINES),
    "none": ("", {}, MACHINES),
}


@pytest.mark.parametrize("tree", TREES)
def test_host_memory_is_that_of_the_nearest_cgroup_with_a_limit_else_of_the_machine(tmp_path, tree):
    cgroup, files, expected = TREES[tree]
    assert host_memory(machine(tmp_path, cgroup, files)) == expected


def test_host_memory_of_this_machine_is_less_than_there_is():
    used, limit, kills = host_memory()
    assert 0 < used < limit <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert kills is None or kills >= 0
