"""bitsandbytes' AdamW on sharded parameters: 8-bit moments, which a GPU can page to host memory.

8-bit Optimizers via Block-wise Quantization (Dettmers et al., arXiv 2110.02861): a moment has one byte per
element and one fp32 scale (absmax) per block of 256.

The kernels are called on each rank's own rows. If the size of a row is a multiple of the block, the result is
bit for bit that of the whole tensor, on any number of ranks. Other parameters, and those with fewer than
4,096 elements, keep fp32 moments, as bitsandbytes does for small ones.
"""

import bitsandbytes
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..model.loading import local
from ..run.errors import print0

BLOCK = 256  # elements that share one scale
LEAST_8BIT = 4096  # parameters with fewer elements keep fp32 moments


def is_8bit(parameter: nn.Parameter) -> bool:
    """Whether a parameter has 8-bit moments. Its global shape decides."""
    row_is_blocks = parameter.shape[1:].numel() % BLOCK == 0
    return parameter.ndim >= 2 and row_is_blocks and parameter.numel() >= LEAST_8BIT


def state_bytes(parameter: nn.Parameter, elements: int) -> int:
    """Bytes of optimizer state on a rank that holds `elements` elements of a parameter."""
    moment_bytes = elements + 4 * elements // BLOCK if is_8bit(parameter) else 4 * elements
    return 2 * moment_bytes + 4  # and the count of steps


class ShardedAdamW8bit(torch.optim.Optimizer):
    """AdamW over plain or sharded (DTensor) parameters, with the kernels of bitsandbytes.

    Checkpoints save state[parameter], and load it in place:
        step              () fp32
        state1, state2    the moments, with the shape and sharding of the parameter: uint8 codes, or fp32
        absmax1, absmax2  only with codes: fp32 scales, (rows, blocks per row), with the same sharding
    groups: dicts of params and weight_decay. The weights must be in memory; shards must be along dim 0.
    paged: on a GPU, large moments are in memory that the driver moves between GPU and host.
    """

    # (); if 1, the next step changes nothing, as in torch's fused AdamW
    found_inf: Tensor | None = None

    def __init__(self, groups: list, lr: float, betas: tuple, paged: bool):
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8})
        # each parameter -> this rank's rows of it
        self.parts = {
            parameter: local(parameter).detach()
            for group in self.param_groups
            for parameter in group["params"]
        }
        parts = [*self.parts.values()]
        on_gpu = parts[0].device.type == "cuda"
        if paged and not on_gpu:
            print0("optimizer the state is in host memory anyway, so nothing is paged")
        self.on_gpu = on_gpu
        self.paged = paged and on_gpu
        self.kernels = bitsandbytes.optim.AdamW(parts, min_8bit_size=0, is_paged=self.paged)
        for parameter in self.parts:
            self._add_state(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """One step at the current learning rates of the groups, for parameters with a gradient."""
        if self.paged and self.found_inf:
            return  # the host waits for it, since the device cannot undo a step of paged moments
        if self.on_gpu:
            # The kernels run on the default stream, whichever is current, and FSDP2 calls the hooks of a
            # backward on another one (https://github.com/bitsandbytes-foundation/bitsandbytes/pull/2050).
            current = torch.cuda.current_stream()
            default = torch.cuda.default_stream()
            default.wait_stream(current)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)
        if self.on_gpu:
            current.wait_stream(default)

    def _step(self, parameter: nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        part = self.parts[parameter]
        state["step"] += 1
        if not part.numel():
            return
        part.data = local(parameter).detach()
        part.grad = local(parameter.grad)
        self.kernels.state[part]["step"] = int(state["step"]) - 1  # the kernels add one
        self.kernels.prefetch_state(part)
        # The kernels ignore found_inf, and reading it here would make the host wait for the device. So the
        # old values are kept, and put back on the device if it is 1.
        written = []
        if self.found_inf is not None and not self.paged:
            written = [part, *(local(state[name]) for name in state.keys() - {"step"})]
        before = [tensor.clone() for tensor in written]
        self.kernels.update_step(group, part, 0, 0)
        for old, new in zip(before, written, strict=True):
            torch.where(self.found_inf > 0, old, new, out=new)
        part.grad = None

    def load_state_dict(self, state_dict: dict) -> None:
        raise NotImplementedError("the state is loaded in place, by checkpoint.load_checkpoint")

    def _add_state(self, parameter: nn.Parameter) -> None:
        """Create the state as zeros. It shares memory with the tensors that the kernels write."""
        part = self.parts[parameter]
        blocks = parameter.shape[1:].numel() // BLOCK
        self.kernels.args.optim_bits = 8 if is_8bit(parameter) else 32
        self.kernels.init_state(self.kernels.param_groups[0], part, 0, 0)
        state = self.state[parameter]
        state["step"] = torch.zeros(())
        for name, value in self.kernels.state[part].items():
            if name.startswith("state"):
                state[name] = _sharded(value, parameter, parameter.shape)
            elif name.startswith("absmax"):
                scales = value.view(len(part), blocks)
                state[name] = _sharded(scales, parameter, (len(parameter), blocks))


def _sharded(part, like, shape):
    """`part` as this rank's shard of a tensor of `shape`, sharded like `like`.

    Not DTensor.from_local, which would move a part that is on the host to the GPU.
    """
    if not isinstance(like, DTensor):
        return part
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), part.dtype)
    return DTensor(part, DTensorSpec(like.device_mesh, like.placements, meta), requires_grad=False)
