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

import utils.loss

sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "recipes" / "benchmarks"))
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
    """Bytes of this rank's second step of three: (gathered, reduced, other)."""
    steps, wire = [], step.WireBytes()

    def at_step(*_):
        steps.append(0)
        if len(steps) == 1:
            wire.__enter__()
        elif len(steps) == 2:
            wire.__exit__(None, None, None)

    hook = register_optimizer_step_post_hook(at_step)
    logits, utils.loss.CHUNK_LOGITS = utils.loss.CHUNK_LOGITS, 1 if lever == "many_chunks" else 2**26
    try:
        finetune.main(finetune.Config(**flags, steps=3, save_every=0, save_model=False))
    finally:
        hook.remove()
        utils.loss.CHUNK_LOGITS = logits
    return wire.gathered, wire.reduced, wire.other


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def setting(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("wire")
    # 1,004 rows divide by 2: FSDP pads what does not, by a row.
    folder = tiny_model_folder(root / "model", request.param, vocab_size=1004)
    with open(root / "rows.jsonl", "w") as file:
        for i in range(12):  # long enough for several chunks of 64 taught tokens, the smallest there are
            turns = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes " * 30}]
            file.write(json.dumps({"messages": turns}) + "\n")
    return folder, root / "rows.jsonl"


@pytest.mark.parametrize("lever", LEVERS)
def test_no_weight_is_gathered_and_no_gradient_reduced_more_often_than_it_must(setting, tmp_path, lever):
    folder, rows = setting
    flags = {"batch_size": 2, "model": str(folder), "dataset": str(rows), "output_dir": str(tmp_path)}
    flags |= LEVERS[lever]
    number = 2 if lever == "bf16" else 4  # bytes of a gathered number; gradients are always reduced in fp32
    least = step.least_wire_bytes(folder, 2, flags.get("grad_accum", 1), number)
    for gathered, reduced, other in run_ranks(count, 2, lever, flags):
        assert (gathered, reduced) == least
        assert other < 1000  # counts, the loss, the norm


def test_without_resharding_every_weight_is_gathered_once(setting, tmp_path):
    folder, rows = setting
    flags = {"batch_size": 2, "model": str(folder), "dataset": str(rows), "output_dir": str(tmp_path)}
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
