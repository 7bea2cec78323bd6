"""bitsandbytes' optimizers on sharded parameters, against bitsandbytes on the whole tensors.

python -m pytest tests/test_optim_8bit.py
"""

import json
import sys
from contextlib import redirect_stdout
from io import StringIO

import pytest
import torch
from ranks import run_ranks
from test_checkpoint import SMALL, fingerprint, train
from tiny import tiny_model
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from utils.model.sharding import shard_model
from utils.plan.states import estimate_states
from utils.run.errors import ConfigError
from utils.train.checkpoint import CheckpointSaver
from utils.train.optim import build_optimizer
from utils.train.resume import load_checkpoint, newest_checkpoint, read_state

SHAPES = {
    "uneven": (37, 512),  # rows are whole blocks of 256
    "few": (2, 2560),  # fewer rows than 3 or 4 ranks
    "experts": (5, 16, 96),
    "ragged": (50, 100),  # 5000 elements: 8-bit, though each of 2 ranks has fewer than 4096
    # rows are less than a block, but half and a quarter of them are whole blocks
    "tall": (512, 16),
    "norm": (5000,),
    "small": (30, 100),  # 3000 elements: 32-bit
    "bias": (7,),
}
WHOLE_ROWS = ("uneven", "few", "experts")
NAMES = ["adamw_8bit", "lion_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "paged_lion_8bit"]


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


def bitsandbytes_alone(name, dtype, count):
    """Weights and state of bitsandbytes' own optimizer on whole tensors."""
    import bitsandbytes

    from utils.train.optim_8bit import CLASSES

    model = Shapes(dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = {} if "lion" in name else {"betas": (0.9, 0.95)}
    optimizer = getattr(bitsandbytes.optim, CLASSES[name])(groups, lr=1e-2, **betas)
    steps(model, optimizer, 0, count)
    return {n: (p.detach(), optimizer.state[p]) for n, p in model.named_parameters()}


def moments(optimizer, parameter) -> list[torch.Tensor]:
    """The whole moments in fp32, from the state that bitsandbytes works on."""
    from bitsandbytes.functional import dequantize_blockwise

    found = []
    for i in range(1, 3):
        parts = []
        for view in optimizer.views[parameter]:
            state = optimizer.inner.state[view]
            part = state.get(f"state{i}")
            if part is not None and part.dtype == torch.uint8:
                scale, values = state[f"absmax{i}"], state[f"qmap{i}"]
                part = dequantize_blockwise(part, absmax=scale, code=values, blocksize=256)
            parts += [part] if part is not None else []
        mine = torch.cat([torch.zeros(0), *parts])
        if f"state{i}" in optimizer.state[parameter] and isinstance(parameter, DTensor):
            mine = mine.view(-1, *parameter.shape[1:])
            mesh, places = parameter.device_mesh, parameter.placements
            like = {"shape": parameter.shape, "stride": parameter.stride()}
            mine = DTensor.from_local(mine, mesh, places, run_check=False, **like).full_tensor()
        found += [mine.view(-1)] if f"state{i}" in optimizer.state[parameter] else []
    return found


def blocks_on_one_rank(shape, ranks) -> torch.Tensor:
    """(elements,) bool: whether the element's block of 256 is on one rank."""
    element = torch.arange(shape.numel())
    rank = element // (-(-shape[0] // ranks) * shape[1:].numel())
    first, last = element // 256 * 256, (element // 256 * 256 + 255).clamp(max=shape.numel() - 1)
    return rank[first] == rank[last]


def beside_bitsandbytes(world, name, dtype, replicate):
    model, optimizer = sharded_shapes(world, name, dtype, replicate)
    steps(model, optimizer, 0, 3)
    alone = bitsandbytes_alone(name, dtype, 3)
    for label, parameter in model.named_parameters():
        weights, state = alone[label]
        mine = {key: whole(value) for key, value in optimizer.state[parameter].items()}
        assert mine["step"] == state["step"] == 3
        same = blocks_on_one_rank(parameter.shape, world.size // replicate)
        if "8bit" not in name or label in ("small", "bias"):
            same[:] = True
        assert same.sum() > 0, label
        if label in WHOLE_ROWS:
            assert same.all()
        assert (
            ("absmax1" in mine)
            == ("absmax1" in state)
            == ("8bit" in name and parameter.numel() >= 4096)
        )
        for key in ("state1", "state2"):
            assert (key in mine) == (key in state)
            if key in mine:
                ours, theirs = (moment[key].view(-1)[same] for moment in (mine, state))
                assert ours.dtype == theirs.dtype
                if ours.dtype == torch.uint8:
                    assert torch.equal(ours, theirs), (label, key)
                torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
        for key in ("absmax1", "absmax2"):
            if label in WHOLE_ROWS and key in mine:
                assert torch.equal(mine[key].view(-1), state[key])
        ours, theirs = whole(parameter.detach()).view(-1)[same], weights.view(-1)[same]
        if label in WHOLE_ROWS:
            assert torch.equal(ours, theirs), label
        tolerance = (
            {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 0.0, "atol": 0.0}
        )
        torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.parametrize(("ranks", "replicate"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2)])
@pytest.mark.parametrize("name", ["adamw_8bit", "lion_8bit", "paged_adamw_32bit"])
def test_codes_and_weights_are_those_of_bitsandbytes_on_whole_tensors(name, ranks, replicate):
    for dtype in (torch.float32, torch.bfloat16):
        run_ranks(beside_bitsandbytes, ranks, name, dtype, replicate)


def views(world):
    model, optimizer = sharded_shapes(world, "adamw_8bit")
    sizes = {n: [view.numel() for view in optimizer.views[p]] for n, p in model.named_parameters()}
    kinds = {n: optimizer.state[p]["state1"].dtype for n, p in model.named_parameters()}
    return sizes, kinds


def test_a_shard_that_begins_within_a_block_is_cut_there_and_an_empty_one_has_no_view():
    (first, _), (second, _) = run_ranks(views, 2)
    assert first["ragged"] == [2500]
    assert second["ragged"] == [60, 2440]  # 2560 = 10 * 256 is the next boundary
    assert second["small"] == [1500]  # 32-bit state has no blocks
    last, _ = run_ranks(views, 4)[3]
    assert last["few"] == []


def test_8_bit_or_32_bit_follows_from_the_global_size():
    for ranks in (1, 4):
        for _, kinds in run_ranks(views, ranks):
            assert kinds["ragged"] == kinds["norm"] == torch.uint8
            assert kinds["small"] == kinds["bias"] == torch.float32


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


# --- a whole model


def build(world, name, **changes):
    model = tiny_model("llama", **{**SMALL, "seed": 0, **changes})
    model = shard_model(model, init_device_mesh("cpu", (world.size,)), torch.float32)
    return model, build_optimizer(model, lr=1e-2, weight_decay=0.1, name=name)


def losses_beside_bitsandbytes(world, name):
    import bitsandbytes

    from utils.train.optim_8bit import CLASSES

    model, optimizer = build(world, name)
    alone = tiny_model("llama", **SMALL, seed=0)
    groups = [{**g, "params": []} for g in optimizer.param_groups]
    for parameter in alone.parameters():
        groups[parameter.ndim < 2]["params"].append(parameter)
    alone_optimizer = getattr(bitsandbytes.optim, CLASSES[name])(groups)
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


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_32bit"])
def test_a_sharded_model_trains_like_bitsandbytes_on_the_whole_model(name):
    mine, theirs = run_ranks(losses_beside_bitsandbytes, 3, name)[0]
    assert mine == pytest.approx(theirs, rel=1e-4 if "8bit" in name else 1e-6)
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
    model, optimizer = build(world, name)
    straight = train(world, model, optimizer, 0, 5)
    first, first_optimizer = build(world, name)
    resumed = train(world, first, first_optimizer, 0, 2)
    path = CheckpointSaver(folder, 0, world).save(2, first, first_optimizer, {})
    second, second_optimizer = build(
        world, name.removeprefix("paged_") if "8bit" in name else name, seed=1
    )
    load_checkpoint(path, second, second_optimizer, world)
    resumed += train(world, second, second_optimizer, 2, 5)
    return straight == resumed, fingerprint(model, optimizer), fingerprint(second, second_optimizer)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if "paged" in name else []) for name in NAMES],
)
def test_resume_on_the_same_number_of_ranks_is_bitwise(tmp_path, name):
    """8-bit state also with another --optimizer, where only paging differs."""
    for same_losses, straight, resumed in run_ranks(straight_and_resumed, 3, tmp_path, name):
        assert same_losses
        assert straight == resumed
        assert "lm_head.weight.state1" in straight
    kind = name if "32bit" in name else name.removeprefix("paged_")
    assert read_state(newest_checkpoint(tmp_path))["optimizer"] == kind


# --- another number of ranks


def save_shapes(world, folder):
    model, optimizer = sharded_shapes(world, "adamw_8bit")
    steps(model, optimizer, 0, 3)
    CheckpointSaver(folder, 0, world).save(3, model, optimizer, {})
    return {n: moments(optimizer, p) for n, p in model.named_parameters()}


def load_shapes(world, folder, again):
    """Moments after the load, what was printed, and moments after a second save and load."""
    model, optimizer = sharded_shapes(world, "adamw_8bit")
    with redirect_stdout(StringIO()) as out:
        load_checkpoint(newest_checkpoint(folder), model, optimizer, world)
    if again:
        CheckpointSaver(folder, 0, world).save(4, model, optimizer, {})
    assert all(float(state["step"]) == 3 for state in optimizer.state.values())
    found = {n: moments(optimizer, p) for n, p in model.named_parameters()}
    steps(model, optimizer, 3, 4)  # its parts are still bitsandbytes' own
    assert all(float(state["step"]) == 4 for state in optimizer.state.values())
    return found, out.getvalue()


def merged_blocks(shape, old, new) -> torch.Tensor:
    """(elements,) bool: blocks that an end of one of `old` shards divides, and no end of `new`."""
    rows, row = shape[0], shape[1:].numel()
    ends = [{k * -(-rows // n) * row for k in range(1, n)} for n in (old, new)]
    merged = {end // 256 for end in ends[0] - ends[1] if end % 256 and end < shape.numel()}
    return torch.tensor([e // 256 in merged for e in range(shape.numel())])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (2, 3),
        (4, 1),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in ((3, 2), (1, 4), (2, 4), (3, 1))),
    ],
)
def test_on_another_number_of_ranks_only_blocks_that_lay_across_ranks_change(tmp_path, old, new):
    from bitsandbytes.functional import create_dynamic_map, dequantize_blockwise, quantize_blockwise

    before = run_ranks(save_shapes, old, tmp_path)[0]
    results = run_ranks(load_shapes, new, tmp_path, True)
    tensors = 0
    for name, shape in ((n, torch.Size(s)) for n, s in SHAPES.items()):
        merged = merged_blocks(shape, old, new) & (shape.numel() >= 4096)
        assert not (name in WHOLE_ROWS and merged.any())
        tensors += bool(merged.any())
        for i, (was, now) in enumerate(zip(before[name], results[0][0][name], strict=True)):
            assert torch.equal(was[~merged], now[~merged]), name
            values = create_dynamic_map(signed=i == 0)
            codes, state = quantize_blockwise(was, values, blocksize=256)
            again = dequantize_blockwise(codes, absmax=state.absmax, code=values, blocksize=256)
            whole_now = merged & blocks_on_one_rank(shape, new)
            assert torch.equal(now[whole_now], again[whole_now]), name
    notice = results[0][1]
    if tensors:
        assert f" in {tensors} tensors lay across ranks of the checkpoint" in notice
        assert notice.count("\n") == 1
    else:
        assert notice == ""
    assert all(text == "" for _, text in results[1:])
    (same, text), *_ = run_ranks(load_shapes, new, tmp_path, False)
    assert text == ""
    for name, found in same.items():
        for was, now in zip(results[0][0][name], found, strict=True):
            assert torch.equal(was, now)


def test_a_notice_tells_how_many_blocks_are_quantized_again(tmp_path):
    run_ranks(save_shapes, 2, tmp_path)
    _, text = run_ranks(load_shapes, 1, tmp_path, False)[0]
    # ragged: its half is element 2500; norm: 2500; the halves of the others are multiples of 256
    blocks = "2 blocks of 256 in 2 tensors lay across ranks of the checkpoint"
    assert text == f"optimizer {blocks}: their 8-bit state is quantized again\n"


def save_as(world, folder, name):
    model, optimizer = build(world, name)
    CheckpointSaver(folder, 0, world).save(1, model, optimizer, {})


def refuse(world, folder, name):
    model, optimizer = build(world, name)
    try:
        load_checkpoint(newest_checkpoint(folder), model, optimizer, world)
    except ConfigError as error:
        return str(error), error.agreed
    return "loaded", False


@pytest.mark.parametrize(("old", "new"), [("adamw", "adamw_8bit"), ("lion_8bit", "adamw")])
def test_another_optimizer_is_refused_by_name(tmp_path, old, new):
    run_ranks(save_as, 2, tmp_path, old)
    path = newest_checkpoint(tmp_path)
    expected = (
        f"{path} holds {old} state, not {new} (fix: --optimizer {old}, or --resume none)",
        True,
    )
    assert run_ranks(refuse, 2, tmp_path, new) == [expected] * 2
    if old == "adamw":  # checkpoints from before there was a choice do not say it
        state = json.loads((path / "state.json").read_text())
        state.pop("optimizer")
        (path / "state.json").write_text(json.dumps(state))
        assert run_ranks(refuse, 2, tmp_path, new) == [expected] * 2


def refuse_a_longer_model(world, folder):
    model, optimizer = build(world, "adamw_8bit", vocab_size=1004)
    with pytest.raises(ConfigError) as error:
        load_checkpoint(newest_checkpoint(folder), model, optimizer, world)
    return str(error.value)


def test_another_model_is_refused_by_name_on_another_number_of_ranks_too(tmp_path):
    run_ranks(save_as, 2, tmp_path, "adamw_8bit")
    text = run_ranks(refuse_a_longer_model, 1, tmp_path)[0]
    assert "model.lm_head.weight torch.float32[1003, 8] -> torch.float32[1004, 8]" in text


# --- what it takes


def measured_and_estimated(world, name, dtype):
    model, optimizer = sharded_shapes(world, name, dtype)
    steps(model, optimizer, 0, 2)
    estimated = estimate_states(model, world.size, world.rank, name).optimizer
    local = [
        t.to_local() if isinstance(t, DTensor) else t
        for s in optimizer.state.values()
        for t in s.values()
    ]
    owned = {t.untyped_storage().data_ptr() for t in local}
    if name != "adamw":  # what bitsandbytes works on are parts of it, and the maps that all share
        maps = {values.untyped_storage().data_ptr() for values in optimizer.maps}
        for state in optimizer.inner.state.values():
            parts = [value for value in state.values() if isinstance(value, torch.Tensor)]
            assert {t.untyped_storage().data_ptr() for t in parts} <= owned | maps
    return sum(t.untyped_storage().nbytes() for t in local), estimated


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_estimate_is_what_the_state_takes(ranks):
    for name in ("adamw", *NAMES):
        for dtype in (torch.float32, torch.bfloat16):
            for measured, estimated in run_ranks(measured_and_estimated, ranks, name, dtype):
                assert measured == estimated, (name, dtype)


def test_without_bitsandbytes_the_fix_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)  # as if it were not installed
    with pytest.raises(
        ConfigError, match=r"--optimizer lion_8bit: .*\(fix: pip install bitsandbytes\)"
    ):
        build_optimizer(Shapes(), lr=1e-2, weight_decay=0.1, name="lion_8bit")


def test_paging_without_a_gpu_says_that_it_does_nothing(capfd):
    build_optimizer(Shapes(), lr=1e-2, weight_decay=0.1, name="paged_adamw_8bit")
    says = "optimizer paged_adamw_8bit: the state is in host memory anyway, so nothing is paged\n"
    assert capfd.readouterr() == (says, "")
