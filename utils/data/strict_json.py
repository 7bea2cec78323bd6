"""JSON as its standard has it (RFC 8259): Python's reader lets more pass, and none of that is meant."""

import json
import math
import re
from collections import Counter


def parse_json(text: str) -> object:
    """One JSON value and nothing else.

    ValueError also for what Python's json lets pass (NaN, 1e999, a key that stands twice, half a surrogate
    pair) and for nesting that it cannot follow.
    """
    try:
        value = DECODER.decode(text)
        check_pairs(value, text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def check_pairs(value: object, text: str) -> None:
    """Raise ValueError where half a surrogate pair stands in a value that was read from `text`."""
    if _SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode()  # cannot encode half a pair


def _object(pairs: list[tuple[str, object]]) -> dict:
    if len(found := dict(pairs)) < len(pairs):
        twin, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twin!r} stands twice in one object")
    return found


def _number(text: str) -> int | float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"the number {text[:12]} is not JSON, or too large")
    return number if set(text) & set(".eE") else int(text)


_NUMBERS = dict.fromkeys(("parse_float", "parse_int", "parse_constant"), _number)
DECODER = json.JSONDecoder(object_pairs_hook=_object, **_NUMBERS)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
