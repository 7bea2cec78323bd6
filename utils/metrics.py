"""The console line, metrics.jsonl, tokens/s, MFU."""

import json
import math
import os
import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

LINE = {
    "loss": "loss {:.4f}",
    "eval_loss": "eval_loss {:.4f}",
    "grad_norm": "grad_norm {:.3f}",
    "lr": "lr {:.2e}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "mfu": "mfu {:.1%}",
    "peak_memory_gib": "peak {:.2f} GiB",
}

# Dense bf16 products summed in fp32, from NVIDIA's data sheets and white papers (halved where they count
# sparsity); fp16 for V100 and T4, which have no bf16 units. The first match counts.
PEAK_TFLOPS = {
    "B200": 2250, "H100 PCIe": 756, "H100 NVL": 835, "H100|H200|GH200|H800": 989, "A100|A800": 312,
    "A10|V100": 125, "L40S": 362, "L4": 121, "RTX 4090": 165, "RTX 3090": 71, "T4": 65,
}  # fmt: skip


class RunLog:
    """Where the numbers of a run go: a line on stdout, folder/metrics.jsonl, and trackers on demand.

    Rank 0 makes one with its folder, the others with None, and theirs does nothing. On a terminal there is a
    progress bar with the time left, in a log only whole lines. done: the step that was resumed from; what the
    file says of later steps is dropped, since they are taken again.
    """

    def __init__(self, folder: Path | None, total_steps, log_every=1, tensorboard=False, wandb=False, done=0):
        self.folder, self.total_steps, self.log_every = folder, total_steps, log_every
        self.trackers = []
        silent = folder is None or not sys.stdout.isatty()
        self.bar = tqdm(total=total_steps, initial=done, unit="step", file=sys.stdout, disable=silent)
        if folder is None:
            return
        _forget_after(done, folder / "metrics.jsonl")
        if tensorboard or wandb:
            from .trackers import open_trackers

            self.trackers = open_trackers(folder, tensorboard, wandb, done)

    def step(self, **numbers: float | None) -> None:
        """Record what is known after optimizer step `step` (from 1): one JSON object, and perhaps a line.

        None is left out; NaN and infinity become null, since JSON has neither. Called again for the same step
        with an eval_loss, it adds another object and its line.
        """
        if self.folder is None:
            return
        numbers = {name: value for name, value in numbers.items() if value is not None}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(finite) + "\n")
        step = numbers.pop("step")
        for tracker in self.trackers:
            tracker.log(numbers, step)
        shown = [form.format(numbers[name]) for name, form in LINE.items() if name in numbers]
        try:
            self.bar.update(step - self.bar.n)
            if step % self.log_every == 0 or step == self.total_steps or "eval_loss" in numbers:
                tqdm.write("  ".join([f"step {step}/{self.total_steps}", *shown]))  # above the bar, if any
                sys.stdout.flush()
        except OSError:  # who read stdout has gone (`| head`, a closed terminal), and the run goes on
            self.bar.disable = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def close(self) -> None:
        """Finish the bar and the trackers."""
        self.bar.close()
        for tracker in self.trackers:
            tracker.close()


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


_most_seen = 0


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory in use so far: on CUDA what torch allocated, else what this process had for its own.

    On Linux that is RssAnon, the largest of all calls so far: VmHWM, the kernel's own peak, counts mapped
    files, so the whole checkpoint. Call it where much is alive. Elsewhere it is getrusage's peak.
    """
    global _most_seen
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    kib = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
    _most_seen = max(_most_seen, int(kib[1]) * 1024)
    return _most_seen


def _forget_after(step: int, file: Path) -> None:
    """Drop the lines of later steps, and a last line that a kill cut in two."""
    kept = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    temporary = file.with_suffix(".tmp")
    temporary.write_text("".join(kept))
    os.replace(temporary, file)
