"""A model folder is checked before it is read. Alone: `.venv/bin/python -m pytest tests/test_model_folder.py`

No test here needs ranks. Files that must not be opened are pipes (opening one would wait forever) or pickles
that leave a mark when they are loaded.
"""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import save_file
from tiny import tiny_config, tiny_model, tiny_model_folder
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.data.tokens import encode, hidden
from utils.model.attention import settle_attention
from utils.model.folder import check_model_config, check_vocab, open_weights, read_config
from utils.model.loading import build_model
from utils.run.errors import ConfigError

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def single(tmp_path) -> Path:
    """Three tensors of three dtypes in one file."""
    folder = tmp_path / "single"
    folder.mkdir()
    tensors = {"x": torch.randn(4, 5), "y": torch.randn(3).bfloat16(), "z": torch.tensor(7)}
    save_file(tensors, folder / ONE, metadata={"format": "pt"})
    return folder


@pytest.fixture
def sharded(tmp_path) -> Path:
    """Seven tensors in two files with an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({f"a{i}": torch.randn(2, 3) for i in range(6)}, folder / A)
    save_file({"b": torch.randn(4)}, folder / B)
    write_index(folder, {**{f"a{i}": A for i in range(6)}, "b": B})
    return folder


def write_index(folder: Path, weight_map) -> None:
    (folder / INDEX).write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )


def weight_map(folder: Path) -> dict:
    return json.loads((folder / INDEX).read_text())["weight_map"]


def refusal(function, *args) -> str:
    """The text of the ConfigError, which is one line that offers a fix."""
    with pytest.raises(ConfigError) as caught:
        function(*args)
    text = str(caught.value)
    assert "\n" not in text
    assert "(fix: " in text
    return text


def test_headers_tell_name_file_dtype_and_shape(single, sharded):
    found = open_weights(single)
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "x": (torch.float32, (4, 5)),
        "y": (torch.bfloat16, (3,)),
        "z": (torch.int64, ()),
    }
    assert {name: info.file.name for name, info in open_weights(sharded).items()} == weight_map(
        sharded
    )


def test_no_file_stays_open(sharded):
    before = len(os.listdir("/proc/self/fd"))
    infos = open_weights(sharded)
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(infos) == 7


def truncate_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


CUT = "damaged, cut short or no safetensors"
DAMAGE = {  # what is done to the file -> words in the answer
    "one byte short": (truncate_by_one, CUT),
    "cut in half": (halve, CUT),
    "one byte too many": (lambda p: p.write_bytes(p.read_bytes() + b"0"), CUT),
    "empty": (lambda p: p.write_bytes(b""), CUT),
    "five bytes": (lambda p: p.write_bytes(b"12345"), CUT),
    "an HTML page": (lambda p: p.write_text("<!DOCTYPE html><html>Sign in</html>"), "an HTML page"),
    "a git-lfs pointer": (
        lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "git lfs pull",
    ),
    "a header of noise": (
        lambda p: p.write_bytes(p.read_bytes().replace(b"dtype", b"d\xfftpe")),
        CUT,
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_file_is_refused_by_name(single, sharded, damage):
    change, words = DAMAGE[damage]
    for file in (single / ONE, sharded / B):
        change(file)
        text = refusal(open_weights, file.parent)
        assert text.startswith(f"{file}: ")
        assert words in text


@pytest.mark.parametrize("what", ["a flipped name", "a flipped digit of a shape"])
def test_flips_in_the_header_do_not_pass(sharded, what):
    """safetensors itself loads a renamed tensor; the index or the size shows the flip."""
    old, new = {
        "a flipped name": (b'"a3"', b'"q3"'),
        "a flipped digit of a shape": (b"[2,3]", b"[2,7]"),
    }[what]
    (sharded / A).write_bytes((sharded / A).read_bytes().replace(old, new, 1))
    assert str(sharded) in refusal(open_weights, sharded)


def test_missing_shard_is_named(sharded):
    (sharded / B).unlink()
    assert f"{B} is missing" in refusal(open_weights, sharded)


OUTSIDE = [
    "../outside/w.safetensors",
    "{outside}/w.safetensors",
    "a/../../outside/w.safetensors",
    "link.safetensors",
]


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("cached", [False, True])
def test_nothing_outside_the_folder_is_opened(sharded, tmp_path, path, cached):
    """The file outside is a pipe: whoever opens it waits forever."""
    if cached:
        folder = tmp_path / "models--x--y" / "snapshots" / "abc"
        folder.parent.mkdir(parents=True)
        sharded = sharded.rename(folder)
    outside = sharded.parent / "outside"
    outside.mkdir()
    os.mkfifo(outside / "w.safetensors")
    (sharded / "link.safetensors").symlink_to(outside / "w.safetensors")
    write_index(sharded, {**weight_map(sharded), "b": path.format(outside=outside)})
    assert "leads out of the folder" in refusal(open_weights, sharded)


def test_links_out_of_the_folder_are_refused_for_every_file(single, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in (ONE, INDEX, "config.json"):
        (single / name).unlink(missing_ok=True)
        (single / name).symlink_to(tmp_path / "pipe")
    assert "leads out of the folder" in refusal(open_weights, single)
    assert "leads out of the folder" in refusal(check_model_config, single, False)


def test_hugging_face_cache_is_read_through_its_links(sharded, tmp_path):
    repo = tmp_path / "hub" / "models--x--y"
    snapshot, blobs = repo / "snapshots" / "abc", repo / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        shutil.move(file, blobs / f"hash{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/hash{number}")
    assert len(open_weights(snapshot)) == 7


def test_a_neighbour_called_blobs_is_outside_unless_this_is_the_cache(sharded, tmp_path):
    folder = tmp_path / "models" / "mine"
    folder.parent.mkdir()
    sharded.rename(folder)
    (tmp_path / "blobs").mkdir()
    shutil.move(folder / B, tmp_path / "blobs" / B)
    (folder / B).symlink_to(tmp_path / "blobs" / B)
    assert "leads out of the folder" in refusal(open_weights, folder)


def test_folder_may_itself_be_a_link(sharded, tmp_path):
    (tmp_path / "here").symlink_to(sharded)
    assert len(open_weights(tmp_path / "here")) == 7


BAD_INDEX = {  # what the index becomes -> words in the answer
    "not JSON": ("{weight_map: }", "not JSON"),
    "a list": ("[1]", "expected a JSON object, got a list"),
    "without weight_map": ("{}", "no weight_map"),
    "with an empty weight_map": ('{"weight_map": {}}', "no weight_map"),
    "with a NUL in a name": ('{"weight_map": {"a0": "x\\u0000y"}}', "is missing"),
    "with an empty name": ('{"weight_map": {"a0": ""}}', "not a regular file"),
    "nested too deep": ("[" * 100_000, "not JSON"),
    "a git-lfs pointer": ("version https://git-lfs.github.com/spec/v1", "git lfs pull"),
    "an HTML page": ("\n<html>", "HTML page"),
}


@pytest.mark.parametrize("kind", BAD_INDEX)
def test_bad_index_is_refused(sharded, kind):
    text, words = BAD_INDEX[kind]
    (sharded / INDEX).write_text(text)
    assert words in refusal(open_weights, sharded)


def test_index_and_files_must_agree(sharded):
    """The error has the first five names, and how many more there are."""
    names = weight_map(sharded)
    write_index(sharded, {**names, **{f"new{i}": B for i in range(7)}})
    assert "new0, new1, new2, new3, new4 and 2 more" in refusal(open_weights, sharded)
    write_index(sharded, {name: file for name, file in names.items() if name != "a3"})
    assert "only one of its files, names a3 " in refusal(open_weights, sharded)
    write_index(sharded, names)
    save_file({"b": torch.randn(4), "a1": torch.randn(2, 3)}, sharded / B)
    assert "two of its files hold a1" in refusal(open_weights, sharded)


def test_whole_and_sharded_model_in_one_folder_is_ambiguous(sharded):
    """Also where the files of the index are gone."""
    save_file({"x": torch.zeros(1)}, sharded / ONE)
    assert "two models" in refusal(open_weights, sharded)
    (sharded / A).unlink()
    (sharded / B).unlink()
    assert "two models" in refusal(open_weights, sharded)


def test_index_of_the_one_file_is_fine(single):
    write_index(single, dict.fromkeys(("x", "y", "z"), ONE))
    assert set(open_weights(single)) == {"x", "y", "z"}


class Payload:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


FOREIGN = [
    "pytorch_model.bin",
    "model.gguf",
    "tf_model.h5",
    "flax_model.msgpack",
    "consolidated.00.pth",
]


@pytest.mark.parametrize("name", FOREIGN)
def test_other_formats_are_refused_by_name_and_never_opened(tmp_path, name):
    mark = tmp_path / "mark"
    for file in (name, "training_args.bin", "optimizer.pt", "rng_state.pth"):
        (tmp_path / file).write_bytes(pickle.dumps(Payload(mark)))
    text = refusal(open_weights, tmp_path)
    assert name in text
    assert not mark.exists()
    pickle.loads((tmp_path / name).read_bytes())  # the payload works
    assert mark.exists()


def test_a_folder_of_a_gguf_file_needs_the_model_in_safetensors(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert "a GGUF file: its model in safetensors" in refusal(read_config, tmp_path, False)


def test_pickles_beside_safetensors_are_left_alone(single):
    (single / "pytorch_model.bin").write_bytes(pickle.dumps(Payload(single / "mark")))
    (single / "training_args.bin").write_bytes(pickle.dumps(Payload(single / "mark")))
    assert set(open_weights(single)) == {"x", "y", "z"}
    assert not (single / "mark").exists()


def test_folder_without_weights_says_what_it_holds(tmp_path):
    (tmp_path / "adapter_model.safetensors").touch()
    assert "adapter_model.safetensors" in refusal(open_weights, tmp_path)
    assert "nothing" in refusal(open_weights, tmp_path / "no_such_folder")


def test_the_advice_for_bin_files_works_as_printed(tmp_path):
    """The code in the message makes a folder that passes."""
    folder = tmp_path / "old"
    model = tiny_model("llama")
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    text = refusal(open_weights, folder)
    advice = re.search(
        r"you trust it: (.*), and copy the tokenizer there; of others, the model", text
    )[1]
    converted = str(tmp_path / "new")
    eval(advice.replace('"NEW"', repr(converted)), {"AutoModelForCausalLM": AutoModelForCausalLM})
    check_model_config(Path(converted), False)
    assert set(open_weights(Path(converted))) == set(model.state_dict())


def test_the_shards_that_accelerate_saves_are_merged_as_the_readme_says(tmp_path):
    readme = Path(__file__).resolve().parent.parent / "recipes" / "README.md"
    assert "`accelerate merge-weights DIR/pytorch_model_fsdp_0 NEW`" in readme.read_text()
    folder, merged = tmp_path / "old", tmp_path / "new"
    model = tiny_model("llama")
    model.config.save_pretrained(folder)
    shards = folder / "pytorch_model_fsdp_0"
    dcp.save({"model": model.state_dict()}, checkpoint_id=shards, no_dist=True)
    text = refusal(open_weights, folder)
    assert "pytorch_model_fsdp_0" in text
    assert "of shards see recipes/README.md" in text
    merge_fsdp_weights(str(shards), str(merged))  # what `accelerate merge-weights` calls
    shutil.copy(folder / "config.json", merged)
    check_model_config(merged, False)
    assert set(open_weights(merged)) == set(model.state_dict())


def test_a_hub_id_whose_weights_are_bin_files_alone_is_told_how_to_convert_them(tmp_path):
    """Vicuna, OPT, GPT-J: of their .bin only the index is fetched."""
    for name in ("config.json", "pytorch_model.bin.index.json", "tokenizer.model"):
        (tmp_path / name).write_text("{}")
    text = refusal(open_weights, tmp_path)
    assert "pytorch_model.bin.index.json" in text
    assert 'AutoModelForCausalLM.from_pretrained("OWNER/NAME").save_pretrained("NEW")' in text


def test_an_adapter_is_named_as_one_also_beside_the_config_of_its_base(tmp_path):
    """axolotl saves that too, of a QLoRA with the quantization of its base."""
    tiny_config("llama", quantization_config={"quant_method": "bitsandbytes"}).save_pretrained(
        tmp_path
    )
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).touch()
    assert f"is an adapter (fix: --model BASE --adapter {tmp_path}" in refusal(
        check_model_config, tmp_path, False
    )
    (tmp_path / "model.safetensors").touch()  # torchtune: it is merged into these weights
    assert "bitsandbytes weights" in refusal(check_model_config, tmp_path, False)


# --- config.json --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["llama", "llama3", "qwen2", "gemma2", "mixtral", "qwen3_moe", "cohere"]
)
def test_good_configs_pass(tmp_path, kind):
    tiny_config(kind).save_pretrained(tmp_path)
    check_model_config(tmp_path, False)


BAD_CONFIG = {  # fields that are changed -> words in the answer
    "own code, switched on by itself": ({"trust_remote_code": True}, "--trust_remote_code"),
    "own attention": ({"_attn_implementation_internal": "org/kernel"}, "--trust_remote_code"),
    "fp8": ({"quantization_config": {"quant_method": "fp8"}}, "fp8 weights"),
    "gptq": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "gptq weights"),
    "awq": ({"quantization_config": {"quant_method": "awq"}}, "awq weights"),
    "bitsandbytes": (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        "bitsandbytes weights",
    ),
    "sees both ways": (
        {"use_bidirectional_attention": True},
        "tokens see what they are to predict",
    ),
    "text sees both ways": (
        {"text_config": {"use_bidirectional_attention": "all"}},
        "use_bidirectional_attention",
    ),
    "unnamed": ({"quantization_config": {"bits": 4}}, "unnamed weights"),
    "quantized text_config": (
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
        "fp8 weights",
    ),
}


@pytest.mark.parametrize("kind", BAD_CONFIG)
def test_bad_config_is_refused_by_field(tmp_path, kind):
    changes, words = BAD_CONFIG[kind]
    config = {**tiny_config("llama").to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal(check_model_config, tmp_path, False)
    assert text.startswith(f"{tmp_path / 'config.json'}: ")
    assert words in text


def test_a_model_that_brings_older_code_is_built_with_transformers_own(tmp_path):
    """As Phi-3.5 and DeepSeek-V2-Lite do, whose code the newest transformers does not run any more."""
    fields = {"auto_map": {"AutoConfig": "configuration_phi3.C", "AutoModelForCausalLM": "m.M"}}
    config = {**tiny_config("phi3").to_dict(), **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = build_model(read_config(tmp_path, False), torch.float32)
    assert type(model) is type(AutoModelForCausalLM.from_config(tiny_config("phi3")))
    assert settle_attention(model, "auto", torch.device("cpu"), torch.float32) == "varlen"


@pytest.mark.parametrize("model_type", ["llamma9", None, ["llama"], "vit"])
def test_what_is_no_type_of_a_language_model_is_refused_in_one_line(tmp_path, model_type):
    config = {**tiny_config("llama").to_dict(), "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = refusal(lambda folder: build_model(read_config(folder, False), torch.float32), tmp_path)
    assert "config.json: " in text or "vit is no text-only causal model" in text


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "\xff", "<html>", "version https://git-lfs", "[" * 100_000]
)
def test_config_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    assert str(tmp_path / "config.json") in refusal(check_model_config, tmp_path, False)


def test_missing_config_is_refused(tmp_path):
    assert "config.json is missing" in refusal(check_model_config, tmp_path, False)


def test_own_code_needs_the_flag_and_nothing_else(tmp_path):
    """The flag allows it; a config cannot allow it itself; nothing is asked on stdin."""
    config = {
        **tiny_config("llama").to_dict(),
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Mine"},
    }
    for itself in ({}, {"trust_remote_code": True}):
        (tmp_path / "config.json").write_text(json.dumps({**config, **itself}))
        assert "--trust_remote_code if you have read" in refusal(read_config, tmp_path, False)
    check_model_config(tmp_path, trust_remote_code=True)


def test_tokenizer_may_not_be_larger_than_the_vocabulary(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder(tmp_path / "model"))
    tokens = len(tokenizer)
    text = refusal(check_vocab, tokenizer, tokens - 1)
    assert f"{tokens} tokens, the model {tokens - 1}" in text
    check_vocab(tokenizer, tokens + 3)
    tokenizer.add_tokens(["<call>"])
    assert f"{tokens + 1} tokens" in refusal(check_vocab, tokenizer, tokens)


@pytest.mark.parametrize("use", ["nothing", "pad", "the template"])
def test_a_special_token_beyond_the_vocabulary_is_refused_only_if_a_text_gets_it(tmp_path, use):
    """The tokenizer of Gemma 3 1B has one for pictures, and the model no row for it."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder(tmp_path / "model", "gemma3"))
    tokens = len(tokenizer)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<image_soft_token>"]})
    if use == "pad":
        tokenizer.pad_token = "<image_soft_token>"
    elif use == "the template":
        tokenizer.chat_template += "<image_soft_token>"
    if use != "nothing":
        assert f"{tokens + 1} tokens, the model {tokens} " in refusal(
            check_vocab, tokenizer, tokens
        )
        return
    check_vocab(tokenizer, tokens)
    ids = encode(tokenizer, hidden(tokenizer, "a <image_soft_token>")).ids
    assert max(ids) < tokens


@pytest.mark.parametrize("files", [1, 3])
def test_what_transformers_saves_passes(tmp_path, files):
    folder = tiny_model_folder(tmp_path / "model", "mixtral", torch.bfloat16, files=files)
    check_model_config(folder, False)
    infos = open_weights(folder)
    assert len({info.file for info in infos.values()}) == len(list(folder.glob("*.safetensors")))
    assert {info.dtype for info in infos.values()} == {torch.bfloat16}
    assert AutoModelForCausalLM.from_pretrained(folder) is not None
