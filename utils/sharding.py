"""FSDP2 / HSDP: which modules are units, when they reshard, in which dtype.

A unit is what is gathered together, used, and freed. See the FSDP2 tutorial,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from .errors import check


def shard_model(
    model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, reshard_after_forward=True, cpu_offload=False
) -> nn.Module:
    """Cut every parameter along dim 0 over the mesh, in place; on meta this costs nothing.

    The shards keep the parameters' dtype (fp32 masters); they are gathered in `dtype`, and gradients
    are reduced in fp32. reshard_after_forward False keeps the layers gathered until their backward, like ZeRO
    stage 2: less traffic, more memory. cpu_offload keeps shards, gradients and the optimizer on the host.
    """
    param_dtype = None if dtype == torch.float32 else dtype
    precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    options = {"mesh": mesh, "mp_policy": precision}
    if cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu")

    layers = decoder_layers(model)
    for layer in layers:
        # Free a layer after its forward and gather it again for its backward; but the last one's backward
        # comes at once.
        free = reshard_after_forward and layer is not layers[-1]
        fully_shard(layer, reshard_after_forward=free, **options)

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.weight is head.weight:
        # One unit, since a tied weight cannot be in two. It is needed first and last in the forward, and
        # again at once.
        fully_shard([embedding, head], reshard_after_forward=False, **options)
    else:
        table = fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
        # The gradient of a lookup needs no table; that of an adapter beside it needs the adapter.
        table.set_unshard_in_backward(not isinstance(embedding, nn.Embedding))
        # The head's backward follows its forward: freeing it in between would gather it twice.
        fully_shard(head, reshard_after_forward=False, **options)

    # The root holds the rest: the final norm, position embeddings. Small, so it stays gathered.
    return fully_shard(model, reshard_after_forward=False, **options)


def reshard(model: nn.Module) -> None:
    """Free what a forward without a backward left gathered; until then parameters() are not the shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The repeated block: the list of modules that holds the most parameters."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    check(lists, f"{type(model).__name__} has no list of layers to shard by")
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def sync_gradients(model: nn.Module, sync: bool) -> None:
    """Whether the next backward reduces gradients over ranks. Deferring it saves traffic and keeps unsharded
    gradients meanwhile.
    """
    model.set_requires_gradient_sync(sync)
