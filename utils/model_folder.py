"""The Hugging Face folder before it is read: config, names and headers, checked.

A folder from the internet is input like any other. Nothing outside it is opened, nothing in it is executed,
no tensor byte is read; and what transformers passes over in silence (missing weights, paths that lead
elsewhere) is refused in one line that names the file.
"""

import hashlib
import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as DTYPES  # {"BF16": torch.bfloat16, ...}

from .distributed import World, gather
from .errors import ConfigError, check, first_five

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RUNS_CODE = ("auto_map", "trust_remote_code", "_attn_implementation_internal")
# What decides how much is allocated; the limits are far above any model there is.
COUNTS, MAX_COUNT = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 10_000
SIZES, MAX_SIZE = ("vocab_size", "hidden_size", "intermediate_size", "head_dim"), 100_000_000
COSMETIC = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
AGAIN = "(fix: download the folder again)"


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says about one tensor; its bytes start at `begin` of the file, row-major."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def find_model(name: str, world: World, trust_remote_code: bool = False) -> Path:
    """A folder as it is; anything else is a Hugging Face id, fetched once per machine. All ranks call it."""
    if all(gather(world, Path(name).is_dir())):
        return Path(name)
    from .hub import fetch_model

    return fetch_model(name, world, trust_remote_code)


def open_weights(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder by its name in the checkpoint, from the headers alone.

    Raises ConfigError naming the file: no safetensors; a file that is missing, damaged or outside the folder;
    an index that does not agree with its files.
    """
    folder = Path(folder)
    single, index = folder / SINGLE, folder / INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(single):
            from .diagnose import nothing_to_read

            raise ConfigError(nothing_to_read(folder))
        return _read_header(file_inside(folder, SINGLE))

    names = read_json(file_inside(folder, INDEX)).get("weight_map")
    good = names and isinstance(names, dict) and all(isinstance(file, str) for file in names.values())
    check(good, f"{index}: no weight_map from names of tensors to names of files {AGAIN}")
    shards = sorted(set(names.values()))
    both = SINGLE not in shards and os.path.lexists(single)
    check(not both, f"{folder}: {SINGLE} and {INDEX} are two models (fix: remove the one that is not meant)")
    files = [file_inside(folder, shard) for shard in shards]  # all of them, before the first is opened

    found: dict[str, TensorInfo] = {}
    twice: list[str] = []
    for file in files:
        header = _read_header(file)
        twice += found.keys() & header.keys()
        found |= header
    lost = [name for name in names if name not in found or found[name].file != folder / names[name]]
    extra = [name for name in found if name not in names]
    check(not twice, f"{index}: two of its files hold {first_five(twice)} {AGAIN}")
    check(not lost, f"{index}: not in the file that it names: {first_five(lost)} {AGAIN}")
    check(not extra, f"{index}: its files hold what it does not name: {first_five(extra)} {AGAIN}")
    return found


def file_inside(folder: Path, name: str) -> Path:
    """folder/name, if that is a regular file within the folder. Opens nothing: a pipe would wait forever.

    In the Hugging Face cache, files in models--x--y/snapshots/<revision> link to models--x--y/blobs: inside.
    """
    name = name.replace("\0", "\\0")
    root = Path(os.path.realpath(folder))
    real = Path(os.path.realpath(root / name))
    cached = root.parent.name == "snapshots" and real.is_relative_to(root.parent.parent / "blobs")
    written = not os.path.isabs(name) and Path(os.path.normpath(root / name)).is_relative_to(root)
    inside = written and (cached or real.is_relative_to(root))
    check(inside, f"{folder}: {name!r} leads out of the folder, and was not opened (fix: a copy inside it)")
    check(real.is_file(), f"{folder}: {name} is missing, or not a regular file {AGAIN}")
    return Path(folder) / name


def read_json(file: Path) -> dict:
    """The object in a JSON file."""
    try:
        text = file.read_bytes()
        value = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        from .diagnose import impostor

        raise ConfigError(f"{file}: {impostor(text) or f'not JSON: {error}'[:100]} {AGAIN}") from None
    check(isinstance(value, dict), f"{file}: expected a JSON object, got a {type(value).__name__} {AGAIN}")
    return value


def check_model_config(folder: Path, trust_remote_code: bool = False) -> None:
    """Refuse a config.json that transformers would choke on, ask a question about, or run code for.

    Comes before transformers sees the folder. Raises ConfigError naming the file and the field.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

    file = file_inside(folder, "config.json")
    config = read_json(file)
    for section in filter(lambda part: isinstance(part, dict), (config, config.get("text_config"))):
        for field in RUNS_CODE if not trust_remote_code else ():
            fix = "--trust_remote_code if you have read it, or remove the field if transformers has the model"
            check(not section.get(field), f"{file}: {field}: the folder would run its code (fix: {fix})")
        for field in ("quantization_config", "compression_config"):
            how = section.get(field)
            how = how.get("quant_method", "unnamed") if isinstance(how, dict) else how
            fix = "the model before quantization"
            check(not how, f"{file}: {field}: {how} weights cannot be trained (fix: {fix})")
        _check_sizes(file, section)
    kind = config.get("model_type")
    known = config.get("auto_map") or str(kind) in MODELS
    what = f"transformers has no causal language model {kind!r}"
    check(known, f"{file}: model_type: {what} (fix: another --model, or a newer transformers)")


def run_facts(config, weights: dict[str, TensorInfo], data: str) -> dict:
    """What makes a run this one, as JSON: the fingerprint of its data, the fields of the transformers config
    that say what the model computes, and "weights", a SHA-256.

    That is over name, dtype, shape and up to 4 KiB from the middle of each tensor: another fine-tune of the
    same model has another one, and no file is read whole.
    """
    digest = hashlib.sha256()
    for name, info in sorted(weights.items()):
        size = math.prod(info.shape) * info.dtype.itemsize
        digest.update(f"{name} {info.dtype} {info.shape}".encode())
        with open(info.file, "rb", buffering=0) as file:
            digest.update(os.pread(file.fileno(), min(size, 4096), info.begin + max(0, size - 4096) // 2))
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    fields = {f"config.{k}": v for k, v in fields.items() if k not in COSMETIC and not k.startswith("_")}
    return {"data": data, "weights": digest.hexdigest(), **fields}


def check_vocab(tokens: int, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the embedding does not have. Fewer is fine: rows are often padded."""
    fix = "(fix: the tokenizer that came with the model)"
    check(tokens <= vocab_size, f"the tokenizer has {tokens} tokens, the model {vocab_size} {fix}")


def _check_sizes(file: Path, section: dict) -> None:
    for name in (*COUNTS, *SIZES):
        limit = MAX_COUNT if name in COUNTS else MAX_SIZE
        value = section.get(name)
        for size in value if isinstance(value, list) else [value]:  # some models size each layer
            good = size is None or (type(size) is int and 0 < size <= limit)
            check(good, f"{file}: {name}: {str(size)[:40]} is not a whole number up to {limit} {AGAIN}")
    fields = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    hidden, heads, shared = (n if isinstance(n := section.get(field), int) else 0 for field in fields)
    fits = not heads or hidden % heads == 0 or any("head_dim" in name and section[name] for name in section)
    check(fits, f"{file}: hidden_size: {hidden} is no multiple of {heads} attention heads {AGAIN}")
    fits = not heads or not shared or heads % shared == 0
    check(fits, f"{file}: num_attention_heads: {heads} is no multiple of {shared} key-value heads {AGAIN}")


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with suppress(RuntimeError), safe_open(file, framework="pt"):  # it fits its file
            pass  # RuntimeError: a file larger than memory, which safetensors would map whole
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
            header.pop("__metadata__", None)
            end = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            whole = os.fstat(opened.fileno()).st_size == end
    except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
        from .diagnose import damage

        what = error.strerror or error if isinstance(error, OSError) else damage(file)
        raise ConfigError(f"{file}: {what} {AGAIN}") from None
    check(whole, f"{file}: cut short, or longer than its header says {AGAIN}")
    odd = [f"{name} ({entry['dtype']})" for name, entry in header.items() if entry["dtype"] not in DTYPES]
    check(not odd, f"{file}: dtypes that torch does not have: {first_five(odd)} (fix: another --model)")
    entries = ((n, DTYPES[e["dtype"]], tuple(e["shape"]), e["data_offsets"][0]) for n, e in header.items())
    return {name: TensorInfo(file, dtype, shape, 8 + size + at) for name, dtype, shape, at in entries}
