"""New weights: the model's own distributions, the same on any number of ranks, and nothing left out.

python -m pytest tests/test_init.py
"""

import json
from pathlib import Path

import pytest
import torch
from families import family_config
from ranks import run_ranks
from safetensors.torch import load_file
from tiny import tiny_config, tiny_tokenizer
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from utils.model import init
from utils.model.folder import open_weights
from utils.model.init import SHAPES, draw_weights, open_config, plan_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.saving import save_model, write_config
from utils.model.sharding import units
from utils.run.distributed import build_mesh, init_distributed, mesh_axes
from utils.run.errors import ConfigError

CPU = torch.device("cpu")
FAMILIES = ["llama", "qwen3", "gemma3", "gpt2", "mixtral", "qwen2", "qwen3_moe"]
GPT2 = {"n_embd": 256, "n_head": 4}
WIDE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 2}


def planned(config, dtype=torch.float32):
    """(model on meta, its pieces, how to draw it)"""
    model = build_model(config, dtype)
    weights, plan = plan_weights(model, dtype)
    return model, plan_pieces(model, weights, Path("none")), plan


def drawn(config, seed=0, dtype=torch.float32):
    model, pieces, plan = planned(config, dtype)
    load_pieces(model, pieces, CPU)
    draw_weights(model, plan, seed)
    return model


def sharded(world, kind, changes, folder, block):
    """Draw on this world's ranks, and save."""
    init.BLOCK = block
    world = init_distributed()
    config = tiny_config(kind, **changes)
    model, pieces, plan = planned(config)
    mesh = build_mesh(world, mesh_axes(world.size, 0, 0))
    for unit in units(model, torch.float32):
        fully_shard(unit.modules, mesh=mesh)
    load_pieces(model, pieces, CPU)
    draw_weights(model, plan, 3)
    source = folder / "nowhere"  # it has no files to copy
    save_model(folder, model, pieces, world, source=source, tokenizer=tiny_tokenizer())


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_tensor_has_the_distribution_that_transformers_gives_it(kind):
    """Deviations and means within 2 %, constants as they are, and buffers too: of models large enough that
    chance is less than that.
    """
    config = tiny_config(kind, **(GPT2 if kind == "gpt2" else WIDE))
    own = drawn(config)
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    found = own.state_dict()
    assert found.keys() == theirs.state_dict().keys()
    for name, wanted in theirs.state_dict().items():
        deviation = wanted.std(unbiased=False)
        if deviation == 0:
            assert torch.equal(found[name], wanted), name
        else:
            chance = 4 / wanted.numel() ** 0.5
            ratio = (found[name].std() / deviation).item()
            assert ratio == pytest.approx(1, rel=max(0.02, chance)), name
            assert abs(found[name].mean()) < chance * deviation, name
    for (name, ours), (_, wanted) in zip(own.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(ours, wanted), name


def test_residual_projections_of_gpt2_are_smaller_as_its_rule_wants():
    layer = drawn(tiny_config("gpt2", **GPT2)).transformer.h[0].attn
    ratio = layer.c_proj.weight.std() / layer.c_attn.weight.std()
    assert ratio.item() == pytest.approx((2 * 3) ** -0.5, rel=0.02)


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_one_two_and_four_ranks_draw_the_same_bits(kind, tmp_path):
    """Into files that from_pretrained loads, with the names of save_pretrained; with tied weights, experts,
    and blocks that end within a row.
    """
    files = []
    for ranks in (1, 2, 4):
        run_ranks(sharded, ranks, kind, {"num_hidden_layers": 2}, tmp_path / str(ranks), 1000)
        files.append(load_file(tmp_path / str(ranks) / "model.safetensors"))
    for other in files[1:]:
        assert other.keys() == files[0].keys()
        assert all(torch.equal(other[name], tensor) for name, tensor in files[0].items())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "2", dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    theirs = open_weights(tmp_path / "theirs")
    assert theirs.keys() == files[0].keys()
    assert all(theirs[name].shape == tuple(files[0][name].shape) for name in theirs)


def test_names_and_seeds_give_different_weights():
    config = tiny_config("llama")
    one, two = drawn(config, 0).state_dict(), drawn(config, 1).state_dict()
    layers = [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)]
    assert not torch.equal(one[layers[0]], one[layers[1]])
    assert not torch.equal(one[layers[0]], two[layers[0]])
    assert torch.equal(one[layers[0]], drawn(config, 0).state_dict()[layers[0]])


def test_weights_in_16_bit_are_those_in_32_bit_rounded():
    config = tiny_config("llama")
    full, half = drawn(config).state_dict(), drawn(config, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(half[name], tensor.bfloat16()) for name, tensor in full.items())


def test_steps_that_follow_each_other_and_rows_that_pad_are_kept():
    """As some families do it: values that change values, and a row of zeros."""
    table = nn.Embedding(40, 300, padding_idx=3, device="meta")
    recorder = init.Recorder({table.weight.untyped_storage()._cdata: "table"})
    with torch.no_grad(), recorder:
        nn.init.uniform_(table.weight, 1, 2)
        nn.init.zeros_(table.weight[3])
        table.weight.data.mul_(torch.arange(300.0))
    block = torch.empty(12000)
    init.draw_block(block, 0, recorder.steps["table"], "key")
    rows = block.view(40, 300)
    assert (rows[3] == 0).all()
    assert (rows[:, 0] == 0).all()
    others = rows[4:, 1:] / torch.arange(1, 300)
    assert 1 <= others.min() < 1.01 < 1.99 < others.max() <= 2


def test_buffers_that_a_module_without_tensors_fills_in_others_are_filled():
    """Falcon H1's decoder fills the multipliers of its layers, which no checkpoint holds."""
    config = family_config("falcon_h1")
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    buffers = dict(drawn(config).named_buffers())
    wanted = {name: buffer for name, buffer in theirs.named_buffers() if "mup_vector" in name}
    assert wanted
    assert all(torch.equal(buffers[name], buffer) for name, buffer in wanted.items())


def test_a_family_whose_rules_leave_a_tensor_is_refused_before_memory_is_used():
    config = tiny_config("llama")
    model = build_model(config, torch.float32)
    model.model.layers[0].self_attn.sink = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(ConfigError, match=r"do not fill model.layers.0.self_attn.sink"):
        plan_weights(model, torch.float32)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        (
            "modernbert-decoder",
            "truncated normals of modernbert-decoder",
        ),  # Wo was 2.8 times too large
        ("mamba2", "A_log is not one for each element"),
        ("ctrl", "do not fill lm_head.bias"),
    ],
)
def test_a_family_whose_rules_cannot_be_drawn_in_blocks_is_refused(name, reason):
    model = build_model(family_config(name), torch.float32)
    with pytest.raises(ConfigError, match=f"{reason}.*fix: another family"):
        plan_weights(model, torch.float32)


def test_tied_weights_are_drawn_by_the_rule_of_the_embedding():
    """transformers ties after it initializes. The head's rule filled the row that pads, and youtu's embedding
    was half as wide.
    """
    table = drawn(tiny_config("llama", tie_word_embeddings=True)).model.embed_tokens.weight
    assert [i for i, row in enumerate(table) if not row.any()] == [0]
    config = family_config("youtu")
    config.hidden_size = 256
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config).get_input_embeddings().weight
    ours = drawn(config).get_input_embeddings().weight
    assert (ours.std() / theirs.std()).item() == pytest.approx(1, rel=0.02)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-8b"])
def test_the_config_of_a_shape_is_saved_in_the_layout_that_transformers_4_reads_too(name, tmp_path):
    source = open_config(name, init_distributed(), "TOKENIZER", False)
    write_config(source.config, source.folder, tmp_path / "config.json")
    saved = json.loads((tmp_path / "config.json").read_text())
    shape = json.loads((SHAPES / f"{name}.json").read_text())
    assert saved["rope_theta"] == shape["rope_theta"] > 10000
    assert saved.get("rope_scaling") == shape.get("rope_scaling")
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.rope_parameters == source.config.rope_parameters


def test_a_model_is_a_config_folder_or_a_shape(tmp_path):
    world = init_distributed()
    config = open_config("LLAMA-3-8b", world, "TOKENIZER", False).config
    assert (config.model_type, config.hidden_size) == ("llama", 4096)
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("qwen3").to_dict()))
    assert open_config(str(tmp_path), world, "", False).config.model_type == "qwen3"
    for name, tokenizer, reason in (
        ("llama-3-8b", "", "fix: --tokenizer"),
        ("llama-4-8b", "x", "a name in .*configs/shapes"),
        (str(tmp_path / "no"), "", "no folder"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            open_config(name, world, tokenizer, False)
        assert "\n" not in str(refused.value)
