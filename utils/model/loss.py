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

from collections.abc import Callable
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn

from ..run.distributed import World, all_reduce_sum
from ..run.units import IGNORE
from .logits import (
    full_logits_loss,
    has_router_loss,
    known_transforms,
    knows_router_loss,
    router_loss,
    use_full_logits,
)
from .sharding import reshard

# fp32 logits (c, V), as the model gives them, and targets (c,) -> the loss of each token (c,)
PerToken = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
CHUNK_TOKENS = 512  # each chunk costs a pass over the weight's gradient
LEAST_LOGITS, MOST_LOGITS = 2**24, 2**26  # of a chunk: 64 and 256 MiB in fp32
BLOCK_SIZE = 2**20  # numbers that a CPU works on at a time, so that they stay in its cache
PART_SIZE = 2**24  # numbers of a part of a sum, whose memory goes back to the system by itself
# Fields of configs (see logits.py).
AFTER_HEAD = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
AFTER_HEAD += ("logit_scale", "logits_scaling", "logits_mup_width_multiplier")


def add_chunked_loss(model: nn.Module, chunk_tokens: int = 0) -> nn.Module:
    """Make `model(ids, labels=labels)` return the summed cross-entropy of its trained tokens, a () fp32
    tensor, without full logits.

    Without labels the model answers as before. chunk_tokens 0: see tokens_of_chunk. Call it on the
    unsharded or the sharded model; nothing is computed here. `check_chunked_loss` should follow once the
    weights are there.
    """
    head = model.get_output_embeddings()
    head.logits_to_loss = _transforms(model)[0]
    head.chunk_tokens = chunk_tokens or tokens_of_chunk(head.weight.shape[0])
    # A plan of memory runs fewer chunks, on tensors without memory, with the operations of a GPU.
    head.chunk_bounds = chunk_bounds
    head.as_cuda = False
    head.forward = MethodType(_head_forward, head)
    model.full_logits = False
    model.forward = MethodType(_model_forward, model)
    return model


@torch.no_grad()
def check_chunked_loss(model: nn.Module, device: torch.device) -> str:
    """Compare the chunked logits of 8 tokens with the model's own; every rank calls it, with the weights
    loaded.

    Returns "" when they agree, trying the transforms that are known, likeliest first. Otherwise switches the
    model to full logits and returns the sentence that says so, with the price per token.
    """
    head = model.get_output_embeddings()
    why = "the head has an adapter or is quantized"
    if not hasattr(head, "base_layer") and head.weight.is_floating_point():
        ids = torch.arange(8, device=device)[None] * (head.weight.shape[0] // 8)
        own = model(ids, use_cache=False).logits.float()  # (1, 8, V)
        plain = model(ids, probe=True)  # (1, 8, V) straight from the head
        reshard(model)
        tolerance = (1e-4 if plain.dtype == torch.float32 else 3e-2) * own.abs().max()
        for transform in _transforms(model):
            if (transform(plain).float() - own).abs().max() <= tolerance:
                head.logits_to_loss = transform
                return ""
        why = f"{type(model.base_model).__name__} changes its logits after the head"
    return use_full_logits(model, why)


def summed_cross_entropy(
    model: nn.Module, batch, per_token: PerToken | None = None
) -> torch.Tensor:
    """Cross-entropy summed over the trained tokens of batch.ids, batch.labels (B, T), plus the router loss of
    a mixture of experts. per_token: another loss in its place, differentiated chunk by chunk.

    A () fp32 tensor. Divide by the number of trained tokens of the *global* batch. The labels stand where
    their tokens stand; the shift by one is made here. Padding is on the right, so causal attention needs no
    mask; only the router's statistics use it.
    """
    options = {"attention_mask": batch.mask, "per_token": per_token}
    if batch.positions is not None:
        options["position_ids"] = batch.positions
    return model(batch.ids, labels=batch.labels, **options)


def backbone(model: nn.Module) -> nn.Module:
    """The model without its head."""
    if model.base_model is not model:
        return model.base_model
    return model.model  # Llama 4 calls it by another name than the one that it says


def _model_forward(
    self, input_ids, labels=None, attention_mask=None, probe=False, per_token=None, **kwargs
):
    """The model's own forward, cut after the backbone when labels are given."""
    if labels is None and not probe:
        return type(self).forward(self, input_ids, attention_mask=attention_mask, **kwargs)
    router = getattr(self.config, "output_router_logits", False) and labels is not None
    if router:
        router = has_router_loss(self)
    if router:
        self.full_logits = self.full_logits or not knows_router_loss(self)
        kwargs["output_router_logits"] = True
        if "position_ids" not in kwargs:
            # With a mask transformers would not see the ends of packed documents.
            kwargs["attention_mask"] = attention_mask
    head = self.get_output_embeddings()
    if self.full_logits:
        return full_logits_loss(self, input_ids, labels, IGNORE, kwargs, per_token)
    output = backbone(self)(input_ids, use_cache=False, **kwargs)
    hidden = output.last_hidden_state
    if probe:
        return head(hidden)
    targets = F.pad(labels[:, 1:], (0, 1), value=IGNORE)  # (B, T): what each position must predict
    trained = targets != IGNORE
    loss = head(hidden[trained], targets[trained], per_token)  # (n, D), (n,)
    if router:
        loss = loss + router_loss(self, output.router_logits, attention_mask) * trained.sum()
    return loss.clone()  # not the head's own output: FSDP hangs a hook on what each unit returns


def _head_forward(self, hidden, targets=None, per_token=None):
    """The head as it was, or, given targets, the loss of `hidden` (n, D) against `targets` (n,)."""
    if self.weight.is_floating_point():
        hidden = hidden.to(self.weight.dtype)  # some families keep the residual in fp32
    if targets is None:
        return type(self).forward(self, hidden)
    grad = torch.is_grad_enabled()
    as_cuda = self.as_cuda or hidden.device.type == "cuda"
    chunks = self.chunk_bounds(len(hidden), self.chunk_tokens)
    options = (self.logits_to_loss, per_token, chunks, grad, as_cuda)
    return _ChunkedLoss.apply(hidden, self.weight, self.bias, targets, *options)


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of F.linear(hidden, weight, bias), gradients included, c tokens at a time.

    Extra memory: c * V logits and their gradient; the gradient of the hidden states; with several chunks in
    16 bit the gradient of the weight in fp32, see _WeightGradient.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, per_token, chunks, grad, as_cuda):
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        ctx.hidden, ctx.weight, ctx.bias = None, None, None
        if grad and ctx.needs_input_grad[0]:
            ctx.hidden = torch.empty_like(hidden)
        weight_gradient = (
            _WeightGradient(weight, as_cuda) if grad and weight.requires_grad else None
        )
        if grad and bias is not None and bias.requires_grad:
            ctx.bias = torch.zeros_like(bias, dtype=torch.float32)
        if weight_gradient and not len(hidden):
            ctx.weight = torch.zeros_like(weight)  # all ranks reduce it
        rooms = _rooms_of_chunk(weight, chunks[0][1]) if chunks else ()
        for number, (start, end) in enumerate(chunks, 1):
            h = hidden[start:end]  # (c, D)
            options = (transform, per_token, grad, rooms, as_cuda)
            loss, d_logits = _loss_of_chunk(h, weight, bias, targets[start:end], *options)
            total += loss
            if ctx.hidden is not None:
                torch.mm(d_logits, weight, out=ctx.hidden[start:end])
            if number == len(chunks):
                del rooms, options  # the gradient needs the memory
            if weight_gradient:
                ctx.weight = weight_gradient.add(d_logits, h, number == 1, number == len(chunks))
            if ctx.bias is not None:
                ctx.bias += d_logits.sum(0)
            del d_logits  # the next chunk needs the room
        ctx.bias = ctx.bias if ctx.bias is None else ctx.bias.to(weight.dtype)
        return total

    @staticmethod
    def backward(ctx, scale):
        # In place: the graph is walked once, and these buffers are the largest of the step. A GPU would round
        # a () tensor to the gradient's dtype first.
        scale = scale.view(1) if scale.device.type == "cuda" else scale
        grads = [g if g is None else g.mul_(scale) for g in (ctx.hidden, ctx.weight, ctx.bias)]
        ctx.hidden, ctx.weight, ctx.bias = None, None, None
        return (*grads, None, None, None, None, None, None)


def _rooms_of_chunk(weight: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Memory (c, V) for a chunk's logits, and for them in fp32 where the weight is in 16 bit. All chunks use
    the same: on a CPU fresh memory costs its page faults, some 5 % of the loss's time.
    """
    logits = weight.new_empty(tokens, len(weight))
    if weight.dtype == torch.float32:
        return logits, None
    return logits, torch.empty_like(logits, dtype=torch.float32)


def _loss_of_chunk(
    h, weight, bias, targets, transform, per_token: PerToken | None, grad, rooms, as_cuda
):
    """(summed loss (), its gradient by the logits (c, V) in the weight's dtype, None without grad)."""
    logits, fp32 = (None if room is None else room[: len(h)] for room in rooms)
    torch.mm(h, weight.T, out=logits)
    if bias is not None:
        logits += bias
    with torch.enable_grad():
        logits = logits.detach().requires_grad_(grad)  # (c, V)
        shown = transform(logits)
    fp32 = shown.detach().float() if fp32 is None else fp32.copy_(shown.detach())
    if per_token:
        loss, d_shown = _differentiate(per_token, fp32, targets, grad)
    else:
        loss, d_shown = _cross_entropy_in_place(fp32, targets, as_cuda)
    if not grad:
        return loss, None
    if shown is not logits:
        (d_logits,) = torch.autograd.grad(shown, logits, d_shown.to(shown.dtype))
        return loss, d_logits
    if d_shown.dtype == logits.dtype:
        return loss, d_shown
    return loss, logits.detach().copy_(d_shown)  # in their memory


class _WeightGradient:
    """d_logits.T @ h, summed over the chunks: (V, D) in the weight's dtype.

    In 16 bit the sum is made in fp32, because small terms would be lost; a single chunk needs no sum. A CPU
    keeps the sum in parts: as they are cast their memory is given back.
    """

    def __init__(self, weight: torch.Tensor, as_cuda: bool):
        self.weight = weight
        self.as_cuda = as_cuda
        self.parts: list[torch.Tensor] = []  # the sum so far, fp32 in 16 bit: (p, D) each
        rows, width = weight.shape
        whole = as_cuda or weight.dtype == torch.float32
        self.part_rows = rows if whole else max(1, PART_SIZE // width)

    def add(self, d_logits: torch.Tensor, h: torch.Tensor, first: bool, last: bool):
        """Add the product of d_logits (c, V) and h (c, D); the gradient after the last chunk, else None."""
        if first and last:
            return d_logits.T @ h
        if first:
            fp32 = {"dtype": torch.float32}
            self.parts = [torch.empty_like(w, **fp32) for w in self.weight.split(self.part_rows)]
        for part, columns in zip(self.parts, d_logits.split(self.part_rows, 1), strict=True):
            _add_product(part, columns.T, h, first, self.as_cuda)  # (p, D) += (p, c) @ (c, D)
        if not last:
            return None
        gradient = torch.empty_like(self.weight)
        for rows in gradient.split(self.part_rows):
            rows.copy_(self.parts.pop(0))
        return gradient


def _add_product(
    total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool, as_cuda: bool
) -> None:
    """total += left @ right, or total = left @ right; total is fp32.

    A GPU adds within the product. A CPU has no product of 16 bit that ends in fp32: it adds blocks of rows,
    which stay in its cache, in memory that all of them use.
    """
    beta = 0 if first else 1
    if left.dtype == torch.float32:
        torch.addmm(total, left, right, beta=beta, out=total)
        return
    if as_cuda:
        torch.addmm(total, left, right, out_dtype=torch.float32, beta=beta, out=total)
        return
    block_rows = max(1, BLOCK_SIZE // total.shape[1])
    product = left.new_empty(min(block_rows, len(total)), total.shape[1])  # (b, D)
    in_fp32 = torch.empty_like(product, dtype=torch.float32)
    for block, rows in zip(total.split(block_rows), left.split(block_rows), strict=True):
        size = len(block)
        torch.mm(rows, right, out=product[:size])
        if first:
            block.copy_(product[:size])
        else:
            block += in_fp32[:size].copy_(product[:size])


def tokens_of_chunk(vocabulary: int) -> int:
    """Tokens of a chunk: more where the vocabulary is small, fewer where it is very large. A multiple of 64,
    with which products are fastest.
    """
    tokens = max(LEAST_LOGITS // vocabulary, min(CHUNK_TOKENS, MOST_LOGITS // vocabulary))
    return max(64, tokens // 64 * 64)


def chunk_bounds(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """(start, end) of each chunk of the loss."""
    return [(start, min(start + chunk_tokens, tokens)) for start in range(0, tokens, chunk_tokens)]


def _cross_entropy_in_place(
    logits: torch.Tensor, targets: torch.Tensor, as_cuda: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(summed cross-entropy, its gradient) of logits (c, V) in fp32, which become the gradient.

    torch's own needs four tensors of this size, and they are what a step's memory peaks at.
    """
    loss = torch.zeros((), dtype=torch.float32, device=logits.device)
    at_a_time = len(logits) if as_cuda else max(1, BLOCK_SIZE // logits.shape[1])
    blocks = zip(logits.split(at_a_time), targets.split(at_a_time), strict=True)
    for block, right_ones in blocks:  # (r, V), which stays in a CPU's cache, and (r,)
        block -= block.amax(-1, keepdim=True)
        right = block.gather(1, right_ones[:, None])  # (r, 1)
        sums = block.exp_().sum(-1, keepdim=True)
        loss += (sums.log() - right).sum()
        block.div_(sums)
        block.scatter_add_(1, right_ones[:, None], torch.full_like(right, -1.0))
    return loss, logits


def _differentiate(
    per_token: PerToken, logits: torch.Tensor, targets: torch.Tensor, grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(summed loss, its gradient) of any loss per token, of logits (c, V) in fp32."""
    with torch.set_grad_enabled(grad):
        loss = per_token(logits.requires_grad_(grad), targets).sum()
    gradient = torch.autograd.grad(loss, logits)[0] if grad else None
    return loss.detach(), gradient


def _transforms(model: nn.Module) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """What the model may do to its logits after the head, likeliest first: mostly nothing."""
    config = model.config.get_text_config()
    if not any(getattr(config, name, None) for name in AFTER_HEAD):
        return [lambda logits: logits]
    return known_transforms(config)


@torch.no_grad()
def eval_loss(model: nn.Module, loader, world: World) -> float:
    """Mean cross-entropy over the trained tokens of one epoch of all ranks' GlobalBatches. All ranks call it:
    every batch is a collective.
    """
    model.eval()
    total = torch.zeros((), dtype=torch.float64)
    trained_tokens = 0
    for step in range(loader.per_epoch):
        for batch in loader.batches(step):
            total += summed_cross_entropy(model, batch.to(world.device)).double().cpu()
            trained_tokens += batch.trained_tokens
    model.train()
    reshard(model)
    return all_reduce_sum(total, world) / all_reduce_sum(trained_tokens, world)
