"""AdamW in the backward: each parameter is updated as soon as its gradient is ready; then the gradient is
freed.

FSDP2 calls the hooks of a shard after it has reduced the gradients of the shard's unit, in foreach_reduce
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py). See
https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html
"""

from functools import partial
from weakref import proxy

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from ..model.loading import local
from ..run.distributed import sum_on_device
from ..run.errors import check


def check_in_backward(cfg: object, micro_batches: int) -> None:
    """Raise ConfigError for settings that need all gradients of a step at the same time."""
    clip_norm = vars(cfg).get("clip_norm", 0)  # plan.py has none
    check(
        not clip_norm,
        f"--optimizer_in_backward: the norm that --clip_norm {clip_norm:g} needs is known only after the"
        " backward (fix: --clip_norm 0)",
    )
    check(
        micro_batches == 1,
        f"--optimizer_in_backward: {micro_batches} micro-batches would be as many steps (fix: --grad_accum 1,"
        f" and with --global_batch_size or a resume a --batch_size {micro_batches} times as large)",
    )
    check(
        cfg.dtype != "fp16",
        "--optimizer_in_backward: in fp16 a step is left out where any gradient overflows"
        " (fix: --dtype bf16)",
    )
    check(
        not cfg.cpu_offload,
        "--optimizer_in_backward: with --cpu_offload no gradient stays on a GPU (fix: leave one out)",
    )


class StepInBackward:
    """Lets an optimizer update each parameter in the backward, at the current learning rates of its groups.

    optimizer: its parameters are sharded over `mesh`. Its state has the same form as with ordinary steps, so
    a run can be resumed with or without this.
    """

    def __init__(self, optimizer: Optimizer, mesh: DeviceMesh):
        self.mesh = mesh
        self.squares = []  # () fp32: squared norm of each local gradient
        for number, group in enumerate(optimizer.param_groups):
            # A hook that holds its parameter is never freed: Python's collector does not see it.
            hook = partial(_step, proxy(optimizer), self.squares, number)
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(hook)

    def grad_norm(self) -> Tensor:
        """The global L2 norm () of the gradients of the last backward. All ranks call it."""
        copies = self.mesh.size() // self.mesh["shard"].size()  # HSDP: each holds all gradients
        squares = torch.stack(self.squares).sum()
        self.squares.clear()
        return (sum_on_device(squares, self.mesh) / copies).sqrt()


@torch.no_grad()
def _step(optimizer, squares, number, parameter):
    """Update a parameter of group `number`, and free its gradient."""
    squares.append(torch.linalg.vector_norm(local(parameter.grad), dtype=torch.float32).square())
    optimizer.found_inf = None  # left by the previous step
    groups = optimizer.param_groups
    optimizer.param_groups = [groups[number] | {"params": [parameter]}]
    optimizer.step()
    optimizer.param_groups = groups
    parameter.grad = None
