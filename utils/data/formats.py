"""Rows -> messages: plain chat and alpaca rows. Every other form, and what is wrong with a row, is in
messages.py.

{"messages": [{"role": "user", "content": "..."}, ...]}
{"instruction": "...", "input": "...", "output": "..."}
"""

import re
from collections import Counter

from ..run.errors import check

FORMS = {  # by the key that tells
    "messages": "chat", "conversations": "sharegpt", "instruction": "alpaca", "completion": "completion",
    "text": "text", "input_ids": "tokens",
}  # fmt: skip
# Keys of a row that say something about its answer, or add to it: messages.check_keys says what of each.
# All other keys that a form does not know (id, source, score, ...) are taken for notes of the data's makers.
PICTURES = frozenset("image images video videos audio audios".split())
PREFERENCES = frozenset(
    "chosen rejected chosen_messages rejected_messages label kto_tag kto_tags".split()
)
WEIGHTS = frozenset("weight loss_weight sample_weight train training masked".split())
OTHER_TEXTS = frozenset(
    "system_prompt system_message reasoning reasoning_content thinking chat_template_kwargs documents".split()
)
SPECIAL = PICTURES | PREFERENCES | WEIGHTS | OTHER_TEXTS | {"tools", "functions"}
PLAIN_TURN = {"role", "content"}
PLACEHOLDER = re.compile("<(?:image|video|audio)>")
PLACEHOLDERS = "rows whose text has <image>, <video> or <audio>, which stays text"
COLUMNS = (
    "messages conversations instruction input output system history tools prompt completion".split()
)
COLUMNS += ["text", "input_ids", "labels"]
LETTERS = {"system": "s", "user": "u", "assistant": "a"}
JSON_NAMES = {str: "text", list: "list", dict: "object", bool: "true or false", type(None): "null"}


def form_of(row: dict) -> str:
    """The kind of a row by its keys, one of FORMS; "" for any other."""
    return next((form for key, form in FORMS.items() if key in row), "")


def plain_messages(row: dict, form: str) -> list[dict[str, str]] | None:
    """[{"role": "system" | "user" | "assistant", "content": text}, ...]: at most one system turn, which is
    first, then user and assistant by turns. None where the row is anything else.

    A last turn of the user is kept: it is read and not trained. Of an alpaca row the user says
    the instruction and, after an empty line, the input where there is one.
    """
    if not row.keys().isdisjoint(SPECIAL):
        return None
    if form == "alpaca" and not row.get("system") and not row.get("history"):
        asked, more, answer = row.get("instruction"), row.get("input") or "", row.get("output")
        asked = f"{asked}\n\n{more}" if more and _words(more) and _words(asked) else asked
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
        return (
            turns
            if isinstance(more, str) and all(_words(turn["content"]) for turn in turns)
            else None
        )
    turns = row.get("messages") if form == "chat" and not row.get("system") else None
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    order = "".join(LETTERS.get(str(turn.get("role")), "?") for turn in turns)
    plain = all(turn.keys() <= PLAIN_TURN and _words(turn.get("content")) for turn in turns)
    if not plain or not re.fullmatch("s?(ua)+u?", order):
        return None
    return [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def parse_columns(text: str) -> dict[str, str]:
    """{our key: their column} of --columns prompt=question,completion=answer, or ConfigError."""
    fix = "fix: --columns prompt=question,completion=answer"
    columns: dict[str, str] = {}
    for pair in filter(None, text.split(",")):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        check(equals and theirs, f"--columns {text!r}: {pair!r} is no KEY=COLUMN ({fix})")
        check(
            ours in COLUMNS, f"--columns {text!r}: {ours!r} is none of {', '.join(COLUMNS)} ({fix})"
        )
        check(ours not in columns, f"--columns {text!r}: {ours} is given twice ({fix})")
        columns[ours] = theirs
    return columns


def renamed(row: dict, columns: dict[str, str]) -> tuple[dict, str]:
    """(the row with our keys for its columns, its form as the renamed keys tell it)."""
    mapped = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    rest = {key: value for key, value in row.items() if key not in columns.values()}
    row = rest | mapped
    return row, form_of(dict.fromkeys(columns)) or form_of(row)


def note_placeholders(messages: list[dict], notes: Counter) -> None:
    """Count a row whose text has a place for a picture, though the row has none."""
    if any(isinstance(m["content"], str) and PLACEHOLDER.search(m["content"]) for m in messages):
        notes[PLACEHOLDERS] += 1


def json_name(value: object) -> str:
    """What a user of JSON calls this type of value."""
    return JSON_NAMES.get(type(value), "number")


def _words(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
