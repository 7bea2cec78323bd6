"""Options of adapters (lora.py) and of the quantization of their frozen base (quantize.py).

They have a file of their own because those two import peft and bitsandbytes: 3 s and 85 MiB of each process.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from ..run.errors import check
from ..run.settings import from_settings
from .folder import read_json

SHARDS_INTEGERS = torch.__version__ >= "2.12"  # FSDP2 does


@dataclass(frozen=True)
class Lora:
    """Options of fresh adapters, or a peft folder to continue. It is false if neither lora_rank nor adapter
    is given. The fields have the names of the flags; peft's LoraConfig describes them
    (https://huggingface.co/docs/peft/package_reference/lora).
    """

    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: str = "all-linear"
    lora_dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: str = ""
    adapter: str = ""  # peft folder to continue

    def __bool__(self) -> bool:
        return bool(self.lora_rank or self.adapter)

    def facts(self) -> dict:
        """What determines the adapters: the options by flag, and the settings of the folder to continue."""
        settings = self.adapter and read_json(Path(self.adapter, "adapter_config.json"))
        return vars(self) | {"adapter": settings}


@dataclass(frozen=True)
class Quant:
    """How frozen weights are stored. It is false if they are not quantized."""

    quantization: str = "none"  # none, 8bit or 4bit
    int8_mode: str = "dequant"  # or llm_int8
    quantize_head: bool = False
    keep_experts_16bit: bool = False

    def __bool__(self) -> bool:
        return self.quantization != "none"


def changed_flags(options: Lora | Quant) -> str:
    """The flags that differ from their defaults, without --adapter."""
    return ", ".join(
        f"--{name}"
        for name, value in vars(options).items()
        if name != "adapter" and value != getattr(type(options), name)
    )


def check_adapter_flags(cfg: object) -> None:
    """Raise ConfigError if flags of adapters or of a quantized base do not fit together."""
    lora = from_settings(Lora, cfg)
    quant = from_settings(Quant, cfg)
    changed = changed_flags(lora)
    check(
        lora or not changed, f"{changed} without --lora_rank changes nothing (fix: --lora_rank 16)"
    )
    changed = changed_flags(quant)
    check(
        quant or not changed,
        f"{changed} without --quantization changes nothing (fix: --quantization 8bit)",
    )
    check(
        lora or not quant,
        f"--quantization {quant.quantization} freezes the weights and --lora_rank is 0: nothing would train"
        " (fix: --lora_rank 16)",
    )
    check(
        not quant or SHARDS_INTEGERS,
        f"--quantization: FSDP2 of torch {torch.__version__} shards no integers"
        " (fix: pip install 'torch>=2.12')",
    )
    check(
        quant.quantization != "4bit" or quant.int8_mode == "dequant",
        "--int8_mode llm_int8 is of --quantization 8bit (fix: leave it out)",
    )
    check(
        not lora or cfg.param_dtype == "fp32",
        "--param_dtype bf16: with adapters what trains is fp32, and --dtype is what is frozen"
        " (fix: leave it out)",
    )
