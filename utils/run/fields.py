"""A dataclass's fields as settings: their types, and strict reading of a text."""

import dataclasses
import math
import re
import typing

from .errors import check

SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


def kinds_of(cls: type) -> dict[str, tuple[type, str | None]]:
    """Each setting's type, and the text that its flag means where it stands alone (None: it may not)."""
    kinds = {}
    for field in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[field.name]
        kinds[field.name] = (kind, "true" if kind is bool else field.metadata.get("bare"))
    return kinds


def read_value(kind: type, alone: str | None, where: str, text: str) -> str | int | float | bool:
    """`text` as a value of its type, strictly. `where` is the flag, or the line and key of a file."""
    check("\0" not in text, f"{where} cannot hold a NUL character: {shown(text)}")
    if kind is bool:
        check(text.lower() in SWITCH, f"{where} takes true or false, not '{shown(text)}'")
        return SWITCH[text.lower()]
    # int() and float() would read 1_000, fullwidth digits, spaces, nan, and numbers that fit nowhere.
    if kind is int:
        number = re.fullmatch("[+-]?(0|[1-9][0-9]{0,17})", text)
        check(
            number,
            f"{where} takes a whole number in plain digits such as 1000, not '{shown(text)}'",
        )
        return int(text)
    if kind is float:
        number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text)
        finite = number and math.isfinite(float(text))
        check(finite, f"{where} takes a finite number such as 0.001 or 1e-3, not '{shown(text)}'")
        return float(text)
    choices = typing.get_args(kind)
    if alone and text not in choices and SWITCH.get(text.lower()):
        return alone
    check(
        kind is str or text in choices,
        f"{where} takes one of {', '.join(choices)}; not '{shown(text)}'",
    )
    return text


def shown(text: str) -> str:
    """Text fit for a message of one line."""
    return repr(text)[1:-1] if len(text) < 200 else repr(text[:60])[1:-1] + "..."
