"""What goes over the wire in an optimizer step is the least that FSDP can do, whatever is switched on.

python -m pytest tests/test_wire.py
"""

import json
import sys
from pathlib import Path

import finetune
import pytest
import torch
from ranks import run_ranks
from tiny import tiny_model_folder
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoConfig

from utils.model import loss
from utils.model.loading import build_model
from utils.model.sharding import decoder_layers

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "tests" / "benchmarks"))
import step

LEVERS = {
    "plain": {},
    "full_recompute": {"activation_checkpointing": "full"},
    "selective_recompute": {"activation_checkpointing": "selective"},
    "accumulation": {"batch_size": 1, "grad_accum": 2},
    "many_chunks": {},
    "bf16": {"dtype": "bf16"},
}


def count(world, lever, flags):
    """Bytes of this rank's second step of two: (gathered, reduced, other)."""
    steps, wire = [], step.WireBytes()

    def at_step(*_):
        steps.append(0)
        if len(steps) == 1:
            wire.__enter__()
        elif len(steps) == 2:
            wire.__exit__(None, None, None)

    hook = register_optimizer_step_post_hook(at_step)
    tokens_of_chunk = loss.tokens_of_chunk
    if lever == "many_chunks":
        loss.tokens_of_chunk = lambda vocabulary: 64
    try:
        finetune.main(finetune.Config(**flags, steps=2, save_every=0, save_model=False))
    finally:
        hook.remove()
        loss.tokens_of_chunk = tokens_of_chunk
    return wire.gathered, wire.reduced, wire.other


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def setting(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("wire")
    # 1,004 rows divide by 2: FSDP pads what does not, by a row.
    folder = tiny_model_folder(root / "model", request.param, vocab_size=1004)
    with open(root / "rows.jsonl", "w") as file:
        # long enough for several chunks of 64 trained tokens, the smallest there are
        for i in range(12):
            turns = [
                {"role": "user", "content": f"{i}?"},
                {"role": "assistant", "content": "yes " * 30},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder, root / "rows.jsonl"


# Of a model whose embedding is also its head, the two in which these could be moved twice.
CASES = [*(("llama", lever) for lever in LEVERS), ("qwen2", "plain"), ("qwen2", "accumulation")]


@pytest.mark.parametrize(("setting", "lever"), CASES, indirect=["setting"])
def test_no_weight_is_gathered_and_no_gradient_reduced_more_often_than_it_must(
    setting, tmp_path, lever
):
    folder, rows = setting
    flags = {
        "batch_size": 2,
        "model": str(folder),
        "dataset": str(rows),
        "output_dir": str(tmp_path),
    }
    flags |= LEVERS[lever]
    # bytes of a gathered number; gradients are always reduced in fp32
    number = 2 if lever == "bf16" else 4
    least = step.least_wire_bytes(folder, 2, flags.get("grad_accum", 1), number)
    for gathered, reduced, other in run_ranks(count, 2, lever, flags):
        assert (gathered, reduced) == least
        assert other < 1000  # counts, the loss, the norm


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["llama"], indirect=True)
def test_copies_of_the_model_add_their_gradients_once_a_step(setting, tmp_path):
    """Their network is that between machines. It was once a micro-batch."""
    folder, rows = setting
    flags = {
        "batch_size": 1,
        "grad_accum": 3,
        "model": str(folder),
        "dataset": str(rows),
        "output_dir": str(tmp_path),
        "replicate": 2,
        "sync_each_microbatch": True,
    }
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    gradients_bytes = 4 * sum(p.numel() for p in model.parameters()) / 2  # of a shard
    for _, _, other in run_ranks(count, 4, "plain", flags):
        assert gradients_bytes <= other < gradients_bytes + 1500


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["llama"], indirect=True)  # for its rows
def test_a_quantized_base_is_gathered_as_codes_and_scales_and_only_adapters_are_reduced(
    setting, tmp_path
):
    _, rows = setting
    folder = tiny_model_folder(tmp_path / "model", vocab_size=1004, intermediate_size=128)
    flags = {
        "batch_size": 2,
        "model": str(folder),
        "dataset": str(rows),
        "lora_rank": 4,
        "dtype": "bf16",
    }
    found = {}
    for kind in ("none", "8bit", "4bit"):
        out = str(tmp_path / kind)
        found[kind] = run_ranks(
            count, 2, "plain", {**flags, "output_dir": out, "quantization": kind}
        )[0]
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    layers = decoder_layers(model)
    linears = linear_weights(layers[0])
    times = 2 * len(layers) - 1  # each layer twice, the last one once
    elements, rows = sum(w.numel() for w in linears), sum(w.shape[0] for w in linears)
    bytes_of = {"8bit": elements + 4 * rows, "4bit": elements / 2 + 4 * elements / 64}
    for kind, size in bytes_of.items():  # a rank of two receives half
        assert found["none"][0] - found[kind][0] == times * (2 * elements - size) / 2
    adapters = sum(4 * (w.shape[0] + w.shape[1]) for layer in layers for w in linear_weights(layer))
    assert [reduced for _, reduced, _ in found.values()] == [4 * adapters / 2] * 3


def linear_weights(layer):
    return [m.weight for m in layer.modules() if isinstance(m, torch.nn.Linear)]


def test_without_resharding_every_weight_is_gathered_once(setting, tmp_path):
    folder, rows = setting
    flags = {
        "batch_size": 2,
        "model": str(folder),
        "dataset": str(rows),
        "output_dir": str(tmp_path),
    }
    _, reduced = step.least_wire_bytes(folder, 2)
    for gathered, *_ in run_ranks(count, 2, "plain", {**flags, "reshard_after_forward": False}):
        assert gathered == reduced  # every weight's bytes, as every gradient's


def test_the_counter_sees_a_gather_a_reduction_and_the_rest(tmp_path):
    for gathered, reduced, other in run_ranks(collectives, 2):
        assert (gathered, reduced, other) == (40, 80, 24)


def collectives(world):
    import torch.distributed as dist

    small, large = torch.zeros(10), torch.zeros(20)
    twice, twice_large = torch.zeros(20, dtype=torch.float64), torch.zeros(40, dtype=torch.float64)
    with step.WireBytes() as wire:
        dist.all_gather_into_tensor(large, small)
        dist.reduce_scatter_tensor(twice[:10].clone(), twice)
        dist.all_reduce(twice_large[:3].clone())
    return wire.gathered, wire.reduced, wire.other
