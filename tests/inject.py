"""Run recipes/finetune.py with one fault from outside: `torchrun tests/inject.py KIND RANK CALL FLAGS...`

The named function ends its process, or misbehaves as KIND says, at its CALL-th call on rank RANK.
"""

import os
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "recipes")]

import finetune

from utils.model import saving
from utils.run.settings import parse_cli
from utils.run.signals import report_errors, stop_at_once
from utils.train import checkpoint

_retire = checkpoint._retire


def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_the_middle(final, keep):
    """When the old checkpoint has its other name, and before it is gone."""
    rename = os.rename

    def rename_and_die(*names):
        rename(*names)
        die()

    os.rename = rename_and_die
    _retire(final, keep)


def leave_out(*_, **__) -> float:
    return 1.0


def fail(*_, **__):
    raise RuntimeError("row 7 is corrupt")


FAULTS = {  # kind -> (where, name, what happens instead)
    "retire": (checkpoint, "_retire", die_in_the_middle),
    "export": (saving, "verify_chunks", die),  # the final model is written, and not yet renamed
    "collective": (finetune, "all_reduce_sum", leave_out),
    "data": (finetune.GlobalBatches, "batches", fail),
}


def inject(kind: str, call: int) -> None:
    owner, name, instead = FAULTS[kind]
    original, calls = getattr(owner, name), 0

    def wrapped(*args, **options):
        nonlocal calls
        calls += 1
        return (instead if calls == call else original)(*args, **options)

    setattr(owner, name, wrapped)


if __name__ == "__main__":
    kind, rank, call, *flags = sys.argv[1:]
    if os.environ.get("RANK", "0") == rank:
        inject(kind, int(call))
    with report_errors():
        stop_at_once()
        finetune.main(parse_cli(finetune.Config, flags))
