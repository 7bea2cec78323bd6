"""The model's part of a step where parameters and batches are on a GPU: no tensor on the host meets them.
Rehearsed on a CPU, on fake tensors of a device of the name gpux, which have no memory.

python -m pytest tests/test_second_device.py
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ranks import run_fresh_ranks
from tiny import build_optimizer, tiny_config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from utils.data.batches import collate
from utils.data.examples import Example
from utils.model.loading import build_model
from utils.model.lora import add_adapters, freeze_base
from utils.model.loss import add_chunked_loss, summed_cross_entropy
from utils.model.options import Lora, Quant
from utils.train.optim import clip_gradients

ADAPTERS = Lora(lora_rank=4, lora_dropout=0.1)
STEPS = {
    "full": {},
    "lora": {"lora": ADAPTERS},
    "8bit": {"lora": ADAPTERS, "quant": Quant("8bit")},
    "4bit": {"lora": ADAPTERS, "quant": Quant("4bit")},
    "packed": {"packed": True},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
}


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="gpux:0")


def step(dtype=torch.bfloat16, lora=None, quant=None, packed=False, loss=None):
    """One of act `train`, without the ranks."""
    model = build_model(tiny_config("llama", vocab_size=271), dtype)
    if lora:
        add_adapters(model, lora)
        freeze_base(model, quant or Quant(), dtype)
    add_chunked_loss(model, chunk_tokens=8)
    model.train()
    rows = [Example(torch.arange(size), torch.arange(size), "") for size in (9, 14)]
    batch = collate(rows, pad_id=0, multiple=8)
    if packed:
        batch = replace(batch, positions=torch.arange(16).remainder(5).repeat(2, 1))
    batch = batch.to(torch.device("meta"))
    with FakeTensorMode(allow_non_fake_inputs=False):
        batch = type(batch)(**tree_map_only(torch.Tensor, on_gpu, vars(batch)))
        for module in model.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    module._parameters[name] = nn.Parameter(on_gpu(tensor), tensor.requires_grad)
            for name, tensor in module._buffers.items():
                module._buffers[name] = on_gpu(tensor)
        scaler = torch.amp.GradScaler("gpux", enabled=dtype == torch.float16)
        total = summed_cross_entropy(model, batch, loss)
        scaler.scale(total / 20).backward()
        shards = nn.ParameterList()  # in fp32, as FSDP2 keeps them and reduces their gradients
        for parameter in (p for p in model.parameters() if p.requires_grad):
            shards.append(parameter.float())
            shards[-1].grad = parameter.grad.float()
        optimizer = build_optimizer(shards, 1e-3, 0.1)
        scaler.unscale_(optimizer)
        grad_norm = clip_gradients(shards, 1.0)
        optimizer.found_inf = (~(total.detach() + grad_norm).isfinite()).float()
        scaler.step(optimizer)
        scaler.update()
    return {tensor.device.type for tensor in (total, grad_norm)}


def steps(world) -> dict[str, object]:
    """What each step gives, or its error."""
    _setup_privateuseone_for_python_backend("gpux")
    found = {}
    for name, how in {**STEPS, "wrong": {"loss": weighted_on_the_host}}.items():
        try:
            found[name] = step(**how)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def weighted_on_the_host(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none") * torch.ones(len(targets))


@pytest.fixture(scope="module")
def found():
    return run_fresh_ranks(steps, 1)[0]


@pytest.mark.parametrize("name", STEPS)
def test_in_no_step_a_tensor_of_the_host_meets_those_of_the_device(name, found):
    assert found[name] == {"gpux"}


def test_a_loss_that_makes_one_would_be_found(found):
    assert "gpux:0 and cpu" in found["wrong"]
