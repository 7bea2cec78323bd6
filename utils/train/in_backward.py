"""AdamW in the backward: each parameter is updated as soon as its gradient is ready; then the gradient is
freed.

FSDP2 calls the hooks of a shard after it has reduced the gradients of the shard's unit, in foreach_reduce
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). See
https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..model.loading import local
from ..run.distributed import sum_on_device
from ..run.errors import check


def check_in_backward(clip_norm: float, micro_batches: int, dtype: str, offload: bool) -> None:
    """Raise ConfigError for settings that need all gradients of a step at the same time."""
    check(
        not clip_norm,
        f"--optimizer_in_backward: the norm that --clip_norm {clip_norm:g} needs is known only after the"
        " backward (fix: --clip_norm 0)",
    )
    check(
        micro_batches == 1,
        f"--optimizer_in_backward: {micro_batches} micro-batches would be as many steps (fix: a larger"
        " --batch_size, a smaller --global_batch_size or --grad_accum 1)",
    )
    check(
        dtype != "fp16",
        "--optimizer_in_backward: in fp16 a step is left out where any gradient overflows"
        " (fix: --dtype bf16)",
    )
    check(
        not offload,
        "--optimizer_in_backward: with --cpu_offload no gradient stays on a GPU (fix: leave one out)",
    )


class StepInBackward:
    """Lets an optimizer update each parameter in the backward, at the current learning rates of its groups.

    optimizer: its parameters are sharded over `mesh`. Its state has the same form as with ordinary steps, so
    a run can be resumed with or without this.
    """

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh):
        self.optimizer, self.mesh = optimizer, mesh
        self.squares = []  # () fp32: squared norm of each local gradient
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(partial(self._step, group))

    @torch.no_grad()
    def _step(self, group: dict, parameter: nn.Parameter) -> None:
        gradient = local(parameter.grad)
        self.squares.append(torch.linalg.vector_norm(gradient, dtype=torch.float32).square())
        self.optimizer.found_inf = None  # left by the previous step
        groups = self.optimizer.param_groups
        self.optimizer.param_groups = [group | {"params": [parameter]}]
        self.optimizer.step()
        self.optimizer.param_groups = groups
        parameter.grad = None

    def grad_norm(self) -> Tensor:
        """The global L2 norm () of the gradients of the last backward. All ranks call it."""
        copies = self.mesh.size() // self.mesh["shard"].size()  # HSDP: each holds all gradients
        squares = torch.stack(self.squares).sum()
        self.squares.clear()
        return (sum_on_device(squares, self.mesh) / copies).sqrt()
