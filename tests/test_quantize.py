"""Quantized linears: codes are bitsandbytes' codes, gradients are bitsandbytes' gradients, on any number of
ranks.

python -m pytest tests/test_quantize.py
"""

import json
import re
from importlib import import_module
from types import SimpleNamespace

import bitsandbytes as bnb
import bitsandbytes.functional as bnb_functional
import pytest
import torch
import torch.nn.functional as F
from families import family_config
from peft import PeftModel
from ranks import gathered, run_ranks
from shards import shard_training
from tiny import tiny_config, tiny_model, tiny_model_folder
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from utils.model import quantize
from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import add_adapters, base_names, freeze_base, load_adapter
from utils.model.options import Lora, Quant, check_adapter_flags
from utils.model.quantize import (
    Int8Linear,
    NF4Linear,
    QuantizedLinear,
    dequantize,
    quantize_linears,
)
from utils.model.sharding import decoder_layers, recompute_activations
from utils.run.distributed import build_mesh, mesh_axes
from utils.run.errors import ConfigError
from utils.train import trained_run

KINDS = {"8bit": Int8Linear, "4bit": NF4Linear}
# rows that 2, 3 and 4 ranks cannot share evenly; 3 rows on 4 ranks
SHAPES = ((37, 128), (5, 64), (3, 192))
ROWS, TOKENS = 12, 10


def whole(kind, weight):
    """bitsandbytes' codes and scales of a whole weight."""
    if kind == "8bit":
        return bnb_functional.int8_vectorwise_quant(weight.half())[:2]
    codes, state = bnb_functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    return codes.view(len(weight), -1), state.absmax.view(len(weight), -1)


def weight_of(shape, dtype):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.1
    weight[0] = 0  # a row, or some blocks, without a scale
    return weight.to(dtype)


def shards_integers(world):
    layer = torch.nn.Linear(4, 4, bias=False, device="meta", dtype=torch.bfloat16)
    codes = torch.empty(4, 4, dtype=torch.int8, device="meta")
    layer.weight = torch.nn.Parameter(codes, requires_grad=False)
    try:
        fully_shard(layer, mesh=build_mesh(world))
    except RuntimeError:
        return False
    return True


def test_quantization_is_refused_where_fsdp2_shards_no_integers():
    """That of torch 2.11 does not."""
    said = ""
    try:
        check_adapter_flags(SimpleNamespace(lora_rank=4, quantization="8bit", param_dtype="fp32"))
    except ConfigError as error:
        said = str(error)
    assert said.startswith("--quantization: FSDP2 of torch 2.") != run_ranks(shards_integers, 1)[0]


def shard_and_quantize(world, kind):
    mesh, found = build_mesh(world), []
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            plain = torch.nn.Linear(shape[1], shape[0], bias=False, device="meta")
            layer = KINDS[kind](plain.weight, None, torch.float32, "dequant")
            fully_shard(layer, mesh=mesh)
            layer.to_empty(device="cpu")
            mine = torch.chunk(weight_of(shape, dtype), world.size)
            mine = mine[world.rank] if world.rank < len(mine) else weight_of(shape, dtype)[:0]
            for first in range(0, len(mine), 2):  # a few rows at a time, as they are read
                layer.copy_rows(first, mine[first : first + 2], "")
            found.append(
                (layer.weight.full_tensor(), layer.scale.full_tensor().view(torch.float32))
            )
    return found


@pytest.mark.parametrize(
    "ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_codes_and_scales_are_bit_equal_to_bitsandbytes_on_the_whole_tensor(kind, ranks):
    found = iter(run_ranks(shard_and_quantize, ranks, kind)[-1])
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            codes, scale = whole(kind, weight_of(shape, dtype))
            ours, our_scale = next(found)
            assert torch.equal(ours, codes), (shape, dtype)
            assert torch.equal(our_scale.view(torch.int32), scale.view(torch.int32)), (shape, dtype)


def test_dequantized_weights_are_bit_equal_to_bitsandbytes():
    weight = weight_of((37, 128), torch.float32)
    codes, scale = whole("8bit", weight)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        theirs = codes.to(dtype).mul_(scale.unsqueeze(1).mul(1.0 / 127.0))  # bitsandbytes/autograd
        assert torch.equal(dequantize(codes, scale.view(torch.int32), dtype), theirs)
    codes, state = bnb_functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    ours = dequantize(
        codes.view(37, -1), state.absmax.view(37, -1).view(torch.int32), torch.float32
    )
    assert torch.equal(ours, bnb_functional.dequantize_4bit(codes, state))


def made(kind, mode="dequant"):
    """A quantized layer with a bias, and its input with one column of outliers."""
    plain = torch.nn.Linear(64, 48).requires_grad_(False)
    layer = KINDS[kind](plain.weight, plain.bias, torch.float32, mode)
    torch.manual_seed(0)
    layer.copy_rows(0, torch.randn(48, 64), "")
    layer.bias.data.normal_()
    x = torch.randn(4, 5, 64)
    x[0, 0, 3] = 40.0
    return layer, x.requires_grad_()


def test_llm_int8_is_linear8bitlt():
    ours, x = made("8bit", "llm_int8")
    theirs = bnb.nn.Linear8bitLt(64, 48, has_fp16_weights=False, threshold=6.0)
    torch.manual_seed(0)
    theirs.weight = bnb.nn.Int8Params(
        torch.randn(48, 64), requires_grad=False, has_fp16_weights=False
    )
    theirs.bias = ours.bias
    theirs = theirs.to("cpu").eval()  # in training it does not quantize activations on a CPU
    y = x.detach().clone().requires_grad_()
    a, b = ours(x), theirs(y)
    assert torch.equal(a, b)
    assert a._base is None  # no view, of which FSDP2 warns where a unit returns it
    (a.square().sum() + b.square().sum()).backward()
    assert torch.equal(x.grad, y.grad)


def test_dequant_does_not_depend_on_how_a_batch_is_split_and_llm_int8_does():
    for mode, same in (("dequant", True), ("llm_int8", False)):
        layer, x = made("8bit", mode)
        together, split = layer(x), torch.cat([layer(row[None]) for row in x])
        assert torch.allclose(together, split, atol=1e-5) == same


@pytest.mark.parametrize(
    ("kind", "mode"), [*((kind, "dequant") for kind in KINDS), ("8bit", "llm_int8")]
)
def test_a_layer_keeps_codes_and_scales_for_the_backward_and_no_activation(kind, mode):
    layer, x = made(kind, mode)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        layer(x)
    assert {t.dtype for t in kept} == {layer.weight.dtype, torch.int32}


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_layer_has_no_graph_break_and_the_same_gradient(kind):
    layer, x = made(kind)
    y = x.detach().clone().requires_grad_()
    layer(x).square().sum().backward()
    torch.compile(layer, backend="aot_eager", fullgraph=True)(y).square().sum().backward()
    assert torch.equal(x.grad, y.grad)


def test_weights_that_have_no_scale_are_refused():
    layer, _ = made("8bit")
    with pytest.raises(ConfigError, match="too large to be quantized"):
        layer.copy_rows(0, torch.full((1, 64), 1e5), "")  # not finite in fp16


@pytest.mark.parametrize("value", [1e5, float("nan")])
def test_a_weight_that_is_too_large_is_named(tmp_path, value):
    name = "model.layers.1.mlp.down_proj.weight"
    model = tiny_model("llama", vocab_size=271)
    with torch.no_grad():
        model.get_parameter(name)[3, 5] = value
    model.save_pretrained(tmp_path)
    model = build_model(AutoConfig.from_pretrained(tmp_path), torch.float32)
    pieces = plan_pieces(model, open_weights(tmp_path), tmp_path)
    add_adapters(model, Lora(4, 8, "q_proj"))
    quantize_linears(model, Quant("8bit"), torch.float32)
    with pytest.raises(ConfigError, match=f"^{name} is too large to be quantized, or not finite"):
        load_pieces(model, pieces, torch.device("cpu"), names=base_names(model))


@pytest.mark.parametrize(("kind", "each"), [("8bit", 4), ("4bit", 3)])  # one is 96 wide
def test_a_subclass_that_multiplies_as_nn_linear_does_is_quantized(kind, each):
    model = build_model(family_config("falcon"), torch.float32)
    add_adapters(model, Lora(4, 8, "all-linear"))
    said = quantize_linears(model, Quant(kind), torch.float32)
    assert said.startswith(f"{kind} for {each * 3} weights")  # of 3 blocks


@pytest.mark.parametrize(
    ("family", "left"),
    [
        ("mamba", {"dt_proj", "out_proj", "x_proj"}),  # a kernel reads them
        ("jamba", {"dt_proj"}),  # multiplied with by the code around it
        ("rwkv", {"output", "value"}),  # divided in place where the model answers
        ("gemma3n_text", {"correction_coefs", "prediction_coefs"}),  # clamped in training
        ("llama", set()),
    ],
)
def test_a_layer_whose_weight_the_model_reads_itself_is_not_quantized(family, left):
    model = build_model(family_config(family), torch.float32)
    why = "does not simply call"
    add_adapters(model, Lora(4, 8, "all-linear"))
    said = quantize_linears(model, Quant("8bit"), torch.float32)
    assert set(re.findall(rf"\d x (\w+) \([^)]*{why}", said)) == left


def test_the_head_the_norms_and_layers_that_nf4_gets_wrong_stay_in_16_bit():
    config = tiny_config("llama", intermediate_size=96)
    for kind, left in (("8bit", 0), ("4bit", 3)):
        model = build_model(config, torch.float32)
        add_adapters(model, Lora(4, 8, "q_proj,down_proj"))
        said = quantize_linears(model, Quant(kind), torch.float32)
        assert said.startswith(f"{kind} for {21 - left} weights")
        assert type(model.lm_head) is torch.nn.Linear
        text = "3 x down_proj (96 input features are no multiple of 64)"
        assert (text in said) == bool(left)
    assert type(model.model.layers[0].self_attn.q_proj.base_layer) is NF4Linear
    assert type(model.model.layers[0].mlp.down_proj.base_layer) is torch.nn.Linear


def test_what_trains_stays_in_16_bit():
    model = build_model(tiny_config("llama"), torch.float32)
    add_adapters(model, Lora(4, 8, "q_proj", modules_to_save="k_proj,lm_head"))
    quantize_linears(model, Quant("8bit"), torch.float32)
    attention = model.model.layers[0].self_attn
    assert not any(isinstance(m, QuantizedLinear) for m in attention.k_proj.modules())
    assert isinstance(attention.q_proj.base_layer, Int8Linear)
    assert isinstance(attention.o_proj, Int8Linear)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_routers_stay_in_16_bit_and_experts_where_that_is_asked(family):
    for keeps in (False, True):
        model = build_model(tiny_config(family), torch.float32)
        add_adapters(model, Lora(4, 8, "all-linear"))
        quant = Quant("8bit", keep_experts_16bit=keeps)
        said = quantize_linears(model, quant, torch.bfloat16)
        weights = 12 + 6 * (not keeps)  # q, k, v, o of 3 layers; two of the experts
        assert said.startswith(f"8bit for {weights} weights")
        assert model.model.layers[0].mlp.gate.weight.is_floating_point()
        text = "3 x experts down_proj (--keep_experts_16bit)"
        assert (text in said) == keeps


def test_experts_that_are_not_there_are_not_kept_in_16_bit_in_silence():
    model = build_model(tiny_config("llama"), torch.float32)
    add_adapters(model, Lora(4, 8, "all-linear"))
    with pytest.raises(ConfigError, match="--keep_experts_16bit: there are no experts"):
        quantize_linears(model, Quant("4bit", keep_experts_16bit=True), torch.bfloat16)


def test_experts_that_bitsandbytes_cannot_count_are_dequantized_one_by_one(monkeypatch):
    layer = NF4Linear(torch.empty(3, 48, 128), None, torch.bfloat16, "")
    layer.copy_rows(0, torch.randn(3, 48, 128), "")
    whole = layer.dequantize()
    monkeypatch.setattr(quantize, "COUNTED", 3 * 48 * 128)
    with profile() as calls:
        assert torch.equal(layer.dequantize(), whole)
    counts = {event.key: event.count for event in calls.key_averages()}
    assert counts["bitsandbytes::dequantize_4bit"] == 3


def test_nothing_to_quantize_is_refused():
    model = build_model(tiny_config("gpt2"), torch.float32)
    add_adapters(model, Lora(4, 8, "all-linear"))
    with pytest.raises(ConfigError, match="no linear layer that can be: 3 x c_attn .a Conv1D"):
        quantize_linears(model, Quant("8bit"), torch.float32)


# --- the whole model, against transformers, bitsandbytes and peft in one process ------------------------


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def setting(request, tmp_path_factory):
    """A model folder (qwen2: biases and tied weights), and for each kind an adapter, a loss, gradients."""
    root = tmp_path_factory.mktemp(request.param)
    folder = tiny_model_folder(root / "model", request.param, vocab_size=271, intermediate_size=128)
    return folder, {kind: reference(folder, root / kind, kind) for kind in KINDS}


def by_bitsandbytes(folder, kind, dtype=torch.float32):
    options = BitsAndBytesConfig(
        load_in_8bit=kind == "8bit",
        load_in_4bit=kind == "4bit",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=dtype,
    )
    model = AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=options, dtype=dtype, device_map="cpu"
    )
    for parameter in model.parameters():
        if parameter.ndim == 3:  # experts, which transformers does not quantize
            parameter.data = dequantized_by_bitsandbytes(parameter.data, kind)
    return model


def dequantized_by_bitsandbytes(experts, kind):
    """(E, out, in) as bitsandbytes rounds a matrix of all rows."""
    rows = experts.flatten(0, 1)
    if kind == "8bit":
        codes, scale, _ = bnb_functional.int8_vectorwise_quant(rows.half())
        rounded = codes.to(rows.dtype).mul_(scale.unsqueeze(1).mul(1.0 / 127.0))
    else:
        rounded = bnb_functional.dequantize_4bit(
            *bnb_functional.quantize_4bit(rows, blocksize=64, quant_type="nf4")
        )
    return rounded.view_as(experts)


def reference(folder, adapter, kind, dtype=torch.float32):
    from peft import LoraConfig, get_peft_model

    model = by_bitsandbytes(folder, kind, dtype)
    torch.manual_seed(0)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    if not hasattr(model.config, "num_local_experts"):
        targets += ["gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(adapter)
    model.train()
    loss = loss_of(model, token_ids())
    loss.backward()
    grads = {
        n.removeprefix("base_model.model."): p.grad
        for n, p in model.named_parameters()
        if p.requires_grad
    }
    return adapter, loss.item(), grads


def token_ids():
    return torch.randint(0, 271, (ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def loss_of(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def sharded(world, folder, adapter, kind, dtype=torch.float32, lever=""):
    """Loss and LoRA gradients of the quantized model, sharded; and the dtypes of what is stored."""
    config = AutoConfig.from_pretrained(folder)
    levers = lever.split()
    if "whole" in levers:
        model = build_model(config, torch.float32, read_from=folder)
    else:
        model = build_model(config, torch.float32)
    pieces = plan_pieces(model, open_weights(folder), folder)
    add_adapters(model, Lora(adapter=str(adapter)))
    quantize_linears(model, Quant(kind), dtype)
    freeze_base(model, Quant(), dtype)
    if "recompute" in levers:
        recompute_activations(model, "full")
    if "compile" in levers:
        for layer in decoder_layers(model):
            layer.compile(backend="aot_eager", fullgraph=True)
    names = base_names(model)
    mesh = build_mesh(world, mesh_axes(world.size, 2 if "hsdp" in levers else 1))
    shard_training(model, mesh, dtype, cpu_offload="offload" in levers)
    if "whole" not in levers:
        load_pieces(model, pieces, world.device, "offload" in levers, names=names)
    load_adapter(model, adapter)
    model.train()
    mine = token_ids().chunk(world.size)[world.rank]
    micro = mine.chunk(2) if "accumulate" in levers else [mine]
    total = 0.0
    for i, ids in enumerate(micro):
        model.set_requires_gradient_sync(i == len(micro) - 1)
        loss = loss_of(model, ids) / len(micro)
        loss.backward()
        total += loss.item()
    total = torch.tensor(total)
    torch.distributed.all_reduce(total)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    full = {n: gathered(p.grad).cpu() for n, p in model.named_parameters() if p.requires_grad}
    codes = {
        n: p.dtype for n, p in model.named_parameters() if isinstance(p, DTensor) or world.size == 1
    }
    return total.item() / world.size, full, codes


def compare(found, expected, tolerance):
    (loss, grads, _), (_, true_loss, true_grads) = found, expected
    assert loss == pytest.approx(true_loss, rel=tolerance)
    assert grads.keys() == true_grads.keys()
    for name, grad in grads.items():
        assert (grad - true_grads[name]).norm() <= tolerance * true_grads[name].norm(), name


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 4))]
)
@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_lora_gradients_equal_transformers_with_bitsandbytes_and_peft(
    setting, kind, ranks
):
    folder, references = setting
    found = run_ranks(sharded, ranks, folder, references[kind][0], kind)[0]
    compare(found, references[kind], 1e-5)
    codes = {name: dtype for name, dtype in found[2].items() if "base_layer.weight" in name}
    assert set(codes.values()) == {torch.int8 if kind == "8bit" else torch.uint8}
    assert len(codes) == 21


MIXTURES = {  # experts that are separate on disk; all in one tensor
    "mixtral": {"num_local_experts": 5, "output_router_logits": False},
    "gpt_oss": {"num_local_experts": 5},
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request, tmp_path_factory):
    """As `setting`, of a mixture of experts."""
    root = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": 271, "intermediate_size": 128}
    folder = tiny_model_folder(root / "model", request.param, **sizes, **MIXTURES[request.param])
    return folder, {kind: reference(folder, root / kind, kind) for kind in KINDS}


@pytest.mark.parametrize(
    ("ranks", "lever"),
    [
        (3, "recompute"),
        *(
            pytest.param(ranks, lever, marks=pytest.mark.slow)
            for ranks, lever in ((1, ""), (2, "offload accumulate"), (2, "whole"), (1, "compile"))
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_experts_are_quantized_as_by_bitsandbytes_and_adapters_learn_over_them(
    mixture, kind, ranks, lever
):
    """Five experts on three ranks: 2, 2 and 1."""
    folder, references = mixture
    found = run_ranks(sharded, ranks, folder, references[kind][0], kind, torch.float32, lever)[0]
    compare(found, references[kind], 1e-5)
    codes = [dtype for name, dtype in found[2].items() if name.endswith("_codes.weight")]
    assert codes == 6 * [torch.int8 if kind == "8bit" else torch.uint8]


def test_a_forward_leaves_no_dequantized_experts_behind_also_where_a_recomputation_ends_early():
    model = tiny_model("mixtral", intermediate_size=128).requires_grad_(False)
    quantize_linears(model, Quant("4bit"), torch.float32)
    recompute_activations(model, "full")
    embedded = model.get_input_embeddings()(token_ids()).requires_grad_()
    model.train()(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    assert embedded.grad.abs().sum() > 0
    for layer in model.model.layers:
        assert {"gate_up_proj", "down_proj"}.isdisjoint(vars(layer.mlp.experts))


def served(world, name, flags):
    recipe = import_module(name)
    recipe.main(recipe.Config(**flags))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["4bit", pytest.param("8bit", marks=pytest.mark.slow)])
def test_an_adapter_is_served_on_the_quantized_base_that_it_was_trained_on(
    setting, kind, ranks, tmp_path
):
    folder, references = setting
    adapter = references[kind][0]
    model = PeftModel.from_pretrained(by_bitsandbytes(folder, kind), adapter)
    model.train()  # there is no dropout; on a CPU eval() would round more
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "one two three four five six"
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with_end = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], 1)
    expected = loss_of(model, with_end).item()
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), adapter)
    other = loss_of(whole, with_end).item()
    answer = model.generate(input_ids=ids, do_sample=False, max_new_tokens=8)[0, ids.shape[1] :]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"text": text}) + "\n")
    flags = {"model": str(folder), "adapter": str(adapter), "quantization": kind, "dtype": "fp32"}
    asked = flags | {"dataset": str(rows), "task": "perplexity", "output_dir": f"{tmp_path}/out"}
    drawn = flags | {"prompts": str(tmp_path / "texts.txt"), "raw": True, "max_new_tokens": 8}
    drawn |= {"output": f"{tmp_path}/answers.jsonl"}
    (tmp_path / "texts.txt").write_text(text + "\n")
    for name, settings in (("eval", asked), ("generate", drawn)):
        run_ranks(served, ranks, name, settings)
    found = json.loads((tmp_path / "out/eval.json").read_text())["results"]["nats_per_token"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found != pytest.approx(other, rel=3e-5)
    told = json.loads((tmp_path / "answers.jsonl").read_text())["answer"]
    assert told == tokenizer.decode(answer, skip_special_tokens=True)


def served_where_integers_are_not_sharded(world, flags):
    chosen, trained_run.SHARDS_INTEGERS = trained_run.SHARDS_INTEGERS, False  # as in torch 2.11
    try:
        with pytest.raises(
            ConfigError, match=r"shards no integers \(fix: 1 rank, or torch>=2\.12\)"
        ):
            served(world, "generate", flags)
    finally:
        trained_run.SHARDS_INTEGERS = chosen


@pytest.mark.slow
def test_an_older_torch_serves_a_quantized_base_on_one_rank_only(setting, tmp_path):
    (tmp_path / "texts.txt").write_text("one\n")
    flags = {"model": str(setting[0]), "prompts": str(tmp_path / "texts.txt"), "raw": True}
    run_ranks(served_where_integers_are_not_sharded, 2, flags | {"quantization": "8bit"})


TOGETHER = ("recompute", "offload", "accumulate")


@pytest.mark.parametrize(
    ("setting", "lever"),
    [
        ("qwen2", " ".join(TOGETHER)),
        *(pytest.param("llama", lever, marks=pytest.mark.slow) for lever in TOGETHER),
        *(
            pytest.param(family, lever, marks=pytest.mark.slow)
            for family in ("llama", "qwen2")
            for lever in ("hsdp", "whole")
        ),
    ],
    indirect=["setting"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_lever_changes_no_gradient(setting, kind, lever):
    folder, references = setting
    found = run_ranks(sharded, 2, folder, references[kind][0], kind, torch.float32, lever)[0]
    compare(found, references[kind], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_have_no_graph_break_and_the_same_gradients(setting, kind):
    folder, references = setting
    found = run_ranks(sharded, 1, folder, references[kind][0], kind, torch.float32, "compile")[0]
    compare(found, references[kind], 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_the_gradients_are_as_near_to_fp32_as_those_of_bitsandbytes_and_peft(
    tmp_path, kind
):
    sizes = {"vocab_size": 271, "intermediate_size": 128}
    folder = tiny_model_folder(tmp_path / "model", "llama", torch.bfloat16, **sizes)
    adapter, loss, true = reference(folder, tmp_path / "adapter", kind)
    _, _, theirs = reference(folder, tmp_path / "adapter", kind, torch.bfloat16)
    our_loss, ours, _ = run_ranks(sharded, 2, folder, adapter, kind, torch.bfloat16)[0]
    assert our_loss == pytest.approx(loss, rel=1e-2)

    def error(grads):
        flat, exact = (
            torch.cat([g[name].flatten() for name in sorted(true)]) for g in (grads, true)
        )
        return ((flat - exact).norm() / exact.norm()).item()

    assert error(ours) <= 1.3 * error(theirs), (error(ours), error(theirs))
    assert error(ours) < 0.05
