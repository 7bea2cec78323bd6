"""LoRA, and quantized bases under it, through the recipe: losses do not depend on how the work is cut, peft
loads the adapter, a resume is exact.

python -m pytest tests/test_adapters.py
"""

import json
import shlex
import shutil

import finetune
import pytest
import torch
import torch.nn.functional as F
from launch import forked
from metrics import read_metrics
from peft import PeftModel
from ranks import run_ranks
from safetensors.torch import load_file
from shell import QUOTED
from test_parity import write_rows
from tiny import tiny_model_folder
from torch.distributed.run import get_args_parser
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.data.batches import GlobalBatches
from utils.data.examples import Rows, load_examples
from utils.data.tokens import load_tokenizer
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError
from utils.train.resume import Reader
from utils.train.trained_run import open_trained

FILE = "adapter_model.safetensors"
BASES = {"16bit": {}, "8bit": {"quantization": "8bit"}, "4bit": {"quantization": "4bit"}}
LEVERS = {
    "full_recompute": {"activation_checkpointing": "full"},
    "selective_recompute": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "zero_2": {"reshard_after_forward": False},
    "hsdp": {"replicate": 2},
    "accumulation": {"batch_size": 2, "global_batch_size": 8},
    "the_classic_way": {"low_cpu_fsdp": False},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    folder = tiny_model_folder(root / "model", vocab_size=271, intermediate_size=128)
    return folder, write_rows(root / "rows.jsonl")


def call(world, flags):
    if flags.get("compile"):
        from torch._inductor import config

        config.compile_threads = 1  # a pool of processes would import more than there is to compile
    return finetune.main(finetune.Config(**flags))


def train(files, out, ranks=2, **flags):
    """The losses and gradient norms of the recipe on so many ranks."""
    model, rows = files
    settings = {
        "model": str(model),
        "dataset": str(rows),
        "output_dir": str(out),
        "lora_rank": 4,
        "lr": 1e-2,
    }
    settings |= {"steps": 4, "seed": 3, "save_every": 0, "global_batch_size": 8}
    run_ranks(call, ranks, settings | {"batch_size": 8 // ranks} | flags)
    return [(line["loss"], line["grad_norm"]) for line in numbers(out) if "loss" in line]


def numbers(out):
    return read_metrics(out / "metrics.jsonl")


@pytest.fixture(
    scope="module", params=["16bit", pytest.param("8bit", marks=pytest.mark.slow), "4bit"]
)
def base(request):
    return BASES[request.param]


@pytest.fixture(scope="module")
def one_rank(files, base, tmp_path_factory):
    return train(files, tmp_path_factory.mktemp("one") / "out", 1, **base)


@pytest.fixture(scope="module")
def two_ranks(files, base, tmp_path_factory):
    """The same on two ranks, with checkpoints and held-out rows: (flags, folder of the run, curve)."""
    out = tmp_path_factory.mktemp("two") / "out"
    flags = {**base, "save_every": 2, "eval_dataset": str(files[1])}
    return flags, out, train(files, out, **flags)


@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(more, marks=pytest.mark.slow) for more in (3, 4))]
)
def test_any_number_of_ranks_gives_the_losses_of_one(
    request, files, base, one_rank, tmp_path, ranks
):
    flags = {"batch_size": 1, "global_batch_size": 6} if ranks == 3 else {}
    expected = train(files, tmp_path / "one", 1, **base, **flags) if flags else one_rank
    if ranks == 2:
        *_, curve = request.getfixturevalue("two_ranks")
    else:
        curve = train(files, tmp_path / "out", ranks, **base, **flags)
    torch.testing.assert_close(curve, expected, rtol=2e-5, atol=0)
    assert curve[-1][0] < curve[0][0]


# LoRA over 16 bit is also in test_lora.py and test_levers.py, and on two ranks above.
over_4_bit = pytest.mark.parametrize(
    "base",
    [*(pytest.param(base, marks=pytest.mark.slow) for base in ("16bit", "8bit")), "4bit"],
    indirect=True,
)
LONG = {*LEVERS} - {"offload", "hsdp"}  # left to make test-all


@over_4_bit
@pytest.mark.parametrize(
    "lever",
    [pytest.param(lever, marks=[pytest.mark.slow] if lever in LONG else []) for lever in LEVERS],
)
def test_a_lever_changes_no_loss(files, base, one_rank, tmp_path, lever):
    curve = train(files, tmp_path / "out", **base, **LEVERS[lever])
    torch.testing.assert_close(curve, one_rank, rtol=2e-5, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("base", ["4bit"], indirect=True)  # others: test_quantize, test_levers
def test_compiled_layers_train_alike(files, base, one_rank, tmp_path):
    curve = train(files, tmp_path / "out", **base, compile=True)
    torch.testing.assert_close(curve, one_rank, rtol=1e-4, atol=0)


@over_4_bit
def test_bf16_trains_like_fp32_to_its_rounding(files, base, one_rank, tmp_path):
    curve = train(files, tmp_path / "out", **base, dtype="bf16")
    torch.testing.assert_close(
        [loss for loss, _ in curve], [loss for loss, _ in one_rank], rtol=3e-2, atol=0
    )


@torch.no_grad()
def summed_loss(model, folder, rows):
    """Summed cross-entropy and trained tokens of a file by plain transformers."""
    examples = load_examples(Rows(str(rows), 2048), load_tokenizer(folder))
    batches = GlobalBatches(examples, 0, 20, 20, 0, 1, 0)
    (batch,) = batches.batches(0)
    logits = model(batch.ids, attention_mask=batch.mask, use_cache=False).logits[:, :-1]
    labels = batch.labels[:, 1:].flatten()
    return F.cross_entropy(logits.flatten(0, 1), labels, ignore_index=-100).item()


def test_peft_on_the_original_base_gives_the_held_out_loss_of_the_run(files, tmp_path):
    folder, rows = files
    out = tmp_path / "out"
    train(files, out, eval_dataset=str(rows), lora_targets="q_proj,down_proj", use_rslora=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = summed_loss(model, folder, rows)
    after = summed_loss(PeftModel.from_pretrained(model, out / "adapter").eval(), folder, rows)
    assert after == pytest.approx(numbers(out)[-1]["eval_loss"], rel=1e-6)
    assert after < before - 0.01
    assert not (out / "model").exists()
    assert load_tokenizer(out / "adapter").chat_template == load_tokenizer(folder).chat_template


@over_4_bit
def test_an_adapter_is_continued_from_where_it_was(files, base, two_ranks, tmp_path):
    _, rows = files
    _, out, _ = two_ranks
    flags = {"lora_rank": 0, "adapter": str(out / "adapter"), "lr": 1e-12, "steps": 1}
    train(files, tmp_path / "second", eval_dataset=str(rows), **base | flags)
    first, second = (numbers(run)[-1]["eval_loss"] for run in (out, tmp_path / "second"))
    assert second == pytest.approx(first, rel=1e-6)


def test_an_adapter_goes_on_in_the_chat_template_that_it_was_trained_in(files, tmp_path):
    _, rows = files
    flags = {"ranks": 1, "steps": 1, "eval_dataset": str(rows)}
    train(files, tmp_path / "first", chat_template="alpaca", **flags)
    adapter = tmp_path / "first" / "adapter"
    train(files, tmp_path / "on", adapter=str(adapter), lora_rank=0, lr=1e-12, **flags)
    template = load_tokenizer(adapter).chat_template
    assert "### Response:" in template
    assert load_tokenizer(tmp_path / "on" / "adapter").chat_template == template
    first, on = (numbers(tmp_path / name)[-1]["eval_loss"] for name in ("first", "on"))
    assert on == pytest.approx(first, rel=1e-6)
    train(
        files, tmp_path / "own", adapter=str(adapter), tokenizer=str(files[0]), lora_rank=0, **flags
    )
    own = load_tokenizer(tmp_path / "own" / "adapter").chat_template
    assert own == load_tokenizer(files[0]).chat_template != template


def test_an_adapter_has_the_ids_of_its_base_whatever_class_its_tokenizer_names(tmp_path):
    """Phi-4 names GPT2Tokenizer. transformers 5 takes TokenizersBackend, by the model's type, and leaves
    digits apart; from a folder without a model it took the class that is named, and joined them.
    """
    folder = tiny_model_folder(tmp_path / "model", "phi3", vocab_size=271)
    made = json.loads((folder / "tokenizer.json").read_text())
    made["model"]["vocab"]["12"] = 261
    made["model"]["merges"] = [["1", "2"]]
    digits = {"type": "Split", "pattern": {"Regex": r"\d"}, "behavior": "Isolated", "invert": False}
    of_bytes = made["pre_tokenizer"] | {"use_regex": False}
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, of_bytes]}
    (folder / "tokenizer.json").write_text(json.dumps(made))

    def ids(path):
        return AutoTokenizer.from_pretrained(path)("12")["input_ids"]

    def name_gpt2(path):
        file = path / "tokenizer_config.json"
        file.write_text(
            json.dumps(json.loads(file.read_text()) | {"tokenizer_class": "GPT2Tokenizer"})
        )

    name_gpt2(folder)
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "12"}, {"role": "assistant", "content": "12 12"}]
    rows.write_text(f"{json.dumps({'messages': turns})}\n" * 8)
    train((folder, rows), tmp_path / "first", 1, steps=1)
    adapter = tmp_path / "first" / "adapter"
    assert len(ids(folder)) == 2
    assert ids(adapter) == ids(folder)
    name_gpt2(adapter)  # as others save it
    assert ids(adapter) == [261]
    train((folder, rows), tmp_path / "on", 1, steps=1, adapter=str(adapter), lora_rank=0)
    assert numbers(tmp_path / "on")[0]["tokens"] == numbers(tmp_path / "first")[0]["tokens"]
    trained = open_trained(str(folder), str(adapter), "", "fp32", ALONE, False)
    assert load_tokenizer(*trained.tokenizer)("12")["input_ids"] == ids(folder)


@over_4_bit
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("adamw_8bit", marks=pytest.mark.slow)])
def test_a_resume_is_bitwise_and_the_checkpoint_holds_only_what_trains(
    files, base, two_ranks, tmp_path, optimizer
):
    flags, out, curve = two_ranks
    if optimizer != "adamw":
        # (64, 64): enough for 8 bits
        flags, out = {**flags, "optimizer": optimizer, "lora_rank": 64}, tmp_path / "whole"
        curve = train(files, out, **flags)
    names = Reader(out / "checkpoints" / "step_00000002").read_metadata().state_dict_metadata
    assert any(".lora_" in name for name in names)
    assert all(".lora_" in name or name.startswith("rng.") for name in names)
    # as a kill after the second step leaves it
    shutil.copytree(out, tmp_path / "killed")
    (tmp_path / "killed" / "plan.json").unlink()
    for name in ("adapter", "checkpoints/step_00000004"):
        shutil.rmtree(tmp_path / "killed" / name)
    assert train(files, tmp_path / "killed", **flags) == curve
    whole, killed = (load_file(run / "adapter" / FILE) for run in (out, tmp_path / "killed"))
    assert whole.keys() == killed.keys()
    assert all(torch.equal(whole[name], killed[name]) for name in whole)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"quantization": "8bit", "lora_rank": 0}, "nothing would train (fix: --lora_rank 16)"),
        ({"lora_rank": 0, "lora_alpha": 32.0}, "--lora_alpha without --lora_rank changes nothing"),
        ({"param_dtype": "bf16"}, "--param_dtype bf16"),
        ({"int8_mode": "llm_int8"}, "--int8_mode without --quantization changes nothing"),
        (
            {"keep_experts_16bit": True},
            "--keep_experts_16bit without --quantization changes nothing",
        ),
        ({"lora_targets": "w_proj"}, "--lora_targets w_proj"),
        ({"adapter": "nowhere"}, "nowhere"),
        (
            {"quantization": "4bit", "int8_mode": "llm_int8"},
            "--int8_mode llm_int8 is of --quantization 8bit",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_weights_are_read(
    files, tmp_path, monkeypatch, flags, says
):
    model, rows = files
    monkeypatch.setattr(finetune, "load_pieces", None)
    settings = {
        "model": str(model),
        "dataset": str(rows),
        "output_dir": str(tmp_path / "out"),
        "lora_rank": 4,
    }
    with pytest.raises(ConfigError) as error:
        finetune.main(finetune.Config(**settings | flags))
    assert says in str(error.value)
    assert "(fix: " in str(error.value)
    assert not list(tmp_path.rglob("*.yaml"))  # the next start is the first one


def test_the_head_is_quantized_where_that_is_asked(files, tmp_path):
    flags = {"quantization": "8bit", "quantize_head": True}
    one = train(files, tmp_path / "one", 1, **flags)
    torch.testing.assert_close(train(files, tmp_path / "two", 2, **flags), one, rtol=2e-5, atol=0)
    plain = train(files, tmp_path / "plain", 1, quantization="8bit")
    assert one != plain
    torch.testing.assert_close(
        [loss for loss, _ in one], [loss for loss, _ in plain], rtol=1e-2, atol=0
    )
    tied = tiny_model_folder(tmp_path / "qwen2", "qwen2", vocab_size=271)
    with pytest.raises(AssertionError, match="--quantize_head: it is the embedding too"):
        train((tied, files[1]), tmp_path / "tied", **flags)


def test_a_mixture_is_trained_over_quantized_experts_and_over_those_in_16_bit(files, tmp_path):
    mixture = tiny_model_folder(tmp_path / "mixtral", "mixtral", vocab_size=271)
    curves = []
    for flags in ({}, {"keep_experts_16bit": True}):
        curve = train(
            (mixture, files[1]), tmp_path / f"out{len(flags)}", quantization="8bit", **flags
        )
        assert curve[-1][0] < curve[0][0]
        curves.append([loss for loss, _ in curve])
    assert curves[0] != curves[1]
    torch.testing.assert_close(*curves, rtol=1e-2, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["", "--quantization 8bit", "--quantization 4bit"])
def test_the_llama_recipes_command_runs_verbatim(files, tmp_path, quantization):
    command = f"torchrun --nnodes 1 --nproc_per_node 2 {QUOTED}/recipes/finetune.py"
    command += " --enable_fsdp --low_cpu_fsdp --use_peft --peft_method lora"
    command += f" --model_name {files[0]} --batch_size_training 1"
    command += (
        f" --output_dir ./output --num_epochs 1 --save_model --dataset {files[1]} {quantization}"
    )
    _, *words = shlex.split(command)
    read = get_args_parser().parse_args(words)  # by torchrun, with nothing left over
    of_script = words.index(read.training_script)
    assert (read.nnodes, read.nproc_per_node, of_script) == ("1", "2", 4)
    assert read.training_script_args == words[of_script + 1 :]
    result = forked(command, tmp_path)
    assert result.returncode == 0, result.stdout
    base = AutoModelForCausalLM.from_pretrained(files[0])
    assert (
        PeftModel.from_pretrained(base, tmp_path / "output" / "adapter").peft_config["default"].r
        == 8
    )
