"""What torch's own tracker counts in a step of a sharded model: the oracle of the memory plan.

It runs on fake tensors and a fake process group, in a process of its own: `python tests/fsdp_tracker.py CASE`
prints the bytes of the peak. CASE is JSON: see `main`. torch/distributed/_tools/fsdp2_mem_tracker.py
"""

import json
import sys
import warnings
from pathlib import Path
from types import MethodType

warnings.simplefilter("ignore")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
from tiny import tiny_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import masking_utils

from utils.model.activations import recompute_activations
from utils.model.sharding import shard_model, sync_gradients
from utils.plan.fit import Planner
from utils.plan.planned import Knobs
from utils.train.optim import build_optimizer

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def planner(case: dict) -> tuple[Planner, Knobs]:
    """kind and sizes of a model, shards, replicate, batch, seq_len, dtype, param_dtype, knobs. The kernels
    are those of a CPU, on which the tracker counts.
    """
    structure = (
        tiny_config(case["kind"], **case["sizes"]),
        DTYPES[case["param_dtype"]],
        "auto",
        False,
    )
    how = {"gpu": False, "replicate": case["replicate"], "sync_each": case["sync_each"]}
    made = Planner(structure, DTYPES[case["dtype"]], case["shards"], case["seq_len"], **how)
    return made, Knobs(**case["knobs"])


def loss_of_all(self, ids, labels):
    """The model's own loss finds the trained tokens by their values, which fake tensors have not."""
    hidden = self.base_model(ids, use_cache=False).last_hidden_state
    rows, columns = (torch.zeros(ids.numel(), dtype=torch.int64) for _ in range(2))
    return self.get_output_embeddings()(hidden[rows, columns], labels.view(-1)).clone()


def peak(case: dict) -> int:
    plan, knobs = planner(case)
    model = plan.model(knobs)
    if knobs.activation_checkpointing != "none":
        recompute_activations(model, knobs.activation_checkpointing)
    masking_utils.find_packed_sequence_indices = lambda positions: None  # it looks at values too
    axes = {"replicate": plan.replicate} if plan.replicate > 1 else {}
    axes["shard"] = plan.shards
    dist.init_process_group(
        "fake", store=FakeStore(), rank=0, world_size=plan.replicate * plan.shards
    )
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        model.tie_weights()
        shard_model(model, mesh, plan.dtype, knobs.reshard_after_forward)
        model.forward = MethodType(loss_of_all, model)
        model.train()
        optimizer = build_optimizer(model, 1e-3, 0.0)
        ids = torch.zeros(knobs.batch_size, case["seq_len"], dtype=torch.int64)

        def step(tracker=None) -> None:
            for i in range(knobs.grad_accum):
                if tracker:
                    tracker.reset_mod_stats()
                sync_gradients(model, plan.sync_each or i == knobs.grad_accum - 1)
                model(ids, labels=ids).backward()

        step()
        optimizer.step()  # its state is there from now on; tracked, it would be counted wrongly
        optimizer.zero_grad()
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((ids,))
        with tracker:
            step(tracker)
        found = tracker.get_tracker_snapshot("peak")
    dist.destroy_process_group()
    return max(parts["Total"] for parts in found.values())


if __name__ == "__main__":
    print("\n".join(str(peak(case)) for case in json.loads(sys.argv[1])))
