"""bitsandbytes' AdamW on sharded parameters, against bitsandbytes on the whole tensors.

python -m pytest tests/test_optim_8bit.py
"""

import pytest
import torch
from ranks import run_ranks
from shards import shard_training
from test_checkpoint import SMALL, fingerprint, train
from tiny import build_optimizer, tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.model.loading import local
from utils.plan.need import estimate_states
from utils.run.errors import ConfigError
from utils.train.checkpoint import CheckpointSaver, complete_checkpoints
from utils.train.resume import load_checkpoint

SHAPES = {
    "uneven": (37, 512),  # rows are whole blocks of 256
    "few": (2, 2560),  # fewer rows than 3 or 4 ranks
    "experts": (5, 16, 96),
    "ragged": (50, 100),  # a row is no whole block: 32-bit
    "small": (3, 256),  # 768 elements: 32-bit
    "bias": (7,),
}
OF_8_BIT = ("uneven", "few", "experts")


NAMES = ["adamw_8bit", "paged_adamw_8bit"]


class Shapes(nn.Module):
    """A parameter of each shape."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        for name, shape in SHAPES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape).to(dtype)))


def sharded_shapes(world, name, dtype=torch.float32, replicate=1):
    model = Shapes(dtype)
    if replicate > 1:
        axes, sizes = ("replicate", "shard"), (replicate, world.size // replicate)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    else:
        mesh = init_device_mesh("cpu", (world.size,))
    fully_shard(model, mesh=mesh)
    return model, build_optimizer(model, lr=1e-2, weight_decay=0.1, name=name)


def give_gradients(model, step) -> None:
    """The same on any number of ranks; larger from row to row, so that blocks differ in scale."""
    torch.manual_seed(100 + step)
    for parameter in model.parameters():
        rows = torch.linspace(0.5, 2.0, len(parameter)).view(-1, *[1] * (parameter.ndim - 1))
        whole = (torch.randn(parameter.shape) * rows).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.grad = whole


def steps(model, optimizer, first, last) -> None:
    for step in range(first, last):
        give_gradients(model, step)
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()


def whole(tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def bitsandbytes_alone(dtype, count):
    """Weights and state of bitsandbytes' own optimizer on whole tensors."""
    import bitsandbytes

    model = Shapes(dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = bitsandbytes.optim.AdamW8bit(groups, lr=1e-2, betas=(0.9, 0.95))
    steps(model, optimizer, 0, count)
    return {n: (p.detach(), optimizer.state[p]) for n, p in model.named_parameters()}


def beside_bitsandbytes(world, name, dtype, replicate):
    model, optimizer = sharded_shapes(world, name, dtype, replicate)
    steps(model, optimizer, 0, 3)
    alone = bitsandbytes_alone(dtype, 3)
    for label, parameter in model.named_parameters():
        mine = {key: whole(value) for key, value in optimizer.state[parameter].items()}
        assert ("absmax1" in mine) == (label in OF_8_BIT)
        if label == "ragged":
            continue  # bitsandbytes has blocks across its rows
        weights, state = alone[label]
        assert mine["step"] == state["step"] == 3
        for key in ("state1", "state2", *(("absmax1", "absmax2") if label in OF_8_BIT else ())):
            ours, theirs = mine[key].view(-1), state[key].view(-1)
            assert ours.dtype == theirs.dtype
            if label in OF_8_BIT:
                assert torch.equal(ours, theirs), (label, key)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        ours = whole(parameter.detach())
        if label in OF_8_BIT:
            assert torch.equal(ours, weights), label
        torch.testing.assert_close(ours, weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "ranks", "replicate"),
    [
        *(("adamw_8bit", *mesh) for mesh in ((1, 1), (3, 1), (4, 2))),
        *(pytest.param("adamw_8bit", n, 1, marks=pytest.mark.slow) for n in (2, 4)),
        ("paged_adamw_8bit", 2, 1),  # a CPU pages nothing
    ],
)
def test_codes_and_weights_are_those_of_bitsandbytes_on_whole_tensors(name, ranks, replicate):
    for dtype in (torch.float32, torch.bfloat16):
        run_ranks(beside_bitsandbytes, ranks, name, dtype, replicate)


def skip_one(world):
    model, optimizer = sharded_shapes(world, "adamw_8bit")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))  # it makes its tensors here
    steps(model, optimizer, 0, 1)
    before = fingerprint(model, optimizer)
    for bad in (True, False):
        give_gradients(model, 1)
        if bad and world.rank == world.size - 1:
            model.uneven.grad.to_local()[-1, 0] = float("inf")
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if bad:
            assert fingerprint(model, optimizer) == before
    return (
        scaler.get_scale(),
        fingerprint(model, optimizer) != before,
        {float(s["step"]) for s in optimizer.state.values()},
    )


def test_grad_scaler_skips_on_all_ranks_what_overflows_on_one():
    assert run_ranks(skip_one, 2) == [(2.0, True, {2.0})] * 2


def step_that_is_not_finite(world):
    model, optimizer = sharded_shapes(world, "adamw_8bit")
    steps(model, optimizer, 0, 1)

    def numbers():
        tensors = [local(p).clone() for p in model.parameters()]
        for state in optimizer.state.values():
            tensors += [local(state[name]).clone() for name in state if name != "step"]
        return tensors

    before = numbers()
    for bad in (1.0, 0.0):
        give_gradients(model, 1)
        if bad:
            model.uneven.grad.to_local()[-1:, :1] = float("nan")
        optimizer.found_inf = torch.tensor(bad)
        optimizer.step()
        same = [torch.equal(old, new) for old, new in zip(before, numbers(), strict=True)]
        assert all(same) if bad else not any(same)


def test_a_step_that_is_not_finite_changes_no_weight_and_no_moment():
    run_ranks(step_that_is_not_finite, 2)


def paged_steps(world):
    """Where moments are paged, the host leaves the step out, and keeps no copies of them."""
    plain, optimizer = sharded_shapes(world, "adamw_8bit")
    paged, of_paged = sharded_shapes(world, "adamw_8bit")
    of_paged.paged = True  # a CPU pages nothing, but this is what decides
    for bad in (0.0, 1.0, 0.0):
        for model, stepped in ((plain, optimizer), (paged, of_paged)):
            stepped.found_inf = torch.tensor(bad)
            if not bad:
                steps(model, stepped, 0, 1)
        before = fingerprint(paged, of_paged)
        if bad:
            give_gradients(paged, 1)
            of_paged.step()
            assert fingerprint(paged, of_paged) == before
    same = zip(plain.parameters(), paged.parameters(), strict=True)
    return all(torch.equal(local(one), local(other)) for one, other in same)


def test_a_paged_step_that_is_not_finite_is_left_out_by_the_host():
    assert run_ranks(paged_steps, 2) == [True, True]


# --- a whole model


def build(world, name, **changes):
    model = tiny_model("llama", **{**SMALL, "seed": 0, **changes})
    model = shard_training(model, init_device_mesh("cpu", (world.size,)), torch.float32)
    return model, build_optimizer(model, lr=1e-2, weight_decay=0.1, name=name)


# rows of whole blocks
WIDE = {"hidden_size": 256, "intermediate_size": 256}


def losses_beside_bitsandbytes(world):
    import bitsandbytes

    model, optimizer = build(world, "adamw_8bit", **WIDE)
    alone = tiny_model("llama", **{**SMALL, **WIDE}, seed=0)
    groups = [{**g, "params": []} for g in optimizer.param_groups]
    for parameter in alone.parameters():
        groups[parameter.ndim < 2]["params"].append(parameter)
    alone_optimizer = bitsandbytes.optim.AdamW8bit(groups)
    mine, theirs = [], []
    for step in range(4):
        torch.manual_seed(step)
        rows = torch.randint(0, 1003, (6, 8))
        for group in (*optimizer.param_groups, *alone_optimizer.param_groups):
            group["lr"] = 1e-2 / (1 + step)
        loss = model(rows[world.rank :: world.size], labels=rows[world.rank :: world.size]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / world.size
        torch.distributed.all_reduce(total)
        mine.append(total.item())
        loss = alone(rows, labels=rows).loss
        loss.backward()
        alone_optimizer.step()
        alone_optimizer.zero_grad()
        theirs.append(loss.item())
    return mine, theirs


def test_a_sharded_model_trains_like_bitsandbytes_on_the_whole_model():
    mine, theirs = run_ranks(losses_beside_bitsandbytes, 3)[0]
    assert mine == pytest.approx(theirs, rel=1e-4)
    assert len({f"{loss:.3f}" for loss in theirs}) == 4


def train_what_moved(world):
    model, optimizer = build(world, "adamw_8bit")
    stays = train(world, model, optimizer, 0, 3)
    model, optimizer = build(world, "adamw_8bit")
    before = [p.to_local().data_ptr() for p in model.parameters()]
    model._apply(torch.clone)  # what .to(device) does, and there is one device here
    moved = before != [p.to_local().data_ptr() for p in model.parameters()]
    return moved and stays == train(world, model, optimizer, 0, 3)


def test_shards_that_move_after_the_optimizer_is_made_are_trained_all_the_same():
    assert run_ranks(train_what_moved, 2) == [True, True]


def straight_and_resumed(world, folder, name):
    model, optimizer = build(world, name, **WIDE)
    straight = train(world, model, optimizer, 0, 4)
    first, first_optimizer = build(world, name, **WIDE)
    resumed = train(world, first, first_optimizer, 0, 2)
    path = CheckpointSaver(folder, 0, world).save(2, first, first_optimizer, {})
    second, second_optimizer = build(world, "adamw_8bit", seed=1, **WIDE)
    load_checkpoint(path, second, second_optimizer, world)
    resumed += train(world, second, second_optimizer, 2, 4)
    return straight == resumed, fingerprint(model, optimizer), fingerprint(second, second_optimizer)


@pytest.mark.parametrize(
    "name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[1:])]
)
def test_resume_on_the_same_number_of_ranks_is_bitwise(tmp_path, name):
    """8-bit state also with another --optimizer, where only paging differs."""
    for same_losses, straight, resumed in run_ranks(straight_and_resumed, 3, tmp_path, name):
        assert same_losses
        assert straight == resumed
        assert "lm_head.weight.state1" in straight


# --- another number of ranks


def save_shapes(world, folder):
    model, optimizer = sharded_shapes(world, "adamw_8bit")
    steps(model, optimizer, 0, 3)
    CheckpointSaver(folder, 0, world).save(3, model, optimizer, {})
    steps(model, optimizer, 3, 4)
    return fingerprint(model, optimizer)


def load_shapes(world, folder):
    model, optimizer = sharded_shapes(world, "adamw_8bit")
    load_checkpoint(complete_checkpoints(folder)[-1], model, optimizer, world)
    steps(model, optimizer, 3, 4)
    return fingerprint(model, optimizer)


@pytest.mark.parametrize(("old", "new"), [(2, 3), (4, 1), (1, 4)])
def test_resume_on_another_number_of_ranks_is_bitwise_in_all_that_is_8_bit(tmp_path, old, new):
    straight = run_ranks(save_shapes, old, tmp_path)[0]
    resumed = run_ranks(load_shapes, new, tmp_path)[0]
    assert straight.keys() == resumed.keys()
    for name, found in straight.items():
        if name.split(".")[0] in OF_8_BIT:
            assert found == resumed[name], name


def save_as(world, folder, name):
    model, optimizer = build(world, name)
    steps(model, optimizer, 0, 1)
    CheckpointSaver(folder, 0, world).save(1, model, optimizer, {})


def refuse(world, folder, name):
    model, optimizer = build(world, name)
    try:
        load_checkpoint(complete_checkpoints(folder)[-1], model, optimizer, world)
    except ConfigError as error:
        return str(error), error.agreed
    return "loaded", False


@pytest.mark.parametrize(("old", "new"), [("adamw", "adamw_8bit"), ("adamw_8bit", "adamw")])
def test_state_of_another_optimizer_is_refused(tmp_path, old, new):
    """By its tensors; a recipe refuses it before, by the flag: tests/test_fault_files.py."""
    run_ranks(save_as, 2, tmp_path, old)
    for text, agreed in run_ranks(refuse, 2, tmp_path, new):
        assert "optimizer.lm_head.weight.exp_avg " in text
        assert agreed


def refuse_a_longer_model(world, folder):
    model, optimizer = build(world, "adamw_8bit", vocab_size=1004)
    with pytest.raises(ConfigError) as error:
        load_checkpoint(complete_checkpoints(folder)[-1], model, optimizer, world)
    return str(error.value)


def test_another_model_is_refused_by_name_on_another_number_of_ranks_too(tmp_path):
    run_ranks(save_as, 2, tmp_path, "adamw_8bit")
    text = run_ranks(refuse_a_longer_model, 1, tmp_path)[0]
    assert "model.lm_head.weight torch.float32[1003, 8] -> torch.float32[1004, 8]" in text


# --- what it takes


def measured_and_estimated(world, name, dtype):
    model, optimizer = sharded_shapes(world, name, dtype)
    steps(model, optimizer, 0, 2)
    estimated = estimate_states(model, world.size, name).optimizer
    local = [
        t.to_local() if isinstance(t, DTensor) else t
        for s in optimizer.state.values()
        for t in s.values()
    ]
    return sum(t.untyped_storage().nbytes() for t in local), estimated


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_estimate_is_what_the_state_takes(ranks):
    for name in ("adamw", *NAMES):
        for dtype in (torch.float32, torch.bfloat16):
            (measured, estimated), *others = run_ranks(measured_and_estimated, ranks, name, dtype)
            assert measured == estimated, (name, dtype)
            assert all(other <= measured for other, _ in others), (name, dtype)


def test_what_an_8_bit_optimizer_does_not_do_is_told(capfd):
    build_optimizer(Shapes(), lr=1e-2, weight_decay=0.1, name="paged_adamw_8bit")
    (paging,) = capfd.readouterr().out.splitlines()
    assert paging == "optimizer the state is in host memory anyway, so nothing is paged"
