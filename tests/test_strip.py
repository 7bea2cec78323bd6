"""A copied recipe is changed by a few edits: each script below applies to a copy, which then trains.

What an owner of a copy does: take adapters and quantization out, swap the loss, add a data format, add a
flag. The numbers of files that they touch are part of the claim.

python -m pytest -m slow tests/test_strip.py
"""

import json
import re
import shutil

import pytest
import torch
from launch import forked
from safetensors.torch import load_file
from shell import ROOT
from test_parity import write_rows
from tiny import tiny_model_folder

RECIPE = "recipes/finetune.py"
# (file, text, text in its place); a text that begins with ^ is a regular expression over whole lines
WITHOUT_ADAPTERS = [
    (RECIPE, r"^    python .* --lora_rank 16 .*\n", ""),
    (RECIPE, "; any: also LoRA, 8bit and 4bit", ""),
    (RECIPE, "from utils.model.options import Lora, Quant, check_adapter_flags\n", ""),
    (RECIPE, "    tokenizer_of,\n", ""),
    (RECIPE, "tokenizer_of(cfg.adapter) or ", ""),
    (RECIPE, r"^    lora_rank: int(?s:.*?)(?=^    low_cpu_fsdp: bool)", ""),
    (RECIPE, r"^        check_adapter_flags\(.*\n", ""),
    (RECIPE, r"^            lora=.*\n            quant=.*\n", ""),
    (RECIPE, r"^    lora = .*\n    quant = .*\n", ""),
    (RECIPE, r"^        \*\*lora.facts\(\),\n", ""),
    (RECIPE, "0 if lora else ", ""),
    (RECIPE, ", frozen=bool(lora)", ""),
    (RECIPE, r"^    adapted_names = None(?s:.*?)(?=^    add_chunked_loss)", ""),
    (RECIPE, "{'frozen' if lora else cfg.param_dtype}", "{cfg.param_dtype}"),
    (RECIPE, r"^        f.\{'; with LoRA .*\n", ""),
    (RECIPE, "cfg.cpu_offload, adapted_names)", "cfg.cpu_offload)"),
    (RECIPE, r"^        if lora:\n +fill_adapters\(.*\n", ""),
    (RECIPE, '("adapter" if lora else "model")', '"model"'),
    (RECIPE, r"^    if cfg.save_model and lora:(?s:.*?)^    elif", "    if"),
]
OTHER_LOSS = [
    (
        RECIPE,
        "summed_cross_entropy(model, batch)",
        "summed_cross_entropy(model, batch, focal_loss)",
    ),
    (
        RECIPE,
        "\n\ndef settle(",
        '''

def focal_loss(logits, targets):
    """Lin et al., arXiv 1708.02002: (c, V) and (c,) -> (c,)."""
    loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    return (1 - torch.exp(-loss)) ** 2 * loss


def settle(''',
    ),
]
OTHER_FLAG = [
    (
        RECIPE,
        "    clip_norm: float = 1.0",
        "    beta2: float = 0.95  # of AdamW's second moment\n    clip_norm: float = 1.0",
    ),
    (RECIPE, "BETAS = (0.9, 0.95)  # of AdamW\n", ""),
    (RECIPE, "betas {BETAS}", "betas (0.9, {cfg.beta2:g})"),
    (RECIPE, "lr=cfg.lr, betas=BETAS, fused=True", "lr=cfg.lr, betas=(0.9, cfg.beta2), fused=True"),
    (RECIPE, "lr=cfg.lr, betas=BETAS, paged", "lr=cfg.lr, betas=(0.9, cfg.beta2), paged"),
]
OTHER_FORM = [
    ("utils/data/formats.py", '    "text": "text",', '    "text": "text",\n    "question": "qa",'),
    (
        "utils/data/formats.py",
        '    "text": read_text,',
        '    "text": read_text,\n    "qa": read_qa,',
    ),
    (
        "utils/data/formats.py",
        "\n\nREADERS =",
        """

def read_qa(row: dict, notes: Counter) -> Read:
    question, answer = text_of(row, "question"), text_of(row, "answer")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], None


READERS =""",
    ),
]
OTHER_GROUPS = [
    (
        RECIPE,
        "trained = [p for p in model.parameters() if p.requires_grad]",
        'trained = [p for name, p in model.named_parameters() if "layers.1." in name]',
    ),
]
AVERAGED = [  # and with frozen weights
    (
        RECIPE,
        "    add_chunked_loss(model)\n",
        "    decoder_layers(model)[:1].requires_grad_(False)\n    add_chunked_loss(model)\n",
    ),
    (RECIPE, "optimizer = torch.optim.AdamW(groups", "optimizer = Averaged(groups"),
    (
        RECIPE,
        "    result = out / (",
        """    with torch.no_grad():
        for p in trained:
            p.copy_(optimizer.state[p]["ema"])
    result = out / (""",
    ),
    (
        RECIPE,
        "\n\ndef settle(",
        """

class Averaged(torch.optim.AdamW):
    def step(self):
        super().step()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            self.state[p].setdefault("ema", p.detach().clone()).lerp_(p.detach(), 0.1)


def settle(""",
    ),
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("strip")
    return tiny_model_folder(root / "model", vocab_size=271), write_rows(root / "rows.jsonl", 4)


def edited(folder, edits, most_files: int):
    """A copy of recipes and utils with these edits, each of which changes one place."""
    for name in ("recipes", "utils"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "tiny")
        )
    for name, old, new in edits:
        text = (folder / name).read_text()
        pattern = old if old.startswith("^") else re.escape(old)
        text, count = re.subn(pattern, new.replace("\\", r"\\"), text, flags=re.M)
        assert count == 1, f"{name}: {count} places are {old!r}"
        (folder / name).write_text(text)
    assert len({name for name, _, _ in edits}) <= most_files
    return folder / RECIPE


@pytest.mark.parametrize(
    "edits", [WITHOUT_ADAPTERS, OTHER_LOSS, OTHER_FLAG, OTHER_FORM, OTHER_GROUPS, AVERAGED]
)
def test_the_recipe_still_has_the_places_that_are_edited(edits, tmp_path):
    edited(tmp_path, edits, most_files=1)


def losses(recipe, model, rows, flags="") -> list[float]:
    out = recipe.parent.parent / "out"
    shutil.rmtree(out, ignore_errors=True)  # that of another call
    sizes = "--steps 3 --batch_size 4 --lr 0.01 --save_every 0"
    command = f"python {recipe} --model {model} --dataset {rows} --output_dir {out} {sizes} {flags}"
    ended = forked(command, recipe.parent.parent)
    assert ended.returncode == 0, ended.stdout
    assert (out / "model" / "model.safetensors").exists()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def usual(files, tmp_path_factory):
    """The losses of a copy without edits."""
    return losses(edited(tmp_path_factory.mktemp("usual"), [], most_files=0), *files)


@pytest.mark.slow
def test_adapters_and_quantization_are_taken_out_of_one_file(files, usual, tmp_path):
    recipe = edited(tmp_path / "copy", WITHOUT_ADAPTERS, most_files=1)
    for name in ("lora", "quantize"):
        (tmp_path / "copy" / "utils" / "model" / f"{name}.py").unlink()
    assert "lora" not in recipe.read_text().lower()
    assert losses(recipe, *files) == usual


@pytest.mark.slow
def test_the_loss_is_swapped_in_one_file(files, tmp_path):
    first, *_, last = losses(edited(tmp_path, OTHER_LOSS, most_files=1), *files)
    assert 0 < last < first < 5.6  # below the cross-entropy of 271 tokens at random, 5.602


@pytest.mark.slow
def test_a_part_of_the_weights_in_the_groups_is_trained_and_resumed_exactly(files, tmp_path):
    """The gradients of the others were never freed, and their growing norm clipped the steps."""
    recipe = edited(tmp_path, OTHER_GROUPS, most_files=1)
    straight = losses(recipe, *files, "--steps 4 --save_every 2")
    checkpoint = tmp_path / "out" / "checkpoints" / "step_00000002"
    shutil.move(checkpoint, tmp_path / "kept")
    assert losses(recipe, *files, f"--steps 4 --resume {tmp_path}/kept") == straight[2:]


@pytest.mark.slow
def test_an_average_of_the_weights_in_the_optimizer_is_resumed_exactly(files, tmp_path):
    recipe = edited(tmp_path, AVERAGED, most_files=1)
    straight = losses(recipe, *files, "--steps 4 --save_every 2")
    expected = load_file(tmp_path / "out" / "model" / "model.safetensors")
    shutil.move(tmp_path / "out" / "checkpoints" / "step_00000002", tmp_path / "kept")
    assert losses(recipe, *files, f"--steps 4 --resume {tmp_path}/kept") == straight[2:]
    found = load_file(tmp_path / "out" / "model" / "model.safetensors")
    before = load_file(files[0] / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    kept = {name for name in found if torch.equal(found[name], before[name])}
    assert kept == {name for name in found if "layers.0." in name}


@pytest.mark.slow
def test_a_flag_is_added_in_one_file(files, usual, tmp_path):
    recipe = edited(tmp_path, OTHER_FLAG, most_files=1)
    assert "--beta2" in forked(f"python {recipe} --help", tmp_path).stdout
    assert losses(recipe, *files, "--beta2 0.95") == usual
    first, second, third = losses(recipe, *files, "--beta2 0.5")
    assert [first, second] == usual[:2]  # AdamW's first step is the same whatever it is
    assert third != usual[2]


@pytest.mark.slow
def test_a_data_format_is_added_in_one_file(files, usual, tmp_path):
    model, rows = files
    pairs = []
    for line in rows.read_text().splitlines():
        question, answer = (turn["content"] for turn in json.loads(line)["messages"])
        pairs.append(json.dumps({"question": question, "answer": answer}) + "\n")
    (tmp_path / "pairs.jsonl").write_text("".join(pairs))
    recipe = edited(tmp_path, OTHER_FORM, most_files=1)
    assert losses(recipe, model, tmp_path / "pairs.jsonl") == usual
    named = f"--model {model} --dataset {tmp_path}/pairs.jsonl --format qa"
    preview = recipe.with_name("preview.py")
    assert forked(f"python {preview} {named}", tmp_path).returncode == 0
