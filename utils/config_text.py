"""Settings as text: flat YAML files, read strictly, and --help. Imported for those, and for a resume."""

import sys
import typing
from pathlib import Path

import yaml

from .errors import ConfigError, check
from .fields import described, kinds_of, read_value, shown


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
