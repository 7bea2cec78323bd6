"""What a run has written: `read_metrics(out / "metrics.jsonl")`."""

import json
from pathlib import Path


def read_metrics(file: Path) -> list[dict]:
    """The objects of metrics.jsonl, by step. Where a step was taken or evaluated again after a restart, only
    those of the last start stay.
    """
    objects = [json.loads(line) for line in file.read_text().splitlines()]
    last_start = {kind_of(found): found.get("run", 1) for found in objects}
    kept = [found for found in objects if found.get("run", 1) == last_start[kind_of(found)]]
    return sorted(kept, key=lambda found: found["step"])


def kind_of(found: dict) -> tuple:
    return found["step"], "loss" in found
