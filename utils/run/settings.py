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
import itertools
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import fire
import yaml
from fire.decorators import SetParseFns

from .errors import ConfigError, check, print0, rank
from .fields import help_text, kinds_of, read_value, shown
from .files import CONFIG_BYTES, did_you_mean, read_small_text, replace_file

MOST_LEAVES = 1000  # of a nested key: a file of a few lines may unfold into millions

SHORT = {
    "batch": "batch_size",
    "bs": "batch_size",
    "learning_rate": "lr",
    "model_name_or_path": "model",
}

FLAG = re.compile(r"-(?![\d.])")  # -1 and -.5 are numbers
Flag = tuple[str, str, str | None]  # as it is written, its name, its text (None: it stands alone)
Entry = tuple[str, int, yaml.Node]  # of a file: the name, its line, the value


@dataclass
class Foreign:
    """What the names that a recipe lacks mean: names of other projects, and names that nobody knows."""

    # Our name -> (flag, text) of settings that hold unless they are set elsewhere.
    implied: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # a line for each name that was understood
    problems: list[str] = field(default_factory=list)  # a line for each that was not
    project: object = None  # the table of foreign_flags.py that understood them


def parse_cli(cls: type, argv: list[str] | None = None, aliases: str = ""):
    """An instance of the flat dataclass `cls`: its defaults, then --config FILE, then the other flags.

    aliases names a module beside this one that knows other projects' flags, foreign_flags; it is imported
    only for a name that `cls` lacks, and may be absent.
    Raises ConfigError, with a line for each name that nobody knows. On --help prints help_text(cls) and exits
    with 0.
    """
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        if rank() == 0:
            print(help_text(cls), end="")
        sys.exit(0)
    kinds = kinds_of(cls) | {"config": (str, None)}
    foreign = Foreign()
    flags = list(_flags(argv))
    if any(name not in kinds for _, name, _ in flags):
        flags = translate_flags(flags, kinds, aliases, foreign)
    written = _each_once(flags, kinds)
    from_file = {}
    if "config" in written:
        _, path = written.pop("config")
        from_file = read_yaml(kinds_of(cls), path, aliases, foreign)
    check(not foreign.problems, foreign.problems)
    values = _fire(kinds, foreign.implied)
    values |= from_file
    values |= _fire(kinds, written)
    if foreign.project:
        note_defaults(foreign, set(values), cls)
    for note in foreign.notes:
        print0(note)
    return cls(**values)


def _each_once(flags: list[Flag], kinds: dict) -> dict[str, tuple[str, str]]:
    """(flag as written, text) by name. ConfigError for a name that is given twice, or lacks its value."""
    written: dict[str, tuple[str, str]] = {}
    for flag, name, text in flags:
        if name in written:
            first, _ = written[name]
            raise ConfigError(f"--{name} is given twice ({first}, {flag}): write it once")
        if text is None:
            _, text = kinds[name]
        check(text is not None, f"{flag} needs a value; one that starts with - as {flag}=VALUE")
        written[name] = (flag, text)
    return written


def check_least(cfg: object, **least: int) -> None:
    """Refuse a number below its least value, which is 0 where `least` names no other."""
    for name, value in asdict(cfg).items():
        if type(value) in (int, float):
            smallest = least.get(name, 0)
            check(value >= smallest, f"--{name} {value} is too small (fix: at least {smallest})")


def save_config(cfg: object, path: str | Path) -> None:
    """Write a config as YAML that --config reads back exactly. The file is complete or absent, never half."""
    values = {}
    for name, value in asdict(cfg).items():
        values[name] = str(value) if isinstance(value, Path) else value
    text = yaml.safe_dump(values, sort_keys=False, width=math.inf, allow_unicode=True)
    replace_file(Path(path), text)


def _flags(argv: list[str]) -> Iterator[Flag]:
    """Each flag of a command line. Words that fire misreads are refused."""
    words = list(argv)
    form = "every setting is written --name value"
    while words:
        word = words.pop(0)
        check(word not in ("-", "--"), f"a lone {word} has no meaning: {form}")
        check(FLAG.match(word), f"'{shown(word)}' belongs to no flag: {form}")
        flag, equals, text = word.partition("=")
        if not equals:
            has_text = words and not FLAG.match(words[0])
            text = words.pop(0) if has_text else None
        # -lr and ---lr keep their dashes and are unknown: fire takes -l for the one flag that starts with l.
        name = flag
        if re.match(r"--\w", flag):
            name = flag.removeprefix("--").replace("-", "_")
        yield flag, name, text


def _fire(kinds: dict, flags: dict[str, tuple[str, str]]) -> dict:
    """Values from (flag as written, text) by name; fire calls our reader in place of guessing a type."""
    values = {}
    readers = {}
    command = []
    for name, (flag, text) in flags.items():
        kind, bare_text = kinds[name]
        readers[name] = partial(read_value, kind, bare_text, flag)
        command.append(f"--{name}={bare_text if text is None else text}")

    def collect(**typed):
        values.update(typed)

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
    if positive in kinds and kinds[positive][0] is bool:
        return f"did you mean {dashes}{positive} false?"
    same = SHORT | (others or {}) | {key: key for key in kinds}
    most_edits = 0  # more of them make another word, and are no slip
    if len(name) > 4:
        most_edits = 1 if len(name) <= 8 else 2
    nearest = (3, True, "")
    for candidate in sorted(same.keys() | known):
        if abs(len(candidate) - len(name)) <= most_edits:
            distance = edits(name, candidate)
            nearest = min(nearest, (distance, candidate not in same, candidate))
    distance, _, meant = nearest
    ours = same.get(meant)
    if distance > most_edits or ours not in kinds:
        return "--help lists them all"
    return f"did you mean {dashes}{ours}?"


def edits(one: str, other: str) -> int:
    """How many letters to add, to leave out or to swap with their neighbour make `one` word `other`; 3 where
    it is more than 2 by their lengths. top_k and top_p are 2 apart.
    """
    if abs(len(one) - len(other)) > 2:
        return 3
    # Row i, column j: the edits between the first i letters of `one` and the first j of `other`.
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(one, start=1):
        above = rows[-1]
        row = [i]
        for j, other_letter in enumerate(other, start=1):
            replaced = above[j - 1] + 2 * (letter != other_letter)
            least = min(above[j] + 1, row[-1] + 1, replaced)
            if i > 1 and j > 1:
                swapped = one[i - 2] == other_letter and other[j - 2] == letter
                least = min(least, rows[-2][j - 2] + 1) if swapped else least
            row.append(least)
        rows.append(row)
    return rows[-1][-1]


def load_config(cls: type, path: str | Path):
    """An instance of `cls` from the flat YAML file `path`; what the file leaves out has its default."""
    return cls(**read_yaml(kinds_of(cls), str(path)))


def translate_flags(flags: list[Flag], kinds: dict, aliases: str, foreign: Foreign) -> list[Flag]:
    """The flags, those that `kinds` lacks in our words. `foreign` takes what else they mean, and a problem
    for each flag that nobody knows or that is refused.
    """
    table = _table(aliases)
    unknown = [name for _, name, _ in flags if name not in kinds]
    theirs = table and table.find_project(unknown)
    ours = []
    for flag, name, text in flags:
        if name in kinds:
            ours.append((flag, name, text))
            continue
        settings = _translate(table, theirs, flag, name, text, kinds, foreign)
        if settings is None:
            hint = _hint(table, name, kinds, "--")
            foreign.problems.append(f"unknown flag {shown(flag)} ({hint})")
            continue
        for our_name, our_text in settings.items():
            ours.append((flag, our_name, our_text))
    return ours


def note_defaults(foreign: Foreign, given: set[str], cls: type) -> None:
    """Add what the other project would train with where nothing was given. With a model only: without one the
    tiny task's own settings hold.
    """
    if "model" not in given:
        return
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}
    note = _table("foreign_flags").defaults_note(foreign.project, given, defaults)
    if note:
        foreign.notes.append(note)


def _table(aliases: str):
    """The module that knows other projects' flags; None where there is none: a copy may do without."""
    try:
        return importlib.import_module(f".{aliases}", __package__) if aliases else None
    except ModuleNotFoundError:
        return None


def _translate(
    table,
    theirs,
    at: str,
    name: str,
    text: str | None,
    kinds: dict,
    foreign: Foreign,
    in_file: bool = False,
) -> dict[str, str | None] | None:
    """Our settings for a name of another project, {} where it means none; None where nobody knows it."""
    if not table:
        return None
    try:
        settings, implied, note = table.translate(theirs, at, name, text, kinds, in_file)
    except ConfigError as error:
        foreign.problems += error.lines
        return {}
    if not note:
        return None
    for key, value in implied.items():
        foreign.implied[key] = (at, value)
    foreign.notes.append(note)
    foreign.project = theirs
    return settings


def _hint(table, name: str, kinds: dict, dashes: str = "") -> str:
    others = table.renamed() if table else {}
    known = table.known_names() if table else set()
    return near_setting(name, kinds, dashes, others, known)


def read_yaml(
    kinds: dict, path: str, aliases: str = "", foreign: Foreign | None = None
) -> dict[str, str | int | float | bool]:
    """The settings of a flat YAML file. Only its text counts: nothing is constructed, and YAML's own readings
    (no as False, 1e-4 as text, 010 as 8) never come into play.

    A file of another project is understood by its table; see translate_flags for aliases and foreign.
    """
    table = _table(aliases)
    foreign = foreign or Foreign()
    file = shown(path)
    entries = _read_entries(path)
    theirs = None
    if table and any(name not in kinds for name, _, _ in entries):
        entries = [leaf for entry in entries for leaf in _leaves(*entry, table)]
        unknown = [name for name, _, _ in entries if name not in kinds]
        foreign_names = [name for name in unknown if table.knows(None, name)]
        theirs = table.find_project(foreign_names) if foreign_names else None
    values = {}
    for name, line, node in entries:
        at = f"{file}:{line}: {shown(name)}"
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
            for our_name, our_text in settings.items():
                kind, bare_text = kinds[our_name]
                twice = f"{at} is {our_name} here, which is set before (fix: write one of them)"
                check(our_name not in values, twice)
                our_text = bare_text if our_text is None else our_text
                values[our_name] = read_value(kind, bare_text, at, our_text)
    return values


def _read_entries(path: str) -> list[Entry]:
    """The keys of a YAML file's mapping. ConfigError where it cannot be read, or is none."""
    file = Path(path)
    title = f"config file {shown(path)}"
    try:
        file.stat()
    except FileNotFoundError as error:
        hint = shown(did_you_mean(file))
        raise ConfigError(f"{title}: {error.strerror}{hint}") from None
    except (OSError, ValueError):
        pass  # read_small_text says what is wrong
    try:
        text = read_small_text(file, CONFIG_BYTES, title, "utf-8-sig")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        at = f"{shown(path)}:{error.problem_mark.line + 1}"
        fix = "write `name: value` lines, without tabs"
        raise ConfigError(f"{at}: {error.problem}; {fix}") from None
    except (OSError, ValueError, OverflowError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(f"{title}: {reason}") from None
    if root is None:
        return []
    is_mapping = isinstance(root, yaml.MappingNode)
    check(is_mapping, f"{shown(path)}: expected lines such as `lr: 1e-4`")
    return [(_name(key), _line(key), value) for key, value in root.value]


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


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


def _leaves(name: str, line: int, node: yaml.Node, table) -> list[Entry]:
    """A key of another project's file, or what is inside it: outer.inner for the keys of a mapping, also for
    those in a list of mappings; a list of texts is one text, with commas. What no table knows stays whole.
    """
    items = node.value if isinstance(node, yaml.SequenceNode) else []
    candidates = [node] if isinstance(node, yaml.MappingNode) else items
    mappings = [item for item in candidates if isinstance(item, yaml.MappingNode)]
    if mappings and len(mappings) == len(candidates) and table.has_inside(name):
        return _inner_leaves(name, mappings, table)
    if items and not mappings and table.knows(None, name):
        return [(name, line, _joined(items[:MOST_LEAVES]))]
    return [(name, line, node)]


def _inner_leaves(name: str, mappings: list[yaml.MappingNode], table) -> list[Entry]:
    """The leaves of several mappings; the values of a name that several have are joined."""
    pairs = itertools.chain.from_iterable(mapping.value for mapping in mappings)
    found: dict[str, Entry] = {}
    for key, value in itertools.islice(pairs, MOST_LEAVES):
        inner_name = f"{name}.{_name(key)}"
        for leaf_name, leaf_line, leaf in _leaves(inner_name, _line(key), value, table):
            if leaf_name in found:
                _, _, earlier = found[leaf_name]
                leaf = _joined([earlier, leaf])
            found[leaf_name] = (leaf_name, leaf_line, leaf)
    return list(found.values())


def _joined(nodes: list[yaml.Node]) -> yaml.Node:
    """Plain values as one, each once, with commas; the first node that is none."""
    values: dict[str, None] = {}
    for node in nodes:
        if not isinstance(node, yaml.ScalarNode):
            return node
        if not _is_empty(node):
            values |= dict.fromkeys(node.value.split(","))
    first = nodes[0]
    return yaml.ScalarNode(first.tag, ",".join(values), first.start_mark, first.end_mark)


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
