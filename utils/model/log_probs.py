"""Log-probabilities of the trained tokens, for preference losses, policy gradients and scores.

As in loss.py the head works on chunks within its own forward, so logits (B, T, V) never exist and FSDP2
gathers the head once. But the gradient cannot be computed in the forward: each token has its own factor,
which is known only in the backward (an advantage, the weight of its pair). With a frozen head, the gradient
with respect to each hidden state is kept and scaled later. With a head that trains, the logits of a chunk
are computed again.

B batch, T tokens, D hidden, V vocabulary, n trained tokens, c tokens of a chunk.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .loss import PerToken, arguments, losses_and_grads


def token_log_probs(
    model: nn.Module, batch, temperature=1.0, per_token: PerToken | None = None
) -> Tensor:
    """log p(token | tokens before it) of each trained token of a batch, at the token's position, and 0
    elsewhere: (B, T) in fp32, in nats.

    model: from add_chunked_loss. temperature: divides the logits. per_token: a loss to use in place of -log
    p; minus its values are returned.

    Any loss of the result can be differentiated, once. A batch without trained tokens gives zeros with a
    graph, so that every rank takes part in the backward. The router loss of a mixture of experts is left out.
    Extra memory: the logits of one chunk in 16 bit, and some copies of them in fp32; for the backward (n, D),
    and the head's gradient if it trains; full logits of the trained tokens if settle_chunked_loss has chosen
    them.

    DPO (arXiv 2305.18290) and GRPO (arXiv 2402.03300) are losses of these log-probabilities.
    """
    if temperature != 1:
        per_token = partial(_cross_entropy, temperature=temperature)
    places, found = model(batch.ids, per_token=per_token, chunked=_TokenLosses, **arguments(batch))
    everywhere = found.new_zeros(batch.labels.numel())
    return everywhere.index_copy(0, places + 1, found).view_as(batch.labels)


def per_sequence(batch, values: Tensor) -> Tensor:
    """Sums (S,) of values (B, T) over the sequences of a batch: its rows, or the documents of its packs."""
    if batch.positions is None:
        return values.sum(1)
    # padding begins no document
    sequence = ((batch.positions == 0) & batch.mask).flatten().cumsum(0).sub(1).clamp(min=0)
    return values.new_zeros(len(batch.where)).index_add(0, sequence, values.flatten())


def _cross_entropy(logits, targets, temperature):
    """(c, V) and (c,) -> (c,)"""
    return F.cross_entropy(logits / temperature, targets, reduction="none")


class _TokenLosses(torch.autograd.Function):
    """The loss (n,) of each token; the backward has a factor for each."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, per_token, chunks, grad):
        tensors = (hidden, weight, bias, targets)
        ctx.options = (transform, per_token, chunks)
        by_hidden, *by_head = ctx.needs_input_grad[:3]
        ctx.head_trains = any(by_head)
        keeps = grad and by_hidden and not ctx.head_trains
        losses, found = losses_and_grads((keeps, False, False), None, *tensors, *ctx.options, keeps)
        saved = tensors if ctx.head_trains else found[:1]
        ctx.save_for_backward(*saved)
        return losses

    @staticmethod
    def backward(ctx, factors):
        assert not torch.is_grad_enabled(), "create_graph: gradients of these losses have no graph"
        factors = factors[:, None]  # (n, 1)
        if ctx.head_trains:
            _, grads = losses_and_grads(
                ctx.needs_input_grad, factors, *ctx.saved_tensors, *ctx.options, True
            )
            return (*grads, *[None] * 5)
        (kept,) = ctx.saved_tensors  # (n, D)
        return ((kept * factors).to(kept.dtype), *[None] * 7)
