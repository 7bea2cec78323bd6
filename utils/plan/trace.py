"""What one step keeps and needs for its activations, found by running one decoder block of each kind, the
embedding and the loss on fake tensors: they have a shape and a dtype, but no memory, and nothing is computed.

A storage counts from the operation that makes it until the last tensor on it is gone, as in torch's own
tracker (torch/distributed/_tools/mem_tracker.py). Parameters do not count.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..model import loss
from ..model.loss import backbone, chunk_bounds, documents_by, one_document
from ..model.sharding import (
    decoder_layers,
    fp32_modules,
    keep_activations,
    recompute_activations,
)


class Segment(NamedTuple):
    """A part of the step. Its bytes are counted from those that are alive when it begins."""

    peak: int  # the most at a time
    rest: int  # at its end


@dataclass(frozen=True)
class Trace:
    """A step of one micro-batch on one rank: segments in their order, of a block for each kind of it."""

    kinds: list[int]  # of each block: which kind it is
    embedding: Segment
    blocks: list[Segment]  # of each kind: its forward
    loss: Segment  # the last norm, the head and the loss
    loss_back: Segment
    blocks_back: list[Segment]  # rest: without what was kept, and with the unsharded gradients
    embedding_back: Segment
    input_bytes: int  # of a block's input
    pictures: object = None  # a pictures.Before


class LiveBytes(TorchDispatchMode):
    """Logs the storages that operations make, when they come and when they go."""

    def __init__(self):
        super().__init__()
        self.sizes = {}  # bytes of each storage that lives
        # bytes that came, or went where negative; the names of segments, where they end
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # most of the calls
            return args[0].fake_device
        result = run_operation(func, args, kwargs or {})
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            key = storage._cdata
            given = tensors_in((args, kwargs))
            if key in self.sizes or any(key == t.untyped_storage()._cdata for t in given):
                continue
            self.sizes[key] = storage.nbytes()
            self.log.append(self.sizes[key])
            weakref.finalize(storage, self._leave, key)
        return result

    def _leave(self, key: int) -> None:
        self.log.append(-self.sizes.pop(key))


def segments_of(log: list[int | str], scaled=int) -> dict[str, list[Segment]]:
    """The segments of a log by their names. scaled: gives the bytes to count for those in the log."""
    segments: dict[str, list[Segment]] = {}
    live = most = 0
    for entry in log:
        if isinstance(entry, str):
            segments.setdefault(entry, []).append(Segment(most, live))
            live = most = 0
        else:
            live += scaled(entry)
            most = max(most, live)
    return segments


def run_operation(func, args: tuple, kwargs: dict):
    """Its result. Kernels of experts take dtypes besides bf16; the code for their shapes does not (torch
    2.13).
    """
    if func is not torch.ops.aten._grouped_mm.default or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    taken = []
    for arg in args:
        is_float = isinstance(arg, torch.Tensor) and arg.is_floating_point()
        taken.append(arg.bfloat16() if is_float else arg)
    return func(*taken, **kwargs).to(args[0].dtype)


def tensors_in(values: object) -> Iterator[torch.Tensor]:
    """The tensors among what an operation takes or returns. torch's own tree_iter takes twice as long."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors_in(value)
    elif isinstance(values, dict):
        for value in values.values():
            yield from tensors_in(value)


def trace_of_log(
    kinds: list[int],
    log: list[int | str],
    gone: list[int],
    input_bytes: int,
    pictures: object,
    scaled=int,
) -> Trace:
    """gone: bytes of each block's input that went after its end. scaled: see segments_of."""
    segments = segments_of(log, scaled)
    blocks = []
    for block, size in zip(segments["block"], gone, strict=True):
        blocks.append(Segment(block.peak, block.rest - scaled(size)))
    # The input of the last block goes within the segment of the loss.
    last = scaled(gone[-1])
    peak, rest = segments["loss"][0]
    loss = Segment(peak + last, rest + last)
    backward = [*segments["back"], segments["end"][0]]
    if len(backward) < len(blocks) + 2:
        # Nothing trains before the blocks, so the backward ends with that of the first one.
        backward.append(Segment(0, 0))
    return Trace(
        kinds=kinds,
        embedding=segments["to block"][0],
        blocks=blocks,
        loss=loss,
        loss_back=backward[0],
        blocks_back=backward[-2:0:-1],
        embedding_back=backward[-1],
        input_bytes=scaled(input_bytes),
        pictures=pictures,
    )


def record_step(
    model: nn.Module,
    dtype: torch.dtype,
    batch: int,
    seq_len: int,
    packed: bool = False,
    recompute: str = "none",
    repeats_keys: bool = False,
    offload: bool = False,
    pictures=None,
) -> Callable[..., Trace]:
    """What makes its trace, see trace_of_log: of a model on meta, with its adapters and chunked loss, as it
    will be sharded. packed: a mask keeps documents apart. recompute, offload: as --activation_checkpointing,
    --activation_offload. repeats_keys: see sharding.lacks_grouped_kernels. pictures: see pictures.Pictures.
    """
    layers = list(decoder_layers(model))
    apart = not any(p.requires_grad for p in model.get_input_embeddings().parameters())
    kinds, firsts = kinds_of(layers, apart)
    repeats = [layer for layer in layers if layer not in firsts]
    live, traced = LiveBytes(), None
    # Where nothing keeps the input of a block it goes, but only after the mark at the block's end.
    inputs: list[tuple] = []  # of each block that ran: its input's storage, weakly, and the bytes
    gone: list[int] = []  # bytes of the inputs that went
    with ExitStack() as stack:
        if repeats_keys:
            from ..model.attention import repeat_grouped_keys

            repeat_grouped_keys(True)
            stack.callback(repeat_grouped_keys, False)
        if not packed:
            stack.enter_context(documents_by(one_document))  # positions have no values here
        if recompute != "none":
            recompute_activations(model, recompute)
            stack.callback(keep_activations, model)
            if offload:
                from ..model.activation_offload import hook_inputs

                hook_inputs(model, lambda tensor: tensor.shape, partial(torch.empty, dtype=dtype))
        if pictures:
            live, traced = pictures.trace(model, dtype, batch, seq_len, recompute)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(parameters_in(dtype, model, repeats))
        for layer in repeats:
            stack.enter_context(patch.object(layer, "forward", pass_over))
        for layer in firsts:
            marked = mark_block(layer, live, inputs, gone)
            stack.enter_context(patch.object(layer, "forward", marked))
        head = model.get_output_embeddings()
        has_logits = hasattr(head, "chunk_bounds")
        if has_logits:
            stack.enter_context(patch.object(head, "chunk_bounds", few_chunks))
        stack.enter_context(patch.object(loss, "_add_product", first_product))
        ids = torch.zeros(batch, seq_len, dtype=torch.int64)
        places = torch.zeros(batch * seq_len, dtype=torch.int64)  # of trained tokens
        stack.enter_context(live)
        if traced:
            hidden = traced.hidden(ids)
        else:
            hidden = backbone(model)(ids, use_cache=False).last_hidden_state
        gone.append(gone_bytes(inputs))  # the last one's goes before the loss
        if has_logits:
            total = head(hidden.flatten(0, 1).index_select(0, places), places)
        else:  # the scores of a pair
            total = head(hidden.flatten(0, 1).index_select(0, places[: 2 * batch])).float().sum()
        input_bytes = hidden.nbytes
        del hidden
        live.log.append("loss")
        total.backward()
        live.log.append("end")
        del total
    return partial(trace_of_log, kinds, live.log, gone, input_bytes, traced)


def kinds_of(layers: list[nn.Module], apart: bool) -> tuple[list[int], list[nn.Module]]:
    """(which kind each block is, the first block of each kind). Blocks of one kind have the same class,
    attention and parameters.

    apart: the first block is a kind of its own, since no gradient goes to what comes before it.
    """
    keys = []
    for i, layer in enumerate(layers):
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters())
        attention_type = getattr(layer, "attention_type", None)
        is_sliding = getattr(layer, "is_sliding", None)
        keys.append((type(layer), attention_type, is_sliding, shapes, apart and i == 0))
    distinct = list(dict.fromkeys(keys))
    firsts = [layers[keys.index(key)] for key in distinct]
    return [distinct.index(key) for key in keys], firsts


def few_chunks(tokens: int, chunk_tokens: int) -> list[tuple[int, int]]:
    """The first two chunks of the loss and its last. Those between are like the second: each begins with what
    the one before has left.
    """
    chunks = chunk_bounds(tokens, chunk_tokens)
    return [*chunks[:2], chunks[-1]] if len(chunks) > 3 else chunks


def first_product(sums, d_logits, h, add=loss._add_product) -> None:
    """The first of the many products in loss._add_product, which are alike."""
    rows = loss.CPU_ROWS
    add([sums[0][:rows]], d_logits[:, :rows], h)


def pass_over(hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """The forward of a block that is like one that ran."""
    return hidden_states


def mark_block(layer: nn.Module, live: LiveBytes, inputs: list, gone: list) -> Callable:
    """A forward that marks a block's begin and end, where its backward begins, and before the first block
    also where that ends. It adds to inputs and gone, see record_step.
    """
    forward = layer.forward

    def mark_backward(gradient: torch.Tensor) -> None:
        live.log.append("back")

    def marked(*args, **kwargs):
        layer.forward = forward  # a second one is part of the backward
        live.log.append("to block")
        hidden = args[0] if args else kwargs["hidden_states"]
        if inputs:
            gone.append(gone_bytes(inputs))
        elif hidden.requires_grad:
            hidden.register_hook(mark_backward)
        storage = hidden.untyped_storage()
        inputs.append((weakref.ref(storage), live.sizes.get(storage._cdata, 0)))
        output = forward(*args, **kwargs)
        live.log.append("block")
        hidden = output[0] if isinstance(output, tuple) else output
        hidden.register_hook(mark_backward)
        return output

    return marked


def gone_bytes(inputs: list[tuple]) -> int:
    """Of the last block's input, if it is gone."""
    storage, size = inputs[-1]
    return size if storage() is None else 0


@contextmanager
def parameters_in(
    dtype: torch.dtype,
    model: nn.Module,
    without: Iterable[nn.Module] = (),
    part: nn.Module | None = None,
) -> Iterator[None]:
    """New parameters and buffers in place of those of a part of the model, or of all of it, without memory,
    in the dtype that FSDP gathers; not in the modules `without`, which do not run.
    """
    kept = {p for module in fp32_modules(model, dtype) for p in module.parameters()}
    tables = []  # (parameters or buffers of a module, a copy of them)
    made = {None: None}  # one for each tensor: weights may be tied
    for _, module in (part or model).named_modules(memo={*without}):
        for table in (module._parameters, module._buffers):
            tables.append((table, dict(table)))
            for name, tensor in table.items():
                if tensor not in made:
                    made[tensor] = empty_like(tensor, torch.float32 if tensor in kept else dtype)
                table[name] = made[tensor]
    try:
        yield
    finally:
        for table, tensors in tables:
            table.update(tensors)


def empty_like(tensor: torch.Tensor, gathered: torch.dtype) -> torch.Tensor:
    """Of the same shape, where new tensors are. Parameters of floating point get the dtype `gathered`."""
    if not isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    dtype = gathered if tensor.is_floating_point() else tensor.dtype
    return nn.Parameter(torch.empty(tensor.shape, dtype=dtype), tensor.requires_grad)
