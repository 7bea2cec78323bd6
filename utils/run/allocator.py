"""How the allocators are set, before they begin: glibc's, and CUDA's of torch.

Memory that is freed goes back to the system, so that a process on a CPU holds what its plan says.

glibc learns from each large block that is freed: its threshold for mapping blocks one by one grows to 32 MiB,
and smaller ones then come from heaps, whose holes stay with the process. A fixed threshold ends that.
"""

import ctypes
import os
from collections.abc import MutableMapping
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
# Blocks of this size and more are mapped, each by itself, and each of their pages is cleared by the system
# anew. With the smaller size 60 steps of the tiny model take 1.4 times the CPU time, and their memory is the
# planned one to 0.1 %; with the larger one it is up to a third more. So the smaller one is for tight runs.
MAPPED_BYTES, MAPPED_BYTES_IF_TIGHT = 2**20, 2**18
KEPT_BYTES = 2**25  # of the heap's free end, which stays: less of it costs time too
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
# What torch reads when it first allocates on a GPU, the first that is set (c10/cuda/CUDAAllocatorConfig.h of
# torch 2.13; before 2.9 the second alone): names of variables.
CUDA_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
EXPANDABLE = "expandable_segments:True"


def give_back_freed_memory(mapped_bytes: int = MAPPED_BYTES) -> None:
    """Fix glibc's thresholds from here on, in all threads; what the user has set in the environment stays.

    Other C libraries, and allocators that are preloaded in its place, are left as they are.
    """
    chosen = any(name in os.environ for name in SETTINGS) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if not chosen:
        with suppress(AttributeError, OSError, TypeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, mapped_bytes)
            libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


def use_expandable_segments(environment: MutableMapping[str, str], started: bool) -> str:
    """Have torch's allocator of GPU memory map pages as it needs them, in place of blocks of fixed sizes, of
    which it loses 10 to 25 % between them in published runs of FSDP2. What the user has set stays.

    environment: where the setting goes, os.environ. started: CUDA has begun, so it is too late. Returns the
    line to print, "" where nothing was set. torchtitan sets the same in its launcher.
    """
    if started or any(name in environment for name in CUDA_SETTINGS):
        return ""
    environment["PYTORCH_CUDA_ALLOC_CONF"] = EXPANDABLE
    return f"allocator PYTORCH_CUDA_ALLOC_CONF={EXPANDABLE}, since it was not set"
