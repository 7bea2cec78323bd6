"""What the model answers before and after fine-tuning: exact match on questions that no training row asks.

    python recipes/tiny/score.py recipes/tiny output/finetune-001/model
    python recipes/tiny/score.py BEFORE AFTER --questions recipes/tiny/heldout.jsonl

Nothing of ours is imported here: both folders are read as anyone would read them, with transformers alone.
Exits with 1 where fewer than 90 % of the answers after fine-tuning are right.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

BATCH = 50  # questions answered at a time
ENOUGH = 0.9  # of the answers


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", help="model folder")
    parser.add_argument("after", help="model folder")
    parser.add_argument(
        "--questions", default=Path(__file__).parent / "heldout.jsonl", help="chat rows"
    )
    args = parser.parse_args()
    rows = [json.loads(line)["messages"] for line in Path(args.questions).read_text().splitlines()]
    questions, expected = [row[:-1] for row in rows], [row[-1]["content"] for row in rows]
    before, after = answers(args.before, questions), answers(args.after, questions)
    for i in range(0, len(rows), max(1, len(rows) // 5))[:5]:
        print(f"\n{shown(questions[i][-1]['content'])}")
        for name, texts in (("expected", expected), ("before", before), ("after", after)):
            print(f"  {name + ':':9} {shown(texts[i][:80])}")
    print()
    for name, given in (("before", before), ("after", after)):
        right = sum(a == b for a, b in zip(given, expected, strict=True))
        print(f"exact match {name:6}: {right} of {len(rows)} ({right / len(rows):.1%})")
    return 0 if right >= ENOUGH * len(rows) else 1


def shown(text: str) -> str:
    """Text on one line: a model may say control characters, which a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@torch.inference_mode()
def answers(folder: str, questions: list[list[dict]]) -> list[str]:
    """The model's own most likely answers, until it ends its turn itself or has written 48 tokens. Thoughts,
    where a template has some, are no part of an answer.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    given = []
    for start in range(0, len(questions), BATCH):
        batch = tokenizer.apply_chat_template(
            questions[start : start + BATCH],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        output = model.generate(**batch, do_sample=False, max_new_tokens=48)
        new = output[:, batch["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new, skip_special_tokens=True)
        given += [text.split("</think>")[-1].strip() for text in texts]
    return given


if __name__ == "__main__":
    sys.exit(main())
