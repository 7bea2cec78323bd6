"""Flags of other projects in our words, so that their users keep their commands and their files.

One table for each project, NAME.yaml beside this file, is read when a command line or a --config file holds a
name that the recipe lacks:

    title: what messages call the project
    inherits: another table, for the names that this one lacks
    defaults: {lr: 1e-4}             what the project itself would train with, in our words
    also: text                       and what no flag of ours says
    names:
      learning_rate: --lr            the same setting: its value is taken over, and a line says so
      bf16: {true: --dtype bf16}     our flags for a value; an empty text is what happens anyway
      optim: {else: "refused: why"}  what every other value is; without `else` it is refused
      use_peft: "unless set: --r 8"  settings that any other flag or file overrides
      deepspeed: "refused: why"      it would change the run, and cannot be done: an error
      run_name: text                 it changes nothing here, and why: a line says so, and the run goes on
    ours_too:                        names that are ours as well, but mean this in a file of the project

A key of a mapping has the name outer.inner; a name may end in * for all that begin so.
"""

import re
import typing
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import yaml

from .errors import ConfigError, check
from .fields import SWITCH, shown

SETTING = re.compile(r"--(\w+)(?: (?!--)([\w.,-]+))?")  # "--warmup -1", "--packing"
UNLESS_SET = "unless set: "
REFUSED = "refused: "
# The first of several that know equally many names is meant.
PROJECTS = ("llama_recipes", "trl", "llama_factory", "axolotl", "torchtune")


@dataclass(frozen=True)
class Project:
    """One table, with the names that it inherits."""

    title: str
    names: dict[str, str | dict]
    defaults: dict[str, object] = field(default_factory=dict)
    also: str = ""
    ours_too: dict[str, str | dict] = field(default_factory=dict)

    def meaning(self, name: str) -> str | dict | None:
        """What the table says of a name; None where it says nothing."""
        found = _find(self.names, name)
        if found is None:
            found = _find(self.names, _short(name))
        return found


@cache
def project(name: str) -> Project:
    """The table of one project."""
    text = Path(__file__).with_name(f"{name}.yaml").read_text("utf-8")
    content = yaml.safe_load(text)
    parent = content.pop("inherits", None)
    if parent:
        content["names"] = project(parent).names | content["names"]
    return Project(**content)


def _projects() -> list[Project]:
    return [project(name) for name in PROJECTS]


def find_project(names: list[str]) -> Project:
    """The project that knows most of these names."""

    def known(theirs: Project) -> int:
        return sum(_has(theirs, name) for name in names)

    return max(_projects(), key=known)


def _has(theirs: Project, name: str) -> bool:
    return theirs.meaning(name) is not None or means_other(theirs, name)


def renamed() -> dict[str, str]:
    """Each name of another project that is one setting of ours, for most of its values at least."""
    found = {}
    for theirs in reversed(_projects()):
        for name, meaning in theirs.names.items():
            ours = meaning
            if isinstance(meaning, dict):
                ours = meaning.get("else", "")
            if re.fullmatch(r"--\w+", ours):
                found[name] = ours.removeprefix("--")
    return found


def known_names() -> set[str]:
    """Every name that some table has."""
    return {name for theirs in _projects() for name in theirs.names}


def means_other(theirs: Project, name: str) -> bool:
    """Whether a file of the project means by this name, which is ours too, something else."""
    return _find(theirs.ours_too, name) is not None


def knows(theirs: Project | None, name: str) -> bool:
    """Whether some table has a name. Of names that are ours too only those of `theirs` count, or all where
    that is None.
    """
    if any(table.meaning(name) is not None for table in _projects()):
        return True
    tables = _projects() if theirs is None else [theirs]
    return any(means_other(table, name) for table in tables)


def has_inside(name: str) -> bool:
    """Whether some table has names inside this one: name.inner."""
    for theirs in _projects():
        for known in (*theirs.names, *theirs.ours_too):
            if known.startswith(f"{name}."):
                return True
    return False


def translate(
    theirs: Project,
    flag: str,
    name: str,
    text: str | None,
    kinds: dict,
    in_file: bool = False,
) -> tuple[dict, dict, str]:
    """(settings, implied, note) for a flag of another project, or for a key of a file of `theirs`; no note if
    no table has it.

    settings: texts of ours by name, None for a flag that stands alone; implied: more of them, which hold
    unless they are set elsewhere; note: the line for the user. flag: how it is written, for messages.
    kinds: our setting -> (type, ...). Raises ConfigError where the recipe cannot do what the flag says.
    """
    meaning = _meaning(theirs, name, kinds, in_file)
    if meaning is None:
        return {}, {}, ""
    if isinstance(meaning, dict):
        value = _plain(text or "true")
        if text is not None:
            flag = f"{flag} {shown(value)}"
        found = _chosen(meaning, value)
        choices = " or ".join(str(key).lower() for key in meaning)
        check(found is not None, f"{flag} is not possible here: leave it out, or write {choices}")
        takes_value = meaning.get("else") is found and found.startswith("--")
        meaning = found or "what happens"
        text = text if takes_value else None
    if meaning.startswith(REFUSED):
        raise ConfigError(f"{flag}: {meaning.removeprefix(REFUSED)}")
    ours = meaning.removeprefix(UNLESS_SET)
    if not ours.startswith(("--", "what")):
        return {}, {}, f"{flag} has no meaning here: {ours}"
    settings = {}
    for key, value in SETTING.findall(ours):
        settings[key] = _value_for(key, value or text, text, flag, kinds)
    if meaning.startswith(UNLESS_SET):
        return {}, settings, f"{flag} is {ours} here, for those that are not set"
    return settings, {}, f"{flag} is {ours} here"


def _meaning(theirs: Project, name: str, kinds: dict, in_file: bool) -> str | dict | None:
    """What the first table that has a name says of it: `theirs`, then the others."""
    if in_file and means_other(theirs, name):
        return _find(theirs.ours_too, name)
    for table in (theirs, *_projects()):
        meaning = table.meaning(name)
        if meaning is not None:
            return meaning
    short = _short(name)
    return f"--{short}" if short in kinds else None


def _value_for(key: str, value: str | None, text: str | None, flag: str, kinds: dict) -> str | None:
    """The text for our setting `key`. ConfigError where the recipe lacks the setting, or a choice of it."""
    kind = kinds[key][0] if key in kinds else None
    choices = typing.get_args(kind)
    lacks_choice = choices and value not in (None, text, *choices)
    if kind is None or lacks_choice:
        raise ConfigError(f"{flag} needs --{key}, which is not here yet (fix: leave it out)")
    if kind is int and value and re.fullmatch(r"[+-]?\d+\.0+", value):
        return value.partition(".")[0]  # num_train_epochs: 3.0
    return value


def defaults_note(theirs: Project, given: set[str], fields: dict[str, object]) -> str:
    """One line: what the project itself would train with in place of our defaults, and how to write that; ""
    where all that differs was given. fields: our defaults by name.
    """
    their_values, our_values, flags = [], [], []
    for name, default in theirs.defaults.items():
        if name in given or name not in fields:
            continue
        their_value = str(default).lower()
        our_value = str(fields[name]).lower()
        if _chosen({our_value: "same"}, their_value):
            continue
        their_values.append(f"{name} {their_value}")
        our_values.append(f"{name} {our_value}")
        flags.append(f"--{name} {their_value}")
    if not flags:
        return ""
    if theirs.also:
        their_values.append(theirs.also)
    would = f"{theirs.title} itself would take {', '.join(their_values)}"
    return f"{would}; here it is {', '.join(our_values)} (to match: {' '.join(flags)})"


def _find(names: dict, name: str) -> str | dict | None:
    if name in names:
        return names[name]
    patterns = [pattern for pattern in names if pattern.endswith("*")]
    found = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
    return names[max(found, key=len)] if found else None


def _short(name: str) -> str:
    """llama-recipes' long form, --fsdp_config.pure_bf16, without its config; FSDP's names without fsdp_."""
    if "fsdp_config.fsdp_" in name:
        return name.replace("fsdp_config.fsdp_", "fsdp_config.")
    return re.sub(r"^\w+_(config|dataset)\.", "", name)


def _plain(text: str) -> str:
    """A value as tables write it: ShardingStrategy.FULL_SHARD is full_shard, "a,b" is "a b"."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text):
        text = text.rpartition(".")[2]
    text = " ".join(text.lower().replace(",", " ").split())
    return str(SWITCH[text]).lower() if text in ("yes", "on", "off") else text


def _chosen(meanings: dict, value: str) -> str | None:
    """The meaning of a value: as a text, a number or a switch, in this order; else that of "else"."""
    by_text = {str(key).lower(): meaning for key, meaning in meanings.items()}
    number = _number(value)
    for key, meaning in by_text.items():
        same_number = number is not None and _number(key) == number
        if key != "else" and (key == value or same_number):
            return meaning
    switch = str(SWITCH.get(value)).lower()
    if switch in ("true", "false") and switch in by_text:
        return by_text[switch]
    return meanings.get("else")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
