"""A bare fully_shard loop for a Llama, the minimum with which `bench.py step` compares finetune.py.

Units, resharding, precision, loss, optimizer, clipping and log are those of the recipe; nothing is checked.
"""

import json
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM

from utils.model.loss import add_chunked_loss


def train(folder, steps, lr, log_file, dtype=None):
    """steps: for each optimizer step, this rank's micro-batches (ids, labels), each (B, T). dtype: of the
    computation; shards are fp32.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = add_chunked_loss(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    *layers, last = model.model.layers
    mesh = init_device_mesh("cpu", (ranks,))
    precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    options = {"mesh": mesh, "mp_policy": precision}
    for layer in layers:
        fully_shard(layer, **options)
    fully_shard(model.model.embed_tokens, **options).set_unshard_in_backward(False)
    for unit in (last, model.lm_head, model):
        fully_shard(unit, reshard_after_forward=False, **options)
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.01}
    norms = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, norms], lr=lr, betas=(0.9, 0.95), fused=True)

    model.train()
    for step, batches in enumerate(steps, start=1):
        started = time.monotonic()
        trained = torch.tensor(float(sum((labels != -100).sum() for _, labels in batches)))
        dist.all_reduce(trained)
        summed = torch.zeros(())
        for i, (ids, labels) in enumerate(batches, start=1):
            model.set_requires_gradient_sync(i == len(batches))
            loss = model(ids, labels=labels)  # () summed over the trained tokens
            (loss * ranks / trained).backward()  # FSDP averages over ranks
            summed += loss.detach()
        dist.all_reduce(summed)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        norm = norm.full_tensor().item()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            seconds, loss = time.monotonic() - started, (summed / trained).item()
            with open(log_file, "a") as log:
                log.write(
                    json.dumps({"step": step, "loss": loss, "grad_norm": norm, "seconds": seconds})
                    + "\n"
                )
            print(f"step {step}  loss {loss:.4f}  grad_norm {norm:.3f}", flush=True)
