"""Draw new weights by the model's own rules; each rank draws only its rows.

A family's `_init_weights` runs once on meta, and its steps for each tensor are recorded: "normal with
this deviation", "ones", "row 0 to zero". Later each rank applies them to blocks of its own shards. A
block is BLOCK elements of the whole tensor, with its own generator, seeded by (seed, name of the tensor,
first element of the block). So a tensor is the same on any number of ranks, and the peak memory above the
shards is one block.
"""

from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import AutoConfig
from transformers.core_model_loading import revert_weight_conversion

from ..run.distributed import World, together
from ..run.errors import check, first_five, others_code
from ..run.units import seed_of
from .folder import Source, read_config, read_json
from .loading import local_parts, whole

SHAPES = Path(__file__).resolve().parents[2] / "configs" / "shapes"
BLOCK = 2**20  # elements
FIX = "another family, or --init model with weights that transformers has made"
# Functions of torch that act on each element by itself: the first fill a tensor, the others change its
# values.
FILLS = set("normal_ uniform_ fill_ zero_ copy_ exponential_ log_normal_".split())
CHANGES = set("add_ sub_ mul_ div_ neg_ abs_ exp_ log_ pow_ sqrt_ erfinv_ clamp_".split())


class Step(NamedTuple):
    """A function of torch that changes elements [begin, end) of a tensor in place, each by itself."""

    function: torch._ops.OpOverload
    begin: int
    end: int
    arguments: list  # numbers; or values of these elements, (end - begin,)
    options: dict


class Recorder(TorchDispatchMode):
    """Records the in-place functions that run on some tensors. names: by the address of their storage."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names = names
        self.steps = {name: [] for name in names.values()}  # the list[Step] of each tensor

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        options = kwargs or {}
        name = None
        if function._schema.is_mutable and torch.is_tensor(args[0]):
            target, *others = args
            name = self.names.get(target.untyped_storage()._cdata)
        if name:
            on_meta = any(torch.is_tensor(value) and value.is_meta for value in others)
            check(
                kind_of(function) in FILLS | CHANGES and not on_meta and target.is_contiguous(),
                f"--init random: the rule for {name} is not one for each element (fix: {FIX})",
            )
            flat = tree_map_only(Tensor, lambda value: value.expand(target.shape).flatten(), others)
            begin = target.storage_offset()
            self.steps[name].append(Step(function, begin, begin + target.numel(), flat, options))
        return function(*args, **options)


def kind_of(function) -> str:
    """normal_ for aten::normal_"""
    return function._schema.name.removeprefix("aten::")


def open_config(name: str, world: World, tokenizer: str, trust_remote_code: bool) -> Source:
    """The config of a folder with a config.json, or of a name in SHAPES, without weights. ConfigError on all
    ranks for another name, and for a shape without --tokenizer.
    """
    with together(world):
        path = SHAPES / f"{name.lower()}.json"
        if path.exists():
            check(
                tokenizer, f"--model {name} is a shape, without a tokenizer (fix: --tokenizer DIR)"
            )
            return Source(path, AutoConfig.for_model(**read_json(path)), {})
        folder = Path(name)
        check(
            (folder / "config.json").is_file(),
            f"--init random --model {name} is no folder with a config.json (fix: one, or a name in {SHAPES})",
        )
        return Source(folder, read_config(folder, trust_remote_code), {})


def plan_weights(model: nn.Module, dtype: torch.dtype) -> tuple:
    """(the tensors that save_pretrained would write, in `dtype` and in no file; the steps that draw each
    tensor of the state). model: on meta, not sharded; nothing is allocated.

    Raises ConfigError for a family whose rules do not fill every tensor, or cannot be applied block by block.
    """
    # On meta torch 2.13's truncated normals do nothing: the plain ones stay, as here in towers.
    check(
        model.config.model_type not in ("blt", "modernbert-decoder"),
        f"--init random: truncated normals of {model.config.model_type} are not drawn in blocks (fix: {FIX})",
    )
    state = model.state_dict(keep_vars=True)
    names = {}
    for name, tensor in state.items():
        names.setdefault(tensor.untyped_storage()._cdata, name)  # tied ones once
    recorder = Recorder(names)
    # transformers ties a head after it is drawn: its embedding's rule counts.
    model.get_output_embeddings()._is_hf_initialized = bool(model.all_tied_weights_keys)
    with others_code(f"--init random: {model.config.model_type}", FIX), torch.no_grad(), recorder:
        model.initialize_weights()
    # Nothing is filled yet, also by modules without tensors: Falcon H1's decoder fills buffers of its layers.
    for module in model.modules():
        module._is_hf_initialized = False
    unfilled = []
    for name, steps in recorder.steps.items():
        fills = {step[1:3] for step in steps if kind_of(step.function) in FILLS}
        if sum(end - begin for begin, end in fills) < state[name].numel():
            unfilled.append(name)
    check(
        not unfilled,
        f"--init random: the rules of {model.config.model_type} do not fill {first_five(unfilled)}"
        f" (fix: {FIX})",
    )
    saved = revert_weight_conversion(model, {name: state[name].detach() for name in names.values()})
    weights = {}
    for name, tensor in saved.items():
        if tensor.is_floating_point():
            tensor = tensor.to(dtype)
        weights[name] = whole(name, tensor).info
    return weights, recorder.steps


@torch.no_grad()
def draw_weights(model: nn.Module, plan: dict, seed: int) -> None:
    """Fill this rank's shards, which must be allocated (see load_pieces). plan: from plan_weights."""
    state = model.state_dict(keep_vars=True)
    for name, steps in plan.items():
        tensor = state[name]
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        for first, values in local_parts(tensor, whole(name, tensor)):
            last = first + len(values)
            for begin in range(first // BLOCK * BLOCK, last, BLOCK):
                block = torch.empty(min(BLOCK, tensor.numel() - begin), dtype=dtype)
                draw_block(block, begin, steps, f"{seed} {name} {begin}")
                start = max(first, begin)
                end = min(last, begin + len(block))
                values[start - first : end - first].copy_(block[start - begin : end - begin])


def draw_block(block: Tensor, begin: int, steps: list[Step], key: str) -> None:
    """Fill elements [begin, begin + len(block)) of a tensor, on the CPU. key: seeds the generator."""
    generator = torch.Generator().manual_seed(seed_of(key))
    for step in steps:
        start = max(step.begin, begin)
        end = min(step.end, begin + len(block))
        if start >= end:
            continue
        own = slice(start - step.begin, end - step.begin)
        arguments = tree_map_only(Tensor, itemgetter(own), step.arguments)
        options = dict(step.options)
        if any(argument.name == "generator" for argument in step.function._schema.arguments):
            options["generator"] = generator
        step.function(block[start - begin : end - begin], *arguments, **options)
