"""The text of --help, read from the comments of a recipe's settings.

A comment on a line of its own below an empty line starts a group. Comment lines directly above a field belong
to the field; they come before the comment at the end of its line.
"""

import dataclasses
import inspect
import typing


def help_text(cls: type, kinds: dict) -> str:
    """The recipe's docstring, then its flags by group: values, meaning, default. kinds: see settings.py."""
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    lines = [(inspect.getmodule(cls).__doc__ or "").strip()]
    for group, comments in described(cls).items():
        lines.append(f"\n{group}")
        for name, comment in comments.items():
            kind, bare = kinds[name]
            default = defaults[name] if defaults[name] != "" else "empty"
            values = "|".join(typing.get_args(kind)) or kind.__name__
            if kind is bool:
                values = "true|false"
                default = str(default).lower()
            flag = f"--{name} [{values}]" if bare else f"--{name} {values}"
            lines.append(f"  {flag:34}  {comment} (default: {default})")
    lines.append(
        f"\n  {'--config FILE':34}  flat YAML; its keys are these flags, and flags win over it"
    )
    return "\n".join(lines)


def described(cls: type) -> dict:
    """{group: {field: comment}} of the fields that `cls` declares itself, read from its source."""
    names = {field.name for field in dataclasses.fields(cls)}
    groups = {}
    group = "Flags"
    above = []
    previous = ""
    for line in inspect.getsource(cls).splitlines():
        line = line.strip()
        name = line.partition(":")[0]
        comment = line.rpartition("# ")[2] if "# " in line else ""
        if line.startswith("# "):
            if not previous or previous.startswith("class "):
                group = comment
            else:
                above.append(comment)
        elif name in names:
            groups.setdefault(group, {})[name] = " ".join([*above, comment])
            above = []
        previous = line
    return groups
