"""
Make a model folder from the result of a run: merge an adapter into its base, or write out a checkpoint.

    python recipes/export.py --adapter runs/first/adapter --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --model DIR --adapter ADAPTER --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --checkpoint runs/first --output_dir model

A merge goes tensor by tensor: each rank writes a share of the tensors, and holds one weight at a time. The
result is bit for bit that of peft's merge_and_unload. A checkpoint is read and written in shards, by any
number of ranks. The checkpoint of a LoRA run holds only the adapter, and becomes an adapter folder.
"""

import gc
import os
import shutil
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    gc.disable()  # the imports leave nothing to collect: saves 0.5 s

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch

from utils.data.tokens import end_of_turn_ids, load_tokenizer
from utils.model.folder import quiet_transformers
from utils.model.lora import allocate, base_of, plan_merge, save_adapter, save_merged
from utils.model.saving import GENERATION, generation_config, save_model, write_json
from utils.model.sharding import DTYPES
from utils.run.distributed import World, build_mesh, init_distributed, stop_distributed, together
from utils.run.errors import act, check, print0
from utils.run.files import file_inside
from utils.run.folder import check_space, releases_output
from utils.run.settings import parse_cli
from utils.run.signals import report_errors, stop_at_once
from utils.train.checkpoint import checkpoint_tensors
from utils.train.resume import read_tensors
from utils.train.trained_run import Trained, load_trained, open_trained, shard_model

WEIGHTS = (".safetensors", ".bin", ".index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
TOKENIZER = (
    "tokenizer*",
    "*.jinja",
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
        check(
            bool(self.adapter) != bool(self.checkpoint),
            "what is to be exported? (fix: either --adapter or --checkpoint)",
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
        base = cfg.model
        if cfg.adapter and not base:
            base = base_of(Path(cfg.adapter))
    trained = open_trained(base, "", cfg.checkpoint, "", world, cfg.trust_remote_code)
    with together(world):
        files = {info.file for info in trained.source.weights.values()}
        disk_bytes = sum(os.stat(file).st_size for file in files)
    parent = next(path for path in out.parents if path.is_dir())
    check_space(parent, disk_bytes, world)
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


def merge_adapter(trained: Trained, adapter: Path, out: Path, world: World) -> None:
    """Merge the adapter into its base. Each rank merges and writes a share of the tensors, one at a time."""
    with together(world):
        merge = plan_merge(trained.model, trained.pieces, adapter)
    copy_others = partial(copy_companions, trained.model, trained.source.folder, adapter)
    print0(f"merged    {save_merged(out, merge, trained.source.weights, world, copy_others)}")


def write_adapter(trained: Trained, out: Path, world: World) -> None:
    """Write an adapter folder from the checkpoint of a LoRA run. Every rank holds the whole adapter."""
    model = trained.model
    allocate(model, [name for name, p in model.named_parameters() if p.requires_grad])
    read_tensors(trained.checkpoint, checkpoint_tensors(model))
    tokenizer = tokenizer_of(trained)
    line = save_adapter(out, model, trained.adapter, trained.name, world, tokenizer)
    print0(f"adapter   {line}")


def write_model(trained: Trained, out: Path, world: World) -> None:
    """Write a model folder from a checkpoint. Each rank loads and writes its own shards."""
    model = shard_model(trained.model, build_mesh(world), torch.float32)
    load_trained(trained, "", world)
    tokenizer = tokenizer_of(trained)
    save_model(
        out,
        model,
        trained.pieces,
        world,
        save_dtype=DTYPES[trained.run.get("save_dtype", "original")],
        tokenizer=tokenizer,
        # pretrain.py, the only recipe with a document mask, trains no turns
        eos_ids=[tokenizer.eos_token_id]
        if "document_mask" in trained.run
        else end_of_turn_ids(tokenizer),
        source=trained.source.folder,
    )


def tokenizer_of(trained: Trained):
    """The tokenizer of the run; if the model reads pictures, with the chat template of its processor."""
    tokenizer = load_tokenizer(*trained.tokenizer)
    if trained.kind == "pictures":
        from utils.data.pictures import load_processor

        load_processor(trained.source.folder, tokenizer)
    return tokenizer


def copy_companions(model, folder: Path, adapter: Path, temp: Path) -> None:
    """Copy all files of the base but its weights. If the adapter has a tokenizer, copy that one instead, and
    add its end-of-turn token to generation_config.json.
    """
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
            shutil.copyfile(file_inside(folder, path.name), temp / path.name)
    for pattern in TOKENIZER:
        for path in adapter.glob(pattern):
            shutil.copyfile(file_inside(adapter, path.name), temp / path.name)
    if not (adapter / "tokenizer_config.json").exists():
        return
    settings = generation_config(model, temp, end_of_turn_ids(load_tokenizer(temp)))
    write_json(temp / GENERATION, settings)


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config))
        stop_distributed()
