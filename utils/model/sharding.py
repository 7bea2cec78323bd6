"""FSDP2 / HSDP: which modules are units, when they reshard, in which dtype.

A unit is what is gathered together, used, and freed. See the FSDP2 tutorial,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from collections import Counter
from dataclasses import replace
from types import MethodType

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers.core_model_loading import build_glob_alternation

from ..run.errors import ConfigError, check

OWN_DTYPES: dict[tuple, tuple[dict, dict]] = {}  # see _own_dtypes
# what peft puts into names
ADAPTED = (".base_layer", ".original_module", ".modules_to_save.default")

# What flags and files call dtypes; "original" keeps that of the checkpoint.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "original": None}


def shard_model(
    model: nn.Module,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    reshard_after_forward=True,
    cpu_offload=False,
) -> nn.Module:
    """Cut every parameter along dim 0 over the mesh, in place; on meta this costs nothing.

    The shards keep the parameters' dtype (fp32 masters); they are gathered in `dtype`, but for those that the
    model's family computes with in fp32, and gradients are reduced in fp32. What goes into a layer is not
    cast: some of it (rotary tables, states) is fp32 on purpose, and the rest has the embedding's dtype. So
    the logits are those of from_pretrained(dtype=dtype), to the bit.

    reshard_after_forward False keeps the layers gathered until their backward, like ZeRO stage 2: less
    traffic, more memory. cpu_offload keeps shards, gradients and the optimizer on the host.
    """
    kept = kept_in_fp32(model, dtype)
    store_alike(model)
    cast_buffers(model, dtype)
    param_dtype = None if dtype == torch.float32 else dtype
    precision = MixedPrecisionPolicy(param_dtype, torch.float32, cast_forward_inputs=False)
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
    # Families with an fp32 residual give the head its weight's dtype, but see that of the shard.
    own = {f"{name}.weight" for name, module in model.named_modules() if module is head}
    at_head = options | {"mp_policy": replace(precision, cast_forward_inputs=not own & kept)}
    if embedding.weight is head.weight:
        # One unit, since a tied weight cannot be in two. It is needed first and last in the forward, and
        # again at once.
        fully_shard([embedding, head], reshard_after_forward=False, **at_head)
    else:
        table = fully_shard(embedding, reshard_after_forward=reshard_after_forward, **options)
        # The gradient of a lookup needs no table; that of an adapter or of a norm beside it needs those.
        lookup = isinstance(embedding, nn.Embedding) and len(list(embedding.parameters())) == 1
        table.set_unshard_in_backward(not lookup)
        # The head's backward follows its forward: freeing it in between would gather it twice.
        fully_shard(head, reshard_after_forward=False, **at_head)

    # The root holds the rest: the final norm, position embeddings. Small, so it stays gathered.
    fully_shard(model, reshard_after_forward=False, **options)
    if kept:
        gather_in_fp32(model, kept)
    return model


def kept_in_fp32(model: nn.Module, dtype: torch.dtype) -> set[str]:
    """Names of the parameters that from_pretrained(dtype=dtype) leaves in fp32: those that the family lists,
    and those that its code makes in fp32 whatever the dtype.
    """
    if dtype == torch.float32:
        return set()
    wanted = _own_dtypes(model, dtype)[0]
    listed = list(getattr(model, "_keep_in_fp32_modules_strict", None) or [])
    if dtype == torch.float16:
        listed += getattr(model, "_keep_in_fp32_modules", None) or []
    pattern = build_glob_alternation(listed)[0] if listed else None
    kept = set()
    for name, parameter in model.named_parameters():
        own = plain_name(name)
        fp32 = wanted.get(own) == torch.float32 or (
            own in wanted and pattern and pattern.search(own)
        )
        if fp32 and parameter.is_floating_point():
            kept.add(name)
    return kept


def plain_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    for part in ADAPTED:
        name = name.replace(part, "")
    return name


def compute_alone(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """For a model on meta that is not sharded: the dtypes that from_pretrained(dtype=dtype) gives."""
    for name in kept_in_fp32(model, dtype):
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.float()
    cast_buffers(model, dtype)
    return model


def store_alike(model: nn.Module) -> None:
    """One dtype for all masters, as FSDP2 wants it in a unit. Some families make some weights in fp32."""
    trained = [p for p in model.parameters() if p.requires_grad and p.is_floating_point()]
    dtypes = Counter(p.dtype for p in trained)
    for parameter in trained if len(dtypes) > 1 else []:
        parameter.data = parameter.data.to(dtypes.most_common(1)[0][0])


def cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the buffers the dtypes that from_pretrained(dtype=dtype) gives them."""
    if dtype == torch.float32:
        return
    listed = list(getattr(model, "_keep_in_fp32_modules_strict", None) or [])
    pattern = build_glob_alternation(listed)[0] if listed else None
    wanted = _own_dtypes(model, dtype)[1]
    saved = model.state_dict().keys()
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            whole = f"{path}.{name}" if path else name
            own = plain_name(whole)
            fp32 = whole in saved and pattern and pattern.search(own)
            if own in wanted and buffer.is_floating_point():
                module._buffers[name] = buffer.to(torch.float32 if fp32 else wanted[own])


def _own_dtypes(model: nn.Module, dtype: torch.dtype) -> tuple[dict, dict]:
    """(of the parameters, of the buffers): the dtype of each by name, as the library makes the same model in
    `dtype`, without adapters. It is made once, on meta; a plan asks for it often.
    """
    family = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    key = family, model.config.to_json_string(use_diff=False), dtype
    if key not in OWN_DTYPES:
        with torch.device("meta"):
            made = family._from_config(model.config, dtype=dtype)
        found = made.named_parameters(), made.named_buffers()
        OWN_DTYPES[key] = tuple(
            {name: tensor.dtype for name, tensor in tensors} for tensors in found
        )
    return OWN_DTYPES[key]


def gather_in_fp32(model: nn.Module, names: set[str]) -> None:
    """Have FSDP2 gather these parameters of a sharded model in fp32, in one all-gather with their unit.

    It takes dtypes per unit; its all-gather takes any mixture of them, but its reduce-scatter wants gradients
    of one dtype. So in units with such parameters all gradients are made in fp32, in which they are reduced
    anyway. A unit of their own is not possible for parameters that a module uses beside others.
    """
    kept = {id(parameter) for name, parameter in model.named_parameters() if name in names}
    for module in model.modules():
        unit = (
            module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
        )
        parts = unit.fsdp_params if unit else []
        if not any(id(part.sharded_param) in kept for part in parts):
            continue
        for part in parts:
            if id(part.sharded_param) in kept:
                part.init_dtype_attrs = MethodType(_gathered_in_fp32, part)
            part.init_unsharded_param = MethodType(_gradient_in_fp32, part)


def _gathered_in_fp32(part, policy: MixedPrecisionPolicy) -> None:
    type(part).init_dtype_attrs(part, policy)
    part.param_dtype = None if part.orig_dtype == torch.float32 else torch.float32


def _gradient_in_fp32(part) -> None:
    type(part).init_unsharded_param(part)
    if part._unsharded_param.requires_grad:
        part._unsharded_param.grad_dtype = torch.float32


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


def settle_dtype(dtype: str, device: torch.device) -> str:
    """The dtype to compute in: "auto" is bf16 on a GPU that has it, else fp32. ConfigError for bf16 on one
    that has not.
    """
    on_gpu = device.type == "cuda"
    has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto":
        return "bf16" if has_bf16 else "fp32"
    if dtype == "bf16" and on_gpu and not has_bf16:
        raise ConfigError(
            f"--dtype bf16: {torch.cuda.get_device_name(device)} has none (fix: --dtype fp16)"
        )
    return dtype
