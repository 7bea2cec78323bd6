"""Learners and generators: some ranks of a torchrun job learn, the others generate. This module assigns the
roles, and sends the trained weights from the learners to the generators.

Weights are sent parameter by parameter, in the dtype that the generators store. A learner sends each
generator only the rows that are in both their shards. So no row is sent twice, and no rank gathers a
parameter. With adapters, only the adapters are sent. Another inference engine would replace `load_weights`
and consume `receive_weights`, with all rows of each parameter as its shard.

Generators store adapters in the compute dtype, in which FSDP gathers those of the learners. So both compute
the same log-probabilities, and the ratio of policies is 1.

Between GPUs, NCCL moves the rows, over one communicator of all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..model.loading import is_writer, local, local_box, whole
from ..run.distributed import (
    BACKENDS,
    World,
    all_gather,
    all_reduce_sum,
    broadcast,
    patience,
    set_timeout,
)
from ..run.errors import ConfigError, check, story
from ..run.signals import stop_after_step, stop_asked
from .rollout import Completion


class Roles(NamedTuple):
    """The ranks of a job: the learners come first, then the generators."""

    learns: bool  # whether this rank learns; else it generates
    own: World  # the ranks with the role of this rank
    joint: World  # all ranks
    learners: int  # number of learners


class Weight(NamedTuple):
    """A parameter that is sent."""

    name: str
    shape: torch.Size
    dtype: torch.dtype  # on the generators
    rows: list[slice]  # for each rank: the rows that a learner sends, or that a generator stores


def divide_world(world: World, generate_ranks: int) -> Roles:
    """Assign the roles: the last `generate_ranks` ranks generate, the others learn. Every rank calls it once.
    NCCL is initialized by the first tensors that are sent.

    Errors raised within `own` name ranks of `own`, and only rank 0 of the job prints agreed errors. So code
    that may fail on a generator must run in `together(joint)`. Raises ConfigError if there would be no
    learner or no generator.
    """
    learners = world.size - generate_ranks
    check(
        0 < generate_ranks < world.size,
        f"--generate_ranks {generate_ranks} of {world.size} ranks: each rank learns or generates"
        " (fix: fewer, or torchrun with more ranks)",
    )
    backend = BACKENDS[world.device.type]
    if world.on_gpu:  # the default group is gloo
        world = world._replace(group=dist.new_group(backend=backend))
    group, _ = dist.new_subgroups_by_enumeration(
        [range(learners), range(learners, world.size)], backend=backend
    )
    set_timeout()  # torch gives new groups 30 minutes
    own = world._replace(rank=group.rank(), size=group.size(), group=group)
    return Roles(world.rank < learners, own, world, learners)


def plan_weights(model: nn.Module, roles: Roles) -> list[Weight]:
    """The parameters to send: those that the learners train. Tied parameters, and the replicas of HSDP, are
    sent once. The generators must have the same model with the same adapters, so that names and shapes agree.

    Every rank calls it, with its model sharded, before weights are sent for the first time.
    """
    held = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not roles.learns:
            boxes = local_box(parameter, whole(name, parameter))
            # no rows if another learner sends the same ones
            takes_part = not roles.learns or is_writer(parameter, roles.own)
            rows = boxes[1][0] if boxes and takes_part else slice(0, 0)
            held[name] = (parameter.shape, parameter.dtype, rows)
    # Before point-to-point transfers among some ranks, NCCL needs a collective of all ranks.
    dist.all_reduce(torch.zeros(1, device=roles.joint.device), group=roles.joint.group)
    of_ranks = all_gather(held, roles.joint)
    return [
        Weight(name, *of_ranks[-1][name][:2], [of_rank[name][-1] for of_rank in of_ranks])
        for name in of_ranks[0]
    ]


@torch.no_grad()
def send_weights(model: nn.Module, weights: list[Weight], roles: Roles) -> None:
    """Send this learner's rows to the generators, which must call receive_weights. All units must be sharded,
    none left gathered by a forward.

    Memory: one shard of one parameter, in the generators' dtype.
    """
    all_reduce_sum(0, roles.joint)  # see receive_weights
    parameters = dict(model.named_parameters())
    for weight in weights:
        shard = local(parameters[weight.name]).to(roles.joint.device, weight.dtype)
        move_rows(dist.isend, shard, weight, range(roles.learners, roles.joint.size), roles.joint)
        del shard


def receive_weights(weights: list[Weight], roles: Roles) -> Iterator:
    """(name, this generator's rows) of each parameter, as the learners send them. The caller must consume
    all. Waits for the learners to send, at most as long as set_timeout allows.

    Memory: the rows of one parameter, if the caller drops them before the next.
    """
    joint = roles.joint
    all_reduce_sum(0, joint)  # wait for the learners here: set_timeout has no effect on irecv
    for weight in weights:
        stored = weight.rows[joint.rank]
        rows = torch.empty(
            (stored.stop - stored.start, *weight.shape[1:]), dtype=weight.dtype, device=joint.device
        )
        move_rows(dist.irecv, rows, weight, range(roles.learners), joint)
        yield weight.name, rows
        del rows


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable) -> None:
    """Copy rows into this generator's model, whole or sharded, in the dtypes of its parameters."""
    parameters = dict(model.named_parameters())
    for name, rows in weights:
        local(parameters[name]).copy_(rows)
        del rows


def move_rows(
    operation: Callable, tensor: Tensor, weight: Weight, peers: range, joint: World
) -> None:
    """Send to, or receive from, each peer the rows that it and this rank have in common. operation:
    dist.isend or dist.irecv. tensor: this rank's rows. Each transfer may take as long as set_timeout allows.
    """
    own = weight.rows[joint.rank]
    transfers = []
    for peer in peers:
        begin = max(own.start, weight.rows[peer].start)
        end = min(own.stop, weight.rows[peer].stop)
        if begin < end:
            part = tensor[begin - own.start : end - own.start]
            transfers.append(dist.P2POp(operation, part, group=joint.group, group_peer=peer))
    backend = (joint.group or dist.group.WORLD)._get_backend(joint.device)
    # NCCL obeys set_timeout by itself. With a timeout here, the host would wait for each transfer.
    timeout = backend.options._timeout * (joint.device.type == "cpu")
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait(timeout)


def ask(*request, model: nn.Module, weights: list[Weight], roles: Roles) -> list[Completion]:
    """Send the current weights to the generators, and let them sample completions. request: (prompts, keys,
    sampling), see rollout.generate. All learners make the same call.
    """
    broadcast(request, roles.joint)
    send_weights(model, weights, roles)
    with patience():
        completions = broadcast(None, roles.joint, source=roles.learners)
    stop_asked(roles.joint.group)  # a signal that only generators received
    return completions


@contextmanager
def generators_end(roles: Roles):
    """Let the generators end when the block ends, also after an error that all learners agreed on. If a
    learner dies or fails alone, torchrun ends the whole job.
    """
    try:
        yield
    except ConfigError as error:
        if error.agreed:
            broadcast(None, roles.joint)
        raise
    broadcast(None, roles.joint)
    story.ended = range(roles.learners, roles.joint.size)


def serve(draw: Callable, model: nn.Module, weights: list[Weight], roles: Roles) -> None:
    """On a generator: sample what the learners request, with their weights, until they end. draw: draw_all
    for this model.
    """
    with patience():
        request = broadcast(None, roles.joint)
    stop_after_step()  # from now on a signal stops the learners, which then end the generators
    while request:
        load_weights(model, receive_weights(weights, roles))
        broadcast(draw(*request), roles.joint, source=roles.learners)
        stop_asked(roles.joint.group)
        with patience():  # the learners may also save
            request = broadcast(None, roles.joint)
