"""The benchmarks of the step, the loss and one GPU do what they say, on shapes of a second.

python -m pytest tests/test_bench_step.py
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

BENCHMARKS = Path(__file__).resolve().parent / "benchmarks"
sys.path.insert(1, str(BENCHMARKS))
import gpu
import loss
import memory
import step
from measure import Worker

from utils.plan.need import TOO_LARGE, Room, answer_of, need_of


def contend(world, benchmark, contender, folder, out):
    """One rank's numbers, as a worker writes them; Trainer's traces in this process are wiped."""
    environment = dict(os.environ)
    try:
        return sys.modules[benchmark].contend(Worker(world, contender, folder, out, True))
    finally:
        os.environ.clear()
        os.environ.update(environment)


def ran(ranks, benchmark, contender, folder, out):
    """Its numbers on all ranks, combined as the table does."""
    Path(out).mkdir(exist_ok=True)
    numbers = run_ranks(contend, ranks, benchmark.__name__, contender, folder, out)
    keys = [key for key in benchmark.METRICS if key in numbers[0]]
    return {key: benchmark.METRICS[key][1](n[key] for n in numbers) for key in keys}


@pytest.fixture(scope="module")
def input_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step")
    step.prepare(folder, small=True)
    return folder


@pytest.fixture(scope="module")
def bare(input_folder, tmp_path_factory):
    return ran(2, step, "bare_loop", input_folder, tmp_path_factory.mktemp("bare"))


@pytest.mark.slow
@pytest.mark.parametrize("contender", [name for name in step.CONTENDERS if name != "bare_loop"])
def test_every_loop_has_the_losses_of_the_bare_loop_and_its_time_is_taken(
    contender, input_folder, bare, tmp_path
):
    numbers = ran(2, step, contender, input_folder, tmp_path)
    assert 0 <= numbers["loss_error"] <= 1e-5
    # not the peak: these processes have run other loops, and what those freed is used again
    assert min(numbers["seconds"], numbers["cpu_seconds"]) > 0
    # so it is sharded, accelerate too; in bf16 two bytes are gathered where four are reduced
    size = 2 if contender.endswith("bf16") else 1
    assert size * numbers["gathered_bytes"] > numbers["reduced_bytes"] > 0


def test_the_bare_loop_sends_the_least_and_fits_on_a_page(bare):
    assert bare["wire_share"] == pytest.approx(1.0)
    assert len((BENCHMARKS / "bare_loop.py").read_text().splitlines()) <= 60


def test_other_losses_than_the_first_contender_s_are_a_failure(input_folder, bare, tmp_path):
    folder = tmp_path / "input"
    shutil.copytree(input_folder, folder)
    first = json.loads((folder / "losses.json").read_text())
    (folder / "losses.json").write_text(json.dumps([first[0] * (1 + 2e-5), *first[1:]]))
    with pytest.raises(AssertionError, match="losses.json differ by 2.0e-05"):
        ran(2, step, "ours", folder, tmp_path / "out")


def test_chunked_and_plain_loss_are_equal_and_another_is_a_failure(tmp_path):
    plain, chunked = (
        ran(1, loss, f"{kind}_32000_4096", tmp_path, tmp_path / kind)
        for kind in ("plain", "chunked")
    )
    assert chunked["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    (tmp_path / "loss and gradient norms of 32000_4096").write_text("[1.0, 1.0, 1.0]")
    with pytest.raises(AssertionError, match="differ by"):
        ran(1, loss, "plain_32000_4096", tmp_path, tmp_path / "wrong")


@pytest.mark.slow
@pytest.mark.parametrize("contender", [name for name in gpu.CONTENDERS if "compiled" not in name])
def test_what_runs_on_a_gpu_runs_on_a_cpu_in_a_tiny_shape(contender, tmp_path):
    numbers = ran(1, gpu, contender, tmp_path, tmp_path / "out")
    assert min(numbers["tokens_per_second"], numbers["peak_bytes"], numbers["seconds"]) > 0


@pytest.mark.slow
def test_so_do_the_steps_whose_memory_was_planned(tmp_path):
    (found,) = run_ranks(contend, 1, "memory", "settings", tmp_path, tmp_path)
    assert found["count"] == len(memory.SMALL) == len(found["rows"])
    assert min(row["planned_bytes"] for row in found["rows"]) > 0


@pytest.mark.slow
def test_every_setting_that_a_gpu_is_asked_about_has_a_plan_and_fits_an_h200():
    assert len(memory.SETTINGS) >= 24
    for shape, seq_len, dtype, knobs in memory.SETTINGS:
        chosen = memory.planned(shape, seq_len, dtype, knobs, True, 1)
        room = Room(139 * 2**30, 100 * 2**30, "")
        assert answer_of(chosen, need_of(chosen), room) != TOO_LARGE, (shape, knobs)


@pytest.mark.slow
def test_the_compiled_step_runs_on_a_cpu_too(tmp_path):
    assert ran(1, gpu, "compiled_full", tmp_path, tmp_path / "out")["tokens_per_second"] > 0


def row(contender, tokens_per_second, **ratios):
    values = {
        "tokens_per_second": tokens_per_second,
        "mfu": 0.5,
        "peak_bytes": 2**30,
        "reserved_bytes": 3 * 2**29,
        "retries": 3,
        "seconds": 2.0,
    }
    spread = {key: (v, v, v) for key, v in {**values, **ratios}.items()}
    return {"contender": contender, "error": "", "values": spread}


def test_the_written_table_has_every_row_its_ratios_and_errors():
    failed = {
        "contender": "hf_tuned",
        "error": "failed: OutOfMemoryError: CUDA out of memory",
        "values": {},
    }
    lines = gpu.table([row("plain", 13_000.0), row("full", 9000.0, peak_bytes_ratio=0.7), failed])
    assert [line.count("|") for line in lines] == [10] * 5
    assert lines[2].startswith("| plain | 13,000 | 50.0% | 1.0 | 1.5 | 3 | 2.00 |  |")
    assert "| 0.700 x hf_tuned |" in lines[3]
    assert "| failed: OutOfMemoryError" in lines[4]


def test_on_a_cpu_the_report_writes_nothing(capsys):
    before = set((BENCHMARKS.parent.parent / "configs").iterdir())
    gpu.report({"config": {"small": False}, "tables": [{"rows": []}]})
    assert "9,500 tokens/s" in capsys.readouterr().out
    assert set((BENCHMARKS.parent.parent / "configs").iterdir()) == before


def test_without_a_gpu_the_gpu_benchmark_says_so():
    assert gpu.unavailable() == "no GPU here: nothing was run"
