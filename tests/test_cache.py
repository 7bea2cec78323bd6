"""Tokenized data on disk equals that in memory, is made once, and is never half written.

python -m pytest tests/test_cache.py
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from shell import ROOT
from test_data import load_examples
from test_parity import write_rows
from tiny import tiny_model_folder

from utils.data import cache
from utils.data import examples as data
from utils.data.encode import TWICE, chunks
from utils.data.tokens import load_tokenizer
from utils.run.distributed import set_timeout, together
from utils.run.errors import ConfigError

SCRIPT = """
import sys
from utils.data import examples as data
from utils.data.tokens import load_tokenizer
from utils.run.signals import report_errors
if __name__ == "__main__":
    data.SMALL = 0
    with report_errors():
        examples = data.load_examples(data.Rows(sys.argv[2], 64), load_tokenizer(sys.argv[1]))
        print("rows", len(examples), examples.fingerprint)
"""

WRITERS = """
from utils.data.cache import in_processes
from utils.run.signals import report_errors
if __name__ == "__main__":
    with report_errors():
        for _ in in_processes(bytes, [2**21] * 10**6):  # that many zeros
            print("read", flush=True)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("cache")
    model = tiny_model_folder(root / "model", vocab_size=271)
    (root / "script.py").write_text(SCRIPT)
    rows = write_rows(root / "rows.jsonl", 700).read_text().splitlines()
    rows[5] = rows[4]  # one comes twice
    rows[9] = json.dumps(
        {
            "messages": [
                {"role": "user", "content": "1 " * 80},
                {"role": "assistant", "content": "a"},
            ]
        }
    )
    (root / "rows.jsonl").write_text("\n".join(rows))
    return model, root / "rows.jsonl"


@pytest.fixture
def everything_is_large(monkeypatch, tmp_path):
    monkeypatch.setattr(data, "SMALL", 0)
    monkeypatch.setattr(cache, "cores", lambda: 1)  # a process takes 2 s to start
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "raw_fsdp" / "data"


def kept(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*") if path.is_dir()]


def test_it_holds_what_memory_would_hold_and_is_made_once(
    files, monkeypatch, everything_is_large, capsys
):
    tokenizer = load_tokenizer(files[0])
    mapped = load_examples(files[1], tokenizer, 64)
    (folder,) = kept(everything_is_large)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = load_examples(files[1], tokenizer, 64)
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert f"tokens    are in {folder}\n" in capsys.readouterr().out
    monkeypatch.setattr(data, "SMALL", 2**24)
    plain = load_examples(files[1], tokenizer, 64)
    for other in (mapped, again):
        assert other.fingerprint == plain.fingerprint
        assert (other.dropped, other.notes) == (plain.dropped, plain.notes)
        assert torch.equal(other.keys, plain.keys)
        for i in range(len(plain)):
            assert other[i].where == plain[i].where
            assert torch.equal(other[i].ids, plain[i].ids)
            assert torch.equal(other[i].labels, plain[i].labels)
    assert plain.dropped
    assert plain.notes[TWICE] > 0


def test_its_name_follows_from_all_that_the_tokens_follow_from(files, tmp_path):
    def key(path=files[1], template="", **settings):
        tokenizer = load_tokenizer(files[0], template)
        rows = data.Rows(**{"dataset": "rows", "seq_len": 64} | settings)
        return cache.key_of([path], tokenizer, rows)

    other = tmp_path / "rows.jsonl"
    other.write_text(files[1].read_text())
    assert key(path=other) == key()
    other.write_text(files[1].read_text() + " ")
    keys = [
        key(),
        key(path=other),
        key(template="alpaca"),
        key(seq_len=65),
        key(train_on="all"),
        key(too_long="drop"),
    ]
    assert len(set(keys)) == len(keys)


def test_bad_rows_are_named_and_nothing_is_kept(files, everything_is_large, tmp_path):
    lines = files[1].read_text().splitlines()
    lines[400] = '{"messages": 5}'
    lines[600] = "{]"
    bad = tmp_path / "bad.jsonl"
    bad.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as refused:
        load_examples(bad, load_tokenizer(files[0]), 64)
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"{bad}:401: messages: expected list, got number (fix: ")
    assert second.startswith(f"{bad}:601: not JSON")
    assert kept(everything_is_large) == []


def test_mixtures_and_dropped_rows_are_the_same_from_the_disk(
    files, everything_is_large, tmp_path, monkeypatch
):
    bad = tmp_path / "bad.jsonl"
    bad.write_text(
        "\n".join(
            [*files[1].read_text().splitlines()[:300], '{"messages": 5}', '{"other": "form"}']
        )
    )
    tokenizer = load_tokenizer(files[0])
    options = {
        "path": f"{bad}:1,{files[1]}:1",
        "tokenizer": tokenizer,
        "seq_len": 64,
        "bad_rows": "drop",
    }
    mapped = load_examples(**options)
    monkeypatch.setattr(data, "SMALL", 2**30)
    plain = load_examples(**options)
    assert len(plain.bad) == 2
    assert mapped.bad == plain.bad
    assert mapped.fingerprint == plain.fingerprint
    assert mapped.sources() == plain.sources()
    assert (mapped.dropped, mapped.notes) == (plain.dropped, plain.notes)
    assert torch.equal(mapped.trained_tokens, plain.trained_tokens)
    assert torch.equal(mapped.rows, plain.rows)


def test_several_sources_are_made_by_processes_and_a_log_says_how_far_it_is(
    files, everything_is_large, tmp_path, monkeypatch, capsys
):
    model, rows = files
    lines = rows.read_text().splitlines()
    parts = []
    for number, share in enumerate((lines[:300], lines[300:310], lines[310:])):
        parts.append(tmp_path / f"{number}.jsonl")
        parts[-1].write_text("\n".join(share))
    monkeypatch.setattr(data, "SAID", 250)
    monkeypatch.setattr(cache, "cores", lambda: 2)
    tokenizer = load_tokenizer(str(model))
    names = ",".join(map(str, parts))
    found = data.load_examples(data.Rows(names, 64), tokenizer)
    said = capsys.readouterr().out
    assert "tokens    of 320 rows are made" in said or "tokens    of 256 rows are made" in said
    monkeypatch.setattr(data, "SMALL", 2**30)  # in memory, by this process
    whole = data.load_examples(data.Rows(str(rows), 64), tokenizer)
    assert torch.equal(found.ids, whole.ids)
    firsts = [origin.first for origin in found.origins]
    assert firsts == [0, 299, 309]  # one row is dropped
    assert [origin.last for origin in found.origins] == [*firsts[1:], len(found)]
    assert sum(origin.forms["chat"] for origin in found.origins) == 700


def test_a_folder_that_cannot_be_written_is_one_line(files, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "SMALL", 0)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        ConfigError, match=r"file/raw_fsdp.*Not a directory \(fix: XDG_CACHE_HOME=FOLDER"
    ):
        load_examples(files[1], load_tokenizer(files[0]), 64)


def test_data_that_is_replaced_while_it_is_read_is_refused_and_not_kept(
    files, everything_is_large, monkeypatch, tmp_path
):
    rows = files[1].read_text().splitlines()
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(rows))
    key_of = cache.key_of

    def replaced_after_hash(*args, **settings) -> str:
        key = key_of(*args, **settings)
        file.write_text("\n".join(rows[::-1]))
        return key

    monkeypatch.setattr(cache, "key_of", replaced_after_hash)
    with pytest.raises(
        ConfigError, match=rf"^{file}: its files were changed while they were read"
    ) as refused:
        load_examples(file, load_tokenizer(files[0]), 64)
    assert "\n" not in str(refused.value)
    assert kept(everything_is_large) == []


def start(files, cache_home: Path, limits: str = "") -> subprocess.Popen:
    command = [
        "bash",
        "-c",
        f'{limits} exec "$@"',
        "bash",
        sys.executable,
        files[1].with_name("script.py"),
        files[0],
        files[1],
    ]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(cache_home),
        "PYTHONUNBUFFERED": "1",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=env, start_new_session=True, **pipes)


def children(pid: int) -> list[int]:
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found]


@pytest.mark.slow
def test_a_kill_half_way_leaves_nothing_that_is_taken_for_whole(files, tmp_path):
    folder = tmp_path / "raw_fsdp" / "data"
    process = start(files, tmp_path)
    until = time.monotonic() + 60
    while not (list(folder.glob(".tmp_*")) and children(process.pid)):
        assert time.monotonic() < until
        time.sleep(0.01)
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGSTOP)  # so that it cannot end in time
    time.sleep(3)  # past the start of the workers: from then on they end with their parent
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert [path for path in kept(folder) if not path.name.startswith(".tmp_")] == []
    out, _ = start(files, tmp_path).communicate(timeout=120)
    assert "rows 699" in out
    assert [path.name[:1] for path in kept(folder)] != ["."]
    assert len(kept(folder)) == 1
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_processes_that_are_killed_while_they_write_are_one_line_at_once(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(WRITERS)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, script], env=env, start_new_session=True, **pipes)
    assert process.stdout.readline() == "read\n"
    os.kill(process.pid, signal.SIGSTOP)  # so that their pipes fill up
    time.sleep(1)
    for pid in children(process.pid):
        os.kill(pid, signal.SIGKILL)
    os.kill(process.pid, signal.SIGCONT)
    try:
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 2
    assert err.startswith("error: a process that tokenizes is gone: if it said nothing itself")
    assert "long .txt as rows" in err  # TinyStories as one file: 100 to 200 times its size
    assert err.count("\n") == 1


@pytest.mark.slow
def test_no_room_half_way_is_one_line_and_leaves_nothing(files, tmp_path):
    out, err = start(files, tmp_path, limits="ulimit -f 8;").communicate(timeout=120)  # KiB
    folder = tmp_path / "raw_fsdp" / "data"
    assert f"error: {folder}/" in err
    assert "File too large (fix: XDG_CACHE_HOME=FOLDER, or room in /dev/shm)\n" in err
    assert "Traceback" not in err
    assert kept(folder) == []


@pytest.mark.slow
def test_two_runs_at_once_make_it_once(files, tmp_path):
    both = [start(files, tmp_path) for _ in range(2)]
    outs = [process.communicate(timeout=120)[0] for process in both]
    assert sum("another process is making them" in out for out in outs) == 1
    assert len({out.splitlines()[-1] for out in outs}) == 1
    assert len(kept(tmp_path / "raw_fsdp" / "data")) == 1


def test_parts_are_cut_by_rows_and_by_bytes():
    assert [len(part) for part in chunks([("f:1", b"x")] * 150)] == [64, 64, 22]
    of_table = {"images": [{"bytes": b"x" * 2**19, "path": None}]}  # 64 of them were one part
    for row in (b"x" * 2**19, of_table):
        assert [len(part) for part in chunks([("f:1", row)] * 7)] == [2, 2, 2, 1]


def late(world) -> bool:
    set_timeout(1)
    with together(world, patient=True):
        time.sleep(2 * world.rank)
    return True


def test_a_machine_that_tokenizes_for_long_is_waited_for():
    assert run_ranks(late, 2) == [True, True]
