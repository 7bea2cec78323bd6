"""Loading: every rank reads only its own slices, and the model is the one that from_pretrained gives.

python -m pytest tests/test_loading.py
"""

import json
import shutil
from functools import cache

import pytest
import torch
from families import LAYERS, family_config, family_model
from ranks import gathered, run_ranks
from safetensors.torch import load_file, save_file
from shards import shard_training
from tiny import KINDS, tiny_config, tiny_model_folder
from torch.distributed.tensor import DTensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Llama4Config,
)

from utils.model import loading
from utils.model.folder import Source, open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.saving import save_model
from utils.run.distributed import build_mesh
from utils.run.errors import ConfigError
from utils.train.trained_run import kind_of

IDS = torch.arange(40).view(2, 20) * 23 % 1003
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def loaded(world, folder, dtype=torch.float32, whole=False):
    """(model, pieces)"""
    config = AutoConfig.from_pretrained(folder)
    model = (
        build_model(config, torch.float32, read_from=folder)
        if whole
        else build_model(config, torch.float32)
    )
    pieces = plan_pieces(model, open_weights(folder), folder)
    shard_training(model, build_mesh(world), dtype)
    if not whole:
        load_pieces(model, pieces, world.device)
    return model, pieces


def sharded(*how):
    return loaded(*how)[0].eval()


def logits(world, folder, dtype, whole=False):
    with torch.no_grad():
        return sharded(world, folder, dtype, whole)(IDS, use_cache=False).logits


@cache
@torch.no_grad()
def of_transformers(folder, dtype):
    """The logits of from_pretrained."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype]).eval()
    return model(IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {kind: tiny_model_folder(root / kind, kind, files=2) for kind in KINDS}


def saved_then_logits(world, folder, out):
    """Load and save, with no step between; what is saved has no forward before it."""
    model, pieces = loaded(world, folder)
    save_model(out, model, pieces, world, source=folder)
    with torch.no_grad():
        return model.eval()(IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def on_three_ranks(folders, tmp_path_factory):
    """By the kind of a model, in fp32: (logits of each rank, the folder in which they saved it)."""

    @cache
    def run(kind):
        out = tmp_path_factory.mktemp("saved") / "out"
        return run_ranks(saved_then_logits, 3, folders[kind], out), out

    return run


ALSO_CAST = ("llama", "gpt2", "gemma3", "mixtral")  # one of each sort; the others: make test-all


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(
            kind, dtype, marks=[] if dtype == "fp32" or kind in ALSO_CAST else pytest.mark.slow
        )
        for kind in KINDS
        for dtype in DTYPES
    ],
)
@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
def test_logits_are_bit_equal_to_from_pretrained(folders, on_three_ranks, kind, dtype, ranks):
    expected = of_transformers(folders[kind], dtype)
    if (ranks, dtype) == (3, "fp32"):
        found, _ = on_three_ranks(kind)
    else:
        found = run_ranks(logits, ranks, folders[kind], DTYPES[dtype])
    for ours in found:
        assert torch.equal(ours, expected), (ours - expected).abs().max()


@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_than_experts_is_no_problem(tmp_path, ranks):
    folder = tiny_model_folder(tmp_path, "mixtral", num_local_experts=2)
    expected = of_transformers(folder, "fp32")
    assert all(
        torch.equal(ours, expected) for ours in run_ranks(logits, ranks, folder, torch.float32)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_has_the_names_the_dtypes_and_the_bits_that_were_read(
    folders, on_three_ranks, kind
):
    _, out = on_three_ranks(kind)
    saved = load_file(out / "model.safetensors")
    read = {
        k: v for file in folders[kind].glob("*.safetensors") for k, v in load_file(file).items()
    }
    assert saved.keys() == read.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in read.items())


def load_with_a_value_head(world, source, out):
    """As utils/README.md says for a parameter of one's own; returns its values."""
    model = build_model(AutoConfig.from_pretrained(source), torch.float32)
    pieces = plan_pieces(model, open_weights(source), source)
    model.value = torch.nn.Linear(64, 1, device="meta")
    pieces += [loading.whole(f"value.{name}", p) for name, p in model.value.named_parameters()]
    shard_training(model, build_mesh(world), torch.float32)
    load_pieces(model, pieces, world.device)
    torch.manual_seed(1)
    model.value.reset_parameters()
    save_model(out, model, pieces, world, source=source)
    return {name: gathered(p).detach() for name, p in model.value.named_parameters()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_of_ones_own_is_saved_with_a_piece_of_its_own(folders, tmp_path, ranks):
    out = tmp_path / "out"
    values = run_ranks(load_with_a_value_head, ranks, folders["llama"], out)[0]
    saved, source = load_file(out / "model.safetensors"), {}
    for file in folders["llama"].glob("*.safetensors"):
        source |= load_file(file)
    source |= {f"value.{name}": value for name, value in values.items()}
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) for name in source)


def test_the_classic_way_gives_the_same_model(folders):
    classic = run_ranks(logits, 2, folders["llama"], torch.float32, True)[0]
    assert torch.equal(classic, of_transformers(folders["llama"], "fp32"))


def bytes_read():
    """What this process has read so far, as the kernel counts it."""
    with open("/proc/self/io") as counters:
        return int(next(line for line in counters if line.startswith("rchar")).split()[1])


def shares(world, folder):
    """Bytes that this rank reads from the checkpoint, and bytes of its shards."""
    sharded(world, folder)  # so that every import is done
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    pieces = plan_pieces(model, open_weights(folder), folder)
    shard_training(model, build_mesh(world), torch.float32)
    before = bytes_read()
    load_pieces(model, pieces, world.device)
    read = bytes_read() - before
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return read, sum(p.to_local().numel() * 4 for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe"])
def test_a_rank_reads_exactly_the_bytes_of_its_own_shards(folders, kind):
    for read, held in run_ranks(shares, 3, folders[kind]):
        assert held <= read < held + 1024  # the counter's own file is read too


def anonymous_growth(world, folder):
    def anonymous_bytes():
        with open("/proc/self/status") as status:
            return next(
                int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon")
            )

    before = anonymous_bytes()
    model = sharded(world, folder)
    grown = anonymous_bytes() - before
    return grown, sum(p.to_local().numel() * 4 for p in model.parameters())


def test_a_rank_holds_little_more_than_its_own_shards(tmp_path):
    folder = tiny_model_folder(
        tmp_path,
        "llama",
        torch.bfloat16,
        vocab_size=20011,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=6,
    )
    for grown, held in run_ranks(anonymous_growth, 2, folder):
        assert held > 50e6
        assert grown < 1.05 * held + 24e6  # 16 MiB of staging


def plan(folder):
    return plan_pieces(
        build_model(AutoConfig.from_pretrained(folder), torch.float32), open_weights(folder), folder
    )


def changed(folder, out, change):
    """A copy of a one-file model whose tensors went through `change`."""
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop(NORM), f"lack {NORM}"),
        (lambda t: t.update(extra=torch.ones(3)), "have unknown extra"),
        (lambda t: t.update({NORM: torch.ones(65)}), f"have misshapen {NORM}"),
        (
            lambda t: t.update({"model.norm.weighs": t.pop(NORM)}),
            "lack model.norm.weight; have unknown model.norm.weighs",
        ),
        (lambda t: [t.pop(n) for n in list(t) if "layers.2." in n], "and 4 more"),
    ],
)
def test_weights_that_do_not_fit_the_model_are_refused_by_name(tmp_path, change, says):
    folder = changed(tiny_model_folder(tmp_path / "good"), tmp_path / "bad", change)
    with pytest.raises(ConfigError, match="the weights") as error:
        plan(folder)
    assert says in str(error.value)


def test_one_more_layer_in_the_config_is_refused(tmp_path):
    folder = tiny_model_folder(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
    with pytest.raises(ConfigError, match=r"lack model\.layers\.3\."):
        plan(folder)


OLDER_BUFFERS = {
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8).half()},
    "gpt2": {
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "transformer.h.0.attn.attention.bias": torch.ones(1, 1, 64, 64).bool(),  # GPT-Neo
        "vision_model.embeddings.position_ids": torch.arange(9)[None],  # CLIP
    },
}


@pytest.mark.parametrize("kind", OLDER_BUFFERS)
def test_buffers_that_older_transformers_stored_are_passed_over(tmp_path, kind):
    """Llama 2 and Pythia have rotary frequencies in their files."""
    good = tiny_model_folder(tmp_path / "good", kind)
    older = changed(good, tmp_path / "older", lambda t: t.update(OLDER_BUFFERS[kind]))
    expected = of_transformers(older, "fp32")
    torch.testing.assert_close(run_ranks(logits, 2, older, torch.float32), 2 * [expected])


def store_draft_layer(tensors, *own):
    """The layer behind the last one, as DeepSeek-V3 publishes it; own: tensors that only it has."""
    last = {name: t for name, t in tensors.items() if f".layers.{LAYERS - 1}." in name}
    for name, tensor in last.items():
        tensors[name.replace(f".{LAYERS - 1}.", f".{LAYERS}.")] = tensor + 1
    tensors.update({f"model.layers.{LAYERS}.{name}": torch.ones(64, 128) for name in own})


def test_a_layer_that_drafts_tokens_is_passed_over_whatever_its_number_and_named(tmp_path, capsys):
    """GigaChat3, of the class of DeepSeek-V3: transformers knows only the number of the largest model."""
    config = family_config("deepseek_v3")
    config.vocab_size = 1003
    family_model("deepseek_v3", config=config).save_pretrained(tmp_path / "good")
    expected = of_transformers(tmp_path / "good", "fp32")
    drafts = changed(
        tmp_path / "good", tmp_path / "drafts", lambda t: store_draft_layer(t, "eh_proj.weight")
    )
    torch.testing.assert_close(run_ranks(logits, 2, drafts, torch.float32), 2 * [expected])
    plan(drafts)
    assert "unread    24 tensors that transformers' model does not have" in capsys.readouterr().out
    # One more layer without eh_proj is a layer that the config lacks.
    longer = changed(tmp_path / "good", tmp_path / "longer", store_draft_layer)
    with pytest.raises(ConfigError, match=rf"unknown model\.layers\.{LAYERS}\."):
        plan(longer)


def store_tied_head(tensors, delta):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + delta


def test_a_tied_weight_stored_twice_is_accepted_when_equal_and_refused_when_not(tmp_path):
    good = tiny_model_folder(tmp_path / "good", "qwen2")
    twice = changed(good, tmp_path / "twice", lambda t: store_tied_head(t, 0))
    expected = of_transformers(good, "fp32")
    torch.testing.assert_close(run_ranks(logits, 2, twice, torch.float32), 2 * [expected])
    differs = changed(good, tmp_path / "differs", lambda t: store_tied_head(t, 1))
    with pytest.raises(
        AssertionError, match="is tied to another weight but holds other values"
    ) as e:
        run_ranks(logits, 2, differs, torch.float32)
    # transformers reads it as two weights. The named remedy does so too.
    assert '(fix: "tie_word_embeddings": false in its config.json' in str(e.value)
    file = differs / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))
    expected = of_transformers(differs, "fp32")
    torch.testing.assert_close(run_ranks(logits, 2, differs, torch.float32), 2 * [expected])


@pytest.mark.parametrize("kind", ["gptq", "mlx", "modelopt"])
def test_quantized_weights_whose_config_does_not_say_so_are_refused_as_such(kind, tmp_path):
    """Older GPTQ says it in quantize_config.json, older mlx-lm under "quantization", ModelOpt in
    hf_quant_config.json."""
    name = "model.layers.0.self_attn.q_proj.weight"

    def quantize(tensors):
        stem = name.removesuffix("weight")
        weight = tensors.pop(name)
        if kind == "gptq":
            tensors[stem + "qweight"] = torch.zeros(8, 64, dtype=torch.int32)
        elif kind == "mlx":
            tensors[name] = torch.zeros(64, 8, dtype=torch.uint32)
        else:
            tensors[name] = weight.to(torch.float8_e4m3fn)
        tensors[stem + ("weight_scale" if kind == "modelopt" else "scales")] = torch.ones(1)

    folder = changed(tiny_model_folder(tmp_path / "good"), tmp_path / "quantized", quantize)
    with pytest.raises(
        ConfigError, match=r"scale.* \(fix: .* before quantization if it has scales"
    ):
        plan(folder)


def test_a_layout_that_is_not_cut_into_slices_is_refused_and_the_named_remedy_works(tmp_path):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model("hrm_text", vocab_size=1003, num_hidden_layers=4, **sizes)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path / "original")
    with pytest.raises(
        ConfigError, match=r"layout that is not read in slices: Chunk \(fix: .*format=False"
    ):
        plan(tmp_path / "original")
    model.save_pretrained(tmp_path / "remedied", save_original_format=False)
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    assert torch.equal(run_ranks(logits, 2, tmp_path / "remedied", torch.float32)[0], expected)


def test_an_attention_that_a_model_lacks_is_refused_with_another_attn():
    with pytest.raises(ConfigError, match=r"--attn sdpa: .*\(fix: another --attn, or other values"):
        build_model(tiny_config("gemma2"), torch.float32, attn="sdpa")


def test_a_model_of_a_known_type_that_needs_its_own_code_is_refused_with_the_flag(tmp_path):
    """Step-3.5-Flash: transformers has its config, but no causal language model for it."""
    names = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "auto_map": names}))
    (tmp_path / "own.py").touch()
    config = AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--trust_remote_code, if it asks for that"):
        build_model(config, torch.float32)


def test_the_text_part_of_llama_4_is_read_from_the_whole_models_folder(tmp_path):
    """As it is published; the picture class of transformers 5.24 fails in its forward."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = Llama4Config(
        text_config=sizes
        | {"vocab_size": 64, "intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 8}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
        vision_config=sizes
        | {"intermediate_size": 128, "num_attention_heads": 2, "image_size": 56}
        | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path)
    source = Source(tmp_path, AutoConfig.from_pretrained(tmp_path), open_weights(tmp_path))
    assert {name.split(".")[0] for name in source.weights} == {
        "language_model",
        "multi_modal_projector",
        "vision_model",
    }
    assert kind_of({}, source, "") == "text"
    model = build_model(source.config, torch.float32)
    pieces = plan_pieces(model, source.weights, tmp_path)
    assert all(piece.name.startswith("language_model.") for piece in pieces)
    load_pieces(model, pieces, torch.device("cpu"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.arange(20)[None]
    assert torch.equal(model.eval()(ids).logits, reference.eval()(ids).logits)
