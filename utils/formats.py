"""Rows -> messages: plain chat and alpaca rows. Every other form, and what is wrong with a row, is in
more_formats.py.

{"messages": [{"role": "user", "content": "..."}, ...]}
{"instruction": "...", "input": "...", "output": "..."}
"""

import re

FORMS = {  # by the key that tells
    "messages": "chat", "conversations": "sharegpt", "instruction": "alpaca", "completion": "completion",
    "text": "text", "input_ids": "tokens",
}  # fmt: skip
PREFERENCE = {"chosen", "rejected", "label"}
LETTERS = {"system": "s", "user": "u", "assistant": "a"}
JSON_NAMES = {str: "text", list: "list", dict: "object", bool: "true or false", type(None): "null"}


def form_of(row: dict) -> str:
    """The kind of a row by its keys, one of FORMS; "" for any other, preferences included."""
    form = next((form for key, form in FORMS.items() if key in row), "")
    return form if row.keys().isdisjoint(PREFERENCE) else ""


def plain_messages(row: dict, form: str) -> list[dict[str, str]] | None:
    """[{"role": "system" | "user" | "assistant", "content": text}, ...]: at most one system turn, which is
    first, then user and assistant by turns. None where the row is anything else.

    A last turn of the user is kept: it is read and not taught. Of an alpaca row the user says the instruction
    and, after an empty line, the input where there is one. Keys that mean nothing here are ignored.
    """
    if form == "alpaca" and not row.get("system") and not row.get("history"):
        asked, more, answer = row.get("instruction"), row.get("input") or "", row.get("output")
        asked = f"{asked}\n\n{more}" if more and _words(more) and _words(asked) else asked
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return turns if isinstance(more, str) and all(_words(turn["content"]) for turn in turns) else None
    turns = row.get("messages") if form == "chat" and "tools" not in row else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    order = "".join(LETTERS.get(str(turn.get("role")), "?") for turn in turns)
    plain = all(_words(t.get("content")) and t.keys().isdisjoint(("tool_calls", "weight")) for t in turns)
    if not plain or not re.fullmatch("s?(ua)+u?", order):
        return None
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def json_name(value: object) -> str:
    """What a user of JSON calls this type of value."""
    return JSON_NAMES.get(type(value), "number")


def _words(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
