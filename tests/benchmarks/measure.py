"""
Code that the workers of all benchmarks share: measure memory, bytes, CPU and wall time of a block.

A benchmark is a file beside this one. bench.py imports it for the names below, and starts it as a program
on every rank, in fresh processes for each run: load.py --contender NAME --folder F --out DIR --small false

    CONTENDERS = {"ours": "what it does", ...}          rows of the table
    REFERENCES = {"ours": "raw_pread", ...}             denominator of its ratios, in the same repeat
    METRICS = {"seconds": ("s", max), ...}              unit (None: not in the table), how ranks combine
    RATIOS = ("seconds",)                               metrics that are also shown as ratios
    BOUNDS = (Bound("seconds", 1.5, ...), ...)          limits that "ours" must keep
    RANKS = (2, 4)                                      world sizes
    def needs(small, ranks) -> (disk, memory)           bytes, checked before anything starts
    def prepare(folder, small) -> None                  writes what the workers read
    def contend(worker) -> dict[str, float]             one rank's numbers, by metric
    if __name__ == "__main__": run_worker(contend)

Optional: unavailable(small), which returns why the benchmark cannot run here, or ""; and report(results).
"""

import argparse
import gc
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(TESTS.parent), str(TESTS)]  # utils/ is beside tests/, which has tiny.py

import torch.distributed as dist

from utils.run.distributed import World, init_distributed, stop_distributed

MIB = 2**20


@dataclass(frozen=True)
class Bound:
    """The metric of `contender` must be at most `limit`, or with at_least at least `limit`. With `over` the
    limit is for its ratio to that contender.

    A timed bound is judged by the median of the repeats in which other processes left the machine alone. Any
    other bound is judged by the worst repeat.
    """

    metric: str
    limit: float
    says: str
    over: str = ""
    timed: bool = False
    at_least: bool = False
    contender: str = "ours"


@dataclass(frozen=True)
class Worker:
    """One rank of one run."""

    world: World
    contender: str
    folder: Path  # what prepare() wrote
    out: Path  # of this run only: rankN.json, and other files that the contender writes
    small: bool


def run_worker(contend: Callable[[Worker], dict]) -> None:
    """The main program of a worker: join the group, run `contend`, write rankN.json or rankN.error."""
    parser = argparse.ArgumentParser()
    for name in ("contender", "folder", "out", "small"):
        parser.add_argument(f"--{name}", required=True)
    args = parser.parse_args()
    rank, out = int(os.environ["RANK"]), Path(args.out)
    try:
        world = init_distributed()
        worker = Worker(world, args.contender, Path(args.folder), out, args.small == "true")
        (out / f"rank{rank}.json").write_text(json.dumps(contend(worker)))
        dist.barrier()
        stop_distributed()
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        (out / f"rank{rank}.error").write_text(f"{text[:200]}\n{traceback.format_exc()}")
        os._exit(1)  # skips the destructors of the group, in which other ranks still wait


@contextmanager
def measured() -> Iterator[dict]:
    """Measure the block on every rank, between two barriers. The dict has the numbers when the
    block has ended.

    seconds: wall time, barrier to barrier. cpu_seconds: of this process. peak_bytes: peak anonymous memory
    above the level at the start. pss_bytes: growth of the process at the end, with its share of mapped files.
    read_call_bytes: bytes read with read calls. disk_bytes: bytes fetched from the device for this process,
    which include reads through mmap. written_bytes: bytes written to files.
    """
    numbers: dict[str, float] = {}
    gc.collect()
    dist.barrier()
    level, pss, before = anonymous_bytes(), _pss(), _io()
    peak, own_bytes, own_cpu, stop = [level], [0], [0.0], threading.Event()

    def sample() -> None:
        with open("/proc/self/statm", "rb", buffering=0) as statm:
            while not stop.wait(0.002):
                peak[0] = max(peak[0], anonymous_bytes(text := os.pread(statm.fileno(), 200, 0)))
                own_bytes[0] += len(text)
        own_cpu[0] = time.thread_time()

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    dist.barrier()
    started, cpu = time.perf_counter(), time.process_time()
    try:
        yield numbers
        dist.barrier()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    finally:
        stop.set()
        sampler.join()
    end, after = anonymous_bytes(), _io()
    names = {"read_call_bytes": "rchar", "disk_bytes": "read_bytes", "written_bytes": "write_bytes"}
    numbers |= {name: after[key] - before[key] for name, key in names.items()}
    numbers["read_call_bytes"] -= own_bytes[0]
    numbers["peak_bytes"] = max(peak[0], end) - level
    numbers |= {"seconds": seconds, "cpu_seconds": cpu - own_cpu[0], "pss_bytes": _pss() - pss}


def anonymous_bytes(statm: bytes = b"") -> int:
    """Bytes of this process's memory that belong to no file. (VmHWM and ru_maxrss also
    count mapped files.)
    """
    _, resident, shared, *_ = map(int, (statm or Path("/proc/self/statm").read_bytes()).split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _pss() -> int:
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


def _io() -> dict[str, int]:
    with open("/proc/self/io") as file:
        return {key: int(value) for key, value in (line.split(": ") for line in file)}
