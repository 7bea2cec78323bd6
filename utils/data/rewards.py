"""Rewards of completions: functions in the user's own files, and three built-in rewards; and for grpo.py this
rank's micro-batches of completions with their advantages.

--rewards exact,number:0.5,rules.py:is_short:-0.1,'regex:<answer>(.*?)</answer>:2'

Commas separate the rewards. A number at the end of a reward is its weight; the default is 1. A regex cannot
contain a comma that is followed by the name of a reward. Functions have the signature of TRL's reward
functions, https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function: (prompts, completions,
**columns) -> a number for each completion, or None if the reward does not apply. Each parameter is a list.
Prompts and completions are texts, or lists of messages if the row has messages.
"""

import inspect
import math
import re
import sys
import traceback
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ..run.distributed import World, all_gather, together
from ..run.errors import ConfigError, check, others_code, print0, reason_of_others
from ..run.signals import received
from ..run.units import IGNORE
from .batches import Batch, GlobalBatches, collate
from .prompts import texts_of
from .questions import Question, Questions, scored

# --- rewards

FORMS = "rewards are exact, number, regex:PATTERN, FILE.py:FUNCTION, or one with its weight (fix: exact:0.5)"
TYPES = " (texts or messages, as prompts; --columns instruction=THEIRS makes messages; a list is returned)"
SEPARATOR = re.compile(r",(?=exact\b|number\b|regex:|[^,:]+\.py:)")
ONE_REWARD = re.compile(r"(?:regex:(.+?)|(?:(.+\.py):)?(\w+))(?::([+-]?\d*\.?\d+))?", re.S)
# The group is empty if there is no number, and for parts of a formula: the 3 of \frac{14}{3}, \frac23,
# \sqrt{3}, x^3, x_3 and 14/3.
NUMBER = re.compile(
    r"""(?x) ^\D*$
    | (?: []}]\s*{ | \\[dt]?frac\s*\d | (?:\\sqrt|\^|(?<=[^\W_])_)\s*{? | (?<=[\d)}])\s*/\s* )
      -?[\d,]*\.?\d+
    | ( (?:(?<![\w)])-)?(?:\d[\d,]*)?\.?\d+(?:[eE][+-]?\d{1,3}(?!\d))? )"""
)


class Reward(NamedTuple):
    name: str  # such as exact; the metric is rewards/exact
    function: Callable
    weight: float
    flag: str  # the flag that set it, for errors
    file: str | None  # the file of the function, if it is not built in


def parse_rewards(text: str, flag="--rewards") -> list[Reward]:
    """Parse the rewards of a flag. Executes the files that it names. ConfigError names the wrong part."""
    rewards = []
    files = {None: BUILT_IN}
    for part in SEPARATOR.split(text) if text else ():
        setting = f"{flag} {part}"
        match = ONE_REWARD.fullmatch(part.strip())
        check(match, f"{setting}: {FORMS}")
        pattern, file, name, weight = match.groups()
        if pattern:
            name = "regex"
            with others_code(setting, "a regular expression of Python"):
                function = of_pattern(re.compile(pattern, re.S))
        else:
            if file not in files:
                with others_code(setting, "a file that Python runs without an error"):
                    files[file] = run_file(Path(file))
            function = files[file].get(name)
            check(
                callable(function) and not inspect.iscoroutinefunction(function),
                f"{setting}: no function {name}, or an async one (asyncio.run calls it); {FORMS}",
            )
        if name in {"model"} | {reward.name for reward in rewards}:
            name = f"{name}_{len(rewards)}"
        rewards.append(Reward(name, function, float(weight or 1), flag, file))
    return rewards


def run_file(path: Path) -> dict:
    """Execute a user's file. Returns what it defines, by name."""
    # Its own name, if it is free, lets processes that the file starts import it.
    name = f"rewards_{path.stem}" if path.stem in sys.modules else path.stem
    spec = spec_from_file_location(name, path)
    module = module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    sys.path.append(str(path.resolve().parent))  # for its own imports
    spec.loader.exec_module(module)
    return vars(module)


def check_columns(
    rewards: list[Reward], questions: Questions, ids_of: Callable | None = None
) -> None:
    """Raise ConfigError if a function does not accept the columns, or needs a column that does not exist; for
    answers that are lists or objects, if they are compared; for answers without a number, if `number` is a
    reward; and for prompts that the reward model's template refuses. ids_of: see RewardModel.
    """
    if ids_of:
        for question in questions:
            with others_code(f"--reward_model: {question.where}", "other rows, or another model"):
                ids_of(question, "")
    for reward in rewards:
        try:
            inspect.signature(reward.function).bind(
                **dict.fromkeys({"prompts", "completions", "completion_ids"} | questions.names)
            )
        except TypeError as error:
            raise ConfigError(
                f"{reward.flag} {reward.name}: {error}; the columns are: "
                f"{', '.join(sorted(questions.names)) or 'none'} (fix: parameters named as columns, --columns"
                " answer=THEIRS, **columns as the last; trainer_state, log_extra, log_metric are not passed)"
            ) from None
        if getattr(reward.function, "func", None) is not compared:
            continue
        for question in questions:
            answer = question.columns["answer"]
            check(
                not isinstance(answer, list | dict),
                f"{question.where}: answer {answer!r:.60} is no text (fix: {reward.flag} FILE.py:FUNCTION)",
            )
            check(
                answer is None
                or reward.function is not BUILT_IN["number"]
                or number_of(without_thoughts(answer)).is_finite(),
                f"{question.where}: no number in the answer {answer!r:.60}, for {reward.flag} number"
                f" (fix: remove the row; LaTeX and fractions need {reward.flag} FILE.py:FUNCTION)",
            )


def score(rewards: list[Reward], asked: list[Question], texts: list[str], ids: list) -> list:
    """{reward name: value} for each of n completions, given their texts and ids.

    asked: the question of each completion. A completion is passed as messages if its prompt is messages, as
    in TRL. If a function raises, or returns NaN or the wrong number of values, ConfigError names the reward,
    the row and the completion.
    """
    lists = {name: [question.columns[name] for question in asked] for name in asked[0].columns}
    lists["prompts"] = [question.content for question in asked]
    lists["completions"] = [
        text if isinstance(question.content, str) else [{"role": "assistant", "content": text}]
        for question, text in zip(asked, texts, strict=True)
    ]
    lists["completion_ids"] = ids
    where = [question.where for question in asked]
    values = {reward.name: values_of(reward, lists, where) for reward in rewards}
    return [{name: values[name][i] for name in values} for i in range(len(asked))]


def reward_all(
    rewards: list[Reward],
    asked: list[Question],
    completions: list,
    group_size: int,
    tokenizer,
    world: World,
    scores: Callable | None,
    weight: float,
) -> list[dict]:
    """For each completion: `text`, `rewards/NAME` of each reward, and their weighted sum `reward`. Every rank
    gets all of them.

    asked: the question of each completion; the group_size completions of a question are adjacent. Each rank
    scores a share of the questions, with one call per question. scores: (questions, texts) -> scores of a
    reward model, which all ranks compute together. weight: the weight of that score in the sum.
    """
    ids = [completion.ids for completion in completions]
    texts = texts_of(tokenizer, ids)
    values_of_all = {}  # number of a completion -> its values
    with together(world, patient=True):  # functions of the user may take long
        for start in range(0, len(asked), group_size)[world.rank :: world.size]:
            part = slice(start, start + group_size)
            values_of_all |= enumerate(score(rewards, asked[part], texts[part], ids[part]), start)
    for of_rank in all_gather(values_of_all, world):
        values_of_all |= of_rank
    for i, values in values_of_all.items():
        if {*values.values()} == {None} and not scores:
            print0(f"warning: no reward applies to {asked[i].where}: its completions count as 0")
            break
    records = []
    for i, text in enumerate(texts):
        values = values_of_all[i]
        record = {"text": text} | {f"rewards/{name}": value for name, value in values.items()}
        record["reward"] = sum(reward.weight * (values[reward.name] or 0) for reward in rewards)
        records.append(record)
    if scores:
        for record, value in zip(records, scores(asked, texts), strict=True):
            record |= {"rewards/model": value, "reward": record["reward"] + weight * value}
    return records


def reward_means(records: list[dict], prefix="") -> dict:
    """The mean of each reward over the completions to which it applies. records: from reward_all."""
    means = {}
    for name in records[0]:
        values = [record[name] for record in records if record[name] is not None]
        if values and name != "text":
            means[prefix + name] = fmean(values)
    return means


def values_of(reward: Reward, lists: dict, where: list[str]) -> list:
    """The values of one reward for n completions. lists: its arguments, of n values each. ConfigError as from
    score. If a signal comes meanwhile, the function is called again: one to all processes of a terminal also
    ends those that the function has started.
    """
    before = [*received]
    try:
        # a function may change its lists
        values = [v if v is None else float(v) for v in reward.function(**deepcopy(lists))]
        if not all(value is None or math.isfinite(value) for value in values):
            raise ValueError(f"not finite: {values}")
    except (Exception, SystemExit) as error:
        if received == before:
            called = f"completion {lists['completions'][0]!r:.200}"
            if len(where) > 1:
                for i, row in enumerate(where):  # raises for the completion that fails
                    values_of(reward, {name: lists[name][i : i + 1] for name in lists}, [row])
                called = f"{len(where)} completions in one call, of which none fails alone"
            # in the user's function, or here
            frame = traceback.extract_tb(error.__traceback__)[:2][-1]
            raise ConfigError(
                f"{reward.flag} {reward.name}: {reason_of_others(error)} ({frame.filename}:{frame.lineno});"
                f" {where[0]}, {called}{TYPES * isinstance(error, TypeError | ValueError)}"
                " (fix: catch it in the function and return None; the same command goes on)"
            ) from error
    if received != before:
        return values_of(reward, lists, where)
    check(
        len(values) == len(where),
        f"{reward.flag} {reward.name}: {len(values)} values for {len(where)} completions of {where[0]}, of"
        f" which the first is {lists['completions'][0]!r:.200} (fix: return one number, or None, for each)",
    )
    return values


def without_thoughts(answer: object) -> str:
    """An answer as text, from behind its last </think> if it has one. 4.0 is 4: pandas makes floats of whole
    numbers in a column with gaps.
    """
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    return str(answer).rpartition("</think>")[2]


def compared(is_right: Callable, completions: list, answer: list, **columns) -> list:
    """1 if is_right(completion, answer without thoughts), both as texts, else 0; None if the row has no
    answer.
    """
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [
        None if known is None else float(is_right(text, without_thoughts(known)))
        for text, known in zip(texts, answer, strict=True)
    ]


def is_same(text: str, known: str) -> bool:
    """Whether two texts are equal, ignoring white space at both ends."""
    return text.strip() == known.strip()


def number_of(text: str) -> Decimal:
    """The first number after the last ####; without ####, the last number. Commas are ignored. NaN, which
    equals nothing, if it is a part of a formula, or if there is no number.
    """
    _, mark, behind = text.replace("\N{MINUS SIGN}", "-").replace("-$", "-").rpartition("####")
    return Decimal(NUMBER.findall(behind)[0 if mark else -1].replace(",", "") or "nan")


def of_pattern(pattern: re.Pattern) -> Callable:
    """A reward: whether the pattern is found. With a group: whether the first group equals the answer, or
    that of the answer, if this is a solution with words around the group, as in GSM8K and MATH.
    """

    def is_right(text, known):
        match = pattern.search(text.strip())
        if not match or not pattern.groups:
            return bool(match)
        solution = pattern.search(known)
        if solution and solution[0] != solution[1]:
            known = solution[1] or known
        return is_same(match[1] or "", known)

    if pattern.groups:
        return partial(compared, is_right)
    # No answer is needed. The completions in its place are ignored, and none of them is None.
    return lambda completions, **columns: compared(is_right, completions, completions)


BUILT_IN = {
    "exact": partial(compared, is_same),
    # whether both have the same number, as in GSM8K
    "number": partial(compared, lambda text, known: number_of(text) == number_of(known)),
}


# --- completions and their advantages -> micro-batches


class Rollout(NamedTuple):
    """A prompt with one of its completions."""

    prompt: list[int]
    ids: list[int]  # ids of the completion
    log_probs: list[float]  # of each id, under the distribution it was sampled from
    advantage: float
    weight: float  # of each token in the loss
    where: str


@dataclass(frozen=True)
class RolloutBatch(Batch):
    """A micro-batch of B completions, whose tokens are trained. A filler has one row and no trained token."""

    advantages: Tensor | None = None  # (B, 1)
    weights: Tensor | None = None  # (B, 1)
    drawn: Tensor | None = None  # (B, T): log-probabilities of the tokens when they were sampled


class RolloutBatches(GlobalBatches):
    """rows_of(step): the prompts of each step. share(rollouts): micro-batches of their completions."""

    def costs(self, rows: list[Rollout]) -> Tensor:
        """The tokens of each prompt with its completion, (n,)."""
        return torch.tensor([len(r.prompt) + len(r.ids) for r in rows])

    def batch(self, rows: list[Rollout]) -> RolloutBatch:
        return rollout_batch(
            rows or [Rollout([self.pad_id], [], [], 0.0, 0.0, "filler")], self.pad_id, self.multiple
        )

    def share(self, rollouts: list[Rollout]) -> list[RolloutBatch]:
        """This rank's micro-batches of the completions of all ranks. Completions of similar length share a
        micro-batch. Each rank has the same number of micro-batches, at least one; some may be fillers.
        """
        return [self.batch(rows) for rows in self.dealt(rollouts)[self.rank] or [[]]]


def rollout_batch(part: list[Rollout], pad_id: int, multiple: int) -> RolloutBatch:
    """Collate completions to a micro-batch."""
    batch = collate(
        [scored(r.prompt + r.ids, len(r.prompt), r.where) for r in part], pad_id, multiple
    )
    drawn = torch.zeros(batch.ids.shape)
    drawn[batch.labels != IGNORE] = torch.tensor([value for r in part for value in r.log_probs])
    return RolloutBatch(
        **vars(batch),
        advantages=torch.tensor([[rollout.advantage] for rollout in part]),
        weights=torch.tensor([[rollout.weight] for rollout in part]),
        drawn=drawn,
    )
