"""Bad disks, files, settings and surroundings end a run in one line, or change nothing.

python -m pytest tests/test_fault_files.py -m ""
"""

import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial

import faults
import pytest
import torch
import torch.distributed.checkpoint as dcp
from launch import Forked, forked
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from shell import shell
from test_checkpoint import build, fingerprint
from test_checkpoint import train as train_steps
from test_parity import write_rows
from test_resume import RUN, curve, cut, train, weights
from tiny import tiny_model_folder
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from utils.run.distributed import init_distributed, together
from utils.run.errors import ConfigError
from utils.run.files import replace_file
from utils.run.folder import claim_output
from utils.train import checkpoint as checkpoint_module
from utils.train.checkpoint import CheckpointSaver
from utils.train.resume import damage, find_checkpoint

slow = pytest.mark.slow
MAY_MOUNT = (
    shutil.which("unshare") and not subprocess.run(["unshare", "--mount", "true"]).returncode
)
root_only = pytest.mark.skipif(not MAY_MOUNT, reason="mounting a small disk needs root")
TORCHRUN = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node 2"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(flags, folder) of an uninterrupted run on 2 ranks with checkpoints after steps 2, 4 and 5."""
    root = tmp_path_factory.mktemp("files")
    model, rows = (
        tiny_model_folder(root / "model", vocab_size=271),
        write_rows(root / "rows.jsonl", 14),
    )
    flags = {**RUN, "model": str(model), "dataset": str(rows)}
    return flags, run_ranks(train, 2, flags, root / "whole")[0]


@pytest.fixture(scope="module")
def adapted(whole, tmp_path_factory):
    """The same with adapters of rank 4."""
    flags = {**whole[0], "lora_rank": 4}
    return flags, run_ranks(train, 2, flags, tmp_path_factory.mktemp("adapted") / "whole")[0]


@pytest.fixture
def half(whole, tmp_path):
    """(flags, folder) of that run, killed after its fourth step."""
    return whole[0], cut(whole[1], tmp_path / "half", 4)


@pytest.fixture(scope="module")
def gone_on(whole, tmp_path_factory):
    """The curve of that run when the same settings go on with it after its fourth step, on one rank."""
    return curve(train(None, whole[0], cut(whole[1], tmp_path_factory.mktemp("on") / "plain", 4)))


@contextmanager
def small_disk(folder, options):
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder, leave):
    disk = os.statvfs(folder)
    (folder / "filler").write_bytes(bytes(disk.f_bavail * disk.f_frsize - leave))


def when(condition, action=lambda: None, seconds=60):
    """A thread that calls `action` as soon as the condition holds."""

    def wait():
        until = time.monotonic() + seconds
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        action()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def refused(flags, out) -> str:
    """The error, which must be one line."""
    with pytest.raises(ConfigError) as error:
        train(None, flags, out)
    text = str(error.value)
    assert "\n" not in text
    return text


def words(flags, out) -> str:
    """Flags as a command line."""
    return " ".join(f"--{name} {value}" for name, value in {**flags, "output_dir": out}.items())


def names(folder) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def times(folder) -> dict:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def same_tensors(one, other) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- the disk


@slow
@root_only
def test_a_disk_that_fills_during_a_run_ends_it_in_one_line_and_it_goes_on_when_there_is_room(
    whole, tmp_path
):
    """The disk fills while the process sleeps in the fourth step, before it would save."""
    flags, _ = whole
    with small_disk(tmp_path / "disk", "size=16m") as disk:
        out = disk / "out"
        when((out / "checkpoints" / "step_00000002").exists, lambda: fill(disk, 2**16))
        command = f"python recipes/finetune.py {words(flags, out)}"
        ended = forked(command, apart=True, FAULT="step:0:3:3")
        assert (ended.returncode, ended.stderr.count("\n")) == (2, 1)
        assert ended.stderr.startswith(
            "error: no space left: need 0.001 GiB, have 0.000 GiB at " + str(out)
        )
        assert names(out / "checkpoints") == ["step_00000002"]
        assert damage(out / "checkpoints" / "step_00000002", 0, 1) == ""
        (disk / "filler").unlink()
        train(None, flags, out)
        train(None, flags, tmp_path / "alone")
        assert curve(out) == curve(tmp_path / "alone")
        assert same_tensors(weights(out), weights(tmp_path / "alone"))


@slow
@root_only
def test_a_disk_without_inodes_is_one_line_and_every_checkpoint_on_it_is_sound(whole, tmp_path):
    """The inodes run out at different points of the run."""
    sound = 0
    for inodes in (2, 4, 6, 8, 12, 16, 20, 23):
        with small_disk(tmp_path / f"{inodes}", f"nr_inodes={inodes}") as disk:
            ended = forked(f"python recipes/finetune.py {words(whole[0], disk / 'out')}")
            assert ended.returncode in (1, 2)
            *_, said = ended.stdout.splitlines()
            assert said.startswith("error: ")
            assert ended.stdout.count("error: ") == 1
            assert "no space left" in said.lower()
            assert str(disk) in said
            left = list(disk.glob("out/checkpoints/step_*"))
            assert [damage(path, 0, 1) for path in left] == [""] * len(left)
            assert not list(disk.glob("out/**/.tmp*"))
            sound += len(left)
    assert sound > 2  # with more inodes there are checkpoints to look at


def claim_as_another_user(world, out):
    """Root becomes another user for a moment, because modes do not stop root."""
    user = os.geteuid()
    out.parent.chmod(0o555)
    try:
        os.seteuid(user or 65534)
        claim_output(str(out), "finetune", world)
    except ConfigError as error:
        return str(error)
    finally:
        os.seteuid(user)
        out.parent.chmod(0o755)


@slow
def test_a_folder_that_may_not_be_written_is_refused(tmp_path):
    """Other folders that cannot be written are in test_saving.py and test_plan.py."""
    assert "Permission denied" in run_ranks(claim_as_another_user, 1, tmp_path / "out")[0]


# --- damaged and poisoned checkpoints


def flip(path, at, bit=1):
    data = bytearray(path.read_bytes())
    data[at] ^= bit
    path.write_bytes(data)


def from_step_2(file):
    shutil.copy(file.parent.with_name("step_00000002") / file.name, file)


ZERO, ONE = "__0_0.distcp", "__1_0.distcp"  # the tensors of ranks 0 and 1
DAMAGE = {  # what is done to a file of checkpoint 4 -> words in the answer
    "metadata cut": (".metadata", lambda f: os.truncate(f, 900), " is not what was written"),
    "metadata empty": (".metadata", lambda f: os.truncate(f, 0), " is not what was written"),
    "metadata missing": (".metadata", os.unlink, ": No such file"),
    "metadata of another step": (".metadata", from_step_2, " "),
    "tensors a byte short": (
        ONE,
        lambda f: os.truncate(f, f.stat().st_size - 1),
        " is not what was written",
    ),
    "a flipped bit": (ONE, lambda f: flip(f, -5000), " is not what was written"),
    "a flipped exponent": (ZERO, lambda f: flip(f, -5001, 64), " is not what was written"),
    "tensors missing": (ZERO, os.unlink, ": No such file"),
    "tensors of another step": (ZERO, from_step_2, " is not what was written"),
    "state changed": ("state.json", lambda f: flip(f, 20), " is not what was written"),
    "manifest cut": ("manifest.json", lambda f: os.truncate(f, 100), " is damaged"),
    "manifest empty": ("manifest.json", lambda f: os.truncate(f, 0), " is damaged"),
}


@slow
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_one_warning_and_refused_where_it_is_named(
    half, tmp_path, capsys, kind
):
    name, change, says = DAMAGE[kind]
    out, world = half[1], init_distributed()
    newest, before = out / "checkpoints" / "step_00000004", out / "checkpoints" / "step_00000002"
    change(newest / name)
    with pytest.raises(ConfigError, match="no sound checkpoint: ") as error:
        find_checkpoint(str(newest), tmp_path / "other", world)
    assert f"{newest}/{name}{says}" in str(error.value)
    assert newest.exists()
    assert find_checkpoint("auto", out, world) == before
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"warning: {newest}/{name}{says}")
    assert find_checkpoint("auto", out, world) == before
    assert capsys.readouterr().out == ""  # it was said once


@slow
def test_a_run_whose_newest_checkpoint_is_damaged_ends_as_if_nothing_had_been(whole, half):
    flags, out = half
    flip(out / "checkpoints" / "step_00000004" / ONE, -5000)
    run_ranks(train, 2, flags, out)
    assert curve(out) == curve(whole[1])
    assert same_tensors(weights(out), weights(whole[1]))


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


def poison(checkpoint, mark, where):
    """Plant a payload, and a manifest that vouches for it."""
    metadata, tensors = pickle.loads((checkpoint / ".metadata").read_bytes()), checkpoint / ZERO
    at = tensors.stat().st_size
    with open(tensors, "ab") as file:
        torch.save(Payload(mark), file)
    entry = _StorageInfo(ZERO, at, tensors.stat().st_size - at)
    if where == "metadata":
        metadata.planner_data = Payload(mark)
    elif where == "byte entry":
        metadata.state_dict_metadata["loader"] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex("loader")] = entry
    else:
        stored = next(i for i in metadata.storage_data if i.fqn == "model.model.norm.weight")
        metadata.storage_data[stored] = entry
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name in manifest["files"]:
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"sha256": hashlib.sha256(data).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert damage(checkpoint, 0, 1) == ""


@pytest.mark.parametrize(
    "where", ["metadata", *(pytest.param(n, marks=slow) for n in ("byte entry", "tensor"))]
)
def test_a_payload_in_a_checkpoint_does_not_run_though_the_manifest_vouches_for_it(
    half, tmp_path, where
):
    (flags, out), mark = half, tmp_path / "mark"
    newest = out / "checkpoints" / "step_00000004"
    poison(newest, mark, where)
    for resume in ("auto", str(newest)):
        assert str(newest) in refused({**flags, "resume": resume}, out)
    assert not mark.exists()
    with suppress(CheckpointException):
        dcp.load({"loader": None}, checkpoint_id=newest, no_dist=True)
    # the payload works, but torch itself loads tensors safely
    assert mark.exists() == (where != "tensor")


@slow
def test_times_do_not_say_which_checkpoint_is_the_newest(half, capsys, monkeypatch):
    """Clocks jumped or stood still."""
    newest, before = (half[1] / "checkpoints" / f"step_0000000{step}" for step in (4, 2))
    for zone, old, new in (("UTC", 2**31, 0), ("Pacific/Kiritimati", 10**9, 10**9)):
        for checkpoint, seconds in ((before, old), (newest, new)):
            for path in (*checkpoint.iterdir(), checkpoint):
                os.utime(path, (seconds, seconds))
        monkeypatch.setenv("TZ", zone)
        time.tzset()
        assert find_checkpoint("auto", half[1], init_distributed()) == newest
    assert capsys.readouterr().out == ""
    monkeypatch.undo()
    time.tzset()


# --- settings that changed


def other_rows(flags, folder):
    return {"dataset": str(write_rows(folder / "other.jsonl", 15))}


def same_rows(flags, folder):
    return {"dataset": str(shutil.copy(flags["dataset"], folder / "copy.jsonl"))}


def other_config(flags, folder):
    model = shutil.copytree(flags["model"], folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    return {"model": str(model)}


def other_weights(flags, folder):
    return {"model": str(tiny_model_folder(folder / "model", vocab_size=271, seed=1))}


def fewer_layers(flags, folder):
    return {"model": str(tiny_model_folder(folder / "model", vocab_size=271, num_hidden_layers=2))}


REFUSED = {  # what test_resume.py does not change -> words in the answer
    "seq_len that cuts rows": ({"seq_len": 44}, "data "),
    "dataset": (other_rows, "data "),
    "param_dtype": ({"param_dtype": "bf16"}, "param_dtype fp32 -> bf16"),
    "optimizer": ({"optimizer": "adamw_8bit"}, "optimizer adamw -> adamw_8bit"),
    "adapters": ({"lora_rank": 4}, "lora_rank 0 -> 4"),
    "a field of the config": (other_config, "rms_norm_eps"),
    "weights of the base": (other_weights, "weights "),
    "architecture": (fewer_layers, "num_hidden_layers"),
}
ADAPTERS_REFUSED = {
    "rank of adapters": ({"lora_rank": 8}, "lora_rank 4 -> 8"),
    "weights of the adapters' base": (other_weights, "weights "),
}
ALLOWED = {
    "batch_size": ({"batch_size": 2}, "batch_size 1 -> 2"),
    "dtype": ({"dtype": "bf16"}, "dtype fp32 -> bf16"),
    "seq_len that cuts nothing": ({"seq_len": 1024}, "seq_len 2048 -> 1024"),
    "the same rows elsewhere": (same_rows, "dataset "),
    "new data, with the flag": ({"max_rows": 9, "allow_new_data": True}, "max_rows 0 -> 9"),
}


@slow
@pytest.mark.parametrize("kind", [*REFUSED, *ADAPTERS_REFUSED])
def test_a_resume_that_would_be_another_run_is_refused_by_field(whole, adapted, tmp_path, kind):
    change, says = {**REFUSED, **ADAPTERS_REFUSED}[kind]
    flags, run = whole if kind in REFUSED else adapted
    out = shutil.copytree(run, tmp_path / "cut")
    (out / "plan.json").unlink()
    before = times(out)
    text = refused({**flags, **(change(flags, tmp_path) if callable(change) else change)}, out)
    assert text.startswith("the checkpoint is of another run: ")
    assert says in text
    assert times(out) == before


@slow
@pytest.mark.parametrize("kind", ALLOWED)
def test_a_resume_with_other_settings_goes_on_and_says_what_changed(
    half, gone_on, tmp_path, capsys, kind
):
    (flags, out), (change, says) = half, ALLOWED[kind]
    train(None, {**flags, **(change(flags, tmp_path) if callable(change) else change)}, out)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("changed ")]
    assert says in line
    assert [number[0] for number in curve(out)] == [1, 2, 3, 4, 5, 5]
    assert (curve(out) == gone_on) == (
        kind in ("seq_len that cuts nothing", "the same rows elsewhere")
    )


# --- an example that is far too large


@slow
def test_a_line_of_three_megabytes_is_cut_and_counted_and_the_others_train(whole, tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    answers = ["1", "a word " * 450_000, "2", "3"]
    rows.write_text(
        "".join(json.dumps({"instruction": "Say.", "output": a}) + "\n" for a in answers)
    )
    changes = {"dataset": str(rows), "seq_len": 256, "eval_share": 0.0, "steps": 2}
    out = train(None, {**whole[0], **changes}, tmp_path / "out")
    printed = capsys.readouterr().out
    assert f"{rows}: 4 rows, " in printed
    assert "1 cut at --seq_len" in printed
    assert [number[0] for number in curve(out)] == [1, 2]
    assert json.loads((out / "plan.json").read_text())["measured"]["peak_memory_bytes"][0] < 2**30


# --- the surroundings of a run


@slow
def test_a_folder_in_use_is_refused_and_that_of_a_dead_process_is_taken_over(whole, tmp_path):
    flags, out = whole[0], tmp_path / "out"
    command = f"python recipes/finetune.py {words(flags, out)}"
    with Forked(command, FAULT="step:0:3:100") as first:  # until it is killed
        log = out / "metrics.jsonl"
        # it sleeps in the fourth step
        when(lambda: log.exists() and log.read_text().count("\n") == 3).join()
        before = times(out)
        in_use = f"{out} is in use by process {first.pids[0]} on {os.uname().nodename}"
        assert in_use in refused(flags, out)
        assert times(out) == before
    assert (out / ".lock").exists()
    train(None, flags, out)
    assert [number[0] for number in curve(out)] == [1, 2, 3, 4, 5, 5]
    assert not (out / ".lock").exists()


@slow
@root_only
def test_without_a_home_and_with_full_temporary_folders_it_trains(whole, tmp_path):
    """The mounts end with the shell."""
    (tmp_path / "ro").mkdir()
    (tmp_path / "script").write_text(
        "set -e\n"
        f"mount -t tmpfs -o ro tmpfs {tmp_path}/ro\n"
        "mount -t tmpfs -o size=4k tmpfs /dev/shm\nhead -c 4096 /dev/zero > /dev/shm/full\n"
        f"env -u HOME TMPDIR=/nowhere {TORCHRUN} recipes/finetune.py {words(whole[0], tmp_path / 'one')}\n"
        f"HOME={tmp_path}/ro TMPDIR={tmp_path}/ro {sys.executable} recipes/finetune.py "
        f"{words(whole[0], tmp_path / 'two')}\n"
    )
    ended = shell(f"unshare --mount sh {tmp_path}/script")
    assert ended.returncode == 0, ended.stderr
    assert same_tensors(weights(tmp_path / "one"), weights(whole[1]))
    assert curve(tmp_path / "two")[-1][0] == 5


@slow
def test_a_closed_pipe_and_a_deleted_log_do_not_end_the_run(whole, tmp_path):
    """Nobody reads after the first line, and metrics.jsonl is deleted in the third step."""
    flags, out = whole[0], tmp_path / "out"
    log, run = out / "metrics.jsonl", f"{TORCHRUN} recipes/finetune.py {words(flags, out)}"
    when(lambda: log.exists() and log.read_text().count("\n") == 2, log.unlink)
    ended = shell(f'sh -c "(FAULT=step:0:2:3 {run}; echo $? > {tmp_path}/code) | head -n 1"')
    assert (tmp_path / "code").read_text() == "0\n", ended.stderr
    assert ended.stdout == "--- world\n"
    assert curve(out) == curve(whole[1])[2:]
    assert same_tensors(weights(out), weights(whole[1]))


@slow
def test_words_of_every_script_train_where_the_locale_knows_none(whole, tmp_path):
    """The rows and the name of their file are Chinese, in a locale that knows only ASCII."""
    rows = tmp_path / "数据.jsonl"
    chats = [{"instruction": f"数到 {i}", "output": "一二三四五"[: i + 1]} for i in range(5)]
    rows.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chats), encoding="utf-8"
    )
    flags = {**whole[0], "dataset": str(rows), "eval_share": 0.0}
    locale = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = shell(f"python recipes/finetune.py {words(flags, tmp_path / 'out')}", **locale)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert curve(tmp_path / "out") == curve(train(None, flags, tmp_path / "here"))


# --- adapters


def train_and_die(world, flags, out, point):
    """Die at a point of the save of a checkpoint or of the adapter."""
    os.environ["FAULT"] = point
    faults.install()
    pwritev, rename, calls = os.pwritev, os.rename, []
    die = partial(os.kill, os.getpid(), signal.SIGKILL)

    def kill_at_write(*args):
        calls.append(args)
        return die() if point == "adapter write" and len(calls) == 9 else pwritev(*args)

    def kill_at_rename(old, new):
        return die() if (point, new.name) == ("adapter rename", "adapter") else rename(old, new)

    os.pwritev, os.rename = kill_at_write, kill_at_rename
    train(world, flags, out)


@slow
@pytest.mark.parametrize(
    ("point", "newest"),
    [("data:1:4", 2), ("rename:0:4", 2), ("adapter write", 5), ("adapter rename", 5)],
)
def test_a_killed_save_of_adapters_is_absent_and_the_run_goes_on_to_the_same_bits(
    adapted, tmp_path, point, newest
):
    (flags, whole), out = adapted, tmp_path / "out"
    with pytest.raises(AssertionError, match="rank [01] of 2"):
        run_ranks(train_and_die, 2, flags, out, point)
    found = sorted((out / "checkpoints").glob("step_*"))
    assert found[-1].name == f"step_{newest:08d}"
    assert [damage(path, 0, 1) for path in found] == [""] * len(found)
    assert not (out / "adapter").exists()
    run_ranks(train, 2, flags, out)
    ours, theirs = (
        load_file(folder / "adapter" / "adapter_model.safetensors") for folder in (out, whole)
    )
    assert same_tensors(ours, theirs)
    assert curve(out) == curve(whole)
    assert not list(out.rglob(".tmp*"))


@slow
def test_an_adapter_of_another_shape_is_refused_by_name(adapted, tmp_path, capsys):
    model = tiny_model_folder(tmp_path / "model", vocab_size=271, hidden_size=32)
    flags = {
        **adapted[0],
        "lora_rank": 0,
        "adapter": str(adapted[1] / "adapter"),
        "model": str(model),
    }
    assert "layers.0.mlp.down_proj.lora_B.weight [32, 4], there [64, 4]" in refused(
        flags, tmp_path / "out"
    )
    assert not (tmp_path / "out").exists()


def save_and_fill(world, folder, leave):
    """Save; unless `leave` is None, the disk fills as soon as the save has checked that there is room."""
    original = checkpoint_module.check_space

    def check_then_fill(path, needed_bytes, world):
        original(path, needed_bytes, world)
        with together(world):  # no rank goes on before the disk is full
            if world.rank == 0:
                fill(folder.parent, leave)

    model, optimizer = build(world)
    train_steps(world, model, optimizer, 0, 1)
    before = fingerprint(model, optimizer)
    checkpoint_module.check_space = original if leave is None else check_then_fill
    try:
        CheckpointSaver(folder, 0, world).save(2 if leave is None else 4, model, optimizer, {})
    except ConfigError as error:
        return str(error), error.agreed, fingerprint(model, optimizer) == before
    finally:
        checkpoint_module.check_space = original


@root_only
def test_a_disk_that_fills_during_a_save_leaves_the_checkpoint_before_and_nothing_half(tmp_path):
    """It fills while the tensors, their metadata, state.json or the manifest are written."""
    with small_disk(tmp_path / "disk", "size=4m") as disk:
        folder = disk / "checkpoints"
        run_ranks(save_and_fill, 2, folder, None)
        needed = sum(file.stat().st_size for file in (folder / "step_00000002").iterdir())
        for leave in (
            0,
            8192,
            needed // 4,
            needed // 2,
            needed - 40960,
            needed - 8192,
            needed - 4096,
        ):
            for text, agreed, unchanged in run_ranks(save_and_fill, 2, folder, leave):
                assert text.startswith(f"{folder}/step_00000004 cannot be written: ")
                assert "no space left" in text.lower()
                assert "\n" not in text
                assert agreed
                assert unchanged
            assert names(folder) == ["step_00000002"]
            (disk / "filler").unlink()


@slow
def test_weights_of_another_kind_of_number_are_refused(whole, tmp_path):
    """Integers where the model has floats."""
    folder = shutil.copytree(whole[0]["model"], tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int64)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.norm.weight" in refused({**whole[0], "model": str(folder)}, tmp_path / "out")


@slow
def test_a_model_in_more_files_than_may_be_open_trains_also_with_a_closed_standard_output(
    whole, tmp_path
):
    """Standard output does not exist, unlike a pipe that nobody reads."""
    model = tiny_model_folder(tmp_path / "model", vocab_size=271, num_hidden_layers=9, files=100)
    assert len(list(model.glob("*.safetensors"))) > 64
    flags = {**whole[0], "model": str(model), "steps": 2}
    recipe = f"{sys.executable} recipes/finetune.py {words(flags, tmp_path / 'out')}"
    ended = shell(f"sh -c 'ulimit -n 64; exec {recipe} >&-'")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert curve(tmp_path / "out")[-1][0] == 2


@slow
def test_a_name_that_is_no_text_is_printed_escaped(whole, tmp_path):
    """A file's name has a byte that is not UTF-8, and standard output is strict."""
    rows = shutil.copy(whole[0]["dataset"], tmp_path / "rows\udcff.jsonl")
    flags, strict = (
        {**whole[0], "dataset": str(rows), "steps": 2},
        {"PYTHONIOENCODING": "utf-8:strict"},
    )
    ended = shell(f"python recipes/finetune.py {words(flags, tmp_path / 'out')}", **strict)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "rows\\udcff.jsonl: " in ended.stdout


def test_what_a_file_holds_is_on_the_disk_before_its_name(tmp_path):
    """A machine that lost its power between the two would have plan.json with nothing in it."""
    (tmp_path / "plan.json").write_text("old")
    called = []
    sys.setprofile(lambda frame, event, what: event == "c_call" and called.append(what))
    replace_file(tmp_path / "plan.json", "new")
    sys.setprofile(None)
    assert [what for what in called if what in (os.fsync, os.rename, os.replace)] == [
        os.fsync,
        os.replace,
    ]
    assert (tmp_path / "plan.json").read_text() == "new"
    assert os.listdir(tmp_path) == ["plan.json"]


@slow
@root_only
def test_a_full_disk_that_the_log_meets_is_one_line_with_its_name(whole, tmp_path):
    """The disk fills while metrics.jsonl is written, before the next save."""
    flags = {**whole[0], "save_every": 0, "steps": 60}
    with small_disk(tmp_path / "disk", "size=1m") as disk:
        log = disk / "out" / "metrics.jsonl"
        when(log.exists, lambda: fill(disk, 0))
        command = f"python recipes/finetune.py {words(flags, disk / 'out')}"
        ended = forked(command, apart=True)
        assert ended.returncode in (1, 2)
        (line,) = ended.stderr.splitlines()
        assert "no space left" in line.lower()
        assert str(log) in line
