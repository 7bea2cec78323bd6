"""Small random models as Hugging Face folders: `tiny_model_folder(path, "gemma2")`. Real classes, odd sizes,
seeded weights.
"""

import json
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from utils.data.examples import Texts

SIZES = {
    "vocab_size": 1003,  # divides by nothing that a test shards over
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS = {
    "llama": ("llama", {}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 8, "final_logit_softcapping": 2.0}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "sliding_window": 8, "num_hidden_layers": 7}),
    "phi3": ("phi3", {}),
    "gpt2": ("gpt2", {"n_positions": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, **NO_DROPOUT}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere": ("cohere", {"logit_scale": 0.7}),
    "granite": ("granite", {"logits_scaling": 3.0}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5},
    ),
    "qwen3_moe": (
        "qwen3_moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
}
NO_REMARKS = {  # of utils.data.examples.Examples, for rows that no file has
    "dropped": {},
    "notes": {},
    "firsts": {},
    "row_sizes": torch.empty(0),
    "details": Texts(torch.empty(0, dtype=torch.uint8), torch.empty(0)),
    "unit": "rows",
    "origins": (),
    "bad": (),
}
SHARED_KEYS = {
    "head_dim": 16,
    "hidden_size_per_layer_input": 64,
    "vocab_size_per_layer_input": 8192,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 32,
}
OLDER = {  # of single tests only
    "falcon": ("falcon", {}),  # its blocks return tuples
    # A second table has a vector for each token and layer, and the last layers have no keys of their own.
    "gemma4_text": ("gemma4_text", SHARED_KEYS),
    "gemma3n_text": (
        "gemma3n_text",
        SHARED_KEYS
        | {
            "laurel_rank": 8,
            "intermediate_size": [96] * 6,
            "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4,
        },
    ),
    "gpt_oss": ("gpt_oss", {"head_dim": 16, "sliding_window": 8, "num_experts_per_tok": 2}),
}


def tiny_config(kind: str, **changes):
    """The config of a tiny model of this kind."""
    model_type, extra = (KINDS | OLDER)[kind]
    return AutoConfig.for_model(model_type, **{**SIZES, **extra, **changes})


def tiny_model(
    kind: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes
) -> torch.nn.Module:
    """A model with seeded random weights, larger than usual so that its logits differ."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype)


def tiny_model_folder(
    path: Path,
    kind: str = "llama",
    dtype: torch.dtype = torch.float32,
    files: int = 1,
    seed: int = 0,
    **changes,
) -> Path:
    """Write such a model, with a byte-level tokenizer, as a Hugging Face folder in about `files` files."""
    model = tiny_model(kind, dtype, seed, **changes)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(
        path, max_shard_size="1GB" if files == 1 else f"{size // files // 1000 + 1}KB"
    )
    tiny_tokenizer().save_pretrained(path)
    return Path(path)


CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, with the ChatML markers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=special[3:],
        chat_template=CHATML,
    )


def in_chunks(model, chunk_tokens: int):
    """The model with its chunked loss, in chunks of so many tokens; 0: of as many as a run takes."""
    from utils.model.loss import add_chunked_loss

    head = add_chunked_loss(model).get_output_embeddings()
    head.chunk_tokens = chunk_tokens or head.chunk_tokens
    return model


def build_optimizer(model, lr: float, weight_decay: float, name: str = "adamw"):
    """The optimizer of recipes/finetune.py."""
    from utils.model.sharding import norms_and_biases

    trained = [p for p in model.parameters() if p.requires_grad]
    undecayed = norms_and_biases(model)
    groups = [
        {"params": [p for p in trained if p not in undecayed], "weight_decay": weight_decay},
        {"params": [p for p in trained if p in undecayed], "weight_decay": 0.0},
    ]
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    from utils.train.optim_8bit import ShardedAdamW8bit

    return ShardedAdamW8bit(groups, lr, (0.9, 0.95), paged=name.startswith("paged"))


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """The states that an optimizer has after its first step, without a step of the model."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def without_special_end(source: Path, folder: Path) -> Path:
    """A copy of the tiny model, with a tokenizer that does not call its <|end|> special."""
    shutil.copytree(source, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        found = json.loads((folder / name).read_text())
        for token in found.get("added_tokens", ()):
            token["special"] = token["special"] and token["content"] != "<|end|>"
        if "additional_special_tokens" in found:
            found["additional_special_tokens"].remove("<|end|>")
        (folder / name).write_text(json.dumps(found))
    assert "<|end|>" not in AutoTokenizer.from_pretrained(folder).all_special_tokens
    return folder
