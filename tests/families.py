"""A tiny config of every type that transformers lists as a causal language model, by `family_config`.

Sizes are given by the names that configs share; a table names what a family needs besides.
"""

import dataclasses
import re
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

README = (Path(__file__).parent.parent / "recipes" / "README.md").read_text()
# Types that a newer transformers adds are tested once README.md lists them.
LISTED = [
    set(re.findall(r"`([^`]+)`", part))
    for part in re.search(
        r"<!-- trained -->\n(.*?)\n<!-- refused -->\n(.*?)\n<!-- end -->", README, re.DOTALL
    ).groups()
]
TYPES = tuple(name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in set.union(*LISTED))
VOCABULARY = 211  # divides by nothing that a test shards over
LAYERS = 3

# A config gets those of these fields that its class has.
SIZES = {
    **dict.fromkeys(["vocab_size", "unpadded_vocab_size", "decoder_vocab_size"], VOCABULARY),
    **dict.fromkeys(["hidden_size", "d_model", "n_embd", "emb_dim", "backbone_hidden_size"], 64),
    **dict.fromkeys(
        ["embedding_size", "word_embed_proj_dim", "input_embedding_size", "dim_model_base"], 64
    ),
    **dict.fromkeys(["output_embedding_size", "pronunciation_embed_dim", "shape_embed_dim"], 64),
    **dict.fromkeys(["attention_hidden_size", "lru_width", "centroid_intermediate_top_k"], 64),
    **dict.fromkeys(
        ["intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "n_inner"], 96
    ),
    **dict.fromkeys(["d_inner", "dff", "dim_ff", "ffn_hidden_size", "feed_forward_size"], 96),
    **dict.fromkeys(
        ["intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"], 96
    ),
    **dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 32),
    **dict.fromkeys(["shared_experts_intermediate_size", "shared_intermediate_size"], 32),
    **dict.fromkeys(["moe_shared_expert_intermediate_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers"], LAYERS),
    **dict.fromkeys(
        ["decoder_layers", "encoder_layers", "num_decoder_layers", "num_encoder_layers"], LAYERS
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"], 4
    ),
    **dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4),
    **dict.fromkeys(["num_decoder_attention_heads", "num_encoder_attention_heads"], 4),
    **dict.fromkeys(
        ["swa_num_attention_heads", "linear_num_heads", "index_n_heads", "indexer_n_heads"], 4
    ),
    **dict.fromkeys(["num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"], 2),
    **dict.fromkeys(["linear_num_key_heads", "indexer_kv_heads"], 2),
    **dict.fromkeys(["linear_num_value_heads"], 4),
    **dict.fromkeys(
        ["head_dim", "swa_head_dim", "d_head", "kv_channels", "attention_head_dim"], 16
    ),
    **dict.fromkeys(["dim_head", "attention_head_size", "qk_nope_head_dim", "v_head_dim"], 16),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"], 16),
    **dict.fromkeys(["index_head_dim", "indexer_head_dim"], 16),
    **dict.fromkeys(["qk_rope_head_dim", "rotary_dim"], 8),
    **dict.fromkeys(
        ["q_lora_rank", "kv_lora_rank", "o_lora_rank", "adapter_rank", "gated_norm_rank"], 16
    ),
    **dict.fromkeys(["laurel_rank", "hc_lowrank", "mamba_dt_rank", "time_step_rank"], 8),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"], 128
    ),
    **dict.fromkeys(["max_target_positions", "max_source_positions"], 128),
    **dict.fromkeys(["num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"], 4),
    **dict.fromkeys(
        ["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "cross_attn_k"], 2
    ),
    **dict.fromkeys(["n_shared_experts", "num_shared_experts", "moe_num_shared_experts"], 1),
    **dict.fromkeys(["n_group", "topk_group", "zero_expert_num"], 1),
    **dict.fromkeys(["first_k_dense_replace", "num_dense_layers"], 1),
    **dict.fromkeys(["mamba_d_state", "state_size", "ssm_state_size"], 16),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads", "mamba_d_head", "mamba_head_dim"], 8),
    **dict.fromkeys(["chunk_size", "mamba_chunk_size", "attention_chunk_size"], 8),
    **dict.fromkeys(
        ["sliding_window", "sliding_window_size", "attention_window_size", "window_size"], 8
    ),
    **dict.fromkeys(["index_topk", "indexer_budget", "index_block_size", "local_attention"], 8),
    **dict.fromkeys(["index_topk_blocks"], 2),
    **dict.fromkeys(["router_hidden_size"], 16),
    # Dropout is drawn at random, and what is compared is not.
    **dict.fromkeys(
        ["attention_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob"], 0.0
    ),
    **dict.fromkeys(
        ["dropout", "activation_dropout", "decoder_layerdrop", "encoder_layerdrop"], 0.0
    ),
    **dict.fromkeys(
        ["resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout", "layerdrop"], 0.0
    ),
    **dict.fromkeys(
        ["resid_dropout", "embed_dropout", "embedding_dropout", "residual_dropout"], 0.0
    ),
    **dict.fromkeys(
        ["mlp_dropout", "dropout_p", "emb_pdrop", "local_attention_probs_dropout_prob"], 0.0
    ),
    **dict.fromkeys(["lsh_attention_probs_dropout_prob", "attention_dropout_prob"], 0.0),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

# Each kind of layer that a family has by default is there. CHANGES adds those that only its checkpoints have.
LAYER_KINDS = {"layer_types", "mlp_layer_types"}

# What a family needs besides, or otherwise. None: leave the field as its class has it.
MAMBA2_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16}  # 128, the inner size
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention"]
MIXED = {"layer_types": SLIDING_AND_FULL}
WITH_WINDOW = MIXED | {"use_sliding_window": True}
CONV_AND_FULL = {"layer_types": ["conv", "full_attention", "conv"]}
LINEAR_AND_FULL = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DENSE_FIRST = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
GEMMA4_TEXT = {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": VOCABULARY}
GEMMA4_TEXT |= {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
GEMMA4_TEXT |= {"num_kv_shared_layers": 1, "global_head_dim": 32}
ASSISTANT = GEMMA4_TEXT | {
    "model_type": "gemma4_text",
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
LATENT = {"num_key_value_heads": 4}  # latent attention: as many as queries
DOTS3_TEXT = LATENT | {
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_qk_nope_head_dim": 16,
    "swa_qk_rope_head_dim": 8,
    "swa_head_dim": 24,
    "swa_v_head_dim": 16,
}
VISION = {"image_size": 28, "patch_size": 14}
CHANGES: dict[str, dict] = {
    **dict.fromkeys(
        ["axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"], LATENT
    ),
    **dict.fromkeys(["bailing_hybrid", "kimi_linear", "minicpm3", "sarvam_mla", "youtu"], LATENT),
    **dict.fromkeys(["dots1", "laguna", "mellum", "ministral"], MIXED),
    **dict.fromkeys(["qwen2", "qwen2_moe", "qwen3", "smollm3"], WITH_WINDOW),
    **dict.fromkeys(["lfm2", "lfm2_moe"], CONV_AND_FULL),
    **dict.fromkeys(["cohere2_moe", "inkling_text"], DENSE_FIRST),
    "bamba": MAMBA2_HEADS | {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 50,
        "patch_in_forward": False,
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
    },
    "cohere_compass_text": MIXED
    | {"rope_parameters": {"full_attention": None, "sliding_attention": DEFAULT_ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
        ]
    },
    "dots3_note": {
        "text_config": DOTS3_TEXT,
        "vision_config": {
            "mlp_layer_types": ["dense"] * LAYERS,
            "pyramid_num_routed": [-1] * LAYERS,
            "adapter_in_dim": 64,
            "adapter_out_dim": 64,
        },
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": DOTS3_TEXT,
    "falcon_h1": MAMBA2_HEADS | {"mamba_d_ssm": 128, "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9]},
    "fuyu": VISION | {"text_config": {"model_type": "persimmon"}},
    "gemma3": {
        "vision_config": VISION | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "mm_tokens_per_image": 4,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 1,
        "layer_types": SLIDING_AND_FULL,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4": {"text_config": GEMMA4_TEXT},
    "gemma4_text": GEMMA4_TEXT,
    "gemma4_assistant": {"text_config": ASSISTANT},
    "gemma4_unified": {"text_config": GEMMA4_TEXT, "vision_config": {"mm_embed_dim": 64}},
    "gemma4_unified_assistant": {"text_config": ASSISTANT},
    "glm_moe_dsa": LATENT | {"indexer_types": ["full", "shared", "full"]},
    "got_ocr2": {"text_config": {"model_type": "qwen2"} | WITH_WINDOW},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "granitemoehybrid": MAMBA2_HEADS | LINEAR_AND_FULL,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "longcat_flash": LATENT | {"head_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "minimax_m3_vl_text": DENSE_FIRST
    | {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    "moshi": {"audio_vocab_size": 64},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"} | WITH_WINDOW},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "qwen4_exp": {"text_config": {"indexer_compress_ratio": 4, "indexer_kv_heads": 1}},
    "qwen4_exp_text": {"indexer_compress_ratio": 4, "indexer_kv_heads": 1},
    "reformer": {"is_decoder": True, "axial_pos_shape": (8, 16), "axial_pos_embds_dim": (32, 32)},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": None,
        "attention_head_dim": None,
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding", "hybrid"]},
}

OVERWRITTEN = {"youtu"}  # from_pretrained initializes the embedding anew after it was loaded


def family_config(model_type: str) -> PretrainedConfig:
    """The tiny config of a type."""
    config_class = CONFIG_MAPPING[model_type]
    return config_class(**_sizes(config_class, CHANGES.get(model_type, {})))


def family_model(
    model_type: str, seed: int = 0, config: PretrainedConfig | None = None
) -> torch.nn.Module:
    """A model with seeded random weights in fp32, larger than usual so that its logits differ."""
    torch.manual_seed(seed)
    config = config or family_config(model_type)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def _default(config_class: type) -> PretrainedConfig | None:
    try:
        return config_class()
    except ValueError:  # it has no default
        return None


def _sizes(config_class: type, changes: dict) -> dict:
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: value for name, value in SIZES.items() if name in fields}
    for name, part in config_class.sub_configs.items():
        part_type = changes.get(name, {}).get("model_type") or getattr(part, "model_type", None)
        part = getattr(part, "config_class", part)
        if part is AutoConfig and part_type in CONFIG_MAPPING:
            part = CONFIG_MAPPING[part_type]
        if dataclasses.is_dataclass(part):
            sizes[name] = _sizes(part, {})
    for name in LAYER_KINDS & fields:
        kinds = list(dict.fromkeys(getattr(_default(config_class), name, None) or []))
        if len(kinds) > 1:
            sizes[name] = [kinds[i % len(kinds)] for i in range(LAYERS)]
    for name, value in changes.items():
        if isinstance(value, dict) and isinstance(sizes.get(name), dict):
            value = sizes[name] | value
        sizes[name] = value
    return {name: value for name, value in sizes.items() if value is not None}
