"""One turn of a conversation -> a message: its text or parts, its calls of tools, its thoughts, and whether
it is trained. Also the tools of a row. The messages are those of messages.to_messages.
"""

import json
import re
from collections import Counter

from .formats import THOUGHTS, json_name, text_of, typed

SPELLED_CALL = re.compile(r"tool_?calls?\b|function_?call|python_tag|<function=", re.IGNORECASE)
ONE = "finetune.py trains rows with one text answer"
REMEDY = "fix: remove these rows, or --bad_rows drop"

# Keys of a turn that keep it out of the loss, and the values that they may have: 1 is trained.
LOSS_KEYS = ("weight", "loss_weight", "train", "training", "masked")
TRAINED = {1: 1, 0: 0}  # 1.0 and True are equal to 1
TURN_KEYS = {"name", "tool_call_id", "tool_calls", "function_call", *LOSS_KEYS, *THOUGHTS}
# Keys that mask parts of a turn in other projects, and that would be wrong to ignore.
OTHER_MASKS = {"train_detail", "training_detail", "mask", "loss_mask", "trainable", "loss"}
NOT_TRAINED = "turns of other roles that ask to be trained, and are not (see --train_on all)"
UNKNOWN_KEY = "turns with the key"
PICTURE_PARTS = re.compile(r"image|video|audio|picture|file")
MOST_KEYS = 20  # different unknown keys that are counted one by one


def read_turn(
    turn: dict,
    name: str,
    role: str,
    keys: tuple[str, str, str],
    at: str,
    before: list[dict],
    tools: list,
    notes: Counter,
) -> dict:
    """One turn as a message.

    name: its role as the row has it; role: the same in our words; keys: as in messages.chat_messages; at: the
    turn's place in the row, for errors; before: the messages up to it; tools: gets those that stand in it.
    """
    _, role_key, content_key = keys
    parts = Parts(turn, content_key, at)
    is_empty = turn.get(content_key) in (None, "", [])
    calls: list[dict] = []
    if name == "function_call":
        content = ""
        calls = _sharegpt_calls(turn.get(content_key), f"{at}.{content_key}")
    elif role == "assistant":
        calls = parts.calls + _openai_calls(turn, at)
        content = _text_beside_calls(turn, content_key, at, parts, calls)
    else:
        content = "" if role == "tool" and is_empty else _text(turn, content_key, at, parts)
        if parts.calls or turn.get("tool_calls") or turn.get("function_call"):
            raise ValueError(f"{at}: a call of a tool in a turn of {name}; only an assistant calls")
    message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    elif turn.get("tool_calls") == [] and is_empty:
        raise ValueError(f"{at}: neither content nor a call")
    if parts.tools and role != "system":
        raise ValueError(
            f"{at}.{content_key}: a list of tools in a turn of {name}; it belongs in the system turn"
        )
    tools += parts.tools
    _add_thoughts(message, turn, role, parts, at)
    if turn.get("name") is not None:
        message["name"] = typed(turn, "name", str, f"{at}.")
    if role == "tool":
        _add_call_id(message, turn, at, before)
    _add_weight(message, turn, role, at, notes)
    _check_turn_keys(turn, (role_key, content_key), at, notes)
    return message


class Parts:
    """What a turn's content holds where it is a list of parts.

    OpenAI's are {"type": "text", "text": ...}; those of LLaMA-Factory v1 have their text under "value", and
    also hold thoughts, calls and tools.
    """

    def __init__(self, turn: dict, key: str, at: str):
        self.text = ""
        self.thoughts = ""
        self.calls: list[dict] = []
        self.tools: list = []
        self.exist = isinstance(turn.get(key), list) and turn.get("from") != "function_call"
        if self.exist:
            for i, part in enumerate(turn[key]):
                self._add(part, f"{at}.{key}[{i}]")

    def _add(self, part: object, at: str) -> None:
        if not isinstance(part, dict):
            raise ValueError(f"{at}: expected object, got {json_name(part)}")
        kind = typed(part, "type", str, f"{at}.")
        if kind == "text":
            self.text += _first_text(part, ("text", "value"), at)
        elif kind in ("reasoning", "thinking"):
            self.thoughts += _first_text(part, ("value", kind, "text"), at)
        elif kind == "tool_call":
            value = part.get("value")
            if isinstance(value, str):
                value = _parsed(value, f"{at}.value")
            self.calls.append(_call({"function": value}, at))
        elif kind in ("tools", "tool"):
            self.tools += _listed(part.get("value"), f"{at}.value")
        elif PICTURE_PARTS.search(kind):
            raise ValueError(
                f"{at}.type: {kind[:40]!r} is a picture, video or sound; {ONE} ({REMEDY})"
            )
        else:
            raise ValueError(f"{at}.type: {kind[:40]!r} is not text, reasoning, tool_call or tools")


def _first_text(part: dict, keys: tuple[str, ...], at: str) -> str:
    """The text under the first of these keys that the part has; "text" is missing if it has none."""
    for key in keys:
        if key in part:
            return typed(part, key, str, f"{at}.")
    return typed(part, "text", str, f"{at}.")


def _text(turn: dict, key: str, at: str, parts: Parts) -> str:
    """The text of a turn, or all texts of its parts."""
    if parts.exist:
        return text_of({key: parts.text}, key, f"{at}.")
    return text_of(turn, key, f"{at}.")


def _text_beside_calls(turn: dict, key: str, at: str, parts: Parts, calls: list) -> str:
    """The text of an assistant's turn; it may be missing where the turn has calls."""
    text = parts.text if parts.exist else turn.get(key)
    if calls and (text is None or isinstance(text, str) and not text.strip()):
        return ""
    return _text(turn, key, at, parts)


def _sharegpt_calls(value: object, at: str) -> list[dict]:
    """The calls in the text of a turn from function_call: one as JSON, or a list of them."""
    if isinstance(value, str):
        value = _parsed(value, at)
    calls = value if isinstance(value, list) else [value]
    return [_call({"function": call}, at) for call in calls]


def _openai_calls(turn: dict, at: str) -> list[dict]:
    calls = []
    if turn.get("tool_calls") is not None:
        for i, call in enumerate(typed(turn, "tool_calls", list, f"{at}.")):
            calls.append(_call(call, f"{at}.tool_calls[{i}]"))
    if turn.get("function_call"):  # the older key
        calls.append(_call({"function": turn["function_call"]}, f"{at}.function_call"))
    return calls


def _add_thoughts(message: dict, turn: dict, role: str, parts: Parts, at: str) -> None:
    """Add the assistant's thoughts under reasoning_content, which most templates read, and under the key that
    the row has for them.
    """
    thoughts = {}
    for key in THOUGHTS:
        if turn.get(key) not in (None, ""):
            thoughts[key] = typed(turn, key, str, f"{at}.")
    if parts.thoughts:
        thoughts["reasoning_content"] = parts.thoughts
    if len(set(thoughts.values())) > 1:
        raise ValueError(f"{at}: {' and '.join(thoughts)} differ (fix: keep one)")
    if thoughts and role != "assistant":
        key = next(iter(thoughts))
        raise ValueError(f"{at}.{key}: thoughts in a turn of {turn.get('role', role)}")
    for key, text in thoughts.items():
        message["reasoning_content"] = text
        message[key] = text


def _add_call_id(message: dict, turn: dict, at: str, before: list[dict]) -> None:
    """Add the id of the call that a tool answers. The tool's name may replace it; where the calls have no
    ids, their order decides.
    """
    known_ids = []
    spells_calls = False
    for earlier in before:
        known_ids += [call["id"] for call in earlier.get("tool_calls", []) if "id" in call]
        if earlier["role"] == "assistant" and SPELLED_CALL.search(earlier["content"]):
            spells_calls = True
    has_name = "name" in message
    if "tool_call_id" in turn and (turn["tool_call_id"] is not None or not has_name):
        call_id = typed(turn, "tool_call_id", str, f"{at}.")
        message["tool_call_id"] = call_id
        may_be_spelled = spells_calls and not known_ids
        if call_id not in known_ids and not may_be_spelled:
            raise ValueError(f"{at}.tool_call_id: no earlier call has the id {call_id[:40]!r}")
    elif known_ids and not has_name:
        raise ValueError(
            f"{at}.tool_call_id: missing; the calls before it have ids (fix: add it, or a name)"
        )


def _add_weight(message: dict, turn: dict, role: str, at: str, notes: Counter) -> None:
    """Add weight 0 where any key says that the turn is not trained: weight (OpenAI), loss_weight
    (LLaMA-Factory), train or training (axolotl), masked (torchtune).
    """
    weights = []
    for key in LOSS_KEYS:
        value = turn.get(key)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or value not in TRAINED:
            raise ValueError(f"{at}.{key}: expected 0 or 1, got {value!r:.40}")
        weight = TRAINED[value]
        weights.append(1 - weight if key == "masked" else weight)
    if len(set(weights)) > 1:
        raise ValueError(f"{at}: its keys for the loss contradict each other (fix: keep one)")
    if weights and role == "assistant":
        message["weight"] = weights[0]
    elif (
        weights and weights[0] and "masked" not in turn
    ):  # torchtune has masked: false in all turns
        notes[NOT_TRAINED] += 1


def _check_turn_keys(turn: dict, used: tuple[str, str], at: str, notes: Counter) -> None:
    """Count keys of a turn that are not used, by name; refuse those that are masks."""
    for key in turn.keys() - TURN_KEYS - {*used}:
        if turn[key] in (None, "", [], {}) and turn[key] is not False:
            continue
        if key in OTHER_MASKS:
            raise ValueError(
                f'{at}.{key}: no key for the loss here (fix: "weight": 0 for a turn not trained)'
            )
        note = f"{UNKNOWN_KEY} {key[:40]!r}, which is not used"
        counted = sum(known.startswith(UNKNOWN_KEY) for known in notes)
        if note not in notes and counted >= MOST_KEYS:
            note = "turns with other keys, which are not used"
        notes[note] += 1


def _call(call: object, at: str) -> dict:
    """A call of a tool, its arguments as an object, which is what chat templates expect."""
    if not isinstance(call, dict):
        raise ValueError(f"{at}: expected object, got {json_name(call)}")
    function = call
    if "function" in call or "name" not in call:
        function = typed(call, "function", dict, f"{at}.")
    name = text_of(function, "name", f"{at}.function.")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{at}.function.arguments")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{at}.function.arguments: expected an object as JSON, got {json_name(arguments)}"
        )
    message: dict = {"type": "function"}
    if isinstance(call.get("id"), str):
        message["id"] = call["id"]
    message["function"] = {"name": name, "arguments": arguments}
    return message


def tools_of(row: dict, in_turns: list | None = None) -> list | None:
    """The tools of a row, which may stand under tools or functions, or in its turns, each as
    {"type": "function", "function": {"name": ...}}, which is what chat templates expect.
    """
    tools = _listed(row.get("tools"), "tools")
    tools += _listed(row.get("functions"), "functions")
    tools += in_turns or []
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError("tools: expected a list of objects, or JSON text of one")
        if not isinstance(tool.get("function"), dict):
            function = {key: value for key, value in tool.items() if key != "type"}
            text_of(function, "name", f"tools[{i}].")
            tools[i] = {"type": "function", "function": function}
    return tools or None


def _listed(tools: object, at: str) -> list:
    """Some tools as a list: from a list, one object, or JSON text of either."""
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, at)
    if isinstance(tools, dict):
        tools = [tools]
    if tools and not isinstance(tools, list):
        raise ValueError(f"{at}: expected a list of objects, or JSON text of one")
    return list(tools or [])


def _parsed(text: str, at: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{at}: not JSON: {str(error)[:80]}") from None
