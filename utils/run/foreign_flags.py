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
# of equals the first is meant
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
        short = _short(name)
        found = _find(self.names, name)
        return _find(self.names, short) if found is None and short != name else found


@cache
def project(name: str) -> Project:
    """The table of one project."""
    content = yaml.safe_load(Path(__file__).with_name(f"{name}.yaml").read_text("utf-8"))
    if parent := content.pop("inherits", None):
        content["names"] = project(parent).names | content["names"]
    return Project(**content)


def find_project(names: list[str]) -> Project:
    """The project that knows most of these names."""

    def known(one: Project) -> int:
        return sum(one.meaning(name) is not None or means_other(one, name) for name in names)

    return max(map(project, PROJECTS), key=known)


def renamed() -> dict[str, str]:
    """Each name of another project that is one setting of ours, for most of its values at least."""
    found = {}
    for one in reversed(PROJECTS):
        for name, meaning in project(one).names.items():
            ours = meaning.get("else", "") if isinstance(meaning, dict) else meaning
            if re.fullmatch(r"--\w+", ours):
                found[name] = ours.removeprefix("--")
    return found


def known_names() -> set[str]:
    """Every name that some table has."""
    return {name for one in PROJECTS for name in project(one).names}


def means_other(theirs: Project, name: str) -> bool:
    """Whether a file of the project means by this name, which is ours too, something else."""
    return _find(theirs.ours_too, name) is not None


def knows(theirs: Project | None, name: str) -> bool:
    """Whether some table has a name; of those that are ours too, `theirs` counts, or any where it is None."""
    projects = [project(one) for one in PROJECTS]
    others = projects if theirs is None else [theirs]
    return any(one.meaning(name) is not None for one in projects) or any(
        means_other(one, name) for one in others
    )


def has_inside(name: str) -> bool:
    """Whether some table has names inside this one: name.inner."""
    tables = [table for one in map(project, PROJECTS) for table in (one.names, one.ours_too)]
    return any(other.startswith(f"{name}.") for table in tables for other in table)


def translate(
    theirs: Project, flag: str, name: str, text: str | None, kinds: dict, in_file: bool = False
) -> tuple[dict, dict, str]:
    """(settings, implied, note) for a flag of another project, or for a key of a file of `theirs`; no note if
    no table has it.

    settings: texts of ours by name, None for a flag that stands alone; implied: more of them, which hold
    unless they are set elsewhere; note: the line for the user. flag: how it is written, for messages.
    kinds: our setting -> (type, ...). Raises ConfigError where the recipe cannot do what the flag says.
    """
    meaning = _find(theirs.ours_too, name) if in_file else None
    for one in (theirs, *map(project, PROJECTS)):
        meaning = one.meaning(name) if meaning is None else meaning
    if meaning is None and (short := _short(name)) in kinds:
        meaning = f"--{short}"
    if meaning is None:
        return {}, {}, ""
    if isinstance(meaning, dict):
        value = _plain(text or "true")
        flag += "" if text is None else f" {shown(value)}"
        found = _chosen(meaning, value)
        choices = " or ".join(str(key).lower() for key in meaning)
        check(found is not None, f"{flag} is not possible here: leave it out, or write {choices}")
        kept = meaning.get("else") is found and found.startswith("--")
        meaning, text = found or "what happens", text if kept else None
    if meaning.startswith("refused: "):
        raise ConfigError(f"{flag}: {meaning.removeprefix('refused: ')}")
    weak = meaning.startswith("unless set: ")
    ours = meaning.removeprefix("unless set: ")
    if not ours.startswith(("--", "what")):
        return {}, {}, f"{flag} has no meaning here: {ours}"
    settings = {key: value or text for key, value in SETTING.findall(ours)}
    for key, value in settings.items():
        choices = typing.get_args(kinds[key][0]) if key in kinds else ()
        if key not in kinds or (choices and value not in (None, text, *choices)):
            raise ConfigError(f"{flag} needs --{key}, which is not here yet (fix: leave it out)")
        if kinds[key][0] is int and value and re.fullmatch(r"[+-]?\d+\.0+", value):
            settings[key] = value.partition(".")[0]  # num_train_epochs: 3.0
    if weak:
        return {}, settings, f"{flag} is {ours} here, for those that are not set"
    return settings, {}, f"{flag} is {ours} here"


def defaults_note(theirs: Project, given: set[str], fields: dict[str, object]) -> str:
    """One line: what the project itself would train with in place of our defaults, and how to write that; ""
    where all that differs was given. fields: our defaults by name.
    """
    differ = {}
    for name, value in theirs.defaults.items():
        same = (
            _chosen({str(fields[name]).lower(): "same"}, str(value).lower())
            if name in fields
            else "none"
        )
        if name not in given and not same:
            differ[name] = str(value).lower()
    if not differ:
        return ""
    there = ", ".join(f"{name} {value}" for name, value in differ.items())
    here = ", ".join(f"{name} {str(fields[name]).lower()}" for name in differ)
    flags = " ".join(f"--{name} {value}" for name, value in differ.items())
    also = f", {theirs.also}" if theirs.also else ""
    return f"{theirs.title} itself would take {there}{also}; here it is {here} (to match: {flags})"


def _find(names: dict, name: str) -> str | dict | None:
    if name in names:
        return names[name]
    found = [pattern for pattern in names if pattern.endswith("*") and fnmatchcase(name, pattern)]
    return names[max(found, key=len)] if found else None


def _short(name: str) -> str:
    """llama-recipes' long form, --fsdp_config.pure_bf16, without its config; FSDP's names without fsdp_."""
    if "fsdp_config.fsdp_" in name:
        return name.replace("fsdp_config.fsdp_", "fsdp_config.")
    return re.sub(r"^\w+_(config|dataset)\.", "", name)


def _plain(text: str) -> str:
    """A value as tables write it: ShardingStrategy.FULL_SHARD is full_shard, "a,b" is "a b"."""
    text = text.rpartition(".")[2] if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", text) else text
    text = " ".join(text.lower().replace(",", " ").split())
    return str(SWITCH[text]).lower() if text in ("yes", "on", "off") else text


def _chosen(meanings: dict, value: str) -> str | None:
    for key, meaning in meanings.items():
        key = str(key).lower()
        if key != "else" and (key == value or _number(key) == _number(value) is not None):
            return meaning
    for key, meaning in meanings.items():  # 1 and 0 are numbers first
        key = str(key).lower()
        if key in ("true", "false") and key == str(SWITCH.get(value)).lower():
            return meaning
    return meanings.get("else")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
