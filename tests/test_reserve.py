"""What a GPU must hold beyond the bytes that are alive, and how that is told.

python -m pytest tests/test_reserve.py
"""

import os
from dataclasses import replace

import pytest
import torch
from test_memory_plan import PLENTY, of_llama

from utils.plan.fit import compare_reserved, room_sentence
from utils.plan.need import (
    FITS,
    MAYBE,
    TIGHT,
    TOO_LARGE,
    Room,
    answer_of,
    comfortable_bytes,
    must_bytes,
    need_of,
)
from utils.plan.search import fastest, ways
from utils.run.distributed import (
    CUDA_SETTINGS,
    init_distributed,
    stop_distributed,
    use_expandable_segments,
)
from utils.run.units import GIB


def test_the_pools_of_all_streams_hold_at_least_what_is_alive_and_one_rank_has_fewer():
    need = need_of(of_llama())
    assert set(need.peak.pools) == {"compute", "all-gather", "reduce-scatter"}
    assert sum(need.peak.pools.values()) > need.peak.total  # their peaks come at different times
    assert need.peak.pools["reduce-scatter"] >= need.states.gradients
    alone = need_of(of_llama(shards=1, local_ranks=1)).peak
    assert set(alone.pools) == {"compute", "reduce-scatter"}  # copies in the stream that computes


def test_copies_of_the_model_keep_what_was_all_reduced_until_the_backward_ends():
    """All of a rank's gradients once more, in fp32, unless it becomes the gradient itself."""
    in_fp32 = of_llama(rows=2, sync_each_microbatch=True)
    for asked in (in_fp32, replace(in_fp32, param_dtype=torch.bfloat16)):
        one, two = (need_of(replace(asked, replicate=n)) for n in (1, 2))
        assert one.peak and two.peak, one.why + two.why  # noqa: PT018
        if asked == in_fp32:
            assert two.peak.pools == one.peak.pools  # nothing stays in the stream of the all-reduce
        else:
            assert two.peak.pools["reduce-scatter"] == 2 * one.states.gradients  # which are bf16
            assert two.peak.pools["all-reduce"] > one.states.gradients
            assert two.peak.pools["compute"] == one.peak.pools["compute"]
    # vision.py then adds each micro-batch's gradients, the second's to those that there are
    one, two = (need_of(replace(in_fp32, separates=True, replicate=n)) for n in (1, 2))
    grown = two.peak.pools["reduce-scatter"] - one.peak.pools["reduce-scatter"]
    assert 0.7 * one.states.gradients < grown <= one.states.gradients


def test_what_must_be_there_is_what_is_alive_and_more_on_several_gpus():
    assert must_bytes(10 * GIB, 1, gpu=True) == 11 * GIB
    assert must_bytes(10 * GIB, 2, gpu=True) == 13 * GIB
    assert must_bytes(10 * GIB, 2, gpu=False) == 16 * GIB + GIB // 4
    assert comfortable_bytes(12 * GIB, 0) == int(12 * GIB * 1.11) + 9 * GIB // 4
    assert comfortable_bytes(12 * GIB, 8 * GIB) == 8 * GIB + int(4 * GIB * 1.11) + 9 * GIB // 4
    small = need_of(of_llama(shards=2))
    assert small.comfortable == small.device  # comfortable is never less


# GiB: name, weights and optimizer of a rank, the sum of the pools' peaks + 1.5, published as reserved
# (configs/README.md has the sources).
RESERVED = {
    "torchtitan 699": (11.22, 48.37, 49.59),
    "torchtitan T1": (11.22, 75.96, 82.4),
    "torchtitan T3, 128 GPUs": (0.70, 61.82, 67.0),
    "ao": (11.22, 54.83, 53.12),
    "ao, full": (11.22, 27.81, 28.07),
    "torchtitan 1690": (0, 86.59, 81.85),  # its GPUs are not stated
}


@pytest.mark.parametrize("name", RESERVED)
def test_comfortable_covers_what_published_runs_with_expandable_segments_reserved(name):
    steady, pools, reserved = (int(size * GIB) for size in RESERVED[name])
    assert reserved <= comfortable_bytes(pools - 3 * GIB // 2, steady)


def test_there_are_four_answers_on_a_gpu_and_two_on_a_cpu():
    setting = of_llama()
    need = need_of(setting)._replace(device=100, comfortable=120)
    sizes = (99, 100, 103, 104, 119, 120)
    answers = [answer_of(setting, need, Room(size, PLENTY, "")) for size in sizes]
    assert answers == [TOO_LARGE, MAYBE, MAYBE, TIGHT, TIGHT, FITS]
    alone = replace(setting, gpu=False)
    need = need._replace(comfortable=100)
    answers = [answer_of(alone, need, Room(size, PLENTY, "")) for size in (99, 100)]
    assert answers == [TOO_LARGE, FITS]


def test_a_compiled_step_is_refused_only_where_the_least_that_was_published_does_not_fit():
    plain, compiled = (need_of(of_llama(compile=compile)) for compile in (False, True))
    assert compiled.acts == plain.acts
    alive = max(int(0.85 * plain.acts["train"]), plain.acts["load"], plain.acts["save"])
    assert compiled.device == alive + 3 * GIB


def test_a_compiled_step_needs_no_less_than_what_remains_without_activations():
    few = need_of(of_llama(compile=True, activation_checkpointing="full", seq_len=64))
    remains = few.peak.total - few.peak.parts["activations"]
    assert remains > 0.85 * few.peak.total
    assert few.device >= remains + 3 * GIB


def test_fit_takes_what_is_comfortable_and_tight_settings_only_where_nothing_is():
    alone = of_llama(shards=1, local_ranks=1, seq_len=256)
    needs = {way: need_of(way) for way in ways(alone)}  # the fastest first
    assert all(need.peak for need in needs.values()), {need.why for need in needs.values()}
    first, need = next(iter(needs.items()))
    assert fastest(alone, Room(need.comfortable, PLENTY, "")) == first
    little = Room(need.comfortable - 1, PLENTY, "")
    slower = fastest(alone, little)
    assert slower != first
    assert answer_of(slower, need_of(slower), little) == FITS
    least = min(need.comfortable for need in needs.values()) - 1  # now nothing is comfortable
    tight = [way for way, need in needs.items() if need.device <= least]
    assert fastest(alone, Room(least, PLENTY, "")) == tight[0]


def test_too_little_host_memory_is_no_tight_fit():
    setting = of_llama(cpu_offload=True)
    need = need_of(setting)
    assert answer_of(setting, need, Room(PLENTY, PLENTY, "")) == FITS
    # that of one of the two ranks
    assert answer_of(setting, need, Room(PLENTY, need.host, "")) == TOO_LARGE


def test_the_plan_says_both_figures_and_the_answer_on_a_gpu_and_on_a_cpu_one():
    setting = of_llama()
    need = need_of(setting)._replace(device=3 * GIB, comfortable=4 * GIB, host=GIB)
    little = Room(3.5 * GIB, PLENTY, "little")
    assert room_sentence(setting, need, little, answer_of(setting, need, little)) == (
        "room      3.00 GiB a rank must be there, 4.00 GiB is comfortable, 2.00 GiB of host; there is little"
        ": fits tightly, the allocator must give blocks back, or the driver move paged moments, in each step"
    )
    on_cpu = room_sentence(replace(setting, gpu=False), need, Room(PLENTY, PLENTY, "much"), FITS)
    assert on_cpu == (
        "room      3.00 GiB a rank, 1.6 x what is alive, since glibc keeps what is freed; there is much"
    )


# --- the allocator of GPU memory


def test_the_allocator_of_gpus_is_left_alone_on_a_cpu(monkeypatch):
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    init_distributed(use_gpu=False)
    stop_distributed()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in os.environ


@pytest.mark.parametrize("own", CUDA_SETTINGS)
def test_expandable_segments_are_set_unless_the_user_has_set_the_allocator(monkeypatch, own):
    for name in CUDA_SETTINGS:
        monkeypatch.setenv(name, "")  # is restored afterwards
        monkeypatch.delenv(name)
    use_expandable_segments()
    assert os.environ.pop("PYTORCH_CUDA_ALLOC_CONF") == "expandable_segments:True"
    monkeypatch.setenv(own, "max_split_size_mb:512")
    use_expandable_segments()
    assert [os.environ.get(name) for name in CUDA_SETTINGS if name != own] == [None, None]
    assert os.environ[own] == "max_split_size_mb:512"


def test_what_the_allocator_reserved_is_compared_with_what_was_called_comfortable(capsys):
    found = compare_reserved(({"plan": GIB, "train": 5 * GIB},), 4 * GIB)
    assert found == {"peak_reserved_bytes": [5 * GIB], "reserved_error": 0.25}
    said = "memory    GiB reserved 5.00 of 4.00 that were called comfortable (+25.0%)"
    assert said in capsys.readouterr().out
    assert compare_reserved(({},), 4 * GIB) == {}  # as on a CPU
