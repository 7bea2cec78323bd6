"""Check a Hugging Face folder before its weights are read: config, names and headers.

A folder from the internet is untrusted input. No config and no weights outside it are opened, and nothing in
it is executed without --trust_remote_code. Problems that transformers ignores silently (missing weights,
paths that lead elsewhere) are refused in one line that names the file. Of a tensor at most 4 KiB are read,
see run_facts.
"""

import hashlib
import json
import logging
import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES as DTYPES  # {"BF16": torch.bfloat16, ...}

from ..run.distributed import World, all_gather, host_name, together
from ..run.errors import ConfigError, check, first_five, others_code
from ..run.files import AGAIN, did_you_mean, file_inside, impostor

# bitsandbytes, which peft imports too, would warn about an optional CPU kernel on every rank.
logging.getLogger("bitsandbytes").setLevel("ERROR")

OTHER_FORMATS = tuple(".bin .pt .pth .ckpt .gguf .h5 .msgpack".split())
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
RUNS_CODE = "trust_remote_code _attn_implementation_internal".split()
COSMETIC = "architectures dtype torch_dtype transformers_version use_cache".split()

# Model types that transformers lists as causal language models, but that cannot be trained as one.
# tests/test_families.py confirms the reasons with tiny models.
ENCODERS = """bert bert-generation big_bird camembert cpmant data2vec-text electra ernie megatron-bert rembert
roberta roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod""".split()
SEQ2SEQ = """bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr
whisper""".split()
NOT_CAUSAL = {  # by reason
    "an encoder: its tokens see those that come after them": ENCODERS,
    "the decoder of an encoder and a decoder: its loss is another one": SEQ2SEQ,
    "a model of sounds": ["musicgen", "musicgen_melody"],
    "a model of pictures, whose text part is not read alone": ["emu3", "git", "mllama"],
    "a draft model of another model": ["gemma4_assistant", "gemma4_unified_assistant"],
    "a model whose layers share weights, which FSDP2 cannot cut": ["zamba", "zamba2"],
    "a model of one fixed length of rows": ["reformer"],
    "a model of which transformers before 5.21 leaves out the soft cap": ["gemma2"]
    * (transformers.__version__ < "5.21"),
}


class TensorInfo(NamedTuple):
    """What a safetensors header says about one tensor; its bytes start at `begin` of the file, row-major."""

    file: Path | None  # None: it is in no file
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int


def find_model(name: str | Path, world: World, trust_remote_code: bool) -> Path:
    """The folder of model `name`. A local folder is used as it is. Any other name is a Hugging Face id: the
    first rank of each machine fetches its safetensors, tokenizer and configuration, and *.py if trusted.

    Every rank calls it. Raises ConfigError on all ranks if the name is no folder and cannot be fetched.
    huggingface_hub does the transfer; if the hub does not answer, it uses its cache.
    """
    folder = Path(name)
    found = all_gather(folder.is_dir(), world)
    if all(found):
        return folder
    with together(world):
        if not folder.is_dir():
            check(not any(found), f"{name} is no folder on {host_name()} (fix: a shared disk)")
            # plan.json: `name` is a result that a run has not written yet, so the hub is not asked.
            check(
                re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", name, re.ASCII)
                and not (folder.parent / "plan.json").exists(),
                f"{name} is not a folder, and no hub id like owner/name{did_you_mean(folder)}"
                " (fix: --model, if an adapter names it; a folder with config.json and safetensors, no .gguf;"
                " a run writes model/ at its end, with LoRA adapter/)",
            )
    fetched = ""
    with together(world, patient=True):
        if world.local_rank == 0:
            from .hub import fetch

            fetched = fetch(name, trust_remote_code, did_you_mean(folder))
    # the folder that the first rank of this machine has fetched
    return Path(all_gather(fetched, world)[world.rank - world.local_rank])


def tokenizer_of(adapter: str) -> str:
    """The folder of an adapter if it has a tokenizer, with the chat template it was trained in; else ""."""
    return adapter if Path(adapter, "tokenizer_config.json").exists() else ""


Weights = dict[str, TensorInfo]  # by name in the checkpoint


class Source(NamedTuple):
    """A model folder whose config and headers have been read, but not its weights."""

    folder: Path  # for a shape, see init.py, its file
    config: transformers.PretrainedConfig
    weights: Weights

    def sentence(self) -> str:
        """The plan's words for the model."""
        return f"{(self.config.architectures or ['?'])[0]}, {len(self.weights)} tensors"


def open_model(name: str, world: World, trust_remote_code: bool) -> Source:
    """find_model, read_config and open_weights. All ranks call it; an error on any rank ends all ranks."""
    folder = find_model(name, world, trust_remote_code)
    with together(world):
        return Source(folder, read_config(folder, trust_remote_code), open_weights(folder))


def open_weights(folder: Path) -> Weights:
    """Every tensor of the folder by its name in the checkpoint, from the headers alone.

    Raises ConfigError naming the file: no safetensors; a file that is missing, damaged or outside the folder;
    an index that does not agree with its files.
    """
    single = folder / SINGLE
    index = folder / INDEX
    if not os.path.lexists(index):
        if not os.path.lexists(single):
            refuse_without_weights(folder)
        return read_header(file_inside(folder, SINGLE))

    names = read_json(file_inside(folder, INDEX)).get("weight_map")
    check(names, f"{index}: no weight_map from names of tensors to names of files {AGAIN}")
    shards = sorted(set(names.values()))
    check(
        SINGLE in shards or not os.path.lexists(single),
        f"{folder}: {SINGLE} and {INDEX} are two models (fix: remove the one that is not meant)",
    )
    # all paths are checked before the first file is opened
    files = [file_inside(folder, shard) for shard in shards]

    found = {}
    twice = []
    for file in files:
        header = read_header(file)
        twice += found.keys() & header
        found |= header
    check(not twice, f"{index}: two of its files hold {first_five(twice)} {AGAIN}")
    odd = sorted(names.keys() ^ found)
    check(not odd, f"{index}: only it, or only one of its files, names {first_five(odd)} {AGAIN}")
    return found


def read_json(file: Path) -> dict:
    """The object in a JSON file, a config or an index."""
    text = file.read_bytes()
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = impostor(text) or f"not JSON: {error}"
        raise ConfigError(f"{file}: {reason} {AGAIN}") from None
    check(
        isinstance(value, dict),
        f"{file}: expected a JSON object, got a {type(value).__name__} {AGAIN}",
    )
    return value


def check_model_config(folder: Path, trust_remote_code: bool) -> None:
    """Refuse a config.json that transformers cannot use, would ask a question about, or would run code for.

    Call it before transformers reads the folder. Raises ConfigError naming the file and the field.
    """
    check(
        any(folder.glob("model*.safetensors*")) or not (folder / "adapter_config.json").exists(),
        f"{folder} is an adapter (fix: --model BASE --adapter {folder}; that of reward.py merged with peft)",
    )
    file = file_inside(folder, "config.json")
    config = read_json(file)
    for section in (config, config.get("text_config") or {}):
        for field in RUNS_CODE:
            check(
                trust_remote_code or not section.get(field),
                f"{file}: {field}: code would be run (fix: --trust_remote_code if you have read it)",
            )
        method = section.get("quantization_config")
        if isinstance(method, dict):
            method = method.get("quant_method", "unnamed")
        check(
            not method,
            f"{file}: quantization_config: {method} weights cannot be trained (fix: --model ORIGINAL; of"
            f" fp8 and mxfp4 recipes/export.py --model {folder} --output_dir NEW makes bf16)",
        )
        check(
            section.get("use_bidirectional_attention") not in (True, "all"),
            f"{file}: with use_bidirectional_attention tokens see what they are to predict"
            " (fix: another --model, or false there)",
        )


def run_facts(config, weights: Weights, data: str) -> dict:
    """The facts that identify a run, as JSON: the fingerprint of its data, the fields of the transformers
    config that decide what the model computes, and "weights", a SHA-256.

    The hash covers name, dtype and shape of each tensor, and up to 4 KiB from the middle of its values if it
    is in a file. So another fine-tune of the same model has another hash, and no file is read whole.
    """
    digest = hashlib.sha256()
    for name, info in sorted(weights.items()):
        size = math.prod(info.shape) * info.dtype.itemsize
        digest.update(f"{name} {info.dtype} {info.shape}".encode())
        if info.file:
            with open(info.file, "rb", buffering=0) as file:
                digest.update(
                    os.pread(file.fileno(), min(size, 4096), info.begin + max(0, size - 4096) // 2)
                )
    fields = json.loads(json.dumps(config.to_dict(), default=str), parse_constant=str)
    return {"data": data, "weights": digest.hexdigest(), **decisive(fields, "config.")}


def decisive(fields: dict, prefix: str) -> dict:
    """The fields of a config, and of the configs in it, that are not COSMETIC, by their dotted names."""
    found = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found |= decisive(value, f"{prefix}{name}.")
        elif name not in COSMETIC and not name.startswith("_"):
            found[prefix + name] = value
    return found


def check_vocab(tokenizer, rows: int) -> None:
    """Raise ConfigError if the tokenizer has more tokens than the embedding has rows. Fewer tokens are fine:
    the rows of an embedding are often padded. So are special tokens beyond the rows that no text gets: Gemma
    3 1B has one for pictures. In a row of data they stay ordinary text.
    """
    used = f"{tokenizer.chat_template} {tokenizer.bos_token} {tokenizer.eos_token} {tokenizer.pad_token}"
    unused = sum(
        i >= rows and token.special and token.content not in used
        for i, token in tokenizer.added_tokens_decoder.items()
    )
    check(
        len(tokenizer) - unused <= rows,
        f"the tokenizer has {len(tokenizer)} tokens, the model {rows}"
        " (fix: the tokenizer that came with the model; new tokens: see recipes/README.md)",
    )


def read_config(folder: Path, trust_remote_code: bool) -> transformers.PretrainedConfig:
    """The config of a model folder, checked before transformers sees it. ConfigError names the file."""
    check_model_config(folder, trust_remote_code)
    file = folder / "config.json"
    # If `auto_map` names code of the folder, transformers runs it only if that is trusted. Else it takes its
    # own class (Phi-3.5, DeepSeek-V2), or raises an error if it has none.
    fix = "another model, for pictures MiniCPM-V 4.6; for texts --trust_remote_code if you have read it"
    with others_code(file, fix):
        return transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=trust_remote_code, local_files_only=True
        )


def read_header(file: Path) -> Weights:
    """Every tensor of a safetensors file, by name. Raises ConfigError naming a file that is damaged, or not
    as long as its header says.
    """
    try:
        with suppress(RuntimeError), safe_open(file, framework="pt"):  # checks the header
            pass  # RuntimeError: the file is larger than memory, and safetensors maps all of it
        with open(file, "rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(size))
            whole_bytes = os.fstat(opened.fileno()).st_size
        header.pop("__metadata__", None)
        infos = {}
        end = start = 8 + size
        for name, entry in header.items():
            dtype = DTYPES[entry["dtype"]]
            first, last = entry["data_offsets"]
            infos[name] = TensorInfo(file, dtype, tuple(entry["shape"]), start + first)
            end = max(end, start + last)
    except (SafetensorError, OSError, ValueError, LookupError) as error:
        with open(file, "rb") as opened:
            reason = impostor(opened.read(100)) or f"damaged, cut short or no safetensors: {error}"
        raise ConfigError(f"{file}: {reason} {AGAIN}") from None
    check(whole_bytes == end, f"{file}: cut short, or longer than its header says {AGAIN}")
    return infos


def refuse_without_weights(folder: Path) -> None:
    """Raise ConfigError, which says what a folder without safetensors holds, and how to convert it."""
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    found = [name for name in names if name.endswith(OTHER_FORMATS)]
    raise ConfigError(
        f"{folder}: no model.safetensors and no index of one, but {first_five(found or names) or 'nothing'};"
        " other formats can run code, and are not fetched (fix: of shards see recipes/README.md; of .bin, if"
        f""" you trust it: AutoModelForCausalLM.from_pretrained("{folder if found else "OWNER/NAME"}")"""
        '.save_pretrained("NEW"), and copy the tokenizer there; of others, the model they were made from)'
    )


def quiet_transformers() -> None:
    """Turn off notices and progress bars of transformers, which would appear once for each rank."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
