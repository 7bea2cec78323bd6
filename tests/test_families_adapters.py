"""LoRA and quantization for every type of transformers' causal mapping that is trained here at all: steps
train, and peft gives the adapter's logits on the model of from_pretrained; or one line says why not.

python -m pytest tests/test_families_adapters.py -m slow
"""

import multiprocessing
import shutil
import tempfile
import traceback
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from families import OVERWRITTEN, TYPES, VOCABULARY, family_model
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from utils.model.folder import open_weights
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.lora import add_adapters, base_names, freeze_base, init_lora, save_adapter
from utils.model.options import Lora, Quant
from utils.model.quantize import quantize_linears
from utils.run.distributed import ALONE, init_distributed

KINDS = ("16bit", "8bit", "4bit")
# How far codes may move the logits of a random model, as a share of their norm. Codes that are taken for
# numbers, or numbers for codes, move them by their whole norm and more.
FAR = {"8bit": 0.3, "4bit": 0.9}
# of gpt2's kind, whose weights lie the other way round
CONV1D = "has no linear layer that can be: "
REFUSED = {
    (name, kind): CONV1D for name in ("gpt2", "gpt-sw3", "openai-gpt") for kind in ("8bit", "4bit")
}


@pytest.mark.slow
def test_every_family_trains_adapters_beside_16_8_and_4_bits_and_peft_loads_them():
    """A type that cannot be built, by its own code or because it is refused, is another test's."""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(2, context) as pool:
        found = dict(zip(TYPES, pool.map(sweep, TYPES), strict=True))
    built = {name: said for name, said in found.items() if said["model"] == "ok"}
    assert len(built) > 120, found
    wrong = []
    for name, said in built.items():
        for kind in KINDS:
            refused = REFUSED.get((name, kind))
            good = refused in said[kind] if refused else said[kind] == "ok"
            wrong += [] if good else [f"{name} {kind}: {said[kind]}"]
    assert not wrong, "\n".join(wrong)


def sweep(model_type: str) -> dict[str, str]:
    """What came of "model" (before any adapter) and of each of KINDS: ok, or what was raised."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    folder = Path(tempfile.mkdtemp())
    try:
        try:
            family_model(model_type).save_pretrained(folder / "model", save_original_format=False)
            logits = answers_of(model_type, folder / "model")
        except Exception as error:
            return {"model": text_of(error)}
        said = {"model": "ok"}
        for kind in KINDS:
            try:
                step(model_type, folder, kind, logits)
                said[kind] = "ok"
            except Exception as error:
                said[kind] = text_of(error)
        return said
    finally:
        shutil.rmtree(folder)


def text_of(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error)[:300]} @{last.filename.rpartition('/')[2]}:{last.lineno}"


def token_ids() -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))


def answers_of(model_type: str, folder: Path) -> torch.Tensor:
    """Logits of the model that this project builds and loads."""
    model, pieces = built(folder)
    load_pieces(model, pieces, ALONE.device)
    with torch.no_grad():
        return model.eval()(input_ids=token_ids(), use_cache=False).logits


def built(folder: Path):
    model = build_model(AutoConfig.from_pretrained(folder), torch.float32)
    return model, plan_pieces(model, open_weights(folder), folder)


def step(model_type: str, folder: Path, kind: str, plain: torch.Tensor) -> None:
    world = init_distributed()
    model, pieces = built(folder / "model")
    config = add_adapters(model, Lora(4, 8))
    if kind != "16bit":
        quantize_linears(model, Quant(kind), torch.float32)
    freeze_base(model, Quant(), torch.float32)
    load_pieces(model, pieces, world.device, names=base_names(model))
    init_lora(model, seed=3)
    fresh = logits_of(model.eval())
    if kind == "16bit":
        assert torch.equal(fresh, plain), "fresh adapters change the answers"
    else:
        near = (fresh - plain).norm() / (plain - plain.mean()).norm()
        assert near < FAR[kind], f"codes answer otherwise: {near:.2f}"
    ids, trained = token_ids(), [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1.0)
    model.train()
    for _ in range(2):  # in the first, A has no gradient, for B is 0
        logits = model(input_ids=ids, use_cache=False).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0, error_if_nonfinite=True)
        assert norm > 0
        optimizer.step()
    moved = [
        parameter for parameter in trained if parameter.grad is not None and parameter.grad.any()
    ]
    assert len(moved) >= 6, f"{len(moved)} of {len(trained)} parameters have a gradient"
    if kind == "16bit":
        ours = logits_of(model.eval())
        assert not torch.equal(ours, fresh), "training changed nothing"
        save_adapter(folder / "adapter", model, config, folder / "model", world, None, None)
        base = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        if model_type in OVERWRITTEN:
            base.load_state_dict(family_model(model_type).state_dict())
        theirs = logits_of(PeftModel.from_pretrained(base, folder / "adapter").eval())
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def logits_of(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=token_ids(), use_cache=False).logits
