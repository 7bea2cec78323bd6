"""What a GPU machine may have wrong is said before anything starts; rehearsed where there is no GPU.

python -m pytest tests/test_devices.py
"""

import os
import pkgutil
import re
import shutil
from contextlib import ExitStack
from typing import NamedTuple

import eval as evaluate
import generate
import grpo
import pytest
import torch
import torch.distributed as dist
from finetune import Config
from launch import Forked
from ranks import free_port, run_ranks
from shell import ROOT
from tiny import tiny_model
from transformers.integrations import sdpa_attention

from utils.model.attention import repeat_grouped_keys, use_gpu_kernels
from utils.model.sharding import lacks_grouped_kernels
from utils.run import distributed
from utils.run.distributed import (
    ALONE,
    START_SECONDS,
    build_mesh,
    check_architecture,
    check_own_gpus,
    init_distributed,
    stop_distributed,
    use_all_cores,
)
from utils.run.errors import ConfigError
from utils.run.memory import cores
from utils.run.settings import check_settled
from utils.train.profiling import mfu


@pytest.mark.parametrize(
    ("capability", "built_for"),
    [
        ((7, 0), ["sm_70", "sm_80"]),
        ((8, 6), ["sm_80", "sm_90"]),
        ((9, 0), ["sm_80", "sm_90a"]),
        ((10, 0), ["sm_90", "sm_100"]),
        ((12, 0), ["sm_80", "compute_90"]),  # compiled when it is first used
        ((9, 4), ["gfx90a", "gfx942"]),  # an MI300 with torch for ROCm
    ],
)
def test_a_gpu_that_torch_has_kernels_for_is_taken(capability, built_for):
    check_architecture(capability, built_for)


@pytest.mark.parametrize(
    ("capability", "built_for"),
    [
        ((7, 0), ["sm_75", "sm_80", "sm_90", "compute_90"]),  # a V100 with PyPI's torch
        ((8, 0), ["sm_86"]),
        ((12, 0), ["sm_80", "sm_90"]),
    ],
)
def test_a_gpu_without_kernels_is_refused_with_where_to_get_them(capability, built_for):
    number = ".".join(map(str, capability))
    with pytest.raises(ConfigError, match=rf"capability {number}, .* \(fix: a torch for it, pip"):
        check_architecture(capability, built_for)


def said_of_gpus(world, gpus: list[str]) -> str:
    try:
        check_own_gpus(world, gpus[world.rank])
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_may_each_see_one_gpu_but_not_the_same():
    assert run_ranks(said_of_gpus, 2, ["GPU-1", "GPU-2"]) == ["", ""]
    assert run_ranks(said_of_gpus, 2, ["", ""]) == ["", ""]  # all are seen, and taken by number
    for said in run_ranks(said_of_gpus, 2, ["GPU-1", "GPU-1"]):
        assert said == "2 ranks have one GPU, GPU-1 (fix: fewer --nproc_per_node)"


def logits_and_gradients(model):
    logits = model(torch.arange(24).reshape(2, 12), use_cache=False).logits
    return [logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))]


@pytest.mark.parametrize(
    ("kind", "fused"), [("llama", 7), ("qwen3_moe", 13), ("gemma2", 0), ("gpt2", 0)]
)
def test_fused_norms_are_bit_for_bit_those_of_transformers_in_fp32(kind, fused):
    """Norms with another formula keep their code."""
    model = tiny_model(kind)
    own = logits_and_gradients(model)
    use_gpu_kernels(model)
    assert sum("forward" in vars(module) for module in model.modules()) == fused
    assert all(map(torch.equal, logits_and_gradients(model), own))


def test_a_norm_that_is_kept_in_fp32_has_an_fp32_result_as_with_transformers():
    model = tiny_model("llama")
    norm, hidden = model.model.norm, torch.randn(3, model.config.hidden_size).bfloat16()
    own = norm(hidden)
    use_gpu_kernels(model)
    assert own.dtype == torch.float32
    assert torch.equal(norm(hidden), own)


@pytest.fixture
def own_choice(monkeypatch):
    """Undoes repeat_grouped_keys after the test."""
    choice = sdpa_attention.use_gqa_in_sdpa
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", choice)
    return choice


def test_repeated_keys_give_the_logits_and_gradients_of_grouped_heads(own_choice):
    model = tiny_model("llama", num_attention_heads=4, num_key_value_heads=2)
    ids = torch.arange(24).reshape(2, 12)
    packed = torch.arange(6).repeat(2, 2)  # a mask keeps two documents of a row apart
    for positions in (None, packed):
        both = []
        for repeat in (False, True):
            sdpa_attention.use_gqa_in_sdpa = own_choice
            if repeat:
                repeat_grouped_keys()
            logits = model(ids, position_ids=positions, use_cache=False).logits
            grads = torch.autograd.grad(logits.square().mean(), list(model.parameters()))
            both.append([logits, *grads])
        for grouped, repeated in zip(*both, strict=True):
            torch.testing.assert_close(repeated, grouped, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_has_a_kernel_for_grouped_heads(dtype):
    assert not lacks_grouped_kernels(torch.device("cpu"), dtype)


@pytest.mark.parametrize("recipe", [evaluate, generate])
def test_a_model_that_serves_has_no_groups_either_where_they_have_no_kernel(
    recipe, own_choice, monkeypatch, tmp_path
):
    """The one that keeps fp32 probabilities (B, H, T, T) is in no plan."""
    monkeypatch.setattr(recipe, "lacks_grouped_kernels", lambda *about: True)
    flags = {"max_new_tokens": 1}
    if recipe is generate:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("Hello")
        flags |= {"model": "recipes/tiny", "prompts": str(prompts)}
    else:
        flags |= {"max_rows": 1, "output_dir": str(tmp_path / "out")}
    keys = torch.zeros(1, 2, 3, 4)
    assert sdpa_attention.use_gqa_in_sdpa(None, keys, keys)
    recipe.main(recipe.Config(**flags))
    assert not sdpa_attention.use_gqa_in_sdpa(None, keys, keys)


@pytest.mark.parametrize("recipe", [evaluate, generate, grpo])
def test_where_each_token_has_a_length_of_its_own_cudnn_makes_no_plan_for_it(recipe, tmp_path):
    flags = {"max_new_tokens": 1, "model": "recipes/tiny/started"}
    if recipe is generate:
        (tmp_path / "prompts.txt").write_text("Hello")
        flags |= {"prompts": str(tmp_path / "prompts.txt")}
    else:
        flags |= {"max_rows": 1, "output_dir": str(tmp_path / "out")}
    if recipe is grpo:
        flags |= {"dataset": "recipes/tiny/chat.jsonl", "save_model": False}
    torch.backends.cuda.enable_cudnn_sdp(True)
    try:
        recipe.main(recipe.Config(**flags))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def test_a_gpu_that_torch_cannot_use_is_no_reason_to_train_on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(distributed, "NVIDIA", tmp_path / "nvidia0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "none")  # hides a GPU of this machine
    assert init_distributed().device.type == "cpu"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(ConfigError, match=r"cannot use the GPU .*nvidia0 \(fix: a driver"):
        init_distributed()
    assert init_distributed(use_gpu=False).device.type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert init_distributed().device.type == "cpu"


def joined_without_variables(world):
    given = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    try:
        return init_distributed()
    finally:
        os.environ.update(given)


def test_the_group_of_a_program_that_sets_no_variables_gives_rank_and_size():
    """As after mp.spawn; each rank took itself for a world of one."""
    worlds = run_ranks(joined_without_variables, 2)
    assert [(world.rank, world.size, world.local_size) for world in worlds] == [
        (0, 2, 2),
        (1, 2, 2),
    ]


def test_machines_with_different_code_are_refused(tmp_path):
    """Each would train in its own way, or wait for a collective that the other does not have."""
    start = "from utils.run.distributed import init_distributed\n\ninit_distributed()\n"
    for folder in ("there", "here"):
        shutil.copytree(ROOT / "utils", tmp_path / folder / "utils")
        (tmp_path / folder / "train.py").write_text(start)
    with open(tmp_path / "here/utils/plan/pictures.py", "a") as file:
        file.write("# edited on this machine only\n")
    (tmp_path / "here/utils/run/.#settings.py").symlink_to("me@host.123")  # Emacs has it open
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as machines:
        started = [
            machines.enter_context(Forked("python train.py", tmp_path / folder, RANK=rank, **env))
            for rank, folder in zip("01", ("there", "here"), strict=True)
        ]
        for machine in started:
            assert machine.end() == 1
            assert re.search(
                r"rank 1: other code than on rank 0: plan/pictures.py \d+ -> \d+ "
                r"\(fix: the same code on every machine\)",
                machine.text,
            ), machine.text


@pytest.mark.parametrize("name", ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_each_task_of_srun_or_mpirun_without_torchrun_is_told_that_it_trains_alone(
    name, monkeypatch, capsys
):
    for tasks, warns in (("1", False), ("2", True)):
        stop_distributed()
        monkeypatch.setenv(name, tasks)
        assert init_distributed(use_gpu=False).size == 1
        said = capsys.readouterr().out
        assert ("warning: each task of srun or mpirun is a run of its own" in said) == warns


def timeouts(world) -> list[float]:
    """Seconds that each group waits, but for those of earlier tests."""
    earlier = set(dist.distributed_c10d._world.pg_map) - {dist.group.WORLD}
    distributed._mesh_of.cache_clear()
    build_mesh(world, {"replicate": 2, "shard": 1})
    groups = set(dist.distributed_c10d._world.pg_map) - earlier
    cpu = torch.device("cpu")
    return [group._get_backend(cpu).options._timeout.total_seconds() for group in groups]


def test_every_group_of_a_run_waits_as_long_as_the_first():
    for seconds in run_ranks(timeouts, 2):
        assert len(seconds) >= 3  # all ranks, copies, shards
        assert set(seconds) == {START_SECONDS}


class Card(NamedTuple):
    gpu_name: str
    size: int


def test_mfu_is_the_share_of_all_gpus_and_unknown_where_their_peak_is():
    assert mfu(989e12, Card("NVIDIA H100 80GB HBM3", 2)) == 0.5
    assert mfu(989e12, Card("", 2)) == 0


@pytest.mark.parametrize(
    ("gpu", "name", "usual", "other"),
    [("", "CXX", "g++", "gcc"), ("NVIDIA H100 80GB HBM3", "CC", "gcc clang", "g++")],
)
def test_compile_without_a_compiler_is_refused_before_weights_are_read(
    gpu, name, usual, other, monkeypatch, tmp_path
):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(name, raising=False)
    check_settled(Config(), gpu)
    (tmp_path / other).touch(mode=0o755)  # of another language: a CPU needs C++, a GPU needs C
    with pytest.raises(ConfigError, match=f"{re.escape(f'({usual})')}, none is here"):
        check_settled(Config(compile=True), gpu)
    for compiler in usual.split():
        (tmp_path / compiler).touch(mode=0o755)
        check_settled(Config(compile=True), gpu)
        (tmp_path / compiler).unlink()
    (tmp_path / "my_compiler").touch(mode=0o755)
    monkeypatch.setenv(name, "my_compiler")
    check_settled(Config(compile=True), gpu)


def test_the_cores_are_shared_by_the_ranks_of_a_machine_but_for_who_set_their_number():
    before = torch.get_num_threads()
    count = cores()
    try:
        torch.set_num_threads(1)
        use_all_cores(ALONE._replace(local_size=1))
        assert torch.get_num_threads() == count
        torch.set_num_threads(1)
        use_all_cores(ALONE._replace(local_size=2 * count))
        assert torch.get_num_threads() == 1
        torch.set_num_threads(3)
        use_all_cores(ALONE._replace(local_size=1))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "name",
    [
        "torch.distributed.distributed_c10d._abort_process_group",
        "torch.nn.attention.varlen.varlen_attn",
        "transformers.integrations.sdpa_attention.use_gqa_in_sdpa",
        "transformers.masking_utils.find_packed_sequence_indices",
        "transformers.modeling_utils.PreTrainedModel.disable_input_require_grads",
    ],
)
def test_what_has_no_promise_to_stay_is_there(name):
    assert pkgutil.resolve_name(name)
