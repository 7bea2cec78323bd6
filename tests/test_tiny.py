"""The embedded model is real, small, made by the project, and its task is one that it cannot do before.

python -m pytest tests/test_tiny.py -m ""
"""

import hashlib
import json
import math
import sys
from collections import Counter
from functools import partial
from random import Random

import pytest
import torch
from launch import forked
from shell import QUOTED, ROOT, shell
from transformers import AutoModelForCausalLM, AutoTokenizer

TINY = ROOT / "recipes" / "tiny"
SCRIPTS = f"{QUOTED}/recipes/tiny"
MADE = json.loads((TINY / "made.json").read_text())
sys.path.append(str(TINY))

import make
from stories import chat_row


def rows(name):
    return [json.loads(line)["messages"] for line in (TINY / name).read_text().splitlines()]


def test_the_text_the_tokenizer_and_the_task_are_made_again_byte_for_byte(tmp_path):
    text = make.make_text()
    assert make.sha256("\n".join(text).encode()) == MADE["text_sha256"]
    make.make_tokenizer(text[-make.TOKENIZER_STORIES :], tmp_path)
    make.make_task(tmp_path)
    for name in ("tokenizer.model", "tokenizer.json", "chat.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()
        assert hashlib.sha256((TINY / name).read_bytes()).hexdigest() == MADE[name]


def test_no_held_out_question_is_in_the_training_file_and_no_answer_is_common():
    asked = {row[-2]["content"] for row in rows("chat.jsonl")}
    held_out = rows("heldout.jsonl")
    assert len(held_out) >= 200
    assert not {row[-2]["content"] for row in held_out} & asked
    answers = Counter(row[-1]["content"] for row in held_out)
    assert len(answers) >= 100
    assert answers.most_common(1)[0][1] <= 0.05 * len(held_out)


def test_what_held_out_rows_tell_of_things_is_told_in_no_training_row():
    seen = {row[-1]["content"] for row in rows("chat.jsonl")}
    things = {
        row[-1]["content"] for row in rows("heldout.jsonl") if row[-1]["content"].startswith("the ")
    }
    assert len(things) > 100
    assert not things & seen


def test_rows_are_a_function_of_the_random_numbers():
    assert chat_row(Random(7), False) == chat_row(Random(7), False)
    assert chat_row(Random(7), False) != chat_row(Random(8), False)


@pytest.mark.parametrize(
    "name", ["all", *(pytest.param(n, marks=pytest.mark.slow) for n in ("make", "make_vision"))]
)
def test_help_makes_and_runs_nothing(name):
    """The two that make something import torch first, which a fork need not."""
    start = shell if name == "all" else partial(forked, apart=True)
    done = start(f"python {SCRIPTS}/{name}.py --help")
    assert done.returncode == 0
    assert f"python recipes/tiny/{name}.py" in done.stdout
    assert done.stderr == ""
    assert start(f"python {SCRIPTS}/{name}.py --halp").returncode == 2


def test_the_weights_are_at_most_2_mb_and_have_the_recorded_loss():
    assert (TINY / "model.safetensors").stat().st_size <= 2_000_000
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    make.add_chunked_loss(model)
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    stories = make.make_text()[-make.VALIDATION_STORIES :]
    # sentencepiece adds the space itself
    ids = tokenizer([" " + story for story in stories])["input_ids"]
    with torch.no_grad():
        assert make.mean_loss(model, ids).item() == pytest.approx(MADE["loss"], abs=1e-3)


@pytest.mark.parametrize("name", [".", "started", "vision"])
def test_the_files_are_in_the_layout_that_transformers_4_and_mlx_read_too(name):
    config = json.loads((TINY / name / "config.json").read_text())
    text = config.get("text_config", config)
    assert text["rope_theta"] == 500
    assert "rope_parameters" not in text
    settings = json.loads((TINY / name / "tokenizer_config.json").read_text())
    assert not isinstance(settings.get("extra_special_tokens"), list)
    markers = AutoTokenizer.from_pretrained(TINY / name).all_special_tokens
    assert set(make.MARKERS) <= set(markers)


def test_the_tokenizer_keeps_text_and_knows_the_templates_markers():
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = "Anna had the wet red hat. Ünïcödé, 漢字 and 🙂 too."
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True).strip() == text
    for marker in make.MARKERS:
        assert tokenizer.encode(marker, add_special_tokens=False) == [
            tokenizer.convert_tokens_to_ids(marker)
        ]
    talk = [
        {"role": "user", "content": "What is red?"},
        {"role": "assistant", "content": "the red hat"},
    ]
    rendered = tokenizer.apply_chat_template(talk, tokenize=False)
    assert rendered == "<s><|user|> What is red?<|end|><|assistant|> the red hat<|end|>"


@pytest.mark.slow
def test_the_first_steps_of_its_pre_training_learn_and_come_out_the_same_twice(monkeypatch):
    """All 1,500, and whether the loss is the recorded one, are `make tiny`, which takes 5 minutes."""
    monkeypatch.setattr(make, "STEPS", 12)
    monkeypatch.setattr(make, "WARMUP", 2)
    text = make.make_text()
    ids = AutoTokenizer.from_pretrained(TINY)([" " + story for story in text])["input_ids"]
    (one, loss), (other, _) = make.pretrain(ids), make.pretrain(ids)
    assert loss < 5.5 < math.log(one.config.vocab_size)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# As Qwen3.5 and later: the prompt opens thoughts, and the last answer has empty ones.
THINKING = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- "<|" + message.role + "|> " -}}
{{- "<think>\\n\\n</think>\\n\\n" if message.role == "assistant" and loop.last -}}
{{- message.content + "<|end|>" -}}
{%- endfor -%}
{{- "<|assistant|> <think>\\n" if add_generation_prompt -}}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "template", ["", THINKING], ids=["its own template", "a thinking model's template"]
)
def test_the_demo_teaches_it(template, tmp_path):
    """The exact command, and the score of what it saved, in a process that imports nothing of ours. With a
    thinking model's template, here on one rank without torchrun, it was once 0 of 300, at a loss of 0.002.
    """
    command = f"torchrun --nproc_per_node 2 {QUOTED}/recipes/finetune.py --low_cpu_fsdp"
    if template:
        (tmp_path / "thinking.jinja").write_text(template)
        command = f"python {QUOTED}/recipes/finetune.py --batch_size 16"
        command += " --chat_template thinking.jinja --epochs 1"
    trained = forked(command, tmp_path)
    assert trained.returncode == 0, trained.stdout
    assert f"ranks     {1 if template else 2} on cpu" in trained.stdout
    score = (forked if template else shell)(
        f"python {SCRIPTS}/score.py {SCRIPTS} output/finetune-001/model",
        tmp_path,
    )
    before, after = (
        int(line.split(":")[1].split()[0])
        for line in score.stdout.splitlines()
        if "exact match" in line
    )
    assert before <= 3
    assert after >= (200 if template else 270)


@pytest.mark.slow
def test_pairs_teach_it_too(tmp_path):
    """recipes/prefer.py with no other flag, and the score of what it saved by transformers alone."""
    trained = forked(f"torchrun --nproc_per_node 2 {QUOTED}/recipes/prefer.py", tmp_path)
    assert trained.returncode == 0, trained.stdout
    command = f"python {SCRIPTS}/score.py {SCRIPTS} output/prefer-001/model"
    score = forked(f"{command} --questions {SCRIPTS}/heldout_pairs.jsonl", tmp_path)
    assert score.returncode == 0, score.stdout
    numbers = [
        int(line.split(":")[1].split()[0])
        for line in score.stdout.splitlines()
        if line.startswith(("exact match", "chosen likelier"))
    ]
    before, after, pairs_before, pairs_after = numbers
    assert before <= 3
    assert after >= 270
    assert pairs_before <= 200
    assert pairs_after >= 290


@pytest.mark.slow
def test_a_reward_model_scores_held_out_pairs_in_plain_transformers(tmp_path):
    """Of recipes/reward.py, in two of the demo's five epochs, on one rank; score.py asks for 90 %."""
    command = f"python {QUOTED}/recipes/reward.py --batch_size 32 --epochs 2"
    trained = forked(command, tmp_path)
    assert trained.returncode == 0, trained.stdout
    command = f"python {SCRIPTS}/score.py {SCRIPTS} output/reward-001/model"
    score = forked(f"{command} --questions {SCRIPTS}/heldout_pairs.jsonl", tmp_path)
    assert score.returncode == 0, score.stdout
    assert "chosen scored above rejected" in score.stdout


@pytest.mark.slow
def test_rewards_alone_teach_a_model_that_has_seen_little_of_the_task(tmp_path):
    """recipes/grpo.py with no other flag, and the score of what it saved by transformers alone."""
    trained = forked(f"torchrun --nproc_per_node 2 {QUOTED}/recipes/grpo.py", tmp_path)
    assert trained.returncode == 0, trained.stdout
    score = forked(
        f"python {SCRIPTS}/score.py {SCRIPTS}/started output/grpo-001/model",
        tmp_path,
    )
    before, after = (
        int(line.split(":")[1].split()[0])
        for line in score.stdout.splitlines()
        if line.startswith("exact match")
    )
    assert before <= 70
    assert after >= 220
