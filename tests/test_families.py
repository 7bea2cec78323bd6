"""Every type of transformers' causal mapping: equal to from_pretrained, or refused by name.

python -m pytest tests/test_families.py -m "slow or not slow"
"""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from families import LISTED, OVERWRITTEN, README, TYPES, VOCABULARY, family_config, family_model
from ranks import run_ranks
from safetensors.torch import load_file
from shards import shard_training
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import get_parameter_names

from utils.data.batches import Batch
from utils.model.folder import (
    ENCODERS,
    NOT_CAUSAL,
    SEQ2SEQ,
    check_model_config,
    open_weights,
)
from utils.model.loading import build_model, check_kind, load_pieces, plan_pieces
from utils.model.loss import add_chunked_loss, settle_chunked_loss, summed_cross_entropy
from utils.model.saving import save_model
from utils.model.sharding import norms_and_biases, recompute_activations
from utils.plan.generation import estimate_generation
from utils.run.distributed import all_gather, build_mesh
from utils.run.errors import ConfigError
from utils.run.units import IGNORE
from utils.train.profiling import flops_per_token, matmul_parameters
from utils.train.trained_run import compute_alone

REFUSED = sum(NOT_CAUSAL.values(), [])
TRAINED = [model_type for model_type in TYPES if model_type not in REFUSED]
# What transformers itself does not do, so that there is nothing to be equal to.
NOT_IN_BF16 = {"xlstm"}  # its own forward fails in bf16 on a CPU
# They use some fp32 parameters beside others, which FSDP2 gathers in the compute dtype.
NEAR_IN_BF16 = {
    "bailing_hybrid",
    "deepseek_v4",
    "flint",
    "hy_v4",
    "inkling_text",
    "kimi_linear",
    "olmo_hybrid",
}
NEEDS = {"gemma3n": "timm"}  # packages that a family asks for while it is built
# Their configs take "full_attention" as the old name of another kind of layer.
RENAMES_FULL = {"dots3_note", "dots3_note_text", "qwen4_exp", "qwen4_exp_text"}


@pytest.mark.parametrize("model_type", TRAINED)
def test_the_flops_of_a_step_are_known_before_it(model_type):
    if (package := NEEDS.get(model_type)) and not importlib.util.find_spec(package):
        return  # the model cannot be built
    model = build_model(family_config(model_type), torch.float32)
    assert flops_per_token(model, 64) >= 6 * matmul_parameters(model) > 0


@pytest.mark.parametrize("model_type", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4", "qwen3"])
def test_a_type_in_which_padding_changes_a_row_is_named_in_the_readme(model_type):
    """Of tokens with equal scores its indexer chooses others in a longer row."""
    model = family_model(model_type)
    ids = torch.randint(3, VOCABULARY, (4, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        alone = model(ids, use_cache=False).logits
        padded = model(F.pad(ids, (0, 2)), use_cache=False).logits[:, :30]
    differs = (alone - padded).abs().max() > 1e-3 * alone.abs().max()
    named = re.search(r"In\n(.*) padding alone does so too", README)[1]
    assert differs == (f"`{model_type}`" in named)


def some_batch() -> Batch:
    """Rows whose prompt is not trained, one of them padded."""
    ids = torch.randint(3, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
    labels, mask = ids.clone(), torch.ones_like(ids, dtype=torch.bool)
    labels[:, :5] = IGNORE
    ids[-1, 15:], labels[-1, 15:], mask[-1, 15:] = 0, IGNORE, False
    return Batch(ids, labels, mask, [])


def load(world, folder, dtype):
    check_model_config(folder, False)
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    pieces = plan_pieces(model, open_weights(folder), folder)
    shard_training(model, build_mesh(world), dtype)
    load_pieces(model, pieces, world.device)
    return model, pieces


def sweep(world, model_type: str, root: Path) -> list[str]:
    """What is not equal, on rank 0. The others hold their shards and take part in every collective."""
    folder = root / "model"
    config = family_config(model_type)
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = True
    if world.rank == 0:
        family_model(model_type, config=config).save_pretrained(folder)
    all_gather(None, world)
    try:
        plan_pieces(build_model(config, torch.float32), open_weights(folder), folder)
    except ConfigError as error:
        if "save_original_format=False" not in str(error):
            raise
        folder = root / "remedied"  # what the message says to do
        if world.rank == 0:
            family_model(model_type, config=config).save_pretrained(
                folder, save_original_format=False
            )
        all_gather(None, world)

    wrong = []
    for dtype in (torch.float32, torch.bfloat16):
        if dtype == torch.bfloat16 and model_type in NOT_IN_BF16:
            continue
        model, pieces = load(world, folder, dtype)
        reference = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=dtype) if world.rank == 0 else None
        )
        if reference is not None and model_type in OVERWRITTEN:
            stored = family_model(model_type, config=config).to(dtype)
            reference.load_state_dict(stored.state_dict())
        # Mapped from the file, weights lie at odd addresses, and some products round otherwise there.
        for parameter in reference.parameters() if reference is not None else ():
            parameter.data = parameter.data.clone()
        wrong += compare_buffers(model, reference)
        if dtype == torch.float32 or model_type not in NEAR_IN_BF16:
            wrong += compare_logits(model, reference, dtype)
        if dtype == torch.float32:
            save_model(root / "saved", model, pieces, world, source=folder)
            wrong += compare_files(folder, root / "saved")
        wrong += compare_gradients(model, reference, world, exact=dtype == torch.float32)
        # Here is the place for what else each family is put through: an adapter, a quantized base.
    return wrong


def compare_buffers(model, reference) -> list[str]:
    theirs = dict(reference.named_buffers()) if reference is not None else {}
    ours = dict(model.named_buffers())
    return [
        f"buffer {name}"
        for name, buffer in theirs.items()
        if ours[name].dtype != buffer.dtype or not torch.equal(ours[name], buffer)
    ]


def compare_logits(model, reference, dtype) -> list[str]:
    """Bit for bit, so with one attention: `sinks` rounds otherwise than eager (see test_packing.py)."""
    ids = some_batch().ids[:2]
    with torch.no_grad():
        theirs = ours = model.eval()(ids, use_cache=False).logits
        if reference is not None:
            if model.config._attn_implementation == "sinks":
                reference.set_attn_implementation("sinks")
            theirs = reference.eval()(ids, use_cache=False).logits
            if model.config._attn_implementation == "sinks":
                reference.set_attn_implementation("eager")
    equal = ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    return [] if equal else [f"{dtype} logits by {(ours.float() - theirs.float()).abs().max():.2g}"]


def compare_files(folder: Path, saved: Path) -> list[str]:
    """Names, dtypes and bits."""
    read = {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}
    written = {
        name: t for file in saved.glob("*.safetensors") for name, t in load_file(file).items()
    }
    differ = read.keys() ^ written.keys()
    for name in read.keys() & written.keys():
        if read[name].dtype != written[name].dtype or not torch.equal(read[name], written[name]):
            differ.add(name)
    return [f"saved {name}" for name in sorted(differ)]


def compare_gradients(model, reference, world, exact: bool) -> list[str]:
    """The loss and its gradients, against transformers' own loss with a mask; in bf16 only that they are
    near.
    """
    batch, wrong = some_batch(), []
    trained = (batch.labels[:, 1:] != IGNORE).sum()
    add_chunked_loss(model)
    settle_chunked_loss(model, world.device)
    loss = summed_cross_entropy(model.train(), batch) / trained
    loss.backward()
    ours = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            ours[name] = parameter.grad.full_tensor()  # all ranks gather
    if reference is None:
        return []
    options = {"labels": batch.labels, "attention_mask": batch.mask.long(), "use_cache": False}
    expected = reference.train()(batch.ids, **options).loss
    expected.backward()
    if not abs(loss.item() - expected.item()) <= (1e-5 if exact else 2e-2) * abs(expected.item()):
        wrong.append(f"loss {loss.item():.6f}, and transformers' {expected.item():.6f}")
    theirs = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    total = sum(grad.float().square().sum() for grad in theirs.values()).sqrt()
    for name, grad in theirs.items():
        difference = grad.float() - ours[name].float() if name in ours else grad.float()
        if not difference.norm() <= (1e-5 if exact else 1e-1) * total:
            wrong.append(f"gradient {name} by {difference.norm() / total:.2g}")
    return wrong


# went wrong before, one in a buffer and one in the backward; `make test` runs them
AT_ONCE = ["falcon_h1", "inkling_text"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in TRAINED if name not in AT_ONCE])
def test_a_family_equals_from_pretrained_in_logits_loss_gradients_and_files_on_two_ranks(
    model_type, tmp_path
):
    package = NEEDS.get(model_type)
    if package and importlib.util.find_spec(package) is None:
        with pytest.raises(ConfigError, match=f"{model_type} cannot be built .*{package}"):
            build_model(family_config(model_type), torch.float32)
        return
    wrong = run_ranks(sweep, 2, model_type, tmp_path)[0]
    assert not wrong, wrong[:5]


@pytest.mark.parametrize("model_type", AT_ONCE)
def test_a_family_that_once_differed_is_equal(model_type, tmp_path):
    wrong = run_ranks(sweep, 2, model_type, tmp_path)[0]
    assert not wrong, wrong[:5]


# weights in fp32, and a buffer in bf16
@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "xglm"])
def test_a_model_that_is_not_sharded_has_the_dtypes_of_from_pretrained(model_type, tmp_path):
    family_model(model_type).save_pretrained(tmp_path)
    model = build_model(AutoConfig.from_pretrained(tmp_path), torch.bfloat16)
    pieces = plan_pieces(model, open_weights(tmp_path), tmp_path)
    compute_alone(model, torch.bfloat16)
    load_pieces(model, pieces, torch.device("cpu"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert compare_logits(model, reference, torch.bfloat16) == []


def fp32_units(world, folder, mode):
    """(dtypes of the routers as they are gathered, gradients by name) of one step in bf16."""
    model, _ = load(world, folder, torch.bfloat16)
    recompute_activations(add_chunked_loss(model.train()), mode)
    gathered = set()

    def see(module, args):
        gathered.update(parameter.dtype for parameter in module.parameters())

    for layer in model.model.layers[1:]:
        layer.mlp.gate.register_forward_pre_hook(see)
    summed_cross_entropy(model, some_batch()).backward()
    trained = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    return gathered, {name: p.grad.full_tensor() for name, p in trained}


@pytest.mark.parametrize("ranks", [1, 2])
def test_routers_in_fp32_are_units_of_their_own_also_where_activations_are_recomputed(
    tmp_path, ranks
):
    family_model("ernie4_5_moe").save_pretrained(tmp_path)
    dtypes, gradients = run_ranks(fp32_units, ranks, tmp_path, "none")[0]
    assert dtypes == {torch.float32}
    for mode in ("selective", "full"):
        dtypes, again = run_ranks(fp32_units, ranks, tmp_path, mode)[0]
        assert dtypes == {torch.float32}
        assert all(torch.equal(gradient, again[name]) for name, gradient in gradients.items())


def test_answers_of_every_family_are_planned():
    """Some configs have no attention, or sizes that differ by layer."""
    for model_type in set(TRAINED) - {
        *NEEDS,
        "blt",
    }:  # transformers' own generate has no cache for it
        model = build_model(family_config(model_type), torch.float32)
        few, more = (estimate_generation(model, 1, torch.float32, 2, 8, n) for n in (8, 64))
        assert 0 < few["cache"] < more["cache"], model_type


@pytest.mark.parametrize("model_type", REFUSED)
def test_what_is_no_causal_language_model_is_refused_by_name(model_type):
    config = AutoConfig.for_model("llama")
    config.model_type = model_type
    with pytest.raises(ConfigError, match=f"{re.escape(model_type)} is ") as error:
        check_kind(config, "text")
    assert "\n" not in str(error.value)
    assert "(fix: " in str(error.value)


@pytest.mark.parametrize(
    ("model_type", "ours_alone"),
    [
        ("gpt_oss", {"sinks"}),  # and its biases of experts, which are matrices
        ("cohere", set()),  # and its norms of each head
        ("mamba", {"A_log", "D", "weight"}),  # weight: of the last norm, which is called norm_f
        ("jamba", {"A_log", "D"}),
        ("qwen3_next", {"A_log"}),
        ("dbrx", set()),
    ],
)
def test_weight_decay_leaves_out_what_transformers_trainer_leaves_out(model_type, ours_alone):
    config = family_config(model_type)
    config.use_qk_norm = True
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = {p: name for name, p in model.named_parameters()}
    ours = {names[p] for p in norms_and_biases(model)}
    patterns = ["bias", "layernorm", "rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    decayed = get_parameter_names(model, [torch.nn.LayerNorm], patterns)  # as Trainer calls it
    theirs = {name for name in {*names.values()} - {*decayed} if "norm_attn_norm.attn" not in name}
    assert theirs  # dbrx: theirs also leaves out the matrices in a block named norm_attn_norm
    assert theirs <= ours
    assert {name.rpartition(".")[2] for name in ours - theirs} == ours_alone


@pytest.mark.skipif(
    transformers.__version__ < "5.24", reason="the tables have types of transformers 5.24"
)
def test_the_tables_name_only_types_that_transformers_lists():
    tables = (REFUSED, NOT_IN_BF16, NEAR_IN_BF16, OVERWRITTEN, NEEDS, RENAMES_FULL)
    assert set().union(*tables) <= set(TYPES)


def named_kinds(config, allowed: tuple[str, ...]) -> set[str]:
    """The kinds of layers that the code of a config's module names as strings."""
    code = re.sub(
        r'""".*?"""', "", inspect.getsource(inspect.getmodule(type(config))), flags=re.DOTALL
    )
    return set(re.findall(r'"(\w+)"', code)) & set(allowed)


def test_a_tiny_model_has_a_layer_of_each_kind_that_its_config_names():
    lacking = {}
    for model_type in TRAINED:
        config = family_config(model_type).get_text_config()
        attention = set(getattr(config, "layer_types", None) or [])
        mlp = set(getattr(config, "mlp_layer_types", None) or [])
        named = named_kinds(config, ALLOWED_ATTN_LAYER_TYPES) - mlp if attention else set()
        named -= {"full_attention"} if model_type in RENAMES_FULL else set()
        named |= named_kinds(config, ALLOWED_MLP_LAYER_TYPES) if mlp else set()
        if not named <= attention | mlp:
            lacking[model_type] = named - attention - mlp
    assert not lacking


@pytest.mark.parametrize(
    ("model_type", "kinds"),
    [
        ("lfm2", {"conv", "full_attention"}),
        ("bamba", {"linear_attention", "full_attention"}),
        ("granitemoehybrid", {"linear_attention", "full_attention"}),
        ("minimax_m3_vl_text", {"minimax_m3_sparse", "full_attention"}),
    ],
)
def test_a_tiny_hybrid_has_layers_of_both_kinds(model_type, kinds):
    assert set(family_config(model_type).layer_types) == kinds


def test_a_buffer_that_nobody_fills_is_named(tmp_path):
    family_model("llama").save_pretrained(tmp_path)
    model = build_model(AutoConfig.from_pretrained(tmp_path), torch.float32)
    pieces = plan_pieces(model, open_weights(tmp_path), tmp_path)
    model.model.layers[1].register_buffer("scale", torch.ones(3, device="meta"), persistent=False)
    with pytest.raises(ConfigError, match=r"model\.layers\.1\.scale: no checkpoint holds them"):
        load_pieces(model, pieces, torch.device("cpu"))


@pytest.mark.parametrize("model_type", ENCODERS)
def test_an_encoder_sees_later_tokens(model_type):
    model, ids = family_model(model_type), some_batch().ids[:2]
    later = ids.clone()
    later[:, 16:] = (later[:, 16:] + 5) % VOCABULARY
    with torch.no_grad():
        first, second = (model(tokens, use_cache=False).logits[:, :16] for tokens in (ids, later))
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("model_type", SEQ2SEQ)
def test_the_own_loss_of_a_seq2seq_decoder_is_not_shifted(model_type):
    model, batch = family_model(model_type), some_batch()
    with torch.no_grad():
        output = model(batch.ids, labels=batch.labels, use_cache=False)
    shifted = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORE
    )
    assert abs(output.loss - shifted) > 1e-3


@pytest.mark.parametrize("model_type", ["zamba", "zamba2"])
def test_layers_that_share_weights_do(model_type):
    model = family_model(model_type)
    seen: dict[int, str] = {}
    shared = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        layer = re.search(r"layers\.(\d+)\.", name)
        if layer and seen.setdefault(id(parameter), layer[1]) != layer[1]:
            shared += 1
    assert shared


def test_the_readme_lists_what_transformers_lists():
    trained, refused = LISTED
    assert not trained & refused
    assert refused == set(REFUSED)
    of_readme = re.search(r"transformers (\d+\.\d+) lists", README)[1]
    listed = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if transformers.__version__.startswith(f"{of_readme}."):
        assert trained | refused == listed
    assert len((trained | refused) & listed) > 100  # a newer transformers may add and remove some
