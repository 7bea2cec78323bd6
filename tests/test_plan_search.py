"""The columns of a plan, rows and tokens: what is printed fits by the plan of that size.

python -m pytest tests/test_plan_search.py -m ""
"""

import sys
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from families import family_config
from shell import ROOT
from tiny import in_chunks, tiny_config

from utils.model import loss
from utils.model.loading import build_model
from utils.model.options import Lora, Quant
from utils.plan import trace
from utils.plan.need import (
    TOO_LARGE,
    Room,
    Setting,
    answer_of,
    cached_record,
    need_of,
    planned_model,
)
from utils.plan.search import largest_batch, largest_seq_len, ways
from utils.run.units import GIB

sys.path.append(str(ROOT / "recipes"))
import plan  # noqa: E402

slow = pytest.mark.slow
LORA = {"lora": Lora(lora_rank=16)}
FULL = {"activation_checkpointing": "full"}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 2048}


def of_shape(name: str, gpus: int, seq_len: int, **how) -> Setting:
    return Setting(
        config=plan.find_config(name, False),
        param_dtype=torch.float32,
        dtype=torch.bfloat16,
        seq_len=seq_len,
        shards=gpus,
        local_ranks=gpus,
        **how,
    )


def of_tiny(kind: str, seq_len: int, **sizes) -> Setting:
    config = tiny_config(kind, **SIZES | sizes)
    return Setting(config, torch.float32, torch.bfloat16, seq_len, shards=2, local_ranks=2, **FULL)


def misses(setting: Setting, gib: float) -> list[str]:
    """What the columns say x."""
    room, found = Room(gib * GIB, 2**40, ""), []

    def fits(rows: int, tokens: int) -> bool:
        other = replace(setting, batch_size=rows, seq_len=tokens)
        return answer_of(other, need_of(other), room) != TOO_LARGE

    scaled = plan.scaled_of(setting)
    rows, tokens = largest_batch(scaled, room), largest_seq_len(scaled, room)
    if rows and not fits(rows, setting.seq_len):
        found.append(f"{rows} rows do not fit")
    # A line may end a row early.
    if fits(int(rows * 1.02) + 2, setting.seq_len):
        found.append(f"{int(rows * 1.02) + 2} rows fit too")
    if tokens and not fits(1, tokens):
        found.append(f"{tokens} tokens do not fit")
    if fits(1, int(tokens * 1.02) + 64):
        found.append(f"{int(tokens * 1.02) + 64} tokens fit too")
    return found


# name, GPUs, GiB of one, tokens of a row, how
SHAPES = [
    ("gemma-2-9b", 1, 80, 4096, LORA | FULL),
    ("mistral-7b", 1, 80, 4096, LORA | FULL),
    ("llama-3.2-1b", 1, 24, 128, FULL),
    ("glm-4-9b", 1, 80, 4096, LORA | FULL | {"quant": Quant("4bit")}),
    ("phi-3-mini", 1, 80, 4096, LORA),
    ("qwen3-30b-a3b", 8, 80, 4096, FULL),
    ("mixtral-8x7b", 8, 80, 4096, LORA | FULL | {"quant": Quant("8bit")}),
    ("gemma-3-4b", 1, 80, 4096, {"activation_checkpointing": "selective"}),
]


@slow
@pytest.mark.parametrize(("name", "gpus", "gib", "seq_len", "how"), SHAPES)
def test_the_printed_rows_and_tokens_fit_and_two_per_cent_more_do_not(
    name, gpus, gib, seq_len, how
):
    assert misses(of_shape(name, gpus, seq_len, **how), gib) == []


@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(kind, marks=slow) for kind in ("gemma2", "mixtral"))]
)
def test_none_is_too_large_for_tiny_models_with_short_rows(kind):
    window = {"sliding_window": 96} if kind == "gemma2" else {}
    assert not [miss for miss in misses(of_tiny(kind, 64, **window), 4) if "not fit" in miss]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("llama", LORA | FULL),
        ("gemma2", {}),
        ("mixtral", LORA | FULL),
        *(
            pytest.param(kind, how, marks=slow)
            for kind, how in (("llama", {}), ("gemma2", LORA | FULL), ("mixtral", {}))
        ),
    ],
)
def test_scaled_activations_are_those_that_are_traced_at_that_size(kind, how):
    setting = replace(of_tiny(kind, 2048, vocab_size=32000), **how)
    scaled = plan.scaled_of(setting)
    assert scaled.scaling
    for batch, tokens in [(1, 2048), (1, 30000), (3, 4096), (40, 640)]:
        sizes = {"batch_size": batch, "rows": batch, "seq_len": tokens}
        traced, found = need_of(replace(setting, **sizes)), need_of(replace(scaled, **sizes))
        assert found.peak == traced.peak, (batch, tokens)


def test_rows_within_a_window_are_compared_with_shorter_ones_and_longer_ones_are_traced():
    """Beyond the window a mask is made, whose bytes are not those of any shorter row."""
    setting = of_tiny("gemma2", 4096, vocab_size=32000, sliding_window=6000)
    scaled = plan.scaled_of(setting)
    for tokens in (2048, 4096, 12000):
        found = need_of(replace(scaled, seq_len=tokens)).peak
        assert found == need_of(replace(setting, seq_len=tokens)).peak, tokens


@pytest.mark.parametrize("kind", ["lfm2_moe", pytest.param("qwen3_5_text", marks=slow)])
def test_where_a_row_is_padded_or_looped_over_the_plan_is_on_a_line_between_two_lengths(kind):
    config = family_config(kind)
    config.vocab_size = 32000
    setting = Setting(config, torch.float32, torch.bfloat16, 1024)
    scaled = plan.scaled_of(setting)
    assert scaled.scaling.func is plan.steps_between
    for batch, tokens in [(1, 1600), (1, 4800), (3, 1536)]:
        sizes = {"batch_size": batch, "rows": batch, "seq_len": tokens}
        traced, found = need_of(replace(setting, **sizes)), need_of(replace(scaled, **sizes))
        assert found.peak == traced.peak, (batch, tokens)


@pytest.mark.parametrize("kind", ["llama", "gemma4_text"])
def test_a_model_is_planned_once_for_equal_configs_and_does_not_change_them(kind):
    """gemma4_text: == of two such configs raises."""
    setting = Setting(family_config(kind), torch.float32, torch.bfloat16, 64)
    before = deepcopy(setting)
    planned = planned_model(setting)
    assert setting == before
    assert setting.config.to_dict() == before.config.to_dict()
    assert setting.config._attn_implementation == before.config._attn_implementation
    assert planned_model(before) is planned
    before.config.vocab_size += 64
    assert planned_model(replace(before, config=before.config)) is not planned


def test_a_table_of_every_method_traces_each_once(tmp_path, capsys):
    config = plan.find_config("llama-3.2-1b", False)
    config.num_hidden_layers = 3
    config.save_pretrained(tmp_path)
    cached_record.cache_clear()
    plan.main(plan.Config(model=str(tmp_path), gpus=2))
    assert "4bit    full       yes" in capsys.readouterr().out
    # four of the setting's own size and its double, and of what is proposed
    assert cached_record.cache_info().misses <= 4 * 3 + 4


@pytest.mark.parametrize(
    ("part", "whole"),
    [("few_chunks", loss.chunk_slices), ("no_product", loss._add_product)],
)
def test_the_parts_of_the_loss_that_are_traced_peak_as_all_do(part, whole, monkeypatch):
    sizes = SIZES | {"vocab_size": 2 * loss.ROWS + 300}
    model = build_model(tiny_config("llama", **sizes), torch.float32)
    model = in_chunks(model, 64)
    for tokens in (64, 100, 128, 500, 512):
        few = trace.record_step(model, torch.bfloat16, 1, tokens)()
        with monkeypatch.context() as patch:
            patch.setattr(trace, part, whole)
            every = trace.record_step(model, torch.bfloat16, 1, tokens)()
        assert few == every, tokens


@pytest.mark.parametrize(
    ("rows", "sizes"), [(1, {1}), (8, {8, 4, 2, 1}), (11, {11, 6, 3, 2, 1}), (12, {12, 6, 3, 2, 1})]
)
def test_rows_that_nothing_divides_have_micro_batches_of_all_sizes_too(rows, sizes):
    settings = [*ways(replace(of_tiny("llama", 64), rows=rows, batch_size=2))]
    assert {way.batch_size for way in settings} == sizes
    for way in settings:
        assert way.rows == rows
        assert (way.grad_accum - 1) * way.batch_size < rows <= way.grad_accum * way.batch_size


@pytest.mark.parametrize("limit", [1, 9, 10, 11, 499, 6000])
def test_as_many_rows_are_found_as_fit_to_one_per_cent(limit):
    setting = of_tiny("llama", 4096)
    scaled = plan.scaled_of(setting)
    needed = need_of(replace(scaled, batch_size=limit, rows=limit)).device
    assert 0.98 * limit <= largest_batch(scaled, Room(needed, 2**60, "")) <= limit
    assert limit > 1 or not largest_batch(scaled, Room(needed - 1, 2**60, ""))
