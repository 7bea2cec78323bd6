"""The models and rows of which TRL's losses are recorded, for record_trl.py and test_trl_losses.py.

Weights and ids are drawn as integers, and the weights in the order of their names. So they are the same bit
for bit on every machine, in whatever order transformers makes the modules.
"""

import copy
from collections.abc import Iterable

import torch
from tiny import NO_REMARKS, tiny_config, tiny_model
from torch import nn
from transformers import AutoModelForSequenceClassification

from utils.data.examples import Examples
from utils.data.pairs import LabelBatches, PairBatches

SEEDS = {
    "reference": 11,
    "policy": 12,
    "reward": 13,
    "pairs": 14,
    "labelled": 15,
    "projections": 16,
}
SIZES = {"vocab_size": 307, "pad_token_id": 0}
PAIRS, LABELLED = 7, 8
PAD, EOS = 0, 2
LETTERS = (69, 95)  # a to z in tiny_tokenizer: TRL's KTOTrainer takes only text
SEQ_LEN = 64
PROJECTIONS = 3
SHOWN = (  # the parameters of which gradients are recorded
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.layers.2.input_layernorm.weight",
    "model.norm.weight",
    "lm_head.weight",
    "score.weight",  # of a reward model, in place of lm_head
)

Ids = list[int]
Pair = tuple[Ids, Ids, Ids]  # prompt, chosen, rejected
Labelled = tuple[Ids, Ids, bool]  # prompt, completion, whether it is desirable


def seeded(what: str) -> torch.Generator:
    return torch.Generator().manual_seed(SEEDS[what])


def uniform(shape, generator: torch.Generator) -> torch.Tensor:
    """Fp32 numbers in [-1, 1): multiples of 2**-20."""
    return torch.randint(-(2**20), 2**20, shape, generator=generator) / 2**20


@torch.no_grad()
def draw(model: nn.Module, what: str) -> nn.Module:
    """Give a model weights by seed: matrices around 0, the weights of norms around 1."""
    generator = seeded(what)
    for _, parameter in sorted(model.named_parameters()):
        values = uniform(parameter.shape, generator)
        parameter.copy_(values / 8 if parameter.ndim > 1 else 1 + values / 8)
    return model


@torch.no_grad()
def shake(model: nn.Module, what: str, size: float) -> nn.Module:
    """A copy of a model, each weight moved by up to `size`."""
    shaken, generator = copy.deepcopy(model), seeded(what)
    for _, parameter in sorted(shaken.named_parameters()):
        parameter.add_(size * uniform(parameter.shape, generator))
    return shaken


def policy_and_reference() -> tuple[nn.Module, nn.Module]:
    """Two causal models in fp32, near to each other."""
    reference = draw(tiny_model("llama", **SIZES), "reference")
    return shake(reference, "policy", 2**-5), reference


def reward_model() -> nn.Module:
    """A model with one score in fp32."""
    config = tiny_config("llama", num_labels=1, **SIZES)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    return draw(model, "reward")


def sizes(low: int, high: int, count: int, generator: torch.Generator) -> list[int]:
    return torch.randint(low, high, (count,), generator=generator).tolist()


def letters(count: int, generator: torch.Generator) -> Ids:
    return sizes(*LETTERS, count, generator)


def pairs() -> list[Pair]:
    """Answers end with EOS and have 2 to 13 tokens."""
    generator, found = seeded("pairs"), []
    for size in sizes(2, 9, PAIRS, generator):
        prompt = letters(size, generator)
        answers = [letters(n, generator) + [EOS] for n in sizes(1, 13, 2, generator)]
        found.append((prompt, *answers))
    return found


def labelled(case: str = "") -> list[Labelled]:
    """Eight rows. case: "odd ...": the first seven; "desirable": only those.

    Each row is shorter than the one before. So a global batch of them has this order at any seed, and it is
    known which row is the next one, with which KTO's KL term is made.
    """
    generator, found = seeded("labelled"), []
    lengths = range(20, 20 - 2 * LABELLED, -2)
    for length, size in zip(lengths, sizes(1, 4, LABELLED, generator), strict=True):
        prompt = letters(size, generator)
        answer = letters(length - size - 1, generator) + [EOS]
        found.append((prompt, answer, bool(sizes(0, 2, 1, generator)[0])))
    if "odd" in case:
        return found[:7]
    return [row for row in found if row[2] or case != "desirable"]


def examples_of(rows: Iterable[tuple[Ids, list[Ids]]], row_sizes: list[int]) -> Examples:
    """Examples of (prompt, answers): one sequence for each answer, of which the answer is trained."""
    ids, mask, bounds, trained = [], [], [0], []
    for prompt, answers in rows:
        for answer in answers:
            ids += prompt + answer
            mask += [0] * len(prompt) + [1] * len(answer)
        bounds.append(len(ids))
        trained.append(sum(map(len, answers)))
    return Examples(
        ids=torch.tensor(ids, dtype=torch.int32),
        loss_mask=torch.tensor(mask, dtype=torch.uint8),
        bounds=torch.tensor(bounds),
        trained_tokens=torch.tensor(trained),
        keys=torch.arange(len(trained)),
        where=[f"row {i}" for i in range(len(trained))],
        **NO_REMARKS | {"row_sizes": torch.tensor(row_sizes)},
    )


def pair_batches(rows: list[Pair], batch_size: int) -> PairBatches:
    """The loader whose global batch 0 is all pairs, in micro-batches of batch_size pairs."""
    examples = examples_of(
        [(prompt, [chosen, rejected]) for prompt, chosen, rejected in rows],
        [len(prompt + chosen) for prompt, chosen, _ in rows],
    )
    return PairBatches(examples, 0, len(rows), batch_size, 0, 1, PAD)


def label_batches(rows: list[Labelled], batch_size: int) -> LabelBatches:
    """The loader whose global batch 0 is all rows, in micro-batches of batch_size rows."""
    examples = examples_of(
        [(prompt, [answer]) for prompt, answer, _ in rows],
        [len(prompt + answer) * label for prompt, answer, label in rows],
    )
    return LabelBatches(examples, 0, len(rows), batch_size, 0, 1, PAD, seq_len=SEQ_LEN)


def checksum(model: nn.Module) -> float:
    """The sum of the absolute weights."""
    return sum(float(p.detach().double().abs().sum()) for p in model.parameters())


def gradients(model: nn.Module) -> dict[str, list[float]]:
    """Of each parameter in SHOWN: the L2 norm of its gradient, and the products of the gradient with some
    tensors of +1 and -1. Such a product is about as large as the norm.
    """
    found, generator = {}, seeded("projections")
    parameters = dict(model.named_parameters())
    for name in SHOWN:
        if name in parameters:
            gradient = parameters[name].grad.double()
            found[name] = [float(gradient.norm())]
            for _ in range(PROJECTIONS):
                signs = 2 * torch.randint(0, 2, gradient.shape, generator=generator) - 1
                found[name].append(float((gradient * signs).sum()))
    return found
