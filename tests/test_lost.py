"""A rank that is killed is named by the others, in one line with the likeliest cause and what helps.

python -m pytest tests/test_lost.py -m ""
"""

import itertools
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from launch import ROOT, Forked, Launch
from ranks import _context, free_port
from test_faults import command
from test_faults import flags as flags  # a fixture
from test_memory_plan import of_llama

from utils.plan.fit import HOST_BYTES_OF_RANK
from utils.plan.planned import Knobs
from utils.run import signals
from utils.run.allocator import MAPPED_BYTES, MAPPED_BYTES_IF_TIGHT
from utils.run.distributed import gather, init_distributed
from utils.run.errors import act, report_errors
from utils.run.lost import likely_cause
from utils.run.memory import memory
from utils.run.remedies import less_memory

slow = pytest.mark.slow
ACTS = "folder data plan build shard load optimizer resume train save".split()


# --- who is gone


def waits_in_a_collective(world):
    gather(world, "here")


def waits_in_a_new_group(_):
    dist.new_group(backend="gloo")  # where Python runs no handler


def computes(_):
    until = time.monotonic() + 60
    while time.monotonic() < until:
        pass


def fails_itself(_):
    raise RuntimeError("row 7 is corrupt")


def recipe(port, rank, folder, ends, waits) -> None:
    """What a rank of a recipe does: rank 1 ends in the act load, while rank 0 waits."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.dup2(os.open(folder / f"rank_{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    with report_errors():
        signals.stop_at_once()
        world = init_distributed()
        act("load")
        (ends if rank else waits)(world)


def die(_):
    os.kill(os.getpid(), signal.SIGKILL)


def said_by_rank_0(folder, ends, waits) -> str:
    """torchrun's part is played here: when one has ended it sends SIGTERM to the other."""
    port = free_port()
    both = [_context.Process(target=recipe, args=(port, r, folder, ends, waits)) for r in range(2)]
    for process in both:
        process.start()
    both[1].join(60)
    both[0].terminate()
    both[0].join(20)
    for process in both:
        process.kill()
    return (folder / "rank_0").read_text()


@pytest.mark.parametrize("waits", [waits_in_a_collective, waits_in_a_new_group, computes])
def test_a_killed_rank_is_one_line_that_names_it_and_memory_wherever_the_others_are(
    tmp_path, waits
):
    said = said_by_rank_0(tmp_path, die, waits)
    (line,) = said.splitlines()
    assert line.startswith("error: rank 1 gave no answer in act 'load'")
    assert "Its process is gone: " in line
    assert "memory" in line.split("Its process is gone: ")[1].split(" (fix: ")[0]
    assert "(fix: " in line
    assert "stopped by" not in said


def test_a_rank_that_ended_by_itself_was_not_killed(tmp_path):
    said = said_by_rank_0(tmp_path, fails_itself, waits_in_a_collective)
    assert "Its process is gone" not in said
    assert "memory" not in said
    assert len(said.splitlines()) == 1


def test_a_kill_that_the_kernel_counts_is_told_as_such(monkeypatch):
    from utils.run import lost

    counted = memory().get("oom_kills")
    if counted is None:
        counted = 1
        monkeypatch.setattr(lost, "memory", lambda: {"oom_kills": 1})
    monkeypatch.setattr(lost, "_kills", counted - 1)
    assert likely_cause("load").startswith("the kernel has killed 1 process for memory (oom_kill)")
    monkeypatch.setattr(lost, "_kills", counted)
    assert likely_cause("load").startswith(
        "killed, most likely for lack of memory, though the kernel has"
    )


UNDER_TORCHRUN = ("load", "train")  # it adds its own lines in every act alike


@slow
@pytest.mark.parametrize("name", ACTS)
def test_a_rank_killed_in_any_act_of_a_run_is_one_line(flags, tmp_path, name):
    launch = Launch if name in UNDER_TORCHRUN else Forked
    with launch(command(flags, tmp_path / "run"), FAULT=f"{name}:1:0") as run:
        assert run.end(120) != 0
        (line,) = run.lines("error: ")
    said = re.match(r"error: rank 1 gave no answer in act '(\w+)'", line)
    # That of rank 0, which may be behind, or further on, up to the next act in which ranks wait.
    assert said[1] == re.findall(r"^--- (\w+)", run.text, re.M)[-1]
    assert "memory" in line
    assert "KeyboardInterrupt" not in run.text
    ours = [
        line for line in run.text.splitlines() if "utils/" in line or 'recipes/finetune.py"' in line
    ]
    assert ours == []  # no traceback of ours


# --- what helps


CHOICES = {
    "batch_size": [1, 4],
    "activation_checkpointing": ["none", "selective", "full"],
    "cpu_offload": [False, True],
    "async_save": [False, True],
    "low_cpu_fsdp": [False, True],
}
SETTINGS = [
    dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*CHOICES.values())
]


@pytest.mark.parametrize("act", ["load", "optimizer", "train", "save"])
@pytest.mark.parametrize(("gpu", "of_gpu"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("ranks", [0, 1, 2])
def test_no_remedy_names_what_is_set_already(act, gpu, of_gpu, ranks):
    for given in SETTINGS:
        said = less_memory(act, given, gpu, ranks, of_gpu)
        assert said
        assert (
            "--activation_checkpointing full" not in said
            or given["activation_checkpointing"] != "full"
        )
        assert "--batch_size" not in said or given["batch_size"] > 1
        assert "without --cpu_offload" not in said or given["cpu_offload"]
        assert not of_gpu or "--cpu_offload" not in said or not given["cpu_offload"]
        assert "--async_save" not in said or given["async_save"]
        assert "--low_cpu_fsdp" not in said or not given["low_cpu_fsdp"]
        assert "fewer ranks" not in said or ranks != 1


def test_a_recipe_that_has_no_such_flags_is_told_of_none():
    assert "--" not in less_memory("load", None)


def test_a_change_of_the_plan_is_a_change():
    made = of_llama(local=2, gpu=False)
    for knobs in (
        Knobs(),
        Knobs(2, 1, "full"),
        Knobs(1, 2, "selective"),
        Knobs(reshard_after_forward=False),
    ):
        need = made.need(knobs)
        for share in (0.5, 0.9):
            said = made.remedy(knobs, share * need.device, 64 * 2**30)
            assert "GPU" not in said
            for name, value in vars(knobs).items():
                assert f"--{name} {value} " not in f"{said} "


# --- what a plan holds


def test_the_plan_of_a_cpu_holds_every_act_a_copy_to_save_from_and_a_reserve():
    knobs = Knobs(lora_rank=8)
    plain, background = (of_llama(gpu=False, seq_len=16, async_save=copy) for copy in (False, True))
    need, more = plain.need(knobs), background.need(knobs)
    # two forwards of the whole model, before there are gradients
    assert need.acts["load"] > need.peak.total
    assert need.device > 1.02 * max(need.acts.values()) + 2**26
    assert need.host == need.device
    assert more.acts["train"] == need.acts["train"] + need.states.gradients + need.states.optimizer


def test_the_plan_of_a_cpu_holds_what_an_8_bit_step_takes_of_its_largest_tensor():
    need = of_llama(gpu=False, seq_len=16, optimizer="adamw_8bit").need(Knobs())
    largest = 32000 // 2 * 768  # rows of the embedding on each of two ranks
    assert need.acts["train"] >= need.states.total + 20 * largest


GROW_AND_SHRINK = """
import sys
import torch
from utils.run.allocator import give_back_freed_memory
from utils.run.memory import forget_peak, peak_memory_bytes

def in_use():
    forget_peak(torch.device("cpu"))
    return peak_memory_bytes(torch.device("cpu"))

give_back_freed_memory(int(sys.argv[1]))
before, kept = in_use(), []
torch.manual_seed(0)
for _ in range(4):
    blocks = []
    for size in torch.randint(1000, 900_000, (300,)).tolist():
        blocks.append(torch.ones(size))
        kept.append(torch.ones(1000))
    del blocks
print(in_use() - before)
"""


def test_a_process_gives_back_what_it_frees_unless_the_user_has_set_the_allocator():
    """600 MiB of blocks of all sizes come and go four times: 15 MiB stay, 115, or 545 by glibc's own ways."""

    def kept(mapped_bytes: int, **settings: str) -> int:
        command = [sys.executable, "-c", GROW_AND_SHRINK, str(mapped_bytes)]
        found = subprocess.run(
            command, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True
        )
        return int(found.stdout)

    tight, usual = kept(MAPPED_BYTES_IF_TIGHT), kept(MAPPED_BYTES)
    assert 3 * tight < usual < HOST_BYTES_OF_RANK
    assert kept(MAPPED_BYTES, GLIBC_TUNABLES="glibc.malloc.tcache_count=7") > HOST_BYTES_OF_RANK
