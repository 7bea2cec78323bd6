"""Values that several rooms share."""

import hashlib

MIB = 2**20
GIB = 2**30
IGNORE = -100  # the label of a token that is not trained; cross-entropy leaves it out


def seed_of(key: str) -> int:
    """A seed computed from `key` alone, so it is the same on every machine."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little") >> 1
