"""The memory that pictures need in a step: the layers of a tower and the projector, each on meta tensors.

A tower reads the sizes of its pictures from the values of tensors, and meta tensors have no values. So the
model runs on real zeros up to its language model. Only its large modules (the embedding, the tower's layers,
the projector) run on meta tensors, one by one.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only

from ..model.sharding import PROJECTOR, language_model, tower_layers
from .need import Replay, UnitBytes
from .trace import LiveBytes, Segment, aten, on_meta, parameters_in, segments_of, tensors_in

INDEXED = (aten.index, aten.index_put, aten.index_put_)
on_tensors = partial(tree_map_only, Tensor)  # (function, values): of each tensor among values
SMALL = 1e-5  # a tower with at most this share of all parameters is computed, not traced
MORE = 8  # tokens by which the rows of the second traced micro-batch are longer


@dataclass(frozen=True, eq=False)
class Pictures:
    """The pictures that the plan assumes in each row: those of the row with the most. rows_of(n): a batch of
    n such rows, with ids (n, t) and extra, the model's other inputs.
    """

    rows_of: Callable
    traced: dict = field(default_factory=dict)  # (model, dtype, recompute) -> what `trace` found

    def batch(self, rows: int, seq_len: int) -> tuple:
        """(ids (rows, seq_len), the other inputs) of such a batch, padded."""
        batch = self.rows_of(rows)
        shape = batch.ids.shape

        def padded(tensor):
            if tensor.shape[:2] != shape:  # has no value for each token
                return tensor
            return F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, seq_len - shape[1]))

        return tree_map(padded, (batch.ids, batch.extra))

    def trace(
        self, model: nn.Module, dtype: torch.dtype, rows: int, seq_len: int, recompute: str
    ) -> tuple:
        """(the mode that logs the language model's operations, what comes before the language model). The
        latter grows linearly with the rows, so it is traced for two small micro-batches only.
        """
        layers = tower_layers(model, SMALL)
        trains = any(p.requires_grad for p in nn.ModuleList(layers).parameters())
        key = (model, dtype, trains and recompute)
        if key not in self.traced:
            tokens = self.rows_of(1).ids.shape[1]
            one, two = (
                PictureTrace(model, dtype).come_to_language(*self.batch(*shape))
                for shape in ((1, tokens), (2, tokens + MORE))
            )
            self.traced[key] = (tokens, one, two)
        tokens, one, two = self.traced[key]
        if len(one.calls) != len(two.calls):  # one call for each picture
            one, two = (before._replace(calls=one.calls * rows) for before in (one, two))
        return PictureBytes(), tree_map(partial(resized, tokens, rows, seq_len), one, two)


def resized(tokens: int, rows: int, seq_len: int, one, two) -> object:
    """A number of bytes or a tensor for `rows` rows of `seq_len` tokens, from its values for
    micro-batches (1, tokens) and (2, tokens + MORE). Integer tensors of at most 2**26 elements are real,
    other tensors on meta.
    """

    def of_rows(of_one, of_two):
        return of_one + (rows - 1) * (of_two - of_one)

    if type(one) is int:
        return of_rows(one, two)
    if not isinstance(one, Tensor):
        return one
    shape = []
    padding = []
    for size, size_of_two in zip(one.shape, two.shape, strict=True):
        of_tokens = size == tokens and size_of_two == tokens + MORE
        shape.append(seq_len if of_tokens else of_rows(size, size_of_two))
        padding = [0, seq_len - size if of_tokens else 0, *padding]
    if one.is_floating_point() or math.prod(shape) > 2**26:
        return one.new_empty(shape, device="meta", requires_grad=one.requires_grad)
    one = F.pad(one, padding)  # the added tokens hold no picture
    copies = [math.ceil(size / old) for size, old in zip(shape, one.shape, strict=True)]
    return one.repeat(copies)[tuple(map(slice, shape))]


def blank_pictures(model: nn.Module, image_processor, sizes: Sequence[tuple]) -> Pictures:
    """Rows with blank pictures of these sizes (width, height), and almost no text. model: on meta."""
    blanks = [Image.new("RGB", size) for size in sizes]
    token = model.config.image_token_id
    parameters = inspect.signature(type(model.base_model).forward).parameters

    def features(images):
        extra = image_processor(images=images, return_tensors="pt")
        return {name: value for name, value in extra.items() if name in parameters}

    row = []  # the tokens of each picture, and one of text that separates it from the next
    for blank in blanks:
        row += [token] * PictureTrace(model, torch.float32).tokens(features([blank])) + [token - 1]

    def rows_of(rows):
        extra = features(blanks * rows)
        ids = torch.tensor([row] * rows)
        for name in ("mm_token_type_ids", "token_type_ids"):
            if name in parameters:
                extra[name] = (ids == token).long()
        return SimpleNamespace(ids=ids, extra=extra)

    return Pictures(rows_of)


class Call(NamedTuple):
    """A call of a tower's layer that is a unit, by its number, or of another module (-1). backward: its rest
    has the whole gradients, but not what the forward kept.
    """

    layer: int
    forward: Segment
    backward: Segment
    trains: bool  # gradients go through it


class PictureBytes(LiveBytes):
    """LiveBytes that computes operations on real tensors, such as the sizes of pictures."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in INDEXED:
            args = (args[0], numbered(args[1]), *args[2:])
        kwargs = kwargs or {}
        metas = {tensor.is_meta for tensor in tensors_in((args, kwargs))}
        # Towers begin with a convolution, which takes seconds on real zeros, and has no sizes to read.
        is_real = True not in metas and func is not aten.convolution.default
        if not metas:  # it creates a tensor: integers are real, floating-point values on meta
            dtype = kwargs.get("dtype") or torch.float32
            is_real = not dtype.is_floating_point or func.overloadpacket is aten.arange
        if not is_real:
            if False in metas:  # asked first, because towers have very many operations
                args, kwargs = on_tensors(lambda tensor: tensor.to("meta"), (args, kwargs))
        elif "device" in kwargs:
            kwargs["device"] = "cpu"
        return super().__torch_dispatch__(func, types, args, kwargs)


def numbered(indices: list) -> list:
    """Indices in which a real boolean mask is replaced by the positions of its True elements. Otherwise their
    number would be unknown on meta.
    """
    numbers = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not index.is_meta:
            numbers += index.nonzero().unbind(1)
        else:
            numbers.append(index)
    return numbers


class Reached(Exception):
    """Raised when the language model is called; it carries the arguments."""


class PictureTrace:
    """Traces what comes before the language model, in the forward of a small micro-batch."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        """model: on meta, in training mode."""
        self.model = model
        self.dtype = dtype
        self.layers = tower_layers(model)
        self.calls = []
        self.traced = {}  # equal calls are traced once
        self.graphs = []  # keeps alive what the backward of the real parts needs
        self.embedding = model.get_input_embeddings()
        projector = []
        # A tower too small to be cut, such as that of Qwen2.5-VL 72B, would take minutes on real zeros.
        layers = tower_layers(model, SMALL)
        inside = {*nn.ModuleList(layers).modules()}
        for name, module in model.named_modules():
            is_called = not isinstance(module, nn.ModuleList)
            if PROJECTOR.search(name) and is_called and module not in inside:
                projector.append(module)
                inside.update(module.modules())
        self.large = [self.embedding, *projector, *layers]

    @contextmanager
    def on_zeros(self):
        """Within it small modules run on real zeros, large ones through `run`, and the language
        model raises Reached.
        """
        decoder = language_model(self.model)
        idle_modules = [*self.large, decoder, self.model.get_output_embeddings()]
        with ExitStack() as stack:
            stack.enter_context(parameters_in(self.dtype, self.model, idle_modules))
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                tensor.data.zero_()  # does nothing on meta
            for module in (*self.large, decoder):
                module.forward = reach if module is decoder else partial(self.run, module)
                stack.callback(delattr, module, "forward")
            yield

    def tokens(self, extra: dict) -> int:
        """How many tokens the model makes of these pictures."""
        with torch.no_grad(), self.on_zeros():
            output = self.model.base_model.get_image_features(**extra)
        features = tree_leaves(getattr(output, "pooler_output", output))
        numel = sum(feature.numel() for feature in features)
        return numel // self.model.config.get_text_config().hidden_size

    def come_to_language(self, ids: Tensor, extra: dict) -> "Before":
        """Run the model on a micro-batch, up to its language model."""
        live = PictureBytes()
        with self.on_zeros(), live:
            try:
                self.model.base_model(ids, **extra, use_cache=False)
            except Reached as reached:
                (arguments,) = reached.args
        kept_bytes = sum(live.sizes.values()) + sum(value.nbytes for value in extra.values())
        embedded = arguments.get("inputs_embeds")
        if embedded is not None:  # counted with the language model
            kept_bytes -= live.sizes.get(embedded.untyped_storage()._cdata, 0)
        return Before(self.model, self.calls, kept_bytes, arguments)

    def run(self, module: nn.Module, *args, **kwargs):
        """Stands in for the forward of a large module: trace the call, and return zeros like its outputs."""
        values, structure = tree_flatten((args, kwargs))
        self.graphs += [tensor for tensor in tensors_in(values) if tensor.requires_grad]
        key = (type(module), str(structure), *map(description, [*values, *module.parameters()]))
        with _disable_current_modes():
            if key not in self.traced:
                self.traced[key] = self.trace_call(module, args, kwargs)
            forward, backward, outputs = self.traced[key]
            if module is not self.embedding:
                layer = self.layers.index(module) if module in self.layers else -1
                trains = any(value.requires_grad for value in tree_leaves(outputs))
                self.calls.append(Call(layer, forward, backward, trains))
            return on_tensors(zeros_like, outputs)

    def trace_call(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        """(forward, backward, outputs as meta tensors) of one call of a module."""
        live = PictureBytes()
        with on_meta(), parameters_in(self.dtype, self.model, part=module):
            args, kwargs = on_tensors(meta_like, (args, kwargs))
            with live:
                # Not module(...), because its hooks collect hidden states.
                outputs = type(module).forward(module, *args, **kwargs)
                live.log.append("forward")
            shapes = on_tensors(meta_like, outputs)
            with live:
                trained = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
                grads = [torch.empty_like(tensor) for tensor in trained]
                live.log.append("gradients")
                if trained:
                    torch.autograd.backward(trained, grads)
                del outputs, trained, grads
                live.log.append("backward")
        segments = segments_of(live.log)
        return segments["forward"][0], segments["backward"][0], shapes


class Before(NamedTuple):
    """What comes before the language model: calls, in their order; bytes, kept besides those of the calls;
    arguments, those of the language model.
    """

    model: nn.Module
    calls: list[Call]
    bytes: int
    arguments: dict

    def hidden(self, ids: Tensor) -> Tensor:
        """The last hidden states of the language model. Its parameters and ids (B, T) are on meta."""
        embedded = self.model.get_input_embeddings()(ids)
        trains = any(call.trains for call in self.calls)
        features = torch.empty(embedded.shape, dtype=embedded.dtype, requires_grad=trains)
        arguments = on_tensors(meta_like, self.arguments) | {"input_ids": None}
        arguments["inputs_embeds"] = torch.where(ids[..., None] > 0, features, embedded)
        del embedded, features
        return language_model(self.model)(**arguments).last_hidden_state

    def forward(self, replay: Replay, towers: list[UnitBytes]) -> None:
        """The part of a step between the embedding and the blocks."""
        for call in self.calls:
            if call.layer >= 0:
                replay.unshard(towers[call.layer], forward=True)
            replay.compute(call.forward if call.trains else call.forward._replace(rest=0))
            if call.layer >= 0 and replay.setting.reshard_after_forward:
                replay.reshard(towers[call.layer])

    def backward(self, replay: Replay, towers: list[UnitBytes], sync: bool) -> None:
        """The part of a step after the backward of the blocks."""
        for call in reversed([call for call in self.calls if call.trains]):
            if call.layer < 0:
                replay.compute(call.backward)
                continue
            unit = towers[call.layer]
            replay.unshard(unit, forward=False)
            replay.compute(call.backward, unit.grads)
            replay.reduce(unit, sync)


def reach(**kwargs):
    """Stands in for the forward of the language model."""
    raise Reached(kwargs)


def description(value: object) -> object:
    """Calls whose values have equal descriptions need the same memory."""
    if not isinstance(value, Tensor):
        return repr(value)
    is_known = not value.is_floating_point() and not value.is_meta
    numbers = value.numpy().tobytes() if is_known else b""
    return value.shape, value.dtype, value.requires_grad, numbers


def meta_like(value: Tensor) -> Tensor:
    """A new contiguous tensor of the same shape on meta. Real integers, such as sizes of pictures, keep their
    values.
    """
    if value.is_floating_point() or value.is_meta:
        return value.new_empty(value.shape, device="meta", requires_grad=value.requires_grad)
    return value


def zeros_like(value: Tensor) -> Tensor:
    """Real zeros, which code may write into."""
    zeros = torch.zeros(value.shape, dtype=value.dtype)
    return zeros.requires_grad_().clone() if value.requires_grad else zeros
