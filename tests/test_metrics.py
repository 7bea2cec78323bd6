"""Numbers of a run, and the memory that is planned for it. Alone: `pytest tests/test_metrics.py`"""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from finetune import Config
from launch import forked
from metrics import read_metrics
from ranks import run_ranks
from shards import shard_training
from tiny import build_optimizer, tiny_config, tiny_model
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from utils.plan.need import States, estimate_states, sum_of
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError
from utils.run.settings import check_settled
from utils.train.log import RunLog
from utils.train.profiling import (
    Tracker,
    flops_per_token,
    matmul_parameters,
    mfu,
)

ROOT = Path(__file__).resolve().parent.parent
NUMBERS = {
    "loss": 2.5,
    "grad_norm": 0.75,
    "lr": 1e-4,
    "trained_tokens": 99,
    "tokens_per_second": 12345.6,
}
LINE = "step 2/4  loss 2.5000  grad_norm 0.750  lr 1.00e-04  12,346 tokens/s"


def log_of(folder: Path, steps: int, first: int = 0, run: int = 1, **options) -> RunLog:
    return RunLog(folder, steps, first, run, ALONE, 0.0, Config(**options))


def objects(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_log_has_whole_lines_and_the_file_every_step(tmp_path, capsys):
    log = log_of(tmp_path, 5, log_every=2)
    for step in range(1, 6):
        log.step(step=step, **NUMBERS, mfu=0.417 if step == 4 else None, peak_memory_gib=1.5)
    log.step(step=5, eval_loss=1.25)
    log.step(step=4, exact_match=0.25)  # an owner's, without a format
    log.__exit__()
    said = capsys.readouterr().out
    assert said.splitlines() == [
        "step 2/5  loss 2.5000  grad_norm 0.750  lr 1.00e-04  12,346 tokens/s  peak 1.50 GiB",
        "step 4/5  loss 2.5000  grad_norm 0.750  lr 1.00e-04  12,346 tokens/s  mfu 41.7%  peak 1.50 GiB",
        "step 5/5  loss 2.5000  grad_norm 0.750  lr 1.00e-04  12,346 tokens/s  peak 1.50 GiB",
        "step 5/5  eval_loss 1.2500",
    ]
    assert "\r" not in said
    assert [entry["step"] for entry in objects(tmp_path)] == [1, 2, 3, 4, 5, 5, 4]
    assert objects(tmp_path)[0] == {"run": 1, "step": 1, **NUMBERS, "peak_memory_gib": 1.5}


def test_other_ranks_are_silent(tmp_path, capsys):
    log = log_of(tmp_path, 2, run=0)
    log.step(step=2, **NUMBERS)
    log.__exit__()
    assert capsys.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_numbers_that_json_lacks_become_null(tmp_path):
    log_of(tmp_path, 1).step(step=1, loss=float("nan"), grad_norm=float("inf"))
    assert objects(tmp_path) == [{"run": 1, "step": 1, "loss": None, "grad_norm": None}]


def test_a_resume_adds_lines_and_readers_take_the_last_of_a_step(tmp_path):
    log = log_of(tmp_path, 9)
    for step in range(1, 6):
        log.step(step=step, loss=0.0)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    log = log_of(tmp_path, 9, first=3, run=2)
    log.step(step=4, loss=1.0)
    log.step(step=4, eval_loss=2.0)
    assert [entry["run"] for entry in objects(tmp_path)] == [1] * 5 + [2] * 2
    read = [
        (entry["step"], entry.get("loss")) for entry in read_metrics(tmp_path / "metrics.jsonl")
    ]
    assert read == [(1, 0), (2, 0), (3, 0), (4, 1), (4, None), (5, 0)]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


SCRIPT = f"""
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from utils.run.distributed import ALONE
from utils.train.log import RunLog
if sys.argv[2:]:  # a terminal
    os.dup2(os.open(sys.argv[2], os.O_WRONLY | os.O_NOCTTY), 1)
options = SimpleNamespace(log_every=1, profile=False, tensorboard=False, wandb=False)
log = RunLog(Path(sys.argv[1]), 4, 0, 1, ALONE, 0.0, options)
for step in range(1, 5):
    log.step(step=step, **{NUMBERS})
log.__exit__()
print("done")
"""


def test_a_closed_stdout_does_not_end_the_run(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", SCRIPT, tmp_path]
    ended = subprocess.run(command, cwd=ROOT, timeout=100, stderr=subprocess.PIPE, stdout=writer)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert len(objects(tmp_path)) == 4


def test_a_terminal_gets_a_bar_with_the_time_left(tmp_path):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = forked(f"python {tmp_path}/script.py {tmp_path} {os.ttyname(theirs)}")
    assert (ended.returncode, ended.stdout) == (0, "")
    said = os.read(ours, 2**16).decode()
    assert LINE in said
    assert "4/4 [00:00<00:00" in said
    assert "\r" in said


def test_tensorboard_gets_every_number(tmp_path):
    check_settled(Config(tensorboard=True), "")
    log = log_of(tmp_path, 2, tensorboard=True)
    log.step(step=1, **NUMBERS)
    log.__exit__()
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == sorted(NUMBERS)
    assert events.Scalars("loss")[0].value == 2.5


def test_tensorboard_forgets_the_steps_that_a_resume_takes_again(tmp_path):
    for run, done, loss in ((1, 0, 1.0), (2, 2, 2.0)):
        log = log_of(tmp_path, 4, first=done, run=run, tensorboard=True)
        for step in range(done + 1, 5):
            log.step(step=step, loss=loss)
        log.__exit__()
        if run == 1:
            time.sleep(1.1)  # the name of an event file has its second
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 2.0),
        (4, 2.0),
    ]


def test_a_missing_tracker_is_named_with_its_remedy(tmp_path, monkeypatch):
    (tmp_path / "wandb").mkdir()  # what a run of it leaves behind is not the package
    monkeypatch.syspath_prepend(tmp_path)
    check_settled(Config(), "")
    with pytest.raises(ConfigError, match="--wandb needs a package .fix: pip install wandb."):
        check_settled(Config(wandb=True), "")


def on_meta(model_type: str, **sizes):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **sizes))


EIGHT_B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def test_flops_of_llama_3_8b_are_the_known_ones():
    model = on_meta("llama", **EIGHT_B)
    params = matmul_parameters(model)
    # table, norms
    assert params == sum(p.numel() for p in model.parameters()) - 128256 * 4096 - 65 * 4096
    assert flops_per_token(model, 4096) == pytest.approx(48.25e9, rel=1e-4)
    assert flops_per_token(model, 8192) == pytest.approx(51.47e9, rel=1e-4)
    # under adapters the weights have no gradient, which is one of the three products with them
    frozen = flops_per_token(model, 4096, frozen=True)
    assert frozen == flops_per_token(model, 4096) - 2 * params


def test_a_tied_table_counts_as_the_head_and_experts_by_visits():
    tied, untied = tiny_model("qwen2"), tiny_model("llama")
    embedding = tied.get_input_embeddings().weight.numel()
    assert matmul_parameters(tied) == sum(p.numel() for p in tied.parameters() if p.ndim == 2)
    matrices = sum(p.numel() for p in untied.parameters() if p.ndim == 2)
    assert matmul_parameters(untied) == matrices - embedding
    # the 8x7B, of which 12.9B work
    mixtral = on_meta("mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert matmul_parameters(mixtral) + 32000 * 4096 == pytest.approx(12.9e9, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H800 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 5090", 209),
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA GeForce RTX 3090", 71),
        ("Tesla V100-SXM2-16GB", 125),
    ],
)
def test_peaks_are_known_by_the_names_that_torch_gives(name, tera):
    assert mfu(tera * 1e12, SimpleNamespace(gpu_name=name, size=1)) == 1


def test_unknown_devices_have_no_peak():
    assert mfu(1e12, ALONE) == 0
    for name in (
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ):
        assert mfu(1e12, SimpleNamespace(gpu_name=name, size=1)) == 0


PEAK = """
import sys
import numpy as np
import torch
from utils.run.memory import peak_memory_bytes
mib, file = 2**20, sys.argv[1]
open(file, "wb").write(bytes(64 * mib))
before = peak_memory_bytes()
mapped = np.memmap(file, mode="r")
assert mapped.sum() == 0  # every page is in memory now
assert peak_memory_bytes() - before < 32 * mib
block = np.ones(64 * mib, dtype=np.uint8)
with_block = peak_memory_bytes()
assert with_block - before > 48 * mib
del block
assert peak_memory_bytes() - before > 48 * mib
"""


def test_peak_memory_remembers_what_was_freed_and_ignores_mapped_files(tmp_path):
    """In a process of its own, because other tests leave free memory that still counts."""
    ended = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path / "file"], cwd=ROOT, capture_output=True
    )
    assert ended.returncode == 0, ended.stderr.decode()


def planned_and_held(world, kind):
    """The estimate from meta shapes, and the bytes that this rank holds after one AdamW step."""
    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
    }
    with torch.device("meta"):
        planned_model = AutoModelForCausalLM.from_config(tiny_config(kind, **sizes))
    model = tiny_model(kind, **sizes)
    for each in (planned_model, model):
        # frozen where it is not tied
        each.get_input_embeddings().weight.requires_grad_(kind == "qwen2")
    planned = estimate_states(planned_model, world.size)
    model = shard_training(model, init_device_mesh("cpu", (world.size,)), torch.float32)
    optimizer = build_optimizer(model, 1e-3, 0.1)
    rows = torch.arange(8)[None]
    model(rows, labels=rows).loss.backward()
    optimizer.step()
    weights = list(model.parameters())
    gradients = [p.grad for p in weights if p.grad is not None]
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return planned, States(*(held_bytes(tensors) for tensors in (weights, gradients, moments)))


def held_bytes(tensors) -> int:
    """Storage of the local parts with padding; shared storage counts once."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in (t.detach() for t in tensors)]
    return sum(
        {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}.values()
    )


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_planned_states_are_what_the_fullest_rank_holds(ranks):
    for kind in ("llama", "qwen2"):
        both = run_ranks(planned_and_held, ranks, kind)
        planned, held = both[0]
        assert planned == held
        assert max(sum(held) for _, held in both) == sum(planned)


def test_parts_and_their_sum_are_one_line():
    states = estimate_states(on_meta("llama", **EIGHT_B), shards=8)
    assert sum_of(states._asdict()) == "optimizer 7.48 + weights 3.74 + gradients 3.74 = 14.96 GiB"


def broken(where):
    """A tracker that fails to start, to log or to close."""

    def fail(act):
        if act == where:
            raise OSError(f"no network to {act}\nand more")

    def start(folder, done):
        fail("start")
        return (lambda numbers, step: fail("log")), (lambda: fail("close"))

    return start


@pytest.mark.parametrize("where", ["start", "log", "close"])
def test_a_tracker_that_fails_is_left_out_with_one_warning(where, tmp_path, capsys):
    tracker = Tracker("TensorBoard", broken(where), tmp_path, 0)
    log = log_of(tmp_path, 2, log_every=3)
    log.trackers = [tracker]
    log.step(step=1, loss=1.0)
    log.__exit__()
    said = (
        f"warning: the run goes on without TensorBoard: OSError: no network to {where} and more\n"
    )
    assert capsys.readouterr().out == said
