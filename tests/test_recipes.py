"""Every command that the README shows runs, and the recipe does what its flags say.

python -m pytest tests/test_recipes.py
"""

import json
import re
import shlex
from pathlib import Path

import finetune
import pytest
import torch
from launch import forked
from ranks import run_ranks
from safetensors.torch import load_file
from shell import QUOTED, ROOT, shell
from test_config import load_config
from test_parity import write_rows
from tiny import tiny_model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.data.examples import Rows, load_examples
from utils.data.held_out import split_by_hash
from utils.data.tokens import load_tokenizer
from utils.run.distributed import START_SECONDS
from utils.run.units import IGNORE

READMES = "\n".join(
    path.read_text() for path in (ROOT / "README.md", *sorted(ROOT.glob("*/README.md")))
)
QUICK = {"steps": 2, "batch_size": 2, "save_every": 0}


def readme_commands() -> list[str]:
    """The lines of the READMEs' shell blocks that start a recipe, each once."""
    blocks = re.findall(r"```bash\n(.*?)```", READMES, re.S)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return list(
        dict.fromkeys(
            line for line in lines if re.match(r"(torchrun|python) .*recipes/\w+\.py", line)
        )
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("recipes")
    return tiny_model_folder(root / "model", vocab_size=271), write_rows(root / "rows.jsonl", 6)


def run(files, out, **flags):
    model, rows = files
    settings = {**QUICK, "model": str(model), "dataset": str(rows), "output_dir": str(out), **flags}
    return finetune.main(finetune.Config(**settings))


def numbers(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_every_test_that_a_readme_names_exists():
    sources = {path.name: path.read_text() for path in (ROOT / "tests").glob("test_*.py")}
    named = set(re.findall(r"`(?:tests/)?(test_\w+(?:\.py)?)`", READMES))
    assert len(named) > 12
    for name in named:
        assert name in sources or any(f"def {name}(" in text for text in sources.values()), name


def test_the_readme_says_how_long_ranks_wait_for_each_other():
    (row,) = [line for line in READMES.splitlines() if line.startswith("| a rank hangs")]
    assert f"after `--timeout` ({finetune.Config.timeout} s) in a step" in row
    assert f"after {START_SECONDS} s in the first step" in row


def test_the_readme_shows_the_promised_command():
    assert "torchrun --nproc_per_node 2 recipes/finetune.py --low_cpu_fsdp" in readme_commands()


@pytest.fixture(scope="module")
def adapted(files, tmp_path_factory):
    """The folder of a LoRA run, and a file of prompts."""
    out = tmp_path_factory.mktemp("adapted")
    (out / "prompts.txt").write_text("Count to 3.\nCount to 4.\n")
    return run(files, out / "lora", lora_rank=4, save_every=2), out / "prompts.txt"


@pytest.mark.parametrize(("lr", "remarked"), [(finetune.Config.lr, True), (2e-4, False)])
def test_adapters_at_the_default_rate_are_told_the_usual_one(files, tmp_path, capsys, lr, remarked):
    run(files, tmp_path / "lora", lora_rank=2, lr=lr, save_model=False)
    said = "; with LoRA ten times this --lr is usual" in capsys.readouterr().out
    assert said == remarked


AT_ONCE = "--low_cpu_fsdp"  # the command that ends so is in `make test`


def firsts() -> set[str]:
    """The first command of each recipe, which is started as a user would; the others are forked, and so are
    those of recipes of which test_tiny.py and others start the bare command.
    """
    found = dict.fromkeys(("prefer", "reward", "grpo", "vision", "pretrain"), "")
    for command in readme_commands():
        found.setdefault(re.search(r"recipes/(\w+)\.py", command)[1], command)
    return set(found.values())


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=[] if c.endswith(AT_ONCE) else pytest.mark.slow)
        for c in readme_commands()
    ],
)
def test_every_command_of_the_readme_runs(command, files, adapted, tmp_path):
    """As written, but for fewer ranks, steps and rows, our own output folder, and real files for names."""
    model, rows = files
    words = shlex.split(
        command.replace("recipes/", f"{QUOTED}/recipes/").replace("configs/", f"{QUOTED}/configs/")
    )
    values = {"--nproc_per_node": "2", "--model": str(model), "--dataset": str(rows)}
    values |= {"--checkpoint": str(adapted[0]), "--adapter": f"{adapted[0]}/adapter"}
    values |= {"--prompts": str(adapted[1]), "--tokens": "2000"}
    if re.search("prefer.py|reward.py", command):
        pair = {"prompt": "Count to 3", "chosen": "1 2 3", "rejected": "3 2 1"}
        values["--dataset"] = str(tmp_path / "pairs.jsonl")
        Path(values["--dataset"]).write_text(json.dumps(pair) + "\n")
    if "grpo.py" in command:
        words += ["--max_new_tokens", "4", "--global_batch_size", "2"]
        values["--dataset"] = str(tmp_path / "math.jsonl")
        Path(values["--dataset"]).write_text('{"prompt": "1 + 1", "answer": "2"}\n' * 4)
    if "vision.py" in command:
        values["--model"] = f"{ROOT}/recipes/tiny/vision"
        values["--dataset"] = f"{ROOT}/recipes/tiny/vision/heldout.jsonl"
    if "plan.py" in command:  # its names are known
        values.clear()
    for i, word in enumerate(words[:-1]):
        words[i + 1] = values.get(word, words[i + 1])
    if "--config" in words and values:
        words += ["--model", str(model)]
        words += [] if "--dataset" in words else ["--dataset", str(rows)]
    if "--help" not in words and re.search(
        "finetune.py|prefer.py|reward.py|pretrain.py|grpo.py|vision.py", command
    ):
        words += [] if "--tokens" in words else ["--steps", "2"]
        words += ["--save_every", "0"]
        words += [] if "--dataset" in words else ["--max_rows", "64"]
    if re.search("generate.py|eval.py", command):
        words += ["--max_new_tokens", "8"]
    start = shell if command in firsts() else forked
    result = start(shlex.join(words), tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    begins = "--- world" if "--help" not in words else "Supervised"
    if "plan.py" in command:
        begins = f"{words[words.index('--model') + 1]}: "
    assert result.stdout.startswith(begins)
    if "--gpu_memory 40" in command:  # configs/README.md shows its output, without some rows
        shown = re.search(r"```\n(llama-3-8b: .*?)```", READMES, re.S)[1].splitlines()
        assert {*shown} - {"  ..."} <= {*result.stdout.splitlines()}


@pytest.mark.slow
def test_from_any_working_folder_twice_in_a_row_it_trains_twice(tmp_path):
    command = f"torchrun --nproc_per_node 2 {QUOTED}/recipes/finetune.py --low_cpu_fsdp --steps 2"
    command += " --max_rows 64"
    for count in (1, 2):
        assert forked(command, tmp_path).returncode == 0
        runs = sorted((tmp_path / "output").iterdir())
        assert [folder.name for folder in runs] == ["finetune-001", "finetune-002"][:count]
        assert len(numbers(runs[-1])) == 2


def test_the_output_loads_with_from_pretrained_and_stops_by_itself(files, tmp_path):
    out = run(files, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert model.dtype == torch.float32
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in model.generation_config.eos_token_id
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(files[0]).chat_template


def test_the_run_folder_holds_what_the_house_says(files, tmp_path):
    out = run(files, tmp_path, save_every=1, keep=1)
    assert {p.name for p in out.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "metrics.jsonl",
        "model",
        "plan.json",
    }
    assert {p.name for p in (out / "checkpoints").iterdir()} == {"step_00000002"}
    assert load_config(finetune.Config, out / "config.yaml").model == str(files[0])
    plan = json.loads((out / "plan.json").read_text())
    assert plan["planned"]["weights"] > 0
    assert plan["measured"]["steps"] == 2
    for name in (
        "step",
        "loss",
        "grad_norm",
        "lr",
        "trained_tokens",
        "tokens",
        "seconds",
        "tokens_per_second",
    ):
        assert [name in line for line in numbers(out)] == [True, True]


def test_held_out_rows_are_not_trained_on_and_are_measured(files, tmp_path):
    model, _ = files
    rows = write_rows(tmp_path / "rows.jsonl", 24)
    share, batch = 0.3, 2
    out = run(
        (model, rows),
        tmp_path / "out",
        eval_share=share,
        eval_every=5,
        steps=0,
        epochs=1,
        batch_size=batch,
    )
    everything = load_examples(Rows(str(rows), 2048), load_tokenizer(model))
    trained, held_out = split_by_hash(everything, share)
    lines = numbers(out)
    tokens = sum(line["tokens"] for line in lines if "tokens" in line)
    # each row of the epoch once
    assert tokens == int(trained.lengths.sum()) < int(everything.lengths.sum())
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert len(losses) == -(-len(trained) // batch) // 5 + 1
    # as it was at the last measurement
    theirs = AutoModelForCausalLM.from_pretrained(out / "model")
    total = count = 0
    for item in held_out:
        labels = item.labels[None].long()
        n = int((labels[:, 1:] != IGNORE).sum())
        total += theirs(input_ids=item.ids[None].long(), labels=labels).loss.item() * n
        count += n
    assert losses[-1] == pytest.approx(total / count, rel=1e-4)


def test_a_model_that_is_bf16_on_disk_stays_bf16_unless_told_otherwise(files, tmp_path):
    folder = tiny_model_folder(tmp_path / "bf16", dtype=torch.bfloat16, vocab_size=271)
    saved = {}
    for save_dtype in ("original", "fp32"):
        out = run((folder, files[1]), tmp_path / save_dtype, save_dtype=save_dtype)
        saved[save_dtype] = load_file(out / "model" / "model.safetensors")
    for name, tensor in saved["original"].items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, saved["fp32"][name].bfloat16())  # cast once from the fp32 master


def on_ranks(world, files, out, flags):
    return run(files, out, **flags)


@pytest.mark.slow
def test_bf16_compute_trains_like_fp32_to_rounding(files, tmp_path):
    curves = {}
    for dtype in ("fp32", "bf16"):
        flags = {"dtype": dtype, "steps": 4, "lr": 1e-3}
        out = run_ranks(on_ranks, 2, files, tmp_path / dtype, flags)[0]
        curves[dtype] = [line["loss"] for line in numbers(out)]
    assert curves["bf16"] == pytest.approx(curves["fp32"], rel=2e-2)
    assert curves["bf16"] != curves["fp32"]


def test_the_classic_way_trains_the_same(files, tmp_path):
    curves = []
    for low in (True, False):
        out = run_ranks(on_ranks, 2, files, tmp_path / str(low), {"low_cpu_fsdp": low})[0]
        curves.append([(line["loss"], line["grad_norm"]) for line in numbers(out)])
    assert curves[0] == curves[1]


def test_tensorboard_gets_the_numbers(files, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = run(files, tmp_path, tensorboard=True)
    written = EventAccumulator(str(out / "tensorboard")).Reload()
    for name in ("loss", "lr", "grad_norm"):
        found = [(event.step, event.value) for event in written.Scalars(name)]
        assert found == [(line["step"], pytest.approx(line[name])) for line in numbers(out)]
        assert len(found) == 2


def test_a_loss_that_is_not_finite_stops_all_ranks_naming_step_rank_and_rows(files, tmp_path):
    folder = tiny_model_folder(tmp_path / "model", vocab_size=271)
    weights = load_file(folder / "model.safetensors")
    rare = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("6")  # of one row only
    weights["model.embed_tokens.weight"][rare] = float("nan")
    from safetensors.torch import save_file

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    rows = write_rows(tmp_path / "rows.jsonl", 7)
    with pytest.raises(AssertionError, match=r"rank [01]: step 1: loss nan, .*rows.jsonl:7"):
        run_ranks(on_ranks, 2, (folder, rows), tmp_path / "out", {"batch_size": 4, "save_every": 1})
    assert not (tmp_path / "out" / "model").exists()
    assert not (tmp_path / "out" / "checkpoints").exists()
