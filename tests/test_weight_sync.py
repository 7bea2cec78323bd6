"""Weights travel from ranks that learn to ranks that generate: bit for bit, each row once to who stores it,
one parameter at a time; and both kinds of ranks meet among themselves.

python -m pytest tests/test_weight_sync.py
"""

import time
import weakref
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import gathered as full
from ranks import run_ranks
from shards import shard_training
from test_rollout import SAMPLING, asked
from tiny import build_optimizer, tiny_model, tiny_model_folder
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from utils.data.batches import collate
from utils.data.examples import Example
from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import adapt, init_lora
from utils.model.loss import add_chunked_loss, summed_cross_entropy
from utils.model.options import Lora, Quant
from utils.model.sharding import cast_to, units
from utils.run.distributed import (
    ALONE,
    START_SECONDS,
    agree,
    all_gather,
    all_reduce_sum,
    broadcast,
    build_mesh,
    set_timeout,
    sum_on_device,
    together,
)
from utils.run.errors import ConfigError, check
from utils.run.signals import stop_asked
from utils.train.checkpoint import CheckpointSaver
from utils.train.resume import load_checkpoint
from utils.train.rollout import gathered, generate
from utils.train.trained_run import compute_alone
from utils.train.weight_sync import (
    Weight,
    ask,
    divide_world,
    generators_end,
    load_weights,
    move_rows,
    plan_weights,
    receive_weights,
    send_weights,
    serve,
)

divided = cache(divide_world)  # DTensor keeps the groups of the first mesh of some ranks


class Wire(TorchDispatchMode):
    """Bytes that go from rank to rank, and the most bytes of tensors made meanwhile that live at a time."""

    def __init__(self):
        super().__init__()
        self.sent, self.received, self.alive, self.peak, self.others = 0, 0, 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if name in ("c10d::send", "c10d::recv_"):
            moved_bytes = sum(tensor.nbytes for tensor in args[0])
            self.sent += moved_bytes * (name == "c10d::send")
            self.received += moved_bytes * (name == "c10d::recv_")
        elif "c10d" in name:
            self.others.append(name)
        result = function(*args, **(kwargs or {}))
        if name in ("aten::empty", "aten::_to_copy"):
            self.alive += result.nbytes
            self.peak = max(self.peak, self.alive)
            weakref.finalize(result, self.free, result.nbytes)
        return result

    def free(self, freed_bytes):
        self.alive -= freed_bytes


def learn(model, optimizer, vocabulary=1003):
    """Two steps, the same on every learner."""
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, vocabulary, (24,), generator=generator)
        summed_cross_entropy(model, collate([Example(ids, ids, "")], 0, 8)).backward()
        optimizer.step()
        optimizer.zero_grad()


def trained_weights(model):
    return {name: full(p.detach()) for name, p in model.named_parameters() if p.requires_grad}


def learner(roles, kind, dtype, mesh=None):
    model = shard_training(
        add_chunked_loss(tiny_model(kind)), mesh or build_mesh(roles.own), dtype
    ).train()
    optimizer = build_optimizer(model, 1e-2, 0.0)
    return model, optimizer


def generator(roles, kind, dtype, layout):
    """(a model of other weights, its units)"""
    model = tiny_model(kind, dtype, seed=1)
    found = units(model, dtype)
    if layout == "whole":
        return model, []
    return shard_training(model, build_mesh(roles.own), dtype), found


def copy_of(weights, kind, dtype):
    """A plain model of one process with these weights."""
    model = tiny_model(kind, dtype, seed=2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return model


def travel(world, generate_ranks, layout, kind, dtype):
    """What each rank sees of two steps, a transfer, and what is generated then."""
    roles = divided(world, generate_ranks)
    prompts, keys = asked(5)
    if roles.learns:
        model, optimizer = learner(roles, kind, dtype)
    else:
        model, found = generator(roles, kind, dtype, layout)
    weights = plan_weights(model, roles)
    facts = {"learns": roles.learns, "names": [weight.name for weight in weights]}
    wire = Wire()
    if roles.learns:
        learn(model, optimizer)
        with wire:
            send_weights(model, weights, roles)
        facts["weights"] = {n: w.to(dtype) for n, w in trained_weights(model).items()}
        plain = copy_of(facts["weights"], kind, dtype)
        facts["expected"] = generate(plain, prompts, keys, SAMPLING, ALONE)
        drawn = {}
    else:
        with wire:
            load_weights(model, receive_weights(weights, roles))
        facts["weights"] = {n: full(p.detach()) for n, p in model.named_parameters()}
        with gathered(found, True):
            drawn = generate(model, prompts, keys, SAMPLING, roles.own)
        if layout == "sharded":
            lockstep = generate(model, prompts, keys, SAMPLING, roles.own, lockstep=True)
            assert lockstep == drawn
    facts["completions"] = {}
    for found in all_gather(drawn, roles.joint):
        assert not facts["completions"].keys() & found.keys()
        facts["completions"] |= found
    return facts | {"wire": vars(wire)}


ROLES = [(1, 1, "whole"), (1, 2, "whole"), (1, 2, "sharded")]  # learners, generators, layout
ROLES += [(2, 1, "whole"), (2, 2, "whole"), (2, 2, "sharded"), (3, 1, "whole")]
AT_ONCE = {"llama": [ROLES[0], ROLES[2]], "qwen2": ROLES[1:3]}  # the others: make test-all


@pytest.mark.parametrize(
    ("kind", "learners", "generators", "layout"),
    [
        pytest.param(kind, *roles, marks=[] if roles in AT_ONCE[kind] else pytest.mark.slow)
        for kind in AT_ONCE
        for roles in ROLES
    ],
)
def test_generators_have_the_learners_weights_in_bf16(kind, learners, generators, layout):
    dtype = torch.bfloat16
    ranks = run_ranks(travel, learners + generators, generators, layout, kind, dtype)
    senders, receivers = ranks[:learners], ranks[learners:]
    assert [rank["learns"] for rank in ranks] == [True] * learners + [False] * generators
    expected = senders[0]["weights"]
    assert all(rank["names"] == [*expected] for rank in ranks)
    assert ("lm_head.weight" in expected) == (kind == "llama")  # qwen2: tied, and travels once
    for rank in receivers:
        assert rank["weights"].keys() == expected.keys()
        for name, weight in rank["weights"].items():
            assert weight.dtype == dtype
            assert torch.equal(weight, expected[name])
            assert weight.view(torch.int16).sum() == expected[name].view(torch.int16).sum()
    # What is drawn with them.
    for rank in ranks:
        assert dict(sorted(rank["completions"].items())) == {
            i: senders[0]["expected"][i] for i in range(5)
        }
    # What went over the wire: each row once to each generator that stores it, in 2 bytes a number.
    model_bytes = sum(weight.nbytes for weight in expected.values())
    needed_bytes = model_bytes * (generators if layout == "whole" else 1)
    assert sum(rank["wire"]["sent"] for rank in ranks) == needed_bytes
    assert sum(rank["wire"]["received"] for rank in ranks) == needed_bytes
    assert all(rank["wire"]["others"] == ["c10d::allreduce_"] for rank in ranks)  # of 8 bytes
    # Memory above the share of each rank.
    largest_bytes = max(weight.nbytes for weight in expected.values())
    for rank in ranks:
        assert 0 < rank["wire"]["peak"] <= largest_bytes
        assert rank["wire"]["alive"] == 0


def adapted(folder, dtype, mesh=None):
    """A model with adapters beside an 8-bit base; it learns, or, without a mesh, it generates as a whole: its
    adapters are stored in the dtype in which FSDP gathers those that learn.
    """
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    pieces = plan_pieces(model, open_weights(folder), folder)
    lora = Lora(lora_rank=4, lora_alpha=8, lora_targets="all-linear")
    _, names = adapt(model, lora, Quant("8bit"), dtype)
    if mesh:
        shard_training(add_chunked_loss(model), mesh, dtype)
    else:
        compute_alone(model, dtype)
        for parameter in model.parameters():
            cast_to(parameter, dtype if parameter.requires_grad else None)
    load_pieces(model, pieces, torch.device("cpu"), names=names)
    init_lora(model, seed=3)
    return model


def travel_adapters(world, folder, dtype):
    """(adapters, wire, completions before and after, logits after) of each rank."""
    roles, wire = divided(world, 1), Wire()
    prompts, keys = asked(4, vocabulary=271)
    ids = torch.tensor([prompts[0]])
    model = adapted(folder, dtype, build_mesh(roles.own) if roles.learns else None)
    weights = plan_weights(model, roles)
    if roles.learns:
        learn(model.train(), build_optimizer(model, 3e-2, 0.0), 271)
        with wire:
            send_weights(model, weights, roles)
        trained = {name: weight.to(dtype) for name, weight in trained_weights(model).items()}
        with torch.no_grad():
            logits = model.eval()(ids).logits
        model = adapted(folder, dtype)  # of one process
        before = generate(model, prompts, keys, SAMPLING, ALONE)
        load_weights(model, trained.items())
    else:
        before = generate(model, prompts, keys, SAMPLING, roles.own)
        with wire:
            load_weights(model, receive_weights(weights, roles))
        trained = trained_weights(model)
        with torch.no_grad():
            logits = model.eval()(ids).logits
    after = generate(model, prompts, keys, SAMPLING, ALONE)
    return trained, vars(wire), (before, after), logits


@pytest.mark.parametrize("learners", [2, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_adapters_on_an_8_bit_base_only_these_travel(tmp_path, learners, dtype):
    folder = tiny_model_folder(tmp_path / "model", vocab_size=271, intermediate_size=128)
    ranks = run_ranks(travel_adapters, learners + 1, folder, dtype)
    *senders, (loaded, received, completions, logits) = ranks
    for trained, _, expected_completions, learned_logits in senders:
        assert all(".lora_" in name for name in trained)
        assert trained.keys() == loaded.keys()
        for name, weight in loaded.items():
            assert weight.dtype == dtype
            assert torch.equal(weight, trained[name])
        assert completions == expected_completions
        assert torch.equal(logits, learned_logits)  # so the ratio of policies is 1
    before, after = completions
    assert before != after
    adapter_bytes = sum(weight.nbytes for weight in loaded.values())
    assert received["received"] == sum(wire["sent"] for _, wire, *_ in senders) == adapter_bytes
    assert received["peak"] <= max(weight.nbytes for weight in loaded.values())


def copies(world):
    """Two learners have one shard each, the whole."""
    roles = divided(world, 1)
    alone = dist.new_group([world.rank], use_local_synchronization=True)
    wire = Wire()
    if roles.learns:
        groups, ranks = [roles.own.group, alone], [[0], [1]]
        mesh = DeviceMesh.from_group(groups, "cpu", ranks, mesh_dim_names=("replicate", "shard"))
        model, _ = learner(roles, "llama", torch.float32, mesh)
    else:
        model, _ = generator(roles, "llama", torch.float32, "whole")
    weights = plan_weights(model, roles)
    with wire:
        if roles.learns:
            send_weights(model, weights, roles)
        else:
            load_weights(model, receive_weights(weights, roles))
    sums = {name: full(p.detach()).double().sum().item() for name, p in model.named_parameters()}
    return wire.sent, wire.received, sums


def test_of_the_copies_of_hsdp_one_sends():
    first, second, generator = run_ranks(copies, 3)
    assert first[0] == generator[1] > 0
    assert second[0] == 0
    assert first[2] == second[2] == generator[2]


def one_row(world, generate_ranks):
    """Parameters of one row and of one number, which one rank of two holds alone."""
    roles = divided(world, generate_ranks)
    torch.manual_seed(0 if roles.learns else 1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Linear(1, 5))
    fully_shard(model, mesh=build_mesh(roles.own))
    weights = plan_weights(model, roles)
    for _ in range(2):
        if roles.learns:
            send_weights(model, weights, roles)
        else:
            load_weights(model, receive_weights(weights, roles))
    return trained_weights(model)


@pytest.mark.parametrize("generators", [1, 2])
def test_ranks_without_rows_take_part(generators):
    first, *others = run_ranks(one_row, 3, generators)
    for rank in others:
        assert all(torch.equal(rank[name], weight) for name, weight in first.items())


def meet(world, generate_ranks, folder):
    """Both kinds do the same, one after the other, and the others sleep meanwhile."""
    roles = divided(world, generate_ranks)
    own = roles.own
    assert own.local_rank == world.local_rank
    if not roles.learns:
        time.sleep(0.5)
    last = own.size - 1
    found = [
        all_gather(world.rank, own),
        broadcast(world.rank, own, last),
        all_reduce_sum(world.rank, own),
        sum_on_device(torch.tensor(float(world.rank)), build_mesh(own)).item(),
        stop_asked(own.group),
    ]
    errors = []
    try:
        with together(own):
            check(own.rank < last, "a bad row")
    except ConfigError as error:
        errors += error.lines
    try:
        agree(own, {"row": own.rank}, "data")
    except ConfigError as error:
        errors += error.lines
    set_timeout(30, own.group)
    model = torch.nn.Linear(3, 5)
    fully_shard(model, mesh=build_mesh(own))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = full(model.weight.detach()).clone()
    folder = folder / ("learn" if roles.learns else "generate")
    folder.mkdir(exist_ok=True)
    with CheckpointSaver(folder, 0, own) as saver:
        path = saver.save(1, model, optimizer, {})
    with torch.no_grad():
        model.weight.zero_()
    load_checkpoint(path, model, optimizer, own)
    assert torch.equal(full(model.weight.detach()), before)
    return (own.rank, own.size), found, errors


def test_each_kind_meets_alone(tmp_path):
    first, second, generator = run_ranks(meet, 3, 1, tmp_path)
    assert (first[0], second[0], generator[0]) == ((0, 2), (1, 2), (0, 1))
    assert first[1] == second[1] == [[0, 1], 1, 1.0, 1.0, ""]
    assert generator[1] == [[2], 2, 2.0, 2.0, ""]
    assert first[2] == second[2]
    assert first[2][0] == "rank 1: a bad row"
    assert "rank 1: other data than on rank 0" in first[2][1]
    assert generator[2] == ["a bad row"]


def test_two_generators_meet_alone(tmp_path):
    learner, first, second = run_ranks(meet, 3, 2, tmp_path)
    assert (learner[0], first[0], second[0]) == ((0, 1), (0, 2), (1, 2))
    assert first[1] == second[1] == [[1, 2], 2, 3.0, 3.0, ""]
    assert first[2][0] == second[2][0] == "rank 1: a bad row"
    assert learner[1] == [[0], 0, 0.0, 0.0, ""]


def wait_long(world):
    """The generator waits longer than the first timeout, which every rank has then changed."""
    roles = divided(world, 1)
    model = tiny_model("llama", seed=world.rank)
    weights = plan_weights(model, roles)
    set_timeout(0.8)
    set_timeout(30)
    if roles.learns:
        time.sleep(1.6)
        send_weights(model, weights, roles)
    else:
        load_weights(model, receive_weights(weights, roles))
    set_timeout()
    return {name: p.detach().sum().item() for name, p in model.named_parameters()}


def test_a_generator_waits_as_long_as_set_timeout_says():
    sent, received = run_ranks(wait_long, 2)
    assert sent == received


def draw_long(world):
    """A rollout takes longer than ranks wait in a step; so does what the learners do between two."""
    roles = divided(world, 1)
    model = tiny_model("llama", seed=world.rank)
    weights = plan_weights(model, roles)
    set_timeout(2)

    def draw(number):
        time.sleep(4)
        return number + 1

    found = 0
    if roles.learns:
        with generators_end(roles):
            time.sleep(4)
            found = ask(5, model=model, weights=weights, roles=roles)
    else:
        serve(draw, model, weights, roles)
    set_timeout()
    return found


@pytest.mark.slow
def test_learners_and_generators_wait_for_each_other_longer_than_ranks_do_in_a_step():
    assert run_ranks(draw_long, 2) == [6, 0]


def wait_for(world, kind):
    """With which timeout a rank waits for its transfers, which are none here, of tensors on such devices."""
    timeouts = []

    class Transfer:
        def wait(self, timeout):
            timeouts.append(timeout.total_seconds())

    weight = Weight("w", torch.Size([1]), torch.float32, [slice(0, 1)] * 2)
    joint = world._replace(device=torch.device(kind))
    group = SimpleNamespace(_get_backend=lambda device: dist.group.WORLD._get_backend(world.device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "batch_isend_irecv", lambda transfers: [Transfer()] * len(transfers))
        patch.setattr(dist, "P2POp", lambda *args, **kwargs: None)
        move_rows(dist.isend, torch.zeros(1), weight, [1 - world.rank], joint._replace(group=group))
    return timeouts


def test_no_host_waits_for_the_transfers_of_its_gpu():
    """A work of NCCL with a timeout blocks the thread that calls wait, says torch; without one its stream."""
    assert run_ranks(wait_for, 2, "cuda") == [[0], [0]]
    assert run_ranks(wait_for, 2, "cpu") == [[START_SECONDS]] * 2


@pytest.mark.parametrize("generators", [0, 1, 2])
def test_somebody_learns_and_somebody_generates(generators):
    with pytest.raises(ConfigError, match="each rank learns or generates"):
        divide_world(ALONE, generators)
