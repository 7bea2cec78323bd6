"""The columns of a plan: rows, tokens and speed. What is printed fits, one step more does not.

python -m pytest tests/test_plan_search.py -m ""
"""

import sys
from dataclasses import replace

import pytest
import torch
from shell import ROOT
from tiny import tiny_config

from utils.model import loss
from utils.model.loading import build_model
from utils.model.loss import add_chunked_loss
from utils.plan import trace
from utils.plan.fit import Planner
from utils.plan.largest import STEP, largest_batch, longest, most
from utils.plan.planned import Knobs
from utils.run.units import GIB

sys.path.append(str(ROOT / "recipes"))
import plan  # noqa: E402

slow = pytest.mark.slow
LORA = {"lora_rank": 16}
FULL = {"activation_checkpointing": "full"}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048}


def of_shape(name: str, gpus=1, seq_len=4096, link=200.0, dtype=torch.float32) -> Planner:
    structure = (plan.find_config(name, False), dtype, "auto", False)
    return Planner(structure, torch.bfloat16, gpus, seq_len, local=min(gpus, 8), link=link)


def of_tiny(kind: str, seq_len=512, **sizes) -> Planner:
    structure = (tiny_config(kind, **SIZES | sizes), torch.float32, "auto", False)
    return Planner(structure, torch.bfloat16, 2, seq_len, local=2)


def misses(made: Planner, knobs: Knobs, gib: float, host: float = 2**40) -> list[str]:
    """What the columns say that a direct run on fake tensors, at the number and one step above, does not."""
    room, found = (gib * GIB, host), []

    def fits(rows: int, tokens: int) -> bool:
        more = replace(knobs, batch_size=rows)
        return made.fits(made.need(more, lambda: made.trace(more, tokens)), *room)

    rows, tokens = largest_batch(made, knobs, *room), longest(made, knobs, *room)
    for printed, step, at in (
        (rows, 1, lambda n: (n, made.seq_len)),
        (tokens, STEP, lambda n: (1, n)),
    ):
        if printed and not fits(*at(printed)):
            found.append(f"{printed} does not fit")
        if fits(*at(printed + step)):
            found.append(f"{printed + step} fits too")
    return found


# name, GPUs, GiB of one, tokens of a row, knobs; the columns were once wrong for most of them
SHAPES = [
    ("gemma-2-9b", 1, 80, 4096, LORA | FULL),
    ("mistral-7b", 1, 80, 4096, LORA | FULL),
    ("llama-3.2-1b", 1, 24, 128, FULL),
    ("glm-4-9b", 1, 80, 4096, LORA | FULL | {"quantization": "4bit"}),
    ("phi-3-mini", 1, 80, 4096, LORA),
    ("qwen3-30b-a3b", 8, 80, 4096, FULL),
    ("mixtral-8x7b", 8, 80, 4096, LORA | FULL | {"quantization": "8bit"}),
    ("gemma-3-4b", 1, 80, 4096, {"activation_checkpointing": "selective"}),
]


@slow
@pytest.mark.parametrize(("name", "gpus", "gib", "seq_len", "knobs"), SHAPES)
def test_the_printed_rows_and_tokens_fit_and_one_step_more_does_not(
    name, gpus, gib, seq_len, knobs
):
    assert misses(of_shape(name, gpus, seq_len), Knobs(**knobs), gib) == []


@pytest.mark.parametrize("kind", ["llama", "gemma2", "mixtral"])
def test_so_it_is_for_tiny_models_with_short_rows(kind):
    window = {"sliding_window": 96} if kind == "gemma2" else {}
    made = of_tiny(kind, 64, **window)
    assert misses(made, Knobs(**FULL), 2) == []


def test_a_formula_gives_what_a_run_gives_to_the_byte():
    """One chunk of the loss, two and many; one row and more; below, at and above the width of a window."""
    made = of_tiny("gemma2", sliding_window=96, vocab_size=2**20)
    for knobs in (Knobs(), Knobs(**LORA, activation_checkpointing="selective")):
        for rows, tokens in ((1, 40), (1, 96), (1, 97), (1, 1000), (3, 33), (7, 95)):
            many = replace(knobs, batch_size=rows)
            assert made.formulas.trace(knobs, rows, tokens) == made.trace(many, tokens), (
                knobs,
                rows,
                tokens,
            )


def test_three_chunks_of_the_loss_peak_as_all_do(monkeypatch):
    model = add_chunked_loss(
        build_model(tiny_config("llama", **SIZES), torch.float32), chunk_tokens=64
    )
    for tokens in (64, 100, 128, 500, 512):
        few = trace.trace_step(model, torch.bfloat16, 1, tokens)
        with monkeypatch.context() as patch:
            patch.setattr(trace, "few_chunks", lambda bounds, live: trace.ExitStack())
            assert len(loss.chunk_bounds(tokens, 64)) == -(-tokens // 64)
            every = trace.trace_step(model, torch.bfloat16, 1, tokens)
        assert few == every, tokens


@pytest.mark.parametrize("limit", [0, 1, 9, 10, 11, 499, 70000])
def test_the_largest_number_is_found_wherever_the_search_begins(limit):
    def over(number: int) -> float:
        return (number - limit) * (1 + max(0, number - 300))

    assert [most(over, first) for first in (1, 10, 500, 2**16)] == 4 * [min(limit, 2**16)]


# --- speed


def speeds(made: Planner, **knobs) -> float:
    return 1 / made.seconds(Knobs(**knobs))


def test_speeds_are_near_the_published_ratios():
    """Llama-3-8B, 4,096 tokens a row. Bounds are published ranges, 0.03 wider.

    Full recompute over none: 0.80 (torchtitan PR 165) to 0.84 (pytorch/ao) on 8 H100, 0.79 on one GPU
    (torchtune). LoRA over full on one A100, both recomputing: 1.12 to 1.14; nf4 over LoRA: 0.78 to 1.06
    (fms-acceleration). Not met: selective over none, published 0.90 for a policy that keeps every second
    product; ours keeps all.
    """
    one = of_shape("llama-3-8b", dtype=torch.bfloat16)
    eight = of_shape("llama-3-8b", 8)
    for made in (one, eight):
        none = speeds(made, batch_size=4)
        assert 0.76 < speeds(made, batch_size=4, **FULL) / none < 0.87
        assert 0.90 < speeds(made, batch_size=4, activation_checkpointing="selective") / none < 1
    lora = speeds(one, batch_size=4, **LORA, **FULL)
    assert 1.09 < lora / speeds(one, batch_size=4, **FULL) < 1.17
    assert 0.75 < speeds(one, batch_size=4, **LORA, **FULL, quantization="4bit") / lora < 1.09


def test_a_slow_link_holds_up_many_gpus_and_never_one():
    def seconds(shards: int, link: float) -> float:
        made = of_tiny("llama", 64)
        made.shards, made.link = shards, link
        return made.seconds(Knobs())

    assert seconds(2, 0.01) > seconds(2, 200)
    assert seconds(1, 0.01) == seconds(1, 200)
