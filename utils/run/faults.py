"""How tests break a run from outside, in places that errors.fault marks. Imported only where FAULT is set."""

import os
import signal
import time


def break_at(point: str, step: int, rank: int) -> None:
    """FAULT=point:rank:step, and :exit, :memory or :SECONDS; else a kill. Not after an elastic restart."""
    *where, action = (os.environ["FAULT"] + ":::").split(":")[:4]
    if (
        where != [point, str(rank), str(step)]
        or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    ):
        return
    if action == "memory":
        raise MemoryError
    if action == "exit":
        os._exit(0)
    time.sleep(float(action)) if action else os.kill(os.getpid(), signal.SIGKILL)
