"""The tokenizer and its chat template: loading, rendering, and text -> ids with the offsets of each token.

If a message spells a special token, such as <|im_end|>, it stays ordinary text. Before the template is
rendered, `hidden` replaces it with as many private-use characters, which ordinary text does not contain.
`encode` puts it back, and makes the tokenizer read it as text (encode_special_tokens).
"""

import os
import re
from ast import literal_eval
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from ..run.errors import check, others_code, print0
from .formats import Messages

# Unicode has noncharacters for such uses within a program. They are in no text.
MARK = "\ufdd0{}\ufdd1"  # a placeholder for a text, to see whether and where a template writes it
PLACE = "\ufdd2"  # stands for a picture in the content of a message
SCHEMA = [
    {
        "type": "function",
        "function": {
            "name": MARK.format("-1 tools"),
            "description": "x",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]
GENERATION_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
HIDDEN = re.compile("[\U000f0000-\U000ffffd]\U000effff*")


# Macros of the built-in templates. Tools and tool calls have the format of Hermes and Qwen,
# https://huggingface.co/NousResearch/Hermes-2-Pro-Mistral-7B#prompt-format-for-function-calling
MACROS = """\
{%- macro tool_list() -%}
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> \
XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call>
{%- endmacro -%}
{%- macro call_text(call) -%}
<tool_call>
{"name": {{ call.name | tojson }}, "arguments": \
{{ call.arguments if call.arguments is string else call.arguments | tojson }}}
</tool_call>
{%- endmacro -%}
{%- macro text_of(m) -%}
{%- if m.role == 'tool' -%}
{{- '<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- else -%}
{%- if m.reasoning_content -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] -%}
{{- '\n' if m.content or not loop.first -}}
{{- call_text(call.function) -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
BUILT_IN = {
    # For tokenizers of base models, which have no template. It needs no new token: the end-of-text token
    # ends a turn.
    "plain": """\
{%- if tools and messages[0].role != 'system' -%}
{{- 'System:\n' + tool_list() + '\n\n' -}}
{%- endif -%}
{%- for m in messages -%}
{{- m.role | capitalize + ':\n' + text_of(m) -}}
{{- '\n\n' + tool_list() if tools and loop.first and m.role == 'system' -}}
{{- eos_token if m.role == 'assistant' -}}
{{- '\n\n' -}}
{%- endfor -%}
{{- 'Assistant:\n' if add_generation_prompt -}}
""",
    "chatml": """\
{%- if tools and messages[0].role != 'system' -%}
{{- '<|im_start|>system\n' + tool_list() + '<|im_end|>\n' -}}
{%- endif -%}
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + text_of(m) -}}
{{- '\n\n' + tool_list() if tools and loop.first and m.role == 'system' -}}
{{- '<|im_end|>\n' -}}
{%- endfor -%}
{{- '<|im_start|>assistant\n' if add_generation_prompt -}}
""",
    # The wording of tatsu-lab/stanford_alpaca, train.py. The input follows the instruction; a system turn
    # replaces the first sentences.
    "alpaca": """\
{%- if messages[0].role != 'system' -%}
{{- 'Below is an instruction that describes a task. ' -}}
{{- 'Write a response that appropriately completes the request.' -}}
{{- '\n\n' + tool_list() if tools -}}
{%- endif -%}
{%- set headers = {'system': '', 'user': '\n\n### Instruction:\n', 'assistant': '\n\n### Response:\n', \
'tool': '\n\n### Tool:\n'} -%}
{%- for m in messages -%}
{{- headers[m.role] + text_of(m) -}}
{{- '\n\n' + tool_list() if tools and loop.first and m.role == 'system' -}}
{{- eos_token if m.role == 'assistant' -}}
{%- endfor -%}
{{- '\n\n### Response:\n' if add_generation_prompt -}}
""",
}

IdsAndMask = tuple[list[int], bytearray]  # (ids, loss mask) of T tokens each
# (text, the characters [first, last) between {% generation %} marks, if the template has any)
Rendered = tuple[str, list[tuple[int, int]]]


def load_tokenizer(folder: Path | str, chat_template="", trust_remote_code=False, config=None):
    """The tokenizer of a model folder, with a chat template that works.

    config: of the model; None: that of the folder. In transformers 5 the type of the model may decide over
    the class that the tokenizer's files name, and the class over the ids.
    chat_template: "" for the tokenizer's own, "chatml", "alpaca" or "plain" for a built-in one, else a file.
    The tokenizer gets the attribute `template_name`. It is "" if the tokenizer has none of its own: turns are
    rendered with "plain" then, and texts are no turns. ConfigError names the folder or the template that is
    wrong.
    """
    # Imported here because it imports torch, which the tokenizing processes do not need.
    from transformers import AutoTokenizer

    with others_code(
        f"{folder}: no tokenizer here, or one that cannot be read",
        "a folder with its tokenizer.json or .model; --trust_remote_code, if it is code that you have read",
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            folder,
            config=config,
            local_files_only=True,
            trust_remote_code=trust_remote_code,
        )
    # Without files, transformers makes some tokenizers with an empty vocabulary.
    check(
        tokenizer.is_fast and len(tokenizer) > len(tokenizer.added_tokens_decoder),
        f"{folder}: its tokenizer has no vocabulary or no offsets; it needs a tokenizer.json (fix: add one"
        " that others made of it, or another --model; a tiktoken file with code of its own is not enough)",
    )
    # Ranks and tokenizing processes already use all cores.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.template_name = f"of {folder}"
    if chat_template:
        set_template(tokenizer, chat_template)
    elif not tokenizer.chat_template:
        set_template(tokenizer, "plain")
        tokenizer.template_name = ""
    with others_code(folder, "another --chat_template"):
        end_of_turn_ids(tokenizer)  # renders a conversation
    return tokenizer


def set_template(tokenizer, name: str) -> None:
    """Give the tokenizer a built-in template, or the one in the file `name`."""
    if name in BUILT_IN:
        vocabulary = tokenizer.get_vocab()
        for token in re.findall(r"<\|\w+\|>", BUILT_IN[name]):
            check(
                token in vocabulary,
                f"--chat_template {name}: {token} is not in the tokenizer's vocabulary (fix: leave the flag"
                " out, or alpaca; or a model with it: recipes/README.md, New tokens)",
            )
        # Rendered text is encoded without adding special tokens, so the template must write the BOS token.
        bos = "{{- bos_token -}}\n" if adds_bos(tokenizer) else ""
        tokenizer.chat_template = MACROS + bos + BUILT_IN[name]
        tokenizer.template_name = f"built-in {name}"
    else:
        with others_code(f"--chat_template {name}", "give a file, chatml, alpaca or plain"):
            tokenizer.chat_template = Path(name).read_text("utf-8")
        tokenizer.template_name = name


@lru_cache(maxsize=8)
def adds_bos(tokenizer) -> bool:
    """Whether the tokenizer begins every text with a BOS token."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]


def pad_id(tokenizer) -> int:
    """The pad token, else the end-of-text token, else 0. Any id will do: padding is masked by position."""
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    return tokenizer.eos_token_id or 0


# Takes the place of the clock in templates that write the date (Llama 3, gpt-oss, Granite). It is always
# Friday, 26 July 2024, which Llama 3's takes where there is no clock. If the date were today's, the tokens
# would differ each day, and no run could be resumed on the next day.
CLOCK = """\
{%- macro strftime_now(format) -%}
{{- format | replace('%-', '%') | replace('%F', '%Y-%m-%d') | replace('%T', '%H:%M:%S')
    | replace('%Y', '2024') | replace('%y', '24') | replace('%m', '07') | replace('%B', 'July')
    | replace('%b', 'Jul') | replace('%d', '26') | replace('%e', '26') | replace('%A', 'Friday')
    | replace('%a', 'Fri') | replace('%H', '00') | replace('%I', '12') | replace('%M', '00')
    | replace('%S', '00') | replace('%p', 'AM') -}}
{%- endmacro %}
"""
QUESTION = [{"role": "user", "content": MARK.format(0)}]
ANSWERED = [*QUESTION, {"role": "assistant", "content": MARK.format(1)}]


def print_template_notes(tokenizer) -> None:
    """Print what the user should know about the chat template."""
    if tokenizer.template_name == "built-in plain":
        print0(
            "template  plain, saved with the model: the tokenizer has none, or --chat_template says so"
        )
    elif tokenizer.template_name == "built-in chatml":
        print0(
            "template  chatml; a base that has never seen its tokens learns them by LoRA only with"
            " --modules_to_save embed_tokens,lm_head"
        )
    if not end_of_turn_ids(tokenizer):
        print0(
            "warning: the chat template ends no turn with a token, so the model will not learn to stop"
        )


def end_of_turn_ids(tokenizer) -> set[int]:
    """The token that ends an assistant's turn, see turn_end; an empty set if no token does.

    The trained tokens of a turn end with it, and generation_config.eos_token_id must contain it.
    """
    _, end = answer_end(tokenizer)
    return {*encode(tokenizer, end).ids[-1:]} & {*tokenizer.added_tokens_decoder}


def answer_end(tokenizer) -> tuple:
    """turn_end of a short conversation; with example tools if the template renders none without tools."""
    try:
        return turn_end(tokenizer, ANSWERED, None)
    except ValueError:
        with suppress(ValueError):
            return turn_end(tokenizer, ANSWERED, SCHEMA)
        raise


def turn_end(tokenizer, messages: Messages, tools: list | None, next_role="user") -> tuple:
    """(tail, end) of the last message, which is an assistant's. tail: all text that the template writes after
    its content. end: the text that ends the turn, found in this order:

    1. the added tokens directly after the content, with white space before them, or words between them (the
       tags of Kimi K3). A template may write its generation prompt unasked; then only the token that also
       stands there before a next turn counts.
    2. the token with which a turn of next_role begins.
    3. the end-of-text token, if there is one; else "".

    messages, tools: see sketch. The content of the last message is a mark.
    """
    words = added_words(tokenizer)
    answer = messages[-1]["content"]

    def after_answer(messages, prompt=False):
        text, _ = sketch(tokenizer, messages, tools, prompt)
        return text.rpartition(answer)[2]

    tail = after_answer(messages)
    end = re.match(rf"\s*(?:{words})(?:\w*(?:{words}))*", tail)
    if end and tail != after_answer(messages, prompt=True):
        return tail, end[0]
    following = {"role": next_role, "content": MARK.format("next"), "name": "", "tool_call_id": ""}
    with suppress(ValueError):  # the template may refuse this turn
        end = re.match(rf"\s*(?:{words})", after_answer([*messages, following])) or end
    return tail, end[0] if end else tokenizer.eos_token or ""


@lru_cache(maxsize=8)
def added_words(tokenizer) -> str:
    """A regular expression that matches any added token, special or not."""
    return any_of({token.content for token in tokenizer.added_tokens_decoder.values()})


def any_of(words: set[str]) -> str:
    """A regular expression that matches any of these words, longest first. Without words: matches nothing."""
    return "|".join(map(re.escape, sorted(words - {""}, key=len, reverse=True))) or "(?!)"


# --- messages -> text


def render(tokenizer, messages: Messages, tools: list | None = None, prompt=False) -> str:
    """The conversation as text; with `prompt`, followed by the generation prompt."""
    return render_marked(tokenizer, messages, tools, prompt)[0]


def sketch(tokenizer, messages: Messages, tools: list | None, prompt=False) -> Rendered:
    """render_marked for a conversation whose texts are marks. Results are cached, because most rows have one
    of a few such sketches. Any tools are replaced by SCHEMA.
    """
    template = tokenizer.get_chat_template(tools=tools)
    return _sketch(tokenizer, template, repr(messages), bool(tools), prompt)


@lru_cache(maxsize=4096)
def _sketch(tokenizer, template, messages, has_tools, prompt) -> Rendered:
    messages = literal_eval(messages)
    return render_marked(tokenizer, messages, SCHEMA if has_tools else None, prompt)


def render_marked(tokenizer, messages, tools, prompt=False) -> Rendered:
    """As render, and also the spans between {% generation %} marks. ValueError if the template cannot render
    the conversation.
    """
    template = tokenizer.get_chat_template(tools=tools)
    only_parts = takes_parts(tokenizer, template)
    messages = [in_parts(m) if only_parts or PLACE in m["content"] else m for m in messages]
    has_marks = not prompt and GENERATION_MARK.search(template)
    try:
        texts, spans = render_jinja_template(
            [messages],
            tools,
            None,
            CLOCK + template,
            has_marks,
            add_generation_prompt=prompt,
            **tokenizer.special_tokens_map,  # bos_token, eos_token ...
        )
    except Exception as error:  # a template is foreign code, which may raise anything
        roles = [message["role"] for message in messages]
        if len(roles) > 1:
            render(tokenizer, messages[:-1], tools)  # raises if an earlier turn is the cause
        raise ValueError(
            f"{template_name(tokenizer)} cannot render {', then '.join(roles)}: {error}"
        ) from error
    return texts[0], spans[0] if has_marks else []


def template_name(tokenizer) -> str:
    """The name of the chat template in messages."""
    return f"chat template {getattr(tokenizer, 'template_name', '') or 'of the tokenizer'}"


def in_parts(message: dict) -> dict:
    """The message with its content as a list of parts."""
    if isinstance(message["content"], list):
        return message
    parts = []
    for text in re.split(f"({PLACE})", message["content"]):
        if text == PLACE:
            parts.append({"type": "image"})
        elif text or not message["content"]:
            parts.append({"type": "text", "text": text})
    return message | {"content": parts}


@lru_cache(maxsize=8)
def takes_parts(tokenizer, template: str) -> bool:
    """Whether a template renders contents only as lists of parts, [{"type": "text", "text": ...}], and not as
    plain text. Templates of some vision-language models do.
    """
    (question,) = QUESTION
    for message in (question, in_parts(question)):
        with suppress(Exception):  # the template is foreign code
            texts, _ = render_jinja_template(
                [[message]], None, None, template, **tokenizer.special_tokens_map
            )
            if question["content"] in texts[0]:
                return message is not question
    return False


# --- text -> ids


class Encoded(NamedTuple):
    """The T tokens of a text. Token i covers the characters [starts[i], ends[i])."""

    ids: list[int]
    starts: list[int]
    ends: list[int]


def encode(tokenizer, text: str) -> Encoded:
    """As tokenizer(text, add_special_tokens=False), with hidden text put back.

    Byte-level tokenizers report an empty range for a token of spaces, at the end of the spaces. Here such a
    token starts where the previous token ended. ValueError for a lone surrogate.
    """
    text.encode()  # raises UnicodeEncodeError, a ValueError, for a lone surrogate
    if HIDDEN.search(text):
        from .spelled import encode_hidden

        ids, offsets = encode_hidden(tokenizer, text, special_tokens(tokenizer), HIDDEN)
    else:
        tokenizer.backend_tokenizer.encode_special_tokens = False
        encoding = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
        ids = encoding.ids
        offsets = encoding.offsets
    ends = [last for _, last in offsets]
    starts = [
        first if first < last else before
        for (first, last), before in zip(offsets, [0, *ends], strict=False)
    ]
    return Encoded(ids, starts, ends)


def hidden(tokenizer, value: object) -> object:
    """A JSON value in whose texts and keys every special token is replaced by hidden characters."""
    special, _, hide = special_tokens(tokenizer)
    if isinstance(value, str):
        return special.sub(lambda match: hide[match[0]], value)
    if isinstance(value, dict):
        return {hidden(tokenizer, key): hidden(tokenizer, item) for key, item in value.items()}
    return [hidden(tokenizer, item) for item in value] if isinstance(value, list) else value


@lru_cache(maxsize=8)
def special_tokens(tokenizer) -> tuple:
    """(a pattern that matches special tokens, hidden characters -> special token, special token -> hidden
    characters).
    """
    words = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    hide = {
        word: chr(0xF0000 + i) + "\U000effff" * (len(word) - 1)
        for i, word in enumerate(sorted(words))
    }
    return re.compile(any_of(words)), {mark: word for word, mark in hide.items()}, hide
