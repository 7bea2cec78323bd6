"""Save while training goes on: a copy in host memory, and a thread that writes it."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..model.pieces import local

NICE = 19  # of the thread: the training steps have priority


class Background:
    """One thread, and one copy of the tensors that it saves. The copy is used again for each save; beside a
    GPU it is page-locked.

    torch's async_save would look at every tensor anew, which takes longer than to copy it.
    """

    def __init__(self, device: torch.device):
        self.device = device
        on_gpu = device.type == "cuda"
        options = StagingOptions(
            use_pinned_memory=on_gpu,
            use_non_blocking_copy=on_gpu,
            use_shared_memory=False,
            use_async_staging=False,
        )
        self.stager = DefaultStager(options)
        self.copies: dict[str, torch.Tensor] = {}
        self.thread = ThreadPoolExecutor(1, "save", initializer=_lower_priority)

    @torch.no_grad()
    def submit(self, save: Callable, tensors: dict[str, torch.Tensor], **options) -> Future:
        """Call save(a copy of the tensors, **options) in the thread. The tensors may change after this."""
        if self.copies.keys() != tensors.keys():
            self.copies = self.stager.stage(tensors)
        else:
            for name, copy in self.copies.items():
                local(copy).copy_(local(tensors[name]), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.thread.submit(save, self.copies, **options)


def _lower_priority() -> None:
    with suppress(AttributeError, OSError):  # only Linux has priorities of threads
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
