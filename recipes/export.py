"""
Make a model folder from the result of a run: merge an adapter into its base, or write out a checkpoint.

    python recipes/export.py --adapter runs/first/adapter --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --model DIR --adapter ADAPTER --output_dir merged
    torchrun --nproc_per_node 4 recipes/export.py --checkpoint runs/first --output_dir model

A merge goes file by file: each rank writes its own files and holds one weight at a time. The numbers are
those of peft's merge_and_unload, bit for bit. A checkpoint is read and written in shards, by any number of
ranks. The checkpoint of a LoRA run holds only what trained, and becomes an adapter folder.
"""

import json
import os
import shutil
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch
from torch import nn

from utils.data.tokens import end_of_turn_ids, load_tokenizer
from utils.model.adapter_file import base_of
from utils.model.folder import (
    find_model,
    open_weights,
    quiet_transformers,
    read_config,
    read_json,
)
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import save_adapter
from utils.model.merge import allocate, plan_merge, save_merged
from utils.model.saving import save_model
from utils.model.sharding import DTYPES, shard_model
from utils.run.disk import check_space
from utils.run.distributed import init_distributed, stop_distributed, together
from utils.run.errors import act, check, print0, report_errors
from utils.run.files import file_inside
from utils.run.folder import releases_output
from utils.run.mesh import build_mesh
from utils.run.settings import parse_cli
from utils.run.signals import stop_at_once
from utils.train.trained_run import add_run_adapter, check_weights, find_run, load_weights

WEIGHTS = (".safetensors", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
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
    world = replace(init_distributed(), device=torch.device("cpu"))  # a GPU has nothing to do here

    # --- plan: everything that can fail cheaply fails here ----------------------------------------
    act("plan")
    out = Path(os.path.realpath(cfg.output_dir))
    with together(world):
        is_empty_folder = out.is_dir() and not any(out.iterdir())
        check(
            is_empty_folder or not os.path.lexists(out),
            f"--output_dir {out} holds something, and is not overwritten (fix: another one)",
        )
    checkpoint, run = None, {}  # run: the settings of the checkpoint's run
    if cfg.checkpoint:
        checkpoint, run = find_run(cfg.checkpoint, world)
    with together(world):
        base = cfg.model or run.get("model")
        if cfg.adapter:
            base = base or base_of(Path(cfg.adapter))
        check(base, "the base model is not known (fix: --model FOLDER)")
    folder = find_model(base, world, cfg.trust_remote_code)
    tokenizer_folder = folder
    if run.get("tokenizer"):
        tokenizer_folder = find_model(run["tokenizer"], world, cfg.trust_remote_code)
    is_lora_run = bool(run.get("lora_rank") or run.get("adapter"))
    with together(world):
        config = read_config(folder, cfg.trust_remote_code)
        weights = open_weights(folder)
        dtype = DTYPES[run.get("param_dtype", "fp32")]
        model = build_model(config, dtype, "auto", cfg.trust_remote_code)  # on meta
        pieces = plan_pieces(model, weights, folder)  # checkpoint tensor -> its place in the model
        files = {info.file for info in weights.values()}
        disk_bytes = sum(os.stat(file).st_size for file in files)
        if cfg.adapter:
            merge = plan_merge(model, pieces, Path(cfg.adapter))
        else:
            if is_lora_run:
                adapter = add_run_adapter(model, "", run)
            template = run.get("chat_template", "")
            tokenizer = load_tokenizer(tokenizer_folder, template, cfg.trust_remote_code)
        if checkpoint:
            check_weights(checkpoint, model)
    parent = next(path for path in out.parents if path.is_dir())
    check_space(parent, disk_bytes, world)
    print0(f"model     {base}: {len(weights)} tensors")

    if cfg.adapter:
        # --- merge: each rank its own files, one tensor at a time ---------------------------------
        act("merge")
        copy_others = partial(copy_companions, folder, Path(cfg.adapter))
        counts = save_merged(out, merge, world, copy_others)
        print0(f"merged    {counts}")
    elif is_lora_run:
        # --- adapter: what trained, without its base ----------------------------------------------
        act("adapter")
        allocate(model, [name for name, p in model.named_parameters() if p.requires_grad])
        load_weights(checkpoint, model)
        base_name = str(folder.absolute()) if Path(base).is_dir() else base
        line = save_adapter(out, model, adapter, base_name, world, tokenizer)
        print0(f"adapter   {line}")
    else:
        # --- model: the shards of the checkpoint, into a new folder -------------------------------
        act("load")
        shard_model(model, build_mesh(world), torch.float32)
        state = model.state_dict(keep_vars=True)
        buffers = [p for p in pieces if not isinstance(state[p.param], nn.Parameter)]
        load_pieces(model, buffers, world.device)
        load_weights(checkpoint, model)
        act("save")
        save_model(
            out,
            model,
            pieces,
            world,
            save_dtype=DTYPES[run.get("save_dtype", "original")],
            tokenizer=tokenizer,
            eos_ids=end_of_turn_ids(tokenizer),
            source=folder,
        )
    print0(f"finished  {out}")
    return out


def copy_companions(folder: Path, adapter: Path, temp: Path) -> None:
    """Copy all files beside the base's weights. Where the adapter has a tokenizer, take that one, and let its
    end of a turn end an answer.
    """
    for path in folder.iterdir():
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
            shutil.copyfile(file_inside(folder, path.name), temp / path.name)
    for pattern in TOKENIZER:
        for path in adapter.glob(pattern):
            shutil.copyfile(file_inside(adapter, path.name), temp / path.name)
    if not (adapter / "tokenizer_config.json").exists():
        return
    file = temp / "generation_config.json"
    settings = read_json(file) if file.exists() else {}
    ends = settings.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    ends = dict.fromkeys([*ends, *end_of_turn_ids(load_tokenizer(temp))])  # each once, in order
    settings["eos_token_id"] = [token for token in ends if token is not None]
    file.write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config))
        stop_distributed()
