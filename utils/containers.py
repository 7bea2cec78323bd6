"""Rows in files that are not one object a line. Imported only for those."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

from .errors import check
from .strict_json import parse_at, skip_space


def read_array(path: Path) -> Iterator[tuple[str, object]]:
    """(where, the value or a ValueError) of each element. After a syntax error there is no next one."""
    where, row = str(path), 0
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if re.fullmatch(r"\s*(\[\s*\]\s*)?", text):
            return
        at = skip_space(text, 0)
        check(text[at] == "[", f"{path}: not an array, [...]; a file with one object a line is a .jsonl file")
        while text[at] != "]":  # at [ or ,
            row += 1
            where = f"{path} row {row}"
            value, at = parse_at(text, at + 1)
            if text[at : at + 1] not in (",", "]"):
                raise json.JSONDecodeError("Expecting , or ]", text, at)
            yield where, value
        if skip_space(text, at + 1) < len(text):
            raise json.JSONDecodeError("More text after the array", text, at + 1)
    except ValueError as error:
        yield where, error
