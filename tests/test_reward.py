"""recipes/reward.py: a score for each answer, the same on any number of ranks and in plain transformers.

python -m pytest tests/test_reward.py -m ""
"""

import json
import shutil
from functools import cache
from pathlib import Path

import pytest
import reward
import torch
import torch.nn.functional as F
from families import family_config
from metrics import read_metrics
from peft import PeftModel
from ranks import gathered, run_ranks
from safetensors.torch import load_file, save_file
from tiny import tiny_model_folder, tiny_tokenizer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from utils.data.examples import Rows, load_examples
from utils.data.pairs import PairBatches
from utils.data.tokens import load_tokenizer
from utils.model.folder import open_weights, read_config
from utils.model.kinds import SCORE, add_scores, fill_score, sequence_scores, settle_pad
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.run.distributed import ALONE, build_mesh
from utils.run.errors import ConfigError
from utils.train.trained_run import open_reward_model, shard_model

slow = pytest.mark.slow
STEPS = 4
# With AdamW a gradient near 0 makes a whole step of its rounding: the rate is small.
RUN = {"steps": STEPS, "lr": 1e-4, "warmup": 1, "global_batch_size": 6, "seed": 3, "save_every": 0}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A causal model, and pairs of very different lengths; 15 do not divide into global batches of 6."""
    root = tmp_path_factory.mktemp("reward")
    rows = []
    for i in range(15):
        chosen = " ".join(f"good{j}" for j in range(1 + i % 5))
        rejected = " ".join(f"bad{j}" for j in range(1 + 2 * i % 7))
        rows.append({"prompt": f"Say {i} " * (1 + i % 4), "chosen": chosen, "rejected": rejected})
    (root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tiny_model_folder(root / "model", vocab_size=271)
    return {"model": str(folder), "dataset": str(root / "pairs.jsonl")}


def train(world, flags):
    return reward.main(reward.Config(**flags))


def trained(ranks, out, files, **flags):
    """(metrics by step, final weights)."""
    flags = RUN | files | {"output_dir": str(out), "batch_size": 6 // ranks} | flags
    out = run_ranks(train, ranks, flags)[0]
    (result,) = out.glob("*/*model.safetensors")
    metrics = [numbers for numbers in read_metrics(out / "metrics.jsonl") if "loss" in numbers]
    return metrics, load_file(result)


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
    """A run on two ranks, with checkpoints: its folder, its metrics and weights."""
    out = tmp_path_factory.mktemp("two_ranks") / "out"
    return out, trained(2, out, files, save_every=2, keep=0)


def scoring(folder, labels=1):
    """A model with a score, or several, on meta."""
    config = read_config(Path(folder), False)
    config.num_labels = labels
    return build_model(config, torch.float32, kind="scores")


def assert_alike(found, wanted, rtol=1e-5):
    for name in ("loss", "grad_norm", "accuracy", "margin", "mean_reward"):
        ours, theirs = ([numbers[name] for numbers in metrics] for metrics, _ in (found, wanted))
        torch.testing.assert_close(ours, theirs, rtol=10 * rtol, atol=rtol)
    assert found[1].keys() == wanted[1].keys()
    for name, tensor in wanted[1].items():
        assert (found[1][name] - tensor).norm() <= rtol * tensor.norm(), name


def batches_of(files, size=6):
    examples = load_examples(
        Rows(files["dataset"], 2048, task="pairs"), load_tokenizer(files["model"])
    )
    return PairBatches(examples, RUN["seed"], size, size, 0, 1, 0)


@pytest.mark.parametrize(
    "how",
    [
        {"ranks": 2, "batch_size": 1},
        {"ranks": 2, "activation_checkpointing": "full", "cpu_offload": True},
        pytest.param({"ranks": 4, "batch_size": 2, "replicate": 2}, marks=slow),
    ],
    ids=str,
)
def test_any_ranks_and_micro_batches_learn_the_same(files, alone, tmp_path, how):
    how = how | {"global_batch_size": 8}
    how.setdefault("batch_size", 4)
    _, one = alone(batch_size=8, global_batch_size=8, center_weight=0.01)
    many = trained(how.pop("ranks"), tmp_path / "many", files, **how, center_weight=0.01)
    assert_alike(many, one)


def test_it_learns_what_a_page_of_pytorch_learns(files, two_ranks, tmp_path):
    """transformers' own class and pooling, no FSDP, no accumulation, from the same first score."""
    trained(1, tmp_path / "start", files, steps=1, lr=1e-30)
    start = tmp_path / "start" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(start, dtype=torch.float32)
    decaying = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": decaying}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)
    batches = batches_of(files)
    losses = []
    for step in range(STEPS):
        (batch,) = batches.batches(step)
        scores = model(batch.ids, attention_mask=batch.mask).logits[:, 0]
        loss = -F.logsigmoid(scores[0::2] - scores[1::2]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        share = max(0.0, (step - RUN["warmup"]) / (STEPS - RUN["warmup"]))
        for group in optimizer.param_groups:
            group["lr"] = RUN["lr"] * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * share)).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    metrics, weights = two_ranks[1]
    torch.testing.assert_close([m["loss"] for m in metrics], losses, rtol=1e-5, atol=0)
    for name, tensor in model.state_dict().items():
        assert (weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name


@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2", "gemma2", "mixtral"])
def test_a_causal_checkpoint_gets_a_score_and_no_head(kind, tmp_path):
    """As from_pretrained, but for the score, which is drawn by seed."""
    folder = tiny_model_folder(tmp_path / "model", kind)
    model = scoring(folder)
    pieces = plan_pieces(model, open_weights(folder), folder, SCORE)
    load_pieces(model, pieces, CPU)
    assert fill_score(model, pieces, 0) == "new, of seed 0"
    theirs = AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype=torch.float32
    )
    own = model.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(own[name], tensor) == (name != SCORE), name
    size = model.config.hidden_size
    assert 0.7 < own[SCORE].std() * size**0.5 < 1.3
    first = own[SCORE].clone()
    fill_score(model, pieces, 1)
    assert not torch.equal(first, model.score.weight)


def three_scores(world, folder):
    """(new head, scores of two places) of a model with three scores."""
    model = add_scores(scoring(folder, labels=3), 0)
    pieces = plan_pieces(model, open_weights(Path(folder)), Path(folder), SCORE)
    if world.size > 1:
        shard_model(model, build_mesh(world), torch.float32)
    load_pieces(model, pieces, CPU)
    fill_score(model, pieces, 0)
    with torch.no_grad():
        scores = model(torch.arange(5, 15).view(2, 5), ends=torch.tensor([4, 7]))
    return gathered(model.score.weight.detach()), scores


def test_several_scores_begin_alike_on_any_ranks(files):
    head, scores = three_scores(ALONE, files["model"])
    assert len(head.unique(dim=0)) == 3
    assert scores.shape == (2, 3)
    for found in run_ranks(three_scores, 2, files["model"]):
        assert torch.equal(found[0], head)
        torch.testing.assert_close(found[1], scores)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("granite", "granite is no model for which transformers has a sequence classifier"),
        ("modernbert-decoder", "the classifier of modernbert-decoder has no layer `score`"),
    ],
)
def test_a_family_without_a_score_in_transformers_is_refused_by_name(kind, why):
    with pytest.raises(ConfigError, match=f"{why} .fix: another --model"):
        build_model(family_config(kind), torch.float32, kind="scores")


def test_a_checkpoint_that_lacks_more_than_the_score_is_refused(files, tmp_path):
    folder = shutil.copytree(files["model"], tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights | {"extra.weight": torch.ones(2)}, folder / "model.safetensors")
    model = scoring(folder)
    said = r"lack model.norm.weight; have unknown extra.weight"
    with pytest.raises(ConfigError, match=said):
        plan_pieces(model, open_weights(folder), folder, SCORE)


def test_training_goes_on_from_a_reward_model(files, alone, tmp_path):
    out, (_, first) = alone()
    start = {"model": str(out / "model"), "dataset": files["dataset"]}
    metrics, again = trained(2, tmp_path / "again", start, lr=1e-30, steps=1)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())
    assert metrics[0]["margin"] != 0


@pytest.mark.parametrize("pad", ["its own", "none", "the end of each turn"])
def test_plain_transformers_pools_at_the_token_that_was_trained(files, tmp_path, pad):
    """Also where pad ends each answer, as in most base models."""
    folder = shutil.copytree(files["model"], tmp_path / "model")
    tokenizer = tiny_tokenizer()
    if pad != "its own":
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
        tokenizer.pad_token = None if pad == "none" else "<|im_end|>"
        tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["pad_token_id"] = tokenizer.pad_token_id
        (folder / "config.json").write_text(json.dumps(config))
    flags = files | {"model": str(folder)}
    trained(1, tmp_path / "out", flags, eval_dataset=files["dataset"])
    result = tmp_path / "out" / "model"
    model = AutoModelForSequenceClassification.from_pretrained(result, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(result)
    assert tokenizer.pad_token_id == model.config.pad_token_id is not None
    chats = []
    for line in Path(files["dataset"]).read_text().splitlines():
        row = json.loads(line)
        for side in ("chosen", "rejected"):
            question = {"role": "user", "content": row["prompt"]}
            chats.append([question, {"role": "assistant", "content": row[side]}])
    batch = tokenizer.apply_chat_template(
        chats, padding=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        scores = model(**batch).logits[:, 0]
    loss = -F.logsigmoid(scores[0::2] - scores[1::2]).mean()
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    held_out = json.loads(lines[-1])
    assert held_out["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert held_out["eval_accuracy"] == (scores[0::2] > scores[1::2]).float().mean()


def test_where_every_special_token_ends_a_sequence_the_last_word_pads():
    """As with GPT-2's tokenizer, whose only special token ends every text."""
    tokenizer = tiny_tokenizer()
    text = "Anna has a red hat. " + tokenizer.convert_ids_to_tokens(len(tokenizer) - 1)
    ids = tokenizer(text)["input_ids"]
    settle_pad(tokenizer, {0, 1})
    assert tokenizer.pad_token_id == 2
    settle_pad(tokenizer, set(range(5)))
    assert tokenizer.pad_token_id == len(tokenizer) - 1
    assert tokenizer(text)["input_ids"] == ids


@pytest.mark.parametrize(
    "quantization", [*(pytest.param(q, marks=slow) for q in ("none", "8bit")), "4bit"]
)
def test_adapters_and_the_whole_score_train_and_load_with_peft(
    files, alone, tmp_path, quantization
):
    flags = {"lora_rank": 4, "quantization": quantization, "eval_dataset": files["dataset"]}
    _, one = alone(**flags)
    two = trained(2, tmp_path / "two", files, **flags, batch_size=1)
    assert_alike(two, one, rtol=1e-4)  # lora_B begins at 0, so it is all rounding's steps
    assert "base_model.model.score.weight" in two[1]
    folder = tmp_path / "two" / "adapter"
    assert json.loads((folder / "adapter_config.json").read_text())["task_type"] == "SEQ_CLS"
    if quantization != "none":
        return
    base = AutoModelForSequenceClassification.from_pretrained(
        files["model"], num_labels=1, dtype=torch.float32
    )
    model = PeftModel.from_pretrained(base, folder).eval()
    (batch,) = batches_of(files, 15).batches(0)
    with torch.no_grad():
        scores = model(input_ids=batch.ids, attention_mask=batch.mask).logits[:, 0]
    loss = -F.logsigmoid(scores[0::2] - scores[1::2]).mean()
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)
    # merged as recipes/README.md says, it is a reward model for grpo.py
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base.config.pad_token_id = tokenizer.pad_token_id
    model.merge_and_unload().save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    judge = open_reward_model(str(tmp_path / "judge"), torch.float32, ALONE, False)
    assert all(piece.info.file for piece in judge.pieces)


def test_an_adapter_goes_on_with_its_score(files, alone, tmp_path):
    """Here in 16 bit; what it was trained on does not matter."""
    flags = {"lora_rank": 4, "quantization": "4bit", "eval_dataset": files["dataset"]}
    out, (_, first) = alone(**flags)
    on = {"adapter": str(out / "adapter"), "lr": 1e-30, "steps": 1}
    _, again = trained(2, tmp_path / "again", files, **on)
    assert all(torch.equal(again[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("how", [{}, pytest.param({"lora_rank": 4}, marks=slow)], ids=str)
def test_a_run_that_was_cut_goes_on_bit_for_bit(request, files, tmp_path, how):
    flags, out = {"save_every": 2, "keep": 0, **how}, tmp_path / "out"
    if how:
        whole = trained(2, out, files, **flags)
    else:
        first, whole = request.getfixturevalue("two_ranks")
        shutil.copytree(first, out)
    shutil.rmtree(out / "checkpoints" / "step_00000004")
    shutil.rmtree(out / ("adapter" if how else "model"))
    (out / "plan.json").unlink()
    again = trained(2, out, files, **flags)
    assert all(torch.equal(again[1][name], tensor) for name, tensor in whole[1].items())


def test_the_whole_model_on_each_rank_learns_the_same(files, alone, tmp_path):
    _, one = alone()
    two = trained(2, tmp_path / "two", files, low_cpu_fsdp=False)
    assert_alike(two, one)


def test_a_filler_adds_nothing_and_takes_part_in_the_backward(files):
    folder = Path(files["model"])
    model = scoring(folder)
    pieces = plan_pieces(model, open_weights(folder), folder, SCORE)
    load_pieces(model, pieces, CPU)
    fill_score(add_scores(model, 0), pieces, 0)
    filler = batches_of(files).batch([])
    found = reward.score_sums(sequence_scores(model, filler), 0.1)
    found[0].backward()
    assert not found.any()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
