"""How long a step takes beside others of the same model: for an order of settings, not for seconds.

What is computed is counted in the run without memory that also gives the bytes: the floating-point
operations of products and attention, forward, recomputed and backward, and the bytes that all other
operations read and write. So LoRA saves the products for the gradients of frozen weights and pays for its
small operations, and recomputing costs what is run again: torch's checkpoint ends a block's second forward at
the last tensor that the backward needs, before the last product.
"""

from ..train.flops import flops_per_token, matmul_parameters

# What a data-centre GPU of today gives in practice, in a second.
FLOPS = 200e12  # of products in bf16
MEMORY_BYTES = 1.5e12  # of its memory
# GB/s of one GPU.
LINK = 200.0  # to others in its machine: NVLink; PCIe gives 10 to 25
ACROSS = 25.0  # to other machines
HOST_LINK = 25.0  # to its host
HOST_BYTES = 50e9  # of memory that the processors of a machine read or write in a second
STATE_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes all but the gradient


def seconds(planner, knobs) -> float:
    """Of a step. Traffic between GPUs is hidden by what is computed, or hides it."""
    states, _, stored_bytes, gathered_bytes, reduced_bytes = planner.sizes(knobs)
    shards = planner.shards
    passes = 2 if knobs.reshard_after_forward else 1
    flops, moved_bytes = cost(planner, knobs)
    # Weights are cast, gathered, and copied to where they are used.
    moved_bytes += passes * (stored_bytes / shards + 3 * gathered_bytes)
    computing = knobs.grad_accum * (flops / FLOPS + moved_bytes / MEMORY_BYTES)
    computing += 1.5 * reduced_bytes / MEMORY_BYTES  # gradients are cast to fp32
    link = planner.link
    if shards > planner.local:
        link = min(link, ACROSS)
    sent_bytes = passes * gathered_bytes * knobs.grad_accum + reduced_bytes
    sending = sent_bytes * (shards - 1) / shards / (1e9 * link)
    if not knobs.cpu_offload:
        stepping = STATE_PASSES * states.gradients / MEMORY_BYTES
        return max(computing, sending) + stepping
    host_bytes = passes * knobs.grad_accum * stored_bytes + reduced_bytes
    sending += host_bytes / shards / (1e9 * HOST_LINK)
    stepping = STATE_PASSES * reduced_bytes / shards * planner.local / HOST_BYTES
    return max(computing, sending) + stepping


def cost(planner, knobs) -> tuple[float, float]:
    """(floating-point operations, bytes that other operations move) of a micro-batch. For a model that cannot
    be traced only the first, which is known for every model.
    """
    try:
        return planner.formulas.cost(planner.kind(knobs), knobs.batch_size, planner.seq_len)
    except Exception:  # a model is someone else's program
        model = planner.model(type(knobs)())
        parameters = matmul_parameters(model)
        flops = flops_per_token(model.config, planner.seq_len, parameters)
        return flops * knobs.batch_size * planner.seq_len, 0.0
