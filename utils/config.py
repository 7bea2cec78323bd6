"""Flat dataclass <- YAML <- flags; strict names and types; --help from the comments.

A recipe declares each setting once: `name: type = default  # meaning`. A comment that stands alone after a
blank line opens a group; comment lines directly above a field belong to it, before the one at its line's end.
Types: str, int, float, bool and Literal of strings. A Literal that means something when its flag stands alone
says so: `field(default="none", metadata={"bare": "8bit"})`.

fire is the surface, with its traps closed. Left alone it turns `--model 1e5`, `a,b` or `foo#bar` into other
things, keeps the last of two equal flags, starts a Python prompt on `-- --interactive`, and finds a mistyped
flag only after main has run. Here a command line is understood completely, or refused, before main starts.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

import fire
import yaml
from fire.decorators import SetParseFns

from .errors import check, rank
from .fields import kinds_of, read_value, shown

FLAG = re.compile(r"-(?![\d.])")  # -1 and -.5 are numbers


def parse_cli(cls: type, argv: list[str] | None = None, aliases: str = ""):
    """An instance of the flat dataclass `cls`: its defaults, then --config FILE, then the other flags.

    aliases names a module beside this one that knows another project's flags; it is imported only for a flag
    that `cls` lacks, and may be absent. Its translate(name, text, kinds) returns (settings, implied, note):
    texts of our settings by name, None for a flag that stands alone; more of them, which hold unless they are
    set elsewhere; a line for the user, empty for a flag that it does not know either.
    Raises ConfigError. On --help prints help_text(cls) and exits with 0.
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & set(argv):
        from .config_text import help_text

        print(help_text(cls) if rank() == 0 else "", end="")
        sys.exit(0)
    kinds = kinds_of(cls) | {"config": (str, None)}
    flags, written, implied, notes = list(_flags(argv)), {}, {}, []
    if any(name not in kinds for _, name, _ in flags):
        from .config_text import translate_flags

        flags, implied, notes = translate_flags(flags, kinds, aliases)
    for flag, name, text in flags:
        first = written.get(name, ("",))[0]
        check(name not in written, f"--{name} is given twice ({first}, {flag}): write it once")
        text = kinds[name][1] if text is None else text
        check(text is not None, f"{flag} needs a value; one that starts with - as {flag}=VALUE")
        written[name] = (flag, text)
    from_file = {}
    if "config" in written:
        from .config_text import read_yaml

        from_file = read_yaml(kinds_of(cls), written.pop("config")[1])
    values = _fire(kinds, implied) | from_file | _fire(kinds, written)
    for note in notes if rank() == 0 else []:
        print(note, flush=True)
    return cls(**values)


def check_least(cfg: object, **least: int) -> None:
    """Refuse a number below its least value, which is 0 where `least` names no other."""
    for name, value in ((name, value) for name, value in asdict(cfg).items() if type(value) in (int, float)):
        smallest = least.get(name, 0)
        check(value >= smallest, f"--{name} {value} is too small (fix: at least {smallest})")


def save_config(cfg: object, path: str | Path) -> None:
    """Write a config as YAML that --config reads back exactly. The file is complete or absent, never half."""
    values = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(cfg).items()}
    temporary = Path(path).with_name(f".tmp_{Path(path).name}")
    temporary.write_text(yaml.safe_dump(values, sort_keys=False, width=math.inf, allow_unicode=True), "utf-8")
    temporary.replace(path)


def _flags(argv: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """(flag as written, its name, its text or None) of each flag. Words that fire misreads are refused."""
    words = list(argv)
    while words:
        word = words.pop(0)
        check(word not in ("-", "--"), f"a lone {word} has no meaning: every setting is written --name value")
        check(FLAG.match(word), f"'{shown(word)}' belongs to no flag: every setting is written --name value")
        flag, equals, text = word.partition("=")
        if not equals:
            text = words.pop(0) if words and not FLAG.match(words[0]) else None
        # -lr and ---lr keep their dashes and are unknown: fire takes -l for the one flag that starts with l.
        yield flag, flag[2:].replace("-", "_") if re.match(r"--\w", flag) else flag, text


def _fire(kinds: dict, flags: dict[str, tuple[str, str]]) -> dict:
    """Values from (flag as written, text) by name; fire calls our reader in place of guessing a type."""
    values = {}

    def collect(**typed):
        values.update(typed)

    readers = {name: partial(read_value, *kinds[name], flag) for name, (flag, _) in flags.items()}
    command = [f"--{name}={text}" for name, (_, text) in flags.items()]
    fire.Fire(SetParseFns(**readers)(collect), command=command)
    return values
