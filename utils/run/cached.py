"""The cache folder, for files that can be made again."""

import os
from pathlib import Path

from .errors import ConfigError


def cache_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/raw_fsdp/NAME or ~/.cache/raw_fsdp/NAME. ConfigError if the user has no home."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise ConfigError(f"no folder for {name}: {error} (fix: XDG_CACHE_HOME=FOLDER)") from None
    return home / "raw_fsdp" / name
