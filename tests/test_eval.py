"""What eval.py counts is what transformers counts, and what lm-eval counts, on any number of ranks.

python -m pytest tests/test_eval.py
"""

import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import eval as recipe
import finetune
import pytest
import torch
from datasets import Dataset, DatasetDict
from launch import Forked, forked
from ranks import run_ranks
from shell import QUOTED, ROOT
from test_export import lora_run, make_adapter
from test_parity import write_rows
from tiny import tiny_model_folder, without_special_end
from transformers import AutoModelForCausalLM, AutoTokenizer

from utils.data.batches import collate
from utils.data.questions import harness_of, scored, windows
from utils.data.tokens import load_tokenizer
from utils.model.loss import add_chunked_loss
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError
from utils.train.rollout import Asker

TINY = ROOT / "recipes" / "tiny"
WORDS = "one two three four five six seven eight nine ten eleven twelve".split()
NEW = 10  # tokens of an answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model_folder(tmp_path_factory.mktemp("llama") / "model", vocab_size=271)


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(path: Path) -> str:
    return write(path, [{"text": " ".join(WORDS[: 2 + i] * (1 + i % 4))} for i in range(9)])


def questions(path: Path) -> str:
    rows = [{"prompt": f"What is {a} and {b}?", "answer": b} for a in WORDS[:3] for b in WORDS[3:6]]
    return write(path, rows)


def choices(path: Path) -> str:
    rows = []
    for i, word in enumerate(WORDS[:7]):
        others = [f" {other}" for other in WORDS[i + 1 : i + 4]]
        rows.append({"prompt": f"After {word} comes", "choices": others, "answer": i % 3})
    rows[1]["answer"] = rows[1]["choices"][2]
    return write(path, rows)


def pairs(path: Path) -> str:
    rows = [
        {"prompt": f"Say {word}", "chosen": word, "rejected": f"{word} {word}"}
        for word in WORDS[:7]
    ]
    return write(path, rows)


ROWS = {"perplexity": texts, "exact_match": questions, "choices": choices, "pairs": pairs}
FLAGS = {
    "perplexity": {"seq_len": 32, "stride": 12},
    "exact_match": {"max_new_tokens": NEW},
    "choices": {"format": "completion"},
    "pairs": {},
}


def on_rank(world, flags):
    recipe.main(recipe.Config(**flags))


def evaluated(out: Path, ranks: int = 1, **flags) -> tuple[dict, list[dict]]:
    """(the results, the items) of the recipe in a folder."""
    flags = {"output_dir": str(out), "batch_size": 4, **flags}
    on_rank(None, flags) if ranks == 1 else run_ranks(on_rank, ranks, flags)
    items = [json.loads(line) for line in (out / "items.jsonl").read_text().splitlines()]
    results = json.loads((out / "eval.json").read_text())["results"]
    return results, sorted(items, key=lambda item: item["number"])


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """Each task once, on one process: (flags, results, items, folder)."""
    root = tmp_path_factory.mktemp("alone")
    found = {}
    for task, make in ROWS.items():
        flags = {"model": str(folder), "task": task, "dataset": make(root / f"{task}.jsonl")}
        flags |= FLAGS[task]
        found[task] = (flags, *evaluated(root / task, **flags), root / task)
    return found


@torch.inference_mode()
def log_probs(model, ids: list[int]) -> torch.Tensor:
    """log p of each token but the first, (T - 1,), by full logits."""
    logits = model(torch.tensor([ids])).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def test_half_of_a_surrogate_pair_in_an_answer_is_written_as_it_was_read(folder, tmp_path):
    data = write(tmp_path / "q.jsonl", [{"prompt": "Say red", "answer": "grün \ud83d"}])
    _, items = evaluated(tmp_path / "out", model=str(folder), dataset=data, max_new_tokens=2)
    assert items[0]["answer"] == "grün \ud83d"


def test_windows_score_each_token_once_with_enough_context():
    for tokens in (1, 5, 8, 9, 23, 24, 25):
        for seq_len, stride in ((8, 3), (8, 7), (24, 12)):
            seen = []
            for begin, first, end in windows(tokens, seq_len, stride):
                assert end - begin <= seq_len
                assert begin == 0 or first - begin >= seq_len - stride
                seen += range(first, end)
            assert seen == list(range(1, tokens))


def test_perplexity_is_that_of_a_plain_loop_with_full_logits(alone, folder):
    flags, results, items, _ = alone["perplexity"]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, tokens, size_bytes = 0.0, 0, 0
    for line in Path(flags["dataset"]).read_text().splitlines():
        text = json.loads(line)["text"]
        ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
        size_bytes += len(text.encode())
        known = 1  # tokens that were scored, or come first
        while known < len(ids):
            end = min(len(ids), 32 if known == 1 else known + 12)
            part = ids[max(0, end - 32) : end]
            nats -= log_probs(model, part)[-(end - known) :].sum().item()
            tokens += end - known
            known = end
    assert len(items) > 9  # some texts have several windows
    assert results["tokens"] == tokens
    assert results["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
    assert results["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert results["bits_per_byte"] == pytest.approx(nats / math.log(2) / size_bytes, rel=1e-5)


def test_answers_are_those_of_transformers_and_are_counted(alone, folder, tmp_path):
    flags, results, items, _ = alone["exact_match"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [json.loads(line) for line in Path(flags["dataset"]).read_text().splitlines()]
    for row, item in zip(rows, items, strict=True):
        options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        chat = [{"role": "user", "content": row["prompt"]}]
        ids = tokenizer.apply_chat_template(chat, **options)["input_ids"]
        mask = torch.ones_like(ids)
        stop = {"eos_token_id": [2, 4]}  # 4: <|im_end|>
        output = model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **stop
        )
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
        assert item["prediction"] == text.strip()
    assert results["exact"] == 0.0
    # the same questions with the answers that it gives, but for one
    for row, item in zip(rows[1:], items[1:], strict=True):
        row["answer"] = f"  {item['prediction']}\n"
    file = write(tmp_path / "known.jsonl", rows)
    own = tmp_path / "own.py"  # a score may be called as a row's number is
    own.write_text("def number(completions, **columns):\n    return [1.0 for _ in completions]\n")
    flags = flags | {"dataset": file, "match": f"exact,{own}:number"}
    results, known = evaluated(tmp_path / "known", **flags)
    assert results["number"] == 1.0
    assert [item["number"] for item in known] == list(range(len(rows)))
    n, share = len(rows), (len(rows) - 1) / len(rows)
    assert results["exact_sum"] == n - 1
    assert results["exact"] == pytest.approx(share)
    assert results["exact_stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (n - 1)))


def test_a_text_that_is_continued_keeps_the_indentation_of_its_continuation(folder, tmp_path):
    """As code, in HumanEval. A pattern does not see it, nor does an answer of a chat have it."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(" 7", add_special_tokens=False)["input_ids"]
    with torch.no_grad():  # the likeliest token is always the same, and " " or one that follows it
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.get_output_embeddings().weight[ids[0]] = 1.0
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rules = tmp_path / "rules.py"
    rules.write_text(
        "def text(completion):\n"
        "    return completion if isinstance(completion, str) else completion[0]['content']\n"
        "def indented(completions, **columns):\n"
        "    return [float(text(one).startswith(' ')) for one in completions]\n"
    )
    data = write(tmp_path / "rows.jsonl", [{"prompt": "def add(x, y):\n"}])
    flags = {"model": str(tmp_path / "model"), "dataset": data, "max_new_tokens": 3}
    flags["match"] = f"{rules}:indented,regex:^\\S|^$"
    found = {}
    for form in ("completion", "auto"):
        results, items = evaluated(tmp_path / form, **flags, format=form)
        found[form] = (results["indented"], results["regex"], items[0]["prediction"][:1])
    continued = tokenizer.decode(ids[:1] * 3)
    assert continued.startswith(" ")
    assert found["completion"] == (1.0, 1.0, " ")
    assert found["auto"] == (0.0, 1.0, continued.strip()[:1])


def test_choices_are_scored_as_by_log_softmax(alone, folder):
    flags, results, items, _ = alone["choices"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    right, right_by_byte = 0, 0
    for line, item in zip(Path(flags["dataset"]).read_text().splitlines(), items, strict=True):
        row = json.loads(line)
        before = len(tokenizer(row["prompt"])["input_ids"])
        sums = []
        for choice in row["choices"]:
            ids = tokenizer(row["prompt"] + choice)["input_ids"]
            sums.append(log_probs(model, ids)[before - 1 :].sum().item())
        assert item["log_probs"] == pytest.approx(sums, rel=1e-5)
        answer = row["answer"]
        answer = row["choices"].index(answer) if isinstance(answer, str) else answer
        by_byte = [value / len(c.encode()) for value, c in zip(sums, row["choices"], strict=True)]
        right += sums.index(max(sums)) == answer
        right_by_byte += by_byte.index(max(by_byte)) == answer
    assert (results["acc_sum"], results["acc_norm_sum"]) == (right, right_by_byte)


def test_pairs_are_scored_from_the_prompt_to_the_end_of_the_turn(alone, folder):
    flags, results, items, _ = alone["pairs"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    likelier, by_mean = 0, 0
    for line, item in zip(Path(flags["dataset"]).read_text().splitlines(), items, strict=True):
        row = json.loads(line)
        asked = [{"role": "user", "content": row["prompt"]}]
        options = {"add_generation_prompt": True, "return_dict": True}
        before = len(tokenizer.apply_chat_template(asked, **options)["input_ids"])
        sums, means = [], []
        for key in ("chosen", "rejected"):
            chat = [*asked, {"role": "assistant", "content": row[key]}]
            ids = tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]
            end = len(ids) - ids[::-1].index(4)  # <|im_end|>; the template may go on
            found = log_probs(model, ids[:end])[before - 1 :]
            sums.append(found.sum().item())
            means.append(found.mean().item())
        assert item["log_probs"] == pytest.approx(sums, rel=1e-5)
        likelier += sums[0] > sums[1]
        by_mean += means[0] > means[1]
    assert (results["accuracy_sum"], results["accuracy_by_mean_sum"]) == (likelier, by_mean)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("task", ROWS)
def test_any_number_of_ranks_gives_the_same_file(task, ranks, alone, tmp_path):
    flags, results, items, _ = alone[task]
    found, others = evaluated(tmp_path / "out", ranks, **flags)
    assert found == pytest.approx(results, rel=1e-6)
    counts = [key for key, value in results.items() if float(value).is_integer()]
    assert all(found[key] == results[key] for key in counts)
    for one, other in zip(items, others, strict=True):
        assert one == {
            key: pytest.approx(value, rel=1e-5) if key in ("nats", "log_probs") else value
            for key, value in other.items()
        }


@pytest.mark.parametrize("task", ROWS)
def test_what_is_answered_is_not_asked_again(task, alone, tmp_path):
    """An answer that the model never gave stays, beside those that a kill has cut off."""
    flags, results, items, before = alone[task]
    out = shutil.copytree(before, tmp_path / "out")
    lines = (out / "items.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"where": "kept"}
    cut = lines[2][:20].encode() + "火".encode()[:1]  # within a character
    (out / "items.jsonl").write_bytes(f"{json.dumps(first)}\n{lines[1]}\n".encode() + cut)
    facts = json.loads((out / "eval.json").read_text())
    (out / "eval.json").write_text(json.dumps({"facts": facts["facts"]}))
    again, others = evaluated(out, **flags)
    assert again == results
    kept = items[first["number"]] | {"where": "kept"}
    assert others == [*items[: first["number"]], kept, *items[first["number"] + 1 :]]


def test_a_finished_folder_is_read_and_one_of_other_facts_refused(alone, folder, tmp_path, capsys):
    flags, results, _, before = alone["choices"]
    out = shutil.copytree(before, tmp_path / "out")
    capsys.readouterr()
    assert (
        evaluated(
            out,
            **flags,
        )[0]
        == results
    )
    printed = capsys.readouterr().out
    assert "--- load" not in printed
    assert "acc_norm" in printed
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert evaluated(out, **flags | {"model": str(moved)})[0] == results
    other = tiny_model_folder(tmp_path / "other", vocab_size=271, num_hidden_layers=2)
    rows = Path(flags["dataset"]).read_text().replace("After", "Behind")
    (tmp_path / "other.jsonl").write_text(rows)
    changes = {"model": str(other), "dataset": str(tmp_path / "other.jsonl")}
    named = {"model": "model", "dataset": "data", "max_rows": "max_rows 0 -> 5"}
    for name, value in (changes | {"max_rows": 5}).items():
        with pytest.raises(ConfigError, match=f"something else: .*{named[name]}") as said:
            evaluated(out, **flags | {name: value})
        changed = str(said.value).partition("else: ")[2]
        assert ("model" in changed) == (name == "model")


def test_a_penalty_that_the_models_folder_asks_for_is_said_to_be_left_out(folder, tmp_path, capsys):
    """transformers, and so generate.py, has it in greedy answers too: Qwen2.5's is 1.05."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.05}))
    flags = {"dataset": questions(tmp_path / "rows.jsonl"), "max_new_tokens": NEW}
    said = []
    for name in (folder, model):
        evaluated(tmp_path / f"out{len(said)}", **flags, model=str(name))
        said.append("without the model's repetition_penalty 1.05" in capsys.readouterr().out)
    assert said == [False, True]


def test_tokens_that_end_an_answer_are_part_of_what_the_answers_follow_from(folder, tmp_path):
    model = shutil.copytree(folder, tmp_path / "model")
    flags = {"model": str(model), "dataset": questions(tmp_path / "rows.jsonl")}
    flags["max_new_tokens"] = NEW
    evaluated(tmp_path / "out", **flags)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    with pytest.raises(ConfigError, match="something else: eos_token_id .* 9"):
        evaluated(tmp_path / "out", **flags)


@pytest.mark.parametrize("task", ROWS)
def test_a_model_that_computes_no_numbers_is_refused_and_gets_no_figures(
    task, alone, folder, tmp_path
):
    """A choice of NaN was the first one, an answer empty: both had figures with standard errors."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight[0, 0] = math.nan
    shutil.copytree(folder, tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    flags, *_ = alone[task]
    with pytest.raises(ConfigError, match=r"item \d+: .* not finite \(fix: --dtype fp32"):
        evaluated(tmp_path / "out", **flags | {"model": str(tmp_path / "model")})
    assert "results" not in json.loads((tmp_path / "out" / "eval.json").read_text())
    assert not (tmp_path / "out" / "items.jsonl").exists()


def test_the_token_that_ends_a_turn_is_no_text_even_if_it_is_not_special(tmp_path):
    started = TINY / "started"
    model = without_special_end(started, tmp_path / "model")
    flags = {"dataset": str(TINY / "heldout.jsonl"), "max_rows": 8, "max_new_tokens": 24}
    expected = evaluated(tmp_path / "special", **flags, model=str(started))
    assert evaluated(tmp_path / "out", **flags, model=str(model)) == expected
    assert expected[0]["exact"] > 0


@pytest.mark.slow
def test_killed_in_the_middle_it_goes_on(tmp_path):
    command = (
        "torchrun --nproc_per_node 2 recipes/eval.py --batch_size 4 --max_rows 32 --output_dir"
    )
    whole = forked(f"{command} {tmp_path}/whole")
    assert whole.returncode == 0, whole.stdout
    items = tmp_path / "out" / "items.jsonl"
    with Forked(f"{command} {tmp_path}/out") as run:
        while not (items.exists() and len(items.read_bytes().splitlines()) > 10):
            assert all(process.is_alive() for process in run.processes), run.text
            time.sleep(0.01)
        run.signal(9)
    assert len(items.read_bytes().splitlines()) < 32
    begun = items.read_bytes()
    again = forked(f"{command} {tmp_path}/out")
    assert again.returncode == 0, again.stdout
    assert items.read_bytes().startswith(begun[: begun.rfind(b"\n") + 1])
    for name in ("items.jsonl", "eval.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """A finished LoRA run beside its base."""
    return lora_run(tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_adapter_and_a_checkpoint_give_what_their_folders_give(ranks, lora, tmp_path):
    run = lora
    rows = pairs(tmp_path / "pairs.jsonl")
    flags = {"task": "pairs", "dataset": rows}
    _, by_adapter = evaluated(tmp_path / "1", ranks, **flags, adapter=str(run / "adapter"))
    _, by_run = evaluated(tmp_path / "2", ranks, **flags, checkpoint=str(run))
    _, by_base = evaluated(tmp_path / "3", **flags, model=str(run.parent / "base"))
    assert by_adapter == by_run != by_base


def test_a_checkpoint_that_its_run_removes_while_rows_are_read_is_one_line(
    lora, tmp_path, monkeypatch
):
    run, load = shutil.copytree(lora, tmp_path / "run"), recipe.load_examples

    def load_long(*given):
        shutil.rmtree(run / "checkpoints")
        return load(*given)

    monkeypatch.setattr(recipe, "load_examples", load_long)
    flags = {"task": "pairs", "dataset": pairs(tmp_path / "pairs.jsonl"), "checkpoint": str(run)}
    with pytest.raises(ConfigError, match=r"step_\d+: FileNotFoundError: .*\(fix: start again"):
        evaluated(tmp_path / "out", **flags)


def test_a_run_of_all_weights_gives_what_its_model_gives(folder, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", 4)
    flags = {"model": str(folder), "dataset": str(rows), "output_dir": str(tmp_path / "run")}
    out = finetune.main(finetune.Config(**flags, steps=2, lr=1e-2))
    asked = {"task": "perplexity", "dataset": texts(tmp_path / "texts.jsonl")}
    by_run, _ = evaluated(tmp_path / "1", **asked, checkpoint=str(out))
    by_model, _ = evaluated(tmp_path / "2", **asked, model=str(out / "model"))
    assert by_run == by_model


@pytest.mark.parametrize("rows", ["texts", "turns"])
def test_a_text_is_a_turn_if_the_run_has_trained_turns_however_it_is_opened(rows, folder, tmp_path):
    """Where the tokenizer of the base has no template, one is saved only with a model that has used it."""
    base = shutil.copytree(folder, tmp_path / "base")
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = None
    (base / "chat_template.jinja").unlink(missing_ok=True)
    tokenizer.save_pretrained(base)
    data = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"messages": turns} if rows == "turns" else {"prompt": "a", "completion": "b"}
    data.write_text(json.dumps(row) + "\n")
    flags = {"model": str(base), "dataset": str(data), "output_dir": str(tmp_path / "run")}
    out = finetune.main(finetune.Config(**flags, steps=1, save_every=1))
    asked = {"dataset": questions(tmp_path / "asked.jsonl"), "max_new_tokens": NEW}
    by_run, items = evaluated(tmp_path / "1", **asked, checkpoint=str(out))
    by_model, same = evaluated(tmp_path / "2", **asked, model=str(out / "model"))
    assert (by_run, items) == (by_model, same)
    saved = load_tokenizer(out / "model")
    assert bool(saved.template_name) == (rows == "turns")
    _, plain = evaluated(tmp_path / "3", **asked, model=str(out / "model"), format="completion")
    assert (plain == same) == (rows == "texts")


def test_prompts_whose_tools_the_template_leaves_out_are_counted_and_named(
    folder, tmp_path, capsys
):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    row = {"tools": [tool], "answer": "b", "choices": ["a", "b"]}
    prompts = ["Add.", "Add 1."]
    rows = write(tmp_path / "tools.jsonl", [row | {"prompt": prompt} for prompt in prompts])
    for task in ("exact_match", "choices"):
        flags = {"max_new_tokens": 2} if task == "exact_match" else {}
        out = str(tmp_path / task)
        recipe.main(
            recipe.Config(model=str(folder), task=task, dataset=rows, output_dir=out, **flags)
        )
        said = capsys.readouterr().out
        assert re.search(r"2 items, 2 rows with tools, which .* does not write \(the first: ", said)


def test_an_adapter_is_part_of_what_the_answers_follow_from(folder, tmp_path):
    flags = {"model": str(folder), "task": "pairs", "dataset": pairs(tmp_path / "pairs.jsonl")}
    first = make_adapter(folder, tmp_path / "first")
    evaluated(tmp_path / "out", **flags, adapter=str(first))
    second = make_adapter(folder, tmp_path / "second", r=2)
    with pytest.raises(ConfigError, match="something else: model"):
        evaluated(tmp_path / "out", **flags, adapter=str(second))


def test_what_judges_is_part_of_what_the_answers_follow_from(folder, tmp_path):
    judge = tmp_path / "judge.py"
    judge.write_text("def right(completions, **columns):\n    return [1.0] * len(completions)\n")
    flags = {"model": str(folder), "dataset": questions(tmp_path / "rows.jsonl")}
    flags |= {"match": f"exact,{judge}:right:2", "max_new_tokens": NEW}
    results, _ = evaluated(tmp_path / "out", **flags)
    assert results["right"] == 1
    judge.write_text(judge.read_text().replace("1.0", "0.5"))
    with pytest.raises(ConfigError, match="something else: data"):
        evaluated(tmp_path / "out", **flags)


# --- lm-eval: tests/record_lm_eval.py has asked its own model of transformers


@pytest.fixture(scope="module")
def recorded():
    return json.loads((ROOT / "tests" / "lm_eval.json").read_text())


def asker_of(world):
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)

    def batch_of(rows: list):
        return collate(rows or [scored([0], 1)], 0, 1)

    return Asker(add_chunked_loss(model).eval(), world, batch_of, 4, frozenset({2}), 0, None)


def harness(recorded, world=ALONE):
    """Our model for lm-eval, without its base class, which only encodes requests."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    return harness_of(object, tokenizer, asker_of(world), recorded["max_length"] + 1, 256)


def requests(arguments: list) -> list:
    return [SimpleNamespace(args=given) for given in arguments]


def answers_of(recorded, ours) -> tuple[list, list, list]:
    encoded = [(None, *ids) for ids in recorded["encoded"]]
    likelihoods = ours._loglikelihood_tokens(encoded)
    rolling = ours.loglikelihood_rolling(requests([(text,) for text in recorded["rolling"]]))
    return likelihoods, rolling, ours.generate_until(requests(recorded["prompts"]))


def test_lm_eval_gets_what_its_own_model_of_transformers_gives(recorded):
    likelihoods, rolling, generated = answers_of(recorded, harness(recorded))
    expected = recorded["loglikelihood"]
    assert {greedy for _, greedy in expected} == {True, False}
    for (ours, our_greedy), (theirs, greedy) in zip(likelihoods, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)
        assert our_greedy == greedy
    assert rolling == pytest.approx(recorded["loglikelihood_rolling"], rel=1e-5)
    assert generated == recorded["generate_until"]


def on_ranks(world, recorded):
    from utils.run.distributed import init_distributed

    return answers_of(recorded, harness(recorded, init_distributed()))


def test_every_rank_gets_all_answers_of_lm_eval(recorded):
    first, second = run_ranks(on_ranks, 2, recorded)
    assert first == second == answers_of(recorded, harness(recorded))


def judge_long(world):
    from utils.run.distributed import init_distributed, set_timeout

    world = init_distributed()
    asker = asker_of(world)
    set_timeout(2)

    def judge(i: int, _: list) -> dict:
        time.sleep(4 * (i == 7))  # on the second rank
        return {}

    return len(asker.score([[scored([5, 6], 1)]] * 8, judge))


@pytest.mark.slow
def test_ranks_wait_for_one_that_judges_longer_than_they_wait_in_a_step():
    assert run_ranks(judge_long, 2) == [8, 8]


@pytest.fixture
def small_lm_eval(tmp_path, monkeypatch):
    """lm_eval is not installed: a package that gives a task's file as its result stands in for it."""
    for name, text in {
        "__init__": "__version__ = '0'",
        "api/__init__": "",
        "api/model": "class TemplateLM: pass",
        "tasks": "class TaskManager:\n    def __init__(self, include_path):\n"
        "        self.path = include_path\n"
        "def get_task_dict(names, manager):\n    return {name: {'mine': 0}[name] for name in names}",
        "evaluator": "def simple_evaluate(task_manager, **_):\n"
        "    found = float(open(task_manager.path + '/mine.yaml').read())\n"
        "    return {'results': {'mine': {'acc,none': found, 'acc_stderr,none': 0.1,\n"
        "        'exact_match,strict': 0.5, 'exact_match_stderr,strict': 0.2}}}",
    }.items():
        file = tmp_path / "site" / "lm_eval" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "lm_eval"]:
        del sys.modules[name]


def test_the_tasks_in_a_folder_are_part_of_what_the_answers_follow_from(
    folder, tmp_path, small_lm_eval, capsys
):
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "mine.yaml").write_text("0.25")
    flags = {"model": str(folder), "task": "lm_eval", "tasks": "mine", "include_path": str(tasks)}
    flags["output_dir"] = str(tmp_path / "out")
    for _ in range(2):
        recipe.main(recipe.Config(**flags))
        results = json.loads((tmp_path / "out" / "eval.json").read_text())["results"]
        assert results["mine acc"] == 0.25
        said = capsys.readouterr().out
        assert re.search(r"mine acc +0.25 \+- 0.1\nmine exact_match,strict +0.5 \+- 0.2\n", said)
    files = "rows.jsonl rows.json rows.txt rows.tsv rows.arrow rows.json.gz mine.yaml".split()
    for file in map(tasks.joinpath, files):
        file.write_text("0.75")
        with pytest.raises(ConfigError, match="something else: data"):
            recipe.main(recipe.Config(**flags))
        file.unlink()


def test_a_task_of_lm_eval_limits_its_answers_by_any_of_the_names(recorded):
    context, ours = recorded["prompts"][0][0], harness(recorded)
    limits = "max_gen_toks max_new_tokens max_tokens max_completion_tokens".split()
    asked = [(context, {"do_sample": False, limit: 2}) for limit in limits]
    asked.append((context, asked[0][1] | {"max_tokens": 1}))  # the first name counts
    answers = ours.generate_until(requests(asked))
    assert len(set(answers)) == 1
    assert len(ours.tok_encode(answers[0], add_special_tokens=False)) == 2


def test_a_task_of_lm_eval_that_draws_its_answers_is_refused(recorded):
    """lm-eval draws where do_sample is not set and the temperature is not 0."""
    ours = harness(recorded)
    for options in ({"do_sample": True, "temperature": 0.8}, {"temperature": 0.8}):
        with pytest.raises(ConfigError, match="answers are greedy"):
            ours.generate_until(requests([("a", options)]))
    for options in ({"do_sample": False, "temperature": 0.8}, {"temperature": 0.0}):
        assert ours.generate_until(requests([("a", options | {"max_gen_toks": 2})]))


def test_tasks_that_lm_eval_cannot_load_are_refused_before_the_weights_are_read(
    folder, tmp_path, small_lm_eval, capsys
):
    flags = {"model": str(folder), "task": "lm_eval", "tasks": "mine, yours"}
    with pytest.raises(ConfigError, match="--tasks mine, yours: KeyError: 'yours' .fix: "):
        evaluated(tmp_path / "out", **flags)
    assert "--- load" not in capsys.readouterr().out


# --- errors


MISTAKES = {
    "a stride without windows": ({"stride": 5}, "--stride has no effect on --task exact_match"),
    "a match of pairs": ({"task": "pairs", "match": "number"}, "--match has no effect"),
    "choices of what": ({"task": "choices"}, "--task choices: what is asked"),
    "lm_eval of what": ({"task": "lm_eval"}, "--tasks hellaswag"),
    "two on top": ({"adapter": "a", "checkpoint": "c"}, "give one of them"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_flags_that_cannot_work_are_refused_at_once(name):
    flags, words = MISTAKES[name]
    with pytest.raises(ConfigError, match=words):
        recipe.Config(**flags)


def test_columns_of_public_benchmarks_are_renamed(folder, tmp_path):
    """A row of HellaSwag: its label is the index as a text."""
    row = {"ctx": "He waxes", "endings": ["the car", "a dog", "it"], "label": "2"}
    results, items = evaluated(
        tmp_path / "out",
        model=str(folder),
        task="choices",
        dataset=write(tmp_path / "rows.jsonl", [row]),
        columns="prompt=ctx,choices=endings,answer=label",
    )
    assert (items[0]["answer"], len(items[0]["log_probs"])) == (2, 3)


def test_the_split_and_the_form_of_what_is_asked_are_said(folder, tmp_path, capsys):
    """A data set of several splits is read from "train" unless the split is named."""
    splits = {
        "train": [{"prompt": "1 + 1", "answer": "2"}],
        "test": [{"prompt": "b", "answer": "3"}],
    }
    data = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    data.save_to_disk(tmp_path / "data")
    flags = {"model": str(folder), "max_new_tokens": 2}
    name = str(tmp_path / "data")
    evaluated(tmp_path / "train", **flags, dataset=name)
    said = capsys.readouterr().out
    assert f"split     {name}:train, of train, test\n" in said
    assert f"form      {name}: prompts in the chat template (1 rows)\n" in said
    evaluated(tmp_path / "test", **flags, dataset=f"{name}:test", format="completion")
    said = capsys.readouterr().out
    assert f"split     {name}:test, of " in said
    assert f"form      {name}:test: plain text (1 rows)\n" in said


@pytest.mark.parametrize(
    ("prompt", "choice", "joined"),
    [
        ("He sits on a roof. he", "is using wrap", "f. heis u"),
        ("What is cold?", "The spoon", "cold?The spoon"),
        ("What is cold?", " The spoon", ""),
        ("Question: ...\n", "The spoon", ""),
        ("Answer: (", "A)", ""),
        ("答案：", "A", ""),
    ],
)
def test_words_of_a_prompt_and_a_choice_that_run_together_are_a_warning(
    prompt, choice, joined, folder, tmp_path, capsys
):
    """The choices of HellaSwag and ARC begin without a space, and are appended unchanged."""
    row = {"prompt": prompt, "choices": [choice, choice + "!"], "answer": 0}
    flags = {"model": str(folder), "dataset": write(tmp_path / "rows.jsonl", [row])}
    flags |= {"task": "choices", "format": "completion", "max_rows": 1}
    evaluated(tmp_path / "plain", **flags)
    said = capsys.readouterr().out
    assert ("warning: no space between a prompt" in said) == bool(joined)
    assert joined in said
    evaluated(tmp_path / "chat", **flags | {"format": "auto"})
    assert "warning: no space" not in capsys.readouterr().out


def test_a_copy_without_the_tiny_model_asks_for_one(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "TINY", tmp_path)
    with pytest.raises(ConfigError, match=r"no --model given \(fix: --model FOLDER\)"):
        recipe.Config(dataset="rows.jsonl")


BAD = {
    "no choices": ({"prompt": "a", "answer": 0}, r"rows.jsonl:1: choices: expected a list"),
    "numbers": (
        {"prompt": "a", "choices": [2, 3], "answer": 2},
        "1: choices: expected a list of two",
    ),
    "no such choice": ({"prompt": "a", "choices": ["b", "c"], "answer": "d"}, "'d' names 0 of"),
    "a number too far": (
        {"prompt": "a", "choices": ["b", "c"], "answer": 2},
        "2 names 0 of the choices",
    ),
    "a choice in each column": (
        {"prompt": "a", "sol1": "b", "sol2": "c", "answer": 0},
        "in columns of their own, such as sol1",
    ),
    "too long": (
        {"prompt": "a", "choices": ["b", "c " * 300], "answer": 0},
        "--seq_len is 256 .fix: a larger",
    ),
    "a prompt too long": (
        {"prompt": "a" * 300, "choices": ["b", "c"], "answer": 0},
        "fix: --too_long drop or --seq_len",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_rows_that_are_wrong_are_named(name, folder, tmp_path):
    row, words = BAD[name]
    file = write(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ConfigError, match=words):
        evaluated(tmp_path / "out", model=str(folder), task="choices", dataset=file)


def test_windows_and_answers_must_fit(folder, tmp_path):
    flags = {"model": str(folder), "dataset": texts(tmp_path / "texts.jsonl")}
    for task, given, words in (
        ("perplexity", {"seq_len": 300}, "at most the model's 256 positions"),
        ("perplexity", {"seq_len": 16, "stride": 16}, "--stride 16 is not below"),
        ("exact_match", {"seq_len": 100, "max_new_tokens": 99}, "more than --max_new_tokens 99"),
    ):
        with pytest.raises(ConfigError, match=words):
            evaluated(tmp_path / "out", **flags, task=task, **given)


def test_items_without_an_answer_are_told_from_those_that_are_judged(folder, tmp_path):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "b"}, {"prompt": "c", "answer": "2"}]
    file = write(tmp_path / "rows.jsonl", rows)
    flags = {"model": str(folder), "dataset": file, "match": "exact,number", "max_new_tokens": 2}
    results, _ = evaluated(tmp_path / "out", task="exact_match", **flags)
    assert (results["items"], results["exact_items"], results["number_items"]) == (3, 2, 2)


def test_weights_of_sources_have_no_place_where_all_texts_are_scored(folder, tmp_path):
    file = write(tmp_path / "texts.jsonl", [{"text": "a b c"}])
    with pytest.raises(ConfigError, match="--task perplexity scores all documents .fix: "):
        evaluated(
            tmp_path / "out",
            model=str(folder),
            task="perplexity",
            dataset=f"{file}:0.5,{file}:0.5",
        )


def test_one_item_has_a_figure_without_an_error(folder, tmp_path):
    file = write(tmp_path / "rows.jsonl", [{"prompt": "a", "choices": ["b", "c"], "answer": 1}])
    results, _ = evaluated(tmp_path / "out", model=str(folder), task="choices", dataset=file)
    assert results["acc"] in (0.0, 1.0)
    assert "acc_stderr" not in results
    file = write(tmp_path / "texts.jsonl", [{"text": "a b c " * 100}])  # one text, several windows
    results, items = evaluated(
        tmp_path / "text", model=str(folder), task="perplexity", dataset=file, seq_len=32
    )
    assert len(items) > 1
    assert "nats_per_token_stderr" not in results


def test_lm_eval_that_is_not_installed_is_one_line(folder, tmp_path):
    flags = {"model": str(folder), "task": "lm_eval", "tasks": "x"}
    with pytest.raises(ConfigError, match="--task lm_eval: .*fix: pip install lm-eval"):
        evaluated(tmp_path / "out", **flags)


@pytest.mark.slow
def test_the_bare_command_asks_the_tiny_model_what_it_cannot_do(tmp_path):
    done = forked(f"python {QUOTED}/recipes/eval.py", tmp_path, apart=True)
    assert done.returncode == 0, done.stderr
    assert "exact                    0 +- 0" in done.stdout
    assert len((tmp_path / "output/eval-001/items.jsonl").read_text().splitlines()) == 300
