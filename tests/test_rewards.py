"""Rewards: what is given to functions and what they may give back; every fault is named.

python -m pytest tests/test_rewards.py
"""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from launch import Forked
from shell import ROOT
from tiny import tiny_tokenizer, without_special_end

from utils.data.encode import Rows
from utils.data.questions import Question, load_questions
from utils.data.rewards import (
    check_columns,
    parse_rewards,
    reward_all,
    reward_means,
    score,
)
from utils.data.tokens import load_tokenizer
from utils.run.distributed import ALONE
from utils.run.errors import ConfigError
from utils.train.rollout import Completion

RULES = """
from dataclasses import dataclass

seen = []
not_a_function = 3


@dataclass
class Rule:
    words: int


def is_short(prompts, completions, **columns):
    seen.append((prompts, completions, columns))
    return [float(len(text) < 5) for text in completions]


def length(completions, completion_ids, **columns):
    return [len(ids) for ids in completion_ids]


def only_some(completions, level, **kwargs):
    return [None if one == "hard" else 2 for one in level]


def needs(solution, **columns):
    return solution


def strict(completions):
    return []


def divides(completions, by, **columns):
    return [1 / number for number in by]


def gives(completions, value, **columns):
    return value


def too_few(completions, **columns):
    return [1.0] * (len(completions) - 1 or 3)


def one_number(completions, **columns):
    return 1.0


async def later(completions, **columns):
    return [1.0]
"""


@pytest.fixture
def rules(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "rules", raising=False)
    path = tmp_path / "rules.py"
    path.write_text(RULES)
    return path


def scores(flag, completions, prompts=None, **columns):
    prompts = prompts or ["p"] * len(completions)
    asked = []
    for i, prompt in enumerate(prompts):
        own = {name: values[i] for name, values in columns.items()}
        asked.append(Question([], prompt, own, f"rows.jsonl:{i + 1}", None))
    ids = [[*text.encode()] for text in completions]
    rewards = parse_rewards(flag)
    rows = score(rewards, asked, completions, ids)
    found = {reward.name: [row[reward.name] for row in rows] for reward in rewards}
    return found, [sum(one.weight * (row[one.name] or 0) for one in rewards) for row in rows]


def asked_of(folder, rows):
    """The questions of a file with these rows."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = Rows(str(folder / "rows.jsonl"), 64, format="completion")
    return load_questions(found, tiny_tokenizer())


def given(flag, completions, **columns):
    """What a single reward gives."""
    ((_, values),) = scores(flag, completions, **columns)[0].items()
    return values


def test_exact_ignores_white_space_around_and_rows_without_an_answer():
    answers = ["cat", "dog", None, 7, 7.0, 7.5]
    said = [" cat\n", "Dog", "x", "7", "7", "7"]
    assert given("exact", said, answer=answers) == [1, 0, None, 1, 1, 0]


def test_thoughts_of_an_answer_are_not_compared():
    answers = ["<think>\nhm, 3\n</think>\n\ncat", "<think>cat</think>dog"]
    assert given("exact", ["cat", "cat"], answer=answers) == [1, 0]
    assert given("regex:</think>(.*)", ["<think></think>cat"] * 2, answer=answers) == [1, 0]


def test_a_number_in_the_thoughts_of_an_answer_is_none(tmp_path):
    """Otherwise a completion without a number would equal it."""
    questions = asked_of(tmp_path, [{"prompt": "q", "answer": "<think>3</think>none"}])
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no number in the answer"):
        check_columns(parse_rewards("number"), questions)


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("It is 1,234.", "so\n#### 1234", 1),
        ("#### 18.0\n#### 18", "#### 18", 1),
        ("#### 3 and then 18", "#### 18", 0),  # the first behind the mark
        ("3 or 18", "#### 18", 1),  # without a mark the last
        ("It is -2", 2, 0),
        ("about .5", "0.50", 1),
        ("ten", "10", 0),
        ("####", "10", 0),
        ("10", 10.0, 1),
        ("$1,000,000", "1000000", 1),
        (r"\boxed{\frac{14}{3}}", "3", 0),  # parts of a formula are no numbers
        (r"\frac23", "3", 0),
        (r"2\sqrt{3}", "3", 0),
        ("x^{3}", "3", 0),
        ("14/3", "3", 0),
        (r"\frac{6}{2} = 6/2 = \boxed{3}", "3", 1),
        ("3 km/h", "3.", 1),
        ("9.1e-19 C", "1.6e-19", 0),
        ("3E8 m/s", "300000000", 1),
        ("x = \N{MINUS SIGN}5", "-5", 1),
        ("x_3", "3", 0),
        ("-$1,200.50", "-1200.5", 1),
        ("pages 10-12", "12", 1),  # a hyphen behind a digit or a word is no sign
        ("on July-15, f(2)-5", "5", 1),
        ("10 - 12 = -2", "-2", 1),
        ("It is _3_ or **3** or __3__", "3", 1),
    ],
)
def test_number_compares_numbers(completion, answer, right):
    assert given("number", [completion], answer=[answer]) == [right]


@pytest.mark.parametrize(
    "answer", [r"\frac{14}{3}", r"3\sqrt{13}", "2^{10}", r"\left(3, \frac{\pi}{2}\right)"]
)
def test_a_formula_as_the_answer_is_refused_where_numbers_are_compared(answer, tmp_path):
    """As in MATH-500 and DeepScaleR: its last number alone would be compared."""
    questions = asked_of(tmp_path, [{"prompt": "q", "answer": answer}])
    with pytest.raises(ConfigError, match="1: no number in the answer .*LaTeX and fractions need"):
        check_columns(parse_rewards("number"), questions)


def test_a_group_of_a_pattern_is_compared_and_a_pattern_without_one_is_searched():
    texts = ["<answer> 3\n</answer>", "<answer>4</answer>", "3"]
    assert given("regex:<answer>(.*)</answer>", texts, answer=["3"] * 3) == [1, 0, 0]
    assert given("regex:<answer>.*</answer>", texts) == [1, 1, 0]
    assert given("regex:^(a)?b", ["b"], answer=["a"]) == [0]


def test_a_solution_as_the_answer_is_searched_for_the_group_too():
    """As the answers of GSM8K and the solutions of MATH: they are no numbers or texts alone."""
    known = ["4 + 5 = <<4+5=9>>9\n#### 9"] * 3
    assert given(r"regex:#### (\S+)", ["so\n#### 9\n\nQ: ...", "#### 4", "9"], answer=known) == [
        1,
        0,
        0,
    ]
    boxed = [r"It is $\boxed{\frac{1}{2}}$."] * 2
    texts = [r"Half: \boxed{\frac{1}{2}}", r"\boxed{\frac{3}{2}}"]
    assert given(r"regex:\\boxed\{(.*)\}", texts, answer=boxed) == [1, 0]
    # a pattern that is only a group would cut answers that are no solutions
    assert given(r"regex:(\d+)", ["12", "12.5"], answer=["12.5"] * 2) == [0, 0]
    assert given(r"regex:(a)?b|c", ["b", "c"], answer=["c"] * 2) == [0, 0]


README = (ROOT / "recipes" / "README.md").read_text()


def test_the_pattern_for_math_in_the_readme_ends_with_its_box():
    pattern = re.search(r"'(regex:\\\\boxed\S+)'", README)[1]
    known = [r"It is $\boxed{\frac{\sqrt{3}}{2}}$, as $x = \sqrt{25}$."]
    for text, right in (
        (r"$\boxed{\frac{\sqrt{3}}{2}}$, as $x^{2} = 25$.", 1),
        (r"\boxed{\frac{\sqrt{3}}{2}} or \boxed{1}", 1),
        (r"\boxed{\frac{\sqrt{5}}{2}}", 0),
        (r"\boxed{\frac{\sqrt{3}}{2}", 0),
    ):
        assert given(pattern, [text], answer=known) == [right], text


def test_the_function_for_rows_of_verl_in_the_readme_compares_whole_answers(tmp_path):
    code = re.search(r"```python\n(import re\n.*?def right\(.*?)```", README, re.S)[1]
    (tmp_path / "verl.py").write_text(code)
    prompt = [[{"role": "user", "content": "?"}]]
    for text, value in (
        ("Answer: 3", 1),
        ("Answer: 34", 0),
        ("Answer: 34\nNo.\n**Answer:** $3$.", 1),
        ("3", 0),
    ):
        columns = {"reward_model": [{"ground_truth": "3"}]}
        assert scores(f"{tmp_path}/verl.py:right", [text], prompt, **columns)[1] == [value], text


def test_patterns_may_have_commas_and_colons_and_weights_are_behind_them():
    flag = r"regex:\d{1,3}:.:0.5,exact:2,regex:a(b):-1e,number:.25,regex:x"
    rewards = parse_rewards(flag)
    assert [(one.name, one.weight) for one in rewards] == [
        ("regex", 0.5),
        ("exact", 2.0),
        ("regex_2", 1.0),
        ("number", 0.25),
        ("regex_4", 1.0),
    ]
    found, sums = scores(r"regex:\d{1,3}:.:-0.5", ["12:a", "12"])
    assert (found["regex"], sums) == ([1, 0], [-0.5, 0])


def test_functions_get_what_trl_gives_them_and_sums_leave_out_none(rules):
    flag = f"{rules}:is_short,{rules}:length:0.1,{rules}:only_some:-2"
    prompts = ["p", [{"role": "user", "content": "q"}]]
    found, sums = scores(flag, ["abc", "abcdef"], prompts, level=["easy", "hard"])
    assert found == {"is_short": [1, 1], "length": [3, 6], "only_some": [2, None]}
    assert sums == pytest.approx([1 + 0.3 - 4, 1 + 0.6])
    from rules import seen

    ((seen_prompts, completions, columns),) = seen
    assert seen_prompts == prompts
    assert completions == ["abc", [{"role": "assistant", "content": "abcdef"}]]
    assert columns == {
        "level": ["easy", "hard"],
        "completion_ids": [[*b"abc"], [*b"abcdef"]],
    }


def test_rewards_may_be_called_reward_and_text(rules):
    rules.write_text(
        "def reward(completions, **columns):\n    return [1, 3]\ndef text(**columns):\n    return [None, 4]\n"
    )
    rewards = parse_rewards(f"{rules}:reward:2,{rules}:text")
    asked = [Question([], "p", {}, "rows.jsonl:1", None)] * 2
    completions = [Completion([5], []), Completion([6], [])]
    found = reward_all(rewards, asked, completions, 2, tiny_tokenizer(), ALONE, None, 1.0)
    assert reward_means(found) == {"reward": 6, "rewards/reward": 2, "rewards/text": 4}
    assert [one["text"] for one in found] == tiny_tokenizer().batch_decode([[5], [6]])
    assert [one["rewards/text"] for one in found] == [None, 4]


def test_a_function_is_called_for_one_prompt_at_a_time_and_with_weight_0_only_logged(rules):
    rules.write_text("def calls(completions, **columns):\n    return [len(completions)] * 2\n")
    rewards = parse_rewards(f"{rules}:calls:0,exact")
    asked = [Question([], name, {"answer": "a"}, "rows.jsonl", None) for name in "ppqq"]
    completions = [Completion([i], []) for i in range(5, 9)]
    found = reward_all(rewards, asked, completions, 2, tiny_tokenizer(), ALONE, None, 1.0)
    assert [one["rewards/calls"] for one in found] == [2] * 4
    assert [one["reward"] for one in found] == [one["rewards/exact"] for one in found]
    assert reward_means(found)["rewards/calls"] == 2


def test_a_function_that_changes_its_lists_changes_neither_completions_nor_other_rewards(rules):
    rules.write_text(
        "def changes(completions, completion_ids, answer, **columns):\n"
        "    completions.clear()\n    answer[:] = ['b', 'b']\n    completion_ids[0].pop()\n"
        "    return [0, 0]\n"
    )
    rewards = parse_rewards(f"{rules}:changes,exact")
    asked = [Question([], "p", {"answer": "a"}, "rows.jsonl:1", None)] * 2
    ids = tiny_tokenizer()(["a", "b"], add_special_tokens=False)["input_ids"]
    completions = [Completion([*one], []) for one in ids]
    found = reward_all(rewards, asked, completions, 2, tiny_tokenizer(), ALONE, None, 1.0)
    assert [one["rewards/exact"] for one in found] == [1, 0]
    assert [completion.ids for completion in completions] == ids


def test_the_token_that_ends_a_turn_is_no_text_even_if_it_is_not_special(tmp_path):
    """A right answer was `cat<|end|>`, and got 0."""
    tiny = ROOT / "recipes/tiny"
    tokenizer = load_tokenizer(without_special_end(tiny / "started", tmp_path / "model"))
    asked = [Question([], "p", {"answer": "cat"}, "rows.jsonl:1", None)]
    ids = tokenizer("cat<|end|>", add_special_tokens=False)["input_ids"]
    (found,) = reward_all(
        parse_rewards("exact"), asked, [Completion(ids, [])], 1, tokenizer, ALONE, None, 1.0
    )
    assert (found["text"], found["reward"]) == ("cat", 1)


def test_a_warning_names_the_row_to_which_no_reward_applies(rules, capsys):
    rules.write_text("def never(completions, **columns):\n    return [None] * len(completions)\n")
    rewards = parse_rewards(f"{rules}:never")
    asked = [Question([], "p", {}, "rows.jsonl:1", None)] * 2
    completions = [Completion([5], []), Completion([6], [])]
    found = reward_all(rewards, asked, completions, 2, tiny_tokenizer(), ALONE, None, 1.0)
    assert [one["reward"] for one in found] == [0, 0]
    said = capsys.readouterr().out
    assert said == "warning: no reward applies to rows.jsonl:1: its completions count as 0\n"


def test_a_function_of_the_name_model_has_a_metric_of_its_own(rules):
    rules.write_text("def model(completions, **columns):\n    return [1.0]\n")
    rewards = parse_rewards(f"{rules}:model")
    asked, completions = [Question([], "p", {}, "rows.jsonl:1", None)], [Completion([5], [])]
    judge = lambda asked, texts: [0.5]  # noqa: E731
    (found,) = reward_all(rewards, asked, completions, 1, tiny_tokenizer(), ALONE, judge, 2.0)
    assert found["rewards/model_0"] == 1
    assert found["rewards/model"] == 0.5
    assert found["reward"] == 2


def test_a_function_that_ends_the_process_is_named(rules):
    rules.write_text("def leave(completions, **columns):\n    raise SystemExit(3)\n")
    rewards, asked = parse_rewards(f"{rules}:leave"), [Question([], "p", {}, "rows.jsonl:1", None)]
    with pytest.raises(ConfigError, match=r"leave: SystemExit.*rows.jsonl:1"):
        score(rewards, asked, ["a"], [[5]])


def test_an_error_of_one_call_for_all_completions_blames_none_of_them(rules):
    rules.write_text(
        "def inner():\n    raise RuntimeError('judge')\n"
        "def batched(completions, **columns):\n"
        "    if len(completions) > 1:\n        inner()\n"
        "    return [0.0]\n"
        "def parts(completions, **columns):\n    return {'a': 1}\n"
    )
    asked = [Question([], "p", {}, "rows.jsonl:1", None)] * 2
    with pytest.raises(ConfigError) as refused:
        score(parse_rewards(f"{rules}:batched"), asked, ["a", "b"], [[5], [6]])
    said = str(refused.value)
    assert f"RuntimeError: judge ({rules}:5); rows.jsonl:1, 2 completions in one call" in said
    assert "none fails alone (fix: catch it in the function and return None;" in said
    with pytest.raises(ConfigError, match="parts: ValueError.*a list is returned"):
        score(parse_rewards(f"{rules}:parts"), asked[:1], ["a"], [[5]])


@pytest.mark.parametrize("checks", [False, True])
def test_a_signal_that_also_ends_what_a_reward_has_started_changes_no_reward(tmp_path, checks):
    """Ctrl-C in a terminal goes to all its processes."""
    (tmp_path / "rules.py").write_text(
        "import subprocess\n"
        "def passes(completions, **columns):\n"
        "    calls.append(1)\n"
        "    print('asks', flush=True)\n"
        "    seconds = '60' if len(calls) == 1 else '0'\n"
        f"    done = subprocess.run(['sleep', seconds], check={checks})\n"
        "    return [float(done.returncode == 0)]\n"
        "calls = []\n"
    )
    (tmp_path / "run.py").write_text(
        f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from utils.data.rewards import parse_rewards, score\n"
        "from utils.data.questions import Question\n"
        "from utils.run import signals\n"
        "signals.stop_at_once()\n"
        "signals.stop_after_step()\n"
        "rewards = parse_rewards(sys.argv[1] + ':passes')\n"
        "asked = [Question([], 'p', {}, 'rows.jsonl:1', None)]\n"
        "print(score(rewards, asked, ['a'], [[5]]), len(sys.modules['rules'].calls))\n"
    )
    with Forked(f"python {tmp_path}/run.py {tmp_path}/rules.py") as run:
        run.until("asks\n")
        time.sleep(0.5)
        os.killpg(run.pids[0], signal.SIGINT)
        assert run.end(50) == 0
        assert run.text.endswith("[{'passes': 1.0}] 2\n")


def test_messages_are_compared_by_their_text():
    prompt = [[{"role": "user", "content": "?"}]]
    for flag in ("exact", "number", "regex:(.*)"):
        assert scores(flag, ["3"], prompt, answer=["3"])[1] == [1]


def test_columns_that_functions_need_are_asked_for_before_anything_runs(rules, tmp_path):
    rewards = parse_rewards(f"exact,{rules}:is_short,{rules}:length")
    answered = asked_of(tmp_path, [{"prompt": "q", "answer": "a"}])
    check_columns(rewards, answered)
    with pytest.raises(ConfigError, match=r"--rewards exact: .*'answer'; the columns are: level"):
        check_columns(rewards, asked_of(tmp_path, [{"prompt": "q", "level": "hard"}]))
    with pytest.raises(ConfigError, match=r"strict: .*unexpected.*\*\*columns as the last"):
        check_columns(parse_rewards(f"{rules}:strict"), answered)
    with pytest.raises(ConfigError, match=r"needs: .*'solution'.* --columns"):
        check_columns(parse_rewards(f"{rules}:needs"), answered)


MISTAKES = {
    "an unknown name": ("exakt", "no function exakt.*regex:PATTERN, FILE.py:FUNCTION"),
    "nothing": ("exact,", "--rewards exact,: rewards are exact"),
    "no function": ("{}", "rewards are exact, number"),
    "no column": ("{}:", "rewards are exact, number"),
    "no pattern": ("regex:", "rewards are exact, number"),
    "a weight of a built-in": ("exact:much", "--rewards exact:much: rewards are exact"),
    "a weight of a function": (
        "{}:length:much",
        "rewards are exact, number, .* its weight",
    ),
    "a missing file": (
        "nowhere.py:length",
        "--rewards nowhere.py:length: FileNotFoundError.*nowhere.py.*fix: a file that Python runs",
    ),
    "a missing function": ("{}:lenght", "rules.py:lenght: no function lenght"),
    "a value": ("{}:not_a_function", "no function not_a_function"),
    "a coroutine": ("{}:later", "or an async one"),
    "a bad pattern": ("regex:(a", "--rewards regex:.a: .*missing \\).*fix: a regular expression"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_flag_that_cannot_work_is_named(name, rules):
    flag, words = MISTAKES[name]
    with pytest.raises(ConfigError, match=words):
        parse_rewards(flag.format(rules))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_where", "ModuleNotFoundError: No module named 'no_where'"),
        ("def", "SyntaxError"),
    ],
)
def test_a_file_that_cannot_be_imported_says_why_in_one_line(text, words, tmp_path):
    path = tmp_path / "broken.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        parse_rewards(f"{path}:f")
    assert len(caught.value.lines) == 1


FAULTS = {
    "raises": ("divides", {"by": [1, 0, 2]}, r"ZeroDivisionError: .* \(.*rules.py:\d+\)"),
    "nan": ("gives", {"value": [1.0, math.nan, 2.0]}, "not finite"),
    "inf": ("gives", {"value": [1.0, math.inf, None]}, "not finite"),
    "text": ("gives", {"value": [1.0, "good", 2.0]}, "could not convert"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_names_the_reward_the_row_and_the_completion(name, rules):
    function, columns, words = FAULTS[name]
    words = rf"--rewards {function}: .*{words}.*; rows.jsonl:2, completion 'two'"
    with pytest.raises(ConfigError, match=words):
        scores(f"{rules}:{function}", ["one", "two", "three"], **columns)


def test_a_function_for_messages_is_told_how_texts_become_messages(rules):
    """As with the functions of GRPO notebooks, and GSM8K with --columns prompt=question."""
    rules.write_text(
        "import re\n"
        "def of_chat(completions, **columns):\n"
        "    return [float(one[0]['content'] == '3') for one in completions]\n"
        "def of_text(completions, **columns):\n"
        "    return [float('3' == re.sub(' ', '', one)) for one in completions]\n"
    )
    remedy = r" \(texts or messages, as prompts; --columns instruction=THEIRS makes messages"
    with pytest.raises(ConfigError, match=r"TypeError: string ind.*completion '3'" + remedy):
        scores(f"{rules}:of_chat", ["3"])
    chat = [[{"role": "user", "content": "1 + 2"}]]
    assert scores(f"{rules}:of_chat", ["3"], chat) == ({"of_chat": [1.0]}, [1.0])
    with pytest.raises(ConfigError, match=r"TypeError: expected str.*'content': '3'}\]" + remedy):
        scores(f"{rules}:of_text", ["3"], chat)


def test_a_wrong_number_of_values_is_a_fault(rules):
    with pytest.raises(
        ConfigError, match="too_few: 1 values for 2 completions of rows.jsonl:1, .*one.*fix"
    ):
        scores(f"{rules}:too_few", ["one", "two"])
    with pytest.raises(ConfigError, match="one_number: TypeError: 'float' object is not iterable"):
        scores(f"{rules}:one_number", ["one", "two"])


def test_a_fault_that_only_all_together_have_is_named_too(rules):
    rules.write_text(
        "def odd(completions, **columns):\n    return [1.0] * (1 + len(completions) // 2)\n"
    )
    with pytest.raises(ConfigError, match="odd: 2 values for 3 completions of rows.jsonl:1"):
        scores(f"{rules}:odd", ["one", "two", "three"])


def test_an_answer_without_a_number_is_a_fault_of_its_row_before_anything_runs(tmp_path):
    rows = [{"prompt": "q", "answer": answer} for answer in ("1", None, "N/A")]
    questions = asked_of(tmp_path, rows)
    check_columns(parse_rewards("exact"), questions)
    with pytest.raises(
        ConfigError, match=r"3: no number in the answer 'N/A'.*LaTeX and fractions need"
    ):
        check_columns(parse_rewards("number"), questions)


def test_an_answer_of_several_texts_is_a_fault_of_its_row_if_it_is_compared(rules, tmp_path):
    """Otherwise each completion is compared with the text of a Python list, and none is right."""
    for answer in (["one", "two 2"], {"text": ["2"]}):
        questions = asked_of(
            tmp_path, [{"prompt": "q", "answer": "a 1"}, {"prompt": "q", "answer": answer}]
        )
        check_columns(parse_rewards(f"regex:a,{rules}:length"), questions)
        for flag in ("exact", "number", "regex:(a)"):
            with pytest.raises(ConfigError, match=r"rows.jsonl:2: answer .* is no text .fix"):
                check_columns(parse_rewards(flag), questions)


def test_a_prompt_that_the_reward_model_cannot_read_is_named(tmp_path):
    def ids_of(question, text):
        raise ValueError(f"{question.content} is not supported")

    questions = asked_of(tmp_path, [{"prompt": "q"}])
    with pytest.raises(ConfigError, match=r"--reward_model: .*rows.jsonl:1: ValueError: q is not"):
        check_columns([], questions, ids_of)


def test_a_file_of_rewards_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_rewards.py").write_text("def one(completions):\n    return 1.0\n")
    (tmp_path / "mine.py").write_text(
        "from neighbour_of_rewards import one\n"
        "def f(completions, **columns):\n    return [one(c) for c in completions]\n"
    )
    assert given(f"{tmp_path}/mine.py:f", ["a", "b"]) == [1, 1]


def test_a_file_of_rewards_may_start_processes_that_import_it(tmp_path):
    (tmp_path / "in_processes.py").write_text(
        "from concurrent.futures import ProcessPoolExecutor\n"
        "from multiprocessing import get_context\n"
        "def one(completion):\n    return len(completion)\n"
        "def f(completions, **columns):\n"
        "    with ProcessPoolExecutor(1, get_context('spawn')) as pool:\n"  # Python 3.14: forkserver
        "        return list(pool.map(one, completions))\n"
    )
    assert given(f"{tmp_path}/in_processes.py:f", ["a", "bc"]) == [1, 2]


def test_a_process_that_a_reward_forks_ends_when_told_to_and_is_no_signal_to_the_run(tmp_path):
    (tmp_path / "forks.py").write_text(
        "import sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from multiprocessing import get_context\n"
        "from utils.run import signals\n"
        "signals.stop_at_once()\n"
        "signals.stop_after_step()\n"
        "with get_context('fork').Pool(1) as pool:\n"  # its end terminates the worker
        "    print(pool.map(len, ['ab']))\n"
        "worker = get_context('fork').Process(target=time.sleep, args=(60,))\n"
        "worker.start()\n"
        "worker.terminate()\n"
        "worker.join()\n"
        "time.sleep(0.3)\n"
        "print(worker.exitcode, signals.received)\n"
    )
    command = [sys.executable, str(tmp_path / "forks.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.stdout == "[2]\n-15 []\n", done.stderr
