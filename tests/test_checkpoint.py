"""Save and exact resume, on small sharded models. Alone: `pytest tests/test_checkpoint.py`"""

import hashlib
import os
import pickle
import re
import resource
import shutil
from contextlib import chdir
from textwrap import dedent

import pytest
import torch
from ranks import run_ranks
from shards import shard_training
from shell import ROOT
from tiny import build_optimizer, tiny_model
from torch.distributed.device_mesh import init_device_mesh

from utils.model.sharding import clip_gradients
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError
from utils.train.checkpoint import CheckpointSaver, complete_checkpoints, set_seed
from utils.train.resume import load_checkpoint, read_state

SMALL = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
}
# 1003 rows of vocabulary divide by nothing; of a key projection's 4 rows, the third of 3 ranks holds none.


def build(world, kind="llama", seed=0, **changes):
    model = tiny_model(kind, seed=seed, **{**SMALL, **changes})
    model = shard_training(model, init_device_mesh("cpu", (world.size,)), torch.float32)
    return model, build_optimizer(model, lr=1e-2, weight_decay=0.1)


def save_checkpoint(folder, step, model, optimizer, state, keep, world):
    with CheckpointSaver(folder, keep, world) as saver:
        return saver.save(step, model, optimizer, state)


def train(world, model, optimizer, first, last) -> list[float]:
    """Losses of steps first ... last - 1. A step's number gives its 6 rows, which the ranks divide."""
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        rows = torch.randint(0, 1003, (6, 8))[world.rank :: world.size]
        loss = model(rows, labels=rows).loss
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        model.zero_grad()
        losses.append(loss.item())
    return losses


def fingerprint(model, optimizer) -> dict[str, str]:
    """A hash of every whole parameter and of every piece of its optimizer state."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        tensors |= {f"{name}.{key}": value for key, value in optimizer.state[parameter].items()}
    whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}
    return {n: hashlib.sha256(t.numpy().tobytes()).hexdigest() for n, t in whole.items()}


def of_readme(name: str) -> type:
    """A class that utils/README.md shows."""
    blocks = re.findall(
        r"  ```python\n(.*?)  ```", (ROOT / "utils" / "README.md").read_text(), re.S
    )
    (code,) = [block for block in blocks if f"class {name}" in block]
    space = {"torch": torch}
    exec(dedent(code), space)
    return space[name]


def straight_and_resumed(world, folder, kind, other=""):
    def start(seed=0):
        model, optimizer = build(world, kind, seed)
        if other == "amsgrad":
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
        elif other == "momentum":
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        elif other == "average":
            optimizer = of_readme("Averaged")(model.parameters(), lr=1e-2, fused=True)
        elif other == "muon and adamw":
            inside = [p for p in model.model.layers.parameters() if p.ndim == 2]
            rest = [p for p in model.parameters() if p not in set(inside)]
            both = torch.optim.Muon(inside, ns_steps=1), torch.optim.AdamW(rest, lr=1e-2)
            optimizer = of_readme("Both")(*both)
        elif other == "muon":
            for parameter in model.parameters():
                parameter.requires_grad_(parameter.ndim == 2)
            trained = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.Muon(trained, ns_steps=1)  # more of them take long on DTensors
        return model, optimizer

    model, optimizer = start()
    straight = train(world, model, optimizer, 0, 4)
    first, first_optimizer = start()
    resumed = train(world, first, first_optimizer, 0, 2)
    path = save_checkpoint(folder, 2, first, first_optimizer, {"epoch": 1}, 0, world)
    seed = 0 if other == "muon" else 1  # frozen weights are not saved
    second, second_optimizer = start(seed)
    load_checkpoint(path, second, second_optimizer, world)
    state = read_state(path)
    resumed += train(world, second, second_optimizer, state["step"], 4)
    return (
        straight == resumed,
        fingerprint(model, optimizer),
        fingerprint(second, second_optimizer),
        state,
    )


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_resume_is_bitwise(tmp_path, kind):
    for same_losses, straight, resumed, state in run_ranks(straight_and_resumed, 2, tmp_path, kind):
        assert same_losses
        assert straight == resumed
        assert state.items() >= {"step": 2, "epoch": 1}.items()
        assert ("lm_head.weight" in straight) == (kind == "llama")  # a tied weight is there once
        assert "model.embed_tokens.weight.exp_avg_sq" in straight


@pytest.mark.parametrize(
    "other",
    [
        "amsgrad",
        "muon",  # its states are those of momentum
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("momentum", "average", "muon and adamw")
        ),
    ],
)
def test_resume_is_bitwise_with_another_optimizer(tmp_path, other):
    for same_losses, straight, resumed, _ in run_ranks(
        straight_and_resumed, 2, tmp_path, "llama", other
    ):
        assert same_losses
        assert straight == resumed


def test_the_average_of_bf16_weights_follows_them_as_that_of_fp32_weights_does():
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        parameter = torch.nn.Parameter(torch.ones(100, dtype=dtype))
        optimizer = of_readme("Averaged")([parameter], lr=2**-7, weight_decay=0.0)
        for _ in range(40):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        moved[dtype] = 1 - optimizer.state[parameter]["ema"].float()
    torch.testing.assert_close(moved[torch.bfloat16], moved[torch.float32], rtol=0.1, atol=0)


def train_and_save(world, folder):
    model, optimizer = build(world)
    train(world, model, optimizer, 0, 2)
    save_checkpoint(folder, 2, model, optimizer, {}, 0, world)
    return fingerprint(model, optimizer)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """(a folder with the checkpoint of step 2, which two ranks saved; the fingerprint of what they saved)"""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run_ranks(train_and_save, 2, folder)[0]


@pytest.fixture
def saved(on_two_ranks, tmp_path):
    """The test's own copy of it, which it may damage."""
    shutil.copytree(on_two_ranks[0], tmp_path, dirs_exist_ok=True)
    return tmp_path


def load_and_save(world, folder, step):
    """Load the newest, save it under another number without a step in between."""
    model, optimizer = build(world, seed=world.size)
    load_checkpoint(complete_checkpoints(folder)[-1], model, optimizer, world)
    save_checkpoint(folder, step, model, optimizer, {}, 0, world)
    return fingerprint(model, optimizer)


@pytest.mark.parametrize("worlds", [(1, 2, 1), (2, 3, 2)])
def test_another_number_of_ranks_loads_the_same_bits(request, tmp_path, worlds):
    if worlds[0] == 2:
        folder, bits = request.getfixturevalue("saved"), request.getfixturevalue("on_two_ranks")[1]
    else:
        folder, bits = tmp_path, run_ranks(train_and_save, worlds[0], tmp_path)[0]
    for number, ranks in enumerate(worlds[1:], start=3):
        assert run_ranks(load_and_save, ranks, folder, number) == [bits] * ranks


def save_before_the_first_step(world, folder):
    model, optimizer = build(world)
    save_checkpoint(folder, 0, model, optimizer, {}, 0, world)
    other, other_optimizer = build(world)
    losses = train(world, model, optimizer, 0, 2), train(world, other, other_optimizer, 0, 2)
    return losses[0] == losses[1] and fingerprint(model, optimizer) == fingerprint(
        other, other_optimizer
    )


def test_saving_changes_nothing_even_before_the_first_step(tmp_path):
    assert run_ranks(save_before_the_first_step, 1, tmp_path) == [True]


def refuse(world, folder, changes):
    model, optimizer = build(world, **changes)
    try:
        load_checkpoint(complete_checkpoints(folder)[-1], model, optimizer, world)
    except ConfigError as error:
        return str(error), error.agreed
    return "loaded", False


def test_a_checkpoint_of_another_model_is_refused_by_name_and_shape(saved):
    (text, agreed), other = run_ranks(
        refuse, 2, saved, {"vocab_size": 1000, "num_hidden_layers": 3}
    )
    assert (text, agreed) == other
    assert agreed
    assert "\n" not in text
    assert text.startswith(f"{saved}/step_00000002 is of another model, then -> now: ")
    assert "model.lm_head.weight torch.float32[1003, 8] -> torch.float32[1000, 8]" in text
    assert "model.model.layers.2.input_layernorm.weight absent -> torch.float32[8]" in text
    assert "more (fix: --resume none)" in text


class Payload:
    def __init__(self, canary):
        self.canary = str(canary)

    def __reduce__(self):
        return os.mkdir, (self.canary,)


def test_a_payload_in_the_metadata_does_not_run(saved):
    file = complete_checkpoints(saved)[-1] / ".metadata"
    good = pickle.loads(file.read_bytes())
    good.planner_data = Payload(saved / "canary")
    for planted in (pickle.dumps(good), pickle.dumps(Payload(saved / "canary"))):
        file.write_bytes(planted)
        for text, agreed in run_ranks(refuse, 2, saved, {}):
            assert text.startswith(
                f"{file} is gone, damaged or foreign: UnpicklingError: it asks for posix.mkdir"
            )
            assert agreed
    assert not (saved / "canary").exists()


@pytest.mark.parametrize("damage", ["empty", "cut", "outside", "half a tensor file"])
def test_damage_is_one_line_on_all_ranks(saved, damage):
    path = complete_checkpoints(saved)[-1]
    metadata = path / ".metadata"
    if damage == "empty":
        metadata.write_bytes(b"")
    elif damage == "cut":
        metadata.write_bytes(metadata.read_bytes()[:500])
    elif damage == "outside":
        metadata.write_bytes(metadata.read_bytes().replace(b"__0_0.distcp", b"../../x.dist"))
    else:
        tensors = path / "__1_0.distcp"
        tensors.write_bytes(tensors.read_bytes()[:2000])
    for text, agreed in run_ranks(refuse, 2, saved, {}):
        assert text.startswith(str(path))
        assert "\n" not in text
        assert agreed


def save_many(world, folder, steps, keep):
    model, optimizer = build(world)
    for step in steps:
        save_checkpoint(folder, step, model, optimizer, {}, keep, world)


def names(folder) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_leftovers_and_odd_names_are_not_checkpoints(tmp_path):
    assert complete_checkpoints(tmp_path / "absent") == []
    assert complete_checkpoints(tmp_path) == []
    run_ranks(save_many, 1, tmp_path, [9, 10], 0)
    right = tmp_path / "step_00000010"
    odd = [
        "step_abc",
        "step_00000011 (copy)",
        "step_11",
        "step_000000011",
        "xstep_00000011",
        "step_00000011\n",
    ]
    for name in [
        *odd,
        "step_\u0660\u0660\u0660\u0660\u0660\u0660\u0661\u0661",
        ".tmp_step_00000011_ab12",
    ]:
        shutil.copytree(right, tmp_path / name)
    shutil.copytree(right, tmp_path / "step_00000012")
    (tmp_path / "step_00000012" / "manifest.json").unlink()
    (tmp_path / "step_00000014").write_text("a file")
    os.utime(tmp_path / "step_00000009")
    assert complete_checkpoints(tmp_path)[-1] == right
    assert read_state(right)["step"] == 10


def save_state(world, folder, state):
    path = save_checkpoint(folder, 1, *build(world), state, 0, world)
    return read_state(path)


def test_a_best_loss_before_the_first_evaluation_is_kept_as_infinity(tmp_path):
    (state,) = run_ranks(save_state, 1, tmp_path, {"best": float("inf")})
    assert state["best"] == float("inf")


def save_without_a_working_folder(world, folder):
    with chdir(folder), CheckpointSaver(folder.parent, 1, world) as saver:
        folder.rmdir()
        return read_state(saver.save(1, *build(world), {}))


def test_a_working_folder_that_is_removed_during_a_run_does_not_stop_a_save(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    (state,) = run_ranks(save_without_a_working_folder, 1, folder)
    assert state["cwd"] == str(folder)


def save_newest_and_best(world, folder):
    model, optimizer = build(world)
    with (
        CheckpointSaver(folder / "checkpoints", 2, world) as newest,
        CheckpointSaver(folder / "best", 1, world) as best,
    ):
        for step in range(1, 5):
            newest.save(step, model, optimizer, {})
            if step < 3:
                best.save(step, model, optimizer, {})


def test_a_second_saver_keeps_the_best_that_the_first_removes(tmp_path):
    run_ranks(save_newest_and_best, 2, tmp_path)
    assert names(tmp_path / "checkpoints") == ["step_00000003", "step_00000004"]
    assert names(tmp_path / "best") == ["step_00000002"]


def save_nothing(world, folder):
    with CheckpointSaver(folder, 1, world):
        pass


def test_a_start_that_has_no_step_left_to_save_clears_killed_saves_too(tmp_path):
    run_ranks(save_many, 1, tmp_path, [1, 2], 2)
    (tmp_path / ".tmp_step_00000001_dead").mkdir()
    (tmp_path / ".tmp_step_00000001_dead" / "manifest.json").touch()
    run_ranks(save_nothing, 1, tmp_path)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]


def test_the_newest_are_kept_and_killed_saves_are_cleared(tmp_path):
    (tmp_path / ".tmp_step_00000001_dead").mkdir()
    run_ranks(save_many, 1, tmp_path, [1, 2, 3, 4], 2)
    assert names(tmp_path) == ["step_00000003", "step_00000004"]
    run_ranks(save_many, 1, tmp_path, [5], 4)
    assert names(tmp_path) == ["step_00000003", "step_00000004", "step_00000005"]
    # after resuming from an early one: what comes later is not its
    run_ranks(save_many, 1, tmp_path, [2], 1)
    later = ["step_00000003", "step_00000004", "step_00000005"]
    assert names(tmp_path) == ["step_00000002", *later]


def save_with_a_full_disk_on(world, folder, full_rank):
    model, optimizer = build(world)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if world.rank == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        save_checkpoint(folder, 3, model, optimizer, {}, 1, world)
    except ConfigError as error:
        return str(error), error.agreed
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    return "saved", False


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_failed_save_is_one_line_and_leaves_the_previous_checkpoint(saved, full_rank):
    for text, agreed in run_ranks(save_with_a_full_disk_on, 2, saved, full_rank):
        assert text.startswith(
            f"{saved}/step_00000003 cannot be written: rank {full_rank}: OSError: "
        )
        assert text.endswith("File too large (fix: make room, or another --output_dir)")
        assert "\n" not in text
        assert agreed
    assert names(saved) == ["step_00000002"]


def save_twice(world, folder):
    model, optimizer = build(world)
    path = save_checkpoint(folder, 1, model, optimizer, {}, 0, world)
    written = files_of(path)
    try:
        save_checkpoint(folder, 1, model, optimizer, {"other": 1}, 0, world)
    except ConfigError as error:
        return str(error), error.agreed, files_of(path) == written


def files_of(path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def test_an_existing_checkpoint_is_not_overwritten(tmp_path):
    for text, agreed, unchanged in run_ranks(save_twice, 2, tmp_path):
        assert text.startswith(f"{tmp_path}/step_00000001 cannot be written: rank 0: OSError: ")
        assert "Directory not empty" in text
        assert agreed
        assert unchanged
    assert names(tmp_path) == ["step_00000001"]


def save_after_a_forward_alone(world, folder):
    model, optimizer = build(world)
    train(world, model, optimizer, 0, 1)
    expected = fingerprint(model, optimizer)
    with torch.no_grad():
        model(torch.arange(8)[None])  # leaves units gathered
    path = save_checkpoint(folder, 1, model, optimizer, {}, 0, world)
    second, second_optimizer = build(world, seed=1)
    load_checkpoint(path, second, second_optimizer, world)
    return expected, fingerprint(second, second_optimizer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_after_a_forward_without_backward_keeps_all_optimizer_state(tmp_path, ranks):
    for expected, loaded in run_ranks(save_after_a_forward_alone, ranks, tmp_path):
        assert loaded == expected


def save_half_frozen(world, folder):
    model, optimizer = build(world)
    for parameter in model.model.parameters():
        parameter.requires_grad_(False)
    train(world, model, optimizer, 0, 1)
    save_checkpoint(folder, 1, model, optimizer, {}, 0, world)


def test_frozen_weights_are_not_saved(tmp_path):
    run_ranks(save_half_frozen, 1, tmp_path)
    metadata = pickle.loads((tmp_path / "step_00000001" / ".metadata").read_bytes())
    assert sorted(metadata.state_dict_metadata) == [
        "model.lm_head.weight",
        "optimizer.lm_head.weight.exp_avg",
        "optimizer.lm_head.weight.exp_avg_sq",
        "optimizer.lm_head.weight.step",
    ]


@pytest.mark.parametrize("seed", [0, 20261128153000, 2**63 - 1])
def test_each_step_draws_other_numbers_also_with_a_seed_made_of_the_time(seed):
    drawn = []
    for step in (0, 1, 0):
        set_seed(seed, step, ALONE)
        drawn.append(torch.rand(1).item())
    assert drawn[0] == drawn[2] != drawn[1]
