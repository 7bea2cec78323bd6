"""Adapters: the same numbers on any number of ranks, peft's own training, and peft's own file.

python -m pytest tests/test_lora.py
"""

import json
import shutil
from functools import cache

import pytest
import torch
from families import family_config
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import gathered, run_ranks
from safetensors.torch import load_file, save_file
from shards import shard_training
from test_quantize import loss_of, token_ids
from tiny import build_optimizer, tiny_config, tiny_model_folder
from torch.distributed.tensor import distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import (
    adapt,
    adapters_off,
    add_adapters,
    base_names,
    freeze_base,
    init_lora,
    inject,
    load_adapter,
    save_adapter,
)
from utils.model.options import Lora, Quant
from utils.model.quantize import quantize_linears
from utils.model.sharding import recompute_activations
from utils.run.distributed import build_mesh, mesh_axes
from utils.run.errors import ConfigError

EVERY = {"lora_targets": "all-linear", "use_rslora": True}
CASES = {  # of Lora
    "all_linear": EVERY,
    "regex": {"lora_targets": r"model\.layers\.[02]\..*(q_proj|down_proj)"},
    "embedding_and_head": {"lora_targets": "embed_tokens,lm_head,q_proj"},
    "modules_to_save": {
        "lora_targets": "q_proj",
        "modules_to_save": "lm_head,embed_tokens,input_layernorm",
    },
    "dora": {"lora_targets": "q_proj,down_proj,embed_tokens", "use_dora": True},
}


def build(folder, case, kind="", adapter=None):
    """(model on meta, pieces, config)"""
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    pieces = plan_pieces(model, open_weights(folder), folder)
    lora = Lora(adapter=str(adapter)) if adapter else Lora(lora_rank=4, lora_alpha=8, **case)
    config = add_adapters(model, lora)
    if kind:
        quantize_linears(model, Quant(kind), torch.float32)
    freeze_base(model, Quant(), torch.float32)
    return model, pieces, config


def sharded(world, folder, case, kind="", recompute=False, adapter=None, replicate=1):
    model, pieces, config = build(folder, case, kind, adapter)
    if recompute:
        recompute_activations(model, "full")
    names = base_names(model)
    shard_training(model, build_mesh(world, mesh_axes(world.size, replicate)), torch.float32)
    load_pieces(model, pieces, world.device, names=names)
    if adapter:
        load_adapter(model, adapter)
    else:
        init_lora(model, seed=3)
    return model.train(), config


def step(model, optimizer, ids):
    loss = loss_of(model, ids)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(world, folder, case, out, kind="", recompute=False, adapter=None):
    """Train two steps on this rank's rows and save; the adapter before, and the logits after."""
    model, config = sharded(world, folder, case, kind, recompute, adapter)
    first = {
        n: gathered(p).detach().clone() for n, p in model.named_parameters() if p.requires_grad
    }
    optimizer = build_optimizer(model, 1e-2, 0.0)
    for _ in range(2):
        step(model, optimizer, token_ids().chunk(world.size)[world.rank])
    text = save_adapter(out, model, config, folder, world, None, None)
    with torch.no_grad():
        logits = model.eval()(input_ids=token_ids(), use_cache=False).logits
    return first, logits, text


def values(world, folder, case, recompute):
    model, _ = sharded(world, folder, case, recompute=recompute)
    return {n: gathered(p).detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("lora")
    sizes = {"vocab_size": 271, "num_hidden_layers": 3}
    return {
        family: tiny_model_folder(root / family, family, **sizes)
        for family in ("llama", "qwen2", "mixtral")
    }


@pytest.fixture(scope="module")
def all_linear(folders, tmp_path_factory):
    """What two ranks trained and saved, and the folder of the adapter."""
    out = tmp_path_factory.mktemp("saved") / "adapter"
    return run_ranks(trained, 2, folders["llama"], EVERY, out)[0], out


@pytest.fixture(scope="module")
def saved(all_linear):
    """An adapter that two ranks trained."""
    return all_linear[1]


def test_fresh_adapters_are_the_same_on_any_number_of_ranks_and_with_recompute(folders):
    case = {**EVERY, "lora_targets": "all-linear", "modules_to_save": "embed_tokens"}
    one = run_ranks(values, 1, folders["llama"], case, False)[0]
    others = [run_ranks(values, n, folders["llama"], case, n == 2)[0] for n in (2, 3)]
    for other in others:
        assert other.keys() == one.keys()
        assert all(torch.equal(other[name], one[name]) for name in one)
    a, b = (one[f"model.layers.0.mlp.up_proj.lora_{x}.default.weight"] for x in "AB")
    assert a.abs().max() <= 1 / 64**0.5
    assert a.std() == pytest.approx(1 / (3 * 64) ** 0.5, rel=0.1)
    assert not b.any()
    assert not torch.equal(a, one["model.layers.1.mlp.up_proj.lora_A.default.weight"])


def plain(folder, first, out, case):
    """The same training with peft in one process, from the same numbers."""
    config = LoraConfig.from_pretrained(out)
    config.inference_mode = False
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config
    )
    mine = dict(model.get_base_model().named_parameters())
    with torch.no_grad():
        for name, value in first.items():
            mine[name].copy_(value)
    optimizer = build_optimizer(model, 1e-2, 0.0)
    for _ in range(2):
        step(model.train(), optimizer, token_ids())
    with torch.no_grad():
        return model.eval()(input_ids=token_ids(), use_cache=False).logits


# Of the second, whose embedding is also its head, and which has biases, only what may meet these.
AT_ONCE = {"llama": CASES, "qwen2": ("all_linear", "embedding_and_head", "modules_to_save")}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=[] if case in AT_ONCE[family] else pytest.mark.slow)
        for family in AT_ONCE
        for case in CASES
    ],
)
def test_training_equals_peft_in_one_process_and_peft_loads_the_adapter_with_the_same_logits(
    request, folders, tmp_path, family, case
):
    folder, out = folders[family], tmp_path / "adapter"
    if (family, case) == ("llama", "all_linear"):
        (first, logits, text), out = request.getfixturevalue("all_linear")
    else:
        first, logits, text = run_ranks(trained, 2, folder, CASES[case], out)[0]
    torch.testing.assert_close(logits, plain(folder, first, out, CASES[case]), rtol=1e-4, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert (base(token_ids(), use_cache=False).logits - logits).abs().max() > 0.1  # it did train
    theirs = PeftModel.from_pretrained(base, out).eval()
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=token_ids(), use_cache=False).logits, logits)
    assert text.startswith(f"{len(load_file(out / 'adapter_model.safetensors'))} tensors")


def save_copies(world, folder, out):
    """Save from 2 copies of the model, each on 2 ranks."""
    model, config = sharded(world, folder, EVERY, replicate=2)
    save_adapter(out, model, config, folder, world, None, None)
    return {n: gathered(p).detach() for n, p in model.named_parameters() if p.requires_grad}


def test_of_copies_of_the_model_one_is_saved(folders, tmp_path):
    live = run_ranks(save_copies, 4, folders["llama"], tmp_path / "adapter")[3]
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert len(stored) == len(live) == 42
    for name, value in live.items():
        assert torch.equal(stored["base_model.model." + name.replace(".default", "")], value)


def test_adapters_on_a_mixture_of_experts_leave_router_and_experts_alone(folders, tmp_path):
    out = tmp_path / "adapter"
    first, logits, _ = run_ranks(trained, 2, folders["mixtral"], EVERY, out)[0]
    assert {name.split(".")[4] for name in first} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    base = AutoModelForCausalLM.from_pretrained(folders["mixtral"], dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, out).eval()
    with torch.no_grad():
        assert torch.equal(theirs(input_ids=token_ids(), use_cache=False).logits, logits)


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_dora_starts_as_the_quantized_base_on_uneven_rows(folders, kind):
    case = {"lora_targets": "q_proj,o_proj", "use_dora": True}
    logits = run_ranks(answers, 3, folders["llama"], case, kind)
    without = run_ranks(answers, 1, folders["llama"], {"lora_targets": "q_proj"}, kind)[0]
    for rank in logits:
        torch.testing.assert_close(rank, without, rtol=1e-4, atol=1e-4)


def answers(world, folder, case, kind):
    model, _ = sharded(world, folder, case, kind)
    with torch.no_grad():
        return model.eval()(input_ids=token_ids(), use_cache=False).logits


def test_an_adapter_continues_on_another_number_of_ranks_where_it_stood(folders, saved, tmp_path):
    stored = load_file(saved / "adapter_model.safetensors")
    first, _, _ = run_ranks(
        trained, 3, folders["llama"], {}, tmp_path / "more", "8bit", False, saved
    )[0]
    assert len(first) == len(stored)
    for name, value in first.items():
        assert torch.equal(stored["base_model.model." + name.replace(".default", "")], value)
    assert json.loads((saved / "adapter_config.json").read_text())["use_rslora"]


def meta(family="llama", **changes):
    return build_model(tiny_config(family, **changes), torch.float32)


def adapted(model):
    return {name.split(".lora_")[0] for name, p in model.named_parameters() if ".lora_" in name}


def test_all_linear_is_every_linear_layer_but_the_head_and_the_routers():
    for family, count in (
        ("llama", 21),
        ("mixtral", 12),
        ("qwen3_moe", 12),
        ("gpt2", 12),
        ("phi3", 12),
    ):
        model = meta(family)
        linear = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear | Conv1D)}
        add_adapters(model, Lora(4, 8, "all-linear"))
        assert adapted(model) == linear - {"lm_head"}
        assert len(adapted(model)) == count


@pytest.mark.parametrize(
    ("family", "some", "none"),
    [
        # peft refuses, or kernels pass by
        ("mamba", {"in_proj"}, {"out_proj", "x_proj", "dt_proj"}),
        ("mamba2", {"in_proj"}, {"out_proj"}),
        ("falcon_mamba", {"in_proj"}, {"out_proj"}),
        ("falcon_h1", {"in_proj", "q_proj", "o_proj", "up_proj"}, {"out_proj"}),
        ("nemotron_h", {"in_proj", "q_proj"}, {"out_proj"}),
        (
            "gemma3n_text",
            {"q_proj", "per_layer_input_gate"},
            {"prediction_coefs", "modality_router"},
        ),
        ("deepseek_v4", {"o_b_proj"}, {"o_a_proj"}),  # multiplies group by group
        ("ctrl", {"Wq", "dense"}, set()),
        ("rwkv", {"key", "receptance"}, {"output"}),  # divided where the model answers
        ("laguna", {"q_proj"}, set()),  # peft loses those of the shared expert
        ("bloom", {"query_key_value", "dense", "dense_4h_to_h"}, set()),
        ("falcon", {"query_key_value", "dense"}, set()),
    ],
)
def test_all_linear_leaves_out_what_an_adapter_cannot_stand_beside(family, some, none):
    model = build_model(family_config(family), torch.float32)
    add_adapters(model, Lora(4, 8, "all-linear"))
    names = {name.rpartition(".")[2] for name in adapted(model)}
    assert some <= names
    assert not none & names
    if family == "laguna":
        assert not any("shared_expert" in name for name in adapted(model))


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("mamba", "x_proj"),
        ("mamba2", "out_proj"),
        ("deepseek_v4", "o_a_proj"),
        ("rwkv", r".*attention\.output"),
        ("laguna", "shared_experts.up_proj"),
    ],
)
def test_what_an_adapter_cannot_stand_beside_is_refused_where_it_is_named(family, targets):
    model = build_model(family_config(family), torch.float32)
    with pytest.raises(
        ConfigError, match=r"^--lora_targets .* past an adapter: .*\(fix: all-linear, which"
    ):
        add_adapters(model, Lora(4, 8, targets))


def test_what_peft_raises_is_one_line_with_the_remedy():
    model = build_model(family_config("llama"), torch.float32)
    with pytest.raises(
        ConfigError, match=r"^--lora_targets: peft: ValueError: Target module LlamaMLP\(.*\(fix: "
    ):
        inject(model, LoraConfig(target_modules=["mlp"]), "--lora_targets")


def test_targets_are_names_or_one_regular_expression():
    model = meta()
    add_adapters(model, Lora(4, 8, "q_proj, layers.1.mlp.up_proj"))
    attention = {f"model.layers.{i}.self_attn.q_proj" for i in range(3)}
    assert adapted(model) == attention | {"model.layers.1.mlp.up_proj"}
    model = meta("mixtral")
    # peft itself would forget the layer numbers here
    add_adapters(model, Lora(4, 8, r".*\.[01]\..*[qv]_proj"))
    assert adapted(model) == {f"model.layers.{i}.self_attn.{n}_proj" for i in (0, 1) for n in "qv"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora_targets": "q_porj"}, "--lora_targets q_porj: .* (fix: q_proj, "),
        ({"lora_targets": ""}, "matches no layer"),
        ({"lora_targets": ".*query"}, "--lora_targets .*query matches no layer"),
        ({"lora_targets": "(q_proj"}, "--lora_targets (q_proj: .*"),
        (
            {"lora_targets": "q_proj", "modules_to_save": "head"},
            "--modules_to_save head: .*lm_head",
        ),
        (
            {"lora_targets": "q_proj", "modules_to_save": "q_proj"},
            "--lora_targets: peft: .*excluded",
        ),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(options, message):
    with pytest.raises(
        ConfigError, match=message.replace("(fix", r"\(fix").replace("(q_", r"\(q_")
    ):
        add_adapters(meta(), Lora(4, 8, **options))


def test_experts_cannot_be_targets():
    for targets in ("gate_proj,up_proj", "experts", "gate"):
        with pytest.raises(ConfigError, match="--lora_targets"):
            add_adapters(meta("qwen3_moe"), Lora(4, 8, targets))


def test_only_adapters_train_in_fp32_and_the_rest_is_stored_in_the_compute_dtype():
    model = meta()
    add_adapters(model, Lora(4, 8, "q_proj", modules_to_save="lm_head"))
    quantize_linears(model, Quant("8bit"), torch.bfloat16)
    freeze_base(model, Quant(), torch.bfloat16)
    dtypes = {(p.requires_grad, p.dtype) for p in model.parameters()}
    frozen = {(False, dtype) for dtype in (torch.bfloat16, torch.int8, torch.int32)}
    assert dtypes == {(True, torch.float32), *frozen}


def test_flags_beside_a_stored_adapter_have_no_effect_and_say_so(saved, capsys):
    config, _ = adapt(meta(), Lora(64, adapter=str(saved)), Quant(), torch.float32)
    assert config.r == 4
    assert f"--lora_rank has no effect: {saved} has its own" in capsys.readouterr().out


def change_config(folder, **fields):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type IA3"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights pissa"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"not_yet_known": True}, "not_yet_known True"),
    ],
)
def test_an_adapter_of_another_kind_is_refused(saved, tmp_path, fields, message):
    folder = shutil.copytree(saved, tmp_path / "adapter")
    change_config(folder, **fields)
    with pytest.raises(ConfigError, match=message):
        add_adapters(meta(), Lora(adapter=str(folder)))


def test_an_adapter_with_other_names_or_shapes_or_cut_short_is_refused(saved, tmp_path):
    model = build_model(tiny_config("llama", vocab_size=271), torch.float32)
    add_adapters(model, Lora(adapter=str(saved)))
    model.to_empty(device="cpu")
    tensors = load_file(saved / "adapter_model.safetensors")
    folder = shutil.copytree(saved, tmp_path / "adapter")
    name = next(iter(tensors))
    for change, message in (
        ({name: tensors[name][1:].clone()}, r"lora_\w.weight \[4, \d+\], there \[3, "),
        ({name: None}, r"\], there absent"),
        (
            {"base_model.model.other.lora_A.weight": torch.zeros(4, 4)},
            r"other.lora_A.weight absent, there \[4, 4\]",
        ),
    ):
        changed = {key: value for key, value in {**tensors, **change}.items() if value is not None}
        save_file(changed, folder / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=message):
            load_adapter(model, folder)
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match="copy or download the folder again"):
        load_adapter(model, folder)


def save_over(world, folder, out):
    """Save into a folder that is no adapter's; then one rank cannot write."""
    model, config = sharded(world, folder, EVERY)
    found = []
    for value, path in ((None, out / "notes"), (1e38, out / "adapter")):
        if value:
            with torch.no_grad():
                next(p for p in model.parameters() if p.requires_grad).fill_(value)
        try:
            found.append(save_adapter(path, model, config, folder, world, None, None))
        except ConfigError as error:
            found.append(str(error))
    return found


def test_a_save_replaces_an_adapter_and_nothing_else(folders, saved, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "diary.txt").write_text("dear")
    shutil.copytree(saved, tmp_path / "adapter")
    for refused, text in run_ranks(save_over, 2, folders["llama"], tmp_path):
        assert "is no adapter, and a save would replace it" in refused
        assert text.endswith("numbers")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["adapter", "notes"]
    assert [p.name for p in (tmp_path / "notes").iterdir()] == ["diary.txt"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert any((tensor == 1e38).all() for tensor in tensors.values())


def save_with_a_limit(world, folder, out):
    """Rank 1 may not write beyond the first KiB of a file."""
    import resource
    import signal

    model, config = sharded(world, folder, EVERY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, limits[1]))
    try:
        save_adapter(out, model, config, folder, world, None, None)
    except ConfigError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_save_that_fails_on_one_rank_fails_on_all_and_the_older_adapter_stays(
    folders, saved, tmp_path
):
    out = shutil.copytree(saved, tmp_path / "adapter")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for error in run_ranks(save_with_a_limit, 2, folders["llama"], out):
        assert "rank 1: " in error
        assert "File too large" in error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def reference_and_gradients(world, folder, case, kind, refers):
    """(logits with adapters off, gradients of what trains) of two steps with a reference pass, or without."""
    model, _ = sharded(world, folder, case, kind, recompute=True)
    torch.manual_seed(7)  # adapters that answer otherwise than their base; the same on all ranks
    for parameter in (p for p in model.parameters() if p.requires_grad):
        full = torch.randn(parameter.shape) * 0.1
        with torch.no_grad():
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))
    ids, logits = token_ids().chunk(world.size)[world.rank], None
    for _ in range(2):  # what peft itself would lose is lost after the first
        model.zero_grad()
        if refers:
            with adapters_off(model), torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits
        loss_of(model, ids).backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return logits, {name: gathered(p.grad) for name, p in trained.items()}


def base_answers(world, folder, kind):
    """The logits of this rank's rows by the base, which has never had an adapter."""
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    pieces = plan_pieces(model, open_weights(folder), folder)
    model.requires_grad_(False)
    if kind:
        quantize_linears(model, Quant(kind), torch.float32)
    shard_training(model, build_mesh(world), torch.float32)
    load_pieces(model, pieces, world.device)
    with torch.no_grad():
        ids = token_ids().chunk(world.size)[world.rank]
        return model(input_ids=ids, use_cache=False).logits


@cache
def base_on_two_ranks(folder, kind):
    return run_ranks(base_answers, 2, folder, kind)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("all_linear", ""),
        ("all_linear", "8bit"),
        ("embedding_and_head", ""),
        ("modules_to_save", ""),
        ("dora", ""),
    ],
)
def test_with_adapters_off_the_base_answers_and_every_adapter_still_trains(folders, case, kind):
    folder = folders["llama"]
    base = base_on_two_ranks(folder, kind)
    with_it, without = (
        run_ranks(reference_and_gradients, 2, folder, CASES[case], kind, refers)
        for refers in (True, False)
    )
    for rank in range(2):
        assert torch.equal(with_it[rank][0], base[rank])
        found, expected = with_it[rank][1], without[rank][1]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in found)
        assert all(gradient.any() for gradient in found.values())
