"""
Will it fit? The memory of a fine-tune by part, before there is a GPU, a weight or a process group.

    python recipes/plan.py --model llama-3-8b --gpus 2 --gpu_memory 24
    python recipes/plan.py --model DIR --gpus 8 --gpu_memory 80 --host_memory 512 --seq_len 32768 --json

It prints what the given settings need, what every method with every lever would need, and the fastest that
fits as a command. Speeds compare the rows of one table: products, recomputed ones too, and bytes that are
moved, at 200 TFLOP/s and 25 GB/s. They are no measurement.
"""

import json
import re
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch
import transformers

from utils.config import check_least, parse_cli
from utils.errors import ConfigError, check, report_errors, say
from utils.fit import METHODS, Knobs, Need, Planner
from utils.memory import GIB

SHAPES = Path(__file__).resolve().parent.parent / "configs" / "shapes"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HEAD = ("method", "recompute", "offload", "reshard", "GPU GiB", "host GiB", "rows", "tokens", "speed")


@dataclass
class Config:
    # What
    model: str = ""  # folder, config.json, Hugging Face id, a name in configs/shapes, or a size: 7B
    gpus: int = 1  # of the whole run
    gpus_per_machine: int = 8  # at most
    gpu_memory: float = 24.0  # GiB of one
    host_memory: float = 0.0  # GiB of one machine; 0: not limited

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
        check_least(self, gpus=1, gpus_per_machine=1, seq_len=2, batch_size=1, grad_accum=1)
        check(self.gpu_memory > 0, f"--gpu_memory {self.gpu_memory:g} holds nothing (fix: --gpu_memory 24)")
        machines = self.gpus <= self.gpus_per_machine or self.gpus % self.gpus_per_machine == 0
        fix = "a multiple of it, or another --gpus_per_machine"
        check(machines, f"--gpus {self.gpus}: machines have {self.gpus_per_machine} (fix: {fix})")
        frozen = self.lora_rank or self.quantization == "none"
        check(frozen, f"--quantization {self.quantization} trains nothing (fix: --lora_rank 16)")


def main(cfg: Config) -> dict:
    """Print the plan; returns what --json prints."""
    transformers.utils.logging.set_verbosity_error()
    config = find_config(cfg.model, cfg.trust_remote_code)
    room = cfg.gpu_memory * GIB, (cfg.host_memory or 2**20) * GIB
    structure = (config, DTYPES[cfg.param_dtype], cfg.attn, cfg.trust_remote_code)
    options = {"optimizer": cfg.optimizer, "packed": cfg.packing}
    options["local"] = min(cfg.gpus, cfg.gpus_per_machine)
    planner = Planner(structure, DTYPES[cfg.dtype], cfg.gpus, cfg.seq_len, **options)
    asked = Knobs(**{name: getattr(cfg, name) for name in Knobs.__annotations__})
    need = planner.need(asked)
    rows = [] if need.why else strategies(planner, asked, room)
    best = None if need.why else planner.fastest(asked, *room, any_method=True)
    told = {
        "settings": asdict(cfg), "parameters": sum(p.numel() for p in planner.model(Knobs()).parameters()),
        "states": asdict(need.states), "peak": need.peak and {**asdict(need.peak), "total": need.peak.total},
        "why": need.why, "gpu_bytes": need.device, "host_bytes": need.host * planner.local,
        "fits": None if need.why else planner.fits(need, *room),
        "strategies": rows, "recommended": best and asdict(best),
        "command": command(cfg, best) if best else "",
    }  # fmt: skip
    if cfg.plot:
        plot(rows, cfg)
    say(json.dumps(told, indent=2) if cfg.json else report(cfg, need, planner, told))
    return told


def command(cfg: Config, best: Knobs) -> str:
    """The line to type, but for what only the user knows: DIR (where --model is no folder), FILE and HOST."""
    machines = cfg.gpus // cfg.gpus_per_machine
    meeting = f"--nnodes {machines} --rdzv_backend c10d --rdzv_endpoint HOST:29500 " if machines > 1 else ""
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
    check(name, f"--model is missing (fix: a folder, a size such as 7B, or one of {', '.join(known)})")
    if size := re.fullmatch(r"([\d_.]+)([bBmM]?)", name):
        return shape_of(float(size[1].replace("_", "")) * {"b": 1e9, "m": 1e6, "": 1}[size[2].lower()], name)
    path = SHAPES / f"{name.lower()}.json"
    path = path if path.exists() else Path(name)
    path = path / "config.json" if path.is_dir() else path
    try:
        if path.is_file():
            fields = json.loads(path.read_text("utf-8"))
            if "auto_map" not in fields:
                return transformers.AutoConfig.for_model(**fields)
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        fix = f"a folder with a config.json, a size such as 7B, or one of {', '.join(known)}"
        raise ConfigError(f"--model {name}: {reason} (fix: {fix})") from None


def shape_of(parameters: float, name: str) -> transformers.LlamaConfig:
    """A model of about so many parameters, in Llama's proportions: 128 wide for each block."""
    check(1e6 <= parameters <= 1e13, f"--model {name}: no size of a language model (fix: 7B)")
    blocks = next(n for n in range(1, 2000) if 12 * n * (128 * n) ** 2 + 65536 * 128 * n >= parameters)
    width = 128 * blocks
    sizes = {"hidden_size": width, "intermediate_size": round(width * 8 / 3 / 256 + 0.5) * 256}
    return transformers.LlamaConfig(
        num_hidden_layers=blocks, num_attention_heads=blocks, num_key_value_heads=blocks, **sizes
    )


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
                    need = planner.need(knobs)
                    rows.append({
                        "method": method, "knobs": asdict(knobs), "gpu_bytes": need.device,
                        "host_bytes": need.host * planner.local, "fits": planner.fits(need, *room),
                        "largest_batch": planner.largest_batch(knobs, *room),
                        "longest": planner.longest(knobs, *room), "seconds": planner.seconds(knobs),
                        "parts": need.peak.parts,
                    })  # fmt: skip
    fastest = min(row["seconds"] for row in rows)
    return [row | {"speed": fastest / row["seconds"]} for row in rows]


def report(cfg: Config, need: Need, planner: Planner, told: dict) -> str:
    """The tables, as text."""
    size = f"{told['parameters'] / 1e9:.2f} billion parameters"
    lines = [
        f"{cfg.model}: {size}; {cfg.gpus} GPUs of {cfg.gpu_memory:g} GiB",
        f"{cfg.batch_size} x {cfg.seq_len} tokens a rank and micro-batch; {cfg.dtype} over {cfg.param_dtype}",
        "",
        "The setting as given, on the fullest rank:",
    ]
    if need.why:
        return "\n".join([*lines, f"  {need.sentence()}"])
    parts = sorted(need.peak.parts.items(), key=lambda part: -part[1])
    parts = [(name, size) for name, size in parts if size >= GIB / 200]
    parts += [(f"peak, in the {need.peak.phase}", need.peak.total), ("with reserve", need.device)]
    lines += [f"  {name:22}{size / GIB:9.2f} GiB" for name, size in parts]
    limit = f" of {cfg.host_memory:g}" if cfg.host_memory else ""
    lines += [f"  {'host, a machine':22}{told['host_bytes'] / GIB:9.2f} GiB{limit}"]
    lines += [f"  {'fits' if told['fits'] else 'DOES NOT FIT'}", "", "Every method with every lever:"]
    table = [HEAD, *map(cells, told["strategies"])]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        aligned = [
            f"{cell:<{w}}" if i < 4 else f"{cell:>{w}}"
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  " + "  ".join(aligned))
    lines += ["rows: the largest micro-batch that fits; tokens: the longest row; -: nothing does", ""]
    if told["command"]:
        return "\n".join(
            [*lines, "The fastest that fits, of the first method of which any does:", f"  {told['command']}"]
        )
    return "\n".join([*lines, "Nothing fits (fix: more or larger GPUs, or a smaller --seq_len)"])


def cells(row: dict) -> tuple[str, ...]:
    """A row of the table."""
    knobs, words = row["knobs"], ("no", "yes")
    levers = [words[knobs[name]] for name in ("cpu_offload", "reshard_after_forward")]
    sizes = [f"{row['gpu_bytes'] / GIB:.1f}", f"{row['host_bytes'] / GIB:.0f}"]
    most = [f"{row[name]:,}" if row[name] else "-" for name in ("largest_batch", "longest")]
    return (row["method"], knobs["activation_checkpointing"], *levers, *sizes, *most, f"{row['speed']:.2f}")


def plot(rows: list[dict], cfg: Config) -> None:
    """The table as stacked bars: what each row needs of a GPU, by part, and what there is."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib (fix: pip install matplotlib)") from None
    figure = Figure(figsize=(9, 1.5 + 0.22 * len(rows)), layout="constrained")
    axes = figure.subplots()
    names, left = [" ".join(cells(row)[:4]) for row in rows], [0.0] * len(rows)
    for part in dict.fromkeys(name for row in rows for name in row["parts"]):
        sizes = [row["parts"].get(part, 0) / GIB for row in rows]
        axes.barh(names, sizes, left=left, label=part)
        left = [before + size for before, size in zip(left, sizes, strict=True)]
    axes.axvline(cfg.gpu_memory, color="black", linestyle="--")
    axes.invert_yaxis()
    axes.set(xlabel="GiB of a GPU", title="method, recompute, offload, reshard")
    axes.legend()
    figure.savefig(cfg.plot)


if __name__ == "__main__":
    with report_errors():
        main(parse_cli(Config))
