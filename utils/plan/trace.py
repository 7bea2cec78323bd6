"""What one step keeps and needs for its activations, found by running one decoder block of each kind, the
embedding and the loss on tensors that have a shape and a dtype, but no memory. Nothing is computed.

A storage counts from the operation that makes it until the last tensor on it is gone, as in torch's own
tracker (torch/distributed/_tools/mem_tracker.py). Parameters do not count.

There are two kinds of such tensors. Fake ones say that they are on the CPU, so every program runs as it runs
there. Meta ones take a third of the time; see meta.meta_tensors.
"""

import sys
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from ..model import loss
from ..model.sharding import decoder_layers
from .costs import cost_of, flash_workspace
from .meta import meta_tensors, parameters_in


@dataclass(frozen=True)
class Segment:
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


@dataclass(frozen=True)
class Record:
    """What a step allocates and frees, in its order. Sizes are apart, so that others may take their place.

    events: k where storage k is made, ~k where it goes. marks: (name, events before it), where a segment
    ends. inputs: of each block that ran, the storage of its input if that was gone at the block's end.
    """

    kinds: list[int]
    events: list[int]
    marks: list[tuple[str, int]]
    inputs: list[int | None]
    sizes: list[int]
    flops: list[int]  # of each product and attention
    moved: list[int]  # bytes of each tensor that another operation reads or writes
    # of each: (in which segment, whether in the loss's second chunk)
    flop_parts: list[tuple[int, bool]]
    moved_parts: list[tuple[int, bool]]

    def trace(self, sizes: numpy.ndarray | None = None) -> Trace:
        """The segments. sizes: bytes of the storages, in place of those of the run."""
        if sizes is None:
            sizes = numpy.array(self.sizes, dtype=float)
        events = numpy.array(self.events)
        changes = numpy.where(events >= 0, sizes[events], -sizes[~events])
        live = numpy.concatenate([[0.0], changes.cumsum()])
        segments = {name: [] for name, _ in self.marks}
        start = 0
        for name, end in self.marks:
            at_start = live[start]
            peak = live[start : end + 1].max() - at_start
            segments[name].append(Segment(int(peak), int(live[end] - at_start)))
            start = end
        gone_bytes = [0 if k is None else int(sizes[k]) for k in self.inputs]
        blocks = []
        for block, size in zip(segments["block"], gone_bytes, strict=True):
            blocks.append(Segment(block.peak, block.rest - size))
        # The input of the last block goes within the segment of the loss.
        loss = segments["loss"][0]
        loss = Segment(loss.peak + gone_bytes[-1], loss.rest + gone_bytes[-1])
        backward = segments["back"]
        embedding_back = segments["end"][0]
        if len(backward) == len(self.inputs):
            # Nothing trains before the blocks, so the backward ends with that of the first one.
            backward = [*backward, embedding_back]
            embedding_back = Segment(0, 0)
        return Trace(
            kinds=self.kinds,
            embedding=segments["to block"][0],
            blocks=blocks,
            loss=loss,
            loss_back=backward[0],
            blocks_back=backward[:0:-1],
            embedding_back=embedding_back,
        )

    def times(self) -> list[int]:
        """How many times a step runs each segment. Here is one block of each kind."""
        counts = [self.kinds.count(kind) for kind in range(len(self.inputs))]
        blocks = iter(counts)
        backward = iter([1, *reversed(counts)])  # the first is that of the loss
        times = []
        for name, _ in self.marks:
            if name == "block":
                times.append(next(blocks))
            elif name == "back":
                times.append(next(backward))
            else:
                times.append(1)
        return times


class LiveBytes(TorchDispatchMode):
    """Record the storages that operations make, while they live, and what operations cost. `mark` cuts the
    time into segments.

    flash: also count what the kernels of a GPU take for a while in the backward of attention.
    """

    def __init__(self, flash=False):
        super().__init__()
        self.flash = flash
        self.known: dict[int, int | None] = {}  # storage -> its number; None: it was there before
        self.second_chunk = False
        # See Record.
        self.events: list[int] = []
        self.marks: list[tuple[str, int]] = []
        self.sizes: list[int] = []
        self.flops: list[int] = []
        self.moved: list[int] = []
        self.flop_parts: list[tuple[int, bool]] = []
        self.moved_parts: list[tuple[int, bool]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        for tensor in inputs:
            self._meet(tensor, False)
        result = run_operation(func, args, kwargs)
        outputs = list(tensors_in(result))
        for tensor in outputs:
            self._meet(tensor, True)
        part = (len(self.marks), self.second_chunk)
        flops, moved = cost_of(func, args, kwargs, result, inputs, outputs)
        if flops:
            self.flops.append(flops)
            self.flop_parts.append(part)
        self.moved += moved
        self.moved_parts += [part] * len(moved)
        if self.flash:
            workspace = flash_workspace(func, args, kwargs)
            if workspace:  # it comes and goes within the operation
                number = len(self.sizes)
                self.sizes.append(workspace)
                self.events += [number, ~number]
        return result

    def _meet(self, tensor: torch.Tensor, is_made: bool) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        number = None
        if is_made:
            number = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self.events.append(number)
        self.known[key] = number
        weakref.finalize(storage, self._leave, key)

    def _leave(self, key: int) -> None:
        number = self.known.pop(key)
        if number is not None:
            self.events.append(~number)

    def count_product(self, total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
        """What it costs to add left @ right to `total`."""
        part = (len(self.marks), self.second_chunk)
        self.flops.append(2 * left.numel() * right.shape[1])
        self.flop_parts.append(part)
        self.moved += [total.nbytes] * 2
        self.moved_parts += [part] * 2

    def mark(self, name: str) -> None:
        """A segment ends here."""
        self.marks.append((name, len(self.events)))


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


def trace_step(
    model: nn.Module, dtype: torch.dtype, batch: int, seq_len: int, packed=False, flash=False
) -> Trace:
    """Of a model on meta, as it will be sharded: with its adapters, recomputing and chunked loss. flash: as
    on a GPU, see flash_workspace.
    """
    return record_step(model, dtype, batch, seq_len, packed, flash=flash).trace()


def record_step(
    model: nn.Module,
    dtype: torch.dtype,
    batch: int,
    seq_len: int,
    packed=False,
    bounds=None,
    flash=False,
    on_meta=False,
) -> Record:
    """What such a step allocates. bounds: the chunks of the loss, of at most three, in place of its own.
    on_meta: run on meta tensors, not on fake ones; see meta.meta_tensors.
    """
    layers = list(decoder_layers(model))
    apart = not any(p.requires_grad for p in model.get_input_embeddings().parameters())
    kinds, firsts = kinds_of(layers, apart)
    repeats = [layer for layer in layers if layer not in firsts]
    live = LiveBytes(flash)
    was_training = model.training
    with ExitStack() as stack:
        if on_meta:
            stack.enter_context(meta_tensors())
        else:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(parameters_in(dtype, model, repeats))
        stack.enter_context(documents_found(packed))
        stack.enter_context(passed_over(repeats))
        stack.enter_context(few_chunks(bounds, live))
        stack.callback(model.train, was_training)
        model.train()
        # Where nothing keeps the input of a block it goes, but only after the mark at the block's end.
        inputs, gone = [], []  # of each first block
        for layer in firsts:
            stack.enter_context(marked(layer, live, inputs, gone))
        ids = torch.zeros(batch, seq_len, dtype=torch.int64)
        labels = ids + 1
        stack.enter_context(live)
        hidden = loss.backbone(model)(ids, use_cache=False).last_hidden_state
        gone.extend(went(inputs))  # and the last one's goes before the loss
        rows = torch.zeros(batch * seq_len, dtype=torch.int64)
        columns = torch.zeros(batch * seq_len, dtype=torch.int64)
        total = model.get_output_embeddings()(hidden[rows, columns], labels.view(-1))
        del hidden
        live.mark("loss")
        total.backward()
        live.mark("end")
        del total
    return Record(
        kinds=kinds,
        events=live.events,
        marks=live.marks,
        inputs=gone,
        sizes=live.sizes,
        flops=live.flops,
        moved=live.moved,
        flop_parts=live.flop_parts,
        moved_parts=live.moved_parts,
    )


def kinds_of(layers: list[nn.Module], apart: bool) -> tuple[list[int], list[nn.Module]]:
    """(which kind each block is, the first block of each kind). Blocks of one kind have the same class,
    attention and parameters.

    apart: the first block is a kind of its own, since no gradient goes to what comes before it.
    """
    number_of = {}
    firsts, kinds = [], []
    for i, layer in enumerate(layers):
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters())
        attention_type = getattr(layer, "attention_type", None)
        is_sliding = getattr(layer, "is_sliding", None)
        key = (type(layer), attention_type, is_sliding, shapes, apart and i == 0)
        if key not in number_of:
            number_of[key] = len(firsts)
            firsts.append(layer)
        kinds.append(number_of[key])
    return kinds, firsts


@contextmanager
def documents_found(packed: bool) -> Iterator[None]:
    """transformers looks for packed documents in the position ids, to mask them from each other. Those here
    have no values, so it is told.

    Its own search is left out: it is small and early, and a tensor of one more than the row's tokens has no
    place in a formula of products.
    """

    def find(position_ids: torch.Tensor) -> torch.Tensor | None:
        return position_ids.cumsum(-1) if packed else None

    find_in_values = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = find
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find_in_values


class Chunks(list):
    """Bounds of the loss's chunks, which tell `live` when the second of three begins and ends."""

    def __init__(self, bounds: list[tuple[int, int]], live: LiveBytes):
        super().__init__(bounds)
        self.live = live

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for i, chunk in enumerate(super().__iter__()):
            self.live.second_chunk = i == 1 and len(self) == 3
            yield chunk
        self.live.second_chunk = False


@contextmanager
def few_chunks(bounds: list[tuple[int, int]] | None, live: LiveBytes) -> Iterator[None]:
    """The loss runs its first two chunks and its last. Those between are like the second: each begins with
    what the one before has left. What a CPU would do in blocks is done at once: the peaks are the same.
    """
    all_of, own_product = loss.chunk_bounds, loss._add_product
    sizes = loss.BLOCK_SIZE, loss.PART_SIZE

    def few(tokens: int, chunk_tokens: int) -> Chunks:
        chunks = bounds or all_of(tokens, chunk_tokens)
        if len(chunks) > 3:
            chunks = [*chunks[:2], chunks[-1]]
        return Chunks(chunks, live)

    def add_product(total, left, right, first) -> None:
        if left.dtype != torch.float32 and not live.flash:  # a CPU, which adds in blocks
            block = total[: max(1, sizes[0] // total.shape[1])]
            buffers = torch.empty_like(block, dtype=left.dtype), torch.empty_like(block)
            del buffers
        live.count_product(total, left, right)

    loss.chunk_bounds, loss._add_product = few, add_product
    loss.BLOCK_SIZE = loss.PART_SIZE = sys.maxsize
    try:
        yield
    finally:
        loss.chunk_bounds, loss._add_product = all_of, own_product
        loss.BLOCK_SIZE, loss.PART_SIZE = sizes


@contextmanager
def passed_over(layers: list[nn.Module]) -> Iterator[None]:
    """These blocks return what they get."""
    for layer in layers:
        layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@contextmanager
def marked(layer: nn.Module, live: LiveBytes, inputs: list, gone: list) -> Iterator[None]:
    """Marks before and after a block, and where its backward begins; before the first also where it ends.

    inputs: gets (number, weak reference) of the block's input. gone: gets the numbers of inputs that went.
    """
    forwards = []  # a second one is part of the backward

    def begin(module, args, kwargs):
        if not forwards:
            live.mark("to block")
            hidden = args[0] if args else kwargs["hidden_states"]
            if not inputs and hidden.requires_grad:
                hidden.register_hook(lambda grad: live.mark("back"))
            storage = hidden.untyped_storage()
            gone.extend(went(inputs))
            inputs.append((live.known[storage._cdata], weakref.ref(storage)))

    def end(module, args, kwargs, output):
        if not forwards:
            live.mark("block")
            hidden = output[0] if isinstance(output, tuple) else output
            hidden.register_hook(lambda grad: live.mark("back"))
        forwards.append(True)

    with (
        layer.register_forward_pre_hook(begin, with_kwargs=True),
        layer.register_forward_hook(end, with_kwargs=True),
    ):
        yield


def went(inputs: list) -> list[int | None]:
    """The number of the last block's input if it is gone, else None; an empty list if there was no block."""
    if not inputs:
        return []
    number, storage = inputs[-1]
    return [number if storage() is None else None]
