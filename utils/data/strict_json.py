"""JSON as its standard defines it (RFC 8259). Python's reader accepts more, which no author of data means."""

import json
import math
import re
from collections import Counter


def parse_json(text: str) -> object:
    """One JSON value and nothing else.

    ValueError also for what Python's json accepts (NaN, 1e999, a key that stands twice, half a surrogate
    pair) and for values that are nested too deeply for it.
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
    value = dict(pairs)
    if len(value) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} stands twice in one object")
    return value


def _number(text: str) -> int | float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:12]} is not JSON, or too large")
    return number if set(text) & set(".eE") else int(text)


DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_float=_number,
    parse_int=_number,
    parse_constant=_number,
)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
