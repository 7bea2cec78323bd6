"""int8 and nf4 frozen linears and experts whose storage shards.

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
from functools import partial

import bitsandbytes.functional as bnb
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..run.errors import check
from .loading import CHUNK, Piece, local, local_box
from .options import Quant

BLOCK = 64  # weights that share an nf4 scale
COUNTED = 2**31  # bitsandbytes' CUDA kernels count elements in 32 bit
ADDED = re.compile(r"\.(lora_|modules_to_save\.|original_module)")  # modules that peft adds
OUTLIER = 6.0  # LLM.int8(): columns with an activation above this are not quantized
# Modules that choose experts, or tokens to attend to. They are small, but small errors in them have large
# effects.
ROUTER = re.compile(r"((^|[._])router|(^|\.|expert_)gate|(^|\.)weights?_proj)(\.|$)")
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
    """A frozen linear layer: `weight` holds integer codes, `scale` the bits of fp32 scales as int32. Or the
    matrices (E, out, in) of experts, which are only dequantized, see add_codes.

    As floats the scales would be cast to bf16 when FSDP2 gathers them.
    """

    W_q = True  # tells peft (DoRA) that dequantize() returns the weight

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, mode: str):
        super().__init__()
        self.out_features, self.in_features = weight.shape[-2:]
        self.dtype = dtype
        self.mode = mode
        self.bias = bias

        def rows_like(row):
            """A frozen parameter with a row like `row` (1, ...) for each output feature."""
            shape = (*weight.shape[:-1], *row.shape[1:])
            return nn.Parameter(weight.new_empty(shape, dtype=row.dtype), requires_grad=False)

        codes, scale = self.quantize(torch.empty(1, self.in_features, device="meta"))
        self.weight = rows_like(codes)
        self.scale = rows_like(scale.view(torch.int32))

    def forward(self, x: Tensor) -> Tensor:
        return _FrozenLinear.apply(x, self.weight, self.scale, self.bias, self.mode)

    def dequantize(self) -> Tensor:
        """The weight in the compute dtype; if the parameters are sharded, this rank's rows."""
        return dequantize(local(self.weight), local(self.scale), self.dtype)

    @torch.no_grad()
    def copy_rows(self, first: int, rows: Tensor, name: str, inner=()) -> None:
        """Quantize rows (n, in_features) of the checkpoint into local rows [first, first + n). Of experts:
        rows (n, r, in_features) into the rows `inner`, a tuple of one slice, of n local experts.

        `rows` may be on another device than the shards. name: of the tensor, for the message. Raises
        ConfigError if a row is too large or not finite.
        """
        codes, scale = self.quantize(rows.flatten(0, -2))
        check(
            scale.isfinite().all(),
            f"{name} is too large to be quantized, or not finite"
            " (fix: a checkpoint with smaller or finite weights, or no --quantization)",
        )
        for stored, values in ((self.weight, codes), (self.scale, scale.view(torch.int32))):
            target = local(stored)[first : first + len(rows), *inner]
            target.copy_(values.view_as(target))

    def load_rows(self, read: Callable, piece: Piece, device: torch.device) -> None:
        """Read this rank's rows, or experts, of a piece, some MiB or an expert at a time, and quantize them.

        read(first, into) reads elements of the piece in full precision.
        """
        # The codes of a row may have another width than its weights.
        of_codes = piece._replace(shape=(*piece.shape[:-1], self.weight.shape[-1]))
        boxes = local_box(self.weight, of_codes)
        if not boxes:
            return
        in_shard, in_piece = boxes
        rows = in_piece[0]
        shape = (piece.info if piece.transposed else piece).shape[1:]
        width = math.prod(shape)
        step = max(1, CHUNK // width)
        for start in range(rows.start, rows.stop, step):
            part = torch.empty(min(step, rows.stop - start), *shape, dtype=piece.info.dtype)
            read(start * width, part.view(-1))
            part = (part.mT if piece.transposed else part).to(device)
            self.copy_rows(in_shard[0].start + start - rows.start, part, piece.name, in_shard[1:-1])


class Int8Linear(QuantizedLinear):
    """weight int8 (out, in), scale (out,): the largest absolute value of a row is code 127.

    mode "dequant" multiplies with the dequantized weight. "llm_int8" also quantizes the activations, as
    bitsandbytes does on a GPU; there the choice of outlier columns looks at all tokens of a micro-batch, so
    the loss depends on how the batch is split over ranks.
    """

    @staticmethod
    def quantize(rows: Tensor) -> tuple:
        """(codes, fp32 scales). Rows are cast to fp16 first, as in bitsandbytes."""
        return bnb.int8_vectorwise_quant(rows.to(torch.float16).contiguous())[:2]


class NF4Linear(QuantizedLinear):
    """weight uint8 (out, in / 2), two codes in a byte, scale (out, in / 64).

    in must be a multiple of 64: else blocks cross rows, and bitsandbytes' CPU kernel is silently wrong.
    """

    @staticmethod
    def quantize(rows: Tensor) -> tuple:
        """(codes, fp32 scales)"""
        codes, state = bnb.quantize_4bit(
            rows.contiguous(), blocksize=BLOCK, quant_type="nf4", compress_statistics=False
        )
        return codes.view(len(rows), -1), state.absmax.view(len(rows), -1)


KINDS = {"8bit": Int8Linear, "4bit": NF4Linear}


def dequantize(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (..., out, in) of codes and int32-bit scales, rounded once, as bitsandbytes does."""
    scale = scale.view(torch.float32)
    if codes.dtype == torch.int8:
        # one pass over memory, where .to().mul_() would be two
        out = torch.empty_like(codes, dtype=dtype)
        return torch.mul(codes, scale[..., None].mul(1.0 / 127.0), out=out)
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    if math.prod(shape) >= COUNTED:  # experts
        out = codes.new_empty(shape, dtype=dtype)
        for i, expert in enumerate(codes):
            out[i] = dequantize(expert, scale[i], dtype)
        return out
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


@torch.no_grad()
def quantize_linears(model: nn.Module, quant: Quant, dtype: torch.dtype) -> str:
    """Replace every frozen linear layer by a quantized one, in place, LoRA's base layers included, and the
    matrices of experts by their codes. Returns in words what was quantized, and what was not.

    dtype: of the computation. The head (unless quant.quantize_head), and weights for which _reason gives a
    reason, such as those of routers, stay as they are. On meta only the structure changes, and load_rows
    fills it later; real weights are quantized here. Raises ConfigError if no weight can be quantized.
    """
    head = model.get_output_embeddings()
    check(
        not (quant.quantize_head and head.weight is model.get_input_embeddings().weight),
        "--quantize_head: it is the embedding too, and stays as it is (fix: leave it out)",
    )
    weights = 0  # quantized ones: of a linear layer, or of all experts of a layer
    in_16bit = Counter()
    for name, layer, weight, put in list(_candidates(model)):
        if ADDED.search(name) or (layer in head.modules() and not quant.quantize_head):
            continue
        name = name.removesuffix(".base_layer")
        if reason := _reason(model, name, layer, weight, quant):
            in_16bit[f"{name.rpartition('.')[2]} ({reason})"] += 1
            continue
        new = KINDS[quant.quantization](weight, layer and layer.bias, dtype, quant.int8_mode)
        if not weight.is_meta:
            new.copy_rows(0, weight, name)
        put(new)
        weights += 1
    others = "; ".join(f"{count} x {name}" for name, count in in_16bit.items())
    check(
        "--keep" in others or not quant.keep_experts_16bit,
        "--keep_experts_16bit: there are no experts (fix: leave it out)",
    )
    check(
        weights,
        f"--quantization {quant.quantization}: {type(model).__name__} has no linear layer that can be:"
        f" {others} (fix: --quantization none; or, for a --checkpoint, its run's OUT/model as --model)",
    )
    return f"{quant.quantization} for {weights} weights{others and '; in 16 bit: ' + others}"


def _candidates(model):
    """Yield (name, layer, weight, what puts codes in its place) for linear layers, and for the matrices of
    experts, which are no layers (None).
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | Conv1D):
            yield name, module, module.weight, partial(model.set_submodule, name)
        elif name.endswith(".experts"):
            for matrix, weight in module.named_parameters(recurse=False):
                if weight.ndim == 3:
                    yield f"{name} {matrix}", None, weight, partial(add_codes, module, matrix)


def add_codes(experts: nn.Module, matrix: str, codes: QuantizedLinear) -> None:
    """Put codes in place of the parameter experts.MATRIX (E, out, in). Each forward of the experts
    dequantizes it. If autograd keeps the result, it is as large as in 16 bit, unless the layer is recomputed.
    """
    delattr(experts, matrix)
    experts.add_module(f"{matrix}_codes", codes)  # sharding.ADAPTED has the name
    experts._is_hf_initialized = True  # it may have no tensor of its own
    experts.register_forward_pre_hook(lambda *_: setattr(experts, matrix, codes.dequantize()))
    # A recomputation ends early, by an exception.
    experts.register_forward_hook(lambda *_: delattr(experts, matrix), always_call=True)


def _reason(model, name, layer, weight, quant) -> str:
    """Why a weight stays in 16 bit; "" if it can be quantized."""
    if weight.requires_grad:
        return "it trains"
    if not layer and quant.keep_experts_16bit:
        return "--keep_experts_16bit"
    if ROUTER.search(name):
        return "a router"
    if isinstance(layer, Conv1D):
        return "a Conv1D: its rows are input features, the scales would run across ranks"
    if layer and not is_plain(model, name, layer):
        return f"a {type(layer).__name__} that {model.config.model_type} does not simply call"
    if quant.quantization == "4bit" and weight.shape[-1] % BLOCK:
        return f"{weight.shape[-1]} input features are no multiple of {BLOCK}"
    return ""


def is_plain(model: nn.Module, name: str, layer: nn.Module) -> bool:
    """Whether a layer computes what its class in torch does, and the model only calls it: see READ_PAST.
    FalconLinear has a forward of its own, but it computes the same.
    """
    has_own_forward = isinstance(layer, nn.Linear) and type(layer).forward is not nn.Linear.forward
    if has_own_forward and type(layer).__name__ != "FalconLinear":
        return False
    return name.rpartition(".")[2] not in READ_PAST.get(model.config.model_type, "").split()
