"""
Loss and head from full logits against chunks: forward and backward in one process, bf16.

Plain is what a model of transformers does with labels: logits for all tokens at once, in fp32 for the
cross-entropy. There is no body: the hidden states are drawn, and get a gradient too.
"""

import re
from pathlib import Path

import torch
from measure import Bound, Worker, measured, run_worker  # also puts the repository on sys.path
from step import difference_to_first

from utils.run.errors import check

VOCABULARIES, TOKENS, WIDTH = (32_000, 128_256), (510, 4096), 2048
GIB = 2**30
CELLS = [(vocabulary, tokens) for vocabulary in VOCABULARIES for tokens in TOKENS]
CONTENDERS = {
    f"{kind}_{vocabulary}_{tokens}": f"{what}; vocabulary {vocabulary:,}, {tokens:,} tokens"
    for vocabulary, tokens in CELLS
    for kind, what in (("plain", "transformers' loss"), ("chunked", "utils/model/loss.py"))
}
REFERENCES = {f"chunked_{v}_{t}": f"plain_{v}_{t}" for v, t in CELLS}
METRICS = {
    "peak_bytes": ("MiB", max),
    "seconds": ("s", max),
    "cpu_seconds": ("s", max),
    "loss": ("", max),
}
RATIOS = ("peak_bytes", "seconds")
BOUNDS = tuple(
    Bound(
        "seconds",
        1.15,
        "time, over plain's",
        f"plain_{v}_{t}",
        timed=True,
        contender=f"chunked_{v}_{t}",
    )
    for v, t in CELLS
)
BOUNDS += tuple(
    Bound(
        "peak_bytes", 0.25, "peak, over plain's", f"plain_{v}_4096", contender=f"chunked_{v}_4096"
    )
    for v in VOCABULARIES
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
    vocabulary, tokens, width = int(vocabulary), int(tokens), WIDTH
    if worker.small:
        vocabulary, tokens, width = vocabulary // 16, tokens // 8, WIDTH // 8
    # Plain holds logits, log-softmax and their gradients; both hold the head and its gradient.
    needed = 16 * vocabulary * tokens * (kind == "plain") + 16 * vocabulary * width + GIB
    free = int(re.search(r"MemAvailable: +(\d+)", Path("/proc/meminfo").read_text())[1]) * 1024
    check(
        needed <= free,
        f"left out: it takes {needed / GIB:.1f} GiB, and {free / GIB:.1f} are available",
    )

    torch.manual_seed(0)
    sizes = {"hidden_size": width, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=8, vocab_size=vocabulary)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    head = add_chunked_loss(model).get_output_embeddings()
    hidden = torch.randn(tokens, width).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    with measured() as numbers:
        if kind == "chunked":
            loss = head(hidden, targets) / tokens
        else:
            loss = model.loss_function(head(hidden), None, vocabulary, shift_labels=targets)
        loss.backward()
    found = [loss.item(), hidden.grad.float().norm().item(), head.weight.grad.float().norm().item()]
    cell = worker.contender.split("_", 1)[1]
    # Plain rounds 1 / tokens to bf16 in the gradient of its logits: up to 0.4 %.
    difference_to_first(found, worker.folder / f"loss and gradient norms of {cell}", most=4e-3)
    return {"loss": found[0]} | {key: numbers[key] for key in METRICS if key in numbers}


if __name__ == "__main__":
    run_worker(contend)
