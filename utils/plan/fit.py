"""The memory plan of a run: what it needs and what this machine has; at its end also what was measured."""

import math
from pathlib import Path
from typing import NamedTuple

import torch

from ..run.distributed import World, all_gather
from ..run.errors import ConfigError, print0, story
from ..run.folder import write_plan
from ..run.memory import host_memory, memory_bytes, note_peak, peaks, reserved_peaks
from ..run.units import GIB
from .need import (
    COMPILED,
    HOST_SLACK,
    TIGHT,
    TOO_LARGE,
    WHY_TIGHT,
    Need,
    Room,
    Setting,
    answer_of,
    need_of,
)

# What cuBLAS takes of the allocator on a Hopper GPU: half of it for the forward, half for the backward.
WORKSPACES = GIB // 16


def available_room(world: World) -> Room:
    """The memory that is free on this machine. All ranks return the same values and text: those of the rank
    with the least.
    """
    used, limit = host_memory()
    host, limit, local_ranks = min(all_gather((limit - used, limit, world.local_size), world))
    if not world.on_gpu:
        share = host / local_ranks
        return Room(
            share, host, f"{share / GIB:.2f} GiB a rank, of {limit / GIB:.1f} GiB of host memory"
        )
    # mem_get_info creates this process's CUDA context, some hundred MiB. The reserve in need.py holds it too.
    device, _ = min(all_gather(torch.cuda.mem_get_info(world.device), world))
    return Room(
        device,
        host,
        f"{device / GIB:.2f} GiB free on a GPU and {host / GIB:.1f} GiB of host memory",
    )


class MemoryPlan(NamedTuple):
    """What the act `plan` found: the lines to print, the flags that --fit chose, what plan.json keeps.

    base: bytes that measured peaks also include: on a CPU this process before the build, on a GPU WORKSPACES.
    """

    text: str
    chosen: dict
    planned: dict
    base: int

    def finish(self, out: Path, world: World, **facts: object) -> None:
        """Print the measured peaks of the fullest rank beside the planned ones, and write both and `facts` to
        plan.json. This marks the run as finished. All ranks call it, in the last act.
        """
        note_peak(story.act)  # the last act is still running
        ranks, reserved = zip(*all_gather((peaks, reserved_peaks), world), strict=True)
        acts = {act: {"measured_bytes": max(rank[act] for rank in ranks)} for act in ranks[0]}
        texts = []
        for act, size in self.planned["acts"].items():
            measured = acts[act]["measured_bytes"]
            planned = self.base + size
            error = measured / planned - 1
            acts[act] |= {"planned_bytes": planned, "error": error}
            texts.append(
                f"{act} planned {planned / GIB:.2f}, measured {measured / GIB:.2f} ({error:+.1%})"
            )
        if not any(reserved):
            texts[-1] += (
                f"; glibc keeps what is freed, so up to {HOST_SLACK - 1:+.0%} is planned for"
            )
        print0(f"memory    GiB on the fullest rank: {', '.join(texts)}")
        measured = {"peak_memory_bytes": [max(rank.values()) for rank in ranks], "acts": acts}
        measured |= compare_reserved(reserved, self.planned["comfortable_bytes"])
        if world.rank == 0:
            write_plan(out, self.planned, measured | facts)


def compare_reserved(ranks: tuple, comfortable: int) -> dict:
    """Compare the peak bytes that the GPU allocator had reserved, by rank and act, with the bytes that the
    plan calls comfortable. Returns facts for plan.json; {} on a CPU.
    """
    if not any(ranks):
        return {}
    reserved = [max(rank.values()) for rank in ranks]
    error = max(reserved) / comfortable - 1
    print0(
        f"memory    GiB reserved {max(reserved) / GIB:.2f} of {comfortable / GIB:.2f} that were called"
        f" comfortable ({error:+.1%}), by the allocator of the fullest GPU"
    )
    return {"peak_reserved_bytes": reserved, "reserved_error": error}


def plan_memory(setting: Setting, world: World, fit="", fitted=(), force=False) -> MemoryPlan:
    """Whether a training run fits, before anything is allocated.

    fit: "same" searches for settings that fit, "any" also for LoRA and a quantized base. fitted: what an
    earlier start has chosen, if it has; it stays. If the run does not fit, it raises ConfigError with the
    smallest change that fits, unless `force`.
    """
    room = available_room(world)
    chosen = {}
    lines = []
    if fit and not fitted:
        from .search import fit_levers

        setting, chosen, line = fit_levers(setting, room, fit == "any")
        lines.append(line)
    need = need_of(setting)
    answer = answer_of(setting, need, room)
    if setting.compile and need.peak:
        lines.append(
            f"memory    estimated: compiled, {COMPILED:g} to 0.96 of these; the least must be there"
        )
    lines += [need.sentence(), room_sentence(setting, need, room, answer)]
    if answer == TOO_LARGE and not force:
        from .search import refusal

        raise ConfigError(refusal(setting, need, room))

    def less_memory():
        """What to do if memory runs out anyway: the smallest change that needs a tenth less."""
        from .search import remedy

        fix = remedy(setting, room._replace(device=need.device - 0.1 * max(need.acts.values())))
        if fit and fix.startswith("--"):
            fix = f"without --fit, and {fix}"  # --fit would choose the same settings again
        return fix

    # The host's memory too: if it runs out, the kernel kills the process, and no error says why.
    story.planned = (
        f"; planned {need.device / GIB:.2f} GiB a rank and {need.host * setting.local_ranks / GIB:.2f} GiB of"
        f" host memory, where there was {room.text}"
    )
    story.less_memory = less_memory
    peaks.clear()  # they are measured from here on
    reserved_peaks.clear()
    base = WORKSPACES if setting.gpu else memory_bytes()
    # for plan.json: bytes of the fullest rank
    facts = need.states._asdict() | {
        "device_bytes": need.device,
        "host_bytes": need.host,
        "room_bytes": room.device,
        "comfortable_bytes": need.comfortable,
        "answer": answer,
        "acts": need.acts,
    }
    if need.peak:
        facts |= need.peak._asdict() | {"peak_bytes": need.peak.total}
    return MemoryPlan("\n".join(lines), chosen, facts, base)


def room_sentence(setting: Setting, need: Need, room: Room, answer: str) -> str:
    """The plan's line about the bytes that are needed and those that there are."""
    if not setting.gpu:
        return (
            f"room      {need.device / GIB:.2f} GiB a rank, {HOST_SLACK} x what is alive, since glibc keeps"
            f" what is freed; there is {room.text}"
        )
    if answer == TIGHT:
        answer = f"{answer}, {WHY_TIGHT}"
    return (
        f"room      {need.device / GIB:.2f} GiB a rank must be there, {need.comfortable / GIB:.2f} GiB is"
        f" comfortable, {need.host * setting.local_ranks / GIB:.2f} GiB of host;"
        f" there is {room.text}: {answer}"
    )


def estimate_disk(weights: dict, steps: int, cfg: object, dtype: torch.dtype) -> int:
    """Bytes on disk of the final model and of the checkpoints that exist at the same time.

    weights: from open_weights, of the model folder. cfg: the settings of the run. A checkpoint has weights of
    `dtype` and two moments per weight, of this dtype or in 8 bit.
    """
    saves = math.ceil(steps / cfg.save_every) if cfg.save_every else 0
    saves = min(saves, cfg.keep + 1) if cfg.keep else saves
    moment_bytes = 1 if "8bit" in cfg.optimizer else dtype.itemsize
    checkpoint_bytes = saves * (dtype.itemsize + 2 * moment_bytes)
    return sum(
        math.prod(info.shape) * (info.dtype.itemsize + checkpoint_bytes)
        for info in weights.values()
    )
