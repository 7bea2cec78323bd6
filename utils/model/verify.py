"""A model folder's files against a list of SHA-256 sums, as sha256sum and many model pages give it."""

import hashlib
import re
from pathlib import Path

from ..run.distributed import World
from ..run.errors import ConfigError, check, first_five
from ..run.files import TEXT_BYTES, open_regular, read_small_text


def check_hashes(files: set[Path], sums: str, world: World) -> None:
    """Raise ConfigError unless the files are in the list `sums`, and this rank's share of them as it says."""
    try:
        lines = read_small_text(sums, TEXT_BYTES, f"--verify {sums}").split("\n")
    except ConfigError as error:
        raise ConfigError(f"{error} (fix: a list that sha256sum wrote)") from None
    wanted = {}
    for number, line in enumerate(lines, start=1):
        entry = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        check(
            entry or not line.strip(),
            f"{sums}:{number}: expected a SHA-256 sum, two spaces and a name",
        )
        if entry:
            wanted[Path(entry[2]).name] = entry[1].lower()
    lacks = [path.name for path in sorted(files) if path.name not in wanted]
    check(
        not lacks, f"--verify {sums}: no sum for {first_five(lacks)} (fix: the list of this model)"
    )
    for path in sorted(files)[world.rank :: world.size]:
        with open_regular(path) as file:
            same = hashlib.file_digest(file, "sha256").hexdigest() == wanted[path.name]
        check(same, f"{path}: not what {sums} says, SHA-256 (fix: download the folder again)")
