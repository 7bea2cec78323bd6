"""Packed documents and attention: how packs must lie, and whether the model keeps the documents apart."""

import torch
from torch import nn

from ..run.errors import check
from .sharding import reshard


def wants_flat_packs(model: nn.Module) -> bool:
    """Whether the packs of a micro-batch must lie in one row, end to end.

    Flash attention finds where documents begin by the positions that start anew, and looks at one row only.
    """
    return "flash" in model.config._attn_implementation


@torch.no_grad()
def check_packing(model: nn.Module, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ConfigError for a model in which packed documents see each other. It changes nothing.

    All ranks call it when the weights are loaded. Two short documents must have the same logits packed, in a
    batch of `rows` rows as in training, and alone. transformers builds the mask from positions that start
    anew, but only without an attention mask and a cache, and not for every kind of layer:
    https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
    """
    vocabulary = model.get_output_embeddings().weight.shape[0]
    numbers = torch.arange(1, 17, device=device)
    ids = numbers[None] * (vocabulary // 17)  # (1, 16): a document of 7 tokens, and one of 9
    first, second = ids[:, :7], ids[:, 7:]
    positions = torch.cat([torch.arange(7), torch.arange(9)])
    positions = positions.to(device)[None]  # (1, 16)

    model.eval()
    alone = [model(document, use_cache=False).logits for document in (first, second)]
    alone = torch.cat(alone, 1).float()  # (1, 16, V)
    output = model(
        ids.repeat(rows, 1),
        use_cache=False,
        position_ids=positions.repeat(rows, 1),
    )
    packed = output.logits.float()  # (rows, 16, V)
    model.train()
    reshard(model)

    tolerance = 1e-4 if dtype == torch.float32 else 3e-2  # of the largest logit
    difference = (packed - alone).abs().max()
    equal = difference <= tolerance * alone.abs().max()
    name = type(model.base_model).__name__
    attention = model.config._attn_implementation
    leak = f"--packing: in {name} with {attention} attention documents see each other"
    check(equal, f"{leak} (fix: --attn sdpa, or no --packing)")
