"""Log-probabilities of tokens and their gradients equal those of full logits, which are never made.

python -m pytest tests/test_log_probs.py
"""

import copy
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from ranks import run_ranks
from shards import shard_training
from test_loss import Calls, some_batch
from test_packing import documents
from tiny import in_chunks, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from utils.data.batches import Batch
from utils.data.packing import PackedBatches
from utils.model.attention import wants_flat_packs
from utils.model.log_probs import token_log_probs
from utils.model.lora import adapters_off, add_adapters
from utils.model.loss import add_chunked_loss, settle_chunked_loss
from utils.model.options import Lora
from utils.run.distributed import build_mesh
from utils.run.units import IGNORE

CPU = torch.device("cpu")
V = 1003


def of_full_logits(model, batch, temperature=1.0):
    """What token_log_probs must give, from logits (B, T, V)."""
    logits = model(batch.ids, use_cache=False).logits[:, :-1].float() / temperature
    targets = batch.labels[:, 1:]
    found = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    found = found.masked_fill(targets == IGNORE, 0.0)
    return torch.cat([found.new_zeros(len(found), 1), found], 1)


def factors_of(batch, scale=1.0):
    """A factor for each token, as advantages are: (B, T)."""
    return scale * torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(2))


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def compare(found, expected, tolerance=1e-5):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient - expected[name]).norm() <= tolerance * expected[name].norm(), name


def freeze_head(model):
    model.get_output_embeddings().requires_grad_(False)


def adapt_body(model):
    add_adapters(model, Lora(lora_rank=4, lora_targets="q_proj,down_proj"))
    shake(model)


def adapt_head(model):
    add_adapters(model, Lora(lora_rank=4, lora_targets="q_proj,lm_head"))
    shake(model)


def train_a_copy_of_the_head(model):
    add_adapters(model, Lora(lora_rank=4, lora_targets="q_proj", modules_to_save="lm_head"))
    shake(model)


def shake(model):
    """Let adapters answer otherwise than their base."""
    torch.manual_seed(3)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        torch.nn.init.normal_(parameter, std=0.1)


def add_bias(model):
    torch.manual_seed(4)
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.randn(V))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_tokens", [16, 512])
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", None),
        ("llama", add_bias),
        ("llama", freeze_head),
        ("llama", adapt_body),
        ("llama", adapt_head),
        ("llama", train_a_copy_of_the_head),
        ("qwen2", None),  # a tied head
        ("qwen2", adapt_body),
        ("gemma2", None),  # a soft cap
        ("gemma2", freeze_head),
        ("cohere", None),  # a scale, and a tied head
        ("granite", freeze_head),
    ],
)
def test_values_and_gradients_equal_those_of_full_logits(kind, change, chunk_tokens, temperature):
    reference, batch = tiny_model(kind), some_batch()
    if change:
        change(reference)
    model = in_chunks(copy.deepcopy(reference), chunk_tokens)
    settle_chunked_loss(model, CPU)
    assert model.full_logits == (change is adapt_head)
    expected, factors = of_full_logits(reference, batch, temperature), factors_of(batch)
    (expected * factors).sum().backward()
    found = token_log_probs(model, batch, temperature)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not found[batch.labels == IGNORE].any()
    (found * factors).sum().backward()
    compare(gradients(model), gradients(reference))
    with torch.no_grad():
        assert torch.equal(token_log_probs(model, batch, temperature), found)


def test_a_soft_cap_and_a_scale_stand_before_the_temperature():
    """Of any order that there could be, this one is that of the samplers."""
    model = in_chunks(tiny_model("gemma2"), 16)
    head, cap = model.get_output_embeddings(), model.get_output_embeddings().logits_to_loss
    head.logits_to_loss = lambda logits: cap(logits * 0.5)
    batch = some_batch()
    hidden = model.model(batch.ids, use_cache=False).last_hidden_state[:, :-1]
    logits = cap(hidden @ head.weight.T * 0.5) / 0.3
    right = logits.log_softmax(-1).gather(-1, batch.ids[:, 1:, None])[..., 0]
    trained = batch.labels[:, 1:] != IGNORE
    found = token_log_probs(model, batch, 0.3)[:, 1:]
    torch.testing.assert_close(found[trained], right[trained], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("change", [None, freeze_head])
def test_in_bf16_values_and_gradients_are_as_near_to_fp32_as_those_of_full_logits(change):
    exact, batch = tiny_model("llama", torch.bfloat16).float(), some_batch()
    if change:
        change(exact)
    plain = copy.deepcopy(exact).bfloat16()
    model = in_chunks(copy.deepcopy(plain), 16)
    factors, found = factors_of(batch), []
    for of, log_probs in (
        (exact, of_full_logits(exact, batch)),
        (plain, of_full_logits(plain, batch)),
        (model, token_log_probs(model, batch)),
    ):
        (log_probs * factors).sum().backward()
        flat = torch.cat([g.float().flatten() for g in gradients(of).values()])
        found.append((log_probs.detach(), flat))
    (values, true), (_, theirs), (ours_values, ours) = found
    assert (ours_values - values).abs().max() <= 0.1
    assert (ours - true).norm() <= 1.2 * (theirs - true).norm()


def test_a_router_has_no_loss_of_its_own_here():
    """Though the model trains with one, chunks and full logits give the same gradients, without it."""
    batch, found = some_batch(), []
    for full_logits, coefficient in ((False, 0.5), (True, 0.5), (False, 0.0)):
        model = in_chunks(tiny_model("mixtral", router_aux_loss_coef=coefficient), 16)
        model.full_logits = full_logits
        (token_log_probs(model, batch) * factors_of(batch)).sum().backward()
        found.append(gradients(model))
    compare(found[0], found[1])
    compare(found[0], found[2])


@pytest.mark.parametrize("change", [adapt_body, adapt_head, train_a_copy_of_the_head])
def test_with_adapters_off_they_are_those_of_the_base(change):
    model, batch = tiny_model("llama"), some_batch()
    with torch.no_grad():
        expected = token_log_probs(in_chunks(copy.deepcopy(model), 16), batch)
        change(model)
        settle_chunked_loss(in_chunks(model, 16), CPU)
        assert (token_log_probs(model, batch) - expected).abs().max() > 1e-2
        with adapters_off(model):
            torch.testing.assert_close(token_log_probs(model, batch), expected, rtol=1e-6, atol=0)


def test_with_adapters_off_nothing_is_dropped_and_training_goes_on_with_dropout():
    model, batch = tiny_model("gpt2", resid_pdrop=0.5), some_batch()
    add_adapters(model, Lora(lora_rank=4))
    model = in_chunks(model, 16).eval()
    with torch.no_grad(), adapters_off(model):
        expected = token_log_probs(model, batch)
        assert not model.training
    model.train()
    with torch.no_grad(), adapters_off(model):
        assert torch.equal(token_log_probs(model, batch), expected)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("change", [None, freeze_head])
def test_a_batch_that_trains_nothing_gives_zeros_and_zero_gradients(change, full_logits):
    model, batch = add_chunked_loss(tiny_model("llama")), some_batch()
    model.full_logits = full_logits
    if change:
        change(model)
    batch.labels[:] = IGNORE
    log_probs = token_log_probs(model, batch)
    assert log_probs.shape == batch.ids.shape
    assert not log_probs.any()
    log_probs.sum().backward()
    assert all(g is not None and not g.any() for g in gradients(model).values())


@pytest.mark.parametrize("attn", ["sdpa", "varlen"])
def test_documents_of_a_pack_have_the_log_probs_that_they_have_alone(attn):
    examples = documents([13, 5, 21, 8, 30, 3], vocab=V)
    model, alone, seen = in_chunks(tiny_model("llama"), 16), {}, []
    for example in examples:
        ids, labels = example.ids.long()[None], example.labels.long()[None]
        batch = Batch(ids, labels, torch.ones_like(ids, dtype=torch.bool), [])
        alone[ids[0, 0].item(), ids.numel()] = token_log_probs(model, batch)[0]
    model.set_attn_implementation(attn)
    loader = PackedBatches(examples, 0, 2, 2, 0, 1, 0, 64)
    loader.flat = wants_flat_packs(model)
    for step in range(loader.per_epoch):
        for batch in loader.batches(step):
            found, ids = token_log_probs(model, batch.to(CPU)).flatten(), batch.ids.flatten()
            begins = (batch.positions.flatten() == 0).nonzero().flatten().tolist() + [len(ids)]
            for begin, end in pairwise(begins):
                expected = alone.get((ids[begin].item(), end - begin))
                if expected is not None:  # else padding
                    torch.testing.assert_close(found[begin:end], expected, rtol=1e-5, atol=1e-5)
                    seen.append(begin)
    assert len(seen) == len(examples)


class Logits(TorchDispatchMode):
    """The most rows of a tensor (rows, V) that is no weight."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        output = function(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else [output]:
            if isinstance(tensor, torch.Tensor) and tensor.ndim >= 2 and tensor.shape[-1] == V:
                rows = tensor.numel() // V
                self.most = max(self.most, 0 if rows == 64 else rows)  # 64: the weight, transposed
        return output


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("change", [None, freeze_head])
def test_no_tensor_of_the_size_of_the_logits_is_ever_made(change, temperature):
    model, batch = in_chunks(tiny_model("gemma2"), 8), some_batch()
    if change:
        change(model)
    with Logits() as made:
        (token_log_probs(model, batch, temperature) * factors_of(batch)).sum().backward()
    assert made.most == 8


def kept_bytes(model, batch):
    """Bytes of the tensors that the head keeps for the backward, but for the weight."""
    kept = {}
    weight = model.get_output_embeddings().weight

    def pack(tensor):
        if inside and tensor is not weight and tensor.data_ptr() != weight.data_ptr():
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    inside = []
    head = model.get_output_embeddings()
    hooks = [
        head.register_forward_pre_hook(lambda *_: inside.append(True)),
        head.register_forward_hook(lambda *_: inside.clear()),
    ]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        token_log_probs(model, batch)
    for hook in hooks:
        hook.remove()
    return sum(kept.values())


def test_the_head_keeps_a_row_of_hidden_size_for_each_trained_token():
    batch = some_batch()
    n = int((batch.labels != IGNORE).sum())
    model = in_chunks(tiny_model("llama"), 8)
    assert kept_bytes(model, batch) == n * 64 * 4 + n * 8  # hidden states, targets
    freeze_head(model)
    assert kept_bytes(model, batch) == n * 64 * 4  # gradients by them


def sharded_step(world, kind, change, ranks_share, temperature, dtype=torch.float32):
    """(log-probs of this rank's rows, reduced gradients, all-gathers, reduce-scatters, of one backward)"""
    model = tiny_model(kind)
    if change:
        change(model)
    in_chunks(model, 8)
    if ranks_share:
        shard_training(model, build_mesh(world), dtype)
    settle_chunked_loss(model, CPU)
    whole = some_batch(4)
    rows = slice(world.rank, None, world.size) if ranks_share else slice(None)
    batch = replace(whole, **{n: getattr(whole, n)[rows] for n in ("ids", "labels", "mask")})
    with Calls() as calls:
        log_probs = token_log_probs(model, batch, temperature)
        # FSDP gives the mean over the ranks
        (log_probs * factors_of(whole)[rows]).sum().mul(len(whole.ids) / len(batch.ids)).backward()
    counts = [
        sum(name in op for op in calls.names)
        for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
    ]
    full = {}
    for name, gradient in gradients(model).items():
        full[name] = gradient.full_tensor() if ranks_share else gradient
    return log_probs.detach(), full, counts


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", None),
        ("llama", freeze_head),
        ("qwen2", None),
        ("gemma2", None),
        ("llama", adapt_body),
        ("llama", adapt_head),
        ("llama", train_a_copy_of_the_head),
        ("mixtral", None),
    ],
)
def test_two_ranks_match_one(kind, change):
    ((expected, gradient, _),) = run_ranks(sharded_step, 1, kind, change, False, 0.7)
    for rank, (found, ours, _) in enumerate(run_ranks(sharded_step, 2, kind, change, True, 0.7)):
        torch.testing.assert_close(found, expected[rank::2], rtol=1e-6, atol=1e-6)
        compare(ours, gradient)


@pytest.mark.parametrize("change", [None, freeze_head, adapt_body])
def test_two_ranks_that_compute_in_bf16_are_as_near_as_its_rounding(change):
    ((expected, gradient, _),) = run_ranks(sharded_step, 1, "llama", change, False, 0.7)
    found = run_ranks(sharded_step, 2, "llama", change, True, 0.7, torch.bfloat16)
    for rank, (log_probs, ours, _) in enumerate(found):
        assert log_probs.dtype == torch.float32
        assert (log_probs - expected[rank::2]).abs().max() <= 0.2
        assert {g.dtype for g in ours.values()} == {torch.float32}
        compare(ours, gradient, 0.1)


@pytest.mark.parametrize("change", [None, freeze_head])
@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_chunks_cost_no_extra_gather_and_no_extra_reduction(kind, change):
    _, _, (gathers, reductions) = run_ranks(sharded_step, 2, kind, change, True, 1.0)[0]
    layers, others = 3, 2 if kind == "qwen2" else 3  # the embedding, the head, the root
    assert gathers == 2 * layers - 1 + others
    assert reductions == layers + others - bool(change)  # what is frozen has none
