"""What a training step needs of a GPU and of the host, and whether that fits. To find its peak memory, the
step is replayed unit by unit in FSDP2's own order.

Nothing is allocated and nothing is read: models are on meta. The memory of activations comes from trace.py.
For a model that cannot be traced, only weights, gradients and optimizer states are estimated.

A GPU has two figures. *Must* is the least memory with which a step can finish. *Comfortable* is what the
caching allocator reserves when nothing limits it: each CUDA stream has its own pool, and no other stream
uses the freed blocks in it, so the peaks of the pools add up, although they occur at different times.
Between the two figures a run fits tightly: in every step the allocator has to give cached blocks back, and
to wait for the device.
"""

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from ..model import sharding
from ..model.loading import build_model
from ..model.loss import add_chunked_loss
from ..model.options import Lora, Quant
from ..run.errors import escaped, reason_of_others
from ..run.units import GIB, MIB
from .trace import Segment, Trace, record_step

# --- the setting, and the bytes of its states, exact from shapes on meta


@dataclass(frozen=True)
class Setting:
    """Everything that decides the memory of a rank. A field has the name of its flag, if there is one."""

    config: PretrainedConfig = field(compare=False)
    param_dtype: torch.dtype
    dtype: torch.dtype  # in which the model computes
    seq_len: int  # tokens of the longest row
    shards: int = 1  # ranks over which a copy of the model is sharded
    replicate: int = 1  # copies of the model, each sharded over `shards` ranks (HSDP)
    local_ranks: int = 1  # ranks on one machine
    gpu: bool = True  # false: ranks compute on the CPU and communicate through gloo
    batch_size: int = 1
    global_batch_size: int = 0  # rows of an optimizer step, if they are given
    rows: int = 0  # of them, those of the fullest rank; 0: those of one micro-batch
    activation_checkpointing: str = "none"
    activation_offload: bool = False
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    lora: Lora = Lora()
    quant: Quant = Quant()
    lacks: str = ""  # a flag of search.LEVERS that the recipe does not have
    attn: str = "auto"
    trust_remote_code: bool = False
    kind: str = "text"  # a key of loading.KINDS
    train: str = ""  # the parts of a picture model that train, see kinds.parse_parts; "": all
    pictures: object = None  # a pictures.Pictures
    frozen_bytes: int = 0  # bytes of a rank's shards of other models, which do not train
    masked: bool = False  # a mask keeps the documents of a pack apart
    optimizer: str = "adamw"
    optimizer_in_backward: bool = False
    sync_each_microbatch: bool = False
    separates: bool = False  # see PictureBatches: one micro-batch more
    low_cpu_fsdp: bool = True
    async_save: bool = False  # checkpoints are written from a copy on the host
    compile: bool = False
    repeats_keys: bool = False  # see sharding.lacks_grouped_kernels
    # a function (traced, rows, tokens of a row) -> Trace that derives it from traces of other steps; see
    # trace_of
    scaling: object = None
    # stands for the config in comparisons: Gemma 4's cannot be compared, since its sizes differ by layer
    config_text: str = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "config_text", self.config.to_json_string(use_diff=False))

    @property
    def grad_accum(self) -> int:
        return -(-self.rows // self.batch_size) or 1


# The fields of a Setting on which the model depends, before it is sharded.
OF_MODEL = "config param_dtype dtype lora quant attn trust_remote_code gpu kind train".split()


class States(NamedTuple):
    """Bytes on one rank."""

    weights: int
    gradients: int
    optimizer: int


class Peak(NamedTuple):
    """The peak of live bytes on the fullest rank: the phase of the step, and bytes by part.

    pools: the peak bytes of each CUDA stream's pool, each at its own time. A caching allocator
    reserves them all.
    """

    phase: str
    parts: dict
    pools: dict

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def sum_of(parts: dict) -> str:
    """The parts and their sum in words, largest first; parts that would print as 0.00 are left out."""
    total = sum(parts.values())
    unit, name = (GIB, "GiB") if total >= GIB else (MIB, "MiB")
    texts = [
        f"{part} {size / unit:.2f}"
        for part, size in Counter(parts).most_common()
        if size >= unit / 200
    ]
    return f"{' + '.join(texts)} = {total / unit:.2f} {name}"


def planned_model(setting: Setting) -> nn.Module:
    """The model on meta, with adapters, quantized layers and chunked loss. It is cached; only the plan uses
    it.
    """
    return _planned_model(Setting(seq_len=1, **{name: getattr(setting, name) for name in OF_MODEL}))


@lru_cache(maxsize=16)
def _planned_model(setting):
    model = build_model(
        deepcopy(setting.config),  # build_model changes it
        setting.param_dtype,
        setting.attn,
        setting.trust_remote_code,
        kind=setting.kind,
    )
    if setting.gpu:
        from ..model.attention import use_gpu_kernels

        use_gpu_kernels(model)
    if setting.train:
        from ..model.kinds import freeze_parts

        freeze_parts(model, setting.train, setting.dtype)
    if setting.lora:
        from ..model.lora import add_adapters, freeze_base

        add_adapters(model, setting.lora)
        # llm_int8 keeps as much for the backward as dequant, but cannot be traced.
        freeze_base(model, replace(setting.quant, int8_mode="dequant"), setting.dtype)
    return model if setting.kind == "scores" else add_chunked_loss(model)


def estimate_states(model: nn.Module, shards: int, optimizer="adamw") -> States:
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
            moments += (
                2 * share_bytes + 4 if optimizer == "adamw" else state_bytes(parameter, share)
            )
    return States(weights, gradients, moments)


def share_numel(parameter: nn.Parameter, shards: int) -> int:
    """Elements in the first, fullest of a parameter's `shards`: see estimate_states."""
    rows = len(parameter)
    return -(-rows // shards) * parameter.numel() // rows


# --- the step replayed. What FSDP2 gathers, keeps and reduces, and when, follows
# torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py and _fsdp_collectives.py.


@dataclass(eq=False)
class UnitBytes:
    """Bytes of one FSDP2 unit. Parameters that a single rank uses as they are stored have gradients only."""

    gathered: int = 0  # the whole parameters, padded, in the dtype of the all-gather
    # this rank's shards in that dtype, if stored in another one, or on the host; of a single rank the largest
    copied: int = 0
    moved: int = 0  # the largest as it is stored, if it comes from the host to be copied
    grads: int = 0  # the whole gradients, in that dtype
    reduced: int = 0  # the same, padded, in fp32: the input of the reduce-scatter
    share: int = 0  # this rank's shard of the gradients, in the dtype of the parameters
    # the whole gradients of the last parameter, which a loop variable in foreach_reduce keeps alive
    last: int = 0


def units_of(model: nn.Module, setting: Setting) -> tuple:
    """(the root, the embedding and further tables, the blocks, the head, the layers of towers), as
    sharding.units forms them. The root has all other parameters. A tied head shares the embedding's unit,
    and is None here.
    """
    layers = sharding.decoder_layers(model)
    towers = sharding.tower_layers(model)
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    in_fp32 = sharding.fp32_modules(model, setting.dtype)
    # Modules that are gathered in fp32, in units of their own, count as part of the unit around them.
    fp32_parameters = {*nn.ModuleList(in_fp32).parameters()}
    unsharded = set()  # see sharding.stored_as_computed
    alone = setting.shards == 1
    if alone and setting.replicate == 1 and not setting.cpu_offload:
        units = [sharding.Unit(in_fp32, torch.float32), sharding.Unit([model], setting.dtype)]
        accumulates = setting.grad_accum > 1 and not setting.sync_each_microbatch
        unsharded = sharding.stored_as_computed(units, accumulates)

    def unit_of(parameters):
        unit = UnitBytes()
        for p in parameters:
            shard_numel = share_numel(p, setting.shards)
            padded_numel = 0 if p in unsharded else shard_numel * setting.shards
            dtype = torch.float32 if p in fp32_parameters else setting.dtype
            is_cast = p.is_floating_point() and p.dtype != dtype
            itemsize = dtype.itemsize if is_cast else p.element_size()
            unit.gathered += padded_numel * itemsize
            copied = shard_numel * itemsize if is_cast or setting.cpu_offload else 0
            unit.copied = max(copied, unit.copied) if alone else copied + unit.copied
            if is_cast and setting.cpu_offload:
                unit.moved = max(unit.moved, shard_numel * p.element_size())
            if p.requires_grad:
                grads = p.numel() * itemsize
                unit.grads += grads
                unit.reduced += padded_numel * 4
                unit.share += shard_numel * p.element_size()
                unit.last = 0 if alone else grads
        return unit

    is_tied = embedding.weight is head.weight
    tables = [nn.ModuleList([embedding, head]) if is_tied else embedding]
    tables += sharding.further_tables(model)
    in_units = {*nn.ModuleList([*tables, head, *layers, *towers]).parameters()}
    return (
        unit_of(p for p in model.parameters() if p not in in_units),
        [unit_of(table.parameters()) for table in tables],
        [unit_of(layer.parameters()) for layer in layers],
        None if is_tied else unit_of(head.parameters()),
        [unit_of(layer.parameters()) for layer in towers],
    )


# The streams in which FSDP2 allocates. Each has its own pool.
COMPUTE = "compute"  # also for gathered parameters, and for the input of a reduce-scatter
GATHER = "all-gather"  # all_gather_copy_in_stream in foreach_all_gather
REDUCE = "reduce-scatter"  # reduce_scatter_stream in foreach_reduce
ALL_REDUCE = "all-reduce"  # all_reduce_stream in foreach_reduce


class Replay:
    """Counts the live bytes by part and keeps their peak. Its methods follow those of FSDPParamGroup."""

    def __init__(self, states: States, setting: Setting):
        self.setting = setting
        self.phase = ""
        self.live = Counter()  # bytes by part
        self.peak = Peak("", {}, {})
        self.pools = Counter()  # bytes by stream
        self.pool_peaks = Counter()  # the most bytes of each stream so far
        self.open = set()  # units that are gathered
        # unit -> bytes of its all-gather buffer, before it is copied out
        self.fetched = {}
        self.unfreed_bytes = 0  # of all-gather buffers that are copied out
        # unit -> bytes of whole gradients that wait for the last micro-batch
        self.deferred = {}
        self.reduced = set()  # units whose sharded gradients exist
        self.alone = setting.shards == 1  # one rank copies, and gathers nothing
        self.gather_stream = COMPUTE if self.alone else GATHER
        if not setting.cpu_offload:
            self.add("weights", states.weights)
            self.add("optimizer", states.optimizer)

    def add(self, part: str, size: int, stream=COMPUTE) -> None:
        """Add `size` bytes, which may be negative, and keep the peak."""
        self.live[part] += size
        self.pools[stream] += size
        self.pool_peaks |= self.pools  # the larger bytes of each
        if self.live.total() > self.peak.total:
            # The pools are not copied: they peak at other times, also later.
            self.peak = Peak(self.phase, dict(self.live), self.pool_peaks)

    def free(self, part: str, size: int | None = None, stream=COMPUTE) -> None:
        """size None: all bytes of the part."""
        self.add(part, -(self.live[part] if size is None else size), stream)

    def compute(self, segment: Segment, grads=0, part="activations") -> None:
        """Run a segment. grads: bytes of whole gradients in its rest, counted as a part of their own."""
        self.add(part, segment.peak)
        self.free(part, segment.peak)
        self.add("activations", segment.rest - grads)
        self.add("whole gradients", grads)

    def fetch(self, unit: UnitBytes) -> None:
        """Begin the all-gather of a unit. A single rank copies its parameters one by one."""
        if unit in self.open or unit in self.fetched:
            return
        buffer, freed = (unit.copied, unit.moved) if self.alone else (unit.gathered, unit.copied)
        self.fetched[unit] = buffer
        self.add("buffers", buffer + freed, self.gather_stream)
        self.free("buffers", freed, self.gather_stream)

    def unshard(self, unit: UnitBytes, forward: bool) -> None:
        """Gather a unit. In the forward the buffer of an all-gather lives until the next one is copied out: a
        variable of FSDPParamGroup.wait_for_unshard holds it.
        """
        if unit in self.open:
            return
        self.fetch(unit)
        self.add("gathered", unit.gathered)
        self.drop_buffer()
        self.unfreed_bytes += self.fetched.pop(unit)
        if self.alone or not forward:
            self.drop_buffer()
        self.open.add(unit)

    def drop_buffer(self) -> None:
        """Free the all-gather buffers that are copied out."""
        self.free("buffers", self.unfreed_bytes, self.gather_stream)
        self.unfreed_bytes = 0

    def reshard(self, unit: UnitBytes) -> None:
        """Free the gathered parameters of a unit."""
        if unit in self.open:
            self.open.remove(unit)
            self.free("gathered", unit.gathered)

    def reduce(self, unit: UnitBytes, sync: bool) -> None:
        """Reshard a unit after its backward, and reduce its gradients. The input of a reduce-scatter lives
        until the next one begins. Its output becomes the unit's gradients, or is added to them.
        """
        self.reshard(unit)
        waiting = self.deferred.pop(unit, 0)
        if waiting:  # the gradients of this micro-batch are added to them
            self.free("whole gradients", unit.grads)
        if unit.reduced and not sync:
            in_fp32 = unit.grads // self.setting.dtype.itemsize * 4
            if in_fp32 > unit.grads and not waiting:
                self.add("whole gradients", in_fp32)
                self.free("whole gradients", unit.grads)
            self.deferred[unit] = in_fp32
            return
        self.free("reduced")
        self.add("reduced", unit.reduced)
        self.free("whole gradients", waiting or unit.grads)
        last = unit.last * 2 if waiting > unit.grads else unit.last  # those that waited are fp32
        output = unit.reduced // self.setting.shards
        cast = unit.share if unit.share != output else 0  # a copy in the parameters' dtype
        stays = not (self.setting.cpu_offload or self.setting.optimizer_in_backward)
        new_grads = unit.share if stays and unit not in self.reduced else 0
        self.reduced.add(unit)
        # The pool counts even if there is no such stream: gradients do not fit between activations.
        stream = ALL_REDUCE if self.setting.replicate > 1 else REDUCE
        self.add("gradients", last)
        self.add("gradients", output, REDUCE)
        if not (self.setting.gpu or self.alone):
            # gloo reduces a copy of its input.
            self.add("reduced", unit.reduced, REDUCE)
            self.free("reduced", unit.reduced, REDUCE)
        self.add("gradients", cast, stream)
        self.free("gradients", last)
        if cast:
            self.free("gradients", cast - new_grads, stream)
        freed = output if cast else output - new_grads
        self.free("gradients", freed, REDUCE)
        if stream == ALL_REDUCE and (cast or not stays or self.setting.separates):
            # FSDPParamGroup._all_reduce_state keeps the all-reduced tensor until the backward ends. Else that
            # tensor becomes the gradient itself, with the sum of earlier micro-batches: see `reduces_once`.
            self.add("all-reduced", freed, REDUCE)


def forward(replay: Replay, units: tuple, trace: Trace | None) -> None:
    """A forward with head and loss. trace: None for a few tokens, whose activations are negligible."""
    root, tables, blocks, head, towers = units
    reshards = replay.setting.reshard_after_forward
    for unit in (root, *tables):
        replay.unshard(unit, forward=True)
    if trace:
        replay.compute(trace.embedding)
    for table in tables[head is None :] if reshards else ():  # a tied embedding is the head too
        replay.reshard(table)
    if trace and trace.pictures:
        trace.pictures.forward(replay, towers)
    for k, unit in enumerate(blocks):
        replay.unshard(unit, forward=True)
        if head and unit is blocks[-1] and not replay.alone:
            replay.fetch(head)  # set_modules_to_forward_prefetch
        if trace:
            replay.compute(trace.blocks[trace.kinds[k]])
        if reshards and unit is not blocks[-1]:
            replay.reshard(unit)
    replay.phase = "loss"
    if head:
        replay.unshard(head, forward=True)
    if trace:
        replay.compute(trace.loss, part="loss")
    replay.drop_buffer()  # FSDPState._post_forward


def step_peak(units: tuple, states: States, setting: Setting, trace: Trace) -> Peak:
    """The peak of a step on the fullest rank, from the second step on, when the optimizer has its state.

    units: from units_of, for a setting with the same shards, dtype and offload.
    """
    replay = Replay(states, setting)
    root, tables, blocks, head, towers = units
    if trace.pictures:
        replay.add("pictures", trace.pictures.bytes)
    micro_batches = min(setting.grad_accum + setting.separates, 3)  # the others are like the second
    for i in range(micro_batches):
        sync = setting.sync_each_microbatch or i == micro_batches - 1
        replay.phase = "forward"
        if setting.activation_offload:  # one input on its way to the host, or back
            replay.add("activations", trace.input_bytes)
        forward(replay, units, trace)
        replay.phase = "backward"
        replay.compute(trace.loss_back, (head or tables[0]).grads)
        if head:
            replay.reduce(head, sync)
        for k, unit in reversed(list(enumerate(blocks))):
            replay.unshard(unit, forward=False)
            if k and not replay.alone:
                replay.fetch(blocks[k - 1])
            replay.compute(trace.blocks_back[trace.kinds[k]], unit.grads)
            replay.reduce(unit, sync)
        if trace.pictures:
            trace.pictures.backward(replay, towers, sync)
        replay.compute(
            trace.embedding_back, sum(unit.grads for unit in (root, *tables[head is None :]))
        )
        for unit in (root, *tables):
            replay.reduce(unit, sync)
        replay.free("reduced")
        replay.free("activations")
        replay.free("all-reduced", stream=REDUCE)
    return replay.peak  # the fused optimizer needs no more memory


# --- the reserves, and the answers

FITS = "fits"
TIGHT = "fits tightly"
MAYBE = "may not fit"
TOO_LARGE = "does not fit"
WHY_TIGHT = "the allocator must give blocks back, or the driver move paged moments, in each step"

# The reserve above the live bytes: the CUDA context, cuBLAS, and with several GPUs NCCL. In 224 published
# runs on A100 (foundation-model-stack/fms-acceleration, benchmark results of its FSDP and Liger plugins) the
# memory in nvidia-smi less what torch had allocated was never below 0.92 GiB on one GPU, 3.5 GiB on two,
# some of it cache.
MUST_BYTES_ALONE = GIB
MUST_BYTES_OF_SEVERAL = 3 * GIB
# The slack on the pools, without weights and optimizer, which are never freed; and bytes on top, with CUDA's
# context. Both cover six of six published runs of FSDP2 with expandable segments (configs/README.md).
POOLS_SLACK = 1.11
POOLS_BYTES = 9 * GIB // 4
# In most published runs the plan's own error was up to 3 %: a run that needs more than this share may fail.
SURE = 0.97
# The least share of the live bytes that a compiled step needs: 0.85 to 0.96 in published runs.
COMPILED = 0.85
# An assumption: host memory of a process that uses a GPU.
PROCESS_BYTES = 2 * GIB
# On top of the states: loading.CHUNK and, on a CPU, saving.CHUNK elements, and imports of a save.
LOAD_BYTES = 8 * MIB
SAVE_BYTES = 48 * MIB
# On a CPU glibc keeps much of the freed memory: 1.42 to 1.68 times the live bytes were measured, but 2.0 to
# 2.3 times with layers of 27 MiB (configs/README.md). The bytes on top are for modules that are imported
# later, and for threads.
HOST_SLACK = 1.6
HOST_BYTES = 256 * MIB


class Need(NamedTuple):
    """What a rank needs. peak: None if the model cannot be traced, for the reason `why`. device: bytes that
    must be available. host: bytes on the host. acts: peak bytes on the device by act, without a reserve.
    """

    states: States
    peak: Peak | None
    why: str
    device: int
    comfortable: int
    host: int
    acts: dict

    def sentence(self) -> str:
        """The line that the plan prints."""
        if not self.peak:
            return (
                f"memory    {sum_of(self.states._asdict())} on the fullest rank (states only, no activations,"
                f" no gathered layers); {self.why}"
            )
        text = f"memory    {sum_of(self.peak.parts)} on the fullest rank, in the {self.peak.phase}"
        if self.acts["load"] > self.peak.total:
            text += f"; {self.acts['load'] / GIB:.2f} GiB in the act load"
        return text


class Room(NamedTuple):
    """Bytes for each rank's device, bytes of the host for all ranks of a machine, and both in words."""

    device: float
    host: float
    text: str


# --- what a setting needs

cached_record = lru_cache(maxsize=256)(record_step)


@lru_cache(maxsize=256)
def sizes_of(setting: Setting) -> tuple:
    """(the states, the units of units_of, bytes on the host for offloaded states), which do not depend on the
    rows. Offloaded weights and gradients are in page-locked memory.

    setting: reduced to at most two rows of one token and to defaults where they do not change the sizes, so
    that more settings share a cache entry.
    """
    model = planned_model(setting)
    states = estimate_states(model, setting.shards, optimizer=setting.optimizer)
    offloaded_bytes = states.optimizer + sum(
        pinned_bytes(share_numel(p, setting.shards) * p.element_size()) * (1 + p.requires_grad)
        for p in model.parameters()
    )
    states = states._replace(weights=states.weights + setting.frozen_bytes)
    return states, units_of(model, setting), offloaded_bytes


def trace_of(setting: Setting) -> Trace:
    """The memory of the activations in a step with this setting."""

    def traced(batch, seq_len, scaled=int):
        return cached_record(
            planned_model(setting),
            setting.dtype,
            batch,
            seq_len,
            setting.masked,
            setting.activation_checkpointing,
            setting.repeats_keys,
            setting.activation_offload,
            setting.pictures,
            setting.gpu,
        )(scaled=scaled)

    shape = (min(setting.rows or setting.batch_size, setting.batch_size), setting.seq_len)
    trace = setting.scaling(traced, *shape) if setting.scaling else traced(*shape)
    if setting.pictures:
        _, before = setting.pictures.trace(
            planned_model(setting), setting.dtype, *shape, setting.activation_checkpointing
        )
        trace = trace._replace(pictures=before)
    return trace


def need_of(setting: Setting) -> Need:
    """What a rank needs of its device and of the host."""
    on_host = not setting.gpu
    if on_host:  # the device is the host
        setting = replace(setting, cpu_offload=False, activation_offload=False)
    states, units, offloaded_bytes = sizes_of(
        replace(
            setting,
            batch_size=1,
            rows=min(2, setting.grad_accum),
            seq_len=1,
            reshard_after_forward=True,
            activation_checkpointing="none",
            scaling=None,
        )
    )
    copy_bytes = states.gradients + states.optimizer if setting.async_save else 0
    peak = None
    why = ""
    inputs_bytes = 0  # blocks' inputs on the host
    paged_bytes = 0
    if setting.gpu and not setting.cpu_offload and "paged" in setting.optimizer:
        # The driver moves the moments to the host if it must, and torch does not count them.
        paged_bytes = states.optimizer
        states = states._replace(optimizer=0)
    try:
        trace = trace_of(setting)
        peak = step_peak(units, states, setting, trace)
        if setting.activation_offload:
            inputs_bytes = len(trace.kinds) * pinned_bytes(trace.input_bytes)
    except Exception as error:  # a model is someone else's program
        why = f"its blocks cannot be traced: {escaped(reason_of_others(error))[:150]}"
    model = planned_model(setting)
    # all weights, unsharded, in their own dtypes
    stored_bytes = 0 if setting.low_cpu_fsdp else sum(p.nbytes for p in model.parameters())
    on_device = States(0, 0, 0) if setting.cpu_offload else states
    steady = on_device.weights + on_device.optimizer
    load = on_device.weights + LOAD_BYTES
    train = peak.total if peak else steady + on_device.gradients
    save = steady
    if on_host:
        load += stored_bytes
        train += copy_bytes
        save += copy_bytes + SAVE_BYTES
    if not getattr(model, "full_logits", True):
        # settle_chunked_loss: two forwards of a few tokens, without optimizer states.
        replay = Replay(States(states.weights, 0, 0), setting)
        forward(replay, units, None)
        forward(replay, units, None)
        load = max(load, replay.peak.total)
    acts = {"load": load, "train": train, "save": save}
    if setting.compile and peak:  # only the activations of the layers can shrink
        train = max(int(train * COMPILED), train - peak.parts["activations"])
    alive = max(load, train, save)
    must = must_bytes(alive, setting.shards * setting.replicate, setting.gpu)
    if on_host:
        return Need(states, peak, why, must, must, must, acts)
    pools = max(alive, sum(peak.pools.values()) if peak else 0)
    comfortable = max(must, comfortable_bytes(pools, steady)) + paged_bytes
    host = PROCESS_BYTES + copy_bytes + inputs_bytes + stored_bytes + paged_bytes
    if setting.cpu_offload:
        host += offloaded_bytes + setting.frozen_bytes
    return Need(states, peak, why, must, comfortable, host, acts)


def pinned_bytes(size: int) -> int:
    """Bytes of the page-locked block for `size` bytes: a power of two (torch's CachingHostAllocator)."""
    return 1 << (size - 1).bit_length()


def must_bytes(alive: int, ranks: int, gpu: bool) -> int:
    """Bytes that must be available on a rank's device for a peak of `alive` bytes: with the reserve."""
    if not gpu:
        return int(alive * HOST_SLACK) + HOST_BYTES
    return alive + (MUST_BYTES_ALONE if ranks == 1 else MUST_BYTES_OF_SEVERAL)


def comfortable_bytes(pools: int, steady: int) -> int:
    """Comfortable bytes of a GPU. pools: the sum of the pools' peaks; steady: bytes in it that are never
    freed.
    """
    return steady + int((pools - steady) * POOLS_SLACK) + POOLS_BYTES


# --- whether that fits


def answer_of(setting: Setting, need: Need, room: Room) -> str:
    """FITS, TIGHT, MAYBE or TOO_LARGE."""
    if need.device > room.device or need.host * setting.local_ranks > room.host:
        return TOO_LARGE
    if setting.gpu and need.device > SURE * room.device:
        return MAYBE
    return TIGHT if need.comfortable > room.device else FITS
