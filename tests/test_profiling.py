"""--profile writes a trace that opens, and says how. The end of a --wandb run comes after the result.

python -m pytest tests/test_profiling.py
"""

import gzip
import json

import pytest
from launch import forked
from shell import shell
from test_parity import write_rows
from tiny import tiny_model_folder

WITHOUT_NETWORK = """
import os, time
class Run:
    def log(self, numbers, step):
        pass
    def finish(self):
        print("saved before", os.path.exists(f"{folder}/model/config.json"), flush=True)
        time.sleep(10)
def init(dir, **_):
    global folder
    folder = dir
    return Run()
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("profiling")
    model, rows = (
        tiny_model_folder(root / "model", vocab_size=271),
        write_rows(root / "rows.jsonl", 8),
    )
    return f"--model {model} --dataset {rows} --batch_size 2 --save_every 0 --save_model false --profile"


def events(trace):
    return [
        event.get("name", "")
        for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    ]


@pytest.mark.slow
def test_every_rank_writes_a_trace_of_steps_four_and_five(tmp_path, flags):
    command = (
        f"torchrun --nproc_per_node 2 recipes/finetune.py {flags} --steps 7 --output_dir {tmp_path}"
    )
    result = forked(command)
    assert result.returncode == 0, result.stdout
    for rank in range(2):
        (trace,) = (tmp_path / "profile").glob(f"rank{rank}_from_step_00000004.*.json.gz")
        names = events(trace)
        assert {"ProfilerStep#3", "ProfilerStep#4"} <= set(names)
        assert "ProfilerStep#5" not in names
        assert any("all_gather" in name for name in names)
        assert "FSDP::forward_prefetch for lm_head" in names  # before the last layer computes
    said = [line for line in result.stdout.splitlines() if line.startswith("profile ")]
    assert said == [f"profile   {tmp_path}/profile: open its traces at https://ui.perfetto.dev"]


@pytest.mark.slow
def test_a_run_of_one_step_is_profiled_too_and_an_older_trace_stays(tmp_path, flags):
    command = f"python recipes/finetune.py {flags} --steps 1 --output_dir {tmp_path}"
    traces = set()
    for start in (1, 2):
        result = forked(command)
        assert result.returncode == 0, result.stdout
        (tmp_path / "plan.json").unlink()  # as if it had not ended
        found = set((tmp_path / "profile").glob("rank0_from_step_00000001.*.json.gz"))
        (newest,) = found - traces
        assert "ProfilerStep#0" in events(newest)
        traces |= {newest}
        assert traces == found
        assert len(found) == start


@pytest.mark.slow
def test_a_run_that_fails_while_it_records_ends_as_without_a_profile(tmp_path, flags):
    run = shell(
        f"python recipes/finetune.py {flags} --steps 3 --lr 1e30 --warmup 0 --output_dir {tmp_path}"
    )
    assert run.returncode == 2, run.stderr  # not that of a segmentation fault
    assert "error: step 2: loss" in run.stderr
    (trace,) = (tmp_path / "profile").glob("rank0_from_step_00000002.*.json.gz")
    assert "ProfilerStep#1" in events(trace)


@pytest.mark.slow
def test_the_result_is_saved_before_weights_and_biases_waits_for_its_network(tmp_path, flags):
    (tmp_path / "wandb.py").write_text(WITHOUT_NETWORK)
    flags = flags.replace("--save_model false --profile", "--wandb --timeout 3 --steps 2")
    result = shell(
        f"torchrun --nproc_per_node 2 recipes/finetune.py {flags} --output_dir {tmp_path / 'run'}",
        PYTHONPATH=str(tmp_path),
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("saved before True\n")
