"""What is trained here gives transformers 4, on which vLLM and other servers build, the same ids and logits
as transformers 5. The models are made by transformers 4, in whose layout most published models are.

make test-4        it installs transformers 4 in .four/, from the network, and runs this
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
SIZES = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
YARN = {"original_max_position_embeddings": 512, "mscale": 1.0, "mscale_all_dim": 1.0}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0] * 8}
FAMILIES = {  # class -> its config, with other rotary positions than the defaults
    "Llama": {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA3}},
    "Qwen2": {"rope_theta": 1e6},
    "Qwen3": {"rope_theta": 1e6, "head_dim": 16},
    "Gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 5000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "head_dim": 16,
        "sliding_window": 16,
    },
    "Mistral": {"rope_theta": 1e6, "sliding_window": None},
    "Mixtral": {"rope_theta": 1e6, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Phi3": {
        "rope_theta": 2e4,
        "rope_scaling": {"type": "longrope", **LONG},
        "original_max_position_embeddings": 512,
    },
    "DeepseekV3": {
        "rope_theta": 5e4,
        "rope_scaling": {"type": "yarn", "factor": 8.0, "beta_fast": 32, "beta_slow": 1, **YARN},
        "num_key_value_heads": 4,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "Glm4": {"rope_theta": 3e4, "head_dim": 16, "partial_rotary_factor": 0.5},
    "Olmo2": {"rope_theta": 5e5},
}
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "é!"}]
TEMPLATE = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def make(root: Path) -> None:
    """In transformers 4: a folder for each family."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    words = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
    )
    tokenizer.chat_template = TEMPLATE
    for family, fields in FAMILIES.items():
        text = "Text" * (family == "Gemma3")
        config = getattr(transformers, f"{family}{text}Config")(**SIZES | fields)
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
        model.save_pretrained(root / family)
        tokenizer.save_pretrained(root / family, save_jinja_files=False)


def answer(folders: list[str]) -> None:
    """Print what each folder gives: the version, ids of a conversation, logits of 600 tokens."""
    for folder in folders:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template(TURNS, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = model(torch.arange(600)[None] % 250 + 5).logits[0, ::50]
        print(json.dumps([transformers.__version__, ids, logits.tolist()]))


def run(*arguments: object, older: bool = False) -> str:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if older:
        environment["PYTHONPATH"] = str(ROOT / ".four")
    words = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        words, env=environment, check=True, stdout=subprocess.PIPE
    ).stdout.decode()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        run(__file__, "make", root, older=True)
        rows = root / "rows.jsonl"
        rows.write_text(json.dumps({"messages": TURNS}) + "\n")
        recipes = ROOT / "recipes"
        flags = ["--dataset", rows, "--steps", 3, "--lr", 1e-2, "--save_every", 0, "--seq_len", 64]
        for family in FAMILIES:
            out = ["--model", root / family, "--output_dir", root / f"{family}-run"]
            run(recipes / "finetune.py", *out, *flags)
        base, lora = root / "Llama", root / "lora"
        run(
            recipes / "finetune.py", "--model", base, "--output_dir", lora, *flags, "--lora_rank", 4
        )
        merge = ["--model", base, "--adapter", lora / "adapter", "--output_dir", root / "merged"]
        run(recipes / "export.py", *merge)
        folders = [root / family for family in FAMILIES]
        folders += [root / f"{family}-run" / "model" for family in FAMILIES] + [root / "merged"]
        found = [run(__file__, "answer", *folders, older=older) for older in (True, False)]
        for path, *lines in zip(folders, *(text.splitlines() for text in found), strict=True):
            (old, old_ids, old_logits), (new, new_ids, logits) = map(json.loads, lines)
            apart = (torch.tensor(old_logits) - torch.tensor(logits)).abs().max()
            assert old.startswith("4.")
            assert new.startswith("5.")
            assert old_ids == new_ids, path
            assert apart < 1e-5 * torch.tensor(logits).abs().max(), path
            print(f"{path.relative_to(root)}: transformers {old} and {new} agree, to {apart:.1e}")


if __name__ == "__main__":
    task, *rest = [*sys.argv[1:], ""]
    {"make": lambda: make(Path(rest[0])), "answer": lambda: answer(rest[:-1])}.get(task, main)()
