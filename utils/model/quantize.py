"""int8 and nf4 frozen linears whose storage shards.

bitsandbytes keeps codes and scales in Parameter subclasses with attributes of their own, which FSDP2 loses
("'Parameter' object has no attribute 'CB'"). Here both are plain integer parameters: FSDP2 shards their rows
like any others, casts no integer, and gathers the quantized bytes. A row, or a block of 64 within one, is
quantized on its own. So the rows that each rank quantizes equal bit for bit those that bitsandbytes makes
from the whole tensor.

int8 is LLM.int8()'s row-wise absmax (arXiv 2208.07339), nf4 is QLoRA's (arXiv 2305.14314) without double
quantization, whose statistics run over the whole tensor. The kernels are bitsandbytes'.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..run.errors import check
from .loading import CHUNK, Piece, local, local_box
from .options import Quant

BLOCK = 64  # weights that share an nf4 scale
ADDED = re.compile(r"\.(lora_|modules_to_save\.|original_module)")  # modules that peft adds
OUTLIER = 6.0  # LLM.int8(): columns with an activation above this are not quantized
# Modules that choose experts, or tokens to attend to. They are small, but small errors in them have large
# effects.
ROUTER = re.compile(r"(^|[._])(gate|router|weights?_proj)(\.|$)")
# By model type: layers that the model's own code does not simply call. It reads or changes their weights, or
# casts to their dtype. Adapters of such layers would be ignored silently, and quantized codes would be taken
# for weights. (laguna: peft does not find the adapters of its shared experts again.)
READ_PAST = {
    "bamba": "out_proj",
    "falcon_h1": "out_proj",
    "falcon_mamba": "dt_proj out_proj x_proj lm_head",
    "gemma3n_text": "correction_coefs prediction_coefs",
    "granitemoehybrid": "out_proj",
    "jamba": "dt_proj",
    "laguna": "down_proj gate_proj up_proj",
    "mamba": "dt_proj out_proj x_proj lm_head",
    "mamba2": "out_proj lm_head",
    "nemotron_h": "out_proj",
    "phi4_multimodal": "out_proj",
    "rwkv": "output value",
    "xlstm": "lm_head",
}


class QuantizedLinear(nn.Module):
    """A frozen linear layer: `weight` holds integer codes, `scale` the bits of fp32 scales as int32.

    As floats the scales would be cast to bf16 when FSDP2 gathers them.
    """

    W_q = True  # tells peft (DoRA) that dequantize() returns the weight

    def __init__(self, old: nn.Linear, dtype: torch.dtype, mode: str):
        super().__init__()
        self.in_features = old.in_features
        self.out_features = old.out_features
        self.dtype = dtype
        self.mode = mode
        self.bias = old.bias

        def rows_like(row):
            """A frozen parameter with a row like `row` (1, ...) for each output feature."""
            shape = (old.out_features, *row.shape[1:])
            rows = torch.empty(shape, dtype=row.dtype, device=old.weight.device)
            return nn.Parameter(rows, requires_grad=False)

        codes, scale = self.quantize(torch.empty(1, old.in_features, device="meta"))
        self.weight = rows_like(codes)
        self.scale = rows_like(scale.view(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return _FrozenLinear.apply(x, self.weight, self.scale, self.bias, self.mode)

    def dequantize(self) -> Tensor:
        """The weight in the compute dtype; if the parameters are sharded, this rank's rows."""
        return dequantize(local(self.weight), local(self.scale), self.dtype)

    @torch.no_grad()
    def copy_rows(self, first: int, rows: Tensor, name: str) -> None:
        """Quantize rows (n, in_features) of the checkpoint into local rows [first, first + n).

        `rows` may be on another device than the shards. name: of the tensor, for the message. Raises
        ConfigError if a row is too large or not finite.
        """
        codes, scale = self.quantize(rows)
        check(
            scale.isfinite().all(),
            f"{name} is too large for {self.kind} or not finite"
            " (fix: a checkpoint with smaller or finite weights, or no --quantization)",
        )
        last = first + len(rows)
        local(self.weight)[first:last].copy_(codes)
        local(self.scale)[first:last].copy_(scale.view(torch.int32))

    def load_rows(self, read: Callable, piece: Piece, device: torch.device) -> None:
        """Read this rank's rows of a piece, some MiB at a time, and quantize them.

        read(first, into) reads elements of the piece in full precision.
        """
        # The codes of a row may have another width than its weights.
        of_codes = replace(piece, shape=(piece.shape[0], *self.weight.shape[1:]))
        boxes = local_box(self.weight, of_codes)
        if boxes is None:
            return
        in_shard, in_piece = boxes
        rows = in_piece[0]
        width = math.prod(piece.shape[1:])
        step = max(1, CHUNK // width)
        for start in range(rows.start, rows.stop, step):
            part = torch.empty(min(step, rows.stop - start), width, dtype=piece.info.dtype)
            read(start * width, part.view(-1))
            self.copy_rows(in_shard[0].start + start - rows.start, part.to(device), piece.name)


class Int8Linear(QuantizedLinear):
    """weight int8 (out, in), scale (out,): the largest absolute value of a row is code 127.

    mode "dequant" multiplies with the dequantized weight. "llm_int8" also quantizes the activations, as
    bitsandbytes does on a GPU; there the choice of outlier columns looks at all tokens of a micro-batch, so
    the loss depends on how the batch is split over ranks.
    """

    kind = "8bit"

    @staticmethod
    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, fp32 scales). Rows are cast to fp16 first, as in bitsandbytes."""
        return bnb.int8_vectorwise_quant(rows.to(torch.float16).contiguous())[:2]


class NF4Linear(QuantizedLinear):
    """weight uint8 (out, in / 2), two codes in a byte, scale (out, in / 64).

    in must be a multiple of 64: else blocks cross rows, and bitsandbytes' CPU kernel is silently wrong.
    """

    kind = "4bit"

    @staticmethod
    def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
        """(codes, fp32 scales)"""
        codes, state = bnb.quantize_4bit(
            rows.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False
        )
        return codes.view(len(rows), -1), state.absmax.view(len(rows), -1)


KINDS = {cls.kind: cls for cls in (Int8Linear, NF4Linear)}


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The (out, in) weight of codes and int32-bit scales, rounded once, as bitsandbytes does."""
    scale = scale.view(torch.float32)
    if codes.dtype == torch.int8:
        # one pass over memory, where .to().mul_() would be two
        out = torch.empty_like(codes, dtype=dtype)
        return torch.mul(codes, scale[:, None].mul(1.0 / 127.0), out=out)
    shape = (len(codes), codes.shape[1] * 2)
    return torch.ops.bitsandbytes.dequantize_4bit(
        codes.view(-1, 1), scale.view(-1), BLOCK, "nf4", shape, dtype
    )


class _FrozenLinear(torch.autograd.Function):
    """x @ weight.T + bias. The weight is dequantized only for the product, and again in the backward.

    Only codes and scales are kept for the backward; FSDP2 frees and refills their memory in between.
    bitsandbytes' own functions also keep x, in a way that activation checkpointing cannot avoid.
    """

    @staticmethod
    def forward(ctx, x, codes, scale, bias, mode):
        ctx.save_for_backward(codes, scale)
        if mode != "llm_int8":
            return F.linear(x, dequantize(codes, scale, x.dtype), bias)
        flat = x.flatten(0, -2)
        x_codes, x_scale, outliers = bnb.int8_vectorwise_quant(
            flat.half().contiguous(), threshold=OUTLIER
        )
        out, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
            flat, x_codes, codes, x_scale, scale.view(torch.float32), outliers, bias
        )
        # FSDP2 warns if a unit, such as the head, returns a view
        return torch.ops.aten._unsafe_view(out, (*x.shape[:-1], len(codes)))

    @staticmethod
    def backward(ctx, grad):
        codes, scale = ctx.saved_tensors
        return grad @ dequantize(codes, scale, grad.dtype), None, None, None, None


@dataclass(frozen=True)
class Quantized:
    """What quantize_linears did. expert_share: the share of experts, which stay in 16 bit, in the frozen
    weights.
    """

    kind: str
    layers: int
    in_16bit: dict[str, int]  # linears that stay in 16 bit, with the reason -> their number
    expert_share: float

    def sentence(self) -> str:
        """The line that the plan prints."""
        in_16bit = [f"{count} x {name}" for name, count in self.in_16bit.items()]
        if self.expert_share:
            in_16bit.append(f"all experts, {self.expert_share:.0%} of the weights")
        exceptions = f"; in 16 bit: {'; '.join(in_16bit)}" if in_16bit else ""
        return f"{self.kind} for {self.layers} linear layers{exceptions}"


@torch.no_grad()
def quantize_linears(model: nn.Module, quant: Quant, dtype: torch.dtype) -> Quantized:
    """Replace every frozen linear layer by a quantized one, in place, LoRA's base layers included.

    dtype: of the computation. The head (unless quant.quantize_head), trainable layers, and those for
    which _reason gives a reason, such as routers, stay as they are. On meta only the structure
    changes, and load_rows fills it later; real weights are quantized here. Raises ConfigError if no
    layer can be quantized.
    """
    kind = quant.quantization
    frozen = {name: p.numel() for name, p in model.named_parameters() if not p.requires_grad}
    experts = sum(size for name, size in frozen.items() if ".experts." in name)
    head = model.get_output_embeddings()
    check(
        not (quant.quantize_head and head.weight is model.get_input_embeddings().weight),
        "--quantize_head: it is the embedding too, and stays as it is (fix: leave it out)",
    )
    stays_whole = set() if quant.quantize_head else set(head.modules())
    layers = 0
    in_16bit = Counter()
    for name, old in list(model.named_modules()):
        if not isinstance(old, nn.Linear | Conv1D) or old in stays_whole or ADDED.search(name):
            continue
        plain = name.removesuffix(".base_layer")
        if reason := _reason(model, plain, old, kind):
            in_16bit[f"{plain.rpartition('.')[2]} ({reason})"] += 1
            continue
        new = KINDS[kind](old, dtype, quant.int8_mode)
        if not old.weight.is_meta:
            new.copy_rows(0, old.weight, f"{plain}.weight")
        model.set_submodule(name, new)
        layers += 1
    check(
        layers,
        f"--quantization {kind}: {type(model).__name__} has no linear layer that can be:"
        f" {'; '.join(in_16bit)} (fix: --quantization none)",
    )
    return Quantized(kind, layers, in_16bit, experts / sum(frozen.values()))


def _reason(model: nn.Module, name: str, layer: nn.Module, kind: str) -> str:
    """Why a layer stays in 16 bit; "" if it can be quantized."""
    if layer.weight.requires_grad:
        return "it trains"
    if ROUTER.search(name):
        return "a router"
    if isinstance(layer, Conv1D):
        return "a Conv1D: its rows are input features, the scales would run across ranks"
    if not is_plain(model, name, layer):
        return f"a {type(layer).__name__} that {model.config.model_type} does not simply call"
    if kind == NF4Linear.kind and layer.in_features % BLOCK:
        return f"{layer.in_features} input features are no multiple of {BLOCK}"
    return ""


def is_plain(model: nn.Module, name: str, layer: nn.Module) -> bool:
    """Whether a layer computes what its class in torch does, and the model only calls it: see READ_PAST.
    FalconLinear has a forward of its own, but it computes the same.
    """
    has_own_forward = isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward
    if has_own_forward and type(layer).__name__ != "FalconLinear":
        return False
    return name.rpartition(".")[2] not in READ_PAST.get(model.config.model_type, "").split()
