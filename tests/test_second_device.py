"""The model's part of a step of each recipe, where parameters and batches are on a GPU: no tensor of the
host meets them, and no copy to the GPU makes the host wait.
Rehearsed on a CPU, on fake tensors of a device of the name gpux, which have no memory.

python -m pytest tests/test_second_device.py
"""

import re
from dataclasses import replace

import grpo
import prefer
import pytest
import reward
import torch
import torch.nn.functional as F
from ranks import run_fresh_ranks
from tiny import build_optimizer, in_chunks, tiny_config
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from utils.data.batches import collate
from utils.data.examples import Example
from utils.data.pairs import PairBatch
from utils.data.rewards import Rollout, rollout_batch
from utils.model.kinds import add_scores, sequence_scores
from utils.model.loading import build_model
from utils.model.log_probs import token_log_probs
from utils.model.lora import add_adapters, freeze_base
from utils.model.loss import summed_cross_entropy
from utils.model.options import Lora, Quant
from utils.model.sharding import clip_gradients
from utils.run.distributed import ALONE
from utils.train.answers import Reference, log_probs_of, sums_of
from utils.train.rollout import token_sums

PREFERENCES = ("dpo", "ipo", "orpo", "simpo", "kto")
ADAPTERS = Lora(lora_rank=4, lora_dropout=0.1)
STEPS = {
    "full": {},
    "lora": {"lora": ADAPTERS},
    "8bit": {"lora": ADAPTERS, "quant": Quant("8bit")},
    "4bit": {"lora": ADAPTERS, "quant": Quant("4bit")},
    "packed": {"packed": True},
    "fp16": {"dtype": torch.float16},
    "fp32": {"dtype": torch.float32},
    "packed pairs": {"loss": "dpo", "packed": True},
    "lora on rewards": {"loss": "grpo", "lora": ADAPTERS},
    "lora on scores": {"loss": "scores", "lora": ADAPTERS},
}
STEPS |= {loss: {"loss": loss} for loss in (*PREFERENCES, "grpo", "scores")}


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="gpux:0")


class Copies(TorchDispatchMode):
    """What says of copies from the host to the device that the host waits for them."""

    def __init__(self):
        super().__init__()
        self.waits = set()

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            is_upward = (args[0].device.type, result.device.type) == ("cpu", "gpux")
            if is_upward and not kwargs.get("non_blocking"):
                self.waits.add(f"waits for {tuple(result.shape)} to be copied")
        return result


def loss_of(name: str, model, batch) -> torch.Tensor:
    """What a recipe differentiates: its formula on a batch. name: of a --loss, or of another recipe."""
    if name == "scores":
        return reward.score_sums(sequence_scores(model, batch), center_weight=0.1)[0]
    if name == "grpo":
        now = token_log_probs(model, batch, 0.7)
        with torch.no_grad():
            start = now + 0.1
        policy = grpo.policy_loss(grpo.Config(kl_beta=0.1), batch, now, now.detach(), start)
        return token_sums(batch, now.detach(), *policy)[0]
    if name in PREFERENCES:
        cfg = prefer.Config(loss=name, beta=0.1)
        policy = log_probs_of(model, batch)
        reference = Reference(model, ALONE)
        reference.known = dict.fromkeys(batch.keys, -1.0)  # computed before the first step
        start = reference.of(batch)
        found = prefer.preference_loss(cfg, batch, policy, start, policy.detach().sum())
        sums = sums_of(batch, policy, *found)
        return sums[0] - sums[1]
    weighted = {"": None, "wrong": weighted_on_the_host, "waiting": weighted_from_the_host}
    return summed_cross_entropy(model, batch, weighted[name])


def batch_of(loss: str, packed: bool):
    if loss == "grpo":
        rollouts = [Rollout([5, 6], [7] * size, [-1.0] * size, 0.5, 0.1, "") for size in (3, 9)]
        return rollout_batch(rollouts, 0, 8)
    rows = [Example(torch.arange(size), torch.arange(size), "") for size in (9, 14)]
    batch = collate(rows, pad_id=0, multiple=8)
    if packed:
        batch = replace(batch, positions=torch.arange(16).remainder(8).repeat(2, 1))
        batch = replace(batch, where=[""] * 4)
    if loss in ("", "wrong", "waiting"):
        return batch
    answers = len(batch.where)
    wanted = torch.arange(answers) % 2 == 0
    return PairBatch(
        **vars(batch), pairs=answers // 2, desirable=wanted, keys=tuple(range(answers))
    )


def step(dtype=torch.bfloat16, lora=None, quant=None, packed=False, loss=""):
    """One of act `train`, without the ranks."""
    kind = "scores" if loss == "scores" else "text"
    config = tiny_config("llama", vocab_size=271, num_labels=1, num_hidden_layers=1)
    model = build_model(config, dtype, kind=kind)
    if lora:
        add_adapters(model, lora)
        freeze_base(model, quant or Quant(), dtype)
    if kind == "scores":
        add_scores(model, 0)
    else:
        in_chunks(model, 8)
    model.train()
    batch = batch_of(loss, packed)
    batch = batch.to(torch.device("meta"))
    with FakeTensorMode(allow_non_fake_inputs=False), Copies() as copies:
        batch = type(batch)(**tree_map_only(torch.Tensor, on_gpu, vars(batch)))
        for module in model.modules():
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    module._parameters[name] = nn.Parameter(on_gpu(tensor), tensor.requires_grad)
            for name, tensor in module._buffers.items():
                module._buffers[name] = on_gpu(tensor)
        scaler = torch.amp.GradScaler("gpux", enabled=dtype == torch.float16)
        total = loss_of(loss, model, batch) / 20
        scaler.scale(total).backward()
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
    return {tensor.device.type for tensor in (total, grad_norm)} | copies.waits


def steps(world) -> dict[str, object]:
    """What each step gives, or its error."""
    _setup_privateuseone_for_python_backend("gpux")
    found = {}
    for name, how in {**STEPS, **{loss: {"loss": loss} for loss in ("wrong", "waiting")}}.items():
        try:
            found[name] = step(**how)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def weighted_on_the_host(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, targets, reduction="none") * torch.ones(len(targets))


def weighted_from_the_host(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    weights = torch.ones(len(targets)).to(logits.device)
    return F.cross_entropy(logits, targets, reduction="none") * weights


@pytest.fixture(scope="module")
def found():
    return run_fresh_ranks(steps, 1)[0]


@pytest.mark.parametrize("name", STEPS)
def test_in_no_step_a_tensor_of_the_host_meets_those_of_the_device_or_waits_for_it(name, found):
    assert found[name] == {"gpux"}


def test_a_loss_that_makes_one_would_be_found(found):
    assert re.search("devices,? gpux:0(,| and) cpu", found["wrong"])
    assert "waits for (8,) to be copied" in found["waiting"]
