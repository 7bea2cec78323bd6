"""Tiny vision-language models of fourteen families, as folders in the hub's layout, made without a network.

python tests/picture_families.py NAME FOLDER       writes one of them
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- 'PICTURE' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
# Contents in parts only, pictures first, as the templates of llava-hf write them.
LLAVA = """\
{%- for message in messages -%}
{{- message['role'].upper() + ': ' -}}
{%- for part in message['content'] if part['type'] == 'image' -%}{{- '<image>\\n' -}}{%- endfor -%}
{%- for part in message['content'] if part['type'] == 'text' -%}
{{- part['text'] + (eos_token if message['role'] == 'assistant' else ' ') -}}
{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT: ' -}}{%- endif -%}
"""
GEMMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] | trim -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<start_of_image>' -}}{%- else -%}
{{- part['text'] | trim -}}
{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<end_of_turn>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}
"""
SMOLVLM = """\
{{- '<|im_start|>' -}}
{%- for message in messages -%}
{{- message['role'] | capitalize -}}
{{- ':' if message['content'][0]['type'] == 'image' else ': ' -}}
{%- for part in message['content'] -%}
{%- if part['type'] == 'text' -%}{{- part['text'] -}}{%- else -%}{{- '<image>' -}}{%- endif -%}
{%- endfor -%}
{{- '<end_of_utterance>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' -}}{%- endif -%}
"""
MLLAMA = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' -}}
{%- if message['content'] is string -%}{{- message['content'] -}}{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}{{- '<|image|>' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
IM = {"bos": None, "eos": "<|im_end|>", "pad": "<|endoftext|>", "more": ["<|im_start|>"]}
QWEN_TOKENS = IM | {
    "more": ["<|im_start|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
}
QWEN_TEMPLATE = CHATML.replace("PICTURE", "<|vision_start|><|image_pad|><|vision_end|>")
HIDDEN = 64
TEXT = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
BLOCKS = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2}
QWEN3_VISION = BLOCKS | {
    "patch_size": 16,
    "out_hidden_size": HIDDEN,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
}
QWEN3_TEXT = TEXT | {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 14,
    "image_size": 56,
}
SQUARE = {"height": 56, "width": 56}
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}
GRIDS = [[56, 56], [56, 112], [112, 56], [112, 112]]

# model_type of the folder -> how it is made. tokens: special tokens; names: attributes of the tokenizer;
# ids: field of the config -> special token; image: class and settings of the image processor; processor: its
# class and settings.
FAMILIES: dict[str, dict] = {
    "qwen2_5_vl": {
        "tokens": QWEN_TOKENS,
        "template": QWEN_TEMPLATE,
        "ids": {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        },
        "text": TEXT | {"rope_parameters": MROPE},
        "vision": BLOCKS
        | {
            "patch_size": 14,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "out_hidden_size": HIDDEN,
        },
        "image": ("Qwen2VLImageProcessor", {"size": PIXELS, "patch_size": 14}),
        "processor": ("Qwen2_5_VLProcessor", {}),
    },
    "qwen3_vl": {
        "text": QWEN3_TEXT,
        "vision": QWEN3_VISION,
        "image": (
            "Qwen2VLImageProcessor",
            {
                "size": PIXELS,
                "patch_size": 16,
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
            },
        ),
        "processor": ("Qwen3VLProcessor", {}),
    },
    "qwen3_vl_moe": {
        "text": QWEN3_TEXT
        | {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2},
    },
    "llava": {
        "tokens": {"bos": "<s>", "eos": "</s>", "pad": "<pad>", "more": ["<image>"]},
        "template": LLAVA,
        "ids": {"image_token_index": "<image>"},
        "text": TEXT | {"model_type": "llama"},
        "vision": TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        "config": {"image_seq_length": 16},
        "image": ("CLIPImageProcessor", {"size": {"shortest_edge": 56}, "crop_size": SQUARE}),
        "processor": (
            "LlavaProcessor",
            {
                "patch_size": 14,
                "vision_feature_select_strategy": "default",
                "num_additional_image_tokens": 1,
            },
        ),
    },
    "llava_onevision": {
        "tokens": IM | {"more": ["<|im_start|>", "<image>", "<video>"]},
        "template": CHATML.replace("PICTURE", "<image>"),
        "ids": {"image_token_index": "<image>", "video_token_index": "<video>"},
        "text": TEXT | {"model_type": "qwen2"},
        "vision": TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "config": {"image_grid_pinpoints": GRIDS},
        "image": (
            "LlavaOnevisionImageProcessor",
            {"size": SQUARE, "image_grid_pinpoints": GRIDS},
        ),
        "processor": (
            "LlavaOnevisionProcessor",
            {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
        ),
    },
    "gemma3": {
        "tokens": {
            "bos": "<bos>",
            "eos": "<eos>",
            "pad": "<pad>",
            "more": [
                "<start_of_turn>",
                "<end_of_turn>",
                "<start_of_image>",
                "<end_of_image>",
                "<image_soft_token>",
            ],
        },
        "names": {
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
        "template": GEMMA,
        "ids": {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
        },
        "text": TEXT
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        "vision": TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False},
        "config": {"mm_tokens_per_image": 4},
        "image": ("Gemma3ImageProcessor", {"size": SQUARE}),
        "processor": ("Gemma3Processor", {"image_seq_length": 4}),
    },
    "smolvlm": {
        "tokens": {
            "bos": "<|im_start|>",
            "eos": "<end_of_utterance>",
            "pad": "<|im_end|>",
            "more": ["<fake_token_around_image>", "<image>", "<global-img>"]
            + [f"<row_{row}_col_{col}>" for row in range(1, 5) for col in range(1, 5)],
        },
        "names": {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        "template": SMOLVLM,
        "ids": {"image_token_id": "<image>"},
        "text": TEXT | {"model_type": "llama"},
        "vision": TOWER | {"model_type": "smolvlm_vision"},
        "config": {"scale_factor": 2},
        "image": (
            "SmolVLMImageProcessor",
            {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}},
        ),
        "processor": ("SmolVLMProcessor", {"image_seq_len": 4}),
    },
    "internvl": {
        "tokens": IM | {"more": ["<|im_start|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"]},
        "names": {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "template": CHATML.replace("PICTURE", "<IMG_CONTEXT>\\n"),
        "ids": {"image_token_id": "<IMG_CONTEXT>"},
        "text": TEXT | {"model_type": "qwen2"},
        "vision": TOWER | {"model_type": "internvl_vision"},
        "config": {"image_seq_length": 4, "downsample_ratio": 0.5},
        "image": (
            "GotOcr2ImageProcessor",
            {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        ),
        "processor": ("InternVLProcessor", {"image_seq_length": 4}),
    },
    "mllama": {
        "tokens": {
            "bos": "<|begin_of_text|>",
            "eos": "<|eot_id|>",
            "pad": "<|finetune_right_pad_id|>",
            "more": [
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|python_tag|>",
                "<|image|>",
            ],
        },
        "template": MLLAMA,
        "ids": {"image_token_index": "<|image|>"},
        "outside": 1,  # the picture's token has an embedding, and no logit
        "text": TEXT | {"num_hidden_layers": 3, "cross_attention_layers": [1]},
        "vision": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_global_layers": 1,
            "attention_heads": 2,
            "patch_size": 14,
            "image_size": 56,
            "max_num_tiles": 4,
            "intermediate_layers_indices": [0],
            "vision_output_dim": 64,
        },
        "image": ("MllamaImageProcessor", {"size": SQUARE, "max_image_tiles": 4}),
        "processor": ("MllamaProcessor", {}),
    },
    "minicpmv4_6": {
        "tokens": IM
        | {
            "more": ["<|im_start|>", "<|image_pad|>", "<|video_pad|>", "<image>", "</image>"]
            + ["<slice>", "</slice>", "<image_id>", "</image_id>"],
        },
        "names": {
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
            "image_start_token": "<image>",
            "image_end_token": "</image>",
            "slice_start_token": "<slice>",
            "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>",
            "image_id_end_token": "</image_id>",
        },
        "template": CHATML.replace("PICTURE", "<|image_pad|>"),
        "ids": {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"},
        "text": TEXT
        | {
            "model_type": "qwen3_5_text",
            "head_dim": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
            },
        },
        "vision": TOWER | {"image_size": 112, "model_type": "minicpmv4_6_vision"},
        "config": {"insert_layer_id": 0, "image_size": 112},
        "image": (
            "MiniCPMV4_6ImageProcessor",
            {"scale_resolution": 112, "patch_size": 14, "max_slice_nums": 4},
        ),
        "processor": ("MiniCPMV4_6Processor", {}),
    },
}
FAMILIES["qwen3_vl"] = FAMILIES["qwen2_5_vl"] | FAMILIES["qwen3_vl"]
FAMILIES["qwen3_vl_moe"] = FAMILIES["qwen3_vl"] | FAMILIES["qwen3_vl_moe"]
NAMES = tuple(FAMILIES)
SOUNDS = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"} | {
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "video_token": "<|video|>",
}
FAMILIES["gemma4"] = {  # its processor also takes sounds; it is slow, so only some tests have it
    "tokens": FAMILIES["gemma3"]["tokens"]
    | {"more": ["<start_of_turn>", "<end_of_turn>", *SOUNDS.values()]},
    "names": SOUNDS,
    "template": GEMMA.replace("<start_of_image>", "<|image|>"),
    "ids": {"image_token_id": "<|image|>"},
    "text": TEXT
    | {
        "model_type": "gemma4_text",
        "head_dim": 16,
        "global_head_dim": 16,
        "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 300,
        "num_kv_shared_layers": 0,
        "use_bidirectional_attention": "vision",
    },
    "vision": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 14,
        "position_embedding_size": 64,
        "pooling_kernel_size": 2,
    },
    "config": {"audio_config": None},
    "image": (
        "Gemma4ImageProcessor",
        {"patch_size": 14, "max_soft_tokens": 70, "pooling_kernel_size": 2},
    ),
    "processor": ("Gemma4Processor", {"image_seq_length": 70}),
}
FAMILIES["hunyuan_vl"] = {  # its processor wants tokens around a placeholder
    "tokens": IM | {"more": ["<|im_start|>", "<img>", "<img_start>", "<img_end>", "<img_line>"]},
    "names": {
        "image_token": "<img>",
        "image_start_token": "<img_start>",
        "image_end_token": "<img_end>",
        "image_newline_token": "<img_line>",
    },
    "template": CHATML.replace("PICTURE", "<img_start><img><img_end>"),
    "ids": {
        "image_token_id": "<img>",
        "im_start_id": "<img_start>",
        "im_end_id": "<img_end>",
        "im_newline_id": "<img_line>",
    },
    "text": TEXT
    | {
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [2, 2, 2, 2],
        },
    },
    "vision": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "patch_size": 16,
        "out_hidden_size": HIDDEN,
        "text_hidden_size": HIDDEN,
        "max_image_size": 128,
        "min_image_size": 32,
    },
    "image": (
        "HunYuanVLImageProcessor",
        {
            "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
            "patch_size": 16,
            "merge_size": 2,
            "temporal_patch_size": 1,
        },
    ),
    "processor": ("HunYuanVLProcessor", {}),
}
OVIS_PLACES = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
FAMILIES["ovis2"] = {  # its processor makes the tokens of a picture from a tensor alone
    "tokens": IM | {"more": ["<|im_start|>", "<image>", "<IMG_ATOM>", *OVIS_PLACES]},
    "template": CHATML.replace("PICTURE", "<image>\\n"),
    "ids": {"image_token_id": "<IMG_ATOM>"},
    "text": TEXT | {"model_type": "qwen2"},
    "vision": TOWER | {"hidden_stride": 2, "vocab_size": 40, "num_visual_indicator_tokens": 5},
    # 258: bytes, pad and eos; then the tokens above
    "config": {"hidden_size": HIDDEN, "visual_indicator_token_ids": [*range(261, 266)]},
    "image": (
        "Ovis2ImageProcessor",
        {"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
    ),
    "processor": ("Ovis2Processor", {"image_seq_length": 4}),
}
ERNIE = {
    "image_start_token": "<|IMAGE_START|>",
    "image_token": "<|IMAGE_PLACEHOLDER|>",
    "image_end_token": "<|IMAGE_END|>",
    "video_start_token": "<|VIDEO_START|>",
    "video_token": "<|VIDEO_PLACEHOLDER|>",
    "video_end_token": "<|VIDEO_END|>",
}
FAMILIES["ernie4_5_vl_moe"] = {  # experts of its own for pictures and the tokens around them
    "original": False,  # the hub's layout is not read in slices
    "tokens": IM | {"more": ["<|im_start|>", *ERNIE.values()]},
    "names": ERNIE,
    "template": CHATML.replace("PICTURE", "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>"),
    "ids": {f"{name}_id": token for name, token in ERNIE.items()},
    "text": TEXT
    | {
        "moe_intermediate_size": [48, 32],
        "moe_num_experts": 4,
        "moe_k": 2,
        "rope_parameters": MROPE | {"mrope_section": [3, 3, 2]},
    },
    "vision": BLOCKS | {"patch_size": 14},
    "image": ("Ernie4_5_VLMoeImageProcessor", {"size": PIXELS, "patch_size": 14}),
    "processor": ("Ernie4_5_VLMoeProcessor", {}),
}
# that only some tests have; in transformers 5.21 the processor of the second needs torchvision
MORE = ("gemma4",)
if transformers.__version__ >= "5.24":
    MORE += ("hunyuan_vl", "ovis2", "ernie4_5_vl_moe")


def family_folder(name: str, folder: Path) -> Path:
    """Write FOLDER/NAME: config, tokenizer, processor and random weights of a tiny model of a family; always
    the same.
    """
    made, folder = FAMILIES[name], Path(folder, name)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(made["tokens"], made.get("names", {}))
    tokenizer.chat_template = made["template"]
    tokenizer.save_pretrained(folder)
    ids = {key: tokenizer.convert_tokens_to_ids(token) for key, token in made["ids"].items()}
    known = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "vocab_size": len(tokenizer) - made.get("outside", 0),
    }
    config = CONFIG_MAPPING[name](
        text_config=made["text"] | known,
        vision_config=made["vision"],
        **ids,
        **made.get("config", {}),
    )
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():  # gates and tables of zeros would hide a tower
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder, save_original_format=made.get("original", True))
    kind, settings = made["image"]
    image = settings | {"image_processor_type": kind}
    processor, settings = made["processor"]
    image["processor_class"] = processor
    (folder / "preprocessor_config.json").write_text(json.dumps(image, indent=2))
    words = settings | {"processor_class": processor}
    (folder / "processor_config.json").write_text(json.dumps(words, indent=2))
    return folder


def byte_tokenizer(tokens: dict, names: dict) -> PreTrainedTokenizerFast:
    """A token for each byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: i for i, word in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [tokens[key] for key in ("pad", "bos", "eos") if tokens[key]]
    tokenizer.add_special_tokens([*special, *tokens["more"]])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens["bos"],
        eos_token=tokens["eos"],
        pad_token=tokens["pad"],
        extra_special_tokens=names,
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    print(family_folder(sys.argv[1], Path(sys.argv[2])))
