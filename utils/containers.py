"""Rows in files that are not one object a line. Imported only for those."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import check
from .strict_json import DECODER, check_pairs

SPACE = re.compile(r"[ \t\r\n]*")


def read_array(path: Path) -> Iterator[tuple[str, object]]:
    """(where, the value or a ValueError) of each element. After a syntax error there is no next one."""
    where, row = str(path), 0
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if re.fullmatch(r"\s*(\[\s*\]\s*)?", text):
            return
        at = _skip_space(text, 0)
        check(text[at] == "[", f"{path}: not an array, [...]; a file with one object a line is a .jsonl file")
        while text[at] != "]":  # at [ or ,
            row += 1
            where = f"{path} row {row}"
            value, at = _parse_at(text, at + 1)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting , or ]", text, at)
            yield where, value
        if _skip_space(text, at + 1) < len(text):
            raise json.JSONDecodeError("More text after the array", text, at + 1)
    except ValueError as error:
        yield where, error


def _parse_at(text: str, at: int) -> tuple[object, int]:
    """The JSON value that starts at or after `at`, and where the text goes on after it."""
    start = _skip_space(text, at)
    try:
        value, end = DECODER.raw_decode(text, start)
        check_pairs(value, text[start:end])
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value, _skip_space(text, end)


def _skip_space(text: str, at: int) -> int:
    return SPACE.match(text, at).end()
