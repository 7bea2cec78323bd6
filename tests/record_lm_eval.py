"""Record what lm-eval's own model of transformers, HFLM, answers of recipes/tiny, in lm_eval.json.

lm-eval is no dependency of the project. In an environment of its own, with tests/requirements.txt, and after
`pip install --no-deps lm-eval` and what its imports ask for, from the root of the repository:

PYTHONPATH=.:tests OMP_NUM_THREADS=1 python tests/record_lm_eval.py
"""

import datetime
import json
from pathlib import Path

import lm_eval
import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

TINY = Path(__file__).resolve().parent.parent / "recipes" / "tiny"
FILE = Path(__file__).with_name("lm_eval.json")
MAX_LENGTH = 63  # so that some requests are longer
NEW = 12


def asked(kind: str, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]


def main() -> None:
    rows = [json.loads(line) for line in (TINY / "heldout.jsonl").read_text().splitlines()[:12]]
    questions = [row["messages"][0]["content"] for row in rows]
    answers = [row["messages"][1]["content"] for row in rows]
    model = HFLM(
        pretrained=str(TINY), batch_size=4, max_length=MAX_LENGTH, dtype="float32", device="cpu"
    )
    texts = [question.split(".")[0] for question in questions]
    pairs = [(f"{text}.", f" {answer}") for text, answer in zip(texts, answers, strict=True)]
    # a space at the end of the context, more than the model takes, no context, and what it said itself
    pairs += [(f"{texts[0]}. ", "The pen"), (" ".join(questions[:3]), " red"), ("", texts[1])]
    rolling = [questions[0], " ".join(questions[:4]), texts[2]]
    until = [{"until": ["asked", "."], "max_gen_toks": NEW}, {"until": [], "max_gen_toks": 5}]
    prompts = [(f'{questions[i]} "What', until[i % 2]) for i in range(6)]
    generated = model.generate_until(asked("generate_until", prompts))
    pairs += [(prompts[i][0], f" {generated[i]}") for i in (1, 3, 5)]
    encoded = [
        model._encode_pair(*pair)
        if pair[0]
        else ([model.prefix_token_id], model.tok_encode(pair[1], add_special_tokens=False))
        for pair in pairs
    ]
    found = {
        "made": {
            "lm_eval": lm_eval.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "date": str(datetime.date.today()),
        },
        "max_length": MAX_LENGTH,
        "pairs": pairs,
        "encoded": encoded,
        "loglikelihood": model.loglikelihood(asked("loglikelihood", pairs)),
        "rolling": rolling,
        "loglikelihood_rolling": model.loglikelihood_rolling(
            asked("loglikelihood_rolling", [(text,) for text in rolling])
        ),
        "prompts": prompts,
        "generate_until": generated,
    }
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in found.items())
    FILE.write_text("{\n" + lines + "\n}\n")
    print({key: found[key] for key in ("loglikelihood", "loglikelihood_rolling", "generate_until")})


if __name__ == "__main__":
    main()
