"""Chat templates for tokenizers that have none, or should have another: plain, chatml, alpaca, or a file."""

import re
from functools import lru_cache
from pathlib import Path

from ..run.errors import ConfigError, check

# What the built-in templates share. Tools and their calls are written as Hermes and Qwen write them,
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
    # For tokenizers of base models, which have none. It adds no token: the end-of-text token ends a turn.
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
    # The wording of tatsu-lab/stanford_alpaca, train.py. An input stands below its instruction; a system turn
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


def set_template(tokenizer, name: str) -> None:
    """Give the tokenizer a built-in template, or the one in the file `name`."""
    if name in BUILT_IN:
        vocabulary = tokenizer.get_vocab()
        for token in re.findall(r"<\|\w+\|>", BUILT_IN[name]):
            check(
                token in vocabulary,
                f"--chat_template {name}: {token} is not in the tokenizer's vocabulary, and embeddings are "
                "not resized; leave the flag out, or write alpaca",
            )
        # What a template renders is encoded as it stands: a BOS token that the tokenizer adds must be in it.
        bos = "{{- bos_token -}}\n" if adds_bos(tokenizer) else ""
        tokenizer.chat_template = MACROS + bos + BUILT_IN[name]
        tokenizer.template_name = f"built-in {name}"
    else:
        try:
            tokenizer.chat_template = Path(name).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"--chat_template {name}: {error}; give a file, chatml or alpaca"
            ) from None
        tokenizer.template_name = name


@lru_cache(maxsize=8)
def adds_bos(tokenizer) -> bool:
    """Whether the tokenizer begins every text with a BOS token."""
    return tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
