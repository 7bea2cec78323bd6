"""Preference rows -> ids: pairs of answers to one prompt, or answers with a label (KTO).

{"prompt": TEXT or [turn, ...], "chosen": A, "rejected": A}
{"instruction": TEXT, "input": TEXT, "chosen": TEXT, "rejected": TEXT}        alpaca
{"conversations" or "messages": [turn, ...], "chosen": A, "rejected": A}      ShareGPT
{"chosen": [turn, ...], "rejected": [turn, ...]}                              two whole conversations
{"input": {"messages": [turn, ...], "tools": [...]}, "preferred_output": A, "non_preferred_output": A}  OpenAI
{"chosen": "\\n\\nHuman: ... \\n\\nAssistant: ...", "rejected": ...}              hh-rlhf: two transcripts
{"prompt": "\\n\\nHuman: ... \\n\\nAssistant:", "chosen": TEXT, "rejected": TEXT}  full-hh-rlhf
{"prompt": TEXT or [turn, ...], "completion": A, "label": true}               or kto_tag
{"instruction": TEXT, "input": TEXT, "output": TEXT, "label": true}
{"conversations" or "messages": [turn, ..., answer], "label": false}

An answer A is a text, one turn as an object, or a list of turns. Turns, system and tools are those of
formats.py. If prompt and answer are texts, they are plain text with --format completion, or if the tokenizer
has no chat template; otherwise they are chat turns.

The prompt of a pair is the common beginning of both conversations. The prompt of a conversation with a label
is all but its last turn. The rest is the answer, trained by the rule of chats.py. A text `prompt` beside
whole conversations must be one of their user turns before the answers (UltraFeedback, ORPO-DPO-mix). Turns
of a prompt that the answers do not repeat come before them.
The prompt must have the same tokens in both sequences of a pair.

Sources of these forms: https://huggingface.co/docs/trl/dataset_formats,
https://llamafactory.readthedocs.io/en/latest/getting_started/data_preparation.html,
https://platform.openai.com/docs/guides/direct-preference-optimization,
https://huggingface.co/datasets/HuggingFaceH4/ultrafeedback_binarized,
https://huggingface.co/datasets/Anthropic/hh-rlhf.
"""

import re
from collections import Counter

from .chats import encode_chat, render_chats
from .documents import encode_plain
from .formats import (
    PREFERENCES,
    REMEDY,
    ROLES,
    Messages,
    Read,
    conversation,
    examine_keys,
    keys_of,
    read_alpaca,
    read_completion,
    text_of,
    typed,
)

EQUAL = "chosen equals rejected"
PROMPTS = "prompt instruction conversations messages".split()  # the first that a row has is used
ANSWER_OF = {"prompt": "completion", "instruction": "output"}  # the key of a labelled answer
# one turn in a transcript of hh-rlhf
TRANSCRIPT_TURN = re.compile(
    r"(?:^|\n\n)(Human|Assistant):(.*?)(?=\n\n(?:Human|Assistant):|\Z)", re.S
)


def add_preferences(part, tokenizer, row: dict, where: str, rows, form: str, notes: Counter) -> str:
    """Add the pair or the labelled answers of a row to `part`. Returns its form. part: an
    encode.Part; rows: an encode.Rows.

    rows.task pairs: adds one row whose ids are the chosen sequence, then the rejected one; row_sizes gets the
    length of the chosen one. rows.task labels: adds one row per sequence; a pair becomes two rows, of which
    the chosen one is desirable. rows.too_long applies to each sequence; drop drops the whole pair. Equal
    answers, and prompts that leave no trained token within seq_len, are dropped and counted. ValueError names
    what is wrong with the row.
    """
    if "preferred_output" in row:  # OpenAI
        row |= typed(row, "input", dict)
        row["chosen"] = row.pop("preferred_output")
        row["rejected"] = row.pop("non_preferred_output", None)
    prompt_key = next(filter(row.get, PROMPTS), "")
    form = prompt_key or "conversation"
    labels = labels_of(row, prompt_key, rows.task)
    examine_keys({key: row[key] for key in row.keys() - PREFERENCES}, "chat", notes)
    is_plain = rows.format == "completion" or not tokenizer.template_name
    # full-hh-rlhf: prompt and answers become two transcripts
    if not is_plain and re.fullmatch(
        r"(\n\n)?Human:(?s:.*)\n\nAssistant:\s*", str(row.get("prompt"))
    ):
        row |= {key: row["prompt"] + text_of(row, key) for key in labels}
        row["prompt"] = prompt_key = ""
    sides = [read_side(row, prompt_key, key, is_plain, notes) for key in labels]
    start = begin_of_answers(row, [messages for messages, _ in sides])
    cuts = []
    prompts = []
    for messages, tools in sides:
        roles = [message["role"] for message in messages[start:]]
        if not roles or roles[0] not in ("assistant", "text") or roles[-1] == "user":
            raise ValueError(
                f"after {start} turns of the prompt, expected one of the assistant, and none of the user at"
                f" the end ({REMEDY})"
            )
        messages[:start] = [message | {"weight": 0} for message in messages[:start]]
        if messages[0]["role"] == "text":
            ids, mask = encode_plain(tokenizer, messages, notes)
            form = "plain text"
        else:
            chat, *later_chats = render_chats(tokenizer, messages, tools, "assistant", notes)
            if later_chats:
                raise ValueError(
                    "an answer of several turns, of which the chat template writes one differently once"
                    " others follow (fix: one turn an answer, or another --chat_template)"
                )
            ids, mask = encode_chat(tokenizer, chat)
        prompts.append(ids[: mask.find(1)])
        cut = type(part)()  # a Part; encode.py cannot be imported, since it imports this file
        cut.add_row(ids, mask, where, rows, "")
        cuts.append(cut)
    if prompts[0] != prompts[-1]:
        raise ValueError(
            "the prompt has other tokens before chosen than before rejected (fix: a prompt without white"
            " space at its end, or another --chat_template)"
        )
    add_cuts(part, cuts, labels, where, rows.task)
    notes &= Counter({*notes})  # a note of both sides counts once
    return form


def labels_of(row: dict, prompt_key: str, task: str) -> dict:
    """{key of an answer: whether it is desirable}. ValueError if the row has neither a pair nor a label."""
    if {"chosen", "rejected"} <= row.keys():
        return {"chosen": True, "rejected": False}
    key = "kto_tag" if row.get("label") is None else "label"
    label = row.get(key)
    label = {"true": 1, "1": 1, "false": 0, "0": 0}.get(str(label).lower(), label)  # text in CSV
    if label is None or not prompt_key or task == "pairs":
        raise ValueError(
            "expected chosen and rejected, or a label with prefer.py --loss kto, and what they answer (fix:"
            " --columns prompt=THEIRS,chosen=THEIRS,rejected=THEIRS; first sort both by a label of the best)"
        )
    if label not in (0, 1):
        raise ValueError(
            f"{key}: expected true or false, got {label!r:.40} (fix: true or false, without quotes, or 1, 0)"
        )
    return {ANSWER_OF.get(prompt_key, prompt_key): bool(label)}


def read_side(row: dict, prompt_key: str, key: str, is_plain: bool, notes: Counter) -> Read:
    """(messages, tools) of a side: the conversation row[key], or row[prompt_key] with the answer row[key]."""
    turns = answer_turns(row, key, prompt_key)
    first = turns[0] if turns else None
    role = str(first.get(keys_of(first)[0])) if isinstance(first, dict) else ""
    if key == prompt_key or ROLES.get(role) in ("system", "user"):
        earlier = row.get(prompt_key)
        for i in range(len(earlier) if isinstance(earlier, list) else 0):
            if earlier[i:] == turns[: len(earlier) - i]:
                turns = earlier[:i] + turns
                break
        return conversation(row | {key: turns}, notes, key)
    if prompt_key == "instruction":
        return read_alpaca(row | {"output": row[key]}, notes)
    prompt_key = prompt_key or "prompt"
    if isinstance(row.get(prompt_key), str):
        if is_plain and isinstance(row[key], str):
            return read_completion(row | {"completion": row[key]}, notes)
        # The other side, and begin_of_answers, take the turns too.
        row[prompt_key] = [{"role": "user", "content": text_of(row, prompt_key)}]
    name = f"{prompt_key} + {key}"  # the key of these turns in errors
    turns = typed(row, prompt_key, list) + turns
    return conversation(row | {name: turns}, notes, name)


def answer_turns(row: dict, key: str, prompt_key: str) -> list:
    """The turns of an answer, or of a whole conversation."""
    value = row.get(key)
    if isinstance(value, list):
        return value
    if isinstance(value, dict):
        return [value]
    text = text_of(row, key)
    if prompt_key or not TRANSCRIPT_TURN.match(text):
        return [{"role": "assistant", "content": text}]
    return [
        {"from": speaker.lower(), "value": words.strip()}
        for speaker, words in TRANSCRIPT_TURN.findall(text)
    ]


def begin_of_answers(row: dict, conversations: list[Messages]) -> int:
    """The number of turns in the prompt: the common first turns of two conversations, or all turns but the
    last of a single one.
    """
    chosen = conversations[0]
    rejected = conversations[-1]
    start = sum(chosen[: i + 1] == rejected[: i + 1] for i in range(len(chosen)))
    # of a single conversation, or equal answers, which add_cuts drops and counts
    start -= chosen == rejected
    questions = [turn["content"] for turn in chosen[:start] if turn["role"] in ("user", "text")]
    if not questions:
        raise ValueError(
            f"chosen and rejected have no common beginning, which is the prompt ({REMEDY})"
        )
    prompt = row.get("prompt") or None
    if isinstance(prompt, str) and prompt.strip() not in map(str.strip, questions):
        raise ValueError(f"prompt: none of the turns of the user before the answers ({REMEDY})")
    return start


def add_cuts(part, cuts: list, labels: dict, where: str, task: str) -> None:
    """Add the sequences of a row as one pair, or each with its label. cuts: one Part per sequence, which is
    already cut to seq_len.
    """
    chosen = cuts[0]
    rejected = cuts[-1]
    dropped = chosen.dropped | rejected.dropped
    part.dropped += dropped
    part.notes += chosen.notes | rejected.notes
    if len(cuts) == 2 and not dropped and chosen.ids == rejected.ids:
        part.dropped[EQUAL] += 1
    elif task == "labels":
        for cut, label in zip(cuts, labels.values(), strict=True):
            if cut.lengths:
                part.add(cut.ids, cut.loss_mask, where)
                part.row_sizes.append(cut.lengths[0] * label)
    elif not dropped:
        part.add(chosen.ids + rejected.ids, chosen.loss_mask + rejected.loss_mask, where)
        part.row_sizes.append(len(chosen.ids))
