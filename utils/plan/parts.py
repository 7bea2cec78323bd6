"""Will it fit, for recipes that train nothing: what they need by part, before anything is allocated."""

import math

import torch
from torch import nn

from ..run.distributed import World
from ..run.errors import check, print0
from ..run.memory import memory_bytes
from ..run.units import GIB
from .planned import MemoryPlan
from .replay import units_of
from .reserve import TIGHT, WHY_TIGHT, answer_of, must_and_comfortable, room
from .states import Setting, estimate_states, sum_of


def plan_parts(act: str, parts: dict[str, int], world: World, fix: str, force: bool) -> MemoryPlan:
    """For a recipe that trains nothing: print what a rank needs by part, at most, in an act, and what there
    is. ConfigError with `fix` where that is less, unless force.
    """
    (need, comfortable), (there, _, what) = needed(parts, world), room(world)
    answer = answer_of(need, comfortable, there)
    print0(f"memory    {sum_of(parts)} on the fullest rank, in the act {act}")
    if world.device.type == "cuda":
        told = f"{answer}, {WHY_TIGHT}" if answer == TIGHT else answer
        both = (
            f"{need / GIB:.2f} GiB a rank must be there, {comfortable / GIB:.2f} GiB is comfortable"
        )
        print0(f"room      {both}; there is {what}: {told}")
    else:
        print0(f"room      {need / GIB:.2f} GiB a rank, reserve included; there is {what}")
    part, size = max(parts.items(), key=lambda part: part[1])
    why = f"a rank needs {need / GIB:.2f} GiB, most of it {part}, {size / GIB:.2f} GiB; there is {what}"
    check(force or need <= there, f"this does not fit: {why} (fix: {fix}; or --force to try)")
    planned = {"acts": {act: sum(parts.values())}, "device_bytes": need, "room_bytes": there}
    if world.device.type == "cuda":
        return MemoryPlan("", planned=planned)
    return MemoryPlan("", planned=planned, base=memory_bytes())


def needed(parts: dict[str, int], world: World) -> tuple[int, int]:
    """Bytes of a rank's device: (that must be there, that are comfortable); on a CPU without a reserve."""
    # which has the buffers of all-gathers in it, so it is also that of the pools
    total = sum(parts.values())
    return (
        must_and_comfortable(total, total, world.size)
        if world.device.type == "cuda"
        else (total, total)
    )


def estimate_generation(
    model: nn.Module, shards: int, dtype: torch.dtype, rows: int, prompt: int, new: int
) -> dict[str, int]:
    """Bytes by part on the fullest rank, to answer `rows` prompts of at most `prompt` tokens with `new` more.

    Weights and what FSDP2 gathers are exact. The cache is that of plain attention, keys and values of every
    layer, which none exceeds; activations are a block's largest, in its feed-forward part, and the mask of
    padded rows.
    """
    config, size = model.config.get_text_config(), dtype.itemsize
    width, heads = config.hidden_size, config.num_attention_heads
    experts = [
        getattr(config, name, None) or 0
        for name in ("moe_intermediate_size", "num_experts_per_tok")
    ]
    inner = max(getattr(config, "intermediate_size", None) or 4 * width, math.prod(experts))
    keys = getattr(config, "num_key_value_heads", None) or heads
    keys *= getattr(config, "head_dim", None) or width // heads
    layers, gathered = config.num_hidden_layers, 0
    activations = rows * prompt * (2 * width + 3 * inner + prompt) * size
    layer_cache = 2 * rows * (prompt + new) * keys * size
    if shards > 1:
        rest, embedding, blocks, head = units_of(model, Setting(shards, dtype))
        moving = 2 * max(unit.gathered for unit in blocks)  # one is in use, the next is coming
        moving = max(moving, 2 * embedding.gathered - activations)  # before them, it and its buffer
        gathered = rest.gathered + (head or embedding).gathered + moving
    return {
        "weights": estimate_states(model, shards).weights,
        "gathered": gathered,
        "cache": layers * layer_cache,
        # The prompt's; or, when it is done, one layer's cache, which is copied to grow.
        "activations": max(activations, layer_cache),
        # in fp32 too, sorted, and their order
        "logits": rows * config.vocab_size * (size + 4 + 16),
    }
