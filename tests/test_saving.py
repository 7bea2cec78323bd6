"""Every rank writes its own bytes of the folder. Alone: `.venv/bin/python -m pytest tests/test_saving.py`

The reference for each sharded model is a plain one: what is saved must equal it bit for bit, and load with
plain from_pretrained.
"""

import errno
import fcntl
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import tiny_config, tiny_model, tiny_tokenizer
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from utils.data.tokens import load_tokenizer
from utils.model import saving
from utils.model.folder import TensorInfo, open_weights
from utils.model.loading import Piece, lay_out, local_box
from utils.model.saving import GENERATION, generation_config, save_model, save_tokenizer, write_json
from utils.plan import fit
from utils.plan.fit import available_room
from utils.run.distributed import set_timeout, together
from utils.run.errors import ConfigError
from utils.run.folder import check_seen, check_space, claim_output, releases_output

NOWHERE = Path("nowhere")  # a source without files to copy
BF16, FP32 = torch.bfloat16, torch.float32


def dense_pieces(model: nn.Module, dtype=FP32, kept_in_fp32=()) -> list[Piece]:
    """Every parameter is one tensor of the checkpoint; tied ones are stored once."""
    pieces = []
    for name, parameter in model.named_parameters():
        wanted = FP32 if any(part in name for part in kept_in_fp32) else dtype
        info = TensorInfo(Path("source"), wanted, tuple(parameter.shape), 0)
        pieces.append(Piece(name, info, name, (0,) * parameter.ndim, info.shape))
    return pieces


def expert_pieces(model: nn.Module, dtype=FP32) -> list[Piece]:
    """As dense_pieces, but a parameter that holds all experts is one tensor per expert on disk."""
    pieces = []
    for piece in dense_pieces(model, dtype):
        if ".experts." not in piece.param:
            pieces.append(piece)
            continue
        prefix = piece.param.rsplit(".", 1)[0]
        parts = ("gate_proj", "up_proj") if piece.param.endswith("gate_up_proj") else ("down_proj",)
        experts, rows, columns = piece.shape
        rows //= len(parts)
        for expert in range(experts):
            for j, part in enumerate(parts):
                info = TensorInfo(Path("source"), dtype, (rows, columns), 0)
                at, shape = (expert, j * rows, 0), (1, rows, columns)
                pieces.append(
                    Piece(f"{prefix}.{expert}.{part}.weight", info, piece.param, at, shape)
                )
    return pieces


def sharded(model: nn.Module, mesh=None) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def saved(
    world,
    out,
    kind="llama",
    replicate=1,
    dtype=FP32,
    experts=False,
    changes=(),
    kept_in_fp32=(),
    **options,
):
    """Shard a seeded model, save it, and return the error if there is one."""
    model = tiny_model(kind, **dict(changes))
    make = expert_pieces if experts else dense_pieces
    pieces = make(model, dtype) if experts else make(model, dtype, kept_in_fp32)
    mesh = None
    if replicate > 1:
        sizes = (replicate, world.size // replicate)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model = sharded(model, mesh)
    try:
        save_model(out, model, pieces, world, **{"source": NOWHERE, **options})
    except ConfigError as error:
        return str(error), error.agreed
    return None


def logits(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12) * 37 % 1003
    with torch.no_grad():
        return model.eval()(ids).logits


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_same_tensors(found: dict, expected: dict) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


# --- what is saved ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_saved_folder_loads_with_equal_logits(tmp_path, ranks):
    """2, 3 and 4 do not divide 1003 rows; three layers and norms of width 64 give uneven shards."""
    out = tmp_path / "run" / "model"
    assert run_ranks(saved, ranks, out) == [None] * ranks
    reference = tiny_model("llama")
    assert_same_tensors(tensors(out), dict(reference.named_parameters()))
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == FP32
    assert torch.equal(logits(model), logits(reference))
    assert sorted(os.listdir(out.parent)) == ["model"]


def test_tensors_with_fewer_rows_than_ranks_are_saved_whole(tmp_path):
    """(2, 64) key projections and a vocabulary of 3 on 4 ranks: some hold nothing."""
    changes = {"vocab_size": 3, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    assert run_ranks(saved, 4, tmp_path / "model", "llama", 1, FP32, False, changes) == [None] * 4
    assert_same_tensors(
        tensors(tmp_path / "model"), dict(tiny_model("llama", **changes).named_parameters())
    )


def test_tied_weights_are_stored_once(tmp_path):
    assert run_ranks(saved, 2, tmp_path / "model", "qwen2") == [None] * 2
    assert "lm_head.weight" not in tensors(tmp_path / "model")
    reference = tiny_model("qwen2")
    assert torch.equal(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "model")), logits(reference)
    )


def test_bf16_file_is_the_fp32_master_cast_once(tmp_path):
    assert run_ranks(saved, 3, tmp_path / "model", "llama", 1, BF16) == [None] * 3
    expected = {name: value.to(BF16) for name, value in tiny_model("llama").named_parameters()}
    assert_same_tensors(tensors(tmp_path / "model"), expected)
    assert AutoConfig.from_pretrained(tmp_path / "model").dtype == BF16
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").dtype == BF16


def keep_norms(world, out, **options):
    return saved(world, out, dtype=BF16, kept_in_fp32=("norm",), **options)


def override(world, out):
    return keep_norms(world, out, save_dtype=torch.float16)


def test_tensors_that_the_source_keeps_in_fp32_stay_fp32(tmp_path):
    assert run_ranks(keep_norms, 2, tmp_path / "model") == [None] * 2
    reference = dict(tiny_model("llama").named_parameters())
    mixed = {name: value if "norm" in name else value.to(BF16) for name, value in reference.items()}
    assert_same_tensors(tensors(tmp_path / "model"), mixed)
    assert AutoConfig.from_pretrained(tmp_path / "model").dtype == BF16
    assert run_ranks(override, 2, tmp_path / "model") == [None] * 2
    assert_same_tensors(
        tensors(tmp_path / "model"), {name: v.half() for name, v in reference.items()}
    )


def in_files(world, out, max_file_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "lay_out", partial(lay_out, max_file_bytes=max_file_bytes))
        return saved(world, out)


def test_large_models_go_to_several_files_with_an_index(tmp_path):
    out = tmp_path / "model"
    assert run_ranks(in_files, 2, out, 3e5) == [None] * 2
    names = sorted(file.name for file in out.glob("*.safetensors"))
    assert names == [
        f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)
    ]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    reference = tiny_model("llama")
    assert index["metadata"]["total_size"] == sum(p.numel() * 4 for p in reference.parameters())
    assert sorted(set(index["weight_map"].values())) == names
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(out)), logits(reference))
    # A second save with another limit leaves no file of the first.
    assert run_ranks(in_files, 2, out, 5e9) == [None] * 2
    assert [file.name for file in out.glob("model*")] == ["model.safetensors"]


def test_bytes_are_those_that_safetensors_itself_would_accept(tmp_path):
    run_ranks(keep_norms, 2, tmp_path / "model")
    with open(tmp_path / "model" / "model.safetensors", "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    assert length % 8 == 0
    assert header.pop("__metadata__") == {"format": "pt"}
    width = {"F32": 4, "BF16": 2}
    assert all(entry["data_offsets"][0] % width[entry["dtype"]] == 0 for entry in header.values())
    with safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert set(file.keys()) == set(header)


def count_writes(world, out, seconds=0):
    """How many bytes this rank wrote of an HSDP 2x2 model. seconds: for which the first copy writes."""
    written = []
    original = saving.write_chunks

    def write(*args):
        time.sleep(seconds if world.rank < 2 else 0)
        written.append(original(*args))
        return written[-1]

    saving.write_chunks = write
    if seconds:
        set_timeout(seconds / 2)
    try:
        error = saved(world, out, replicate=2)
    finally:
        saving.write_chunks = original
    set_timeout()
    return error, sum(written)


def test_hsdp_writes_each_byte_once(tmp_path):
    results = run_ranks(count_writes, 4, tmp_path / "model")
    assert [error for error, _ in results] == [None] * 4
    reference = tiny_model("llama")
    assert_same_tensors(tensors(tmp_path / "model"), dict(reference.named_parameters()))
    written = [count for _, count in results]
    assert written[2:] == [0, 0]  # the second replica
    assert sum(written) == (tmp_path / "model" / "model.safetensors").stat().st_size


@pytest.mark.slow
def test_the_copies_of_hsdp_that_write_nothing_wait_for_the_one_that_writes(tmp_path):
    results = run_ranks(count_writes, 4, tmp_path / "model", 8)
    assert [error for error, _ in results] == [None] * 4


def test_a_file_is_written_without_being_opened_for_reading(tmp_path):
    """NFS would write whole pages, with the old bytes of other machines."""
    (tmp_path / "part").write_bytes(bytes(8))
    modes = []

    def chunks():
        for at in (0, 2):
            yield "part", at, torch.full((2,), 7, dtype=torch.uint8), ""
            (file,) = (link for link in Path("/proc/self/fd").iterdir() if opens(link, "part"))
            modes.append(fcntl.fcntl(int(file.name), fcntl.F_GETFL) & os.O_ACCMODE)

    assert saving.write_chunks(tmp_path, chunks()) == 4
    assert modes == [os.O_WRONLY] * 2
    assert (tmp_path / "part").read_bytes() == bytes([7] * 4 + [0] * 4)


def opens(link: Path, name: str) -> bool:
    """Whether an entry of /proc/self/fd is of a file with this name."""
    return os.path.basename(os.path.realpath(link)) == name


@pytest.mark.parametrize(("ranks", "kind"), [(2, "mixtral"), (4, "qwen3_moe")])
def test_experts_are_saved_one_tensor_each(tmp_path, ranks, kind):
    """Five experts on four ranks: torch.chunk gives 2, 2, 1 and 0."""
    assert run_ranks(saved, ranks, tmp_path / "model", kind, 1, FP32, True) == [None] * ranks
    found = tensors(tmp_path / "model")
    for name, value in tiny_model(kind).named_parameters():
        if ".experts." not in name:
            assert torch.equal(found.pop(name), value)
            continue
        prefix = name.rsplit(".", 1)[0]
        parts = ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else ("down_proj",)
        for expert in range(len(value)):
            made = [found.pop(f"{prefix}.{expert}.{part}.weight") for part in parts]
            assert torch.equal(torch.cat(made), value[expert])
    assert not found


class TwoWays(nn.Module):
    """A model of one matrix (6, 10), a scalar and an integer buffer."""

    def __init__(self):
        super().__init__()
        self.config = tiny_config("llama")
        self.matrix = nn.Parameter(torch.randn(6, 10))
        self.scalar = nn.Parameter(torch.tensor(2.5))
        self.register_buffer("count", torch.tensor([3, 4]))


def save_two_ways(world, out):
    model = TwoWays()
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    mesh = init_device_mesh("cpu", (world.size,))
    model.matrix = nn.Parameter(distribute_tensor(model.matrix.detach(), mesh, [Shard(0)]))
    pieces = [
        Piece(
            name,
            TensorInfo(Path("s"), tensor.dtype, tuple(tensor.shape), 0),
            name,
            (0,) * tensor.ndim,
            tensor.shape,
        )
        for name, tensor in whole.items()
    ]
    save_model(out, model, pieces, world, source=NOWHERE, save_dtype=torch.float64)
    return whole


def test_rows_scalars_plain_tensors_and_integers_are_saved(tmp_path):
    whole = run_ranks(save_two_ways, 3, tmp_path / "model")[0]
    expected = {name: t.double() if t.is_floating_point() else t for name, t in whole.items()}
    assert_same_tensors(tensors(tmp_path / "model"), expected)


# --- which part is mine -------------------------------------------------------------------------------------


def boxes(world):
    """local_box of a (5, 4) matrix on this rank, for each way to place it."""
    whole = torch.arange(20.0).reshape(5, 4)
    piece = Piece("w", TensorInfo(Path("s"), FP32, (2, 4), 0), "w", (2, 0), (2, 4))
    line = init_device_mesh("cpu", (world.size,))
    plane = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for mesh, placements in (
        (line, [Shard(0)]),
        (plane, [Replicate(), Shard(0)]),
        (line, [Shard(1)]),
    ):
        matrix = distribute_tensor(whole, mesh, placements)
        box = local_box(matrix, piece)
        found.append(box)
        if box:
            assert torch.equal(matrix.to_local()[box[0]], whole[2:4][box[1]])
    strided = DTensor.from_local(
        torch.zeros(1, 4), plane, [_StridedShard(0, split_factor=2), Shard(0)]
    )
    try:
        found.append(local_box(strided, piece))
    except AssertionError as error:
        found.append(str(error))
    return found


def test_local_box_is_the_overlap_of_shard_and_piece():
    """Rows 2 and 3 of 5; on 4 ranks torch.chunk gives rows 0-1, 2-3, 4 and none."""
    results = run_ranks(boxes, 4)
    rows = slice(0, 4)
    by_row = [None, ((slice(0, 2), rows), (slice(0, 2), rows)), None, None]
    assert [result[0] for result in results] == by_row
    high, low = (
        ((slice(2, 3), rows), (slice(0, 1), rows)),
        ((slice(0, 1), rows), (slice(1, 2), rows)),
    )
    assert [result[1] for result in results] == [high, low, high, low]  # rows 0-2 and 3-4, twice
    assert all(
        result[2] == ((slice(2, 4), slice(0, 1)), (slice(0, 2), slice(i, i + 1)))
        for i, result in enumerate(results)
    )
    assert all(
        result[3].startswith(f"w: a shard by {(_StridedShard(0, split_factor=2), Shard(0))}")
        for result in results
    )


def test_plain_tensor_is_one_shard():
    whole = Piece("w", TensorInfo(Path("s"), FP32, (5, 4), 0), "w", (0, 0), (5, 4))
    everything = (slice(0, 5), slice(0, 4))
    assert local_box(torch.zeros(5, 4), whole) == (everything, everything)
    scalar = Piece("s", TensorInfo(Path("s"), FP32, (), 0), "s", (), ())
    assert local_box(torch.tensor(1.0), scalar) == ((), ())


# --- what comes beside the weights --------------------------------------------------------------------------


def with_tokenizer(world, out, source):
    tokenizer = tiny_tokenizer() if world.rank == 0 else None
    return saved(world, out, tokenizer=tokenizer, eos_ids=[4, 2], source=source)


def test_folder_is_complete(tmp_path):
    source, out = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    # Published folders hold settings that transformers refuses to save; and more files than are needed.
    published = {
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": False,
        "eos_token_id": 2,
        "made_up": 1,
    }
    (source / "generation_config.json").write_text(json.dumps(published))
    for name in ("modeling_mine.py", "LICENSE", "model.safetensors", "trainer_state.json"):
        (source / name).write_text(name)
    assert run_ranks(with_tokenizer, 2, out, source) == [None] * 2
    generation = GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [2, 4]
    assert generation.temperature == 0.6
    config = AutoConfig.from_pretrained(out)
    assert config.architectures == ["LlamaForCausalLM"]
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    assert tokenizer("hello")["input_ids"] == tiny_tokenizer()("hello")["input_ids"]
    assert (out / "modeling_mine.py").exists()
    assert (out / "LICENSE").exists()
    assert not (out / "trainer_state.json").exists()
    assert len(open_weights(out)) == len(list(tiny_model("llama").parameters()))


# --- what transformers 4 reads, and with it servers and converters that build on it: transformers 5 itself
# would write rope_parameters in place of rope_theta, and a tokenizer_class that transformers 4 lacks

SCALED = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
OLDER = {
    "llama": json.loads(tiny_config("llama").to_json_string()) | SCALED,
    "gemma3": {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": json.loads(tiny_config("gemma3").to_json_string()) | SCALED,
    },
}


def saved_from(world, out, source):
    config = AutoConfig.from_pretrained(source)
    model = sharded(AutoModelForCausalLM.from_config(config.get_text_config()))
    save_model(out, model, dense_pieces(model, torch.bfloat16), world, source=source)
    return model.config.rope_parameters


@pytest.mark.parametrize("kind", OLDER)
def test_the_config_has_the_layout_of_its_source(tmp_path, kind):
    """Of a model that reads pictures the text part is saved alone."""
    source, out = tmp_path / "source", tmp_path / "model"
    source.mkdir()
    stored = {**OLDER[kind], "made_up": 1}
    stored.get("text_config", stored).pop("rope_parameters")
    write_json(source / "config.json", stored)
    (known,) = run_ranks(saved_from, 1, out, source)
    text = stored.get("text_config", stored)
    found = json.loads((out / "config.json").read_text())
    architecture = {"llama": "LlamaForCausalLM", "gemma3": "Gemma3ForCausalLM"}[kind]
    assert found == text | {"architectures": [architecture], "dtype": "bfloat16"}
    assert AutoConfig.from_pretrained(out).rope_parameters == known


@pytest.mark.parametrize("own", [True, False])
def test_the_tokenizers_own_files_are_kept_but_for_its_template(tmp_path, own):
    """Also sentencepiece's, which converters to GGUF read. The tokenizer may be of another folder."""
    source, out = tmp_path / "source", tmp_path / "model"
    folder = source if own else tmp_path / "another"
    for path in {source, folder}:
        path.mkdir()
        (path / "tokenizer.model").write_text(path.name)
    tiny_tokenizer().save_pretrained(folder)
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "made_up": 1}
    words |= {"bos_token": {"content": "<s>", "__type": "AddedToken"}, "eos_token": "</s>"}
    words |= {"pad_token": "<pad>"}
    write_json(folder / "tokenizer_config.json", words)
    tokenizer = load_tokenizer(folder, "chatml")
    save = partial(saved, tokenizer=tokenizer, source=source)
    assert run_ranks(save, 1, out) == [None]
    found = json.loads((out / "tokenizer_config.json").read_text())
    assert found == words | {"chat_template": tokenizer.chat_template}
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert (out / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (out / "tokenizer.model").read_text() == folder.name


def test_several_chat_templates_stay_as_they_are(tmp_path):
    source, out = tmp_path / "source", tmp_path / "model"
    tiny_tokenizer().save_pretrained(source)
    (source / "chat_template.jinja").unlink()
    named = {
        "default": "{{ messages }}<|im_end|>",
        "tool_use": "{{ tools }}{{ messages }}<|im_end|>",
    }
    stored = json.loads((source / "tokenizer_config.json").read_text())
    stored["chat_template"] = [{"name": k, "template": text} for k, text in named.items()]
    write_json(source / "tokenizer_config.json", stored)
    out.mkdir()
    save_tokenizer(load_tokenizer(source), out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == stored
    assert AutoTokenizer.from_pretrained(out).chat_template == named


def test_generation_config_comes_from_the_model_without_a_source(tmp_path):
    assert run_ranks(saved, 2, tmp_path / "model") == [None] * 2
    assert GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [2]


def test_files_beside_the_weights_that_cannot_be_copied_lose_no_model(tmp_path):
    """A save comes after the whole training."""
    source, out = tmp_path / "source", tmp_path / "model"
    (source / "LICENSES").mkdir(parents=True)  # https://reuse.software
    (tmp_path / "outside").write_text("secret")
    (source / "LICENSE").symlink_to(tmp_path / "outside")
    (source / "NOTICE").write_text("kept")
    (source / "generation_config.json").write_text('{"temperature": 0.6,')
    assert run_ranks(with_tokenizer, 2, out, source) == [None] * 2
    assert (out / "NOTICE").read_text() == "kept"
    assert not [*out.glob("LICENSE*")]
    assert GenerationConfig.from_pretrained(out).eos_token_id == [2, 4]


def test_a_model_without_a_token_that_ends_an_answer_generates(tmp_path):
    write_json(tmp_path / GENERATION, generation_config(None, tmp_path, []))
    model = tiny_model("llama")
    model.generation_config = GenerationConfig.from_pretrained(tmp_path)
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=3).shape == (1, 5)


# --- complete or absent -------------------------------------------------------------------------------------


def state_of(folder: Path) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_new_model_replaces_the_old_one_whole(tmp_path):
    out = tmp_path / "model"
    run_ranks(keep_norms, 2, out)
    (out / "stale.txt").touch()
    assert run_ranks(saved, 2, out) == [None] * 2
    assert_same_tensors(tensors(out), dict(tiny_model("llama").named_parameters()))
    assert not (out / "stale.txt").exists()
    assert os.listdir(tmp_path) == ["model"]


def test_leftovers_of_this_folder_alone_are_removed(tmp_path):
    theirs = [".tmp_model_final_0123abcd", ".tmp_model_x", ".tmp_step_00000005_0123abcd"]
    for name in [".tmp_model_0123abcd", *theirs]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").touch()
    saving.remove_siblings(tmp_path / "model", ".tmp")
    assert sorted(os.listdir(tmp_path)) == theirs


def killed(world, out, point, calls):
    """Rank 0 is killed with SIGKILL at the given call of os.<point>."""
    original, count = getattr(os, point), iter(range(1, 1000))

    def kill_at(*args):
        if world.rank == 0 and next(count) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(os, point, kill_at)
    return saved(world, out)


@pytest.mark.parametrize(
    ("point", "calls"),
    [
        ("pwritev", 5),
        ("rename", 1),
        *(
            pytest.param(*other, marks=pytest.mark.slow)
            for other in (("truncate", 1), ("preadv", 5), ("rename", 2))
        ),
    ],
)
def test_killed_save_leaves_no_half_model_and_the_next_one_succeeds(tmp_path, point, calls):
    """At the second rename the old model is aside and the new one is not there yet: absent, not half."""
    out = tmp_path / "model"
    run_ranks(keep_norms, 2, out)
    before = state_of(out)
    with pytest.raises(AssertionError, match="rank [01] of 2"):
        run_ranks(killed, 2, out, point, calls)
    visible = [name for name in os.listdir(tmp_path) if not name.startswith(".")]
    if (point, calls) == ("rename", 2):
        assert visible == []
        aside = next(tmp_path.glob(".old_model_*"))
        assert state_of(aside) == before
    else:
        assert visible == ["model"]
        assert state_of(out) == before
    assert run_ranks(saved, 2, out) == [None] * 2
    assert_same_tensors(tensors(out), dict(tiny_model("llama").named_parameters()))
    assert os.listdir(tmp_path) == ["model"]


def limited_files(world, out):
    """Save while this process may write no file larger than 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))
    try:
        return saved(world, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def one_rank_limited(world, out):
    return limited_files(world, out) if world.rank == 1 else saved(world, out)


@pytest.mark.parametrize("fault", [limited_files, one_rank_limited])
def test_failed_write_keeps_the_old_model_and_all_ranks_say_so(tmp_path, fault):
    out = tmp_path / "model"
    run_ranks(keep_norms, 2, out)
    before = state_of(out)
    errors = run_ranks(fault, 2, out)
    assert errors[0] == errors[1]
    text, agreed = errors[0]
    assert agreed
    assert os.strerror(errno.EFBIG) in text
    assert text.startswith("rank 1: ") == (fault is one_rank_limited)
    assert "\n" not in text
    assert state_of(out) == before
    assert os.listdir(tmp_path) == ["model"]
    assert run_ranks(saved, 2, out) == [None] * 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 3 MiB; only root can make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(disk)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def fill_up_then_write(world, out, free_bytes):
    """The disk fills after the check for space, while the model is written."""
    original = saving.check_space
    filler = out.parent / "filler"

    def check_then_fill(folder, needed_bytes):
        original(folder, needed_bytes)
        disk = os.statvfs(folder)
        filler.write_bytes(b"0" * (disk.f_bavail * disk.f_frsize - free_bytes))

    saving.check_space = check_then_fill
    try:
        return saved(world, out, tokenizer=tiny_tokenizer())
    finally:
        saving.check_space = original


def test_full_disk_is_one_line_and_keeps_the_old_model(small_disk):
    """Found before anything is written where possible, else by the write that fails."""
    out = small_disk / "model"
    run_ranks(saved, 2, out, "llama", 1, BF16, False, {"vocab_size": 103})
    before = state_of(out)
    text, agreed = run_ranks(saved, 2, out, "llama", 1, FP32, False, {"hidden_size": 256})[0]
    assert agreed
    assert "need 0.0" in text
    assert "have 0.0" in text
    # it fills in the headers, the configs, the tokenizer or the weights
    for pages in (1, 2, 3, 4, 5, 6, 8, 32):
        errors = run_ranks(fill_up_then_write, 2, out, pages * 4096)
        assert "no space left" in errors[0][0]
        assert "\n" not in errors[0][0]
        assert errors[0] == errors[1]
        (small_disk / "filler").unlink()
        assert state_of(out) == before
        assert os.listdir(small_disk) == ["model"]


def flip_before_verifying(world, out):
    """Flip one bit on disk between writing and reading back."""
    original = saving.verify_chunks

    def flip_then_verify(folder, chunks):
        if world.rank == 1:
            with open(folder / "model.safetensors", "r+b") as file:
                file.seek(-5, os.SEEK_END)
                byte = file.read(1)[0]
                file.seek(-5, os.SEEK_END)
                file.write(bytes([byte ^ 1]))
        return original(folder, chunks)

    saving.verify_chunks = flip_then_verify
    try:
        return saved(world, out)
    finally:
        saving.verify_chunks = original


def test_flipped_bit_on_disk_is_found_before_the_model_is_published(tmp_path):
    errors = run_ranks(flip_before_verifying, 2, tmp_path / "model")
    text, agreed = errors[0]
    assert agreed
    assert text.startswith("rank 1: ")
    assert "reads back other than it was written" in text
    assert os.listdir(tmp_path) == []


def test_save_refuses_the_source_and_folders_that_are_no_models(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "notes.txt").write_text("keep me")
    (tmp_path / "link").symlink_to(source)
    for out in (source, tmp_path / "link", source / "model"):
        text, _ = run_ranks(save_from, 2, out, source)[0]
        assert "is the folder that the model is read from" in text
    text, _ = run_ranks(saved, 2, source)[0]
    assert "is no model folder" in text
    assert os.listdir(source) == ["notes.txt"]


def save_from(world, out, source):
    return saved(world, out, source=source)


# --- memory -------------------------------------------------------------------------------------------------


def peak_above_shards(world, out):
    """How much more memory this process has at the peak of a save than before it, in MiB."""
    changes = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 4,
        "vocab_size": 4001,
    }
    model = tiny_model("llama", **changes)
    pieces = dense_pieces(model, BF16)
    total = sum(p.numel() * 2 for p in model.parameters()) / 2**20
    largest = max(p.numel() * 2 for p in model.parameters()) / 2**20
    model = sharded(model)
    save = partial(save_model, out, model, pieces, world, source=NOWHERE)
    save()  # the first save allocates what later ones reuse
    held = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the present value
    save()
    return total, largest, memory("VmHWM") - held


def memory(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) / 1024


def test_no_rank_holds_the_model_while_saving(tmp_path):
    """Files are written and not mapped, so the page cache does not count."""
    for total, largest, peak in run_ranks(peak_above_shards, 2, tmp_path / "model"):
        assert total > 8 * largest
        assert peak < 2 * largest + 2


# --- the act `plan` -----------------------------------------------------------------------------------------


def checked(world, out_dir, source=None, needed_bytes=0):
    """What the act `plan` does with the folder, and what is undone when the run ends."""

    @releases_output
    def main(_):
        out = claim_output(str(out_dir), "finetune", world, source)
        check_space(out, needed_bytes, world)

    try:
        main(None)
    except ConfigError as error:
        return str(error), error.agreed
    return None


def test_output_folder_is_made_and_one_that_stays_empty_goes_with_the_run(tmp_path):
    (tmp_path / "mine").mkdir()
    for folder in (tmp_path / "a" / "b", tmp_path / "a" / "b", tmp_path / "mine"):
        assert run_ranks(checked, 3, folder) == [None] * 3
    assert os.listdir(tmp_path) == ["mine"]
    assert os.listdir(tmp_path / "mine") == []


def test_output_folders_that_cannot_work_are_refused_without_litter(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").touch()
    (tmp_path / "other" / "model").mkdir(parents=True)
    (tmp_path / "other" / "model" / "thesis.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    source = tmp_path / "run" / "model"
    cases = [
        (tmp_path / "file", None, 0, "File exists"),
        (tmp_path / "file" / "x" / "y", None, 0, "Not a directory"),
        (tmp_path / "loop", None, 0, "File exists"),
        (tmp_path / "loop" / "x", None, 0, "symbolic links"),
        (Path("/proc/x/y"), None, 0, "/proc/x"),
        (tmp_path / ("n" * 300), None, 0, "too long"),
        (source, source, 0, "read from"),
        (tmp_path / "run", source, 0, "read from"),
        (tmp_path / "other", None, 0, "is no model folder"),
        (tmp_path / "new" / "run", None, 2**60, "need 1073741824.000 GiB"),
    ]
    for out_dir, model, needed_bytes, words in cases:
        errors = run_ranks(checked, 2, out_dir, model, needed_bytes)
        assert errors[0] == errors[1]
        text, agreed = errors[0]
        assert words in text
        assert "(fix: " in text
        assert "\n" not in text
        assert agreed
        assert sorted(tmp_path.rglob("*")) == before


def checked_on_a_busy_disk(world, out_dir, needed_bytes):
    """Another process writes meanwhile, so the ranks read different amounts of free space."""
    statvfs = os.statvfs

    def later(folder):
        found = list(statvfs(folder))
        found[4] -= 1 + 2**20 * world.rank  # f_bavail
        return os.statvfs_result(found)

    os.statvfs = later
    try:
        return checked(world, out_dir, None, needed_bytes)
    finally:
        os.statvfs = statvfs


def test_free_space_that_differs_between_two_readings_is_told_once(tmp_path):
    ranks = run_ranks(checked_on_a_busy_disk, 2, tmp_path / "new" / "run", 2**60)
    assert ranks[0] == ranks[1]
    text, agreed = ranks[0]
    assert text.startswith("no space left: need 1073741824.000 GiB, have ")
    assert agreed
    assert "\n" not in text


def readings_of_memory(world):
    """The sentence of the plan, when each rank reads different numbers for the host's memory."""
    original = fit.host_memory
    fit.host_memory = lambda: (2**30 * (1 + world.rank), 2**34 - world.rank)
    try:
        return available_room(world._replace(device=torch.device("cpu")))
    finally:
        fit.host_memory = original


def test_memory_that_differs_between_two_readings_gives_one_plan():
    ranks = run_ranks(readings_of_memory, 2)
    assert ranks[0] == ranks[1]
    assert ranks[0][2] == "7.00 GiB a rank, of 16.0 GiB of host memory"


def test_read_only_output_is_refused(small_disk):
    """chmod does not stop root, but a read-only mount does."""
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for out_dir in (small_disk, small_disk / "new" / "run"):
        assert "Read-only" in run_ranks(checked, 2, out_dir)[0][0]


def seen(world, disks):
    with together(world):
        check_seen(disks[world.rank], "process 7 on a since today")


def test_ranks_that_see_another_folder_are_named(tmp_path):
    disks = [tmp_path / "0", tmp_path / "1", tmp_path / "2"]
    for disk in disks:
        disk.mkdir()
    (disks[0] / ".lock").write_text("process 7 on a since today")
    (disks[2] / ".lock").write_text("process 7 on a since yesterday")
    with pytest.raises(AssertionError) as raised:
        run_ranks(seen, 3, disks)
    text = str(raised.value)
    for rank in (1, 2):
        assert (
            f"rank {rank}: {disks[rank]} on {socket.gethostname()} is not the folder that rank 0 sees"
            in text
        )
    assert "rank 0: " not in text.partition("ConfigError")[2]
