"""Several machines: a job that loses a rank or a machine goes on, and ends as if it had lost none.

What configs/launch/ runs on each machine is run here for two, in network namespaces where this is root, else
on loopback. Alone: `python -m pytest -m "" tests/test_multinode.py`
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template

import finetune
import pytest
import yaml
from launch import forked
from ranks import free_port
from shell import ROOT
from test_parity import write_rows
from tiny import tiny_model_folder
from torch.distributed.run import get_args_parser

from utils.run.folder import write_plan
from utils.run.settings import parse_cli

SLURM = (ROOT / "configs/launch/slurm.sbatch").read_text()
KUBERNETES = (ROOT / "configs/launch/kubernetes.yaml").read_text()
MODEL = "org/tiny"  # is in the caches only
STEPS, KILLED = 8, 3  # steps of a run, and after how many of them something is killed
FLAGS = f"--steps {STEPS} --save_every 2 --lr 1e-3 --warmup 1 --batch_size 2 --global_batch_size 4"
# (run, step): saved was 2
GONE_ON = [(1, 1), (1, 2), (1, 3), *((2, step) for step in range(3, STEPS + 1))]
WITHIN = 60  # seconds in which a job forms again, or ends


def pod() -> dict:
    return list(yaml.safe_load_all(KUBERNETES))[1]["spec"]["template"]["spec"]


def scripts() -> list[str]:
    """What srun, and what a pod, starts on each machine."""
    srun = re.search(r"^srun .*? bash -c '(.*?)' &$", SLURM, re.DOTALL | re.MULTILINE)
    return [srun[1], pod()["containers"][0]["args"][0]]


def torchrun_line(script: str) -> str:
    """Its one torchrun command, before the shell fills it in."""
    (line,) = re.findall(r"torchrun (--.*?\$FLAGS)", script.replace("\\\n", " "))
    return " ".join(line.split())


def test_the_launch_files_parse_and_start_the_same():
    for script in (SLURM, *scripts()):
        subprocess.run(["bash", "-n", "-c", script], check=True)
    first, second = scripts()
    assert torchrun_line(first) == torchrun_line(second)
    for script in scripts():
        assert "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n" in script


@pytest.mark.parametrize(("measured", "code"), [({"steps": 3}, 0), (None, 1)])
def test_a_pod_ends_well_only_if_the_run_has_finished(tmp_path, measured, code):
    """A pod whose torchrun ended with 0 after a signal counted as one that had finished."""
    write_plan(tmp_path, {"acts": {}}, measured)
    torchrun = tmp_path / "torchrun"
    torchrun.write_text("#!/bin/sh\nexit 0\n")
    torchrun.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "OUT": str(tmp_path)}
    pod_script = scripts()[1]
    assert subprocess.run(["bash", "-c", pod_script], env=env).returncode == code


def test_every_flag_in_the_launch_files_exists():
    values = {
        entry["name"]: entry.get("value", "10.0.0.1") for entry in pod()["containers"][0]["env"]
    }
    for flags in (values["FLAGS"], re.search(r'^export FLAGS="(.*)"$', SLURM, re.MULTILINE)[1]):
        line = Template(torchrun_line(SLURM)).substitute(values, IS_HOST=1, FLAGS=flags)
        known, unknown = get_args_parser().parse_known_args(shlex.split(line))
        assert not unknown
        assert (known.nnodes, known.rdzv_conf, known.max_restarts) == ("2", "is_host=1", 3)
        assert (ROOT / known.training_script).is_file()
        parse_cli(finetune.Config, known.training_script_args)
        (seconds,) = {re.search(r"SHUTDOWN_TIMEOUT=(\d+)", script)[1] for script in scripts()}
        assert int(seconds) < pod()["terminationGracePeriodSeconds"]
        assert int(seconds) < int(re.search(r"--signal=B:USR1@(\d+)", SLURM)[1])


class Machine:
    """A place in the network with a model cache of its own, and what was started there last."""

    def __init__(self, number: int, root: Path, address="127.0.0.1", interface="lo", enter=()):
        self.address, self.enter, self.log = address, enter, root / f"machine_{number}.log"
        self.process, self.env = None, {"HF_HOME": str(root / f"cache_{number}")}
        self.env |= {
            "GLOO_SOCKET_IFNAME": interface,
            "ADDRESS": address,
            "SLURMD_NODENAME": address,
        }
        self.env |= {"JOB_COMPLETION_INDEX": str(number), "SLURM_NODEID": str(number)}
        self.env |= {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}

    def start(self, script: str, **env: str) -> None:
        with open(self.log, "a") as log:
            self.process = subprocess.Popen(
                [*self.enter, "bash", "-c", script],
                cwd=ROOT,
                env={**os.environ, **self.env, **env},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def kill(self) -> None:
        """It says nothing more, as after a power cut. Workers go with their torchrun."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def status(self, seconds: float) -> int:
        """The exit status, waited for."""
        until(lambda: self.process.poll() is not None, seconds, [self])
        return self.process.returncode


def until(true: Callable[[], object], seconds: float, machines: list[Machine]) -> float:
    """The seconds until it is; the test fails when they are over, and shows what the machines said."""
    start = time.monotonic()
    while not true():
        said = "\n\n".join(machine.log.read_text()[-6000:] for machine in machines)
        assert time.monotonic() - start < seconds, said
        time.sleep(0.2)
    return time.monotonic() - start


def workers(out: Path) -> dict[int, int]:
    """The process of each rank at work on `out`."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            rank = re.search(r"\0RANK=(\d+)", "\0" + (folder / "environ").read_text())
            if rank and str(out) in (folder / "cmdline").read_text():
                found[int(rank[1])] = int(folder.name)
    return found


def lines(out: Path) -> list[tuple[int, int]]:
    """(run, step) of each line of metrics.jsonl so far."""
    file = out / "metrics.jsonl"
    whole = file.read_text().split("\n")[:-1] if file.exists() else []
    return [(line["run"], line["step"]) for line in map(json.loads, whole)]


def weights(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (out / "model").glob("*.safetensors")}


def stays(rank: int) -> str:
    """FAULT: in its first life this rank does not leave its step, so that what is killed is in the middle."""
    return f"step:{rank}:{KILLED}:600"


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the data, and with the model as it lies in the cache of each machine."""
    root = tmp_path_factory.mktemp("multinode")
    write_rows(root / "rows.jsonl", 14)
    model = tiny_model_folder(root / "model", vocab_size=271)
    for number in range(2):
        cached = root / f"cache_{number}" / "hub" / f"models--{MODEL.replace('/', '--')}"
        shutil.copytree(model, cached / "snapshots" / "0123abcd")
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("0123abcd")
    return root


@contextmanager
def alone(root: Path, out: Path, flags: str = "", **env: str) -> Iterator[Machine]:
    """One torchrun with two ranks."""
    machine = Machine(0, root)
    command = (
        f"exec torchrun --standalone --nproc_per_node 2 {flags} recipes/finetune.py --model {MODEL}"
    )
    try:
        machine.start(f"{command} --dataset {root}/rows.jsonl --output_dir {out} {FLAGS}", **env)
        yield machine
    finally:
        machine.kill()


@pytest.fixture(scope="module")
def undisturbed(root):
    """The weights of a run that nothing happened to."""
    out = root / "undisturbed"
    flags = f"--model {root}/model --dataset {root}/rows.jsonl --output_dir {out} {FLAGS}"
    done = forked(f"torchrun --nproc_per_node 2 recipes/finetune.py {flags}")
    assert done.returncode == 0, done.stdout
    return weights(out)


@pytest.fixture
def machines(root, capsys):
    """Two of them, the first of which hosts the rendezvous."""
    # namespaces, and the cable's two ends
    spaces = [f"raw{os.getpid()}{letter}" for letter in "ab"]
    a, b = spaces
    script = f"ip netns add {a}; ip netns add {b};"
    script += f"ip link add {a} netns {a} type veth peer name {b} netns {b};"
    for number, space in enumerate(spaces):
        script += f"ip -n {space} address add 10.213.0.{number + 1}/24 dev {space};"
        script += f"ip -n {space} link set {space} up; ip -n {space} link set lo up;"
    spaced = subprocess.run(["bash", "-ec", script], capture_output=True).returncode == 0
    places = [("127.0.0.1",), ("127.0.0.2",)]
    if spaced:
        places = [
            (f"10.213.0.{i + 1}", s, ("ip", "netns", "exec", s)) for i, s in enumerate(spaces)
        ]
    both = [Machine(number, root, *place) for number, place in enumerate(places)]
    with capsys.disabled():
        print("\ntwo torchruns", "in two network namespaces" if spaced else "on loopback", end=": ")
    try:
        yield both
    finally:
        for machine in both:
            machine.kill()
        subprocess.run(
            ["bash", "-c", f"ip netns delete {a}; ip netns delete {b}"], capture_output=True
        )


def job(root: Path, out: Path, host: Machine) -> dict[str, str]:
    """What the scheduler and the user say: two machines with one process each."""
    given = {"NODES": "2", "GPUS": "1", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    given |= {
        "JOB": out.name,
        "SLURM_JOB_ID": out.name,
        "HOST": host.address,
        "PORT": str(free_port()),
    }
    dataset = str(root / "rows.jsonl")
    return given | {"MODEL": MODEL, "DATASET": dataset, "OUT": str(out), "FLAGS": FLAGS}


@pytest.mark.slow
def test_a_killed_rank_is_started_again_by_torchrun(root, undisturbed):
    out = root / "rank_killed"
    with alone(root, out, "--max-restarts 3", FAULT=stays(1)) as machine:
        until(lambda: (1, KILLED) in lines(out), 60, [machine])
        os.kill(workers(out)[1], signal.SIGKILL)
        assert machine.status(120) == 0
    assert lines(out) == GONE_ON
    assert weights(out) == undisturbed


@pytest.mark.slow
def test_a_machine_that_comes_back_is_taken_in(root, undisturbed, machines, capsys):
    out, script = root / "machine_killed", scripts()[0]
    given = job(root, out, machines[0])
    for machine in machines:
        machine.start(script, **given, FAULT=stays(1))
    until(lambda: (1, KILLED) in lines(out), 90, machines)
    machines[1].kill()
    machines[1].start(script, **given)
    seconds = until(lambda: lines(out)[-1][0] == 2, WITHIN, machines)
    with capsys.disabled():
        print(f"trains again {seconds:.0f} s after the kill", end=" ")
    assert [machine.status(60) for machine in machines] == [0, 0]
    assert lines(out) == GONE_ON
    assert weights(out) == undisturbed


@pytest.mark.slow
def test_without_its_host_a_job_ends_and_a_relaunch_goes_on(root, undisturbed, machines, capsys):
    out, script = root / "host_killed", scripts()[1]
    given = job(root, out, machines[0])
    for machine in machines:
        machine.start(script, **given, FAULT=stays(0))
    until(lambda: (1, KILLED) in lines(out), 90, machines)
    machines[0].kill()
    seconds = until(lambda: machines[1].process.poll() is not None, WITHIN, machines)
    with capsys.disabled():
        print(f"ended {seconds:.0f} s after the kill", end=" ")
    assert machines[1].process.returncode != 0
    assert not workers(out)
    for machine in machines:
        machine.start(script, **given)
    assert [machine.status(120) for machine in machines] == [0, 0]
    assert lines(out) == GONE_ON
    assert weights(out) == undisturbed
