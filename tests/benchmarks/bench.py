"""
Measure what the README claims, next to peers: ratios within one run, as median with min and max.

    python tests/benchmarks/bench.py load
    # also: save, step, dpo, rollouts, loss, attention, quant, data, stream, gpu, memory
    python tests/benchmarks/bench.py save --ranks 2 --only ours,raw_write --json save.json

Every contender runs in fresh processes, and they take turns (a b c, a b c, ...), so that a drift of the
machine affects all alike. If one fails, the table shows its error and the others go on: peers are optional
installs. Bytes and memory are always judged; time only in runs during which other processes left the machine
alone. Exit code 1: a bound is missed. The file of each benchmark in tests/benchmarks/ says what it measures.
Large files go to $TMPDIR, and are removed.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

BENCHMARKS = Path(__file__).resolve().parent
sys.path.insert(1, str(BENCHMARKS.parent.parent))  # utils/ is beside tests/

from utils.run.errors import act, check
from utils.run.settings import parse_cli
from utils.run.signals import report_errors
from utils.run.units import GIB, MIB

PACKAGES = "torch transformers accelerate safetensors bitsandbytes peft trl liger_kernel".split()
LIMIT = 1800  # seconds until a run is killed and counts as failed
QUIET = 0.05  # a run's time is judged if other processes took at most this share of the CPU time
# the size of each unit in a table; 1 for all other units
SCALE = {"MiB": MIB, "GiB": GIB, "MiB/s": MIB, "GiB/s": GIB, "ms": 1e-3, "%": 1e-2}


@dataclass
class Config:
    # What
    # also as the first word
    what: Literal[
        "load",
        "save",
        "step",
        "dpo",
        "rollouts",
        "loss",
        "attention",
        "quant",
        "data",
        "stream",
        "gpu",
        "memory",
    ] = "load"
    only: str = ""  # its contenders, separated by commas; empty: all

    # How
    ranks: str = ""  # world sizes, separated by commas; empty: the benchmark's own
    repeats: int = 3  # runs of each contender
    small: bool = False  # shapes of seconds: whether it runs, not how fast

    # Where
    json: str = ""  # a file for everything: machine, versions, every repeat


def main(cfg: Config) -> bool:
    """Run one benchmark and print it. Returns whether every bound that was judged is kept."""
    # --- plan -------------------------------------------------------------------------------------
    act("plan")
    check(
        sys.platform == "linux",
        f"bench.py measures through /proc, which {sys.platform} lacks (fix: run it on Linux)",
    )
    benchmark = importlib.import_module(cfg.what)
    names = cfg.only.split(",") if cfg.only else list(benchmark.CONTENDERS)
    unknown = ", ".join(name for name in names if name not in benchmark.CONTENDERS)
    known = ", ".join(benchmark.CONTENDERS)
    check(
        not unknown, f"--only {cfg.only}: {cfg.what} has no contender {unknown} (it has: {known})"
    )
    words = cfg.ranks.split(",") if cfg.ranks else [str(size) for size in benchmark.RANKS]
    are_positive = all(word.isdecimal() and int(word) > 0 for word in words)
    check(
        are_positive and cfg.repeats > 0,
        f"--ranks {cfg.ranks} --repeats {cfg.repeats}: write numbers above 0, as in --ranks 2,4",
    )
    sizes = [int(word) for word in words]
    parent = Path(cfg.json).absolute().parent
    check(parent.is_dir(), f"--json {cfg.json}: its folder does not exist")
    reason = benchmark.unavailable(cfg.small) if hasattr(benchmark, "unavailable") else ""
    if reason:
        print(f"{cfg.what} is skipped: {reason}")
        return True
    _check_room(*benchmark.needs(cfg.small, max(sizes)))

    # --- run --------------------------------------------------------------------------------------
    runs: list[dict] = []
    failed: set[tuple[int, str]] = set()  # not tried again
    with tempfile.TemporaryDirectory(prefix=f"bench_{cfg.what}_") as folder:
        act("prepare")
        source = Path(folder, "input")
        source.mkdir()
        benchmark.prepare(source, cfg.small)
        act("run")
        for size, repeat, name in itertools.product(sizes, range(cfg.repeats), names):
            if (size, name) in failed:
                continue
            measured = _run(cfg, source, size, name, benchmark.METRICS)
            runs.append({"ranks": size, "repeat": repeat, "contender": name} | measured)
            result = f"{measured['values'].get('seconds', 0):.2f} s"
            if measured["error"]:
                failed.add((size, name))
                result = measured["error"]
            print(f"{size} ranks, repeat {repeat + 1}, {name}: {result}", flush=True)
    _add_ratios(benchmark, runs)

    # --- tell -------------------------------------------------------------------------------------
    act("tell")
    results = {
        "command": sys.argv,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "config": asdict(cfg),
        "machine": _machine(),
        "versions": _versions(),
        "runs": runs,
        "tables": [],
        "bounds": [],
    }
    print(f"\n{cfg.what}: {results['date']}, {results['machine']['sentence']}")
    print(", ".join(f"{package} {number}" for package, number in results["versions"].items()))
    width = max(len(name) for name in names)
    for name in names:
        print(f"  {name.ljust(width)}  {benchmark.CONTENDERS[name]}")
    for size in sizes:
        runs_of_size = [run for run in runs if run["ranks"] == size]
        table = {"ranks": size, "rows": [_row(name, runs_of_size) for name in names]}
        results["tables"].append(table)
        _print_table(benchmark, table)
        for bound in benchmark.BOUNDS:
            if bound.contender in names:
                results["bounds"].append(_judge(bound, size, runs_of_size, cfg.small))
    print()
    for bound in results["bounds"]:
        print(bound["sentence"])
    if hasattr(benchmark, "report"):
        benchmark.report(results)  # figures of this benchmark alone
    if cfg.json:
        Path(cfg.json).write_text(json.dumps(results, indent=1) + "\n")
    return not any(bound["verdict"].startswith("MISSED") for bound in results["bounds"])


def _run(cfg: Config, source: Path, size: int, name: str, metrics: dict) -> dict:
    """Run one contender once on `size` fresh processes. Returns its metrics, or the error that ended it."""
    _drop_page_cache(source)
    environment = dict(os.environ)
    environment.pop("RANK", None)
    environment.pop("WORLD_SIZE", None)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if cfg.what not in ("gpu", "memory"):  # the others compare loops on CPU ranks
        environment["CUDA_VISIBLE_DEVICES"] = "-1"
    with tempfile.TemporaryDirectory(dir=source.parent) as folder:
        environment["TMPDIR"] = folder  # torchrun leaves folders there
        ranks_flag = f"--nproc_per_node={size}"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", ranks_flag]
        command += [str(BENCHMARKS / f"{cfg.what}.py"), "--contender", name]
        command += ["--folder", str(source), "--out", folder, "--small", str(cfg.small).lower()]
        load_average = os.getloadavg()[0]
        started = time.monotonic()
        busy_before = _busy_seconds()
        own_before = _own_seconds()
        code = _wait_for(command, environment, folder)
        busy_seconds = _busy_seconds() - busy_before
        own_seconds = _own_seconds() - own_before
        seconds = time.monotonic() - started
        run = {
            "error": "",
            "values": {},
            "load_average": load_average,
            "cores_of_others": max(0.0, (busy_seconds - own_seconds) / seconds),
        }
        if code != 0:
            run["error"] = f"failed: {_cause(Path(folder), code)}"
            return run
        files = [Path(folder, f"rank{rank}.json") for rank in range(size)]
        ranks = [json.loads(file.read_text()) for file in files]
    for key, (_, combine) in metrics.items():
        if key in ranks[0]:
            run["values"][key] = combine(rank[key] for rank in ranks)
    run["by_rank"] = ranks
    return run


def _wait_for(command: list[str], environment: dict[str, str], folder: str) -> int | None:
    """Run a command with its output in folder/log. Returns its exit code; None if it was
    killed after LIMIT s.
    """
    code = None
    with open(f"{folder}/log", "w") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, start_new_session=True
        )
        try:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(LIMIT)
        finally:
            if code is None:
                _kill(process, folder)
    return code


def _cause(folder: Path, code: int | None) -> str:
    """Why a run failed, in one line. Also prints the end of its output."""
    log = (folder / "log").read_text()
    # the first rank that failed is the cause
    errors = sorted(folder.glob("rank*.error"), key=os.path.getmtime)
    lines = (errors[0].read_text() if errors else log).splitlines()
    print("\n".join(lines[-15:]), file=sys.stderr, flush=True)
    killed = re.search(r"Signal \d+ \((SIG(?!TERM)\w+)\) received", log)  # in torchrun's summary
    if killed:
        hint = " (out of memory?)" if killed[1] == "SIGKILL" else ""
        return f"a rank was ended by {killed[1]}{hint}"
    if errors:
        return lines[0]
    return f"exit code {code}" if code else f"not done after {LIMIT} s"


def _kill(process: subprocess.Popen, folder: str) -> None:
    """End torchrun and its workers. The workers have their own sessions, so they are found by `folder`, which
    is in their command lines.
    """
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if folder.encode() in path.read_bytes():
                os.kill(int(path.parent.name), signal.SIGKILL)


def _add_ratios(benchmark, runs: list[dict]) -> None:
    """Add to the values of each run the ratio of each metric in RATIOS to its reference
    in the same repeat.
    """
    values_of = {(run["ranks"], run["repeat"], run["contender"]): run["values"] for run in runs}
    for (size, repeat, name), values in values_of.items():
        reference = values_of.get((size, repeat, benchmark.REFERENCES.get(name)), {})
        for key in benchmark.RATIOS:
            if values.get(key) and reference.get(key):
                values[f"{key}_ratio"] = values[key] / reference[key]


def _row(name: str, runs: list[dict]) -> dict:
    """A contender's error, or {metric: (median, min, max) over its repeats}."""
    own_runs = [run for run in runs if run["contender"] == name]
    error = next((run["error"] for run in own_runs if run["error"]), "")
    spreads = {}
    if not error:
        for key in own_runs[0]["values"]:
            values = [run["values"][key] for run in own_runs if key in run["values"]]
            spreads[key] = (statistics.median(values), min(values), max(values))
    return {"contender": name, "error": error, "values": spreads}


def _judge(bound, size: int, runs: list[dict], small: bool = False) -> dict:
    """The verdict on one bound: by the worst repeat, or for time by the median of the quiet repeats."""
    key = f"{bound.metric}_ratio" if bound.over else bound.metric
    own_runs = [run for run in runs if run["contender"] == bound.contender]
    measured = [run for run in own_runs if key in run["values"]]
    loud = []  # runs of the contender or its reference during which other processes were at work
    if bound.timed:
        for run in runs:
            takes_part = run["contender"] in (bound.contender, bound.over)
            if takes_part and run["cores_of_others"] > QUIET * os.cpu_count():
                loud.append(run)
    loud_repeats = {run["repeat"] for run in loud}
    quiet = [run for run in measured if run["repeat"] not in loud_repeats]

    value = None
    if measured:
        values = [run["values"][key] for run in quiet or measured]
        if bound.timed:
            value = statistics.median(values)
        else:
            value = min(values) if bound.at_least else max(values)

    error = next((run["error"] for run in own_runs if run["error"]), "")
    if error:
        verdict = f"MISSED ({error})"
    elif not measured:
        verdict = f"not judged: {bound.over or bound.metric} is missing"
    elif bound.timed and small:
        verdict = "not judged: --small is over too soon"
    elif not quiet:
        cores = max(run["cores_of_others"] for run in loud)
        load = max(run["load_average"] for run in loud)
        used = f"other processes used {cores:.1f} of {os.cpu_count()} cores"
        verdict = f"not judged: {used}, load average {load:.1f}"
    else:
        is_kept = value >= bound.limit if bound.at_least else value <= bound.limit
        verdict = "ok" if is_kept else "MISSED"
    limit = f"at {'least' if bound.at_least else 'most'} {bound.limit:g}"
    shown = "-" if value is None else f"{value:.3g}"
    sentence = f"{bound.contender}, {size} ranks: {bound.says}: {shown}, {limit}: {verdict}"
    judged = {"value": value, "verdict": verdict, "sentence": sentence}
    return {"ranks": size, **asdict(bound), **judged}


def _print_table(benchmark, table: dict) -> None:
    """Print aligned columns, median (min-max). A metric whose unit is None is used for a bound only."""
    rows = table["rows"]
    units = {key: unit for key, (unit, _) in benchmark.METRICS.items() if unit is not None}
    for key in benchmark.RATIOS:
        units[f"{key}_ratio"] = "x"
    keys = [key for key in units if any(key in row["values"] for row in rows)]
    head = [f"{table['ranks']} ranks"]
    for key in keys:
        head.append(f"{key.removesuffix('_bytes')} {units[key]}")
    lines = [head]
    for row in rows:
        line = [row["contender"]]
        if not row["error"]:
            line += [_cell(row["values"].get(key), units[key]) for key in keys]
        lines.append(line)
    widths = [0] * len(head)
    for line in lines:
        for column, cell in enumerate(line):
            widths[column] = max(widths[column], len(cell))
    errors = ["", *(row["error"] for row in rows)]
    print()
    for line, error in zip(lines, errors, strict=True):
        cells = [cell.ljust(width) for cell, width in zip(line, widths, strict=False)]
        print("  ".join([*cells, error]).rstrip())


def _cell(spread: tuple | None, unit: str) -> str:
    if spread is None:
        return "-"
    median, low, high = (f"{value / SCALE.get(unit, 1):.4g}" for value in spread)
    return median if low == high else f"{median} ({low}-{high})"


def _check_room(disk_bytes: int, memory_bytes: int) -> None:
    """Raise ConfigError if the disk or the memory has no room for the benchmark."""
    folder = tempfile.gettempdir()
    free_bytes = shutil.disk_usage(folder).free
    need = f"{disk_bytes / GIB:.1f} GiB are needed in {folder}, {free_bytes / GIB:.1f} GiB are free"
    check(disk_bytes <= free_bytes, f"{need} (fix: TMPDIR=another folder, or --small)")
    meminfo = Path("/proc/meminfo").read_text()
    available_bytes = int(meminfo.split("MemAvailable:")[1].split()[0]) * 1024
    available = f"{available_bytes / GIB:.1f} GiB are available"
    need = f"{memory_bytes / GIB:.1f} GiB of memory are needed, {available}"
    check(memory_bytes <= available_bytes, f"{need} (fix: fewer --ranks, or --small)")


def _drop_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that every run reads from the disk. Only clean pages are
    dropped; disk_bytes shows whether it worked.
    """
    for path in filter(Path.is_file, folder.rglob("*")):
        with open(path, "rb") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _busy_seconds() -> float:
    """CPU seconds that this machine has spent on anything, all cores together."""
    fields = Path("/proc/stat").read_text().split(None, 9)[1:9]
    user, nice, system, _idle, _iowait, *interrupts = (int(field) for field in fields)
    ticks = user + nice + system + sum(interrupts)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    """CPU seconds of this process, and of all processes below it that have ended."""
    return sum(os.times()[:4])


def _machine() -> dict:
    """The cores, memory and kernel of this machine, also as one sentence."""
    found = re.search(r"^model name.*?: (.*)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = found[1] if found else platform.machine()
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = os.cpu_count()
    system = f"{memory_bytes / GIB:.0f} GiB, Linux {platform.release()}"
    sentence = f"{cores} cores ({cpu}), {system}"
    return {"cores": cores, "cpu": cpu, "memory_bytes": memory_bytes, "sentence": sentence}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "absent"
    return versions


def _interrupt(*_) -> None:
    raise KeyboardInterrupt  # as Ctrl-C: the running contender is killed, the temporary folder removed


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        words = ["--what", *words]  # the first word alone names the benchmark
    with report_errors():
        kept = main(parse_cli(Config, words))
        sys.exit(0 if kept else 1)
