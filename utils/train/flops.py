"""What a token costs, what a device could do, and their ratio: MFU."""

import re

import torch
from torch import nn

# Dense bf16 products summed in fp32, from NVIDIA's data sheets and white papers (halved where they count
# sparsity); fp16 for V100 and T4, which have no bf16 units. The first match counts.
PEAK_TFLOPS = {
    "B200": 2250, "H100 PCIe": 756, "H100 NVL": 835, "H100|H200|GH200|H800": 989, "A100|A800": 312,
    "A10|V100": 125, "L40S": 362, "L4": 121, "RTX 4090": 165, "RTX 3090": 71, "T4": 65,
}  # fmt: skip


def mfu(model: nn.Module, seq_len: int, tokens_per_second: float, device: torch.device, ranks: int):
    """Model FLOPs utilization: the share of `ranks` devices' peak that training tokens at this speed takes.

    None where the device's peak is not known.
    """
    peak = peak_flops(device)
    flops = flops_per_token(model.config, seq_len, matmul_parameters(model)) if peak else 0.0
    return tokens_per_second * flops / (peak * ranks) if peak else None


def matmul_parameters(model: nn.Module) -> int:
    """Parameters that a token is multiplied with: matrices, with the head, without the embedding table.

    Of the experts of a mixture, stored as (experts, rows, columns), those that one token visits.
    """
    visits = getattr(model.config.get_text_config(), "num_experts_per_tok", 1)
    tables = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
    tables.discard(model.get_output_embeddings().weight)  # tied: looked up, and multiplied with
    matrices = [p for p in model.parameters() if p.ndim >= 2 and p not in tables]
    return sum(p.numel() * visits // p.shape[0] if p.ndim == 3 else p.numel() for p in matrices)


def flops_per_token(config, seq_len: int, matmul_params: int) -> float:
    """Floating-point operations to train on one token, forward and backward, without recomputation.

    6 for each matmul parameter; and 6 * layers * (heads * head size) * seq_len for attention, which is
    causal, so half of what PaLM counts (arXiv 2204.02311, appendix B). Llama-3-8B at 4096: 48.25e9.
    """
    config = config.get_text_config()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    return 6.0 * matmul_params + 6.0 * config.num_hidden_layers * width * seq_len


def peak_flops(device: torch.device) -> float | None:
    """What one device could do in a second, or None where that is not known, as on a CPU."""
    return peak_flops_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def peak_flops_of(name: str) -> float | None:
    """The peak of what torch.cuda.get_device_name calls `name`; None for a part of it, or a laptop's."""
    if re.search(r"\b(MIG|Laptop|Ti)\b", name):
        return None
    return next((v * 1e12 for k, v in PEAK_TFLOPS.items() if re.search(rf"\b({k})\b", name)), None)
