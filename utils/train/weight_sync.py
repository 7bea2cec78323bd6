"""Of the ranks of one torchrun some learn and the others generate: who is what, and how the weights that
train travel from those to these.

They travel parameter by parameter, in the dtype that the generators store. Each learner sends the rows that
its shard and a generator's have in common straight to that generator, so nothing travels twice, and no rank
gathers a parameter. With adapters only these travel. Another engine would take `receive_weights`, with all
rows of each parameter as its part, in place of `load_weights`.

A generator has its adapters in the dtype of compute, in which FSDP gathers those of the learners: then both
compute the same log-probabilities, and the ratio of policies is 1.

Between GPUs NCCL carries the rows, over one communicator of all ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ..model.pieces import is_writer, local, local_box, whole
from ..run.distributed import (
    BACKENDS,
    START_SECONDS,
    World,
    all_reduce_sum,
    broadcast,
    gather,
    set_timeout,
)
from ..run.errors import ConfigError, check
from ..run.signals import stop_after_step
from .rollout import Completion


class Roles(NamedTuple):
    """The ranks of a job: the learners come first, then the generators."""

    learns: bool  # this rank; else it generates
    own: World  # the ranks that do the same as this one
    joint: World  # all ranks
    learners: int  # how many


class Weight(NamedTuple):
    """A parameter that travels."""

    name: str
    shape: torch.Size
    dtype: torch.dtype  # of the generators
    rows: list[slice]  # of each rank: what a learner sends, and what a generator stores


def divide_world(world: World, generate_ranks: int) -> Roles:
    """The last `generate_ranks` ranks generate, the others learn. Every rank calls it, once. NCCL begins with
    the first tensors.

    Errors within `own` name ranks of it, and only rank 0 of all prints what ranks agree on: what may fail on
    a generator belongs in `together(joint)`. Raises ConfigError where nobody would learn or generate.
    """
    learners = world.size - generate_ranks
    text = f"--generate_ranks {generate_ranks} of {world.size} ranks: each rank learns or generates"
    fix = (
        f"1 to {world.size - 1}, or more ranks" if world.size > 1 else "torchrun --nproc_per_node 2"
    )
    check(0 < generate_ranks < world.size, f"{text} (fix: {fix})")
    backend = BACKENDS[world.device.type]
    if world.device.type == "cuda":  # the default group cannot move tensors of GPUs
        world = replace(world, group=dist.new_group(backend=backend))
    kinds = [range(learners), range(learners, world.size)]
    group, _ = dist.new_subgroups_by_enumeration(kinds, backend=backend)
    set_timeout()  # torch gives new groups 30 minutes
    learns = world.rank < learners
    own = replace(world, rank=group.rank(), size=group.size(), group=group)
    return Roles(learns, own, world, learners)


def plan_weights(model: nn.Module, roles: Roles) -> list[Weight]:
    """What travels from now on: the parameters that train on the learners, a tied one once, copies of HSDP
    once. The generators' model is of the same source, with the same adapters: names and shapes are equal.

    Every rank calls it, with its model sharded, before the first weights travel.
    """
    held = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or not roles.learns:
            boxes = local_box(parameter, whole(name, parameter))
            # none where another learner sends the same
            takes_part = not roles.learns or is_writer(parameter, roles.own)
            rows = boxes[1][0] if boxes and takes_part else slice(0, 0)
            held[name] = (parameter.shape, parameter.dtype, rows)
    # Where only some ranks move tensors, NCCL wants a collective of all ranks to have been first.
    dist.all_reduce(torch.zeros(1, device=roles.joint.device), group=roles.joint.group)
    of_ranks = gather(roles.joint, held)
    weights = []
    for name in of_ranks[0]:
        shape, dtype, _ = of_ranks[-1][name]
        weights.append(Weight(name, shape, dtype, [of_rank[name][-1] for of_rank in of_ranks]))
    return weights


@torch.no_grad()
def send_weights(model: nn.Module, weights: list[Weight], roles: Roles) -> None:
    """Send this learner's rows, which all generators receive meanwhile. No forward has left a unit gathered.

    Memory: one shard, in the generators' dtype.
    """
    all_reduce_sum(0, roles.joint)  # see receive_weights
    parameters = dict(model.named_parameters())
    for weight in weights:
        shard = local(parameters[weight.name]).to(roles.joint.device, weight.dtype)
        move_rows(dist.isend, shard, weight, range(roles.learners, roles.joint.size), roles.joint)
        del shard


def receive_weights(weights: list[Weight], roles: Roles) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, this generator's rows) of each parameter, as the learners send them. All are to be taken.
    The first comes when the learners send, however long that takes within set_timeout.

    Memory: one of them, if who takes it lets go of it before the next.
    """
    joint = roles.joint
    all_reduce_sum(0, joint)  # wait for the learners; in irecv set_timeout would have no effect
    for weight in weights:
        stored = weight.rows[joint.rank]
        shape = (stored.stop - stored.start, *weight.shape[1:])
        rows = torch.empty(shape, dtype=weight.dtype, device=joint.device)
        move_rows(dist.irecv, rows, weight, range(roles.learners), joint)
        yield weight.name, rows
        del rows


@torch.no_grad()
def load_weights(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy rows into this generator's model, whole or sharded, in the dtypes that it stores."""
    parameters = dict(model.named_parameters())
    for name, rows in weights:
        local(parameters[name]).copy_(rows)
        del rows


def move_rows(
    operation: Callable, tensor: torch.Tensor, weight: Weight, peers: range, joint: World
) -> None:
    """Send peers the rows that they want of this rank's, or receive those that they have for it. Each may
    take as long as set_timeout says.
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
    # NCCL heeds set_timeout by itself. Given a timeout, it makes the host wait for each transfer.
    timeout = backend.options._timeout * (joint.device.type == "cpu")
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait(timeout)


def ask(*request, model: nn.Module, weights: list[Weight], roles: Roles) -> list[Completion]:
    """The completions that the generators draw with this learner's weights: request is (prompts, keys,
    sampling), see rollout.generate. All learners call it alike.
    """
    broadcast(roles.joint, request)
    send_weights(model, weights, roles)
    return broadcast(roles.joint, None, source=roles.learners)


@contextmanager
def generators_end(roles: Roles) -> Iterator[None]:
    """At the end of the block the generators end, also where the learners agree on an error. Where one of
    them is lost, or fails alone, torchrun ends all.
    """
    try:
        yield
    except ConfigError as error:
        if error.agreed:
            broadcast(roles.joint, None)
        raise
    broadcast(roles.joint, None)


def serve(
    draw: Callable, model: nn.Module, weights: list[Weight], roles: Roles, timeout: float
) -> None:
    """Draw what the learners ask for, with their weights, until they end. draw: draw_all of this model.
    timeout: seconds of a step of the learners, of which the first may take longer.
    """
    set_timeout(max(timeout, START_SECONDS), roles.own.group)
    while True:
        request = broadcast(roles.joint, None)
        stop_after_step()  # from now on a signal stops the learners, and they end this
        if request is None:
            return
        load_weights(model, receive_weights(weights, roles))
        broadcast(roles.joint, draw(*request), source=roles.learners)
