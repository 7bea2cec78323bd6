"""One GPU trains as the CPU does: losses, gradient norms and weights of the recipe, lever by lever.

make gpu        or: python -m pytest -m gpu tests/test_gpu.py
"""

import copy
import json
from types import SimpleNamespace

import finetune
import generate
import prefer
import pytest
import torch
from safetensors.torch import load_file
from shards import shard_training
from shell import shell
from test_parity import GLOBAL_BATCH, RECIPE, curve_of, plain_loop, write_rows
from tiny import build_optimizer, in_chunks, tiny_config, tiny_model_folder
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from utils.data.batches import Batch, GlobalBatches
from utils.data.examples import Rows, load_data
from utils.data.tokens import load_tokenizer
from utils.model.attention import attend_documents, use_gpu_kernels
from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.log_probs import token_log_probs
from utils.model.loss import add_chunked_loss, settle_chunked_loss, summed_cross_entropy
from utils.model.options import SHARDS_INTEGERS
from utils.model.quantize import KINDS, dequantize
from utils.plan.fit import available_room
from utils.run.distributed import build_mesh, init_distributed, stop_distributed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here: nothing was run"),
]
DEVICE = torch.device("cuda")
FP32 = {"dtype": "fp32"}  # auto is bf16 on a GPU
SAME = {  # to 1e-4: products are summed in another order than on the CPU
    "fp32": FP32,
    "micro_batches": {**FP32, "batch_size": 2},
    "full_recompute": {**FP32, "activation_checkpointing": "full"},
    "selective_recompute": {**FP32, "activation_checkpointing": "selective"},
    "inputs_on_the_host": {
        **FP32,
        "activation_checkpointing": "full",
        "activation_offload": True,
    },
    "offload": {**FP32, "cpu_offload": True},
    "offload_accumulated": {**FP32, "cpu_offload": True, "batch_size": 2},
    "whole_load": {**FP32, "low_cpu_fsdp": False},
}
ROUNDED = {  # (flags, relative rounding of the losses)
    "bf16": ({"dtype": "bf16"}, 2e-2),
    "pure_bf16": ({"dtype": "bf16", "param_dtype": "bf16"}, 3e-2),
    "bf16_offload": ({"dtype": "bf16", "cpu_offload": True}, 2e-2),
    # over fp32 weights, so that FSDP2 copies them as on several GPUs
    "bf16_micro_batches": ({"dtype": "bf16", "batch_size": 2}, 2e-2),
    "bf16_recompute": ({"dtype": "bf16", "activation_checkpointing": "full"}, 2e-2),
    "bf16_inputs_on_the_host": (
        {"dtype": "bf16", "activation_checkpointing": "full", "activation_offload": True},
        2e-2,
    ),
    "bf16_compiled": ({"dtype": "bf16", "compile": True}, 2e-2),
}


@pytest.fixture(scope="module", autouse=True)
def exact_products():
    """No TF32, which has 10 bits of mantissa; and leave the group of one that the recipe makes."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.set_float32_matmul_precision(before)
    stop_distributed()


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def setting(request, tmp_path_factory):
    """A model, its rows, and what a plain loop on the CPU makes of them."""
    root = tmp_path_factory.mktemp("gpu")
    folder = tiny_model_folder(root / "model", request.param, vocab_size=271)
    rows = write_rows(root / "rows.jsonl")
    return folder, rows, plain_loop(folder, rows)


def trained(setting, out, **flags):
    """(losses and gradient norms by step, final weights) of the recipe in this process, on the GPU."""
    folder, rows, _ = setting
    flags = {"batch_size": GLOBAL_BATCH, "global_batch_size": GLOBAL_BATCH, **flags}
    paths = {"model": str(folder), "dataset": str(rows), "output_dir": str(out)}
    config = finetune.Config(**{**RECIPE, **paths, **flags})
    torch.cuda.reset_peak_memory_stats()
    out = finetune.main(config)
    assert torch.cuda.max_memory_allocated() > 0
    return curve_of(out), load_file(out / "model" / "model.safetensors")


@pytest.mark.parametrize("lever", SAME)
def test_losses_gradient_norms_and_weights_are_those_of_the_cpu(setting, tmp_path, lever):
    _, _, (expected, weights) = setting
    curve, ours = trained(setting, tmp_path, **SAME[lever])
    torch.testing.assert_close(curve, expected, rtol=1e-4, atol=0)
    for name, tensor in ours.items():
        assert (tensor - weights[name]).norm() <= 1e-4 * weights[name].norm(), name


def test_compiled_layers_train_as_on_the_cpu(tmp_path):
    folder, rows = (
        tiny_model_folder(tmp_path / "model", vocab_size=271),
        write_rows(tmp_path / "rows.jsonl"),
    )
    setting = folder, rows, plain_loop(folder, rows)
    curve, _ = trained(setting, tmp_path / "out", **FP32, compile=True)
    torch.testing.assert_close(curve, setting[2][0], rtol=1e-4, atol=0)


@pytest.mark.parametrize("lever", ROUNDED)
def test_16_bit_losses_are_those_of_the_cpu_in_fp32_to_their_rounding(setting, tmp_path, lever):
    _, _, (expected, _) = setting
    flags, rounding = ROUNDED[lever]
    curve, _ = trained(setting, tmp_path, **flags)
    losses = [[loss for loss, _ in steps] for steps in (curve, expected)]
    torch.testing.assert_close(*losses, rtol=rounding, atol=0)


def test_fp16_finds_its_loss_scale_and_then_trains(setting, tmp_path):
    _, _, (expected, _) = setting
    trained(setting, tmp_path, dtype="fp16")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(expected[0][0], rel=1e-2)
    skipped = [line["skipped"] for line in lines]
    assert skipped == sorted(skipped, reverse=True)  # the first scale of 65,536 may be too large
    assert sum(skipped) <= 2
    assert lines[-1]["loss"] < lines[0]["loss"]


def test_packs_without_a_mask_have_the_losses_of_packs_with_one(setting, tmp_path):
    losses = []
    for attn in ("sdpa", "varlen"):
        packs = {"packing": True, "attn": attn, "batch_size": 2, "global_batch_size": 2}
        curve, _ = trained(setting, tmp_path / attn, dtype="bf16", **packs)
        losses.append([loss for loss, _ in curve])
    torch.testing.assert_close(*losses, rtol=2e-2, atol=0)


@pytest.mark.parametrize("async_save", [False, True])
def test_a_run_that_goes_on_has_the_losses_of_one_that_was_not_stopped(
    setting, tmp_path, async_save
):
    flags = {"dtype": "bf16", "save_every": 2, "async_save": async_save}
    whole, _ = trained(setting, tmp_path / "whole", **flags)
    checkpoints = tmp_path / "whole" / "checkpoints"
    newest = sorted(checkpoints.iterdir())[-2]  # the last one is that of the end
    parts, _ = trained(setting, tmp_path / "part", resume=str(newest), **flags)
    losses = [[loss for loss, _ in curve] for curve in (whole[-len(parts) :], parts)]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)


def test_the_room_on_a_gpu_is_what_is_free_and_not_what_the_card_has():
    world = init_distributed()
    before = available_room(world)[0]
    taken = torch.empty(2**28, dtype=torch.uint8, device=world.device)
    assert before - 2**29 < available_room(world)[0] <= before - taken.numel()
    assert before < torch.cuda.get_device_properties(world.device).total_memory


def test_offloaded_shards_are_pinned_and_the_gpu_holds_no_weight_between_steps(setting):
    world = init_distributed()
    model = add_chunked_loss(build_model(AutoConfig.from_pretrained(setting[0]), torch.float32))
    shard_training(model, build_mesh(world), torch.float32, cpu_offload=True)
    pieces = plan_pieces(model, open_weights(setting[0]), setting[0])
    load_pieces(model, pieces, world.device, cpu_offload=True)
    optimizer = build_optimizer(model, 1e-3, 0.0)
    ids = torch.arange(5, 69, device=world.device)[None]
    model(ids, labels=ids).backward()
    shards = [p.to_local() for p in model.parameters()]
    assert all(shard.device.type == "cpu" and shard.is_pinned() for shard in shards)
    assert all(p.grad.to_local().device.type == "cpu" for p in model.parameters())
    before = [shard.clone() for shard in shards]
    optimizer.step()
    assert any(not torch.equal(a, b) for a, b in zip(before, shards, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_chunked_loss_and_its_gradients_are_those_of_full_logits(setting, dtype):
    folder, _, _ = setting
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).cuda().train()
    chunked = in_chunks(copy.deepcopy(plain), 64)
    settle_chunked_loss(chunked, torch.device("cuda"))
    assert not chunked.full_logits
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 271, (3, 100), generator=generator).cuda()
    logits = plain(ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="sum")
    loss = chunked(ids, labels=ids)
    expected.backward()
    loss.backward()
    rounding = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss, expected, rtol=rounding, atol=0)
    for ours, theirs in zip(chunked.parameters(), plain.parameters(), strict=True):
        assert (
            ours.grad - theirs.grad
        ).float().norm() <= 10 * rounding * theirs.grad.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_fused_norm_keeps_only_its_input_and_rounds_as_little_as_transformers(dtype):
    torch.manual_seed(0)
    own = LlamaRMSNorm(256).to(DEVICE, dtype)
    own.weight.data.uniform_(0.5, 2.0)
    fused, exact = copy.deepcopy(own), copy.deepcopy(own).to("cpu", torch.float64)
    use_gpu_kernels(fused)
    hidden = torch.randn(3, 50, 256).to(DEVICE, dtype)
    errors, kept = {}, {}
    wanted = exact_norm(exact, hidden.cpu().double().requires_grad_())
    for name, norm in (("own", own), ("fused", fused)):
        sizes = kept[name] = []

        def keep(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        given = hidden.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            result = norm(given)
        result.square().sum().backward()
        found = (result.detach(), given.grad, norm.weight.grad)
        errors[name] = [
            float((a.double().cpu() - b).norm() / b.norm())
            for a, b in zip(found, wanted, strict=True)
        ]
    assert all(f < 1.2 * o + 1e-7 for f, o in zip(errors["fused"], errors["own"], strict=True))
    assert sorted(kept["fused"]) == [150, 256, hidden.numel()]
    assert sum(kept["own"]) > 2 * hidden.numel()


@pytest.mark.parametrize("window", [None, 16])
def test_sinks_in_packs_are_those_of_the_cpu_to_the_rounding_of_bf16(window):
    torch.manual_seed(0)
    shapes = ((1, 8, 96, 64), (1, 2, 96, 64), (1, 2, 96, 64), (8,))
    begins = torch.tensor([0, 40, 96], dtype=torch.int32)
    module = SimpleNamespace(num_key_value_groups=4)
    values = [torch.randn(shape) for shape in shapes]
    found = []
    for device, dtype in (("cpu", torch.float32), (DEVICE, torch.bfloat16)):
        moved = [value.detach().to(device, dtype).requires_grad_() for value in values]
        *tensors, sinks = moved
        packed = {"cu_seq_lens_q": begins.to(device), "max_length_q": 56, "s_aux": sinks}
        output, _ = attend_documents(
            module, *tensors, None, scaling=0.125, sliding_window=window, **packed
        )
        output.float().square().sum().backward()
        found.append([output, *(value.grad for value in moved)])
    for ours, exact in zip(*reversed(found), strict=True):
        error = (ours.float().cpu() - exact).norm() / exact.norm()
        assert error < 2e-2


def exact_norm(norm, hidden):
    """(the norm's result in fp64, the gradients of the sum of its squares by input and weight)."""
    scale = (hidden.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    result = norm.weight * hidden * scale
    return (result, *torch.autograd.grad(result.square().sum(), (hidden, norm.weight)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_of_row_slices_are_those_of_the_cuda_quantizer_on_the_whole(kind, dtype):
    torch.manual_seed(0)
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight = torch.randn(37, 256).to("cuda", dtype)
    codes, scales = KINDS[kind].quantize(weight)
    for first, last in ((0, 13), (13, 26), (26, 37)):
        part_codes, part_scales = KINDS[kind].quantize(weight[first:last])
        assert torch.equal(part_codes, codes[first:last])
        assert torch.equal(part_scales, scales[first:last])
    if kind == "8bit":
        whole, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.half())
    else:
        options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": False}
        whole, state = bitsandbytes.functional.quantize_4bit(weight, **options)
        whole, scale = whole.view(37, -1), state.absmax.view(37, -1)
    assert torch.equal(codes, whole)
    assert torch.equal(scales, scale)


def quantized(kind, weight, dtype):
    layer = KINDS[kind](torch.empty(weight.shape, device="cuda"), None, dtype, "dequant")
    layer.copy_rows(0, weight, "")
    return layer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantized_layer_is_a_linear_layer_of_the_weight_that_bitsandbytes_dequantizes(
    kind, dtype
):
    torch.manual_seed(0)
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight, x = torch.randn(96, 256).cuda(), torch.randn(5, 256).to("cuda", dtype)
    layer = quantized(kind, weight.to(dtype), dtype)
    if kind == "8bit":
        codes, scale, _ = bitsandbytes.functional.int8_vectorwise_quant(weight.to(dtype).half())
        expected = bitsandbytes.functional.int8_vectorwise_dequant(codes, scale)
        rounding = 1e-6 if dtype == torch.float32 else 1e-2
    else:
        options = {"blocksize": 64, "quant_type": "nf4", "compress_statistics": False}
        expected = bitsandbytes.functional.dequantize_4bit(
            *bitsandbytes.functional.quantize_4bit(weight.to(dtype), **options)
        )
        rounding = 0.0
    torch.testing.assert_close(layer.dequantize().float(), expected.float(), rtol=rounding, atol=0)
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.dequantize()))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_of_experts_are_those_of_each_matrix_and_are_dequantized_together(kind):
    torch.manual_seed(0)
    experts = torch.randn(3, 96, 256).cuda()
    layer = quantized(kind, experts, torch.bfloat16)
    for weight, codes, found in zip(experts, layer.weight, layer.dequantize(), strict=True):
        alone = quantized(kind, weight, torch.bfloat16)
        assert torch.equal(codes, alone.weight)
        assert torch.equal(found, alone.dequantize())


def test_experts_with_more_elements_than_32_bit_count_are_dequantized():
    codes = torch.randint(256, (33, 2**13, 2**12), device="cuda", dtype=torch.uint8)
    scale = torch.rand(33, 2**13, 2**7, device="cuda").view(torch.int32)
    found = dequantize(codes, scale, torch.bfloat16)
    for index in (0, 31, 32):
        assert torch.equal(found[index], dequantize(codes[index], scale[index], torch.bfloat16))


def test_llm_int8_on_one_rank_is_that_of_linear8bitlt_to_the_rounding_of_fp16():
    torch.manual_seed(0)
    bitsandbytes = pytest.importorskip("bitsandbytes")
    weight, x = torch.randn(96, 256), torch.randn(5, 256)
    x[:, 7] *= 20  # an outlier column
    theirs = bitsandbytes.nn.Linear8bitLt(
        256, 96, bias=False, has_fp16_weights=False, threshold=6.0
    )
    theirs.weight = bitsandbytes.nn.Int8Params(
        weight.half(), requires_grad=False, has_fp16_weights=False
    )
    theirs = theirs.cuda()
    ours = quantized("8bit", weight.half().cuda(), torch.float16)
    ours.mode = "llm_int8"
    torch.testing.assert_close(ours(x.half().cuda()), theirs(x.half().cuda()), rtol=1e-3, atol=1e-3)


@pytest.mark.skipif(not SHARDS_INTEGERS, reason="FSDP2 of this torch shards no integers")
@pytest.mark.parametrize("kind", KINDS)
def test_lora_over_a_quantized_base_learns(setting, tmp_path, kind):
    folder, rows, _ = setting
    flags = {**FP32, "quantization": kind, "lora_rank": 4, "output_dir": str(tmp_path)}
    settings = {
        **RECIPE,
        "model": str(folder),
        "dataset": str(rows),
        "global_batch_size": GLOBAL_BATCH,
    }
    ours = curve_of(finetune.main(finetune.Config(**settings | flags)))
    assert ours[-1][0] < ours[0][0]


@pytest.mark.parametrize("param_dtype", ["bf16", "fp32"])  # fp32: FSDP2 copies, in its streams
@pytest.mark.parametrize("how", [{"optimizer_in_backward": True, "clip_norm": 0}, {}])
@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
def test_every_optimizer_learns_after_the_backward_and_within_it(
    setting, tmp_path, optimizer, how, param_dtype
):
    if optimizer != "adamw":
        pytest.importorskip("bitsandbytes")
    flags = {"dtype": "bf16", "param_dtype": param_dtype, "optimizer": optimizer, **how}
    curve, _ = trained(setting, tmp_path, **flags)
    assert curve[-1][0] < curve[0][0]


@pytest.mark.parametrize("bad", [0.0, 1.0])
def test_a_parameter_that_is_large_enough_to_be_paged_steps_unless_the_loss_is_not_finite(bad):
    pytest.importorskip("bitsandbytes")
    layer = torch.nn.Linear(512, 512, bias=False, device=DEVICE)  # bitsandbytes pages from 1e5 on
    optimizer = build_optimizer(layer, 1e-2, 0.0, name="paged_adamw_8bit")
    before = layer.weight.detach().clone()
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.found_inf = torch.tensor(bad, device=DEVICE)
    optimizer.step()
    assert torch.equal(layer.weight, before) == bool(bad)


def test_an_8_bit_step_on_another_stream_waits_for_its_gradient_and_is_waited_for():
    """As in FSDP2's hooks. The kernels of bitsandbytes run on the default stream."""
    pytest.importorskip("bitsandbytes")
    layers = [torch.nn.Linear(512, 512, bias=False, device=DEVICE) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    wanted = torch.randn_like(layers[0].weight)
    for layer, stream in zip(
        layers, (torch.cuda.default_stream(), torch.cuda.Stream()), strict=True
    ):
        optimizer = build_optimizer(layer, 1e-2, 0.0, name="adamw_8bit")
        layer.weight.grad = torch.zeros_like(layer.weight)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2**28)
            layer.weight.grad.copy_(wanted)
            optimizer.step()
            layer.weight.detach().mul_(2)
        torch.cuda.synchronize()
    assert torch.equal(layers[0].weight, layers[1].weight)


def test_the_held_out_loss_is_that_of_the_cpu(setting, tmp_path):
    folder, rows, _ = setting
    trained(setting, tmp_path / "gpu", **FP32, eval_share=0.3, eval_every=2)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "gpu" / "model", dtype=torch.float32)
    add_chunked_loss(plain)
    _, held_out = load_data(Rows(str(rows), 2048, eval_share=0.3), load_tokenizer(folder))
    loader = GlobalBatches(held_out, 0, 8, 8, 0, 1, 0)
    batches = [batch for step in range(loader.per_epoch) for batch in loader.batches(step)]
    total = sum(summed_cross_entropy(plain, batch).item() for batch in batches)
    lines = [json.loads(text) for text in (tmp_path / "gpu" / "metrics.jsonl").open()]
    found = [line["eval_loss"] for line in lines if "eval_loss" in line]
    trained_tokens = int(held_out.trained_tokens[held_out.rows].sum())
    assert found[-1] == pytest.approx(total / trained_tokens, rel=1e-4)


def test_the_host_does_not_wait_for_a_batch_on_its_way_to_the_gpu():
    ids = torch.arange(2**16).view(8, -1)
    batch = Batch(ids, ids, torch.ones_like(ids, dtype=torch.bool), [""] * 8)
    batch.to(DEVICE)  # the first one has memory to find
    torch.cuda.synchronize()
    torch.cuda._sleep(2**30)  # cycles: about half a second
    moved = batch.to(DEVICE)
    assert not torch.cuda.current_stream().query(), "the host waited for what was issued before"
    assert torch.equal(moved.ids.cpu(), ids)


def test_a_profile_has_the_trace_and_the_memory_of_two_steps(setting, tmp_path):
    trained(setting, tmp_path, dtype="bf16", profile=True)
    written = {path.name.partition("step")[0] for path in (tmp_path / "profile").iterdir()}
    assert written == {"rank0_from_"}
    assert len(list((tmp_path / "profile").glob("*.memory.pickle"))) == 1


def test_answers_are_those_of_transformers(setting, tmp_path):
    folder, _, _ = setting
    texts = ["Hello there", "a", "one two three"]
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    flags = {"model": str(folder), "prompts": str(prompts), "output": str(output)}
    generate.main(generate.Config(**flags, max_new_tokens=12, batch_size=2, **FP32))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)
    for text, line in zip(texts, output.open(), strict=True):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt"
        )["input_ids"].to(DEVICE)
        new = plain.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        answer = json.loads(line)["answer"]
        assert answer == tokenizer.decode(new, skip_special_tokens=True).strip()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_several_chunks_of_a_large_vocabulary_have_the_loss_of_full_logits(dtype):
    """And so do the log-probabilities of their tokens."""
    config = tiny_config("llama", vocab_size=131_072, max_position_embeddings=1024)
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype).to(DEVICE).train()
    chunked = add_chunked_loss(copy.deepcopy(plain))
    ids = torch.randint(5, 131_072, (2, 900), device=DEVICE)
    logits = plain(ids, use_cache=False).logits[:, :-1].float()
    expected = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)  # (B, T - 1)
    mask = torch.ones_like(ids, dtype=torch.bool)
    found = token_log_probs(chunked, Batch(ids, ids, mask, ["", ""]))
    torch.testing.assert_close(found[:, 1:], expected, rtol=1e-2, atol=5e-2)
    loss = chunked(ids, labels=ids)
    torch.testing.assert_close(loss, -expected.sum(), rtol=1e-3, atol=0)
    (loss / ids.numel()).backward()
    (-expected.mean()).backward()
    ours, theirs = (m.get_output_embeddings().weight.grad.float() for m in (chunked, plain))
    assert (ours - theirs).norm() <= 5e-2 * theirs.norm()


@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_preferences_are_learned_as_on_the_cpu(tmp_path, loss, lora_rank, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tiny_model_folder(tmp_path / "model", vocab_size=271)
    pairs = [
        {"prompt": f"Say {i}", "chosen": "good " * (1 + i % 3), "rejected": "bad " * (1 + i % 4)}
        for i in range(12)
    ]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    flags = {"model": str(folder), "dataset": str(tmp_path / "pairs.jsonl"), "loss": loss}
    flags |= {"lr": 1e-3, "steps": 4, "batch_size": 6, "lora_rank": lora_rank, **FP32}
    prefer.main(prefer.Config(**flags, output_dir=str(tmp_path / "gpu"), save_every=0))
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    words += f" --output_dir {tmp_path / 'cpu'} --save_every 0"
    run = shell(f"python recipes/prefer.py {words}", CUDA_VISIBLE_DEVICES="")
    assert run.returncode == 0, run.stderr
    ours, theirs = (
        [json.loads(text)["loss"] for text in (tmp_path / place / "metrics.jsonl").open()]
        for place in ("gpu", "cpu")
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
