"""
Make a model folder: merge an adapter into its base, write out a checkpoint, or convert fp8 and mxfp4 weights.

    python recipes/export.py --adapter runs/first/adapter --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --model DIR --adapter ADAPTER --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --checkpoint runs/first --output_dir model
    torchrun --nproc_per_node 4 recipes/export.py --model openai/gpt-oss-20b --output_dir gpt-oss-20b-bf16

A merge goes tensor by tensor: each rank writes a share of the tensors, and holds one weight at a time. The
result is bit for bit that of peft's merge_and_unload. Only a head that is tied to its embedding is untied if
the adapter changes one of them: peft changes both, and its model answers otherwise than the adapter.
A checkpoint is read and written in shards, by any number of ranks. The checkpoint of a LoRA run holds only
the adapter, and becomes an adapter folder.
A model that is published in fp8 (DeepSeek-V3) or mxfp4 (gpt-oss) is written in bf16, to be trained.
"""

import gc
import math
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # the imports leave nothing to collect: saves 0.5 s

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch
from torch import Tensor, nn

from utils.data.tokens import end_of_turn_ids, load_tokenizer
from utils.model.folder import (
    TensorInfo,
    check_vocab,
    find_model,
    open_weights,
    quiet_transformers,
    read_json,
)
from utils.model.loading import Piece, lay_out, local_box, read_elements
from utils.model.lora import (
    BaseTunerLayer,
    allocate,
    inject,
    load_adapter,
    match_tensors,
    read_lora_config,
    save_adapter,
)
from utils.model.saving import (
    GENERATION,
    Part,
    generation_config,
    save_folder,
    save_model,
    write_json,
)
from utils.model.sharding import DTYPES, plain_name
from utils.run.distributed import World, build_mesh, init_distributed, stop_distributed, together
from utils.run.errors import act, check, first_five, others_code, print0
from utils.run.files import file_inside
from utils.run.folder import check_space, releases_output
from utils.run.settings import convert_settings, parse_cli
from utils.run.signals import report_errors, stop_at_once
from utils.train.checkpoint import checkpoint_tensors
from utils.train.resume import read_tensors
from utils.train.trained_run import Trained, load_trained, open_trained, shard_model

# Ends of the names of scales with which activations are computed in fp8; bf16 needs none.
ACTIVATION_SCALES = ("activation_scale", "input_scale")
# Ends of the names of files that hold weights, and the config of an adapter that torchtune has written beside
# the weights it was merged into: with it, transformers would look for the weights in the adapter's base.
WEIGHT_FILES = tuple(
    ".safetensors .bin .index.json .pt .pth .gguf .h5 .msgpack adapter_config.json".split()
)
TEMPLATES = "additional_chat_templates/*.jinja"
TOKENIZER_FILES = (
    "tokenizer*",
    "*.jinja",
    TEMPLATES,
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
)


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the base of --adapter or --checkpoint
    adapter: str = ""  # folder of a LoRA adapter, as peft writes it
    checkpoint: str = ""  # run folder (its newest checkpoint), or one checkpoint of it
    trust_remote_code: bool = False  # run Python code that comes with the model

    # Where
    output_dir: str = ""  # the new folder

    def __post_init__(self):
        convert_settings(self)
        check(
            (self.model or self.adapter or self.checkpoint)
            and not (self.adapter and self.checkpoint),
            "what is to be exported? (fix: --adapter, --checkpoint, or --model in fp8 or mxfp4)",
        )
        check(self.output_dir, "no --output_dir given (fix: --output_dir FOLDER)")


@releases_output
def main(cfg: Config) -> Path:
    """Write the folder; returns it."""
    quiet_transformers()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed(use_gpu=False)  # there is nothing to compute

    # --- plan: everything that can fail cheaply fails here ----------------------------------------
    act("plan")
    out = Path(os.path.realpath(cfg.output_dir))
    with together(world):
        is_empty_folder = out.is_dir() and not any(out.iterdir())
        check(
            is_empty_folder or not os.path.lexists(out),
            f"--output_dir {out} holds something, and is not overwritten (fix: another one)",
        )
    if not cfg.adapter and not cfg.checkpoint:
        convert_weights(find_model(cfg.model, world, cfg.trust_remote_code), out, world)
        print0(f"finished  {out}")
        return out
    trained = open_trained(
        cfg.model,
        cfg.adapter,
        cfg.checkpoint,
        "",
        world,
        cfg.trust_remote_code,
        merge=bool(cfg.adapter),
    )
    check_room(out, trained.source.weights.values(), world)
    print0(f"model     {trained.name}: {trained.source.sentence()}")

    # --- write: an adapter merged into its base, an adapter, or a model -------------------------
    act("write")
    if cfg.adapter:
        merge_adapter(trained, Path(cfg.adapter), out, world)
    elif trained.adapter:
        write_adapter(trained, out, world)
    else:
        write_model(trained, out, world)
    print0(f"finished  {out}")
    return out


def check_room(out: Path, infos: Iterable[TensorInfo], world: World) -> None:
    """Raise ConfigError unless the disk has room for these tensors."""
    disk_bytes = sum(math.prod(info.shape) * info.dtype.itemsize for info in infos)
    parent = next(path for path in out.parents if path.is_dir())
    check_space(parent, disk_bytes, world)


def merge_adapter(trained: Trained, adapter: Path, out: Path, world: World) -> None:
    """Merge the adapter into its base: all tensors of the base's files, merged or unchanged, and the untied
    ones. Each rank merges and writes a share of them.

    The base stays on meta, and only the adapter is loaded. Each weight that it changes is read, merged by
    peft's own code, and written. So the numbers are those of merge_and_unload, and only one weight is in
    memory at a time.
    """
    with together(world):
        merge = plan_merge(trained.model, trained.pieces, adapter)
    piece_of = {piece.name: piece for piece in merge.pieces + merge.untied}
    # Tensors that the model ignores, such as layers that only draft tokens, are copied.
    for name, info in trained.source.weights.items():
        if name not in piece_of:
            piece_of[name] = Piece(name, info, "", (), info.shape)
    pieces = list(piece_of.values())
    of_this_rank = {piece.name for piece in pieces[world.rank :: world.size]}

    def prepare(temp: Path) -> None:
        copy_companions(trained.model, trained.source.folder, adapter, temp)
        if merge.untied:
            config = read_json(temp / "config.json")
            for part in (config, config.get("text_config") or {}):  # servers read either
                part["tie_word_embeddings"] = False
            write_json(temp / "config.json", config)

    def parts(piece: Piece) -> Iterator[Part]:
        if piece.name in of_this_rank:
            yield 0, merged_tensor(piece, merge).flatten()

    save_folder(out, world, pieces, parts, prepare, lay_out(pieces))
    changed = sum(p.param in merge.copies or p.param in merge.layers for p in merge.pieces)
    counts = f"{changed} of {len(merge.pieces)} tensors changed, {len(merge.untied)} untied"
    print0(f"merged    {counts}")


@dataclass
class Merge:
    """What becomes of each tensor of the checkpoint."""

    pieces: list[Piece]
    copies: dict[str, Tensor]  # parameter -> the adapter's copy of it, in place of the base's
    layers: dict[str, tuple]  # parameter -> (LoRA layer, name in its base)
    untied: list[Piece]  # tied in the base but not any more: the files of the base lack them


def plan_merge(model: nn.Module, pieces: list[Piece], folder: Path) -> Merge:
    """Put the adapter, with its values, into the meta model; ConfigError names what does not fit."""
    names_of: dict[int, list[str]] = {}  # by id of a tensor
    for name, tensor in model.state_dict(keep_vars=True).items():
        names_of.setdefault(id(tensor), []).append(name)
    tied = {name: names for names in names_of.values() for name in names}
    inject(model, read_lora_config(folder, merge=True), str(folder))
    stored = match_tensors(model, folder, merge=True).values()
    allocate(model, stored)
    load_adapter(model, folder, merge=True)

    trained_whole = {plain_name(name) for name in stored if ".modules_to_save." in name}
    copies = {}
    for name in stored:
        base_name, parameter = plain_name(name), model.get_parameter(name)
        if ".modules_to_save." in name:
            copies[base_name] = parameter
            continue
        for tied_name in tied.get(base_name, []):  # it is a parameter of the base
            copies.setdefault(tied_name, parameter)
    layers = {}
    for path, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            for name, _ in module.get_base_layer().named_parameters():
                layers[f"{path}.{name}"] = module, name

    # One piece for each weight that is no longer tied, because it or its partner was trained. peft merges the
    # adapter of the one into both, which is not what was trained.
    piece_of = {piece.param: piece for piece in pieces}
    untied = []
    for pair in model.all_tied_weights_keys.items():
        if trained_whole.isdisjoint(pair) and layers.keys().isdisjoint(pair):
            continue
        partner = next(piece_of[name] for name in pair if name in piece_of)
        for name in pair:
            if name not in piece_of:
                untied.append(partner._replace(name=name, param=name))
    return Merge(pieces, copies, layers, untied)


@torch.no_grad()
def merged_tensor(piece: Piece, merge: Merge) -> Tensor:
    """A tensor of the checkpoint with the adapter merged into it, in its own dtype and shape."""
    info = piece.info
    if piece.param in merge.copies:
        parameter = merge.copies[piece.param]
        box, _ = local_box(parameter, piece)
        value = parameter[box].reshape(info.shape).to(info.dtype, copy=True)
    else:
        value = read_whole(info)
    if piece.param in merge.layers:
        value = merge_into(*merge.layers[piece.param], value)
    return value


def merge_into(layer: BaseTunerLayer, name: str, value: Tensor) -> Tensor:
    """Merge the adapter of a layer into `value`, the value of parameter `name` of its base layer.

    peft's merge needs all parameters of the base layer: the others, such as a bias, are set to zeros.
    """
    base = layer.get_base_layer()
    for each, parameter in list(base.named_parameters()):
        used = value if each == name else torch.zeros_like(parameter, device="cpu")
        setattr(base, each, nn.Parameter(used, requires_grad=False))
    with others_code(f"{name} of {type(base).__name__}: peft", "serve the adapter beside its base"):
        layer.merge()
    merged = base.get_parameter(name).data
    layer.merged_adapters.clear()
    base.to("meta")  # only one weight is in memory at a time
    return merged


def read_whole(info: TensorInfo) -> Tensor:
    """A tensor of a file, in its own dtype and shape."""
    value = torch.empty(info.shape, dtype=info.dtype)
    with open(info.file, "rb", buffering=0) as file:
        read_elements(file, Piece("", info, "", (), info.shape), 0, value.view(-1))
    return value


def write_adapter(trained: Trained, out: Path, world: World) -> None:
    """Write an adapter folder from the checkpoint of a LoRA run. Every rank holds the whole adapter."""
    model = trained.model
    allocate(model, [name for name, p in model.named_parameters() if p.requires_grad])
    read_tensors(trained.checkpoint, checkpoint_tensors(model))
    tokenizer = tokenizer_of(trained)
    save_dtype = DTYPES[trained.run.get("save_dtype", "original")]
    line = save_adapter(out, model, trained.adapter, trained.name, world, tokenizer, save_dtype)
    print0(f"adapter   {line}")


def write_model(trained: Trained, out: Path, world: World) -> None:
    """Write a model folder from a checkpoint. Each rank loads and writes its own shards."""
    shard_model(trained.model, build_mesh(world), torch.float32)
    load_trained(trained, "", world)
    tokenizer = tokenizer_of(trained)
    eos_ids = end_of_turn_ids(tokenizer)
    if "document_mask" in trained.run:  # a setting of pretrain.py alone, which trains no turns
        eos_ids = [tokenizer.eos_token_id]
    save_model(
        out,
        trained.model,
        trained.pieces,
        world,
        save_dtype=DTYPES[trained.run.get("save_dtype", "original")],
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        source=trained.source.folder,
    )


def tokenizer_of(trained: Trained):
    """The tokenizer of the run; if the model reads pictures, with the chat template of its processor."""
    tokenizer = load_tokenizer(*trained.tokenizer)
    if trained.kind == "pictures":
        from utils.data.pictures import load_processor

        load_processor(trained.source.folder, tokenizer)
    return tokenizer


def convert_weights(folder: Path, out: Path, world: World) -> None:
    """Write the model of a folder with bf16 in place of fp8 or mxfp4, as transformers computes it. Each rank
    converts a share of the tensors, one at a time.
    """
    with together(world):
        config = read_json(file_inside(folder, "config.json"))
        quantization = config.pop("quantization_config", {})
        check(
            quantization,
            f"{folder} is not quantized: nothing to convert (fix: use it as it is; --adapter or"
            " --checkpoint for what a run has made of it)",
        )
        method = quantization.get("quant_method", "an unknown method")
        check(
            method in ("fp8", "mxfp4"),
            f"{folder}: {method}: only fp8 and mxfp4 are converted (fix: the model before quantization)",
        )
        stored = open_weights(folder)
        pieces, scaled = converted_pieces(stored)
    check_room(out, (piece.info for piece in pieces), world)
    print0(f"model     {folder}: {method}, {len(scaled)} of {len(pieces)} tensors become bf16")
    act("write")
    of_this_rank = {piece.name for piece in pieces[world.rank :: world.size]}

    def prepare(temp: Path) -> None:
        copy_files(folder, temp)
        write_json(temp / "config.json", config)

    def parts(piece: Piece) -> Iterator[Part]:
        if piece.name not in of_this_rank:
            return
        if piece.name in scaled:
            weight, scales = map(read_whole, scaled[piece.name])
            yield 0, dequantized(weight, scales, quantization.get("weight_block_size")).flatten()
        else:
            yield 0, read_whole(stored[piece.name]).flatten()

    save_folder(out, world, pieces, parts, prepare, lay_out(pieces))


def converted_pieces(stored: dict[str, TensorInfo]) -> tuple[list[Piece], dict[str, tuple]]:
    """(tensors of the new folder, those with scales: name -> (weight, scales) as they are stored).

    With X the name of a parameter, fp8 has X and X_scale_inv, and mxfp4 X_blocks (E, rows, groups, 16) and
    X_scales (E, rows, groups) for X (E, 32 groups, rows). Scales of activations are left out.
    """
    infos, scaled, used_scales = {}, {}, set()
    for name, info in stored.items():
        parameter = name.removesuffix("_blocks")
        packed = parameter != name  # mxfp4
        scales = f"{parameter}_scales" if packed else f"{name}_scale_inv"
        if scales in stored and info.dtype == (torch.uint8 if packed else torch.float8_e4m3fn):
            shape = info.shape
            if packed:
                experts, rows, groups, group_bytes = shape  # a byte holds two values
                shape = (experts, 2 * group_bytes * groups, rows)
            scaled[parameter] = info, stored[scales]
            infos[parameter] = TensorInfo(None, torch.bfloat16, shape, 0)
            used_scales.add(scales)
        else:
            infos[name] = info
    pieces = [
        Piece(name, info, "", (), info.shape)
        for name, info in infos.items()
        if name not in used_scales and not name.endswith(ACTIVATION_SCALES)
    ]
    unknown = [piece.name for piece in pieces if piece.info.dtype.itemsize == 1]
    check(
        not unknown,
        f"unknown scales, or none: {first_five(unknown)} (fix: the model before quantization)",
    )
    return pieces, scaled


def dequantized(weight: Tensor, scales: Tensor, block: list[int] | None) -> Tensor:
    """A weight in bf16. block: rows and columns that share a scale of fp8; None: all, or those that the shape
    of the scales says.
    """
    if weight.dtype == torch.uint8:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(weight, scales)
    scales = scales.float()
    if block:
        for dim, size in zip((-2, -1), block, strict=True):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
    return (weight.float() * scales).bfloat16()


def copy_files(folder: Path, temp: Path) -> None:
    """Copy all files of a model folder but its weights, and the chat templates that it has beside the default
    one.
    """
    for path in [*folder.iterdir(), *folder.glob(TEMPLATES)]:
        if (
            path.is_file()
            and not path.name.startswith(".")
            and not path.name.endswith(WEIGHT_FILES)
        ):
            copy_file(folder, path, temp)


def copy_file(folder: Path, path: Path, temp: Path) -> None:
    """Copy a file of a folder to the same place in `temp`."""
    name = path.relative_to(folder)
    (temp / name).parent.mkdir(exist_ok=True)
    shutil.copyfile(file_inside(folder, str(name)), temp / name)


def copy_companions(model, folder: Path, adapter: Path, temp: Path) -> None:
    """Copy all files of the base but its weights. If the adapter has a tokenizer, copy that one instead, and
    add its end-of-turn token to generation_config.json. Of the base's chat templates none stays if the
    adapter has one: transformers would read it first.
    """
    copy_files(folder, temp)
    settings = adapter / "tokenizer_config.json"
    has_file = (adapter / "chat_template.jinja").exists()
    if has_file:  # a processor would read the base's before it
        (temp / "chat_template.json").unlink(missing_ok=True)
    if has_file or settings.exists() and read_json(settings).get("chat_template"):
        for path in [*temp.glob("*.jinja"), *temp.glob(TEMPLATES)]:
            path.unlink()
    for pattern in TOKENIZER_FILES:
        for path in adapter.glob(pattern):
            copy_file(adapter, path, temp)
    if settings.exists():
        tokenizer = load_tokenizer(temp)
        check_vocab(tokenizer, len(model.get_input_embeddings().weight))
        found = generation_config(model, temp, end_of_turn_ids(tokenizer))
        write_json(temp / GENERATION, found)


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config))
        stop_distributed()
