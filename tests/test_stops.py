"""A model that is fine-tuned on what we teach answers, and stops by itself, whatever the chat template.

python -m pytest tests/test_stops.py -m slow
"""

import json

import finetune
import pytest
from templates import KINDS
from test_tokens import BUILT_IN, SHIPPED, byte_level
from tiny import tiny_model_folder
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

# How Llama 3 and Qwen cut text before they look for tokens: line breaks stay together, as in a prompt's end.
LLAMA3_CUTS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QUESTIONS = {"Say blue": "blue", "And the sea?": "Grün, 蓝", "Is it red?": "blue, blue"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*SHIPPED, *BUILT_IN, *(name for name in KINDS if KINDS[name].exact)]
)
def test_a_fine_tuned_model_answers_and_stops_by_itself(name, tmp_path):
    tokenizer = byte_level(trim_offsets=False)
    cuts = (
        pre_tokenizers.Split(Regex(LLAMA3_CUTS), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    )
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(cuts))
    sizes = {"vocab_size": len(tokenizer) + 3, "num_hidden_layers": 1}
    folder = tiny_model_folder(tmp_path / "model", **sizes)
    tokenizer.save_pretrained(folder)
    template = name
    if name not in BUILT_IN:
        template = tmp_path / "template.jinja"
        template.write_text(SHIPPED[name][0] if name in SHIPPED else KINDS[name].template)
    rows = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in QUESTIONS.items()
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = finetune.main(
        finetune.Config(
            model=str(folder),
            dataset=str(tmp_path / "rows.jsonl"),
            chat_template=str(template),
            output_dir=str(tmp_path / "out"),
            steps=40,
            batch_size=3,
            lr=8e-3,
            save_every=0,
            log_every=40,
        )
    )
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    for question, answer in QUESTIONS.items():
        parts = [{"type": "text", "text": question}]
        turn = [{"role": "user", "content": parts if name == "contents in parts" else question}]
        prompt = tokenizer.apply_chat_template(
            turn, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        given = model.generate(**prompt, do_sample=False, max_new_tokens=40)[
            0, prompt["input_ids"].shape[1] :
        ]
        lead = KINDS[name].lead if name in KINDS else ""  # special tokens in it are not shown
        lead = tokenizer.decode(
            tokenizer.encode(lead, add_special_tokens=False), skip_special_tokens=True
        )
        assert tokenizer.decode(given, skip_special_tokens=True).strip() == (lead + answer).strip()
        assert 0 < len(given) < 40
