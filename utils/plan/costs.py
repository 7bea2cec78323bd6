"""What an operation costs: floating-point operations, and bytes that it reads and writes."""

import torch
from torch.utils.flop_counter import flop_registry

FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

LOOKUPS = (
    "embedding",
    "index",
    "gather",
    "index_select",
)  # they read as much of a table as they write


def cost_of(
    func, args: tuple, kwargs: dict, result, inputs: list, outputs: list
) -> tuple[int, list[int]]:
    """(floating-point operations, bytes of each tensor that is read or written). Products and attention have
    only the first, since memory does not slow them. An operation that makes a view has neither.
    """
    packet = func._overloadpacket
    name = packet.__name__
    if packet in flop_registry:
        return flop_registry[packet](*args, **kwargs, out_val=result), []
    if name == "_grouped_mm":  # (n, K) x (experts, K, N), or (K, n) x (n, N) for each expert's rows
        return 2 * args[0].numel() * args[1].shape[-1], []
    if name.startswith("_scaled_dot_product"):
        return attention_flops(name, args, kwargs), []
    if name.startswith(("empty", "new_empty")):
        return 0, []
    read = {tensor.untyped_storage()._cdata for tensor in inputs}
    makes_views = all(tensor.untyped_storage()._cdata in read for tensor in outputs)
    if makes_views and not func._schema.is_mutable:
        return 0, []
    if name in LOOKUPS:
        inputs = outputs
    moved = [min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in inputs]
    moved += [min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in outputs]
    return 0, moved


def attention_flops(name: str, args: tuple, kwargs: dict) -> int:
    """Of the two products of attention, or the five of its backward."""
    backward = name.endswith("backward")
    query, key = args[1:3] if backward else args[:2]
    flops = query.numel() * key.shape[-2] * (10 if backward else 4)
    is_causal = any(value is True for value in (*args, *kwargs.values()))
    return flops // 2 if is_causal else flops


def flash_workspace(func, args: tuple, kwargs: dict) -> int:
    """Bytes that flash attention takes on a GPU while its backward runs, and the kernel of a CPU does not:
    the fp32 sum of the queries' gradients, and with grouped heads dK and dV for each head of the queries.

    Not measured here. It was inferred from slopes that others published: Llama-3-8B in nf4 took 16.4 KB a
    token more than was planned, which is 4 bytes x 32 heads x a head size of 128. Counted where it is
    alive, it changes no peak of those runs: their peak is in the feed-forward part, and their slope is still
    not explained. A mask, or fp32, means another kernel, which is counted as on a CPU.
    """
    if func is not FLASH_BACKWARD or kwargs.get("attn_mask") is not None:
        return 0
    query, key = args[1], args[2]  # (B, H, T, D), and with fewer heads
    if query.dtype == torch.float32:
        return 0
    workspace = 4 * query.numel()
    if key.shape[1] < query.shape[1]:
        workspace += 2 * query.numel() * query.element_size()
    return workspace
