"""What a chat template does to a row: which parts it does not write, and where its prompt at inference
differs from the text before the answer in training.
"""

from collections import Counter
from functools import lru_cache
from os.path import commonprefix
from typing import NamedTuple

from .formats import THOUGHTS
from .tokens import (
    MARK,
    Sequence,
    encode,
    in_parts,
    render,
    renderable,
    takes_parts,
    template_name,
    trained_turns,
)

# role -> its text, as a note names it
PARTS_OF_ROLES = {
    "tools": "tools",
    "system": "system text",
    "tool": "answers of tools",
    "user": "user's text",
}


def check_parts(tokenizer, messages, tools, trained: list[int], notes: Counter) -> None:
    """Raise ValueError where the template does not write a part that is to be trained. Count in `notes` the
    other parts that it leaves out. trained: the indices of the trained turns.
    """
    name = f"the {template_name(tokenizer)}"
    loses_thoughts = False
    for i in trained:
        lost = lost_parts(tokenizer, messages[: i + 1], tools)
        for part in ("tool_calls", "content"):
            if (i, part) in lost:
                raise ValueError(
                    f"{part} of turn {i + 1}: {name} does not write {part}, and the model would learn to"
                    " leave it out (fix: a --chat_template that does, or chatml)"
                )
        loses_thoughts = loses_thoughts or (i, "reasoning_content") in lost
    if loses_thoughts:
        notes[f"rows with reasoning_content, which {name} does not write"] += 1
    lost_roles = set()
    for i, _ in lost_parts(tokenizer, messages, tools):
        lost_roles.add("tools" if i < 0 else messages[i]["role"])
    for role, text in PARTS_OF_ROLES.items():
        if role in lost_roles:
            notes[f"rows with {text}, which {name} does not write"] += 1


class Outline(NamedTuple):
    """A message without its texts."""

    role: str
    has_content: bool
    keys: tuple[str, ...]  # those of thoughts, name and tool_call_id that it has
    calls: tuple[bool, ...]  # for each call: whether its arguments are text


def outline_of(message: dict) -> Outline:
    calls = message.get("tool_calls", [])
    return Outline(
        role=message["role"],
        has_content=bool(message["content"]),
        keys=tuple(key for key in (*THOUGHTS, "name", "tool_call_id") if message.get(key)),
        calls=tuple(isinstance(call["function"]["arguments"], str) for call in calls),
    )


def lost_parts(tokenizer, messages: list[dict], tools: list | None) -> frozenset[tuple[int, str]]:
    """(index of a message, its part) that the template does not write at all; (-1, "tools") for the tools."""
    outlines = tuple(outline_of(message) for message in messages)
    template = tokenizer.get_chat_template(tools=tools)
    return _lost_parts(tokenizer, template, outlines, bool(tools))


@lru_cache(maxsize=1024)
def _lost_parts(
    tokenizer, template: str, outlines: tuple[Outline, ...], has_tools: bool
) -> frozenset[tuple[int, str]]:
    """As lost_parts, from a conversation of the same outline whose texts are marks."""
    marks: list[tuple[int, str, str]] = []  # (index of a message, its part, its mark)

    def new_mark(i: int, part: str) -> str:
        mark = MARK.format(len(marks))
        marks.append((i, part, mark))
        return mark

    messages = []
    for i, outline in enumerate(outlines):
        content = new_mark(i, "content") if outline.has_content else ""
        message: dict = {"role": outline.role, "content": content}
        for key in outline.keys:
            message[key] = new_mark(i, "reasoning_content") if key in THOUGHTS else "x"
        if outline.calls:
            message["tool_calls"] = []
        for as_text in outline.calls:
            message["tool_calls"].append(marked_call(new_mark(i, "tool_calls"), as_text))
        messages.append(message)
    tools = None
    if has_tools:
        parameters = {"type": "object", "properties": {}}
        name = new_mark(-1, "tools")
        function = {"name": name, "description": "x", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
    try:
        text = render(tokenizer, messages, tools)
    except ValueError:  # the template reads the texts themselves; the row itself can be rendered
        return frozenset()
    lost = {(i, part) for i, part, mark in marks if mark not in text}
    # Thoughts under several keys are written if one of them is; calls only if all of them are.
    for i, part, mark in marks:
        if part == "reasoning_content" and mark in text:
            lost.discard((i, part))
    return frozenset(lost)


def marked_call(name: str, as_text: bool) -> dict:
    arguments = "{}" if as_text else {}
    return {"type": "function", "id": "x", "function": {"name": name, "arguments": arguments}}


def prompt_problem(tokenizer, messages, tools, train_on: str, sequences: list[Sequence]) -> str:
    """A sentence about the first answer of a row whose prompt at inference, by transformers, is not the text
    before it in training. It names the template and the difference; "" where there is none.
    """
    trained = trained_turns(messages, train_on)
    messages = renderable(tokenizer, messages, tools)
    if takes_parts(tokenizer, tokenizer.get_chat_template(tools=tools)):
        messages = in_parts(messages)
    starts = answer_starts(sequences)
    if len(starts) != len(trained):
        # Answers follow each other without a token between them; each was located on its own.
        return ""
    for i, (ids, start) in zip(trained, starts, strict=True):
        text = tokenizer.apply_chat_template(
            messages[:i], tools=tools, add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer.decode(encode(tokenizer, text).ids)
        text_before = tokenizer.decode(ids[:start])
        if prompt != text_before:
            return prompt_difference(tokenizer, prompt, text_before, tokenizer.decode(ids))
    return ""


def answer_starts(sequences: list[Sequence]) -> list[tuple[list[int], int]]:
    """(ids, index of a trained token that follows one that is not trained), for all of them in order."""
    starts = []
    for ids, mask in sequences:
        was_trained = 0
        for at, is_trained in enumerate(mask):
            if is_trained and not was_trained:
                starts.append((ids, at))
            was_trained = is_trained
    return starts


def prompt_difference(tokenizer, prompt: str, text_before: str, row_text: str) -> str:
    """prompt: that of inference; text_before: what stands before the answer in row_text."""
    same = len(commonprefix((prompt, text_before)))
    begin = max(0, same - 20)
    return (
        f"the {template_name(tokenizer)} ends its prompt with {prompt[begin:]!r}, but in the row"
        f" {text_before[begin:same]!r} goes on with {row_text[same : same + 20]!r}: the prompt at"
        " inference differs from the one in training (fix: thoughts of the rows under reasoning_content, if"
        " the prompt begins thoughts; or a --chat_template whose answers begin with its prompt)"
    )
