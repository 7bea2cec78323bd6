"""What one step keeps and needs for its activations, found by running one decoder block of each kind, the
embedding and the loss on fake tensors: shapes and dtypes without memory. Nothing is computed.

What is counted are storages from when an operation makes them until the last tensor on them is gone, as
torch's own tracker does it (torch/distributed/_tools/mem_tracker.py). Parameters are not among them.
"""

import math
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import masking_utils

from .sharding import decoder_layers


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


class LiveBytes(TorchDispatchMode):
    """Count the bytes that operations make, while they live. `mark` cuts the time into segments."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.begin, self.marks, self.known = 0, 0, 0, [], {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default:  # a third of all calls
            return func(*args)
        for tensor in tree_iter((args, kwargs)):
            self._meet(tensor, 0)  # who was there before is not counted
        if func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            # Kernels of experts take other dtypes too; what says so of their shapes does not (torch 2.13).
            fits = [arg.bfloat16() if getattr(arg, "is_floating_point", bool)() else arg for arg in args]
            result = func(*fits, **(kwargs or {})).to(args[0].dtype)
        else:
            result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            self._meet(tensor, 1)
        self.peak = max(self.peak, self.now)
        return result

    def _meet(self, tensor: object, counts: int) -> None:
        if not isinstance(tensor, torch.Tensor):
            return
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            size = storage.nbytes() * counts
            self.known[storage._cdata] = size
            self.now += size
            weakref.finalize(storage, self._leave, storage._cdata)

    def _leave(self, key: int) -> None:
        self.now -= self.known.pop(key)

    def mark(self, name: str) -> None:
        """A segment ends here."""
        self.marks.append((name, Segment(self.peak - self.begin, self.now - self.begin)))
        self.peak = self.begin = self.now


def trace_step(model: nn.Module, dtype: torch.dtype, batch: int, seq_len: int, packed=False) -> Trace:
    """Of a model on meta, as it will be sharded: with its adapters, recomputing and chunked loss."""
    layers = list(decoder_layers(model))
    apart = not any(p.requires_grad for p in model.get_input_embeddings().parameters())
    kinds, firsts = kinds_of(layers, apart)
    others = [layer for layer in layers if layer not in firsts]
    fake, live = FakeTensorMode(allow_non_fake_inputs=True), LiveBytes()
    was_training = model.training
    with ExitStack() as stack:
        stack.enter_context(fake)
        stack.enter_context(fake_tensors(model, dtype, others))
        if not packed:
            stack.enter_context(no_packs())
        stack.enter_context(passed_over(others))
        stack.callback(model.train, was_training)
        model.train()
        # Where nothing keeps the input of a block it goes, but only after the mark at the block's end.
        inputs, gone = [], []  # of each first block
        for layer in firsts:
            stack.enter_context(marked(layer, live, inputs, gone))
        ids = torch.zeros(batch, seq_len, dtype=torch.int64)
        labels = ids + 1
        stack.enter_context(live)
        hidden = model.base_model(ids, use_cache=False).last_hidden_state
        gone = [*gone, *went(inputs)]  # and the last one's goes before the loss
        rows, columns = (torch.zeros(batch * seq_len, dtype=torch.int64) for _ in range(2))
        loss = model.get_output_embeddings()(hidden[rows, columns], labels.view(-1))
        del hidden
        live.mark("loss")
        loss.backward()
        live.mark("end")
        del loss
    parts = {name: [segment for mark, segment in live.marks if mark == name] for name, _ in live.marks}
    back, last = parts["back"], parts["end"][0]
    if len(back) == len(firsts):  # nothing before the blocks trains, so the first one's backward is the last
        back, last = [*back, last], Segment(0, 0)
    loss_back, *blocks_back = back
    pairs, loss = zip(parts["block"], gone, strict=True), parts["loss"][0]
    blocks = [Segment(block.peak, block.rest - size) for block, size in pairs]
    loss = Segment(loss.peak + gone[-1], loss.rest + gone[-1])  # the last block's goes in here
    return Trace(kinds, parts["to block"][0], blocks, loss, loss_back, blocks_back[::-1], last)


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
    idle = {module for layer in others for module in layer.modules()}
    for module in (module for module in model.modules() if module not in idle):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
                    new = torch.empty(tensor.shape, dtype=dtype if cast else tensor.dtype)
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
    find, masking_utils.find_packed_sequence_indices = masking_utils.find_packed_sequence_indices, none
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


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
def marked(layer: nn.Module, live: LiveBytes, inputs: list, gone: list[int]) -> Iterator[None]:
    """Marks before and after a block, and where its backward begins; before the first also where it ends.

    inputs: takes what comes in, (bytes, a weak reference). gone: takes the bytes of those before that went.
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
            inputs.append((storage.nbytes(), weakref.ref(storage)))

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


def went(inputs: list) -> list[int]:
    """The bytes of the last block's input if it is no more, else 0; nothing if there was no block."""
    return [size if storage() is None else 0 for size, storage in inputs[-1:]]


def extrapolate(traces: dict[int, Trace], at: int) -> Trace:
    """The trace at another batch or length: the polynomial through those that are known, number by number.

    Activations are linear in the rows of a batch, and in their length a polynomial of degree two.
    """

    def number(values: dict[int, int]) -> int:
        total = 0.0
        for x, y in values.items():
            others = [(at - z) / (x - z) for z in values if z != x]
            total += y * math.prod(others)
        return round(total)

    def segment(parts: dict[int, Segment]) -> Segment:
        names = ("peak", "rest")
        return Segment(*(number({x: getattr(part, name) for x, part in parts.items()}) for name in names))

    first = next(iter(traces.values()))
    found = {}
    for name, value in vars(first).items():
        known = {x: getattr(trace, name) for x, trace in traces.items()}
        if isinstance(value, Segment):
            found[name] = segment(known)
        elif name != "kinds":
            found[name] = [segment({x: parts[i] for x, parts in known.items()}) for i in range(len(value))]
    return Trace(first.kinds, **found)
