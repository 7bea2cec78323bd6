"""Score a model before and after training: exact match on held-out questions; for pairs, how often the chosen
answer is more likely than the rejected one; with a reward model, how often its score is higher.

    python recipes/tiny/score.py recipes/tiny output/finetune-001/model
    python recipes/tiny/score.py BEFORE AFTER --questions recipes/tiny/heldout_pairs.jsonl

Nothing of this project is imported here: both folders are read with transformers alone.
Exit code 1: after training, fewer than 90 % of the answers, or of the pairs, are right.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoProcessor,
    AutoTokenizer,
)

BATCH = 50  # questions answered at a time
ENOUGH = 0.9  # share of right answers for exit code 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", help="model folder")
    parser.add_argument("after", help="model folder")
    parser.add_argument(
        "--questions", default=Path(__file__).parent / "heldout.jsonl", help="chat rows or pairs"
    )
    args = parser.parse_args()
    questions = []
    expected = []
    rejected = []
    for line in Path(args.questions).read_text().splitlines():
        row = json.loads(line)
        if "rejected" in row:
            question = [{"role": "user", "content": row["prompt"]}]
            rejected.append(row["rejected"])
            expected.append(row["chosen"])
        else:
            *question, answer = row["messages"]
            expected.append(answer["content"])
        questions.append(question)
    if AutoConfig.from_pretrained(args.after).architectures[0].endswith("Classification"):
        of_chosen, of_rejected = (
            scores(args.after, questions, texts) for texts in (expected, rejected)
        )
        higher = sum(a > b for a, b in zip(of_chosen, of_rejected, strict=True))
        print(f"chosen scored above rejected, {args.after}: {higher} of {len(expected)}")
        return 0 if higher >= ENOUGH * len(expected) else 1
    before = answers(args.before, questions)
    after = answers(args.after, questions)

    step = max(1, len(questions) // 5)
    for i in range(0, len(questions), step)[:5]:  # five examples
        question = questions[i][-1]["content"]
        if isinstance(question, list):  # with pictures
            question = " ".join(part.get("text", "(picture)") for part in question)
        print(f"\n{shown(question)}")
        print(f"  expected: {shown(expected[i][:80])}")
        print(f"  before:   {shown(before[i][:80])}")
        print(f"  after:    {shown(after[i][:80])}")
    print()
    print_matches("before", before, expected)
    right = [print_matches("after", after, expected)]
    if rejected:
        for name in (args.before, args.after):
            of_chosen, of_rejected = (
                log_probs(name, questions, texts) for texts in (expected, rejected)
            )
            likelier = sum(a > b for a, b in zip(of_chosen, of_rejected, strict=True))
            print(f"chosen likelier than rejected, {name}: {likelier} of {len(expected)}")
        right.append(likelier)
    return 0 if min(right) >= ENOUGH * len(expected) else 1


def print_matches(name: str, texts: list[str], expected: list[str]) -> int:
    """Print and return the number of right answers."""
    right = sum(text == wanted for text, wanted in zip(texts, expected, strict=True))
    count = len(expected)
    print(f"exact match {name:6}: {right} of {count} ({right / count:.1%})")
    return right


def shown(text: str) -> str:
    """The text on one line, with control characters escaped, which a terminal would obey."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


@torch.inference_mode()
def answers(folder: str, questions: list[list[dict]]) -> list[str]:
    """Greedy answers of at most 48 tokens, without thoughts."""
    if hasattr(AutoConfig.from_pretrained(folder), "vision_config"):
        reader = AutoProcessor.from_pretrained(folder, padding_side="left")
        model = AutoModelForImageTextToText.from_pretrained(folder)
        options = {"tokenize": True, "processor_kwargs": {"padding": True}}
    else:
        reader = AutoTokenizer.from_pretrained(folder, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(folder)
        options = {"padding": True}
    found = []
    for start in range(0, len(questions), BATCH):
        batch = reader.apply_chat_template(
            questions[start : start + BATCH],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            **options,
        )
        output = model.generate(**batch, do_sample=False, max_new_tokens=48)
        new_ids = output[:, batch["input_ids"].shape[1] :]
        for text in reader.batch_decode(new_ids, skip_special_tokens=True):
            found.append(text.split("</think>")[-1].strip())
    return found


@torch.inference_mode()
def log_probs(folder: str, questions: list[list[dict]], texts: list[str]) -> list[float]:
    """log p(answer | question) of each answer in nats, including the token that ends it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for question, text in zip(questions, texts, strict=True):
        turns = [*question, {"role": "assistant", "content": text}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt")["input_ids"]
        all_log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        of_tokens = all_log_probs.gather(1, ids[0, 1:, None])
        found.append(of_tokens[len(prompt) - 1 :].sum().item())
    return found


@torch.inference_mode()
def scores(folder: str, questions: list[list[dict]], texts: list[str]) -> list[float]:
    """The score of each answer by a reward model."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    found = []
    for start in range(0, len(texts), BATCH):
        pairs = zip(questions[start : start + BATCH], texts[start : start + BATCH], strict=True)
        chats = [[*question, {"role": "assistant", "content": text}] for question, text in pairs]
        batch = tokenizer.apply_chat_template(
            chats, padding=True, return_dict=True, return_tensors="pt"
        )
        found += model(**batch).logits[:, 0].tolist()
    return found


if __name__ == "__main__":
    sys.exit(main())
