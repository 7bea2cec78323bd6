"""The floating-point operations of a token, the peak of a device, and their ratio: MFU."""

import re

import torch
from torch import nn

# Name of a device, as a regular expression -> TFLOP/s. Dense bf16 products summed in fp32, from NVIDIA's data
# sheets and white papers (halved where they count sparsity); fp16 for V100 and T4, which have no bf16 units.
# The first match counts.
PEAK_TFLOPS = {
    "B200": 2250,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100|H200|GH200|H800": 989,
    "A100|A800": 312,
    "A10|V100": 125,
    "L40S": 362,
    "L4": 121,
    "RTX 4090": 165,
    "RTX 3090": 71,
    "T4": 65,
}


def mfu(
    model: nn.Module,
    seq_len: int,
    tokens_per_second: float,
    device: torch.device,
    ranks: int,
) -> float | None:
    """Model FLOPs utilization: the share of the peak of `ranks` devices that training uses at this speed.

    tokens_per_second: of all ranks together. None where the device's peak is not known.
    """
    peak = peak_flops(device)
    if peak is None:
        return None
    flops = flops_per_token(model.config, seq_len, matmul_parameters(model))
    return tokens_per_second * flops / (peak * ranks)


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that multiply each token: matrices and the head, without the embedding table.

    Of the experts of a mixture, stored as (experts, rows, columns), those that one token visits.
    """
    visits = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    # a tied table is looked up, and also multiplied with
    tables.discard(model.get_output_embeddings().weight)
    total = 0
    for parameter in model.parameters():
        if parameter.ndim < 2 or parameter in tables:
            continue
        if parameter.ndim == 3:
            experts = parameter.shape[0]
            total += parameter.numel() * visits // experts
        else:
            total += parameter.numel()
    return total


def flops_per_token(config, seq_len: int, matmul_params: int) -> float:
    """Floating-point operations to train on one token, forward and backward, without recomputation.

    6 for each matmul parameter; and 6 * layers * (heads * head size) * seq_len for attention, which is
    causal, so half of what PaLM counts (arXiv 2204.02311, appendix B). Llama-3-8B at 4096: 48.25e9.
    """
    config = config.get_text_config()
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    attention = config.num_hidden_layers * heads * head_size * seq_len
    return 6.0 * matmul_params + 6.0 * attention


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of one device at its peak; None where that is not known, as on a CPU."""
    if device.type != "cuda":
        return None
    return peak_flops_of(torch.cuda.get_device_name(device))


def peak_flops_of(name: str) -> float | None:
    """The peak of the device that torch.cuda.get_device_name calls `name`; None for a part of a device (MIG)
    and for a laptop's.
    """
    if re.search(r"\b(MIG|Laptop|Ti)\b", name):
        return None
    for pattern, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b({pattern})\b", name):
            return tflops * 1e12
    return None
