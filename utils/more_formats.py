"""Rows that are more than plain turns: ShareGPT, tools and their calls, content in parts, alpaca with a
history, prompt and completion, plain text. Imported for those; and it says what the rows are that nobody
reads.
"""

import json
from collections import Counter

from .formats import FORMS, JSON_NAMES, form_of, json_name, plain_messages

ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
# What may follow: nothing yet, a role, or an assistant's calls of tools.
NEXT = {"": "system user", "system": "user", "user": "assistant", "assistant": "user", "calls": "tool"}
NEXT |= {"tool": "tool assistant"}
RULE = "a conversation is at most one system turn, then user and assistant by turns"
LEADING = "turns of the assistant before the first of the user left out"
RICH = {"tool_calls", "weight"}
SHAREGPT = {"human": "user", "user": "user", "system": "system", "observation": "tool", "tool": "tool"}
SHAREGPT |= dict.fromkeys(("gpt", "assistant", "chatgpt", "model", "function_call"), "assistant")
KNOWN = (
    "messages (chat), conversations (ShareGPT), instruction and output (alpaca), prompt and completion, text,"
    " input_ids (tokens)"
)
ONE = "finetune.py teaches rows with one answer"


def to_messages(row: dict, form: str = "", notes: Counter | None = None) -> tuple[list[dict], list | None]:
    """(messages, tools) of a row of any form: what formats.plain_messages gives, with roles "tool" and "text"
    too, "tool_calls" where the assistant makes some, and "weight" 0 where it is not to be taught.

    After calls comes what the tools answer. notes: counts what was left out. ValueError names the first field
    that is wrong: "messages[2].content: expected text, got number".
    """
    form = form or form_of(row)
    if plain := plain_messages(row, form):
        return plain, None
    if not form:
        form = check_form(row)
    return READERS[form](row, Counter() if notes is None else notes)


def check_form(row: dict) -> str:
    """The form of a row with a label that says nothing here. ValueError for what is not taught, by name."""
    form = next((form for key, form in FORMS.items() if key in row), "")
    if {"chosen", "rejected"} <= row.keys():
        raise ValueError(f"these are preference pairs; {ONE}")
    if "label" in row and form in ("", "completion") and row.keys() & {"prompt", "completion"}:
        raise ValueError(f"these are answers with a label (KTO); {ONE}")
    if not form and "prompt" in row:
        raise ValueError(f"these are prompts without an answer; {ONE}")
    if not form:
        seen = ", ".join(repr(key[:40]) for key in list(row)[:8]) or "none"
        raise ValueError(f"its keys are {seen}; the rows that can be read have {KNOWN}")
    return form


def read_chat(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """OpenAI: messages, and tools as a list or as JSON text."""
    return chat_messages(row, notes), _tools(row)


def read_sharegpt(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """ShareGPT, and what LLaMA-Factory adds: calls, observations, a system text and tools beside them."""
    messages = chat_messages(row, notes, ("conversations", "from", "value"), SHAREGPT)
    return _with_system(row, messages), _tools(row)


def read_alpaca(row: dict, notes: Counter) -> tuple[list[dict], None]:
    """Alpaca with a system text, or a history of [question, answer] pairs before the instruction."""
    before = []
    for i, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(t, str) and t for t in pair):
            raise ValueError(f"history[{i}]: expected two texts, a question and its answer")
        before += [{"role": role, "content": t} for role, t in zip(("user", "assistant"), pair, strict=True)]
    return _with_system(row, before + alpaca_messages(row)), None


def read_completion(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """Two texts, or two lists of messages; what is in the prompt is not taught."""
    if isinstance(row.get("completion"), str):
        texts = [typed(row, "prompt", str), text_of(row, "completion")]
        return [{"role": "text", "content": t, "weight": w} for w, t in enumerate(texts)], None
    before, after = typed(row, "prompt", list), typed(row, "completion", list)
    messages = chat_messages({"messages": before + after}, notes)
    for message in messages[: len(before)]:
        message |= {"weight": 0} if message["role"] == "assistant" else {}
    return messages, _tools(row)


def read_text(row: dict, notes: Counter) -> tuple[list[dict], None]:
    """Plain text, taught as it stands; one without words is not, and is dropped for that."""
    text = typed(row, "text", str)
    return [{"role": "text", "content": text, "weight": int(bool(text.strip()))}], None


def read_tokens(row: dict, notes: Counter) -> tuple[list[dict], None]:
    """Ids of tokens; labels, as many, are -100 where one is not taught."""
    ids = typed(row, "input_ids", list)
    labels = typed(row, "labels", list) if "labels" in row else ids
    if len(labels) != len(ids):
        raise ValueError(f"labels: {len(labels)} of them for {len(ids)} input_ids")
    return [{"role": "tokens", "content": ids, "taught": bytes(label != -100 for label in labels)}], None


READERS = {
    "chat": read_chat,
    "sharegpt": read_sharegpt,
    "alpaca": read_alpaca,
    "completion": read_completion,
    "text": read_text,
    "tokens": read_tokens,
}


def chat_messages(row: dict, notes: Counter, keys=("messages", "role", "content"), roles=ROLES) -> list[dict]:
    """The turns in row[keys[0]], whose role and text have the other two keys."""
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
        if (
            name in ("system", "user", "assistant")
            and type(turn.get(keys[2])) is str
            and not turn.keys() & RICH
        ):
            message = {"role": role, "content": text_of(turn, keys[2], f"{at}.")}
        else:
            message = rich_message(turn, name, role, keys[2], at, messages)
        messages.append(message)
        last = "calls" if "tool_calls" in message else role
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{keys[0]}: no assistant turn, so there is nothing to learn")
    return messages


def alpaca_messages(row: dict) -> list[dict]:
    """User: the instruction, and after an empty line the input where there is one. Assistant: the output."""
    asked = text_of(row, "instruction")
    if row.get("input") not in (None, ""):
        asked += "\n\n" + typed(row, "input", str)
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": text_of(row, "output")}]


def rich_message(turn: dict, name: str, role: str, key: str, at: str, before: list[dict]) -> dict:
    """A turn with calls, an answer of a tool, content in parts, or a weight. name: its role as the row has
    it; before: the messages up to it.
    """
    message = {"role": role}
    if name == "function_call":
        calls = _parsed(turn[key], f"{at}.{key}") if isinstance(turn.get(key), str) else turn.get(key)
        calls = calls if isinstance(calls, list) else [calls]
        message |= {"content": "", "tool_calls": [_call({"function": c}, f"{at}.{key}") for c in calls]}
    elif role == "assistant" and turn.get("tool_calls") is not None:
        calls = typed(turn, "tool_calls", list, f"{at}.")
        message["content"] = _content(turn, key, at) if turn.get(key) else ""
        message["tool_calls"] = [_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)]
    elif role == "tool" and turn.get(key) == "":
        message["content"] = ""
    else:
        message["content"] = _content(turn, key, at)
    if role == "tool" and key == "content":
        message["tool_call_id"] = typed(turn, "tool_call_id", str, f"{at}.")
        known = [call.get("id") for other in before for call in other.get("tool_calls", [])]
        if message["tool_call_id"] not in known:
            raise ValueError(f"{at}.tool_call_id: {message['tool_call_id'][:40]!r} is no call before it")
    if "weight" in turn:
        if turn["weight"] not in (0, 1):
            raise ValueError(f"{at}.weight: expected 0 or 1, got {str(turn['weight'])[:40]}")
        message["weight"] = turn["weight"]
    return message


def _content(turn: dict, key: str, at: str) -> str:
    """Text, or a list of parts of type text."""
    if not isinstance(turn.get(key), list):
        return text_of(turn, key, f"{at}.")
    texts = []
    for j, part in enumerate(turn[key]):
        where = f"{at}.{key}[{j}]"
        if not isinstance(part, dict):
            raise ValueError(f"{where}: expected object, got {json_name(part)}")
        if typed(part, "type", str, f"{where}.") != "text":
            raise ValueError(f"{where}.type: {part['type'][:40]!r} is not text, the only kind here")
        texts.append(typed(part, "text", str, f"{where}."))
    return text_of({key: "".join(texts)}, key, f"{at}.")


def _call(call: object, at: str) -> dict:
    """A call of a tool, its arguments as an object, which is what chat templates expect."""
    if not isinstance(call, dict):
        raise ValueError(f"{at}: expected object, got {json_name(call)}")
    function = typed(call, "function", dict, f"{at}.")
    name, arguments = text_of(function, "name", f"{at}.function."), function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments, f"{at}.function.arguments")
    if not isinstance(arguments, dict):
        raise ValueError(f"{at}.function.arguments: expected an object as JSON, got {json_name(arguments)}")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **known, "function": {"name": name, "arguments": arguments}}


def _tools(row: dict) -> list | None:
    tools = row.get("tools")
    tools = _parsed(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise ValueError("tools: expected a list of objects, or JSON text of one")
    return tools or None


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
