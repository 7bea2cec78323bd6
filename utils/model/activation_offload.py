"""Keep the inputs of recomputed blocks on the host, from their forward to their backward.

On a GPU the copies run on two streams of their own, through page-locked memory: an input leaves while its
block computes, and comes back during the backward of the block after it. The streams wait for each other
explicitly, without record_stream, so the live memory does not depend on how far the host runs ahead. On a CPU
they are plain copies. After torchtune's OffloadActivations,
https://docs.pytorch.org/torchtune/stable/generated/torchtune.training.OffloadActivations.html
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .sharding import decoder_layers


def offload_inputs(model: nn.Module, device: torch.device) -> None:
    """Keep the inputs of a model's blocks on the host. Call recompute_activations first."""
    copies = HostCopies(device)
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


class HostCopy:
    """An input on the host, and also on the device once its copy back has begun."""

    def __init__(self, host: Tensor):
        self.host = host
        self.device = None


class HostCopies:
    """The copies of all inputs in the order of the forward; the backward takes them from last to first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.copies = []
        self.leaving = None  # the input whose copy may not be complete
        # To the host, and back. Made in the first step, because here no rank has chosen its GPU.
        self.streams = None

    def pack(self, tensor: Tensor) -> HostCopy:
        if not self.on_gpu:
            copy = HostCopy(tensor.clone())
        else:
            self.streams = self.streams or (torch.cuda.Stream(), torch.cuda.Stream())
            computing, (leave, _) = torch.cuda.current_stream(), self.streams
            computing.wait_stream(leave)  # so the previous input may be freed
            self.leaving = tensor
            copy = HostCopy(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
            leave.wait_stream(computing)
            with torch.cuda.stream(leave):
                copy.host.copy_(tensor, non_blocking=True)
        self.copies.append(copy)
        return copy

    def unpack(self, copy: HostCopy) -> Tensor:
        if copy in self.copies:  # not if it follows another input of its block
            # those after it are of its block, or of a forward without a backward
            del self.copies[self.copies.index(copy) :]
        if not self.on_gpu:
            return copy.host
        computing, (leave, arrive) = torch.cuda.current_stream(), self.streams
        computing.wait_stream(leave)
        self.leaving = None
        self.fetch(copy)
        computing.wait_stream(arrive)
        if self.copies:  # the next input arrives while this block computes
            self.fetch(self.copies[-1])
        tensor = copy.device
        copy.device = None
        return tensor

    def fetch(self, copy: HostCopy) -> None:
        """Begin to copy an input back to the device."""
        if copy.device is None:
            # memory of the computing stream, so only that stream must be done with it
            copy.device = torch.empty_like(copy.host, device=self.device)
            _, arrive = self.streams
            arrive.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(arrive):
                copy.device.copy_(copy.host, non_blocking=True)
