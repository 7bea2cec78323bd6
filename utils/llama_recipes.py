"""llama-recipes' flags in our words, so that its users keep their command.

The table, llama_recipes.yaml, is read when a command line holds a flag that the recipe lacks. It covers the
configs for training, fsdp, peft, quantization, wandb and data sets of llama-recipes (now llama-cookbook),
also in their long form: --fsdp_config.pure_bf16.
"""

import re
import typing
from pathlib import Path

import yaml

from .errors import ConfigError, check
from .fields import SWITCH

LLAMA_RECIPES: dict[str, str | dict[str, str]]
LLAMA_RECIPES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def translate(name: str, text: str | None, kinds: dict) -> tuple[dict, dict, str]:
    """(settings, implied, note) for one of their flags, as parse_cli wants them; no note if it is not theirs.

    kinds: our setting -> (type, ...). Raises ConfigError where the recipe cannot do what the flag says.
    """
    flag, short = f"--{name}", re.sub(r"^\w+_(config|dataset)\.", "", name)
    ours = f"--{short}" if short in kinds else LLAMA_RECIPES.get(short, "")
    if isinstance(ours, dict):
        value = (text or "true").rpartition(".")[2].lower()  # also ShardingStrategy.FULL_SHARD
        value = str(SWITCH.get(value, value)).lower()
        flag += "" if text is None else f" {value}"
        check(value in ours, f"{flag} is not possible here: leave it out, or write {' or '.join(ours)}")
        ours, text = ours[value] or "what happens", None
    settings = {key: value or text for key, value in re.findall(r"--(\w+)(?: ([\w.,]+))?", ours)}
    for key, value in settings.items():
        choices = typing.get_args(kinds[key][0]) if key in kinds else ()
        if key not in kinds or (choices and value not in (None, text, *choices)):
            raise ConfigError(f"{flag} needs --{key}, which is not here yet (fix: leave it out)")
    if not ours.startswith(("--", "what")):
        return {}, {}, ours and f"{flag} has no meaning here: {ours}"
    implied = settings if short == "use_peft" else {}
    return ({} if implied else settings), implied, f"{flag} is {ours} here"
