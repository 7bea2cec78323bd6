"""
Evaluate a model: answers and scores, and results with their standard errors.

    python recipes/eval.py
    python recipes/eval.py --checkpoint runs/first --dataset math.jsonl --match number
    torchrun --nproc_per_node 2 recipes/eval.py --model DIR --task perplexity --dataset texts.jsonl
    torchrun --nproc_per_node 8 recipes/eval.py --model DIR --task lm_eval --tasks hellaswag,gsm8k

In one process, or with the model sharded over all ranks: batches and results are the same. OUT/items.jsonl
has each answer, OUT/eval.json the results with their standard errors. A run that was stopped goes on with the
same --output_dir. Without --model and --dataset it asks the tiny model what finetune.py teaches.
"""

import gc
import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal, NamedTuple

if __name__ == "__main__":
    gc.disable()  # the imports leave nothing to collect: saves 0.5 s

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # utils/ is beside recipes/

import torch

from utils.data.batches import Batch, collate
from utils.data.examples import Example, Examples, FormName, Rows, load_examples
from utils.data.pairs import sequences
from utils.data.prompts import is_plain, texts_of
from utils.data.questions import choices_of, harness_of, load_questions, scored, windows
from utils.data.rewards import check_columns, parse_rewards, score, without_thoughts
from utils.data.tokens import end_of_turn_ids, load_tokenizer, pad_id
from utils.model.folder import check_vocab, quiet_transformers, read_json, run_facts
from utils.model.loss import add_chunked_loss, settle_chunked_loss
from utils.model.saving import generation_config
from utils.model.sharding import DTYPES, lacks_grouped_kernels, settle_dtype
from utils.plan.generation import estimate_generation, plan_generation
from utils.run.distributed import (
    agree,
    broadcast,
    build_mesh,
    init_distributed,
    stop_distributed,
    together,
)
from utils.run.errors import ConfigError, act, check, differences, others_code, print0
from utils.run.files import disk_errors, replace_file
from utils.run.folder import claim_output, releases_output
from utils.run.settings import convert_settings, from_settings, parse_cli
from utils.run.signals import report_errors, stop_at_once
from utils.train.rollout import Asker, Completion
from utils.train.trained_run import Trained, compute_alone, load_trained, open_trained, shard_model

TINY = HERE / "tiny"
TINY_ROWS = {  # task -> its rows in recipes/tiny
    "exact_match": "heldout.jsonl",
    "perplexity": "heldout.jsonl",
    "pairs": "heldout_pairs.jsonl",
}
SETTINGS_OF = {  # task -> its settings, without those that all tasks have
    "exact_match": "dataset columns format too_long match max_new_tokens",
    "perplexity": "dataset columns stride",
    "choices": "dataset columns format",
    "pairs": "dataset columns format too_long",
    "lm_eval": "tasks include_path num_fewshot apply_chat_template max_new_tokens",
}
# Settings that do not change the answers, or whose contents count, not their names: see facts_of.
NOT_IN_FACTS = "model adapter checkpoint dataset batch_size force output_dir".split()


@dataclass
class Config:
    # What
    # folder or Hugging Face id; empty: the base of --adapter or --checkpoint, else the tiny model
    model: str = ""
    adapter: str = ""  # folder of a LoRA adapter, as peft writes it
    checkpoint: str = ""  # run folder (its newest checkpoint), or one checkpoint of it
    trust_remote_code: bool = False  # run Python code that comes with the model
    # exact_match: greedy answers; perplexity: of texts; choices: the likeliest of several; pairs: is the
    # chosen answer likelier than the rejected one; lm_eval: EleutherAI's harness, pip install lm-eval
    task: Literal["exact_match", "perplexity", "choices", "pairs", "lm_eval"] = "exact_match"
    dataset: str = ""  # file, folder, glob or id; several: a.jsonl,b.csv; empty: the tiny task
    format: FormName = "auto"  # completion: texts do not become chat turns; others: no effect
    columns: str = ""  # our key=your column: prompt=question,answer=solution
    max_rows: int = 0  # read only the first N rows of each source, or lm_eval task; 0: all
    # right answers: exact, number (after ####), regex:PATTERN, FILE.py:FUNCTION; several: a,b
    match: str = "exact"
    tasks: str = ""  # names of lm_eval's tasks: hellaswag,gsm8k
    include_path: str = ""  # folder with more tasks of lm_eval, as .yaml
    num_fewshot: int = -1  # lm_eval: solved examples before each question; -1: the task's default
    apply_chat_template: bool = False  # lm_eval: ask questions as chat turns

    # How much
    max_new_tokens: int = 0  # maximum tokens of an answer; 0: 256, for the tiny task 48
    # maximum tokens of a window, or a row with its answer; 0: the model's positions, at most 2048
    seq_len: int = 0
    stride: int = 0  # perplexity: tokens by which the window moves; 0: half of --seq_len
    too_long: Literal["error", "drop"] = "error"  # what to do with longer rows
    batch_size: int = 32  # sequences per rank and forward

    # How
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # compute; auto: bf16 if the GPU has it
    quantization: Literal["none", "8bit", "4bit"] = "none"  # of frozen linear layers and experts
    force: bool = False  # start even if the plan says that it does not fit

    # Where
    output_dir: str = ""  # folder of the results; empty: the next free one in output/

    def __post_init__(self):
        convert_settings(self, seq_len=0, num_fewshot=-1)
        effective = SETTINGS_OF[self.task].split()
        for name in " ".join(SETTINGS_OF.values()).split():
            fix = "--task lm_eval" if name == "tasks" else "leave it out"
            check(
                name in effective or vars(self)[name] == vars(Config)[name],
                f"--{name} has no effect on --task {self.task} (fix: {fix})",
            )
        if "max_new_tokens" in effective and not self.max_new_tokens:
            self.max_new_tokens = 256 if self.dataset or self.tasks else 48
        check(
            not (self.adapter and self.checkpoint), "--adapter and --checkpoint: give one of them"
        )
        check(
            self.dataset or self.task in (*TINY_ROWS, "lm_eval"),
            f"--task {self.task}: what is asked? (fix: --dataset FILE)",
        )
        check(
            self.tasks or self.task != "lm_eval",
            "--task lm_eval: which ones? (fix: --tasks hellaswag,gsm8k)",
        )
        check(
            self.model or self.adapter or self.checkpoint or (TINY / "config.json").exists(),
            "no --model given (fix: --model FOLDER)",
        )


@releases_output
def main(cfg: Config) -> Path:
    """Evaluate; returns the folder of the answers."""
    quiet_transformers()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed()
    agree(world, asdict(cfg), "flags")

    # --- folder: the model's, and that of the answers ---------------------------------------------
    act("folder")
    dtype = settle_dtype(cfg.dtype, world.device)
    base = cfg.model or ("" if cfg.adapter or cfg.checkpoint else str(TINY))
    trained = open_trained(
        base, cfg.adapter, cfg.checkpoint, dtype, world, cfg.trust_remote_code, cfg.quantization
    )
    model = trained.model
    with together(world):
        tokenizer = load_tokenizer(*trained.tokenizer)
        if trained.kind == "pictures":  # the chat template may be its processor's
            from utils.data.pictures import load_processor

            load_processor(trained.source.folder, tokenizer)
        check_vocab(tokenizer, len(model.get_input_embeddings().weight))
        seq_len = settle_seq_len(cfg, model)
        settings = generation_config(model, trained.source.folder, end_of_turn_ids(tokenizer))
    ends = settings["eos_token_id"] or ()
    out = claim_output(cfg.output_dir, Path(__file__).stem, world)

    # --- data: every row is read, checked and tokenized -------------------------------------------
    act("data")
    with together(world, patient=True):
        rows = from_settings(
            Rows,
            cfg,
            dataset=cfg.dataset or str(TINY / TINY_ROWS.get(cfg.task, "")),
            seq_len=seq_len,
            task="rows",
        )
        task = TASKS[cfg.task](cfg, rows, tokenizer)
        if task.rows:
            print0(f"data      {len(task.groups):,} items{task.rows.remarks()}")
            for line in task.rows.sources():
                print0(f"form      {line}")
    with together(world), disk_errors(out):
        facts = facts_of(cfg, trained, task.data, dtype, seq_len) | {"eos_token_id": ends}
        finished = world.rank == 0 and finished_before(out, facts)
    if broadcast(finished, world):
        print_results(out, read_json(out / "eval.json")["results"])
        return out

    # --- plan: memory; all that fails cheaply has failed after it ---------------------------------
    act("plan")
    with together(world):
        lengths = [len(sequence.ids) for group in task.groups for sequence in group]
        longest = max(lengths, default=seq_len)
        parts = estimate_generation(
            model, world.size, DTYPES[dtype], cfg.batch_size, longest, cfg.max_new_tokens
        )
        plan_generation(parts, world, cfg.force)

    # --- shard: every parameter cut over the ranks ------------------------------------------------
    act("shard")
    if world.size > 1:
        shard_model(model, build_mesh(world), DTYPES[dtype])
    else:
        compute_alone(model, DTYPES[dtype])
    # On Hopper and later, torch prefers cuDNN, which makes a plan for each length: 23 to 37 ms in reports.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if lacks_grouped_kernels(world.device, DTYPES[dtype]):
        from utils.model.attention import repeat_grouped_keys

        repeat_grouped_keys()

    # --- load: the first act that costs memory ----------------------------------------------------
    act("load")
    load_trained(trained, cfg.adapter, world)
    settle_chunked_loss(add_chunked_loss(model), world.device)
    print0(f"compute   {dtype}")
    penalty = settings.get("repetition_penalty") or 1
    if penalty != 1 and cfg.task in ("exact_match", "lm_eval"):
        print0(
            f"greedy    without the model's repetition_penalty {penalty}, which generate.py applies"
        )

    # --- evaluate ---------------------------------------------------------------------------------
    act("evaluate")
    pad = pad_id(tokenizer)

    def batch_of(rows: list[Example]) -> Batch:
        return collate(rows or [scored([pad], 1)], pad, multiple=1)

    file = out / "items.jsonl" if task.groups else None  # lm_eval keeps its own
    asker = Checked(model, world, batch_of, cfg.batch_size, frozenset(ends), pad, file)
    results = task.results(asker)
    with together(world), disk_errors(out):
        if world.rank == 0:
            replace_file(
                out / "eval.json", json.dumps({"results": results, "facts": facts}, indent=2)
            )
    print_results(out, results)
    return out


def print_results(out: Path, results: dict) -> None:
    """Print each result with its standard error, and the path of the file."""
    for name, value in results.items():
        error = results.get(f"{name}_stderr")
        shown = f"{value:.6g}" if error is None else f"{value:.6g} +- {error:.2g}"
        if not name.endswith("_stderr"):
            print0(f"{name:24} {shown}")
    print0(f"finished  {out}/eval.json")


class Checked(Asker):
    """An Asker that refuses a model that computes no numbers: else a choice of NaN would be the first one."""

    def ask(self, groups, answers, judge):
        def checked(i, answer):
            is_text = isinstance(answer, Completion)
            log_probs = answer.log_probs if is_text else [score[0] for score in answer]
            check(
                math.isfinite(sum(log_probs)),
                f"item {i}: the log-probabilities of the model are not finite (fix: --dtype fp32; if they are"
                " not finite then either, its weights are damaged: another --model or --checkpoint)",
            )
            return judge(i, answer)

        return super().ask(groups, answers, checked)


class Task(NamedTuple):
    """The items to evaluate, and how results are computed."""

    data: str  # a fingerprint of the items
    groups: list  # the sequences of each item
    results: Callable[[Asker], dict]
    rows: Examples | None = None  # None: lm_eval has its own


def exact_match(cfg: Config, rows: Rows, tokenizer) -> Task:
    """Greedy answers to questions, compared with the rows' answers."""
    rows = replace(rows, seq_len=rows.seq_len - cfg.max_new_tokens)  # of a prompt
    questions = load_questions(rows, tokenizer)
    rewards = parse_rewards(cfg.match, "--match")
    check_columns(rewards, questions)
    prompts = [scored(question.ids, len(question.ids)) for question in questions]

    def judge(i: int, completion: Completion) -> dict:
        question = questions[i]
        ids = completion.ids
        (text,) = texts_of(tokenizer, [ids])
        answer = without_thoughts(text)
        if not is_plain(question.content, tokenizer, rows):  # code that goes on has its indentation
            text = text.strip()
            answer = answer.strip()
        (scores,) = score(rewards, [question], [answer], [ids])
        return {
            "where": question.where,
            "prompt": question.content,
            "prediction": text,
            "answer": question.columns.get("answer"),
            "tokens": len(ids),
            "scores": scores,
        }

    def results(asker: Asker) -> dict:
        answers = asker.complete(prompts, cfg.max_new_tokens, judge)
        return {
            **means([row["scores"] for row in answers], [reward.name for reward in rewards]),
            "longest_answers": sum(row["tokens"] == cfg.max_new_tokens for row in answers),
        }

    data = with_files(questions.fingerprint, [reward.file for reward in rewards])
    return Task(data, [[prompt] for prompt in prompts], results, questions)


def with_files(data: str, files: Iterable) -> str:
    """The fingerprint `data`, with the content of files. A file may be None."""
    for file in sorted(filter(None, files)):
        data = hashlib.sha256(data.encode() + Path(file).read_bytes()).hexdigest()
    return data


def perplexity(cfg: Config, rows: Rows, tokenizer) -> Task:
    """Perplexity of texts, in windows of --seq_len tokens that overlap by --seq_len minus --stride."""
    documents = load_examples(replace(rows, task="documents"), tokenizer)
    stride = cfg.stride or rows.seq_len // 2
    check(stride < rows.seq_len, f"--stride {stride} is not below --seq_len {rows.seq_len}")
    check(
        not any(origin.weight for origin in documents.origins),
        "--task perplexity scores all documents (fix: --dataset without weights)",
    )
    groups, places = [], []
    for number, length in enumerate(documents.lengths.tolist()):
        ids = documents.ids[documents.bounds[number] :][:length].tolist()
        for begin, first, end in windows(length, rows.seq_len, stride):
            groups.append([scored(ids[begin:end], first - begin)])
            places.append({"where": documents.where[number], "document": number, "begin": begin})

    def judge(i: int, scores: list) -> dict:
        log_prob, tokens, _ = scores[0]  # of its only sequence
        return places[i] | {"tokens": tokens, "nats": -log_prob}

    def results(asker: Asker) -> dict:
        answers = asker.score(groups, judge)
        nats = math.fsum(row["nats"] for row in answers)
        tokens = sum(row["tokens"] for row in answers)
        size_bytes = int(documents.row_sizes.sum())
        mean = nats / tokens
        # The standard error of a ratio of sums. The independent observations are documents, not tokens.
        count = len(documents)
        residuals = [0.0] * count
        for row in answers:
            residuals[row["document"]] += row["nats"] - mean * row["tokens"]
        found = {
            "nats_per_token": mean,
            "perplexity": math.exp(min(mean, 700)),
            "bits_per_byte": nats / math.log(2) / size_bytes,
            "documents": count,
            "tokens": tokens,
            "bytes": size_bytes,
        }
        if count > 1:
            found["nats_per_token_stderr"] = stdev(residuals) * math.sqrt(count) / tokens
        return found

    return Task(documents.fingerprint, groups, results, documents)


def choices(cfg: Config, rows: Rows, tokenizer) -> Task:
    """Multiple choice: the text with the highest log-likelihood after a prompt; acc_norm: per byte."""
    questions = load_questions(rows, tokenizer)
    groups, texts, right = zip(*choices_of(questions, tokenizer, rows), strict=True)
    prompt = questions[0].content
    choice = texts[0][0]
    # The end of a prompt and the begin of a choice that read as one word.
    one_word = r"(?a)[\w.,:;?!]\w"
    if is_plain(prompt, tokenizer, rows) and re.match(one_word, prompt[-1:] + choice):
        print0(
            f"warning: no space between a prompt and its choices: {prompt[-20:] + choice[:20]!r} (fix:"
            ' choices that begin with a space, or prompts that end with "\\n")'
        )

    def judge(i: int, scores: list) -> dict:
        log_probs = [log_prob for log_prob, _, _ in scores]
        per_byte = [
            value / len(text.encode()) for value, text in zip(log_probs, texts[i], strict=True)
        ]
        best = log_probs.index(max(log_probs))
        return {
            "where": questions[i].where,
            "prediction": best,
            "answer": right[i],
            "log_probs": log_probs,
            "acc": float(best == right[i]),
            "acc_norm": float(per_byte.index(max(per_byte)) == right[i]),
        }

    return Task(
        questions.fingerprint,
        groups,
        lambda asker: means(asker.score(groups, judge), ["acc", "acc_norm"]),
        questions,
    )


def pairs(cfg: Config, rows: Rows, tokenizer) -> Task:
    """Whether the chosen answer is more likely than the rejected one: in total, and per token."""
    examples = load_examples(replace(rows, task="pairs"), tokenizer)
    both = sequences(examples)
    groups = [[both[2 * i], both[2 * i + 1]] for i in range(len(examples))]

    def judge(i: int, scores: list) -> dict:
        (chosen, chosen_tokens, _), (rejected, rejected_tokens, _) = scores
        return {
            "where": groups[i][0].where,
            "log_probs": [chosen, rejected],
            "tokens": [chosen_tokens, rejected_tokens],
            "accuracy": float(chosen > rejected),
            "accuracy_by_mean": float(chosen / chosen_tokens > rejected / rejected_tokens),
        }

    return Task(
        examples.fingerprint,
        groups,
        lambda asker: means(asker.score(groups, judge), ["accuracy", "accuracy_by_mean"]),
        examples,
    )


def lm_eval(cfg: Config, rows: Rows, tokenizer) -> Task:
    """Tasks of EleutherAI's harness."""
    try:
        from lm_eval import __version__ as version
        from lm_eval.api.model import TemplateLM
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager, get_task_dict

        manager = TaskManager(include_path=cfg.include_path or None)
    except ImportError as error:
        raise ConfigError(f"--task lm_eval: {error} (fix: pip install lm-eval)") from None
    names = cfg.tasks.replace(" ", "").split(",")
    # What is wrong with the tasks or their data is said here, before the weights are loaded.
    with others_code(f"--tasks {cfg.tasks}", "names of `lm_eval ls tasks`, or --include_path"):
        get_task_dict(names, manager)

    def results(asker: Asker) -> dict:
        harness = harness_of(TemplateLM, tokenizer, asker, rows.seq_len, cfg.max_new_tokens)
        with others_code("lm_eval"):
            found = simple_evaluate(
                model=harness,
                tasks=names,
                num_fewshot=None if cfg.num_fewshot < 0 else cfg.num_fewshot,
                limit=cfg.max_rows or None,
                apply_chat_template=cfg.apply_chat_template,
                task_manager=manager,
                log_samples=False,
                bootstrap_iters=1000,
            )
        figures = {}
        for task, values in found["results"].items() if found else ():  # only rank 0 has results
            for name, value in values.items():
                if isinstance(value, int | float):
                    # METRIC_stderr,FILTER becomes METRIC,FILTER_stderr: print_results looks for the end
                    metric, stderr, filter_name = name.removesuffix(",none").partition("_stderr")
                    figures[f"{task} {metric}{filter_name}{stderr}"] = value
        return figures

    data = f"lm_eval {version}"
    if cfg.include_path:
        for suffix in "py yaml json jsonl txt csv tsv parquet arrow gz".split():
            data = with_files(data, Path(cfg.include_path).rglob(f"*.{suffix}"))
    return Task(data, [], results)


TASKS = {task.__name__: task for task in (exact_match, perplexity, choices, pairs, lm_eval)}


def means(answers: list[dict], names: list[str]) -> dict:
    """The mean, its standard error, and the sum of each value, over the answers that have it."""
    found = {"items": len(answers)}
    for name in names:
        values = [row[name] for row in answers if row[name] is not None]
        if len(values) < len(answers):
            found[f"{name}_items"] = len(values)  # the others have no answer
        if values:
            found[name] = fmean(values)
            found[f"{name}_sum"] = math.fsum(values)
        if len(values) > 1:
            found[f"{name}_stderr"] = stdev(values) / math.sqrt(len(values))
    return found


def settle_seq_len(cfg: Config, model) -> int:
    """--seq_len; by default the model's number of positions, at most 2,048."""
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf
    seq_len = cfg.seq_len or min(2048, positions)
    # lm_eval's tasks have answers of their own lengths.
    answer_tokens = cfg.max_new_tokens if cfg.task == "exact_match" else 0
    check(
        answer_tokens + 2 <= seq_len <= positions,
        f"--seq_len {seq_len} does not fit (fix: more than --max_new_tokens {answer_tokens}, at most the"
        f" model's {positions} positions)",
    )
    return seq_len


def facts_of(cfg: Config, trained: Trained, data: str, dtype: str, seq_len: int) -> dict:
    """What determines the answers, as JSON. Contents of folders and files count, not their names."""
    base = json.dumps(run_facts(trained.source.config, trained.source.weights, ""))
    files = [trained.checkpoint and trained.checkpoint / "manifest.json"]
    if cfg.adapter:
        files += Path(cfg.adapter).glob("adapter_*")
    with others_code(
        f"{trained.checkpoint or cfg.adapter}", "start again, if its run has removed it"
    ):
        model = with_files(hashlib.sha256(base.encode()).hexdigest(), files)
    flags = {name: value for name, value in asdict(cfg).items() if name not in NOT_IN_FACTS}
    return flags | {"dtype": dtype, "seq_len": seq_len, "data": data, "model": model}


def finished_before(out: Path, facts: dict) -> bool:
    """Whether the folder has the results already. If it is new, the facts are written there. ConfigError if
    its answers were made with other facts.
    """
    file = out / "eval.json"
    if not file.exists():
        check(
            not (out / "items.jsonl").exists(),
            f"{out} has an items.jsonl of something else (fix: another --output_dir)",
        )
        replace_file(file, json.dumps({"facts": facts}))
        return False
    earlier = read_json(file)
    changed = differences(earlier.get("facts", {}), facts)
    check(
        not changed, f"{out} has answers to something else: {changed} (fix: another --output_dir)"
    )
    return "results" in earlier


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config))
        stop_distributed()
