"""bitsandbytes' optimizers on sharded parameters: moments of 8 bit, or paged between GPU and host.

8-bit Optimizers via Block-wise Quantization (Dettmers et al., arXiv 2110.02861): a moment is one byte for
each element and one fp32 scale (absmax) for each block of 256.

bitsandbytes refuses DTensors, so it is given flat views of each rank's own part. Two of its choices would
then depend on the number of ranks, and are made here as it makes them on the whole tensor: whether moments
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

# elements with one scale; parameters with fewer elements keep fp32 moments
BLOCK, LEAST_8BIT = 256, 4096
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
    elements = part.stop - part.start
    moment = elements + 4 * math.prod(part.scales) if _is_8bit(name, parameter) else 4 * elements
    return _moments(name) * moment + 4  # and the count of steps


class ShardedBnb(torch.optim.Optimizer):
    """bitsandbytes' optimizer `name`, one of CLASSES, over plain or sharded (DTensor) parameters.

    param_groups hold the parameters themselves, so learning rates, zero_grad, clipping and GradScaler work as
    on any optimizer. state[parameter] is what checkpoints save, and load in place:
        step     () fp32
        state1   the first moment, shaped and sharded as the parameter: uint8 codes, or fp32
        absmax1  of codes: fp32 scales, (rows, blocks per row) sharded likewise where a row is whole blocks;
                 else (shards, most blocks of one), a line for each shard, which may begin within a block
        state2, absmax2  likewise the second moment, which Lion has not
    groups: dicts of params and weight_decay; the weights must be in memory, cut along dim 0 if at all. AdamW
    has the betas of build_optimizer, Lion its own. Raises ConfigError where bitsandbytes is missing.
    """

    def __init__(self, groups: list[dict], lr: float, name: str):
        self.bnb = import_bitsandbytes(name)
        # of state, as checkpoints say
        self.kind = name.removeprefix("paged_") if "8bit" in name else name
        super().__init__(
            groups, {"lr": lr, "betas": (0.9, 0.99) if "lion" in name else (0.9, 0.95)}
        )
        self.parts = {
            p: _part(p.shape, *_shard(p)) for group in self.param_groups for p in group["params"]
        }
        device = next(iter(self.parts)).device
        self.paged = name.startswith("paged") and device.type == "cuda"
        if name.startswith("paged") and not self.paged:
            print0(f"optimizer {name}: the state is in host memory anyway, so nothing is paged")
        signs = (True, False)[: _moments(name)]  # a second moment is never negative
        self.maps = [self.bnb.functional.create_dynamic_map(sign).to(device) for sign in signs]
        self.cuts = {p: _cuts(part, _is_8bit(name, p)) for p, part in self.parts.items()}
        self.views = {
            p: [nn.Parameter(_flat(p)[cut]) for cut in cuts] for p, cuts in self.cuts.items()
        }
        groups = [
            {**g, "params": [v for p in g["params"] for v in self.views[p]]}
            for g in self.param_groups
        ]
        self.inner = getattr(self.bnb.optim, CLASSES[name])(groups)
        for parameter in self.parts:
            self.state[parameter] = self._new_state(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """One step at the learning rates that the groups have now, for what has a gradient."""
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update({key: value for key, value in group.items() if key != "params"})
            for parameter in (p for p in group["params"] if p.grad is not None):
                steps = int(self.state[parameter]["step"])
                self.state[parameter]["step"] += 1
                weights, gradients = _flat(parameter), _flat(parameter.grad.contiguous())
                for view, cut in zip(self.views[parameter], self.cuts[parameter], strict=True):
                    # anew: model.to() moves them
                    view.data, view.grad = weights[cut], gradients[cut]
                    self.inner.state[view]["step"] = steps
        self.inner.step()
        self.inner.zero_grad()

    def load_state_dict(self, state_dict: dict) -> None:
        raise NotImplementedError("the state is loaded in place, by checkpoint.load_checkpoint")

    def other_scales(
        self, tensors: dict[str, torch.Tensor], saved: dict
    ) -> dict[str, torch.Tensor]:
        """By name, room for the scales that another number of shards has saved in another shape.

        tensors: what will be loaded; saved: DCP's metadata; both by name. After the load comes take_scales.
        """
        names, self.others = {id(tensor): name for name, tensor in tensors.items()}, {}
        for parameter, state in self.state.items():
            for moment in range(1, len(self.maps) + 1):
                mine = state.get(f"absmax{moment}")
                size = getattr(saved.get(names.get(id(mine))), "size", ())
                by_shard = len(size) == 2 and size[0] > 0 and not _rows_are_blocks(parameter.shape)
                fits = by_shard and (1, size[1]) == _part(parameter.shape, size[0], 0).scales
                if fits and size != mine.shape:
                    self.others[names[id(mine)]] = torch.zeros(size), parameter, moment
        return {name: room for name, (room, _, _) in self.others.items()}

    @torch.no_grad()
    def take_scales(self) -> None:
        """Fill the scales from what was loaded for other_scales: exactly, but for blocks that lay across
        shards and do so no more. These are quantized again; prints how many there are.
        """
        merged = {}  # by parameter, the blocks in which a shard ended and none ends now
        for old, parameter, moment in self.others.values():
            was, now = _part(parameter.shape, len(old), 0).chunk, self.parts[parameter].chunk
            ends = range(was, parameter.numel(), was)
            merged[parameter] = {end // BLOCK for end in ends if end % BLOCK and end % now}
            self._take(parameter, moment, old.to(self.maps[0].device), was)
        blocks, tensors = sum(map(len, merged.values())), sum(map(bool, merged.values()))
        if blocks:
            what = f"{blocks} blocks of {BLOCK} in {tensors} tensors lay across ranks of the checkpoint"
            print0(f"optimizer {what}: their 8-bit state is quantized again")

    def _take(self, parameter: nn.Parameter, moment: int, old: torch.Tensor, was: int) -> None:
        """old: (shards, most blocks of one), the scales of one moment in shards of `was` elements."""
        state, values, part = self.state[parameter], self.maps[moment - 1], self.parts[parameter]
        codes, scales = _flat(state[f"state{moment}"]), _flat(state[f"absmax{moment}"])

        def scale(element: torch.Tensor) -> torch.Tensor:
            shard = element // was
            return old[shard, element // BLOCK - shard * was // BLOCK]

        first = torch.arange(part.start // BLOCK * BLOCK, part.stop, BLOCK, device=old.device)
        last = (first + BLOCK - 1).clamp(max=part.stop - 1)
        first = first.clamp(min=part.start)
        scales[: len(first)] = scale(first)
        for k in (first // was != last // was).nonzero().flatten().tolist():
            element = torch.arange(int(first[k]), int(last[k]) + 1, device=old.device)
            exact = values[codes[element - part.start].long()] * scale(element)
            again, new = self.bnb.functional.quantize_blockwise(exact, values, blocksize=BLOCK)
            codes[element - part.start], scales[k] = again, new.absmax

    def _new_state(self, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
        """Zeros; each view's part of them is the state that bitsandbytes would make for it."""
        local, shape, part = _flat(parameter), parameter.shape, self.parts[parameter]
        is_8bit, rows = (
            _is_8bit(self.kind, parameter),
            shape[0] if _rows_are_blocks(shape) else part.shards,
        )
        # small ones are not paged
        zeros = self.inner.get_state_buffer if self.paged else torch.zeros_like
        state = {"step": torch.zeros(())}
        for i, values in enumerate(self.maps, start=1):
            moment = zeros(local, dtype=torch.uint8 if is_8bit else torch.float32)
            state[f"state{i}"] = _sharded(moment.view(-1, *shape[1:]), parameter, shape)
            if is_8bit:
                scales = torch.zeros(part.scales, device=local.device)
                state[f"absmax{i}"] = _sharded(scales, parameter, (rows, part.scales[1]))
            for view, cut in zip(self.views[parameter], self.cuts[parameter], strict=True):
                inner = self.inner.state[view]
                inner[f"state{i}"] = moment[cut]
                if hasattr(moment, "is_paged"):  # a part of paged memory is paged
                    vars(inner[f"state{i}"]).update(vars(moment))
                if is_8bit:
                    first, last = ((part.start + n) // BLOCK for n in (cut.start, cut.stop - 1))
                    blocks = slice(first - part.start // BLOCK, last + 1 - part.start // BLOCK)
                    inner |= {f"qmap{i}": values, f"absmax{i}": scales.view(-1)[blocks]}
        return state


class _Part(NamedTuple):
    """Elements `start` up to `stop` of a flattened parameter, and the shape of their scales."""

    shards: int
    chunk: int  # elements of a full shard
    start: int
    stop: int
    scales: tuple[int, int]  # see ShardedBnb


def _part(shape: torch.Size, shards: int, index: int) -> _Part:
    """Shard `index` of rows that are dealt as torch.chunk does."""
    row = shape[1:].numel()
    chunk = rows_of_full_shard(shape[0], shards) * row
    start, stop = (min(n * chunk, shape.numel()) for n in (index, index + 1))
    most = (chunk + BLOCK - 2) // BLOCK + 1  # blocks of a shard, wherever it begins
    scales = ((stop - start) // row, row // BLOCK) if _rows_are_blocks(shape) else (1, most)
    return _Part(shards, chunk, start, stop, scales)


def _shard(parameter: nn.Parameter) -> tuple[int, int]:
    """Into how many shards it is cut, and which of them this rank has; copies of HSDP have the same."""
    if not isinstance(parameter, DTensor):
        return 1, 0
    mesh, placements = parameter.device_mesh, parameter.placements
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    assert all(placements[i].is_shard(0) for i in cut), f"cut along other dims than 0: {placements}"
    assert len(cut) <= 1, f"cut twice: {placements}"
    return (mesh.size(cut[0]), mesh.get_local_rank(cut[0])) if cut else (1, 0)


def _cuts(part: _Part, is_8bit: bool) -> list[slice]:
    """Views of a part: what is left of a block that begins on another rank, and the rest."""
    elements = part.stop - part.start
    head = min(-part.start % BLOCK, elements) if is_8bit else 0
    return [cut for cut in (slice(0, head), slice(head, elements)) if cut.start < cut.stop]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part as a 1-D view."""
    return local(tensor).detach().view(-1)


def _sharded(local: torch.Tensor, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`local` as this rank's part of a tensor of `shape`; DTensor.from_local would move it off the host."""
    if not isinstance(like, DTensor):
        return local
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(like.device_mesh, like.placements, meta), requires_grad=False)


def _is_8bit(name: str, parameter: nn.Parameter) -> bool:
    return "8bit" in name and parameter.numel() >= LEAST_8BIT


def _rows_are_blocks(shape: torch.Size) -> bool:
    return shape[1:].numel() % BLOCK == 0


def _moments(name: str) -> int:
    return 1 if "lion" in name else 2
