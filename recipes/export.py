"""
Turn what a run left into a model folder: merge an adapter into its base, or write out a checkpoint.

    python recipes/export.py --adapter runs/first/adapter --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --model DIR --adapter ADAPTER --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --checkpoint runs/first --output_dir model

A merge goes file by file, each rank its own files, and holds one weight at a time; its numbers are those of
peft's merge_and_unload, bit for bit. A checkpoint is read and written in shards, by any number of ranks; that
of a LoRA run holds only what trained, and becomes an adapter folder.
"""

import json
import math
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from utils.data.tokens import end_of_turn_ids, load_tokenizer
from utils.model.adapter_file import (
    SETTINGS,
    TENSORS,
    base_of,
    check_finite,
    read_lora_config,
    stored_shapes,
)
from utils.model.folder import INDEX, find_model, open_weights, read_config, read_json
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import LoraLayer, ModulesToSaveWrapper, inject, save_adapter
from utils.model.pieces import Piece, transfer
from utils.model.saving import save_folder, save_model
from utils.model.sharding import DTYPES, shard_model
from utils.plan.parts import plan_parts
from utils.plan.planned import MemoryPlan
from utils.plan.states import estimate_states
from utils.run.disk import check_space
from utils.run.distributed import World, init_distributed, stop_distributed, together
from utils.run.errors import act, check, first_five, print0, report_errors
from utils.run.files import file_inside
from utils.run.folder import releases_output
from utils.run.mesh import build_mesh
from utils.run.settings import parse_cli
from utils.run.signals import stop_at_once
from utils.run.units import MIB
from utils.train.trained_run import add_run_adapter, check_weights, find_run, load_weights

WEIGHTS = (".safetensors", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
TOKENIZER = ("tokenizer*", "*.jinja", "special_tokens_map.json", "added_tokens.json")
TOKENIZER += ("generation_config.json",)


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the base of --adapter or --checkpoint
    adapter: str = ""  # folder of a LoRA adapter, as peft writes it
    checkpoint: str = ""  # run folder (its newest checkpoint), or one checkpoint of it
    trust_remote_code: bool = False  # run Python code that comes with the model

    force: bool = False  # begin though the plan says that it does not fit

    # Where
    output_dir: str = ""  # the new folder

    def __post_init__(self):
        check(
            bool(self.adapter) != bool(self.checkpoint),
            "what to export? (fix: --adapter or --checkpoint)",
        )
        check(self.output_dir, "no --output_dir given (fix: --output_dir FOLDER)")


@releases_output
def main(cfg: Config) -> Path:
    """Write the folder; returns it."""
    transformers.utils.logging.set_verbosity_error()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = replace(init_distributed(), device=torch.device("cpu"))  # a GPU has nothing to do here

    # --- plan: everything that can fail cheaply fails here ----------------------------------------
    act("plan")
    out, trust = Path(os.path.realpath(cfg.output_dir)), cfg.trust_remote_code
    with together(world):
        free = not os.path.lexists(out) or (out.is_dir() and not any(out.iterdir()))
        check(
            free, f"--output_dir {out} holds something, and is not overwritten (fix: another one)"
        )
    checkpoint, run = find_run(cfg.checkpoint, world) if cfg.checkpoint else (None, {})
    with together(world):
        base = cfg.model or run.get("model")
        if cfg.adapter:
            base = base or base_of(Path(cfg.adapter))
        check(base, "nothing says which model it is for (fix: --model FOLDER)")
    folder = find_model(base, world, trust)
    tokenizer_folder = (
        find_model(run["tokenizer"], world, trust) if run.get("tokenizer") else folder
    )
    with together(world):
        config = read_config(folder, trust)
        weights = open_weights(folder)
        # on meta
        model = build_model(config, DTYPES[run.get("param_dtype", "fp32")], "auto", trust)
        pieces = plan_pieces(model, weights, folder)
        size = sum(os.stat(file).st_size for file in {info.file for info in weights.values()})
        lora_run = run.get("lora_rank") or run.get("adapter")
        if cfg.adapter:
            merge = plan_merge(model, pieces, Path(cfg.adapter))
        else:
            adapter = add_run_adapter(model, "", run) if lora_run else None
            tokenizer = load_tokenizer(tokenizer_folder, run.get("chat_template", ""), trust)
        if checkpoint:
            check_weights(checkpoint, model)
    check_space(next(path for path in out.parents if path.is_dir()), size, world)
    print0(f"model     {base}: {len(weights)} tensors")
    with together(world):
        name = "merge" if cfg.adapter else "adapter" if lora_run else "save"
        plan = plan_memory(name, model, world, cfg.force)

    if cfg.adapter:
        # --- merge: each rank its own files, one tensor at a time ---------------------------------
        act("merge")
        save_merged(out, folder, Path(cfg.adapter), merge, world)
    elif lora_run:
        # --- adapter: what trained, without its base ----------------------------------------------
        act("adapter")
        allocate(model, [name for name, p in model.named_parameters() if p.requires_grad])
        load_weights(checkpoint, model)
        base = str(folder.absolute()) if Path(base).is_dir() else base
        print0(f"adapter   {save_adapter(out, model, adapter, base, world, tokenizer)}")
    else:
        # --- model: the shards of the checkpoint, into a new folder -------------------------------
        act("load")
        shard_model(model, build_mesh(world), torch.float32)
        state = model.state_dict(keep_vars=True)
        load_pieces(
            model, [p for p in pieces if not isinstance(state[p.param], nn.Parameter)], world.device
        )
        load_weights(checkpoint, model)
        act("save")
        save_model(
            out, model, pieces, world,
            save_dtype=DTYPES[run.get("save_dtype", "original")],
            tokenizer=tokenizer, eos_ids=end_of_turn_ids(tokenizer), source=folder,
        )  # fmt: skip
    plan.compare(world)
    print0(f"finished  {out}")
    return out


def plan_memory(name: str, model: nn.Module, world: World, force: bool) -> MemoryPlan:
    """What an act of that name needs of the host: a merge has read its adapter already."""
    weights = list(model.parameters())
    largest = max((p.numel() * p.element_size() for p in weights if p.is_meta), default=0)
    trains = sum(p.numel() * p.element_size() for p in weights if p.requires_grad)
    parts = {
        "save": {"weights": estimate_states(model, world.size).weights},
        "merge": {"the largest weight, read and merged": 3 * largest},
        "adapter": {"adapter": trains},
    }[name]
    fewer = name != "save" and world.size > 1
    fix = f"--nproc_per_node {world.size // 2}" if fewer else "a machine with more memory"
    return plan_parts(name, parts | {"buffers": 32 * MIB}, world, fix, force)


# --- merging an adapter into its base


@dataclass
class Merge:
    """What becomes of each tensor of the checkpoint."""

    pieces: list[Piece]
    # parameter -> the adapter's own copy of it, in place of the base's
    own: dict[str, torch.Tensor]
    # parameter -> (LoRA layer, name in its base layer), in peft's order
    layers: dict[str, list[tuple]]
    untied: list[Piece]  # tied in the base, and no longer: tensors that its files do not have


def plan_merge(model: nn.Module, pieces: list[Piece], folder: Path) -> Merge:
    """Put the adapter, with its values, into the meta model; ConfigError names what does not fit."""
    state = model.state_dict(keep_vars=True)
    first: dict[int, str] = {}
    # tied: one name
    shared = {name: first.setdefault(id(tensor), name) for name, tensor in state.items()}
    load_peft(model, folder)
    copies, given, layers = {}, {}, {}
    for path, module in model.named_modules():
        if isinstance(module, ModulesToSaveWrapper):
            saved = module.modules_to_save["default"].named_parameters()
            copies |= {f"{path}.{name}": parameter for name, parameter in saved}
        elif isinstance(module, LoraLayer):
            for name, _ in module.get_base_layer().named_parameters():
                layers.setdefault(shared[f"{path}.{name}"], []).append((module, name))
    for name, parameter in model.named_parameters():
        plain = name.replace(".base_layer.", ".")
        if plain in shared and not parameter.is_meta:
            given[shared[plain]] = parameter
    covering, untied = {piece.param: piece for piece in pieces}, []
    for pair in model.all_tied_weights_keys.items():
        if copies.keys() & {*pair}:
            here = next(covering[name] for name in pair if name in covering)
            untied += [replace(here, name=n, param=n) for n in pair if n not in covering]
    names = {name: shared[name] for name in shared if name not in copies}
    own = copies | {name: given[key] for name, key in names.items() if key in given}
    return Merge(pieces, own, {n: layers[key] for n, key in names.items() if key in layers}, untied)


def load_peft(model: nn.Module, folder: Path) -> None:
    """Inject the adapter as peft does, and give memory to what its file holds; the base stays on meta."""
    from peft import set_peft_model_state_dict

    settings, file = (file_inside(folder, name) for name in (SETTINGS, TENSORS))
    config, shapes = read_lora_config(folder, merge=True), stored_shapes(file)
    inject(model, config, str(settings))
    stored = {name.removeprefix("base_model.model.") for name in shapes}
    names = [n for n, t in model.state_dict(keep_vars=True).items() if isinstance(t, nn.Parameter)]
    here = [n for n in names if n in stored or ".lora_" in n or ".modules_to_save." in n]
    fix = "(fix: the base that it was trained on)"
    wants = sum(model.get_parameter(name).numel() for name in here)
    holds = sum(math.prod(shape) for shape in shapes.values())
    far = f"{folder} does not fit this base: it holds {holds:,} numbers, and its settings ask for {wants:,}"
    check(max(wants, holds) <= 16 * max(1, min(wants, holds)), f"{far} {fix}")
    try:
        tensors = {name.removeprefix("base_model.model."): t for name, t in load_file(file).items()}
        for name, tensor in tensors.items():
            check_finite(file, name, tensor)
        allocate(model, here)
        result = set_peft_model_state_dict(model, tensors)
        wrong = first_five(result.unexpected_keys + [n for n in result.missing_keys if n in here])
    except (SafetensorError, ValueError, RuntimeError, KeyError) as error:
        wrong = " ".join(str(error).split())[:300]
    check(not wrong, f"{folder} does not fit this base: {wrong} {fix}")


@torch.no_grad()
def merged_tensor(piece: Piece, merge: Merge) -> torch.Tensor:
    """A tensor of the checkpoint with the adapter in it, in its own dtype and shape."""
    if piece.param in merge.own:
        box = tuple(
            slice(at, at + length) for at, length in zip(piece.at, piece.shape, strict=True)
        )
        value = (
            merge.own[piece.param][box].reshape(piece.info.shape).to(piece.info.dtype, copy=True)
        )
    else:
        value = torch.empty(piece.info.shape, dtype=piece.info.dtype)
        with open(piece.info.file, "rb", buffering=0) as file:
            transfer(os.preadv, file, piece.info.begin, value.view(-1).view(torch.uint8))
    for layer, name in merge.layers.get(piece.param, []):
        base = layer.get_base_layer()
        others = {n: p for n, p in base.named_parameters() if n != name}  # the bias of a weight
        for other, parameter in others.items():
            setattr(
                base,
                other,
                nn.Parameter(torch.zeros_like(parameter, device="cpu"), requires_grad=False),
            )
        setattr(base, name, nn.Parameter(value, requires_grad=False))
        layer.merge()
        value = getattr(base, name).data
        layer.merged_adapters.clear()
        for other in (name, *others):  # one weight at a time
            setattr(base, other, nn.Parameter(getattr(base, other).to("meta"), requires_grad=False))
    return value


def save_merged(out: Path, folder: Path, adapter: Path, merge: Merge, world: World) -> None:
    """Write `out`: copies of the base's files, in which each changed tensor is overwritten where it lies."""
    files = sorted({piece.info.file for piece in merge.pieces})
    names = {file: file.name for file in files}
    if merge.untied:
        names = {
            file: f"model-{i:05d}-of-{len(files) + 1:05d}.safetensors"
            for i, file in enumerate(files, 1)
        }
    changed = [
        piece for piece in merge.pieces if piece.param in merge.own or piece.param in merge.layers
    ]
    mine = files[world.rank :: world.size]

    def prepare(temp: Path, rank: int) -> int:
        for file in mine:
            shutil.copyfile(file, temp / names[file])
        if rank == 0:
            copy_companions(folder, adapter, temp)
        if rank == 0 and merge.untied:
            untie(temp, names, merge)
        return 0  # only some bytes change

    def finish(temp: Path) -> None:
        found = {name: (info.dtype, info.shape) for name, info in open_weights(temp).items()}
        wanted = {p.name: (p.info.dtype, p.info.shape) for p in merge.pieces + merge.untied}
        assert found == wanted, f"{temp} holds other tensors than was planned"

    save_folder(out, world, prepare, partial(merged_chunks, changed, mine, names, merge), finish)
    print0(
        f"merged    {len(changed)} of {len(merge.pieces)} tensors changed, {len(merge.untied)} untied"
    )


def merged_chunks(changed: list[Piece], files: list, names: dict, merge: Merge) -> Iterator[tuple]:
    """(file, first byte, bytes, name) of the changed tensors in some files, one at a time."""
    mine = [piece for piece in changed if piece.info.file in files]
    for piece in sorted(mine, key=lambda piece: (piece.info.file, piece.info.begin)):
        data = merged_tensor(piece, merge).contiguous().view(-1).view(torch.uint8)
        yield names[piece.info.file], piece.info.begin, data, piece.name


def untie(temp: Path, names: dict[Path, str], merge: Merge) -> None:
    """One more file for the tensors that were tied in the base, an index that names it, and the config."""
    last = f"model-{len(names) + 1:05d}-of-{len(names) + 1:05d}.safetensors"
    tensors = {piece.name: merged_tensor(piece, merge).contiguous() for piece in merge.untied}
    save_file(tensors, temp / last, metadata={"format": "pt"})
    weight_map = {piece.name: names[piece.info.file] for piece in merge.pieces} | dict.fromkeys(
        tensors, last
    )
    sizes = [
        p.info.dtype.itemsize * torch.Size(p.info.shape).numel()
        for p in merge.pieces + merge.untied
    ]
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
    (temp / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    config = read_json(temp / "config.json") | {"tie_word_embeddings": False}
    (temp / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def copy_companions(folder: Path, adapter: Path, temp: Path) -> None:
    """All that is beside the base's weights. Where the adapter brings a tokenizer, that one, and its end of a
    turn ends an answer.
    """
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
            shutil.copyfile(file_inside(folder, path.name), temp / path.name)
    for pattern in TOKENIZER:
        for path in adapter.glob(pattern):
            shutil.copyfile(file_inside(adapter, path.name), temp / path.name)
    if (adapter / "tokenizer_config.json").exists():
        file = temp / "generation_config.json"
        settings = read_json(file) if file.exists() else {}
        eos = settings.get("eos_token_id")
        eos = eos if isinstance(eos, list) else [eos]
        ends = dict.fromkeys([*eos, *end_of_turn_ids(load_tokenizer(temp))])
        settings["eos_token_id"] = [token for token in ends if token is not None]
        file.write_text(json.dumps(settings, indent=2) + "\n")


def allocate(model: nn.Module, names: list[str]) -> None:
    """Memory for some parameters of a meta model."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        parameter = model.get_parameter(name)
        empty = nn.Parameter(torch.empty_like(parameter, device="cpu"), parameter.requires_grad)
        setattr(model.get_submodule(path), leaf, empty)


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config))
        stop_distributed()
