"""Attention: grouped heads on GPUs without kernels for them; how packs must lie, and whether the model keeps
their documents apart.
"""

import re
from types import SimpleNamespace

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from ..run.errors import check
from ..run.units import IGNORE
from .sharding import reshard

BLOCK = r'"\w*(?:window|chunk|block)\w*": (\d+)'  # fields of a config in JSON
LONGEST = 1024  # tokens of a document in check_packing, for speed; larger blocks are not filled


def repeat_grouped_keys(repeat: bool) -> None:
    """Have sdpa attention repeat keys and values, so that there are no groups; or as transformers does it."""
    function = sdpa_with_repeated_keys if repeat else sdpa_attention_forward
    AttentionInterface.register("sdpa", function)


def sdpa_with_repeated_keys(module, query, key, value, attention_mask, **options):
    """query (B, H, T, D); key and value of fewer heads (B, H / groups, T, D)."""
    groups = query.shape[1] // key.shape[1]
    without_groups = SimpleNamespace(is_causal=getattr(module, "is_causal", True))
    key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return sdpa_attention_forward(without_groups, query, key, value, attention_mask, **options)


def wants_flat_packs(model: nn.Module) -> bool:
    """Whether the packs of a micro-batch must lie in one row, end to end.

    Flash attention finds where documents begin by the positions that start anew, and looks at one row only.
    """
    return "flash" in model.config._attn_implementation


@torch.no_grad()
def check_packing(model: nn.Module, device: torch.device) -> None:
    """Raise ConfigError for a model in which packed documents see each other. It changes nothing.

    All ranks call it after add_chunked_loss, with the weights loaded. A document must have the same logits
    behind each of two others of one length, which is above the blocks and windows that the config names. The
    cost is two forwards of at most 4 x LONGEST tokens, through the chunked loss.
    transformers builds the mask from positions that start anew, but only without an attention mask and a
    cache, and not for every kind of layer:
    https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
    """
    config = model.config.get_text_config()
    blocks = re.findall(BLOCK, config.to_json_string(use_diff=False))
    most = getattr(config, "max_position_embeddings", LONGEST)
    length = min(max([16, *map(int, blocks)]) + 1, LONGEST, most)
    positions = torch.arange(length, device=device).repeat(2, 2)  # (2, 2 * length)
    ids = positions * 7919
    ids[1, :length] += 1  # the rows begin with different documents and end with the same one
    ids %= model.get_output_embeddings().weight.shape[0]
    labels = ids.clone()
    labels[:, : length + 1] = IGNORE  # the head works on the second documents only
    # In one row a layer that attends to everything would see the same documents in both forwards.
    shape = (1 if wants_flat_packs(model) else 2, -1)
    kept = []

    def keep(logits, targets):
        kept.append(logits[:, :256].clone())  # a part of the vocabulary is enough
        return logits[:, 0]

    model.eval()
    # Both forwards hold the same documents, because some results depend on a whole batch: how many tokens an
    # expert gets, and the outlier columns of LLM.int8().
    for packs in (ids, ids.flip(0)):
        model(
            packs.view(shape),
            labels=labels.view(shape),
            position_ids=positions.view(shape),
            per_token=keep,
        )
    model.train()
    reshard(model)

    one, two = torch.cat(kept).chunk(2)
    # Measured with tiny random models of all families on a CPU, as a share of the largest logit: 0 in fp32
    # and bf16 where documents are apart, and at least 0.017 where they are not.
    equal = (one - two).abs().max() <= 1e-3 * one.abs().max()
    attention = model.config._attn_implementation
    where = f"{type(model.base_model).__name__} with {attention} attention"
    # Eager attention and sdpa share one mask: where one fails, so does the other.
    other = "--attn sdpa, or " if "flash" in attention else ""
    text = f"--packing: in {where} documents see each other (fix: {other}leave out --packing)"
    check(equal, text)
