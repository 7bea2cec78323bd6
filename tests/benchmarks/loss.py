"""
Plain against chunked cross-entropy over vocabulary and tokens: forward and backward in one process, fp32.

Plain is what the model itself does with labels: logits for all tokens at once. The body is one small layer of
width 512, so what is seen is the head and the loss.
"""

import re
from pathlib import Path

import torch
from measure import Bound, Worker, measured, run_worker  # also puts the repository on sys.path
from step import difference_to_first

from utils.run.errors import check

VOCABULARIES, TOKENS, WIDTH = (8, 32, 128), (512, 2048, 4096), 512  # vocabularies in units of 1,024
GIB = 2**30
CELLS = [(vocabulary, tokens) for vocabulary in VOCABULARIES for tokens in TOKENS]
CONTENDERS = {
    f"{kind}_{vocabulary}k_{tokens}": f"{what}; vocabulary {vocabulary * 1024:,}, {tokens:,} tokens"
    for vocabulary, tokens in CELLS
    for kind, what in (("plain", "the model's own loss"), ("chunked", "utils/model/loss.py"))
}
REFERENCES = {f"chunked_{v}k_{t}": f"plain_{v}k_{t}" for v, t in CELLS}
METRICS = {
    "peak_bytes": ("MiB", max),
    "seconds": ("s", max),
    "cpu_seconds": ("s", max),
    "loss": ("", max),
}
RATIOS = ("peak_bytes", "seconds")
LARGEST = f"{VOCABULARIES[-1]}k_{TOKENS[-1]}"
BOUNDS = (
    Bound(
        "peak_bytes", 0.5, "peak, over plain's", f"plain_{LARGEST}", contender=f"chunked_{LARGEST}"
    ),
)
RANKS = (1,)


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory) to start with; what each cell needs it checks itself."""
    return 2**20, 2**30


def prepare(folder: Path, small: bool) -> None:
    """Nothing is read: weights and tokens are drawn from a seed."""


def contend(worker: Worker) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from utils.model.loss import add_chunked_loss

    kind, vocabulary, tokens = worker.contender.split("_")
    vocabulary, tokens = int(vocabulary[:-1]) * 1024, int(tokens)
    if worker.small:
        vocabulary, tokens = vocabulary // 16, tokens // 8
    # Plain holds logits, log-softmax and their gradients, in fp32; both hold the head and its gradient.
    needed = 4 * 4 * vocabulary * tokens * (kind == "plain") + 4 * 4 * vocabulary * WIDTH + GIB
    free = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    check(
        needed <= free,
        f"left out: it takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} are available",
    )

    torch.manual_seed(0)
    heads = {"num_attention_heads": 8, "num_hidden_layers": 1}
    config = LlamaConfig(hidden_size=WIDTH, intermediate_size=WIDTH, vocab_size=vocabulary, **heads)
    model = LlamaForCausalLM(config).train()
    if kind == "chunked":
        add_chunked_loss(model)
    ids = torch.randint(vocabulary, (1, tokens))
    with measured() as numbers:
        if kind == "chunked":
            loss = model(ids, labels=ids) / (tokens - 1)
        else:
            loss = model(ids, labels=ids, use_cache=False).loss
        loss.backward()
    found = [loss.item(), model.lm_head.weight.grad.norm().item()]
    difference_to_first(
        found, worker.folder / f"loss and gradient norm of {worker.contender.split('_', 1)[1]}"
    )
    return {"loss": found[0]} | {key: numbers[key] for key in METRICS if key in numbers}


if __name__ == "__main__":
    run_worker(contend)
