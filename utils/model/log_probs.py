"""Log-probabilities of the trained tokens: what preferences, policy gradients and scores begin with.

As in loss.py the head works on chunks within its own forward, so logits (B, T, V) never exist and FSDP2
gathers the head once. But the gradient cannot be taken in the forward, since each token has a factor of its
own that is known only in the backward (an advantage, the weight of its pair). With a frozen head the gradient
by each hidden state is kept and then scaled; with one that trains a chunk's logits are computed again.

B batch, T tokens, D hidden, V vocabulary, n trained tokens, c tokens of a chunk.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from .loss import PerToken, arguments, chunk_by_chunk


def token_log_probs(
    model: nn.Module, batch, temperature: float = 1.0, per_token: PerToken | None = None
) -> torch.Tensor:
    """log p(token | what is before it) of each trained token of a batch, where the token stands, and 0
    elsewhere: (B, T) in fp32, in nats. model: of add_chunked_loss. temperature: divides the logits.
    per_token: gives another value than -log p, and what is returned is minus that.

    Any loss of them can be differentiated. A batch that trains nothing gives zeros with a graph, so that
    every rank takes part in the backward. The router loss of a mixture of experts is left out. Extra memory:
    one chunk's logits in 16 bit and some copies of them in fp32; for the backward (n, D), the head's gradient
    where it trains, or, where check_chunked_loss has said so, full logits of the trained tokens.

    Source: the log-probs of DPO, https://arxiv.org/abs/2305.18290, and of GRPO, arXiv 2402.03300.
    """
    if temperature != 1:
        per_token = partial(_cross_entropy, temperature=temperature)
    places, found = model(
        batch.ids,
        per_token=per_token,
        chunked=_TokenLosses,
        **arguments(batch),
    )
    everywhere = found.new_zeros(batch.labels.numel())
    return everywhere.index_copy(0, places + 1, found).view_as(batch.labels)


def per_sequence(batch, values: torch.Tensor) -> torch.Tensor:
    """Sums (S,) of values (B, T) over the sequences of a batch: its rows, or the documents of its packs."""
    if batch.positions is None:
        return values.sum(1)
    begins = (batch.positions == 0) & batch.mask  # what pads a pack belongs to none
    sequence = (begins.flatten().cumsum(0) - 1).clamp(min=0)
    return values.new_zeros(len(batch.where)).index_add(0, sequence, values.flatten())


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    """(c, V) and (c,) -> (c,)"""
    return F.cross_entropy(logits / temperature, targets, reduction="none")


class _TokenLosses(torch.autograd.Function):
    """The loss (n,) of each token, with a factor for each in the backward."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, per_token, chunks, grad):
        tensors = (hidden, weight, bias, targets)
        ctx.options = (transform, per_token, chunks)
        by_hidden, *by_head = ctx.needs_input_grad[:3]
        ctx.trains = any(by_head)
        keeps = grad and by_hidden and not ctx.trains
        wanted = (keeps, False, False)
        losses, found = chunk_by_chunk(
            wanted,
            None,
            *tensors,
            *ctx.options,
            keeps,
        )
        saved = tensors if ctx.trains else found[:1]
        ctx.save_for_backward(*saved)
        return losses

    @staticmethod
    def backward(ctx, factors):
        factors = factors[:, None]  # (n, 1)
        no_others = (None,) * 5
        if ctx.trains:
            wanted = ctx.needs_input_grad
            _, grads = chunk_by_chunk(wanted, factors, *ctx.saved_tensors, *ctx.options, True)
            return (*grads, *no_others)
        (kept,) = ctx.saved_tensors  # (n, D)
        d_hidden = (kept * factors).to(kept.dtype)
        return (d_hidden, None, None, *no_others)
