"""Flat dataclass <- YAML <- flags; strict names and types; --help from the comments.

A recipe declares each setting once: `name: type = default  # meaning`. A comment that stands alone after a
blank line opens a group; comment lines directly above a field belong to it, before the one at its line's end.
Types: str, int, float, bool and Literal of strings. A Literal that means something when its flag stands alone
says so: `field(default="none", metadata={"bare": "8bit"})`.

fire is the surface, with its traps closed. Left alone it turns `--model 1e5`, `a,b` or `foo#bar` into other
things, keeps the last of two equal flags, starts a Python prompt on `-- --interactive`, and finds a mistyped
flag only after main has run. Here a command line is understood completely, or refused, before main starts.
"""

import dataclasses
import importlib
import inspect
import io
import math
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import fire
import yaml
from fire.decorators import SetParseFns

from .errors import ConfigError, check, rank

SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
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
    kinds = _kinds(cls) | {"config": (str, None)}
    written, implied, notes = {}, {}, []  # written, implied: name -> (flag as the user wrote it, text)
    for flag, name, text in _flags(argv):
        settings = {name: text}
        if name not in kinds:
            settings, weak, note = _translate(aliases, name, text, kinds)
            if not note:
                from .diagnose import near_setting

                raise ConfigError(f"unknown flag {_shown(flag)} ({near_setting(name, kinds, '--')})")
            implied |= {key: (flag, value) for key, value in weak.items()}
            notes.append(note)
        for key, value in settings.items():
            if key in written:
                raise ConfigError(f"--{key} is given twice ({written[key][0]}, {flag}): write it once")
            value = kinds[key][1] if value is None else value
            check(value is not None, f"{flag} needs a value; one that starts with - as {flag}=VALUE")
            written[key] = (flag, value)
    from_file = {}
    if "config" in written:
        from .config_text import read_yaml

        from_file = read_yaml(_kinds(cls), written.pop("config")[1])
    values = _fire(kinds, implied) | from_file | _fire(kinds, written)
    for note in notes if rank() == 0 else []:
        print(note, flush=True)
    return cls(**values)


def save_config(cfg: object, path: str | Path) -> None:
    """Write a config as YAML that --config reads back exactly. The file is complete or absent, never half."""
    lines = []
    for group, members in _described(type(cfg)).items():
        lines.append(f"\n# {group}")
        for field, comment in members:
            value = getattr(cfg, field.name)
            value = str(value) if isinstance(value, Path) else value
            quote = '"' if isinstance(value, str) else None  # every YAML reader leaves "no" and "1e5" alone
            text = yaml.safe_dump(value, default_style=quote, width=math.inf, allow_unicode=True)
            lines.append(f"{field.name}: {text.splitlines()[0]}" + f"  # {comment}" * bool(comment))
    temporary = Path(path).with_name(f".tmp_{Path(path).name}")
    temporary.write_text("\n".join(lines).lstrip() + "\n", encoding="utf-8")
    temporary.replace(path)


def _kinds(cls: type) -> dict[str, tuple[type, str | None]]:
    """Each setting's type, and the text that its flag means where it stands alone (None: it may not)."""
    kinds = {}
    for field in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[field.name]
        kinds[field.name] = (kind, "true" if kind is bool else field.metadata.get("bare"))
    return kinds


def _flags(argv: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """(flag as written, its name, its text or None) of each flag. Words that fire misreads are refused."""
    words = list(argv)
    while words:
        word = words.pop(0)
        check(word not in ("-", "--"), f"a lone {word} has no meaning: every setting is written --name value")
        check(FLAG.match(word), f"'{_shown(word)}' belongs to no flag: every setting is written --name value")
        flag, equals, text = word.partition("=")
        if not equals:
            text = words.pop(0) if words and not FLAG.match(words[0]) else None
        # -lr and ---lr keep their dashes and are unknown: fire takes -l for the one flag that starts with l.
        yield flag, flag[2:].replace("-", "_") if re.match(r"--\w", flag) else flag, text


def _translate(aliases: str, name: str, text: str | None, kinds: dict) -> tuple[dict, dict, str]:
    try:
        translate = importlib.import_module(f".{aliases}", __package__).translate if aliases else None
    except ModuleNotFoundError:  # a copy may do without
        translate = None
    return translate and translate(name, text, kinds) or ({}, {}, "")


def _fire(kinds: dict, flags: dict[str, tuple[str, str]]) -> dict:
    """Values from (flag as written, text) by name; fire calls our reader in place of guessing a type."""
    values = {}

    def collect(**typed):
        values.update(typed)

    readers = {name: partial(_read, *kinds[name], flag) for name, (flag, _) in flags.items()}
    command = [f"--{name}={text}" for name, (_, text) in flags.items()]
    fire.Fire(SetParseFns(**readers)(collect), command=command)
    return values


def _read(kind: type, alone: str | None, where: str, text: str) -> str | int | float | bool:
    """`text` as a value of its type, strictly. `where` is the flag, or the line and key of a file."""
    check("\0" not in text, f"{where} cannot hold a NUL character: {_shown(text)}")
    if kind is bool:
        check(text.lower() in SWITCH, f"{where} takes true or false, not '{_shown(text)}'")
        return SWITCH[text.lower()]
    # int() and float() would read 1_000, fullwidth digits, spaces, nan, and numbers that fit nowhere.
    if kind is int:
        number = re.fullmatch("[+-]?(0|[1-9][0-9]{0,17})", text)
        check(number, f"{where} takes a whole number in plain digits such as 1000, not '{_shown(text)}'")
        return int(text)
    if kind is float:
        number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text)
        finite = number and math.isfinite(float(text))
        check(finite, f"{where} takes a finite number such as 0.001 or 1e-3, not '{_shown(text)}'")
        return float(text)
    choices = typing.get_args(kind)
    if alone and text not in choices and SWITCH.get(text.lower()):
        return alone
    check(kind is str or text in choices, f"{where} takes one of {', '.join(choices)}; not '{_shown(text)}'")
    return text


def _shown(text: str) -> str:
    """Text fit for a message of one line."""
    return repr(text)[1:-1] if len(text) < 200 else repr(text[:60])[1:-1] + "..."


def _described(cls: type) -> dict[str, list[tuple[dataclasses.Field, str]]]:
    """The fields of `cls` and their comments by group, read from its source."""
    fields, groups = {f.name: f for f in dataclasses.fields(cls)}, {}
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class typed at a prompt has none
        source = ""
    group, comments, name, alone = "Flags", [], "", True  # alone: nothing stands right above
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and alone and not name:
            group, alone = token.string.lstrip("# "), False
        elif token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("# "))
        elif token.type == tokenize.NL and not token.line.strip():
            alone = True
        elif token.type == tokenize.NEWLINE:  # ends a statement, which may be a field
            field = fields.pop(name, None)
            if field:
                groups.setdefault(group, []).append((field, " ".join(comments)))
            alone, name, comments = field is None, "", []
        elif token.type == tokenize.NAME and not name:
            name = token.string
    inherited = [(field, "") for field in fields.values()]
    return groups | ({"Also": inherited} if inherited else {})
