"""peft adapters on a meta or sharded model; save, load.

The order is: add (on meta: structure only), shard, load the base, then init_lora or load_adapter, which give
every rank its rows of the same numbers, however many ranks there are. Only the structure is peft's: its
initialization would draw other numbers on each rank, and its saving would see only shards.

LoRA: arXiv 2106.09685. rsLoRA: arXiv 2312.03732. DoRA: arXiv 2402.09353. The folder:
https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import copy
import difflib
import hashlib
import logging
import math
import os
import re
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from ..run.distributed import World, gather
from ..run.errors import ConfigError, check, first_five, print0
from ..run.files import check_not_linked
from .folder import SINGLE, TensorInfo
from .options import Lora, Quant
from .pieces import Piece, is_writer, lay_out, local_box
from .saving import create_files, local_chunks, save_folder

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # peft imports it; it warns on every rank
from peft import LoraConfig, inject_adapter_in_model  # noqa: E402
from peft.tuners.lora import LoraLayer  # noqa: E402
from peft.utils import ModulesToSaveWrapper  # noqa: E402
from peft.utils.transformers_weight_conversion import (  # noqa: E402
    convert_peft_adapter_state_dict_for_transformers,
    convert_peft_config_for_transformers,
)

from .adapter_file import (  # noqa: E402
    NEEDS,
    SETTINGS,
    TENSORS,
    adapted_modules,
    check_finite,
    first_line,
    limited_matching,
    read_lora_config,
    stored_shapes,
)
from .pieces import local  # noqa: E402
from .quantize import (  # noqa: E402
    ROUTER,
    Quantized,
    check_experts,
    is_plain_linear,
    quantize_linears,
    read_by_others,
)

FLAG = "--lora_targets"
WRAPPERS = re.compile(r"\.(base_layer|original_module|modules_to_save\.default)(?=\.)")
FIELDS = {"lora_rank": "r"}  # of the config, where the flag has another name
INJECTING_SECONDS = 60  # of the CPU, at most; some seconds are usual for a large model


def adapt(
    model: nn.Module, lora: Lora, quant: Quant, dtype: torch.dtype
) -> tuple[LoraConfig, dict[str, list[str]]]:
    """(the adapters' config, base_names) of a model on meta that gets adapters beside its frozen base, in
    place. dtype: of compute.
    """
    config = add_adapters(model, lora)
    if quantized := freeze_base(model, quant, dtype):
        check_experts(quantized, quant.keep_experts_16bit)
        print0(f"quantized {quantized.sentence()}")
    return config, base_names(model)


def add_adapters(model: nn.Module, lora: Lora) -> LoraConfig:
    """add_adapter where a folder is named, of which flags may only repeat what it says; else add_lora."""
    if lora.adapter:
        return add_adapter(model, Path(lora.adapter), lora.changed_flags())
    return add_lora(
        model,
        lora.lora_rank,
        lora.lora_alpha,
        lora.lora_targets,
        dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        modules_to_save=lora.modules_to_save,
        init=lora.lora_init,
    )


def freeze_base(model: nn.Module, quant: Quant, dtype: torch.dtype) -> Quantized | None:
    """Quantize what is frozen, if asked, and give all else its dtype: see cast_frozen."""
    quantized = None
    if quant:
        quantized = quantize_linears(
            model, quant.quantization, dtype, quant.int8_mode, head=quant.quantize_head
        )
    cast_frozen(model, dtype)
    return quantized


def add_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: str,
    *,
    dropout: float = 0.0,
    use_rslora=False,
    use_dora=False,
    modules_to_save: str = "",
    init: str = "default",
) -> LoraConfig:
    """Put adapters beside the target layers, in place, and freeze everything else but modules_to_save.

    targets: all-linear (all but the head and the routers of experts), names separated by commas, or one
    regular expression for whole names. modules_to_save: names of modules that train as a whole. On meta
    this costs nothing. Raises ConfigError for what does not exist, with the nearest names that do.
    """
    check(rank > 0, f"--lora_rank {rank} trains nothing (fix: --lora_rank 16)")
    check(init == "default", f"--lora_init {init} {NEEDS} (fix: default)")
    saved = _known(
        modules_to_save, [name for name, _ in model.named_modules()], "--modules_to_save"
    )
    options = {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "modules_to_save": saved or None,
    }
    options |= {"use_rslora": use_rslora, "use_dora": use_dora, "task_type": "CAUSAL_LM"}
    config = LoraConfig(target_modules=_target_modules(model, targets), **options)
    return _add(model, config, FLAG)


def add_adapter(model: nn.Module, folder: Path, given: dict[str, object]) -> LoraConfig:
    """Like add_lora, with the structure of a peft folder; load_adapter brings its values.

    given: flags that the user set, by name; they may only repeat what the folder says. Raises ConfigError by
    field for what differs, and for kinds of LoRA that are not supported here.
    """
    config, file = read_lora_config(folder), Path(folder) / SETTINGS
    _name_linear(model, config)
    now = {
        flag: getattr(config, FIELDS.get(flag, flag)) for flag in given if flag != "lora_targets"
    }
    if "modules_to_save" in given:
        now["modules_to_save"] = ",".join(config.modules_to_save or [])
    if "lora_targets" in given:
        asked = LoraConfig(target_modules=_target_modules(model, given["lora_targets"]))
        same = adapted_modules(model, asked) == adapted_modules(model, config, str(file))
        now["lora_targets"] = given["lora_targets"] if same else config.target_modules
    differ = [
        f"--{flag} {value}, there {now[flag]}"
        for flag, value in given.items()
        if value != now[flag]
    ]
    check(not differ, f"{folder} is another adapter: {'; '.join(differ)} (fix: leave the flag out)")
    _add(model, config, str(file))
    match_tensors(model, folder)
    return config


@torch.no_grad()
def cast_frozen(model: nn.Module, dtype: torch.dtype) -> None:
    """What trains becomes fp32, what does not gets the dtype that it is computed in. Quantized codes stay."""
    for parameter in filter(torch.is_floating_point, model.parameters()):
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else dtype)


def base_names(model: nn.Module) -> dict[str, list[str]]:
    """What each parameter and buffer of the plain model is called now; two names are two copies.

    A module in modules_to_save is there twice, and may have untied a tied weight.
    """
    state, names = model.state_dict(keep_vars=True), {}
    for name in (name for name in state if ".lora_" not in name):
        names.setdefault(WRAPPERS.sub("", name), []).append(name)
    for target, source in model.all_tied_weights_keys.items():
        copies = {id(state[name]): name for name in reversed(names[source] + names[target])}
        names[source] = names[target] = list(copies.values())
    return names


def adapter_names(model: nn.Module) -> dict[str, str]:
    """Name in a peft file -> parameter, of all that trains."""
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    names = {}
    for name in trained:
        key = re.sub(r"(\.lora_magnitude_vector)\.default\.weight", r"\1", WRAPPERS.sub("", name))
        names["base_model.model." + re.sub(r"(\.lora_\w+)\.default(?=\.|$)", r"\1", key)] = name
    assert len(names) == len(trained) > 0, (
        f"{len(trained)} parameters train, {len(names)} have a name"
    )
    return names


@torch.no_grad()
def init_lora(model: nn.Module, seed: int) -> None:
    """Fresh adapters, as peft draws them: the model answers as its base does. The base must be loaded.

    Each parameter has a generator of its own, seeded by its name, and each rank keeps its rows.
    """
    for key, name in adapter_names(model).items():
        parameter, kind = model.get_parameter(name), name.partition(".lora_")[2]
        full = torch.zeros(parameter.shape, dtype=torch.float32)
        digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        if not kind:
            continue  # modules_to_save: loaded with the base
        if kind.startswith("A."):
            nn.init.kaiming_uniform_(full, a=math.sqrt(5), generator=generator)
        elif kind.startswith("embedding_B."):
            full.normal_(generator=generator)
        elif kind.startswith("magnitude_vector."):
            full = _magnitude(model.get_submodule(name.partition(".lora_")[0]).base_layer)
        if len(full) != len(parameter):  # the magnitudes of this rank's rows
            local(parameter).copy_(full)
        elif box := local_box(parameter, _piece(key, name, parameter)):
            local(parameter)[box[0]].copy_(full[box[1]])


def _magnitude(base: nn.Module) -> torch.Tensor:
    """DoRA's magnitudes at the start: the norm of each output feature's weights, as the forward takes it."""
    if hasattr(base, "dequantize") or isinstance(base, nn.Linear):
        weight = base.dequantize() if hasattr(base, "dequantize") else local(base.weight)
        return torch.linalg.norm(weight, dim=1)
    # embeddings and Conv1D: over all ranks' rows
    norms = torch.linalg.vector_norm(base.weight, dim=0)
    return norms.full_tensor() if isinstance(norms, DTensor) else norms


def fill_adapters(model: nn.Module, folder: str | Path, seed: int) -> None:
    """The values of the adapters: those of a peft folder, else fresh ones. The base must be loaded."""
    load_adapter(model, Path(folder)) if folder else init_lora(model, seed)


@torch.no_grad()
def load_adapter(model: nn.Module, folder: Path) -> None:
    """Copy this rank's rows of an adapter into a model of add_adapter.

    Raises ConfigError unless names and shapes are the model's; only base layers that peft stored along, as it
    does for embeddings, may be there too, and are loaded.
    """
    file, names = Path(folder) / TENSORS, match_tensors(model, folder)
    try:
        with safe_open(file, framework="pt") as tensors:
            for key, name in names.items():
                parameter = model.get_parameter(name)
                if box := local_box(parameter, _piece(key, name, parameter)):
                    values = tensors.get_slice(key)[box[1]]
                    check_finite(file, key, values)
                    local(parameter)[box[0]].copy_(values)
    except SafetensorError as error:
        raise ConfigError(f"{file}: {error} (fix: copy it again)") from None


def match_tensors(model: nn.Module, folder: Path) -> dict[str, str]:
    """Name in an adapter's file -> parameter of a model of add_adapter, by the header of the file alone.

    Raises ConfigError as load_adapter does.
    """
    file, names = Path(folder) / TENSORS, adapter_names(model)
    stored = stored_shapes(file)
    for name in (name for name, p in model.named_parameters() if not p.requires_grad):
        if ".base_layer." in name and f"base_model.model.{name}" in stored:
            names[f"base_model.model.{name}"] = name
    shapes = {key: [*model.get_parameter(name).shape] for key, name in names.items()}
    differ = [key for key in sorted(names | stored) if stored.get(key) != shapes.get(key)]
    wrong = [f"{k} {shapes.get(k, 'absent')}, there {stored.get(k, 'absent')}" for k in differ]
    check(not wrong, f"{file} does not fit: {first_five(wrong)} (fix: the adapter of this model)")
    return names


def save_adapter(
    out: Path, model: nn.Module, config: LoraConfig, base_name: str, world: World, tokenizer=None
) -> str:
    """Write `out` as a peft folder for PeftModel.from_pretrained, in place of an older one; returns in words
    what is in it.

    Each rank writes its rows into a temporary folder beside `out`, reads them back and compares them bit for
    bit; rank 0 reopens the file and compares names, shapes and numbers of non-zero values; then it is
    renamed. On failure all ranks raise one ConfigError, and an older adapter is still there.
    """
    out = Path(os.path.realpath(out.parent)) / out.name  # not what a link there means
    state, names = model.state_dict(), adapter_names(model)
    pieces = [_piece(key, name, state[name]) for key, name in names.items()]
    places, headers = lay_out(pieces, None, math.inf)
    places = {key: replace(place, file=TENSORS) for key, place in places.items()}
    mine = [piece for piece in pieces if is_writer(state[piece.param], world)]
    config = copy.copy(config)
    here = Path(base_name).is_dir()  # a folder, else a Hugging Face id
    config.base_model_name_or_path = os.path.abspath(base_name) if here else str(base_name)
    config.inference_mode = True
    if not isinstance(config.target_modules, str):  # a regular expression stays one
        config.target_modules = sorted(config.target_modules)
    counts = gather(
        world, {piece.name: int(local(state[piece.param]).count_nonzero()) for piece in mine}
    )
    live = {
        piece.name: (piece.shape, sum(c.get(piece.name, 0) for c in counts)) for piece in pieces
    }

    def prepare(temp: Path, rank: int) -> int:
        if rank:
            return 0
        check_not_linked(out)
        free = not out.exists() or (out / "adapter_config.json").exists()
        check(free, f"{out} is no adapter, and a save would replace it (fix: another --output_dir)")
        config.save_pretrained(temp)
        if tokenizer is not None:  # with the chat template that the adapter was trained in
            tokenizer.save_pretrained(temp)
        return create_files(temp, places)

    chunks = partial(local_chunks, state, mine, places, {TENSORS: headers[SINGLE]}, world)
    save_folder(out, world, prepare, chunks, lambda temp: _verify_file(temp / TENSORS, live))
    numbers, others = (
        sum(n) for n in zip(*((math.prod(s), n) for s, n in live.values()), strict=True)
    )
    return f"{len(live)} tensors, {numbers:,} numbers, {others / numbers:.1%} of them not 0"


def _verify_file(file: Path, live: dict[str, tuple]) -> None:
    found = {}
    with safe_open(file, framework="pt") as tensors:
        for key in tensors.keys():  # noqa: SIM118 - not a dict
            tensor = tensors.get_tensor(key)
            found[key] = (tuple(tensor.shape), int(tensor.count_nonzero()))
    check(
        found == live,
        f"{file.name} reads back other than the adapter in memory (fix: check the disk)",
    )


def inject(model: nn.Module, config: LoraConfig, where: str) -> None:
    """Let peft put its layers into the model. where: the flag or the file that names the layers.

    Raises ConfigError with what peft said.
    """
    _name_linear(model, config)
    head, wanted = model.get_output_embeddings(), adapted_modules(model, config, where)
    fix = "all-linear" if where == FLAG else "the --model that it was trained on"
    targets = config.target_modules
    some = targets if isinstance(targets, str) else first_five(sorted(targets))
    left_out = " or ".join(
        name for name in ("modules_to_save", "exclude_modules") if getattr(config, name)
    )
    why = (
        f"nothing is left of {some} beside {left_out}"
        if left_out
        else f"the model has no layer {some}"
    )
    check(wanted, f"{where}: {why} (fix: {fix})")
    try:
        with torch.device(head.weight.device), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tied weights and Conv1D; both are seen to
            with limited_matching(where, fix, INJECTING_SECONDS):
                inject_adapter_in_model(config, model)
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        RuntimeError,
        NotImplementedError,
    ) as error:
        raise ConfigError(f"{where}: peft: {first_line(error)} (fix: {fix})") from error
    found = {name for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    assert found == wanted, f"peft adapted other layers: {first_five(sorted(found ^ wanted))}"


def _name_linear(model: nn.Module, config: LoraConfig) -> None:
    """Put names in the place of all-linear, as peft reads it."""
    if str(config.target_modules).lower() == "all-linear":
        config.target_modules = _linear_names(model)


def _add(model: nn.Module, config: LoraConfig, where: str) -> LoraConfig:
    """inject, and a tied weight stays one parameter."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is embedding.weight
    inject(model, config, where)
    if tied:
        # transformers would tie by names that have changed; and one parameter cannot be in two FSDP units.
        saved = [m.original_module for m in model.modules() if isinstance(m, ModulesToSaveWrapper)]
        copies = [module for module in saved if module in (head, embedding)]
        for module in copies:
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
        model.tie_weights = lambda: None if copies else setattr(head, "weight", embedding.weight)
    return config


def _linear_names(model: nn.Module) -> list[str]:
    """Every linear layer but the head: what peft calls all-linear."""
    head = model.get_output_embeddings()
    linear = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    return [name for name, module in linear.items() if module is not head]


def _target_modules(model: nn.Module, targets: str) -> list[str]:
    """What config.target_modules says: names, or ends of names."""
    kinds = nn.Linear | Conv1D | nn.Embedding
    layers = [name for name, module in model.named_modules() if isinstance(module, kinds)]
    alone = read_by_others(model)  # no adapter can stand beside them
    alone |= {name for name in layers if _multiplies_otherwise(model.get_submodule(name))}
    alone |= _renamed_by_peft(model, layers)
    if targets == "all-linear":
        linear = {
            name for name in _linear_names(model) if name not in alone and not ROUTER.search(name)
        }
        check(
            linear,
            f"{FLAG} all-linear: {type(model).__name__} has no layer for it (fix: name some)",
        )
        return [end for end in _ends(model, linear) if not _is_fused(model, end)]
    if re.search(r"[\\*+?\[\](){}|^$]", targets):
        fix = "names separated by commas"
        try:
            with limited_matching(f"{FLAG} {targets}", fix):
                wanted = [name for name in layers if re.fullmatch(targets, name)]
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(
                f"{FLAG} {targets} is no regular expression: {error} (fix: {fix})"
            ) from None
        example = next((name for name in layers if "0" in name), layers[-1])
        check(wanted, f"{FLAG} {targets} matches no layer (fix: match whole names, as {example})")
    else:
        ends = _known(targets, layers, FLAG)
        check(ends, f"{FLAG} is empty (fix: --lora_targets all-linear)")
        wanted = _ends(
            model, {name for name in layers if any(_ends_with(name, end) for end in ends)}
        )
    fused = [name for name in wanted if _is_fused(model, name)]
    check(not fused, f"{FLAG} {first_five(fused)}: experts cannot be adapted (fix: all-linear)")
    unseen = sorted(name for name in alone if any(_ends_with(name, end) for end in wanted))
    why = f"peft cannot adapt these, or the model reads their weights past an adapter: {first_five(unseen)}"
    check(not unseen, f"{FLAG} {targets}: {why} (fix: all-linear, which leaves them out)")
    return wanted


def _multiplies_otherwise(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not is_plain_linear(type(module))


def _renamed_by_peft(model: nn.Module, layers: list[str]) -> set[str]:
    """Layers whose adapters peft would look for under other names when it loads them, and leave fresh: it
    renames them like tensors of an older checkpoint, also where they have their new name already.
    """
    empty = torch.empty(1, 1, device="meta")
    keys = {f"base_model.model.{name}.lora_A.weight": name for name in layers}
    state = dict.fromkeys(keys, empty)
    found = convert_peft_adapter_state_dict_for_transformers(model, LoraConfig(), state, "default")
    return {name for key, name in keys.items() if key not in found}


def _ends(model: nn.Module, wanted: set[str]) -> list[str]:
    """The last parts of these names, and the whole name where another module ends alike."""
    others = {_leaf(name) for name, _ in model.named_modules() if name not in wanted}
    return sorted({name if _leaf(name) in others else _leaf(name) for name in wanted})


def _ends_with(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def _known(text: str, known: list[str], flag: str) -> list[str]:
    """Names separated by commas, each the end of a known one."""
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    for name in wanted:
        nearest = difflib.get_close_matches(
            name, sorted({_leaf(other) for other in known}), 3, cutoff=0
        )
        found = any(_ends_with(other, name) for other in known)
        check(found, f"{flag} {name}: the model has no such layer (fix: {', '.join(nearest)})")
    return wanted


def _is_fused(model: nn.Module, name: str) -> bool:
    """Whether peft takes a name for a part of the fused experts."""
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one half of a fused pair
        return True
    return bool(config.target_parameters)


def _piece(key: str, name: str, parameter: torch.Tensor) -> Piece:
    shape = tuple(parameter.shape)
    return Piece(
        key, TensorInfo(Path(TENSORS), parameter.dtype, shape, 0), name, (0,) * len(shape), shape
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]
