"""recipes/prefer.py learns the same on any number of ranks, and as a page of PyTorch does.

python -m pytest tests/test_prefer.py -m ""
"""

import json
import os
import re
import shutil
import sys
from contextlib import nullcontext, suppress
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from textwrap import dedent, indent

import prefer
import preview
import pytest
import torch
import torch.nn.functional as F
from launch import forked
from metrics import read_metrics
from ranks import run_ranks
from safetensors.torch import load_file
from shell import QUOTED, ROOT
from tiny import tiny_model_folder
from transformers import AutoModelForCausalLM

from utils.data.examples import Rows, load_examples
from utils.data.pairs import PairBatches
from utils.data.tokens import load_tokenizer
from utils.run.distributed import ALONE, stop_distributed
from utils.run.errors import ConfigError, check
from utils.run.settings import save_config
from utils.run.units import IGNORE
from utils.train import answers

slow = pytest.mark.slow
STEPS = 4
RUN = {"steps": STEPS, "lr": 1e-3, "warmup": 1, "global_batch_size": 6, "seed": 3, "save_every": 0}
LOSSES = {
    "dpo": {"label_smoothing": 0.1, "sft_weight": 0.3},
    "ipo": {},
    "orpo": {"beta": 0.5},
    "simpo": {"margin": 1.0},
    "kto": {"undesirable_weight": 1.5},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and pairs of very different lengths; 15 do not divide into global batches of 6."""
    root = tmp_path_factory.mktemp("prefer")
    rows = []
    for i in range(15):
        chosen = " ".join(f"good{j}" for j in range(1 + i % 5))
        rejected = " ".join(f"bad{j}" for j in range(1 + 2 * i % 7))
        rows.append({"prompt": f"Say {i} " * (1 + i % 4), "chosen": chosen, "rejected": rejected})
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tiny_model_folder(root / "model", vocab_size=271)
    return {"model": str(folder), "dataset": str(root / "pairs.jsonl")}


def train(world, flags, cache):
    os.environ["XDG_CACHE_HOME"] = str(cache)
    return prefer.main(prefer.Config(**flags))


def trained(ranks, out, files, **flags):
    """(metrics by step, final weights)."""
    flags = RUN | files | {"output_dir": str(out), "batch_size": 6 // ranks} | flags
    out = run_ranks(train, ranks, flags, out.parent / "cache")[0]
    (result,) = out.glob("*/*model.safetensors")
    return read_metrics(out / "metrics.jsonl"), load_file(result)


@pytest.fixture(scope="module")
def alone(files, tmp_path_factory):
    """A run on one rank, by its flags: (folder of the run, its metrics and weights). Made once."""

    @cache
    def run(**flags):
        out = tmp_path_factory.mktemp("alone") / "out"
        return out, trained(1, out, files, **flags)

    return run


@pytest.fixture(scope="module")
def two_ranks(files, tmp_path_factory):
    """A run of DPO on two ranks, with checkpoints: its folder, its metrics and weights."""
    out = tmp_path_factory.mktemp("two_ranks") / "out"
    return out, trained(2, out, files, loss="dpo", save_every=2, keep=0)


def assert_alike(found, wanted, rtol=1e-5):
    for name in ("loss", "grad_norm", "rewards/margins", "logps/chosen", "logps/rejected"):
        ours, theirs = (
            [numbers[name] for numbers in metrics if name in numbers]
            for metrics, _ in (found, wanted)
        )
        torch.testing.assert_close(ours, theirs, rtol=10 * rtol, atol=rtol)
    for name, tensor in wanted[1].items():
        assert (found[1][name] - tensor).norm() <= rtol * tensor.norm(), name


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        ("dpo", {"ranks": 2, "batch_size": 1}),
        pytest.param("kto", {"ranks": 2, "batch_size": 1}, marks=slow),
        ("dpo", {"ranks": 2, "packing": True, "attn": "sdpa", "batch_size": 1}),
        *(pytest.param(loss, {"ranks": 4, "batch_size": 1}, marks=slow) for loss in LOSSES),
    ],
)
def test_any_ranks_and_micro_batches_learn_the_same(files, alone, tmp_path, loss, how):
    if how.get("packing"):
        # the same pairs in each step: all of them
        how = how | {"global_batch_size": 2, "seq_len": 512, "eval_dataset": files["dataset"]}
        whole = {"batch_size": 15, "global_batch_size": 15, "eval_dataset": files["dataset"]}
    else:
        how = how | {"global_batch_size": 8}
        whole = {"batch_size": 8, "global_batch_size": 8}
    out, one = alone(loss=loss, **LOSSES[loss], **whole)
    many = trained(how.pop("ranks"), tmp_path / "many", files, loss=loss, **LOSSES[loss], **how)
    assert_alike(many, one)
    if "eval_dataset" in how:
        names = ("eval_loss", "eval_rewards/margins", "eval_logps/rejected")
        found = [[last_line(run)[name] for name in names] for run in (out, tmp_path / "many")]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def last_line(out):
    """The last line that a run has logged: that of the held-out rows, if there are any."""
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])


def test_dpo_is_what_a_page_of_pytorch_makes_of_it(files, two_ranks):
    """Full logits, no FSDP, no chunks, no accumulation, the reference a second model."""
    tokenizer = load_tokenizer(files["model"])
    examples = load_examples(Rows(files["dataset"], 2048, task="pairs"), tokenizer)
    batches = PairBatches(examples, RUN["seed"], 6, 6, 0, 1, 0)
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(files["model"], dtype=torch.float32) for _ in range(2)
    )
    decaying = [p for p in policy.parameters() if p.ndim > 1]
    others = [p for p in policy.parameters() if p.ndim == 1]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)

    def log_probs(model, batch):
        logits = model(batch.ids, attention_mask=batch.mask, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(
            logits.flatten(0, 1),
            batch.labels[:, 1:].flatten(),
            ignore_index=IGNORE,
            reduction="none",
        )
        return -losses.view(len(batch.ids), -1).sum(1)

    losses = []
    for step in range(STEPS):
        (batch,) = batches.batches(step)
        with torch.no_grad():
            start = log_probs(reference, batch)
        scores = log_probs(policy, batch) - start
        loss = -F.logsigmoid(0.1 * (scores[0::2] - scores[1::2])).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = prefer_rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    metrics, weights = two_ranks[1]
    assert losses[0] == pytest.approx(0.693147, rel=1e-6)
    torch.testing.assert_close([m["loss"] for m in metrics], losses, rtol=1e-5, atol=0)
    for name, tensor in policy.state_dict().items():
        if name in weights:
            assert (weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


def prefer_rate(step):
    share = max(0.0, (step - RUN["warmup"]) / (STEPS - RUN["warmup"]))
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * share)).item())
    return RUN["lr"] * min(1.0, (step + 1) / RUN["warmup"]) * cosine


QUANTIZED = {"quantization": "8bit", "activation_checkpointing": "full"}


@pytest.mark.parametrize(
    ("loss", "how"),
    [
        ("dpo", {}),
        *(
            pytest.param(*case, marks=slow)
            for case in (("kto", QUANTIZED), ("kto", {}), ("dpo", QUANTIZED))
        ),
    ],
)
def test_adapters_learn_from_the_base_as_their_reference(files, alone, tmp_path, loss, how):
    lora = {"lora_rank": 4, "loss": loss, **how}
    out, one = alone(**lora)
    two = trained(2, tmp_path / "two", files, **lora, batch_size=1)
    assert_alike(two, one)
    first = one[0][0]
    assert first["rewards/margins"] == 0  # the adapters begin with nothing
    assert not (out.parent / "cache").exists()
    assert not (tmp_path / "cache").exists()
    assert all(tensor.abs().sum() > 0 for name, tensor in two[1].items() if "lora_B" in name)


def test_an_adapter_that_goes_on_has_itself_as_its_reference(files, alone, tmp_path):
    first, _ = alone(loss="dpo", lora_rank=4)
    on = {"adapter": str(first / "adapter"), "loss": "dpo", "steps": 2}
    metrics, _ = trained(2, tmp_path / "second", files, **on)
    assert abs(metrics[0]["rewards/margins"]) < 1e-5
    assert metrics[0]["logps/chosen"] != pytest.approx(metrics[-1]["logps/chosen"])


@pytest.mark.parametrize("loss", ["dpo", pytest.param("kto", marks=slow)])
def test_a_run_that_was_cut_goes_on_bit_for_bit_and_reads_its_reference(
    request, files, tmp_path, loss
):
    flags, out = {"loss": loss, "save_every": 2, "keep": 0}, tmp_path / "out"
    if loss == "dpo":
        first, whole = request.getfixturevalue("two_ranks")
        shutil.copytree(first.parent, tmp_path, dirs_exist_ok=True)  # with its reference
    else:
        whole = trained(2, out, files, **flags)
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    shutil.rmtree(out / "model")
    (out / "plan.json").unlink()
    (known,) = (tmp_path / "cache" / "raw_fsdp" / "reference").glob("*.json")
    written = known.stat().st_mtime_ns
    again = trained(2, out, files, **flags)
    assert known.stat().st_mtime_ns == written
    assert all(torch.equal(again[1][name], tensor) for name, tensor in whole[1].items())
    losses = [[numbers["loss"] for numbers in metrics[-2:]] for metrics, _ in (whole, again)]
    assert losses[0] == losses[1]


def test_a_reference_is_that_of_the_pairs_of_a_run_and_stays_when_another_run_adds_answers(
    files, tmp_path
):
    """The other run's batches round otherwise, and the first would not go on bit for bit."""
    trained(1, tmp_path / "first", files, loss="dpo", steps=1)
    (file,) = (tmp_path / "cache" / "raw_fsdp" / "reference").glob("*.json")
    assert len(json.loads(file.read_text())) == 2 * 6  # of 15 pairs: those of the one step
    known = {key: value + 1e-4 for key, value in json.loads(file.read_text()).items()}
    file.write_text(json.dumps(known))
    trained(1, tmp_path / "second", files, loss="dpo")
    more = json.loads(file.read_text())
    assert len(known) < len(more)
    assert {key: more[key] for key in known} == known


def train_counting(world, flags, cache, fails_at: int):
    """The number of calls of log_probs_of, of which number `fails_at` fails; the run then ends."""
    kept, real = answers.KEPT, answers.log_probs_of
    calls = []

    def counted(model, batch):
        calls.append(batch)
        check(len(calls) != fails_at, "cut")
        return real(model, batch)

    answers.KEPT, answers.log_probs_of = 1, counted
    try:
        with suppress(ConfigError) if fails_at else nullcontext():
            train(world, flags, cache)
    finally:
        answers.KEPT, answers.log_probs_of = kept, real
    return len(calls)


def test_a_run_that_is_cut_in_its_reference_computes_only_what_is_left_of_it(files, tmp_path):
    """All answers of 300,000 pairs were computed again, and in silence."""
    flags = RUN | files | {"loss": "dpo", "batch_size": 1}
    counts = {}
    for name, fails_at in {"cut": 3, "rest": 0, "whole": 0}.items():
        flags["output_dir"] = str(tmp_path / name)
        cache = tmp_path / ("whole_cache" if name == "whole" else "cache")
        counts[name] = run_ranks(train_counting, 2, flags, cache, fails_at)[0]
    others = counts["whole"] - 8  # 15 pairs in 3 steps are 8 batches of each rank
    assert others > 0  # those of mean_of_wanted
    assert counts["cut"] == 3
    assert counts["rest"] - others == 8 - 2 + 1  # the first batch is computed as a check
    found, whole = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("rest", "whole")
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in whole.items())


def test_a_reference_of_other_weights_is_refused(files, alone, tmp_path):
    flags = {"loss": "dpo", **LOSSES["dpo"], "batch_size": 8, "global_batch_size": 8}
    shutil.copytree(alone(**flags)[0].parent / "cache", tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "raw_fsdp" / "reference").glob("*.json")
    known = json.loads(file.read_text())
    file.write_text(json.dumps({key: value - 9 for key, value in known.items()}))
    with pytest.raises(AssertionError, match=r"nats there, .* \(fix: remove the file\)"):
        trained(1, tmp_path / "second", files, **flags)
    file.write_text("{")
    trained(1, tmp_path / "third", files, **flags)
    assert json.loads(file.read_text()) == known


@pytest.fixture(scope="module")
def kto_held_out(files, tmp_path_factory):
    """What a run of KTO logs of its held-out rows, for runs on one and on two ranks."""
    found = []
    for ranks, batch_size in ((1, 2), (2, 3)):
        flags = {"loss": "kto", "sft_weight": 1.0, "eval_share": 0.5, "batch_size": batch_size}
        out = tmp_path_factory.mktemp("kto") / str(ranks)
        trained(ranks, out, files, **flags, eval_every=2)
        found.append(held_out_lines(out))
    return found


def held_out_lines(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "eval_loss" in line]


def test_held_out_pairs_and_labels_have_their_loss_and_means(files, kto_held_out, tmp_path):
    trained(2, tmp_path / "simpo", files, loss="simpo", eval_share=0.3, eval_every=2)
    for loss, held_out in (("simpo", held_out_lines(tmp_path / "simpo")), ("kto", kto_held_out[1])):
        assert [line["step"] for line in held_out] == [2, 4]
        assert ("eval_rewards/accuracies" in held_out[0]) == (loss == "simpo")
        assert held_out[0]["eval_logps/chosen"] < 0


def test_the_held_out_loss_of_kto_does_not_depend_on_the_ranks(kto_held_out):
    """Wanted answers gain, so that its KL is above 0 and follows from the batches."""
    names = ("eval_loss", "eval_rewards/chosen")
    found = [[lines[-1][name] for name in names] for lines in kto_held_out]
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    assert found[0][1] > 0


def test_one_warning_tells_that_wanted_answers_are_forgotten(files, tmp_path):
    flags = RUN | files | {"steps": 12, "lr": 3e-2, "beta": 5.0, "loss": "simpo", "save_every": 4}
    words = " ".join(f"--{name} {value}" for name, value in flags.items())
    run = forked(f"python {QUOTED}/recipes/prefer.py {words} --batch_size 6", tmp_path)
    assert run.returncode == 0, run.stdout
    warnings = [line for line in run.stdout.splitlines() if line.startswith("warning: wanted")]
    assert len(warnings) == 1
    assert "--sft_weight 1" in warnings[0]


@slow
def test_a_run_says_the_weights_of_its_loss_also_those_that_a_config_of_another_loss_set(
    files, tmp_path
):
    """The config.yaml of a DPO run has sft_weight 0, with which ORPO lacks its cross-entropy."""
    cfg = prefer.Config(**files, steps=1, batch_size=6, output_dir=str(tmp_path / "orpo"))
    save_config(prefer.settle(cfg, ALONE), tmp_path / "config.yaml")
    for flags, says in {
        "--config config.yaml": "loss      orpo: beta 0.1, sft_weight 0\n",
        "--config config.yaml --sft_weight -1": "loss      orpo: beta 0.1, sft_weight 1\n",
    }.items():
        command = f"python {QUOTED}/recipes/prefer.py {flags} --loss orpo --output_dir {len(flags)}"
        run = forked(command, tmp_path)
        assert run.returncode == 0, run.stdout
        assert says in run.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"margin": 0.3}, "--margin has no effect on dpo"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "--label_smoothing has no effect on ipo"),
        ({"undesirable_weight": 2.0}, "--undesirable_weight has no effect on dpo"),
        ({"loss": "kto", "packing": True}, "--packing: kto"),
        ({"label_smoothing": 0.5}, "--label_smoothing of half"),
    ],
)
def test_flags_without_an_effect_are_refused(flags, says):
    with pytest.raises(ConfigError, match=f"{says}.* \\(fix: "):
        prefer.Config(**flags)


def test_kto_refuses_global_batches_of_one(files, tmp_path):
    flags = {"loss": "kto", "batch_size": 1, "global_batch_size": 1}
    with pytest.raises(AssertionError, match=r"--loss kto compares .* \(fix: --global_batch_size"):
        trained(1, tmp_path / "out", files, **flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"loss": "kto", "packing": True},
        {"loss": "kto", "batch_size": 1},
        {"loss": "dpo", "optimizer_in_backward": True},
    ],
)
def test_a_preview_refuses_the_flags_that_the_run_refuses(flags, files, tmp_path):
    flags = flags | files
    said = []
    for start in (
        lambda: preview.main(preview.Config(**flags, show=0)),
        lambda: prefer.main(prefer.Config(**flags, output_dir=str(tmp_path / "out"))),
    ):
        try:
            with pytest.raises(ConfigError) as refused:
                start()
        finally:
            stop_distributed()
        said.append(str(refused.value))
    assert said[0] == said[1]


def test_a_preview_shows_both_answers_and_the_plan_of_the_run(files, tmp_path):
    flags = " ".join(f"--{name} {value}" for name, value in files.items())
    flags += " --loss simpo --beta 3 --batch_size 3"
    seen = forked(f"python {QUOTED}/recipes/preview.py {flags} --show 1", tmp_path)
    assert seen.returncode == 0, seen.stdout
    for side, text in (("chosen", "good0"), ("rejected", "bad0")):
        assert re.search(rf"pairs.jsonl:1 {side}\n[^\[]*\[\[\W*{text}", seen.stdout)
    run = forked(f"python {QUOTED}/recipes/prefer.py {flags} --steps 1 --output_dir out", tmp_path)
    for start in ("data ", "memory "):
        lines = [
            next(line for line in text.splitlines() if line.startswith(start))
            for text in (seen.stdout, run.stdout)
        ]
        assert lines[0] == lines[1]


def test_a_preview_of_labels_names_each_answer_by_its_label(files, tmp_path):
    flags = " ".join(f"--{name} {value}" for name, value in files.items())
    seen = forked(
        f"python {QUOTED}/recipes/preview.py {flags} --loss kto --batch_size 2 --show 2", tmp_path
    )
    assert seen.returncode == 0, seen.stdout
    for side, text in (("desirable", "good0"), ("undesirable", "bad0")):
        assert re.search(rf"pairs.jsonl:1 {side}\n[^\[]*\[\[\W*{text}", seen.stdout)


def train_copy(world, path, flags, cache):
    """Run a changed copy of the recipe."""
    os.environ["XDG_CACHE_HOME"] = str(cache)
    spec = spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = copy = module_from_spec(spec)
    spec.loader.exec_module(copy)
    copy.main(copy.Config(**flags))


@slow
def test_another_model_can_be_the_reference_of_new_adapters_as_the_tour_of_utils_says(
    alone, files, tmp_path
):
    tour = (ROOT / "utils" / "README.md").read_text()
    block = re.search(r"  ```python\n(  other = open_model.*?)  ```", tour, re.S)[1]
    code = indent(dedent(block), "    ")
    recipe = Path(prefer.__file__).read_text()
    for old, new in {
        "    reference = Reference(model, world)": f"{code}    reference = Reference(twin, world)",
        " and (cfg.adapter or not lora)": "",
        "run_facts(source.config, source.weights, hash": "run_facts(other.config, other.weights, hash",
        "@dataclass\n": "from utils.train.trained_run import frozen_copy\n\n@dataclass\n",
    }.items():
        assert recipe.count(old) == 1
        recipe = recipe.replace(old, new)
    (tmp_path / "prefer_copy.py").write_text(recipe.replace("FOLDER, world", "cfg.model, world"))
    flags = RUN | files | {"loss": "dpo", "lora_rank": 4, "batch_size": 6}
    flags["output_dir"] = str(tmp_path / "out")
    run_ranks(train_copy, 1, tmp_path / "prefer_copy.py", flags, tmp_path / "cache")
    _, (expected, _) = alone(loss="dpo", lora_rank=4)
    found = read_metrics(tmp_path / "out" / "metrics.jsonl")
    losses = [[row["loss"] for row in rows] for rows in (found, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_reference_that_cannot_be_kept_is_used_all_the_same(files, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    metrics, _ = trained(2, tmp_path / "out", files, loss="dpo", steps=1)
    assert metrics[0]["loss"] == pytest.approx(0.693147, rel=1e-6)
