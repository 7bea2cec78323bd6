"""Packed documents and attention: whether a model keeps them apart, and how packs must lie for that."""

import torch
from torch import nn

from ..run.errors import check
from .sharding import reshard


def wants_flat_packs(model: nn.Module) -> bool:
    """Whether the packs of a micro-batch must lie in one row: flash attention tells documents apart by where
    positions start anew, and looks at one row only.
    """
    return "flash" in model.config._attn_implementation


@torch.no_grad()
def check_packing(model: nn.Module, rows: int, dtype: torch.dtype, device: torch.device) -> None:
    """Refuse a model in which packed documents see each other: all ranks call it, with the weights in place.

    Two short documents, packed and alone, must have the same logits in a batch of `rows` rows, as it will be.
    transformers builds the mask from positions that start anew, but only without an attention mask and a
    cache, and not for every kind of layer:
    https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
    """
    ids = torch.arange(1, 17, device=device)[None] * (
        model.get_output_embeddings().weight.shape[0] // 17
    )
    # (rows, 16)
    positions = torch.cat([torch.arange(7), torch.arange(9)]).to(device)[None].repeat(rows, 1)
    model.eval()
    parts = [model(part, use_cache=False).logits.float() for part in (ids[:, :7], ids[:, 7:])]
    packed = model(ids.repeat(rows, 1), use_cache=False, position_ids=positions).logits.float()
    model.train()
    reshard(model)
    alone = torch.cat(parts, 1)  # (1, 16, V)
    tolerance = (1e-4 if dtype == torch.float32 else 3e-2) * alone.abs().max()
    name = type(model.base_model).__name__
    seen = f"--packing: in {name} with {model.config._attn_implementation} attention documents see each other"
    check((packed - alone).abs().max() <= tolerance, f"{seen} (fix: --attn sdpa, or no --packing)")
