"""Rows that are more than plain turns: ShareGPT, tools and their calls, content in parts, thoughts, turns
that are not trained, alpaca with a history, prompt and completion, plain text. turns.py reads one turn. Rows
that no form can read are refused here, with what they seem to be.
"""

from collections import Counter

from .formats import (
    OTHER_TEXTS,
    PICTURES,
    PREFERENCES,
    SPECIAL,
    WEIGHTS,
    form_of,
    json_name,
    plain_messages,
    text_of,
    typed,
)
from .turns import ONE, REMEDY, SPELLED_CALL, read_turn, tools_of

ROLES = {  # role in a row of messages -> ours
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "developer": "system",
    "function": "tool",
}
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
}
# The roles that may follow: nothing yet, a role, an assistant's calls of tools, or a text that spells a call.
NEXT = {
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "calls": ("tool",),
    "spelled call": ("user", "tool"),
    "tool": ("tool", "assistant"),
}
RULE = "a conversation is at most one system turn, then user and assistant by turns"
LEADING = "turns of the assistant before the first of the user left out"
KNOWN = (
    "messages (chat), conversations (ShareGPT), instruction and output (alpaca), prompt and completion, text,"
    " input_ids (tokens)"
)
CATEGORY = "rows with a label in words, which is not used"
JUDGEMENTS = set("0 1 -1 true false good bad desirable undesirable chosen rejected".split())


def to_messages(
    row: dict, form: str = "", notes: Counter | None = None
) -> tuple[list[dict], list | None]:
    """(messages, tools) of a row of any form. The messages are as those of formats.plain_messages, with the
    roles "tool", "text" and "tokens" too, and with these keys where a turn has them:

    tool_calls; reasoning_content, the assistant's thoughts, also under the key that the row has for them
    (thinking, reasoning); name; tool_call_id; weight, 0 where the turn is not trained.
    After calls come the answers of the tools. notes: counts what was left out. ValueError names the first
    field that is wrong: "messages[2].content: expected text, got number".
    """
    form = form or form_of(row)
    plain = plain_messages(row, form)
    if plain:
        return plain, None
    notes = Counter() if notes is None else notes
    check_keys(row, form, notes)
    return READERS[form](row, notes)


def check_keys(row: dict, form: str, notes: Counter) -> None:
    """Raise ValueError for rows without exactly one text answer, naming the key that shows it. Count in
    `notes` the keys that are not used.
    """
    present = {key for key in SPECIAL & row.keys() if row[key] is not None}
    pictures = sorted(key for key in PICTURES & present if row[key] not in ("", [], {}))
    if pictures:
        raise ValueError(f"{pictures[0]}: rows with pictures, videos or sounds; {ONE} ({REMEDY})")
    present = {key for key in present if row[key] not in ("", [], {}) or row[key] is False}
    if present & {"chosen", "chosen_messages"} and present & {"rejected", "rejected_messages"}:
        raise ValueError(f"these are preference pairs; {ONE} ({REMEDY})")
    judgements = sorted(present & PREFERENCES - {"label"})
    if judgements:
        raise ValueError(
            f"{judgements[0]}: these are answers that are marked as good or bad (KTO); {ONE} ({REMEDY})"
        )
    has_label = "label" in present
    if has_label and (form not in ("text", "tokens") or isinstance(row["label"], bool)):
        if not isinstance(row["label"], str) or row["label"].strip().lower() in JUDGEMENTS:
            raise ValueError(f"label: these are answers with a label (KTO); {ONE} ({REMEDY})")
        notes[CATEGORY] += 1
    if form:
        check_row_weights(row, WEIGHTS & present)
    for key in sorted(OTHER_TEXTS & present):
        notes[f"rows with the key {key!r}, which is not used"] += 1
    if present & {"tools", "functions"} and form in ("text", "tokens"):
        raise ValueError(f"tools: a row in {form} form has no place for them")
    if not form and "prompt" in row:
        raise ValueError(f"these are prompts without an answer; {ONE}")
    if not form:
        seen = ", ".join(repr(key[:40]) for key in list(row)[:8]) or "none"
        fix = "fix: --columns prompt=THEIRS,completion=THEIRS"
        raise ValueError(f"its keys are {seen}; the rows that can be read have {KNOWN} ({fix})")


def check_row_weights(row: dict, keys: set[str]) -> None:
    """Raise ValueError where a key gives the row another weight than 1."""
    for key in sorted(keys):
        full_weight = 0 if key == "masked" else 1
        if not isinstance(row[key], (int, float)) or row[key] != full_weight:
            raise ValueError(f"{key}: {row[key]!r:.40}: whole rows cannot be weighted ({REMEDY})")


def read_chat(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """OpenAI: messages, and tools as a list or as JSON text. A system text may stand beside them."""
    tools: list = []
    messages = chat_messages(row, notes, tools=tools)
    return _with_system(row, messages), tools_of(row, tools)


def read_sharegpt(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """ShareGPT, and what LLaMA-Factory adds: calls, observations, a system text and tools beside them."""
    tools: list = []
    messages = chat_messages(row, notes, ("conversations", "from", "value"), SHAREGPT_ROLES, tools)
    return _with_system(row, messages), tools_of(row, tools)


def read_alpaca(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """Alpaca with a system text, tools, or a history of [question, answer] pairs before the instruction."""
    history = row.get("history") or []
    if not isinstance(history, list):
        raise ValueError(f"history: expected list, got {json_name(history)}")
    messages = []
    for i, pair in enumerate(history):
        is_pair = isinstance(pair, list) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) and text for text in pair):
            raise ValueError(f"history[{i}]: expected two texts, a question and its answer")
        question, answer = pair
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    messages += alpaca_messages(row)
    return _with_system(row, messages), tools_of(row)


def read_completion(row: dict, notes: Counter) -> tuple[list[dict], list | None]:
    """Two texts, or two lists of messages. The prompt is not trained."""
    if isinstance(row.get("completion"), str):
        prompt = typed(row, "prompt", str)
        completion = text_of(row, "completion")
        if tools_of(row):
            raise ValueError(
                "tools: a prompt and a completion of plain text have no place for them"
            )
        messages = [
            {"role": "text", "content": prompt, "weight": 0},
            {"role": "text", "content": completion, "weight": 1},
        ]
        return messages, None
    prompt_turns = typed(row, "prompt", list)
    turns = prompt_turns + typed(row, "completion", list)
    tools: list = []
    messages = chat_messages({"messages": turns}, notes, tools=tools, first=len(prompt_turns))
    return messages, tools_of(row, tools)


def read_text(row: dict, notes: Counter) -> tuple[list[dict], None]:
    """Plain text, all of it trained. White space alone is not trained, and such a row is dropped for it."""
    text = typed(row, "text", str)
    return [{"role": "text", "content": text, "weight": int(bool(text.strip()))}], None


def read_tokens(row: dict, notes: Counter) -> tuple[list[dict], None]:
    """Token ids; labels, of the same number, are -100 for tokens that are not trained."""
    ids = typed(row, "input_ids", list)
    labels = typed(row, "labels", list) if "labels" in row else ids
    if len(labels) != len(ids):
        raise ValueError(f"labels: {len(labels)} of them for {len(ids)} input_ids")
    loss_mask = bytes(label != -100 for label in labels)
    return [{"role": "tokens", "content": ids, "loss_mask": loss_mask}], None


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
    """The turns in row[keys[0]], whose role and text are under the other two keys.

    tools: gets those that stand in a turn. No turn before number `first` is trained.
    """
    turns_key, role_key, _ = keys
    tools = [] if tools is None else tools
    messages: list[dict] = []
    last = ""  # a key of NEXT
    for i, turn in enumerate(typed(row, turns_key, list)):
        at = f"{turns_key}[{i}]"
        if not isinstance(turn, dict):
            raise ValueError(f"{at}: expected object, got {json_name(turn)}")
        name = typed(turn, role_key, str, f"{at}.")
        if name not in roles:
            known = ", ".join(roles)
            raise ValueError(f"{at}.{role_key}: {name[:40]!r} is not one of {known}")
        role = roles[name]
        if role == "assistant" and last in ("", "system"):
            notes[LEADING] += 1
            continue
        if role not in NEXT[last]:
            expected = " or ".join(NEXT[last])
            raise ValueError(f"{at}.{role_key}: expected {expected}, got {name}; {RULE}")
        message = read_turn(turn, name, role, keys, at, messages, tools, notes)
        if i < first and role == "assistant":
            message["weight"] = 0
        messages.append(message)
        last = role
        if role == "assistant" and "tool_calls" in message:
            last = "calls"
        elif role == "assistant" and SPELLED_CALL.search(message["content"]):
            last = "spelled call"
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError(f"{turns_key}: no assistant turn, so there is nothing to learn")
    return messages


def alpaca_messages(row: dict) -> list[dict]:
    """User: the instruction, and after an empty line the input where there is one. Assistant: the output."""
    question = text_of(row, "instruction")
    if row.get("input") not in (None, ""):
        question += "\n\n" + typed(row, "input", str)
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": text_of(row, "output")},
    ]


def _with_system(row: dict, messages: list[dict]) -> list[dict]:
    if row.get("system") in (None, ""):
        return messages
    if messages[0]["role"] == "system":
        raise ValueError("system: there is a system turn too")
    return [{"role": "system", "content": text_of(row, "system")}, *messages]
