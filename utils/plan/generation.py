"""Does generation fit in memory: for generate.py and eval.py, and for the completions of grpo.py."""

from dataclasses import replace

import torch
from torch import nn

from ..run.distributed import World
from ..run.errors import check, print0
from ..run.units import GIB
from .fit import MemoryPlan, available_room
from .need import (
    Room,
    Setting,
    estimate_states,
    must_bytes,
    planned_model,
    sum_of,
    units_of,
)


def estimate_generation(
    model: nn.Module,
    shards: int,
    dtype: torch.dtype,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    pictures: object = None,
) -> dict:
    """Bytes by part on the fullest rank, to answer `rows` prompts of at most prompt_tokens with new_tokens.

    Weights and gathered layers are exact. The cache is an upper bound: keys and values of every layer, as in
    plain attention. Activations are the largest of one block, in its feed-forward part, and the mask of
    padded rows. What is dequantized at a time, a weight or the experts of a layer, is left to the reserve.
    pictures: a plan.pictures.Pictures, for a model that reads pictures.
    """
    config = model.config.get_text_config()
    itemsize = dtype.itemsize

    def largest(field, default=0):
        """The largest value of a field that may differ by layer, be missing, or a list (Gemma 3n)."""
        of_layers = [getattr(layer, field, None) or default for layer in config.per_layer_config]
        return int(torch.tensor(of_layers).max())

    width = config.hidden_size
    heads = largest("num_attention_heads")  # 0: it has no attention
    inner = max(
        largest("intermediate_size", 4 * width),
        largest("moe_intermediate_size") * largest("num_experts_per_tok"),
    )
    key_width = width
    if heads:
        key_width = largest("num_key_value_heads", heads) * largest("head_dim", width // heads)
    activations = rows * prompt_tokens * (2 * width + 3 * inner + prompt_tokens) * itemsize
    if config._attn_implementation == "eager":
        # Scores and probabilities of all heads, in `dtype` and in fp32.
        activations += 8 * heads * rows * prompt_tokens**2
    layer_cache = 2 * rows * (prompt_tokens + new_tokens) * key_width * itemsize
    root, tables, blocks, head, towers = units_of(
        model, Setting(config, dtype, dtype, prompt_tokens, shards, pictures=pictures)
    )
    # One block is in use while the next one arrives.
    moving = 2 * max(unit.gathered for unit in [*blocks, *towers])
    # Before the blocks: the tables and their all-gather buffers, but no activations.
    moving = max(moving, 2 * sum(table.gathered for table in tables) - activations)
    gathered = root.gathered + (head or tables[0]).gathered + moving
    return {
        "weights": estimate_states(model, shards).weights,
        "gathered": gathered,
        "cache": len(blocks) * layer_cache,
        # Of the prompt; afterwards the cache of one layer, which is copied when it grows.
        "activations": max(activations, layer_cache),
        # In `dtype`, in fp32 (4 bytes), and sorted with their indices (16).
        "logits": rows * config.vocab_size * (itemsize + 20),
    }


def plan_generation(parts: dict, world: World, force: bool) -> None:
    """Print what a rank needs, `parts` of estimate_generation, and what this machine has. ConfigError if that
    does not fit, unless `force`.
    """
    room = available_room(world)
    needed = must_bytes(sum(parts.values()), world.size, world.on_gpu)
    print0(f"memory    {sum_of(parts)} on the fullest rank")
    print0(f"room      {needed / GIB:.2f} GiB a rank, reserve included; there is {room.text}")
    part = max(parts, key=parts.get)
    check(
        force or needed <= room.device,
        f"this does not fit: a rank needs {needed / GIB:.2f} GiB, most of it {part},"
        f" {parts[part] / GIB:.2f} GiB; there is {room.text}"
        " (fix: a smaller --batch_size or --max_new_tokens, or more ranks; or --force to try)",
    )


def plan_rollout(
    setting: Setting,
    plan: MemoryPlan,
    room: Room,
    rows: int,
    prompt_tokens: int,
    new_tokens: int,
    force: bool,
    generate_ranks: int,
) -> tuple[bool, MemoryPlan]:
    """Plan completions of at most new_tokens for `rows` prompts at a time: beside the states of a training
    run, or on `generate_ranks` ranks that only generate.

    Returns (whether the layers are gathered once for all tokens instead of in each forward; the plan with one
    more line). On ranks that also train, the plan's act train becomes the larger of the two needs.
    ConfigError if neither way of gathering fits, unless `force`.
    """
    ranks = setting.shards * setting.replicate + generate_ranks
    if generate_ranks:
        setting = replace(
            setting, param_dtype=setting.dtype, shards=generate_ranks, rows=0, frozen_bytes=0
        )
    model = planned_model(setting)
    parts = estimate_generation(
        model, setting.shards, setting.dtype, rows, prompt_tokens, new_tokens
    )
    parts["weights"] += setting.frozen_bytes
    if not generate_ranks:
        states = estimate_states(model, setting.shards, optimizer=setting.optimizer)
        parts["optimizer"] = states.optimizer
    if setting.cpu_offload and setting.gpu:  # both are on the host
        parts |= {"weights": 0, "optimizer": 0}
    root, tables, blocks, head, _ = units_of(model, setting)
    gathered = sum(unit.gathered for unit in (root, *tables, *blocks, head) if unit)
    for size in (gathered, parts["gathered"]):
        parts["gathered"] = size
        alive = sum(parts.values())
        needed = must_bytes(alive, ranks, setting.gpu)
        if needed <= room.device:
            break
    gathers_once = size == gathered
    times = "once" if gathers_once else "in each forward"
    check(
        force or needed <= room.device,
        f"the completions do not fit: a rank needs {needed / GIB:.2f} GiB; there is {room.text}"
        f" (fix: {'more --generate_ranks, or ' if generate_ranks else ''}a smaller --generate_batch_size or"
        " --max_new_tokens; or --force to try)",
    )
    if not generate_ranks:
        acts = plan.planned["acts"]
        acts["train"] = max(acts["train"], alive)
    return gathers_once, plan._replace(
        text=f"{plan.text}\nrollout   {sum_of(parts)} on the fullest rank, with layers gathered {times}"
    )
