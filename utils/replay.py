"""A step of training on meta, unit by unit in FSDP2's own order, to find where the most is alive.

What FSDP2 gathers, keeps and reduces, and when, follows torch/distributed/fsdp/_fully_shard:
_fsdp_param_group.py and _fsdp_collectives.py. What the blocks hold meanwhile comes from trace.py.
"""

from collections import Counter
from dataclasses import dataclass

from torch import nn

from .memory import Peak, Setting, States
from .sharding import decoder_layers
from .trace import Segment, Trace


@dataclass(frozen=True)
class Unit:
    """Bytes of what FSDP2 gathers together."""

    gathered: int  # whole and padded, in the dtype that it is gathered in
    copied: int  # this rank's share in that dtype, where it is stored in another, or on the host
    grads: int  # its whole gradients, in that dtype
    reduced: int  # the same, padded, in fp32: what is reduced
    share: int  # this rank's share of them, as it is kept
    last: int  # the last parameter's whole gradients, which a loop's variable in foreach_reduce holds on to


def units_of(model: nn.Module, setting: Setting) -> tuple[Unit, Unit, list[Unit], Unit | None]:
    """(the rest, the embedding, the blocks, the head) as sharding.shard_model forms them. A tied head is in
    one unit with the embedding, and None here.
    """
    layers = list(decoder_layers(model))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    parts = [embedding, *layers] + ([] if embedding.weight is head.weight else [head])
    own = {parameter for part in parts for parameter in part.parameters()}
    rest = _unit([parameter for parameter in model.parameters() if parameter not in own], setting)
    first, *others = (_unit(list(part.parameters()), setting) for part in parts)
    return rest, first, others[: len(layers)], others[-1] if len(others) > len(layers) else None


def _unit(parameters: list[nn.Parameter], setting: Setting) -> Unit:
    gathered = copied = grads = reduced = share = last = 0
    for p in parameters:
        mine = -(-p.shape[0] // setting.shards) * p[0].numel()
        casts = p.is_floating_point() and p.dtype != setting.dtype
        size = setting.dtype.itemsize if casts else p.element_size()
        gathered += mine * setting.shards * size
        copied += mine * size if casts or setting.cpu_offload else 0
        if p.requires_grad:
            last = p.numel() * size
            grads += last
            reduced += mine * setting.shards * 4
            share += mine * p.element_size()
    return Unit(gathered, copied, grads, reduced, share, last if setting.shards > 1 else 0)


class Replay:
    """What is alive, by part, and when it was most: the verbs are those of an FSDPParamGroup."""

    def __init__(self, states: States, setting: Setting):
        self.live, self.setting, self.peak, self.phase = Counter(), setting, Peak("", {}), ""
        self.open: set[str] = set()  # units that are gathered
        self.fetched: dict[str, int] = {}  # unit -> bytes of an all-gather that is not yet copied out
        self.kept_buffer = 0  # of the last all-gather that was
        self.deferred: dict[str, int] = {}  # unit -> bytes of gradients that wait for the last micro-batch
        self.reduced: set[str] = set()  # units whose share of the gradients is there
        if not setting.cpu_offload:
            self.live.update(weights=states.weights, optimizer=states.optimizer)

    def add(self, part: str, size: int) -> None:
        self.live[part] += size
        if self.live.total() > self.peak.total:
            self.peak = Peak(self.phase, dict(self.live))

    def compute(self, segment: Segment, without: int = 0, part="activations") -> None:
        """Run a segment; `without`: the gradients in its rest, which are counted by themselves."""
        self.add(part, segment.peak)
        self.live[part] -= segment.peak
        self.add("activations", segment.rest - without)
        self.add("whole gradients", without)

    def fetch(self, name: str, unit: Unit) -> None:
        """Begin an all-gather. On one rank there is none."""
        if name not in self.open and name not in self.fetched:
            self.fetched[name] = unit.gathered if self.setting.shards > 1 else 0
            self.add("buffers", self.fetched[name] + unit.copied)
            self.live["buffers"] -= unit.copied

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
        self.live["buffers"] -= self.kept_buffer
        self.kept_buffer = 0

    def reshard(self, name: str, unit: Unit) -> None:
        if name in self.open:
            self.open.remove(name)
            self.live["gathered"] -= unit.gathered

    def reduce(self, name: str, unit: Unit, sync: bool) -> None:
        """The backward of a unit is done. The input of a reduce-scatter lives until the next one begins."""
        self.reshard(name, unit)
        waiting = self.deferred.pop(name, 0)
        if waiting:  # this micro-batch's are added to them
            self.live["whole gradients"] -= unit.grads
        if not sync:
            fp32 = unit.grads // self.setting.dtype.itemsize * 4
            if not waiting:
                self.add("whole gradients", fp32 if fp32 > unit.grads else 0)
                self.live["whole gradients"] -= unit.grads if fp32 > unit.grads else 0
            self.deferred[name] = fp32
            return
        self.live["reduced"] = 0
        self.add("reduced", unit.reduced)
        self.live["whole gradients"] -= waiting or unit.grads
        output = unit.reduced // self.setting.shards
        new = 0 if name in self.reduced or self.setting.cpu_offload else unit.share
        more = max(new, output) + unit.last  # what is reduced becomes the gradient, or is added or cast
        self.add("gradients", more)
        self.live["gradients"] -= more - new
        self.reduced.add(name)


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
        replay.live["reduced"] = replay.live["activations"] = 0
    replay.phase = "optimizer"  # fused, it needs nothing more
    replay.add("optimizer", 0)
    return replay.peak


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
