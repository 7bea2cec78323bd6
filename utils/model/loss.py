"""Chunked cross-entropy.

The logits of a batch are (B, T, V): with a vocabulary of 128k they are the largest thing in a training step.
Here they never exist: the head works on a few hundred trained tokens at a time, in the model's compute dtype
with an fp32 softmax, and the gradient of each chunk is taken at once, in the forward pass (the idea of
Liger-Kernel's fused linear cross-entropy, arXiv 2410.10989).

The loop runs inside the head module's own `forward`. That matters under FSDP2: the module is called once, so
its weight is gathered once and its gradient reduced once, however many chunks there are. (A gather per chunk
cost TRL 50 % of its speed.)

B batch, T tokens, D hidden, V vocabulary, n trained tokens, c tokens of a chunk.
"""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import masking_utils

from ..run.distributed import World, all_reduce_sum
from ..run.errors import print0
from ..run.signals import stop_asked
from ..run.units import GIB, IGNORE
from .sharding import family_of, reshard

# fp32 logits (c, V), as the model gives them, and targets (c,) -> the loss of each token (c,)
PerToken = Callable[[Tensor, Tensor], Tensor]
Transform = Callable[[Tensor], Tensor]
CHUNK_TOKENS = 512  # each chunk costs a pass over the weight's gradient
# Least and most logits of a chunk: 64 and 256 MiB in fp32.
LEAST_LOGITS = 2**24
MOST_LOGITS = 2**26
CPU_ROWS = 256  # rows of a product on a CPU, so that it fits the cache
ROWS = 4096  # rows in a block of the weight's fp32 gradient; a block is freed once it is cast

# Fields of configs that say what happens to the logits after the head.
CAPS = "final_logit_softcapping logits_soft_cap output_logit_soft_cap".split()  # Gemma, xLSTM
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")  # Granite, Inkling
FACTORS = ("logit_scale", "logits_scaling")  # Cohere, HyperCLOVA X
# The parameters of the router loss in nearly all families (it keeps the experts of a mixture equally busy),
# and the attributes of a model that it needs.
ROUTER_LOSS_PARAMETERS = "gate_logits num_experts top_k attention_mask".split()
ROUTER_LOSS_FIELDS = "router_aux_loss_coef num_experts num_experts_per_tok".split()


def add_chunked_loss(model: nn.Module) -> nn.Module:
    """Make `model(ids, labels=labels)` return the summed cross-entropy of its trained tokens, a () fp32
    tensor, without full logits.

    Without labels the model answers as before. Call it on the unsharded or the sharded model; nothing is
    computed here. `settle_chunked_loss` should follow once the weights are there.
    """
    head = model.get_output_embeddings()
    head.logits_to_loss = known_transforms(model)[0]
    head.chunk_tokens = tokens_of_chunk(head.weight.shape[0])
    head.forward = partial(_head_forward, head)
    model.router_loss = None
    if getattr(model.config, "output_router_logits", False):
        family = inspect.getmodule(family_of(model))
        model.router_loss = getattr(family, "load_balancing_loss_func", None)
    # The model's own forward uses a parameter beside backbone and head. If that begins as zero, comparing the
    # logits does not show it.
    model.full_logits = (
        bool(model._parameters)
        or hasattr(head, "base_layer")
        or not head.weight.is_floating_point()
        or (model.base_model is model and not hasattr(model, "model"))  # a class of your own
    )
    if model.router_loss:
        parameters = list(inspect.signature(model.router_loss).parameters)
        has_fields = all(hasattr(model, field) for field in ROUTER_LOSS_FIELDS)
        model.full_logits |= parameters != ROUTER_LOSS_PARAMETERS or not has_fields
    # generate() of transformers asks for the names of its parameters, and gives no position_ids to others.
    model.forward = wraps(model.forward)(partial(_model_forward, model))
    return model


def known_transforms(model: nn.Module) -> list[Transform]:
    """The known transforms of logits after the head, the likeliest first: those that the config
    names, then no change.
    """
    config = model.config.get_text_config()

    def values(fields):
        return filter(None, (getattr(config, field, None) for field in fields))

    factors = [*(1 / divisor for divisor in values(DIVISORS)), *values(FACTORS)]
    capped = [lambda logits, cap=cap: torch.tanh(logits / cap) * cap for cap in values(CAPS)]
    scaled = [lambda logits, factor=factor: logits * factor for factor in factors]
    return [*capped, *scaled, lambda logits: logits]


@torch.no_grad()
def settle_chunked_loss(model: nn.Module, device: torch.device) -> None:
    """Choose what the chunked loss does with the logits after the head: of known_transforms the first with
    which the logits of 7 tokens agree with the model's own. If none does, the model is switched to full
    logits, and a warning says why, and how much memory they cost.

    Every rank calls it, with the weights loaded. The model stays in evaluation mode.
    """
    model.eval()
    head = model.get_output_embeddings()
    vocab_size = head.weight.shape[0]
    if model.full_logits:
        reason = (
            "the head has an adapter or is quantized, the router has a loss of its own, the model has a"
            " parameter beside backbone and head, or no backbone by a known name, or full_logits was set"
        )
    else:
        ids = torch.arange(8, device=device)[None] * (vocab_size // 8)
        expected = model(ids, use_cache=False).logits[0, :-1].float()  # (7, V)
        chunks = []  # logits straight from the head, chunk by chunk

        def keep(logits):
            chunks.append(logits.clone())  # the loss overwrites them
            return logits

        head.logits_to_loss = keep
        model(ids, labels=ids)
        reshard(model)
        plain = torch.cat(chunks)  # (7, V)
        tolerance = (1e-4 if plain.dtype == torch.float32 else 3e-2) * expected.abs().max()
        for transform in known_transforms(model):
            if (transform(plain).float() - expected).abs().max() <= tolerance:
                head.logits_to_loss = transform
                return
        reason = f"{type(model.base_model).__name__} changes its logits after the head"
    model.full_logits = True
    gib = 1024 * vocab_size * 16 / GIB  # fp32 logits, softmax, and gradients
    print0(
        f"warning: {reason}, which the chunked loss does not know: full logits are used, about {gib:.2f} GiB"
        " for 1,024 tokens of a micro-batch"
    )


def summed_cross_entropy(model: nn.Module, batch, per_token: PerToken | None = None) -> Tensor:
    """Cross-entropy summed over the trained tokens of batch.ids, batch.labels (B, T), plus the router loss of
    a mixture of experts. per_token: a loss in place of cross-entropy, differentiated chunk by chunk.

    Returns a () fp32 tensor. Divide it by the number of trained tokens of the *global* batch. Each label is
    at the position of its own token; the shift by one is done here. Padding is on the right, so causal
    attention needs no mask; only the router's statistics use it.
    """
    return model(batch.ids, per_token=per_token, **arguments(batch))


def arguments(batch) -> dict:
    """The model's arguments besides the ids, named as in _model_forward and transformers' flash attention."""
    options = {"labels": batch.labels, "attention_mask": batch.mask, "places": batch.places}
    if batch.positions is not None:
        options["position_ids"] = batch.positions
    if batch.begins is not None:
        options |= {
            "cu_seq_lens_q": batch.begins,
            "cu_seq_lens_k": batch.begins,
            "max_length_q": batch.longest,
            "max_length_k": batch.longest,
            # the document of each token, for convolutions of layers with a state (Qwen3.5, Mamba-2)
            "seq_idx": (batch.positions == 0).cumsum(1, dtype=torch.int32) - 1,
        }
    return options | batch.extra


def backbone(model: nn.Module) -> nn.Module:
    """The model without its head."""
    # Llama 4 has no attribute of the name in its base_model_prefix, and base_model is then the model itself.
    return model.model if model.base_model is model else model.base_model


def _model_forward(
    self,
    input_ids,
    labels=None,
    attention_mask=None,
    per_token=None,
    places=None,
    chunked=None,
    **kwargs,
):
    """The model's own forward; with labels only its backbone runs, and the head computes the loss.

    places (n,): the positions in the flattened (B, T) that predict a trained token; without them the host
    waits until the GPU has counted them. chunked: an autograd function in place of _ChunkedLoss, which
    returns the loss of each token; the result is then (places, -losses (n,)).
    """
    if labels is None:
        return type(self).forward(self, input_ids, attention_mask=attention_mask, **kwargs)
    if self.router_loss:
        kwargs["output_router_logits"] = True
        if "position_ids" not in kwargs:
            # With a mask transformers would not see the ends of packed documents.
            kwargs["attention_mask"] = attention_mask
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE).flatten()  # the next token's label
    if places is None:
        places = (targets != IGNORE).nonzero().flatten()
    targets = targets[places]
    forward = partial(type(self).forward, self) if self.full_logits else backbone(self)
    with documents_by(documents if "position_ids" in kwargs else one_document):
        output = forward(input_ids, use_cache=False, **kwargs)
    if self.full_logits:
        per_token = per_token or partial(F.cross_entropy, reduction="none")
        logits = output.logits.flatten(0, 1).index_select(0, places)  # (n, V)
        loss = per_token(logits.float(), targets)
        balance = output.get("aux_loss")
    else:
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, places)  # (n, D)
        loss = self.get_output_embeddings()(hidden, targets, per_token, chunked)
        balance = None
        if self.router_loss:
            balance = self.router_loss(
                output.router_logits, self.num_experts, self.num_experts_per_tok, attention_mask
            )
    # Return new tensors, not the head's own output: FSDP2 puts a hook on the output of each unit.
    if chunked:
        return places, -loss
    loss = loss.sum()
    if balance is not None and self.training:
        # JetMoE has the other name.
        factor = getattr(self, "router_aux_loss_coef", getattr(self, "aux_loss_coef", None))
        loss = loss + factor * balance * len(places)
    return loss


def documents_by(find: Callable) -> AbstractContextManager:
    """Within it transformers finds packed documents with `find`, a function of the positions (B, T). Its own
    function asks the device whether a row has several documents, and waits for the answer.
    """
    return patch.object(masking_utils, "find_packed_sequence_indices", find)


def documents(position_ids: Tensor) -> Tensor:
    """(B, T): the number of each token's document in its row; positions (B, T) restart with each document."""
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


def one_document(position_ids: Tensor) -> None:
    """None, which tells transformers that rows are not packed."""


def _head_forward(self, hidden, targets=None, per_token=None, chunked=None):
    """The head's own forward; with targets (n,) the summed loss of `hidden` (n, D), or the
    result of `chunked`.
    """
    if self.weight.is_floating_point():
        hidden = hidden.to(self.weight.dtype)  # some families keep the residual in fp32
    if targets is None:
        return type(self).forward(self, hidden)
    return (chunked or _ChunkedLoss).apply(
        hidden,
        self.weight,
        self.bias,
        targets,
        self.logits_to_loss,
        per_token,
        chunk_slices(len(hidden), self.chunk_tokens),
        torch.is_grad_enabled(),  # in a Function's forward it is False, and needs_input_grad ignores it
    )


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of F.linear(hidden, weight, bias); its gradient is computed in the forward."""

    @staticmethod
    def forward(ctx, *inputs):
        losses, ctx.grads = losses_and_grads(ctx.needs_input_grad, None, *inputs)
        return losses.sum()

    @staticmethod
    def backward(ctx, scale):
        assert not torch.is_grad_enabled(), "create_graph: gradients of this loss have no graph"
        # In place, because these buffers are the largest of the step; the backward runs only once. A GPU
        # would round a () tensor to the gradient's dtype first.
        scale = scale.view(1) if scale.is_cuda else scale
        grads = [d if d is None else d.mul_(scale) for d in ctx.grads]
        del ctx.grads
        return (*grads, *[None] * 5)  # forward takes 5 more: targets to grad


def losses_and_grads(
    wanted, factors, hidden, weight, bias, targets, transform, per_token, chunks, grad
):
    """(the losses (n,) of the logits F.linear(hidden, weight, bias); the gradients of their sum with respect
    to hidden, weight and bias), computed chunk by chunk. wanted: which of the three gradients are computed,
    if `grad`; others are None. factors (n, 1): weights of the losses in the sum; None: 1. chunks: from
    chunk_slices.

    Extra memory: the logits (c, V) in the weight's dtype and in fp32; the gradient of the hidden states; the
    gradient of the weight, with several chunks in fp32, since a sum in 16 bit loses small terms.
    """
    by_hidden, by_weight, by_bias = (grad and is_wanted for is_wanted in wanted[:3])
    losses = hidden.new_empty(len(hidden), dtype=torch.float32)
    d_hidden = torch.empty_like(hidden) if by_hidden else None
    d_weight = None
    sums = []  # the gradient of the weight in fp32, in blocks (ROWS, D); empty if there is one chunk
    if by_weight and len(chunks) != 1:
        sums = [torch.zeros_like(rows, dtype=torch.float32) for rows in weight.split(ROWS)]
    d_bias = torch.zeros_like(bias, dtype=torch.float32) if by_bias else None
    for chunk in chunks:
        h = hidden[chunk]  # (c, D)
        losses[chunk], d_logits = _losses_of_chunk(
            F.linear(h, weight, bias), targets[chunk], transform, per_token, grad
        )
        if factors is not None:
            d_logits *= factors[chunk]
        if by_hidden:
            torch.mm(d_logits, weight, out=d_hidden[chunk])
        if sums:
            _add_product(sums, d_logits, h)
        elif by_weight:
            d_weight = d_logits.T @ h
        if by_bias:
            d_bias += d_logits.sum(0)
        del d_logits  # the next chunk needs the memory
    if sums:
        d_weight = torch.empty_like(weight)
        for rows in d_weight.split(ROWS):
            rows.copy_(sums.pop(0))
    d_bias = d_bias.to(weight.dtype) if by_bias else None
    return losses, (d_hidden, d_weight, d_bias)


def _losses_of_chunk(logits, targets, transform, per_token, grad):
    """(losses (c,), the gradient of their sum with respect to the logits (c, V), in their dtype; None without
    grad). The gradient may overwrite the logits.
    """
    with torch.set_grad_enabled(grad):
        shown = transform(logits.requires_grad_(grad))
        if per_token:
            loss = per_token(shown.float(), targets)
            return loss.detach(), torch.autograd.grad(loss.sum(), logits)[0] if grad else None
    loss, d_shown = _cross_entropy_in_place(shown.detach().float(), targets)
    if not grad:
        return loss, None
    if shown is logits:
        return loss, logits.detach().copy_(d_shown)
    return loss, torch.autograd.grad(shown, logits, d_shown.to(shown.dtype))[0]


def _cross_entropy_in_place(logits, targets):
    """(cross-entropy (c,), the gradient of its sum) of logits (c, V) in fp32. The gradient
    overwrites the logits.

    torch's own function needs four tensors of this size, which would set the peak memory of a step.
    """
    logits -= logits.amax(-1, keepdim=True)
    of_targets = logits.gather(1, targets[:, None])  # (c, 1)
    sums = logits.exp_().sum(-1, keepdim=True)
    loss = (sums.log() - of_targets).flatten()
    logits /= sums
    logits.scatter_add_(1, targets[:, None], torch.full_like(of_targets, -1.0))
    return loss, logits


def _add_product(sums, d_logits, h):
    """Add d_logits.T @ h, of (c, V) and (c, D), to the blocks (ROWS, D) in fp32 that make up (V, D).

    A GPU accumulates within the product. A CPU has no product of 16-bit matrices with an fp32 result.
    """
    for block, columns in zip(sums, d_logits.split(ROWS, 1), strict=True):
        if block.is_cuda and h.dtype != torch.float32:
            torch.addmm(block, columns.T, h, out_dtype=torch.float32, out=block)
            continue
        for rows, part in zip(block.split(CPU_ROWS), columns.split(CPU_ROWS, 1), strict=True):
            rows += part.T @ h


def tokens_of_chunk(vocabulary: int) -> int:
    """Tokens of a chunk: more for a small vocabulary, fewer for a very large one. A multiple of 64, for which
    matrix products are fastest.
    """
    tokens = max(LEAST_LOGITS // vocabulary, min(CHUNK_TOKENS, MOST_LOGITS // vocabulary))
    return max(64, tokens // 64 * 64)


def chunk_slices(tokens: int, chunk_tokens: int) -> list[slice]:
    """The tokens of each chunk of the loss."""
    return [slice(start, start + chunk_tokens) for start in range(0, tokens, chunk_tokens)]


@torch.no_grad()
def eval_loss(model: nn.Module, loader, world: World) -> float:
    """Mean cross-entropy over the trained tokens of one epoch of all ranks' GlobalBatches. All ranks call it:
    every batch is a collective. A signal ends it early; then the mean is of no use.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=world.device)
    trained_tokens = 0
    for step in range(loader.per_epoch):
        for batch in loader.batches(step):
            total += summed_cross_entropy(model, batch.to(world.device))
            trained_tokens += batch.trained_tokens
        if stop_asked():
            break
    model.train()
    reshard(model)
    return all_reduce_sum(total, world) / all_reduce_sum(trained_tokens, world)
