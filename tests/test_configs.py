"""Every file in configs/ is valid, says what it is for, and plans what the arithmetic gives.

python -m pytest tests/test_configs.py
"""

import re

import finetune
import pytest
from shell import ROOT
from transformers import AutoConfig

from utils.config import load_config
from utils.loading import build_model
from utils.memory import estimate_states
from utils.mesh import mesh_axes

PATHS = sorted((ROOT / "configs").glob("*.yaml"))
LLAMA3 = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
SHAPES = {  # from the models' public config.json files
    "meta-llama/Meta-Llama-3-8B-Instruct": (
        "llama",
        {**LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
    ),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "llama",
        {
            **LLAMA3,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "Qwen/Qwen2.5-7B-Instruct": (
        "qwen2",
        {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
    ),
    "Qwen/Qwen2.5-1.5B-Instruct": (
        "qwen2",
        {
            "vocab_size": 151936,
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
}


def header_of(path):
    return "".join(line for line in path.read_text().splitlines(True) if line.startswith("#"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_says_what_it_is_for(path):
    load_config(finetune.Config, path)
    header = header_of(path)
    assert "recipes/finetune.py" in header
    assert f"configs/{path.name}" in header
    assert "GPUs:" in header


@pytest.mark.parametrize("path", [p for p in PATHS if "Planned" in header_of(p)], ids=lambda path: path.stem)
def test_the_planned_bytes_are_what_the_estimate_says(path):
    cfg, header = load_config(finetune.Config, path), header_of(path)
    ranks = int(re.search(r"GPUs: +(\d+) x", header)[1])
    processes = int(found[1]) if (found := re.search(r"--nproc_per_node (\d+)", header)) else 1
    nodes = int(found[1]) if (found := re.search(r"--nnodes (\d+)", header)) else 1
    assert processes * nodes == ranks
    kind, sizes = SHAPES[cfg.model]
    model = build_model(AutoConfig.for_model(kind, **sizes), finetune.DTYPES[cfg.param_dtype])
    shards = mesh_axes(ranks, cfg.replicate, cfg.shard)["shard"]
    states = estimate_states(model, shards, optimizer=cfg.optimizer)
    planned = re.search(r"Planned: +([\d.]+) GiB of states per GPU", header)[1]
    assert f"{states.total / 2**30:.2f}" == planned
    assert "Measured: not measured" in header or re.search(r"Measured: .*\d{4}-\d\d-\d\d", header)
