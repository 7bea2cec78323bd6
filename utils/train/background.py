"""Asynchronous saves, for --async_save: the tensors are copied to host memory, and a thread writes them while
training goes on.
"""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from ..model.loading import local


class Background:
    """One thread, and one host copy of the tensors that it saves. Each save reuses the memory of the copy,
    which is pinned if there is a GPU.

    torch's async_save would inspect every tensor again at each save, which takes longer than the copy.
    """

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=self.on_gpu,
                use_non_blocking_copy=self.on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
            )
        )
        self.copies = {}  # of the tensors, by name
        self.thread = ThreadPoolExecutor(1, "save", _start_thread, (device,))

    @torch.no_grad()
    def submit(self, save: Callable, tensors: dict) -> Future:
        """Call save(a copy of the tensors) in the thread. The tensors may change after this."""
        if self.copies.keys() != tensors.keys():
            self.copies = self.stager.stage(tensors)
        else:
            for name, copy in self.copies.items():
                local(copy).copy_(local(tensors[name]), non_blocking=True)
        if self.on_gpu:
            torch.cuda.synchronize()
        return self.thread.submit(save, self.copies)


def _start_thread(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)  # else DCP's copies create a context on GPU 0
    # Training steps have priority. On Linux this is the niceness of this thread alone.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
