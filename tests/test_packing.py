"""Packing: nothing lost, few slots empty, and no document sees another.

python -m pytest tests/test_packing.py
"""

import bisect
import itertools
import json
import re
from itertools import chain

import finetune
import preview
import pytest
import torch
import torch.nn.functional as F
from families import TYPES, VOCABULARY, family_config, family_model
from ranks import run_ranks
from shards import shard_training
from test_data import examples_of
from test_parity import write_rows
from tiny import KINDS, tiny_model, tiny_model_folder
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AttentionInterface, AutoConfig

from utils.data.batches import GlobalBatches, deal
from utils.data.encode import Part
from utils.data.packing import PackedBatches, pack
from utils.model.attention import check_packing, settle_attention, wants_flat_packs
from utils.model.folder import NOT_CAUSAL, open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import base_names
from utils.model.loss import (
    add_chunked_loss,
    arguments,
    settle_chunked_loss,
    summed_cross_entropy,
)
from utils.model.options import Quant
from utils.model.quantize import quantize_linears
from utils.model.sharding import recompute_activations
from utils.run.distributed import ALONE, build_mesh
from utils.run.errors import ConfigError
from utils.train.rollout import Sampling, generate

CPU = torch.device("cpu")
LONG = 38  # tokens that half of the rows exceed


def lognormal(mean: float, count: int = 20000, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    lengths = torch.distributions.LogNormal(0.0, 0.8).sample((count,))
    return (lengths / lengths.mean() * mean).long().clamp(1, 4096)


def documents(lengths: list[int], vocab: int = 256, seed: int = 0):
    """Examples of random tokens; the first third of each is not trained."""
    part, generator = Part(), torch.Generator().manual_seed(seed)
    for i, length in enumerate(lengths):
        ids = torch.randint(1, vocab, (length,), generator=generator).tolist()
        part.add(ids, bytes(j >= length // 3 for j in range(length)), f"f:{i}")
    return examples_of(part)


def best_fit(lengths: list[int], size: int) -> int:
    """Packs that best-fit-decreasing needs, one document at a time."""
    rooms, packs = [], 0
    for length in sorted(lengths, reverse=True):
        at = bisect.bisect_left(rooms, length)
        room = rooms.pop(at) if at < len(rooms) else size
        packs += room == size
        bisect.insort(rooms, room - length)
    return packs


@pytest.mark.parametrize(
    ("longest", "size"), [(8, 16), (16, 16), (99, 128), (1000, 1500), (4096, 4096)]
)
def test_packs_are_those_of_best_fit_decreasing_and_hold_every_document_once(longest, size):
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest + 1, (1 + 700 * seed,), generator=generator)
        packs = pack(lengths, size)
        assert sorted(chain.from_iterable(packs)) == list(range(len(lengths)))
        assert max(int(lengths[p].sum()) for p in packs) <= size
        assert len(packs) == best_fit(lengths.tolist(), size)


@pytest.mark.parametrize(("mean", "short"), [(300, 0.003), (1000, 0.003), (2000, 0.01)])
def test_few_slots_are_left_empty(mean, short):
    lengths = lognormal(mean)
    least = -(-int(lengths.sum()) // 4096)
    assert int(lengths.sum()) / (len(pack(lengths, 4096)) * 4096) >= (1 - short) * least / (
        least + 1
    )


def test_an_epoch_teaches_every_document_once_and_the_next_packs_them_otherwise():
    examples = documents([3 + (7 * i) % 40 for i in range(200)])
    loaders = [PackedBatches(examples, 0, 8, 2, rank, 2, 0, 64) for rank in range(2)]
    seen = []
    for epoch in range(2):
        batches = [
            loader.batches(epoch * loader.per_epoch + k)
            for loader in loaders
            for k in range(loader.per_epoch)
        ]
        where = [where for step in batches for batch in step for where in batch.where]
        assert sorted(w for w in where if w != "filler") == sorted(f"f:{i}" for i in range(200))
        assert sum(
            int(batch.mask.sum())
            for step in batches
            for batch in step
            if "filler" not in batch.where
        ) == int(examples.lengths.sum())
        seen.append(where)
    assert seen[0] != seen[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_global_batches_do_not_depend_on_ranks(ranks):
    examples = documents([3 + (7 * i) % 40 for i in range(200)])
    one = PackedBatches(examples, 0, 8, 8, 0, 1, 0, 64)
    for step in range(one.per_epoch):
        dealt = [
            PackedBatches(examples, 0, 8, 2, rank, ranks, 0, 64).batches(step)
            for rank in range(ranks)
        ]
        assert len({len(batches) for batches in dealt}) == 1
        got = sorted(
            w for batches in dealt for batch in batches for w in batch.where if w != "filler"
        )
        assert got == sorted(one.batches(step)[0].where)


@pytest.mark.parametrize(("mean", "packs"), [(1000, 8), (2000, 8), (300, 16)])
def test_ranks_work_alike_in_tokens_and_in_attention(mean, packs):
    examples, ranks = documents([1]), 8
    lengths = lognormal(mean)
    found = pack(lengths, 4096)
    shuffled = torch.randperm(len(found), generator=torch.Generator().manual_seed(1)).tolist()
    rows = [lengths[found[i]] for i in shuffled]
    assert len(examples) == 1
    for power in (1, 2):
        ratios = []
        for start in range(0, len(rows) - ranks * packs, ranks * packs):
            step = rows[start : start + ranks * packs]
            costs = torch.stack([row.square().sum() for row in step])
            shares = deal(costs, ranks)
            assert sorted(chain.from_iterable(shares)) == list(range(len(step)))
            hands = [[step[i] for i in share] for share in shares]
            assert {len(hand) for hand in hands} == {packs}
            loads = [sum(float((row.double() ** power).sum()) for row in hand) for hand in hands]
            ratios.append(max(loads) * ranks / sum(loads))
        assert sum(ratios) / len(ratios) <= 1.02, power


# transformers refuses it: test_attention_that_its_class_cannot_is_refused
WITHOUT_SDPA = ("gemma2",)
ATTENTION = [(family, "eager") for family in KINDS]
ATTENTION += [(family, "sdpa") for family in KINDS if family not in WITHOUT_SDPA]


@pytest.mark.parametrize(("family", "attn"), ATTENTION)
def test_packed_rows_have_the_logits_and_the_loss_of_the_documents_alone(family, attn):
    torch.manual_seed(0)
    model = add_chunked_loss(tiny_model(family)).eval()
    model.set_attn_implementation(attn)
    assert model.config._attn_implementation == attn
    examples = documents(
        [13, 5, 21, 8, 30, 3, 17, 9], vocab=model.config.get_text_config().vocab_size
    )
    loader = PackedBatches(examples, 0, 2, 2, 0, 1, 0, 64)
    loader.flat = False
    (batch,) = loader.batches(0)
    assert batch.ids.shape[0] == 2
    with torch.no_grad():
        packed = model(batch.ids, use_cache=False, position_ids=batch.positions).logits
        for row in range(2):
            begins = (batch.positions[row] == 0).nonzero()[:, 0].tolist()
            for begin, end in zip(begins, [*begins[1:], None], strict=True):
                alone = model(batch.ids[row : row + 1, begin:end], use_cache=False).logits[0]
                assert (packed[row, begin:end] - alone).abs().max() <= 1e-5 * max(
                    1, alone.abs().max()
                )
        total = sum(
            summed_cross_entropy(model, b)
            for b in GlobalBatches(examples, 0, 8, 1, 0, 1, 0).batches(0)
        )
        if not getattr(
            model.config, "output_router_logits", False
        ):  # statistics of a batch, not of documents
            assert summed_cross_entropy(model, batch).item() == pytest.approx(
                total.item(), rel=1e-5
            )


REFUSED = sum(NOT_CAUSAL.values(), [])
WITHOUT_TIMM = [name for name in TYPES if name not in REFUSED and name != "gemma3n"]


def test_the_attention_of_packs_is_one_with_which_the_model_can_be_built():
    """The plan builds it so, before the run."""
    for model_type in WITHOUT_TIMM:
        config = family_config(model_type)
        model = build_model(config, torch.float32)
        settled = settle_attention(model, "auto", CPU, torch.float32)
        if settled != "auto":  # with which it has been built
            build_model(config, torch.float32, settled)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WITHOUT_TIMM)
def test_attention_without_masks_has_the_logits_of_the_documents_alone(model_type):
    """In each family that takes it and is not refused, with windows of 8 tokens, packed and unpacked."""
    model, alone = family_model(model_type), family_model(model_type)
    if settle_attention(model, "auto", CPU, torch.float32) != "varlen":
        return
    add_chunked_loss(model)
    settle_chunked_loss(model, CPU)
    try:
        check_packing(model, CPU)
    except ConfigError:  # layers with a state
        return
    examples = documents([13, 5, 21, 8, 30, 3, 17, 9, 13, 5], vocab=VOCABULARY)
    loader = PackedBatches(examples, 0, 2, 2, 0, 1, 0, 64)
    loader.flat = True
    (batch,) = loader.batches(0)
    options = {"cu_seq_lens_q": batch.begins, "cu_seq_lens_k": batch.begins, "use_cache": False}
    options |= {"max_length_q": batch.longest, "max_length_k": batch.longest}
    with torch.no_grad():
        packed = model.eval()(batch.ids, position_ids=batch.positions, **options).logits[0]
        pairs = [(packed[at:end], at, end) for at, end in itertools.pairwise(batch.begins.tolist())]
        pairs.append((model(batch.ids[:, :24], use_cache=False).logits[0], 0, 24))
        for ours, begin, end in pairs:
            theirs = alone(batch.ids[:, begin:end], use_cache=False).logits[0]
            assert (ours - theirs).abs().max() <= 1e-5 * max(1, theirs.abs().max())


@pytest.mark.parametrize(
    ("family", "attn"), [("llama", "sdpa"), ("mistral", "sdpa"), ("gemma3_text", "eager")]
)
def test_attention_without_masks_has_the_loss_and_gradients_of_masked_packs(family, attn):
    """Also where documents are equally long, and where one is longer than the window of 8 tokens."""
    found = []
    examples = documents([13, 5, 21, 8, 30, 3, 17, 9, 13, 5], vocab=VOCABULARY)
    for chosen in (attn, "varlen"):
        model = add_chunked_loss(family_model(family)).train()
        model.set_attn_implementation(chosen)
        recompute_activations(model, "selective" if chosen == "varlen" else "none")
        loader = PackedBatches(examples, 0, 2, 2, 0, 1, 0, 64)
        loader.flat = wants_flat_packs(model)
        (batch,) = loader.batches(0)
        loss = summed_cross_entropy(model, batch.to(CPU))
        loss.backward()
        found.append((loss.item(), [p.grad for p in model.parameters()]))
    (one, ones), (other, others) = found
    assert one == pytest.approx(other, rel=1e-6)
    for gradient, expected in zip(others, ones, strict=True):
        assert (gradient - expected).norm() <= 1e-5 * max(1, expected.norm())


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa", "mimo_v2_flash"])
def test_sinks_have_the_loss_and_gradients_of_eager_attention_on_the_documents_alone(family):
    """A mask does not keep packed documents apart in gpt-oss, whose layers have windows of 8 tokens."""
    packed, alone = (family_model(family).train() for _ in range(2))
    for model in (packed, alone):
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(parameter)
    loader = PackedBatches(
        documents([13, 5, 21, 8, 30, 3, 17, 9], vocab=VOCABULARY), 0, 2, 2, 0, 1, 0, 64
    )
    loader.flat = True
    (batch,) = loader.batches(0)
    packed.set_attn_implementation("varlen")
    loss = summed_cross_entropy(add_chunked_loss(packed), batch.to(CPU))
    alone.set_attn_implementation("eager")
    expected = 0
    for begin, end in itertools.pairwise(batch.begins.tolist()):
        logits = alone(batch.ids[:, begin:end], use_cache=False).logits[0, :-1]
        targets = batch.labels[0, begin + 1 : end]
        expected += F.cross_entropy(logits.float(), targets, reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for ours, theirs in zip(packed.parameters(), alone.parameters(), strict=True):
        difference = (ours.grad - theirs.grad).norm()
        assert difference <= 1e-5 * max(1, theirs.grad.norm())


def test_a_run_without_packs_trains_gpt_oss_without_all_probabilities(tmp_path, capsys):
    """transformers has only eager for its sinks; rows here are of different lengths, and padded."""
    folder = tiny_model_folder(tmp_path / "model", "gpt_oss", vocab_size=271)
    rows = write_rows(tmp_path / "rows.jsonl", 6)
    found = {}
    for asked, taken in [("auto", "sinks"), ("varlen", "varlen"), ("eager", "eager")]:
        flags = {"model": str(folder), "dataset": str(rows), "output_dir": str(tmp_path / asked)}
        cfg = finetune.Config(**flags, attn=asked, batch_size=3, steps=2, save_every=0)
        out = finetune.main(cfg)
        assert f"attention {taken}\n" in capsys.readouterr().out
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        found[asked] = [(step["loss"], step["grad_norm"]) for step in steps]
    for steps in zip(found["auto"], found["varlen"], found["eager"], strict=True):
        for ours in steps[:2]:
            assert ours == pytest.approx(steps[2], rel=1e-5)


@pytest.mark.parametrize("family", ["gpt_oss", "granite_swa", "mimo_v2_flash"])
def test_completions_of_models_with_sinks_are_those_of_eager_attention(family):
    """Of padded prompts longer and shorter than the window of 8 tokens, and of equally long ones."""
    chosen = build_model(family_config(family), torch.float32).config._attn_implementation
    sampling = Sampling(12, 1.0, frozenset({5}), pad_id=0, batch_size=4)
    found = []
    for attn in ("eager", chosen):
        model = family_model(family)
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                nn.init.normal_(parameter)
        model.set_attn_implementation(attn)
        drawn = []
        for lengths in ((3, 20, 11, 7), (12, 12)):
            prompts = [list(range(1, 1 + length)) for length in lengths]
            keys = [(number,) for number in range(len(lengths))]
            drawn += generate(model, prompts, keys, sampling, ALONE).values()
        found.append(drawn)
    assert chosen == "sinks"
    for eager, ours in zip(*found, strict=True):
        assert ours.ids == eager.ids
        assert ours.log_probs == pytest.approx(eager.log_probs, abs=1e-5)


def test_layers_with_a_state_get_the_number_of_the_document_of_each_token():
    """As the kernels of causal-conv1d want it: (1, T) int32, padding included."""
    loader = PackedBatches(documents([13, 5, 21, 8, 30, 3, 17, 9]), 0, 2, 2, 0, 1, 0, 64)
    loader.flat = True
    (batch,) = loader.batches(0)
    numbers = arguments(batch)["seq_idx"]
    assert (numbers.dtype, numbers.shape) == (torch.int32, batch.ids.shape)
    for number, (begin, end) in enumerate(itertools.pairwise(batch.begins.tolist())):
        assert set(numbers[0, begin:end].tolist()) == {number}


def test_a_family_whose_attention_has_dropout_keeps_sdpa():
    model = family_model("gpt2")
    model.config.attn_pdrop = 0.1
    assert settle_attention(model, "auto", CPU, torch.float32) == "auto"


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("gemma2", "has no attn_logit_softcapping, as gemma2 wants it"),
        ("phimoe", "is not known to be right for phimoe"),
    ],
)
def test_a_family_that_needs_masks_keeps_them_and_is_refused_where_it_shall_not(model_type, why):
    model = family_model(model_type)
    before = model.config._attn_implementation
    assert settle_attention(model, "auto", CPU, torch.float32) == "auto"
    assert model.config._attn_implementation == before
    said = re.escape(f"--attn varlen {why} (fix: leave out --attn)")
    with pytest.raises(ConfigError, match=said):
        settle_attention(model, "varlen", CPU, torch.float32)


def test_one_flat_row_is_the_same_batch():
    model = add_chunked_loss(tiny_model("llama")).eval()
    loader = PackedBatches(documents([13, 5, 21, 8, 30, 3, 17, 9]), 0, 2, 2, 0, 1, 0, 64)
    losses = []
    for loader.flat in (False, True):
        (batch,) = loader.batches(0)
        losses.append(summed_cross_entropy(model, batch).item())
    assert batch.ids.shape[0] == 1
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


DTYPES = [torch.float32, torch.bfloat16]
LEAVE_OUT = "documents see each other (fix: leave out --packing)"


def family_with_loss(model_type: str, dtype: torch.dtype, seed: int = 0, **changes):
    """A tiny model of a family as a recipe has it when it checks packing."""
    config = family_config(model_type)
    for name, value in changes.items():
        setattr(config, name, value)
    model = add_chunked_loss(family_model(model_type, seed, config).to(dtype))
    settle_chunked_loss(model, CPU)
    return model


MANY_EXPERTS = {"num_local_experts": 64, "num_hidden_layers": 10}


# Some routers of the last two choose otherwise in bf16 where a document stands alone.
@pytest.mark.parametrize(
    ("model_type", "changes", "dtype"),
    [
        *((name, {}, dtype) for name in ("llama", "qwen3", "mixtral") for dtype in DTYPES),
        ("mixtral", MANY_EXPERTS, torch.bfloat16),
        pytest.param("mixtral", MANY_EXPERTS, torch.float32, marks=pytest.mark.slow),
        *(
            pytest.param(name, {}, dtype, marks=pytest.mark.slow)
            for name in ("gemma3_text", "axk2", "qwen3_moe", "phimoe")
            for dtype in DTYPES
        ),
    ],
)
def test_a_model_that_keeps_documents_apart_is_not_refused(model_type, changes, dtype):
    for seed in range(8):
        model = family_with_loss(model_type, dtype, seed, **changes)
        check_packing(model, CPU)
    assert model.training


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("falcon_h1", {}),  # a state that goes on: the logits move by 2 %
        ("lfm2", {}),  # a convolution over the last tokens
        ("minimax_m3_vl_text", {"index_block_size": 128, "max_position_embeddings": 512}),
        ("deepseek_v4", {}),  # compressed keys
        ("gpt_oss", {}),  # its mask is made without positions
    ],
)
def test_a_family_in_which_documents_see_each_other_is_refused(model_type, changes, dtype):
    for seed in range(3):
        model = family_with_loss(model_type, dtype, seed, **changes)
        with pytest.raises(ConfigError, match=re.escape(LEAVE_OUT)):
            check_packing(model, CPU)


def test_outlier_columns_that_documents_share_are_no_leak(tmp_path):
    plain = family_model("qwen3_moe")
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            parameter.data *= 2.2  # activations above LLM.int8()'s threshold
    plain.save_pretrained(tmp_path)
    model = build_model(AutoConfig.from_pretrained(tmp_path), torch.float32).requires_grad_(False)
    pieces = plan_pieces(model, open_weights(tmp_path), tmp_path)
    quantize_linears(model, Quant("8bit", "llm_int8"), torch.float32)
    load_pieces(model, pieces, CPU, names=base_names(model))
    add_chunked_loss(model)
    check_packing(model, CPU)
    ids = torch.randint(3, 200, (3, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (model(ids[rows], use_cache=False).logits[0] for rows in ([0, 1], [0, 2]))
    assert (first - second).abs().max() > 1e-2 * first.abs().max()


def attend_in_one_row(module, query, key, value, mask, scaling, position_ids, **kwargs):
    """Attention as flash attention's: in one row it finds the documents by their positions."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    causal = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril()
    assert len(query) == 1
    document = (position_ids[0] == 0).cumsum(0)
    causal &= document[:, None] == document
    output = F.scaled_dot_product_attention(query, key, value, causal, scale=scaling)
    return output.transpose(1, 2), None


def attend_without_positions(module, *tensors, position_ids, **options):
    """The same in a family that does not hand on the positions."""
    return attend_in_one_row(
        module, *tensors, position_ids=torch.arange(tensors[0].shape[2])[None], **options
    )


def test_flash_attention_is_checked_in_one_row_as_in_training_and_sdpa_is_the_remedy():
    AttentionInterface.register("one_row_flash", attend_in_one_row)
    AttentionInterface.register("blind_flash", attend_without_positions)
    model = family_with_loss("llama", torch.float32)
    model.config._attn_implementation = "one_row_flash"
    assert wants_flat_packs(model)
    check_packing(model, CPU)
    model.config._attn_implementation = "blind_flash"
    remedy = "with blind_flash attention documents see each other (fix: --attn sdpa, or leave"
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        check_packing(model, CPU)
    model.set_attn_implementation("sdpa")
    check_packing(model, CPU)


def test_a_run_with_sdpa_is_not_told_to_use_it():
    model = family_with_loss("llama", torch.float32)
    inner = model.model.forward

    # as a model does that knows nothing of positions
    def leaky(input_ids, position_ids=None, **kwargs):
        return inner(input_ids, **kwargs)

    model.model.forward = leaky
    with pytest.raises(ConfigError) as error:
        check_packing(model, CPU)
    assert str(error.value) == f"--packing: in LlamaModel with sdpa attention {LEAVE_OUT}"


def check_sharded(world, model_type: str) -> tuple[str, bool]:
    """(what check_packing says on this rank, whether the parameters are shards after it)"""
    model = shard_training(family_model(model_type), build_mesh(world), torch.bfloat16)
    add_chunked_loss(model)
    said = ""
    try:
        check_packing(model, world.device)
    except ConfigError as error:
        said = str(error)
    return said, all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize(("model_type", "said"), [("qwen3_moe", ""), ("lfm2", LEAVE_OUT)])
def test_all_ranks_say_the_same_of_a_sharded_model(model_type, said):
    for heard, sharded in run_ranks(check_sharded, 2, model_type):
        assert heard.endswith(said)
        assert bool(heard) == bool(said)
        assert sharded


def test_a_packed_run_has_the_losses_of_the_unpacked_one_and_resumes(tmp_path):
    """Those of held-out rows too, which are packed as well."""
    folder = tiny_model_folder(tmp_path / "model", vocab_size=271)
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    settings = {
        "model": str(folder),
        "dataset": str(rows),
        "save_every": 1,
        "lr": 1e-3,
        "save_model": False,
        "eval_dataset": str(write_rows(tmp_path / "held_out.jsonl", 9)),
        "eval_every": 1,
    }

    def losses(name, **flags):
        out = finetune.main(finetune.Config(output_dir=str(tmp_path / name), **settings | flags))
        lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        return [line.get("loss") or line["eval_loss"] for line in lines]

    plain = losses("plain", steps=1, global_batch_size=12, batch_size=12)
    packed = losses("packed", steps=3, batch_size=16, packing=True, seq_len=128)
    # One step holds all rows either way.
    assert packed[:2] == pytest.approx(plain, rel=1e-5)
    second = str(tmp_path / "packed" / "checkpoints" / "step_00000002")
    again = {"steps": 3, "batch_size": 16, "seq_len": 128, "resume": second}
    assert losses("again", packing=True, **again) == packed[4:]
    with pytest.raises(ConfigError, match="packing"):
        losses("other", **again)


@pytest.mark.parametrize(
    ("too_long", "said"),
    [("truncate", "cut at --seq_len"), ("drop", "dropped: longer than --seq_len")],
)
def test_what_becomes_of_longer_rows_is_counted(tmp_path, capsys, too_long, said):
    folder = tiny_model_folder(tmp_path / "model", vocab_size=271)
    rows = write_rows(tmp_path / "rows.jsonl", 12)
    flags = {"model": str(folder), "dataset": str(rows), "show": 0, "seq_len": LONG}
    preview.main(preview.Config(too_long=too_long, packing=True, **flags))
    assert said in capsys.readouterr().out
    with pytest.raises(
        ConfigError,
        match=rf"rows.jsonl:\d+: \d+ tokens, more than --seq_len {LONG} \(fix: --too_long",
    ):
        preview.main(preview.Config(too_long="error", **flags))
