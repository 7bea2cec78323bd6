"""Files that somebody else prepared: each is one line that names it, soon and in little memory, or it works.

python -m pytest tests/test_hostile.py

Nothing here needs ranks. A pipe that is opened, or a device that is read to its end, would never return: an
alarm ends the test then.
"""

import json
import os
import re
import shutil
import signal
import socket
import time
from contextlib import contextmanager
from pathlib import Path

import export
import finetune
import generate
import plan
import pytest
import torch
from safetensors.torch import save_file
from tiny import tiny_config, tiny_model_folder

from utils.data.rows import read_file
from utils.data.tokens import load_tokenizer
from utils.model.folder import find_model, open_weights, read_config, read_json
from utils.model.loading import build_model
from utils.model.verify import check_hashes
from utils.plan.fit import fitted_before
from utils.run.disk import check_replaceable
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError
from utils.run.files import open_own, read_small_file, replace_file
from utils.run.folder import claim_output, releases_output, write_plan
from utils.run.log import RunLog
from utils.run.settings import parse_cli, save_config
from utils.train.checkpoint import point_to
from utils.train.resume import Reader, damage, finished_at, read_state

SIZES = {
    "vocab_size": 271, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip
SECONDS, BYTES = 10, 2**30  # that a hostile file may cost


def peak_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def limited():
    """Fail where the block takes too long, of its own time, hangs, or needs too much memory."""

    def hangs(*_):
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(120)  # of a busy machine
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the present
    held, began = peak_memory(), time.process_time()
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - began < SECONDS
    assert peak_memory() - held < BYTES


def refusal(function, *args) -> str:
    """The one line with which it is refused."""
    with limited(), pytest.raises(ConfigError) as caught:
        function(*args)
    (line,) = caught.value.lines
    assert line.isprintable()
    return line


# --- config.json


def structure(folder: Path, trust: bool = False) -> torch.nn.Module:
    """What each recipe does with a folder before it looks at a weight."""
    return build_model(read_config(folder, trust), torch.float32)


def nested(deep: int) -> dict:
    value: dict = {}
    for _ in range(deep):
        value = {"a": value}
    return value


ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0}
ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GONE = object()  # the field is left out
BAD = {  # what is changed in a config that works
    # the kind of model
    "model_type unknown": {"model_type": "llamma"},
    "model_type a number": {"model_type": 5},
    "model_type a list": {"model_type": ["llama"]},
    "model_type an object": {"model_type": {"llama": 1}},
    "model_type null": {"model_type": None},
    "model_type missing": {"model_type": GONE},
    "model_type empty": {"model_type": ""},
    "model_type with control characters": {"model_type": "x\x1b[2J\nerror: forged"},
    "model_type a path": {"model_type": "../../llama"},
    "model_type of Python": {"model_type": "__class__"},
    # names that are looked up
    "hidden_act unknown": {"hidden_act": "os.system"},
    "hidden_act null": {"hidden_act": None},
    "hidden_act a number": {"hidden_act": 3},
    "hidden_act a list": {"hidden_act": ["silu"]},
    "hidden_act an object": {"hidden_act": {"silu": 1}},
    "hidden_act of several lines": {"hidden_act": "silu\nerror: forged"},
    "dtype unknown": {"dtype": "float12"},
    "dtype of another module": {"dtype": "os.system"},
    "dtype with its module": {"dtype": "torch.float16"},
    "dtype a function of torch": {"dtype": "torch.load"},
    "dtype a number": {"dtype": 16},
    "dtype a list": {"dtype": ["float32"]},
    "torch_dtype unknown": {"torch_dtype": "half precision"},
    "rope_type unknown": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}},
    "rope_type a list": {"rope_parameters": {"rope_type": ["default"], "rope_theta": 1e4}},
    "rope_type a number": {"rope_parameters": {"rope_type": 4, "rope_theta": 1e4}},
    "rope_type null": {"rope_parameters": {"rope_type": None, "rope_theta": 1e4}},
    "rope factor missing": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
    "rope factor as text": {"rope_parameters": {**ROPE, "factor": "eight"}},
    "rope_theta as text": {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    "rope_theta null": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "rope_theta a list": {"rope_parameters": {"rope_type": "default", "rope_theta": [1e4]}},
    "rope_theta NaN": {"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}},
    "rope_parameters a list": {"rope_parameters": [1, 2]},
    "rope_parameters as text": {"rope_parameters": "linear"},
    "rope_parameters a number": {"rope_parameters": 3},
    "rope_scaling a list": {"rope_parameters": GONE, "rope_scaling": ["linear", 2]},
    "rope_scaling unknown": {
        "rope_parameters": GONE,
        "rope_scaling": {"type": "odd", "factor": 2.0},
    },
    "rope_scaling as text": {"rope_parameters": GONE, "rope_scaling": "linear"},
    # counts
    "layers none": {"num_hidden_layers": 0},
    "layers 10^4": {"num_hidden_layers": 10**4},
    "layers 10^9": {"num_hidden_layers": 10**9},
    "layers negative": {"num_hidden_layers": -1},
    "layers as text": {"num_hidden_layers": "1"},
    "layers as a fraction": {"num_hidden_layers": 1.5},
    "layers true": {"num_hidden_layers": True},
    "layers an object": {"num_hidden_layers": {"n": 1}},
    "layers infinite": {"num_hidden_layers": float("inf")},
    "layers NaN": {"num_hidden_layers": float("nan")},
    "layers of 5000 digits": '{"model_type": "llama", "num_hidden_layers": 1' + "0" * 5000 + "}",
    "heads none": {"num_attention_heads": 0},
    "heads negative": {"num_attention_heads": -2},
    "heads 10^9": {"num_attention_heads": 10**9},
    "heads do not divide": {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": None},
    "heads as text": {"num_attention_heads": "two"},
    "key-value heads none": {"num_key_value_heads": 0},
    "key-value heads do not divide": {"num_attention_heads": 4, "num_key_value_heads": 3},
    "key-value heads negative": {"num_key_value_heads": -1},
    "head_dim odd": {"head_dim": 7},
    "head_dim of an odd width": {"hidden_size": 14, "head_dim": None},
    "head_dim none": {"head_dim": 0},
    "head_dim negative": {"head_dim": -8},
    "head_dim a list": {"head_dim": [8, "x"]},
    "head_dim 10^18": {"head_dim": 10**18},
    "vocabulary none": {"vocab_size": 0},
    "vocabulary negative": {"vocab_size": -5},
    "vocabulary 10^12": {"vocab_size": 10**12},
    "vocabulary as text": {"vocab_size": "271"},
    "vocabulary as a fraction": {"vocab_size": 271.0},
    "vocabulary of lists": {"vocab_size": [[271]]},
    "width none": {"hidden_size": 0},
    "width 10^18": {"hidden_size": 10**18},
    "width as text": {"hidden_size": "16"},
    "width negative": {"hidden_size": -16},
    "width of the MLP negative": {"intermediate_size": -24},
    "width of the MLP 10^18": {"intermediate_size": 10**18},
    "positions as text": {"max_position_embeddings": "many"},
    "positions 10^18": {"max_position_embeddings": 10**18},
    "positions a list": {"max_position_embeddings": [256]},
    "positions NaN": {"max_position_embeddings": float("nan")},
    "labels 10^9": {"num_labels": 10**9},
    "labels 10^18": {"num_labels": 10**18},
    "labels infinite": {"num_labels": float("inf")},
    "id2label a list": {"id2label": ["a", "b"]},
    "id2label as text": {"id2label": "label"},
    "id2label with words for ids": {"id2label": {"first": "a"}},
    "label2id a list": {"label2id": ["a"]},
    "pad_token_id beyond the vocabulary": {"pad_token_id": 10**6},
    "pad_token_id as text": {"pad_token_id": "0"},
    "pad_token_id a list": {"pad_token_id": [0]},
    # other fields that the structure reads
    "norm's epsilon as text": {"rms_norm_eps": "small"},
    "norm's epsilon a list": {"rms_norm_eps": [1e-5]},
    "norm's epsilon NaN": {"rms_norm_eps": float("nan")},
    "ties as text": {"tie_word_embeddings": "yes"},
    "ties a list": {"tie_word_embeddings": [True]},
    "bias as text": {"attention_bias": "no"},
    "dropout as text": {"attention_dropout": "none"},
    "layer_types too many": ("qwen2", {"layer_types": ["full_attention"] * 9}),
    "layer_types too few": ("qwen2", {"layer_types": []}),
    "layer_types unknown": ("qwen2", {"layer_types": ["half_attention"]}),
    "layer_types as text": ("qwen2", {"layer_types": "full_attention"}),
    "layer_types a number": ("qwen2", {"layer_types": 7}),
    "layer_types of objects": ("qwen2", {"layer_types": [{}]}),
    "experts 10^9": ("qwen3_moe", {"num_experts": 10**9}),
    "experts negative": ("qwen3_moe", {"num_experts": -4}),
    "experts as text": ("qwen3_moe", {"num_experts": "four"}),
    "experts of Mixtral 10^9": ("mixtral", {"num_local_experts": 10**9}),
    "gpt2's layers 10^9": ("gpt2", {"n_layer": 10**9}),
    "gpt2's layers as text": ("gpt2", {"n_layer": "two"}),
    "gpt2's width negative": ("gpt2", {"n_embd": -8}),
    "gpt2's heads none": ("gpt2", {"n_head": 0}),
    "gpt2's positions 10^18": ("gpt2", {"n_positions": 10**18}),
    "gpt2's activation unknown": ("gpt2", {"activation_function": "none such"}),
    "window as text": ("mistral", {"sliding_window": "wide"}),
    "text_config a list": {"text_config": [1]},
    "text_config as text": {"text_config": "llama"},
    "text_config with no vocabulary": {"text_config": {"vocab_size": 0}},
    "text_config with 10^6 layers": {"text_config": {"num_hidden_layers": 10**6}},
    "text_config with an unknown dtype": {"text_config": {"dtype": "os.system"}},
    "vision_config with 10^9 layers": {"vision_config": {"num_hidden_layers": 10**9}},
    # code, and weights that are no numbers yet
    "auto_map": {"auto_map": {"AutoConfig": "x.Y"}},
    "auto_map of another repository": {"auto_map": {"AutoConfig": "evil/repo--x.Y"}},
    "quantized": {"quantization_config": {"quant_method": "gptq"}},
    "quantized, as text": {"quantization_config": "gptq"},
    "attention from a repository": {"_attn_implementation_internal": "evil/kernel"},
    # the file
    "10^6 keys": lambda file: file.write_text(
        "{" + ", ".join(map('"{}": 0'.format, range(10**6))) + "}"
    ),
    "10^5 nested lists": lambda file: file.write_text("[" * 10**5 + "]" * 10**5),
    "500 nested objects": {"task_specific_params": nested(500)},
    "100 nested objects": {"task_specific_params": nested(100)},
    "a million empty lists": lambda file: file.write_text('{"a": [' + "[]," * 10**6 + "[]]}"),
    "100 MiB": lambda file: file.write_text('{"a": "' + "x" * 100 * 2**20 + '"}'),
    "empty": "",
    "half": '{"model_type": "lla',
    "a list": "[]",
    "null": "null",
    "a number": "7",
    "not UTF-8": lambda file: file.write_bytes(b'{"model_type": "\xff\xfe"}'),
    "UTF-16": lambda file: file.write_bytes('{"model_type": "llama"}'.encode("utf-16")),
    "an HTML page": "<!DOCTYPE html><html>Sign in</html>",
    "a git-lfs pointer": "version https://git-lfs.github.com/spec/v1\n",
    "two objects": "{}{}",
    "missing": lambda file: None,
    "a folder": lambda file: file.mkdir(),
    "a pipe": lambda file: os.mkfifo(file),
    "a socket": lambda file: bind(file),
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to nowhere": lambda file: file.symlink_to("nowhere"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a link to a file outside": lambda file: file.symlink_to("/etc/hostname"),
}
GOOD = {  # odd, and meant so
    "as it is": {},
    "fields that nobody knows": {"made_up": [1, {"a": None}], "another": "text"},
    "no head_dim": {"head_dim": None},
    "heads that do not divide, with a head_dim": (
        "qwen3",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16},
    ),
    "several ends": {"eos_token_id": [1, 2]},
    "no ends": {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None},
    "the older name of dtype": {"dtype": GONE, "torch_dtype": "bfloat16"},
    "rope without scaling": {"rope_parameters": GONE, "rope_scaling": None, "rope_theta": 1e6},
    "rope of Llama 3": {"rope_parameters": ROPE},
    "many labels": {"num_labels": 21_000},
    "21,000 labels by name": {"id2label": {str(i): f"label {i}" for i in range(21_000)}},
    "an infinite bound": {"time_step_limit": [0.0, float("inf")]},
    "100 layers": {"num_hidden_layers": 100},
    "a version of the future": {"transformers_version": "99.0"},
    "architectures of another kind": {"architectures": ["MyModel"]},
    "no architectures": {"architectures": None},
    "no attention to a text_config of null": {"text_config": None},
    "gpt2's own names": ("gpt2", {"n_layer": 2, "n_head": 4, "n_embd": 16, "n_inner": None}),
    "windows on some layers": (
        "qwen2",
        {"layer_types": ["full_attention"], "use_sliding_window": False},
    ),
}


def bind(path: Path) -> None:
    """A socket's name must be short."""
    here = os.getcwd()
    os.chdir(path.parent)
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("hostile")


def write_config(folder: Path, change) -> Path:
    file = folder / "config.json"
    if file.is_dir() and not file.is_symlink():
        file.rmdir()
    file.unlink(missing_ok=True)
    if callable(change):
        change(file)
    elif isinstance(change, str):
        file.write_text(change)
    else:
        kind, fields = change if isinstance(change, tuple) else ("llama", change)
        sizes = (
            SIZES
            if kind != "gpt2"
            else {"vocab_size": 271, "n_embd": 16, "n_layer": 1, "n_head": 2}
        )
        config = {**tiny_config(kind, **sizes).to_dict(), **fields}
        file.write_text(json.dumps({key: v for key, v in config.items() if v is not GONE}))
    return file


@pytest.mark.parametrize("kind", BAD)
def test_a_hostile_config_is_one_line_that_names_it(folder, kind):
    file = write_config(folder, BAD[kind])
    text = refusal(structure, folder)
    assert str(folder) in text
    assert file.name in text
    assert "(fix: " in text


@pytest.mark.parametrize("kind", GOOD)
def test_an_odd_config_that_is_meant_so_makes_a_model(folder, kind):
    write_config(folder, GOOD[kind])
    with limited():
        assert list(structure(folder).parameters())


REFUSED_BY_ALL = [
    "layers 10^9",
    "hidden_act unknown",
    "id2label a list",
    "a pipe",
    "rope_type unknown",
]


@pytest.mark.parametrize("kind", REFUSED_BY_ALL)
def test_every_recipe_refuses_it_the_same_way(whole, tmp_path, kind):
    """Called as their `main`, each with the flags it needs. The plan reads the config alone."""
    folder = shutil.copytree(whole, tmp_path / "model")
    write_config(folder, BAD[kind])
    rows, adapter = tmp_path / "rows.jsonl", tmp_path / "adapter"
    rows.write_text('{"prompt": "Hello", "instruction": "Say.", "output": "Yes."}\n')
    adapter.mkdir()
    settings = {
        "peft_type": "LORA",
        "r": 4,
        "target_modules": ["q_proj"],
        "base_model_name_or_path": str(folder),
    }
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: torch.zeros(4, 16)}, adapter / "adapter_model.safetensors")
    data = {"model": str(folder), "dataset": str(rows)}
    calls = {
        "finetune": (finetune, {**data, "output_dir": str(tmp_path / "out")}),
        "--check": (finetune, {**data, "check": True}),
        "generate": (generate, {"model": str(folder), "prompts": str(rows)}),
        "export": (export, {"adapter": str(adapter), "output_dir": str(tmp_path / "merged")}),
        "plan": (plan, {"model": str(folder)}),
    }
    for recipe, flags in calls.values():
        assert str(folder) in refusal(lambda r=recipe, f=flags: r.main(r.Config(**f)))
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "merged").exists()


# --- the other files of a model folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A model folder that works."""
    return tiny_model_folder(tmp_path_factory.mktemp("whole") / "model", **SIZES)


def changed(name: str, **fields):
    def change(folder: Path) -> None:
        file = folder / name
        value = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**value, **fields}))

    return change


def replaced(name: str, content: str | bytes):
    def change(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return change


def planted(name: str, how):
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        how(folder / name)

    return change


def no_files(*names: str):
    return {
        f"{name} {what}": planted(name, how)
        for name in names
        for what, how in {
            "a pipe": os.mkfifo,
            "a folder": Path.mkdir,
            "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
            "outside": lambda path: path.symlink_to("/etc/hostname"),
            "a socket": bind,
        }.items()
    }


BAD_TOKENIZER = {
    **no_files(
        "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
    ),
    **no_files("chat_template.jinja", "additional_chat_templates/other.jinja", "merges.txt"),
    "tokenizer.json empty": replaced("tokenizer.json", ""),
    "tokenizer.json a list": replaced("tokenizer.json", "[]"),
    "tokenizer.json null": replaced("tokenizer.json", "null"),
    "tokenizer.json an empty object": replaced("tokenizer.json", "{}"),
    "tokenizer.json noise": replaced("tokenizer.json", bytes(range(256)) * 100),
    "tokenizer.json nested": replaced("tokenizer.json", "[" * 10**5),
    "tokenizer.json of lists": replaced("tokenizer.json", '{"a": [' + "[]," * 4 * 10**6 + "[]]}"),
    "tokenizer.json of 200 MB": replaced("tokenizer.json", '"' + "x" * 200 * 10**6 + '"'),
    "its model a list": changed("tokenizer.json", model=[]),
    "its model unknown": changed("tokenizer.json", model={"type": "Magic"}),
    "its vocabulary a list": changed(
        "tokenizer.json", model={"type": "BPE", "vocab": [1], "merges": []}
    ),
    "its ids negative": changed(
        "tokenizer.json", model={"type": "BPE", "vocab": {"a": -1}, "merges": []}
    ),
    "its merges wrong": changed(
        "tokenizer.json", model={"type": "BPE", "vocab": {}, "merges": ["q q"]}
    ),
    "its added tokens text": changed("tokenizer.json", added_tokens="<s>"),
    "its normalizer unknown": changed("tokenizer.json", normalizer={"type": "Magic"}),
    "its pattern broken": changed(
        "tokenizer.json",
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated"},
    ),
    "tokenizer_config.json a list": replaced("tokenizer_config.json", "[]"),
    "tokenizer_config.json null": replaced("tokenizer_config.json", "null"),
    "tokenizer_config.json half": replaced("tokenizer_config.json", '{"a": '),
    "tokenizer_config.json nested": replaced("tokenizer_config.json", "[" * 10**5 + "]" * 10**5),
    "another file by path": changed(
        "tokenizer_config.json",
        fast_tokenizer_files=["tokenizer.json", "../../tokenizer.4.0.0.json"],
    ),
    "a class that is none": changed("tokenizer_config.json", tokenizer_class=5),
    "code of its own": changed(
        "tokenizer_config.json",
        tokenizer_class="Mine",
        auto_map={"AutoTokenizer": ["evil/repo--x.Y", None]},
    ),
    "a pad token that is a number": changed("tokenizer_config.json", pad_token=5),
    "an end token that is a list": changed("tokenizer_config.json", eos_token=["</s>"]),
    "added tokens that are text": changed("tokenizer_config.json", added_tokens_decoder="x"),
    "added tokens without ids": changed(
        "tokenizer_config.json", added_tokens_decoder={"x": {"content": ""}}
    ),
    "added tokens of nothing": changed("tokenizer_config.json", added_tokens_decoder={"7": None}),
    "a template that is broken": replaced("chat_template.jinja", "{% for m in messages %}"),
    "a template that breaks out": replaced("chat_template.jinja", "{{ ''.__class__.__mro__[1] }}"),
    "a template that fails": replaced("chat_template.jinja", "{{ messages[0].a.b.c }}"),
    "a template that divides by nothing": replaced("chat_template.jinja", "{{ 1 / 0 }}"),
    "a template that calls itself": replaced(
        "chat_template.jinja", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    ),
    "a template of 10 MiB": replaced("chat_template.jinja", "x" * 10 * 2**20),
    "a template that is no text": replaced("chat_template.jinja", b"\xff\xfe\x00"),
    "a template for another length": replaced("chat_template.jinja", "{{ range(10**9) | list }}"),
}


def tokens(folder: Path):
    return load_tokenizer(folder)


@pytest.mark.parametrize("kind", BAD_TOKENIZER)
def test_a_hostile_tokenizer_is_one_line_that_names_its_folder(whole, tmp_path, kind):
    folder = shutil.copytree(whole, tmp_path / "model")
    BAD_TOKENIZER[kind](folder)
    assert str(folder) in refusal(tokens, folder)


BAD_COMPANION = {
    **no_files("generation_config.json", "LICENSE", "modeling_x.py", "preprocessor_config.json"),
    "generation_config.json a list": replaced("generation_config.json", "[]"),
    "generation_config.json half": replaced("generation_config.json", "{"),
    "generation_config.json of 100 MiB": replaced("generation_config.json", " " * 100 * 2**20),
    "generation_config.json nested": replaced("generation_config.json", '{"a":' * 10**5),
    "its ends text": changed("generation_config.json", eos_token_id="</s>"),
    "its ends objects": changed("generation_config.json", eos_token_id=[{"a": 1}]),
    "its ends negative": changed("generation_config.json", eos_token_id=-7),
    "its ends true": changed("generation_config.json", eos_token_id=True),
}


@pytest.mark.parametrize("kind", BAD_COMPANION)
def test_what_a_save_would_stumble_over_at_the_end_is_refused_before_the_run(whole, tmp_path, kind):
    folder = shutil.copytree(whole, tmp_path / "model")
    BAD_COMPANION[kind](folder)
    assert str(folder) in refusal(read_config, folder)


BAD_WEIGHTS = {
    **no_files("model.safetensors", "model.safetensors.index.json"),
    "an index of 10^6 lists": replaced(
        "model.safetensors.index.json", '{"weight_map": {"a": [' + "[]," * 10**6 + "[]]}}"
    ),
    "an index of 100 MiB": replaced("model.safetensors.index.json", " " * 100 * 2**20),
    "an index with control characters": replaced(
        "model.safetensors.index.json", json.dumps({"weight_map": {"a": "\x1b[2J\nerror: forged"}})
    ),
    "a header of 2^62 bytes": replaced("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    "a header that is a list": replaced("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    "a header that is nested": replaced(
        "model.safetensors", (10**5).to_bytes(8, "little") + b"[" * 10**5
    ),
}


@pytest.mark.parametrize("kind", BAD_WEIGHTS)
def test_hostile_weights_are_one_line_that_names_them(whole, tmp_path, kind):
    folder = shutil.copytree(whole, tmp_path / "model")
    BAD_WEIGHTS[kind](folder)
    assert str(folder) in refusal(open_weights, folder)


# --- files that are named by a flag, or lie in a run folder


def as_template(whole: Path, file: Path):
    return load_tokenizer(whole, str(file))


def as_sums(whole: Path, file: Path):
    return check_hashes(set(whole.glob("*.safetensors")), str(file), ALONE)


def as_config(_: Path, file: Path):
    return parse_cli(finetune.Config, ["--config", str(file)])


def as_prompts(_: Path, file: Path):
    return generate.read_prompts(file.rename(file.with_suffix(".txt")), True, "")


def as_data(_: Path, file: Path):
    return list(read_file(file))


def as_adapter(_: Path, file: Path):
    return read_json(file)


def as_state(_: Path, file: Path):
    return read_state(file.rename(file.with_name("state.json")).parent)


def as_metadata(_: Path, file: Path):
    return Reader(file.rename(file.with_name(".metadata")).parent).read_metadata()


def as_finished_plan(_: Path, file: Path):
    return finished_at(file.rename(file.with_name("plan.json")).parent)


def as_settings(_: Path, file: Path):
    return fitted_before(file.rename(file.with_name("config.yaml")).parent)


READERS = [as_template, as_sums, as_config, as_prompts, as_data, as_adapter, as_state, as_metadata]
READERS += [as_finished_plan, as_settings]
NO_FILE = {
    "a pipe": os.mkfifo,
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
    "a socket": bind,
}


@pytest.mark.parametrize("what", NO_FILE)
@pytest.mark.parametrize("read", READERS)
def test_only_regular_files_are_read(whole, tmp_path, read, what):
    NO_FILE[what](tmp_path / "given")
    text = refusal(read, whole, tmp_path / "given")
    assert str(tmp_path) in text


@pytest.mark.parametrize(
    "read", [as_template, as_config, as_adapter, as_finished_plan, as_settings]
)
def test_what_is_read_whole_has_a_size(whole, tmp_path, read):
    with open(tmp_path / "given", "wb") as file:
        file.truncate(2**40)  # a hole: it takes no room
    assert "more than" in refusal(read, whole, tmp_path / "given")


def test_a_checkpoint_with_a_pipe_in_it_is_damaged(tmp_path):
    files = {
        name: {"bytes": 1, "sha256": "0"} for name in (".metadata", "state.json", "__0_0.distcp")
    }
    (tmp_path / "manifest.json").write_text(json.dumps({"files": files}))
    for name in files:
        os.mkfifo(tmp_path / name)
    with limited():
        assert "not a regular file" in damage(tmp_path)
    (tmp_path / "manifest.json").unlink()
    os.mkfifo(tmp_path / "manifest.json")
    with limited():
        assert "manifest.json is damaged" in damage(tmp_path)


BAD_STATE = {
    "a list": [],
    "no step": {"config": {}},
    "a step of text": {"step": "9", "config": {}},
    "a negative step": {"step": -1},
    "settings that are a list": {"step": 1, "config": ["model"]},
    "settings of objects": {"step": 1, "config": {"model": {"a": 1}}},
    "a model that is a number": {"step": 1, "config": {"model": 5}},
    "targets that are a switch": {"step": 1, "config": {"lora_targets": True}},
}


@pytest.mark.parametrize("kind", BAD_STATE)
def test_a_hostile_state_of_a_checkpoint_is_refused(tmp_path, kind):
    (tmp_path / "state.json").write_text(json.dumps(BAD_STATE[kind]))
    assert str(tmp_path) in refusal(read_state, tmp_path)


def test_a_base_that_is_no_name_is_refused():
    assert "5 is no name of a model" in refusal(find_model, 5, ALONE)
    assert "is not a folder" in refusal(find_model, "a\0b\nerror: forged", ALONE)


def test_a_small_file_is_read_to_its_limit_and_no_further(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    assert read_small_file(file, 5) == read_small_file(tmp_path / "link", 5) == b"12345"
    assert "more than 4 bytes" in refusal(read_small_file, file, 4)
    assert refusal(read_small_file, tmp_path / "none", 4, "--flag X").startswith(
        "--flag X: No such file"
    )


# --- a run folder in which somebody planted links


OWN = [
    ".lock", "config.yaml", "config_002.yaml", "metrics.jsonl", "plan.json", "bad_rows.jsonl",
    "hang_rank_0", "checkpoints", "model", "adapter", "profile", "tensorboard", "wandb", "checkpoints/latest",
    "checkpoints/step_00000002", "checkpoints/.tmp_step_00000002_0123abcd",
    "checkpoints/step_00000002/state.json", "checkpoints/step_00000002/manifest.json",
    "profile/rank0_from_step_00000001.json.gz", "tensorboard/events.out.tfevents.1.a.1.0",
]  # fmt: skip


@releases_output
def claim(out: Path) -> Path:
    return claim_output(str(out), "finetune", ALONE)


def contents(folder: Path) -> dict:
    return {str(path): path.is_dir() or path.read_bytes() for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("means", ["file", "folder", "nothing"])
@pytest.mark.parametrize("name", OWN)
def test_a_planted_link_is_refused_by_name_and_what_it_means_stays(tmp_path, name, means):
    outside, out = tmp_path / "outside", tmp_path / "run"
    (outside / "folder").mkdir(parents=True)
    (outside / "file").write_text("mine\n")
    (outside / "folder" / "config.json").write_text("mine too\n")
    before = contents(outside)
    link = out / name
    link.parent.mkdir(parents=True)
    link.symlink_to(outside / means)
    text = refusal(claim, out)
    assert text.startswith(f"{link} is a link")
    assert contents(outside) == before
    assert link.is_symlink()


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "plan.json", "checkpoints", "model"])
def test_a_planted_pipe_is_refused_by_name(tmp_path, name):
    os.mkfifo(tmp_path / name)
    assert refusal(claim, tmp_path).startswith(f"{tmp_path / name}")


def test_an_output_folder_that_is_itself_a_link_is_the_users_choice(tmp_path):
    (tmp_path / "disk" / "run").mkdir(parents=True)
    (tmp_path / "here").symlink_to("disk")
    (tmp_path / "link").symlink_to("disk/run")
    (tmp_path / "disk" / "run" / "notes").symlink_to("/etc/hostname")  # nothing that a run writes
    assert claim(tmp_path / "link") == tmp_path / "link"
    assert claim(tmp_path / "here" / "run") == tmp_path / "here" / "run"


def test_a_link_planted_during_the_run_is_not_followed(tmp_path):
    """What is opened by name after the folder was claimed."""
    outside = tmp_path / "outside"
    outside.write_text("mine\n")
    for name in ("metrics.jsonl", "plan.json", "config.yaml"):
        (tmp_path / name).symlink_to(outside)
    log = RunLog.__new__(RunLog)
    log.folder, log.run, log.trackers = tmp_path, 1, []
    assert "metrics.jsonl is a link" in refusal(lambda: log.step(step=1, loss=1.0))
    assert "metrics.jsonl is a link" in refusal(lambda: RunLog(tmp_path, 1))
    assert "plan.json is a link" in refusal(write_plan, tmp_path, {})
    assert "config.yaml is a link" in refusal(
        save_config, finetune.Config(), tmp_path / "config.yaml"
    )
    for mode in ("ab", "wb", "r+b", "a+b", "rb"):
        assert "is a link" in refusal(open_own, tmp_path / "plan.json", mode)
    assert outside.read_text() == "mine\n"
    (tmp_path / "checkpoints").symlink_to(tmp_path)
    (tmp_path / "latest").symlink_to(outside)
    point_to(tmp_path / "step_00000001")
    assert outside.read_text() == "mine\n"
    assert (tmp_path / "latest").read_text() == "step_00000001\n"


def test_a_model_is_not_saved_through_a_link(whole, tmp_path):
    """The folder that the link means is a model's, which a save may replace where it is named itself."""
    theirs = shutil.copytree(whole, tmp_path / "theirs")
    before = contents(theirs)
    (tmp_path / "model").symlink_to(theirs)
    assert f"{tmp_path / 'model'} is a link" in refusal(check_replaceable, tmp_path / "model", None)
    assert contents(theirs) == before


def test_temporary_names_cannot_be_guessed_and_none_is_left(tmp_path):
    seen = []
    replace_file(tmp_path / "plan.json", "1\n", seen.append)
    replace_file(tmp_path / "plan.json", "2\n", seen.append)
    assert (tmp_path / "plan.json").read_text() == "2\n"
    assert len({path.name for path in seen}) == 2
    assert all(re.fullmatch(r"\.tmp_plan\.json_[0-9a-f]{16}", path.name) for path in seen)

    def fails(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "plan.json", "3\n", fails)
    assert os.listdir(tmp_path) == ["plan.json"]
    assert (tmp_path / "plan.json").read_text() == "2\n"
