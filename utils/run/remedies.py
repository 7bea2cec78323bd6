"""What needs less memory: flags that are not set already, fewer ranks, or another machine."""

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
    package = __package__.rpartition(".")[0]
    planned = sys.modules.get(f"{package}.plan.planned")
    plan = getattr(planned, "current", None)
    return plan.flags if plan else None


def less_memory(
    act: str, flags: dict | None, gpu: bool = False, ranks: int = 0, of_gpu: bool = False
) -> str:
    """The remedies, the likeliest first. A flag whose value is not known may be one.

    flags: those of the run by name, None for a recipe that does not train; gpu: whether the ranks use GPUs;
    ranks: those of this machine, 0 if not known; of_gpu: the GPU's memory was too small, not the host's.
    """
    if of_gpu:
        return joined(["larger GPUs"] if flags is None else _for_gpu_memory(flags))
    fewer_ranks = [] if ranks == 1 else ["fewer ranks on this machine"]
    larger = "one with more memory" if fewer_ranks else "a machine with more memory"
    if flags is None:
        return joined([*fewer_ranks, larger])

    offloads = _may_be(flags, "cpu_offload", True)
    saves_in_background = _may_be(flags, "async_save", True)
    remedies = []
    if act not in ("train", "save"):
        if _may_be(flags, "low_cpu_fsdp", False):
            remedies.append("--low_cpu_fsdp")
        remedies += fewer_ranks
        if gpu and offloads:
            remedies.append("without --cpu_offload")
        return joined([*remedies, larger])
    if gpu:
        causes = ["--cpu_offload"] if offloads else []
        if saves_in_background:
            causes.append("--async_save")
        if causes:
            remedies.append("without " + " and ".join(causes))
    else:
        remedies = [*_fewer_rows(flags), *_recomputing(flags), *_shorter_rows(flags)]
        if saves_in_background:
            remedies.append("without --async_save")
    return joined([*remedies, *fewer_ranks, larger])


def _for_gpu_memory(flags: dict) -> list[str]:
    remedies = [*_recomputing(flags), *_fewer_rows(flags)]
    if _may_be(flags, "cpu_offload", False):
        offload = ["--cpu_offload"]
    else:
        offload = [] if remedies else ["larger GPUs"]
    return [*remedies, *_shorter_rows(flags), *offload]


def _may_be(flags: dict, name: str, *values: object) -> bool:
    """Whether a flag has one of these values, or is not known."""
    return name not in flags or flags[name] in values


def _recomputing(flags: dict) -> list[str]:
    partly = _may_be(flags, "activation_checkpointing", "none", "selective")
    return ["--activation_checkpointing full"] if partly else []


def _fewer_rows(flags: dict) -> list[str]:
    return ["a smaller --batch_size"] if flags.get("batch_size", 2) > 1 else []


def _shorter_rows(flags: dict) -> list[str]:
    """Where there can be no fewer of them."""
    return [] if _fewer_rows(flags) else ["a smaller --seq_len"]


def joined(remedies: list[str]) -> str:
    """As a sentence has them."""
    *first, last = remedies
    return f"{', '.join(first)}, or {last}" if first else last
