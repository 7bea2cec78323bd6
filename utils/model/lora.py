"""Add peft adapters to a model on meta; fill, read and save them on a sharded model; merge one into its base.

The order is: add (on meta: structure only), shard, load the base, then init_lora or load_adapter. These give
every rank its rows of the same values, on any number of ranks. Only the structure comes from peft: its
initialization would draw different values on each rank, and its saving would see only shards.

LoRA: arXiv 2106.09685. rsLoRA: arXiv 2312.03732. DoRA: arXiv 2402.09353. The folder:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import copy
import difflib
import math
import os
import re
import warnings
from collections.abc import Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors import safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.initialization import no_init_weights
from transformers.pytorch_utils import Conv1D

from ..run.distributed import World
from ..run.errors import check, first_five, others_code, print0
from ..run.files import file_inside
from ..run.units import seed_of
from .folder import read_header, read_json
from .loading import lay_out, local, local_box, whole
from .options import Lora, Quant, changed_flags
from .quantize import ROUTER, is_plain, quantize_linears
from .saving import save_folder, save_tokenizer, written_parts
from .sharding import cast_to, language_model, plain_name

SETTINGS = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
PREFIX = "base_model.model."  # of tensor names in an adapter's file
TARGETS = "--lora_targets"
ANOTHER = "another --adapter"
# Settings of adapter_config.json: READ are passed on to peft, MERGED are supported for a merge but not for
# training, IGNORED change no value. All others must have peft's defaults.
READ = """r lora_alpha lora_dropout use_rslora use_dora fan_in_fan_out target_modules exclude_modules
    modules_to_save rank_pattern alpha_pattern layers_to_transform layers_pattern""".split()
MERGED = ["bias", "lora_bias"]
IGNORED = """peft_version task_type auto_mapping base_model_name_or_path revision
    inference_mode""".split()


def adapt(model: nn.Module, lora: Lora, quant: Quant, dtype: torch.dtype) -> tuple:
    """Add adapters to a model on meta and freeze its base, in place. Returns (the adapters' config,
    base_names). dtype: of the computation.
    """
    config = add_adapters(model, lora)
    unused = changed_flags(lora)
    if lora.adapter and unused:
        print0(f"adapter   {unused} has no effect: {lora.adapter} has its own settings")
    if quantized := freeze_base(model, quant, dtype):
        print0(f"quantized {quantized}")
    return config, base_names(model)


def add_adapters(model: nn.Module, lora: Lora) -> LoraConfig:
    """Put adapters beside the target layers, in place, and freeze everything else except modules_to_save.

    lora.lora_targets: all-linear (all but the head, the routers of experts, and layers with the names of
    experts, which peft takes for these), names separated by commas, or one regular expression for whole
    names. lora.adapter: a peft folder; only its structure is used here, and load_adapter reads its values. On
    meta this costs nothing. Raises ConfigError for names that do not exist, with the nearest names that do,
    and for an adapter that does not fit.
    """
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings()
    tied = head.weight is embedding.weight
    # the head of a reward model trains in full
    scores = ["score"] if head is getattr(model, "score", None) else []
    if lora.adapter:
        config = read_lora_config(Path(lora.adapter))
        inject(model, config, lora.adapter)
        match_tensors(model, Path(lora.adapter))
    else:
        modules = _split_names(
            lora.modules_to_save, dict(model.named_modules()), "--modules_to_save"
        )
        config = LoraConfig(
            r=lora.lora_rank,
            lora_alpha=lora.lora_alpha,
            lora_dropout=lora.lora_dropout,
            target_modules=_target_modules(model, lora.lora_targets),
            modules_to_save=[*modules, *scores] or None,
            use_rslora=lora.use_rslora,
            use_dora=lora.use_dora,
        )
        inject(model, config, TARGETS)
    config.task_type = "SEQ_CLS" if scores else "CAUSAL_LM"
    if tied:
        # transformers would tie weights by names that have changed. One parameter cannot be in two FSDP2
        # units, so a head or embedding in modules_to_save gets its own copy of the frozen weight.
        copies = {head, embedding} & {
            m.original_module for m in model.modules() if isinstance(m, ModulesToSaveWrapper)
        }
        for module in copies:
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)

        def tie_weights():
            if not copies:
                head.weight = embedding.weight

        model.tie_weights = tie_weights
    return config


def read_lora_config(folder: Path, merge=False) -> LoraConfig:
    """The settings of a LoRA folder as peft's config. merge: the adapter is merged into its
    base, not trained.

    Raises ConfigError for kinds of LoRA that are not supported: those that this version of peft does not
    know, and those that change the weights of the base at the start (PiSSA, OLoRA, ...).
    """
    file = file_inside(folder, SETTINGS)
    stored = read_json(file)
    defaults = LoraConfig().to_dict()
    read = READ + MERGED if merge else READ
    odd = []
    for name, value in stored.items():
        same_base = name == "init_lora_weights" and value in ("gaussian", "orthogonal")
        if value and value != defaults.get(name) and name not in read + IGNORED and not same_base:
            odd.append(f"{name} {value}")
    check(
        not odd,
        f"{file}: {first_five(odd)} cannot be used here (fix: merge it by peft or mlx_lm.fuse; --model NEW)",
    )
    given = {name: stored[name] for name in read if stored.get(name) is not None}
    with others_code(file, f"correct it, or {ANOTHER}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft warns about settings that change nothing
        return LoraConfig(**given)


def base_of(folder: Path) -> str:
    """The base model that an adapter's settings name; "" if they name none."""
    return str(read_json(file_inside(folder, SETTINGS)).get("base_model_name_or_path") or "")


@torch.no_grad()
def freeze_base(model: nn.Module, quant: Quant, dtype: torch.dtype) -> str:
    """Quantize the frozen weights, if asked. Cast trainable parameters to fp32 and frozen ones to `dtype`,
    that of the computation; quantized codes stay as they are. Returns the words of quantize_linears, or "".
    """
    quantized = quantize_linears(model, quant, dtype) if quant else ""
    for parameter in model.parameters():
        cast_to(parameter, torch.float32 if parameter.requires_grad else dtype)
    return quantized


def base_names(model: nn.Module) -> dict:
    """The present names of each parameter and buffer of the plain model. Two names are two copies.

    A module in modules_to_save exists twice, and its copy may end the tie of a tied weight.
    """
    state = model.state_dict(keep_vars=True)
    names = {}
    for name in state:
        if ".lora_" not in name:
            names.setdefault(plain_name(name), []).append(name)
    for target, source in model.all_tied_weights_keys.items():
        copies = {id(state[name]): name for name in reversed(names[source] + names[target])}
        names[source] = names[target] = list(copies.values())
    return names


def adapter_names(model: nn.Module) -> dict:
    """Name in a peft file -> name of the parameter, for all trainable parameters."""
    of_peft = r"\.modules_to_save\.default|(\.lora_magnitude_vector)\.default\.weight|(\.lora_\w+)\.default"
    names = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            names[PREFIX + re.sub(of_peft, r"\1\2", name)] = name
    return names


@torch.no_grad()
def init_lora(model: nn.Module, seed: int) -> None:
    """Draw fresh adapters as peft does: the model still computes what its base does. The base must be loaded.

    Each parameter has its own generator, seeded by its name, and each rank keeps its rows.
    """
    for key, name in adapter_names(model).items():
        parameter = model.get_parameter(name)
        path, _, kind = name.partition(".lora_")
        if not kind:
            continue  # modules_to_save: loaded with the base
        full = torch.zeros(parameter.shape)
        generator = torch.Generator().manual_seed(seed_of(f"{seed} {key}"))
        if kind.startswith("A."):
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        elif kind.startswith("embedding_B."):
            full.normal_(generator=generator)
        elif kind.startswith("magnitude_vector."):
            full = _magnitude(model.get_submodule(path).base_layer)
        if len(full) != len(parameter):  # the magnitudes of this rank's rows
            local(parameter).copy_(full)
        elif boxes := local_box(parameter, whole(key, parameter)):
            in_shard, in_full = boxes
            local(parameter)[in_shard].copy_(full[in_full])


def _magnitude(base):
    """DoRA's initial magnitudes: the norm of each output feature's weights, as peft's forward computes it."""
    if hasattr(base, "dequantize") or isinstance(base, nn.Linear):
        weight = base.dequantize() if hasattr(base, "dequantize") else local(base.weight)
        return torch.linalg.norm(weight, dim=1)
    # embeddings and Conv1D: over all ranks' rows
    norms = torch.linalg.vector_norm(base.weight, dim=0)
    return norms.full_tensor() if isinstance(norms, DTensor) else norms


@contextmanager
def adapters_off(model: nn.Module):
    """Within it the model computes what its base does, also in modules_to_save, without dropout: for a
    reference pass in no_grad. An adapter that the run continues (--adapter) is switched off too.

    Only the flags that peft's forwards read are set. peft's own disable_adapter also sets
    requires_grad. FSDP2 would keep that on parameters that are gathered at this moment, and those
    adapters would never train again.
    """
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | ModulesToSaveWrapper)]
    was_training = model.training
    try:
        model.eval()
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
        model.train(was_training)


def fill_adapters(model: nn.Module, folder: str, seed: int) -> None:
    """Fill the adapters: from a peft folder, else with fresh values. The base must be loaded."""
    load_adapter(model, Path(folder)) if folder else init_lora(model, seed)


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path, merge=False) -> None:
    """Copy this rank's rows of an adapter into a model from add_adapters.

    Raises ConfigError unless names and shapes match the model. The file may also have base layers that peft
    stored, as it does for embeddings; they are loaded. merge: see match_tensors.
    """
    file = folder / TENSORS
    names = match_tensors(model, folder, merge)
    with others_code(file, "copy it again"), safe_open(file, framework="pt") as tensors:
        for key, name in names.items():
            parameter = model.get_parameter(name)
            if boxes := local_box(parameter, whole(key, parameter)):
                in_shard, in_file = boxes
                values = tensors.get_slice(key)[in_file]
                check(
                    values.isfinite().all(),
                    f"{file}: {key} holds numbers that are not finite (fix: {ANOTHER})",
                )
                local(parameter)[in_shard].copy_(values)


def match_tensors(model: nn.Module, folder: Path, merge=False) -> dict:
    """Name in an adapter's file -> parameter of a model from add_adapters, from the file's header alone.
    If the vocabulary has grown, peft also stores both embeddings of the base, and copies of those in
    modules_to_save. merge: take stored weights of any part of the base, not only those under adapters. A
    training would save its adapter without the others.

    Raises ConfigError as load_adapter does.
    """
    file = file_inside(folder, TENSORS)
    names = adapter_names(model)
    stored = {
        key: [*info.shape]
        for key, info in read_header(file).items()
        if not re.search(r"\.(modules_to_save|original_module)\.", key)
    }
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = PREFIX + name
        # codes of a quantized layer are not floating-point
        if (merge or ".base_layer." in name) and key in stored and parameter.is_floating_point():
            names[key] = name
    shapes = {key: [*model.get_parameter(name).shape] for key, name in names.items()}
    wrong = []
    for key in sorted(names | stored):
        wanted = shapes.get(key, "absent")
        found = stored.get(key, "absent")
        if wanted != found:
            wrong.append(f"{key} {wanted}, there {found}")
    check(
        not wrong,
        f"{file} does not fit: {first_five(wrong)} (fix: --model with the base of this adapter;"
        " recipes/README.md says how to merge that of a reward model, to rename the tensors of an older one,"
        " and to merge one of a larger vocabulary)",
    )
    return names


def save_adapter(
    out: Path,
    model: nn.Module,
    config: LoraConfig,
    base_name: str,
    world: World,
    tokenizer,
    save_dtype: torch.dtype | None,
) -> str:
    """Write `out` as a peft folder for PeftModel.from_pretrained, in place of an older one. Returns its
    content in words. save_dtype: None: as it was trained.

    Each rank writes its rows into a temporary folder beside `out`, reads them back and compares them
    bit for bit; then the folder is renamed. On failure all ranks raise one ConfigError, and an older
    adapter is still there.
    """
    state = model.state_dict()
    pieces = [whole(key, state[name], name) for key, name in adapter_names(model).items()]
    config = copy.copy(config)
    # as in find_model; if there is no such folder, the name is a Hugging Face id
    folder = Path(base_name).expanduser()
    config.base_model_name_or_path = os.path.abspath(folder) if folder.is_dir() else base_name
    config.inference_mode = True
    if not config.lora_alpha % 1:  # Ollama reads 16, but not 16.0
        config.lora_alpha = int(config.lora_alpha)
    if not isinstance(config.target_modules, str):  # a regular expression stays one
        config.target_modules = sorted(config.target_modules)

    def prepare(temp):
        check(
            not out.exists() or (out / SETTINGS).exists(),
            f"{out} is no adapter, and a save would replace it (fix: another --output_dir)",
        )
        config.save_pretrained(temp)
        # By the model's type, which an adapter lacks, transformers 5 may take another class than the files of
        # the base name. transformers 4 knows TokenizersBackend by another name.
        name = type(tokenizer).__name__.replace("TokenizersBackend", "PreTrainedTokenizerFast")
        save_tokenizer(tokenizer, temp, tokenizer_class=name)

    layout = lay_out(pieces, save_dtype, max_file_bytes=math.inf, stem="adapter_model")
    save_folder(out, world, pieces, partial(written_parts, state, world), prepare, layout)
    return f"{len(pieces)} tensors, {sum(math.prod(piece.shape) for piece in pieces):,} numbers"


def inject(model: nn.Module, config: LoraConfig, where: str) -> None:
    """Let peft put its layers into the model. where: the flag or the folder that names the layers.

    Raises ConfigError with peft's error.
    """
    fix = (
        "all-linear, fewer --modules_to_save"
        if where == TARGETS
        else "the --model that it was trained on"
    )
    with (
        others_code(f"{where}: peft", fix),
        model.get_output_embeddings().weight.device,  # for the new layers
        no_init_weights(),  # fill_adapters sets the values
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")  # about tied weights and Conv1D, which are handled here
        inject_adapter_in_model(config, model)
    check(
        not config.target_parameters,
        f"{where}: experts cannot be adapted (fix: {TARGETS} all-linear; to go on from an adapter of experts:"
        " merge it with peft, and --model NEW)",
    )


def _target_modules(model, targets):
    """Names of the layers that get adapters."""
    kinds = nn.Linear | Conv1D | nn.Embedding
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kinds)}
    bypassed = {name for name, layer in layers.items() if not is_plain(model, name, layer)}
    if targets == "all-linear":
        return _all_linear(model, layers.keys() - bypassed)
    pattern = targets
    if not re.search(r"[\\*+?\[\](){}|^$]", targets):
        pattern = rf"(.*\.)?({'|'.join(_split_names(targets, layers, TARGETS))})"
    with others_code(f"{TARGETS} {targets}", "names separated by commas"):
        wanted = {name for name in layers if re.fullmatch(pattern, name)}
    example = next((name for name in layers if "0" in name), "")
    check(
        wanted,
        f"{TARGETS} {targets} matches no layer (fix: all-linear, or match whole names, as {example})",
    )
    without_effect = first_five(sorted(wanted & bypassed))
    check(
        not without_effect,
        f"{TARGETS} {targets}: {model.config.model_type} reads weights past an adapter: {without_effect}"
        " (fix: all-linear, which leaves them out)",
    )
    return sorted(wanted)


def _all_linear(model, names):
    """The linear layers among `names` in the part that reads text, except the head, routers, and layers that
    peft takes for fused experts.
    """
    inside = {m for m in language_model(model).modules() if isinstance(m, nn.Linear | Conv1D)}
    inside.discard(model.get_output_embeddings())
    linear = [
        name for name in names if model.get_submodule(name) in inside and not ROUTER.search(name)
    ]
    config = LoraConfig(target_modules=linear)
    convert_peft_config_for_transformers(config, model, None)
    check(
        config.target_modules,
        f"{TARGETS} all-linear: {model.config.model_type} has no layer for it (fix: name some)",
    )
    return sorted(config.target_modules)


def _split_names(text, known, flag):
    """The names in `text`, separated by commas. Raises ConfigError unless each is the end of a known name."""
    leaves = sorted({name.rpartition(".")[2] for name in known})
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        nearest = ", ".join(difflib.get_close_matches(name, leaves, 3, cutoff=0))
        check(
            any(f".{path}".endswith(f".{name}") for path in known),
            f"{flag} {name}: the model has no such layer (fix: {nearest})",
        )
    return wanted


def allocate(model: nn.Module, names: Iterable[str]) -> None:
    """Allocate these parameters of a meta model on the CPU, and the other parameters of their modules."""
    for name in names:
        model.get_submodule(name.rpartition(".")[0]).to_empty(device="cpu", recurse=False)
