"""Flags of llama-recipes work as they are; for a flag of another project the error names ours.

foreign_flags.yaml beside this file has two tables. `llama_recipes` maps each of its names to our flags, to
our flags for each value that works, or to the reason why nothing has to be set. `hints` lists, for each of
our flags, with or without a value, or for a sentence of advice, the names in TRL and transformers'
TrainingArguments, LLaMA-Factory, Axolotl and torchtune; it is used in messages only.
"""

import re
from pathlib import Path

import yaml

from .errors import ConfigError, check, print0

TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
HINTS: dict[str, str] = {}
for ours, theirs in TABLES["hints"].items():
    HINTS |= dict.fromkeys(theirs.split(), ours)


def translate(texts: dict[str, str], kinds: dict) -> tuple[dict[str, str], dict[str, str]]:
    """Translate flags of llama-recipes to ours; each one prints a line.

    Returns (our flags as typed, settings that those of llama-recipes imply; --config and our own flags
    override these). texts: the typed value of each flag. kinds: our settings. A name that is in no table is
    returned unchanged. Raises ConfigError with a line for each flag that has no translation.
    """
    known = {}
    implied = {}
    problems = []
    for name, text in texts.items():
        short = name.rpartition(".")[2]  # such as train_config.model_name
        hint = HINTS.get(short, "")
        if short in kinds:
            known[short] = text
        elif short in TABLES["llama_recipes"]:
            try:
                implied |= _ours(f"--{name}", TABLES["llama_recipes"][short], text, kinds)
            except ConfigError as error:
                problems += error.lines
        elif (ours := hint.partition(" ")[0]) in kinds:
            problems.append(f"--{name} is --{ours} here (fix: write --{hint})")
        elif " " in hint:
            problems.append(f"--{name}: {hint}")
        else:
            known[name] = text
    check(not problems, problems)
    if "lora_rank" in implied and implied.get("param_dtype") == "bf16":
        # pure_bf16 with LoRA: only the frozen base becomes bf16, the adapters stay in fp32.
        del implied["param_dtype"]
        implied["dtype"] = "bf16"
    if "model" in implied:
        print0(TABLES["llama_recipes_note"])
    return known, implied


def _ours(flag: str, meaning: str | dict, text: str, kinds: dict) -> dict[str, str]:
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
    if not settings:
        print0(f"{flag} has no meaning here: {meaning or 'it is what happens anyway'}")
    else:
        print0(f"{flag} is {meaning} here")
    for name in settings:
        check(name in kinds, f"{flag} needs --{name}, which is not here (fix: leave it out)")
    return {name: value or text for name, value in settings.items()}
