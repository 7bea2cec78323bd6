"""Adapter folders from elsewhere: those of peft are used, whatever it wrote into them; others are one line.

python -m pytest tests/test_adapter_file.py
"""

import itertools
import json
import math
import shutil
import warnings

import export
import finetune
import generate
import prefer
import pytest
import torch
from export import read_whole
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_parity import write_rows
from tiny import tiny_config, tiny_model_folder
from transformers import AutoConfig, AutoModelForCausalLM

from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import (
    SETTINGS,
    TENSORS,
    add_adapters,
    base_names,
    base_of,
    load_adapter,
    match_tensors,
    read_lora_config,
    save_adapter,
)
from utils.model.options import Lora
from utils.run.distributed import init_distributed
from utils.run.errors import ConfigError


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("files") / "base", vocab_size=271)


def peft_adapter(base, folder, targets, **options):
    """An adapter that peft made and saved, and the logits with it."""
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        config = LoraConfig(
            r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM", **options
        )
        model = get_peft_model(model, config)
        with torch.no_grad():
            for parameter in filter(lambda p: p.requires_grad, model.parameters()):
                parameter.add_(torch.randn_like(parameter) * 0.05)
        model.save_pretrained(folder)
    return answers(model)


@torch.no_grad()
def answers(model):
    return model.eval()(input_ids=torch.arange(3, 15)[None], use_cache=False).logits


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("honest") / "adapter"
    peft_adapter(base, folder, ["q_proj", "v_proj"])
    return folder


def changed(adapter, folder, **settings):
    """A copy of an adapter with other settings; None takes one out."""
    shutil.copytree(adapter, folder)
    file = folder / SETTINGS
    merged = {**json.loads(file.read_text()), **settings}
    file.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))
    return folder


def train_on(folder):
    """Build a model on meta with an adapter; nothing is allocated."""
    model = build_model(tiny_config("llama", vocab_size=271), torch.float32)
    add_adapters(model, Lora(adapter=str(folder)))
    return model


def merge(folder):
    model = build_model(tiny_config("llama", vocab_size=271), torch.float32)
    export.plan_merge(model, [], folder)


HONEST = {
    "a regular expression": (r".*\.(q_proj|v_proj)", {}),
    "one with a look ahead": (r"^(model\.layers(?=\.).*\.(q_proj|down_proj))$", {}),
    "all-linear": ("all-linear", {}),
    "patterns": (
        ["q_proj", "v_proj"],
        {"rank_pattern": {r"layers\.[01]\..*q_proj": 2}, "alpha_pattern": {"v_proj": 3}},
    ),
    "some layers": (
        ["q_proj", "up_proj"],
        {"layers_to_transform": [0, 2], "layers_pattern": "layers"},
    ),
    "excluded": (["q_proj", "v_proj"], {"exclude_modules": r".*layers\.1\..*"}),
}


@pytest.mark.parametrize("case", HONEST)
def test_adapters_of_peft_give_pefts_logits_and_are_saved_as_they_were(base, tmp_path, case):
    targets, options = HONEST[case]
    expected = peft_adapter(base, tmp_path / "theirs", targets, **options)
    model = build_model(AutoConfig.from_pretrained(base), torch.float32)
    pieces = plan_pieces(model, open_weights(base), base)
    config = add_adapters(model, Lora(adapter=str(tmp_path / "theirs")))
    world = init_distributed()
    load_pieces(model, pieces, world.device, names=base_names(model))
    load_adapter(model, tmp_path / "theirs")
    assert torch.equal(answers(model), expected)
    save_adapter(tmp_path / "ours", model, config, base, world, None, None)
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert torch.equal(answers(PeftModel.from_pretrained(again, tmp_path / "ours")), expected)


@pytest.mark.parametrize(("alpha", "written"), [(16.0, "16"), (0.5, "0.5"), (16, "16")])
def test_a_whole_lora_alpha_is_written_as_an_integer_which_is_all_that_ollama_reads(
    tmp_path, alpha, written
):
    model = build_model(tiny_config("llama", vocab_size=271), torch.float32)
    config = add_adapters(model, Lora(lora_rank=4, lora_alpha=alpha, lora_targets="q_proj,v_proj"))
    model.to_empty(device="cpu")
    save_adapter(tmp_path / "ours", model, config, "base", init_distributed(), None, None)
    assert f'"lora_alpha": {written},' in (tmp_path / "ours" / SETTINGS).read_text()


@pytest.mark.parametrize(
    ("name", "written"),
    [("~/base", "HOME/base"), ("HOME/base", "HOME/base"), ("owner/name", "owner/name")],
)
def test_an_adapter_names_its_base_so_that_peft_finds_it(tmp_path, monkeypatch, name, written):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "base").mkdir()
    name, written = (text.replace("HOME", str(tmp_path)) for text in (name, written))
    model = build_model(tiny_config("llama", vocab_size=271), torch.float32)
    config = add_adapters(model, Lora(lora_rank=4))
    model.to_empty(device="cpu")
    save_adapter(tmp_path / "ours", model, config, name, init_distributed(), None, None)
    assert base_of(tmp_path / "ours") == written


def test_all_linear_in_a_file_is_what_peft_reads_it_as(base, tmp_path):
    peft_adapter(base, tmp_path / "names", "all-linear")
    folder = changed(tmp_path / "names", tmp_path / "adapter", target_modules="all-linear")
    names = [name for name, _ in train_on(folder).named_parameters()]
    assert sum(".lora_A." in name for name in names) == 21


WRONG = [
    *(("r", value) for value in ("8", -1, 1.5, [8], 100_000)),
    *(("lora_alpha", value) for value in ("16", [16])),
    *(("lora_dropout", value) for value in ("0", 7)),
    *(("target_modules", value) for value in (7, "(q_proj", [], ["nothing"])),
    *(("modules_to_save", value) for value in (3, ["lm_head"])),
    *(("rank_pattern", value) for value in ({"q_proj": 3}, {"q_proj": "8"})),
    *(("init_lora_weights", value) for value in ("pissa", "olora", "eva", "corda", "loftq")),
    *(("peft_type", "IA3"), ("layer_replication", [[0, 2]]), ("of_a_later_peft", 1)),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_settings_that_do_not_work_are_one_line_before_memory_is_given_to_them(
    adapter, tmp_path, name, value
):
    folder = changed(adapter, tmp_path / "adapter", **{name: value})
    for use in (train_on, merge):
        with pytest.raises(ConfigError, match=r"\(fix: ") as error:
            use(folder)
        assert len(str(error.value).splitlines()) == 1


def test_what_is_null_or_unknown_but_empty_is_passed_over(adapter, tmp_path):
    file = changed(adapter, tmp_path / "adapter") / SETTINGS
    stored = json.loads(file.read_text())
    nothing = dict.fromkeys(("exclude_modules", "modules_to_save", "rank_pattern", "use_dora"))
    file.write_text(json.dumps(stored | nothing | {"of_a_later_peft": None, "another": False}))
    assert read_lora_config(file.parent).r == 4


def test_the_advice_for_an_adapter_in_a_bin_file_works(base, adapter, tmp_path):
    """peft wrote them until late 2023."""
    older, newer = changed(adapter, tmp_path / "older"), tmp_path / "newer"
    torch.save(load_file(older / TENSORS), older / "adapter_model.bin")
    (older / TENSORS).unlink()
    with pytest.raises(ConfigError, match=r"an adapter in \.bin: peft's save_pretrained"):
        match_tensors(train_on(adapter), older)
    model = AutoModelForCausalLM.from_pretrained(base)
    PeftModel.from_pretrained(model, older).save_pretrained(newer)
    assert match_tensors(train_on(newer), newer)


def test_an_adapter_of_the_experts_of_transformers_4_is_merged_as_the_error_says(tmp_path):
    """Mixtral's experts were layers w1, w2 and w3 there, each with an adapter of its own."""
    mixtral = tiny_model_folder(tmp_path / "mixtral", "mixtral", vocab_size=271)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    peft_adapter(mixtral, adapter, ["q_proj"])
    stored = load_file(adapter / TENSORS)
    for name, into, out in (("w1", 64, 96), ("w2", 96, 64), ("w3", 64, 96)):
        for layer, expert in itertools.product(range(3), range(4)):
            path = f"base_model.model.model.layers.{layer}.block_sparse_moe.experts.{expert}.{name}"
            stored[f"{path}.lora_A.weight"] = torch.randn(4, into) * 0.1
            stored[f"{path}.lora_B.weight"] = torch.randn(out, 4) * 0.1
    save_file(stored, adapter / TENSORS)
    adapter = changed(adapter, tmp_path / "old", target_modules=["q_proj", "w1", "w2", "w3"])
    for recipe in ("finetune", "generate", "export"):
        with pytest.raises(ConfigError, match=r"experts .* merge it with peft, and --model NEW\)"):
            use(recipe, mixtral, adapter, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype="auto")
    PeftModel.from_pretrained(model, adapter).merge_and_unload().save_pretrained(merged)
    before, after = (
        {name: read_whole(info) for name, info in open_weights(folder).items()}
        for folder in (mixtral, merged)
    )
    for name, info in before.items():
        path = f"base_model.model.{name.removesuffix('.weight')}"
        change = 0
        if f"{path}.lora_A.weight" in stored:  # lora_alpha / r is 2
            change = 2 * stored[f"{path}.lora_B.weight"] @ stored[f"{path}.lora_A.weight"]
        torch.testing.assert_close(after[name], info + change)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(adapter, tmp_path, bad):
    folder = changed(adapter, tmp_path / "adapter")
    stored = load_file(folder / TENSORS)
    name = sorted(stored)[0]
    stored[name].fill_(bad)
    save_file(stored, folder / TENSORS)
    model = train_on(folder)
    with pytest.raises(ConfigError, match=f"{name} holds numbers that are not finite"):
        load_adapter(model.to_empty(device="cpu"), folder)
    with pytest.raises(ConfigError, match=f"{name} holds numbers that are not finite"):
        merge(folder)


def use(recipe, base, folder, root):
    """Start a recipe with an adapter."""
    rows, out, prompts = write_rows(root / "rows.jsonl", 4), str(root / "out"), root / "prompts.txt"
    prompts.write_text("ab\n")
    flags = {"model": str(base), "adapter": str(folder)}
    if recipe == "finetune":
        finetune.main(finetune.Config(dataset=str(rows), output_dir=out, **flags))
    elif recipe == "generate":
        generate.main(generate.Config(prompts=str(prompts), **flags))
    else:
        export.main(export.Config(output_dir=out, **flags))


def test_an_adapter_of_mlx_is_refused_with_its_own_command_since_peft_cannot_merge_it(
    base, tmp_path
):
    tensors = {"model.layers.0.self_attn.q_proj.lora_a": torch.zeros(64, 4)}
    save_file(tensors, tmp_path / "adapters.safetensors")
    settings = {
        "fine_tune_type": "lora",
        "lora_parameters": {"rank": 4, "dropout": 0.0, "scale": 20.0},
        "num_layers": 16,
    }
    (tmp_path / SETTINGS).write_text(json.dumps(settings))
    with pytest.raises(KeyError):
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path)
    for recipe in ("finetune", "generate", "export"):
        with pytest.raises(ConfigError, match=r"lora_parameters .*mlx_lm.fuse; --model NEW\)$"):
            use(recipe, base, tmp_path, tmp_path)


@pytest.mark.parametrize("recipe", ["finetune", "generate", "export"])
def test_every_recipe_says_one_line_of_an_adapter_that_does_not_work(
    base, adapter, tmp_path, recipe
):
    for i, settings in enumerate(({"target_modules": "(q"}, {"r": "8"}, {"use_dora": True})):
        folder = changed(adapter, tmp_path / f"adapter_{i}", **settings)
        with pytest.raises(ConfigError, match=r"\(fix: ") as error:
            use(recipe, base, folder, tmp_path)
        assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out" / "config.yaml").exists()


@pytest.mark.parametrize("name", ["/home/them/llama", "../models/llama"])
def test_an_adapter_whose_base_is_not_on_this_machine_asks_for_the_model(adapter, tmp_path, name):
    folder = changed(adapter, tmp_path / "adapter", base_model_name_or_path=name)
    for recipe in ("generate", "export"):
        with pytest.raises(ConfigError, match=rf"^{name} is not a folder.*fix: --model, if an"):
            use(recipe, "", folder, tmp_path)


@pytest.mark.parametrize("recipe", ["finetune", "generate", "export"])
def test_an_adapter_of_the_hub_is_refused_with_the_command_that_fetches_it(base, tmp_path, recipe):
    with pytest.raises(
        ConfigError, match=r"^owner/name: .*hf download OWNER/NAME --local-dir DIR;"
    ):
        use(recipe, base, "owner/name", tmp_path)


def test_other_settings_of_the_adapter_that_a_run_began_with_are_refused_at_its_resume(
    base, adapter, tmp_path, capsys
):
    """Its checkpoint has the weights, and lora_alpha is in the adapter's folder, which may have changed."""
    folder = changed(adapter, tmp_path / "adapter")
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    flags = {"model": str(base), "adapter": str(folder), "dataset": str(rows), "steps": 2}
    run = finetune.main(finetune.Config(**flags, save_every=1, output_dir=str(tmp_path / "run")))
    checkpoint = str(run / "checkpoints" / "step_00000001")
    again = flags | {"resume": checkpoint, "output_dir": str(tmp_path / "again")}
    finetune.main(finetune.Config(**again))
    export.main(export.Config(checkpoint=checkpoint, output_dir=str(tmp_path / "same")))
    assert "warning" not in capsys.readouterr().out
    shutil.rmtree(folder)
    changed(adapter, folder, lora_alpha=16)
    with pytest.raises(ConfigError, match=r"of another run: adapter \{?.* -> .*\(fix: "):
        finetune.main(finetune.Config(**again | {"output_dir": str(tmp_path / "third")}))
    export.main(export.Config(checkpoint=checkpoint, output_dir=str(tmp_path / "other")))
    assert "was trained from, then -> now: adapter " in capsys.readouterr().out


def test_the_reference_of_an_adapter_is_computed_anew_for_another_lora_alpha(
    base, adapter, tmp_path, monkeypatch
):
    """It is the model at the start, so the first loss is log 2. Equal tensors were read from the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(json.dumps({"prompt": "a", "chosen": "bc d", "rejected": "zz"}) + "\n")
    for alpha in (8, 16):
        folder = changed(adapter, tmp_path / f"adapter_{alpha}", lora_alpha=alpha)
        flags = {"model": base, "adapter": folder, "dataset": pairs, "output_dir": f"{folder}_run"}
        flags = {name: str(path) for name, path in flags.items()}
        run = prefer.main(prefer.Config(**flags, steps=1))
        first = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
