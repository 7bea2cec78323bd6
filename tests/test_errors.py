"""What escapes a recipe: one line, once, and the right exit code.

python -m pytest tests/test_errors.py
"""

import errno
import io
import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import generate
import preview
import pytest
import torch
from launch import forked
from tiny import tiny_tokenizer

from utils.run.distributed import ALONE, together
from utils.run.errors import ConfigError, check, differences, escaped, others_code, print0
from utils.run.signals import report_errors
from utils.run.units import IGNORE

ROOT = Path(__file__).resolve().parent.parent


def code_of(body: str) -> str:
    """`body` inside report_errors()."""
    code = "import errno, os, time\nfrom utils.run.errors import *\n"
    code += "from utils.run.signals import *\nwith report_errors():\n"
    return code + "".join(f"    {line}\n" for line in body.splitlines())


def start(body: str, rank: int = 0) -> subprocess.Popen:
    """A process of its own for code_of(body)."""
    environment = os.environ | {"RANK": str(rank), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code_of(body)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(body: str, rank: int = 0) -> tuple[int, str, str]:
    process = start(body, rank)
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


@pytest.fixture
def run_forked(tmp_path):
    """run() without the imports, for what does not depend on how Python itself ends."""

    def run(body: str, rank: int = 0) -> tuple[int, str, str]:
        (tmp_path / "body.py").write_text(code_of(body))
        done = forked(f"python {tmp_path / 'body.py'}", apart=True, RANK=str(rank))
        return done.returncode, done.stdout, done.stderr

    return run


def test_check_raises_only_where_the_condition_fails():
    check(True, "unseen")
    check([0], "unseen")
    with pytest.raises(ConfigError, match="seen"):
        check(None, "seen")


def test_bad_input_is_one_line_and_exit_code_2():
    assert run("check(False, '--lr 0 teaches nothing: try --lr 1e-5')") == (
        2,
        "",
        "error: --lr 0 teaches nothing: try --lr 1e-5\n",
    )


def test_several_errors_are_several_lines(run_forked):
    assert run_forked("raise ConfigError(['one', 'two'], agreed=True)") == (
        2,
        "",
        "error: one\nerror: two\n",
    )


FORGED = "x\nerror: forged\r\x1b[2J\x1b]0;title\x07\u2028error: forged\u202egnp.exe\x9b31m\x00\x85\x0b\udcff"
ESCAPED = r"x\nerror: forged\r\u001b[2J\u001b]0;title\u0007\u2028error: forged\u202egnp.exe"
ESCAPED += r"\u009b31m\u0000\u0085\u000b\udcff"


def test_control_characters_are_escaped_once_and_everything_else_stays():
    assert escaped(FORGED) == escaped(escaped(FORGED)) == ESCAPED
    assert len(ESCAPED.splitlines()) == 1
    assert escaped("a\nb\rc", keep="\n") == "a\nb\\rc"
    plain = "\ttab, ünïcödé, 数据, עברית, \U0001f468\u200d\U0001f469, C:\\new"
    assert escaped(plain) == plain
    for number in [
        *range(32),
        *range(0x7F, 0xA0),
        0x2028,
        0x2029,
        *range(0x202A, 0x202F),
        0x2066,
        0x2069,
    ]:
        assert escaped(chr(number)).isprintable() or chr(number) == "\t"


def test_a_name_cannot_forge_a_line_whichever_way_its_error_takes():
    error = ConfigError(f"{FORGED} is no file")
    assert str(error) == f"{ESCAPED} is no file"
    several = ConfigError([f"one {FORGED}", "two"], agreed=True)
    assert str(several).split("\n") == [f"one {ESCAPED}", "two"]
    again = pickle.loads(pickle.dumps(several))
    assert (again.lines, again.agreed) == (several.lines, True)
    for raised in (error, several):
        with pytest.raises(ConfigError) as caught, together(ALONE):
            raise raised
        assert caught.value.lines == raised.lines


def test_whatever_others_raise_is_one_line_and_ctrl_c_passes():
    class Panic(BaseException):
        """As Rust's."""

    for error in (
        KeyError("x\ny"),
        Panic("a\n\n  b"),
        RecursionError(),
        MemoryError(),
        StopIteration(3),
    ):
        with (
            pytest.raises(ConfigError, match="^config.json: ") as caught,
            others_code("config.json", "another"),
        ):
            raise error
        assert len(caught.value.lines) == 1
        assert str(caught.value).endswith(" (fix: another)")
        assert type(error).__name__ in str(caught.value)
    for error in (KeyboardInterrupt("SIGINT"), SystemExit(3), ConfigError("mine")):
        with pytest.raises(type(error)) as caught, others_code("config.json"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    "how",
    [
        "raise ConfigError(text)",
        "print0(text)",
        "act(text)",
        "raise OSError(28, os.strerror(28), text)",
    ],
)
def test_nothing_that_a_recipe_prints_obeys_a_name(how, run_forked):
    _, out, err = run_forked(f"text = {FORGED!r}\n{how}")
    assert "forged" in out + err
    for line in (out + err).split("\n"):
        assert line.isprintable() or "\t" in line
        assert not line.startswith("error: forged")


def test_masks_keep_the_line_breaks_of_a_row_and_show_other_control_characters(capsys):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(f"ab\n{FORGED[:-1]}", add_special_tokens=False)["input_ids"]
    labels = torch.tensor([IGNORE] + ids[1:])
    item = SimpleNamespace(ids=torch.tensor(ids), labels=labels, where=f"{FORGED}:3")
    preview.show_masks([item], tokenizer, 1)
    out = capsys.readouterr().out
    where, text = out.split("\n", 1)
    assert where == f"{ESCAPED}:3"
    expected = ESCAPED.removesuffix(r"\udcff").replace(r"\n", "\n", 1)
    assert text == f"a[[b\n{expected}]]\n\n"


def test_what_a_model_says_does_not_move_the_cursor(capsys):
    printed = generate.EscapedText(tiny_tokenizer())
    printed.on_finalized_text("two\nlines \x1b[2J\rerror: forged\u202e\n", stream_end=True)
    assert capsys.readouterr().out == "two\nlines \\u001b[2J\\rerror: forged\\u202e\n\n"


@pytest.mark.parametrize("flag", ["model", "dataset", "tokenizer", "chat_template", "eval_dataset"])
def test_a_flag_cannot_forge_a_line(flag, tmp_path, capsys):
    """Its value is named in the error that it leads to."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"instruction": "Say.", "output": "Yes."}\n')
    flags = {"model": str(ROOT / "recipes" / "tiny"), "dataset": str(rows)}
    flags[flag] = str(tmp_path / FORGED.replace("\x00", ""))
    with pytest.raises(SystemExit) as ended, report_errors():
        preview.main(preview.Config(**flags))
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    (line, empty) = err.split("\n")
    assert line.isprintable()
    assert "forged" in line
    assert empty == ""
    assert all(line.isprintable() for line in out.split("\n"))


@pytest.mark.slow
def test_another_rank_gives_rank_0_time_to_speak_and_is_silent_where_all_agree():
    started = time.monotonic()
    agreed = start("raise ConfigError('one', agreed=True)", rank=1)
    assert run("raise ConfigError('one error: x')", rank=1) == (
        2,
        "",
        "error: rank 1: one error: x\n",
    )
    assert (*agreed.communicate(timeout=60), agreed.returncode) == ("", "", 2)
    assert time.monotonic() - started > 4


def test_acts_are_announced_by_rank_0(run_forked):
    assert run_forked("act('plan')") == (0, "--- plan\n", "")
    assert run_forked("act('plan')", rank=1) == (0, "", "")


def test_an_error_of_our_own_keeps_its_traceback_and_names_act_and_rank():
    code, _, err = run("act('shard')\nassert 1 + 1 == 3, '1 + 1'", rank=1)
    assert code == 1
    assert err.startswith("error: rank 1 failed in act 'shard'; its traceback follows\nTraceback")
    assert "AssertionError: 1 + 1" in err


FULL = os.strerror(errno.ENOSPC)


def test_a_run_that_a_signal_stopped_after_its_checkpoint_ends_with_its_number(run_forked):
    """`finetune.py ... && export.py ...` published a model that was half trained."""
    stopped = "print_resume_command('SIGTERM', Path('out/step_00000007'), Cfg(), ALONE)"
    begin = """from utils.train.resume import print_resume_command
from utils.run.distributed import ALONE
class Cfg: output_dir, resume = "out", "auto"
"""
    code, out, err = run_forked(f"{begin}{stopped}")
    assert (code, err) == (128 + signal.SIGTERM, "")
    assert "stopped   by SIGTERM after step 7" in out
    # in a notebook, the next run begins anew
    assert run_forked(f"{begin}{stopped}\nwith report_errors(): pass")[0] == 0


@pytest.mark.parametrize(
    "raised",
    [
        "OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), '/out/model')",
        "RuntimeError(f'I/O error: {os.strerror(errno.ENOSPC)} (os error 28)')",
        "PermissionError(errno.EACCES, os.strerror(errno.EACCES), '/out/model')",
        "OSError(errno.EROFS, os.strerror(errno.EROFS), '/out/model')",
    ],
)
def test_a_disk_that_is_full_or_may_not_be_used_is_one_line_that_names_the_act(raised, run_forked):
    code, _, err = run_forked(f"act('save')\nraise {raised}")
    assert code == 1
    file = "a file" if "RuntimeError" in raised else "/out/model"
    why = f" for {file} in act 'save' (fix: room, or rights; or another --output_dir)\n"
    reasons = [os.strerror(code) for code in (errno.ENOSPC, errno.EACCES, errno.EROFS)]
    assert err in [f"error: {reason}{why}" for reason in reasons]


def test_nccl_without_room_in_shared_memory_is_no_full_disk(run_forked):
    """The text is from torchtitan issue 853, its end from newer NCCL; Docker gives 64 MiB."""
    code, _, err = run_forked(
        "import torch\nraise torch.distributed.DistBackendError('unhandled system error\\nLast error:\\n'"
        " 'Error while creating shared memory segment /dev/shm/nccl-Xq2zvN (size 33030528), error: '"
        " + os.strerror(errno.ENOSPC) + ' (28)')"
    )
    said = "error: NCCL has no room in /dev/shm (fix: a larger one, in Docker --shm-size 8g)\n"
    assert (code, err) == (1, said)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_really_full_is_told_from_a_bug(run_forked):
    code, _, err = run_forked("with open('/dev/full', 'w') as file:\n    file.write('x' * 100000)")
    assert (code, len(err.splitlines())) == (1, 1)
    assert FULL in err


def test_other_failures_of_files_keep_their_traceback(run_forked):
    code, _, err = run_forked("open('/no/such/file')")
    assert code == 1
    assert "Traceback" in err


def test_ctrl_c_is_one_line_and_exit_code_130():
    process = start("act('train')\ntime.sleep(60)")
    assert process.stdout.readline() == "--- train\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "error: stopped by SIGINT in act 'train'\n")


def test_a_signal_whose_exception_is_lost_ends_the_run_at_the_next_act(run_forked):
    """Python swallows what the callback of a weak reference raises, as in the trace of the act plan."""
    lost = """import signal, weakref
stop_at_once()
act('plan')
value = {1}
weakref.finalize(value, signal.raise_signal, signal.SIGTERM)
del value
print('goes on', flush=True)
act('load')
print('never')"""
    code, out, err = run_forked(lost)
    assert (code, out) == (143, "--- plan\ngoes on\n")
    assert err.endswith("error: stopped by SIGTERM in act 'plan'\n")


def test_a_recipe_runs_with_the_stdout_of_a_notebook():
    """`%run recipes/finetune.py` there: a stream of Python's own class, without an encoding to change."""
    with redirect_stdout(io.StringIO()) as out, report_errors():
        print0("ready")
    assert out.getvalue() == "ready\n"


def test_a_rank_that_is_no_number_is_one_line(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "abc")
    print0("said")
    assert capsys.readouterr().out == "said\n"


def test_a_second_text_is_an_error_and_not_lost(capsys):
    """A user writes print0("sample", answer) where print stood."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        print0("sample", "an answer")
    assert capsys.readouterr().out == ""


@pytest.fixture(scope="module")
def ended_by_others():
    """(code, stdout, stderr) of a process that tells of its collections; someone else's code ends it."""
    told = "import gc\nprint(gc.isenabled(), gc.get_freeze_count() > 0)"
    return run(f"{told}\nraise SystemExit(7)")


def test_exit_codes_of_others_pass_through(ended_by_others):
    code, _, err = ended_by_others
    assert (code, err) == (7, "")


def test_collections_pass_over_what_the_imports_made(ended_by_others):
    """A recipe turns them off for its imports; from here on they run."""
    assert ended_by_others[1] == "True True\n"


def test_of_long_paths_that_differ_the_ends_are_shown():
    """Of a setting that changed only their beginnings were printed, which are the same on a shared disk."""
    folder = "/lustre/projects/languages/data/2026_november/conversations/cleaned/"
    old, new = ({"dataset": f"{folder}version_{number}.jsonl"} for number in (1, 2))
    before, after = differences(old, new).split(" -> ")
    assert before.endswith("/cleaned/version_1.jsonl")
    assert after.endswith("/cleaned/version_2.jsonl")
