"""What needs less memory, of what is not set already."""

import sys

NAMES = (
    "batch_size",
    "activation_checkpointing",
    "cpu_offload",
    "async_save",
    "low_cpu_fsdp",
    "fit",
)


def settings() -> dict | None:
    """The flags of this run, after --fit; None where a recipe plans none."""
    plan = getattr(
        sys.modules.get(f"{__package__.rpartition('.')[0]}.plan.planned"), "current", None
    )
    return plan.flags if plan else None


def less_memory(
    act: str, flags: dict | None, gpu: bool = False, ranks: int = 0, of_gpu: bool = False
) -> str:
    """The remedies, the likeliest first. What no flag is known of is told too.

    flags: the run's by name, None of a recipe that does not train; gpu: whether ranks drive one; ranks: of
    this machine, 0 if not known; of_gpu: the GPU's memory was too small, not the host's.
    """
    fewer = [] if ranks == 1 else ["fewer ranks on this machine"]
    more = (
        "larger GPUs"
        if of_gpu
        else "one with more memory"
        if fewer
        else "a machine with more memory"
    )
    if flags is None:
        return joined([*([] if of_gpu else fewer), more])

    def may_be(name: str, *values: object) -> bool:
        return flags.get(name, values[0]) in values

    full = ["--activation_checkpointing full"] * may_be(
        "activation_checkpointing", "none", "selective"
    )
    rows = ["a smaller --batch_size"] * (flags.get("batch_size", 2) > 1)
    shorter = [] if rows else ["a smaller --seq_len"]
    offload, background = may_be("cpu_offload", True), may_be("async_save", True)
    if of_gpu:
        away = ["--cpu_offload"] * may_be("cpu_offload", False)
        return joined([*full, *rows, *shorter, *away, *([] if full or rows or away else [more])])
    if act not in ("train", "save"):
        whole = ["--low_cpu_fsdp"] * may_be("low_cpu_fsdp", False)
        return joined([*whole, *fewer, *["without --cpu_offload"] * (gpu and offload), more])
    if gpu:
        without = [
            name
            for name, set_ in (("--cpu_offload", offload), ("--async_save", background))
            if set_
        ]
        return joined([*["without " + " and ".join(without)] * bool(without), *fewer, more])
    return joined([*rows, *full, *shorter, *["without --async_save"] * background, *fewer, more])


def joined(remedies: list[str]) -> str:
    """As a sentence has them."""
    *first, last = remedies
    return f"{', '.join(first)}, or {last}" if first else last
