"""Copying a recipe and utils into one's own repository works, in three layouts, from any working folder.

python -m pytest tests/test_copying.py
"""

import shutil

import pytest
from shell import ROOT, shell
from test_parity import write_rows
from tiny import tiny_model_folder

NOTHING = shutil.ignore_patterns("__pycache__")
OPTIONAL = (
    "acts",
    "activations",
    "async_save",
    "cache",
    "config_text",
    "containers",
    "diagnose",
    "experts",
    "explain",
    "faults",
    "fit",
    "flops",
    "held_out",
    "hub",
    "llama_recipes",
    "logits",
    "more_formats",
    "more_tokens",
    "lora",
    "memory",
    "optim_8bit",
    "packing",
    "parts",
    "profiling",
    "quantize",
    "replay",
    "resume",
    "show_data",
    "templates",
    "trace",
    "trackers",
    "trained_run",
    "verify",
    "workers",
)  # what the plain path does not import


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("copying")
    model, rows = tiny_model_folder(root / "model", vocab_size=271), write_rows(root / "rows.jsonl", 4)
    return f"--model {model} --dataset {rows} --steps 1 --batch_size 4"


def trains(script, flags, cwd):
    result = shell(f"python {script} {flags} --output_dir out", cwd)
    assert result.returncode == 0, result.stderr
    assert (cwd / "out" / "model" / "model.safetensors").exists()


@pytest.mark.slow
def test_recipes_and_utils_side_by_side_from_another_folder(tmp_path, flags):
    shutil.copytree(ROOT / "recipes", tmp_path / "mine" / "recipes", ignore=NOTHING)
    shutil.copytree(ROOT / "utils", tmp_path / "mine" / "utils", ignore=NOTHING)
    (tmp_path / "elsewhere").mkdir()
    trains(tmp_path / "mine" / "recipes" / "finetune.py", flags, tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_flat_copy_beside_its_own_utils_though_the_parent_has_other_utils(tmp_path, flags):
    (tmp_path / "utils").mkdir()
    (tmp_path / "utils" / "__init__.py").write_text("raise SystemExit('the wrong utils')\n")
    flat = tmp_path / "project"
    shutil.copytree(ROOT / "utils", flat / "utils", ignore=NOTHING)
    shutil.copy(ROOT / "recipes" / "finetune.py", flat)
    trains("finetune.py", flags, flat)


def test_a_renamed_folder_and_one_sed_without_the_optional_files(tmp_path, flags):
    shutil.copytree(ROOT / "utils", tmp_path / "fsdp_utils", ignore=NOTHING)
    for name in OPTIONAL:
        (tmp_path / "fsdp_utils" / f"{name}.py").unlink()
    (tmp_path / "fsdp_utils" / "llama_recipes.yaml").unlink()
    text = (ROOT / "recipes" / "finetune.py").read_text().replace("from utils.", "from fsdp_utils.")
    (tmp_path / "train.py").write_text(text)
    trains("train.py", flags, tmp_path)


@pytest.mark.slow
def test_a_copy_without_the_tiny_model_says_so(tmp_path):
    shutil.copytree(ROOT / "utils", tmp_path / "utils", ignore=NOTHING)
    shutil.copy(ROOT / "recipes" / "finetune.py", tmp_path)
    result = shell("python finetune.py", tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("error: recipes/tiny is not here (fix: --model FOLDER --dataset FILE)")
    assert result.stderr.count("\n") == 1
