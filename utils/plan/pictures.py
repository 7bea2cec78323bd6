"""What pictures take in a step: the layers of a tower and the projector behind it, each on fake tensors.

A tower reads the sizes of its pictures from values, which fake tensors have not. So the model runs on real
zeros up to its language model, and only what is large in it (the embedding, the tower's layers, the
projector) on fake tensors, module by module.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ..model.parts import PROJECTOR
from ..model.sharding import tower_layers
from .trace import Call, LiveBytes, Segment, parameters_in


@dataclass(frozen=True, eq=False)
class PictureRow:
    """The row of a run with the most pictures: ids (1, T), and what the model takes beside them."""

    ids: torch.Tensor
    extra: dict[str, torch.Tensor]

    def repeated(self, rows: int, seq_len: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(ids (rows, seq_len), the rest of such a batch)."""
        tokens = self.ids.shape[1]

        def padded(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.shape[:2] == (1, tokens):  # of each token
                tensor = F.pad(tensor, (0, 0) * (tensor.ndim - 2) + (0, seq_len - tokens))
            return tensor.repeat(rows, *[1] * (tensor.ndim - 1))

        return padded(self.ids), {name: padded(value) for name, value in self.extra.items()}


class Reached(Exception):
    """The language model was called."""


def trace_pictures(
    model: nn.Module, dtype: torch.dtype, ids: torch.Tensor, extra: dict
) -> tuple[tuple[Call, ...], int, dict]:
    """(the calls of tower and projector in their order, bytes that are kept beside those, what the language
    model is called with) in the forward of a micro-batch. The model is on meta and in training mode. Equal
    calls are traced once.
    """
    layers, decoder = tower_layers(model), model.get_decoder()
    projector, inside = [], {m for layer in layers for m in layer.modules()}
    for name, module in model.named_modules():
        is_called = not isinstance(module, nn.ModuleList)
        if PROJECTOR.search(name) and is_called and module not in inside:
            projector.append(module)
            inside.update(module.modules())
    large = [model.get_input_embeddings(), *projector, *layers]
    calls: list[Call] = []
    known: dict[tuple, tuple] = {}
    graphs = []  # what the backward of the real parts needs stays

    def run(module: nn.Module, *args, **kwargs):
        values, structure = tree_flatten((args, kwargs))
        graphs.extend(value for value in values if getattr(value, "requires_grad", False))
        shapes = [description(value) for value in [*values, *module.parameters()]]
        key = (type(module), str(structure), *shapes)
        if key not in known:
            with _disable_current_modes():
                known[key] = trace_call(model, module, dtype, args, kwargs)
        forward, backward, outputs = known[key]
        if module is not large[0]:
            layer = layers.index(module) if module in layers else -1
            trains = any(value.requires_grad for value in tree_leaves(outputs))
            calls.append(Call(layer, forward, backward, trains))
        with _disable_current_modes():  # they count as the call's
            return tree_map_only(torch.Tensor, zeros_like, outputs)

    def reach(**kwargs):
        raise Reached(kwargs)

    with ExitStack() as stack:
        heavy = [*large, decoder, model.get_output_embeddings()]
        stack.enter_context(parameters_in(dtype, model, heavy, make=torch.zeros))
        for module in (*large, decoder):
            module.forward = partial(run, module) if module is not decoder else reach
            stack.callback(delattr, module, "forward")
        live = stack.enter_context(LiveBytes())
        try:
            model.base_model(ids, **extra, use_cache=False)
        except Reached as reached:
            (read,) = reached.args
            kept = live.live + sum(value.nbytes for value in extra.values())
            if read.get("inputs_embeds") is not None:  # the embedding's
                kept -= live.sizes.get(read["inputs_embeds"].untyped_storage()._cdata, 0)
            return tuple(calls), kept, read | {"input_ids": None}
    raise AssertionError(f"{type(model).__name__} does not call its language model")


def trace_call(
    model: nn.Module, module: nn.Module, dtype: torch.dtype, args: tuple, kwargs: dict
) -> tuple[Segment, Segment, object]:
    """(its forward, its backward, its outputs as meta tensors) of a call of a module of the model."""
    live = LiveBytes()
    with FakeTensorMode(allow_non_fake_inputs=True), parameters_in(dtype, model, [], module):
        args, kwargs = tree_map_only(torch.Tensor, fake_like, (args, kwargs))
        with live:
            # Not the module itself, whose hooks collect hidden states.
            outputs = type(module).forward(module, *args, **kwargs)
            live.mark("forward")
        shapes = tree_map_only(torch.Tensor, meta_like, outputs)
        with live:
            trained = [t for t in tree_leaves(outputs) if getattr(t, "requires_grad", False)]
            grads = [torch.empty_like(t) for t in trained]
            live.mark("gradients")
            if trained:
                torch.autograd.backward(trained, grads)
            del outputs, trained, grads
            live.mark("backward")
    return live.segments["forward"][0], live.segments["backward"][0], shapes


def description(value: object) -> object:
    """What two calls have in common that need the same memory."""
    if not isinstance(value, torch.Tensor):
        return repr(value)
    numbers = value.numpy().tobytes() if not value.is_floating_point() else b""
    return value.shape, value.dtype, value.requires_grad, numbers


def fake_like(value: torch.Tensor) -> torch.Tensor:
    """A new tensor of that shape, in a FakeTensorMode. Whole numbers, such as sizes of pictures, stay what
    they are.
    """
    if not value.is_floating_point():
        return value
    return torch.empty(value.shape, dtype=value.dtype, requires_grad=value.requires_grad)


def meta_like(value: torch.Tensor) -> torch.Tensor:
    options = {"dtype": value.dtype, "requires_grad": value.requires_grad}
    return torch.empty(value.shape, device="meta", **options)


def zeros_like(value: torch.Tensor) -> torch.Tensor:
    """Real ones, which code may write into."""
    options = {"dtype": value.dtype, "requires_grad": value.requires_grad}
    return torch.zeros(value.shape, **options).clone()
