"""The setting that decides the memory of a run, and the bytes of its states, exact from shapes on meta."""

from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import nn
from transformers import PretrainedConfig

from ..model.loading import build_model, rows_of_full_shard
from ..model.loss import add_chunked_loss
from ..model.options import Lora, Quant
from ..run.units import GIB, MIB


@dataclass(frozen=True)
class Setting:
    """Everything that decides the memory of a rank. A field has the name of its flag, if there is one."""

    config: PretrainedConfig = field(hash=False)
    param_dtype: torch.dtype
    dtype: torch.dtype  # of the computation
    seq_len: int  # tokens of the longest row
    shards: int = 1  # ranks over which a copy of the model is sharded
    replicate: int = 1  # copies of the model, each sharded over `shards` ranks (HSDP)
    local_ranks: int = 1  # ranks on one machine
    gpu: bool = True  # false: ranks compute on the CPU and communicate through gloo
    batch_size: int = 1
    rows: int = 0  # rows of a rank in an optimizer step; 0: those of one micro-batch
    activation_checkpointing: str = "none"
    activation_offload: bool = False
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    lora: Lora = Lora()
    quant: Quant = Quant()
    may_adapt: bool = True  # false: the recipe has no adapters, so the plan proposes none
    attn: str = "auto"
    trust_remote_code: bool = False
    kind: str = "text"  # a key of loading.KINDS
    parts: str = ""  # the parts of a picture model that train, see kinds.parse_parts; "": all
    pictures: object = None  # a pictures.Pictures
    frozen_bytes: int = 0  # bytes of a rank's shards of other models, which do not train
    masked: bool = False  # a mask keeps the documents of a pack apart
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    sync_each_microbatch: bool = False
    low_cpu_fsdp: bool = True
    async_save: bool = False  # checkpoints are written from a copy on the host
    compile: bool = False
    repeats_keys: bool = False  # see sharding.lacks_grouped_kernels
    # a function (traced, rows, tokens of a row) -> Trace that derives it from traces of other steps; see
    # trace_of
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
    """The peak of live bytes on the fullest rank: the phase of the step, and bytes by part.

    pools: the peak bytes of each CUDA stream's pool, each at its own time. A caching allocator
    reserves them all.
    """

    phase: str
    parts: dict[str, int]
    pools: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def sum_of(parts: dict[str, int]) -> str:
    """The parts and their sum in words, largest first; parts that would print as 0.00 are left out."""
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    texts = [f"{part} {size / unit:.2f}" for part, size in ordered if size >= unit / 200]
    return f"{' + '.join(texts)} = {total / unit:.2f} {name}"


def planned_model(setting: Setting) -> nn.Module:
    """The model on meta, with adapters, quantized layers and chunked loss. Only the plan uses
    it; it is cached.
    """
    return _planned_model(
        Setting(
            config=setting.config,
            param_dtype=setting.param_dtype,
            dtype=setting.dtype,
            seq_len=1,
            lora=setting.lora,
            quant=setting.quant,
            attn=setting.attn,
            trust_remote_code=setting.trust_remote_code,
            kind=setting.kind,
            parts=setting.parts,
        )
    )


@lru_cache(maxsize=16)
def _planned_model(setting: Setting) -> nn.Module:
    model = build_model(
        deepcopy(setting.config),  # which it changes, and the cache compares
        setting.param_dtype,
        setting.attn,
        setting.trust_remote_code,
        kind=setting.kind,
    )
    if setting.parts:
        from ..model.kinds import freeze_parts, parse_parts

        freeze_parts(model, parse_parts(setting.parts), setting.dtype)
    if setting.lora:
        from ..model.lora import add_adapters, freeze_base

        add_adapters(model, setting.lora)
        freeze_base(model, setting.quant, setting.dtype)
    return model if setting.kind == "scores" else add_chunked_loss(model)


def estimate_states(model: nn.Module, shards: int, optimizer: str = "adamw") -> States:
    """Bytes on the fullest rank when FSDP2 shards every parameter along dim 0 over `shards` ranks.

    They follow from the parameters' shapes and dtypes, so the model may be on meta, sharded or not. Rows are
    split as by torch.chunk, ceil(rows / shards) for each rank until none are left. So rank 0 is the fullest,
    and FSDP2 pads weights and gradients to its size on every rank. AdamW keeps two moments of each trainable
    row, in the parameter's dtype; for other optimizers see optim_8bit. Frozen parameters have neither
    gradients nor moments. A tied weight counts once.
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
    """Elements in the largest of a parameter's `shards`."""
    rows = len(parameter)
    return rows_of_full_shard(rows, shards) * parameter.numel() // rows
