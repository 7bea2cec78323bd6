"""ShareGPT, alpaca, OpenAI, prompt/completion ... -> messages; one small function each.

Read today: chat rows, {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}, and
alpaca rows, {"instruction": "...", "input": "...", "output": "..."}; input may lack. Other keys are ignored.
A ValueError names the field: "messages[2].content: expected text, got list".
"""

ROLES = ("system", "user", "assistant")
READ_TODAY = '{"messages": [...]} and {"instruction": ..., "input": ..., "output": ...}'
_JSON_NAMES = {str: "text", list: "list", dict: "object", bool: "true or false", type(None): "null"}


def form_of(row: dict) -> str:
    """The kind of a row by its keys: "chat" or "alpaca". ValueError for any other kind."""
    if "messages" in row:
        return "chat"
    if "instruction" in row:
        return "alpaca"
    seen = ", ".join(repr(key[:40]) for key in list(row)[:8]) or "none"
    raise ValueError(f"its keys are {seen}; the rows that can be read today are {READ_TODAY}")


def to_messages(row: dict) -> list[dict[str, str]]:
    """The conversation in a row: [{"role": "system" | "user" | "assistant", "content": text}, ...].

    At most one system turn, which is first; then user and assistant by turns, user first, with at least one
    assistant turn. A last turn of the user is kept: it is read and not taught. ValueError names the first
    field that breaks this.
    """
    return chat_messages(row) if form_of(row) == "chat" else alpaca_messages(row)


def chat_messages(row: dict) -> list[dict[str, str]]:
    turns = _typed(row, "messages", list)
    messages = []
    for i, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise ValueError(f"messages[{i}]: expected object, got {json_name(turn)}")
        role = _typed(turn, "role", str, f"messages[{i}].")
        if role not in ROLES:
            raise ValueError(f"messages[{i}].role: {role[:40]!r} is not one of {', '.join(ROLES)}")
        expected = "assistant" if messages and messages[-1]["role"] == "user" else "user"
        if role != expected and not (role == "system" and i == 0):
            rule = "a conversation is at most one system turn, then user and assistant by turns"
            raise ValueError(f"messages[{i}].role: expected {expected}, got {role}; {rule}")
        messages.append({"role": role, "content": _text(turn, "content", f"messages[{i}].")})
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("messages: no assistant turn, so there is nothing to learn")
    return messages


def alpaca_messages(row: dict) -> list[dict[str, str]]:
    """User: the instruction, and after an empty line the input where there is one. Assistant: the output."""
    asked = _text(row, "instruction")
    if row.get("input") not in (None, ""):
        asked += "\n\n" + _typed(row, "input", str)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": _text(row, "output")}]


def json_name(value: object) -> str:
    """What a user of JSON calls this type of value."""
    return _JSON_NAMES.get(type(value), "number")


def _typed(holder: dict, key: str, kind: type, path: str = ""):
    if key not in holder:
        raise ValueError(f"{path}{key}: missing")
    if type(holder[key]) is not kind:
        raise ValueError(f"{path}{key}: expected {_JSON_NAMES[kind]}, got {json_name(holder[key])}")
    return holder[key]


def _text(holder: dict, key: str, path: str = "") -> str:
    text = _typed(holder, key, str, path)
    if not text.strip():
        raise ValueError(f"{path}{key}: empty")
    return text
