"""Models whose loss takes more than the head: logits that are capped or scaled, routers, and full logits
where the chunked loss does not know better. Imported only for those.
"""

import inspect
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..run.units import GIB

ROUTER_LOSS_TAKES = ["gate_logits", "num_experts", "top_k", "attention_mask"]


def known_transforms(config) -> list[Callable[[torch.Tensor], torch.Tensor]]:
    """What models are known to do to their logits after the head, likeliest first: those that the config
    names, then nothing.
    """
    transforms = []
    # Gemma 2 and later, xLSTM
    for name in ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap"):
        if cap := getattr(config, name, None):
            transforms.append(lambda logits, cap=cap: torch.tanh(logits / cap) * cap)
    if scale := getattr(config, "logit_scale", None):  # Cohere
        transforms.append(lambda logits: logits * scale)
    # Granite divides, HyperCLOVA X multiplies
    if scaling := getattr(config, "logits_scaling", None):
        transforms.append(lambda logits: logits / scaling)
        transforms.append(lambda logits: logits * scaling)
    if width := getattr(config, "logits_mup_width_multiplier", None):  # Inkling
        transforms.append(lambda logits: logits / width)
    return [*transforms, lambda logits: logits]


def use_full_logits(model: nn.Module, why: str) -> str:
    """Switch a model of add_chunked_loss to full logits; the sentence that says so, with the price."""
    model.full_logits = True
    vocabulary = model.get_output_embeddings().weight.shape[0]
    token_bytes = vocabulary * 4 * 4  # fp32 logits, softmax, and gradients
    gib = token_bytes * 1024 / GIB
    price = f"full logits are used, about {gib:.2f} GiB for 1,024 tokens of a micro-batch"
    return f"{why}, which the chunked loss does not know: {price}"


def full_logits_loss(
    model: nn.Module, ids, labels, ignore: int, options: dict, per_token: Callable | None = None
) -> torch.Tensor:
    """Summed cross-entropy of ids and labels (B, T), or another loss per token, by way of (B, T, V) logits;
    router loss included.
    """
    output = type(model).forward(model, ids, use_cache=False, **options)
    logits = output.logits[:, :-1].float().flatten(0, 1)  # (B (T - 1), V)
    targets = labels[:, 1:].flatten()
    trained = targets != ignore
    if per_token:
        loss = per_token(logits[trained], targets[trained]).sum()
    else:
        loss = F.cross_entropy(logits, targets, ignore_index=ignore, reduction="sum")
    if getattr(output, "aux_loss", None) is not None:
        coefficient = getattr(model, "router_aux_loss_coef", None) or model.aux_loss_coef
        loss = loss + coefficient * output.aux_loss * trained.sum()
    return loss


def has_router_loss(model: nn.Module) -> bool:
    """Whether the family's own loss has a part for its routers, when the config asks for their logits."""
    return hasattr(_family(model), "load_balancing_loss_func")


def knows_router_loss(model: nn.Module) -> bool:
    """Whether that part is weighed and computed as nearly all families do it."""
    takes = list(inspect.signature(_family(model).load_balancing_loss_func).parameters)
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    return takes == ROUTER_LOSS_TAKES and all(hasattr(model, name) for name in names)


def _family(model: nn.Module):
    family = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    return sys.modules[family.__module__]


def router_loss(model: nn.Module, router_logits, mask: torch.Tensor) -> torch.Tensor:
    """The loss that keeps a mixture's experts equally busy, as the model's own forward weighs it."""
    balance = _family(model).load_balancing_loss_func
    loss = balance(router_logits, model.num_experts, model.num_experts_per_tok, mask)
    return model.router_aux_loss_coef * loss
