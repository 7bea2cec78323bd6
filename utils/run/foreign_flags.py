"""Flags of llama-recipes work as they are; for a flag of another project the error names ours.

foreign_flags.yaml beside this file has two tables. `llama_recipes` maps each of its names to our flags, to
our flags for each value that works, or to the reason why nothing has to be set. `hints` lists, for each of
our flags, with or without a value, or for a sentence of advice, the names, or name=value, in TRL and
transformers' TrainingArguments, LLaMA-Factory, Axolotl and torchtune; it is used in messages only.
"""

import difflib
import re
from pathlib import Path

import yaml

from .errors import ConfigError, check, print0

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
HINTS = {name: ours for ours, theirs in TABLES["hints"].items() for name in theirs.split()}


def meaning_of(name: str, kinds: dict, text: str) -> str:
    """Which of our settings an unknown name, whose value is `text`, may mean, or advice about it."""
    valued = f"{name}={text}".lower()
    name = valued if valued in HINTS else name
    known = HINTS | {name: name for name in kinds}
    near = difflib.get_close_matches(name.lower(), known, cutoff=0.8)
    ours = known[near[0]] if near else ""
    meaning = f"did you mean --{ours}?"
    flag = ours.partition(" ")[0]
    if flag in kinds:
        return meaning
    if flag in HINTS:  # a sibling has it
        return f"{meaning} {HINTS[flag]}"
    return ours if name in HINTS and "(fix" in ours else "--help lists them all"


def translate(texts: dict[str, str], kinds: dict) -> tuple:
    """Translate flags of llama-recipes to ours; each one prints a line.

    Returns (our flags as typed, settings that those of llama-recipes imply; --config and our own flags
    override these). texts: the typed value of each flag. kinds: our settings. Raises ConfigError with a line
    for each flag that has no translation.
    """
    known = {}
    implied = {}
    problems = []
    own = False  # whether a name is of llama-recipes alone
    for name, text in texts.items():
        short = name.rpartition(".")[2]  # such as train_config.model_name
        if short in kinds:
            known[short] = text
        elif short in TABLES["llama_recipes"]:
            own |= short not in TABLES["shared"]
            try:
                implied |= _ours(f"--{name}", TABLES["llama_recipes"][short], text, kinds)
            except ConfigError as error:
                problems += error.lines
        else:
            problems.append(f"unknown flag --{short}: {meaning_of(short, kinds, text)}")
    check(not problems, problems)
    if {"lora_rank", "param_dtype"} <= implied.keys():
        # pure_bf16 with LoRA: only the frozen base becomes bf16, the adapters stay in fp32.
        implied["dtype"] = implied.pop("param_dtype")
    if own and implied and "lr" in kinds:
        print0(TABLES["llama_recipes_note"])
    return known, implied


def _ours(flag, meaning, text, kinds):
    """Our settings for a flag of llama-recipes; {} if it changes nothing."""
    if isinstance(meaning, dict):
        value = text.lower().rpartition(".")[2]  # such as ShardingStrategy.FULL_SHARD
        check(
            value in meaning,
            f"{flag} {text}: works with {', '.join(meaning)} only (fix: leave it out)",
        )
        meaning = meaning[value]
        flag = f"{flag} {text}"
    settings = dict(re.findall(r"--(\w+) ?((?!--)\S*)", meaning))
    for name in settings:
        check(
            name in kinds,
            f"{flag} needs --{name}: {HINTS.get(name, 'it is no flag of this recipe (fix: leave it out)')}",
        )
    print0(
        f"{flag} is {meaning} here"
        if settings
        else f"{flag} has no meaning here: {meaning or 'it is what happens anyway'}"
    )
    return {name: value or text for name, value in settings.items()}
