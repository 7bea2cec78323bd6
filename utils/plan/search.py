"""The settings that fit: for --fit, for a refusal, and for the tables of plan.py."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import yaml

from ..run.errors import ConfigError
from ..run.units import GIB
from .need import (
    FITS,
    MAYBE,
    TIGHT,
    TOO_LARGE,
    Need,
    Quant,
    Room,
    Setting,
    answer_of,
    need_of,
    planned_model,
)

RECOMPUTE = "none selective full".split()
TOKENS_STEP = 64  # step of a row's length
MOST_SIZE = 2**16  # limit of a search: rows, or steps of a row's length

# Flags that a plan may change -> the attribute of a setting.
LEVERS = {
    attribute.rpartition(".")[2]: attribute
    for attribute in "batch_size grad_accum activation_checkpointing activation_offload cpu_offload"
    " reshard_after_forward sync_each_microbatch low_cpu_fsdp async_save lora.lora_rank"
    " quant.quantization quant.int8_mode quant.quantize_head quant.keep_experts_16bit train".split()
}


def levers_of(setting: Setting) -> dict:
    """The value of each flag that a plan may change."""
    return {flag: attrgetter(attribute)(setting) for flag, attribute in LEVERS.items()}


def changes(before: Setting, after: Setting) -> dict:
    """The new values of the flags that differ between two settings."""
    old = levers_of(before)
    return {
        flag: value
        for flag, value in levers_of(after).items()
        if value != old[flag] and flag != before.lacks
    }


def flags_between(before: Setting, after: Setting) -> str:
    """The flags that lead from one setting to another, as they are typed."""
    return " ".join(
        f"--{name}" if value is True else f"--{name} {value}".lower()
        for name, value in changes(before, after).items()
    )


def first_that_fits(settings: Iterable[Setting], room: Room) -> Setting | None:
    """The first setting that fits. If none does, the first that fits tightly, else the first that may not
    fit; None if there is none of these. Settings that cannot be traced do not count.
    """
    second_best = {}
    for setting in settings:
        need = need_of(setting)
        answer = answer_of(setting, need, room) if need.peak else TOO_LARGE
        if answer == FITS:
            return setting
        second_best.setdefault(answer, setting)
    return second_best.get(TIGHT) or second_best.get(MAYBE)


def ways(setting: Setting) -> Iterator[Setting]:
    """All settings of the same method with the same rows in a step, the fastest first: offload costs most
    time, then reducing gradients in each micro-batch, then inputs on the host, then recomputing, then more
    micro-batches, then gathering layers twice. The last two choices are about the host's memory alone.
    """
    rows = setting.rows or setting.batch_size
    sizes = [-(-rows >> k) for k in range((rows - 1).bit_length() + 1)]  # as 11, 6, 3, 2, 1
    choices = {
        "cpu_offload": [setting.cpu_offload]
        if setting.optimizer_in_backward or not setting.gpu
        else [False, True],
        "sync_each_microbatch": sorted({setting.sync_each_microbatch, True}),
        "activation_offload": sorted({False, setting.activation_offload, setting.gpu}),
        "activation_checkpointing": RECOMPUTE,
        "batch_size": sizes[:1] if setting.optimizer_in_backward else sizes,
        "reshard_after_forward": [False, True]
        if setting.shards > 1
        else [setting.reshard_after_forward],
        "low_cpu_fsdp": sorted({setting.low_cpu_fsdp, True}),
        "async_save": sorted({setting.async_save, False}, reverse=True),
    }
    for values in itertools.product(*choices.values()):
        way = replace(setting, rows=rows, **dict(zip(choices, values, strict=True)))
        if way.activation_checkpointing != "none" or not way.activation_offload:
            yield way


def methods(setting: Setting) -> list[Setting]:
    """The setting itself, and with LoRA on frozen weights in 16, 8 and 4 bit, if recipe and model can have
    them: adapters are trained in fp32, and of a model that reads pictures only the language model.
    """
    if setting.lacks == "lora_rank" or setting.param_dtype.itemsize < 4:
        return [setting]
    lora = setting.lora or replace(setting.lora, lora_rank=16)
    settings = {setting: None}  # an ordered set
    for kind in ("none", "8bit", "4bit"):
        adapted = replace(setting, lora=lora, quant=Quant(kind), train=setting.train and "language")
        with suppress(ConfigError):  # no linear layer of the model can be quantized
            planned_model(adapted)
            settings[adapted] = None
    return list(settings)


def fastest(setting: Setting, room: Room, any_method=False, may_offload=True) -> Setting | None:
    """The fastest setting that fits, of the first method for which any setting fits."""
    for method in methods(setting) if any_method else [setting]:
        candidates = (way for way in ways(method) if may_offload or not way.cpu_offload)
        if fitting := first_that_fits(candidates, room):
            return fitting
    return None


def smallest_change(setting: Setting, room: Room) -> Setting | None:
    """The setting that fits and changes the fewest flags. The method changes only if nothing else fits."""

    def best(candidates):
        fewest_first = sorted(candidates, key=lambda candidate: len(changes(setting, candidate)))
        return first_that_fits(fewest_first, room)

    return best(ways(setting)) or best(
        way for method in methods(setting)[1:] for way in ways(method)
    )


def remedy(setting: Setting, room: Room) -> str:
    """The flags of the smallest change that fits; if there is none, other advice."""
    if change := smallest_change(setting, room):
        return flags_between(setting, change)
    if setting.gpu and need_of(setting).device <= room.device:  # the host has too little
        return "more machines, or more memory in each"
    if setting.gpu:
        return "more or larger GPUs, or a smaller --seq_len"
    return "a machine with more memory, or a smaller --seq_len"


def largest_batch(setting: Setting, room: Room) -> int:
    """The most rows of a micro-batch that fit, to 1 % or one row; 0 if not even one fits."""
    return largest_size(
        lambda rows: replace(setting, batch_size=rows, rows=rows * setting.grad_accum), room
    )


def largest_seq_len(setting: Setting, room: Room) -> int:
    """The most tokens that fit in a micro-batch of one row, in steps of 64 and to 1 %; 0 if none fit."""
    one_row = replace(setting, batch_size=1, rows=setting.grad_accum)
    return TOKENS_STEP * largest_size(
        lambda steps: replace(one_row, seq_len=TOKENS_STEP * steps),
        room,
        setting.seq_len // TOKENS_STEP or 1,
    )


def largest_size(setting_of: Callable, room: Room, high=1) -> int:
    """The largest size up to MOST_SIZE with which a setting fits, to 1 %, and never one with which it does
    not; 0 if none fits. high: the first size to try. Others above twice the result are not tried: some models
    take long to trace.
    """

    def fits(size):
        setting = setting_of(size)
        return answer_of(setting, need_of(setting), room) != TOO_LARGE

    low = 0
    while high <= MOST_SIZE and fits(high):
        low = high
        high = 2 * high
    while high - low > max(1, low / 100):
        middle = (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def fit_levers(setting: Setting, room: Room, any_method: bool) -> tuple:
    """--fit: (the fastest setting that fits; the values of the flags to change; the line to print).
    ConfigError if nothing fits.
    """
    best = fastest(setting, room, any_method)
    if not best:
        raise ConfigError(f"--fit: nothing fits in {room.text} (fix: {remedy(setting, room)})")
    chosen = changes(setting, best) | {
        "batch_size": best.batch_size,
        "grad_accum": 0,
        "global_batch_size": setting.global_batch_size
        or best.rows * setting.shards * setting.replicate,
    }
    return best, chosen, f"fitted    {flags_between(setting, best) or 'nothing had to change'}"


def refusal(setting: Setting, need: Need, room: Room) -> str:
    """One line: what does not fit, its largest part, and the smallest change that fits."""
    if need.device <= room.device:
        reason = f"the ranks of a machine need {need.host * setting.local_ranks / GIB:.2f} GiB of host memory"
    else:
        reason = f"a rank needs {need.device / GIB:.2f} GiB"
        if need.peak:
            parts = need.peak.parts
            name = max(parts, key=parts.get)
            reason += f", most of it {name}, {parts[name] / GIB:.2f} GiB"
    return (
        f"this does not fit: {reason}; there is {room.text} (fix: {remedy(setting, room)};"
        " or --force to try)"
    )


def fitted_before(out: Path) -> dict:
    """The values of LEVERS and the global batch size in the config.yaml of a run that was started with --fit;
    {} for another run, or without that file.
    """
    file = out / "config.yaml"
    settings = yaml.safe_load(file.read_text()) if file.exists() else {}
    return {
        name: value
        for name, value in settings.items()
        if settings.get("fit") and name in {*LEVERS, "global_batch_size"}
    }
