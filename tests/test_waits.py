"""No step makes the host wait for a GPU, but to read what is logged; rehearsed on a CPU by waits.py.

python -m pytest tests/test_waits.py -m ""
"""

import json

import pytest
from launch import forked

STEPS, LOGGED = 4, 2
RUN = f"--steps {STEPS} --log_every {STEPS // LOGGED} --batch_size 4 --grad_accum 2"
RUN += " --save_every 0 --save_model false"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--packing --seq_len 256",
        pytest.param("--activation_checkpointing selective", marks=slow),
        pytest.param("--dtype fp16", marks=slow),
        pytest.param("--optimizer_in_backward --clip_norm 0 --grad_accum 1", marks=slow),
        pytest.param("--optimizer adamw_8bit", marks=slow),
        pytest.param("--lora_rank 8 --quantization 4bit --optimizer adamw_8bit", marks=slow),
    ],
)
def test_a_step_waits_only_where_it_is_logged(flags, tmp_path):
    run = forked(f"python tests/waits.py {RUN} --output_dir {tmp_path / 'out'} {flags}")
    assert run.returncode == 0, run.stdout
    assert json.loads(run.stdout.splitlines()[-1]) == {"read": LOGGED}
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
