"""Replay a training step unit by unit, in FSDP2's own order, to find its peak memory.

What FSDP2 gathers, keeps and reduces, and when, follows torch/distributed/fsdp/_fully_shard:
_fsdp_param_group.py and _fsdp_collectives.py. The memory of activations comes from trace.py.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..model import sharding
from .states import Peak, Setting, States, share_numel
from .trace import Segment, Trace


@dataclass(eq=False)
class Unit:
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


def units_of(
    model: nn.Module, setting: Setting
) -> tuple[Unit, Unit, list[Unit], Unit | None, list[Unit]]:
    """(the rest, the embedding, the blocks, the head, the layers of towers), as sharding.units forms them. A
    tied head shares the embedding's unit, and is None here.
    """
    layers = sharding.decoder_layers(model)
    towers = setting.pictures.towers(model) if setting.pictures else []
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    in_fp32 = sharding.fp32_modules(model, setting.dtype)
    # Modules that are gathered in fp32, in units of their own, count as part of the unit around them.
    kept = {p for module in in_fp32 for p in module.parameters()}
    plain = set()  # see sharding.stored_as_computed
    alone = setting.shards == 1
    if alone and setting.replicate == 1 and not setting.cpu_offload:
        found = [sharding.Unit(in_fp32, torch.float32), sharding.Unit([model], setting.dtype)]
        plain = sharding.stored_as_computed(found, setting.grad_accum > 1)

    def unit_of(parameters: Iterable[nn.Parameter]) -> Unit:
        unit = Unit()
        for p in parameters:
            own_numel = share_numel(p, setting.shards)
            padded_numel = 0 if p in plain else own_numel * setting.shards
            dtype = torch.float32 if p in kept else setting.dtype
            is_cast = p.is_floating_point() and p.dtype != dtype
            itemsize = dtype.itemsize if is_cast else p.element_size()
            unit.gathered += padded_numel * itemsize
            copied = own_numel * itemsize * (is_cast or setting.cpu_offload)
            unit.copied = max(copied, unit.copied) if alone else copied + unit.copied
            if is_cast and setting.cpu_offload:
                unit.moved = max(unit.moved, own_numel * p.element_size())
            if p.requires_grad:
                grads = p.numel() * itemsize
                unit.grads += grads
                unit.reduced += padded_numel * 4
                unit.share += own_numel * p.element_size()
                unit.last = 0 if alone else grads
        return unit

    own = {*nn.ModuleList([embedding, head, *layers, *towers]).parameters()}
    is_tied = embedding.weight is head.weight
    first = nn.ModuleList([embedding, head]) if is_tied else embedding
    return (
        unit_of(p for p in model.parameters() if p not in own),
        unit_of(first.parameters()),
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
        self.live_bytes = 0  # of all parts together
        self.most_bytes = 0  # their peak
        self.peak = Peak("", {})
        self.pools = Counter()  # bytes by stream
        self.most_of_pools: dict[str, int] = {}
        self.open: set[Unit] = set()  # units that are gathered
        # unit -> bytes of its all-gather buffer, before it is copied out
        self.fetched: dict[Unit, int] = {}
        self.kept_buffer = 0  # bytes of buffers that are copied out but not freed yet
        # unit -> bytes of whole gradients that wait for the last micro-batch
        self.deferred: dict[Unit, int] = {}
        self.reduced: set[Unit] = set()  # units whose sharded gradients exist
        self.alone = setting.shards == 1  # one rank copies, and gathers nothing
        self.gather_stream = COMPUTE if self.alone else GATHER
        if not setting.cpu_offload:
            self.add("weights", states.weights)
            self.add("optimizer", states.optimizer)

    def add(self, part: str, size: int, stream: str = COMPUTE) -> None:
        self.live[part] += size
        self.live_bytes += size
        self.pools[stream] += size
        self.most_of_pools[stream] = max(self.most_of_pools.get(stream, 0), self.pools[stream])
        if self.live_bytes > self.most_bytes:
            self.most_bytes = self.live_bytes
            self.peak = Peak(self.phase, dict(self.live), self.most_of_pools)

    def free(self, part: str, size: int | None = None, stream: str = COMPUTE) -> None:
        """size None: all bytes of the part."""
        if size is None:
            size = self.live[part]
        self.add(part, -size, stream)

    def compute(self, segment: Segment, without: int = 0, part="activations") -> None:
        """Run a segment. without: bytes of whole gradients in its rest, counted as a part of their own."""
        self.add(part, segment.peak)
        self.free(part, segment.peak)
        self.add("activations", segment.rest - without)
        self.add("whole gradients", without)

    def fetch(self, unit: Unit, needed: bool = False) -> None:
        """Begin the all-gather of a unit. A single rank copies its parameters one by one, when needed."""
        if unit in self.open or unit in self.fetched or self.alone and not needed:
            return
        sizes = (unit.copied, unit.moved) if self.alone else (unit.gathered, unit.copied)
        self.fetched[unit], freed = sizes
        self.add("buffers", sum(sizes), self.gather_stream)
        self.free("buffers", freed, self.gather_stream)

    def unshard(self, unit: Unit, forward: bool) -> None:
        """Gather a unit. In the forward the buffer of an all-gather lives until the next one has arrived."""
        if unit in self.open:
            return
        self.fetch(unit, needed=True)
        if forward:
            self.drop_buffer()
        self.add("gathered", unit.gathered)
        self.kept_buffer += self.fetched.pop(unit)
        if self.alone or not forward:
            self.drop_buffer()
        self.open.add(unit)

    def drop_buffer(self) -> None:
        self.free("buffers", self.kept_buffer, self.gather_stream)
        self.kept_buffer = 0

    def reshard(self, unit: Unit) -> None:
        if unit in self.open:
            self.open.remove(unit)
            self.free("gathered", unit.gathered)

    def reduce(self, unit: Unit, sync: bool) -> None:
        """Reshard a unit after its backward, and reduce its gradients. The input of a reduce-scatter lives
        until the next one begins.
        """
        self.reshard(unit)
        waiting = self.deferred.pop(unit, 0)
        if waiting:  # the gradients of this micro-batch are added to them
            self.free("whole gradients", unit.grads)
        if sync or not unit.reduced:
            self.free("reduced")
            self.add("reduced", unit.reduced)
            self.free("whole gradients", waiting or unit.grads)
            self.reduce_scatter(unit)
            return
        in_fp32 = unit.grads // self.setting.dtype.itemsize * 4
        if in_fp32 > unit.grads and not waiting:
            self.add("whole gradients", in_fp32)
            self.free("whole gradients", unit.grads)
        self.deferred[unit] = in_fp32

    def reduce_scatter(self, unit: Unit) -> None:
        """The output of a reduce-scatter: it becomes the unit's gradients, or is added to them."""
        output = unit.reduced // self.setting.shards
        cast = unit.share if unit.share != output else 0  # a copy in the parameters' dtype
        keeps = not (self.setting.cpu_offload or self.setting.optimizer_in_backward)
        kept = unit.share if keeps and unit not in self.reduced else 0
        self.reduced.add(unit)
        has_replicas = self.setting.replicate > 1
        # also without a stream of its own, since gradients do not fit between activations
        stream = ALL_REDUCE if has_replicas else REDUCE
        self.add("gradients", unit.last)
        self.add("gradients", output, REDUCE)
        if not self.setting.gpu and self.setting.shards > 1:
            # gloo reduces a copy of its input.
            self.add("reduced", unit.reduced, REDUCE)
            self.free("reduced", unit.reduced, REDUCE)
        self.add("gradients", cast, stream)
        self.free("gradients", unit.last)
        if cast:
            self.free("gradients", cast - kept, stream)
        freed = output if cast else output - kept
        self.free("gradients", freed, REDUCE)
        if has_replicas:
            # FSDPParamGroup._all_reduce_state keeps the all-reduced tensor until the whole backward ends. If
            # that tensor became the gradient itself, it needs no more memory.
            self.add("all-reduced", freed, REDUCE)


def forward(replay: Replay, units: tuple, trace: Trace | None) -> None:
    """A forward up to the head. trace: None for a few tokens, whose activations are negligible."""
    rest, embedding, blocks, head, towers = units
    reshards = replay.setting.reshard_after_forward
    replay.unshard(rest, True)
    replay.unshard(embedding, True)
    if trace:
        replay.compute(trace.embedding)
    if head and reshards:
        replay.reshard(embedding)
    if trace and trace.pictures:
        trace.pictures.forward(replay, towers)
    for k, unit in enumerate(blocks):
        replay.unshard(unit, True)
        if head and unit is blocks[-1]:
            replay.fetch(head)  # set_modules_to_forward_prefetch
        if trace:
            replay.compute(trace.blocks[trace.kinds[k]])
        if reshards and unit is not blocks[-1]:
            replay.reshard(unit)
    replay.phase = "loss"
    if head:
        replay.unshard(head, True)


def step_peak(units: tuple, states: States, setting: Setting, trace: Trace) -> Peak:
    """The peak of a step on the fullest rank, from the second step on, when the optimizer has its state.

    units: from units_of, for a setting with the same shards, dtype and offload.
    """
    replay = Replay(states, setting)
    rest, embedding, blocks, head, towers = units
    if trace.pictures:
        replay.add("pictures", trace.pictures.bytes)
    micro_batches = min(setting.grad_accum, 3)  # the others are like the second
    for i in range(micro_batches):
        sync = setting.sync_each_microbatch or i == micro_batches - 1
        replay.phase = "forward"
        if setting.activation_offload:  # one input on its way to the host, or back
            replay.add("activations", trace.input_bytes)
        forward(replay, units, trace)
        replay.compute(trace.loss, part="loss")
        replay.drop_buffer()
        replay.phase = "backward"
        replay.compute(trace.loss_back, (head or embedding).grads)
        if head:
            replay.reduce(head, sync)
        for k, unit in reversed(list(enumerate(blocks))):
            replay.unshard(unit, False)
            if k:
                replay.fetch(blocks[k - 1])
            replay.compute(trace.blocks_back[trace.kinds[k]], unit.grads)
            replay.reduce(unit, sync)
        if trace.pictures:
            trace.pictures.backward(replay, towers, sync)
        replay.compute(trace.embedding_back, embedding.grads if head else 0)
        replay.reduce(rest, sync)
        replay.reduce(embedding, sync)
        replay.free("reduced")
        replay.free("activations")
        replay.free("all-reduced", stream=REDUCE)
    return replay.peak  # the fused optimizer needs no more memory


def check_peak(units: tuple, states: States, setting: Setting) -> int:
    """Peak bytes of the loss check after loading: two forwards of a few tokens, without optimizer states."""
    replay = Replay(States(states.weights, 0, 0), setting)
    forward(replay, units, None)
    forward(replay, units, None)
    return replay.peak.total
