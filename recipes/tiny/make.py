"""Make the embedded model: a text, a tokenizer, a model pre-trained on it, and a task to fine-tune it on.

    python recipes/tiny/make.py             # rebuild everything beside this file and compare with made.json
    python recipes/tiny/make.py --record    # after a change here: write made.json anew

Written by hand are only config.json, generation_config.json, tokenizer_config.json and chat_template.jinja.
"""

import hashlib
import io
import json
import sys
import time
from pathlib import Path
from random import Random

import sentencepiece
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaTokenizer

HERE = Path(__file__).resolve().parent
sys.path[1:1] = [str(HERE), str(HERE.parent.parent)]  # stories.py is here, utils/ beside recipes/

from stories import chat_row, story

from utils.data.batches import Batch
from utils.model.loss import add_chunked_loss, summed_cross_entropy
from utils.run.units import IGNORE
from utils.train.optim import build_optimizer, clip_gradients, learning_rate

STEPS, BATCH, LR, WARMUP = 1500, 32, 2e-3, 50
LENGTH = 80  # tokens; the rest of a longer story is cut
VALIDATION_STORIES, TOKENIZER_STORIES, CHAT_ROWS, HELD_OUT_ROWS = 256, 4000, 3000, 300
# in no story: fine-tuning teaches them
MARKERS = ["<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]


def main(record: bool) -> None:
    started = time.perf_counter()
    text = make_text()
    tokenizer = make_tokenizer(text[-TOKENIZER_STORIES:], HERE)
    make_task(HERE)
    torch.set_num_threads(1)  # sums depend on it
    model, loss = pretrain(tokenizer.encode(text, add_bos=True))
    weights = model.state_dict()
    del weights["lm_head.weight"]  # the embedding's
    save_file(
        {k: v.bfloat16() for k, v in weights.items()}, HERE / "model.safetensors", {"format": "pt"}
    )
    made = {"text_sha256": sha256("\n".join(text).encode()), "loss": round(loss, 5)}
    for name in ("tokenizer.model", "tokenizer.json", "chat.jsonl", "heldout.jsonl"):
        made[name] = sha256((HERE / name).read_bytes())
    print(
        f"loss {loss:.5f} on {VALIDATION_STORIES} other stories, {time.perf_counter() - started:.0f} s in all"
    )
    if record:
        (HERE / "made.json").write_text(json.dumps(made, indent=2) + "\n")
        return
    before = json.loads((HERE / "made.json").read_text())
    different = [k for k in made if k != "loss" and made[k] != before[k]]
    if abs(loss - before["loss"]) > 1e-3:
        different.append(f"loss, which was {before['loss']}")
    sys.exit(f"not as in made.json: {', '.join(different)}" if different else 0)


def make_text() -> list[str]:
    """All stories: every step has its own, and the last are for validation."""
    rng = Random(0)
    return [story(rng) for _ in range(STEPS * BATCH + VALIDATION_STORIES)]


def make_tokenizer(text: list[str], folder: Path) -> sentencepiece.SentencePieceProcessor:
    """Write tokenizer.model, and the same as tokenizer.json, which loads without sentencepiece."""
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
        num_threads=1,  # more make the order of equal pairs a matter of chance
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    sp = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    vocab = {sp.id_to_piece(i): i for i in range(len(sp))}
    splits = [(piece[:i], piece[i:]) for piece in vocab for i in range(1, len(piece))]
    merges = [
        (a, b) for a, b in splits if a in vocab and b in vocab
    ]  # in the order in which pieces were found
    options = {"pad_token": "<pad>", "add_bos_token": True, "extra_special_tokens": MARKERS}
    LlamaTokenizer(vocab, merges, **options).backend_tokenizer.save(str(folder / "tokenizer.json"))
    return sp


def make_task(folder: Path) -> None:
    """Write chat.jsonl and heldout.jsonl."""
    for name, rows, held_out in (
        ("chat.jsonl", CHAT_ROWS, False),
        ("heldout.jsonl", HELD_OUT_ROWS, True),
    ):
        rng = Random(name)
        lines = [json.dumps(chat_row(rng, held_out)) + "\n" for _ in range(rows)]
        (folder / name).write_text("".join(lines))


def pretrain(ids: list[list[int]]) -> tuple[torch.nn.Module, float]:
    """A new model after STEPS steps on its stories, and its loss per token on the others.

    One story is one row: in rows packed with several, models look for the red hat in the wrong story.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(HERE), dtype=torch.float32)
    add_chunked_loss(model)
    optimizer = build_optimizer(model, LR, weight_decay=0.1)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, LR, WARMUP, "cosine")
        loss = mean_loss(model, ids[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step} of {STEPS}: loss {loss:.3f}", flush=True)
    model.to(torch.bfloat16).to(torch.float32)  # what the file holds
    with torch.no_grad():
        return model, mean_loss(model, ids[-VALIDATION_STORIES:]).item()


def mean_loss(model: torch.nn.Module, stories: list[list[int]]) -> torch.Tensor:
    """Cross-entropy per token, a () tensor."""
    width = min(LENGTH, max(map(len, stories)))
    # (B, T)
    ids = torch.tensor([(s + [model.config.pad_token_id] * width)[:width] for s in stories])
    mask = torch.tensor([[i < len(s) for i in range(width)] for s in stories])
    batch = Batch(ids, ids.masked_fill(~mask, IGNORE), mask, [])
    return summed_cross_entropy(model, batch) / mask[:, 1:].sum()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main(record="--record" in sys.argv[1:])
