"""Make the embedded model: a text, a tokenizer, a model pre-trained on it, and a task to fine-tune it on.

    python recipes/tiny/make.py             # rebuild everything beside this file and compare with made.json
    python recipes/tiny/make.py --record    # after a change here: write made.json anew

Only config.json, generation_config.json, tokenizer_config.json and chat_template.jinja are written by hand.
"""

import argparse
import hashlib
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import sentencepiece
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaTokenizer

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent.parent)]  # stories.py is here, utils/ beside recipes/

from stories import chat_row, pair_row, story

from utils.data.batches import Batch
from utils.model.loss import add_chunked_loss, summed_cross_entropy
from utils.run.units import IGNORE

STEPS = 1500
BATCH = 32  # stories
LR = 2e-3
WARMUP = 50  # steps
LENGTH = 80  # tokens; longer stories are cut
VALIDATION_STORIES = 256
TOKENIZER_STORIES = 4000
CHAT_ROWS = 3000
PAIRS = 2000
HELD_OUT_ROWS = 300
ROWS = ("chat.jsonl", "heldout.jsonl", "pairs.jsonl", "heldout_pairs.jsonl")
# They are in no story; the model learns them in fine-tuning.
MARKERS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def main(record: bool) -> None:
    started = time.perf_counter()
    text = make_text()
    tokenizer = make_tokenizer(text[-TOKENIZER_STORIES:], HERE)
    make_task(HERE)
    torch.set_num_threads(1)  # rounding depends on it
    model, loss = pretrain(tokenizer.encode(text, add_bos=True))
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    del weights["lm_head.weight"]  # tied to the embedding
    save_file(weights, HERE / "model.safetensors", {"format": "pt"})
    start_task()
    made = {"text_sha256": sha256("\n".join(text).encode()), "loss": round(loss, 5)}
    for name in ("tokenizer.model", "tokenizer.json", *ROWS):
        made[name] = sha256((HERE / name).read_bytes())
    seconds = time.perf_counter() - started
    print(f"loss {loss:.5f} on {VALIDATION_STORIES} other stories, {seconds:.0f} s in all")
    if record:
        (HERE / "made.json").write_text(json.dumps(made, indent=2) + "\n")
        return
    recorded = json.loads((HERE / "made.json").read_text())
    different = [name for name in made if name != "loss" and made[name] != recorded[name]]
    if abs(loss - recorded["loss"]) > 1e-3:
        different.append(f"loss, which was {recorded['loss']}")
    if different:
        sys.exit(f"not as in made.json: {', '.join(different)}")


def make_text() -> list[str]:
    """All stories: BATCH new ones per step, then those for validation."""
    rng = Random(0)
    return [story(rng) for _ in range(STEPS * BATCH + VALIDATION_STORIES)]


def make_tokenizer(text: list[str], folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Write tokenizer.model, and the same tokenizer as tokenizer.json, which loads without sentencepiece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_writer=model,
        model_type="bpe",
        vocab_size=json.loads((HERE / "config.json").read_text())["vocab_size"],
        control_symbols=MARKERS,
        pad_id=3,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        num_threads=1,  # with more, the order of equal pairs is random
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocab = {sp.id_to_piece(i): i for i in range(len(sp))}
    merges = []  # in the order of the pieces
    for piece in vocab:
        for i in range(1, len(piece)):
            left = piece[:i]
            right = piece[i:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    tokenizer = LlamaTokenizer(
        vocab,
        merges,
        pad_token="<pad>",
        add_bos_token=True,
        extra_special_tokens=MARKERS,
    )
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))
    return sp


def make_task(folder: Path) -> None:
    """Write chat.jsonl, pairs.jsonl and their held-out rows."""
    write_rows(folder / "chat.jsonl", chat_row, CHAT_ROWS, held_out=False)
    write_rows(folder / "heldout.jsonl", chat_row, HELD_OUT_ROWS, held_out=True)
    write_rows(folder / "pairs.jsonl", pair_row, PAIRS, held_out=False)
    write_rows(folder / "heldout_pairs.jsonl", pair_row, HELD_OUT_ROWS, held_out=True)


def start_task() -> None:
    """Write started/: the model after 12 steps on the chat rows, from which grpo.py can find rewards."""
    flags = "--batch_size 32 --steps 12 --lr 2e-3 --schedule constant --warmup 1 --save_every 0"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(HERE.parent / "finetune.py"), *flags.split()]
        subprocess.run([*command, "--output_dir", f"{folder}/out"], check=True)
        for name in ("config.json", "generation_config.json", "model.safetensors"):
            shutil.copy(f"{folder}/out/model/{name}", HERE / "started" / name)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(HERE / name, HERE / "started" / name)


def write_rows(file: Path, row: Callable, rows: int, held_out: bool) -> None:
    rng = Random(file.name)
    lines = [json.dumps(row(rng, held_out)) + "\n" for _ in range(rows)]
    file.write_text("".join(lines))


def pretrain(ids: list[list[int]]) -> tuple[torch.nn.Module, float]:
    """Train a new model for STEPS steps. Returns it, and its loss per token on the validation stories.

    A row is one story: if rows hold several, the model looks for the red hat in the wrong story.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(HERE), dtype=torch.float32)
    add_chunked_loss(model)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rate_of(step)
        first = step * BATCH
        loss = mean_loss(model, ids[first : first + BATCH])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step} of {STEPS}: loss {loss:.3f}", flush=True)
    model.to(torch.bfloat16).to(torch.float32)  # the values that the file holds
    with torch.no_grad():
        return model, mean_loss(model, ids[-VALIDATION_STORIES:]).item()


def rate_of(step: int) -> float:
    """Linear warm-up, then cosine to 0."""
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP)))


def mean_loss(model: torch.nn.Module, stories: list[list[int]]) -> torch.Tensor:
    """Cross-entropy per token, a () tensor."""
    width = min(LENGTH, max(len(tokens) for tokens in stories))
    ids = torch.full((len(stories), width), model.config.pad_token_id)  # (B, T)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    for row, tokens in enumerate(stories):
        kept = tokens[:width]
        ids[row, : len(kept)] = torch.tensor(kept)
        mask[row, : len(kept)] = True
    labels = ids.masked_fill(~mask, IGNORE)
    batch = Batch(ids, labels, mask, [])
    return summed_cross_entropy(model, batch) / mask[:, 1:].sum()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--record", action="store_true", help="write made.json anew")
    main(parser.parse_args().record)
