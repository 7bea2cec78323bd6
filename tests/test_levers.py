"""Every memory lever gives the losses, gradient norms and weights that the run has without it, to rounding.

python -m pytest tests/test_levers.py
"""

import gc
import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import finetune
import prefer
import pretrain
import pytest
import reward
import torch
import vision
import yaml
from families import family_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_parity import GLOBAL_BATCH, RECIPE, curve_of, plain_loop, with_recipe, write_rows
from tiny import tiny_model, tiny_model_folder
from torch.distributed.tensor import DTensor
from transformers import Gemma3TextConfig

from utils.data.batches import divide_batch
from utils.model.activation_offload import HostCopies, hook_inputs, offload_inputs
from utils.model.attention import compile_layers
from utils.model.sharding import recompute_activations
from utils.plan import search
from utils.run.distributed import mesh_axes
from utils.run.errors import ConfigError
from utils.train.in_backward import check_in_backward

LEVERS = {
    "full_recompute": {"activation_checkpointing": "full"},
    "selective_recompute": {"activation_checkpointing": "selective"},
    "inputs_on_the_host": {"activation_checkpointing": "full", "activation_offload": True},
    "offload": {"cpu_offload": True},
    "zero_2": {"reshard_after_forward": False},
    "hsdp": {"replicate": 2},
    "hsdp_by_shard": {"shard": 1},
    "together": {
        "activation_checkpointing": "full",
        "cpu_offload": True,
        "reshard_after_forward": False,
    },
}


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def setting(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("levers")
    folder = tiny_model_folder(root / "model", request.param, vocab_size=271)
    rows = write_rows(root / "rows.jsonl")
    return folder, rows, plain_loop(folder, rows)


def trained(setting, out, ranks=2, **flags):
    """In micro-batches of two rows: some are padded, and on two ranks two of them make a step."""
    folder, rows, _ = setting
    flags = {"batch_size": 2, "global_batch_size": GLOBAL_BATCH} | flags
    return with_recipe(ranks, model=folder, dataset=rows, output_dir=out, **flags)


LONG = ("full_recompute", "offload", "hsdp", "hsdp_by_shard")  # left to make test-all


@pytest.mark.parametrize(
    "lever",
    [pytest.param(lever, marks=[pytest.mark.slow] if lever in LONG else []) for lever in LEVERS],
)
def test_a_lever_changes_no_loss_and_no_weight(setting, tmp_path, lever):
    _, _, (expected, weights) = setting
    curve, ours = trained(setting, tmp_path, **LEVERS[lever])
    torch.testing.assert_close(curve, expected, rtol=1e-5, atol=0)
    for name, tensor in ours.items():
        assert (tensor - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


@pytest.mark.parametrize(
    "flags",
    [{}, pytest.param({"batch_size": 1, "sync_each_microbatch": True}, marks=pytest.mark.slow)],
)
def test_hsdp_on_2_x_2_ranks_equals_the_plain_loop(setting, tmp_path, flags):
    _, _, (expected, weights) = setting
    curve, ours = trained(setting, tmp_path, ranks=4, replicate=2, shard=2, **flags)
    torch.testing.assert_close(curve, expected, rtol=1e-5, atol=0)
    for name, tensor in ours.items():
        assert (tensor - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


@pytest.mark.parametrize(
    ("given", "axes"),
    [
        ((0, 0), {"shard": 8}),
        ((2, 0), {"replicate": 2, "shard": 4}),
        ((0, 2), {"replicate": 4, "shard": 2}),
        ((4, 2), {"replicate": 4, "shard": 2}),
        ((8, 1), {"replicate": 8, "shard": 1}),
        ((1, 0), {"shard": 8}),
    ],
)
def test_either_axis_of_the_mesh_follows_from_the_other(given, axes):
    assert mesh_axes(8, *given) == axes


@pytest.mark.parametrize("given", [(3, 0), (0, 3), (2, 2), (16, 0)])
def test_axes_that_do_not_make_up_the_ranks_are_refused(given):
    with pytest.raises(
        ConfigError, match=r"--(replicate|shard) \d+.* does not make 8 ranks \(fix: "
    ):
        mesh_axes(8, *given)


def test_pure_bf16_trains_like_fp32_to_its_rounding(setting, tmp_path):
    _, _, (expected, _) = setting
    curve, _ = trained(setting, tmp_path, param_dtype="bf16", dtype="bf16")
    torch.testing.assert_close(
        [loss for loss, _ in curve], [loss for loss, _ in expected], rtol=3e-2, atol=0
    )


def compiled(world, folder, rows, out):
    """A run of compiled layers, and how many pieces of Python were compiled for it."""
    from torch._inductor import config

    config.compile_threads = 1  # a pool of processes would import more than there is to compile
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    flags = {"model": str(folder), "dataset": str(rows), "output_dir": str(out), "compile": True}
    out = finetune.main(finetune.Config(**RECIPE, **flags, global_batch_size=GLOBAL_BATCH))
    return out, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def compiled_run(setting, tmp_path_factory):
    """(its folder, how many pieces were compiled for its three layers)"""
    folder, rows, _ = setting
    return run_ranks(compiled, 2, folder, rows, tmp_path_factory.mktemp("compiled") / "out")[0]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["llama"], indirect=True)
def test_compiled_layers_train_alike(setting, compiled_run):
    _, _, (expected, _) = setting
    torch.testing.assert_close(curve_of(compiled_run[0]), expected, rtol=1e-4, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["llama"], indirect=True)
def test_one_compilation_is_shared_by_all_layers(setting, compiled_run, tmp_path):
    _, few = compiled_run
    deeper = tiny_model_folder(tmp_path / "model", vocab_size=271, num_hidden_layers=6)
    _, many = run_ranks(compiled, 2, deeper, setting[1], tmp_path / "out")[0]
    assert 0 < few == many


def train_two_kinds_of_layers(world, folder, rows, out):
    from torch._inductor import config

    config.compile_threads = 1
    torch._dynamo.reset()
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    cfg = pretrain.Config(
        model=str(folder),
        init="random",
        tokenizer=str(pretrain.TINY),
        dataset=str(rows),
        eval_share=0.5,
        seq_len=128,
        batch_size=3,
        steps=1,
        save_model=False,
        compile=True,
        output_dir=str(out),
    )
    pretrain.main(cfg)


@pytest.mark.slow
def test_layers_of_two_kinds_are_compiled_for_checks_evaluation_and_training(tmp_path):
    config = Gemma3TextConfig(
        vocab_size=640,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=64,
    )
    config.save_pretrained(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    texts = ("".join(f"{n * n % 97} " for n in range(i, i + 5 + i % 60)) for i in range(200))
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run_ranks(train_two_kinds_of_layers, 1, tmp_path / "model", rows, tmp_path / "out")


@pytest.mark.slow
def test_a_loop_over_chunks_is_not_compiled_again_for_rows_of_more_chunks():
    from torch._inductor import config

    config.compile_threads = 1
    torch._dynamo.reset()
    model = family_model("qwen3_5_text")
    compile_layers(model)
    for length, stance in ((128, "default"), (192, "default"), (320, "fail_on_recompile")):
        with torch.compiler.set_stance(stance), torch.no_grad():
            model(torch.ones(2, length, dtype=torch.int64), use_cache=False)


def test_fp16_trains_like_fp32_to_its_rounding(setting, tmp_path):
    _, _, (expected, _) = setting
    curve, _ = trained(setting, tmp_path, dtype="fp16")
    torch.testing.assert_close(
        [loss for loss, _ in curve], [loss for loss, _ in expected], rtol=2e-2, atol=0
    )


def in_fp16(world, flags):
    return finetune.main(
        finetune.Config(**flags, dtype="fp16", save_every=0, lr=1e-4, batch_size=2)
    )


def loud(tmp_path, factors):
    """Flags for a model whose gradients, times the first loss scale of 65536, are too large for fp16."""
    folder = tiny_model_folder(tmp_path / "model", vocab_size=271)
    weights = load_file(folder / "model.safetensors")
    for name, factor in factors.items():
        weights[name] *= factor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rows = write_rows(tmp_path / "rows.jsonl")
    return {"model": str(folder), "dataset": str(rows), "output_dir": str(tmp_path / "out")}


def test_overflows_in_fp16_are_skipped_and_counted_on_all_ranks_and_training_goes_on(tmp_path):
    out = run_ranks(in_fp16, 2, loud(tmp_path, {"model.norm.weight": 100.0}) | {"steps": 12})[0]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    skipped = [line["skipped"] for line in lines]
    assert skipped == sorted(skipped, reverse=True)  # the scale halves until it fits
    assert 1 <= sum(skipped) < 12
    assert lines[0]["grad_norm"] is None  # JSON has no infinity
    assert lines[-1]["grad_norm"] > 0


def test_twenty_overflows_in_a_row_stop_an_fp16_run(tmp_path):
    factors = {"model.embed_tokens.weight": 1e-3, "model.norm.weight": 1e3}
    flags = loud(tmp_path, {**factors, "model.layers.0.input_layernorm.weight": 1e3})
    with pytest.raises(AssertionError, match="step 20: loss .* gradient norm (inf|nan)"):
        run_ranks(in_fp16, 2, flags | {"steps": 24})


@pytest.mark.slow
def test_a_run_may_go_on_in_fp16_and_back(tmp_path):
    flags = {**loud(tmp_path, {}), "steps": 2, "save_every": 1}
    for steps, dtype in ((2, "fp32"), (4, "fp16"), (6, "fp32")):
        run_ranks(continued, 2, {**flags, "steps": steps, "dtype": dtype})
    lines = [
        json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def continued(world, flags):
    """Leave the run unfinished, as a kill before its last line does."""
    out = finetune.main(finetune.Config(**flags))
    if world.rank == 0:
        (out / "plan.json").unlink()


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_inputs_of_blocks_and_nothing_else_wait_on_the_host_for_their_backward(mode):
    model = tiny_model("llama", num_hidden_layers=5).train()
    recompute_activations(model, mode)
    copies = HostCopies()
    inputs = []

    def pack(tensor):
        inputs.append(tensor.clone())
        return copies.pack(tensor)

    def unpack(copy):
        back = copies.unpack(copy)
        assert torch.equal(back, inputs.pop())
        return back

    hook_inputs(model, pack, unpack)
    ids = torch.arange(12).view(2, 6)
    loss = model(ids, labels=ids, use_cache=False).loss
    assert [tensor.shape for tensor in inputs] == 5 * [(2, 6, model.config.hidden_size)]
    loss.backward()
    assert inputs == []
    with torch.no_grad():
        model(ids, use_cache=False)
    assert inputs == []


# Layers that add to a product in place, and layers with two inputs.
@pytest.mark.parametrize(
    ("family", "mode", "waits"),
    [("gemma3n_text", "selective", False), ("gemma4_text", "full", True), ("zaya", "full", True)],
)
def test_gradients_are_those_of_a_model_that_keeps_everything(family, mode, waits):
    ids = torch.arange(3, 51).view(2, 24)
    plain, model = (family_model(family).train() for _ in range(2))
    recompute_activations(model, mode)
    if waits:
        offload_inputs(model)
    for one in (plain, model):
        one(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, msg=name)


def test_inputs_wait_only_where_blocks_are_recomputed():
    with pytest.raises(ConfigError, match=r"\(fix: --activation_checkpointing full\)"):
        finetune.Config(activation_offload=True)


IN_BACKWARD = {"optimizer_in_backward": True, "clip_norm": 0}
AFTER = {"clip_norm": 0, "steps": 4, "batch_size": 4, "save_every": 2, "keep": 0, "seed": 3}


RECIPES = {module.__name__: module for module in (finetune, prefer, pretrain, reward, vision)}


def fitted(world, name, flags):
    """A run for which --fit finds that of 6 rows 2 at a time fit."""
    two = partial(replace, batch_size=2, rows=6)
    with patch.object(search, "fastest", lambda setting, *_: two(setting)):
        recipe = RECIPES[name]
        return recipe.main(recipe.Config(fit="same", batch_size=6, **flags))


@pytest.mark.parametrize("name", RECIPES)
def test_fit_keeps_the_rows_of_a_step_in_more_micro_batches(tmp_path, name):
    flags = {"steps": 1, "max_rows": 40, "save_model": False, "output_dir": str(tmp_path / "run")}
    (out,) = run_ranks(fitted, 1, name, flags)
    assert json.loads((out / "plan.json").read_text())["measured"]["global_batch_size"] == 6


def run_in(out, setting, **flags):
    folder, rows, _ = setting
    return AFTER | flags | {"output_dir": str(out), "model": str(folder), "dataset": str(rows)}


def finetuned(world, flags):
    return finetune.main(finetune.Config(**flags))


def test_fit_keeps_a_global_batch_size_that_the_ranks_do_not_divide(tmp_path):
    """The flag's, then the checkpoint's."""
    flags = {"fit": "same", "max_rows": 40, "save_every": 1, "save_model": False}
    first, more = str(tmp_path / "first"), str(tmp_path / "more")
    run_ranks(finetuned, 2, flags | {"global_batch_size": 3, "steps": 1, "output_dir": first})
    run_ranks(finetuned, 2, flags | {"steps": 2, "resume": first, "output_dir": more})
    for out in (first, more):
        measured = json.loads(Path(out, "plan.json").read_text())["measured"]
        assert measured["global_batch_size"] == 3
        assert yaml.safe_load(Path(out, "config.yaml").read_text())["global_batch_size"] == 3


@pytest.mark.parametrize(
    "how",
    [
        {"ranks": 2},
        {"ranks": 1, "param_dtype": "bf16", "dtype": "bf16"},
        pytest.param(
            {"ranks": 2, "replicate": 2, "activation_checkpointing": "full"}, marks=pytest.mark.slow
        ),
        pytest.param({"ranks": 2, "optimizer": "adamw_8bit"}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "lora_rank": 4}, marks=pytest.mark.slow),
    ],
    ids=lambda how: "-".join(map(str, how)),
)
def test_steps_in_the_backward_give_the_same_weights_bit_for_bit_and_a_run_goes_on_with_them(
    setting, tmp_path, how
):
    ranks = how["ranks"]
    how = {name: value for name, value in how.items() if name != "ranks"}
    outs = []
    for name, flag in (("after", {}), ("within", IN_BACKWARD)):
        flags = run_in(tmp_path / name, setting, **how, **flag)
        outs.append(run_ranks(finetuned, ranks, flags)[0])
    result = "adapter/adapter_model" if "lora_rank" in how else "model/model"
    after, within = (load_file(out / f"{result}.safetensors") for out in outs)
    assert all(torch.equal(within[name], tensor) for name, tensor in after.items())
    rtol = 1e-2 if "dtype" in how else 1e-6  # clipping takes the norm of a bf16 gradient in bf16
    torch.testing.assert_close(curve_of(outs[1]), curve_of(outs[0]), rtol=rtol, atol=0)
    for step in (3, 4):  # as a kill after step 2 leaves it
        shutil.rmtree(outs[1] / "checkpoints" / f"step_{step:08}", ignore_errors=True)
    (outs[1] / "plan.json").unlink()
    shutil.rmtree((outs[1] / result).parent)
    run_ranks(finetuned, ranks, flags)
    again = load_file(outs[1] / f"{result}.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())


# Which parameters a single rank uses as they are stored, and the flags of a run.
WITHOUT_COPIES = {
    "fp32": ("all", {"grad_accum": 2}),
    "bf16": ("all", {"param_dtype": "bf16", "dtype": "bf16"}),
    "fp32_sums": ("none", {"param_dtype": "bf16", "dtype": "bf16", "grad_accum": 2}),
    "bf16_sums": (
        "all",
        {"param_dtype": "bf16", "dtype": "bf16", "grad_accum": 2, "sync_each_microbatch": True},
    ),
    "masters": ("none", {"dtype": "bf16"}),
    "lora": ("frozen", {"dtype": "bf16", "lora_rank": 4, "activation_checkpointing": "full"}),
    "dora": ("frozen", {"dtype": "fp16", "lora_rank": 4, "use_dora": True}),
    "4bit": ("frozen", {"dtype": "bf16", "lora_rank": 4, "quantization": "4bit"}),
    "8bit": ("frozen", {"dtype": "bf16", "lora_rank": 4, "quantization": "8bit", "grad_accum": 2}),
    "8bit_moments": ("all", {"optimizer": "adamw_8bit"}),
    "in_backward": (
        "all",
        {**IN_BACKWARD, "low_cpu_fsdp": False, "param_dtype": "bf16", "dtype": "bf16"},
    ),
    "offload": ("none", {"cpu_offload": True}),
}


def train_alone(world, flags, copies):
    """(run folder, which parameters are no DTensors); with copies FSDP2 manages all of them."""
    chosen = finetune.stored_as_computed
    loaded = finetune.settle_chunked_loss
    kinds = set()

    def note(model, device):
        kinds.update((p.requires_grad, isinstance(p, DTensor)) for p in model.parameters())
        return loaded(model, device)

    finetune.settle_chunked_loss = note
    if copies:
        finetune.stored_as_computed = lambda *given, **named: set()
    try:
        return finetune.main(finetune.Config(**flags)), kinds
    finally:
        finetune.stored_as_computed, finetune.settle_chunked_loss = chosen, loaded


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(how, marks=pytest.mark.slow)
        if how not in ("fp32", "lora", "in_backward", "offload")
        else how
        for how in WITHOUT_COPIES
    ],
)
def test_one_rank_trains_without_copies_bit_for_bit_and_a_run_with_them_goes_on(
    setting, tmp_path, how
):
    parts, flags = WITHOUT_COPIES[how]
    flags = {"clip_norm": 1.0, "eval_share": 0.2} | flags
    plain, sharded = (run_in(tmp_path / name, setting, **flags) for name in ("plain", "sharded"))
    (out, kinds), *_ = run_ranks(train_alone, 1, plain, False)
    (before, all_sharded), *_ = run_ranks(train_alone, 1, sharded, True)
    is_lora = "lora_rank" in flags
    trained = (True, parts != "all")
    assert kinds == ({trained, (False, False)} if is_lora else {trained})
    assert all(is_dtensor for _, is_dtensor in all_sharded)
    rtol = 1e-6 if "optimizer_in_backward" in flags else 0  # the norm adds in the backward's order
    torch.testing.assert_close(numbers_of(out), numbers_of(before), rtol=rtol, atol=0)
    result = "adapter/adapter_model" if is_lora else "model/model"
    expected = load_file(before / f"{result}.safetensors")
    for again in (False, True):
        if again:
            for step in (3, 4):  # as a kill after step 2 leaves it
                shutil.rmtree(before / "checkpoints" / f"step_{step:08}", ignore_errors=True)
            (before / "plan.json").unlink()
            shutil.rmtree((before / result).parent)
            (out, _), *_ = run_ranks(train_alone, 1, sharded, False)
        found = load_file(out / f"{result}.safetensors")
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def numbers_of(out):
    """What a run logs that does not depend on time."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss", "grad_norm", "skipped", "eval_loss")
    return [[line[name] for name in names if name in line] for line in lines]


def test_a_run_frees_its_weights_and_moments(setting, tmp_path):
    """The hooks of the parameters held them: a second run in the same process had both in memory."""
    flags = run_in(tmp_path / "out", setting, **IN_BACKWARD, save_model=False)
    assert run_ranks(numbers_left, 1, flags) == [0]


def numbers_left(world, flags):
    """How many numbers of a run's weights and moments are in memory after it."""

    def tensors():
        gc.collect()
        found = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and not t.is_meta]
        return {id(t): t for t in found if t.ndim == 2 and t.dtype == torch.float32}

    before = tensors()
    finetune.main(finetune.Config(**flags))
    return sum(t.numel() for key, t in tensors().items() if key not in before)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"clip_norm": 1.0}, r"--clip_norm 1 .* \(fix: --clip_norm 0\)"),
        ({"grad_accum": 2}, r"2 micro-batches .* \(fix: "),
        ({"dtype": "fp16"}, r"fp16 .* \(fix: --dtype bf16\)"),
        ({"cpu_offload": True}, r"--cpu_offload .* \(fix: "),
    ],
)
def test_what_needs_all_gradients_at_a_time_is_refused_beside_it(setting, tmp_path, flags, says):
    flags = run_in(tmp_path / "out", setting, **IN_BACKWARD | flags)
    with pytest.raises(AssertionError, match=f"--optimizer_in_backward: .*{says}"):
        run_ranks(finetuned, 2, flags)
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(("grad_accum", "global_batch"), [(4, 0), (0, 16), (4, 16)])
def test_the_fix_for_micro_batches_in_backward_leaves_one(grad_accum, global_batch):
    _, micro_batches = divide_batch(2, grad_accum, global_batch, ranks=2)
    with pytest.raises(ConfigError) as refused:
        check_in_backward(SimpleNamespace(dtype="fp32", cpu_offload=False), micro_batches)
    words = r"--grad_accum (\d), and with --global_batch_size .* --batch_size (\d) times as large"
    grad_accum, times = map(int, re.search(words, str(refused.value)).groups())
    rows = 2 * times if global_batch else 2
    assert divide_batch(rows, grad_accum, global_batch, ranks=2) == (global_batch or 4, 1)
