"""A step of training on meta, unit by unit in FSDP2's own order, to find where the most is alive.

What FSDP2 gathers, keeps and reduces, and when, follows torch/distributed/fsdp/_fully_shard:
_fsdp_param_group.py and _fsdp_collectives.py. What the blocks hold meanwhile comes from trace.py.
"""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..model.pieces import rows_of_full_shard
from ..model.sharding import decoder_layers, kept_in_fp32
from .states import Peak, Setting, States
from .trace import Segment, Trace


@dataclass(frozen=True)
class Unit:
    """Bytes of what FSDP2 gathers together."""

    gathered: int  # whole and padded, in the dtype that it is gathered in
    copied: int  # this rank's share in that dtype, where it is stored in another, or on the host
    grads: int  # its whole gradients, in that dtype
    reduced: int  # the same, padded, in fp32: what is reduced
    share: int  # this rank's share of them, as it is kept
    # the last parameter's whole gradients, which a loop's variable in foreach_reduce holds on to
    last: int


def units_of(model: nn.Module, setting: Setting) -> tuple[Unit, Unit, list[Unit], Unit | None]:
    """(the rest, the embedding, the blocks, the head) as sharding.shard_model forms them. A tied head is in
    one unit with the embedding, and None here.
    """
    layers = list(decoder_layers(model))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [embedding, *layers] + ([] if embedding.weight is head.weight else [head])
    kept = {model.get_parameter(name) for name in kept_in_fp32(model, setting.dtype)}
    own = {parameter for part in parts for parameter in part.parameters()}
    rest = _unit(
        [parameter for parameter in model.parameters() if parameter not in own], kept, setting
    )
    first, *others = (_unit(list(part.parameters()), kept, setting) for part in parts)
    return rest, first, others[: len(layers)], others[-1] if len(others) > len(layers) else None


def _unit(parameters: list[nn.Parameter], kept: set[nn.Parameter], setting: Setting) -> Unit:
    """kept: what is gathered in fp32; a unit with such parameters makes all its gradients in fp32."""
    mixed = any(p in kept for p in parameters)
    gathered = copied = grads = reduced = share = last = 0
    for p in parameters:
        mine = rows_of_full_shard(p.shape[0], setting.shards) * p[0].numel()
        dtype = torch.float32 if p in kept else setting.dtype
        casts = p.is_floating_point() and p.dtype != dtype
        size = dtype.itemsize if casts else p.element_size()
        gathered += mine * setting.shards * size
        copied += mine * size if casts or setting.cpu_offload else 0
        if p.requires_grad:
            last = p.numel() * (4 if mixed else size)
            grads += last
            reduced += mine * setting.shards * 4
            share += mine * p.element_size()
    return Unit(gathered, copied, grads, reduced, share, last if setting.shards > 1 else 0)


# The streams that FSDP2 allocates in, each with a pool of its own: all_gather_copy_in_stream in
# foreach_all_gather, reduce_scatter_stream and all_reduce_stream in foreach_reduce. All else is compute's:
# what is gathered, too, and the input of a reduce-scatter.
COMPUTE, GATHER, REDUCE, ALL_REDUCE = "compute", "all-gather", "reduce-scatter", "all-reduce"


class Replay:
    """What is alive, by part, and when it was most: the verbs are those of an FSDPParamGroup."""

    def __init__(self, states: States, setting: Setting):
        self.live, self.setting, self.peak, self.phase = Counter(), setting, Peak("", {}), ""
        self.now = self.most = 0  # bytes of all parts together, and their peak
        self.pools, self.most_of_pools = Counter(), Counter()  # by stream
        self.open: set[str] = set()  # units that are gathered
        # unit -> bytes of an all-gather that is not yet copied out
        self.fetched: dict[str, int] = {}
        self.kept_buffer = 0  # of the last all-gather that was
        # unit -> bytes of gradients that wait for the last micro-batch
        self.deferred: dict[str, int] = {}
        self.reduced: set[str] = set()  # units whose share of the gradients is there
        # on one rank a copy, and no gather
        self.gather_stream = GATHER if setting.shards > 1 else COMPUTE
        if not setting.cpu_offload:
            self.add("weights", states.weights)
            self.add("optimizer", states.optimizer)

    def add(self, part: str, size: int, stream: str = COMPUTE) -> None:
        self.live[part] += size
        self.now += size
        self.pools[stream] += size
        self.most_of_pools[stream] = max(self.most_of_pools[stream], self.pools[stream])
        if self.now > self.most:
            self.most, self.peak = self.now, Peak(self.phase, dict(self.live))

    def free(self, part: str, size: int | None = None, stream: str = COMPUTE) -> None:
        """size None: all of the part."""
        self.add(part, -self.live[part] if size is None else -size, stream)

    def compute(self, segment: Segment, without: int = 0, part="activations") -> None:
        """Run a segment; `without`: the gradients in its rest, which are counted by themselves."""
        self.add(part, segment.peak)
        self.free(part, segment.peak)
        self.add("activations", segment.rest - without)
        self.add("whole gradients", without)

    def fetch(self, name: str, unit: Unit) -> None:
        """Begin an all-gather. On one rank there is none."""
        if name not in self.open and name not in self.fetched:
            self.fetched[name] = unit.gathered if self.setting.shards > 1 else 0
            self.add("buffers", self.fetched[name] + unit.copied, self.gather_stream)
            self.free("buffers", unit.copied, self.gather_stream)

    def unshard(self, name: str, unit: Unit, forward: bool) -> None:
        """In the forward the buffer of an all-gather lives until the next one has arrived."""
        if name in self.open:
            return
        self.fetch(name, unit)
        if forward:
            self.drop_buffer()
        self.add("gathered", unit.gathered)
        self.kept_buffer += self.fetched.pop(name)
        if not forward:
            self.drop_buffer()
        self.open.add(name)

    def drop_buffer(self) -> None:
        self.free("buffers", self.kept_buffer, self.gather_stream)
        self.kept_buffer = 0

    def reshard(self, name: str, unit: Unit) -> None:
        if name in self.open:
            self.open.remove(name)
            self.free("gathered", unit.gathered)

    def reduce(self, name: str, unit: Unit, sync: bool) -> None:
        """The backward of a unit is done. The input of a reduce-scatter lives until the next one begins."""
        self.reshard(name, unit)
        waiting = self.deferred.pop(name, 0)
        if waiting:  # this micro-batch's are added to them
            self.free("whole gradients", unit.grads)
        if not sync:
            fp32 = unit.grads // self.setting.dtype.itemsize * 4
            if not waiting:
                self.add("whole gradients", fp32 if fp32 > unit.grads else 0)
                self.free("whole gradients", unit.grads if fp32 > unit.grads else 0)
            self.deferred[name] = fp32
            return
        self.free("reduced")
        self.add("reduced", unit.reduced)
        self.free("whole gradients", waiting or unit.grads)
        output = unit.reduced // self.setting.shards
        cast = unit.share if unit.share != output else 0  # a copy in the parameters' dtype
        # else added, or copied
        kept = 0 if name in self.reduced or self.setting.cpu_offload else unit.share
        self.reduced.add(name)
        stream = ALL_REDUCE if self.setting.replicate > 1 else REDUCE
        self.add("gradients", unit.last)
        self.add("gradients", output, REDUCE)
        self.add("gradients", cast, stream)
        self.free("gradients", unit.last)
        self.free("gradients", cast - kept if cast else 0, stream)
        rest = output if cast else output - kept
        self.free("gradients", rest, REDUCE)
        if self.setting.replicate > 1:
            # FSDPParamGroup._all_reduce_state keeps what was all-reduced until the whole backward ends.
            # Where it became the gradient itself, that is nothing more.
            self.add("all-reduced", rest, REDUCE)

    def end_backward(self) -> None:
        self.free("reduced")
        self.free("activations")
        self.free("all-reduced", stream=REDUCE)

    def found(self) -> Peak:
        return replace(self.peak, pools=dict(self.most_of_pools))


def step_peak(units: tuple, states: States, setting: Setting, trace: Trace) -> Peak:
    """The peak of a step on the fullest rank, from the second step on, when the optimizer has its state.

    units: of units_of, for a setting of the same shards, dtype and offload.
    """
    replay = Replay(states, setting)
    rest, embedding, blocks, head = units
    named = list(enumerate(blocks))
    end = min(setting.micro_batches, 3)  # the others are like the second
    for i in range(end):
        sync = setting.sync_each_microbatch or i == end - 1
        replay.phase = "forward"
        replay.unshard("rest", rest, True)
        replay.unshard("embedding", embedding, True)
        replay.compute(trace.embedding)
        if head and setting.reshard_after_forward:
            replay.reshard("embedding", embedding)
        for k, unit in named:
            replay.unshard(k, unit, True)
            replay.compute(trace.blocks[trace.kinds[k]])
            if setting.reshard_after_forward and k != len(blocks) - 1:
                replay.reshard(k, unit)
        replay.phase = "loss"
        if head:
            replay.unshard("head", head, True)
        replay.compute(trace.loss, part="loss")
        replay.drop_buffer()
        replay.phase = "backward"
        replay.compute(trace.loss_back, (head or embedding).grads)
        if head:
            replay.reduce("head", head, sync)
        for k, unit in reversed(named):
            replay.unshard(k, unit, False)
            if k:
                replay.fetch(k - 1, blocks[k - 1])
            replay.compute(trace.blocks_back[trace.kinds[k]], unit.grads)
            replay.reduce(k, unit, sync)
        replay.compute(trace.embedding_back, embedding.grads if head else 0)
        replay.reduce("rest", rest, sync)
        replay.reduce("embedding", embedding, sync)
        replay.end_backward()
    replay.phase = "optimizer"  # fused, it needs nothing more
    replay.add("optimizer", 0)
    return replay.found()


def forward_peak(units: tuple, states: States, setting: Setting) -> int:
    """The most bytes in a forward of few tokens, and in one more, before there is an optimizer: so the loss
    is checked when the weights are there.
    """
    replay = Replay(States(states.weights, 0, 0), setting)
    rest, embedding, blocks, head = units
    named = [("rest", rest), ("embedding", embedding), *enumerate(blocks)]
    kept = {"rest", len(blocks) - 1} | ({"embedding"} if head is None else set())
    for name, unit in 2 * [*named, *([("head", head)] if head else [])]:
        replay.unshard(name, unit, True)
        if setting.reshard_after_forward and name not in kept | {"head"}:
            replay.reshard(name, unit)
    return replay.peak.total
