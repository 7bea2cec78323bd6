"""The chunked loss equals the model's own, holds no full logits, and costs one gather and one reduction of
the head.

python -m pytest tests/test_loss.py
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from shards import shard_training
from tiny import in_chunks, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from utils.data.batches import Batch
from utils.model.log_probs import token_log_probs
from utils.model.loss import add_chunked_loss, settle_chunked_loss, summed_cross_entropy
from utils.run.distributed import build_mesh
from utils.run.units import IGNORE

CPU = torch.device("cpu")
ALL_KINDS = ["llama", "qwen2", "gemma2", "cohere", "granite", "mixtral", "qwen3_moe"]


def some_batch(rows: int = 3, vocabulary: int = 1003):
    """Rows whose prompt is not trained, one of them padded."""
    ids = torch.randint(0, vocabulary, (rows, 24), generator=torch.Generator().manual_seed(1))
    labels, mask = ids.clone(), torch.ones_like(ids, dtype=torch.bool)
    labels[:, :5] = IGNORE
    labels[-1, 15:], mask[-1, 15:] = IGNORE, False
    return Batch(ids, labels, mask, [])


def own_loss_and_gradients(model, batch, times=1):
    """What transformers' forward(labels=...) gives: the mean over the trained tokens, and gradients `times`
    those of it.
    """
    mask = batch.mask if getattr(model.config, "output_router_logits", False) else None
    loss = model(batch.ids, labels=batch.labels, attention_mask=mask, use_cache=False).loss
    (loss * times).backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_loss_and_gradients_equal_the_models_own(kind, dtype):
    reference, batch = tiny_model(kind, dtype), some_batch()
    model = in_chunks(copy.deepcopy(reference), 16)
    settle_chunked_loss(model, CPU)
    assert not model.full_logits
    model.train()  # only then the router's loss is part of it
    exact, trained = dtype == torch.float32, (batch.labels[:, 1:] != IGNORE).sum()
    # of the sum: the mean's factor rounds bf16 gradients once more, elsewhere
    times = 1 if exact else trained
    expected, gradients = own_loss_and_gradients(reference, batch, times)
    loss = summed_cross_entropy(model, batch) / trained
    (loss * times).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6 if exact else 1e-4, atol=0)
    for ours, theirs in zip((p.grad for p in model.parameters()), gradients, strict=True):
        assert (ours - theirs).norm() <= (2e-6 if exact else 1e-2) * theirs.norm()


def smoothed(logits, targets):
    """Cross-entropy with label smoothing, (c, V) and (c,) -> (c,)."""
    return F.cross_entropy(logits, targets, label_smoothing=0.1, reduction="none")


@pytest.mark.parametrize("full_logits", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_another_loss_per_token_is_differentiated_within_the_chunks(kind, full_logits):
    reference, batch = tiny_model(kind), some_batch()
    model = in_chunks(copy.deepcopy(reference), 16)
    model.full_logits = full_logits
    logits, targets = reference(batch.ids).logits[:, :-1], batch.labels[:, 1:]
    expected = smoothed(logits[targets != IGNORE], targets[targets != IGNORE]).sum()
    expected.backward()
    loss = summed_cross_entropy(model, batch, smoothed)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 2e-6 * theirs.grad.norm()
    with torch.no_grad():
        torch.testing.assert_close(summed_cross_entropy(model, batch, smoothed), expected.detach())


@pytest.mark.parametrize("of_each_token", [False, True])
def test_a_gradient_of_gradients_is_refused_and_not_wrong(of_each_token):
    model, batch = in_chunks(tiny_model("llama"), 16), some_batch()
    loss = (
        -token_log_probs(model, batch).sum()
        if of_each_token
        else summed_cross_entropy(model, batch)
    )
    weight = model.model.layers[0].mlp.up_proj.weight
    with pytest.raises(AssertionError, match="have no graph"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generate_of_transformers_answers_as_without_the_chunked_loss(kind):
    model = tiny_model(kind).eval()
    ids = torch.tensor([[0, 0, 0, 7, 8, 9], [5, 6, 7, 8, 9, 10]])
    given = {"attention_mask": ids != 0, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **given)
    assert torch.equal(add_chunked_loss(model).generate(ids, **given), expected)


def test_the_routers_loss_is_part_of_it():
    batch, losses = some_batch(), []
    for coefficient in (0.0, 0.5):
        model = add_chunked_loss(tiny_model("mixtral", router_aux_loss_coef=coefficient))
        losses.append(summed_cross_entropy(model, batch).item())
    assert losses[1] > losses[0] + 1


def test_an_evaluation_leaves_the_routers_loss_out():
    losses = []
    for coefficient in (0.0, 0.5):
        model = add_chunked_loss(tiny_model("mixtral", router_aux_loss_coef=coefficient)).eval()
        losses.append(summed_cross_entropy(model, some_batch()).item())
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "gemma2"])
def test_full_logits_give_the_same_loss_and_gradients_router_included(kind):
    chunked, full = (
        in_chunks(tiny_model(kind), 16),
        add_chunked_loss(tiny_model(kind)),
    )
    full.full_logits = True
    losses = [summed_cross_entropy(model, some_batch()) for model in (chunked, full)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for ours, theirs in zip(chunked.parameters(), full.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 2e-6 * theirs.grad.norm()


class OwnConfig(PretrainedConfig):
    model_type = "own"


class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    """Its backbone has no name that transformers' classes use."""

    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.table, self.lm_head = torch.nn.Embedding(1003, 16), torch.nn.Linear(16, 1003)

    def get_input_embeddings(self):
        return self.table

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids, attention_mask=None, **_):
        return CausalLMOutput(logits=self.lm_head(self.table(input_ids)))


def test_a_class_of_the_users_own_without_a_known_backbone_has_full_logits(capsys):
    model, batch = OwnForCausalLM(OwnConfig(vocab_size=1003)), some_batch()
    logits = model(batch.ids).logits
    add_chunked_loss(model)
    settle_chunked_loss(model, CPU)
    assert "or no backbone by a known name" in capsys.readouterr().out
    loss = summed_cross_entropy(model, batch)
    shifted = logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten()
    expected = F.cross_entropy(*shifted, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(loss, expected)


def test_an_unknown_transform_falls_back_to_full_logits_and_says_the_price(capsys):
    reference, batch = tiny_model("gemma2"), some_batch()
    model = copy.deepcopy(reference)
    type_of_config = type(model.config)
    model.config.final_logit_softcapping = None  # what the check would look for ...

    class Capped(type(model)):  # ... while the model does it by itself
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = torch.tanh(output.logits / 2.0) * 2.0
            return output

    model.__class__ = Capped
    add_chunked_loss(model)
    settle_chunked_loss(model, CPU)
    warning = capsys.readouterr().out
    assert "full logits are used" in warning
    assert "GiB" in warning
    expected, gradients = own_loss_and_gradients(reference, batch)
    loss = summed_cross_entropy(model, batch) / (batch.labels[:, 1:] != IGNORE).sum()
    loss.backward()
    torch.testing.assert_close(loss, expected)
    for ours, theirs in zip((p.grad for p in model.parameters()), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert type_of_config is type(model.config)


def test_a_parameter_of_the_models_own_forward_is_trained_though_it_begins_at_zero(capsys):
    reference, batch = tiny_model("llama"), some_batch()

    class Shifted(type(reference)):
        def forward(self, *args, labels=None, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits + self.shift
            if labels is not None:
                output.loss = self.loss_function(output.logits, labels, self.config.vocab_size)
            return output

    reference.__class__ = Shifted
    reference.shift = torch.nn.Parameter(torch.zeros(reference.config.vocab_size))
    model = add_chunked_loss(copy.deepcopy(reference))
    settle_chunked_loss(model, CPU)
    assert "a parameter beside backbone and head" in capsys.readouterr().out
    own_loss_and_gradients(reference, batch)
    (summed_cross_entropy(model, batch) / (batch.labels[:, 1:] != IGNORE).sum()).backward()
    assert model.shift.grad.any()
    torch.testing.assert_close(model.shift.grad, reference.shift.grad)


def test_dropout_is_no_change_of_the_logits():
    model = add_chunked_loss(tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train())
    settle_chunked_loss(model, CPU)
    assert not model.full_logits


def test_a_batch_that_teaches_nothing_has_zero_loss_and_zero_gradients():
    model, batch = add_chunked_loss(tiny_model("llama")), some_batch()
    batch.labels[:] = IGNORE
    loss = summed_cross_entropy(model, batch)
    loss.backward()
    assert loss == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_no_tensor_of_the_size_of_the_logits_is_ever_made():
    model, batch = in_chunks(tiny_model("llama"), 8), some_batch()
    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            output = function(*args, **(kwargs or {}))
            for tensor in output if isinstance(output, (tuple, list)) else [output]:
                if (
                    isinstance(tensor, torch.Tensor)
                    and tensor.ndim >= 2
                    and tensor.shape[-1] == 1003
                ):
                    sizes.append(
                        0 if tensor.shape[0] == 64 else tensor.numel()
                    )  # 64 rows: the weight, transposed
            return output

    with Watch():
        summed_cross_entropy(model, batch).backward()
    assert max(sizes) == 8 * 1003


class Calls(TorchDispatchMode):
    """The names of all operations."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **(kwargs or {}))

    def __enter__(self):
        self.names = []
        return super().__enter__()


def collectives(world, kind, micro_batches):
    """(all-gathers, reduce-scatters) of one step."""
    model = tiny_model(kind)
    in_chunks(model, 8)
    shard_training(model, build_mesh(world), torch.float32)
    batch = some_batch()
    with Calls() as calls:
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i == micro_batches - 1)
            summed_cross_entropy(model, batch).backward()
    return tuple(
        sum(name in op for op in calls.names)
        for name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_")
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_chunks_cost_no_extra_gather_and_no_extra_reduction(kind, micro_batches):
    layers = 3
    # Each layer twice but the last; embedding, head (or the tied pair) and root once. Every unit is reduced
    # once, in the last micro-batch.
    units = layers + (2 if kind == "qwen2" else 3)
    gathers = 2 * layers - 1 + (2 if kind == "qwen2" else 3)
    assert run_ranks(collectives, 2, kind, micro_batches)[0] == (gathers * micro_batches, units)
