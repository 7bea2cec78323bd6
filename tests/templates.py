"""Small chat templates of every kind that is in use, and which templates of trl 1.16 (trl/chat_templates) are
of that kind. They write special tokens that test_tokens.py's tokenizers have.
"""

from typing import NamedTuple


class Kind(NamedTuple):
    template: str
    lead: str  # what it writes between its generation prompt and a last answer
    end: str  # what ends an answer
    # how it writes the thought "so" before a last answer; None: it drops thoughts
    thought: str | None
    call: str | None  # how it writes a call of look(at="sea"); None: it drops calls
    exact: bool  # whether an answer without thoughts begins with its generation prompt
    trl: str  # names


USER = "{%- if m.role == 'user' %}{{- '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}"
TOOL = "{%- elif m.role == 'tool' %}{{- '<|im_start|>tool\n' + m.content + '<|im_end|>\n' }}"
CALLS = (
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<call>' + call.function | tojson + '</call>' }}{%- endfor %}"
)
PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
OPEN_PROMPT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n<think>\n' }}{%- endif %}"
LAST_QUESTION = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
)
CALL = '<call>{"name": "look", "arguments": {"at": "sea"}}</call>'


def chatml(answer: str, prompt: str = PROMPT) -> str:
    """Turns between ChatML's tokens; `answer` writes an assistant's from m, ns.last and loop."""
    return (
        LAST_QUESTION
        + "{%- for m in messages %}"
        + USER
        + TOOL
        + "{%- else %}"
        + answer
        + "{%- endif %}{%- endfor %}"
        + prompt
    )


KINDS = {
    "plain": Kind(
        chatml("{{- '<|im_start|>assistant\n' + m.content }}" + CALLS + "{{- '<|im_end|>\n' }}"),
        lead="",
        end="<|im_end|>",
        thought=None,
        call=CALL,
        exact=True,
        trl="cohere cohere2 gemma gemma3 llama3 llama3_1 llama3_2 phi3 phi3_5 lfm2 lfm2_v2 qwen2_5 qwen2_5_vl"
        " qwen3_instruct_2507 qwen3_vl",
    ),
    "no calls": Kind(
        chatml("{{- '<|im_start|>assistant\n' + m.content + '<|im_end|>\n' }}"),
        lead="",
        end="<|im_end|>",
        thought=None,
        call=None,
        exact=True,
        trl="llama3 phi3 phi3_5 lfm2 qwen2_5_vl",
    ),
    "thoughts where there are some": Kind(
        chatml(
            "{{- '<|im_start|>assistant\n' }}{%- if m.reasoning_content and loop.index0 > ns.last %}"
            "{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}{{- m.content }}"
            + CALLS
            + "{{- '<|im_end|>\n' }}"
        ),
        lead="",
        end="<|im_end|>",
        thought="<think>so</think>",
        call=CALL,
        exact=True,
        trl="gemma4 gemma4_v2 gemma4_v3 gemma4_v4 gemma4_v5 diffusion_gemma lfm2_2_5 lfm2_2_5_v2 lfm2_2_5_vl",
    ),
    "empty thoughts in the last answer": Kind(
        chatml(
            "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last %}"
            "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- m.content }}"
            + CALLS
            + "{{- '<|im_end|>\n' }}"
        ),
        lead="<think>\n\n</think>\n\n",
        end="<|im_end|>",
        thought="<think>\nso\n</think>\n\n",
        call=CALL,
        exact=True,
        trl="qwen3",
    ),
    "thoughts that the prompt opens": Kind(
        chatml(
            "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last %}"
            "{{- '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{%- endif %}{{- m.content }}"
            + CALLS
            + "{{- '<|im_end|>\n' }}",
            OPEN_PROMPT,
        ),
        lead="\n</think>\n\n",
        end="<|im_end|>",
        thought="so\n</think>\n\n",
        call=CALL,
        exact=True,
        trl="qwen3_5_think qwen3_6 qwen3_8",
    ),
    "thoughts that the prompt closes": Kind(
        chatml(
            "{{- '<|im_start|>assistant\n' }}{%- if loop.index0 > ns.last %}"
            "{{- '<think>\n\n</think>\n\n' }}{%- endif %}{{- m.content }}"
            + CALLS
            + "{{- '<|im_end|>\n' }}",
            OPEN_PROMPT.replace("<think>\n", "<think>\n\n</think>\n\n"),
        ),
        lead="",
        end="<|im_end|>",
        thought=None,
        call=CALL,
        exact=True,
        trl="qwen3_5_nothink",
    ),
    "no token ends an answer": Kind(
        LAST_QUESTION
        + "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|end|>' }}{{- '\n<think>' }}"
        "{{- m.reasoning_content if m.reasoning_content and loop.index0 > ns.last }}{{- '</think>\n' }}"
        "{{- m.content }}"
        + CALLS
        + "{%- else %}{{- '<|im_start|>' if m.role == 'user' else '<end_of_turn>' }}{{- '\n' + m.content }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|end|>' }}{%- endif %}",
        lead="\n<think></think>\n",
        end="<|im_start|>",
        thought="\n<think>so</think>\n",
        call=CALL,
        exact=True,
        trl="glm4moe",
    ),
    "channels": Kind(
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|im_start|>assistant' }}"
        "{%- if m.tool_calls %}{{- ' to=' + m.tool_calls[0].function.name + '<start_of_turn>' }}"
        "{{- m.tool_calls[0].function.arguments | tojson + '<end_of_turn>' }}{%- else %}"
        "{{- ' to=self<start_of_turn>' + m.reasoning_content + '<|end|><|im_start|>assistant' "
        "if m.reasoning_content and loop.last }}{{- ' to=user<start_of_turn>' + m.content }}"
        "{{- '<|eot_id|>' if loop.last else '<|end|>' }}{%- endif %}{%- else %}"
        "{{- '<|im_start|>' + m.role + '<start_of_turn>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant' }}{%- endif %}",
        lead=" to=user<start_of_turn>",
        end="<|eot_id|>",
        thought=" to=self<start_of_turn>so<|end|><|im_start|>assistant to=user<start_of_turn>",
        call=' to=look<start_of_turn>{"at": "sea"}<end_of_turn>',
        exact=True,
        trl="gptoss muse_glimmer",
    ),
    "contents in parts": Kind(
        "{%- for m in messages %}{{- m.role | capitalize + ':' }}{%- for part in m.content %}"
        "{{- ' ' + part.text if part.type == 'text' else '<image>' }}{%- endfor %}{{- '<end_of_turn>\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- 'Assistant:' }}{%- endif %}",
        lead=" ",
        end="<end_of_turn>",
        thought=None,
        call=None,
        exact=True,
        trl="idefics3 smolvlm llava_next",
    ),
    "a prompt that opens thoughts which no answer has": Kind(
        chatml(
            "{{- '<|im_start|>assistant\n' + m.content }}" + CALLS + "{{- '<|im_end|>\n' }}",
            OPEN_PROMPT,
        ),
        lead="",
        end="<|im_end|>",
        thought=None,
        call=CALL,
        exact=False,
        trl="deepseekv3 deepseek_r1_distill",
    ),
    "a prompt with a line break that empty thoughts have not": Kind(
        chatml(
            "{{- '<|im_start|>assistant\n<think>' }}"
            "{{- '\n' + m.reasoning_content + '\n' if m.reasoning_content and loop.index0 > ns.last }}"
            "{{- '</think>' + m.content }}" + CALLS + "{{- '<|im_end|>\n' }}",
            OPEN_PROMPT,
        ),
        lead="</think>",
        end="<|im_end|>",
        thought="so\n</think>",
        call=CALL,
        exact=False,
        trl="nemotron_3_nano nemotron_3_super nemotron_3_ultra nemotron_3_5_lightning",
    ),
}
