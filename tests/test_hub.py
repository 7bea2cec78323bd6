"""Models by name: folders, and hub ids of a hub of our own on 127.0.0.1. Alone: `pytest tests/test_hub.py`

HF_ENDPOINT is read when huggingface_hub is imported, so every case runs in processes of its own.
"""

import hashlib
import json
import os
import socket
import struct
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from ranks import free_port, run_ranks

from utils.model.folder import find_model
from utils.run.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
MIB = 2**20
# 14 MiB: huggingface_hub writes, and so resumes, in pieces of 10 MiB
WEIGHTS = bytes(range(256)) * 4096 * 14
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "chat_template.jinja": b"{{ m }}",
    "LICENSE": b"of the model",
    "USE_POLICY.md": b"of its use",
    "model.safetensors": WEIGHTS,
    "modeling_own.py": b"raise SystemExit('run')",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": WEIGHTS,
    "original/params.json": b"{}",
}
FETCHED = ["LICENSE", "USE_POLICY.md", "chat_template.jinja", "config.json", "model.safetensors"]
FETCHED.append("tokenizer.json")
ETAG = hashlib.sha1(WEIGHTS).hexdigest()

# Fetch every name of argv, and answer one line of JSON: the folder, or the one error.
WORKER = """
import json, sys, time
from utils.run.distributed import init_distributed
from utils.run.errors import ConfigError
from utils.model.folder import find_model

world = init_distributed()
for name in sys.argv[1:]:
    start = time.time()
    try:
        answer = {"folder": str(find_model(name, world, trust_remote_code=name.endswith("-code")))}
    except ConfigError as error:
        answer = {"error": str(error), "agreed": error.agreed}
    print("ANSWER", json.dumps({**answer, "name": name, "seconds": time.time() - start}), flush=True)
"""


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as snapshot_download needs. The repository's name says what is wrong with it."""

    protocol_version = "HTTP/1.1"
    served: list = []  # (repository, file, first byte, bytes sent)
    asked: set = set()  # repositories

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.split("?")[0]
        if path.startswith("/api/models/"):
            self.api(path.removeprefix("/api/models/"))
            return
        repo, _, rest = path.lstrip("/").partition("/resolve/")
        self.asked.add(repo)
        name = rest.partition("/")[2]
        if "gated" in repo:
            self.answer(b"", status=403, **{"X-Error-Code": "GatedRepo"})
            return
        if name not in FILES:  # huggingface_hub asks for a few other things, too
            self.answer(b"", status=404)
            return
        body = FILES[name]
        headers = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": COMMIT}
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        cut = 12 * MIB if name == "model.safetensors" and self.first(repo, name) else None
        self.answer(
            body[start:], status=206 if start else 200, cut=cut, repo=repo, name=name, **headers
        )
        if self.command == "GET":
            self.served.append((repo, name, start, len(body[start:cut])))

    def first(self, repo: str, name: str) -> bool:
        """Whether this download is to be cut: the first of a file in a repository that is called so."""
        sent = [1 for r, n, *_ in self.served if (r, n) == (repo, name)]
        return self.command == "GET" and not sent and ("cut" in repo or "reset" in repo)

    def api(self, path: str):
        repo = "/".join(path.split("/")[:2])
        self.asked.add(repo)
        if "missing" in repo:
            self.answer(b"{}", status=404, **{"X-Error-Code": "RepoNotFound"})
            return
        files = {
            k: v for k, v in FILES.items() if "pickle" not in repo or not k.endswith(".safetensors")
        }
        if "/tree/" in path:
            answer = [
                {"type": "file", "path": k, "size": len(v), "oid": f"{k:x<40}"}
                for k, v in files.items()
            ]
        else:
            answer = {"id": repo, "sha": COMMIT, "siblings": [{"rfilename": k} for k in files]}
        self.answer(json.dumps(answer).encode())

    def answer(self, body: bytes, status=200, cut=None, repo="", name="", **headers):
        self.send_response(status)
        for key, value in {
            "Content-Length": len(body),
            "Content-Type": "application/json",
            **headers,
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut])
        if cut and "reset" in repo:  # a connection reset instead of an early end
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
        self.close_connection = bool(cut)


@pytest.fixture(scope="module")
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def fetch(names, endpoint, home, ranks=1, prefix=(), **env) -> list[list[dict]]:
    """The answers of each rank."""
    port, workers = free_port(), []
    for rank in range(ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        own |= {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "PYTHONPATH": ROOT,
        }
        own |= {
            "HF_ENDPOINT": endpoint,
            "HF_HOME": home,
            "HF_HUB_OFFLINE": 0,
            "no_proxy": "127.0.0.1",
            **env,
        }
        workers.append(
            subprocess.Popen(
                [*prefix, sys.executable, "-c", WORKER, *names],
                env={**os.environ, **{key: str(value) for key, value in own.items()}},
                cwd=home,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [worker.communicate(timeout=100)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    answers = [
        [json.loads(line[7:]) for line in text.splitlines() if line.startswith("ANSWER ")]
        for text in said
    ]
    assert all(len(of_rank) == len(names) for of_rank in answers), "\n".join(said)
    return answers


@pytest.fixture(scope="module")
def answers(hub, tmp_path_factory):
    """What two ranks answer for each name, in one start of both."""
    home = tmp_path_factory.mktemp("hub")
    (home / "output" / "model").mkdir(parents=True)
    (home / "run").mkdir()
    (home / "run" / "plan.json").write_text("{}")
    names = ["org/plain", "org/with-code", "org/gated", "org/missing", "./output/modle"]
    names.append("run/model")
    per_rank = fetch(names, hub, home, ranks=2)
    return {name: [of_rank[i] for of_rank in per_rank] for i, name in enumerate(names)}


def files(folder: str) -> list[str]:
    root = Path(folder)
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file())


def gets(repo: str, name: str) -> list[tuple[int, int]]:
    return [(start, sent) for r, n, start, sent in Hub.served if (r, n) == (repo, name)]


def test_two_ranks_download_once_and_share_the_folder(answers):
    first, second = answers["org/plain"]
    assert first["folder"] == second["folder"]
    assert files(first["folder"]) == FETCHED
    assert (Path(first["folder"]) / "model.safetensors").read_bytes() == WEIGHTS
    assert [len(gets("org/plain", name)) for name in FETCHED] == [1] * 6, Hub.served


def test_the_licence_comes_along_for_the_save_to_copy(answers):
    folder = Path(answers["org/plain"][0]["folder"])
    assert (folder / "LICENSE").read_bytes() == FILES["LICENSE"]
    assert (folder / "USE_POLICY.md").exists()


def test_model_code_comes_only_when_it_is_trusted(answers):
    assert files(answers["org/with-code"][0]["folder"]) == sorted([*FETCHED, "modeling_own.py"])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "org/gated",
            "org/gated is no folder and cannot be had from the hub: GatedRepoError",
        ),
        ("org/missing", "org/missing is no folder and cannot be had from the hub: Reposit"),
        (
            "./output/modle",
            "./output/modle is not a folder, and no hub id like owner/name; did you mean output/model?",
        ),
    ],
)
def test_what_cannot_be_fetched_is_one_line_on_all_ranks(answers, name, text):
    for answer in answers[name]:
        assert text in answer["error"]
        assert "\n" not in answer["error"]
        assert answer["agreed"]
        assert answer["seconds"] < 15


def test_without_a_network_it_says_so_at_once_and_guesses_the_folder(tmp_path):
    (tmp_path / "output" / "model").mkdir(parents=True)
    ((answer, offline),) = fetch(
        ["output/modle", "org/x"], f"http://127.0.0.1:{free_port()}", tmp_path
    )
    assert answer["seconds"] < 15
    assert answer["error"].startswith(
        "output/modle is no folder and cannot be had from the hub; did you mean output/model?"
    )


def test_the_hub_is_not_asked_for_the_model_that_a_run_has_not_written_yet(answers):
    for answer in answers["run/model"]:
        said = answer["error"]
        assert said.startswith("run/model is not a folder, and no hub id like owner/name")
        assert "a run writes model/ at its end, with LoRA adapter/" in said
    assert Hub.asked >= {"org/plain", "org/missing"}
    assert "run/model" not in Hub.asked


def test_offline_uses_the_cache_and_asks_nobody(answers, hub):
    folder = Path(answers["org/plain"][0]["folder"])
    before = list(Hub.served)
    ((cached, absent),) = fetch(["org/plain", "org/new"], hub, folder.parents[3], HF_HUB_OFFLINE=1)
    assert cached["folder"] == str(folder)
    assert "HF_HUB_OFFLINE" in absent["error"]
    assert Hub.served == before


def _fetch_folder(world, name):
    return find_model(name, world, False)


def test_a_folder_is_returned_as_it_is(tmp_path):
    assert run_ranks(_fetch_folder, 2, str(tmp_path)) == [tmp_path] * 2


def _fetch_own_folder(world, names):
    try:
        return find_model(names[world.rank], world, False)
    except ConfigError as error:
        return str(error), error.agreed


def test_a_folder_that_only_some_ranks_see_is_refused_by_all(tmp_path):
    (first, agreed), second = run_ranks(
        _fetch_own_folder, 2, [str(tmp_path), str(tmp_path / "gone")]
    )
    assert agreed
    assert first == second[0]
    assert first.startswith("rank 1: ")
