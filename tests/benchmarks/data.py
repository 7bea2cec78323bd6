"""
Data: text to tokens on the disk, against tokenizers' own encode_batch; how full packs are and how fast they
are found, against TRL's packer if it is installed; how long a training loop waits for its batches.

The text is generated: words of an invented language, by Zipf's law, in chats of one to three turns. The
tokenizer has 8,000 byte-level tokens and is trained on it. Lengths of documents are log-normal (sigma 0.8).
"""

import json
import os
import random
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from measure import (
    Bound,
    Worker,
    anonymous_bytes,
    measured,
    run_worker,
)  # also puts the repository on sys.path

GIB, MIB = 2**30, 2**20
SIZE, SMALL_SIZE = 256 * MIB, MIB  # of rows.jsonl
MEANS, SLOTS, DOCUMENTS = (300, 1000, 2000), 4096, 1_000_000
CONTENDERS = {
    "raw": "tokenizers' encode_batch, all cores, of the rendered chats, which it finds in memory",
    "ours": "utils/data/examples.py and utils/data/cache.py: from rows.jsonl to mapped tokens and masks",
    "gigabyte": "ours, of 1 GiB of rows: for its memory, in all processes",
    "wait": "a training loop: the time for its batches, packed, over that of its steps",
}
CONTENDERS |= {
    f"pack_{mean}": f"utils/data/packing.py: {DOCUMENTS:,} documents of {mean} tokens"
    for mean in MEANS
}
CONTENDERS |= {
    f"trl_{mean}": f"TRL's bfd: {DOCUMENTS // 10:,} documents of {mean} tokens" for mean in MEANS
}
REFERENCES = {"ours": "raw"}
METRICS = {
    "seconds": ("s", max),
    "peak_bytes": ("MiB", max),
    "tokens_per_second": ("", max),
    "filled": ("%", max),
    "bound": ("%", max),
    "documents_per_second": ("", max),
    "waited": ("%", max),
}
RATIOS = ("tokens_per_second",)
BOUNDS = (
    Bound("tokens_per_second", 0.5, "tokens/s, over tokenizers'", "raw", timed=True, at_least=True),
    Bound("waited", 0.01, "time for batches, of the step's", contender="wait"),
    Bound("filled", 0.99, "slots filled", at_least=True, contender="pack_2000"),
)
BOUNDS += tuple(
    Bound(
        "documents_per_second",
        1e6,
        "documents/s",
        timed=True,
        at_least=True,
        contender=f"pack_{mean}",
    )
    for mean in MEANS
)
RANKS = (1,)


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory) to start with."""
    return (MIB * 64, GIB) if small else (8 * GIB, 4 * GIB)


def prepare(folder: Path, small: bool) -> None:
    """Write rows.jsonl, and a tokenizer in `model`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    write_rows(folder / "rows.jsonl", SMALL_SIZE if small else SIZE)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    options = {"vocab_size": 8000, "special_tokens": special, "show_progress": False}
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    with open(folder / "rows.jsonl") as lines:
        texts = [line for line, _ in zip(lines, range(2000), strict=False)]
    backend.train_from_iterator(texts, trainers.BpeTrainer(initial_alphabet=alphabet, **options))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(
        folder / "model"
    )


def write_rows(file: Path, size: int) -> None:
    """Write chats with this many bytes in all."""
    rng = random.Random(0)
    syllables = [
        a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "an", "er", "is")
    ]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(20000)]
    weights, written = [1 / rank for rank in range(1, len(words) + 1)], 0
    pool = rng.choices(words, weights, k=2**20)

    def said(longest: int) -> str:
        at, count = rng.randrange(len(pool) - longest), rng.randint(5, longest)
        return " ".join(pool[at : at + count]).capitalize() + "."

    with open(file, "w") as out:
        while written < size:
            turns = []
            for _ in range(rng.choice((1, 1, 2, 3))):
                turns += [
                    {"role": "user", "content": said(60)},
                    {"role": "assistant", "content": said(300)},
                ]
            written += out.write(json.dumps({"messages": turns}) + "\n")


def contend(worker: Worker) -> dict[str, float]:
    kind, _, mean = worker.contender.partition("_")
    return {
        "raw": raw,
        "ours": ours,
        "gigabyte": gigabyte,
        "wait": wait,
        "pack": packs,
        "trl": trl,
    }[kind](worker, *([int(mean)] if mean else []))


def tokenizer_of(worker: Worker):
    from utils.data.tokens import load_tokenizer

    return load_tokenizer(worker.folder / "model", "chatml")


def raw(worker: Worker) -> dict[str, float]:
    from utils.data.tokens import render

    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    tokenizer = tokenizer_of(worker)
    with open(worker.folder / "rows.jsonl") as lines:
        texts = [render(tokenizer, json.loads(line)["messages"]) for line in lines]
    tokens = 0
    with measured() as numbers:
        for i in range(0, len(texts), 1000):
            batch = tokenizer.backend_tokenizer.encode_batch(
                texts[i : i + 1000], add_special_tokens=False
            )
            tokens += sum(map(len, batch))
    return {"seconds": numbers["seconds"], "tokens_per_second": tokens / numbers["seconds"]}


def ours(worker: Worker, rows: Path | None = None) -> dict[str, float]:
    from utils.data import examples as data

    os.environ["XDG_CACHE_HOME"] = str(worker.out)
    data.SMALL = 0
    tokenizer, rows = tokenizer_of(worker), rows or worker.folder / "rows.jsonl"
    with measured() as numbers, memory_of_all() as peak:
        examples = data.load_examples(data.Rows(str(rows), 2**20), tokenizer)
    rate = len(examples.ids) / numbers["seconds"]
    return {"seconds": numbers["seconds"], "peak_bytes": peak[0], "tokens_per_second": rate}


def gigabyte(worker: Worker) -> dict[str, float]:
    rows = worker.out / "rows.jsonl"
    write_rows(rows, 4 * SMALL_SIZE if worker.small else GIB)
    return ours(worker, rows)


@contextmanager
def memory_of_all():
    """[the most anonymous memory that this process and its children held together]"""
    peak, stop = [0], threading.Event()

    def sample() -> None:
        while not stop.wait(0.05):
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            total = 0
            for pid in ("self", *children):
                try:
                    total += anonymous_bytes(Path(f"/proc/{pid}/statm").read_bytes())
                except (OSError, ValueError):  # the process has ended
                    continue
            peak[0] = max(peak[0], total)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    yield peak
    stop.set()
    sampler.join()


def lengths_of(mean: int, count: int) -> torch.Tensor:
    torch.manual_seed(0)
    lengths = torch.distributions.LogNormal(0.0, 0.8).sample((count,))
    return (lengths / lengths.mean() * mean).long().clamp(1, SLOTS)


def packs(worker: Worker, mean: int) -> dict[str, float]:
    from utils.data.packing import pack

    lengths = lengths_of(mean, DOCUMENTS)
    with measured() as numbers:
        count = len(pack(lengths, SLOTS))
    return filled(lengths, count, numbers["seconds"])


def trl(worker: Worker, mean: int) -> dict[str, float]:
    from datasets import Dataset
    from trl.data_utils import pack_dataset

    lengths = lengths_of(mean, DOCUMENTS // 10)
    rows = Dataset.from_dict({"input_ids": [[0] * length for length in lengths.tolist()]})
    with measured() as numbers:
        count = len(pack_dataset(rows, SLOTS, "bfd", {"batch_size": len(rows)}))
    return filled(lengths, count, numbers["seconds"])


def filled(lengths: torch.Tensor, count: int, seconds: float) -> dict[str, float]:
    total = int(lengths.sum())
    rate = {"seconds": seconds, "documents_per_second": len(lengths) / seconds}
    return rate | {"filled": total / count / SLOTS, "bound": total / -(-total // SLOTS) / SLOTS}


def wait(worker: Worker) -> dict[str, float]:
    """How long training waits for batches: a model of 29 million parameters, 2 packs of 2,048 tokens a
    step, one process.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    from utils.data import examples as data
    from utils.data.packing import PackedBatches
    from utils.model.loss import add_chunked_loss, summed_cross_entropy

    data.SMALL = 2**40
    rows = data.Rows(str(worker.folder / "rows.jsonl"), 2048, max_rows=2000)
    examples = data.load_examples(rows, tokenizer_of(worker))
    loader = PackedBatches(examples, 0, 2, 1, 0, 1, 0, 2048)
    heads = {"num_attention_heads": 8, "num_hidden_layers": 1 if worker.small else 8}
    config = LlamaConfig(hidden_size=512, intermediate_size=1376, vocab_size=8192, **heads)
    model, waited, steps = add_chunked_loss(LlamaForCausalLM(config).train()), 0.0, 4
    with measured() as numbers:
        for step in range(steps):
            started = time.perf_counter()
            batches = loader.batches(step)
            waited += time.perf_counter() - started
            for batch in batches:
                summed_cross_entropy(model, batch).backward()
    return {"seconds": numbers["seconds"], "waited": waited / numbers["seconds"]}


if __name__ == "__main__":
    run_worker(contend)
