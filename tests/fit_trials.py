"""Runs that the plan says fit, in exactly the memory that it says they need: none may be killed.

    python tests/fit_trials.py                20 settings, one after the other
    python tests/fit_trials.py 3 7            some of them

A setting is a model of 100 to 450 million random parameters and flags, drawn from its number. preview.py
plans it in a cgroup of 3 GiB. The run is then started in one that is smaller by what the plan says is not
needed.
"""

import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

from limited import Limit
from tiny import tiny_model_folder

ROOT = Path(__file__).resolve().parent.parent
GIB, MIB = 2**30, 2**20
MOST = 3 * GIB  # that a run may need; larger settings are drawn again
SHAPES = {  # millions of parameters -> width, inner width, blocks, vocabulary
    100: (640, 1792, 12, 32000),
    150: (768, 2048, 14, 32000),
    250: (1024, 2816, 15, 32000),
    350: (1024, 2816, 22, 32000),
    450: (1152, 3072, 24, 32000),
}
ROOM = r"room +([\d.]+) GiB a rank, 1.6 x what is alive.*; there is ([\d.]+) GiB a rank"
# GiB of a rank that are added: the plan is told in hundredths, and two starts differ a little
EACH = 0.02


def draw(number: int) -> dict:
    """The setting of that number: size in millions, ranks, tokens of a row, flags."""
    dice = random.Random(number)
    lora = dice.random() < 0.5
    size = dice.choice([100, 250, 450] if lora else [100, 100, 250])
    flags = {"batch_size": dice.choice([1, 2, 3]), "grad_accum": dice.choice([1, 1, 2])}
    flags["activation_checkpointing"] = dice.choice(["none", "none", "selective", "full"])
    flags["optimizer"] = dice.choice(["adamw", "adamw", "adamw_8bit"])
    if not lora:
        flags["param_dtype"] = dice.choice(["bf16"] if size > 150 else ["fp32", "bf16"])
    if lora:
        flags |= {
            "lora_rank": dice.choice([8, 64]),
            "quantization": dice.choice(["none", "8bit", "4bit"]),
        }
    flags["cpu_offload"] = dice.random() < 0.2
    flags["async_save"] = dice.random() < 0.3
    flags["reshard_after_forward"] = dice.random() < 0.7
    flags["fit"] = dice.random() < 0.15
    return {
        "size": size,
        "ranks": dice.choice([1, 1, 2]),
        "seq_len": dice.choice([32, 64, 128]),
        "flags": flags,
    }


def make_model(folder: Path, size: int) -> Path:
    import torch

    width, inner, blocks, vocabulary = SHAPES[size]
    heads = width // 64
    return tiny_model_folder(
        folder,
        dtype=torch.bfloat16,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=vocabulary,
        max_position_embeddings=2048,
    )


def make_rows(file: Path) -> Path:
    row = {
        "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1 " * 900}]
    }
    file.write_text("\n".join(json.dumps(row) for _ in range(16)))
    return file


def command(
    setting: dict, model: Path, rows: Path, out: Path, *more: str, recipe: str = "finetune"
) -> list[str]:
    """Two steps, each with a checkpoint, and the final save."""
    flags = {"model": model, "dataset": rows, "output_dir": out, "seq_len": setting["seq_len"]}
    flags |= {"steps": 2, "save_every": 1, "log_every": 1} | setting["flags"]
    flags.pop("fit")
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    words = [{"True": "true", "False": "false"}.get(word, word) for word in words]
    launcher = [sys.executable]
    if setting["ranks"] > 1:
        launcher += [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(setting["ranks"]),
        ]
    return [*launcher, str(ROOT / "recipes" / f"{recipe}.py"), *words, *more]


def trial(setting: dict, model: Path, rows: Path, out: Path) -> dict:
    """What became of a setting, in as much memory as its plan says."""
    options = {
        "cwd": ROOT,
        "env": os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    }
    with Limit(MOST) as limit:
        planned = limit.run(command(setting, model, rows, out, recipe="preview"), **options)
    needed, there_is = map(float, re.search(ROOM, planned.stdout).groups())
    found = {"limit": MOST - int((there_is - needed - EACH) * setting["ranks"] * GIB), "killed": 0}
    found |= {
        "larger": found["limit"] > MOST,
        "rc": 0,
        "said": "",
        "all": planned.stdout,
        "seconds": 0,
    }
    if found["larger"]:
        return found
    began = time.monotonic()
    with Limit(found["limit"]) as limit:
        ended = limit.run(
            command(setting, model, rows, out, *["--fit"] * setting["flags"]["fit"]),
            seconds=1800,
            **options,
        )
        found["killed"] = limit.kills
    told = ("memory", "room", "error", "fitted")
    found["said"] = "".join(f"    {x}\n" for x in ended.stdout.splitlines() if x.startswith(told))
    return found | {
        "rc": ended.returncode,
        "all": ended.stdout,
        "seconds": round(time.monotonic() - began),
    }


def main(numbers: list[int]) -> int:
    folder = Path(tempfile.mkdtemp(prefix="fit_trials_"))
    done = killed = 0
    try:
        rows = make_rows(folder / "rows.jsonl")
        for number in numbers or range(100):
            setting = draw(number)
            model = folder / f"model_{setting['size']}"
            if not model.exists():
                make_model(model, setting["size"])
            found = trial(setting, model, rows, folder / "run")
            shutil.rmtree(folder / "run", ignore_errors=True)
            if found["larger"]:
                print(
                    f"{number}: needs more than {MOST / GIB:.0f} GiB",
                    json.dumps(setting),
                    flush=True,
                )
                continue
            done, killed = done + 1, killed + bool(found["killed"])
            result = f"limit {found['limit'] / GIB:.2f} GiB, killed {found['killed']}, exit {found['rc']}"
            print(f"{number}: {result}, {found['seconds']} s", json.dumps(setting), flush=True)
            print(found["all"][-6000:] if found["rc"] else found["said"], flush=True)
            if done == 20:
                break
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{done} settings, {killed} of them killed")
    return killed


if __name__ == "__main__":
    sys.exit(bool(main([int(word) for word in sys.argv[1:]])))
