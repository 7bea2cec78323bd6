"""Every file in configs/ is valid, says what it is for, and plans what the arithmetic gives.

python -m pytest tests/test_configs.py
"""

import re

import finetune
import pytest
from shell import ROOT
from transformers import AutoConfig

from utils.model.options import Lora
from utils.model.sharding import DTYPES
from utils.plan.fit import Planner
from utils.plan.planned import KNOBS, Knobs
from utils.run.mesh import mesh_axes
from utils.run.settings import load_config
from utils.run.units import GIB

PATHS = sorted((ROOT / "configs").glob("*.yaml"))
NAMES = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
TIED = {"tie_word_embeddings": True}
SHAPES = {  # from the models' public config.json files: the sizes by NAMES, and what else differs
    "meta-llama/Meta-Llama-3-8B-Instruct": ("llama", (128256, 4096, 14336, 32, 32, 8), {}),
    "meta-llama/Meta-Llama-3-70B-Instruct": ("llama", (128256, 8192, 28672, 80, 64, 8), {}),
    "meta-llama/Llama-3.2-1B-Instruct": ("llama", (128256, 2048, 8192, 16, 32, 8), TIED),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", (152064, 3584, 18944, 28, 28, 4), {}),
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", (151936, 1536, 8960, 28, 12, 2), TIED),
    "zai-org/GLM-4-9B-0414": ("glm4", (151552, 4096, 13696, 40, 32, 2), {"head_dim": 128}),
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


@pytest.mark.parametrize(
    "path", [p for p in PATHS if "Planned" in header_of(p)], ids=lambda path: path.stem
)
def test_the_planned_bytes_are_what_the_plan_says_and_fit(path):
    cfg, header = load_config(finetune.Config, path), header_of(path)
    ranks = int(re.search(r"GPUs: +(\d+) x", header)[1])
    processes = int(found[1]) if (found := re.search(r"--nproc_per_node (\d+)", header)) else 1
    nodes = int(found[1]) if (found := re.search(r"--nnodes (\d+)", header)) else 1
    assert processes * nodes == ranks
    kind, sizes, others = SHAPES[cfg.model]
    config = AutoConfig.for_model(kind, **dict(zip(NAMES.split(), sizes, strict=True)), **others)
    gib = int(re.search(r"GPUs: +\d+ x (\d+) GB", header)[1])
    how = {
        "lora": Lora(lora_alpha=cfg.lora_alpha, lora_targets=cfg.lora_targets),
        "optimizer": cfg.optimizer,
    }
    how |= {"replicate": ranks // mesh_axes(ranks, cfg.replicate, cfg.shard)["shard"]}
    how |= {"local": processes, "packed": cfg.packing, "sync_each": cfg.sync_each_microbatch}
    structure = (config, DTYPES[cfg.param_dtype], cfg.attn, False)
    shards = mesh_axes(ranks, cfg.replicate, cfg.shard)["shard"]
    planner = Planner(
        structure, DTYPES[cfg.dtype.replace("auto", "bf16")], shards, cfg.seq_len, **how
    )
    rows = cfg.global_batch_size // ranks or cfg.batch_size * max(1, cfg.grad_accum)
    knobs = {name: getattr(cfg, name) for name in KNOBS} | {"grad_accum": rows // cfg.batch_size}
    need = planner.need(Knobs(**knobs))
    assert need.comfortable <= 0.98 * gib * GIB  # of 80 GiB, an H100 shows 79.6
    host, states = need.host * processes / GIB, need.states.total / GIB
    wanted = f"{need.device / GIB:.1f} GiB per GPU must be there, {need.comfortable / GIB:.1f} is comfortable"
    wanted += f", {host:.0f} GiB of host; states are {states:.2f} GiB per GPU"
    assert re.search(r"Planned: +(.+) \(", header)[1] == wanted
    assert "Measured: not measured" in header or re.search(r"Measured: .*\d{4}-\d\d-\d\d", header)
