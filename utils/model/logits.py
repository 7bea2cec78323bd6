"""Models whose loss needs more than the head: capped or scaled logits, routers, and full logits where the
chunked loss cannot be used. Imported only for those.
"""

import inspect
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ..run.units import GIB

Transform = Callable[[torch.Tensor], torch.Tensor]

# Gemma 2 and later, xLSTM
CAP_FIELDS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
ROUTER_LOSS_PARAMETERS = ["gate_logits", "num_experts", "top_k", "attention_mask"]
ROUTER_LOSS_FIELDS = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")


def known_transforms(config) -> list[Transform]:
    """What models are known to do to their logits after the head, the likeliest first: what the config names,
    then nothing.
    """
    transforms = []
    for field in CAP_FIELDS:
        cap = getattr(config, field, None)
        if cap:
            transforms.append(_cap(cap))
    cohere_scale = getattr(config, "logit_scale", None)
    if cohere_scale:
        transforms.append(_multiply(cohere_scale))
    scaling = getattr(config, "logits_scaling", None)
    if scaling:
        transforms.append(_divide(scaling))  # Granite
        transforms.append(_multiply(scaling))  # HyperCLOVA X
    inkling_width = getattr(config, "logits_mup_width_multiplier", None)
    if inkling_width:
        transforms.append(_divide(inkling_width))
    return [*transforms, lambda logits: logits]


def _cap(cap: float) -> Transform:
    return lambda logits: torch.tanh(logits / cap) * cap


def _multiply(factor: float) -> Transform:
    return lambda logits: logits * factor


def _divide(divisor: float) -> Transform:
    return lambda logits: logits / divisor


def use_full_logits(model: nn.Module, why: str) -> str:
    """Switch a model of add_chunked_loss to full logits; the sentence that says so, with the price."""
    model.full_logits = True
    vocab_size = model.get_output_embeddings().weight.shape[0]
    bytes_per_token = vocab_size * 4 * 4  # fp32 logits, softmax, and gradients
    gib = 1024 * bytes_per_token / GIB
    price = f"full logits are used, about {gib:.2f} GiB for 1,024 tokens of a micro-batch"
    return f"{why}, which the chunked loss does not know: {price}"


def full_logits_loss(
    model: nn.Module,
    ids: torch.Tensor,
    labels: torch.Tensor,
    ignore: int,
    options: dict,
    per_token: Callable | None = None,
) -> torch.Tensor:
    """Summed cross-entropy of ids and labels (B, T), or another loss per token, by way of (B, T, V) logits;
    router loss included.
    """
    output = type(model).forward(model, ids, use_cache=False, **options)
    logits = output.logits[:, :-1].float().flatten(0, 1)  # (B (T-1), V)
    targets = labels[:, 1:].flatten()  # (B (T-1),)
    trained = targets != ignore
    if per_token:
        loss = per_token(logits[trained], targets[trained]).sum()
    else:
        loss = F.cross_entropy(logits, targets, ignore_index=ignore, reduction="sum")
    router_mean = getattr(output, "aux_loss", None)
    if router_mean is not None:
        coefficient = getattr(model, "router_aux_loss_coef", None) or model.aux_loss_coef
        loss = loss + coefficient * router_mean * trained.sum()
    return loss


def has_router_loss(model: nn.Module) -> bool:
    """Whether the loss of the model's family has a part for the routers, where the config asks for it."""
    return hasattr(_family(model), "load_balancing_loss_func")


def knows_router_loss(model: nn.Module) -> bool:
    """Whether that part is weighted and computed as in nearly all families."""
    function = _family(model).load_balancing_loss_func
    parameters = list(inspect.signature(function).parameters)
    has_fields = all(hasattr(model, field) for field in ROUTER_LOSS_FIELDS)
    return parameters == ROUTER_LOSS_PARAMETERS and has_fields


def _family(model: nn.Module):
    """The module of transformers that defines the model's class, without the class that FSDP2 adds."""
    family = next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))
    return sys.modules[family.__module__]


def router_loss(model: nn.Module, router_logits, mask: torch.Tensor) -> torch.Tensor:
    """The loss that keeps the experts of a mixture equally busy, weighted as in the model's own forward."""
    balance = _family(model).load_balancing_loss_func
    loss = balance(router_logits, model.num_experts, model.num_experts_per_tok, mask)
    return model.router_aux_loss_coef * loss
