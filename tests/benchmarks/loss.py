"""
Head and loss with full logits against chunks: forward and backward in one process, bf16.

"plain" is what a model of transformers does with labels: logits for all tokens at once, in fp32 for the
cross-entropy. There is no backbone: the hidden states are random, and get a gradient too.

It also measures log-probabilities of tokens, each with its own factor: from log_softmax of full logits, and
from utils/model/log_probs.py. Here one narrow layer makes the hidden states.
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
OF_TOKENS = "131072_4096"
CONTENDERS |= {
    f"logits_{OF_TOKENS}": "log_softmax of all; vocabulary 131,072, 4,096 tokens",
    f"logprobs_{OF_TOKENS}": "utils/model/log_probs.py; vocabulary 131,072, 4,096 tokens",
}
REFERENCES = {f"chunked_{v}_{t}": f"plain_{v}_{t}" for v, t in CELLS}
REFERENCES |= {f"logprobs_{OF_TOKENS}": f"logits_{OF_TOKENS}"}
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
BOUNDS += (
    Bound(
        "peak_bytes",
        0.3,
        "peak, over log_softmax's",
        f"logits_{OF_TOKENS}",
        contender=f"logprobs_{OF_TOKENS}",
    ),
)
RANKS = (1,)


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory) to start with; each contender checks its own need."""
    return 2**20, 2**30


def prepare(folder: Path, small: bool) -> None:
    """Nothing to prepare: weights and tokens are drawn from a seed."""


def contend(worker: Worker) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from utils.model.loss import add_chunked_loss

    kind, vocabulary, tokens = worker.contender.split("_")
    vocabulary, tokens, width = int(vocabulary), int(tokens), WIDTH
    if worker.small:
        vocabulary, tokens, width = vocabulary // 16, tokens // 8, WIDTH // 8
    # Full logits: the logits, their log-softmax and gradients. All contenders: the head and its gradient.
    needed = (
        16 * vocabulary * tokens * (kind in ("plain", "logits")) + 16 * vocabulary * width + GIB
    )
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
    if kind.startswith("log"):
        loss, numbers = log_probs(model, kind, tokens)
        hidden = model.model.norm.weight  # its gradient stands for that of the hidden states
    else:
        loss, numbers, hidden = summed(model, head, kind, tokens)
    found = [loss.item(), hidden.grad.float().norm().item(), head.weight.grad.float().norm().item()]
    cell = worker.contender.split("_", 1)[1]
    # "plain" rounds 1 / tokens to bf16 in the gradient of its logits: an error of up to 0.4 %.
    difference_to_first(found, worker.folder / f"loss and gradient norms of {cell}", most=4e-3)
    return {"loss": found[0]} | {key: numbers[key] for key in METRICS if key in numbers}


def summed(model, head, kind: str, tokens: int):
    """(loss, numbers, hidden states) of the mean cross-entropy, forward and backward."""
    vocabulary, width = head.weight.shape
    hidden = torch.randn(tokens, width).to(torch.bfloat16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,))
    with measured() as numbers:
        if kind == "chunked":
            loss = head(hidden, targets) / tokens
        else:
            loss = model.loss_function(head(hidden), None, vocabulary, shift_labels=targets)
        loss.backward()
    return loss, numbers, hidden


def log_probs(model, kind: str, tokens: int):
    """(loss, numbers) of log-probs with one factor per token, forward and backward."""
    from utils.data.batches import Batch
    from utils.model.log_probs import token_log_probs

    model.get_input_embeddings().requires_grad_(False)  # its gradient is not measured
    ids, factors = torch.randint(model.config.vocab_size, (1, tokens)), torch.rand(1, tokens)
    batch = Batch(ids, ids, torch.ones_like(ids, dtype=torch.bool), [])
    with measured() as numbers:
        if kind == "logprobs":
            found = token_log_probs(model, batch)[:, 1:]
        else:
            logits = model(ids, use_cache=False).logits[:, :-1].float()
            found = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        loss = -(found * factors[:, 1:]).sum() / tokens
        loss.backward()
    return loss, numbers


if __name__ == "__main__":
    run_worker(contend)
