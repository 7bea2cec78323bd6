"""Chat templates for tokenizers that have none, or should have another: plain, chatml, alpaca, or a file."""

import re
from pathlib import Path

from .errors import ConfigError, check

# Jinja drops a line break after a block, {% %}, and keeps one after a value, {{ }}.
BUILT_IN = {
    # For tokenizers of base models, which have none. It adds no token: the end-of-text token ends a turn.
    "plain": "{% for m in messages %}{{ m.role | capitalize }}:\n{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}",
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # The wording of tatsu-lab/stanford_alpaca, train.py. An input stands below its instruction; a system turn
    # replaces the first sentences.
    "alpaca": "{% if messages[0].role != 'system' %}Below is an instruction that describes a task. "
    "Write a response that appropriately completes the request.{% endif %}{% for m in messages %}"
    "{{ {'system': '', 'user': '\n\n### Instruction:\n', 'assistant': '\n\n### Response:\n'}[m.role] }}"
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '\n\n### Response:\n' }}{% endif %}",
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
        bos = tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if bos else "") + BUILT_IN[name]
        tokenizer.template_name = f"built-in {name}"
    else:
        try:
            tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"--chat_template {name}: {error}; give a file, chatml or alpaca") from error
        tokenizer.template_name = name
