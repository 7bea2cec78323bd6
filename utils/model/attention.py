"""Attention: grouped heads on GPUs without kernels for them; attention within the documents of packs; a check
that a model keeps packed documents apart. RMS norms in one kernel of a GPU. Compiled layers.
"""

import logging
import re
from functools import partial
from inspect import signature
from operator import attrgetter
from types import MethodType, SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from ..run.errors import check, others_code, rank
from ..run.units import IGNORE
from .loss import summed_cross_entropy
from .sharding import decoder_layers, lacks_grouped_kernels, reshard

BLOCK = r'"\w*(?:window|chunk|block)\w*": (\d+)'  # fields of a config in JSON
# If torch's varlen_attn accepts fewer heads of keys and values than of queries, as in 2.12.
GROUPED = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
# Config fields that, if set, require more than causal attention with a window.
NOT_IN_VARLEN = """attn_logit_softcapping attention_chunk_size attention_dropout attn_pdrop
    attention_probs_dropout_prob""".split()
# The first two do not pass the documents on to attention, the next two apply their windows in masks only, and
# the last three have only the attentions that they name themselves (GPT-J in transformers 5.21).
NEED_MASKS = "nemotron stablelm phimoe qwen2_moe falcon gpt_neo gptj".split()
_code_of = attrgetter(  # class -> the code of its forward, without its name and place
    "forward.__code__.co_code", "forward.__code__.co_names", "forward.__code__.co_consts"
)
LONGEST = 1024  # most tokens of a document in check_packing, for speed, even if a block is longer


def use_gpu_kernels(model: nn.Module) -> None:
    """Compute norms that have the code of LlamaRMSNorm, as two of three in transformers, with torch's kernel.
    Rank 0 lets transformers say which package would make linear attention fast, if it is not installed.

    For the backward the kernel keeps its input and one number per token. transformers' code keeps the input
    in fp32, and if the weight trains also what the weight scales. In 16 bit it rounds once, not twice.
    https://docs.pytorch.org/docs/stable/generated/torch.nn.functional.rms_norm.html
    """
    if not rank():
        logging.getLogger("transformers.integrations.hub_kernels").setLevel("WARNING")
    for module in model.modules():
        if _code_of(type(module)) == _code_of(LlamaRMSNorm):
            module.forward = MethodType(_fused_norm, module)


def _fused_norm(self, hidden):
    if self.weight.dtype != hidden.dtype:  # kept in fp32, and then the result is fp32
        return type(self).forward(self, hidden)
    return F.rms_norm(hidden, self.weight.shape, self.weight, self.variance_epsilon)


def compile_layers(model: nn.Module) -> None:
    """torch.compile for each decoder layer, in place. Layers are alike, so one compilation serves all.

    Parts whose code loops over the tokens or chunks of a row stay uncompiled: torch would unroll the loop,
    for minutes, and again for each number of rounds.
    """
    # Per code: for each kind of layer, with and without gradients, for each form of its inputs. At torch's
    # limit of 8 a Gemma 3 with packing would train uncompiled.
    torch.compiler.config.recompile_limit = 64
    for layer in decoder_layers(model):
        for mixer in layer.modules():
            if re.search("Delta|MambaMixer|Lightning", type(mixer).__name__):
                mixer.forward = torch.compiler.disable(mixer.forward)
        layer.compile()


def repeat_grouped_keys() -> None:
    """Make transformers' sdpa repeat keys and values, so that heads are not grouped."""
    sdpa_attention.use_gqa_in_sdpa = lambda *tensors: False


def attend_documents(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q=0,
    s_aux: Tensor | None = None,
    **options,
) -> tuple[Tensor, None]:
    """`--attn varlen`, an attention function of transformers: causal, within each document, without any mask.
    As `sinks` it gets a mask if rows are padded or a layer has a window: (B, 1, T, T_kv) bool, True: seen.

    query (1, H, T, D), key and value (1, H_kv, T, D): packs in one row. cu_seq_lens_q (N + 1,) int32: where
    its documents begin, and where the last one ends; the longest has max_length_q tokens. Without
    cu_seq_lens_q each of B rows is a document. sliding_window: tokens that a token sees, itself included.
    s_aux (H,): sinks, one more score for each softmax, without a value (gpt-oss).
    Returns (B, T, H, D).
    """
    if not (GROUPED or query.is_cpu):  # on meta too: the plan counts them
        groups = query.shape[1] // key.shape[1]
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
        module = None  # transformers would repeat them again, by its num_key_value_groups
    attend = partial(causal_attention, module, scaling, sliding_window, s_aux)
    if cu_seq_lens_q is None:
        attended = attend(query, key, value, attention_mask)
    elif s_aux is not None or not query.is_cuda:
        attended = attend_one_by_one(attend, (query, key, value), cu_seq_lens_q)
    else:
        size = value.shape[-1]
        value = F.pad(value, (0, query.shape[-1] - size))  # latent attention has narrower values
        attended = varlen_attn(
            *(tensor[0].transpose(0, 1) for tensor in (query, key, value)),  # (T, H, D)
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            window_size=(sliding_window - 1 if sliding_window else -1, 0),
            **GROUPED,
        )[None, ..., :size]
    return attended.contiguous(), None


@torch.compiler.disable
def attend_one_by_one(attend, tensors, cu_seq_lens) -> Tensor:
    """attend(query, key, value) within each document, where no kernel does that. tensors: (1, H, T, D)."""
    lengths = cu_seq_lens.diff().tolist()
    documents = zip(*(tensor.split(lengths, 2) for tensor in tensors), strict=True)
    return torch.cat([attend(*document) for document in documents], 1)


def causal_attention(
    module, scaling, sliding_window, sinks, query, key, value, mask=None
) -> Tensor:
    """(B, T, H, D): each token sees itself and those before it, at most `sliding_window` tokens in all; or
    what the mask lets it see.

    Sinks are the scores of one more token, the first, whose value is 0. In one more dimension its key is 1
    and each query is its head's sink. Kernels want a multiple of 8, so there are eight more.
    """
    tokens, size = query.shape[2], value.shape[-1]
    if mask is None and sliding_window and tokens > sliding_window:
        mask = query.new_ones(tokens, tokens, dtype=torch.bool)
        mask = mask.tril().triu(1 - sliding_window)
    if sinks is not None:
        query, key, value = (F.pad(tensor, (0, 8, 1, 0)) for tensor in (query, key, value))
        query[..., -1] = sinks[:, None] / scaling
        key[:, :, 0, -1] = 1
        if mask is not None:
            mask = F.pad(mask, (1, 0, 1, 0), value=True)
    attended, _ = sdpa_attention_forward(
        module, query, key, value, mask, scaling=scaling, is_causal=tokens > 1
    )
    return attended[:, -tokens:, :, :size]


def settle_attention(
    model: nn.Module, attn: str, device: torch.device, dtype: torch.dtype, chosen="varlen"
) -> str:
    """Choose the attention for packs, set it on the model, and return it: auto becomes varlen if that works.
    Raises ConfigError if `--attn varlen` is given and does not work. chosen: in place of varlen `sinks`, of
    a model for which transformers has only eager attention, which keeps all probabilities.
    """
    if attn not in ("auto", "varlen"):
        return attn
    config = model.config.get_text_config()
    fields = config.to_dict()
    kind = config.model_type
    others_own = "transformers_modules" in type(model).__module__  # the folder's own code
    set_fields = [field for field in NOT_IN_VARLEN if fields.get(field)]
    reason = ""  # why attend_documents is not right
    if lacks_grouped_kernels(device, dtype):
        reason = f"needs a GPU of compute capability 8 and 16 bit, not {dtype}"
    elif set_fields:
        reason = f"has no {', '.join(set_fields)}, as {kind} wants it"
    elif not type(model)._supports_flash_attn or kind in NEED_MASKS or others_own:
        reason = f"is not known to be right for {kind}"
    check(not reason or attn == "auto", f"--attn varlen {reason} (fix: leave out --attn)")
    if reason:
        return attn
    model.set_attn_implementation(chosen)
    return chosen


AttentionInterface.register("varlen", attend_documents)  # transformers makes no mask for it
AttentionInterface.register("sinks", attend_documents)
AttentionMaskInterface.register("sinks", sdpa_mask)


def wants_flat_packs(model: nn.Module) -> bool:
    """Whether the packs of a micro-batch must lie in one row, end to end.

    Flash attention and varlen take the documents of one row only.
    """
    return bool(re.search("flash|varlen", model.config._attn_implementation))


@torch.no_grad()
def check_packing(
    model: nn.Module, device: torch.device, flag="--packing", fix="leave out --packing"
) -> None:
    """Raise ConfigError for a model in which packed documents see each other. The message names `flag`, which
    needs them apart. The model is not changed.

    All ranks call it after add_chunked_loss, with the weights loaded. A document must have the same logits
    after two different documents of equal length. That length is above the blocks and windows in the config,
    but at most LONGEST. Cost: two forwards of at most 4 x LONGEST tokens, through the chunked loss.

    transformers builds the mask from positions that restart at 0, but only without an attention mask and a
    cache, and not for every kind of layer:
    https://github.com/huggingface/transformers/blob/main/src/transformers/masking_utils.py
    """
    config = model.config.get_text_config()
    blocks = re.findall(BLOCK, config.to_json_string(use_diff=False))
    longest = getattr(config, "max_position_embeddings", LONGEST)
    length = min(max([16, *map(int, blocks)]) + 1, LONGEST, longest)
    positions = torch.arange(length, device=device).repeat(2, 2)  # (2, 2 * length)
    ids = positions * 7919
    ids[1, :length] += 1  # the rows begin with different documents and end with the same one
    ids %= model.get_output_embeddings().weight.shape[0]
    labels = ids.clone()
    labels[:, : length + 1] = IGNORE  # the head works on the second documents only
    # Two rows if possible: in one row a layer that attends to everything sees the same documents in both
    # forwards.
    flat = wants_flat_packs(model)
    shape = (1 if flat else 2, -1)
    begins = torch.arange(0, 4 * length + 1, length, dtype=torch.int32, device=device)
    kept = []

    def keep(logits, targets):
        kept.append(logits[:, :256].clone())  # a part of the vocabulary is enough
        return logits[:, 0]

    model.eval()
    # Both forwards hold the same documents, because some results depend on a whole batch: how many tokens an
    # expert gets, and the outlier columns of LLM.int8().
    for packs in (ids, ids.flip(0)):
        batch = SimpleNamespace(
            ids=packs.view(shape),
            labels=labels.view(shape),
            mask=None,
            positions=positions.view(shape),
            begins=begins if flat else None,
            longest=length,
            places=None,
            extra={},
        )
        # some recurrent layers raise an error, because they cannot keep documents apart
        with others_code(flag, fix):
            summed_cross_entropy(model, batch, keep)
    model.train()
    reshard(model)

    first, second = torch.cat(kept).chunk(2)  # logits of the same documents, in each forward
    attention = model.config._attn_implementation
    # Measured with tiny random models of all families on a CPU, as a share of the largest logit: 0 in fp32
    # and bf16 where documents are apart, and at least 0.017 where they are not.
    check(
        (first - second).abs().max() <= 1e-3 * first.abs().max(),
        f"{flag}: in {type(model.base_model).__name__} with {attention} attention documents see each other"
        # Eager attention and sdpa share one mask: where one fails, so does the other.
        f" (fix: {'--attn sdpa, or ' if 'flash' in attention else ''}{fix})",
    )
