"""What a GPU must hold beyond the bytes that are alive, and how that is told.

python -m pytest tests/test_reserve.py
"""

import os
from dataclasses import replace

import pytest
import torch
from test_memory_plan import BIG, of_llama
from tiny import tiny_config

from utils.model.loading import build_model
from utils.model.loss import add_chunked_loss
from utils.plan.decide import room_sentence
from utils.plan.fit import Planner
from utils.plan.planned import Knobs, MemoryPlan
from utils.plan.reserve import FITS, TIGHT, TOO_LARGE, answer_of, must_and_comfortable
from utils.plan.trace import trace_step
from utils.run.distributed import use_expandable_segments
from utils.run.units import GIB

PLENTY = 10**15  # bytes of a host


@pytest.fixture(scope="module")
def two_ranks() -> Planner:
    return of_llama(local=2)


def test_the_pools_of_all_streams_hold_at_least_what_is_alive_and_one_rank_has_fewer(two_ranks):
    peak = two_ranks.need(Knobs()).peak
    assert set(peak.pools) == {"compute", "all-gather", "reduce-scatter"}
    assert sum(peak.pools.values()) > peak.total  # their peaks come at different times
    assert peak.pools["reduce-scatter"] >= two_ranks.need(Knobs()).states.gradients
    alone = replace(two_ranks, shards=1, local=1, known={}).need(Knobs()).peak
    assert set(alone.pools) == {"compute", "reduce-scatter"}  # copies in the stream that computes


def test_copies_of_the_model_keep_what_was_all_reduced_until_the_backward_ends(two_ranks):
    """All of a rank's gradients once more in fp32, where it does not become the gradient itself."""
    knobs, more = Knobs(grad_accum=2), {"sync_each": True, "known": two_ranks.known}
    one, two = (replace(two_ranks, replicate=n, **more).need(knobs) for n in (1, 2))
    grown = two.peak.pools["reduce-scatter"] - one.peak.pools["reduce-scatter"]
    assert 0.7 * one.states.gradients < grown <= one.states.gradients
    assert one.peak.pools["compute"] == two.peak.pools["compute"]


def test_what_must_be_there_is_what_is_alive_and_more_on_several_gpus():
    assert must_and_comfortable(10 * GIB, 12 * GIB, 1) == (
        11 * GIB,
        int(12 * GIB * 1.08) + 3 * GIB // 2,
    )
    assert must_and_comfortable(10 * GIB, 12 * GIB, 2)[0] == 13 * GIB
    assert must_and_comfortable(GIB, GIB, 2) == (4 * GIB, 4 * GIB)  # comfortable is never less


def test_there_are_three_answers():
    answers = [answer_of(10, 12, room) for room in (9, 10, 11, 12)]
    assert answers == [TOO_LARGE, TIGHT, TIGHT, FITS]


def test_fit_takes_what_is_comfortable_and_tight_settings_only_where_nothing_is():
    alone = of_llama(shards=1, seq_len=256)
    ways = {way: alone.need(way) for way in alone.ways(Knobs())}  # the fastest first
    fastest, need = next(iter(ways.items()))
    assert alone.fastest(Knobs(), need.comfortable, PLENTY) == fastest
    slower = alone.fastest(Knobs(), need.comfortable - 1, PLENTY)
    assert slower != fastest
    assert alone.answer_for(slower, need.comfortable - 1, PLENTY) == FITS
    least = min(need.comfortable for need in ways.values()) - 1  # now nothing is comfortable
    tight = [way for way, need in ways.items() if need.device <= least]
    assert alone.fastest(Knobs(), least, PLENTY) == tight[0]


def test_too_little_host_memory_is_no_tight_fit(two_ranks):
    need = two_ranks.need(Knobs(cpu_offload=True))
    assert two_ranks.answer(need, PLENTY, PLENTY) == FITS
    assert two_ranks.answer(need, PLENTY, need.host) == TOO_LARGE  # of one of the two ranks


def test_the_plan_says_both_figures_and_the_answer_on_a_gpu_and_on_a_cpu_one(two_ranks):
    need = replace(two_ranks.need(Knobs()), device=3 * GIB, comfortable=4 * GIB, host=GIB)
    line = room_sentence(two_ranks, need, "little", TIGHT)
    assert line == (
        "room      3.00 GiB a rank must be there, 4.00 GiB is comfortable, 2.00 GiB of host; there is little"
        ": fits tightly, the allocator must give blocks back in every step"
    )
    cpu = replace(two_ranks, gpu=False)
    assert room_sentence(cpu, need, "much", FITS) == (
        "room      3.00 GiB a rank, reserve included; there is much"
    )


def test_on_a_cpu_there_is_one_figure():
    need = of_llama(gpu=False, seq_len=64).need(Knobs())
    assert need.device == need.comfortable == need.host


def attention(dtype=torch.bfloat16, flash=True, packed=False, kv=2):
    """The backward of a block that is attention for the most part."""
    sizes = {
        "num_attention_heads": 8,
        "num_key_value_heads": kv,
        "head_dim": 128,
        "intermediate_size": 64,
    }
    model = build_model(tiny_config("llama", **BIG | sizes | {"hidden_size": 64}), torch.float32)
    return trace_step(add_chunked_loss(model), dtype, 2, 256, packed, flash).blocks_back[0]


def test_flash_attention_sums_its_gradients_in_fp32_while_its_backward_runs():
    tokens, width = 2 * 256, 8 * 128
    grouped = attention().peak - attention(flash=False).peak
    assert grouped == tokens * width * (4 + 2 * 2)  # and dK, dV for each head of the queries
    assert attention(kv=8).peak - attention(kv=8, flash=False).peak == tokens * width * 4
    assert attention().rest == attention(flash=False).rest


@pytest.mark.parametrize("how", [{"dtype": torch.float32}, {"packed": True}])
def test_other_kernels_than_flash_attention_are_taken_as_they_are(how):
    assert attention(**how) == attention(flash=False, **how)


# --- the allocator of GPU memory


def test_expandable_segments_are_left_alone_without_a_gpu(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    use_expandable_segments(torch.device("cpu"))
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


def test_what_the_allocator_reserved_is_compared_with_what_was_called_comfortable(capsys):
    planned = {"comfortable_bytes": 4 * GIB, "acts": {"plan": GIB}}
    plan = MemoryPlan("", planned=planned)
    acts = {"plan": {}, "train": {}}
    found = plan.compare_reserved(({"plan": GIB, "train": 5 * GIB},), acts)
    assert found["peak_reserved_bytes"] == [5 * GIB]
    assert found["reserved_error"] == 0.25
    assert acts["plan"]["reserved_bytes"] == GIB
    said = "memory    GiB reserved 5.00 of 4.00 that were called comfortable (+25.0%)"
    assert said in capsys.readouterr().out
    assert plan.compare_reserved(({},), acts) == {}  # as on a CPU
