"""Save while training goes on: a copy in host memory, and a thread that writes it."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..model.pieces import local

NICE = 19  # of the thread: the steps come first


class Background:
    """One thread, and one copy of what it saves, page-locked beside a GPU and used again each time.

    torch's async_save would look at every tensor anew, which takes longer than to copy it.
    """

    def __init__(self, device: torch.device):
        self.device, cuda = device, device.type == "cuda"
        options = {"use_shared_memory": False, "use_async_staging": False}
        options = StagingOptions(use_pinned_memory=cuda, use_non_blocking_copy=cuda, **options)
        self.stager, self.copies = DefaultStager(options), {}
        self.thread = ThreadPoolExecutor(1, "save", initializer=_be_nice)

    @torch.no_grad()
    def submit(self, save: Callable, tensors: dict[str, torch.Tensor], **options) -> Future:
        """save(a copy of the tensors, **options) in the thread; the tensors may change from now on."""
        if self.copies.keys() != tensors.keys():
            self.copies = self.stager.stage(tensors)
        else:
            for name, copy in self.copies.items():
                local(copy).copy_(local(tensors[name]), non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return self.thread.submit(save, self.copies, **options)


def _be_nice() -> None:
    with suppress(AttributeError, OSError):  # Linux can say so of a thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
