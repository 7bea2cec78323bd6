"""Options of what trains beside a frozen base: adapters (lora.py), and its quantization (quantize.py).

They stand apart from those two files, which import peft and bitsandbytes: 3 s and 85 MiB of each process.
"""

from dataclasses import dataclass, fields

from ..run.errors import check


@dataclass(frozen=True)
class Lora:
    """Fresh adapters of a rank, or those of a peft folder; it is false where neither is given. The fields
    have the names of the flags; peft's LoraConfig describes them
    (https://huggingface.co/docs/peft/package_reference/lora).
    """

    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_targets: str = "all-linear"
    lora_dropout: float = 0.0
    lora_init: str = "default"
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: str = ""
    adapter: str = ""  # peft folder to continue

    def __bool__(self) -> bool:
        return bool(self.lora_rank or self.adapter)

    def flags(self) -> dict[str, object]:
        """The options of fresh adapters, by flag."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "adapter"}

    def changed_flags(self) -> dict[str, object]:
        """Those of them that are not left at their defaults."""
        defaults = Lora().flags()
        return {flag: value for flag, value in self.flags().items() if value != defaults[flag]}


@dataclass(frozen=True)
class Quant:
    """How frozen weights are stored; it is false where they are not quantized."""

    quantization: str = "none"  # none, 8bit or 4bit
    int8_mode: str = "dequant"  # or llm_int8
    quantize_head: bool = False
    keep_experts_16bit: bool = False

    def __bool__(self) -> bool:
        return self.quantization != "none"

    def changed_flags(self) -> list[str]:
        """The options that are not left at their defaults, by flag, without the kind."""
        names = ("int8_mode", "quantize_head", "keep_experts_16bit")
        return [name for name in names if getattr(self, name) != getattr(Quant, name)]


def check_adapter_flags(lora: Lora, quant: Quant, param_dtype: str) -> None:
    """Raise ConfigError where flags of adapters or of a quantized base do not go together."""
    for given, flags, fix in (
        (lora, list(lora.changed_flags()), "lora_rank 16"),
        (quant, quant.changed_flags(), "quantization 8bit"),
    ):
        alone = ", ".join(f"--{name}" for name in flags)
        needed = fix.split()[0]
        check(given or not alone, f"{alone} without --{needed} changes nothing (fix: --{fix})")
    frozen = f"--quantization {quant.quantization} freezes the weights and --lora_rank is 0"
    check(lora or not quant, f"{frozen}: nothing would train (fix: --lora_rank 16)")
    plain = "--param_dtype bf16: with adapters what trains is fp32, and --dtype is what is frozen"
    check(not lora or param_dtype == "fp32", f"{plain} (fix: leave it out)")
