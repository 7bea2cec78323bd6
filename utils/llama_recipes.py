"""llama-recipes' flags in our words, so that its users keep their command.

One table, read by parse_cli when a command line holds a flag that the recipe lacks. It covers the configs for
training, fsdp, peft, quantization, wandb and data sets of llama-recipes (now llama-cookbook), also in their
long form: --fsdp_config.pure_bf16.
"""

import re
import typing

from .errors import ConfigError, check
from .fields import SWITCH

DATA = "dataset, eval_dataset and eval_share name the rows"
LORA = "--lora_rank 8 --lora_alpha 32 --lora_targets q_proj,v_proj --lora_dropout 0.05"
RECOMPUTE = {"true": "--activation_checkpointing full", "false": ""}
HYBRID = "replicate sets hybrid sharding: the number of copies of the model"
STRATEGIES = {"full_shard": "", "shard_grad_op": "--reshard_after_forward false", "hybrid_shard": HYBRID}
METRICS = "metrics.jsonl always has it"

# Their flag and what it is here. "--x": our name for it. {value: "--x y"}: our flags for that value, where ""
# is what happens anyway and another value is refused. Anything else: no meaning here, and why.
LLAMA_RECIPES: dict[str, str | dict[str, str]] = {
    "model_name": "--model",
    "tokenizer_name": "--tokenizer",
    "enable_fsdp": "every run is sharded",
    "one_gpu": "python in place of torchrun starts one process",
    "num_epochs": "--epochs",
    "max_train_step": "--steps (optimizer steps)",
    "batch_size_training": "--batch_size",
    "gradient_accumulation_steps": "--grad_accum",
    "context_length": "--seq_len",
    "batching_strategy": {"padding": "", "packing": "--packing"},
    "num_workers_dataloader": "rows are tokenized before the first step",
    "val_batch_size": "the held-out loss uses batch_size",
    "max_eval_step": "the held-out loss reads every held-out row",
    **dict.fromkeys(("run_validation", "data_path", "dataset_path", "file"), DATA),
    **dict.fromkeys(("train_split", "test_split", "val_quantity"), DATA),
    "gamma": "the learning rate follows schedule",
    "gradient_clipping": {"true": "", "false": "--clip_norm 0"},
    "gradient_clipping_threshold": "--clip_norm",
    "optimizer": {"adamw": ""},
    **dict.fromkeys(("freeze_layers", "freeze_LLM_only", "inference_mode"), {"false": ""}),
    "num_freeze_layers": "no layer is frozen",
    "mixed_precision": {"true": "", "false": "--dtype fp32"},
    "use_fp16": {"true": "--dtype fp16", "false": ""},
    "pure_bf16": {"true": "--param_dtype bf16", "false": ""},
    "use_fast_kernels": {"true": "--attn sdpa", "false": ""},
    "fsdp_cpu_offload": {"true": "--cpu_offload", "false": ""},
    **dict.fromkeys(("fsdp_activation_checkpointing", "enable_activation_checkpointing"), RECOMPUTE),
    "activation_checkpointing_use_reentrant": "recomputing is never reentrant",
    "sharding_strategy": STRATEGIES,
    "hsdp": {"true": HYBRID, "false": ""},
    "sharding_group_size": "--shard",
    "replica_group_size": "--replicate",
    "quantization": {"true": "--quantization", "8bit": "--quantization", "4bit": "--quantization 4bit"},
    "quant_type": {"int8": "--quantization 8bit", "int4": "--quantization 4bit"},
    **dict.fromkeys(("compute_dtype", "use_double_quant", "quant_storage"), "the quantized format is fixed"),
    "use_peft": {"true": LORA, "false": ""},
    "peft_method": {"lora": ""},
    "from_peft_checkpoint": "--adapter",
    "r": "--lora_rank",
    **{name: f"--{name}" for name in ("lora_alpha", "lora_dropout")},
    "target_modules": "--lora_targets",
    "bias": {"none": ""},
    "task_type": {"causal_lm": ""},
    **dict.fromkeys(("adapter_len", "adapter_layers", "num_virtual_tokens"), "LoRA is the only adapter"),
    "checkpoint_type": "checkpoints are sharded and load on any number of ranks",
    "save_optimizer": "every checkpoint holds the optimizer",
    **dict.fromkeys(("dist_checkpoint_root_folder", "dist_checkpoint_folder"), "output_dir holds them"),
    **dict.fromkeys(("save_metrics", "enable_memory_monitoring", "memory_monitoring_interval"), METRICS),
    **dict.fromkeys(("flop_counter", "flop_counter_start"), "the console line has the MFU"),
    "use_profiler": {"true": "--profile", "false": ""},
    "profiler_dir": "traces go to OUT/profile",
    "use_wandb": "--wandb",
    **{word: f"set WANDB_{word.upper()}" for word in ("project", "entity", "job_type", "tags")},
    **{word: f"set WANDB_{word.upper()}" for word in ("notes", "mode", "name")},
    "group": "set WANDB_RUN_GROUP",
}


def translate(name: str, text: str | None, kinds: dict) -> tuple[dict, dict, str]:
    """(settings, implied, note) for one of their flags, as parse_cli wants them; no note if it is not theirs.

    kinds: our setting -> (type, ...). Raises ConfigError where the recipe cannot do what the flag says.
    """
    flag, short = f"--{name}", re.sub(r"^\w+_(config|dataset)\.", "", name)
    ours = f"--{short}" if short in kinds else LLAMA_RECIPES.get(short, "")
    if isinstance(ours, dict):
        value = (text or "true").rpartition(".")[2].lower()  # also ShardingStrategy.FULL_SHARD
        value = str(SWITCH.get(value, value)).lower()
        flag += "" if text is None else f" {value}"
        check(value in ours, f"{flag} is not possible here: leave it out, or write {' or '.join(ours)}")
        ours, text = ours[value] or "what happens", None
    settings = {key: value or text for key, value in re.findall(r"--(\w+)(?: ([\w.,]+))?", ours)}
    for key, value in settings.items():
        choices = typing.get_args(kinds[key][0]) if key in kinds else ()
        if key not in kinds or (choices and value not in (None, text, *choices)):
            raise ConfigError(f"{flag} needs --{key}, which is not here yet (fix: leave it out)")
    if not ours.startswith(("--", "what")):
        return {}, {}, ours and f"{flag} has no meaning here: {ours}"
    implied = settings if short == "use_peft" else {}
    return ({} if implied else settings), implied, f"{flag} is {ours} here"
