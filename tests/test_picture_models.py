"""Vision-language models: read in slices, cut into units, frozen by parts, saved as they were stored.

python -m pytest tests/test_picture_models.py
"""

import json
from collections import Counter

import pytest
import torch
from launch import forked
from picture_families import NAMES, family_folder
from picture_tracker import pictures_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from shards import shard_training
from tiny import tiny_config
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from utils.model.folder import open_weights, read_config
from utils.model.kinds import freeze_parts, parse_parts, part_names
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import base_names
from utils.model.loss import add_chunked_loss, settle_chunked_loss
from utils.model.options import Lora, Quant
from utils.model.quantize import Int8Linear, quantize_linears
from utils.model.saving import save_model
from utils.model.sharding import decoder_layers, numel, recompute_activations, tower_layers, units
from utils.plan.need import Setting, estimate_states, need_of, planned_model, units_of
from utils.plan.pictures import PictureTrace
from utils.run.distributed import build_mesh
from utils.run.errors import ConfigError


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each family, made when it is first asked for."""
    root = tmp_path_factory.mktemp("families")

    def folder_of(name):
        if not (root / name).exists():
            family_folder(name, root)
            transpose_experts(root / name / "model.safetensors")
        return root / name

    return folder_of


def transpose_experts(file):
    """As the hub has them; save_pretrained of today writes them as they are in memory."""
    stored = load_file(file)
    fused = {name: tensor for name, tensor in stored.items() if ".experts." in name}
    stored |= {name: tensor.mT.contiguous() for name, tensor in fused.items()}
    save_file(stored, file, metadata={"format": "pt"})


def on_meta(folder):
    return build_model(read_config(folder, False), torch.float32, kind="pictures")


def read_and_save(world, folder, out) -> tuple[bool, set[str], float]:
    """(whether the loss needs full logits, tensors that are not equal, difference of logits) of 2 ranks."""
    model = on_meta(folder)
    pieces = plan_pieces(model, open_weights(folder), folder)
    add_chunked_loss(model)
    shard_training(model, build_mesh(world), torch.float32)
    load_pieces(model, pieces, world.device)
    settle_chunked_loss(model, world.device)
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    expected = reference.state_dict()
    state = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    wrong = expected.keys() ^ state.keys()
    wrong |= {name for name in state if not torch.equal(state[name], expected[name])}
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits
        difference = (logits - reference.eval()(ids).logits).abs().max()
    save_model(out, model, pieces, world, source=folder)
    return model.full_logits, wrong, float(difference)


# one of each sort; the others are left to make test-all
AT_ONCE = ("qwen2_5_vl", "qwen3_vl_moe", "mllama", "minicpmv4_6")


@pytest.mark.parametrize(
    "name",
    [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def test_two_ranks_read_their_slices_and_save_what_was_stored(name, folders, tmp_path):
    folder, out = folders(name), tmp_path / "out"
    for result in run_ranks(read_and_save, 2, folder, out):
        assert result == (False, set(), 0.0)
    stored, saved = (load_file(path / "model.safetensors") for path in (folder, out))
    assert stored.keys() == saved.keys()
    assert all(torch.equal(stored[name], saved[name]) for name in stored)
    for file in ("processor_config.json", "preprocessor_config.json"):
        assert (out / file).read_text() == (folder / file).read_text()


def test_experts_that_are_stored_transposed_are_read_and_written_so(folders):
    folder = folders("qwen3_vl_moe")
    model = on_meta(folder)
    pieces = plan_pieces(model, open_weights(folder), folder)
    transposed = [piece for piece in pieces if piece.transposed]
    assert {piece.param.rpartition(".")[2] for piece in transposed} == {"gate_up_proj", "down_proj"}
    for piece in transposed:
        experts, rows, columns = model.get_parameter(piece.param).shape
        assert piece.info.shape == (experts, columns, rows)
    quantize_linears(model.requires_grad_(False), Quant("8bit"), torch.float32)
    load_pieces(model, pieces, torch.device("cpu"), names=base_names(model))
    read = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    for piece in transposed:
        codes, _ = Int8Linear.quantize(read.get_parameter(piece.param).detach().flatten(0, 1))
        found = model.get_parameter(f"{piece.param}_codes.weight")
        assert torch.equal(found.flatten(0, 1), codes)


@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_a_model_is_known_and_its_long_lists_are_units(name, folders):
    model = on_meta(folders(name))
    names = part_names(model)
    assert sorted(sum(names.values(), [])) == sorted(n for n, _ in model.named_parameters())
    layers, towers = list(decoder_layers(model)), tower_layers(model)
    assert all(names.values())
    assert len(layers) == 2 + (name == "mllama")
    assert len(towers) >= 2
    language = {model.get_parameter(n) for n in names["language"]}
    assert all(set(layer.parameters()) <= language for layer in layers)
    assert not any(set(layer.parameters()) & language for layer in towers)


def test_what_is_for_sounds_is_frozen_with_the_tower_and_a_text_run_freezes_the_tower():
    """Gemma 4 E2B: no row has sounds, and no text has pictures. A plan counts no states of the tower."""
    config = CONFIG_MAPPING["gemma4"](audio_config={}, vision_config={})
    names = part_names(build_model(config, torch.bfloat16, kind="pictures"))
    assert {name for name in names["vision"] if "audio" in name} == {
        name for names_of in names.values() for name in names_of if "audio" in name
    }
    text = build_model(config, torch.bfloat16)
    frozen = {name for name, p in text.named_parameters() if not p.requires_grad}
    assert frozen == {name for name in names["vision"] if "vision_tower" in name}
    setting = Setting(config, torch.float32, torch.bfloat16, 8)
    trained = [p for p in planned_model(setting).parameters() if p.requires_grad]
    states = estimate_states(planned_model(setting), 1)
    assert states.gradients == 4 * sum(map(torch.numel, trained)) < states.weights
    assert all(
        p.requires_grad for p in build_model(tiny_config("llama"), torch.float32).parameters()
    )
    scores = build_model(CONFIG_MAPPING["gemma3"](num_labels=1), torch.bfloat16, kind="scores")
    trained = {name for name, p in scores.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert not any("vision_tower" in name for name in trained)


def test_neither_layers_of_towers_nor_large_tables_are_in_the_roots_unit():
    """Gemma 4 E2B: the root stays gathered for the whole step, and a run on texts never gathers a tower."""
    config = CONFIG_MAPPING["gemma4"](audio_config={}, vision_config={})
    model = build_model(config, torch.bfloat16)
    layers = {*tower_layers(model)}
    assert layers == {*model.model.vision_tower.encoder.layers, *model.model.audio_tower.layers}
    assert layers <= {module for unit in units(model, torch.bfloat16) for module in unit.modules}
    root, tables, blocks, _, towers = units_of(
        model, Setting(config, torch.bfloat16, torch.bfloat16, 8, shards=2)
    )
    assert len(towers) == len(layers)
    assert len(tables) == 2  # the other one has a vector for each token and layer
    assert root.gathered < 2**28
    of_all = [root, *tables, *blocks, *towers]
    assert 1 <= sum(unit.gathered for unit in of_all) / 2 / numel(model) < 1.01  # bf16, padded


def test_the_layers_of_a_tower_that_is_too_small_to_be_cut_are_traced_and_not_computed():
    """Qwen2.5-VL 72B: the plan computed its tower on zeros, which took minutes."""
    tower = {"depth": 2, "hidden_size": 1280, "num_heads": 16, "out_hidden_size": 8192}
    text = {"num_hidden_layers": 2, "layer_types": None}
    config = CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=tower)
    model = build_model(config, torch.bfloat16, kind="pictures")
    assert not tower_layers(model)
    trace = PictureTrace(model, torch.bfloat16)
    layers = model.model.visual.blocks
    pictures = {"pixel_values": torch.zeros(64, 1176), "image_grid_thw": torch.tensor([[1, 8, 8]])}
    ids = torch.tensor([[config.image_token_id] * 16])
    before = trace.come_to_language(ids, pictures | {"mm_token_type_ids": ids.clamp(max=1)})
    sizes = [call.forward.rest for call in before.calls if call.layer == -1]
    assert len(sizes) == len(layers) + 1  # and the projector
    assert min(sizes[:-1]) > 64 * 1280 * 2  # more than the input of a layer is kept
    tower["depth"] = 6  # 118 million parameters, less than 1 %
    config = CONFIG_MAPPING["qwen2_5_vl"](
        text_config=text | {"num_hidden_layers": 12}, vision_config=tower
    )
    model = build_model(config, torch.bfloat16, kind="pictures")
    assert tower_layers(model) == [*model.model.visual.blocks]
    assert numel(model.model.visual.blocks) < 0.01 * numel(model)


def test_what_is_frozen_is_stored_in_the_dtype_that_it_is_computed_in(folders):
    model = on_meta(folders("qwen2_5_vl"))
    freeze_parts(model, "language, projector", torch.bfloat16)
    for name, parameter in model.named_parameters():
        in_tower = "visual" in name and "merger" not in name
        assert parameter.requires_grad != in_tower
        assert parameter.dtype == (torch.bfloat16 if in_tower else torch.float32)
    with pytest.raises(ConfigError, match="tower is none of language, projector, vision"):
        parse_parts("tower,vision")


def calls_in_a_step(model, ids, extra) -> Counter:
    """How often a step calls the first linear layer of each layer."""
    calls = Counter()
    for layer in (*tower_layers(model), *decoder_layers(model)):
        linear = next(m for m in layer.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_pre_hook(lambda module, args, layer=layer: calls.update([layer]))
    model(ids, **extra, use_cache=False).logits.sum().backward()
    return calls


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_recomputed_below_the_lowest_trained_layer(name, folders):
    """A frozen tower runs once in a step, though all layers are checkpointed; one that trains, twice."""
    batch = pictures_of(folders(name)).rows_of(1)
    for parts, most in (("language", 1), ("language,projector,vision", 2)):
        model = AutoModelForImageTextToText.from_pretrained(folders(name), dtype=torch.float32)
        freeze_parts(model, parts, torch.float32)
        recompute_activations(model.train(), "full")
        calls = calls_in_a_step(model, batch.ids, batch.extra)
        assert max(calls[layer] for layer in decoder_layers(model)) == 2
        most = 1 if name == "mllama" else most  # its tower transformers never recomputes
        assert max(calls[layer] for layer in tower_layers(model)) == most


@pytest.mark.parametrize("name", NAMES)
def test_adapters_go_beside_all_linear_layers_of_the_language_model_only(name, folders):
    from utils.model.lora import add_adapters

    model = on_meta(folders(name))
    add_adapters(model, Lora(lora_rank=2))
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    language = part_names(model)["language"]
    assert trained
    assert set(trained) <= set(language)


def test_a_model_with_code_of_its_own_is_refused_with_what_to_take_instead(tmp_path):
    fields = {"model_type": "minicpmv", "auto_map": {"AutoConfig": "configuration_minicpm.C"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    said = "custom code which must be executed.*another model, for pictures MiniCPM-V 4.6; for texts --trust"
    with pytest.raises(ConfigError, match=said):
        read_config(tmp_path, False)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="llama is no model of pictures.*MiniCPM-V 4.6"):
        on_meta(tmp_path)


def test_gemma_4_with_embeddings_for_each_layer_is_planned_with_its_activations(folders):
    """The sizes of E2B and E4B; the model takes rows of its embedding by itself."""
    folder = folders("gemma4")
    setting = Setting(
        read_config(folder, False),
        torch.float32,
        torch.bfloat16,
        192,
        kind="pictures",
        train="language,projector",
        pictures=pictures_of(folder),
    )
    assert setting.config.text_config.hidden_size_per_layer_input
    need = need_of(setting)
    assert need.peak, need.why
    assert {"activations", "pictures"} <= need.peak.parts.keys()


@pytest.mark.slow
def test_the_planned_peak_is_within_five_percent_of_torchs_tracker(folders):
    paths = " ".join(str(folders(name)) for name in NAMES)
    ended = forked(f"python tests/picture_tracker.py {paths}", seconds=600, apart=True)
    assert ended.returncode == 0, ended.stderr
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 4 * len(NAMES)
    wrong = [setting for setting in found if not -0.02 < setting[-1] < 0.05]
    assert wrong == []
