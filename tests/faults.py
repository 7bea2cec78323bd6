"""FAULT=point:rank:step[:action] in the environment of a process breaks it from outside.

point: an act (step 0); `step`, before the batches of optimizer step `step` (from 0) are read; or one of a
save after `step` steps: `begin`, `data` (some tensors are written), `metadata` (all are), `rename`,
`published`. action: a kill, where it is left out; `exit` leaves with 0; `memory` runs out of memory; a number
of seconds is slept. Not after an elastic restart. conftest.py puts tests/site on PYTHONPATH, which calls it.
"""

import os
import re
import signal
import sys
import time
from functools import wraps


def install() -> None:
    """Wrap what the points are as soon as its modules are imported, which their audit events tell."""
    done = False

    def look(event: str, _: tuple) -> None:
        nonlocal done
        if done or event != "import":
            return
        wrapped = sys.modules.get("utils.train.checkpoint")
        errors = sys.modules.get("utils.run.errors")
        batches = sys.modules.get("utils.data.batches")
        if hasattr(wrapped, "set_seed") and hasattr(batches, "GlobalBatches"):
            done = True
            wrap(wrapped, errors, batches)

    sys.addaudithook(look)
    look("import", ())


def wrap(checkpoint, errors, batches) -> None:
    print0 = errors.print0

    def announce(*parts, **options):
        print0(*parts, **options)
        if str(parts[0]).startswith("--- "):
            break_at(parts[0].removeprefix("--- "), 0)

    errors.print0 = announce
    before(batches.GlobalBatches, "batches", "step", lambda loader, step: step)
    before(checkpoint.CheckpointSaver, "save", "begin", lambda saver, step, *_, **__: step)
    before(
        checkpoint._Writer,
        "finish",
        "metadata",
        lambda writer, *_, **__: step_of_folder(str(writer.final)),
    )
    before(checkpoint, "_retire", "published", lambda final, keep: int(final.name[-8:]))
    before(os, "rename", "rename", lambda old, new, **_: step_of_folder(str(new)))
    write_data, write = checkpoint._Writer.write_data, checkpoint._HashingFile.write

    def note_step(writer, *args):
        checkpoint._HashingFile.step = step_of_folder(str(writer.final))
        return write_data(writer, *args)

    checkpoint._Writer.write_data = note_step

    def write_and_break(file, data):
        written = write(file, data)
        break_at("data", file.step)
        return written

    checkpoint._HashingFile.write = write_and_break


def step_of_folder(path: str) -> int:
    found = re.search(r"/step_(\d{8})$", path)
    return int(found[1]) if found else -1


def before(owner, name: str, point: str, step_of) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args, **options):
        break_at(point, step_of(*args, **options))
        return original(*args, **options)

    setattr(owner, name, wrapped)


def break_at(point: str, step: int) -> None:
    *where, action = (os.environ.get("FAULT", "") + ":::").split(":")[:4]
    if where != [point, os.environ.get("RANK", "0"), str(step)]:
        return
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    if action == "memory":
        raise MemoryError
    if action == "exit":
        os._exit(0)
    time.sleep(float(action)) if action else os.kill(os.getpid(), signal.SIGKILL)
