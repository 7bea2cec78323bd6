"""A dataclass's fields as settings: their types, strict reading of a text, and --help from their comments."""

import dataclasses
import inspect
import io
import math
import re
import sys
import textwrap
import tokenize
import typing

from .errors import check

SWITCH = dict.fromkeys(("true", "yes", "on", "1"), True)
SWITCH |= dict.fromkeys(("false", "no", "off", "0"), False)


def kinds_of(cls: type) -> dict[str, tuple[type, str | None]]:
    """Each setting's type, and the text that its flag means where it stands alone (None: it may not)."""
    kinds = {}
    for field in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[field.name]
        kinds[field.name] = (kind, "true" if kind is bool else field.metadata.get("bare"))
    return kinds


def read_value(kind: type, alone: str | None, where: str, text: str) -> str | int | float | bool:
    """`text` as a value of its type, strictly. `where` is the flag, or the line and key of a file."""
    check("\0" not in text, f"{where} cannot hold a NUL character: {shown(text)}")
    if kind is bool:
        check(text.lower() in SWITCH, f"{where} takes true or false, not '{shown(text)}'")
        return SWITCH[text.lower()]
    # int() and float() would read 1_000, fullwidth digits, spaces, nan, and numbers that fit nowhere.
    if kind is int:
        number = re.fullmatch("[+-]?(0|[1-9][0-9]{0,17})", text)
        form = "a whole number in plain digits such as 1000"
        check(number, f"{where} takes {form}, not '{shown(text)}'")
        return int(text)
    if kind is float:
        number = re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?", text)
        finite = number and math.isfinite(float(text))
        check(finite, f"{where} takes a finite number such as 0.001 or 1e-3, not '{shown(text)}'")
        return float(text)
    choices = typing.get_args(kind)
    if alone and text not in choices and SWITCH.get(text.lower()):
        return alone
    fits = kind is str or text in choices
    check(fits, f"{where} takes one of {', '.join(choices)}; not '{shown(text)}'")
    return text


def shown(text: str) -> str:
    """Text fit for a message of one line."""
    return repr(text)[1:-1] if len(text) < 200 else repr(text[:60])[1:-1] + "..."


def help_text(cls: type) -> str:
    """The recipe's docstring, then its flags by group: values, meaning, default."""
    kinds = kinds_of(cls)
    docstring = sys.modules[cls.__module__].__doc__ or ""
    lines = [docstring.strip()]
    for group, members in described(cls).items():
        lines.append(f"\n{group}")
        for setting, comment in members:
            kind, bare_text = kinds[setting.name]
            lines.append(_help_line(setting, comment, kind, bare_text))
    meaning = "flat YAML; its keys are these flags, and flags win over it"
    lines.append(f"\n  {'--config FILE':34}  {meaning}\n")
    return "\n".join(lines)


def _help_line(setting: dataclasses.Field, comment: str, kind: type, bare_text: str | None) -> str:
    values = "|".join(typing.get_args(kind)) or kind.__name__
    default = setting.default
    if kind is bool:
        values = "true|false"
        default = str(default).lower()
    if bare_text is not None:  # the flag may stand alone
        values = f"[{values}]"
    if default == "":
        default = "empty"
    flag = f"--{setting.name} {values}"
    return f"  {flag:34}  {comment} (default: {default})"


def described(cls: type) -> dict[str, list[tuple[dataclasses.Field, str]]]:
    """The fields of `cls` and their comments by group, read from its source."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    groups: dict[str, list[tuple[dataclasses.Field, str]]] = {}
    try:
        source = textwrap.dedent(inspect.getsource(cls))
    except (OSError, TypeError):  # a class typed at a prompt has none
        source = ""
    group = "Flags"
    comments: list[str] = []
    name = ""
    alone = True  # nothing stands right above
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and alone and not name:
            group = token.string.lstrip("# ")
            alone = False
        elif token.type == tokenize.COMMENT:
            comments.append(token.string.lstrip("# "))
        elif token.type == tokenize.NL and not token.line.strip():
            alone = True
        elif token.type == tokenize.NEWLINE:  # ends a statement, which may be a setting
            setting = fields.pop(name, None)
            if setting:
                groups.setdefault(group, []).append((setting, " ".join(comments)))
            alone = setting is None
            name = ""
            comments = []
        elif token.type == tokenize.NAME and not name:
            name = token.string
    if fields:
        groups["Also"] = [(setting, "") for setting in fields.values()]  # inherited
    return groups
