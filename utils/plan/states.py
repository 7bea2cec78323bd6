"""What decides the memory of a run, and bytes by part: the states are exact from meta shapes."""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import nn
from transformers import PretrainedConfig

from ..model.loading import build_model
from ..model.loss import add_chunked_loss
from ..model.options import Lora, Quant
from ..model.pieces import rows_of_full_shard
from ..run.units import GIB, MIB


@dataclass(frozen=True)
class Setting:
    """All that decides the memory of a rank; the names are those of the flags where there is one."""

    config: PretrainedConfig = field(hash=False)
    param_dtype: torch.dtype
    dtype: torch.dtype  # to compute in
    seq_len: int  # tokens of the longest row
    shards: int = 1  # ranks that a copy of the model is cut over
    replicate: int = 1  # copies of the model, each cut over `shards` ranks (HSDP)
    local_ranks: int = 1  # of one machine
    gpu: bool = True  # false: ranks compute on the CPU, and gloo moves what they share
    batch_size: int = 1
    rows: int = 0  # of a rank in an optimizer step; 0: those of one micro-batch
    activation_checkpointing: str = "none"
    activation_offload: bool = False
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    lora: Lora = Lora()
    quant: Quant = Quant()
    may_adapt: bool = True  # false: the recipe has no adapters to propose
    attn: str = "auto"
    trust_remote_code: bool = False
    kind: str = "text"  # of loading.KINDS
    parts: str = ""  # of a model of pictures that train, see parts.parse_parts; "": all
    pictures: object = None  # a pictures.Pictures
    frozen_bytes: int = 0  # of a rank's shards of other models, which do not train
    masked: bool = False  # a mask keeps the documents of a pack apart
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    sync_each_microbatch: bool = False
    low_cpu_fsdp: bool = True
    async_save: bool = False  # checkpoints are written from a copy on the host
    compile: bool = False
    repeats_keys: bool = False  # see sharding.lacks_grouped_kernels
    # a function: (what traces a step, rows, tokens of a row) -> its trace, made from that of other steps
    scaling: object = None

    @property
    def grad_accum(self) -> int:
        return max(1, self.rows // self.batch_size)


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class Peak:
    """The most that is alive at a time on the fullest rank: in which phase of a step, and bytes by part.

    pools: the most in each CUDA stream's pool, at whatever time; what a caching allocator reserves.
    """

    phase: str
    parts: dict[str, int]
    pools: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def sum_of(parts: dict[str, int]) -> str:
    """The parts that count, largest first, and their sum."""
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    texts = [f"{part} {size / unit:.2f}" for part, size in ordered if size >= unit / 200]
    return f"{' + '.join(texts)} = {total / unit:.2f} {name}"


def planned_model(setting: Setting) -> nn.Module:
    """The model on meta, with its adapters, codes and chunked loss. It is the plan's own, and made once."""
    quant = setting.quant
    if quant.quantization != "8bit":
        quant = replace(quant, int8_mode="dequant")
    return _planned_model(
        Setting(
            config=setting.config,
            param_dtype=setting.param_dtype,
            dtype=setting.dtype,
            seq_len=1,
            lora=setting.lora,
            quant=quant,
            attn=setting.attn,
            trust_remote_code=setting.trust_remote_code,
            kind=setting.kind,
            parts=setting.parts,
        )
    )


@lru_cache(maxsize=16)
def _planned_model(setting: Setting) -> nn.Module:
    model = build_model(
        setting.config,
        setting.param_dtype,
        setting.attn,
        setting.trust_remote_code,
        kind=setting.kind,
    )
    if setting.parts:
        from ..model.parts import freeze_parts, parse_parts

        freeze_parts(model, parse_parts(setting.parts), setting.dtype)
    if setting.lora:
        from ..model.lora import add_adapters, freeze_base

        add_adapters(model, setting.lora)
        freeze_base(model, setting.quant, setting.dtype)
    return model if setting.kind == "scores" else add_chunked_loss(model)


def estimate_states(model: nn.Module, shards: int, optimizer: str = "adamw") -> States:
    """Bytes on the fullest rank when every parameter is cut along dim 0 over `shards` ranks, as FSDP2 does.

    They follow from the parameters' shapes and dtypes, so the model may be on meta, sharded or not. Rows
    are dealt as torch.chunk does, ceil(rows / shards) each until there are none left: rank 0 is the fullest,
    and FSDP2 pads weights and gradients to its size on every rank. AdamW keeps two moments of each trainable
    row, in the parameter's dtype; the other optimizers keep what optim_8bit says. Frozen parameters have
    neither; a tied weight counts once.
    """
    if optimizer != "adamw":
        from ..train.optim_8bit import state_bytes
    weights = gradients = moments = 0
    for parameter in model.parameters():
        share = share_numel(parameter, shards)
        share_bytes = share * parameter.element_size()
        weights += share_bytes
        if parameter.requires_grad:
            gradients += share_bytes
            # AdamW's two moments, and the count of steps, one fp32 per parameter.
            adamw = 2 * share_bytes + 4
            moments += adamw if optimizer == "adamw" else state_bytes(parameter, share)
    return States(weights, gradients, moments)


def share_numel(parameter: nn.Parameter, shards: int) -> int:
    """Elements of the fullest of `shards`."""
    rows = len(parameter)
    return rows_of_full_shard(rows, shards) * parameter.numel() // rows
