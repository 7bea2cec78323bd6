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
    value, end = parse_at(text, 0)
    if end < len(text):
        raise json.JSONDecodeError("More text after the value", text, end)
    return value


def parse_at(text: str, at: int) -> tuple[object, int]:
    """The JSON value that starts at or after `at`, and where the text goes on after it."""
    start = skip_space(text, at)
    try:
        value, end = _DECODER.raw_decode(text, start)
        if _SURROGATE.search(text, start, end):
            json.dumps(value, ensure_ascii=False).encode()  # cannot encode half a pair
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, skip_space(text, end)


def skip_space(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()


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
_DECODER = json.JSONDecoder(object_pairs_hook=_object, **_NUMBERS)
_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
