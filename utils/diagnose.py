"""Why a file cannot be read or a flag not be meant: imported only then, to say so in one line with the
remedy.
"""

import difflib
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path

from .errors import check, first_five

OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
# What transformers' Trainer calls our settings, for "did you mean".
TRAINER = {"learning_rate": "lr", "max_steps": "steps", "num_train_epochs": "epochs", "max_length": "seq_len",
           "per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "grad_accum",
           "model_name_or_path": "model", "max_grad_norm": "clip_norm"}  # fmt: skip


def did_you_mean(path: Path) -> str:
    """A neighbour of almost the same name, as "; did you mean X?"; else nothing."""
    names = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, set(names) - {path.name}, n=1)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def tokenizer_damage(files: list[Path], error: Exception) -> str:
    """One line that names the damaged file, as far as that can be told: transformers' errors name none."""
    for file in files:
        if what := impostor(file.read_bytes()[:100]):
            return f"{file}: {what}"
    if "trust_remote_code" in str(error):
        return f"{files[0].parent}: its tokenizer is Python code; read it, then add --trust_remote_code"
    names = ", ".join(file.name for file in files)
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return (
        f"{files[0].parent}: {names} cannot be read, cut short or damaged ({reason}); fetch the files again"
    )


def damage(file: Path) -> str:
    """Why safetensors refused the file; its own words name neither the file nor the sizes."""
    size = file.stat().st_size
    with open(file, "rb") as raw:
        start = raw.read(8)
        needed = 8 + int.from_bytes(start, "little")
        start += raw.read(min(needed, 10**8))
    try:
        tensors = json.loads(start[8:needed])
        needed += max(tensors[name]["data_offsets"][1] for name in tensors if name != "__metadata__")
    except (ValueError, TypeError, LookupError, RecursionError):
        if 8 <= size < needed <= 10**8:  # cut within the header
            return f"damaged: its header alone needs {needed} bytes, the file has {size}"
        return impostor(start) or f"not safetensors, in these {size} bytes"
    return f"damaged: its header asks for {needed} bytes, the file has {size}"


def impostor(start: bytes) -> str:
    """What a download often leaves in place of a file."""
    pointer = start.startswith(b"version https://git-lfs")
    page = start.lstrip()[:1] == b"<" and "an HTML page, not the file itself"
    return "a git-lfs pointer, not the file itself; try `git lfs pull`" if pointer else page or ""


def nothing_to_read(folder: Path) -> str:
    """Why a folder without safetensors cannot be used, and how to make one of it that can."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    other = [name for name in names if name.endswith(OTHER_FORMATS) and not name.startswith(NOT_WEIGHTS)]
    if not other:
        held = first_five(names) or "nothing"
        return f"{folder}: no model.safetensors and no index of one, but {held} (fix: another --model)"
    readable = {".bin": "", ".gguf": f', gguf_file="{other[0]}"'}
    fix = "another --model, or convert it with the tools of its format"
    if (suffix := Path(other[0]).suffix) in readable:
        load = f'from_pretrained("{folder}"{readable[suffix]})'
        save = f'save_pretrained("{folder}-safetensors")'
        both = "; ".join(f"t.{auto}.{load}.{save}" for auto in ("AutoModelForCausalLM", "AutoTokenizer"))
        fix = f"if you trust this one, convert it: python -c 'import transformers as t; {both}'"
    return f"{folder}: only {first_five(other)}: other formats than safetensors can run code (fix: {fix})"


def near_setting(name: str, kinds: dict, dashes: str = "") -> str:
    """What the user may have meant by an unknown name."""
    name = name.strip("-").replace("-", "_").lower()
    positive = re.sub("^no_?", "", name)
    if kinds.get(positive, (str,))[0] is bool:
        return f"did you mean {dashes}{positive} false?"
    names = {key: key for key in kinds} | {theirs: key for theirs, key in TRAINER.items() if key in kinds}
    near = difflib.get_close_matches(name, names, 1)
    return f"did you mean {dashes}{names[near[0]]}?" if near else "--help lists them all"


def check_packages(attn: str, optimizer: str, tensorboard: bool, wandb: bool, dtype: str, gpu: str) -> None:
    """Raise ConfigError when a package that was asked for is not installed, or cannot work in this dtype or
    without a GPU, whose name is `gpu`.
    """
    for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb)):
        spec = find_spec(name) if wanted else None
        # A folder named wandb, left by an earlier run, is found as well, but has no origin.
        check(not wanted or (spec and spec.origin), f"--{name} needs a package (fix: pip install {name})")
    if attn == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        where = f"--attn {attn} computes in 16 bit on GPUs, not in {dtype} on {gpu or 'the CPU'}"
        check(gpu and dtype != "fp32", f"{where} (fix: --attn sdpa)")
        fix = "(fix: pip install flash-attn)"
        check(is_flash_attn_2_available(), f"--attn {attn}: the package is missing {fix}")
    if optimizer != "adamw":
        from .optim_8bit import import_bitsandbytes

        import_bitsandbytes(optimizer)


def check_adapter_flags(cfg: dict, changed: list[str], lora: list[str]) -> None:
    """Raise ConfigError where flags of adapters or of a quantized base do not go together. changed: those
    that are not left at their defaults, of which `lora` are the adapter's.
    """
    adapted, quantized = cfg["lora_rank"] or cfg["adapter"], cfg["quantization"] != "none"
    for whose, there, fix in ((True, adapted, "lora_rank 16"), (False, quantized, "quantization 8bit")):
        alone = ", ".join(f"--{name}" for name in changed if (name in lora) == whose)
        check(there or not alone, f"{alone} without --{fix.split()[0]} changes nothing (fix: --{fix})")
    frozen = f"--quantization {cfg['quantization']} freezes the weights and --lora_rank is 0"
    check(adapted or not quantized, f"{frozen}: nothing would train (fix: --lora_rank 16)")
    plain = "--param_dtype bf16: with adapters what trains is fp32, and --dtype is what is frozen"
    check(not adapted or cfg["param_dtype"] == "fp32", f"{plain} (fix: leave it out)")
