"""The act `shard` of the recipes that train, for tests and benchmarks that have no recipe's loop."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from utils.model.sharding import stored_as_computed, units


def shard_training(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward=True,
    cpu_offload=False,
    accumulates=True,
) -> nn.Module:
    """Shard every parameter along dim 0 over the mesh, in place. On meta this costs nothing.

    Shards keep the dtype of the parameters (fp32 master weights). They are all-gathered in `dtype`, except
    for modules that the model's family computes in fp32. Gradients are reduced in fp32. Inputs of a layer are
    not cast: some (rotary tables, states) are fp32 on purpose, the others have the embedding's dtype. So the
    logits are bit for bit those of from_pretrained(dtype=dtype).

    reshard_after_forward False keeps the layers gathered until their backward, like ZeRO stage 2: less
    traffic, more memory. cpu_offload keeps shards, gradients and optimizer on the host. On a single rank,
    stored_as_computed decides which parameters are not sharded; accumulates: see there.
    """
    offload = CPUOffloadPolicy(mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    all_units = units(model, dtype)
    unsharded = set()
    if mesh.size() == 1 and not cpu_offload:
        unsharded = stored_as_computed(all_units, accumulates)
    for unit in all_units:
        fully_shard(
            unit.modules,
            mesh=mesh,
            reshard_after_forward=reshard_after_forward and unit.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=unit.param_dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=unit.cast_forward_inputs,
            ),
            offload_policy=offload,
            ignored_params=unsharded,
        )
        unit.modules[0].set_unshard_in_backward(unit.unshard_in_backward)
    return model
