"""Every memory lever gives the losses, gradient norms and weights that the run has without it, to rounding.

python -m pytest tests/test_levers.py
"""

import pytest
import torch
from test_parity import GLOBAL_BATCH, plain_loop, with_recipe, write_rows
from tiny import tiny_model_folder

LEVERS = {
    "full_recompute": {"activation_checkpointing": "full"},
    "selective_recompute": {"activation_checkpointing": "selective"},
    "offload": {"cpu_offload": True},
    "zero_2": {"reshard_after_forward": False},
    "hsdp": {"replicate": 2},
    "together": {"activation_checkpointing": "full", "cpu_offload": True, "reshard_after_forward": False},
}


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def setting(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("levers")
    folder = tiny_model_folder(root / "model", request.param, vocab_size=271)
    rows = write_rows(root / "rows.jsonl")
    return folder, rows, plain_loop(folder, rows)


def trained(setting, out, ranks=2, **flags):
    folder, rows, _ = setting
    return with_recipe(
        ranks, model=folder, dataset=rows, output_dir=out, global_batch_size=GLOBAL_BATCH, **flags
    )


@pytest.mark.parametrize("lever", LEVERS)
def test_a_lever_changes_no_loss_and_no_weight(setting, tmp_path, lever):
    _, _, (expected, weights) = setting
    curve, ours = trained(setting, tmp_path, **LEVERS[lever])
    torch.testing.assert_close(curve, expected, rtol=1e-5, atol=0)
    for name, tensor in ours.items():
        assert (tensor - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


def test_hsdp_on_2_x_2_ranks_equals_the_plain_loop(setting, tmp_path):
    _, _, (expected, weights) = setting
    curve, ours = trained(setting, tmp_path, ranks=4, replicate=2)
    torch.testing.assert_close(curve, expected, rtol=1e-5, atol=0)
    for name, tensor in ours.items():
        assert (tensor - weights[name]).norm() <= 1e-5 * weights[name].norm(), name


def test_pure_bf16_trains_like_fp32_to_its_rounding(setting, tmp_path):
    _, _, (expected, _) = setting
    curve, _ = trained(setting, tmp_path, param_dtype="bf16", dtype="bf16")
    torch.testing.assert_close([loss for loss, _ in curve], [loss for loss, _ in expected], rtol=3e-2, atol=0)


@pytest.mark.slow
def test_compiled_layers_train_alike(setting, tmp_path):
    _, _, (expected, _) = setting
    curve, _ = trained(setting, tmp_path, compile=True)
    torch.testing.assert_close(curve, expected, rtol=1e-4, atol=0)
