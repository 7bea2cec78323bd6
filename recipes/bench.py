"""
Measure what the README claims, beside the peers: ratios within one run, median with min and max.

    python recipes/bench.py load                      # also: save, step, loss, quant, data, gpu, memory
    python recipes/bench.py save --ranks 2 --only ours,raw_write --json save.json

Every contender runs in fresh processes, and they take turns (a b c, a b c, ...), so that what drifts hits all
alike. One that fails stands in the table with its error, and the others go on: peers are optional installs.
Bytes and memory are always judged; time where other processes left the machine alone. Exit code 1: a bound is
missed. What is measured, and how, stands in tests/benchmarks/. Large files go to $TMPDIR, and are removed.
"""

import importlib
import itertools
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Literal

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent / "tests" / "benchmarks"
sys.path[1:1] = [str(HERE.parent), str(BENCHMARKS)]  # utils/ is beside recipes/

from utils.run.errors import act, check, report_errors
from utils.run.settings import parse_cli

GIB, MIB = 2**30, 2**20
PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "bitsandbytes", "peft")
LIMIT = 1800  # seconds until a run is killed and counts as failed
QUIET = 0.05  # of the machine's CPU time may go to other processes in a run whose time is judged
SCALE = {"MiB": MIB, "GiB": GIB, "MiB/s": MIB, "GiB/s": GIB, "ms": 1e-3, "%": 1e-2}  # else as it is


@dataclass
class Config:
    # What
    # or first word
    what: Literal["load", "save", "step", "loss", "quant", "data", "gpu", "memory"] = "load"
    only: str = ""  # its contenders, separated by commas; empty: all

    # How
    ranks: str = ""  # world sizes, separated by commas; empty: the benchmark's own
    repeats: int = 3  # runs of each contender
    small: bool = False  # shapes of seconds: whether it runs, not how fast

    # Where
    json: str = ""  # a file for everything: machine, versions, every repeat


def main(cfg: Config) -> bool:
    """Run one benchmark and print it; whether every bound that was judged is kept."""
    # --- plan -------------------------------------------------------------------------------------
    act("plan")
    on_linux = sys.platform == "linux"
    check(
        on_linux,
        f"bench.py measures through /proc, which {sys.platform} lacks (fix: run it on Linux)",
    )
    missing = f"{BENCHMARKS} is not here (fix: copy it too, or run bench.py where it comes from)"
    check((BENCHMARKS / f"{cfg.what}.py").is_file(), missing)
    benchmark = importlib.import_module(cfg.what)
    names = cfg.only.split(",") if cfg.only else list(benchmark.CONTENDERS)
    unknown = ", ".join(name for name in names if name not in benchmark.CONTENDERS)
    have = ", ".join(benchmark.CONTENDERS)
    check(not unknown, f"--only {cfg.only}: {cfg.what} has no contender {unknown} (it has: {have})")
    sizes = cfg.ranks.split(",") if cfg.ranks else [str(size) for size in benchmark.RANKS]
    positive = all(size.isdecimal() and int(size) for size in sizes) and cfg.repeats > 0
    check(
        positive,
        f"--ranks {cfg.ranks} --repeats {cfg.repeats}: write numbers above 0, as in --ranks 2,4",
    )
    check(
        Path(cfg.json).absolute().parent.is_dir(), f"--json {cfg.json}: its folder does not exist"
    )
    if reason := hasattr(benchmark, "unavailable") and benchmark.unavailable(cfg.small):
        print(f"{cfg.what} is skipped: {reason}")
        return True
    _check_room(*benchmark.needs(cfg.small, max(map(int, sizes))))

    # --- run --------------------------------------------------------------------------------------
    runs: list[dict] = []
    with tempfile.TemporaryDirectory(prefix=f"bench_{cfg.what}_") as folder:
        act("prepare")
        source = Path(folder, "input")
        source.mkdir()
        benchmark.prepare(source, cfg.small)
        act("run")
        for size, repeat, name in itertools.product(map(int, sizes), range(cfg.repeats), names):
            if not any(
                run["error"] for run in runs if (run["ranks"], run["contender"]) == (size, name)
            ):
                run = {"ranks": size, "repeat": repeat, "contender": name}
                runs.append(run | _run(cfg, source, size, name, benchmark.METRICS))
                told = runs[-1]["error"] or f"{runs[-1]['values'].get('seconds', 0):.2f} s"
                print(f"{size} ranks, repeat {repeat + 1}, {name}: {told}", flush=True)
    _add_ratios(benchmark, runs)

    # --- tell -------------------------------------------------------------------------------------
    act("tell")
    results = {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "config": asdict(cfg),
    }
    results |= {
        "machine": _machine(),
        "versions": _versions(),
        "runs": runs,
        "tables": [],
        "bounds": [],
    }
    print(f"\n{cfg.what}: {results['date']}, {results['machine']['sentence']}")
    print(", ".join(f"{package} {v}" for package, v in results["versions"].items()))
    for name in names:
        print(f"  {name.ljust(max(map(len, names)))}  {benchmark.CONTENDERS[name]}")
    for size in map(int, sizes):
        of_size = [run for run in runs if run["ranks"] == size]
        results["tables"].append({"ranks": size, "rows": [_row(name, of_size) for name in names]})
        _print_table(benchmark, results["tables"][-1])
        taken = [bound for bound in benchmark.BOUNDS if bound.contender in names]
        results["bounds"] += [_judge(bound, size, of_size, cfg.small) for bound in taken]
    print("", *(bound["sentence"] for bound in results["bounds"]), sep="\n")
    if hasattr(benchmark, "report"):
        benchmark.report(results)  # what it alone knows
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(results, indent=1) + "\n")
    return not any(bound["verdict"].startswith("MISSED") for bound in results["bounds"])


def _run(cfg: Config, source: Path, size: int, name: str, metrics: dict) -> dict:
    """One contender, once, on `size` fresh processes: its metrics, or the error that ended it."""
    _drop_page_cache(source)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={size}",
    ]
    command += [str(BENCHMARKS / f"{cfg.what}.py"), "--contender", name, "--folder", str(source)]
    variables = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    }
    variables.setdefault("OMP_NUM_THREADS", "1")
    with (
        tempfile.TemporaryDirectory(dir=source.parent) as folder,
        open(f"{folder}/log", "w") as log,
    ):
        out, code = Path(folder), None
        command += ["--out", folder, "--small", str(cfg.small).lower()]
        variables["TMPDIR"] = folder  # torchrun leaves folders there
        options = {"stdout": log, "stderr": log, "env": variables, "start_new_session": True}
        load, started, busy, ours = (
            os.getloadavg()[0],
            time.monotonic(),
            _busy_seconds(),
            _own_seconds(),
        )
        process = subprocess.Popen(command, **options)
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(LIMIT)
        finally:
            if code is None:
                _kill(process, folder)
        others = (_busy_seconds() - busy - (_own_seconds() - ours)) / (time.monotonic() - started)
        run = {"error": "", "values": {}, "load_average": load, "cores_of_others": max(0.0, others)}
        if code != 0:
            told = (out / "log").read_text()
            # in torchrun's summary
            killed = re.search(r"Signal \d+ \((SIG(?!TERM)\w+)\) received", told)
            # the first one is the cause
            said = sorted(out.glob("rank*.error"), key=os.path.getmtime)
            text = (said[0].read_text() if said else told).splitlines()
            print("\n".join(text[-15:]), file=sys.stderr, flush=True)
            ended = f"exit code {code}" if code else f"not done after {LIMIT} s"
            ended = text[0] if said else ended
            if killed:
                ended = f"a rank was ended by {killed[1]}" + " (out of memory?)" * (
                    killed[1] == "SIGKILL"
                )
            return run | {"error": f"failed: {ended}"}
        ranks = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(size)]
    values = {
        key: how(rank[key] for rank in ranks)
        for key, (_, how) in metrics.items()
        if key in ranks[0]
    }
    return run | {"values": values, "by_rank": ranks}


def _kill(process: subprocess.Popen, folder: str) -> None:
    """End torchrun and its workers, which it has put into sessions of their own; `folder` is theirs alone."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _add_ratios(benchmark, runs: list[dict]) -> None:
    """To the values of each run, each metric of RATIOS over that of its reference in the same repeat."""
    found = {(run["ranks"], run["repeat"], run["contender"]): run["values"] for run in runs}
    for (size, repeat, name), values in found.items():
        reference = found.get((size, repeat, benchmark.REFERENCES.get(name)), {})
        for key in benchmark.RATIOS:
            if values.get(key) and reference.get(key):
                values[f"{key}_ratio"] = values[key] / reference[key]


def _row(name: str, runs: list[dict]) -> dict:
    """A contender's error, or (median, min, max) over its repeats by metric."""
    mine = [run for run in runs if run["contender"] == name]
    error = next((run["error"] for run in mine if run["error"]), "")
    values = {
        key: [run["values"][key] for run in mine if key in run["values"]]
        for key in mine[0]["values"]
    }
    spread = {key: (statistics.median(v), min(v), max(v)) for key, v in values.items()}
    return {"contender": name, "error": error, "values": {} if error else spread}


def _judge(bound, size: int, runs: list[dict], small: bool = False) -> dict:
    """The verdict on one bound: by the worst repeat, or where it is of time by the median of quiet ones."""
    key = f"{bound.metric}_ratio" if bound.over else bound.metric
    mine = [run for run in runs if run["contender"] == bound.contender]
    pair = [run for run in runs if run["contender"] in (bound.contender, bound.over)]
    loud = (
        [run for run in pair if run["cores_of_others"] > QUIET * os.cpu_count()]
        if bound.timed
        else []
    )
    known = [run for run in mine if key in run["values"]]
    quiet = [run for run in known if run["repeat"] not in {other["repeat"] for other in loud}]
    worst = statistics.median if bound.timed else min if bound.at_least else max
    value = worst([run["values"][key] for run in quiet or known]) if known else None
    error, verdict = next((run["error"] for run in mine if run["error"]), ""), "ok"
    if error:
        verdict = f"MISSED ({error})"
    elif not known:
        verdict = f"not judged: {bound.over or bound.metric} is missing"
    elif bound.timed and small:
        verdict = "not judged: --small is over too soon"
    elif not quiet:
        others, load = (
            max(run[key] for run in loud) for key in ("cores_of_others", "load_average")
        )
        used = f"other processes used {others:.1f} of {os.cpu_count()} cores"
        verdict = f"not judged: {used}, load average {load:.1f}"
    elif value < bound.limit if bound.at_least else value > bound.limit:
        verdict = "MISSED"
    limit = f"at {'least' if bound.at_least else 'most'} {bound.limit:g}"
    shown = "-" if value is None else f"{value:.3g}"
    sentence = f"{bound.contender}, {size} ranks: {bound.says}: {shown}, {limit}: {verdict}"
    return {
        "ranks": size,
        **asdict(bound),
        "value": value,
        "verdict": verdict,
        "sentence": sentence,
    }


def _print_table(benchmark, table: dict) -> None:
    """Aligned columns, median (min-max). A metric whose unit is None serves a bound only."""
    units = {key: unit for key, (unit, _) in benchmark.METRICS.items() if unit is not None}
    units |= {f"{key}_ratio": "x" for key in benchmark.RATIOS}
    keys = [key for key in units if any(key in row["values"] for row in table["rows"])]
    lines = [
        [f"{table['ranks']} ranks", *(f"{key.removesuffix('_bytes')} {units[key]}" for key in keys)]
    ]
    for row in table["rows"]:
        cells = [_cell(row["values"].get(key), units[key]) for key in keys]
        lines.append([row["contender"], *([] if row["error"] else cells)])
    widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(len(lines[0]))]
    print()
    for line, error in zip(lines, ["", *(row["error"] for row in table["rows"])], strict=True):
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=False))
        print("  ".join([*cells, error]).rstrip())


def _cell(spread: tuple | None, unit: str) -> str:
    if spread is None:
        return "-"
    median, low, high = (f"{value / SCALE.get(unit, 1):.4g}" for value in spread)
    return median if low == high else f"{median} ({low}-{high})"


def _check_room(disk: int, memory: int) -> None:
    folder = tempfile.gettempdir()
    free = shutil.disk_usage(folder).free
    need = f"{disk / GIB:.1f} GiB are needed in {folder}, {free / GIB:.1f} GiB are free"
    check(disk <= free, f"{need} (fix: TMPDIR=another folder, or --small)")
    available = int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024
    need = f"{memory / GIB:.1f} GiB of memory are needed, {available / GIB:.1f} GiB are available"
    check(memory <= available, f"{need} (fix: fewer --ranks, or --small)")


def _drop_page_cache(folder: Path) -> None:
    """So that every run reads from the disk. Only clean pages go; whether it worked is seen in disk_bytes."""
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _busy_seconds() -> float:
    """CPU seconds that this machine has spent on anything, all cores together."""
    user, nice, system, _, _, *rest = map(int, Path("/proc/stat").read_text().split(None, 9)[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """CPU seconds of this process, and of all processes below it that have ended."""
    return sum(os.times()[:4])


def _machine() -> dict:
    models = [
        x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")
    ]
    cpu = models[0].split(": ", 1)[1] if models else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sentence = f"{os.cpu_count()} cores ({cpu}), {memory / GIB:.0f} GiB, Linux {platform.release()}"
    return {"cores": os.cpu_count(), "cpu": cpu, "memory_bytes": memory, "sentence": sentence}


def _versions() -> dict[str, str]:
    installed = {
        d.metadata["Name"].lower(): d.version for d in distributions() if d.metadata["Name"]
    }
    found = {name: installed.get(name, "absent") for name in PACKAGES}
    return {"python": platform.python_version()} | found


def _interrupt(*_) -> None:
    raise KeyboardInterrupt  # as Ctrl-C: what is running is killed, and the temporary folder goes


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    words = sys.argv[1:]
    with report_errors():
        kept = main(
            parse_cli(Config, ["--what", *words] if words and words[0][:1] != "-" else words)
        )
        sys.exit(0 if kept else 1)
