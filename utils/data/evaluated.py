"""Sequences that an evaluation scores: windows of long texts, and choices of questions. See
recipes/eval.py.
"""

from collections import Counter
from collections.abc import Iterator

import torch

from ..run.units import IGNORE
from .chats import encode_plain
from .encode import Part, Rows
from .examples import Example
from .prompts import is_plain
from .questions import Question, Questions
from .tokens import encode, hidden


def scored(ids: list[int], first: int, where: str = "") -> Example:
    """A sequence whose tokens from index `first` on are scored."""
    tokens = torch.tensor(ids, dtype=torch.int32)
    labels = tokens.clone()
    labels[:first] = IGNORE
    return Example(tokens, labels, where)


def windows(tokens: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """(begin, first scored token, end) of each window over a text of so many tokens. A window has at most
    seq_len tokens; stride < seq_len. Each token but the first is scored once, with a context of at least
    seq_len - stride tokens, or all tokens before it if there are fewer.

    The same as https://huggingface.co/docs/transformers/perplexity and lm-eval's rolling windows.
    """
    end = min(seq_len, tokens)
    yield 0, 1, end
    while end < tokens:
        first, end = end, min(end + stride, tokens)
        yield max(0, end - seq_len), first, end


def choices_of(questions: Questions, tokenizer, rows: Rows) -> list[tuple[list[Example], int]]:
    """For each question: (its sequences, the index of the right one). Each sequence is the prompt and one
    choice, without an end-of-text or end-of-turn token. Only the choice is scored.

    Columns of a row: choices, texts that are appended to the prompt unchanged; answer, the right choice or
    its index. ConfigError lists up to ten rows that are wrong or longer than rows.seq_len.
    """
    found, part = [], Part()
    for question in questions:
        choices = question.columns.get("choices")
        answer = question.columns.get("answer")
        try:
            texts = isinstance(choices, list) and {*map(type, choices)} == {str} and all(choices)
            if not texts or len(choices) < 2:
                raise ValueError("choices: expected two texts or more")
            right = choices.index(answer) if answer in choices else answer
            if type(right) is not int or not 0 <= right < len(choices):
                raise ValueError(
                    f"answer: {answer!r:.60} is no choice, nor the number of one, from 0"
                )
            sequences = [continued(question, choice, tokenizer, rows) for choice in choices]
            longest = max(len(sequence.ids) for sequence in sequences)
            if longest > rows.seq_len:
                raise ValueError(f"{longest:,} tokens, and --seq_len is {rows.seq_len}")
            found.append((sequences, right))
        except ValueError as fault:
            part.bad.append((question.where, str(fault)))
    if part.bad:
        part.close(rows)  # raises
    return found


def continued(question: Question, choice: str, tokenizer, rows: Rows) -> Example:
    """The sequence of a question's prompt and one choice; see choices_of."""
    if is_plain(question.content, tokenizer, rows):
        prompt = {"role": "text", "content": question.content, "weight": 0}
        answer = prompt | {"content": choice, "weight": 1}
        ids, mask = encode_plain(tokenizer, [prompt, answer], Counter())
        ids = ids if tokenizer.eos_token_id is None else ids[:-1]
        return scored(ids, mask.find(1), question.where)
    ids = question.ids + encode(tokenizer, hidden(tokenizer, choice)).ids
    return scored(ids, len(question.ids), question.where)
