"""Rows -> messages: which form a row has, its turns, and what is wrong with it.

{"messages": [{"role": "user", "content": "..."}, ...], "tools": [...]}                       chat (OpenAI)
{"conversations": [{"from": "human", "value": "..."}, ...], "system": "..."}                  sharegpt
{"instruction": "...", "input": "...", "output": "...", "system": "...", "history": [...]}    alpaca
{"prompt": "...", "completion": "..."}                                                        completion
{"text": "..."}                                                                               text
{"input_ids": [5, 6, 0], "labels": [-100, 6, -100], "attention_mask": [1, 1, 0]}              tokens

Rows that need another recipe or loss (pairs, labels, pictures, weights or masks of rows) are refused. The
error names the key that shows it.
"""

import json
import re
from collections import Counter
from functools import partial
from itertools import compress

from ..run.errors import check

Messages = list[dict]
Read = tuple[Messages, list | None]  # (messages, tools)

FORMS = {  # key -> form; in this order, the first key that a row has decides
    "messages": "chat",
    "conversations": "sharegpt",
    "instruction": "alpaca",
    "completion": "completion",
    "text": "text",
    "input_ids": "tokens",
}
# Forms of rows without turns. "plain text": a prompt, alone or with answers.
PLAIN = {"completion", "text", "tokens", "plain text"}
KNOWN = (
    "messages (chat), conversations (ShareGPT), instruction and output (alpaca), prompt and completion, text,"
    " input_ids (tokens)"
)
COLUMNS = {
    *FORMS,
    *"input output system history tools prompt labels attention_mask image images reasoning".split(),
}
# further keys, of preferences.py and questions.py
PREFERENCES = set("chosen rejected label kto_tag answer choices".split())
ROLES = {  # role in a row -> ours
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}
# role -> the roles that may follow; "" is the start of a conversation
NEXT = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
RULE = (
    "one system turn at most, first, then user and assistant by turns (fix: join turns of one role; recipes"
    " that train also take --bad_rows drop)"
)
# Keys of a turn that hold the assistant's thoughts, beside its content.
THOUGHTS = "reasoning_content thinking reasoning".split()
TURN_KEYS = set(
    "role content from value name tool_calls tool_call_id weight train".split() + THOUGHTS
)
LEADING = "turns of the assistant before the first of the user left out"
IGNORED = "ignored key "
TURNS = r'\s*\[\s*\{\s*"(role|content|from|value)"'  # how JSON text of turns begins

ONE_ANSWER = "here a row has one text answer"
REMEDY = "fix: remove these rows; recipes that train also take --bad_rows drop"
ANSWERS = "response answer output".split()  # other names of a completion
PAIRS = (
    f"preference pairs and answers with labels (KTO); {ONE_ANSWER} (fix: recipes/prefer.py); chosen alone are"
    " --columns output=chosen; if label is a class, remove it"
)
PICTURES = (
    f"{ONE_ANSWER}, in generate.py and vision.py also pictures if the model reads them, but no pairs,"
    f" no videos, no sounds ({REMEDY})"
)
# key -> reason
REFUSED = {
    "functions": "tools under another name (fix: --columns tools=functions)",
    "chat_template_kwargs": "a run has one template (fix: rows of each value in a file of their own, with a"
    " --chat_template FILE that sets it)",
    "message_tree_id": 'single messages of trees (fix: one row a path, {"messages": [...]})',
}
REFUSED |= dict.fromkeys("image images video videos audio audios".split(), PICTURES)
REFUSED |= dict.fromkeys(
    "chosen rejected chosen_messages rejected_messages kto_tag kto_tags".split(), PAIRS
)
WEIGHTS = set(
    """weight loss_weight sample_weight train training masked
    loss_mask completion_mask assistant_masks""".split()
)
# Keys of a turn that other projects use to mask it, or that hold tool calls in an older form.
FOREIGN = """function_call loss loss_mask loss_weight mask masked train_detail trainable training
    training_detail""".split()
JSON_NAMES = {
    str: "text",
    list: "list",
    dict: "object",
    bool: "true or false",
    bytes: "bytes",
    type(None): "null",
}


def form_of(row: dict) -> str:
    """The form of a row, decided by its keys; "" if no key is known."""
    return next((form for key, form in FORMS.items() if key in row), "")


def parse_columns(text: str) -> dict:
    """Parse --columns instruction=question,output=answer to {our key: column of the data}, or ConfigError."""
    columns = {}
    keys = COLUMNS | PREFERENCES
    for pair in filter(None, text.split(",")):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        check(
            equals and theirs and ours in keys and ours not in columns,
            f"--columns {text!r}: {pair!r} is no KEY=COLUMN, its key given twice or none of"
            f" {', '.join(sorted(keys))} (fix: --columns instruction=question,output=answer)",
        )
        columns[ours] = theirs
    return columns


def renamed(row: dict, columns: dict) -> tuple:
    """(the row with its columns renamed to our keys, its form). For the form, renamed keys take priority, if
    the row has any of them.
    Turns that are JSON text, as in a table, are parsed, also under prompt, completion, chosen and rejected.
    """
    mapped = {ours: row[theirs] for ours, theirs in columns.items() if theirs in row}
    row = {key: value for key, value in row.items() if key not in columns.values()} | mapped
    row |= {key: parsed(row, key) for key in ("messages", "conversations") if key in row}
    for key in "prompt completion chosen rejected".split():  # mostly texts
        if re.match(TURNS, str(row.get(key))):
            row[key] = parsed(row, key)
    return row, form_of(mapped and columns) or form_of(row)


def to_messages(row: dict, form: str, notes: Counter) -> Read:
    """(messages, tools) of a row of any form.

    A message has a role (system, user, assistant, tool; or text or tokens for rows without turns) and
    content. If the row has them, it also has: tool_calls; reasoning_content, the assistant's thoughts, which
    also stay under the row's own key; name; tool_call_id; weight, 0 if the turn is not trained.

    notes: counts what was left out. ValueError names the first field that is wrong: "messages[2].content:
    expected text, got number".
    """
    examine_keys(row, form, notes)
    return READERS[form](row, notes)


def examine_keys(row: dict, form: str, notes: Counter) -> None:
    """Raise ValueError unless the row has exactly one text answer; the error names the key that shows it.
    Count keys that are ignored in `notes`.
    """
    known = COLUMNS if form == "alpaca" else COLUMNS - {"reasoning"}
    notes.update(f"{IGNORED}{key[:40]!r}" for key in row.keys() - known)
    for key in sorted(key for key, value in row.items() if value not in (None, "", [], {})):
        if key in REFUSED:
            raise ValueError(f"{key}: {REFUSED[key]}")
        # 1 or true changes nothing; of masked 0 or false
        if key in WEIGHTS and form and row[key] != (key != "masked"):
            raise ValueError(
                f"{key}: {row[key]!r:.40}: whole rows cannot be weighted; masks are -100 in labels ({REMEDY})"
            )
    is_class = form in ("text", "tokens")  # then "label" is a class, not a preference
    if str(row.get("label")).lower() in "true false 0 1".split() and not is_class:
        raise ValueError(f"label: {PAIRS}")
    if not form:
        if "prompt" in row:
            theirs = next((key for key in ANSWERS if key in row), "THEIRS")
            raise ValueError(
                f"these are prompts without an answer; {ONE_ANSWER} (fix: --columns completion={theirs});"
                f" for a chat model --columns instruction=prompt,output={theirs}"
            )
        raise ValueError(
            f"its keys are {_keys(row)}; the rows that can be read have {KNOWN}"
            " (fix: --columns messages=THEIRS, text=THEIRS, or instruction=THEIRS,output=THEIRS, with"
            " input=THEIRS and system=THEIRS if it has them)"
        )


def read_alpaca(row: dict, notes: Counter) -> Read:
    """The user's turn is the instruction and, if there is an input, an empty line and the input. history:
    earlier turns as [question, answer] pairs.
    """
    question = text_of(row, "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + typed(row, "input", str)
    history = typed(row, "history", list) if row.get("history") else []
    pairs = [*history, [question, text_of(row, "output")]]
    turns = []
    for i, pair in enumerate(pairs):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"history[{i}]: expected two texts, a question and its answer")
        question, answer = pair
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if row.get("reasoning"):
        turns[-1]["reasoning_content"] = row["reasoning"]
    return conversation(row | {"history + output": turns}, notes, "history + output")


def read_completion(row: dict, notes: Counter) -> Read:
    """prompt and completion are two texts, or two lists of messages, or messages and a text. The prompt is
    not trained.
    """
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), str):
        row["completion"] = [{"role": "assistant", "content": text_of(row, "completion")}]
    if isinstance(row.get("completion"), list):
        turns = [
            turn | {"weight": 0} if isinstance(turn, dict) else turn
            for turn in typed(row, "prompt", list)
        ]
        turns += row["completion"]
        return conversation(row | {"prompt + completion": turns}, notes, "prompt + completion")
    for key in ("tools", "system"):
        if row.get(key):
            raise ValueError(
                f"{key}: a prompt and a completion of plain text have no place for it"
                " (fix: --columns instruction=prompt,output=completion, the names of the columns)"
            )
    return [
        {"role": "text", "content": typed(row, "prompt", str), "weight": 0},
        {"role": "text", "content": text_of(row, "completion"), "weight": 1},
    ], None


def read_text(row: dict, notes: Counter) -> Read:
    """Plain text, all trained. Text of only white space is not trained, so the row is dropped later."""
    text = typed(row, "text", str)
    return [{"role": "text", "content": text, "weight": bool(text.strip())}], None


def read_tokens(row: dict, notes: Counter) -> Read:
    """Token ids. labels, one per id, are -100 for tokens that are not trained. attention_mask, one per id, is
    0 for padding, which is left out.
    """
    ids = typed(row, "input_ids", list)
    row = {"labels": ids, "attention_mask": [1] * len(ids)} | row
    for name in ("labels", "attention_mask"):
        if len(typed(row, name, list)) != len(ids):
            raise ValueError(f"{name}: {len(row[name])} of them for {len(ids)} input_ids")
    mask = row["attention_mask"]
    if any(value not in (0, 1) for value in mask):  # LLaMA-Factory's neat_packing
        raise ValueError("attention_mask: it numbers documents (fix: one a row, and --packing)")
    for i, label in enumerate(row["labels"]):
        if label not in (-100, ids[i]):
            raise ValueError(f"labels[{i}]: expected -100 or {ids[i]}, the id, got {label!r:.40}")
    loss_mask = bytes(label != -100 for label in compress(row["labels"], mask))
    return [{"role": "tokens", "content": [*compress(ids, mask)], "loss_mask": loss_mask}], None


def conversation(row: dict, notes: Counter, key: str) -> Read:
    """(messages, tools) of a row with turns under row[key]."""
    messages: Messages = []
    last_role = ""
    if row.get("system"):
        messages.append({"role": "system", "content": text_of(row, "system")})
        last_role = "system"
    for i, turn in enumerate(typed(row, key, list)):
        path = f"{key}[{i}]"
        if isinstance(turn, str):  # the texts of both, by turns
            turn = {"role": ("user", "assistant")[i % 2], "content": turn}
        if not isinstance(turn, dict):
            raise ValueError(
                f'{path}: expected object, got {json_name(turn)} (fix: {{"role": "user", "content": ...}})'
            )
        role_key, text_key = keys_of(turn)
        name = typed(turn, role_key, str, f"{path}.")
        role = ROLES.get(name)
        if not role:
            raise ValueError(
                f"{path}.{role_key}: {name[:40]!r} is not one of {', '.join(ROLES)} (fix: one of these roles;"
                " recipes that train also take --bad_rows drop)"
            )
        if role == "assistant" and last_role in ("", "system"):
            notes[LEADING] += 1
            continue
        if role not in NEXT[last_role]:
            expected = " or ".join(NEXT[last_role])
            raise ValueError(f"{path}.{role_key}: expected {expected}, got {name}; {RULE}")
        messages.append(read_turn(turn, role, text_key, f"{path}.", notes))
        last_role = role
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{key}: no assistant turn, so there is nothing to learn ({REMEDY})")
    return messages, tools_of(row)


READERS = {
    "chat": partial(conversation, key="messages"),
    "sharegpt": partial(conversation, key="conversations"),
    "alpaca": read_alpaca,
    "completion": read_completion,
    "text": read_text,
    "tokens": read_tokens,
}


def keys_of(turn: dict) -> tuple:
    """The keys of a turn's role and content: those of OpenAI, or of ShareGPT."""
    return ("from", "value") if {"from", "value"} & turn.keys() else ("role", "content")


def read_turn(turn: dict, role: str, text_key: str, path: str, notes: Counter) -> dict:
    """One turn as a message. role: one of our roles; text_key: the key of its content; path: of the turn in
    the row, "messages[2].". notes: counts keys that are ignored.
    """
    for foreign in FOREIGN:
        if turn.get(foreign) is not None:  # OpenAI's client writes "function_call": null
            raise ValueError(
                f'{path}{foreign}: no key of a turn here (fix: "weight": 0, not trained; tool_calls: calls)'
            )
    message: dict = {"role": role}
    if turn.get("from") == "function_call":
        calls = parsed(turn, text_key, path)
        calls = calls if isinstance(calls, list) else [calls]
        turn = turn | {text_key: None, "tool_calls": calls}
    if calls := turn.get("tool_calls"):
        if role != "assistant" or not isinstance(calls, list):
            raise ValueError(f"{path}tool_calls: expected a list, in a turn of an assistant")
        message["tool_calls"] = [
            call_of(call, f"{path}tool_calls[{i}].") for i, call in enumerate(calls)
        ]
    text = content_of(turn, text_key, path)
    if not text.strip() and not calls and role in ("user", "assistant"):
        raise ValueError(f"{path}{text_key}: empty ({REMEDY})")
    message["content"] = text if text.strip() else ""
    for name in THOUGHTS:
        if turn.get(name):
            message["reasoning_content"] = message[name] = typed(turn, name, str, path)
    for name in ("name", "tool_call_id"):
        if turn.get(name) is not None:
            message[name] = typed(turn, name, str, path)
    for name in ("weight", "train"):
        weight = turn.get(name)
        if weight not in (None, 0, 1):
            raise ValueError(f"{path}{name}: expected 0 or 1, got {weight!r:.40}")
        if weight is not None and role == "assistant":
            message["weight"] = min(int(weight), message.get("weight", 1))
    notes.update(f"{IGNORED}{name[:40]!r}" for name in turn.keys() - TURN_KEYS)
    return message


def content_of(turn: dict, key: str, path: str) -> str:
    """The text of a turn, or the joined texts of its parts. It may be missing if the turn has tool calls."""
    content = turn.get(key)
    if content is None and turn.get("tool_calls"):
        return ""
    if not isinstance(content, list):
        return typed(turn, key, str, path)
    text = ""
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or kind is part:  # a part may be the word itself
            raise ValueError(f"{path}{key}[{i}].type: {str(kind)[:40]!r} is no text; {PICTURES}")
        text += typed(part, "text", str, f"{path}{key}[{i}].")
    return text


def call_of(call: object, path: str) -> dict:
    """A tool call in the form that chat templates expect, with its arguments as an object."""
    function = call.get("function", call) if isinstance(call, dict) else call
    typed({"function": function}, "function", dict, path)
    name = text_of(function, "name", f"{path}function.")
    arguments = parsed({"arguments": {}} | function, "arguments", f"{path}function.")
    if not isinstance(arguments, dict):
        raise ValueError(
            f"{path}function.arguments: expected an object as JSON, got {json_name(arguments)}"
        )
    message = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if isinstance(call.get("id"), str):
        message["id"] = call["id"]
    return message


def tools_of(row: dict) -> list | None:
    """The tools of a row in the form that chat templates expect: {"type": "function", "function": {"name":
    ...}}. The row has a list, or a list as JSON text.
    """
    tools = parsed(row, "tools") if row.get("tools") else []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("tools: expected a list of objects, or JSON text of one")
    wrapped = []
    for i, tool in enumerate(tools):
        function = typed({"function": tool} | tool, "function", dict, f"tools[{i}].")
        text_of(function, "name", f"tools[{i}].")
        wrapped.append({"type": "function", "function": function})
    return wrapped or None


def parsed(holder: dict, key: str, path="") -> object:
    """holder[key]; if that is text, it is parsed as JSON."""
    value = holder.get(key)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(
            f"{path}{key}: not JSON: {str(error)[:80]} (fix: json.dumps of it, or a .parquet file)"
        ) from None


def json_name(value: object) -> str:
    """The JSON name of this value's type."""
    return JSON_NAMES.get(type(value), "number")


def typed(holder: dict, key: str, kind: type, path=""):
    """holder[key]; ValueError if it has another type. path: of the holder in the row, "messages[2]."."""
    if key not in holder:
        row_has = (
            f"; the row has {_keys(holder)} (fix: --columns {key}=THEIRS; a column beside the"
            f" instruction is input=THEIRS; recipes that train leave out such rows with --bad_rows drop)"
        )
        raise ValueError(
            f"{path}{key}: missing{'; there are only ' + _keys(holder) if path else row_has}"
        )
    if not isinstance(holder[key], kind):
        raise ValueError(
            f"{path}{key}: expected {JSON_NAMES[kind]}, got {json_name(holder[key])} (fix: convert it, as by"
            " datasets' map; recipes that train also take --bad_rows drop)"
        )
    return holder[key]


def text_of(holder: dict, key: str, path="") -> str:
    """holder[key]; ValueError unless it is text that is not blank."""
    text = typed(holder, key, str, path)
    if not text.strip():
        raise ValueError(
            f"{path}{key}: empty (fix: a text; recipes that train leave out such rows with --bad_rows drop)"
        )
    return text


def _keys(row):
    return ", ".join(repr(key[:40]) for key in list(row)[:8]) or "none"
