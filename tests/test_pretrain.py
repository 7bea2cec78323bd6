"""recipes/pretrain.py: documents without end, from new weights or a model's, the same on any number of ranks.

python -m pytest tests/test_pretrain.py -m ""
"""

import json
import math
import shutil

import export
import pretrain
import pytest
import torch
import torch.nn.functional as F
from families import family_config
from launch import Forked, forked
from metrics import read_metrics
from ranks import run_ranks
from safetensors.torch import load_file
from shell import QUOTED
from test_stream import texts_of, write
from tiny import tiny_config, tiny_model_folder, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.data.examples import Rows, load_examples
from utils.data.stream import StreamBatches
from utils.data.tokens import load_tokenizer
from utils.run.errors import ConfigError
from utils.run.settings import parse_cli
from utils.train.checkpoint import complete_checkpoints

slow = pytest.mark.slow
# With AdamW a gradient near 0 makes a whole step of its rounding: the rate is small.
RUN = {
    "steps": 6,
    "lr": 1e-4,
    "warmup": 1,
    "schedule": "wsd",
    "decay_share": 0.5,
    "seq_len": 24,
    "global_batch_size": 8,
    "seed": 3,
    "save_every": 2,
    "keep": 0,
    "eval_share": 0.2,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, two sources of texts, and a config without weights."""
    root = tmp_path_factory.mktemp("pretrain")
    folder = tiny_model_folder(root / "model", vocab_size=271, num_hidden_layers=2)
    a = write(root / "a.jsonl", texts_of(60))
    b = write(root / "b.jsonl", texts_of(60, seed=1))
    empty = root / "config"
    empty.mkdir()
    config = tiny_config("llama", vocab_size=271, num_hidden_layers=2, initializer_range=0.1)
    (empty / "config.json").write_text(json.dumps(config.to_dict()))
    tiny_tokenizer().save_pretrained(empty)
    return {"model": str(folder), "dataset": f"{a}:0.75,{b}:0.25"}, {"model": str(empty)}


def train(world, flags):
    return pretrain.main(pretrain.Config(**flags))


def trained(ranks, out, flags, **more):
    """(metrics by step, final weights)."""
    flags = RUN | flags | {"output_dir": str(out), "batch_size": 8 // ranks} | more
    return results(run_ranks(train, ranks, flags)[0])


def exported(world, options):
    return export.main(options)


def results(out):
    return read_metrics(out / "metrics.jsonl"), load_file(out / "model" / "model.safetensors")


def curve(metrics):
    names = ("step", "loss", "grad_norm", "lr", "bits_per_byte", "eval_loss", "eval_bits_per_byte")
    return [[numbers.get(name) for name in names] for numbers in metrics]


def assert_alike(found, wanted, rtol=1e-5):
    for ours, theirs in zip(curve(found[0]), curve(wanted[0]), strict=True):
        assert [value is None for value in ours] == [value is None for value in theirs]
        both = zip(ours, theirs, strict=True)
        assert all(one is None or one == pytest.approx(two, rel=10 * rtol) for one, two in both)
    assert found[1].keys() == wanted[1].keys()
    for name, tensor in wanted[1].items():
        assert (found[1][name] - tensor).norm() <= rtol * tensor.norm(), name


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
    """What an undisturbed run on 2 ranks leaves, and its folder."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return trained(2, out, files[0]), out


@pytest.mark.parametrize(
    "how",
    [
        {"ranks": 1},
        {"ranks": 1, "attn": "sdpa"},
        {"ranks": 1, "batch_size": 2, "activation_checkpointing": "full"},
        pytest.param({"ranks": 4, "batch_size": 1, "replicate": 2}, marks=slow),
    ],
    ids=str,
)
def test_any_ranks_and_micro_batches_learn_the_same(files, whole, tmp_path, how):
    how = dict(how)
    assert_alike(trained(how.pop("ranks"), tmp_path / "out", files[0], **how), whole[0])


def plain_loop(flags, steps, rate):
    """(losses, model) of a page of PyTorch on the same rows, each document alone."""
    examples = load_examples(
        Rows(flags["dataset"], RUN["seq_len"], task="documents"), load_tokenizer(flags["model"])
    )
    loader = StreamBatches(examples, RUN["seed"], 8, 8, 0, 1, 0, RUN["seq_len"])
    model = AutoModelForCausalLM.from_pretrained(flags["model"], dtype=torch.float32)
    decaying = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(steps):
        total, tokens = 0.0, 0
        for row in loader.rows_of(step):
            for part in loader.items([row]):
                ids = part.ids.long()[None]
                logits = model(ids).logits[0, :-1]
                total = total + F.cross_entropy(logits, ids[0, 1:], reduction="sum")
                tokens += ids.shape[1] - 1
        loss = total / tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("steps", [6, pytest.param(300, marks=slow)])
def test_it_learns_what_a_page_of_pytorch_learns(files, tmp_path, steps):
    """No FSDP, no masks, no rows of several documents; linear decay over the last half of the steps."""

    def rate(step):
        return RUN["lr"] * min(1.0, (steps - step) / (steps / 2))

    flags = {"eval_share": 0.0, "steps": steps, "save_every": 0}
    metrics, weights = trained(2, tmp_path / "out", files[0], **flags)
    losses, model = plain_loop(files[0], steps, rate)
    assert [numbers["loss"] for numbers in metrics] == pytest.approx(losses, rel=1e-4)
    for name, tensor in model.state_dict().items():
        assert (weights[name] - tensor).norm() <= 1e-4 * tensor.norm(), name


def test_wsd_is_constant_then_falls_in_a_line_to_zero(whole):
    rates = [numbers["lr"] for numbers in whole[0][0] if "lr" in numbers]
    assert rates == pytest.approx([1e-4, 1e-4, 1e-4, 1e-4, 1e-4 * 2 / 3, 1e-4 / 3])


def test_bits_per_byte_stand_beside_the_loss_before_and_after(whole):
    metrics = whole[0][0]
    held_out = {numbers["step"]: numbers for numbers in metrics if "eval_loss" in numbers}
    assert [*held_out] == [0, 6]
    assert held_out[6]["eval_bits_per_byte"] < held_out[0]["eval_bits_per_byte"]
    for numbers in metrics:
        kind = "eval_" if "eval_loss" in numbers else ""
        per_byte = numbers[f"{kind}bits_per_byte"] / numbers[f"{kind}loss"]
        # a token is a byte here, or the end of a text, and the first of a text is not predicted
        assert per_byte * math.log(2) == pytest.approx(1)


def test_a_run_from_a_checkpoint_is_bitwise_the_run(files, whole, tmp_path):
    (checkpoint,) = (p for p in complete_checkpoints(whole[1] / "checkpoints") if p.name[-1] == "2")
    found = trained(2, tmp_path / "again", files[0], resume=str(checkpoint))
    wanted = [row for row in curve(whole[0][0]) if row[0] > 2]
    assert curve(found[0]) == wanted
    assert all(torch.equal(found[1][name], tensor) for name, tensor in whole[0][1].items())


@slow
def test_killed_on_two_ranks_then_on_one_it_ends_on_four_as_if_nothing_had_been(
    files, whole, tmp_path
):
    out = tmp_path / "run"
    for ranks, step in ((2, 4), (1, 6)):  # killed while it saves
        flags = RUN | files[0] | {"output_dir": out, "batch_size": 8 // ranks}
        words = " ".join(f"--{name} {value}" for name, value in flags.items())
        command = f"torchrun --nproc_per_node {ranks} {QUOTED}/recipes/pretrain.py {words}"
        with Forked(command, FAULT=f"data:0:{step}") as run:
            assert run.end() != 0
        assert len(complete_checkpoints(out / "checkpoints")) == step // 2 - 1
    assert_alike(trained(4, out, files[0]), whole[0])


def test_new_weights_train_the_same_on_one_and_two_ranks_and_load_in_transformers(files, tmp_path):
    flags = files[0] | files[1] | {"init": "random", "save_dtype": "fp32", "document_mask": False}
    one = trained(1, tmp_path / "one", flags)
    two = trained(2, tmp_path / "two", flags)
    assert_alike(two, one)
    start, *_, end = (n["eval_bits_per_byte"] for n in one[0] if "eval_loss" in n)
    assert end < start
    folder = tmp_path / "two" / "model"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert torch.equal(model.state_dict()["lm_head.weight"], two[1]["lm_head.weight"])
    # resuming draws nothing anew
    again = tmp_path / "again"
    checkpoint = tmp_path / "two" / "checkpoints" / "step_00000004"
    found = trained(2, again, flags, resume=str(checkpoint))
    assert all(torch.equal(found[1][name], tensor) for name, tensor in two[1].items())


def test_new_weights_are_saved_in_the_dtype_of_their_config(files, tmp_path):
    folder = shutil.copytree((files[0] | files[1])["model"], tmp_path / "model")
    fields = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields))
    flags = files[0] | files[1] | {"model": str(folder), "init": "random", "steps": 1}
    _, weights = trained(1, tmp_path / "out", flags)[:2]
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    found = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert found["dtype"] == "bfloat16"


@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3"])
def test_a_checkpoint_of_new_weights_becomes_what_its_run_saves(kind, files, tmp_path):
    """No file has its base. The first kind has buffers, which checkpoints lack; the second a text_config."""
    folder = shutil.copytree((files[0] | files[1])["model"], tmp_path / "model")
    config = family_config(kind)
    config.get_text_config().vocab_size = 271
    fields = config.to_dict() | {"eos_token_id": 9, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(fields))
    flags = {"model": str(folder), "init": "random", "steps": 1, "document_mask": False}
    wanted = trained(1, tmp_path / "run", files[0] | flags)[1]
    has_buffer = any(name.endswith("e_score_correction_bias") for name in wanted)
    assert has_buffer == (kind == "deepseek_v3")
    options = export.Config(checkpoint=str(tmp_path / "run"), output_dir=str(tmp_path / "out"))
    found = run_ranks(exported, 2, options)[0]
    for path in (tmp_path / "run" / "model").iterdir():
        assert path.read_bytes() == (found / path.name).read_bytes(), path


def test_another_length_of_rows_or_mixture_is_another_run(files, whole, tmp_path):
    a, b = (part.partition(":")[0] for part in files[0]["dataset"].split(","))
    checkpoint = whole[1] / "checkpoints" / "step_00000002"
    changes = ({"seq_len": 32}, {"dataset": f"{a}:0.5,{b}:0.5"}, {"document_mask": False})
    for number, change in enumerate(changes):
        out = str(tmp_path / str(number))
        flags = RUN | files[0] | {"batch_size": 8, "output_dir": out, "resume": str(checkpoint)}
        with pytest.raises(ConfigError, match="another run"):
            pretrain.main(pretrain.Config(**flags | change))


def test_allow_new_data_continues_with_another_mixture(files, whole, tmp_path):
    """A cooldown on better data, which is what wsd is for: it was refused even with the flag."""
    a, b = (part.partition(":")[0] for part in files[0]["dataset"].split(","))
    checkpoint = whole[1] / "checkpoints" / "step_00000002"
    change = {"dataset": f"{b}:0.9,{a}:0.1", "allow_new_data": True, "resume": str(checkpoint)}
    metrics, weights = trained(1, tmp_path / "cooldown", files[0], **change)
    steps = [numbers["step"] for numbers in metrics if "loss" in numbers]
    assert steps == [3, 4, 5, 6]
    assert any((weights[name] != tensor).any() for name, tensor in whole[0][1].items())


def test_a_tokenizer_without_an_end_of_text_token_is_warned_of(files, tmp_path, capsys):
    """One's own new tokenizer often has none."""
    flags = RUN | files[1] | {"init": "random", "steps": 1, "eval_share": 0.0, "save_model": False}

    def said(name, rows, **more):
        lines = [json.dumps(row) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        flags["dataset"] = str(tmp_path / f"{name}.jsonl")
        pretrain.main(pretrain.Config(**flags | more, output_dir=str(tmp_path / name)))
        return capsys.readouterr().out

    assert "warning" not in said("texts", [{"text": "one two three"}] * 99)
    without = tiny_tokenizer()
    without.eos_token = None
    without.save_pretrained(tmp_path / "tokenizer")
    more = {"tokenizer": str(tmp_path / "tokenizer")}
    assert "no end-of-text token" in said("none", [{"text": "one two three"}] * 99, **more)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--tokens 1e6 --steps 5", "--tokens or --steps"),
        ("--tokens many", "--tokens takes a finite number"),
        ("--init random --low_cpu_fsdp false", "--init random has none"),
        ("--decay_share 2", "--decay_share 2.0"),
        ("--decay_share 0.1", "no effect on cosine .fix: --schedule wsd."),
        ("--stage pt", "the recipe says it"),
        ("--interleave_probs 0.7,0.3", "a.jsonl:0.7"),
        ("--pretraining_dataset x", "did you mean --dataset"),
        ("--packing", "fills every row"),
        ("--lora_rank 8", "recipes/finetune.py --packing"),
    ],
)
def test_flags_that_cannot_be_followed_are_one_line(flags, reason):
    with pytest.raises(ConfigError, match=reason) as refused:
        parse_cli(pretrain.Config, flags.split())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dataset": "no.jsonl"}, "no such file"),
        ({"model": "llama-3-8b", "init": "random"}, "fix: --tokenizer"),
        ({"model": "llama-3-9b", "init": "random"}, "a name in .*configs/shapes"),
        ({"seq_len": 512, "document_mask": False, "model": "GPT2"}, "learned ones"),
    ],
)
def test_what_cannot_work_is_one_line_before_weights_are_read(files, tmp_path, change, reason):
    if change.get("model") == "GPT2":
        folder = tiny_model_folder(tmp_path / "gpt2", "gpt2", vocab_size=271)
        change = change | {"model": str(folder)}
    with pytest.raises(ConfigError, match=reason) as refused:
        pretrain.main(
            pretrain.Config(**RUN | files[0] | change | {"output_dir": str(tmp_path / "o")})
        )
    assert "\n" not in str(refused.value)


def test_a_model_without_layers_is_refused_in_one_line(files, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 0, "hidden_size": 64, "vocab_size": 271}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = {"init": "random", "model": str(tmp_path), "tokenizer": files[1]["model"]}
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no layers to shard by"):
        pretrain.main(
            pretrain.Config(**RUN | files[0] | model | {"output_dir": str(tmp_path / "o")})
        )


@slow
def test_the_bare_command_learns_the_language_of_the_stories_from_nothing(tmp_path):
    """recipes/pretrain.py, in three of its six epochs."""
    done = forked(f"torchrun --nproc_per_node 2 {QUOTED}/recipes/pretrain.py --epochs 3", tmp_path)
    assert done.returncode == 0, done.stdout
    metrics = read_metrics(tmp_path / "output" / "pretrain-001" / "metrics.jsonl")
    before, after = (n["eval_bits_per_byte"] for n in metrics if "eval_loss" in n)
    assert before > 2
    assert after < 0.45
