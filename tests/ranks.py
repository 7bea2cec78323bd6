"""Run a function on N gloo ranks: `run_ranks(fn, 2, argument)`.

The processes are started once for each N and reused, because imports cost more than most tests. `fn` is a
module-level function `fn(world, *args)`; the results come back in the order of ranks. If a rank raises, the
first rank's traceback is raised here and the ranks of that N are started anew for the next test, unless all
of them have raised a ConfigError on which they had agreed: none of them is in a collective then.
"""

import atexit
import faulthandler
import gc
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from multiprocessing.connection import Connection, wait

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.fsdp",
        "transformers.models.llama.modeling_llama",
        "bitsandbytes",
        "peft",
        "forked_once",  # in tests/site, since the forkserver knows no other folder of tests
    ]
)
# ranks -> for each its process, its pipe, and where it writes its stacks
_pools: dict[int, list[tuple[multiprocessing.Process, Connection, Connection]]] = {}
SECONDS = 240


def run_ranks(fn, ranks: int, *args, seconds: float = SECONDS) -> list:
    """Results of fn(world, *args) on `ranks` processes."""
    if ranks not in _pools:
        _pools[ranks] = _start(ranks)
    pipes = [pipe for _, pipe, _ in _pools[ranks]]
    for pipe in pipes:
        pipe.send((fn, args))
    results: dict[int, object] = {}
    failures: dict[int, str] = {}
    while len(results) < ranks:
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), timeout=seconds)
        if not ready:
            stacks = _stacks(ranks)
            _stop(ranks)
            raise TimeoutError(
                f"ranks {sorted(waiting.values())} of {ranks} gave no answer within {seconds} s\n{stacks}"
            )
        for pipe in ready:
            rank, agreed = waiting[pipe], False
            try:
                failure, results[rank] = pipe.recv()
                agreed = results[rank] is True
            except EOFError:
                failure = "the process died"
            if failure:
                failures[rank] = f"rank {rank} of {ranks}:\n{failure}"
                if not agreed:
                    _stop(ranks)
                    raise AssertionError(failures[rank])
    if failures:
        if len(failures) < ranks:
            _stop(ranks)
        raise AssertionError(failures[min(failures)])
    return [results[rank] for rank in range(ranks)]


def run_fresh_ranks(fn, ranks: int, *args) -> list:
    """The same on processes that have run nothing before: for memory that is measured."""
    if ranks in _pools:
        _stop(ranks)
    try:
        return run_ranks(fn, ranks, *args)
    finally:
        if ranks in _pools:
            _stop(ranks)


def gathered(tensor):
    """A tensor of all ranks: of a DTensor's shards, or plain, as one rank may have it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _start(ranks: int) -> list:
    port = free_port()
    pool = []
    for rank in range(ranks):
        here, there = _context.Pipe()
        reader, writer = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_serve, args=(there, writer, rank, ranks, port), daemon=True
        )
        process.start()
        there.close()
        writer.close()
        pool.append((process, here, reader))
    return pool


@atexit.register
def _stop_all() -> None:
    for ranks in list(_pools):
        _stop(ranks)


def _stop(ranks: int) -> None:
    for process, pipe, reader in _pools.pop(ranks):
        pipe.close()
        reader.close()
        process.kill()
        process.join()


def _stacks(ranks: int) -> str:
    """Where each thread of each rank is."""
    found = ""
    for rank, (process, _, reader) in enumerate(_pools[ranks]):
        os.kill(process.pid, signal.SIGQUIT)
        time.sleep(1)
        written = os.read(reader.fileno(), 2**16) if reader.poll() else b"nothing"
        found += f"rank {rank}:\n{written.decode()}\n"
    return found


def _serve(pipe: Connection, stacks: Connection, rank: int, ranks: int, port: int) -> None:
    import torch

    faulthandler.enable()  # a crash in C prints the stack of each thread
    faulthandler.register(signal.SIGQUIT, stacks)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    from utils.run.distributed import init_distributed

    world = init_distributed()
    gc.freeze()  # as in conftest.py
    for call in itertools.count(1):
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        # torch names groups by a count. Since 2.14 a group of some ranks is counted by these alone.
        torch.distributed.distributed_c10d._world.group_count = 1000 * call
        try:
            torch.manual_seed(0)
            # Whatever the last function left: sums depend on threads, and compilations are counted.
            torch.set_num_threads(1)
            if "torch._dynamo" in sys.modules:
                torch._dynamo.reset()
            pipe.send((None, fn(world, *args)))
        except BaseException as error:  # whatever it is, the test must see it
            pipe.send((traceback.format_exc(), getattr(error, "agreed", False)))
