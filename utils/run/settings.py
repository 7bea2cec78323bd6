"""A recipe's settings: a flat dataclass <- YAML <- flags; strict names and types; --help from the comments.

A recipe declares each setting once: `name: type = default  # meaning`; see help.py for the comments. Types:
str, int, float, bool and Literal of strings. If the flag of a Literal may stand without a value, its field
says which value that means: `field(default="none", metadata={"bare": "8bit"})`.
"""

import math
import os
import sys
import typing
from contextlib import suppress
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from shutil import which

import yaml

from .errors import ConfigError, check, print0
from .files import did_you_mean, replace_file

SWITCH = dict.fromkeys("true yes on 1".split(), True)
SWITCH |= dict.fromkeys("false no off 0".split(), False)
BARE = "True"  # the text of a flag without a value
LEAST = {"batch_size": 1, "epochs": 1, "seq_len": 2, "log_every": 1, "timeout": 1}
NUMBERS = {int: "a whole number such as 1000", float: "a finite number such as 0.001 or 1e-3"}


def parse_cli(cls: type, argv: list | None = None, without_model: dict | None = None, others=()):
    """An instance of the flat dataclass `cls`: its defaults, then --config FILE, then the other flags.

    Flags of llama-recipes are translated; foreign_flags.py, which knows them, is imported only for a name
    that `cls` lacks, and may be absent. without_model: values that replace the defaults if --model is
    not given. others: names of settings of a sibling recipe that are accepted but have no effect here. Raises
    ConfigError for wrong values, and with a line for each unknown name. On --help it prints help_text(cls)
    and exits with 0.
    """
    argv = sys.argv[1:] if argv is None else argv
    kinds = kinds_of(cls)
    if "--help" in argv or "-h" in argv:
        from .help import help_text

        print0(help_text(cls, kinds), ready=True)
        sys.exit(0)
    texts = split_words(argv)
    path = texts.pop("config", "")
    from_file = read_yaml(cls, read_value(str, None, "--config", path), others) if path else {}
    if without_effect := [f"--{name}" for name in others if texts.pop(name, "")]:
        print0(f"without effect here: {', '.join(without_effect)}")
    implied = {}
    if texts.keys() - kinds:
        with suppress(ModuleNotFoundError):  # a copy of utils may lack it
            from .foreign_flags import translate

            texts, implied = translate(texts, kinds)
    check(
        texts.keys() <= kinds.keys(),
        f"unknown flag --{', --'.join(sorted(texts.keys() - kinds))}: --help lists them all",
    )

    def read(texts):
        return {name: read_value(*kinds[name], f"--{name}", text) for name, text in texts.items()}

    values = read(implied) | from_file | read(texts)
    if without_model and "model" not in values:
        values = without_model | values
    return cls(**values)


def split_words(argv: list[str]) -> dict:
    """The text of each flag by name; the names are as typed, but with _ for -. If a flag is given twice, the
    last one counts, as launch scripts that append flags expect, and a line says so.
    """
    texts = {}
    name = ""  # of the flag that waits for its value
    for word in argv:
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            name = name.replace("-", "_")
            if name in texts:
                print0(f"--{name} is given twice: the last one counts")
            texts[name] = text if equals else BARE
            if equals:
                name = ""
        else:
            check(
                name,
                f"{word!r} belongs to no flag (fix: --config FILE if it is a file of settings, --name value"
                " if it is -name or name=value, and several values as one, with commas: --dataset a,b)",
            )
            texts[name] = word
            name = ""
    return texts


def kinds_of(cls: type) -> dict:
    """Each setting's type, and the value that its flag means without a value (None: it needs one)."""
    return {
        name: (
            kind,
            "true" if kind is bool else cls.__dataclass_fields__[name].metadata.get("bare"),
        )
        for name, kind in typing.get_type_hints(cls).items()
    }


def read_value(kind: type, bare: str | None, where: str, text: str) -> object:
    """`text` as a value of type `kind`, or ConfigError. where: the flag, or the line and key of a file."""
    word = text.lower()
    if kind is bool:
        check(word in SWITCH, f"{where} takes true or false, not '{text}'")
        return SWITCH[word]
    if text == BARE or (bare and SWITCH.get(word)):
        check(bare, f"{where} needs a value; one that starts with -- as {where}=VALUE")
        return bare
    if kind in NUMBERS:
        number = math.nan
        with suppress(ValueError):
            number = kind(text if kind is float else text.removesuffix(".0"))
        check(math.isfinite(number), f"{where} takes {NUMBERS[kind]}, not '{text[:60]}'")
        return number
    words = typing.get_args(kind)
    if not words:
        return text
    word = word.replace("bfloat", "bf").replace("float", "fp")  # such as bfloat16, torch's name
    check(word in words, f"{where} takes one of {', '.join(map(str, words))}; not '{text}'")
    return word


def from_settings(cls: type, cfg: object, **values: object):
    """An instance of the dataclass `cls`. A field gets its value from `values`, else from the setting of
    this name in `cfg`, else its default.
    """
    return cls(**{k: v for k, v in vars(cfg).items() if k in cls.__dataclass_fields__} | values)


def convert_settings(cfg: object, **least: int) -> None:
    """Convert values that a program gave to the types of their settings, in place: a Path becomes text,
    None an empty one, and ~ at the beginning of a text the home folder.

    Raises ConfigError for a value that its setting does not have, such as a misspelt one, and for a number
    below its minimum: the one in `least` or LEAST, else 0.
    """
    least = LEAST | least
    for name, (kind, bare) in kinds_of(type(cfg)).items():
        value = vars(cfg)[name]
        text = "" if value is None and kind is str else os.path.expanduser(str(value))
        value = read_value(kind, bare, f"--{name}", text)
        setattr(cfg, name, value)
        if kind in NUMBERS:
            smallest = least.get(name, 0)
            check(value >= smallest, f"--{name} {value} is too small (fix: at least {smallest})")


def check_training(cfg: object, **least: int) -> None:
    """convert_settings, and a ConfigError for settings that every recipe that trains refuses."""
    convert_settings(cfg, **least)
    check(
        cfg.model or not vars(cfg).get("adapter"),
        "--adapter belongs to one base (fix: --model BASE, which its adapter_config.json names)",
    )
    check(cfg.lr > 0, f"--lr {cfg.lr} trains nothing (fix: --lr {type(cfg).lr:g})")
    check(
        cfg.activation_checkpointing != "none" or not cfg.activation_offload,
        "--activation_offload has no inputs (fix: --activation_checkpointing full)",
    )
    check(
        cfg.eval_dataset or cfg.eval_share or not cfg.eval_every,
        "--eval_every has no rows (fix: --eval_share 0.02)",
    )


def check_settled(cfg: object, gpu: str) -> None:
    """What can be asked only of settings that are settled, once in a run. Raise ConfigError if a package that
    they need is not installed, or does not support their dtype or device. Warn of a rate that is low for bf16
    weights. gpu: the name of the GPU; "" without one.
    """
    if cfg.param_dtype == "bf16" and cfg.lr < 1e-4:
        print0(
            f"warning: in bf16 weights most updates of --lr {cfg.lr:g} are rounded away (fix: fp32"
            " weights, with --optimizer adamw_8bit if they do not fit; or a higher --lr)"
        )
    for name in ("tensorboard", "wandb"):
        if vars(cfg)[name]:
            spec = find_spec(name)
            # A folder named wandb, left by an earlier run, is found too, but has no origin.
            check(spec and spec.origin, f"--{name} needs a package (fix: pip install {name})")
    # inductor writes C++ for a CPU; for a GPU, triton compiles C
    variable, usual = ("CC", "gcc clang") if gpu else ("CXX", "g++")
    check(
        not cfg.compile or any(map(which, os.environ.get(variable, usual).split())),
        f"--compile needs a compiler ({usual}), none is here"
        f" (fix: apt install build-essential, or {variable}=COMPILER)",
    )
    if cfg.attn == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        check(
            gpu and cfg.dtype != "fp32",
            f"--attn {cfg.attn} computes in 16 bit on GPUs, not in {cfg.dtype} on {gpu or 'the CPU'}"
            " (fix: --attn sdpa)",
        )
        check(
            is_flash_attn_2_available(),
            f"--attn {cfg.attn}: the package is missing (fix: pip install flash-attn)",
        )


def save_config(cfg: object, path: Path) -> None:
    """Write a config as YAML that --config reads back exactly. The file is complete or absent, never half."""
    text = yaml.safe_dump(asdict(cfg), sort_keys=False, width=math.inf, allow_unicode=True)
    replace_file(path, text)


def read_yaml(cls: type, path: str | Path, others=()) -> dict:
    """The settings of a flat YAML file, except those named in `others`. ConfigError names the line.

    `null` means the default, and an unknown name without a value is skipped. Values are read from their text,
    as flags are. YAML's own conversions (no to False, 1e-4 to text, 010 to 8) do not apply.
    """
    kinds = kinds_of(cls)
    try:
        root = yaml.compose(Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = str(getattr(error, "strerror", error))
        raise ConfigError(
            f"--config {path}: {' '.join(reason.split())}{did_you_mean(Path(path))}"
        ) from None
    if not root:
        return {}
    check(isinstance(root, yaml.MappingNode), f"{path}: expected lines such as `lr: 1e-4`")
    values = {}
    problems = []
    for key, node in root.value:
        at = f"{path}:{key.start_mark.line + 1}: {key.value}"
        name = str(key.value).replace("-", "_")
        if name in others or (
            node.tag == "tag:yaml.org,2002:null" and (node.value or name not in kinds)
        ):
            continue
        if type(key) is yaml.ScalarNode and name not in kinds:
            advice = "--help lists them all"
            with suppress(ModuleNotFoundError):  # a copy of utils may lack it
                from .foreign_flags import meaning_of

                advice = meaning_of(name, kinds, node.value)
            problems.append(f"{at} is no setting: {advice}")
        elif not type(key) is type(node) is yaml.ScalarNode:
            problems.append(f"{at}: one `name: value` a line, no lists and no mappings")
        else:
            check(name not in values, f"{at} is set twice: write it once")
            try:
                values[name] = read_value(*kinds[name], at, node.value)
            except ConfigError as error:
                problems += error.lines
    check(not problems, problems)
    return values
