"""Rows that are more than plain turns: ShareGPT, tools and their calls, content in parts, thoughts, turns
that are not trained, alpaca with a history, prompt and completion, plain text. Imported for those; and it
says what the rows are that nobody reads.
"""

import json
import re
from collections import Counter

from .formats import (
    JSON_NAMES,
    OTHER_TEXTS,
    PICTURES,
    PREFERENCES,
    SPECIAL,
    WEIGHTS,
    form_of,
    json_name,
    plain_messages,
)

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
ROLES |= {"function": "tool"}
# What may follow: nothing yet, a role, an assistant's calls of tools, or a text that spells a call.
NEXT = {
    "": "system user",
    "system": "user",
    "user": "assistant",
    "assistant": "user",
    "calls": "tool",
}
NEXT |= {"tool": "tool assistant", "spelled call": "user tool"}
SPELLED_CALL = re.compile(r"tool_?calls?\b|function_?call|python_tag|<function=", re.IGNORECASE)
RULE = "a conversation is at most one system turn, then user and assistant by turns"
LEADING = "turns of the assistant before the first of the user left out"
SHAREGPT = {
    "human": "user",
    "user": "user",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
}
SHAREGPT |= dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant")
KNOWN = (
    "messages (chat), conversations (ShareGPT), instruction and output (alpaca), prompt and completion, text,"
    " input_ids (tokens)"
)
ONE = "finetune.py trains rows with one text answer"
REMEDY = "fix: take these rows out, or --bad_rows drop"

# Keys of a turn. Those that keep it out of the loss, with the values that each may have: 1 is trained.
TRAINED = {1: 1, 0: 0}  # 1.0 and True are equal to 1
LOSS_KEYS = ("weight", "loss_weight", "train", "training", "masked")
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
TURN_KEYS = {"name", "tool_call_id", "tool_calls", "function_call", *LOSS_KEYS, *THOUGHTS}
# Keys that mask parts of a turn in other projects, and that would be wrong to ignore.
OTHER_MASKS = {"train_detail", "training_detail", "mask", "loss_mask", "trainable", "loss"}
NOT_TRAINED = "turns of other roles that ask to be trained, and are not (see --train_on all)"
CATEGORY = "rows with a label in words, which is not used"
JUDGEMENTS = set("0 1 -1 true false good bad desirable undesirable chosen rejected".split())
PICTURE_PARTS = re.compile(r"image|video|audio|picture|file")
MOST_KEYS = 20  # different unknown keys that are counted one by one


def to_messages(
    row: dict, form: str = "", notes: Counter | None = None
) -> tuple[list[dict], list | None]:
    """(messages, tools) of a row of any form: what formats.plain_messages gives, with roles "tool" and "text"
    too, and with these keys where a turn has them:

    tool_calls; reasoning_content, the assistant's thoughts, also under the name that the row has for them
    (thinking, reasoning); name; tool_call_id; weight, 0 where the turn is not trained.
    After calls comes what the tools answer. notes: counts what was left out. ValueError names the first field
    that is wrong: "messages[2].content: expected text, got number".
    """
    form = form or form_of(row)
    if plain := plain_messages(row, form):
        return plain, None
    notes = Counter() if notes is None else notes
    check_keys(row, form, notes)
    return READERS[form](row, notes)


def check_keys(row: dict, form: str, notes: Counter) -> None:
    """Raise ValueError, by name, for rows that are no rows with one text answer; count what is not used."""
    there = {key for key in SPECIAL & row.keys() if row[key] is not None}
    if pictures := sorted(key for key in PICTURES & there if row[key] not in ("", [], {})):
        raise ValueError(f"{pictures[0]}: rows with pictures, videos or sounds; {ONE} ({REMEDY})")
    there = {key for key in there if row[key] not in ("", [], {}) or row[key] is False}
    chosen, rejected = (there & {name, f"{name}_messages"} for name in ("chosen", "rejected"))
    if chosen and rejected:
        raise ValueError(f"these are preference pairs; {ONE} ({REMEDY})")
    if key := next(iter(sorted(there & (PREFERENCES - {"label"}))), ""):
        raise ValueError(
            f"{key}: these are answers that are marked as good or bad (KTO); {ONE} ({REMEDY})"
        )
    if "label" in there and (form not in ("text", "tokens") or isinstance(row["label"], bool)):
        if not isinstance(row["label"], str) or row["label"].strip().lower() in JUDGEMENTS:
            raise ValueError(f"label: these are answers with a label (KTO); {ONE} ({REMEDY})")
        notes[CATEGORY] += 1
    for key in sorted(WEIGHTS & there) if form else ():
        trained = isinstance(row[key], (int, float)) and row[key] == (key != "masked")
        if not trained:
            raise ValueError(f"{key}: {row[key]!r:.40}: whole rows cannot be weighted ({REMEDY})")
    for key in sorted(OTHER_TEXTS & there):
        notes[f"rows with the key {key!r}, which is not used"] += 1
    if there & {"tools", "functions"} and form in ("text", "tokens"):
        raise ValueError(f"tools: a row in {form} form has no place for them")
    if not form and "prompt" in row:
        raise ValueError(f"these are prompts without an answer; {ONE}")
    if not form:
        seen = ", ".join(repr(key[:40]) for key in list(row)[:8]) or "none"
        fix = "fix: --columns prompt=THEIRS,completion=THEIRS"
        raise ValueError(f"its keys are {seen}; the rows that can be read have {KNOWN} ({fix})")


def read_chat(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """OpenAI: messages, and tools as a list or as JSON text. A system text may stand beside them."""
    tools: list = []
    messages = chat_messages(row, notes, tools=tools)
    return _with_system(row, messages), _tools(row, tools)


def read_sharegpt(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """ShareGPT, and what LLaMA-Factory adds: calls, observations, a system text and tools beside them."""
    tools: list = []
    messages = chat_messages(row, notes, ("conversations", "from", "value"), SHAREGPT, tools)
    return _with_system(row, messages), _tools(row, tools)


def read_alpaca(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """Alpaca with a system text, tools, or a history of [question, answer] pairs before the instruction."""
    before = []
    if not isinstance(row.get("history") or [], list):
        raise ValueError(f"history: expected list, got {json_name(row['history'])}")
    for i, pair in enumerate(row.get("history") or []):
        if (
            not isinstance(pair, list)
            or len(pair) != 2
            or not all(isinstance(t, str) and t for t in pair)
        ):
            raise ValueError(f"history[{i}]: expected two texts, a question and its answer")
        before += [
            {"role": role, "content": t}
            for role, t in zip(("user", "assistant"), pair, strict=True)
        ]
    messages = before + alpaca_messages(row)
    return _with_system(row, messages), _tools(row)


def read_completion(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """Two texts, or two lists of messages; what is in the prompt is not trained."""
    if isinstance(row.get("completion"), str):
        texts = [typed(row, "prompt", str), text_of(row, "completion")]
        if _tools(row):
            raise ValueError(
                "tools: a prompt and a completion of plain text have no place for them"
            )
        messages = [{"role": "text", "content": t, "weight": w} for w, t in enumerate(texts)]
        return messages, None
    before, after = typed(row, "prompt", list), typed(row, "completion", list)
    tools: list = []
    messages = chat_messages({"messages": before + after}, notes, tools=tools, first=len(before))
    return messages, _tools(row, tools)


def read_text(row: dict, notes: Counter) -> tuple[list[dict], None]:
    """Plain text, trained as it stands; one without words is not, and is dropped for that."""
    text = typed(row, "text", str)
    return [{"role": "text", "content": text, "weight": int(bool(text.strip()))}], None


def read_tokens(row: dict, notes: Counter) -> tuple[list[dict], None]:
    """Ids of tokens; labels, as many, are -100 where one is not trained."""
    ids = typed(row, "input_ids", list)
    labels = typed(row, "labels", list) if "labels" in row else ids
    if len(labels) != len(ids):
        raise ValueError(f"labels: {len(labels)} of them for {len(ids)} input_ids")
    return [
        {"role": "tokens", "content": ids, "loss_mask": bytes(label != -100 for label in labels)}
    ], None


READERS = {
    "chat": read_chat,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
    "completion": read_completion,
    "text": read_text,
    "tokens": read_tokens,
}


def chat_messages(
    row: dict,
    notes: Counter,
    keys: tuple[str, str, str] = ("messages", "role", "content"),
    roles: dict[str, str] = ROLES,
    tools: list | None = None,
    first: int = 0,
) -> list[dict]:
    """The turns in row[keys[0]], whose role and text have the other two keys.

    tools: gets the ones that stand in a turn. Of the turns before number `first` none is trained.
    """
    messages, last = [], ""
    for i, turn in enumerate(typed(row, keys[0], list)):
        at = f"{keys[0]}[{i}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{at}: expected object, got {json_name(turn)}")
        name = typed(turn, keys[1], str, f"{at}.")
        if name not in roles:
            raise ValueError(f"{at}.{keys[1]}: {name[:40]!r} is not one of {', '.join(roles)}")
        role = roles[name]
        if role == "assistant" and last in ("", "system"):
            notes[LEADING] += 1
            continue
        if role not in NEXT[last].split():
            expected = NEXT[last].replace(" ", " or ")
            raise ValueError(f"{at}.{keys[1]}: expected {expected}, got {name}; {RULE}")
        message = _message(turn, name, role, keys, at, messages, tools, notes)
        if i < first and role == "assistant":
            message["weight"] = 0
        messages.append(message)
        last = role
        if role == "assistant" and "tool_calls" in message:
            last = "calls"
        elif role == "assistant" and SPELLED_CALL.search(message["content"]):
            last = "spelled call"
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{keys[0]}: no assistant turn, so there is nothing to learn")
    return messages


def alpaca_messages(row: dict) -> list[dict]:
    """User: the instruction, and after an empty line the input where there is one. Assistant: the output."""
    asked = text_of(row, "instruction")
    if row.get("input") not in (None, ""):
        asked += "\n\n" + typed(row, "input", str)
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": text_of(row, "output")},
    ]


def _message(
    turn: dict,
    name: str,
    role: str,
    keys: tuple,
    at: str,
    before: list[dict],
    tools: list,
    notes: Counter,
) -> dict:
    """One turn. name: its role as the row has it; before: the messages up to it."""
    _, role_key, key = keys
    parts = _Parts(turn, key, at)
    message: dict = {"role": role}
    calls = list(parts.calls)
    empty = turn.get(key) in (None, "", [])
    if name == "function_call":
        given = (
            _parsed(turn[key], f"{at}.{key}") if isinstance(turn.get(key), str) else turn.get(key)
        )
        given = given if isinstance(given, list) else [given]
        message["content"] = ""
        calls = [_call({"function": call}, f"{at}.{key}") for call in given]
    elif role == "assistant":
        if turn.get("tool_calls") is not None:
            given = typed(turn, "tool_calls", list, f"{at}.")
            calls += [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(given)]
        if turn.get("function_call"):  # OpenAI's older way
            calls.append(_call({"function": turn["function_call"]}, f"{at}.function_call"))
        message["content"] = _text_beside_calls(turn, key, at, parts, calls)
    else:
        message["content"] = "" if role == "tool" and empty else _text(turn, key, at, parts)
        if calls or turn.get("tool_calls") or turn.get("function_call"):
            raise ValueError(f"{at}: a call of a tool in a turn of {name}; only an assistant calls")
    if calls:
        message["tool_calls"] = calls
    elif "tool_calls" in turn and turn["tool_calls"] == [] and empty:
        raise ValueError(f"{at}: neither content nor a call")
    if parts.tools and role != "system":
        raise ValueError(
            f"{at}.{key}: a list of tools in a turn of {name}; it belongs into the system turn"
        )
    if tools is not None:
        tools += parts.tools
    _add_thoughts(message, turn, role, parts, at)
    if turn.get("name") is not None:
        message["name"] = typed(turn, "name", str, f"{at}.")
    if role == "tool":
        _add_call_id(message, turn, at, before)
    _add_weight(message, turn, role, at, notes)
    _check_turn_keys(turn, (role_key, key), at, notes)
    return message


class _Parts:
    """What a turn's content holds where it is a list of parts.

    OpenAI's are {"type": "text", "text": ...}; those of LLaMA-Factory v1 have their text under "value", and
    also hold thoughts, calls and tools.
    """

    def __init__(self, turn: dict, key: str, at: str):
        self.text, self.thoughts = "", ""
        self.calls, self.tools = [], []
        self.there = isinstance(turn.get(key), list) and turn.get("from") != "function_call"
        for j, part in enumerate(turn[key] if self.there else []):
            where = f"{at}.{key}[{j}]"
            if not isinstance(part, dict):
                raise ValueError(f"{where}: expected object, got {json_name(part)}")
            kind = typed(part, "type", str, f"{where}.")
            if kind == "text":
                self.text += typed(
                    part,
                    "value" if "value" in part and "text" not in part else "text",
                    str,
                    f"{where}.",
                )
            elif kind in ("reasoning", "thinking"):
                self.thoughts += typed(
                    part,
                    next(k for k in ("value", kind, "text") if k in part or k == "text"),
                    str,
                    f"{where}.",
                )
            elif kind == "tool_call":
                value = part.get("value")
                value = _parsed(value, f"{where}.value") if isinstance(value, str) else value
                self.calls.append(_call({"function": value}, where))
            elif kind in ("tools", "tool"):
                self.tools += _listed(part.get("value"), f"{where}.value")
            elif PICTURE_PARTS.search(kind):
                raise ValueError(
                    f"{where}.type: {kind[:40]!r} is a picture, video or sound; {ONE} ({REMEDY})"
                )
            else:
                raise ValueError(
                    f"{where}.type: {kind[:40]!r} is not text, reasoning, tool_call or tools"
                )


def _text(turn: dict, key: str, at: str, parts: _Parts) -> str:
    """The words of a turn: a text, or all texts of its parts."""
    if parts.there:
        return text_of({key: parts.text}, key, f"{at}.")
    return text_of(turn, key, f"{at}.")


def _text_beside_calls(turn: dict, key: str, at: str, parts: _Parts, calls: list) -> str:
    """The words of an assistant's turn; they may be missing where it has calls."""
    words = parts.text if parts.there else turn.get(key)
    if calls and (words is None or isinstance(words, str) and not words.strip()):
        return ""
    return _text(turn, key, at, parts)


def _add_thoughts(message: dict, turn: dict, role: str, parts: _Parts, at: str) -> None:
    """The assistant's thoughts under reasoning_content, which most templates read, and under the name that
    the row has for them.
    """
    given = [key for key in THOUGHTS if turn.get(key) not in (None, "")]
    thoughts = {key: typed(turn, key, str, f"{at}.") for key in given}
    if parts.thoughts:
        thoughts["reasoning_content"] = parts.thoughts
    if len(set(thoughts.values())) > 1:
        raise ValueError(f"{at}: {' and '.join(thoughts)} differ (fix: one of them)")
    if thoughts and role != "assistant":
        raise ValueError(
            f"{at}.{next(iter(thoughts))}: thoughts in a turn of {turn.get('role', role)}"
        )
    for key, text in thoughts.items():
        message["reasoning_content"] = text
        message[key] = text


def _add_call_id(message: dict, turn: dict, at: str, before: list[dict]) -> None:
    """Which call a tool answers: by its id, by the tool's name, or by the order where calls have no ids."""
    calls = [call for other in before for call in other.get("tool_calls", [])]
    known = [call["id"] for call in calls if "id" in call]
    spelled = any(
        SPELLED_CALL.search(other["content"]) for other in before if other["role"] == "assistant"
    )
    if "tool_call_id" in turn and (turn["tool_call_id"] is not None or "name" not in message):
        message["tool_call_id"] = typed(turn, "tool_call_id", str, f"{at}.")
        if message["tool_call_id"] not in known and not (spelled and not known):
            raise ValueError(
                f"{at}.tool_call_id: {message['tool_call_id'][:40]!r} is no call before it"
            )
    elif known and "name" not in message:
        raise ValueError(
            f"{at}.tool_call_id: missing; the calls before it have ids (fix: it, or a name)"
        )


def _add_weight(message: dict, turn: dict, role: str, at: str, notes: Counter) -> None:
    """weight 0 where any key says that the turn is not trained: weight (OpenAI), loss_weight (LLaMA-Factory),
    train or training (axolotl), masked (torchtune).
    """
    weights = []
    for key in (key for key in LOSS_KEYS if turn.get(key) is not None):
        if not isinstance(turn[key], (int, float)) or turn[key] not in TRAINED:
            raise ValueError(f"{at}.{key}: expected 0 or 1, got {turn[key]!r:.40}")
        weight = TRAINED[turn[key]]
        weights.append(1 - weight if key == "masked" else weight)
    if len(set(weights)) > 1:
        raise ValueError(f"{at}: its keys for the loss contradict each other (fix: one of them)")
    if weights and role == "assistant":
        message["weight"] = weights[0]
    elif weights and weights[0]:
        # torchtune's masked: false stands in turns of all roles
        notes[NOT_TRAINED] += "masked" not in turn


def _check_turn_keys(turn: dict, known: tuple[str, str], at: str, notes: Counter) -> None:
    """Keys of a turn that nothing here reads are counted by name; those that are masks are refused."""
    for key in turn.keys() - TURN_KEYS - {*known}:
        if turn[key] in (None, "", [], {}) and turn[key] is not False:
            continue
        if key in OTHER_MASKS:
            raise ValueError(
                f'{at}.{key}: no key for the loss here (fix: "weight": 0 for a turn not trained)'
            )
        note = f"turns with the key {key[:40]!r}, which is not used"
        if (
            note not in notes
            and sum(other.startswith("turns with the key") for other in notes) >= MOST_KEYS
        ):
            note = "turns with other keys, which are not used"
        notes[note] += 1


def _call(call: object, at: str) -> dict:
    """A call of a tool, its arguments as an object, which is what chat templates expect."""
    if not isinstance(call, dict):
        raise ValueError(f"{at}: expected object, got {json_name(call)}")
    if "function" not in call and "name" in call:
        call = {"function": call} | ({"id": call["id"]} if "id" in call else {})
    function = typed(call, "function", dict, f"{at}.")
    name, arguments = text_of(function, "name", f"{at}.function."), function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{at}.function.arguments")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{at}.function.arguments: expected an object as JSON, got {json_name(arguments)}"
        )
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **known, "function": {"name": name, "arguments": arguments}}


def _tools(row: dict, beside: list | None = None) -> list | None:
    """The tools of a row, which may stand under tools or functions, or in its turns (`beside`), each as
    {"type": "function", "function": {"name": ...}}, which is what chat templates expect.
    """
    tools = [
        *_listed(row.get("tools"), "tools"),
        *_listed(row.get("functions"), "functions"),
        *(beside or []),
    ]
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError("tools: expected a list of objects, or JSON text of one")
        if not isinstance(tool.get("function"), dict):
            bare = {key: value for key, value in tool.items() if key != "type"}
            text_of(bare, "name", f"tools[{i}].")
            tools[i] = {"type": "function", "function": bare}
    return tools or None


def _listed(tools: object, at: str) -> list:
    tools = _parsed(tools, at) if isinstance(tools, str) and tools.strip() else tools
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


def _with_system(row: dict, messages: list[dict]) -> list[dict]:
    if row.get("system") in (None, ""):
        return messages
    if messages[0]["role"] == "system":
        raise ValueError("system: there is a system turn too")
    return [{"role": "system", "content": text_of(row, "system")}, *messages]


def typed(holder: dict, key: str, kind: type, path: str = ""):
    """holder[key], if it is of that type."""
    if key not in holder and not path:  # of a row
        there = ", ".join(repr(other[:40]) for other in list(holder)[:8])
        raise ValueError(f"{key}: missing; the row has {there} (fix: --columns {key}=THEIRS)")
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
