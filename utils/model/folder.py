"""The Hugging Face folder before it is read: config, names and headers, checked.

A folder from the internet is input like any other. Nothing outside it is opened, nothing in it is executed,
no tensor byte is read; and what transformers passes over in silence (missing weights, paths that lead
elsewhere) is refused in one line that names the file.
"""

import hashlib
import json
import math
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as DTYPES  # {"BF16": torch.bfloat16, ...}

from ..run.distributed import World, gather, together
from ..run.errors import ConfigError, check, first_five, others_code
from ..run.files import (
    AGAIN,
    CONFIG_BYTES,
    INDEX_BYTES,
    file_inside,
    impostor,
    read_small_json,
)
from .hub import fetch_model
from .verify import check_hashes

OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
RUNS_CODE = ("auto_map", "trust_remote_code", "_attn_implementation_internal")
# What decides how much is allocated, and how long it takes; the limits are far above any model there is.
# Families have names of their own for these (n_layer, d_model): their config class translates them.
LIMITS = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "head_dim"), 100_000_000)
LIMITS |= dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 10_000) | {
    "num_hidden_layers": 1_000
}
# Other counts of modules, by the ends of their names; zero is a value that some have.
MODULES = re.compile(r"(?:^|_)(layers?|blocks|depth|stages)$|^n_(layer|block|head)s?$")
EXPERTS = re.compile(r"(^|_)(num|n)_.*experts?$|_experts?_num$")
MOST_MODULES, MOST_EXPERTS, MOST_POSITIONS, MOST_LABELS = 1_000, 10_000, 1_000_000_000, 100_000
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
HEADER_BYTES, HEADER_VALUES, INDEX_VALUES = 100_000_000, 4_000_000, 2_000_000
COSMETIC = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")
COMPANIONS = (
    "*.py",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
    "*processor_config.json",
)  # a save takes them along

# What transformers lists as causal language models, and what cannot be trained as one: tests/test_families.py
# finds the reasons again in tiny models.
ENCODERS = """bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert rembert
roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod""".split()
SEQ2SEQ = """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr
whisper""".split()
NOT_CAUSAL = {
    **dict.fromkeys(ENCODERS, "an encoder: its tokens see those that come after them"),
    **dict.fromkeys(SEQ2SEQ, "the decoder of an encoder and a decoder: its loss is another one"),
    **dict.fromkeys(["musicgen", "musicgen_melody"], "a model of sounds"),
    **dict.fromkeys(
        ["emu3", "git", "mllama"], "a model of pictures, whose text part is not read alone"
    ),
    **dict.fromkeys(
        ["gemma4_assistant", "gemma4_unified_assistant"], "a draft model of another model"
    ),
    **dict.fromkeys(
        ["zamba", "zamba2"], "a model whose layers share weights, which FSDP2 cannot cut"
    ),
    "reformer": "a model of one fixed length of rows",
}


@dataclass(frozen=True)
class TensorInfo:
    """What a safetensors header says about one tensor; its bytes start at `begin` of the file, row-major."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def find_model(name: str, world: World, trust_remote_code: bool = False) -> Path:
    """A folder as it is; anything else is a Hugging Face id, fetched once per machine. All ranks call it."""
    # An adapter or a checkpoint may say it, and they come from anywhere.
    check(isinstance(name, str), f"{str(name)[:40]} is no name of a model (fix: --model FOLDER)")
    if all(gather(world, Path(name).is_dir())):
        return Path(name)
    return fetch_model(name, world, trust_remote_code)


@dataclass(frozen=True)
class Source:
    """A model's folder, opened: nothing of its weights is read but the headers."""

    folder: Path
    config: transformers.PretrainedConfig
    weights: dict[str, TensorInfo]  # by name in the checkpoint

    def sentence(self) -> str:
        """What the plan prints of it."""
        return f"{(self.config.architectures or ['?'])[0]}, {len(self.weights)} tensors"


def open_model(name: str, world: World, trust_remote_code: bool = False, sums: str = "") -> Source:
    """find_model, read_config and open_weights; sums: a list of SHA-256 sums that the weights' files must
    have. An error of any rank ends all of them.
    """
    folder = find_model(name, world, trust_remote_code)
    with together(world):
        config = read_config(folder, trust_remote_code)
        weights = open_weights(folder)
        if sums:
            check_hashes({info.file for info in weights.values()}, sums, world)
    return Source(folder, config, weights)


def open_weights(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of the folder by its name in the checkpoint, from the headers alone.

    Raises ConfigError naming the file: no safetensors; a file that is missing, damaged or outside the folder;
    an index that does not agree with its files.
    """
    folder = Path(folder)
    single, index = folder / SINGLE, folder / INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(single):
            raise ConfigError(nothing_to_read(folder))
        return _read_header(file_inside(folder, SINGLE))

    names = read_json(file_inside(folder, INDEX)).get("weight_map")
    good = (
        names and isinstance(names, dict) and all(isinstance(file, str) for file in names.values())
    )
    check(good, f"{index}: no weight_map from names of tensors to names of files {AGAIN}")
    shards = sorted(set(names.values()))
    both = SINGLE not in shards and os.path.lexists(single)
    check(
        not both,
        f"{folder}: {SINGLE} and {INDEX} are two models (fix: remove the one that is not meant)",
    )
    # all of them, before the first is opened
    files = [file_inside(folder, shard) for shard in shards]

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


def read_json(file: Path) -> dict:
    """The object in a JSON file, a config or an index."""
    index = Path(file).name.endswith(".index.json")
    limits = (INDEX_BYTES, INDEX_VALUES) if index else (CONFIG_BYTES,)
    try:
        value = read_small_json(file, *limits)
    except ValueError as error:
        raise ConfigError(f"{file}: {str(error)[:100]} {AGAIN}") from None
    check(
        isinstance(value, dict),
        f"{file}: expected a JSON object, got a {type(value).__name__} {AGAIN}",
    )
    return value


def check_model_config(folder: Path, trust_remote_code: bool = False) -> None:
    """Refuse a config.json that transformers would choke on, ask a question about, or run code for.

    Comes before transformers sees the folder. Raises ConfigError naming the file and the field.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

    file = file_inside(folder, "config.json")
    config = read_json(file)
    check_values(file, config)
    for section in filter(lambda part: isinstance(part, dict), (config, config.get("text_config"))):
        for field in RUNS_CODE if not trust_remote_code else ():
            fix = "--trust_remote_code if you have read it, or remove the field if transformers has the model"
            check(
                not section.get(field),
                f"{file}: {field}: the folder would run its code (fix: {fix})",
            )
        for field in ("quantization_config", "compression_config"):
            how = section.get(field)
            how = how.get("quant_method", "unnamed") if isinstance(how, dict) else how
            fix = "the model before quantization"
            check(not how, f"{file}: {field}: {how} weights cannot be trained (fix: {fix})")
    kind = config.get("model_type")
    known = config.get("auto_map") or str(kind) in MODELS
    what = f"transformers has no causal language model {kind!r}"
    check(known, f"{file}: model_type: {what} (fix: another --model, or a newer transformers)")
    check_family(str(kind), str(file))


def check_family(kind: str, where: str) -> None:
    """Refuse a type that transformers lists, but that is not trained as a causal language model here."""
    why = NOT_CAUSAL.get(kind)
    what = f"{where}: model_type: {kind} is {why}"
    check(not why, f"{what} (fix: another --model, a causal language model such as llama or qwen3)")


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
            digest.update(
                os.pread(file.fileno(), min(size, 4096), info.begin + max(0, size - 4096) // 2)
            )
    fields = json.loads(json.dumps(config.to_dict(), default=str))
    fields = {
        f"config.{k}": v for k, v in fields.items() if k not in COSMETIC and not k.startswith("_")
    }
    return {"data": data, "weights": digest.hexdigest(), **fields}


def check_vocab(tokens: int, vocab_size: int) -> None:
    """Refuse a tokenizer with ids that the embedding does not have. Fewer is fine: rows are often padded."""
    fix = "(fix: the tokenizer that came with the model)"
    check(tokens <= vocab_size, f"the tokenizer has {tokens} tokens, the model {vocab_size} {fix}")


def read_config(folder: Path, trust_remote_code: bool = False) -> transformers.PretrainedConfig:
    """The config of a model folder, checked before transformers sees it; also checked is what else of the
    folder a run will need at its end. ConfigError names the file.
    """
    check_model_config(folder, trust_remote_code)
    check_companions(folder)
    file = Path(folder) / "config.json"
    with others_code(str(file), "the config.json of a model that this transformers knows"):
        how = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        config = transformers.AutoConfig.from_pretrained(folder, **how)
        vocab_size = config.get_text_config().vocab_size
    check(type(vocab_size) is int, f"{file}: vocab_size: {vocab_size!r} is no whole number {AGAIN}")
    return config


def check_companions(folder: Path) -> None:
    """Refuse files beside the weights that a save at the end of the run could not copy."""
    for pattern in COMPANIONS:
        for path in Path(folder).glob(pattern):
            file_inside(folder, path.name)
    if os.path.lexists(Path(folder) / "generation_config.json"):
        file = file_inside(folder, "generation_config.json")
        ends = read_json(file).get("eos_token_id")
        for token in ends if isinstance(ends, list) else [ends]:
            good = token is None or (type(token) is int and 0 <= token <= LIMITS["vocab_size"])
            check(good, f"{file}: eos_token_id: {str(token)[:40]} is no token {AGAIN}")


def check_values(file: Path, config: dict) -> None:
    """Refuse values of a config that would cost minutes or gigabytes before anybody looks at a weight."""
    sections = [config, *(value for value in config.values() if isinstance(value, dict))]
    for section in filter(lambda part: isinstance(part, dict), (config, config.get("text_config"))):
        _check_sizes(file, section)
        for name in ("dtype", "torch_dtype"):
            value = section.get(name)
            named = isinstance(value, str) and isinstance(getattr(torch, value, None), torch.dtype)
            known = value is None or value == "auto" or isinstance(value, dict) or named
            check(known, f"{file}: {name}: {str(value)[:40]} is no dtype of torch {AGAIN}")
    for section in sections:
        _check_counts(file, section)


def _check_counts(file: Path, section: dict) -> None:
    for name, value in section.items():
        nan = isinstance(value, float) and value != value
        check(not nan, f"{file}: {name}: NaN is no number {AGAIN}")
        most = MOST_POSITIONS if name in POSITIONS else None
        most = MOST_MODULES if MODULES.search(name) else most
        most = MOST_EXPERTS if EXPERTS.search(name) else most
        most = MOST_LABELS if name == "num_labels" else most
        if most and isinstance(value, int | float):
            check(value <= most, f"{file}: {name}: {str(value)[:40]} is more than {most:,} {AGAIN}")
            some = value >= 0 or not EXPERTS.search(name)
            check(some, f"{file}: {name}: {str(value)[:40]} is below 0 {AGAIN}")
    for name in ("id2label", "label2id"):
        labels = section.get(name)
        good = labels is None or isinstance(labels, dict)
        check(good, f"{file}: {name}: expected an object, got a {type(labels).__name__} {AGAIN}")


def _check_sizes(file: Path, section: dict) -> None:
    aliases = _aliases(section.get("model_type"))
    for name, limit in LIMITS.items():
        for key in (name, aliases.get(name)):
            value = section.get(key)
            # some models size each layer
            for size in value if isinstance(value, list) else [value]:
                good = size is None or (type(size) is int and 0 < size <= limit)
                check(
                    good,
                    f"{file}: {key}: {str(size)[:40]} is not a whole number up to {limit} {AGAIN}",
                )

    def given(name: str) -> int:
        value = section.get(name, section.get(aliases.get(name)))
        return value if isinstance(value, int) else 0

    hidden, heads, shared = map(
        given, ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    fits = (
        not heads
        or hidden % heads == 0
        or any("head_dim" in name and section[name] for name in section)
    )
    check(fits, f"{file}: hidden_size: {hidden} is no multiple of {heads} attention heads {AGAIN}")
    fits = not heads or not shared or heads % shared == 0
    check(
        fits,
        f"{file}: num_attention_heads: {heads} is no multiple of {shared} key-value heads {AGAIN}",
    )
    # rotary positions turn pairs of numbers
    turns = any(name.startswith("rope_") for name in section)
    width = given("head_dim") or (hidden // heads if heads else 0)
    check(
        not turns or width % 2 == 0,
        f"{file}: head_dim: {width} is odd, and rope turns pairs {AGAIN}",
    )


def _aliases(kind: object) -> dict[str, str]:
    """What the config class of a model type calls the fields of LIMITS."""
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        return {}
    return dict(transformers.CONFIG_MAPPING[kind].attribute_map)


def _read_header(file: Path) -> dict[str, TensorInfo]:
    try:
        with suppress(RuntimeError), safe_open(file, framework="pt"):  # it fits its file
            pass  # RuntimeError: a file larger than memory, which safetensors would map whole
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > HEADER_BYTES:
                raise ValueError("a header that no model needs")
            text = opened.read(size)
            if text.count(b",") > HEADER_VALUES:
                raise ValueError("more tensors than any model has")
            header = json.loads(text)
            header.pop("__metadata__", None)
            end = 8 + size + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            whole = os.fstat(opened.fileno()).st_size == end
    except (
        SafetensorError,
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        what = error.strerror or error if isinstance(error, OSError) else damage(file)
        raise ConfigError(f"{file}: {what} {AGAIN}") from None
    check(whole, f"{file}: cut short, or longer than its header says {AGAIN}")
    odd = [
        f"{name} ({entry['dtype']})"
        for name, entry in header.items()
        if entry["dtype"] not in DTYPES
    ]
    check(
        not odd,
        f"{file}: dtypes that torch does not have: {first_five(odd)} (fix: another --model)",
    )
    entries = (
        (n, DTYPES[e["dtype"]], tuple(e["shape"]), e["data_offsets"][0]) for n, e in header.items()
    )
    return {
        name: TensorInfo(file, dtype, shape, 8 + size + at) for name, dtype, shape, at in entries
    }


def damage(file: Path) -> str:
    """Why safetensors refused the file; its own words name neither the file nor the sizes."""
    size = file.stat().st_size
    with open(file, "rb") as raw:
        start = raw.read(8)
        needed = 8 + int.from_bytes(start, "little")
        start += raw.read(min(needed, 10**8))
    try:
        tensors = json.loads(start[8:needed])
        needed += max(
            tensors[name]["data_offsets"][1] for name in tensors if name != "__metadata__"
        )
    except (ValueError, TypeError, LookupError, RecursionError):
        if 8 <= size < needed <= 10**8:  # cut within the header
            return f"damaged: its header alone needs {needed} bytes, the file has {size}"
        return impostor(start) or f"not safetensors, in these {size} bytes"
    return f"damaged: its header asks for {needed} bytes, the file has {size}"


def nothing_to_read(folder: Path) -> str:
    """Why a folder without safetensors cannot be used, and how to make one of it that can."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    other = [
        name for name in names if name.endswith(OTHER_FORMATS) and not name.startswith(NOT_WEIGHTS)
    ]
    if not other:
        held = first_five(names) or "nothing"
        return (
            f"{folder}: no model.safetensors and no index of one, but {held} (fix: another --model)"
        )
    readable = {".bin": "", ".gguf": f', gguf_file="{other[0]}"'}
    fix = "another --model, or convert it with the tools of its format"
    if (suffix := Path(other[0]).suffix) in readable:
        load = f'from_pretrained("{folder}"{readable[suffix]})'
        save = f'save_pretrained("{folder}-safetensors")'
        both = "; ".join(
            f"t.{auto}.{load}.{save}" for auto in ("AutoModelForCausalLM", "AutoTokenizer")
        )
        fix = f"if you trust this one, convert it: python -c 'import transformers as t; {both}'"
    return f"{folder}: only {first_five(other)}: other formats than safetensors can run code (fix: {fix})"


def quiet_transformers() -> None:
    """Notices and progress bars of transformers would come once for each rank."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
