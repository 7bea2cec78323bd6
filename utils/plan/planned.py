"""What a run needs: memory, planned before it and compared after it, and disk."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
import yaml

from ..model.options import Lora, Quant
from ..run.distributed import World, gather
from ..run.errors import ConfigError, advise_on_memory, end_act, print0, reason_of_others
from ..run.files import CONFIG_BYTES, read_small_text
from ..run.memory import peaks, reserved_peaks
from ..run.units import GIB


@dataclass(frozen=True)
class Knobs:
    """What may be turned until a run fits. The names are those of the flags."""

    batch_size: int = 1
    grad_accum: int = 1
    activation_checkpointing: str = "none"
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    lora_rank: int = 0
    quantization: str = "none"

    def flags(self, others: "Knobs") -> str:
        """The flags that lead from `others` to these, as they are typed."""
        words = []
        for name, value in asdict(self).items():
            if value == getattr(others, name):
                continue
            if value is True:
                words.append(f"--{name}")
            else:
                words.append(f"--{name} {'false' if value is False else value}")
        return " ".join(words)


KNOBS = tuple(knob.name for knob in fields(Knobs))


@dataclass(frozen=True)
class Workload:
    """What of a training run decides its memory, beside the knobs."""

    structure: tuple  # config, dtype of the parameters, attention, trust_remote_code
    dtype: torch.dtype  # of compute
    shards: int  # ranks that a copy of the model is cut over
    ranks: int
    seq_len: int  # tokens of the longest row
    packing: bool = False
    global_batch_size: int = 0  # 0: what the knobs and the ranks make
    optimizer: str = "adamw"
    sync_each_microbatch: bool = False
    low_cpu_fsdp: bool = True
    async_save: bool = False
    compile: bool = False
    lora: Lora = Lora()
    quant: Quant = Quant()


@dataclass(frozen=True)
class MemoryPlan:
    """What the act `plan` found: the lines to print, the flags to go on with, what plan.json keeps.

    base: bytes that a process on a CPU had before the model came, which its measured
    peaks also hold.
    largest: which part of the planned peak is. change: finds the smallest change of flags that needs less.
    """

    text: str
    chosen: dict[str, object] = field(default_factory=dict)
    planned: dict[str, object] = field(default_factory=dict)
    base: int = 0
    largest: str = ""
    change: Callable[[], str] | None = None
    flags: dict[str, object] = field(default_factory=dict)  # those that change what is needed

    def advice(self) -> str:
        """What was planned, and the smallest change that needs less."""
        need_gib, room_gib = (self.planned[f"{name}_bytes"] / GIB for name in ("device", "room"))
        fix = self.change() if self.change else "fewer ranks, or more memory"
        return f"planned {need_gib:.2f} of {room_gib:.2f} GiB a rank (fix: {fix})"

    def compare(self, world: World) -> dict:
        """What plan.json keeps of the measured peaks; prints those of the fullest rank beside the plan. All
        ranks call it, in the last act.
        """
        end_act()
        ranks, reserved = zip(*gather(world, (peaks, reserved_peaks)), strict=True)
        acts, told = (
            {act: {"measured_bytes": max(rank[act] for rank in ranks)} for act in ranks[0]},
            [],
        )
        for act, size in self.planned.get("acts", {}).items():
            most, planned = acts[act]["measured_bytes"], self.base + size
            if planned:
                acts[act] |= {"planned_bytes": planned, "error": most / planned - 1}
                both = f"planned {planned / GIB:.2f}, measured {most / GIB:.2f}"
                told.append(f"{act} {both} ({most / planned - 1:+.1%})")
        most_of_rank = [max(rank.values()) for rank in ranks]
        note = "; with what a process on a CPU had before" if self.base else ""
        if self.base and not is_tight(self.planned):
            note += ", and what glibc keeps where there is room"
        told = told or [f"measured {max(most_of_rank) / GIB:.2f}"]
        print0(f"memory    GiB on the fullest rank: {', '.join(told)}{note}")
        return {"peak_memory_bytes": most_of_rank, "acts": acts} | self.compare_reserved(
            reserved, acts
        )

    def compare_reserved(self, ranks: tuple[dict[str, int], ...], acts: dict) -> dict:
        """The same of what the allocator of a GPU had reserved by act; {} on a CPU. Adds it to `acts`."""
        if not any(ranks):
            return {}
        for act in acts:
            acts[act]["reserved_bytes"] = max(rank.get(act, 0) for rank in ranks)
        peaks = [max(rank.values()) for rank in ranks]
        told, found = f"reserved {max(peaks) / GIB:.2f}", {"peak_reserved_bytes": peaks}
        if comfortable := self.planned.get("comfortable_bytes"):
            found["reserved_error"] = error = max(peaks) / comfortable - 1
            told += f" of {comfortable / GIB:.2f} that were called comfortable ({error:+.1%})"
        print0(f"memory    GiB {told}, by the allocator of the fullest GPU")
        return found


def remember(plan: MemoryPlan) -> MemoryPlan:
    """Let errors advise by this plan, where memory runs out; its peaks are measured from here on."""
    peaks.clear()
    reserved_peaks.clear()
    if "device_bytes" in plan.planned:
        advise_on_memory(plan.advice)
    return plan


def fitted_before(out: Path) -> dict[str, object]:
    """The knobs, and the global batch, in the config.yaml of a run folder that was begun with --fit; {} where
    there is none. Raises ConfigError naming the file.
    """
    file = out / "config.yaml"
    if not file.exists():
        return {}
    try:
        settings = yaml.safe_load(read_small_text(file, CONFIG_BYTES))
        was_fitted = settings.get("fit")
    except (yaml.YAMLError, ValueError, RecursionError, AttributeError) as error:
        reason = reason_of_others(error)
        raise ConfigError(f"{file}: {reason} (fix: another --output_dir)") from None
    names = (*KNOBS, "global_batch_size")
    return {name: settings[name] for name in names if name in settings} if was_fitted else {}


def is_tight(planned: dict) -> bool:
    """Whether a rank's share of the memory is used by more than half."""
    return 2 * planned["device_bytes"] > planned["room_bytes"]


def estimate_disk(
    weights: dict, steps: int, save_every: int, keep: int, optimizer: str = "adamw"
) -> int:
    """Bytes of the final model and of as many checkpoints as there are at a time.

    weights: of the folder that is trained, as open_weights gives them. A checkpoint has fp32 weights and two
    moments of each, in fp32 or 8 bit.
    """
    saves = math.ceil(steps / save_every) if save_every else 0
    saves = min(saves, keep + 1) if keep else saves
    kept = saves * (6 if "8bit" in optimizer else 12)
    return sum(math.prod(info.shape) * (info.dtype.itemsize + kept) for info in weights.values())
