"""A recipe's settings: a flat dataclass <- YAML <- flags; strict names and types; --help from the comments.

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
import itertools
import math
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import fire
import yaml
from fire.decorators import SetParseFns

from .errors import ConfigError, check, rank, say
from .fields import kinds_of, read_value, shown
from .files import CONFIG_BYTES, did_you_mean, read_small_text, replace_file

MOST_LEAVES = 1000  # of a nested key: a file of a few lines may unfold into millions

SHORT = {
    "batch": "batch_size",
    "bs": "batch_size",
    "learning_rate": "lr",
    "model_name_or_path": "model",
}

FLAG = re.compile(r"-(?![\d.])")  # -1 and -.5 are numbers


@dataclass
class Foreign:
    """What names that a recipe lacks have led to: those of other projects, and those of nobody."""

    # flag and text by our name
    implied: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # a line for each name that was understood
    problems: list[str] = field(default_factory=list)  # a line for each that was not
    project: object = None  # of foreign_flags.py: whose names were understood


def parse_cli(cls: type, argv: list[str] | None = None, aliases: str = ""):
    """An instance of the flat dataclass `cls`: its defaults, then --config FILE, then the other flags.

    aliases names a module beside this one that knows other projects' flags, foreign_flags; it is imported
    only for a name that `cls` lacks, and may be absent.
    Raises ConfigError, with a line for each name that nobody knows. On --help prints help_text(cls) and exits
    with 0.
    """
    argv = sys.argv[1:] if argv is None else argv
    if {"--help", "-h"} & set(argv):
        print(help_text(cls) if rank() == 0 else "", end="")
        sys.exit(0)
    kinds = kinds_of(cls) | {"config": (str, None)}
    flags, written, foreign = list(_flags(argv)), {}, Foreign()
    if any(name not in kinds for _, name, _ in flags):
        flags = translate_flags(flags, kinds, aliases, foreign)
    for flag, name, text in flags:
        first = written.get(name, ("",))[0]
        check(name not in written, f"--{name} is given twice ({first}, {flag}): write it once")
        text = kinds[name][1] if text is None else text
        check(text is not None, f"{flag} needs a value; one that starts with - as {flag}=VALUE")
        written[name] = (flag, text)
    from_file = {}
    if "config" in written:
        from_file = read_yaml(kinds_of(cls), written.pop("config")[1], aliases, foreign)
    check(not foreign.problems, foreign.problems)
    values = _fire(kinds, foreign.implied) | from_file | _fire(kinds, written)
    if foreign.project:
        note_defaults(foreign, set(values), cls)
    for note in foreign.notes if rank() == 0 else []:
        say(note)
    return cls(**values)


def check_least(cfg: object, **least: int) -> None:
    """Refuse a number below its least value, which is 0 where `least` names no other."""
    for name, value in (
        (name, value) for name, value in asdict(cfg).items() if type(value) in (int, float)
    ):
        smallest = least.get(name, 0)
        check(value >= smallest, f"--{name} {value} is too small (fix: at least {smallest})")


def save_config(cfg: object, path: str | Path) -> None:
    """Write a config as YAML that --config reads back exactly. The file is complete or absent, never half."""
    values = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(cfg).items()}
    text = yaml.safe_dump(values, sort_keys=False, width=math.inf, allow_unicode=True)
    replace_file(Path(path), text)


def _flags(argv: list[str]) -> Iterator[tuple[str, str, str | None]]:
    """(flag as written, its name, its text or None) of each flag. Words that fire misreads are refused."""
    words = list(argv)
    while words:
        word = words.pop(0)
        check(
            word not in ("-", "--"),
            f"a lone {word} has no meaning: every setting is written --name value",
        )
        check(
            FLAG.match(word),
            f"'{shown(word)}' belongs to no flag: every setting is written --name value",
        )
        flag, equals, text = word.partition("=")
        if not equals:
            text = words.pop(0) if words and not FLAG.match(words[0]) else None
        # -lr and ---lr keep their dashes and are unknown: fire takes -l for the one flag that starts with l.
        yield flag, flag[2:].replace("-", "_") if re.match(r"--\w", flag) else flag, text


def _fire(kinds: dict, flags: dict[str, tuple[str, str]]) -> dict:
    """Values from (flag as written, text) by name; fire calls our reader in place of guessing a type."""
    values = {}
    flags = {
        name: (flag, kinds[name][1] if text is None else text)
        for name, (flag, text) in flags.items()
    }

    def collect(**typed):
        values.update(typed)

    readers = {name: partial(read_value, *kinds[name], flag) for name, (flag, _) in flags.items()}
    command = [f"--{name}={text}" for name, (_, text) in flags.items()]
    fire.Fire(SetParseFns(**readers)(collect), command=command)
    return values


def near_setting(
    name: str,
    kinds: dict,
    dashes: str = "",
    others: dict[str, str] | None = None,
    known: set[str] = frozenset(),
) -> str:
    """What the user may have meant by an unknown name: a setting of the same meaning, or none.

    others: names of other projects -> the setting of ours that is the same. known: all their names; one that
    is nearer than every setting of ours, and means something else, is what was meant.
    """
    name = name.strip("-").replace("-", "_").lower()
    positive = re.sub("^no_?", "", name)
    if kinds.get(positive, (str,))[0] is bool:
        return f"did you mean {dashes}{positive} false?"
    same = SHORT | (others or {}) | {key: key for key in kinds}
    allowed = (len(name) > 4) + (len(name) > 8)  # edits that are a slip, and no other word
    close = [
        other for other in sorted(same.keys() | known) if abs(len(other) - len(name)) <= allowed
    ]
    near = min(
        ((edits(name, other), other not in same, other) for other in close), default=(3, True, "")
    )
    ours = same.get(near[2])
    if near[0] > allowed or ours not in kinds:
        return "--help lists them all"
    return f"did you mean {dashes}{ours}?"


def edits(one: str, other: str) -> int:
    """How many letters to add, to leave out or to swap with their neighbour make one word the other: top_k
    and top_p are 2 apart.
    """
    if abs(len(one) - len(other)) > 2:
        return 3  # or more
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, their in enumerate(other, start=1):
            replaced = rows[-1][j - 1] + 2 * (letter != their)
            row.append(min(rows[-1][j] + 1, row[-1] + 1, replaced))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == their:
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def load_config(cls: type, path: str | Path):
    """An instance of `cls` from the flat YAML file `path`; what the file leaves out has its default."""
    return cls(**read_yaml(kinds_of(cls), str(path)))


def help_text(cls: type) -> str:
    """The recipe's docstring, then its flags by group: values, meaning, default."""
    lines, kinds = [(sys.modules[cls.__module__].__doc__ or "").strip()], kinds_of(cls)
    for group, members in described(cls).items():
        lines.append(f"\n{group}")
        for setting, comment in members:
            kind, alone = kinds[setting.name]
            values = (
                "true|false" if kind is bool else "|".join(typing.get_args(kind)) or kind.__name__
            )
            flag = f"--{setting.name} {values}" if alone is None else f"--{setting.name} [{values}]"
            default = str(setting.default).lower() if kind is bool else setting.default
            lines.append(
                f"  {flag:34}  {comment} (default: {'empty' if default == '' else default})"
            )
    lines.append(
        f"\n  {'--config FILE':34}  flat YAML; its keys are these flags, and flags win over it\n"
    )
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
        elif token.type == tokenize.NEWLINE:  # ends a statement, which may be a setting
            setting = fields.pop(name, None)
            if setting:
                groups.setdefault(group, []).append((setting, " ".join(comments)))
            alone, name, comments = setting is None, "", []
        elif token.type == tokenize.NAME and not name:
            name = token.string
    inherited = [(setting, "") for setting in fields.values()]
    return groups | ({"Also": inherited} if inherited else {})


def translate_flags(flags: list[tuple], kinds: dict, aliases: str, foreign: Foreign) -> list[tuple]:
    """(flag as written, name, text) of each, those that `kinds` lacks in our words. `foreign` takes what else
    they mean, and a problem for each flag that nobody knows or that is refused.
    """
    table = _table(aliases)
    unknown = [name for _, name, _ in flags if name not in kinds]
    theirs = table and table.find_project(unknown)
    ours = []
    for flag, name, text in flags:
        settings = {name: text}
        if name not in kinds:
            settings = _translate(table, theirs, flag, name, text, kinds, foreign)
            if settings is None:
                foreign.problems.append(
                    f"unknown flag {shown(flag)} ({_hint(table, name, kinds, '--')})"
                )
        ours += [(flag, key, value) for key, value in (settings or {}).items()]
    return ours


def note_defaults(foreign: Foreign, given: set[str], cls: type) -> None:
    """Add what the other project would train with where nothing was given. With a model only: without one the
    tiny task's own settings hold.
    """
    fields = {field.name: field.default for field in dataclasses.fields(cls)}
    if "model" in given:
        foreign.notes += filter(
            None, [_table("foreign_flags").defaults_note(foreign.project, given, fields)]
        )


def _table(aliases: str):
    """The module that knows other projects' flags; None where there is none: a copy may do without."""
    try:
        return importlib.import_module(f".{aliases}", __package__) if aliases else None
    except ModuleNotFoundError:
        return None


def _translate(
    table, theirs, at: str, name: str, text: str | None, kinds: dict, foreign: Foreign, **how
):
    """Our settings for a name of another project, {} where it means none; None where it is nobody's."""
    if not table:
        return None
    try:
        settings, implied, note = table.translate(theirs, at, name, text, kinds, **how)
    except ConfigError as error:
        foreign.problems += error.lines
        return {}
    if not note:
        return None
    foreign.implied |= {key: (at, value) for key, value in implied.items()}
    foreign.notes.append(note)
    foreign.project = theirs
    return settings


def _hint(table, name: str, kinds: dict, dashes: str = "") -> str:
    others = table.renamed() if table else {}
    known = table.known_names() if table else set()
    return near_setting(name, kinds, dashes, others, known)


def read_yaml(kinds: dict, path: str, aliases: str = "", foreign: Foreign | None = None) -> dict:
    """The settings of a flat YAML file. Only its text counts: nothing is constructed, and YAML's own readings
    (no as False, 1e-4 as text, 010 as 8) never come into play.

    A file of another project is understood by its table; see translate_flags for aliases and foreign.
    """
    table, foreign = _table(aliases), foreign or Foreign()
    file, said = Path(path), shown(path)
    try:
        file.stat()
    except FileNotFoundError as error:
        raise ConfigError(
            f"config file {said}: {error.strerror}{shown(did_you_mean(file))}"
        ) from None
    except (OSError, ValueError):
        pass  # in the words of what reads it
    try:
        text = read_small_text(file, CONFIG_BYTES, f"config file {said}", "utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        at = f"{said}:{error.problem_mark.line + 1}"
        raise ConfigError(
            f"{at}: {error.problem}; write `name: value` lines, without tabs"
        ) from None
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(f"config file {said}: {reason}") from None
    check(
        root is None or isinstance(root, yaml.MappingNode),
        f"{said}: expected lines such as `lr: 1e-4`",
    )
    entries = (
        [(_name(key), key.start_mark.line + 1, node) for key, node in root.value] if root else []
    )
    theirs = None
    if table and any(name not in kinds for name, _, _ in entries):
        entries = [leaf for entry in entries for leaf in _leaves(*entry, table)]
        foreign_names = [
            name for name, _, _ in entries if name not in kinds and table.knows(None, name)
        ]
        theirs = table.find_project(foreign_names) if foreign_names else None
    values = {}
    for name, line, node in entries:
        at = f"{said}:{line}: {shown(name)}"
        known = theirs and table.knows(theirs, name)
        if theirs and _is_empty(node) and (known or name in kinds):
            continue  # what is left empty is not set in its own project either
        if name in kinds and not (theirs and table.means_other(theirs, name)):
            check(name not in values, f"{at} is set twice: write it once")
            values[name] = read_value(*kinds[name], at, _scalar(at, node))
        elif not known:
            foreign.problems.append(f"{at} is no setting ({_hint(table, name, kinds)})")
        else:
            text = _scalar(at, node)
            settings = _translate(table, theirs, at, name, text, kinds, foreign, in_file=True)
            for ours, text in settings.items():
                twice = f"{at} is {ours} here, which is set before (fix: write one of them)"
                check(ours not in values, twice)
                values[ours] = read_value(
                    *kinds[ours], at, kinds[ours][1] if text is None else text
                )
    return values


def _name(key: yaml.Node) -> str:
    return key.value.replace("-", "_") if isinstance(key, yaml.ScalarNode) else "a list"


def _scalar(at: str, node: yaml.Node) -> str:
    """The text of a plain value."""
    check(isinstance(node, yaml.ScalarNode), f"{at} takes one value, not a list or a mapping")
    tag = node.tag.removeprefix("tag:yaml.org,2002:")
    plain = tag in ("str", "int", "float", "bool", "timestamp")
    check(plain, f'{at} takes a plain value, not {shown(tag)}; the empty text is ""')
    return node.value


def _is_empty(node: yaml.Node) -> bool:
    return not node.value or node.tag == "tag:yaml.org,2002:null"


def _leaves(name: str, line: int, node: yaml.Node, table) -> list[tuple[str, int, yaml.Node]]:
    """A key of another project's file, or what is inside it: outer.inner for the keys of a mapping, also for
    those in a list of mappings; a list of texts is one text, with commas. What no table knows stays whole.
    """
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    mappings = [node] if isinstance(node, yaml.MappingNode) else items
    inside = [item for item in mappings if isinstance(item, yaml.MappingNode)]
    if inside and len(inside) == len(mappings) and table.has_inside(name):
        found: dict[str, tuple[str, int, yaml.Node]] = {}
        for key, value in itertools.islice(
            (pair for item in inside for pair in item.value), MOST_LEAVES
        ):
            for leaf in _leaves(f"{name}.{_name(key)}", key.start_mark.line + 1, value, table):
                before = found.get(leaf[0])
                found[leaf[0]] = (*leaf[:2], _joined([before[2], leaf[2]])) if before else leaf
        return list(found.values())
    if items and not inside and table.knows(None, name):
        return [(name, line, _joined(items[:MOST_LEAVES]))]
    return [(name, line, node)]


def _joined(nodes: list[yaml.Node]) -> yaml.Node:
    """Plain values as one, each once, with commas; the first node that is none."""
    for node in nodes:
        if not isinstance(node, yaml.ScalarNode):
            return node
    values = dict.fromkeys(
        value for node in nodes for value in node.value.split(",") if not _is_empty(node)
    )
    return yaml.ScalarNode(nodes[0].tag, ",".join(values), nodes[0].start_mark, nodes[0].end_mark)


def pick(options: type, settings: object, **others: object) -> object:
    """A small dataclass of options, from a recipe's settings of the same names; others: fields that are no
    settings. A field that the recipe has no setting for keeps its default.
    """
    names = [field.name for field in dataclasses.fields(options)]
    found = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    return options(**(found | others))


@dataclass(frozen=True)
class BatchSizes:
    """What is given of a run's batch sizes, in sequences (or packs); 0: follows from the others."""

    batch_size: int  # of a rank and micro-batch
    grad_accum: int = 0  # micro-batches of a rank in an optimizer step
    global_batch_size: int = 0  # of an optimizer step

    def divide(self, ranks: int) -> tuple[int, int]:
        """(the global batch, micro-batches of a rank in it). ConfigError where the sizes contradict each
        other names those that would fit.
        """
        batch, total = self.batch_size, self.global_batch_size
        at_once = batch * ranks
        if not total:
            micro_batches = max(1, self.grad_accum)
            return at_once * micro_batches, micro_batches
        micro_batches, remainder = divmod(total, at_once)
        product = f"--batch_size {batch} x {ranks} ranks"
        if remainder:
            sizes = [n for n in range(1, total // ranks + 1) if total % (n * ranks) == 0]
            counts = [n for n in range(1, total + 1) if total % n == 0]
            if sizes:
                fix = f"--batch_size {', '.join(map(str, sizes))}"
            else:
                fix = f"{', '.join(map(str, counts))} ranks"
            text = f"--global_batch_size {total} is no multiple of {product}"
            raise ConfigError(f"{text} (fix: {fix})")
        text = f"--grad_accum {self.grad_accum} x {product} is not --global_batch_size {total}"
        fits = self.grad_accum in (0, micro_batches)
        check(fits, f"{text} (fix: leave one of them out)")
        return total, micro_batches
