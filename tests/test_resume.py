"""A run that was cut goes on as if it had not been: same losses, same weights, bit for bit.

python -m pytest tests/test_resume.py
"""

import json
import os
import re
import shutil
import signal
import sys

import export
import finetune
import grpo
import prefer
import pretrain
import pytest
import reward
import torch
import vision
from metrics import read_metrics
from ranks import run_ranks
from safetensors.torch import load_file
from test_parity import write_rows
from tiny import tiny_model_folder
from transformers import AutoConfig, AutoModelForCausalLM

from utils.model.folder import run_facts
from utils.run import signals
from utils.run.distributed import ALONE, World
from utils.run.errors import ConfigError, differences
from utils.run.folder import Resumed
from utils.run.settings import parse_cli
from utils.run.signals import CAUGHT, stop_at_once
from utils.train.resume import continue_run, print_resume_command

RUN = {
    "steps": 5,
    "lr": 1e-3,
    "warmup": 1,
    "global_batch_size": 4,
    "save_every": 2,
    "keep": 0,
    "eval_share": 0.4,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(flags, folder) of an uninterrupted run on 2 ranks, over more than one epoch."""
    root = tmp_path_factory.mktemp("resume")
    model, rows = (
        tiny_model_folder(root / "model", vocab_size=271),
        write_rows(root / "rows.jsonl", 14),
    )
    flags = {**RUN, "model": str(model), "dataset": str(rows)}
    return flags, run_ranks(train, 2, flags, root / "whole")[0]


def train(world, flags, out, name="finetune"):
    recipe = sys.modules[name]
    return recipe.main(recipe.Config(**flags, output_dir=str(out)))


def cut(whole, out, step):
    """A copy of the run folder as a kill after checkpoint `step` leaves it, within a line."""
    shutil.copytree(whole, out)
    for path in (out / "checkpoints").glob("step_*"):
        if int(path.name[-8:]) > step:
            shutil.rmtree(path)
    shutil.rmtree(out / "model")
    (out / "plan.json").write_text((out / "plan.json").read_text().replace("measured", "unknown"))
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "loss"')
    return out


def curve(out):
    numbers = read_metrics(out / "metrics.jsonl")
    return [
        (n["step"], n.get("loss"), n.get("eval_loss"), n.get("grad_norm"), n.get("lr"))
        for n in numbers
    ]


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def test_resume_is_bitwise(whole, tmp_path):
    flags, out = whole
    again = run_ranks(train, 2, flags, cut(out, tmp_path / "cut", 2))[0]
    assert curve(again) == curve(out)
    # the last one: the held-out loss
    assert [number[0] for number in curve(out)] == [1, 2, 3, 4, 5, 5]
    ours = weights(again)
    assert all(torch.equal(ours[name], tensor) for name, tensor in weights(out).items())


@pytest.fixture(scope="module")
def on_one_rank(whole, tmp_path_factory):
    """That run, cut after step 2 and ended by one rank."""
    flags, out = whole
    return run_ranks(train, 1, flags, cut(out, tmp_path_factory.mktemp("one") / "cut", 2))[0]


LEVERS = {"cpu_offload": True, "activation_checkpointing": "full", "batch_size": 2}


@pytest.mark.parametrize(
    ("ranks", "more"),
    [
        (1, {}),
        (3, {"global_batch_size": 0, "batch_size": 2}),  # its rows: 2, 1 and 1
        (4, {}),
        pytest.param(4, {"replicate": 2}, marks=pytest.mark.slow),
        (2, LEVERS),
    ],
)
def test_another_number_of_ranks_sees_the_same_global_batches(
    request, whole, tmp_path, ranks, more
):
    flags, out = whole
    if ranks == 1:
        again = request.getfixturevalue("on_one_rank")
    else:
        again = run_ranks(train, ranks, flags | more, cut(out, tmp_path / "cut", 2))[0]
    losses = [[number[1:4] for number in curve(folder) if number[1]] for folder in (again, out)]
    torch.testing.assert_close(
        [n[0] for n in losses[0]], [n[0] for n in losses[1]], rtol=1e-5, atol=0
    )


def test_a_run_goes_from_one_rank_to_two_and_back(whole, tmp_path):
    """On one its weights are plain tensors, on two DTensors. All see the same batches."""
    flags, on_two = whole
    out = alone = run_ranks(train, 1, flags, tmp_path / "alone")[0]
    for ranks, step in ((2, 2), (1, 4)):
        out = run_ranks(train, ranks, flags, cut(out, tmp_path / f"cut_{ranks}", step))[0]
    wanted, *others = (
        [number[1] for number in curve(folder) if number[1]] for folder in (alone, out, on_two)
    )
    for losses in others:
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=0)
    runs = [x["run"] for x in read_metrics(out / "metrics.jsonl") if "loss" in x]
    assert runs == [1, 1, 2, 2, 3]
    ours = weights(out)
    for name, tensor in weights(alone).items():
        assert (tensor - ours[name]).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"seed": 1}, "seed 0 -> 1"),
        ({"max_rows": 9}, "data "),
        ({"global_batch_size": 8}, "4 -> 8"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_field(whole, tmp_path, change, says):
    flags, out = whole
    with pytest.raises(ConfigError, match="the checkpoint is of another run") as error:
        train(None, {**flags, **change}, cut(out, tmp_path / "cut", 2))
    assert says in str(error.value)


def test_the_ways_out_that_a_refused_checkpoint_names_are_ways_out(whole, tmp_path):
    """A new folder alone is none if --resume names the checkpoint."""
    flags, out = whole
    flags = {**flags, "max_rows": 9}
    with pytest.raises(
        ConfigError, match="new data: --allow_new_data; or another --output_dir and no"
    ):
        train(None, {**flags, "resume": str(out)}, tmp_path / "other")
    named = {**flags, "resume": str(out), "allow_new_data": True}
    for way in (named, {**flags, "seed": 1}):
        assert (train(None, way, tmp_path / f"way {len(way)}") / "model").is_dir()


def test_a_new_learning_rate_goes_on_and_both_configs_are_kept(whole, tmp_path, capsys):
    flags, out = whole
    again = train(None, {**flags, "lr": 2e-3}, cut(out, tmp_path / "cut", 2))
    assert "lr 0.001 -> 0.002" in capsys.readouterr().out
    assert "lr: 0.001" in (again / "config.yaml").read_text()
    assert "lr: 0.002" in (again / "config_002.yaml").read_text()
    train(None, {**flags, "lr": 2e-3}, again)  # what finished it was the second start
    assert "is finished: already at step 5" in capsys.readouterr().out


def test_a_finished_run_with_other_settings_is_refused_by_field(whole, tmp_path):
    flags, out = whole
    shutil.copytree(out, tmp_path / "run")
    out = tmp_path / "run"
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    others = {
        "global_batch_size 4 -> 8": {**flags, "global_batch_size": 8},
        "batch_size 1 -> 2": {**flags, "batch_size": 2},
        "lr 0.001 -> 0.1": {**flags, "batch_size": 2, "lr": 0.1},
    }
    for field, settings in others.items():
        with pytest.raises(ConfigError, match="holds a finished run with other settings") as error:
            train(None, settings, out)
        assert field in str(error.value)
        # with --resume alone this would be refused again, and without more steps nothing would train
        fix = f"(fix: another --output_dir; to go on, also --resume {out}, more epochs, steps or tokens)"
        assert fix in str(error.value)
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_run_that_an_older_version_finished_is_finished(whole, tmp_path, capsys):
    """Its config lacks settings that came later."""
    flags, out = whole
    shutil.copytree(out, tmp_path / "run")
    config = tmp_path / "run" / "config.yaml"
    config.write_text(re.sub("use_dora: .*\n|profile: .*\n", "", config.read_text()))
    train(None, flags, tmp_path / "run")
    assert "is finished: already at step 5" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="other settings: lr 0.001 -> 0.1"):
        train(None, {**flags, "lr": 0.1}, tmp_path / "run")


def test_a_run_that_was_killed_before_its_first_checkpoint_says_that_it_starts_again(
    tmp_path, capsys
):
    (tmp_path / "config.yaml").write_text("lr: 1e-4\n")
    assert continue_run(tmp_path, "auto", finetune.Config(), ALONE) == Resumed()
    said = f"restart   from the beginning: the run in {tmp_path} has no checkpoint\n"
    assert capsys.readouterr().out == said


def test_settings_that_change_no_result_do_not_refuse_a_finished_run(whole, capsys):
    """A script that submits again with a longer --timeout."""
    flags, out = whole
    train(None, {**flags, "timeout": 900, "save_every": 4, "keep": 1, "force": True}, out)
    assert "is finished: already at step 5" in capsys.readouterr().out


def test_a_finished_run_whose_model_is_gone_says_how_to_make_it_again(whole, tmp_path):
    flags, out = whole
    shutil.copytree(out, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")
    fix = rf"\(fix: (recipes/export.py --checkpoint {tmp_path}/run --output_dir {tmp_path}/run/model)\)"
    with pytest.raises(ConfigError, match=f"its model is gone {fix}") as refused:
        train(None, flags, tmp_path / "run")
    _, *words = re.search(fix, str(refused.value))[1].split()
    export.main(parse_cli(export.Config, words))
    train(None, flags, tmp_path / "run")
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        files = [path / "model" / name for path in (out, tmp_path / "run")]
        assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    ("name", "content"), [("plan.json", ""), ("config.yaml", "a: [1"), ("plan.json", b"\xaf")]
)
def test_a_torn_plan_or_config_is_named_and_the_checkpoints_are_enough(
    whole, tmp_path, name, content
):
    flags, out = whole
    part = cut(out, tmp_path / "cut", 2)
    (part / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(
        ConfigError, match=r"cut: its plan.json or newest config: .*\(fix: remove it"
    ):
        train(None, flags, part)
    (part / name).unlink()
    assert [step for step, *_ in curve(train(None, flags, part))][-1] == 5


def test_the_folder_of_another_recipes_finished_run_is_refused(whole):
    flags, out = whole
    own = {name: flags[name] for name in ("model", "dataset")}
    with pytest.raises(ConfigError, match="holds a finished run with other settings: ") as error:
        prefer.main(prefer.Config(**own, output_dir=str(out)))
    assert "--help" not in str(error.value)


def test_more_steps_go_on_from_a_finished_run(whole, tmp_path):
    flags, out = whole
    again = train(None, {**flags, "steps": 7, "resume": str(out)}, tmp_path / "more")
    assert [step for step, loss, *_ in curve(again) if loss] == [6, 7]


def test_a_resume_on_fewer_ranks_is_planned_with_its_micro_batches(whole, on_one_rank, tmp_path):
    """The global batch is the checkpoint's: on one rank it takes more micro-batches."""
    flags, out = whole
    again = {name: value for name, value in flags.items() if name != "global_batch_size"}
    kept = train(None, again, cut(out, tmp_path / "kept", 2))
    planned = [
        json.loads((folder / "plan.json").read_text())["planned"]["acts"]
        for folder in (kept, on_one_rank)
    ]
    assert planned[0] == planned[1]


def train_with_a_signal(world, flags, out, name="finetune"):
    """A run whose last rank gets SIGTERM when the first evaluation after a step begins."""
    recipe = sys.modules[name]
    called = "evaluate" if hasattr(recipe, "evaluate") else "eval_loss"
    evaluate = getattr(recipe, called)
    before = [None] * (recipe is pretrain)  # it also evaluates before the first step

    def signalled(*given):
        if before:
            before.pop()
        else:
            setattr(recipe, called, evaluate)
            if world.rank == world.size - 1:
                os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given)

    setattr(recipe, called, signalled)
    handlers = {number: signal.getsignal(number) for number in CAUGHT}
    stop_at_once()
    try:
        return train(world, flags, out, name)
    finally:
        signals.received.clear()  # this process goes on with other tests
        signal.set_wakeup_fd(-1)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def test_a_signal_ends_an_evaluation_and_the_step_is_saved(whole, tmp_path):
    flags, whole_out = whole
    flags = {**flags, "eval_every": 3, "save_every": 500}
    out = run_ranks(train_with_a_signal, 2, flags, tmp_path / "out")[0]
    assert [path.name for path in (out / "checkpoints").glob("step_*")] == ["step_00000003"]
    assert [number[2] for number in curve(out)] == [None] * 3  # half an evaluation is no number
    run_ranks(train, 2, flags, out)
    ours = weights(out)
    assert all(torch.equal(ours[name], tensor) for name, tensor in weights(whole_out).items())
    held_out = [number[::2][:2] for number in curve(out) if number[2]]
    assert [step for step, _ in held_out] == [3, 5]  # that of step 3 is made up for
    assert held_out[-1][1] == curve(whole_out)[-1][2]


MORE = {
    grpo: {
        "model": str(grpo.TINY / "started"),
        "dataset": str(grpo.TINY / "chat.jsonl"),
        "group_size": 2,
        "max_new_tokens": 4,
    },
    prefer: {"loss": "simpo"},
    pretrain: {"seq_len": 64},
    vision: {"workers": 0},
}


@pytest.mark.parametrize(
    "recipe",
    [
        finetune,
        grpo,
        *(
            pytest.param(other, marks=pytest.mark.slow)
            for other in (prefer, reward, vision, pretrain)
        ),
    ],
)
def test_the_last_evaluation_that_a_signal_ended_is_made_by_the_same_command(recipe, tmp_path):
    flags = {"steps": 2, "lr": 1e-3, "max_rows": 12, "eval_share": 0.4, **MORE.get(recipe, {})}
    name = recipe.__name__
    whole = run_ranks(train, 1, flags, tmp_path / "whole", name)[0]
    out = run_ranks(train_with_a_signal, 1, flags, tmp_path / "out", name)[0]
    assert not (out / "model").exists()
    run_ranks(train, 1, flags, out, name)
    last = [
        {key: value for key, value in numbers.items() if key.startswith("eval_")}
        for numbers in (read_metrics(folder / "metrics.jsonl")[-1] for folder in (whole, out))
    ]
    assert last[0]
    assert last[0] == last[1]
    models = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, out)]
    assert models[0] == models[1]


def test_a_named_checkpoint_starts_a_new_folder_and_the_same_command_goes_on_there(whole, tmp_path):
    flags, out = whole
    named = {**flags, "resume": str(out / "checkpoints" / "step_00000002")}
    new = train(None, named, tmp_path / "new")
    assert [step for step, *_ in curve(new)] == [3, 4, 5, 5]
    again = cut(new, tmp_path / "again", 4)
    with pytest.raises(ConfigError, match="goes on to step_00000004, which a run from"):
        train(None, {**flags, "resume": f"{named['resume']}/"}, again)  # not the same command
    train(None, named, again)
    lines = (again / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["run"] for line in lines] == [1] * 4 + [2] * 2


def test_the_way_on_does_not_refuse_what_the_run_has_left(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["finetune.py", "--resume", "none"])
    checkpoint = tmp_path / "checkpoints" / "step_00000072"
    print_resume_command("SIGTERM", checkpoint, finetune.Config(resume="none"), ALONE)
    stopped, way_on = capsys.readouterr().out.splitlines()
    assert stopped == f"stopped   by SIGTERM after step 72: {checkpoint}"
    command = f"python finetune.py --resume none --output_dir {tmp_path} --resume auto"
    assert way_on == f"to go on  {command}"  # the last one counts


def test_the_way_on_of_several_machines_is_not_the_command_of_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["finetune.py", "--output_dir", "run"])
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000072"
    command = "torchrun --nproc_per_node=8 finetune.py --output_dir run"
    for ranks, begin in [(8, ""), (16, "on each machine, with its --nnodes and rendezvous: ")]:
        world = World(0, ranks, 0, 8, torch.device("cpu"))
        print_resume_command("SIGTERM", checkpoint, finetune.Config(output_dir="run"), world)
        _, way_on = capsys.readouterr().out.splitlines()
        assert way_on == f"to go on  {begin}{command}"


def test_fewer_steps_than_the_checkpoint_has_are_refused(whole, tmp_path):
    flags, out = whole
    with pytest.raises(
        ConfigError, match=r"step_00000005 has more than 2 steps \(fix: --steps 5, no --tokens\)"
    ):
        train(None, {**flags, "steps": 2, "resume": str(out)}, tmp_path / "fewer")


def test_facts_of_a_model_whose_config_holds_infinity_can_be_saved():
    """Mamba-2 and its hybrids: time_step_limit is (0.0, inf)."""
    facts = run_facts(AutoConfig.for_model("mamba2"), {}, "data")
    assert facts["config.time_step_limit"] == [0.0, "Infinity"]
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts


def test_the_dtype_in_which_a_model_was_built_is_no_fact_of_its_run():
    """transformers writes it into the configs of the parts, too: ranks that generate in bf16 were refused."""

    small = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "head_dim": 8}

    def facts(dtype, **sizes):
        config = AutoConfig.for_model("gemma3", text_config=small | sizes, vision_config=small)
        with torch.device("meta"):
            AutoModelForCausalLM.from_config(config, dtype=dtype)
        return run_facts(config, {}, "data")

    before = facts(torch.float32)
    assert facts(torch.bfloat16) == before
    changed = differences(before, facts(torch.bfloat16, head_dim=16))
    assert changed == "config.text_config.head_dim 8 -> 16"
