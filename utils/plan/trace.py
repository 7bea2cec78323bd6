"""The memory of the activations in one step: what is kept, and the peak.

One decoder block of each kind, the embedding and the loss run on meta tensors. These have a shape and a dtype
but no memory, and nothing is computed. A storage counts from the operation that creates it until its last
tensor is freed, as in torch's own tracker (torch/distributed/_tools/mem_tracker.py). Parameters do not count.
"""

import math
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.integrations import sdpa_attention
from transformers.utils import import_utils

from ..model import loss
from ..model.loss import backbone, chunk_slices, documents_by, one_document
from ..model.sharding import decoder_layers, fp32_modules, recompute_activations

ATTENTION = F.scaled_dot_product_attention
aten = torch.ops.aten


class Segment(NamedTuple):
    """A part of the step. Its bytes are relative to the live bytes at its begin."""

    peak: int  # the most during the segment
    rest: int  # those that remain at its end


class Trace(NamedTuple):
    """The segments of a step with one micro-batch on one rank, in order. Blocks of one kind are alike."""

    kinds: list[int]  # the kind of each block
    embedding: Segment
    blocks: list[Segment]  # the forward of each kind
    loss: Segment  # the last norm, the head and the loss
    loss_back: Segment
    blocks_back: list[Segment]  # rest: minus what the forward kept, plus unsharded gradients
    embedding_back: Segment
    input_bytes: int  # of a block's input
    pictures: object = None  # a pictures.Before


class LiveBytes(TorchDispatchMode):
    """Logs when operations create storages, and when these are freed."""

    def __init__(self):
        super().__init__()
        self.sizes = {}  # bytes of each live storage
        # bytes of a new storage, or minus those of a freed one; the name of a segment where it ends
        self.log = []
        # Where the last block ends in the log, and its input's storage. If nothing keeps the input, it is
        # freed a little later, but it counts as freed by the block.
        self.block_end = 0
        self.block_input = None
        # Living storages that the blocks share: masks, rotary tables. The backward does not free them: its
        # traced block stands for many.
        self.shared = set()
        # The arguments of the first block, if it recomputes: they may hold what others put there, such as the
        # recomputed keys of Gemma 4.
        self.arguments = None
        self.table_shape = None  # of the embedding; if it is tied, its two gradients are added
        # what the last block returned beside the hidden states, if it returned a tuple
        self.further_outputs = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_grouped = func is aten._grouped_mm.default
        if is_grouped:  # it takes other dtypes too, but its shape function only bf16 (torch 2.13)
            dtype = args[0].dtype
            args = [
                value.bfloat16() if getattr(value, "dtype", None) == dtype else value
                for value in args
            ]
        if func is aten.add.Tensor and tensors_in(args)[0].shape == self.table_shape:
            func = aten.add_.Tensor  # autograd adds in place, but not within a mode
        result = func(*args, **kwargs or {})
        if is_grouped:
            result = result.to(dtype)
        if any(returned.alias_info for returned in func._schema.returns):
            return result  # a view, or an argument
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.log.append(self.sizes[key])
                weakref.finalize(storage, self._leave, key)
        return result

    def _leave(self, key):
        """Log that a storage is freed."""
        at = len(self.log)
        if key == self.block_input:
            at = self.block_end
            self.block_input = None
        self.shared.discard(key)
        self.log.insert(at, -self.sizes.pop(key))


def segments_of(log: list, scaled=int) -> dict:
    """The segments of a log (bytes, and names) by name. scaled: turns its bytes into those to count."""
    segments = {}
    live = peak = 0
    for entry in log:
        if isinstance(entry, str):
            segments.setdefault(entry, []).append(Segment(peak, live))
            live = peak = 0
        else:
            live += scaled(entry)
            peak = max(peak, live)
    return segments


def tensors_in(values: object) -> list[Tensor]:
    """The tensors among what an operation takes or returns."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def trace_of_log(kinds: list[int], log: list, input_bytes: int, scaled=int) -> Trace:
    """The Trace of a log. scaled: see segments_of."""
    segments = segments_of(log, scaled)
    backward = [*segments["back"], *segments["end"]]
    if len(backward) < len(segments["block"]) + 2:
        # Nothing trains before the blocks, so the backward ends with that of the first one.
        backward.append(Segment(0, 0))
    return Trace(
        kinds=kinds,
        embedding=segments["to block"][0],
        blocks=segments["block"],
        loss=segments["loss"][0],
        loss_back=backward[0],
        blocks_back=backward[-2:0:-1],
        embedding_back=backward[-1],
        input_bytes=scaled(input_bytes),
    )


def record_step(
    model: nn.Module,
    dtype: torch.dtype,
    batch: int,
    seq_len: int,
    masked=False,
    recompute="none",
    repeats_keys=False,
    offload=False,
    pictures=None,
    gpu=False,
) -> Callable:
    """Run a step on meta tensors. Returns a function that makes its Trace, with the argument `scaled`
    of trace_of_log.

    model: on meta, with adapters and chunked loss, as it will be sharded. masked: a mask keeps documents
    apart. recompute, offload: as --activation_checkpointing, --activation_offload. repeats_keys: see
    sharding.lacks_grouped_kernels. pictures: see pictures.Pictures. gpu: see attention_on_meta.
    """
    kinds, firsts = kinds_of(model)
    repeats = [layer for layer in decoder_layers(model) if layer not in firsts]
    live = LiveBytes()
    traced = None
    with ExitStack() as stack:
        enter = stack.enter_context
        if repeats_keys:
            enter(patch.object(sdpa_attention, "use_gqa_in_sdpa", lambda *tensors: False))
        if not masked:
            enter(documents_by(one_document))  # positions have no values here
        if recompute != "none":
            recompute_activations(model, recompute)
            # Before transformers 5.23 the public method has another name.
            stack.callback(model._set_gradient_checkpointing, enable=False)
            if offload:
                from ..model.activation_offload import hook_inputs

                hook_inputs(
                    model, attrgetter("shape"), partial(torch.empty, dtype=dtype, device="meta")
                )
        if pictures:
            live, traced = pictures.trace(model, dtype, batch, seq_len, recompute)
        enter(on_meta(gpu))
        enter(parameters_in(dtype, model, repeats))
        for layer in repeats:
            enter(patch.object(layer, "forward", partial(pass_over, live)))
        for layer in firsts:
            enter(patch.object(layer, "forward", mark_block(layer, live, recompute != "none")))
        head = model.get_output_embeddings()
        live.table_shape = model.get_input_embeddings().weight.shape
        enter(patch.multiple(loss, chunk_slices=few_chunks, _add_product=no_product))
        ids = torch.zeros(batch, seq_len, dtype=torch.int64)
        places = ids.flatten()  # of trained tokens
        enter(live)
        if traced:
            hidden = traced.hidden(ids)
        else:
            hidden = backbone(model)(ids, use_cache=False).last_hidden_state
        live.block_input = None  # the backward needs it, if it is alive
        flat = hidden.flatten(0, 1)
        if not hasattr(head, "chunk_tokens"):  # the scores of a pair
            total = head(flat.index_select(0, places[: 2 * batch])).float().sum()
        elif model.full_logits:  # both live until the loss is there, as in loss._model_forward
            all_logits = head(flat)
            logits = all_logits.index_select(0, places)
            total = F.cross_entropy(logits.float(), places)
            del all_logits, logits
        else:
            total = head(flat.index_select(0, places), places)
        input_bytes = hidden.nbytes
        del hidden, flat
        live.log.append("loss")
        live.sizes |= dict.fromkeys(live.shared, 0)
        total.backward()
        live.log.append("end")
        del total
    return partial(trace_of_log, kinds, live.log, input_bytes)


@contextmanager
def on_meta(gpu=False):
    """Within it new tensors are on meta, attention is that of a CPU or a GPU, transformers asks for no
    values, and no kernel of Triton is launched.
    """
    with (
        torch.device("meta"),
        patch.object(F, "scaled_dot_product_attention", partial(attention_on_meta, gpu=gpu)),
        patch.object(F, "rms_norm", norm_on_meta),
        patch.object(torch.distributions.Distribution, "_validate_args", False),  # Gemma 3n
        patch.object(import_utils, "is_fake_tensor", attrgetter("is_meta")),
        # They write into tensors that are there already, such as those of flash-linear-attention.
        patch("triton.runtime.jit.KernelInterface.__getitem__", lambda *_: lambda *_, **__: None)
        if "triton" in sys.modules
        else nullcontext(),
    ):
        yield


def norm_on_meta(x, shape, weight=None, eps=None):
    """An operation that keeps what F.rms_norm keeps on a GPU. On meta F.rms_norm is many operations."""
    return F.layer_norm(x, shape, weight)


def attention_on_meta(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, gpu=False, **options
) -> Tensor:
    """F.scaled_dot_product_attention with the flash kernel where a CPU has it. On meta there is none. A GPU
    also has it with dropout, and a memory-efficient one for values of another width.
    """
    is_flash = query.shape[-1] == value.shape[-1]
    heads_fit = query.shape[1] == key.shape[1] or is_flash and "enable_gqa" in options
    on_cpu = not gpu and (dropout_p or not is_flash)
    if on_cpu or getattr(attn_mask, "requires_grad", 0) or not heads_fit:
        return ATTENTION(query, key, value, attn_mask, dropout_p, is_causal, **options)
    options.pop("enable_gqa", None)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, query.new_zeros(()), -math.inf)
    if not is_flash:
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, is_causal=is_causal, **options
        )[0]
    return aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options
    )[0]


def kinds_of(model: nn.Module) -> tuple:
    """(the kind of each block, the first block of each kind). Blocks of one kind have the same class,
    attention and parameter shapes. The first block is a kind of its own if no gradient flows to its input.
    """
    embedding_is_frozen = not any(
        p.requires_grad for p in model.get_input_embeddings().parameters()
    )
    types = getattr(model.config.get_text_config(), "layer_types", None)
    kinds = []
    firsts = {}
    for i, layer in enumerate(decoder_layers(model)):
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters())
        # Its keys and values are those of later layers too (Gemma 3n and 4).
        is_shared = getattr(getattr(layer, "self_attn", None), "store_full_length_kv", False)
        key = type(layer), types and types[i], shapes, is_shared, embedding_is_frozen and i == 0
        firsts.setdefault(key, layer)
        kinds.append([*firsts].index(key))
    return kinds, [*firsts.values()]


def few_chunks(tokens: int, chunk_tokens: int) -> list[slice]:
    """The first two chunks of the loss. The others are like the second: each begins with the memory that the
    chunk before has left.
    """
    return chunk_slices(tokens, chunk_tokens)[:2]


def no_product(sums: list, d_logits: Tensor, h: Tensor) -> None:
    """Stands in for loss._add_product, which adds in place. What it allocates meanwhile is less than the
    logits of a chunk in fp32, which are freed before.
    """


def pass_over(live: LiveBytes, hidden_states: Tensor, *args, **kwargs) -> object:
    """The forward of a block that need not run, because another block of its kind does. Outputs beside the
    hidden states are those of the last block that ran.
    """
    return hidden_states if live.further_outputs is None else (hidden_states, *live.further_outputs)


def mark_block(layer: nn.Module, live: LiveBytes, recomputes: bool) -> Callable:
    """A forward that logs where the block begins and ends and where its backward begins; for the first block
    also where its backward ends.
    """
    forward = layer.forward

    def mark_backward(gradient):
        live.log.append("back")

    def marked(hidden_states, *args, **kwargs):
        layer.forward = forward  # a second call is the recomputation in the backward
        live.log.append("to block")
        key = hidden_states.untyped_storage()._cdata
        if "block" not in live.log:
            live.shared = {*live.sizes} - {key}
            live.arguments = recomputes and (args, kwargs)
            if hidden_states.requires_grad:
                # Gemma 4 uses its embedding beside the blocks too: the view has the gradient of the block.
                hidden_states = hidden_states.view_as(hidden_states)
                hidden_states.register_hook(mark_backward)
        output = forward(hidden_states, *args, **kwargs)
        live.block_end = len(live.log)
        live.block_input = key
        live.log.append("block")
        hidden = output
        live.further_outputs = None
        if isinstance(output, tuple | list):
            hidden, *live.further_outputs = output
        hidden.register_hook(mark_backward)
        return output

    return marked


def parameters_in(
    dtype: torch.dtype,
    model: nn.Module,
    idle_modules: Iterable = (),
    part: nn.Module | None = None,
) -> AbstractContextManager:
    """Within it new parameters and buffers stand in for those of `part`, or of the whole model, in the dtype
    in which FSDP gathers them. idle_modules do not run as a whole: their parameters are on meta.
    """
    in_fp32 = {*nn.ModuleList(fp32_modules(model, dtype)).parameters()}
    idle = {*nn.ModuleList(idle_modules).parameters()}
    stand_ins = {}
    part = part or model
    for name, old in (*part.named_parameters(), *part.named_buffers()):
        is_cast = isinstance(old, nn.Parameter) and old.is_floating_point()
        gathered_dtype = torch.float32 if old in in_fp32 else dtype
        stand_ins[name] = torch.empty(
            old.shape,
            dtype=gathered_dtype if is_cast else old.dtype,
            device="meta" if old in idle else None,
            requires_grad=old.requires_grad,
        )
    return _reparametrize_module(part, stand_ins, tie_weights=True)
