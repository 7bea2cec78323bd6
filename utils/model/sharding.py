"""FSDP2 / HSDP: which modules are units, when they reshard, in which dtype, and what is recomputed.

The parameters of a unit are gathered, used and freed together. See the FSDP2 tutorial,
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

import math
import re
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from transformers.core_model_loading import build_glob_alternation

from ..run.errors import ConfigError, check

# Names of dtypes in flags and files; "original" keeps the dtype of the checkpoint.
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "original": None}

# Names of projectors in model families. Some projectors are inside the tower.
PROJECTOR = re.compile(r"projector|connector|merger|resampler|abstractor|aligner")

# What peft, and quantize.py for experts, add to the names of parameters.
ADAPTED = ".base_layer .original_module .modules_to_save.default _codes.weight".split()


class Unit(NamedTuple):
    """Modules whose parameters FSDP2 gathers in one collective: what fully_shard takes."""

    modules: list[nn.Module]
    param_dtype: torch.dtype  # dtype of the all-gather
    reshard_after_forward: bool = True  # False: the backward needs them right away
    unshard_in_backward: bool = True  # False: the backward does not need them
    # FSDP2's default is True. Here inputs keep the dtypes that the model gives them (fp32 residuals, rotary
    # tables), as without FSDP; only a head may need the cast, see units.
    cast_forward_inputs: bool = False


def units(model: nn.Module, dtype: torch.dtype) -> list[Unit]:
    """The units of a model on meta, inner ones first. The dtypes of its tensors are changed in place so that
    FSDP2 can shard them, see prepare_dtypes.

    dtype: of the computation. The last unit is the root, with the remaining parameters: the final norm,
    position embeddings.
    """
    prepare_dtypes(model, dtype)
    in_fp32 = fp32_modules(model, dtype)
    found = []
    layers = decoder_layers(model)
    for layer in [*tower_layers(model), *layers]:
        inner = [module for module in layer.modules() if module in in_fp32]
        for mixer in layer.modules():
            for conv in mixer.children():
                if conv in inner and isinstance(conv, nn.Conv1d):
                    inner.remove(conv)
                    # The mixer reads its weight, and never calls it. The backward shards it again.
                    mixer.register_forward_pre_hook(lambda *_, conv=conv: conv.unshard())
                    found.append(Unit([conv], torch.float32, reshard_after_forward=False))
        if inner:
            found.append(Unit(inner, torch.float32))
        # A layer is freed after its forward and gathered again for its backward. Not the last layer: its
        # backward follows right away.
        found.append(Unit([layer], dtype, reshard_after_forward=layer is not layers[-1]))

    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    # The head's backward follows its forward. Families with an fp32 residual cast the head's input to the
    # dtype of its weight before they call it: then the weight is still the shard, in another dtype.
    head_options = {"reshard_after_forward": False, "cast_forward_inputs": True}
    if embedding.weight is head.weight:
        # One unit, since a tied weight cannot be in two. It is needed at both ends of the forward, and right
        # away in the backward.
        found.append(Unit([embedding, head], dtype, **head_options))
    else:
        # The backward of a lookup does not need the table. But an adapter or a norm in the embedding is
        # needed.
        is_lookup = isinstance(embedding, nn.Embedding) and len(list(embedding.parameters())) == 1
        found.append(Unit([embedding], dtype, unshard_in_backward=not is_lookup))
        found.append(Unit([head], torch.float32 if head in in_fp32 else dtype, **head_options))
    found += [Unit([table], dtype, unshard_in_backward=False) for table in further_tables(model)]
    taken = {module for unit in found for module in nn.ModuleList(unit.modules).modules()}
    outside = [module for module in in_fp32 if module not in taken]
    if outside:
        found.append(Unit(outside, torch.float32, reshard_after_forward=False))
    # The root has only small parameters, which stay gathered.
    return [*found, Unit([model], dtype, reshard_after_forward=False)]


def stored_as_computed(found: list[Unit], accumulates: bool) -> set:
    """Parameters that a single rank can use as they are stored, without FSDP2's copies: their unit computes
    in their dtype, and they are frozen, or their gradients need no sum in fp32.

    found: inner units first. accumulates: the gradients of several micro-batches are added before they are
    reduced. The result has all trainable parameters or none: a gradient norm cannot mix DTensors and plain
    tensors.
    """
    dtypes = {}  # of a parameter's computation
    for unit in reversed(found):
        for p in nn.ModuleList(unit.modules).parameters():
            dtypes[p] = unit.param_dtype
    plain = {p for p, dtype in dtypes.items() if dtype == p.dtype or not p.is_floating_point()}
    trained = {p for p in dtypes if p.requires_grad}
    needs_fp32 = accumulates and any(p.dtype != torch.float32 for p in trained)
    return plain - trained if needs_fp32 or trained - plain else plain


def prepare_dtypes(model: nn.Module, dtype: torch.dtype) -> None:
    """Give the buffers of a model on meta the dtypes of from_pretrained(dtype=dtype). Give all trainable
    parameters, except those of fp32_modules, one dtype: FSDP2 requires that within a unit, and some families
    create some weights in fp32.
    """
    dtypes = dtypes_as_loaded(model, dtype)
    for name, buffer in model.named_buffers():
        cast_to(buffer, dtypes.get(plain_name(name)))
    in_fp32 = {*nn.ModuleList(fp32_modules(model, dtype)).parameters()}
    trained = [p for p in model.parameters() if p.requires_grad and p not in in_fp32]
    largest = max(trained, key=torch.numel, default=None)
    for parameter in trained:
        cast_to(parameter, largest.dtype)


def cast_to(tensor: Tensor, dtype: torch.dtype | None) -> None:
    """Cast a floating-point tensor in place. Integers stay as they are; None: floats do too."""
    if dtype and tensor.is_floating_point():
        tensor.data = tensor.data.to(dtype)


def fp32_modules(model: nn.Module, dtype: torch.dtype) -> list:
    """The outermost modules whose parameters are all left in fp32 by from_pretrained(dtype=dtype): routers,
    the convolutions of some families. A module that has such a parameter beside others computes in `dtype`.
    """
    dtypes = dtypes_as_loaded(model, dtype)
    kept = {
        p for name, p in model.named_parameters() if dtypes.get(plain_name(name)) == torch.float32
    }
    found = []
    inside = set()
    for module in model.modules() if kept else ():
        own = {*module.parameters()}
        if own and own <= kept and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def dtypes_as_loaded(model: nn.Module, dtype: torch.dtype) -> dict:
    """The dtype that from_pretrained(dtype=dtype) gives each parameter and buffer, by its name without
    adapters. Some families keep or create some of them in fp32. Empty if `dtype` is fp32.
    """
    if dtype == torch.float32:
        return {}
    known = vars(model).setdefault("dtypes_as_loaded", {})  # by dtype: a plan asks for it often
    if dtype not in known:
        with torch.device("meta"):
            made = family_of(model)._from_config(model.config, dtype=dtype)
        listed = list(made._keep_in_fp32_modules_strict)
        if dtype == torch.float16:
            listed += made._keep_in_fp32_modules
        pattern = build_glob_alternation(listed)[0] if listed else None
        saved = made.state_dict()
        known[dtype] = {}
        for name, tensor in chain(made.named_parameters(), made.named_buffers()):
            in_fp32 = pattern and name in saved and pattern.search(name)
            known[dtype][name] = torch.float32 if in_fp32 else tensor.dtype
    return known[dtype]


def plain_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    for part in ADAPTED:
        name = name.replace(part, "")
    return name


def family_of(model: nn.Module) -> type:
    """The model's class, without the class that FSDP2 adds."""
    return next(base for base in type(model).__mro__ if not issubclass(base, FSDPModule))


def reshard(model: nn.Module) -> None:
    """Free parameters that a forward without a backward left gathered. Until then parameters() does not
    give the shards. FSDP2 also forgets the order of such forwards, which only a backward clears.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    if hasattr(model, "reset_iter_state"):  # not in torch 2.11
        model.reset_iter_state()


def norms_and_biases(model: nn.Module) -> set:
    """The parameters without weight decay: all vectors, and what is no matrix by its name, such as the
    biases of experts (E, out), the norms of heads (H, D) and the rates of Mamba's states.
    """
    no_matrix = re.compile(r"(norm\.\w+|bias|A_log|\.D)$")
    return {p for name, p in model.named_parameters() if p.ndim < 2 or no_matrix.search(name)}


def clip_gradients(model: nn.Module, max_norm: float, in_backward=None) -> Tensor:
    """Scale the gradients so that their global L2 norm is at most max_norm (0: do not scale). Returns the
    norm before scaling, (), on the device of the gradients. in_backward: a StepInBackward, which has updated
    every weight already and knows the norm.

    Every rank must call it, because the norm of sharded gradients is a collective. If the norm is not finite,
    the gradients have been scaled by it: do not step then.
    """
    if in_backward:
        return in_backward.grad_norm()
    # foreach: a few kernel launches instead of one per DTensor
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or math.inf, foreach=True)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def language_model(model: nn.Module) -> nn.Module:
    """The part of a model that reads text, usually without the head."""
    decoder = model.get_decoder()  # in modernbert-decoder this is the head
    return model if isinstance(decoder, nn.Linear) else decoder


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The decoder layers: the ModuleList of the language model with the most parameters. Raises ConfigError
    if there is none.
    """
    lists = [m for m in language_model(model).modules() if isinstance(m, nn.ModuleList)]
    check(any(lists), f"{type(model).__name__} has no layers to shard by")
    return max(lists, key=numel)


def further_tables(model: nn.Module) -> list:
    """Large embeddings beside that of the input. Each is freed after its lookup; in the root's unit it would
    stay gathered. In Gemma 3n and 4 one has a vector for each token and layer: 40 % of Gemma 4 E2B.
    """
    table = getattr(language_model(model), "embed_tokens_per_layer", None)
    return [table] if isinstance(table, nn.Embedding) else []


def tower_layers(model: nn.Module, share=0.01) -> list:
    """The layers of towers for pictures and sounds: of each ModuleList outside the language model that has
    more than this share of all parameters, or 100 million. A run on texts never gathers them.
    """
    layers = []
    least = min(share * numel(model), 1e8)
    seen = set(language_model(model).modules())
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList) and module not in seen
        # Not of a projector: it may run once for each picture, and ranks have different numbers of pictures.
        if is_list and not PROJECTOR.search(name) and numel(module) > least:
            layers += module
            seen.update(module.modules())
    return layers


def numel(module: nn.Module) -> int:
    """The number of elements of a module's parameters."""
    return sum(p.numel() for p in module.parameters())


def recompute_activations(model: nn.Module, mode: str) -> None:
    """Keep for the backward only each layer's input (full), or its matrix products and attention too
    (selective), or everything (none).

    full costs one more forward, selective the cheap part of one and the products of experts; the losses do
    not change. Raises ConfigError if the model does not support it.
    https://docs.pytorch.org/docs/stable/checkpoint.html
    """
    if mode == "none":
        return
    check(
        model.supports_gradient_checkpointing,
        f"--activation_checkpointing {mode}: {type(model).__name__} does not support it",
    )
    options = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, checkpoint_policy)
        # A recomputation must have no more operations than the forward, but units within a layer are then
        # named, by record_function, at other times.
        of_names = torch.ops.profiler
        SAC_IGNORED_OPS.add(of_names._record_function_enter_new.default)
        SAC_IGNORED_OPS.add(of_names._record_function_exit._RecordFunction)
    # transformers 5.23 has given it another name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)(options)
    model.disable_input_require_grads()  # only use_reentrant needs them


def checkpoint_policy(context, op, *args, **kwargs) -> CheckpointPolicy:
    """Whether the backward keeps the result of an operation: only if it takes long to compute for its size,
    as attention and matrix products do. These products are recomputed:

    - the grouped products of experts, since each token has a result of each of its experts;
    - products with an inner dim below an eighth of their width, such as an adapter's from its rank R to D;
    - products with an inner dim below 8, such as Gemma 3n's over its 4 streams. Gemma 3n adds to that result
      in place, and torch would not notice that a kept result changes.
    """
    name = op.name().partition("::")[2]
    keep = name.startswith(("_scaled_dot_product", "_varlen_attn"))
    if name in "mm addmm bmm baddbmm".split():
        inner, width = args[-1].shape[-2:]
        keep = 8 * inner >= max(width, 64)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def settle_dtype(dtype: str, device: torch.device) -> str:
    """The dtype of the computation: "auto" is bf16 on a GPU that supports it, else fp32. Raises ConfigError
    for bf16 on a GPU that does not.
    """
    on_gpu = device.type == "cuda"
    has_bf16 = on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
    if dtype == "auto":
        return "bf16" if has_bf16 else "fp32"
    if dtype == "bf16" and on_gpu and not has_bf16:
        raise ConfigError(
            f"--dtype bf16: {torch.cuda.get_device_name(device)} has none (fix: --dtype fp16)"
        )
    return dtype


def lacks_grouped_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the math kernel is sdpa's only kernel for grouped heads. It keeps fp32 probabilities (B, H, T,
    T). Flash attention needs compute capability 8 and 16 bit, and the memory-efficient kernel does not
    support groups (https://github.com/pytorch/pytorch/issues/181528).
    """
    return device.type == "cuda" and (
        dtype == torch.float32 or torch.cuda.get_device_capability(device) < (8, 0)
    )
