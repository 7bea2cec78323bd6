"""Tensors that have a shape and a dtype, but no memory, for a model that is run to see what it allocates."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..model.sharding import kept_in_fp32

ATTENTION = F.scaled_dot_product_attention
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


@contextmanager
def meta_tensors() -> Iterator[None]:
    """New tensors are on meta, and torch's attention runs the kernel that it would choose on a CPU.

    A model runs the same operations on meta as on a CPU as long as its code does not ask for the device.
    Formulas compares the two. What has to see values, such as a packed row's positions, fails.
    """
    F.scaled_dot_product_attention = flash_attention_of_cpu
    try:
        with torch.device("meta"):
            yield
    finally:
        F.scaled_dot_product_attention = ATTENTION


def flash_attention_of_cpu(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False
) -> torch.Tensor:
    """F.scaled_dot_product_attention as it is on a CPU, for meta tensors, which it gives another kernel.
    NotImplementedError where a CPU does not take its flash kernel.
    """
    tensors = [query, key, value]
    if attn_mask is not None:
        tensors.append(attn_mask)
    described = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
    if not flash_on_cpu(described, dropout_p, is_causal, scale, enable_gqa):
        raise NotImplementedError("attention that a CPU does without its flash kernel")
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        # as convert_boolean_attn_mask does it in ATen/native/transformers/attention.cpp
        masked = torch.scalar_tensor(float("-inf"), dtype=query.dtype)
        attn_mask = torch.where(attn_mask, torch.scalar_tensor(0.0, dtype=query.dtype), masked)
        del masked
    return FLASH(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]


@cache
def flash_on_cpu(described: tuple, dropout_p: float, is_causal: bool, scale, enable_gqa) -> bool:
    """Whether torch takes the flash kernel on a CPU; found by running it on fake tensors.

    described: (shape, strides, dtype) of query, key, value, and of the mask, if there is one.
    """
    operations = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            operations.append(func)
            return func(*args, **(kwargs or {}))

    with _disable_current_modes(), FakeTensorMode():
        tensors = []
        for shape, strides, dtype in described:
            tensors.append(torch.empty_strided(shape, strides, dtype=dtype, device="cpu"))
        mask = tensors[3] if len(tensors) > 3 else None
        with Names():
            ATTENTION(*tensors[:3], mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return FLASH in operations


@contextmanager
def parameters_in(dtype: torch.dtype, model: nn.Module, repeats: list[nn.Module]) -> Iterator[None]:
    """New parameters and buffers in place of the model's, without memory, in the dtype that FSDP gathers;
    not in the blocks `repeats`, which do not run.
    """
    replaced = []  # (table, name, tensor)
    made = {}
    kept = {id(model.get_parameter(name)) for name in kept_in_fp32(model, dtype)}
    idle = {module for layer in repeats for module in layer.modules()}
    for module in model.modules():
        if module in idle:
            continue
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    gathered = torch.float32 if id(tensor) in kept else dtype
                    made[id(tensor)] = empty_like(tensor, gathered)
                replaced.append((table, name, tensor))
                table[name] = made[id(tensor)]
    try:
        yield
    finally:
        for table, name, tensor in replaced:
            table[name] = tensor


def empty_like(tensor: torch.Tensor, gathered: torch.dtype) -> torch.Tensor:
    """Of the same shape, where new tensors are. Parameters of floating point get the dtype `gathered`."""
    if not isinstance(tensor, nn.Parameter):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    dtype = gathered if tensor.is_floating_point() else tensor.dtype
    return nn.Parameter(torch.empty(tensor.shape, dtype=dtype), tensor.requires_grad)
