"""
Pre-training data far larger than memory: generated text through the token cache
and the token stream, on 2 ranks.

    python tests/benchmarks/bench.py stream --repeats 1                 # 4 GiB of text
    TEXT_MIB=256 python tests/benchmarks/bench.py stream --repeats 1

The text is that of data.py, in documents of 5 to 30,000 words. Each rank maps the tokens, then reads the
batches of steps from all over two epochs of the stream. It measures the peak anonymous memory of the ranks
and the processes that tokenize, together, above the level of the ranks at the start.
"""

import json
import os
import random
import time
from pathlib import Path

import data
from measure import Bound, Worker, anonymous_bytes, measured, run_worker

GIB, MIB = 2**30, 2**20
SIZE = int(os.environ.get("TEXT_MIB", 4096)) * MIB
SMALL_SIZE = 20 * MIB
SEQ_LEN, GLOBAL_BATCH, STEPS = 2048, 16, 200
CONTENDERS = {
    "ours": "utils/data/documents.py, cache.py and stream.py: from texts.jsonl to batches"
}
REFERENCES: dict[str, str] = {}
METRICS = {
    "seconds": ("s", max),
    "peak_bytes": ("MiB", max),
    "tokens_per_second": ("", max),
    "batch_seconds": ("ms", max),
}
RATIOS = ()
BOUNDS = (Bound("peak_bytes", GIB, "bytes of anonymous memory of all processes"),)
RANKS = (2,)


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory) to start with."""
    return 3 * (SMALL_SIZE if small else SIZE), 3 * GIB


def prepare(folder: Path, small: bool) -> None:
    """Write texts.jsonl, and a tokenizer in `model`."""
    data.prepare(folder, True)
    rng = random.Random(0)
    with open(folder / "rows.jsonl") as rows:
        turns = [turn["content"] for row in rows for turn in json.loads(row)["messages"]]
    written, size = 0, SMALL_SIZE if small else SIZE
    with open(folder / "texts.jsonl", "w") as out:
        while written < size:
            count = min(200, int(rng.paretovariate(0.8)))
            text = " ".join(rng.choices(turns, k=count))
            written += out.write(json.dumps({"text": text}) + "\n")


def contend(worker: Worker) -> dict[str, float]:
    import torch
    import torch.distributed as dist

    from utils.data.examples import Rows, load_examples
    from utils.data.stream import StreamBatches

    os.environ["XDG_CACHE_HOME"] = str(worker.out)
    tokenizer = data.tokenizer_of(worker)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    before = anonymous_bytes()
    rows = Rows(str(worker.folder / "texts.jsonl"), SEQ_LEN, task="documents")
    with measured() as numbers, data.memory_of_all() as peak:
        started = time.perf_counter()
        examples = load_examples(rows, tokenizer)
        made = time.perf_counter() - started
        loader = StreamBatches(examples, 0, GLOBAL_BATCH, 2, rank, ranks, 0, SEQ_LEN)
        started = time.perf_counter()
        for number in range(STEPS):
            loader.batches(number * 2 * loader.per_epoch // STEPS)
        batch_seconds = (time.perf_counter() - started) / STEPS
    above = torch.tensor(float(peak[0] - before))
    dist.all_reduce(above)  # the sum of both ranks' peaks, which may occur at different times
    return {
        "seconds": numbers["seconds"],
        "peak_bytes": above.item(),
        "tokens_per_second": int(examples.bounds[-1]) / made,
        "batch_seconds": batch_seconds,
    }


if __name__ == "__main__":
    run_worker(contend)
