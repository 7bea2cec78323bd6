"""recipes/vision.py: what a page of PyTorch learns from pictures, on any number of ranks.

python -m pytest tests/test_vision.py -m ""
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import vision
from launch import Forked, forked
from metrics import read_metrics
from peft import PeftModel
from picture_families import MORE, NAMES, family_folder
from PIL import Image
from ranks import run_ranks
from safetensors.torch import load_file
from shell import QUOTED, ROOT
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from utils.data.encode import Rows
from utils.data.examples import load_examples
from utils.data.picture_batches import PictureBatches
from utils.data.pictures import load_processor, read_pictured
from utils.data.tokens import load_tokenizer, pad_id, render
from utils.model.kinds import part_names
from utils.run.errors import ConfigError
from utils.run.settings import parse_cli

sys.path.append(str(ROOT / "recipes" / "tiny"))

import make_vision

slow = pytest.mark.slow
ALL = "language,projector,vision"
STEPS, GLOBAL_BATCH = 3, 6
# With AdamW a gradient near 0 makes a whole step of its rounding: the rate is small.
RUN = {
    "steps": STEPS,
    "lr": 1e-4,
    "warmup": 1,
    "schedule": "constant",
    "global_batch_size": GLOBAL_BATCH,
    "batch_size": 1,
    "seed": 4,
    "save_every": 0,
    "workers": 0,  # the ranks of run_ranks may have no processes of their own
}


def chat(text: str, answer: str, *pictures: str) -> dict:
    parts = [{"type": "image", "path": name} for name in pictures]
    question = {"role": "user", "content": [*parts, {"type": "text", "text": text}]}
    return {"messages": [question, {"role": "assistant", "content": answer}]}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows with one picture, two and none, of very different lengths; 10 do not divide into 6 and 6."""
    root = tmp_path_factory.mktemp("rows")
    for i, size in enumerate([(60, 40), (120, 60), (30, 90)]):
        torch.manual_seed(i)
        noise = torch.randint(256, (size[1], size[0], 3), dtype=torch.uint8)
        Image.fromarray(noise.numpy()).save(root / f"{i}.png")
    lines = []
    for i in range(10):
        pictures = [[f"{i % 3}.png"], [], [f"{i % 2}.png", "2.png"], []][i % 4]
        lines.append(chat("What? " * (1 + i % 3), "So " * (1 + i % 5), *pictures))
    write(root / "rows.jsonl", lines)
    write(root / "texts.jsonl", [line for i, line in enumerate(lines) if i % 2])
    return root / "rows.jsonl"


def write(file: Path, lines: list[dict]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")

    def folder(name: str) -> Path:
        return root / name if (root / name).exists() else family_folder(name, root)

    return folder


def train(world, flags):
    return vision.main(vision.Config(**flags))


def trained(ranks, out, folder, rows, **flags):
    """(run folder, [(loss, gradient norm)] by step, final weights)."""
    flags = RUN | {"model": str(folder), "dataset": str(rows), "output_dir": str(out)} | flags
    out = run_ranks(train, ranks, flags)[0]
    (result,) = out.glob("*/*model.safetensors")
    return out, curve(out), load_file(result)


@pytest.fixture(scope="module")
def run_of(folder_of, rows, tmp_path_factory):
    """What trained() returns of ranks, a family and flags: tests that ask for the same share one run."""

    @cache
    def run(ranks: int, name: str, **flags):
        return trained(
            ranks, tmp_path_factory.mktemp("run") / "out", folder_of(name), rows, **flags
        )

    return run


def curve(out: Path) -> list[tuple[float, float]]:
    return [
        (found["loss"], found["grad_norm"])
        for found in read_metrics(out / "metrics.jsonl")
        if "loss" in found
    ]


def assert_alike(curves, weights, expected, rtol=1e-5):
    """The norm of a gradient through cross-attention is 1e-4 where the two kinds of rows cancel."""
    torch.testing.assert_close(curves[0], curves[1], rtol=10 * rtol, atol=rtol)
    for name, tensor in weights.items():
        assert (tensor - expected[name]).norm() <= rtol * expected[name].norm(), name


class Page:
    """The rows as the model's own processor gives them, one by one, and their labels."""

    def __init__(self, folder: Path, rows: Path):
        tokenizer = load_tokenizer(folder)
        processor = load_processor(folder, tokenizer)
        source = Rows(str(rows), 2048, processor=str(folder))
        examples = load_examples(source, tokenizer)
        sizes = (GLOBAL_BATCH, GLOBAL_BATCH, 0, 1, pad_id(tokenizer))
        self.batches = PictureBatches(examples, RUN["seed"], *sizes, source, processor, 0)
        self.rows = []
        for number, line in enumerate(rows.read_text().splitlines()):
            messages, _, sources, _ = read_pictured(json.loads(line), "chat", {})
            pictures = [Image.open(rows.parent / name) for name in sources]
            batch = dict(
                processor(
                    text=[render(tokenizer, messages)],
                    images=[pictures] if pictures else None,
                    add_special_tokens=False,
                    return_tensors="pt",
                )
            )
            example = examples[number]
            assert batch["input_ids"][0].tolist() == example.ids.tolist()
            self.rows.append((batch, example.labels.long()))

    def loss(self, model, numbers: list[int]) -> torch.Tensor:
        """Per trained token of these rows."""
        total, count = 0, 0
        for number in numbers:
            batch, labels = self.rows[number]
            logits = model(**batch, use_cache=False).logits[0, :-1].float()  # (T - 1, V)
            total = total + F.cross_entropy(logits, labels[1:], reduction="sum")
            count += int((labels[1:] != -100).sum())
        return total / count

    def train(self, model) -> list[tuple[float, float]]:
        """What the recipe does, as a page of PyTorch: [(loss, gradient norm)] by step."""
        params = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.ndim > 1]},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, RUN["lr"], (0.9, 0.95), weight_decay=0.01)
        found = []
        for step in range(STEPS):
            loss = self.loss(model, self.batches.rows_of(step))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append((loss.item(), norm.item()))
        return found


def plain(folder: Path, parts: str = ALL):
    """transformers' own model, of which some parts are trained."""
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).train()
    for part, names in part_names(model).items():
        for name in names:
            model.get_parameter(name).requires_grad_(part in parts)
    return model


LEARN = [
    (name, parts)
    for name in ("qwen2_5_vl", "mllama", "gemma3", *MORE, "internvl", "minicpmv4_6")
    for parts in (ALL, "language,projector")
]
AT_ONCE = (("qwen2_5_vl", ALL), ("mllama", "language,projector"))  # the others: make test-all


def evaluated_on(rows: Path) -> dict:
    return {"eval_dataset": str(rows), "eval_every": 2}


@pytest.mark.parametrize(
    ("name", "parts"),
    [pytest.param(*both, marks=[] if both in AT_ONCE else [slow]) for both in LEARN],
)
def test_two_ranks_learn_what_a_page_of_pytorch_learns(name, parts, folder_of, run_of, rows):
    """transformers' own class and full logits, the processor's own rows one by one, no FSDP, no blank
    pictures; rows with pictures and without.
    """
    folder = folder_of(name)
    model = plain(folder, parts)
    expected = Page(folder, rows).train(model)
    evaluated = evaluated_on(rows) if (name, parts) == AT_ONCE[1] else {}
    out, found, _ = run_of(2, name, train=parts, **evaluated)
    saved = AutoModelForImageTextToText.from_pretrained(out / "model", dtype=torch.float32)
    assert_alike((found, expected), saved.state_dict(), model.state_dict())
    files = {path.name for path in folder.iterdir()}
    assert files - {path.name for path in (out / "model").iterdir()} == set()


def test_a_step_may_begin_with_texts_alone(folder_of, rows, tmp_path):
    """FSDP2 then reduces gradients of towers that have not run."""
    folder, file = folder_of("llava"), rows.parent / "long.jsonl"
    texts = [chat("Long? " * 60, "So " * i) for i in range(1, 5)]
    write(file, [*texts, chat("What?", "So", "0.png"), chat("What?", "So it is", "1.png")])
    model = plain(folder)
    expected = Page(folder, file).train(model)
    out, found, _ = trained(2, tmp_path / "out", folder, file, train=ALL)
    saved = AutoModelForImageTextToText.from_pretrained(out / "model", dtype=torch.float32)
    assert_alike((found, expected), saved.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ["llava", pytest.param("mllama", marks=slow)])
def test_adapters_learn_what_pefts_learn(name, folder_of, rows, tmp_path):
    folder = folder_of(name)
    start, _, _ = trained(1, tmp_path / "start", folder, rows, lora_rank=4, steps=1, lr=1e-30)
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, start / "adapter", is_trainable=True).train()
    expected = Page(folder, rows).train(model)
    adapter = str(start / "adapter")
    out, found, _ = trained(2, tmp_path / "out", folder, rows, adapter=adapter)
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    saved = PeftModel.from_pretrained(base, out / "adapter")
    # lora_B begins at 0, so it is all rounding's steps
    assert_alike((found, expected), saved.state_dict(), model.state_dict(), rtol=1e-4)
    trains = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trains
    assert not [n for n in trains if "vision" in n or "projector" in n]


@pytest.mark.parametrize(
    "how",
    [
        {"ranks": 2, "batch_size": 2, "activation_checkpointing": "full", "cpu_offload": True},
        pytest.param({"ranks": 2, "low_cpu_fsdp": False}, marks=slow),
        pytest.param({"ranks": 4, "replicate": 2}, marks=slow),
        pytest.param({"ranks": 4, "sync_each_microbatch": True}, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["mllama", pytest.param("qwen3_vl", marks=slow)])
def test_any_ranks_and_micro_batches_learn_the_same(name, how, folder_of, run_of, rows, tmp_path):
    learned = {"train": ALL, "global_batch_size": 8}
    _, one, expected = run_of(1, name, batch_size=8, **learned)
    how = learned | how
    _, many, weights = trained(how.pop("ranks"), tmp_path / "many", folder_of(name), rows, **how)
    assert_alike((many, one), weights, expected)


@slow
@pytest.mark.parametrize("name", NAMES)
def test_in_16_bit_two_ranks_and_micro_batches_learn_the_same(name, folder_of, rows, tmp_path):
    """FSDP2 refuses gradients in two dtypes, and gloo ranks that call a unit of theirs another time."""
    how = {"train": ALL, "dtype": "bf16", "lr": 1e-3}
    _, one, _ = trained(1, tmp_path / "one", folder_of(name), rows, batch_size=6, **how)
    _, many, _ = trained(2, tmp_path / "many", folder_of(name), rows, **how)
    torch.testing.assert_close(many, one, rtol=3e-2, atol=3e-2)


CUT = {"save_every": 2, "keep": 0, "steps": 4}


@pytest.fixture(scope="module")
def cut_of(run_of, folder_of, rows, tmp_path_factory):
    """(the run on two ranks, a copy of it after its first two of four steps) of mllama."""

    @cache
    def cut(**how):
        run = run_of(2, "mllama", **CUT, **how)
        out = shutil.copytree(run[0], tmp_path_factory.mktemp("cut") / "out")
        shutil.rmtree(out / "checkpoints" / "step_00000004")
        shutil.rmtree(out / ("adapter" if "lora_rank" in how else "model"))
        (out / "plan.json").unlink()
        return run, out

    return cut


@pytest.fixture(scope="module")
def on_one_rank_of(cut_of, folder_of, rows, tmp_path_factory):
    """What one rank makes of the copy, which two have begun; it saves in bf16."""

    @cache
    def on_one_rank(**how):
        one = shutil.copytree(cut_of(**how)[1], tmp_path_factory.mktemp("one") / "out")
        return trained(1, one, folder_of("mllama"), rows, **CUT, **how, save_dtype="bf16")

    return on_one_rank


@pytest.mark.parametrize(
    "how", [{"train": ALL}, pytest.param({"lora_rank": 4}, marks=slow)], ids=str
)
def test_a_run_that_was_cut_goes_on_bit_for_bit(how, cut_of, on_one_rank_of, folder_of, rows):
    (_, expected, weights), out = cut_of(**how)
    _, on_one_rank, _ = on_one_rank_of(**how)
    torch.testing.assert_close(on_one_rank, expected, rtol=1e-5, atol=1e-6)
    _, found, again = trained(2, out, folder_of("mllama"), rows, **CUT, **how)
    assert found == expected
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())


def test_the_text_part_alone_loads_in_the_dtype_of_the_saved_model_and_its_tokenizer_pads_nothing(
    on_one_rank_of,
):
    out, _, _ = on_one_rank_of(train=ALL)
    assert json.loads((out / "model" / "tokenizer.json").read_text())["padding"] is None
    assert AutoModelForCausalLM.from_pretrained(out / "model").dtype == torch.bfloat16


def test_weights_in_bf16_are_computed_in_fp32_where_dtype_says_so(folder_of, rows, tmp_path):
    """Not as they are stored: then a tower that is frozen in fp32 and a projector in bf16 do not meet."""
    folder, how = folder_of("llava"), {"param_dtype": "bf16", "dtype": "fp32", "steps": 1}
    _, found, _ = trained(2, tmp_path / "all", folder, rows, train=ALL, **how)
    page, model = Page(folder, rows), plain(folder).bfloat16().float()
    expected = page.loss(model, page.batches.rows_of(0)).item()
    assert found[0][0] == pytest.approx(expected, rel=1e-5)
    trained(1, tmp_path / "default", folder, rows, **how)


def test_a_frozen_tower_has_no_state_and_does_not_change(folder_of, rows, tmp_path):
    folder = folder_of("llava")
    flags = {"save_every": STEPS, "dtype": "bf16"}
    out, _, weights = trained(2, tmp_path / "out", folder, rows, **flags)
    stored = FileSystemReader(out / "checkpoints" / f"step_{STEPS:08d}").read_metadata()
    names = list(stored.state_dict_metadata)
    assert [name for name in names if "multi_modal_projector" in name and "exp_avg" in name]
    assert not [name for name in names if "vision_tower" in name]
    changed = {
        name
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not torch.equal(tensor.bfloat16(), weights[name].bfloat16())
    }
    assert changed
    assert not [name for name in changed if "vision_tower" in name]


def test_each_part_has_its_own_rate(folder_of, rows, tmp_path):
    """The first step of AdamW moves a weight by its rate, whatever the gradient."""
    folder = folder_of("llava")
    rates = {"lr": 1e-4, "lr_projector": 3e-4, "lr_vision": 1e-5}
    flags = {"train": ALL, "steps": 1, "weight_decay": 0.0, "clip_norm": 0.0, **rates}
    out, _, _ = trained(2, tmp_path / "out", folder, rows, **flags)
    before = plain(folder)
    after = plain(out / "model").state_dict()
    for part, names in part_names(before).items():
        moved = max((after[n] - before.get_parameter(n)).abs().max().item() for n in names)
        rate = rates.get(f"lr_{part}", rates["lr"])
        assert moved == pytest.approx(rate, rel=0.01), part


def test_without_a_picture_the_language_model_alone_trains(folder_of, rows, tmp_path):
    folder, texts = folder_of("llava"), rows.parent / "texts.jsonl"
    out, losses, weights = trained(2, tmp_path / "out", folder, texts, train=ALL)
    assert json.loads((out / "plan.json").read_text())
    changed = {
        name
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not torch.equal(tensor, weights[name])
    }
    assert changed
    assert not [name for name in changed if "vision_tower" in name or "projector" in name]
    # The same command again finds the same settings.
    assert trained(2, out, folder, texts, train=ALL)[1] == losses


@pytest.mark.parametrize("name", ["rows.jsonl", "texts.jsonl"])
@pytest.mark.parametrize(
    "flags",
    [{"train": "projector,vision"}, {"lora_rank": 4, "lora_targets": ".*multi_modal.*linear_1"}],
    ids=["parts", "lora"],
)
def test_rows_without_a_picture_are_refused_where_the_language_model_is_frozen(
    flags, name, folder_of, rows, tmp_path
):
    given = {"model": str(folder_of("llava")), "dataset": str(rows.parent / name)}
    with pytest.raises(ConfigError, match="[0-9] rows have no picture, .* they have no gradient"):
        vision.main(vision.Config(**RUN | given | flags, output_dir=str(tmp_path / "out")))


@slow
@pytest.mark.parametrize("quantization", ["8bit", "4bit"])
def test_adapters_on_quantized_weights_learn_on_two_ranks_as_on_one(
    quantization, folder_of, rows, tmp_path
):
    flags = {"lora_rank": 4, "quantization": quantization, "lr": 1e-3, "steps": 8}
    flags["global_batch_size"] = 10
    _, one, _ = trained(1, tmp_path / "one", folder_of("qwen2_5_vl"), rows, **flags)
    _, two, _ = trained(2, tmp_path / "two", folder_of("qwen2_5_vl"), rows, **flags)
    torch.testing.assert_close(two, one, rtol=1e-3, atol=1e-4)
    assert two[-1][0] < two[0][0] - 0.1


def test_the_held_out_loss_is_that_of_the_model_that_is_saved(folder_of, run_of, rows):
    name, parts = AT_ONCE[1]
    folder = folder_of(name)
    out, _, _ = run_of(2, name, train=parts, **evaluated_on(rows))
    found = [f["eval_loss"] for f in read_metrics(out / "metrics.jsonl") if "eval_loss" in f]
    with torch.no_grad():
        loss = Page(folder, rows).loss(plain(out / "model").eval(), list(range(10)))
    assert len(found) == 2
    assert found[-1] == pytest.approx(loss.item(), rel=1e-5)


def words_of(said_of: str, folder_of, rows: Path, out: Path) -> str:
    """A command line with these flags, or with a row of this picture."""
    words = {"--model": folder_of("llava"), "--dataset": rows, "--output_dir": out}
    if not said_of.startswith("--"):
        write(rows.parent / "bad.jsonl", [chat("What?", "So", said_of)])
        said_of = f"--dataset {rows.parent}/bad.jsonl"
    given = said_of.format(rows=rows.parent)
    others = " ".join(f"{key} {value}" for key, value in words.items() if key not in given)
    return f"{others} {given}"


NO_SUCH_PICTURE = ("missing.png", r"bad.jsonl:1: picture 'missing.png': no such file")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--train tower", "--train tower: tower is none of language, projector, vision"),
        NO_SUCH_PICTURE,
    ],
)
def test_what_cannot_work_is_said_in_one_line(flags, said, folder_of, rows, tmp_path):
    words = words_of(flags, folder_of, rows, tmp_path / "out")
    done = forked(f"torchrun --nproc_per_node 2 recipes/vision.py {words}")
    assert done.returncode
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert re.search(said, line), line
    assert "Traceback" not in done.stdout
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--dataset {rows}/missing.jsonl", r"bad|missing.jsonl"),
        ("--train vision --lora_rank 4", "--train vision beside --lora_rank"),
        ("--lr_vision 1e-6", "--lr_vision: nothing there trains .*--train language,vision"),
        ("--lora_rank 4 --lr_projector 1e-4", "--lr_projector: nothing there trains"),
        ("--model recipes/tiny", "llama is no model of pictures and text"),
        NO_SUCH_PICTURE,  # to see that the two ways agree
        ("https://x.org/a.png", r"bad.jsonl:1: picture 'https://x.org/a.png': https: is not"),
        ("../a.png", r"bad.jsonl:1: picture '../a.png': it leads out of"),
    ],
)
def test_what_cannot_work_is_the_same_line_on_all_ranks(flags, said, folder_of, rows, tmp_path):
    """The command prints it once, as above."""
    words = words_of(flags, folder_of, rows, tmp_path / "out")
    lines, others = run_ranks(refused, 2, words)
    assert lines == others
    (line,) = lines
    assert re.search(said, line), line
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def refused(world, words: str) -> list[str]:
    """The lines of the error that ends the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vision.py", *words.split()])
        try:
            vision.main(parse_cli(vision.Config, without_model=vision.TINY_VALUES))
        except ConfigError as error:
            return error.lines
    return []


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def endless(folder: Path, rows: Path, out: Path, **flags) -> Forked:
    words = {"model": folder, "dataset": rows, "output_dir": out, "steps": 100_000, "lr": 1e-5}
    words |= {"workers": 2, "save_every": 1_000_000} | flags
    given = " ".join(f"--{key} {value}" for key, value in words.items())
    return Forked(f"torchrun --nproc_per_node 2 recipes/vision.py {given}")


@slow
def test_ctrl_c_leaves_a_checkpoint_and_no_process(folder_of, rows, tmp_path):
    with endless(folder_of("llava"), rows, tmp_path / "out") as run:
        run.until("step 3/")
        workers = [pid for rank in run.pids.values() for pid in children(rank)]
        assert len(workers) >= 4
        for pid in (*run.pids.values(), *workers):  # a terminal sends it to all of them
            os.kill(pid, signal.SIGINT)
        started = time.monotonic()
        run.end(60)
        assert time.monotonic() - started < 30
    assert "stopped   by SIGINT" in run.text
    assert len(list((tmp_path / "out" / "checkpoints").glob("step_*"))) == 1
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


@slow
def test_the_death_of_a_worker_ends_no_run(folder_of, rows, tmp_path):
    with endless(folder_of("llava"), rows, tmp_path / "out", steps=20) as run:
        run.until("step 3/")
        os.kill(children(run.pids[0])[-1], signal.SIGKILL)
        assert run.end(120) == 0
    assert "the process that trains decodes" in run.text
    assert "finished  20 steps" in run.text


def test_the_task_of_the_tiny_model_is_made_again_byte_for_byte(tmp_path):
    folder = ROOT / "recipes" / "tiny" / "vision"
    make_vision.make_task(tmp_path)
    for name in ("rows.jsonl", "heldout.jsonl"):
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 2_000_000


@slow
def test_the_demo_teaches_it(tmp_path):
    """Exact match by transformers alone on pictures that no training row has, after 6 of its 14 epochs."""
    command = f"torchrun --nproc_per_node 2 {QUOTED}/recipes/vision.py --epochs 6"
    demo = forked(command, tmp_path, seconds=400)
    assert demo.returncode == 0, demo.stdout
    tiny = f"{QUOTED}/recipes/tiny"
    folders = f"{tiny}/vision {tmp_path}/output/vision-001/model"
    questions = f"--questions {tiny}/vision/heldout.jsonl"
    score = forked(f"python {tiny}/score.py {folders} {questions}", tmp_path)
    assert "exact match before: 0 of 250" in score.stdout
    after = re.search(r"exact match after : (\d+) of 250", score.stdout)
    assert int(after[1]) >= 180
