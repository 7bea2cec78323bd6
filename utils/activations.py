"""Recompute activations (full, selective): less memory for more compute."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from .errors import check

# What is worth keeping: results that take long to compute for their size. The attention kernels differ by
# device.
EXPENSIVE = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)


def recompute_activations(model: nn.Module, mode: str) -> nn.Module:
    """Keep for the backward only each layer's input (full), or its matrix products and attention too
    (selective).

    full costs one more forward, selective the cheap part of one; the losses do not change. Raises ConfigError
    for a model that cannot. https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    name = type(model).__name__
    check(
        model.supports_gradient_checkpointing,
        f"--activation_checkpointing {mode}: {name} does not support it",
    )
    options = {"use_reentrant": False}
    if mode == "selective":
        kept = {getattr(torch.ops.aten, op).default for op in EXPENSIVE if hasattr(torch.ops.aten, op)}

        def policy(context, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model
