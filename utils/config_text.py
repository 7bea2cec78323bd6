"""Settings as text: flat YAML files, read strictly; --help; flags of another project. Imported for those."""

import dataclasses
import importlib
import inspect
import io
import sys
import textwrap
import tokenize
import typing
from pathlib import Path

import yaml

from .errors import ConfigError, check
from .fields import kinds_of, read_value, shown


def load_config(cls: type, path: str | Path):
    """An instance of `cls` from the flat YAML file `path`; what the file leaves out has its default."""
    return cls(**read_yaml(kinds_of(cls), str(path)))


def help_text(cls: type) -> str:
    """The recipe's docstring, then its flags by group: values, meaning, default."""
    lines, kinds = [(sys.modules[cls.__module__].__doc__ or "").strip()], kinds_of(cls)
    for group, members in described(cls).items():
        lines.append(f"\n{group}")
        for field, comment in members:
            kind, alone = kinds[field.name]
            values = "true|false" if kind is bool else "|".join(typing.get_args(kind)) or kind.__name__
            flag = f"--{field.name} {values}" if alone is None else f"--{field.name} [{values}]"
            default = str(field.default).lower() if kind is bool else field.default
            lines.append(f"  {flag:34}  {comment} (default: {'empty' if default == '' else default})")
    lines.append(f"\n  {'--config FILE':34}  flat YAML; its keys are these flags, and flags win over it\n")
    return "\n".join(lines)


def described(cls: type) -> dict[str, list[tuple[dataclasses.Field, str]]]:
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


def translate_flags(flags: list[tuple], kinds: dict, aliases: str) -> tuple[list[tuple], dict, list[str]]:
    """(flags, what they imply, notes): (flag as written, name, text) of each, those that `kinds` lacks in our
    words. See config.parse_cli for `aliases`. Raises ConfigError for a flag that nobody knows.
    """
    try:
        translate = importlib.import_module(f".{aliases}", __package__).translate if aliases else None
    except ModuleNotFoundError:  # a copy may do without
        translate = None
    ours, implied, notes = [], {}, []
    for flag, name, text in flags:
        settings = {name: text}
        if name not in kinds:
            settings, weak, note = translate(name, text, kinds) if translate else ({}, {}, "")
            if not note:
                from .diagnose import near_setting

                raise ConfigError(f"unknown flag {shown(flag)} ({near_setting(name, kinds, '--')})")
            implied |= {key: (flag, value) for key, value in weak.items()}
            notes.append(note)
        ours += [(flag, key, value) for key, value in settings.items()]
    return ours, implied, notes


def read_yaml(kinds: dict, path: str) -> dict:
    """The settings of a flat YAML file. Only its text counts: nothing is constructed, and YAML's own readings
    (no as False, 1e-4 as text, 010 as 8) never come into play.
    """
    file, said = Path(path), shown(path)
    try:
        root = yaml.compose(file.read_text("utf-8-sig"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        at = f"{said}:{error.problem_mark.line + 1}"
        raise ConfigError(f"{at}: {error.problem}; write `name: value` lines, without tabs") from None
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        from .diagnose import did_you_mean

        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        hint = "" if file.exists() else shown(did_you_mean(file))
        raise ConfigError(f"config file {said}: {reason}{hint}") from None
    check(root is None or isinstance(root, yaml.MappingNode), f"{said}: expected lines such as `lr: 1e-4`")
    values = {}
    for key, node in root.value if root else []:
        name = key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else "a list"
        at = f"{said}:{key.start_mark.line + 1}: {shown(name)}"
        if name not in kinds:
            from .diagnose import near_setting

            raise ConfigError(f"{at} is no setting ({near_setting(name, kinds)})")
        check(name not in values, f"{at} is set twice: write it once")
        check(isinstance(node, yaml.ScalarNode), f"{at} takes one value, not a list or a mapping")
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        plain = tag in ("str", "int", "float", "bool", "timestamp")
        check(plain, f'{at} takes a plain value, not {shown(tag)}; the empty text is ""')
        values[name] = read_value(*kinds[name], at, node.value)
    return values
