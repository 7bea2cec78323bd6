"""Adapter folders from elsewhere: honest ones are used, whatever peft wrote into them; others are one line.

python -m pytest tests/test_adapter_file.py
"""

import json
import os
import shutil
import signal
import time
import warnings

import export
import finetune
import generate
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_parity import write_rows
from tiny import tiny_config, tiny_model_folder
from transformers import AutoConfig, AutoModelForCausalLM

from utils.model import adapter_file
from utils.model.adapter_file import SETTINGS, TENSORS, base_of, limited_matching, read_lora_config
from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import add_adapter, add_lora, base_names, load_adapter, save_adapter
from utils.model.merge import load_peft
from utils.run.distributed import init_distributed
from utils.run.errors import ConfigError
from utils.train.trained_run import check_settings

# tries each way to cut a name in pieces, which are 2 to the power of its length
SLOW = r"([\w.]+)+!"


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


def meta():
    return build_model(tiny_config("llama", vocab_size=271), torch.float32)


@pytest.fixture(scope="module")
def untouched():
    """For what is refused before anything is put into the model."""
    model = meta()
    yield model
    assert not any("lora" in name for name, _ in model.named_modules())


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
    config = add_adapter(model, tmp_path / "theirs", {})
    world = init_distributed()
    load_pieces(model, pieces, world.device, names=base_names(model))
    load_adapter(model, tmp_path / "theirs")
    assert torch.equal(answers(model), expected)
    save_adapter(tmp_path / "ours", model, config, base, world)
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    assert torch.equal(answers(PeftModel.from_pretrained(again, tmp_path / "ours")), expected)


def test_all_linear_in_a_file_is_what_peft_reads_it_as(base, tmp_path):
    peft_adapter(base, tmp_path / "names", "all-linear")
    folder = changed(tmp_path / "names", tmp_path / "adapter", target_modules="all-linear")
    model = meta()
    add_adapter(model, folder, {})
    assert sum(".lora_A." in name for name, _ in model.named_parameters()) == 21


PATTERNS = {
    "target_modules": SLOW,
    "exclude_modules": SLOW,
    "rank_pattern": {SLOW: 2},
    "alpha_pattern": {SLOW: 2},
}


@pytest.mark.parametrize("setting", [*PATTERNS, "layers_pattern"])
def test_a_regular_expression_that_never_ends_is_one_line(
    adapter, untouched, tmp_path, monkeypatch, setting
):
    monkeypatch.setattr(adapter_file, "MATCHING_SECONDS", 0.3)
    settings = {setting: PATTERNS.get(setting, SLOW)}
    if setting == "layers_pattern":
        settings["layers_to_transform"] = [0]
    folder = changed(adapter, tmp_path / "adapter", **settings)
    before = time.process_time()
    for use in (
        lambda: add_adapter(untouched, folder, {}),
        lambda: load_peft(untouched, folder),
    ):
        says = rf"{SETTINGS}: {setting}: a regular expression was not matched after 0\.3 s \(fix: names of"
        with pytest.raises(ConfigError, match=says):
            use()
    assert time.process_time() - before < 10


def test_a_flag_that_never_ends_is_one_line(monkeypatch):
    monkeypatch.setattr(adapter_file, "MATCHING_SECONDS", 0.3)
    with pytest.raises(
        ConfigError, match=r"^--lora_targets .* was not matched after 0\.3 s \(fix: names"
    ):
        add_lora(meta(), 4, 8, SLOW)


def count_for_ever():
    with limited_matching("here", "there", 0.05):
        while True:
            pass


def test_the_limit_is_one_of_time_and_leaves_no_timer_behind():
    earlier = signal.getsignal(signal.SIGVTALRM)
    with pytest.raises(
        ConfigError, match=r"here: a regular expression was not matched after 0\.05 s"
    ):
        count_for_ever()
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGVTALRM) == earlier


DEEP = "(" * 5000 + ")" * 5000
WRONG = [
    *(("r", value) for value in ("8", "", -1, 0, True, 10**9, 1.5, [8], {}, float("nan"))),
    *(("lora_alpha", value) for value in ("16", True, [16], {}, 0, float("nan"), float("inf"))),
    *(("lora_dropout", value) for value in ("0", -0.1, 1, 7, True, [], float("nan"))),
    *((name, value) for name in ("use_rslora", "use_dora") for value in ("yes", 1, [], "")),
    *(
        ("target_modules", value)
        for value in (7, True, {}, {"q": 1}, [1], [["q_proj"]], [], "", None)
    ),
    *(("target_modules", value) for value in ("(q_proj", "*q", "a{99999999999}", DEEP)),
    *(("exclude_modules", value) for value in (7, {"a": 1}, [None], "(q", DEEP)),
    *(
        ("modules_to_save", value)
        for value in ("lm_head", 3, [3], ["(a+)+$"], [""], {"lm_head": 1})
    ),
    *(
        ("rank_pattern", value)
        for value in ([], "q_proj", {"q_proj": "8"}, {"q_proj": -1}, {"(q": 4})
    ),
    *(("rank_pattern", value) for value in ({"q_proj": 10**9}, {"q_proj": True}, {DEEP: 4})),
    *(
        ("alpha_pattern", value)
        for value in ([1], {"q_proj": "x"}, {"q_proj": float("nan")}, {"*": 1})
    ),
    *(("layers_to_transform", value) for value in ("0", 0.5, [True], [-1], {"0": 1})),
    *(("layers_pattern", value) for value in (7, {"a": 1}, [7])),
    *(("peft_type", value) for value in ("IA3", "", 7, [], {}, None, "LORA\n")),
    *(("init_lora_weights", value) for value in ("pissa", 1, [], {"a": 1})),
    *(("bias", value) for value in ("some", 7, [1], True)),
    *((name, {"a": 1}) for name in ("layer_replication", "megatron_config", "runtime", "\x1b[2J")),
]


@pytest.mark.parametrize("merge", [False, True], ids=["trained", "merged"])
def test_each_setting_of_a_wrong_type_or_size_is_one_line_that_names_it(
    adapter, untouched, tmp_path, merge
):
    folder = changed(adapter, tmp_path / "adapter")
    stored = json.loads((folder / SETTINGS).read_text())
    for name, value in WRONG:
        (folder / SETTINGS).write_text(json.dumps(stored | {name: value}))
        with pytest.raises(ConfigError) as error:
            (load_peft if merge else add_adapter)(untouched, folder, *([] if merge else [{}]))
        text = str(error.value)
        assert len(text) < 700, (name, value)
        assert "(fix: " in text, (name, value, text)
        assert f": {name}".replace("\x1b", "\\u001b") in text, (name, value, text)
        assert text.isprintable(), (name, value)


def test_what_is_null_or_unknown_but_empty_is_passed_over(adapter, tmp_path):
    file = changed(adapter, tmp_path / "adapter") / SETTINGS
    stored = json.loads(file.read_text())
    names = (
        "exclude_modules",
        "modules_to_save",
        "rank_pattern",
        "alpha_pattern",
        "lora_dropout",
        "use_dora",
    )
    file.write_text(
        json.dumps(stored | dict.fromkeys(names) | {"of_a_later_peft": None, "another": False})
    )
    assert read_lora_config(file.parent).r == 4


@pytest.mark.parametrize(
    "name", [7, [], {"a": 1}, "a\nb", "a\0b", "\x1b[2J", "\ud800", "x" * 300, "x/" * 3000]
)
def test_a_base_that_is_no_name_is_refused(adapter, tmp_path, name):
    folder = changed(adapter, tmp_path / "adapter", base_model_name_or_path=name)
    if name == []:
        assert base_of(folder) == ""  # as if it said nothing
        return
    with pytest.raises(ConfigError, match="base_model_name_or_path .*fix: --model"):
        base_of(folder)


def fifo(file):
    os.mkfifo(file)


def endless(file):
    file.symlink_to("/dev/zero")


def sparse(file):
    file.touch()
    os.truncate(file, 2**40)


def nested(file):
    file.write_text("[" * 100_000)


@pytest.mark.parametrize("name", [SETTINGS, TENSORS])
@pytest.mark.parametrize("plant", [fifo, endless, sparse, nested], ids=lambda plant: plant.__name__)
def test_planted_files_are_refused_at_once(adapter, tmp_path, plant, name):
    folder = changed(adapter, tmp_path / "adapter")
    (folder / name).unlink()
    plant(folder / name)
    began = time.monotonic()
    # and its file
    uses = [lambda: add_adapter(meta(), folder, {}), lambda: load_peft(meta(), folder)]
    for use in uses + [lambda: base_of(folder)] * (name == SETTINGS):
        with pytest.raises(ConfigError, match=r"\(fix: "):
            use()
    assert time.monotonic() - began < 60


def damage(adapter, folder, value):
    changed(adapter, folder)
    stored = load_file(folder / TENSORS)
    name = sorted(stored)[0]
    stored[name] = value(stored[name])
    save_file(stored, folder / TENSORS)
    return name


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_by_name(base, adapter, tmp_path, bad):
    name = damage(adapter, tmp_path / "adapter", lambda tensor: tensor.fill_(bad))
    model = meta()
    add_adapter(model, tmp_path / "adapter", {})
    with pytest.raises(ConfigError, match=f"{name} holds numbers that are not finite"):
        load_adapter(model, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="holds numbers that are not finite"):
        load_peft(meta(), tmp_path / "adapter")


def test_whole_numbers_for_weights_are_refused_by_name(adapter, tmp_path):
    name = damage(adapter, tmp_path / "adapter", lambda tensor: tensor.to(torch.int32))
    for use in (lambda: add_adapter(meta(), tmp_path / "adapter", {}),
                lambda: load_peft(meta(), tmp_path / "adapter")):  # fmt: skip
        with pytest.raises(ConfigError, match=f"no floating-point numbers: {name}"):
            use()


def test_a_rank_that_the_file_does_not_hold_is_refused_before_memory_is_given_to_it(
    adapter, tmp_path
):
    folder = changed(adapter, tmp_path / "adapter", r=100_000)
    with pytest.raises(ConfigError, match=r"lora_A.weight \[100000, 64\], there \[4, 64\]"):
        add_adapter(meta(), folder, {})
    with pytest.raises(ConfigError, match="its settings ask for"):
        load_peft(meta(), folder)


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


@pytest.mark.parametrize("recipe", ["finetune", "generate", "export"])
def test_every_recipe_says_one_line_of_a_hostile_adapter(
    base, adapter, tmp_path, recipe, monkeypatch
):
    monkeypatch.setattr(adapter_file, "MATCHING_SECONDS", 0.3)
    for i, settings in enumerate(
        ({"target_modules": SLOW}, {"r": "8"}, {"r": -1}, {"rank_pattern": [1]})
    ):
        folder = changed(adapter, tmp_path / f"adapter_{i}", **settings)
        with pytest.raises(ConfigError, match=r"\(fix: ") as error:
            use(recipe, base, folder, tmp_path)
        assert len(str(error.value).splitlines()) == 1
    assert not (tmp_path / "out" / "config.yaml").exists()


RUN = {"model": "m", "lora_rank": 4, "lora_alpha": 8.0, "lora_targets": "q_proj", "use_dora": False}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lora_rank", value) for value in ("4", -1, True, 1.5, None, [])),
        *(("lora_alpha", value) for value in ("8", None, float("nan"), True)),
        *(("lora_targets", value) for value in (7, None, ["q_proj"], "a\x1b[2J")),
        *(("model", value) for value in (7, None, "a\nb", "a\0b")),
        *(("use_dora", "yes"), ("param_dtype", "int8"), ("save_dtype", []), ("lora_dropout", "x")),
    ],
)
def test_settings_of_a_checkpoint_from_elsewhere_are_checked_by_type(tmp_path, name, value):
    assert check_settings(tmp_path / "state.json", RUN) == RUN
    with pytest.raises(ConfigError, match=f"state.json: config: {name}: "):
        check_settings(tmp_path / "state.json", RUN | {name: value})
