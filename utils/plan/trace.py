"""What one step keeps and needs for its activations, found by running one decoder block of each kind, the
embedding and the loss on fake tensors: shapes and dtypes without memory. Nothing is computed.

What is counted are storages from when an operation makes them until the last tensor on them is gone, as
torch's own tracker does it (torch/distributed/_tools/mem_tracker.py). Parameters are not among them.
"""

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import masking_utils

from ..model import loss
from ..model.sharding import decoder_layers, kept_in_fp32

FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

LOOKUPS = ("embedding", "index", "gather", "index_select")  # they read of a table what they write


@dataclass(frozen=True)
class Segment:
    """Bytes of a part of the step, all counted from where it begins: the most at a time, and the rest at its
    end.
    """

    peak: int
    rest: int


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
        """The segments; where storages have these bytes, if any are given."""
        sizes = numpy.array(self.sizes, dtype=float) if sizes is None else sizes
        events = numpy.array(self.events)
        changes = numpy.where(events >= 0, sizes[events], -sizes[~events])
        live = numpy.concatenate([[0.0], changes.cumsum()])
        parts, start = {name: [] for name, _ in self.marks}, 0
        for name, end in self.marks:
            most, begin = live[start : end + 1].max(), live[start]
            parts[name].append(Segment(int(most - begin), int(live[end] - begin)))
            start = end
        gone = [0 if k is None else int(sizes[k]) for k in self.inputs]
        back, last = parts["back"], parts["end"][0]
        # nothing before the blocks trains: the first one's backward is the last
        if len(back) == len(gone):
            back, last = [*back, last], Segment(0, 0)
        loss_back, *blocks_back = back
        pairs, loss = zip(parts["block"], gone, strict=True), parts["loss"][0]
        blocks = [Segment(block.peak, block.rest - size) for block, size in pairs]
        loss = Segment(loss.peak + gone[-1], loss.rest + gone[-1])  # the last block's goes in here
        return Trace(
            self.kinds, parts["to block"][0], blocks, loss, loss_back, blocks_back[::-1], last
        )

    def times(self) -> list[int]:
        """How many times a step runs each segment, of which here is one for each kind of block."""
        counts = [self.kinds.count(kind) for kind in range(len(self.inputs))]
        of_name = {"block": iter(counts), "back": iter([1, *reversed(counts)])}
        return [next(of_name[name]) if name in of_name else 1 for name, _ in self.marks]


class LiveBytes(TorchDispatchMode):
    """Record the storages that operations make, while they live, and what operations cost. `mark` cuts the
    time into segments.

    flash: also count what the kernels of a GPU take for a while in the backward of attention.
    """

    def __init__(self, flash=False):
        super().__init__()
        self.flash = flash
        self.events, self.marks, self.sizes, self.known = [], [], [], {}
        self.flops, self.moved, self.flop_parts, self.moved_parts = [], [], [], []
        self.second_chunk = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # half of all calls
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        takes = list(tensors_in((args, kwargs)))
        for tensor in takes:
            self._meet(tensor, False)  # who was there before is not counted
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Kernels of experts take other dtypes too; what says so of their shapes does not (torch 2.13).
            fits = [
                arg.bfloat16() if getattr(arg, "is_floating_point", bool)() else arg for arg in args
            ]
            result = func(*fits, **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        makes = list(tensors_in(result))
        for tensor in makes:
            self._meet(tensor, True)
        part = len(self.marks), self.second_chunk
        flops, moved = cost_of(func, args, kwargs or {}, result, takes, makes)
        if flops:
            self.flops.append(flops)
            self.flop_parts.append(part)
        self.moved += moved
        self.moved_parts += [part] * len(moved)
        # comes and goes within
        if self.flash and (workspace := flash_workspace(func, args, kwargs)):
            number = len(self.sizes)
            self.sizes.append(workspace)
            self.events += [number, ~number]
        return result

    def _meet(self, tensor: torch.Tensor, counts: bool) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.known:
            return
        number = None
        if counts:
            number = len(self.sizes)
            self.sizes.append(storage.nbytes())
            self.events.append(number)
        self.known[storage._cdata] = number
        weakref.finalize(storage, self._leave, storage._cdata)

    def _leave(self, key: int) -> None:
        number = self.known.pop(key)
        if number is not None:
            self.events.append(~number)

    def mark(self, name: str) -> None:
        """A segment ends here."""
        self.marks.append((name, len(self.events)))


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


def cost_of(func, args, kwargs, result, takes: list, makes: list) -> tuple[int, list[int]]:
    """(floating-point operations, bytes of each tensor that is read or written). Of products and attention
    only the first, since memory does not hold them up; of what makes a view neither.
    """
    packet, name = func._overloadpacket, func._overloadpacket.__name__
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result), []
    if name == "_grouped_mm":  # (n, K) x (experts, K, N), or (K, n) x (n, N) for each expert's rows
        return 2 * args[0].numel() * args[1].shape[-1], []
    if name.startswith("_scaled_dot_product"):
        back = name.endswith("backward")
        query, key = args[1:3] if back else args[:2]
        products = query.numel() * key.shape[-2] * (10 if back else 4)
        causal = any(value is True for value in (*args, *kwargs.values()))
        return products // 2 if causal else products, []
    if name.startswith(("empty", "new_empty")):
        return 0, []
    there = {tensor.untyped_storage()._cdata for tensor in takes}
    if not func._schema.is_mutable and all(t.untyped_storage()._cdata in there for t in makes):
        return 0, []
    if name in LOOKUPS:
        takes = makes
    return 0, [min(t.nbytes, t.untyped_storage().nbytes()) for t in (*takes, *makes)]


def flash_workspace(func, args: tuple, kwargs: dict | None) -> int:
    """Bytes that flash attention takes on a GPU while its backward runs, and the kernel of a CPU does not:
    the fp32 sum of the queries' gradients, and with grouped heads dK and dV for each head of the queries.

    Not measured here. It was inferred from slopes that others published: Llama-3-8B in nf4 took 16.4 KB a
    token more than was planned, as much as 4 bytes x 32 heads x a head size of 128. Counted where it is
    alive, it changes no peak of those runs: theirs is in the feed-forward part, and their slope is still not
    explained. A mask, or fp32, means another kernel, which is taken as it is on a CPU.
    """
    if func is not FLASH_BACKWARD or (kwargs or {}).get("attn_mask") is not None:
        return 0
    query, key = args[1], args[2]  # (B, H, T, D), and with fewer heads
    if query.dtype == torch.float32:
        return 0
    expanded = 2 * query.numel() * query.element_size() if key.shape[1] < query.shape[1] else 0
    return 4 * query.numel() + expanded


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
) -> Record:
    """What such a step allocates. bounds: the chunks of the loss, of at most three, in place of its own."""
    layers = list(decoder_layers(model))
    apart = not any(p.requires_grad for p in model.get_input_embeddings().parameters())
    kinds, firsts = kinds_of(layers, apart)
    others = [layer for layer in layers if layer not in firsts]
    fake, live = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes(flash)
    was_training = model.training
    with ExitStack() as stack:
        stack.enter_context(fake)
        stack.enter_context(fake_tensors(model, dtype, others))
        if not packed:
            stack.enter_context(no_packs())
        stack.enter_context(passed_over(others))
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
        rows, columns = (torch.zeros(batch * seq_len, dtype=torch.int64) for _ in range(2))
        total = model.get_output_embeddings()(hidden[rows, columns], labels.view(-1))
        del hidden
        live.mark("loss")
        total.backward()
        live.mark("end")
        del total
    costs = live.flops, live.moved, live.flop_parts, live.moved_parts
    return Record(kinds, live.events, live.marks, gone, live.sizes, *costs)


def kinds_of(layers: list[nn.Module], apart: bool) -> tuple[list[int], list[nn.Module]]:
    """(which kind each block is, the first block of each kind): alike in class, attention and parameters.

    apart: the first block is a kind of its own, since no gradient goes to what comes before it.
    """
    seen, firsts, kinds = {}, [], []
    for i, layer in enumerate(layers):
        shapes = tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters())
        attention = [getattr(layer, "attention_type", None), getattr(layer, "is_sliding", None)]
        key = (type(layer), *attention, shapes, apart and i == 0)
        if key not in seen:
            seen[key] = len(firsts)
            firsts.append(layer)
        kinds.append(seen[key])
    return kinds, firsts


@contextmanager
def fake_tensors(model: nn.Module, dtype: torch.dtype, others: list[nn.Module]) -> Iterator[None]:
    """Fake tensors on the CPU in place of meta parameters and buffers, in the dtype that FSDP gathers; not in
    `others`, which do not run.
    """
    before, made = [], {}
    kept = {id(model.get_parameter(name)) for name in kept_in_fp32(model, dtype)}
    idle = {module for layer in others for module in layer.modules()}
    for module in (module for module in model.modules() if module not in idle):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                    gathered = torch.float32 if id(tensor) in kept else dtype
                    new = torch.empty(tensor.shape, dtype=gathered if cast else tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    made[id(tensor)] = new
                before.append((table, name, tensor))
                table[name] = made[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in before:
            table[name] = tensor


@contextmanager
def no_packs() -> Iterator[None]:
    """transformers looks into position ids for packed documents. Fake ones have no values, and it prepares
    for the worst, which is a mask.
    """
    find, masking_utils.find_packed_sequence_indices = (
        masking_utils.find_packed_sequence_indices,
        none,
    )
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


@contextmanager
def few_chunks(bounds: list[tuple[int, int]] | None, live: LiveBytes) -> Iterator[None]:
    """The loss runs its first two chunks and its last, since those between are like the second: each begins
    with what the one before has left.
    """

    def few(tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
        every = bounds or all_of(tokens, chunk_tokens)
        for i, bound in enumerate(every if len(every) <= 3 else [*every[:2], every[-1]]):
            live.second_chunk = i == 1 and len(every) > 2
            yield bound
        live.second_chunk = False

    all_of, loss.chunk_bounds = loss.chunk_bounds, few
    try:
        yield
    finally:
        loss.chunk_bounds = all_of


def none(position_ids: torch.Tensor) -> None:
    return None


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

    inputs: takes what comes in, (its number, a weak reference). gone: takes the numbers of those that went.
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
    """The number of the last block's input if it is no more, else None; nothing if there was no block."""
    return [number if storage() is None else None for number, storage in inputs[-1:]]
