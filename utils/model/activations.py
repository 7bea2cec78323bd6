"""Recompute activations (full, selective): less memory for more compute."""

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..run.errors import check

# What is worth keeping: results that take long to compute for their size. The attention kernels differ by
# device.
ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
EXPENSIVE = (
    "mm",
    "addmm",
    "bmm",
    "baddbmm",
    *(f"_scaled_dot_product_{kind}" for kind in ATTENTION),
)


def recompute_activations(model: nn.Module, mode: str) -> nn.Module:
    """Keep for the backward only each layer's input (full), or its matrix products and attention too
    (selective), or everything (none).

    full costs one more forward, selective the cheap part of one; the losses do not change. Raises ConfigError
    for a model that cannot. https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    if mode == "none":
        return model
    refused = f"--activation_checkpointing {mode}: {type(model).__name__} does not support it"
    check(model.supports_gradient_checkpointing, refused)
    options = {"use_reentrant": False}
    if mode == "selective":
        kept = {
            getattr(torch.ops.aten, op).default for op in EXPENSIVE if hasattr(torch.ops.aten, op)
        }

        def policy(context, op, *args, **kwargs):
            return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    if hasattr(model, "activation_checkpointing_enable"):  # the older name warns
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=options)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    return model


def keep_activations(model: nn.Module) -> nn.Module:
    """Recompute nothing again, as a model does that recompute_activations has not met."""
    newer = hasattr(model, "activation_checkpointing_disable")
    (model.activation_checkpointing_disable if newer else model.gradient_checkpointing_disable)()
    return model
