"""What can fail cheaply fails in the act `plan`: in one line, on all ranks together, before a weight is read.

python -m pytest tests/test_plan.py
"""

import json
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import finetune
import preview
import pytest
from launch import forked
from ranks import run_ranks
from shell import shell
from test_parity import write_rows
from tiny import tiny_model_folder

from utils.model.folder import open_weights
from utils.model.sharding import DTYPES
from utils.plan.fit import estimate_disk
from utils.run.errors import ConfigError
from utils.run.folder import check_space, claim_output


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")
    model = tiny_model_folder(root / "model", vocab_size=271)
    return {
        "model": str(model),
        "dataset": str(write_rows(root / "rows.jsonl", 6)),
        "save_every": 0,
    }


def run(**flags):
    return finetune.main(finetune.Config(**flags))


def refused(**flags) -> str:
    """The error, which must be one line."""
    with pytest.raises(ConfigError) as error:
        run(**flags)
    text = str(error.value)
    assert "\n" not in text
    return text


def steps(out):
    return [
        json.loads(line)
        for line in (out / "metrics.jsonl").read_text().splitlines()
        if "grad_norm" in line
    ]


# --- flags


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"batch_size": 0}, "--batch_size 0"),
        ({"lr": -1.0}, "--lr -1.0"),
        ({"lr": 0.0}, "--lr 0.0 trains nothing"),
        ({"eval_share": 1.0}, "--eval_share 1.0"),
        ({"eval_every": 2}, "--eval_every has no rows (fix: --eval_share"),
        ({"eval_share": 0.1, "eval_dataset": "x.jsonl"}, "--eval_dataset or --eval_share"),
        ({"global_batch_size": 6, "batch_size": 2, "grad_accum": 2}, "--grad_accum 2"),
        (
            {"attn": "flash_attention_2"},
            "not in fp32 on the CPU (fix: --attn sdpa)",
        ),
        ({"resume": "nowhere"}, "--resume nowhere"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(flags, tmp_path, wrong, says):
    assert says in refused(**{**flags, "output_dir": str(tmp_path / "out"), **wrong})
    assert not (tmp_path / "out").exists()  # no litter


@pytest.mark.parametrize("attn", ["flash_attention_2", "sdpa"])
def test_attention_that_its_class_cannot_is_refused(tmp_path, flags, attn):
    model = tiny_model_folder(tmp_path / "model", "gemma2", vocab_size=271)
    text = refused(**{**flags, "model": str(model), "attn": attn})
    assert f"--attn {attn}" in text


# --- the run folder


def test_a_file_in_the_place_of_the_output_folder_is_refused(flags, tmp_path):
    (tmp_path / "out").touch()
    assert "out" in refused(**flags, output_dir=str(tmp_path / "out"))


def test_a_symlink_loop_is_refused(flags, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "out")
    assert "out" in refused(**flags, output_dir=str(tmp_path / "out"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only folder needs root")
def test_a_read_only_output_folder_is_refused_before_the_model_is_loaded(flags, tmp_path):
    (tmp_path / "ro").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(tmp_path / "ro")], check=True)
    try:
        assert "ead-only" in refused(**flags, output_dir=str(tmp_path / "ro" / "out"))
    finally:
        subprocess.run(["umount", str(tmp_path / "ro")], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_too_little_room_is_said_before_training_with_both_numbers_and_leaves_nothing(
    flags, tmp_path
):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        assert "no space left: need 0.0" in refused(
            **{**flags, "save_every": 1}, output_dir=str(tmp_path / "out")
        )
        assert list(tmp_path.iterdir()) == []
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_resume_needs_no_room_for_the_checkpoints_that_are_there(tmp_path):
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], check=True)
    try:
        (tmp_path / "checkpoints" / "step_00000080").mkdir(parents=True)
        (tmp_path / "checkpoints" / "step_00000080" / "tensors").write_bytes(bytes(600 * 1024))
        check_space(tmp_path, 900 * 1024, counted="checkpoints/*/*")
        with pytest.raises(ConfigError, match="no space left"):
            check_space(tmp_path, 900 * 1024)  # a new one beside it
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_the_disk_that_a_run_asks_for_is_what_it_takes(flags, tmp_path, param_dtype):
    asked = {**flags, "steps": 2, "save_every": 1, "keep": 0, "param_dtype": param_dtype}
    out = run(**asked, output_dir=str(tmp_path))
    files = [*out.glob("checkpoints/*/*.distcp"), *out.glob("model/*.safetensors")]
    weights = open_weights(Path(flags["model"]))
    estimate = estimate_disk(weights, 2, finetune.Config(**asked), DTYPES[param_dtype])
    assert 1 <= sum(file.stat().st_size for file in files) / estimate < 1.2  # headers of the files


def test_the_models_own_folder_is_never_the_output(flags, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(flags["model"], model)
    before = sorted(p.name for p in model.iterdir())
    assert str(model) in refused(**{**flags, "model": str(model)}, output_dir=str(model))
    assert sorted(p.name for p in model.iterdir()) == before


def test_resume_none_refuses_a_folder_that_holds_a_run(flags, tmp_path):
    run(**flags, output_dir=str(tmp_path))
    assert "--resume none" in refused(**flags, output_dir=str(tmp_path), resume="none")


def test_a_finished_run_is_left_alone_and_another_config_is_refused_by_field(
    flags, tmp_path, capsys
):
    out = run(**flags, output_dir=str(tmp_path))
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    run(**flags, output_dir=str(tmp_path))
    assert "already at step 6" in capsys.readouterr().out
    assert "lr 2e-05 -> 0.1" in refused(**flags, output_dir=str(tmp_path), lr=0.1)
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def restartable(world, out):
    os.environ["TORCHELASTIC_MAX_RESTARTS"] = "3"
    try:
        return claim_output(out, "finetune", world)
    except ConfigError as error:
        return str(error)
    finally:
        del os.environ["TORCHELASTIC_MAX_RESTARTS"]


def test_a_job_that_may_restart_needs_a_named_folder(tmp_path):
    """The newest number may be that of another run."""
    assert run_ranks(restartable, 2, str(tmp_path / "named")) == [tmp_path / "named"] * 2
    for said in run_ranks(restartable, 2, ""):
        assert said.endswith("finds its run only in a named folder (fix: --output_dir FOLDER)")


# --- data


def write_chats(path, *answers):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "q" * 9},
                {"role": "assistant", "content": answer},
            ]
        }
        for answer in answers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def on_ranks(world, flags):
    return finetune.main(finetune.Config(**flags))


def on_ranks_refused(world, flags, own=None):
    try:
        finetune.main(finetune.Config(**{**flags, **(own or {}).get(world.rank, {})}))
    except ConfigError as error:
        return str(error), error.agreed
    return None


def test_rows_that_teach_nothing_are_counted_and_a_file_of_them_is_refused(flags, tmp_path):
    rows = write_chats(tmp_path / "rows.jsonl", "yes", "no")
    assert "all 2 rows were dropped" in refused(**{**flags, "dataset": rows, "seq_len": 8})


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_rows_than_ranks_or_than_a_global_batch_train_with_their_true_count(
    flags, tmp_path, count
):
    rows = write_chats(tmp_path / "rows.jsonl", *["yes", "no", "maybe"][:count])
    changes = {"dataset": rows, "output_dir": str(tmp_path / "out"), "batch_size": 2, "steps": 2}
    curve = steps(run_ranks(on_ranks, 2, {**flags, **changes})[0])
    alone = steps(
        run(**{**flags, **changes, "output_dir": str(tmp_path / "alone"), "global_batch_size": 4})
    )
    assert len(curve) == len(alone) == 2
    assert [s["trained_tokens"] for s in curve] == [s["trained_tokens"] for s in alone]
    assert [s["loss"] for s in curve] == pytest.approx([s["loss"] for s in alone], rel=1e-5)


def test_ranks_that_see_different_files_are_told_so_together(flags, tmp_path):
    texts = run_ranks(on_ranks_refused, 2, flags, {1: {"dataset": str(tmp_path / "missing.jsonl")}})
    assert texts[0] == texts[1]
    assert re.match(r"rank 1: other flags than on rank 0: dataset \S+ -> ", texts[0][0])
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_chats(tmp_path / "a" / "rows.jsonl", "yes")
    folders, seen = (tmp_path / "a", tmp_path / "b"), {**flags, "dataset": "rows.jsonl"}
    texts = run_ranks(from_own_folder, 2, folders, seen)
    assert texts[0] == texts[1]
    assert texts[0][0].startswith("rank 1: rows.jsonl: no such file")
    write_chats(tmp_path / "b" / "rows.jsonl", "no")
    texts = run_ranks(from_own_folder, 2, folders, seen)
    assert texts[0] == texts[1]
    assert re.match(r"rank 1: other files than on rank 0: data \S+ -> ", texts[0][0])


def from_own_folder(world, folders, flags):
    """The same relative path, seen from two working folders, as from two machines."""
    os.chdir(folders[world.rank])
    try:
        return on_ranks_refused(world, flags)
    finally:
        os.chdir("/")


# --- how it is started


def test_a_port_in_use_is_one_line_that_names_it(flags):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        result = forked(
            "python recipes/finetune.py",
            apart=True,
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            **ranks,
        )
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: the ranks cannot meet at 127.0.0.1:{port}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"RANK": "abc", "WORLD_SIZE": "2"}, "RANK=abc"),
        ({"RANK": "0", "WORLD_SIZE": "abc"}, "WORLD_SIZE=abc"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "are set, but not MASTER_ADDR, MASTER_PORT"),
        ({"WORLD_SIZE": "2"}, "are set, but not RANK, MASTER_ADDR, MASTER_PORT"),
    ],
)
def test_launch_variables_that_do_not_fit_are_named(env, says, monkeypatch):
    from utils.run import distributed

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    distributed.stop_distributed()  # that of an earlier test in this process would be used
    with pytest.raises(ConfigError, match=says):
        distributed.init_distributed()


@pytest.mark.slow
def test_an_error_is_printed_once_for_two_ranks_and_the_exit_is_not_zero(tmp_path):
    result = shell("torchrun --nproc_per_node 2 recipes/finetune.py --dataset nowhere.jsonl")
    assert result.returncode == 1  # torchrun's own, whatever its workers exit with
    assert result.stderr.count("error: ") == 1
    assert "error: nowhere.jsonl" in result.stderr
    assert "[rank1]" not in result.stderr  # so torch marks the lines of a traceback
    result = forked("torchrun --nproc_per_node 2 recipes/finetune.py --learing_rate 1", apart=True)
    assert result.stderr.count("error: ") == 1
    assert "--learing_rate" in result.stderr
    assert result.returncode == 1


# --- a look before the run


def test_a_preview_reads_everything_but_weights(flags, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(flags["model"], model)
    file = model / "model.safetensors"
    with open(file, "r+b") as weights:  # NaN wherever a weight is
        start = 8 + int.from_bytes(weights.read(8), "little")
        weights.seek(start)
        weights.write(b"\xff" * (file.stat().st_size - start))
    settings = {**flags, "model": model, "global_batch_size": 2, "output_dir": tmp_path / "out"}
    words = " ".join(f"--{name} {value}" for name, value in settings.items())
    result = forked(f"python recipes/preview.py {words}")
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[0].startswith("without effect here: ")
    assert "--output_dir" in lines[0]
    assert (
        lines[-1]
        == "checked   all that a run checks before it reads weights: flags of the plan, files, every row"
    )
    assert any(line.startswith("data      ") for line in lines)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_the_last_line_and_exit_code_1():
    command = "python recipes/preview.py --show 0 --batch_size 900000 --ranks 2"
    result = forked(command, apart=True)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: this does not fit: a rank needs ")
    assert "ranks     2 on cpu" in result.stdout


def test_a_preview_beside_a_rank_that_was_left_over_is_an_error_and_not_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match="RANK is set"):
        preview.main(preview.Config())


@pytest.mark.slow
def test_a_preview_on_two_ranks_is_done_once_and_leaves_no_folder(flags, tmp_path):
    words = " ".join(f"--{name} {value}" for name, value in flags.items() if name != "output_dir")
    out = tmp_path / "new"
    command = f"torchrun --nproc_per_node 2 recipes/preview.py --show 0 {words}"
    result = forked(f"{command} --output_dir {out}", apart=True)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(set(lines)) == len(lines)
    for start in ("data ", "batch ", "memory ", "checked "):
        assert len([line for line in lines if line.startswith(start)]) == 1, start
    assert not out.exists()


def test_masks_are_shown_and_nothing_else_happens(flags, tmp_path):
    rows = write_chats(tmp_path / "rows.jsonl", "yes", "no")
    result = forked(f"python recipes/preview.py --model {flags['model']} --dataset {rows} --show 1")
    assert "rows.jsonl:1\n" in result.stdout
    assert result.stdout.count("[[") == 1
    assert "[[yes" in result.stdout


def test_the_former_flags_of_finetune_are_answered_with_preview():
    for flag in ("--check", "--show_masks 2"):
        result = forked(f"python recipes/finetune.py {flag}")
        assert result.returncode != 0
        assert "recipes/preview.py shows rows, masks and the plan" in result.stdout
