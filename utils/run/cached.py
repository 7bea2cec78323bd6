"""Where files lie that can be made again."""

import os
from pathlib import Path

from .errors import ConfigError


def cache_folder(name: str) -> Path:
    """For what can be made again, in $XDG_CACHE_HOME or ~/.cache. ConfigError: a user without a home."""
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:
        raise ConfigError(f"no folder for {name}: {error} (fix: XDG_CACHE_HOME=FOLDER)") from None
    return home / "raw_fsdp" / name
