"""The inputs of recomputed blocks on the host, from their forward to their backward.

On a GPU copies go both ways on streams of their own, through page-locked memory: an input leaves while its
block computes, and comes back while the block after it has its backward. Nothing is left to the allocator's
bookkeeping of streams, so that what is alive does not depend on how far the host is ahead. On a CPU they are
plain copies. After torchtune's OffloadActivations,
https://docs.pytorch.org/torchtune/stable/generated/torchtune.training.OffloadActivations.html
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .sharding import decoder_layers


def offload_inputs(model: nn.Module, device: torch.device) -> None:
    """Keep the inputs of a model's blocks on the host; recompute_activations has been called."""
    copies = HostCopies(device)
    hook_inputs(model, copies.pack, copies.unpack)


def hook_inputs(model: nn.Module, pack: Callable, unpack: Callable) -> None:
    """What is kept of each block's inputs (B, T, D) is pack(input), and unpack makes it an input again."""

    def pack_inputs(tensor: Tensor) -> object:
        return pack(tensor) if tensor.is_floating_point() and tensor.ndim == 3 else tensor

    def unpack_inputs(kept: object) -> Tensor:
        return kept if isinstance(kept, Tensor) else unpack(kept)

    def hooked(checkpoint: Callable, *args, **kwargs):
        # Within a block torch.utils.checkpoint has hooks of its own, so only its inputs come to these.
        with saved_tensors_hooks(pack_inputs, unpack_inputs):
            return checkpoint(*args, **kwargs)

    for layer in decoder_layers(model):
        layer._gradient_checkpointing_func = partial(hooked, layer._gradient_checkpointing_func)


class HostCopy:
    """An input on the host, and on the device once it is on its way back."""

    def __init__(self, host: Tensor):
        self.host = host
        self.device: Tensor | None = None


class HostCopies:
    """Of one forward after the other; the backward asks for them from the last to the first."""

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"
        self.copies: list[HostCopy] = []
        self.leaving: Tensor | None = None  # an input of which the copy may not be complete
        self.streams: tuple | None = None  # to the host and back

    def pack(self, tensor: Tensor) -> HostCopy:
        if not self.on_gpu:
            copy = HostCopy(tensor.clone())
        else:
            self.streams = self.streams or (torch.cuda.Stream(), torch.cuda.Stream())
            computing, (leave, _) = torch.cuda.current_stream(), self.streams
            computing.wait_stream(leave)  # so the input before may go
            self.leaving = tensor
            copy = HostCopy(torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True))
            leave.wait_stream(computing)
            with torch.cuda.stream(leave):
                copy.host.copy_(tensor, non_blocking=True)
        self.copies.append(copy)
        return copy

    def unpack(self, copy: HostCopy) -> Tensor:
        while self.copies.pop() is not copy:  # a forward without a backward left them
            pass
        if not self.on_gpu:
            return copy.host
        computing, (leave, arrive) = torch.cuda.current_stream(), self.streams
        computing.wait_stream(leave)
        self.leaving = None
        self.fetch(copy)
        computing.wait_stream(arrive)
        if self.copies:  # it comes while this block computes
            self.fetch(self.copies[-1])
        tensor, copy.device = copy.device, None
        return tensor

    def fetch(self, copy: HostCopy) -> None:
        """Begin to copy it to the device."""
        if copy.device is None:
            # of the computing stream's memory, so only that must be done with it
            copy.device = torch.empty_like(copy.host, device=self.device)
            _, arrive = self.streams
            arrive.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(arrive):
                copy.device.copy_(copy.host, non_blocking=True)
