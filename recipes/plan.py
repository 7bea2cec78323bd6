"""
Will it fit? The memory of a fine-tune by part, before there is a GPU, a weight or a process group.

    python recipes/plan.py --model llama-3-8b --gpus 2 --gpu_memory 24
    python recipes/plan.py --model DIR --gpus 8 --gpu_memory 80 --host_memory 512 --seq_len 32768 --json

It prints what the given settings need, what every method with every lever would need, and the fastest that
fits as a command. Speeds compare the rows of one table: products, recomputed ones too, and bytes that are
moved, at the rates in utils/plan/speed.py. They are no measurement.
"""

import difflib
import json
import os
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import transformers

from utils.model.folder import check_values, read_json
from utils.model.hub import fetch_config
from utils.model.sharding import DTYPES
from utils.plan.fit import METHODS, Need, Planner
from utils.plan.largest import largest_batch, longest
from utils.plan.planned import Knobs
from utils.plan.reserve import CARDS, FITS, TIGHT, TOO_LARGE, WHY_TIGHT, check_card
from utils.plan.speed import LINK
from utils.run.errors import ConfigError, check, escaped, others_code, report_errors, say
from utils.run.settings import check_least, parse_cli
from utils.run.units import GIB

SHAPES = Path(__file__).resolve().parent.parent / "configs" / "shapes"
HEAD = ("method", "recompute", "offload", "reshard", "GPU GiB", "comfort", "fits", "host GiB")
HEAD += ("rows", "tokens", "speed")
IN_TABLE = {FITS: "yes", TIGHT: "tightly", TOO_LARGE: "no"}


@dataclass
class Config:
    # What
    model: str = ""  # folder, config.json, Hugging Face id, a name in configs/shapes, or a size: 7B
    gpus: int = 1  # of the whole run
    gpus_per_machine: int = 8  # at most
    gpu: str = ""  # a card's name, in place of --gpu_memory: a10g, 4090, a100-40, h100, h200 ...
    gpu_memory: float = 24.0  # GiB of one, as torch shows it: a card "of 24 GB" has 22 to 23.5
    host_memory: float = 0.0  # GiB of one machine; 0: not limited
    link: float = LINK  # GB/s between GPUs of a machine: NVLink by default; PCIe: 10 to 25

    # How
    seq_len: int = 4096  # tokens of a row
    batch_size: int = 1  # rows per rank and micro-batch
    grad_accum: int = 1  # micro-batches per step
    packing: bool = False  # rows hold several documents, which a mask keeps apart
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"  # to compute in
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # of weights, gradients and optimizer
    optimizer: Literal["adamw", "adamw_8bit", "lion_8bit"] = "adamw"
    attn: Literal["auto", "sdpa", "eager"] = "auto"
    lora_rank: int = 0  # adapters of this rank beside frozen weights; 0: train the weights
    quantization: Literal["none", "8bit", "4bit"] = "none"  # of what is frozen
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    trust_remote_code: bool = False  # run Python code that comes with the model

    # Where
    json: bool = False  # print one JSON object in place of tables
    plot: str = ""  # also draw the table as bars into this file

    def __post_init__(self):
        check(
            self.gpu_memory > 0,
            f"--gpu_memory {self.gpu_memory:g} holds nothing (fix: --gpu_memory 24)",
        )
        check_least(self, gpus=1, gpus_per_machine=1, seq_len=2, batch_size=1, grad_accum=1)
        if self.gpu:
            check_card(self.gpu)
            one = self.gpu_memory == Config.gpu_memory
            check(
                one,
                f"--gpu {self.gpu} and --gpu_memory {self.gpu_memory:g} (fix: give one of them)",
            )
        check(self.link > 0, f"--link {self.link:g} carries nothing (fix: --link {LINK:g})")
        machines = self.gpus <= self.gpus_per_machine or self.gpus % self.gpus_per_machine == 0
        fix = "a multiple of it, or another --gpus_per_machine"
        check(machines, f"--gpus {self.gpus}: machines have {self.gpus_per_machine} (fix: {fix})")
        frozen = self.lora_rank or self.quantization == "none"
        check(frozen, f"--quantization {self.quantization} trains nothing (fix: --lora_rank 16)")
        if self.plot:
            check_plot(Path(self.plot))

    @property
    def gpu_gib(self) -> float:
        return CARDS[self.gpu.lower()] if self.gpu else self.gpu_memory


def main(cfg: Config) -> dict:
    """Print the plan; returns what --json prints."""
    transformers.utils.logging.set_verbosity_error()
    config = find_config(cfg.model, cfg.trust_remote_code)
    room = cfg.gpu_gib * GIB, (cfg.host_memory or 2**20) * GIB
    structure = (config, DTYPES[cfg.param_dtype], cfg.attn, cfg.trust_remote_code)
    options = {"optimizer": cfg.optimizer, "packed": cfg.packing, "link": cfg.link}
    options["local"] = min(cfg.gpus, cfg.gpus_per_machine)
    planner = Planner(structure, DTYPES[cfg.dtype], cfg.gpus, cfg.seq_len, **options)
    asked = Knobs(**{name: getattr(cfg, name) for name in Knobs.__annotations__})
    need = planner.need(asked)
    rows = [] if need.why else strategies(planner, asked, room)
    best = None if need.why else planner.fastest(asked, *room, any_method=True)
    best_need = best and planner.need(best)
    told = {
        "settings": asdict(cfg), "parameters": sum(p.numel() for p in planner.model(Knobs()).parameters()),
        "states": asdict(need.states), "peak": need.peak and {**asdict(need.peak), "total": need.peak.total},
        "why": need.why, "gpu_bytes": need.device, "comfortable_bytes": need.comfortable,
        "host_bytes": need.host * planner.local, "positions": positions_of(config),
        "fits": None if need.why else planner.fits(need, *room),
        "answer": None if need.why else planner.answer(need, *room),
        "strategies": rows, "recommended": best and asdict(best),
        "recommended_answer": best and planner.answer(best_need, *room),
        "recommended_host_bytes": best and best_need.host * planner.local,
        "command": command(cfg, best) if best else "",
    }  # fmt: skip
    say(json.dumps(told, indent=2) if cfg.json else report(cfg, need, planner, told), ready=True)
    if cfg.plot:
        plot(rows, cfg)
    return told


def command(cfg: Config, best: Knobs) -> str:
    """The line to type, but for what only the user knows: DIR (where --model is no folder), FILE and HOST."""
    machines = cfg.gpus // cfg.gpus_per_machine
    meeting = (
        f"--nnodes {machines} --rdzv_backend c10d --rdzv_endpoint HOST:29500 "
        if machines > 1
        else ""
    )
    flags = [f"--model {cfg.model if '/' in cfg.model or Path(cfg.model).exists() else 'DIR'}"]
    flags += ["--dataset FILE", f"--seq_len {cfg.seq_len}", best.flags(Knobs())]
    for name in ("dtype", "param_dtype", "optimizer", "attn", "packing", "trust_remote_code"):
        value = getattr(cfg, name)
        if value != getattr(Config, name):
            flags.append(f"--{name}" if value is True else f"--{name} {value}")
    ranks = min(cfg.gpus, cfg.gpus_per_machine)
    return f"torchrun {meeting}--nproc_per_node {ranks} recipes/finetune.py {' '.join(filter(None, flags))}"


def find_config(name: str, trust_remote_code: bool) -> transformers.PretrainedConfig:
    """The config that --model means. ConfigError with the names that are known."""
    known = sorted(path.stem for path in SHAPES.glob("*.json"))
    check(
        name, f"--model is missing (fix: a folder, a size such as 7B, or one of {', '.join(known)})"
    )
    if size := re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([a-zA-Z]?)", name):
        units = {"b": 1e9, "m": 1e6, "": 1}
        check(size[2].lower() in units, f"--model {name} is no size (did you mean {size[1]}B?)")
        return shape_of(float(size[1].replace("_", "")) * units[size[2].lower()], name)
    path = SHAPES / f"{name.lower()}.json"
    path = path if path.exists() else Path(name)
    path = path / "config.json" if path.is_dir() else path
    fix = f"a folder with a config.json, a size such as 7B, or one of {', '.join(known)}"
    with others_code(f"--model {name}", fix):
        if os.path.lexists(path):
            fields = read_json(path)
            check_values(path, fields)
            if "auto_map" not in fields:
                config = transformers.AutoConfig.for_model(**fields)
                config.name_or_path = str(path.parent if path.name == "config.json" else path)
                return config
            return transformers.AutoConfig.from_pretrained(
                name, trust_remote_code=trust_remote_code
            )
        check(name[0] not in "./~", f"--model {name}: there is no such folder or file (fix: {fix})")
        near = [] if "/" in name else difflib.get_close_matches(name.lower(), known, 1, 0.8)
        check(not near, f"--model {name} is not known (did you mean {near and near[0]}?)")
        return fetch_config(name, trust_remote_code, fix)


def shape_of(parameters: float, name: str) -> transformers.LlamaConfig:
    """A model of about so many parameters, in Llama's proportions: 128 wide for each block."""
    check(1e6 <= parameters <= 1e13, f"--model {name}: no size of a language model (fix: 7B)")
    blocks = next(
        n for n in range(1, 2000) if 12 * n * (128 * n) ** 2 + 65536 * 128 * n >= parameters
    )
    width = 128 * blocks
    sizes = {"hidden_size": width, "intermediate_size": round(width * 8 / 3 / 256 + 0.5) * 256}
    return transformers.LlamaConfig(
        num_hidden_layers=blocks, num_attention_heads=blocks, num_key_value_heads=blocks, **sizes
    )


def positions_of(config: transformers.PretrainedConfig) -> int:
    """The longest row that the model was made for; 0 where its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 0


def strategies(planner: Planner, asked: Knobs, room: tuple[float, float]) -> list[dict]:
    """One row for each method with each setting of the levers."""
    rows = []
    for method, (lora, quantization) in METHODS.items():
        rank = (asked.lora_rank or 16) if lora else 0
        for recompute in ("none", "selective", "full"):
            for offload in (False, True):
                for reshard in (True, False) if planner.shards > 1 else (True,):
                    knobs = replace(
                        asked, lora_rank=rank, quantization=quantization, cpu_offload=offload,
                        activation_checkpointing=recompute, reshard_after_forward=reshard,
                    )  # fmt: skip
                    need = planner.quick(knobs)
                    rows.append({
                        "method": method, "knobs": asdict(knobs), "gpu_bytes": need.device,
                        "comfortable_bytes": need.comfortable, "host_bytes": need.host * planner.local,
                        "fits": planner.fits(need, *room), "answer": planner.answer(need, *room),
                        "positions": positions_of(planner.structure[0]),
                        "largest_batch": largest_batch(planner, knobs, *room),
                        "longest": longest(planner, knobs, *room), "seconds": planner.seconds(knobs),
                        "parts": need.peak.parts,
                    })  # fmt: skip
    fastest = min(row["seconds"] for row in rows)
    return [row | {"speed": fastest / row["seconds"]} for row in rows]


def report(cfg: Config, need: Need, planner: Planner, told: dict) -> str:
    """The tables, as text."""
    size = f"{told['parameters'] / 1e9:.2f} billion parameters"
    lines = [
        f"{escaped(cfg.model)}: {size}; {cfg.gpus} GPUs of {cfg.gpu_gib:g} GiB",
        f"{cfg.batch_size} x {cfg.seq_len} tokens a rank and micro-batch; {cfg.dtype} over {cfg.param_dtype}",
        "",
        "The setting as given, on the fullest rank:",
    ]
    if need.why:
        return "\n".join([*lines, f"  {need.sentence()}"])
    parts = sorted(need.peak.parts.items(), key=lambda part: -part[1])
    parts = [(name, size) for name, size in parts if size >= GIB / 200]
    parts += [(f"peak, in the {need.peak.phase}", need.peak.total), ("must be there", need.device)]
    parts += [("comfortable", need.comfortable)]
    lines += [f"  {name:22}{size / GIB:9.2f} GiB" for name, size in parts]
    limit = f" of {cfg.host_memory:g}" if cfg.host_memory else ""
    lines += [f"  {'host, a machine':22}{told['host_bytes'] / GIB:9.2f} GiB{limit}"]
    said = {FITS: FITS, TIGHT: f"{TIGHT}: {WHY_TIGHT}", TOO_LARGE: TOO_LARGE.upper()}[
        told["answer"]
    ]
    lines += [f"  {said}", "", "Every method with every lever:"]
    table = [HEAD, *map(cells, told["strategies"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        aligned = [
            f"{cell:<{w}}" if i < 4 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  " + "  ".join(aligned))
    lines += [
        "GPU GiB: what must be there; comfort: with which nothing has to be given back in a step"
    ]
    lines += [
        "rows: the largest micro-batch that fits, also tightly; tokens: the longest row; -: nothing does"
    ]
    if any("*" in line[9] for line in table[1:]):
        lines += [f"*: longer than the {told['positions']:,} positions that the model was made for"]
    lines += [""]
    if told["command"]:
        return "\n".join([*lines, *recommendation(cfg, told)])
    return "\n".join([*lines, "Nothing fits (fix: more or larger GPUs, or a smaller --seq_len)"])


def recommendation(cfg: Config, told: dict) -> list[str]:
    """The command, and what of it is not seen in the command."""
    tightly = ", tightly" if told["recommended_answer"] == TIGHT else ""
    lines = [f"The fastest that fits{tightly}, of the first method of which any does:"]
    lines += [f"  {escaped(told['command'])}"]
    if told["recommended"]["cpu_offload"]:
        host = f"{told['recommended_host_bytes'] / GIB:.0f} GiB of host memory a machine"
        limit = (
            f", of {cfg.host_memory:g}"
            if cfg.host_memory
            else "; --host_memory says how much there is"
        )
        lines += [f"  It offloads, and needs {host}{limit}."]
    return lines


def cells(row: dict) -> tuple[str, ...]:
    """A row of the table."""
    knobs, words = row["knobs"], ("no", "yes")
    levers = [words[knobs[name]] for name in ("cpu_offload", "reshard_after_forward")]
    gpu = [f"{row[name] / GIB:.1f}" for name in ("gpu_bytes", "comfortable_bytes")]
    sizes = [*gpu, IN_TABLE[row["answer"]], f"{row['host_bytes'] / GIB:.0f}"]
    most = [f"{row[name]:,}" if row[name] else "-" for name in ("largest_batch", "longest")]
    # more than the model was made for
    most[1] += "*" if 0 < row["positions"] < row["longest"] else ""
    return (
        row["method"],
        knobs["activation_checkpointing"],
        *levers,
        *sizes,
        *most,
        f"{row['speed']:.2f}",
    )


def check_plot(file: Path) -> None:
    """What --plot needs, asked for at the start: a plan takes up to a minute."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs a package (fix: pip install matplotlib)") from None
    endings = Figure().canvas.get_supported_filetypes()
    check(
        file.suffix[1:] in endings,
        f"--plot {file}: no ending of a picture (fix: plan.png, .pdf or .svg)",
    )
    check(
        not os.path.lexists(file),
        f"--plot {file} exists, and is not overwritten (fix: another name)",
    )
    folder = file.absolute().parent
    writable = folder.is_dir() and os.access(folder, os.W_OK)
    check(writable, f"--plot {file}: {folder} is no folder that may be written (fix: another one)")


def plot(rows: list[dict], cfg: Config) -> None:
    """The table as stacked bars: what each row needs of a GPU, by part, and what there is."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.5 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names, left = [" ".join(cells(row)[:4]) for row in rows], [0.0] * len(rows)
    for part in dict.fromkeys(name for row in rows for name in row["parts"]):
        sizes = [row["parts"].get(part, 0) / GIB for row in rows]
        axes.barh(names, sizes, left=left, label=part)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.axvline(cfg.gpu_gib, color="black", linestyle="--")
    axes.invert_yaxis()
    axes.set(xlabel="GiB of a GPU", title="method, recompute, offload, reshard")
    axes.legend()
    figure.savefig(cfg.plot)


if __name__ == "__main__":
    with report_errors():
        main(parse_cli(Config, aliases="foreign_flags"))
