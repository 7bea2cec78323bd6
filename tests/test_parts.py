"""generate.py says what it needs, and refuses what does not fit, before a weight is read.

python -m pytest tests/test_parts.py -m ""
"""

import json
import re
import struct

import generate
import pytest
import torch
from families import LAYERS, family_config
from tiny import tiny_config, tiny_model_folder
from transformers import AutoConfig

from utils.model.loading import build_model
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError


def huge_model_folder(folder):
    """A model of 500 GiB whose file has a header, and holes where its weights would be."""
    tiny_model_folder(folder, num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 2**15, "intermediate_size": 2**17, "num_hidden_layers": 8}
    (folder / "config.json").write_text(json.dumps(config))
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    header, end = {}, 0
    for name, tensor in model.state_dict().items():
        begin, end = end, end + tensor.numel() * 4
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return folder


def test_a_model_that_does_not_fit_is_refused_before_it_is_read(tmp_path):
    folder = huge_model_folder(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("1 2 3\n")
    words = {"prompts": str(tmp_path / "prompts.txt"), "raw": True, "max_new_tokens": 8}
    with pytest.raises(ConfigError) as refused:
        generate.main(generate.Config(model=str(folder), **words))
    said = r"this does not fit: a rank needs [\d.]+ GiB, most of it weights, [\d.]+ GiB; there is .* of host"
    assert re.match(said, str(refused.value))
    assert str(refused.value).endswith("or --force to try)")
    assert "\n" not in str(refused.value)


def test_what_does_not_fit_is_refused_with_its_remedy_and_forced():
    parts = {"a weight": 2**60, "buffers": 2**20}
    with pytest.raises(
        ConfigError, match=r"most of it a weight, .* \(fix: a smaller .*; or --force to try\)"
    ):
        generate.plan_generation(parts, ALONE, force=False)
    generate.plan_generation(parts, ALONE, force=True)


def test_eager_attention_is_planned_with_its_probabilities():
    """They are fp32 beside the scores, of every head: most of a long prompt's memory."""
    eager, sdpa = (
        generate.estimate_generation(
            build_model(tiny_config("llama"), torch.float32, attn), 1, torch.float32, 2, 512, 8
        )
        for attn in ("eager", "sdpa")
    )
    heads = tiny_config("llama").num_attention_heads
    assert eager["activations"] - sdpa["activations"] == 8 * 2 * heads * 512 * 512


def test_one_rank_plans_its_copies_in_the_dtype_of_the_computation():
    model = build_model(tiny_config("llama"), torch.float32)
    copied, stored = (
        generate.estimate_generation(model, 1, dtype, 2, 32, 8)["gathered"]
        for dtype in (torch.bfloat16, torch.float32)
    )
    assert stored == 0
    assert copied > model.get_output_embeddings().weight.numel() * torch.bfloat16.itemsize


@pytest.mark.parametrize(
    "kind",
    ["llama", "gpt2", "mixtral", "qwen3_moe", "gemma2", "gemma3n_text", "gemma4_text", "mamba"],
)
def test_more_rows_and_tokens_need_more_and_ranks_share_the_weights(kind):
    """Sizes may differ by layer, and a config may have no attention."""
    model = build_model(family_config(kind), torch.float32)

    def total(shards, *rows_and_tokens):
        return sum(
            generate.estimate_generation(model, shards, torch.float32, *rows_and_tokens).values()
        )

    assert total(1, 1, 32, 8) < total(1, 4, 32, 8) < total(1, 4, 64, 8) < total(1, 4, 64, 32)
    weights = [
        generate.estimate_generation(model, n, torch.float32, 1, 8, 8)["weights"] for n in (1, 2)
    ]
    assert 1.8 < weights[0] / weights[1] <= 2


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text", "mamba", "rwkv"])
def test_layers_of_different_sizes_and_layers_without_heads_are_planned_too(kind):
    model = build_model(family_config(kind), torch.float32)
    parts = generate.estimate_generation(model, 1, torch.float32, 2, 16, 8)
    widths = [
        layer.out_features for name, layer in model.named_modules() if name.endswith(".k_proj")
    ]
    keys_and_values = 2 * 2 * (16 + 8) * 4 * max(widths, default=64)
    assert parts["cache"] >= LAYERS * keys_and_values
