"""bitsandbytes' optimizers on sharded parameters: moments of 8 bit, or paged between GPU and host.

8-bit Optimizers via Block-wise Quantization (Dettmers et al., arXiv 2110.02861): a moment is one byte for
each element and one fp32 scale (absmax) for each block of 256.

bitsandbytes refuses DTensors, so it is given flat views of each rank's own part. Two of its choices would
then depend on the number of ranks. They are made here as it makes them on the whole tensor: whether moments
are 8-bit follows from the parameter's global size, and blocks are those of the whole flattened parameter. A
block that lies across ranks is the exception: each rank scales its own part of it.
"""

import logging
import math
from types import ModuleType
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..model.pieces import local, rows_of_full_shard
from ..run.errors import ConfigError, print0

BLOCK = 256  # elements with one scale
LEAST_8BIT = 4096  # parameters with fewer elements keep fp32 moments
CLASSES = {
    "adamw_8bit": "AdamW8bit",
    "lion_8bit": "Lion8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
    "paged_lion_8bit": "PagedLion8bit",
}


def import_bitsandbytes(name: str) -> ModuleType:
    """The package that `--optimizer name` needs; raises ConfigError where it is missing."""
    # it warns of an optional kernel on every rank
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(f"--optimizer {name}: {error} (fix: pip install bitsandbytes)") from None
    return bitsandbytes


def state_bytes(parameter: nn.Parameter, name: str, shards: int, rank: int) -> int:
    """Bytes of a parameter's state on rank `rank` when its rows are cut over `shards` ranks."""
    part = _part(parameter.shape, shards, rank)
    if _is_8bit(name, parameter):
        moment_bytes = part.elements + 4 * math.prod(part.scales_shape)
    else:
        moment_bytes = 4 * part.elements
    step_bytes = 4
    return _moments(name) * moment_bytes + step_bytes


class ShardedBnb(torch.optim.Optimizer):
    """bitsandbytes' optimizer `name`, one of CLASSES, over plain or sharded (DTensor) parameters.

    param_groups hold the parameters themselves, so learning rates, zero_grad, clipping and GradScaler work as
    on any optimizer. state[parameter] is what checkpoints save, and load in place:
        step     () fp32
        state1   the first moment, shaped and sharded as the parameter: uint8 codes, or fp32
        absmax1  of codes: fp32 scales. (rows, blocks per row), sharded likewise, where a row is whole blocks;
                 else (shards, most blocks of a shard), one row for each shard, which may begin within a block
        state2, absmax2  likewise the second moment, which Lion does not have
    groups: dicts of params and weight_decay; the weights must be in memory, cut along dim 0 if at all. AdamW
    has the betas of build_optimizer, Lion its own. Raises ConfigError where bitsandbytes is missing.
    """

    def __init__(self, groups: list[dict], lr: float, name: str):
        self.bnb = import_bitsandbytes(name)
        # of the state, as checkpoints name it: paged or not makes no difference there
        self.kind = name.removeprefix("paged_") if "8bit" in name else name
        betas = (0.9, 0.99) if "lion" in name else (0.9, 0.95)
        super().__init__(groups, {"lr": lr, "betas": betas})

        self.parts: dict[nn.Parameter, _Part] = {}
        for group in self.param_groups:
            for parameter in group["params"]:
                shards, index = _shard(parameter)
                self.parts[parameter] = _part(parameter.shape, shards, index)
        device = next(iter(self.parts)).device

        wants_paging = name.startswith("paged")
        self.paged = wants_paging and device.type == "cuda"
        if wants_paging and not self.paged:
            print0(f"optimizer {name}: the state is in host memory anyway, so nothing is paged")

        # code -> value in [-1, 1], for each moment; the second one is never negative
        self.maps: list[torch.Tensor] = []
        for signed in (True, False)[: _moments(name)]:
            values = self.bnb.functional.create_dynamic_map(signed)
            self.maps.append(values.to(device))

        # the part of each parameter that bitsandbytes sees: slices of it, and a view of each
        self.cuts: dict[nn.Parameter, list[slice]] = {}
        self.views: dict[nn.Parameter, list[nn.Parameter]] = {}
        for parameter, part in self.parts.items():
            self.cuts[parameter] = _cuts(part, _is_8bit(name, parameter))
            self.views[parameter] = []
            for cut in self.cuts[parameter]:
                view = _flat(parameter)[cut]
                self.views[parameter].append(nn.Parameter(view))

        inner_groups = []
        for group in self.param_groups:
            views = []
            for parameter in group["params"]:
                views += self.views[parameter]
            inner_groups.append({**group, "params": views})
        inner_class = getattr(self.bnb.optim, CLASSES[name])
        self.inner = inner_class(inner_groups)
        for parameter in self.parts:
            self.state[parameter] = self._new_state(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """One step at the learning rates that the groups have now, for parameters with a gradient."""
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            for key, value in group.items():
                if key != "params":
                    inner_group[key] = value
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._prepare_step(parameter)
        self.inner.step()
        self.inner.zero_grad()

    def _prepare_step(self, parameter: nn.Parameter) -> None:
        """Hand the weights, the gradient and the step count of a parameter to bitsandbytes, and count."""
        state = self.state[parameter]
        steps = int(state["step"])
        state["step"] += 1
        weights = _flat(parameter)
        gradients = _flat(parameter.grad.contiguous())
        for view, cut in zip(self.views[parameter], self.cuts[parameter], strict=True):
            # in each step, as model.to() moves the weights
            view.data = weights[cut]
            view.grad = gradients[cut]
            self.inner.state[view]["step"] = steps

    def load_state_dict(self, state_dict: dict) -> None:
        raise NotImplementedError("the state is loaded in place, by checkpoint.load_checkpoint")

    def other_scales(
        self, tensors: dict[str, torch.Tensor], saved: dict
    ) -> dict[str, torch.Tensor]:
        """By name, room for the scales that another number of shards has saved in another shape.

        tensors: what will be loaded; saved: DCP's metadata; both by name. After the load comes take_scales.
        """
        name_of = {id(tensor): name for name, tensor in tensors.items()}
        self.saved_scales: list[_SavedScales] = []
        rooms: dict[str, torch.Tensor] = {}
        for parameter, state in self.state.items():
            if _rows_are_blocks(parameter.shape):
                continue
            for moment in range(1, len(self.maps) + 1):
                scales = state.get(f"absmax{moment}")
                name = name_of.get(id(scales))
                size = getattr(saved.get(name), "size", ())
                if len(size) != 2 or size[0] == 0 or size == scales.shape:
                    continue
                shards, blocks = size
                if (1, blocks) == _part(parameter.shape, shards, 0).scales_shape:
                    rooms[name] = torch.zeros(size)
                    self.saved_scales.append(_SavedScales(rooms[name], parameter, moment))
        return rooms

    @torch.no_grad()
    def take_scales(self) -> None:
        """Fill the scales from those loaded for other_scales. They stay exact, except for blocks that lay
        across shards and no longer do. These are quantized again; prints how many there are.
        """
        merged: dict[nn.Parameter, set[int]] = {}  # blocks in which a shard ended and none ends now
        device = self.maps[0].device
        for scales, parameter, moment in self.saved_scales:
            saved_chunk = _part(parameter.shape, len(scales), 0).chunk
            chunk = self.parts[parameter].chunk
            merged[parameter] = set()
            for end in range(saved_chunk, parameter.numel(), saved_chunk):
                if end % BLOCK and end % chunk:
                    merged[parameter].add(end // BLOCK)
            self._take(parameter, moment, scales.to(device), saved_chunk)
        blocks = sum(len(numbers) for numbers in merged.values())
        tensors = sum(1 for numbers in merged.values() if numbers)
        if blocks:
            counts = f"{blocks} blocks of {BLOCK} in {tensors} tensors"
            print0(
                f"optimizer {counts} lay across ranks of the checkpoint:"
                " their 8-bit state is quantized again"
            )

    def _take(
        self, parameter: nn.Parameter, moment: int, saved: torch.Tensor, saved_chunk: int
    ) -> None:
        """Fill the scales of one moment, and quantize again the blocks that had several.

        saved: (shards, most blocks of a shard), the scales of shards of `saved_chunk` elements.
        """
        part = self.parts[parameter]
        values = self.maps[moment - 1]
        codes = _flat(self.state[parameter][f"state{moment}"])
        scales = _flat(self.state[parameter][f"absmax{moment}"])

        def saved_scale(element: torch.Tensor) -> torch.Tensor:
            shard = element // saved_chunk
            first_block = shard * saved_chunk // BLOCK
            return saved[shard, element // BLOCK - first_block]

        # the first and the last element of each block, as far as they are on this rank
        begin = part.start // BLOCK * BLOCK
        first = torch.arange(begin, part.stop, BLOCK, device=saved.device)
        last = (first + BLOCK - 1).clamp(max=part.stop - 1)
        first = first.clamp(min=part.start)
        scales[: len(first)] = saved_scale(first)

        has_several = first // saved_chunk != last // saved_chunk
        for block in has_several.nonzero().flatten().tolist():
            start = int(first[block])
            stop = int(last[block]) + 1
            element = torch.arange(start, stop, device=saved.device)
            place = element - part.start
            exact = values[codes[place].long()] * saved_scale(element)
            new_codes, quantized = self.bnb.functional.quantize_blockwise(
                exact, values, blocksize=BLOCK
            )
            codes[place] = new_codes
            scales[block] = quantized.absmax

    def _new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Zeros. Each view's part of them becomes the state that bitsandbytes would make for the view."""
        state = {"step": torch.zeros(())}
        for number in range(1, len(self.maps) + 1):
            self._add_moment(state, parameter, number)
        return state

    def _add_moment(
        self, state: dict[str, torch.Tensor], parameter: nn.Parameter, number: int
    ) -> None:
        """Add the zeros of moment `number`, 1 or 2, to the state of a parameter."""
        weights = _flat(parameter)
        part = self.parts[parameter]
        is_8bit = _is_8bit(self.kind, parameter)
        # get_state_buffer pages large tensors, but not small ones
        new_zeros = self.inner.get_state_buffer if self.paged else torch.zeros_like
        moment = new_zeros(weights, dtype=torch.uint8 if is_8bit else torch.float32)
        shaped = moment.view(-1, *parameter.shape[1:])
        state[f"state{number}"] = _sharded(shaped, parameter, parameter.shape)
        if is_8bit:
            scales = torch.zeros(part.scales_shape, device=weights.device)
            rows = parameter.shape[0] if _rows_are_blocks(parameter.shape) else part.shards
            shape = (rows, part.scales_shape[1])
            state[f"absmax{number}"] = _sharded(scales, parameter, shape)

        for view, cut in zip(self.views[parameter], self.cuts[parameter], strict=True):
            inner_state = self.inner.state[view]
            inner_moment = moment[cut]
            if hasattr(moment, "is_paged"):  # a part of paged memory is paged
                vars(inner_moment).update(vars(moment))
            inner_state[f"state{number}"] = inner_moment
            if is_8bit:
                # blocks are counted from the one in which this rank's part begins
                first_of_part = part.start // BLOCK
                first = (part.start + cut.start) // BLOCK
                last = (part.start + cut.stop - 1) // BLOCK
                blocks = slice(first - first_of_part, last + 1 - first_of_part)
                inner_state[f"qmap{number}"] = self.maps[number - 1]
                inner_state[f"absmax{number}"] = scales.view(-1)[blocks]


class _SavedScales(NamedTuple):
    """Scales of a moment as another number of shards has saved them."""

    scales: torch.Tensor
    parameter: nn.Parameter
    moment: int


class _Part(NamedTuple):
    """Elements `start` up to `stop` of a flattened parameter, and the shape of their scales."""

    shards: int
    chunk: int  # elements of a full shard
    start: int
    stop: int
    scales_shape: tuple[int, int]  # see ShardedBnb

    @property
    def elements(self) -> int:
        return self.stop - self.start


def _part(shape: torch.Size, shards: int, index: int) -> _Part:
    """Shard `index` of a parameter whose rows are dealt as torch.chunk does."""
    row_elements = shape[1:].numel()
    chunk = rows_of_full_shard(shape[0], shards) * row_elements
    start = min(index * chunk, shape.numel())
    stop = min((index + 1) * chunk, shape.numel())
    if _rows_are_blocks(shape):
        rows = (stop - start) // row_elements
        scales_shape = (rows, row_elements // BLOCK)
    else:
        most_blocks = (chunk + BLOCK - 2) // BLOCK + 1  # of a shard, wherever it begins
        scales_shape = (1, most_blocks)
    return _Part(shards, chunk, start, stop, scales_shape)


def _shard(parameter: nn.Parameter) -> tuple[int, int]:
    """(number of shards, which of them this rank has); the copies of HSDP have the same shard."""
    if not isinstance(parameter, DTensor):
        return 1, 0
    mesh = parameter.device_mesh
    placements = parameter.placements
    cut = [axis for axis, placement in enumerate(placements) if not placement.is_replicate()]
    along_rows = all(placements[axis].is_shard(0) for axis in cut)
    assert along_rows, f"cut along other dims than 0: {placements}"
    assert len(cut) <= 1, f"cut twice: {placements}"
    if not cut:
        return 1, 0
    return mesh.size(cut[0]), mesh.get_local_rank(cut[0])


def _cuts(part: _Part, is_8bit: bool) -> list[slice]:
    """Views of a part: the end of a block that begins on another rank, then all elements after it."""
    head = min(-part.start % BLOCK, part.elements) if is_8bit else 0
    cuts = [slice(0, head), slice(head, part.elements)]
    return [cut for cut in cuts if cut.start < cut.stop]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part as a 1-D view."""
    return local(tensor).detach().view(-1)


def _sharded(part: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`part` as this rank's part of a tensor of `shape`, sharded as `like`.

    DTensor.from_local would move a part that is on the host.
    """
    if not isinstance(like, DTensor):
        return part
    stride = torch.empty(shape, device="meta").stride()
    meta = TensorMeta(torch.Size(shape), stride, part.dtype)
    spec = DTensorSpec(like.device_mesh, like.placements, meta)
    return DTensor(part, spec, requires_grad=False)


def _is_8bit(name: str, parameter: nn.Parameter) -> bool:
    return "8bit" in name and parameter.numel() >= LEAST_8BIT


def _rows_are_blocks(shape: torch.Size) -> bool:
    return shape[1:].numel() % BLOCK == 0


def _moments(name: str) -> int:
    """How many moments an optimizer has."""
    return 1 if "lion" in name else 2
