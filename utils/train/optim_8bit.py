"""bitsandbytes' AdamW on sharded parameters: moments of 8 bit, and on a GPU paged to the host if asked.

8-bit Optimizers via Block-wise Quantization (Dettmers et al., arXiv 2110.02861): a moment is one byte for
each element and one fp32 scale (absmax) for each block of 256.

Its kernels are called on each rank's own rows. Where a row is whole blocks, the result is that of the whole
tensor, bit for bit, on any number of ranks. Other parameters, and those with fewer than 4,096 elements, keep
moments in fp32, as bitsandbytes does for small ones.
"""

from types import ModuleType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ..model.pieces import local
from ..run.errors import ConfigError, print0

BLOCK = 256  # elements with one scale
LEAST_8BIT = 4096  # parameters with fewer elements keep fp32 moments
LEAST_PAGED = 100_000  # moments with fewer elements are not paged, as in bitsandbytes


def import_bitsandbytes(name: str) -> ModuleType:
    """The package that `--optimizer name` needs; raises ConfigError where it is missing."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(f"--optimizer {name}: {error} (fix: pip install bitsandbytes)") from None
    return bitsandbytes


def is_8bit(parameter: nn.Parameter) -> bool:
    """Whether a parameter, by its whole shape, has 8-bit moments."""
    row_is_blocks = parameter.shape[1:].numel() % BLOCK == 0
    return parameter.ndim >= 2 and row_is_blocks and parameter.numel() >= LEAST_8BIT


def state_bytes(parameter: nn.Parameter, elements: int) -> int:
    """Bytes of the state of a rank that has `elements` of a parameter."""
    moment_bytes = elements + 4 * elements // BLOCK if is_8bit(parameter) else 4 * elements
    step_bytes = 4
    return 2 * moment_bytes + step_bytes


class ShardedAdamW8bit(torch.optim.Optimizer):
    """AdamW over plain or sharded (DTensor) parameters, with the kernels of bitsandbytes.

    state[parameter] is what checkpoints save, and load in place:
        step              () fp32
        state1, state2    the moments, shaped and sharded as the parameter: uint8 codes, or fp32
        absmax1, absmax2  of codes: fp32 scales, (rows, blocks of a row), sharded likewise
    groups: dicts of params and weight_decay; the weights must be in memory, cut along dim 0 if at all.
    paged: on a GPU, large moments live in memory that the driver moves between GPU and host.
    Raises ConfigError where bitsandbytes is missing.
    """

    # of the state, as checkpoints name it: paged or not makes no difference there
    kind = "adamw_8bit"
    found_inf: torch.Tensor | None = (
        None  # (); 1: the next step changes nothing, as in torch's fused AdamW
    )

    def __init__(self, groups: list[dict], lr: float, betas: tuple[float, float], paged: bool):
        self.functional = import_bitsandbytes("adamw_8bit").functional
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8})
        parameters = [p for group in self.param_groups for p in group["params"]]
        device = parameters[0].device
        self.paged = paged and device.type == "cuda"
        if paged and not self.paged:
            print0("optimizer the state is in host memory anyway, so nothing is paged")
        # code -> value in [-1, 1], for each moment; the second one is never negative
        create = self.functional.create_dynamic_map
        self.maps = [create(signed).to(device) for signed in (True, False)]
        # what the kernels write, on this rank
        self.moments: dict[nn.Parameter, list[torch.Tensor]] = {}
        for parameter in parameters:
            self._add_state(parameter)

    @torch.no_grad()
    def step(self) -> None:
        """One step at the learning rates that the groups have now, for parameters with a gradient."""
        if self.found_inf:  # the kernels cannot ask the device, so the host waits for it
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        state["step"] += 1
        weights = local(parameter).detach()
        if not weights.numel():
            return
        step = int(state["step"])
        gradient = local(parameter.grad).contiguous()
        first, second = self.moments[parameter]
        beta1, beta2 = group["betas"]
        lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
        # The arguments that AdamW does not use: beta3 and alpha.
        if self.paged and weights.numel() >= LEAST_PAGED:
            self.functional.prefetch_tensor(first)
            self.functional.prefetch_tensor(second)
        if is_8bit(parameter):
            scales = [local(state[f"absmax{number}"]).view(-1) for number in (1, 2)]
            self.functional.optimizer_update_8bit_blockwise(
                "adam",
                gradient,
                weights,
                first,
                second,
                beta1,
                beta2,
                0.0,
                0.0,
                eps,
                step,
                lr,
                *self.maps,
                *scales,
                decay,
            )
        else:
            self.functional.optimizer_update_32bit(
                "adam",
                gradient,
                weights,
                first,
                beta1,
                eps,
                step,
                lr,
                second,
                beta2,
                0.0,
                0.0,
                decay,
            )

    def load_state_dict(self, state_dict: dict) -> None:
        raise NotImplementedError("the state is loaded in place, by checkpoint.load_checkpoint")

    def _add_state(self, parameter: nn.Parameter) -> None:
        """Zeros."""
        weights = local(parameter).detach()
        coded = is_8bit(parameter)
        dtype = torch.uint8 if coded else torch.float32
        state = self.state[parameter]
        state["step"] = torch.zeros(())
        self.moments[parameter] = []
        for number in (1, 2):
            if self.paged and weights.numel() >= LEAST_PAGED:
                moment = self.functional.get_paged(
                    *weights.shape, dtype=dtype, device=weights.device
                )
                self.functional.fill(moment, 0)
            else:
                moment = torch.zeros_like(weights, dtype=dtype)
            self.moments[parameter].append(moment)
            state[f"state{number}"] = _sharded(moment, parameter, parameter.shape)
            if coded:
                blocks = parameter.shape[1:].numel() // BLOCK
                scales = torch.zeros(weights.shape[0], blocks, device=weights.device)
                shape = (parameter.shape[0], blocks)
                state[f"absmax{number}"] = _sharded(scales, parameter, shape)


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
