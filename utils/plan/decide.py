"""Whether a training run fits this machine, what it is told, and which knobs --fit turns."""

from dataclasses import asdict, replace

from ..run.distributed import World
from ..run.errors import ConfigError
from ..run.memory import memory_bytes
from ..run.units import GIB
from .fit import Need, Planner
from .planned import Knobs, MemoryPlan, Workload
from .reserve import TIGHT, TOO_LARGE, WHY_TIGHT, room


def decide(
    workload: Workload,
    knobs: Knobs,
    world: World,
    fit: str,
    fitted: bool,
    force: bool,
    flags: dict[str, object],
) -> MemoryPlan:
    """See memory.plan_memory. flags: for the remedies of errors.

    Raises ConfigError with the smallest change that helps where the run does not fit, unless force.
    """
    device_bytes, host_bytes, room_text = room(world)
    planner = planner_of(workload, world)
    rows = workload.global_batch_size // workload.ranks
    rows = rows or knobs.batch_size * max(1, knobs.grad_accum)
    knobs = replace(knobs, grad_accum=max(1, rows // knobs.batch_size))
    chosen: dict[str, object] = {}
    lines = []
    if fit and not fitted:
        best = planner.fastest(knobs, device_bytes, host_bytes, fit == "any")
        if not best:
            larger = "more or larger GPUs" if planner.gpu else "a machine with more memory"
            wider = "" if fit == "any" else ", --fit any"
            fix = f"{larger}{wider}, a smaller --seq_len"
            raise ConfigError(f"--fit: nothing fits in {room_text} (fix: {fix})")
        line = f"fitted    {best.flags(knobs) or 'nothing had to change'}"
        if planner.answer_for(best, device_bytes, host_bytes) == TIGHT:
            line += "; tightly, since nothing that may be changed makes it comfortable"
        lines.append(line)
        chosen = {n: value for n, value in asdict(best).items() if value != getattr(knobs, n)}
        chosen |= {"batch_size": best.batch_size, "grad_accum": 0}
        chosen["global_batch_size"] = rows * workload.ranks
        knobs = best
    need = planner.need(knobs)
    answer = planner.answer(need, device_bytes, host_bytes)
    if workload.compile and need.peak:
        lines.append("memory    estimated: compiled blocks keep less than these, which are not")
    lines.append(need.sentence())
    lines.append(room_sentence(planner, need, room_text, answer))
    if answer == TOO_LARGE and not force:
        raise ConfigError(refusal(planner, knobs, need, device_bytes, host_bytes, room_text))

    def smallest_change() -> str:
        """What would keep a tenth less alive."""
        alive = need.peak.total if need.peak else need.states.total
        change = planner.remedy(knobs, need.device - 0.1 * alive, host_bytes)
        if fit and change.startswith("--"):
            return f"without --fit, and {change}"  # it would choose again what it is asked to leave
        return change

    return MemoryPlan(
        "\n".join(lines),
        chosen,
        planned_facts(need, device_bytes, answer),
        base=0 if planner.gpu else memory_bytes(),
        largest=need.most(),
        change=smallest_change,
        flags=flags | asdict(knobs),
    )


def planner_of(workload: Workload, world: World) -> Planner:
    """What plans this run on this machine."""
    return Planner(
        workload.structure,
        workload.dtype,
        workload.shards,
        workload.seq_len,
        local=world.local_ranks,
        replicate=workload.ranks // workload.shards,
        gpu=world.device.type == "cuda",
        gloo=world.device.type == "cpu",
        optimizer=workload.optimizer,
        packed=workload.packing,
        sync_each=workload.sync_each_microbatch,
        low_cpu=workload.low_cpu_fsdp,
        async_save=workload.async_save,
        lora=workload.lora,
        quant=workload.quant,
    )


def planned_facts(need: Need, device_bytes: float, answer: str) -> dict[str, object]:
    """What plan.json keeps of the plan; sizes in bytes of the fullest rank."""
    facts = asdict(need.states) | {
        "device_bytes": need.device,
        "host_bytes": need.host,
        "room_bytes": device_bytes,
        "comfortable_bytes": need.comfortable,
        "answer": answer,
        "acts": need.acts,
    }
    if need.peak:
        facts["peak_bytes"] = need.peak.total
        facts["phase"] = need.peak.phase
        facts["parts"] = need.peak.parts
        facts["pools"] = need.peak.pools
    return facts


def room_sentence(planner: Planner, need: Need, room_text: str, answer: str) -> str:
    """What the plan prints of what is needed and what there is."""
    device = f"{need.device / GIB:.2f} GiB"
    if not planner.gpu:
        return f"room      {device} a rank, reserve included; there is {room_text}"
    comfortable = f"{need.comfortable / GIB:.2f} GiB is comfortable"
    host = f"{need.host * planner.local / GIB:.2f} GiB of host"
    if answer == TIGHT:
        answer = f"{answer}, {WHY_TIGHT}"
    needed = f"{device} a rank must be there, {comfortable}, {host}"
    return f"room      {needed}; there is {room_text}: {answer}"


def refusal(
    planner: Planner,
    knobs: Knobs,
    need: Need,
    device_bytes: float,
    host_bytes: float,
    room_text: str,
) -> str:
    """One line: what does not fit, its largest part, and the smallest change that does."""
    if need.device <= device_bytes:
        host = f"{need.host * planner.local / GIB:.2f} GiB of host memory"
        text = f"the ranks of a machine need {host}"
    else:
        text = f"a rank needs {need.device / GIB:.2f} GiB"
    if need.peak:
        text += f", {need.most()}"
    fix = planner.remedy(knobs, device_bytes, host_bytes)
    return f"this does not fit: {text}; there is {room_text} (fix: {fix}; or --force to try)"
