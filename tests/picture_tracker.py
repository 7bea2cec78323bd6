"""What torch's own tracker counts in a step of a sharded model that reads pictures, beside the plan.

On real zeros, since towers read the sizes of pictures, and a fake process group, in a process of its own:
`python tests/picture_tracker.py FOLDER...` prints, for each family's folder and the settings below, how far
the plan is off. torch/distributed/_tools/fsdp2_mem_tracker.py
"""

import itertools
import json
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

warnings.simplefilter("ignore")
sys.path[:0] = [str(Path(__file__).resolve().parent.parent), str(Path(__file__).resolve().parent)]

import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from shards import shard_training
from tiny import build_optimizer, make_states
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from utils.data.pictures import load_processor
from utils.data.tokens import load_tokenizer
from utils.model.folder import read_config
from utils.model.sharding import recompute_activations
from utils.plan.need import Setting, _planned_model, need_of, planned_model
from utils.plan.pictures import Pictures
from utils.plan.trace import norm_on_meta

SEQ_LEN, ROWS = 192, 2
FROZEN, TRAINED = "language,projector", "language,projector,vision"  # the tower
SETTINGS = (  # each two values of two columns meet in one row
    (FROZEN, "none", torch.bfloat16),
    (FROZEN, "full", torch.float32),
    (TRAINED, "none", torch.float32),
    (TRAINED, "full", torch.bfloat16),
)


def pictures_of(folder: Path) -> Pictures:
    processor = load_processor(folder, load_tokenizer(folder))
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    text = processor.tokenizer.apply_chat_template([message], tokenize=False)
    picture = Image.new("RGB", (90, 60))

    def rows_of(rows: int) -> SimpleNamespace:
        options = {"text": [text] * rows, "images": [[picture]] * rows, "return_tensors": "pt"}
        batch = dict(processor(**options))
        del batch["attention_mask"]
        return SimpleNamespace(ids=batch.pop("input_ids"), extra=batch)

    return Pictures(rows_of)


def peaks(folder: Path, parts: str, recompute: str, dtype: torch.dtype) -> tuple[int, int]:
    """(planned, counted) bytes."""
    _planned_model.cache_clear()  # the one before is sharded
    pictures = pictures_of(folder)
    config = read_config(folder, False)
    if folder.name == "internvl":
        # The tracker runs the hooks of a unit with two modules after each of them: it frees a tied embedding.
        config.tie_word_embeddings = False
    setting = Setting(
        config=config,
        param_dtype=torch.float32,
        dtype=dtype,
        seq_len=SEQ_LEN,
        shards=2,
        kind="pictures",
        train=parts,
        pictures=pictures,
        activation_checkpointing=recompute,
        batch_size=ROWS,
    )
    need = need_of(setting)
    assert need.peak, need.why
    model = planned_model(setting)
    F.rms_norm = norm_on_meta  # a CPU has no kernel for it either
    if recompute != "none":
        recompute_activations(model, recompute)
    shard_training(model, init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), dtype)
    model.to_empty(device="cpu")
    model.tie_weights()
    with torch.no_grad():
        for tensor in itertools.chain(model.parameters(), model.buffers()):
            tensor.zero_()
    model.train()
    optimizer = build_optimizer(model, 1e-3, 0.0)
    ids, extra = pictures.batch(ROWS, SEQ_LEN)
    labels = ids.clamp(max=setting.config.get_text_config().vocab_size - 1)
    make_states(optimizer)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((ids, *extra.values()))
    with tracker:
        model(ids, labels=labels, **extra).backward()
    found = tracker.get_tracker_snapshot("peak")
    return need.peak.total, max(kinds["Total"] for kinds in found.values())


if __name__ == "__main__":
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    for folder, setting in itertools.product(sys.argv[1:], SETTINGS):
        planned, counted = peaks(Path(folder), *setting)
        print(json.dumps([Path(folder).name, *map(str, setting), planned / counted - 1]))
