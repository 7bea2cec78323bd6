"""The Hugging Face folder before it is read: config, names and headers, checked.

A folder from the internet is input like any other. Nothing outside it is opened, nothing in it is executed, no
tensor byte is read; and what transformers passes over in silence (missing weights, paths that leave the folder)
is refused in one line that names the file.
"""

import difflib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as DTYPES  # {"BF16": torch.bfloat16, ...}

from .errors import ConfigError, check

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
CODE = (
    "auto_map",
    "trust_remote_code",
    "_attn_implementation_internal",
)  # fields that make a loader run code
# What decides how much is allocated. The limits are far above any model there is.
COUNTS, MAX_COUNT = (
    ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "n_layer", "n_head"),
    10_000,
)
SIZES, MAX_SIZE = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "n_embd"), 100_000_000
AGAIN = "(fix: download the folder again)"


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says about one tensor."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]


def open_weights(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder by its name in the checkpoint, from the headers alone.

    Raises ConfigError naming the file: no safetensors; a file that is missing, damaged or outside the folder; an
    index that does not agree with its files.
    """
    folder = Path(folder)
    single, index = folder / SINGLE, folder / INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(single):
            raise ConfigError(_nothing_to_read(folder))
        return _read_header(file_inside(folder, SINGLE))

    weight_map = read_json(file_inside(folder, INDEX)).get("weight_map")
    good = (
        isinstance(weight_map, dict) and weight_map and all(isinstance(f, str) for f in weight_map.values())
    )
    check(good, f"{index}: no weight_map from names of tensors to names of files {AGAIN}")
    shards = sorted(set(weight_map.values()))
    both = SINGLE not in shards and os.path.lexists(single)
    check(not both, f"{folder}: {SINGLE} and {INDEX} are two models: which is it? (fix: remove one of them)")

    found: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for file in [
        file_inside(folder, shard) for shard in shards
    ]:  # all are checked before the first is opened
        header = _read_header(file)
        twice += found.keys() & header.keys()
        found |= header
    lost = [
        name for name, shard in weight_map.items() if name not in found or found[name].file != folder / shard
    ]
    unknown = [name for name in found if name not in weight_map]
    wrong = {
        "that two of its files hold": twice,
        "not in the file it names": lost,
        "it does not name": unknown,
    }
    for what, names in wrong.items():
        check(not names, f"{index}: tensors {what}: {first_five(names)} {AGAIN}")
    return found


def file_inside(folder: Path, name: str) -> Path:
    """folder/name, if that is a regular file within the folder. Opens nothing: a pipe would wait forever.

    In the Hugging Face cache, models--x--y/snapshots/<revision>/ links to models--x--y/blobs/: that is inside.
    """
    root = Path(os.path.realpath(folder))
    repo = root.parent.parent
    cached = root.parent.name == "snapshots" and repo.name.startswith("models--")
    inside = "\0" not in name and not os.path.isabs(name)
    inside = inside and Path(os.path.normpath(root / name)).is_relative_to(root)
    real = Path(os.path.realpath(root / name)) if inside else root
    inside = inside and (real.is_relative_to(root) or (cached and real.is_relative_to(repo / "blobs")))
    check(
        inside,
        f"{folder}: {name!r} leads out of the folder, and was not opened (fix: copy that file into it)",
    )
    check(os.path.lexists(real), f"{folder}: {name} is missing {AGAIN}")
    check(real.is_file(), f"{folder}: {name} is not a regular file {AGAIN}")
    return Path(folder) / name


def read_json(file: Path) -> dict:
    """The object in a JSON file."""
    try:
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        what = _impostor(file.read_bytes()) or f"not JSON: {str(error)[:100]}"
        raise ConfigError(f"{file}: {what} {AGAIN}") from None
    check(isinstance(value, dict), f"{file}: expected a JSON object, got a {type(value).__name__} {AGAIN}")
    return value


def first_five(names: list[str]) -> str:
    """The first five names, and how many more."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def check_model_config(folder: Path, trust_remote_code: bool = False) -> None:
    """Refuse a config.json that transformers would choke on, ask a question about, or run code for.

    Comes before transformers sees the folder. Raises ConfigError naming the file and the field.
    """
    file = file_inside(folder, "config.json")
    config = read_json(file)
    for section in (config, config.get("text_config")):
        if not isinstance(section, dict):
            continue
        code = "" if trust_remote_code else next((key for key in CODE if section.get(key)), "")
        fix = "--trust_remote_code, once you have read it; or delete the field, if transformers has the model itself"
        check(not code, f"{file}: {code}: the folder wants its own code to run (fix: {fix})")
        quantized = section.get("quantization_config") or section.get("compression_config")
        method = quantized.get("quant_method", "unnamed") if isinstance(quantized, dict) else quantized
        fix = "the model that it was made from"
        check(
            not quantized,
            f"{file}: quantization_config: {method} weights cannot be trained from (fix: {fix})",
        )
        _check_sizes(file, section)
    if not config.get("auto_map"):
        _check_model_type(file, config.get("model_type"))


def check_vocab(tokens: int, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the embedding does not have. Fewer is fine: rows are often padded."""
    fix = "the tokenizer that came with the model"
    check(
        tokens <= vocab_size,
        f"the tokenizer has {tokens} tokens, the model's vocabulary {vocab_size} (fix: {fix})",
    )


def _check_model_type(file: Path, model_type: object) -> None:
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

    near = "".join(f"did you mean {name}? " for name in difflib.get_close_matches(str(model_type), CAUSAL, 1))
    known = isinstance(model_type, str) and model_type in CONFIG_MAPPING
    fix = f"{near}or a transformers newer than {__version__}"
    check(known, f"{file}: model_type: transformers does not know {model_type!r} (fix: {fix})")
    check(
        model_type in CAUSAL,
        f"{file}: model_type: {model_type!r} is no causal language model (fix: another --model)",
    )


def _check_sizes(file: Path, section: dict) -> None:
    for name in (*COUNTS, *SIZES):
        limit = MAX_COUNT if name in COUNTS else MAX_SIZE
        value = section.get(name)
        for size in value if isinstance(value, list) else [value]:  # some models size each layer
            good = size is None or (type(size) is int and 0 < size <= limit)
            check(
                good,
                f"{file}: {name}: expected a whole number from 1 to {limit}, got {str(size)[:40]} {AGAIN}",
            )
    given = (
        section.get("hidden_size") or section.get("n_embd"),
        section.get("num_attention_heads") or section.get("n_head"),
    )
    hidden, heads, shared = (
        n if isinstance(n, int) else 0 for n in (*given, section.get("num_key_value_heads"))
    )
    head_dim = any("head_dim" in name and section[name] for name in section)
    fits = head_dim or not heads or hidden % heads == 0
    check(fits, f"{file}: hidden_size: {hidden} is no multiple of the {heads} attention heads {AGAIN}")
    fits = not heads or not shared or heads % shared == 0
    check(
        fits, f"{file}: num_attention_heads: {heads} is no multiple of num_key_value_heads {shared} {AGAIN}"
    )


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with safe_open(file, framework="pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it is not a dict
            found = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        what = _damage(file) if isinstance(error, SafetensorError) else error.strerror or error
        raise ConfigError(f"{file}: {what} {AGAIN}") from None
    odd = [f"{name} ({code})" for name, (code, _) in found.items() if code not in DTYPES]
    check(not odd, f"{file}: dtypes that torch does not have: {first_five(odd)} (fix: another --model)")
    return {name: TensorInfo(file, DTYPES[code], shape) for name, (code, shape) in found.items()}


def _damage(file: Path) -> str:
    """Why safetensors refused the file; its own words name neither the file nor the sizes."""
    size = file.stat().st_size
    with open(file, "rb") as raw:
        length = raw.read(8)
        needed = 8 + int.from_bytes(length, "little")
        header = raw.read(min(needed, 100_000_000) - 8)  # the format's limit
    try:
        needed += max(
            entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"
        )
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        if size == 0 or size >= needed or needed > 100_000_000:
            return _impostor(length + header) or f"no safetensors header in these {size} bytes"
    return f"damaged: its header asks for {needed} bytes, the file has {size}"


def _impostor(start: bytes) -> str:
    """What a download often leaves in place of a file."""
    if start.startswith(b"version https://git-lfs"):
        return "a git-lfs pointer, not the file itself; try `git lfs pull`"
    return "an HTML page, not the file itself" if start.lstrip()[:1] == b"<" else ""


def _nothing_to_read(folder: Path) -> str:
    """Why a folder without safetensors cannot be used, and how to make one of it that can."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    other = [name for name in names if name.endswith(OTHER_FORMATS) and not name.startswith(NOT_WEIGHTS)]
    if not other:
        return f"{folder}: neither {SINGLE} nor {INDEX}; it holds {first_five(names) or 'nothing'} (fix: another --model)"
    fix = "transformers 4 can convert it, or another --model"
    if not other[0].endswith((".h5", ".msgpack")):
        gguf = f', gguf_file="{other[0]}"' if other[0].endswith(".gguf") else ""
        convert = f'auto.from_pretrained("{folder}"{gguf}).save_pretrained("{folder}-safetensors")'
        each = "for auto in (t.AutoModelForCausalLM, t.AutoTokenizer)"
        fix = f"if you trust that file, convert it: python -c 'import transformers as t; [{convert} {each}]'"
    return f"{folder}: only safetensors is read, since others can run code, and this is {first_five(other)} (fix: {fix})"
