"""Rows -> messages: plain chat and alpaca rows. messages.py reads every other form, and says what is wrong
with a row.

{"messages": [{"role": "user", "content": "..."}, ...]}
{"instruction": "...", "input": "...", "output": "..."}
"""

import re
from collections import Counter

from ..run.errors import check

FORMS = {  # key -> form; the first of these keys that a row has decides
    "messages": "chat",
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "completion": "completion",
    "text": "text",
    "input_ids": "tokens",
}
# Keys of a row that say something about its answer, or add to it: messages.check_keys handles each of them.
# All other keys that a form does not know (id, source, score, ...) are ignored.
PICTURES = frozenset("image images video videos audio audios".split())
PREFERENCES = frozenset(
    "chosen rejected chosen_messages rejected_messages label kto_tag kto_tags".split()
)
WEIGHTS = frozenset("weight loss_weight sample_weight train training masked".split())
OTHER_TEXTS = frozenset(
    "system_prompt system_message reasoning reasoning_content thinking chat_template_kwargs documents".split()
)
# Keys of a turn with the assistant's thoughts, beside its content.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
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
    """The form of a row by its keys; "" for any other row."""
    for key, form in FORMS.items():
        if key in row:
            return form
    return ""


def plain_messages(row: dict, form: str) -> list[dict[str, str]] | None:
    """[{"role": "system" | "user" | "assistant", "content": text}, ...]: at most one system turn, which is
    first, then user and assistant by turns. None where the row is anything else.

    A last turn of the user is kept: it is read and not trained. The user's turn of an alpaca row is the
    instruction and, after an empty line, the input where there is one.
    """
    if not row.keys().isdisjoint(SPECIAL) or row.get("system"):
        return None
    if form == "alpaca" and not row.get("history"):
        return _plain_alpaca(row)
    if form == "chat":
        return _plain_chat(row.get("messages"))
    return None


def _plain_alpaca(row: dict) -> list[dict[str, str]] | None:
    instruction = row.get("instruction")
    extra = row.get("input") or ""
    output = row.get("output")
    if not (isinstance(extra, str) and _has_words(instruction) and _has_words(output)):
        return None
    question = f"{instruction}\n\n{extra}" if _has_words(extra) else instruction
    return [{"role": "user", "content": question}, {"role": "assistant", "content": output}]


def _plain_chat(turns: object) -> list[dict[str, str]] | None:
    if not isinstance(turns, list):
        return None
    letters = ""
    messages = []
    for turn in turns:
        if not isinstance(turn, dict) or not turn.keys() <= PLAIN_TURN:
            return None
        if not _has_words(turn.get("content")):
            return None
        letters += LETTERS.get(str(turn.get("role")), "?")
        messages.append({"role": turn.get("role"), "content": turn["content"]})
    return messages if re.fullmatch("s?(ua)+u?", letters) else None


def parse_columns(text: str) -> dict[str, str]:
    """{our key: their column} of --columns prompt=question,completion=answer, or ConfigError."""
    fix = "fix: --columns prompt=question,completion=answer"
    columns: dict[str, str] = {}
    for pair in text.split(","):
        if not pair:
            continue
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        check(equals and theirs, f"--columns {text!r}: {pair!r} is no KEY=COLUMN ({fix})")
        known = ", ".join(COLUMNS)
        check(ours in COLUMNS, f"--columns {text!r}: {ours!r} is none of {known} ({fix})")
        check(ours not in columns, f"--columns {text!r}: {ours} is given twice ({fix})")
        columns[ours] = theirs
    return columns


def renamed(row: dict, columns: dict[str, str]) -> tuple[dict, str]:
    """(the row with our keys for its columns, its form: the renamed keys decide first)."""
    mapped = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    unmapped = {key: value for key, value in row.items() if key not in columns.values()}
    row = unmapped | mapped
    return row, form_of(dict.fromkeys(columns)) or form_of(row)


def note_placeholders(messages: list[dict], notes: Counter) -> None:
    """Count a row whose text has a place for a picture, though the row has none."""
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and PLACEHOLDER.search(content):
            notes[PLACEHOLDERS] += 1
            return


def json_name(value: object) -> str:
    """What a user of JSON calls this type of value."""
    return JSON_NAMES.get(type(value), "number")


def typed(holder: dict, key: str, kind: type, path: str = ""):
    """holder[key], if it has that type. path: of the holder within the row, "messages[2].", for errors."""
    if key not in holder and not path:  # the holder is the row itself
        keys = ", ".join(repr(known[:40]) for known in list(holder)[:8])
        raise ValueError(f"{key}: missing; the row has {keys} (fix: --columns {key}=THEIRS)")
    if key not in holder:
        raise ValueError(f"{path}{key}: missing")
    if not isinstance(holder[key], kind):
        raise ValueError(f"{path}{key}: expected {JSON_NAMES[kind]}, got {json_name(holder[key])}")
    return holder[key]


def text_of(holder: dict, key: str, path: str = "") -> str:
    """holder[key], if it is text with something in it."""
    text = typed(holder, key, str, path)
    if not text.strip():
        raise ValueError(f"{path}{key}: empty")
    return text


def _has_words(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())
