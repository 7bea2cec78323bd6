"""How long a step takes beside others of the same model: for an order of settings, not for seconds.

What is computed is counted in the run on fake tensors that also gives the memory: the floating-point
operations of products and attention, forward, recomputed and backward, and the bytes that all other
operations read and write. So LoRA saves the products for the gradients of frozen weights and pays for its
small operations, and recomputing costs what is run again: torch's checkpoint ends a block's second forward at
the last tensor that the backward needs, before the last product.
"""

from ..train.flops import flops_per_token, matmul_parameters

# What a data-centre GPU of today gives in practice, in a second: products in bf16, and bytes of its memory.
FLOPS, MEMORY_BYTES = 200e12, 1.5e12
# GB/s of one GPU: to others in its machine (NVLink; PCIe gives 10 to 25), to other machines, to its host.
LINK, ACROSS, HOST_LINK = 200.0, 25.0, 25.0
HOST_BYTES = 50e9  # of memory that the processors of a machine read or write in a second
STATE_PASSES = 7  # AdamW reads weight, gradient and two moments, and writes all but the gradient


def seconds(planner, knobs) -> float:
    """Of a step. Traffic between GPUs is hidden by what is computed, or hides it."""
    states, _, stored, gathered, reduced = planner.sizes(knobs)
    flops, moved = cost(planner, knobs)
    passes, shards = (2 if knobs.reshard_after_forward else 1), planner.shards
    # cast, gathered, and copied to where they are used
    moved += passes * (stored / shards + 3 * gathered)
    computed = knobs.grad_accum * (flops / FLOPS + moved / MEMORY_BYTES)
    computed += 1.5 * reduced / MEMORY_BYTES  # gradients are cast to fp32
    link = planner.link if shards <= planner.local else min(planner.link, ACROSS)
    wired = (passes * gathered * knobs.grad_accum + reduced) * (shards - 1) / shards / (1e9 * link)
    if not knobs.cpu_offload:
        return max(computed, wired) + STATE_PASSES * states.gradients / MEMORY_BYTES
    wired += (passes * knobs.grad_accum * stored + reduced) / shards / (1e9 * HOST_LINK)
    return max(computed, wired) + STATE_PASSES * reduced / shards * planner.local / HOST_BYTES


def cost(planner, knobs) -> tuple[float, float]:
    """(floating-point operations, bytes that other operations move) of a micro-batch. Of a model that cannot
    be traced only the first, as it is known for all.
    """
    try:
        return planner.formulas.cost(planner.kind(knobs), knobs.batch_size, planner.seq_len)
    except Exception:  # a model is someone else's program
        model = planner.model(type(knobs)())
        each = flops_per_token(model.config, planner.seq_len, matmul_parameters(model))
        return each * knobs.batch_size * planner.seq_len, 0.0
