"""What torch's own tracker counts in a step of a sharded model: the oracle of the memory plan.

It runs on fake tensors and a fake process group, in a process of its own: `python tests/fsdp_tracker.py CASE`
prints the bytes of the peak. CASE is JSON: see `main`. torch/distributed/_tools/fsdp2_mem_tracker.py
"""

import json
import sys
import warnings
import weakref
from functools import partial
from pathlib import Path
from types import MethodType
from unittest.mock import patch

warnings.simplefilter("ignore")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from shards import shard_training
from tiny import build_optimizer, make_states, tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import masking_utils

from utils.model.activation_offload import hook_inputs
from utils.model.options import Lora, Quant
from utils.model.sharding import recompute_activations
from utils.plan.need import Setting, _planned_model, planned_model
from utils.plan.trace import norm_on_meta
from utils.train.in_backward import StepInBackward

aten = torch.ops.aten
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def setting_of(case: dict) -> Setting:
    """kind and sizes of a model, shards, replicate, seq_len, dtype, param_dtype, sync_each, levers."""
    levers = dict(case["levers"])
    lora = Lora(lora_rank=levers.pop("lora_rank", 0))
    quant = Quant(levers.pop("quantization", "none"))
    rows = levers.get("batch_size", 1) * levers.pop("grad_accum", 1)
    kind = "scores" if levers.pop("scores", False) else "text"
    sizes = case["sizes"] | ({"num_labels": 1} if kind == "scores" else {})
    return Setting(
        config=tiny_config(case["kind"], **sizes),
        param_dtype=DTYPES[case["param_dtype"]],
        dtype=DTYPES[case["dtype"]],
        seq_len=case["seq_len"],
        shards=case["shards"],
        replicate=case["replicate"],
        sync_each_microbatch=case["sync_each"],
        lora=lora,
        quant=quant,
        rows=rows,
        kind=kind,
        **levers,
    )


def loss_of_all(self, ids, labels):
    """The model's own loss finds the trained tokens by their values, which fake tensors have not."""
    hidden = self.base_model(ids, use_cache=False).last_hidden_state
    if labels is None:  # scores of a pair
        rows = torch.zeros(2 * len(ids), dtype=torch.int64)
        return self.score(hidden.flatten(0, 1).index_select(0, rows)).float().sum()
    rows, columns = (torch.zeros(ids.numel(), dtype=torch.int64) for _ in range(2))
    return self.get_output_embeddings()(hidden[rows, columns], labels.view(-1)).clone()


def in_place(func, args: tuple, table: torch.Size):
    """Autograd adds the two gradients of a tied weight in place, but not within a mode."""
    is_sum = func is aten.add.Tensor and args[0].shape == table
    return aten.add_.Tensor if is_sum else func


class Tracker(FSDPMemTracker):
    """torch's tracker."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        func = in_place(func, args, self.table)
        return super().__torch_dispatch__(func, types, args, kwargs)


def peak(case: dict) -> int:
    plan = setting_of(case)
    _planned_model.cache_clear()  # the one before is sharded
    model = planned_model(plan)
    if plan.activation_checkpointing != "none":
        recompute_activations(model, plan.activation_checkpointing)
    if plan.activation_offload:
        hook_inputs(model, lambda tensor: tensor.shape, partial(torch.empty, dtype=plan.dtype))
    masking_utils.find_packed_sequence_indices = lambda positions: None  # it looks at values too
    F.rms_norm = norm_on_meta  # a CPU has no kernel for it either
    axes = {"replicate": plan.replicate} if plan.replicate > 1 else {}
    axes["shard"] = plan.shards
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=plan.replicate * plan.shards
    )
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        shard_training(
            model,
            mesh,
            plan.dtype,
            plan.reshard_after_forward,
            accumulates=plan.grad_accum > 1 and not plan.sync_each_microbatch,
        )
        model.forward = MethodType(loss_of_all, model)
        model.train()
        optimizer = build_optimizer(model, 1e-3, 0.0)
        ids = torch.zeros(plan.batch_size, case["seq_len"], dtype=torch.int64)

        def step() -> None:
            for i in range(plan.grad_accum):
                tracker.reset_mod_stats()
                model.set_requires_gradient_sync(
                    plan.sync_each_microbatch or i == plan.grad_accum - 1
                )
                model.set_requires_all_reduce(
                    i == plan.grad_accum - 1 or plan.param_dtype != torch.float32
                )
                model(ids, labels=None if plan.kind == "scores" else ids).backward()

        make_states(optimizer)  # tracked, they would be counted wrongly
        if plan.optimizer_in_backward:
            optimizer.step = lambda: None  # fused, it needs nothing more
            StepInBackward(optimizer, mesh)
        tracker = Tracker(model, optimizer)
        tracker.table = model.get_input_embeddings().weight.shape
        # Of the parameters it finds those that FSDP2 manages.
        plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
        tracker.track_inputs((ids, *plain))
        with tracker:
            if plan.activation_offload:  # an input on its way to the host, or back
                way = torch.empty(*ids.shape, model.config.hidden_size, dtype=plan.dtype)  # noqa: F841
            step()
        found = tracker.get_tracker_snapshot("peak")
    dist.destroy_process_group()
    return max(parts["Total"] for parts in found.values())


class Storages(TorchDispatchMode):
    """The most bytes of live storages. torch's tracker itself keeps alive a gradient that is accumulated."""

    def __init__(self, table: torch.Size, *tensors: torch.Tensor):
        super().__init__()
        self.table, self.storages, self.most = table, weakref.WeakSet(), 0
        self.note(tensors)

    def note(self, values: object) -> None:
        for value in tree_iter(values):
            if isinstance(value, torch.Tensor):
                self.storages.add(getattr(value, "_local_tensor", value).untyped_storage())
        self.most = max(self.most, sum(storage.nbytes() for storage in self.storages))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = in_place(func, args, self.table)(*args, **kwargs or {})
        self.note((args, kwargs, result))
        return result


def most_alive(world, case: dict) -> int:
    """The most bytes of a rank in a step that really runs. Only the collectives do nothing: gloo's threads
    free their tensors at any time.
    """
    plan = setting_of(case)
    _planned_model.cache_clear()
    model = planned_model(plan)
    _planned_model.cache_clear()  # this one is sharded
    recompute_activations(model, plan.activation_checkpointing)
    ranks = dist.new_group(backend="fake")
    mesh = DeviceMesh.from_group(ranks, "cpu", mesh_dim_names=("shard",))
    shard_training(model, mesh, plan.dtype, accumulates=plan.grad_accum > 1)
    model.to_empty(device="cpu")
    model.tie_weights()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.zero_()
    optimizer = build_optimizer(model, 1e-3, 0.0)
    make_states(optimizer)
    moments = [value for state in optimizer.state.values() for value in state.values()]
    model.forward = MethodType(loss_of_all, model)
    ids = torch.zeros(plan.batch_size, plan.seq_len, dtype=torch.int64)
    table = model.get_input_embeddings().weight.shape
    with (
        patch.object(F, "rms_norm", norm_on_meta),
        Storages(table, *model.parameters(), *model.buffers(), *moments) as storages,
    ):
        for i in range(plan.grad_accum):
            model.set_requires_gradient_sync(i == plan.grad_accum - 1)
            model(ids, labels=ids).backward()
    return storages.most


if __name__ == "__main__":
    print("\n".join(str(peak(case)) for case in json.loads(sys.argv[1])))
