"""The cache folder, for files that can be made again."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/raw_fsdp/NAME or ~/.cache/raw_fsdp/NAME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "raw_fsdp", name)
