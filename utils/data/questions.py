"""What eval.py and grpo.py ask a model: prompts with columns, for rewards; windows of long texts and
choices of questions, whose tokens are scored; and a model for EleutherAI's lm-eval.

A row of prompts is {"prompt": TEXT or [turn, ...]}, {"messages": [turn, ...]} or an alpaca row. All other
keys are its columns. A last turn of the assistant, or alpaca's output, becomes the column `answer`. A text is
a user turn; it is plain text with --format completion, or if the tokenizer has no chat template. Sources of
these forms:
https://huggingface.co/docs/trl/dataset_formats (prompt-only), https://huggingface.co/datasets/openai/gsm8k.
"""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from ..run.errors import check
from ..run.units import IGNORE
from .chats import Chat, encode_chat
from .encode import Part, Rows
from .examples import Example, Examples, load_examples
from .prompts import Prompt, is_plain, prompt_of
from .tokens import adds_bos, hidden

# options of lm_eval's tasks that limit the tokens of an answer; the first that a task has is used
SIZES = "max_gen_toks max_new_tokens max_tokens max_completion_tokens".split()
# the labels of choices that come without any: numbers from 0, or letters
LABELS = [[*map(str, range(1000))], [*"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]]

# --- prompts with columns


class Question(NamedTuple):
    ids: list[int]
    content: str | list[dict]  # a text, or messages, as the row has it
    columns: dict[str, object]  # the same keys for all rows; None: this row does not have it
    where: str
    tools: list | None

    messages = Prompt.messages


@dataclass(frozen=True, eq=False)
class Questions(Examples):
    """Prompts as examples without trained tokens. GlobalBatches(questions, ...).rows_of(step) gives the rows
    of a step; questions[row] is the prompt of a row.
    """

    def __getitem__(self, i: int) -> Question:
        ids, _, where = super().__getitem__(i)
        content, columns, tools = json.loads(self.details[self.numbers[i]])
        return Question(ids.tolist(), content, dict.fromkeys(self.names) | columns, where, tools)

    @cached_property
    def names(self) -> set[str]:
        """The names of all columns."""
        return {name for _, columns, _ in map(json.loads, self.details) for name in columns}


def load_questions(rows: Rows, tokenizer) -> Questions:
    """The prompts of a data set, for load_data(..., load=load_questions). rows.seq_len: the maximum tokens of
    a prompt. With rows.too_long drop, longer prompts are dropped and counted; otherwise they are an error. No
    prompt is cut, because that would change the question.

    ConfigError for bad rows (the first ten, and the number of others), and if all rows were dropped.
    """
    return Questions(**vars(load_examples(replace(rows, task="prompts"), tokenizer)))


# --- sequences whose tokens are scored


def scored(ids: list[int], first: int, where="") -> Example:
    """A sequence whose tokens from index `first` on are scored."""
    tokens = torch.tensor(ids, dtype=torch.int32)
    labels = tokens.clone()
    labels[:first] = IGNORE
    return Example(tokens, labels, where)


def windows(tokens: int, seq_len: int, stride: int) -> Iterator:
    """(begin, first scored token, end) of each window over a text of so many tokens. A window has at most
    seq_len tokens; stride < seq_len. Each token but the first is scored once, with a context of at least
    seq_len - stride tokens, or all tokens before it if there are fewer.

    As in https://huggingface.co/docs/transformers/perplexity, but the last window is as long as the others,
    as in lm-eval.
    """
    end = min(seq_len, tokens)
    yield 0, 1, end
    while end < tokens:
        first = end
        end = min(end + stride, tokens)
        yield max(0, end - seq_len), first, end


def choices_of(questions: Questions, tokenizer, rows: Rows) -> list[tuple]:
    """For each question: (its sequences, the texts of its choices, the index of the right one). Each sequence
    is the prompt and one choice, without an end-of-text or end-of-turn token. Only the choice is scored.

    Columns of a row: choices, texts that are appended to the prompt unchanged, in chats after the white space
    that the template writes before an answer, or as in ARC {"text": texts, "label": their labels}; answer, a
    label. Without labels it is a text of choices, a number from 0 or a letter from A. If not all answers are
    texts, one that stands for two choices is an error. ConfigError lists up to ten rows that are wrong or
    longer than rows.seq_len.
    """
    items = []
    part = Part()
    columns = [(q.columns.get("choices"), q.columns.get("answer")) for q in questions]
    all_texts = all(isinstance(choices, list) and answer in choices for choices, answer in columns)
    for question, (choices, answer) in zip(questions, columns, strict=True):
        try:
            label_lists = [] if all_texts else LABELS
            if isinstance(choices, dict):
                label_lists = [choices.get("label") or ()]
                choices = choices.get("text")
            elif isinstance(answer, str):
                label_lists = [*label_lists, choices]
            are_texts = isinstance(choices, list) and {*map(type, choices)} == {str}
            if not are_texts or len(choices) < 2 or "" in choices:
                raise ValueError(
                    "choices: expected a list of two texts or more (fix: --columns choices=THEIRS; texts in"
                    " columns of their own, such as sol1 and sol2, must become a list)"
                )
            right = {
                labels.index(str(answer))
                for labels in label_lists
                if str(answer) in labels[: len(choices)]
            }
            if len(right) != 1:
                raise ValueError(
                    f"answer: {answer!r:.60} names {len(right)} of the choices, not one: it is a text, number"
                    " from 0 or letter, or a label if they have labels (fix: --columns answer=THEIRS)"
                )
            sequences = [continued(question, choice, tokenizer, rows) for choice in choices]
            longest = max(len(sequence.ids) for sequence in sequences)
            if longest > rows.seq_len:
                raise ValueError(
                    f"{longest:,} tokens, and --seq_len is {rows.seq_len} (fix: a larger one, or drop it)"
                )
            items.append((sequences, choices, *right))
        except ValueError as fault:
            part.bad.append((question.where, str(fault)))
    if part.bad:
        part.close(rows)  # raises
    return items


def continued(question: Question, choice: str, tokenizer, rows: Rows) -> Example:
    """The sequence of a question's prompt and one choice; see choices_of."""
    choice = hidden(tokenizer, choice)
    start = []  # chat templates write the BOS token themselves
    lead = ""
    if is_plain(question.content, tokenizer, rows):
        start = question.ids[: adds_bos(tokenizer)]
        prompt = hidden(tokenizer, question.content)
    else:
        messages = question.messages
        answered = [*messages, {"role": "assistant", "content": choice}]
        prompt = prompt_of(tokenizer, messages, question.tools)
        rendered = prompt_of(tokenizer, answered, question.tools)
        lead, *_ = rendered[len(prompt) :].partition(choice)  # Llama 2: "[/INST]", then " Yes"
        if lead.strip():  # only white space is kept
            lead = ""
    text = prompt + lead + choice
    ids, mask = encode_chat(tokenizer, Chat(text, [(len(prompt), len(text), True)]))
    return scored(start + ids, len(start) + mask.find(1), question.where)


# --- lm-eval, https://github.com/EleutherAI/lm-evaluation-harness


def harness_of(base: type, tokenizer, asker, seq_len: int, max_new_tokens: int):
    """A model for lm_eval. base: lm_eval's class TemplateLM, which encodes requests. asker: see
    train/rollout.py.

    lm-eval sees every rank as rank 0 of 1, so all ranks make the same requests. The asker divides the work
    among them. All ranks get all answers, so no result depends on the number of ranks.

    seq_len: maximum tokens of a sequence; lm-eval's max_length is one less, because the last token is not an
    input. max_new_tokens: maximum tokens of an answer, if the task sets none. Sequences that are too long are
    cut on the left, as by lm-eval's own models.
    """
    bos = tokenizer.bos_token_id
    eos = tokenizer.eos_token_id

    def score(sequences):
        """[(log-probability, whether each token is the most likely one), ...]"""
        rows = asker.score(  # [::2] leaves out the number of tokens
            [[sequence] for sequence in sequences], lambda _, scores: {"score": scores[0][::2]}
        )
        return [row["score"] for row in rows]

    class Harness(base):  # lm_eval declares the types of these methods
        tokenizer_name = tokenizer.name_or_path
        eot_token_id = eos
        prefix_token_id = eos if bos is None else bos

        def tok_encode(self, string, add_special_tokens=None, **_):
            if add_special_tokens is None:  # not if a chat template wrote the BOS token
                add_special_tokens = bos is None or not string.startswith(tokenizer.bos_token)
            return tokenizer.encode(string, add_special_tokens=add_special_tokens)

        def apply_chat_template(self, chat_history, add_generation_prompt=True):
            return tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )

        def _loglikelihood_tokens(self, requests, **_):
            sequences = []
            for _, context, continuation in requests:
                ids = (context + continuation)[-seq_len:]
                sequences.append(scored(ids, max(1, len(ids) - len(continuation))))
            return score(sequences)

        def loglikelihood_rolling(self, requests, **_):
            sequences = []
            numbers = []
            for number, request in enumerate(requests):
                ids = [self.prefix_token_id, *self.tok_encode(*request.args)]
                for begin, first, end in windows(len(ids), seq_len, seq_len - 1):
                    sequences.append(scored(ids[begin:end], first - begin))
                    numbers.append(number)
            sums = [0.0] * len(requests)
            for number, (log_prob, _) in zip(numbers, score(sequences), strict=True):
                sums[number] += log_prob
            return sums

        def generate_until(self, requests, **_):
            by_size = defaultdict(list)  # maximum new tokens -> [(request number, prompt)]
            for number, request in enumerate(requests):
                context, options = request.args
                check(
                    not options.get("do_sample", "temperature" in options)
                    or options.get("temperature") == 0,
                    f"lm_eval: answers are greedy here, and a task has {options}"
                    " (fix: do_sample: false in its .yaml, or leave the task out)",
                )
                size = next(filter(None, map(options.get, SIZES)), max_new_tokens)
                prompt_tokens = seq_len - 1 - size  # at most
                check(
                    prompt_tokens > 0,
                    f"--seq_len {seq_len}: a task has answers of {size} tokens (fix: a larger --seq_len)",
                )
                ids = self.tok_encode(context)[-prompt_tokens:]
                by_size[size].append((number, scored(ids, len(ids))))
            texts = [""] * len(requests)
            for size, asked in by_size.items():
                numbers, prompts = zip(*asked, strict=True)
                rows = asker.complete(prompts, size, lambda _, found: {"ids": found.ids})
                for number, row in zip(numbers, rows, strict=True):
                    text = tokenizer.decode(row["ids"], skip_special_tokens=True)
                    until = requests[number].args[1].get("until") or []
                    stops = [until] if isinstance(until, str) else until
                    for stop in filter(None, stops):
                        text = text.split(stop)[0]
                    texts[number] = text
            return texts

    Harness.tokenizer = tokenizer  # lm-eval reads its chat template
    return Harness()
