"""Run each recipe without flags, and print a table of what it changed: recipe, before, after, seconds.

    python recipes/tiny/all.py                  all: about 8 minutes on 2 cores
    python recipes/tiny/all.py finetune eval    some of them

Exit code 1: a command failed; its last lines are shown. Nothing of this project is imported here.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path

TINY = Path(__file__).resolve().parent
RECIPES = TINY.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
LINES = {  # what is measured -> its lines in the output of score.py, for before and after
    "exact match": re.compile(r"^exact match .*?: (\d+ of \d+)", re.M),
    "chosen likelier": re.compile(r"^chosen likelier than rejected, .*: (\d+ of \d+)", re.M),
    "chosen scored higher": re.compile(r"^chosen scored above rejected, .*: (\d+ of \d+)", re.M),
}
# SCORED: recipe -> (what is measured, model before training, questions), the arguments of score.py.
# LOGGED: recipe -> (what is measured, its key in metrics.jsonl).
SCORED = {
    "finetune": ("exact match", TINY, "heldout.jsonl"),
    "prefer": ("chosen likelier", TINY, "heldout_pairs.jsonl"),
    "reward": ("chosen scored higher", TINY, "heldout_pairs.jsonl"),
    "grpo": ("exact match", TINY / "started", "heldout.jsonl"),
    "vision": ("exact match", TINY / "vision", "vision/heldout.jsonl"),
}
LOGGED = {"pretrain": ("bits per byte", "eval_bits_per_byte")}
FAILED = ("failed", "", "")  # in place of (what is measured, before, after)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    everything = [*SCORED, *LOGGED, "eval"]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(everything)}")
    names = parser.parse_args().names or everything
    if unknown := {*names} - {*everything}:
        parser.error(f"no recipe of this table: {', '.join(sorted(unknown))}")
    import torch  # which --help need not wait for

    ranks = str(min(2, torch.cuda.device_count() or 2))  # 1 where there is one GPU
    rows = []
    for name in names:
        start = time.monotonic()
        output = run([*TORCHRUN, ranks, str(RECIPES / f"{name}.py")])
        seconds = time.monotonic() - start
        measure, before, after = measured(name, output) if output else FAILED
        rows.append((name, measure, before, after, f"{seconds:.0f}"))
    print(f"{'recipe':10}{'measured':22}{'before':>14}{'after':>14}{'seconds':>9}")
    for name, measure, before, after, seconds in rows:
        print(f"{name:10}{measure:22}{before:>14}{after:>14}{seconds:>9}")
    return int(any(measure == "failed" for _, measure, *_ in rows))


def run(command: list[str], may_fail: bool = False) -> str:
    """Run a command; returns what it prints. If it fails: prints its last lines, and returns ""."""
    print("$", " ".join(command), flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode and not may_fail:
        print("".join(done.stderr.splitlines(True)[-5:]), file=sys.stderr)
        return ""
    return done.stdout


def measured(name: str, output: str) -> tuple[str, str, str]:
    """(what is measured, before, after) of a recipe that has printed `output`."""
    out = Path(re.findall(rf"\S*output/{name}-\d+", output)[-1])
    if name == "eval":
        results = json.loads((out / "eval.json").read_text())["results"]
        return "exact match", f"{results['exact_sum']:.0f} of {results['items']}", ""
    if name in LOGGED:
        measure, key = LOGGED[name]
        steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        values = [step[key] for step in steps if key in step]
        return measure, f"{values[0]:.3f}", f"{values[-1]:.3f}"
    measure, model_before, questions = SCORED[name]
    command = [sys.executable, str(TINY / "score.py"), str(model_before), str(out / "model")]
    # score.py exits with 1 below 90 %, which grpo.py does not reach from its start
    scored = run([*command, "--questions", str(TINY / questions)], may_fail=True)
    figures = LINES[measure].findall(scored)
    if not figures:
        return FAILED
    before = figures[0] if len(figures) == 2 else ""  # a reward model is scored only after training
    return measure, before, figures[-1]


if __name__ == "__main__":
    sys.exit(main())
