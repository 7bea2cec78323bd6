"""A peft folder from elsewhere, before it is used: its settings by type, its tensors by header, its regular
expressions within a limit of time.

Everything in such a folder is input. peft matches several of its settings as regular expressions, and one
such as (a+)+b takes longer than anybody waits; and it takes them in any type, so that a wrong one fails far
from its cause.
"""

import json
import math
import os
import re
import signal
import stat
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors import SafetensorError, safe_open
from torch import nn

from ..run.errors import ConfigError, check, first_five
from ..run.files import AGAIN
from ..run.units import MIB
from .folder import read_json

SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
MAX_SETTINGS_BYTES = 16 * 2**20  # the largest honest ones list each expert of each layer: some MiB
MAX_RANK = 100_000  # above the width of any layer there is
MATCHING_SECONDS = 10  # of the CPU; some milliseconds are usual
ANOTHER = "another --adapter"
STARTS = (True, False, "gaussian", "orthogonal")  # init_lora_weights that leave the base as it is
NEEDS = "starts from whole weights or from data, which no rank has when adapters are made"
IGNORED = {
    "peft_type",
    "peft_version",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
}


def _is_rank(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_RANK


def _is_scale(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value != 0


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1


def _is_switch(value: object) -> bool:
    return isinstance(value, bool)


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _is_plain_names(value: object) -> bool:
    return _is_names(value) and all(re.fullmatch(r"[\w.-]+", name) for name in value)


def _is_pattern(value: object) -> bool:
    return isinstance(value, str) or _is_names(value)


def _is_layers(value: object) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return all(type(number) is int and number >= 0 for number in numbers)


def _is_ranks(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_rank, value.values()))


def _is_scales(value: object) -> bool:
    return isinstance(value, dict) and all(map(_is_scale, value.values()))


def _is_path(value: object) -> bool:
    """What may be a path or a Hugging Face id; control characters and lone surrogates are not printable."""
    short = (
        isinstance(value, str)
        and len(value) < 4096
        and all(len(part) < 256 for part in value.split("/"))
    )
    return short and value.isprintable()


# Setting -> (is a value good, what it has to be). Those that are null are left out.
PATTERNS = "a list of names, or one regular expression"
READ: dict[str, tuple[Callable, str]] = {
    "r": (_is_rank, f"a whole number from 1 to {MAX_RANK}"),
    "lora_alpha": (_is_scale, "a finite number other than 0"),
    "lora_dropout": (_is_share, "a number from 0 to below 1"),
    "use_rslora": (_is_switch, "true or false"),
    "use_dora": (_is_switch, "true or false"),
    "fan_in_fan_out": (_is_switch, "true or false"),
    "target_modules": (_is_pattern, PATTERNS),
    "exclude_modules": (_is_pattern, PATTERNS),
    "modules_to_save": (_is_plain_names, "a list of names"),
    "rank_pattern": (_is_ranks, f"names of layers with whole numbers from 1 to {MAX_RANK}"),
    "alpha_pattern": (_is_scales, "names of layers with finite numbers other than 0"),
    "layers_to_transform": (_is_layers, "numbers of layers"),
    "layers_pattern": (_is_pattern, PATTERNS),
}
MERGED: dict[str, tuple[Callable, str]] = {  # can be merged into a base, but not trained on
    "bias": (lambda value: value in ("none", "all", "lora_only"), "none, all or lora_only"),
    "lora_bias": (_is_switch, "true or false"),
    "ensure_weight_tying": (_is_switch, "true or false"),
}


class _TooLong(Exception):
    """The CPU time for regular expressions is used up."""


@contextmanager
def limited_matching(what: str, fix: str, seconds: float = 0) -> Iterator[None]:
    """Raise ConfigError where the block takes more CPU time than that; 0: MATCHING_SECONDS.

    Python looks for signals while it matches a regular expression, so that a handler that raises ends it.
    """

    def stop(*_) -> None:
        raise _TooLong

    seconds = seconds or MATCHING_SECONDS
    earlier = signal.signal(signal.SIGVTALRM, stop)
    try:
        # and again, should peft have caught it
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 1.0)
        yield
    except _TooLong:
        how_long = f"a regular expression was not matched after {seconds:g} s"
        raise ConfigError(f"{what}: {how_long} (fix: {fix})") from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, earlier)


def read_settings(folder: Path) -> dict:
    """What adapter_config.json says. Raises ConfigError by setting for what is no adapter's."""
    file = Path(folder) / SETTINGS
    whole = _is_regular(file) and _is_regular(file.with_name(TENSORS))
    check(whole, f"{folder}: no {SETTINGS} with {TENSORS} (fix: a peft folder)")
    size = os.stat(file).st_size
    check(size <= MAX_SETTINGS_BYTES, f"{file}: {size / MIB:.0f} MiB are no settings {AGAIN}")
    return read_json(file)


def base_of(folder: Path) -> str:
    """The model that an adapter says it was trained on; "" where it says none."""
    name = read_settings(folder).get("base_model_name_or_path") or ""
    what = f"{Path(folder) / SETTINGS}: base_model_name_or_path"
    check(
        _is_path(name),
        f"{what} {_value(name)} is neither a folder nor a Hugging Face id (fix: --model)",
    )
    return name


def read_lora_config(folder: Path, merge: bool = False) -> LoraConfig:
    """The settings of a LoRA folder as peft's config; whatever is not read here has to be as peft has it
    where nobody asks.

    merge: it is merged into its base, not trained. Raises ConfigError by setting.
    """
    file, stored, plain = Path(folder) / SETTINGS, read_settings(folder), LoraConfig().to_dict()
    kind, init = stored.get("peft_type"), stored.get("init_lora_weights", True)
    known = any(init == start and type(init) is type(start) for start in STARTS)
    why = "cannot be merged file by file" if merge else NEEDS
    fix = "merge it with peft" if merge else ANOTHER
    check(known, f"{file}: init_lora_weights {_value(init)} {why} (fix: {fix})")
    read = READ | (MERGED if merge else {})
    others = {name: value for name, value in stored.items() if name not in read.keys() | IGNORED}
    others.pop("init_lora_weights", None)
    odd = [(name, value) for name, value in others.items() if value and value != plain.get(name)]
    if kind != "LORA":
        odd.insert(0, ("peft_type", kind))
    names = first_five([f"{name} {_value(value)}".rstrip() for name, value in odd])
    check(not odd, f"{file}: {names} {why if merge else 'cannot be used here'} (fix: {fix})")
    given = {name: stored[name] for name in read if stored.get(name) is not None}
    for name, value in given.items():
        is_good, wanted = read[name]
        what = json.dumps(value, ensure_ascii=False)[:200]
        check(
            is_good(value),
            f"{file}: {name}: {what} is not {wanted} (fix: correct it, or {ANOTHER})",
        )
    targets = given.get("target_modules")
    check(targets, f"{file}: target_modules: it names no layer (fix: correct it, or {ANOTHER})")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that change nothing
            return LoraConfig(**given, task_type="CAUSAL_LM")
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{file}: {first_line(error)} (fix: correct it, or {ANOTHER})") from None


def adapted_modules(model: nn.Module, config: LoraConfig, where: str = "") -> set[str]:
    """The modules that peft will adapt. where: the file of the config, for errors.

    Every regular expression is first matched here, as peft writes it, with every name that peft will try it
    on: one that takes too long, or is none, is one line that names the setting.
    """
    names = [name for name, _ in model.named_modules() if name]
    whole, below = "{}", r"(?:^|.*?\.){}\.(?P<idx>\d+)\."
    for setting, form in (
        ("exclude_modules", whole),
        ("target_modules", whole),
        ("layers_pattern", below),
    ):
        patterns = getattr(config, setting)
        if setting == "layers_pattern" and isinstance(patterns, list) or isinstance(patterns, str):
            patterns = patterns if isinstance(patterns, list) else [patterns]
            _try_all(
                [form.replace("{}", pattern) for pattern in patterns], names, f"{where}: {setting}"
            )
    found = {name for name in names if check_target_module_exists(config, name)}
    for setting in ("rank_pattern", "alpha_pattern"):
        patterns = [rf"(.*\.)?({pattern})$" for pattern in getattr(config, setting) or ()]
        _try_all(patterns, sorted(found), f"{where}: {setting}")
    return found


def _try_all(patterns: list[str], names: list[str], where: str) -> None:
    fix = "names of layers in its place"
    try:
        with limited_matching(where, fix), warnings.catch_warnings():
            # of regular expressions that Python will read otherwise one day
            warnings.simplefilter("ignore")
            for pattern in patterns:
                expression = re.compile(pattern)
                for name in names:
                    expression.match(name)
                    expression.fullmatch(name)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(
            f"{where}: no regular expression: {first_line(error)} (fix: {fix})"
        ) from None


def stored_shapes(file: Path) -> dict[str, list[int]]:
    """Name -> shape of the tensors in an adapter's file. Raises ConfigError where it is damaged, or holds
    what are no floating-point numbers.
    """
    check(_is_regular(file), f"{file} is no regular file (fix: a peft folder)")
    try:
        with safe_open(file, framework="pt") as tensors:
            slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - not a dict
            odd = [
                name
                for name, part in slices.items()
                if not part.get_dtype().startswith(("F", "BF"))
            ]
            check(
                not odd,
                f"{file}: no floating-point numbers: {first_five(odd)} (fix: another --adapter)",
            )
            return {name: part.get_shape() for name, part in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file}: {first_line(error)} (fix: copy it again)") from None


def check_finite(file: Path, name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinity, which would make every answer of the model one."""
    good = bool(tensor.isfinite().all())
    check(good, f"{file}: {name} holds numbers that are not finite (fix: another --adapter)")


def first_line(error: Exception) -> str:
    """The start of what a library raised."""
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _is_regular(file: Path) -> bool:
    try:
        return stat.S_ISREG(os.stat(file).st_mode)
    except OSError:
        return False


def _value(value: object) -> str:
    """A setting's value in a message: text and numbers as they are, but not a whole list."""
    return "" if isinstance(value, list | dict) else str(value)[:200]
