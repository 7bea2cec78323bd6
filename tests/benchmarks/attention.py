"""
Attention over packs of documents, forward and backward: a mask over the whole row against
document by document.

Both are attention functions of transformers and get the same queries, keys and values. The mask is made once,
as in a model, and not timed. Documents have 300 tokens on average.
"""

from pathlib import Path

import torch
from measure import Bound, Worker, measured, run_worker  # also puts the repository on sys.path
from step import difference_to_first
from torch import nn

ROWS, HEADS, GROUPS, SIZE, MEAN = (4096, 8192), 8, 2, 64, 300
CONTENDERS = {
    f"{kind}_{row}": f"{what}; packs of {row:,} tokens"
    for row in ROWS
    for kind, what in (
        ("masked", "sdpa of transformers"),
        ("varlen", "utils/model/attention.py"),
    )
}
REFERENCES = {f"varlen_{row}": f"masked_{row}" for row in ROWS}
METRICS = {"peak_bytes": ("MiB", max), "seconds": ("s", max), "loss": ("", max)}
RATIOS = ("peak_bytes", "seconds")
BOUNDS = (
    *(
        Bound(
            "seconds",
            0.4,
            "time, over the masked way's",
            f"masked_{row}",
            timed=True,
            contender=f"varlen_{row}",
        )
        for row in ROWS
    ),
    Bound(
        "peak_bytes",
        0.5,
        "peak, over the masked way's",
        "masked_8192",
        contender="varlen_8192",
    ),
)
RANKS = (1,)


def needs(small: bool, ranks: int) -> tuple[int, int]:
    """(bytes on disk, bytes of memory) to start with."""
    return 2**20, 4 * 2**30


def prepare(folder: Path, small: bool) -> None:
    """Nothing to prepare: all tensors are drawn from a seed."""


def contend(worker: Worker) -> dict[str, float]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from utils.model.attention import attend_documents

    kind, row = worker.contender.split("_")
    row = int(row) // (8 if worker.small else 1)
    torch.manual_seed(0)
    lengths = []
    while sum(lengths) < row:
        length = int(torch.distributions.LogNormal(0.0, 0.8).sample() * MEAN / 1.377) + 8
        lengths.append(min(length, row - sum(lengths)))
    begins = torch.tensor([0, *lengths]).cumsum(0).int()
    module = nn.Module()
    module.num_key_value_groups = GROUPS
    query = torch.randn(1, HEADS, row, SIZE, requires_grad=True)
    key, value = (torch.randn(1, HEADS // GROUPS, row, SIZE, requires_grad=True) for _ in "kv")
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    mask = None
    if kind == "masked":
        mask = (document[:, None] == document).tril()[None, None]
    options = {"cu_seq_lens_q": begins, "max_length_q": max(lengths)} if kind == "varlen" else {}
    attend = attend_documents if kind == "varlen" else sdpa_attention_forward
    with measured() as numbers:
        found, _ = attend(module, query, key, value, mask, scaling=SIZE**-0.5, **options)
        found.square().sum().backward()
    values = [found.norm().item(), *(t.grad.norm().item() for t in (query, key, value))]
    what = f"norms of the result and of the gradients, packs of {row}"
    difference_to_first(values, worker.folder / what, most=1e-4)
    return {"loss": values[0]} | {key: numbers[key] for key in METRICS if key in numbers}


if __name__ == "__main__":
    run_worker(contend)
