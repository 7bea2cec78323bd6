"""What export.py writes is what peft, or the run itself, would have written, on any number of ranks.

python -m pytest tests/test_export.py
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import warnings
from pathlib import Path

import export
import finetune
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_parity import write_rows
from tiny import SIZES, tiny_model_folder
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from utils.run.errors import ConfigError
from utils.train import resume, trained_run

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
FP32, BF16 = torch.float32, torch.bfloat16
CASES = {  # name: (family, dtype, files of the base, changes to LORA)
    "plain": ("llama", FP32, 2, {}),
    "plain bf16": ("llama", BF16, 2, {}),
    "dora": ("llama", BF16, 2, {"use_dora": True}),
    "rslora and patterns": (
        "llama",
        BF16,
        1,
        {
            "target_modules": "all-linear",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 2},
            "alpha_pattern": {"v_proj": 3},
        },
    ),
    "a head that was trained": ("llama", BF16, 2, {"modules_to_save": ["lm_head"]}),
    "embedding and head": ("llama", FP32, 2, {"target_modules": ["embed_tokens", "lm_head"]}),
    "tied, the head trained": ("qwen2", BF16, 1, {"modules_to_save": ["lm_head"]}),
    "tied, the embedding trained": ("qwen2", FP32, 2, {"modules_to_save": ["embed_tokens"]}),
    "biases": ("qwen2", BF16, 1, {"bias": "all"}),
    "biases of the adapter": ("qwen2", FP32, 1, {"lora_bias": True}),
    "Conv1D": ("gpt2", BF16, 1, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "Conv1D dora": (
        "gpt2",
        FP32,
        1,
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True},
    ),
    "experts beside it": ("mixtral", BF16, 2, {}),
}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: t
        for file in sorted(folder.glob("*.safetensors"))
        for name, t in load_file(file).items()
    }


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_adapter(base: Path, folder: Path, **changes) -> Path:
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA | changes))
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
    return folder


def merge_with_peft(base: Path, adapter: Path, out: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
        PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(out)
    return out


def exported(out, ranks=1, **flags) -> Path:
    flags = {"output_dir": out, **flags}
    flags = {name: str(path) for name, path in flags.items()}
    return on_rank(None, flags) if ranks == 1 else run_ranks(on_rank, ranks, flags)[0]


def on_rank(world, flags) -> Path:
    return export.main(export.Config(**flags))


def test_packages_that_it_imports_are_silent():
    """bitsandbytes, which peft imports, warns of an optional kernel."""
    told = subprocess.run([sys.executable, export.__file__, "--help"], capture_output=True)
    assert told.stderr == b""


@pytest.mark.parametrize("case", CASES)
def test_a_merge_is_bit_equal_to_pefts_and_leaves_its_sources_alone(case, tmp_path):
    kind, dtype, files, changes = CASES[case]
    base = tiny_model_folder(tmp_path / "base", kind, dtype, files, vocab_size=271)
    adapter = make_adapter(base, tmp_path / "adapter", **changes)
    before = contents(base), contents(adapter)
    expected = merge_with_peft(base, adapter, tmp_path / "peft")
    out = exported(tmp_path / "out", model=base, adapter=adapter)
    wanted, found = tensors(expected), tensors(out)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name
    assert any(
        name not in tensors(base) or not torch.equal(t, tensors(base)[name])
        for name, t in found.items()
    )
    configs = [json.loads((folder / "config.json").read_text()) for folder in (expected, out)]
    assert configs[0].get("tie_word_embeddings") == configs[1].get("tie_word_embeddings")
    assert (contents(base), contents(adapter)) == before
    ids = torch.arange(12)[None]
    logits = [
        AutoModelForCausalLM.from_pretrained(f, dtype="auto")(ids).logits for f in (expected, out)
    ]
    assert torch.equal(*logits)


@pytest.mark.parametrize("targets", ["embed_tokens", "lm_head", "embed_tokens lm_head"])
def test_a_merged_model_with_a_tied_head_answers_as_the_adapter_does(targets, tmp_path):
    """peft's merge adds the adapter of the one to both."""
    base = tiny_model_folder(tmp_path / "base", "qwen2", FP32, vocab_size=271)
    changes = {"target_modules": ["q_proj", *targets.split()]}
    adapter = make_adapter(base, tmp_path / "adapter", **changes)
    out = exported(tmp_path / "out", 2, model=base, adapter=adapter)
    ids = torch.arange(12)[None]
    model = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    expected = PeftModel.from_pretrained(model, adapter)(ids).logits
    logits = AutoModelForCausalLM.from_pretrained(out, dtype="auto")(ids).logits
    torch.testing.assert_close(logits, expected)


@pytest.fixture(scope="module")
def merged_alone(tmp_path_factory):
    """(base, adapter, their merge by one rank)"""
    root = tmp_path_factory.mktemp("merged")
    base = tiny_model_folder(root / "base", "qwen2", BF16, 2, vocab_size=271)
    adapter = make_adapter(base, root / "adapter", modules_to_save=["lm_head"])
    return base, adapter, exported(root / "alone", model=base, adapter=adapter)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_the_files_of_a_merge(ranks, merged_alone, tmp_path):
    base, adapter, alone = merged_alone
    shared = exported(tmp_path / "shared", ranks, model=base, adapter=adapter)
    assert contents(shared) == contents(alone)
    assert {"tokenizer.json", "generation_config.json"} <= contents(shared).keys()


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    """(a base, an adapter of it), which nobody changes"""
    root = tmp_path_factory.mktemp("made")
    base = tiny_model_folder(root / "base", vocab_size=271)
    return base, make_adapter(base, root / "adapter")


@pytest.fixture
def made(made_once, tmp_path):
    """(the base, an adapter that the test may damage)"""
    base, adapter = made_once
    return base, shutil.copytree(adapter, tmp_path / "adapter")


def test_the_base_comes_from_the_adapter_and_its_tokenizer_goes_along(made, tmp_path):
    base, adapter = made
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(adapter)
    out = exported(tmp_path / "out", adapter=adapter)
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    # 4: <|im_end|>
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 4]
    assert contents(out)["config.json"] == contents(base)["config.json"]


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("saved", [[], ["embed_tokens", "lm_head"], ["lm_head"]], ids=str)
def test_an_adapter_that_peft_saved_with_a_larger_vocabulary_is_merged(kind, saved, tmp_path):
    """peft adds both embeddings to its file, and those in modules_to_save under three names."""
    old = tiny_model_folder(tmp_path / "old", kind, FP32, vocab_size=271)
    base = tiny_model_folder(tmp_path / "base", kind, FP32, vocab_size=280)
    adapter = make_adapter(base, tmp_path / "adapter", modules_to_save=saved or None)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.name_or_path = str(old)  # peft compares the sizes of the vocabularies
    model = PeftModel.from_pretrained(model, adapter)
    model.get_input_embeddings().weight.data[271:] += 1  # rows that only the adapter has
    model.peft_config["default"].base_model_name_or_path = str(old)
    model.save_pretrained(adapter, save_embedding_layers=True)
    ids = torch.arange(265, 277)[None]
    expected = model(ids).logits
    stored = load_file(adapter / "adapter_model.safetensors")
    assert any(name.endswith("embed_tokens.weight") for name in stored)
    assert saved == [] or any(".original_module." in name for name in stored)
    with pytest.raises(ConfigError, match=r"\[271, 64\], there \[280, 64\].*a larger vocabulary\)"):
        exported(tmp_path / "small", model=old, adapter=adapter)
    out = exported(tmp_path / "out", model=base, adapter=adapter)
    logits = AutoModelForCausalLM.from_pretrained(out)(ids).logits
    torch.testing.assert_close(logits, expected)


def test_an_adapter_with_more_tokens_than_its_base_has_rows_is_refused_as_elsewhere(made, tmp_path):
    """generate.py would refuse the merged folder, and a server would end at the first such token."""
    base, adapter = made
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.add_tokens([f"<call {i}>" for i in range(40)])
    tokenizer.save_pretrained(adapter)
    message = rf"the tokenizer has {len(tokenizer)} tokens, the model 271 .*new tokens: see recipes"
    with pytest.raises(ConfigError, match=message):
        exported(tmp_path / "out", model=base, adapter=adapter)
    assert not (tmp_path / "out").exists()


CHAT = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


@pytest.mark.parametrize("placed", ["chat_template.jinja", "tokenizer_config.json", "nowhere"])
def test_a_merge_has_the_chat_templates_of_the_adapter_or_all_of_the_base(made, tmp_path, placed):
    """transformers before 4.52 wrote the template into tokenizer_config.json, where a chat_template.jinja of
    the base hides it."""
    base, adapter = shutil.copytree(made[0], tmp_path / "base"), made[1]
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = {"default": CHAT + "base", "tool_use": CHAT + "tools"}
    tokenizer.save_pretrained(base)
    if placed == "nowhere":
        expected = tokenizer.chat_template
    else:
        expected = tokenizer.chat_template = CHAT + "adapter"
        tokenizer.save_pretrained(adapter)
    if placed == "tokenizer_config.json":
        (adapter / "chat_template.jinja").unlink()
        settings = json.loads((adapter / placed).read_text()) | {"chat_template": expected}
        (adapter / placed).write_text(json.dumps(settings))
    out = exported(tmp_path / "out", model=base, adapter=adapter)
    assert AutoTokenizer.from_pretrained(out).chat_template == expected


def test_an_adapter_beside_weights_into_which_it_was_merged_is_not_copied(made, tmp_path):
    """As torchtune writes them. from_pretrained would then look for the weights in its base."""
    base, adapter = made
    merged = shutil.copytree(base, tmp_path / "torchtune")
    shutil.copyfile(adapter / "adapter_config.json", merged / "adapter_config.json")
    out = exported(tmp_path / "out", model=merged, adapter=adapter)
    expected = merge_with_peft(base, adapter, tmp_path / "peft")
    ids = torch.arange(12)[None]
    first, second = (
        AutoModelForCausalLM.from_pretrained(folder)(ids).logits for folder in (out, expected)
    )
    assert torch.equal(first, second)


def damaged(adapter: Path, change) -> None:
    file = adapter / "adapter_model.safetensors"
    stored = load_file(file)
    change(stored)
    save_file(stored, file)


def test_the_adapter_of_a_reward_model_is_refused_with_the_place_that_says_how_to_merge_it(
    made, tmp_path
):
    base, adapter = made
    score = "base_model.model.score.weight"
    damaged(adapter, lambda stored: stored.update({score: torch.zeros(1, 64)}))
    remedy = r"recipes/README\.md says how to merge that of a reward model"
    with pytest.raises(ConfigError, match=rf"score\.weight absent, there \[1, 64\] .*{remedy}"):
        exported(tmp_path / "out", model=base, adapter=adapter)


def test_an_adapter_of_another_base_is_refused_by_name_before_anything_is_written(made, tmp_path):
    base, adapter = made
    wider = tiny_model_folder(tmp_path / "wider", vocab_size=271, hidden_size=32)
    other = tiny_model_folder(tmp_path / "other", "gpt2", vocab_size=271)
    for wrong, words in (
        (wider, r"layers\.0\..*q_proj\.lora_A.* \[4, 32\], there \[4, 64\]"),
        (other, "q_proj"),
    ):
        with pytest.raises(ConfigError, match=words):
            exported(tmp_path / "out", model=wrong, adapter=adapter)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    damaged(adapter, lambda stored: stored.update({name.replace("0", "7"): stored[name].clone()}))
    with pytest.raises(
        ConfigError, match=r"does not fit: .*model\.layers\.7\.self_attn\.q_proj.* absent, there"
    ):
        exported(tmp_path / "out", model=base, adapter=adapter)
    damaged(adapter, lambda stored: [stored.pop(n) for n in (name, name.replace("0", "7"))])
    with pytest.raises(
        ConfigError, match=r"does not fit: .*model\.layers\.0\.self_attn\.q_proj.*, there absent"
    ):
        exported(tmp_path / "out", model=base, adapter=adapter)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_holds_something_is_never_written_to(made, tmp_path):
    base, adapter = shutil.copytree(made[0], tmp_path / "base"), made[1]
    for out in (base, adapter):
        before = contents(out)
        with pytest.raises(ConfigError, match="holds something, and is not overwritten"):
            exported(out, model=base, adapter=adapter)
        assert contents(out) == before


def test_a_merge_that_fails_leaves_nothing_behind(made, tmp_path):
    base, adapter = shutil.copytree(made[0], tmp_path / "base"), made[1]
    (base / "notes.txt").symlink_to("/etc/hostname")  # leads out of the folder
    with pytest.raises(ConfigError, match="leads out of the folder"):
        exported(tmp_path / "out" / "model", model=base, adapter=adapter)
    assert not list((tmp_path / "out").iterdir())


def test_a_merge_that_peft_refuses_is_one_line(made_once, tmp_path):
    base, _ = made_once  # its layers have no biases
    adapter = make_adapter(base, tmp_path / "adapter", lora_bias=True)
    with pytest.raises(ConfigError, match=r"peft: .*lora_bias.* no bias.*\(fix: ") as error:
        exported(tmp_path / "out", model=base, adapter=adapter)
    assert "\n" not in str(error.value)


def test_adapters_that_cannot_be_merged_file_by_file_are_refused(made_once, tmp_path):
    base, _ = made_once
    adapter = make_adapter(base, tmp_path / "adapter", trainable_token_indices=[3])
    with pytest.raises(
        ConfigError, match=r"trainable_token_indices .* cannot be used .*fix: merge it"
    ):
        exported(tmp_path / "out", model=base, adapter=adapter)
    with pytest.raises(ConfigError, match="--adapter, --checkpoint, or --model in fp8"):
        export.Config(output_dir="out")


# --- weights that are published in 8 or 4 bits


def quantized(folder: Path, method: str) -> Path:
    """A folder as others publish it: experts in mxfp4 (gpt-oss), or all matrices of the layers in fp8."""
    if method == "mxfp4":
        sizes = {"num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 16}
        config = AutoConfig.for_model("gpt_oss", **{**SIZES, **sizes}, dtype="bfloat16")
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    else:
        tiny_model_folder(folder, "qwen3_moe", BF16)
    stored, random = tensors(folder), torch.Generator().manual_seed(3)
    how = {"quant_method": method, "weight_block_size": [32, 16]}
    if method == "fp8":
        for name in [name for name in stored if name.endswith("_proj.weight")]:
            rows, cols = stored[name].shape
            stored[name] = stored[name].to(torch.float8_e4m3fn)
            scales = torch.rand(-(-rows // 32), -(-cols // 16), generator=random)
            stored[f"{name}_scale_inv"] = scales
    else:
        del how["weight_block_size"]
        for name in [name for name in stored if name.endswith("_proj") and "experts" in name]:
            experts, inner, rows = stored.pop(name).shape
            shape = (experts, rows, inner // 32)
            packed = torch.randint(256, (*shape, 16), generator=random)
            scales = torch.randint(118, 124, shape, generator=random)
            stored[f"{name}_blocks"] = packed.to(torch.uint8)
            stored[f"{name}_scales"] = scales.to(torch.uint8)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": how}))
    return folder


@pytest.mark.parametrize(
    ("method", "ranks", "config"),
    [("fp8", 2, FineGrainedFP8Config), ("mxfp4", 1, Mxfp4Config)],
)
def test_weights_in_8_and_4_bits_become_what_transformers_makes_of_them(
    method, ranks, config, tmp_path
):
    folder = quantized(tmp_path / "published", method)
    with pytest.raises(ConfigError, match=f"--model {folder} --output_dir NEW makes bf16"):
        finetune.main(finetune.Config(model=str(folder), output_dir=str(tmp_path / "run")))
    out = exported(tmp_path / "bf16", ranks, model=folder)
    whole = config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, quantization_config=whole, dtype=BF16)
    ours = AutoModelForCausalLM.from_pretrained(out)
    expected = theirs.state_dict()
    for name, tensor in ours.state_dict().items():
        assert tensor.dtype == BF16
        assert torch.equal(tensor, expected[name]), name
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    flags = {"model": str(out), "dataset": str(rows), "output_dir": str(tmp_path / "run")}
    flags |= {"tokenizer": str(finetune.TINY), "chat_template": "alpaca", "steps": 1}
    assert finetune.main(finetune.Config(**flags))


def test_blocks_of_fp8_may_end_beyond_the_matrix():
    weight = torch.full((5, 3), 2.0).to(torch.float8_e4m3fn)  # such as 576 rows in blocks of 128
    found = export.dequantized(weight, torch.tensor([[1.0, 2], [3, 4], [5, 6]]), [2, 2])
    rows = [[2.0, 2, 4]] * 2 + [[6, 6, 8]] * 2 + [[10, 10, 12]]
    assert torch.equal(found, torch.tensor(rows, dtype=BF16))
    scalar = export.dequantized(weight, torch.tensor(0.5), None)
    assert torch.equal(scalar, torch.ones(5, 3, dtype=BF16))


def test_weights_of_other_formats_are_refused_by_name(tmp_path):
    folder = tiny_model_folder(tmp_path / "plain", "llama")
    with pytest.raises(
        ConfigError, match="not quantized: nothing to convert .fix: use it as it is"
    ):
        exported(tmp_path / "out", model=folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="awq: only fp8 and mxfp4 .*before quantization"):
        exported(tmp_path / "out", model=folder)
    folder = quantized(tmp_path / "published", "fp8")
    stored = tensors(folder)
    name = next(name for name in stored if name.endswith("_scale_inv"))
    del stored[name]
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=f"scales, or none: {name.removesuffix('_scale_inv')} "):
        exported(tmp_path / "out", model=folder)
    assert not (tmp_path / "out").exists()


# --- checkpoints


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two steps with its checkpoints, in bf16 on disk and fp32 in training."""
    root = tmp_path_factory.mktemp("run")
    model = tiny_model_folder(root / "base", "qwen2", BF16, vocab_size=271)
    rows = write_rows(root / "rows.jsonl", 8)
    flags = {"model": str(model), "dataset": str(rows), "output_dir": str(root / "run")}
    flags |= {"steps": 2, "save_every": 1, "lr": 1e-2, "chat_template": "alpaca"}
    return finetune.main(finetune.Config(**flags))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_becomes_the_folder_that_the_run_wrote(ranks, run, tmp_path):
    out = exported(tmp_path / "out", ranks, checkpoint=run)
    assert contents(out) == contents(run / "model")


def test_a_relative_base_and_template_are_found_from_another_folder(run, tmp_path, monkeypatch):
    """The run was started with --model base --chat_template mine.jinja."""
    moved = shutil.copytree(run, tmp_path / "moved")
    state = moved / "checkpoints" / "step_00000002" / "state.json"
    content = json.loads(state.read_text())
    content["config"]["model"], content["cwd"] = "base", str(run.parent)
    content["config"]["chat_template"] = "mine.jinja"
    shutil.copyfile(run / "model" / "chat_template.jinja", run.parent / "mine.jinja")
    resign(state, json.dumps(content))
    monkeypatch.chdir(tmp_path)
    assert contents(exported(tmp_path / "out", checkpoint=moved)) == contents(run / "model")


def test_the_checkpoint_of_a_reward_model_is_refused_with_the_way_to_its_result(run, tmp_path):
    scores = shutil.copytree(run, tmp_path / "scores")
    state = scores / "checkpoints" / "step_00000002" / "state.json"
    content = json.loads(state.read_text())
    content["config"]["center_weight"] = 0.0
    resign(state, json.dumps(content))
    with pytest.raises(
        ConfigError, match=r"it scores and cannot answer \(fix: .*reward.py --resume"
    ):
        exported(tmp_path / "out", checkpoint=scores)


def resign(file: Path, text: str) -> None:
    """Write a file of a checkpoint, with its sum in the manifest."""
    file.write_text(text)
    manifest = file.with_name("manifest.json")
    content = json.loads(manifest.read_text())
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    content["files"][file.name] = {"sha256": sha256}
    manifest.write_text(json.dumps(content))


def test_an_older_checkpoint_is_named_by_its_folder_and_another_model_is_refused(run, tmp_path):
    out = exported(tmp_path / "out", checkpoint=run / "checkpoints" / "step_00000001")
    assert tensors(out).keys() == tensors(run / "model").keys()
    assert not torch.equal(*(tensors(f)["model.embed_tokens.weight"] for f in (out, run / "model")))
    other = tiny_model_folder(tmp_path / "other", "llama", vocab_size=271)
    with pytest.raises(ConfigError, match="is of another model"):
        exported(tmp_path / "wrong", checkpoint=run, model=other)
    with pytest.raises(ConfigError, match="there is no complete checkpoint"):
        exported(tmp_path / "wrong", checkpoint=tmp_path)
    shutil.copytree(run / "model", tmp_path / "done" / "model")  # its checkpoints are removed
    with pytest.raises(ConfigError, match=f"fix: --model {tmp_path}/done/model"):
        exported(tmp_path / "wrong", checkpoint=tmp_path / "done")


def unfinished(run: Path, folder: Path) -> Path:
    """A copy of a run that has published its first checkpoint; the second lies aside."""
    shutil.copytree(run, folder)
    os.rename(folder / "checkpoints" / "step_00000002", folder / "step_00000002")
    return folder


def export_while_the_run_saves(world, flags) -> None:
    """As on_rank; when rank 0 has looked for the newest checkpoint the run publishes another, and rank 1
    looks after that, if it looks.
    """
    checkpoints = Path(flags["checkpoint"]) / "checkpoints"
    newer = checkpoints / "step_00000002"
    look = resume.complete_checkpoints

    def look_and_go_on(folder: Path) -> list[Path]:
        if world.rank:
            until = time.monotonic() + 20
            while not newer.exists() and time.monotonic() < until:
                time.sleep(0.01)
        found = look(folder)
        if world.rank == 0 and not newer.exists():
            os.rename(checkpoints.parent / newer.name, newer)
        return found

    resume.complete_checkpoints = look_and_go_on
    try:
        on_rank(world, flags)
    finally:
        resume.complete_checkpoints = look


def test_all_ranks_read_the_checkpoint_that_rank_0_chose_while_the_run_saves(run, tmp_path):
    saving = unfinished(run, tmp_path / "saving")
    older = contents(exported(tmp_path / "older", checkpoint=run / "checkpoints" / "step_00000001"))
    flags = {"checkpoint": str(saving), "output_dir": str(tmp_path / "out")}
    run_ranks(export_while_the_run_saves, 2, flags)
    assert contents(tmp_path / "out") == older


def export_what_is_removed(world, flags) -> str:
    """The error of an export whose checkpoint goes while it is read, as its run removes it."""
    load = trained_run.read_tensors

    def load_too_late(path: Path, tensors: dict) -> None:
        if world.rank == 0:
            shutil.rmtree(path)
        dist.barrier()
        load(path, tensors)

    trained_run.read_tensors = load_too_late
    try:
        with pytest.raises(ConfigError) as refused:
            on_rank(world, flags)
    finally:
        trained_run.read_tensors = load
    assert refused.value.agreed
    return str(refused.value)


def test_a_checkpoint_that_goes_while_it_is_read_is_one_line_and_no_model(run, tmp_path):
    saving = unfinished(run, tmp_path / "saving")
    flags = {"checkpoint": str(saving), "output_dir": str(tmp_path / "out" / "model")}
    gone = saving / "checkpoints" / "step_00000001"
    for text in run_ranks(export_what_is_removed, 2, flags):
        assert text.startswith(f"{gone} was removed while it was read (fix: start again")
    assert not (tmp_path / "out").exists()


def lora_run(root: Path, **flags) -> Path:
    """A finished LoRA run; its checkpoints hold only what trained."""
    model = tiny_model_folder(root / "base", vocab_size=271)
    rows = write_rows(root / "rows.jsonl", 8)
    flags = {"lora_rank": 4, "lora_targets": "q_proj,v_proj", "use_rslora": True, "lr": 0.1} | flags
    flags |= {
        "model": str(model),
        "dataset": str(rows),
        "output_dir": str(root / "run"),
        "steps": 2,
    }
    return finetune.main(finetune.Config(**flags))


@pytest.mark.parametrize(("ranks", "save_dtype"), [(1, "original"), (2, "bf16")])
def test_a_checkpoint_of_a_lora_run_becomes_the_adapter_that_the_run_wrote(
    ranks, save_dtype, tmp_path
):
    run = lora_run(tmp_path, modules_to_save="lm_head", save_dtype=save_dtype)
    out = exported(tmp_path / "out", ranks, checkpoint=run)
    assert contents(out) == contents(run / "adapter")
    dtype = {"original": FP32, "bf16": BF16}[save_dtype]
    assert all(tensor.dtype == dtype for tensor in tensors(out).values())
    merged = exported(tmp_path / "merged", ranks, adapter=out)
    expected = merge_with_peft(tmp_path / "base", run / "adapter", tmp_path / "peft")
    found = tensors(merged)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors(expected).items())
