"""Count where the steps of a recipe would make the host wait for a GPU, rehearsed on a CPU:
`python tests/waits.py RECIPE FLAGS...` prints one JSON object, place in the code -> times.

What parameters, buffers and moved batches hold counts as memory of a GPU, and so does what is computed from
it. An operation whose result the host has to know makes it wait.
"""

import collections
import importlib
import json
import os
import sys
import types
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "recipes"))
recipe = importlib.import_module(sys.argv.pop(1))

from utils.data.batches import Batch
from utils.run.settings import parse_cli
from utils.train.log import RunLog

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default}
WAITS |= {aten.masked_select.default, aten.equal.default}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
OURS = (f"{os.sep}recipes{os.sep}", f"{os.sep}utils{os.sep}", f"{os.sep}transformers{os.sep}")


class Waits(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.on_gpu: dict[int, bool] = {}  # by storage; the value is not used
        self.found = collections.Counter()

    def mark(self, tensors) -> None:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage._cdata not in self.on_gpu:
                self.on_gpu[storage._cdata] = True
                weakref.finalize(storage, self.on_gpu.pop, storage._cdata, None)

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tensors_of((args, kwargs))
        hot = any(storage_of(t)._cdata in self.on_gpu for t in given)
        if not given:  # what transformers makes of nothing, such as positions, it makes on the GPU
            hot = f"{os.sep}transformers{os.sep}" in place().co_filename
        by_mask = func in INDEXING and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if hot and (func in WAITS or by_mask):
            code = place()
            self.found[f"{os.path.basename(code.co_filename)}:{code.co_name}"] += 1
        result = func(*args, **kwargs)
        if hot:
            self.mark(tensors_of(result))
            for argument, value in zip(func._schema.arguments, args, strict=False):
                if argument.is_write:
                    self.mark(tensors_of(value))
            for argument in func._schema.arguments:
                if argument.is_write and argument.name in kwargs:
                    self.mark(tensors_of(kwargs[argument.name]))
        return result


def tensors_of(values) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storage_of(tensor: torch.Tensor):
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


def copy_of(value):
    return value.clone() if isinstance(value, torch.Tensor) else value


def place() -> types.CodeType:
    """The innermost function of ours or of transformers."""
    frame = sys._getframe(2)
    while not any(part in frame.f_code.co_filename for part in OURS):
        frame = frame.f_back
    return frame.f_code


def main() -> None:
    waits = Waits()
    adds = "add_scores" if hasattr(recipe, "add_scores") else "add_chunked_loss"
    add, move, read, act = getattr(recipe, adds), Batch.to, RunLog.read, recipe.act
    models = []

    def remember(model, *args):
        models.append(model)
        return add(model, *args)

    def moved(batch, device):
        with torch.utils._python_dispatch._disable_current_modes():
            copied = {name: copy_of(value) for name, value in vars(move(batch, device)).items()}
        waits.mark(tensors_of(list(copied.values())))
        return type(batch)(**copied)

    def begin() -> None:
        waits.mark([*models[0].parameters(), *models[0].buffers()])
        waits.__enter__()

    def counted(*args):
        with torch.utils._python_dispatch._disable_current_modes():
            read(*args)  # tolist of a CPU's tensor is no operation
        waits.found["read"] += 1

    def acts(name: str) -> None:
        if name == "save":
            waits.__exit__(None, None, None)
        act(name)

    setattr(recipe, adds, remember)
    Batch.to, RunLog.read = moved, counted
    recipe.stop_after_step, recipe.act = begin, acts
    recipe.main(parse_cli(recipe.Config))
    print(json.dumps(waits.found))


if __name__ == "__main__":
    main()
