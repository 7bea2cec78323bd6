"""No step makes the host wait for a GPU, but to read what is logged; rehearsed on a CPU by waits.py.

python -m pytest tests/test_waits.py -m ""
"""

import json

import pytest
from launch import forked

STEPS, LOGGED = 4, 2
RUN = f"--steps {STEPS} --log_every {STEPS // LOGGED} --batch_size 4 --grad_accum 2"
RUN += " --max_rows 64 --save_every 0 --save_model false"
slow = pytest.mark.slow


@pytest.mark.parametrize(
    "flags",
    [
        "finetune",
        "finetune --packing --seq_len 256",
        pytest.param("finetune --activation_checkpointing selective", marks=slow),
        pytest.param("finetune --dtype fp16", marks=slow),
        pytest.param("finetune --optimizer_in_backward --clip_norm 0 --grad_accum 1", marks=slow),
        pytest.param("finetune --optimizer adamw_8bit", marks=slow),
        pytest.param(
            "finetune --lora_rank 8 --quantization 4bit --optimizer adamw_8bit", marks=slow
        ),
        "reward",
        pytest.param("prefer --loss dpo --lora_rank 8", marks=slow),
        pytest.param("prefer --loss kto", marks=slow),
        pytest.param("pretrain --seq_len 256", marks=slow),
    ],
)
def test_a_step_waits_only_where_it_is_logged(flags, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe, _, flags = flags.partition(" ")
    run = forked(f"python tests/waits.py {recipe} {RUN} --output_dir {tmp_path / 'out'} {flags}")
    assert run.returncode == 0, run.stdout
    expected = {"read": LOGGED}
    if recipe == "prefer":  # at the end it looks whether wanted answers have become unlikely
        expected["distributed.py:all_reduce_sum"] = 1
    assert json.loads(run.stdout.splitlines()[-1]) == expected
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
