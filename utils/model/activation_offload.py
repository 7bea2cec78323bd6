"""Keep the inputs of recomputed blocks on the host, from their forward to their backward.

On a GPU an input leaves on a stream of its own, through page-locked memory, while its block computes; it
comes back on the stream of the computation. The streams wait for each other explicitly, without
record_stream, so the live memory does not depend on how far the host runs ahead. On a CPU both are plain
copies. After torchtune's OffloadActivations,
https://docs.pytorch.org/torchtune/stable/generated/torchtune.training.OffloadActivations.html
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .sharding import decoder_layers


def offload_inputs(model: nn.Module) -> None:
    """Keep the inputs of a model's blocks on the host. Call recompute_activations first."""
    copies = HostCopies()
    hook_inputs(model, copies.pack, copies.unpack)


def hook_inputs(model: nn.Module, pack: Callable, unpack: Callable) -> None:
    """Keep pack(input) for each block's inputs (B, T, D); unpack turns it into the input again."""

    def pack_inputs(tensor):
        return pack(tensor) if tensor.is_floating_point() and tensor.ndim == 3 else tensor

    def unpack_inputs(kept):
        return kept if isinstance(kept, Tensor) else unpack(kept)

    def hooked(checkpoint, *args, **kwargs):
        # Inside a block the hooks of torch.utils.checkpoint apply, so these hooks see only its inputs.
        with saved_tensors_hooks(pack_inputs, unpack_inputs):
            return checkpoint(*args, **kwargs)

    for layer in decoder_layers(model):
        layer._gradient_checkpointing_func = partial(hooked, layer._gradient_checkpointing_func)


class HostCopies:
    """Copies inputs to the host, and back."""

    # To the host. Made in the first step, because before it no rank has chosen its GPU.
    stream = None
    leaving = None  # the input whose copy may not be complete

    def pack(self, tensor: Tensor) -> tuple:
        if not tensor.is_cuda:
            return tensor.clone(), tensor.device
        self.stream = self.stream or torch.cuda.Stream()
        computing = torch.cuda.current_stream()
        computing.wait_stream(self.stream)  # so the previous input may be freed
        self.leaving = tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.stream.wait_stream(computing)
        with torch.cuda.stream(self.stream):
            host.copy_(tensor, non_blocking=True)
        return host, tensor.device

    def unpack(self, kept: tuple) -> Tensor:
        host, device = kept
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
            self.leaving = None
        return host.to(device, non_blocking=True)
