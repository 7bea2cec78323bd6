"""Every file in configs/ is valid, says what it is for, and plans what the arithmetic gives.

python -m pytest tests/test_configs.py
"""

import re

import finetune
import grpo
import plan
import prefer
import pretrain
import pytest
import vision
from shell import ROOT
from test_config import load_config
from transformers import AutoConfig

from utils.plan.need import need_of
from utils.run.settings import parse_cli
from utils.run.units import GIB

PATHS = sorted((ROOT / "configs").glob("*.yaml"))
NAMES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
TIED = {"tie_word_embeddings": True}
SHAPES = {  # from the models' public config.json files: the sizes by NAMES, and what else differs
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama", (128256, 4096, 14336, 32, 32, 8), {}),
    "meta-llama/Meta-Llama-3-8B": ("llama", (128256, 4096, 14336, 32, 32, 8), {}),
    "meta-llama/Meta-Llama-3-70B-Instruct": ("llama", (128256, 8192, 28672, 80, 64, 8), {}),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", (128256, 2048, 8192, 16, 32, 8), TIED),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", (152064, 3584, 18944, 28, 28, 4), {}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", (151936, 1536, 8960, 28, 12, 2), TIED),
    "zai-org/GLM-4-9B-0414": ("glm4", (151552, 4096, 13696, 40, 32, 2), {"head_dim": 128}),
}


def recipe_of(path):
    named = {"dpo": prefer, "grpo": grpo, "pretrain": pretrain, "vision": vision}
    return next((named[word] for word in path.stem.split("_") if word in named), finetune)


def header_of(path):
    return "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_says_what_it_is_for(path):
    load_config(recipe_of(path).Config, path)
    header = header_of(path)
    assert f"recipes/{recipe_of(path).__name__}.py" in header
    assert f"configs/{path.name}" in header
    assert "GPUs:" in header


def marked(path):
    """Towers take a while to be traced."""
    return pytest.param(path, marks=[pytest.mark.slow] if "vision" in path.stem else [])


@pytest.mark.parametrize(
    "path",
    [marked(p) for p in PATHS if "Planned" in header_of(p)],
    ids=lambda path: path.stem,
)
def test_the_planned_bytes_are_what_the_plan_says_and_fit(path):
    cfg, header = load_config(recipe_of(path).Config, path), header_of(path)
    ranks = int(re.search(r"GPUs: +(\d+) x", header)[1])
    processes = int(found[1]) if (found := re.search(r"--nproc_per_node (\d+)", header)) else 1
    nodes = int(found[1]) if (found := re.search(r"--nnodes (\d+)", header)) else 1
    assert processes * nodes == ranks
    pictures = re.search(r"Pictures: +([\dx]+)", header)
    if cfg.model not in SHAPES:  # it is in configs/shapes
        shape = cfg.model.rpartition("/")[2].removesuffix("-Instruct")
        config = plan.find_config(shape, False)
    else:
        kind, sizes, others = SHAPES[cfg.model]
        sizes = dict(zip(NAMES.split(), sizes, strict=True))
        config = AutoConfig.for_model(kind, **sizes, **others)
    gib = int(re.search(r"GPUs: +\d+ x (\d+) GB", header)[1])
    flags = f"--config {path} --gpus {ranks} --gpus_per_machine {processes}"
    flags += " --gpu v100-32" if "V100" in header else ""
    flags += f" --images {pictures[1]}" if pictures else ""
    setting = plan.setting_of(parse_cli(plan.Config, flags.split(), others=plan.OTHERS), config)
    need = need_of(setting)
    assert need.comfortable <= 0.98 * gib * GIB  # of 80 GiB, an H100 shows 79.6
    host, states = need.host * processes / GIB, sum(need.states) / GIB
    wanted = f"{need.device / GIB:.1f} GiB per GPU must be there, {need.comfortable / GIB:.1f} is comfortable"
    wanted += f", {host:.0f} GiB of host; states are {states:.2f} GiB per GPU"
    assert re.search(r"Planned: +(.+) \(", header)[1] == wanted
    assert "Measured: not measured" in header or re.search(r"Measured: .*\d{4}-\d\d-\d\d", header)


def test_the_memory_of_the_completions_is_what_the_plan_says(capsys):
    path = ROOT / "configs" / "qwen2_5_7b_grpo_lora_8x80gb.yaml"
    flags = f"--config {path} --model qwen2.5-7b --gpus 8 --gpu a100-80"
    plan.main(parse_cli(plan.Config, flags.split(), others=plan.OTHERS))
    said = capsys.readouterr().out
    assert "rows: the largest" not in said  # grpo.py has not the flags of the tables
    title, line = said.splitlines()[-2:]
    assert title == "The completions, on the other 4 ranks:"
    assert line.endswith("with layers gathered once: fits")
    sizes = {name: f"{float(gib):.1f}" for name, gib in re.findall(r"(\w+|=) (\d+\.\d+)", line)}
    assert re.search(r"Generate: +(.+)", header_of(path))[1] == (
        f"{sizes['=']} GiB on each of the ranks that generate, for 128 prompts of 1,024 tokens: layers"
        f" gathered once {sizes['gathered']}, prompt {sizes['activations']}, keys and values {sizes['cache']}"
    )
