"""
Will it fit? The memory of a fine-tune by part, before there is a GPU, a weight or a process group.

    python recipes/plan.py --model llama-3-8b --gpus 2 --gpu_memory 24
    python recipes/plan.py --model DIR --gpus 8 --gpu_memory 80 --host_memory 512 --seq_len 32768 --json
    python recipes/plan.py --config configs/llama3_8b_full_8x80gb.yaml --model llama-3-8b --gpus 8 --gpu h100

--config takes the file of a run of any recipe that trains. It prints what the given settings need, what every
method with recomputing and offload would need, and a command that fits; for grpo.py only the first of these,
and what the completions need.
"""

import difflib
import gc
import itertools
import json
import math
import os
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

if __name__ == "__main__":
    gc.disable()  # the imports leave nothing to collect: saves 0.5 s
    # bitsandbytes would import the compiler.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch
import transformers
from torch.utils._pytree import tree_map

from utils.data.batches import divide_batch
from utils.model.attention import settle_attention
from utils.model.kinds import parse_parts
from utils.model.loading import build_model
from utils.model.options import Lora, Quant, check_adapter_flags
from utils.model.sharding import DTYPES
from utils.plan.fit import MemoryPlan
from utils.plan.generation import plan_rollout
from utils.plan.need import (
    FITS,
    MAYBE,
    TIGHT,
    TOO_LARGE,
    WHY_TIGHT,
    Need,
    Room,
    Setting,
    answer_of,
    estimate_states,
    need_of,
    planned_model,
)
from utils.plan.search import (
    RECOMPUTE,
    TOKENS_STEP,
    fastest,
    flags_between,
    largest_batch,
    largest_seq_len,
    levers_of,
)
from utils.plan.trace import Trace
from utils.run.distributed import mesh_axes
from utils.run.errors import ConfigError, check, escaped, others_code, say
from utils.run.settings import convert_settings, from_settings, parse_cli
from utils.run.signals import report_errors
from utils.run.units import GIB
from utils.train.in_backward import check_in_backward

SHAPES = Path(__file__).resolve().parent.parent / "configs" / "shapes"
# Memory of a card in GiB, as torch shows it ("GPU 0 has a total capacity of ..."); the smallest value where
# reports differ. It is less than the name of the card says, because the driver keeps a part.
CARDS = {
    "t4": 14.56,  # 14.56 to 14.76
    "v100-16": 15.77,
    "a10g": 22.06,
    "l4": 22.03,  # 22.03 to 22.06, in out-of-memory lines of six repositories
    "3090": 23.5,
    "4090": 23.5,  # 23.43 to 23.68
    "5090": 31.34,  # 31.34 to 31.37
    "v100-32": 31.74,
    "a100-40": 39.4,
    "l40s": 44.39,
    "a6000": 47.4,  # 47.4 to 47.54
    "a100-80": 79.15,
    "h100": 79.15,  # 79.14 to 79.33
    "h200": 139.72,  # 139.72 to 139.83
    "b200": 178.35,
}
HEAD = (
    "method",
    "recompute",
    "offload",
    "GPU GiB",
    "comfort",
    "fits",
    "host GiB",
    "rows",
    "tokens",
)
# Cards of compute capability below 8: no bf16, and no flash attention.
WITHOUT_BF16 = ("t4", "v100-16", "v100-32")
ROWS = 1009  # a prime: see steps_alike
IN_TABLE = {FITS: "yes", TIGHT: "tightly", MAYBE: "maybe", TOO_LARGE: "no"}
# Settings of a run that do not change its memory.
OTHERS = """tokenizer dataset image_dir image_max_pixels format columns bad_rows train_on chat_template
max_rows eval_dataset eval_share eval_every beta label_smoothing margin sft_weight desirable_weight
undesirable_weight reward_model_weight temperature scale_rewards clip_low clip_high epochs_per_rollout
epochs steps too_long lr lr_projector lr_vision warmup schedule decay_share
weight_decay clip_norm seed lora_alpha use_rslora fit force workers output_dir resume save_every keep
allow_new_data timeout save_model save_dtype log_every profile tensorboard wandb""".split()
OF_GRPO = ("dapo", "grpo", "dr_grpo")  # its losses


@dataclass
class Config:
    # What
    model: str = ""  # folder, config.json, Hugging Face id, a name in configs/shapes, or a size: 7B
    gpus: int = 1  # GPUs of the whole run
    gpus_per_machine: int = 8  # maximum GPUs of one machine
    gpu: str = ""  # name of a card, in place of --gpu_memory: a10g, 4090, a100-40, h100, h200 ...
    gpu_memory: float = 24.0  # GiB of one GPU, as torch shows it: a card "of 24 GB" has 22 to 23.5
    host_memory: float = 0.0  # GiB of host memory of one machine; 0: not limited

    # How
    seq_len: int = 4096  # maximum tokens of a row
    global_batch_size: int = 0  # sequences per optimizer step; 0: batch_size x grad_accum x ranks
    batch_size: int = 1  # sequences per rank and micro-batch
    grad_accum: int = 0  # micro-batches per step; 0: what the global batch needs
    packing: bool = False  # several documents in one row; batch sizes then count packs
    center_weight: float = -1.0  # of reward.py; below 0: another recipe
    init: Literal["", "model", "random"] = ""  # of pretrain.py; empty: another recipe
    tokens: float = 0.0  # of pretrain.py: tokens to train on, such as 2e9; 0: another recipe
    document_mask: bool = True  # of pretrain.py: tokens attend only to their own document
    # loss of prefer.py (rows are pairs, with kto answers) or of grpo.py; empty: rows of finetune.py
    loss: Literal["", "dpo", "ipo", "orpo", "simpo", "kto", *OF_GRPO] = ""
    rewards: str = ""  # of grpo.py: reward functions; their names do not change the memory
    reward_model: str = ""  # folder or id of a reward model, such as OUT/model of reward.py
    kl_beta: float = 0.0  # weight of the KL to the model at the start; 0: none
    group_size: int = 8  # completions per prompt, which are compared with each other
    max_new_tokens: int = 256  # maximum tokens of a completion
    generate_batch_size: int = 64  # completions that a rank generates at a time
    generate_ranks: int = 0  # number of ranks that only generate; the others train; 0: all do both
    # for a model that reads pictures: the sizes of a row's pictures in pixels, 1344x896,448x448
    images: str = ""
    train: str = ""  # parts to train of such a model: language,projector,vision; empty: first two
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "bf16"  # compute; auto: bf16 if the GPU has it
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # dtype of weights, gradients, optimizer
    # adamw_8bit: from bitsandbytes, with moments of 2 bytes per weight, not 8
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    # update each weight as soon as its gradient is ready; keeps no gradients; needs --clip_norm 0
    optimizer_in_backward: bool = False
    # auto: the model's default; with --packing: varlen (no mask) if the model supports it
    attn: Literal["auto", "sdpa", "varlen", "flash_attention_2", "eager"] = "auto"
    lora_rank: int = 0  # rank of LoRA adapters, over frozen weights; 0: no LoRA
    lora_targets: str = "all-linear"  # all-linear, names (q_proj,v_proj), or a regular expression
    lora_dropout: float = 0.0  # dropout on the input of the adapters
    use_dora: bool = False  # DoRA: adapters for directions, and trained magnitudes
    modules_to_save: str = ""  # names of modules to train in full, beside the adapters
    adapter: str = ""  # peft folder of an adapter to continue, with its rank, targets and tokenizer
    # store frozen weights in int8 (8bit) or nf4 (4bit)
    quantization: Literal["none", "8bit", "4bit"] = field(default="none", metadata={"bare": "8bit"})
    int8_mode: Literal["dequant", "llm_int8"] = "dequant"  # llm_int8 also rounds activations
    quantize_head: bool = False  # quantize the head too; the loss then needs full logits
    keep_experts_16bit: bool = False  # quantize a mixture of experts, but not its experts
    low_cpu_fsdp: bool = True  # each rank reads only its own shards; false: the whole model
    # recompute activations in backward; selective: all but matrix products and attention; full: all
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    activation_offload: bool = False  # keep inputs of recomputed layers on the host
    compile: bool = False  # torch.compile for each layer
    cpu_offload: bool = False  # keep weights, gradients and optimizer on the host
    reshard_after_forward: bool = True  # false: keep layers gathered until backward, like ZeRO-2
    replicate: int = 0  # HSDP: number of copies of the model; 0: ranks / shard
    shard: int = 0  # HSDP: ranks that share one copy; 0: ranks / replicate, or all
    sync_each_microbatch: bool = False  # reduce gradients after each micro-batch: less memory
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    trust_remote_code: bool = False  # run Python code that comes with the model

    # Where
    json: bool = False  # print one JSON object, not tables

    def __post_init__(self):
        fix = "--gpu_memory 24"
        check(self.gpu_memory > 0, f"--gpu_memory {self.gpu_memory:g} holds nothing (fix: {fix})")
        convert_settings(self, gpus=1, gpus_per_machine=1, center_weight=-1)
        can_pack = self.recipe in ("finetune", "prefer") and self.loss != "kto"
        check(
            can_pack or not self.packing,
            "--packing is of finetune.py, or of pairs in prefer.py (fix: leave it out)",
        )
        check(
            self.recipe != "grpo" or self.max_new_tokens < self.seq_len,
            f"--max_new_tokens {self.max_new_tokens} leaves no prompt in --seq_len {self.seq_len} (fix:"
            " a longer --seq_len)",
        )
        if self.optimizer_in_backward:
            check_in_backward(self, self.divided[1])
        check(
            self.images or not self.train,
            "--train is of vision.py, and the sizes of the pictures are missing (fix: --images 1024x1024)",
        )
        parse_parts(self.train or "language")
        if self.gpu:
            check_card(self.gpu)
            check(
                self.gpu_memory == Config.gpu_memory,
                f"--gpu {self.gpu} and --gpu_memory {self.gpu_memory:g} (fix: give one of them)",
            )
        has_bf16 = self.gpu.lower() not in WITHOUT_BF16
        check(has_bf16 or self.dtype != "bf16", f"--gpu {self.gpu} has no bf16 (fix: --dtype fp16)")
        if self.dtype == "auto":
            self.dtype = "bf16" if has_bf16 else "fp32"
        whole_machines = self.gpus % self.gpus_per_machine == 0
        possible = whole_machines or self.gpus <= self.gpus_per_machine
        fix = "a multiple of it, or another --gpus_per_machine"
        check(possible, f"--gpus {self.gpus}: machines have {self.gpus_per_machine} (fix: {fix})")
        recomputes = self.activation_checkpointing != "none"
        fix = "(fix: --activation_checkpointing full)"
        check(
            recomputes or not self.activation_offload, f"--activation_offload has no inputs {fix}"
        )
        check_adapter_flags(self)
        check(
            self.learners > 0,
            f"--generate_ranks {self.generate_ranks} leaves none to train (fix: fewer than {self.gpus})",
        )

    @property
    def recipe(self) -> str:
        """The recipe whose settings these are."""
        if self.rewards or self.reward_model or self.loss in OF_GRPO:
            return "grpo"
        if self.init or self.tokens:
            return "pretrain"
        if self.center_weight >= 0:
            return "reward"
        if self.loss:
            return "prefer"
        return "vision" if self.images else "finetune"

    @property
    def divided(self) -> tuple:
        """(rows of a step, micro-batches of a rank)"""
        rows = self.completions if self.recipe == "grpo" else self.global_batch_size
        return divide_batch(self.batch_size, self.grad_accum, rows, self.learners)

    @property
    def packs(self) -> bool:
        """Whether a row holds several documents, which do not see each other."""
        return self.packing or (self.recipe == "pretrain" and self.document_mask)

    @property
    def answers(self) -> int:
        """Sequences of a row: 2 of a pair."""
        return 2 if self.recipe in ("prefer", "reward") and self.loss != "kto" else 1

    @property
    def learners(self) -> int:
        return self.gpus - self.generate_ranks

    @property
    def completions(self) -> int:
        """Of a step of grpo.py."""
        return (self.global_batch_size or 8) * self.group_size

    @property
    def gpu_gib(self) -> float:
        return CARDS[self.gpu.lower()] if self.gpu else self.gpu_memory


def main(cfg: Config) -> dict:
    """Print the plan; returns what --json prints."""
    transformers.utils.logging.set_verbosity_error()
    config = find_config(cfg.model, cfg.trust_remote_code)
    room = Room(cfg.gpu_gib * GIB, (cfg.host_memory or 2**20) * GIB, f"{cfg.gpu_gib:g} GiB")
    asked = setting_of(cfg, config)
    need = need_of(asked)
    whole = replace(asked, lora=Lora(), quant=Quant())
    plan = {
        "settings": asdict(cfg),
        "parameters": sum(p.numel() for p in planned_model(whole).parameters()),
        "states": need.states._asdict(),
        "peak": need.peak and {**need.peak._asdict(), "total": need.peak.total},
        "why": need.why,
        "gpu_bytes": need.device,
        "comfortable_bytes": need.comfortable,
        "host_bytes": need.host * asked.local_ranks,
        "positions": positions_of(config),
        "attention": kernel_of(asked, cfg.packs),
        "answer": None,
        "completions": "",
        "strategies": [],
        "recommended": None,
        "command": "",
        "without_offload": "",
        "lighter": "",
    }
    if need.peak:
        plan["answer"] = answer_of(asked, need, room)
    if cfg.recipe == "grpo":
        plan["completions"] = about_completions(cfg, asked, room)
    if not cfg.json:  # the tables take longer
        say(about_setting(cfg, need, plan), ready=True)
    has_tables = need.peak and cfg.recipe != "grpo"
    if has_tables:
        scaled = scaled_of(asked)
        plan["strategies"] = strategies(scaled, room, cfg.answers)
        # The parameters of adapters are fp32.
        in_fp32 = replace(scaled, param_dtype=torch.float32)
        best = fastest_traced(scaled, room) or fastest_traced(in_fp32, room)
        if best:
            host = need_of(best).host * best.local_ranks
            answer = answer_of(best, need_of(best), room)
            plan["recommended"] = levers_of(best) | {"answer": answer, "host_bytes": host}
            plain = Setting(
                config, best.param_dtype, best.dtype, 1, kind=asked.kind, train=asked.train
            )
            plan["command"] = command(cfg, flags_between(plain, best))
            on_gpu = fastest_traced(scaled, room, may_offload=False)
            if best.cpu_offload and on_gpu:
                plan["without_offload"] = command(cfg, flags_between(plain, on_gpu))
            if best.cpu_offload and asked.param_dtype == torch.float32 and not best.lora:
                for dtype in ("fp32", "bf16"):
                    lighter = replace(scaled, param_dtype=DTYPES[dtype], optimizer="adamw_8bit")
                    on_gpu = fastest_traced(lighter, room, may_offload=False)
                    if on_gpu and not on_gpu.lora:
                        flags = replace(cfg, param_dtype=dtype, optimizer="adamw_8bit")
                        plan["lighter"] = command(flags, flags_between(plain, on_gpu))
                        if answer_of(on_gpu, need_of(on_gpu), room) != MAYBE:
                            break
    if cfg.json:
        say(json.dumps(plan, indent=2), ready=True)
    elif has_tables:
        say(about_methods(cfg, plan), ready=True)
    return plan


def setting_of(cfg: Config, config: transformers.PretrainedConfig) -> Setting:
    """The setting of a run with these flags, as the recipe would make it on such GPUs."""
    shards = mesh_axes(cfg.learners, cfg.replicate, cfg.shard)["shard"]
    repeats_keys = cfg.dtype == "fp32" or cfg.gpu.lower() in WITHOUT_BF16
    attn = attention_of(cfg, config, repeats_keys)
    asked = from_settings(
        Setting,
        cfg,
        gpu=True,
        config=config,
        param_dtype=DTYPES[cfg.param_dtype],
        dtype=DTYPES[cfg.dtype],
        seq_len=cfg.seq_len * cfg.answers,
        shards=shards,
        replicate=cfg.learners // shards,
        local_ranks=min(cfg.gpus, cfg.gpus_per_machine),
        rows=math.ceil(cfg.divided[0] / cfg.learners),
        lora=from_settings(Lora, cfg),
        quant=from_settings(Quant, cfg),
        attn=attn.replace("flash_attention_2", "sdpa"),  # the memory is the same
        masked=cfg.packs and attn not in ("varlen", "flash_attention_2"),
        repeats_keys=repeats_keys,
        lacks={"pretrain": "lora_rank", "grpo": "grad_accum"}.get(cfg.recipe, ""),
        kind="scores" if cfg.recipe == "reward" else "text",
    )
    if cfg.images:
        train = "" if asked.lora else cfg.train or "language,projector"
        asked = replace(asked, kind="pictures", train=train)
        asked = replace(asked, pictures=pictures_of(cfg, asked))
    frozen = []
    if cfg.kl_beta and not asked.lora:  # the model at the start
        frozen.append(planned_model(replace(asked, param_dtype=asked.dtype)))
    if cfg.reward_model:
        judge = find_config(cfg.reward_model, cfg.trust_remote_code)
        judge.num_labels = 1
        frozen.append(build_model(judge, asked.dtype, kind="scores"))
    return replace(asked, frozen_bytes=sum(estimate_states(m, shards).weights for m in frozen))


def about_completions(cfg: Config, asked: Setting, room: Room) -> str:
    """The memory that a rank needs to generate, in the words of grpo.py, or why it does not fit."""
    try:
        _, plan = plan_rollout(
            asked,
            MemoryPlan("", {}, {"acts": {"train": 0}}, 0),
            room,
            min(cfg.generate_batch_size, cfg.completions),
            cfg.seq_len - cfg.max_new_tokens,
            cfg.max_new_tokens,
            False,
            cfg.generate_ranks,
        )
    except ConfigError as error:
        return str(error)
    return plan.text.removeprefix("\nrollout").strip() + ": fits"


def scaled_of(asked: Setting) -> Setting:
    """The setting with a rule that scales traces, so that the tables need not trace each of their sizes.
    Unchanged if no rule is exact enough.
    """
    window = getattr(asked.config.get_text_config(), "sliding_window", None) or 0
    # A second length to test, on the same side of the window: across it, nothing is scaled.
    second_length = asked.seq_len // 2 if asked.seq_len <= window else 2 * asked.seq_len
    tested = [asked, replace(asked, seq_len=second_length)]
    shortest = asked.pictures.rows_of(1).ids.shape[1] if asked.pictures else 0
    first = TOKENS_STEP * math.ceil(max(1024, shortest) / TOKENS_STEP)
    # Loops over tokens pad a row to 64 tokens, so the line is less exact for other lengths.
    for scaling, tolerance in (
        (partial(steps_alike, near=asked.seq_len, window=window), 1e-4),
        (partial(steps_between, first=first), 1e-3),
    ):
        errors = []
        for setting in tested:
            scaled_bytes = need_of(replace(setting, scaling=scaling)).device
            errors.append(abs(scaled_bytes / need_of(setting).device - 1))
        if max(errors) <= tolerance:
            return replace(asked, scaling=scaling)
    return asked


def steps_alike(
    trace: Callable[..., Trace], batch: int, seq_len: int, near: int, window: int
) -> Trace:
    """A step of `batch` rows of seq_len tokens, scaled from a trace whose sizes are primes that no dimension
    of a model is likely to have. As often as a prime divides the bytes of a tensor, the tensor grows with the
    rows or the tokens.
    """
    # Rows longer than the window have other masks, so they are traced themselves.
    if (near > window) != (seq_len > window):
        return trace(batch, seq_len)
    while any(near % divisor == 0 for divisor in range(2, math.isqrt(near) + 1)):
        near += 1
    return trace(ROWS, near, cache(partial(grown, sizes=((ROWS, batch), (near, seq_len)))))


def steps_between(trace: Callable[..., Trace], batch: int, seq_len: int, first: int) -> Trace:
    """A step of `batch` rows of seq_len tokens, on the line through traces of `first` and 2 x `first` tokens.
    For families that loop over the tokens of a row (linear attention), so that more tokens need more tensors.
    """
    scaled = cache(partial(grown, sizes=((ROWS, batch),)))
    short, long = (
        trace(ROWS, tokens, scaled)._replace(pictures=()) for tokens in (first, 2 * first)
    )

    def on_line(of_short: int, of_long: int) -> int:
        return round(of_short + (of_long - of_short) * (seq_len / first - 1))

    return tree_map(on_line, short, long)


def grown(size: int, sizes: tuple[tuple[int, int], ...]) -> int:
    """Bytes of a tensor with each prime factor replaced by a real size. sizes: (prime, real size)."""
    for prime, number in sizes:
        while size and size % prime == 0:
            size = size // prime * number
    return size


def fastest_traced(scaled: Setting, room: Room, **options: bool) -> Setting | None:
    """The fastest setting that fits. Near the limit, it must also fit when traced at its own size. options:
    of search.fastest.
    """
    best = fastest(scaled, room, any_method=True, **options)
    if not best or need_of(best).device < 0.95 * room.device:
        return best
    traced = replace(best, scaling=None)
    if answer_of(traced, need_of(traced), room) == TOO_LARGE:
        return fastest(replace(scaled, scaling=None), room, any_method=True, **options)
    return traced


def pictures_of(cfg: Config, asked: Setting):
    """Rows with blank pictures of the sizes in --images, made by the model's own image processor."""
    from utils.plan.pictures import blank_pictures

    sizes = []  # (width, height) in pixels
    for text in cfg.images.split(","):
        size = re.fullmatch(r" *(\d+)x(\d+) *", text)
        fix = "--images 1344x896,448x448"
        check(size, f"--images {cfg.images}: expected sizes in pixels (fix: {fix})")
        sizes.append((int(size[1]), int(size[2])))
    model, config = planned_model(asked), asked.config
    fix = "a folder with a preprocessor_config.json, or a shape of configs/shapes with pictures"
    with TemporaryDirectory() as made, others_code(f"--images: {cfg.model}", fix):
        folder = config.name_or_path
        if settings := getattr(config, "_image_processor", None):
            folder = made
            Path(made, "preprocessor_config.json").write_text(json.dumps(settings))
        processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
        pictures = blank_pictures(model, processor, sizes)
        tokens = pictures.rows_of(1).ids.shape[1]
    check(
        tokens <= cfg.seq_len,
        f"--images {cfg.images} are {tokens:,} tokens (fix: --seq_len {tokens + 512})",
    )
    return pictures


def kernel_of(asked: Setting, packing: bool) -> str:
    """The attention kernel on such a card, in words."""
    model = planned_model(asked)
    if model.config._attn_implementation == "eager":
        return "eager, which keeps all probabilities"
    if asked.repeats_keys:
        return "memory-efficient, keys and values repeated: there is no kernel for grouped heads"
    if asked.masked:
        return "memory-efficient, with a mask over each pack"
    has_sinks = any("sinks" in name for name, _ in model.named_parameters())
    if packing and not has_sinks:
        return "variable-length flash"
    return "flash; memory-efficient where a layer has a window"


def attention_of(cfg: Config, config: transformers.PretrainedConfig, repeats_keys: bool) -> str:
    """The attention that a run takes: of packs `varlen`, if the card and the model can do it."""
    wanted = cfg.packs or cfg.attn == "varlen"
    if not wanted or repeats_keys or cfg.attn == "flash_attention_2":
        return cfg.attn
    attn = cfg.attn.replace("varlen", "auto")
    model = build_model(config, DTYPES[cfg.dtype], attn, cfg.trust_remote_code)
    return settle_attention(model, cfg.attn, torch.device("cpu"), DTYPES[cfg.dtype])


def command(cfg: Config, levers: str) -> str:
    """The command line. DIR (if --model is no folder), FILE and HOST stand for what only the user knows."""
    machines = cfg.gpus // cfg.gpus_per_machine
    launch = "torchrun"
    if machines > 1:
        launch += f" --nnodes {machines} --rdzv_backend c10d --rdzv_endpoint HOST:29500"
    launch += f" --nproc_per_node {min(cfg.gpus, cfg.gpus_per_machine)}"
    is_found = "/" in cfg.model or Path(cfg.model).exists()
    flags = [f"--model {shlex.quote(cfg.model) if is_found else 'DIR'}"]
    flags += ["--dataset FILE", f"--seq_len {cfg.seq_len}"]
    if levers:
        flags.append(levers)
    has_lora = cfg.adapter or "--lora_rank" in levers
    names = """adapter dtype param_dtype optimizer optimizer_in_backward attn packing loss init tokens
        center_weight compile replicate shard trust_remote_code"""
    if has_lora:  # what trains is fp32
        names = names.replace(" param_dtype", "")
        names += " lora_targets lora_dropout use_dora modules_to_save"
    for name in names.split():
        value = getattr(cfg, name)
        if value != getattr(Config, name):
            flags.append(f"--{name}" if value is True else f"--{name} {shlex.quote(str(value))}")
    if cfg.optimizer_in_backward:
        flags.append("--clip_norm 0")
    if cfg.recipe == "pretrain" and not cfg.document_mask:
        flags.append("--document_mask false")
    if cfg.train and not has_lora:
        flags.append(f"--train {cfg.train}")
    return f"{launch} recipes/{cfg.recipe}.py {' '.join(flags)}"


def check_card(name: str) -> None:
    """Raise ConfigError with similar names if there is no card of this name."""
    if name.lower() in CARDS:
        return
    check(not name.isdecimal(), f"--gpu {name} is no name of a card (did you mean --gpus {name}?)")
    similar = [card for card in CARDS if card.startswith(name.lower())]
    similar = similar or difflib.get_close_matches(name.lower(), CARDS, 1)
    meant = f" (did you mean {' or '.join(similar)}?)" if similar else ""
    fix = f"one of {', '.join(CARDS)}, or --gpu_memory, the GiB that torch shows"
    raise ConfigError(f"--gpu {name} is not known{meant} (fix: {fix})")


def find_config(name: str, trust_remote_code: bool) -> transformers.PretrainedConfig:
    """The config that --model names. ConfigError, with the known names, if there is none."""
    known = sorted(path.stem for path in SHAPES.glob("*.json"))
    fix = f"a folder, a size such as 7B, or one of {', '.join(known)}"
    check(name, f"--model is missing (fix: {fix})")
    if size := re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([a-zA-Z]?)", name):
        units = {"b": 1e9, "m": 1e6, "": 1}
        check(size[2].lower() in units, f"--model {name} is no size (did you mean {size[1]}B?)")
        return shape_of(float(size[1].replace("_", "")) * units[size[2].lower()], name)
    path = SHAPES / f"{name.lower()}.json"
    path = path if path.exists() else Path(name)
    fix = f"a folder with a config.json, a size such as 7B, or one of {', '.join(known)}"
    own_code = f"{fix}; for a model with code of its own --trust_remote_code, if you have read it"
    with others_code(f"--model {name}", own_code):
        if os.path.lexists(path):
            folder = str(path.parent if path.name == "config.json" else path)
            return transformers.AutoConfig.from_pretrained(
                folder, trust_remote_code=trust_remote_code
            )
        check(name[0] not in "./~", f"--model {name}: there is no such folder or file (fix: {fix})")
        similar = difflib.get_close_matches(name.lower(), known, 1, 0.8)
        if similar and "/" not in name:
            raise ConfigError(f"--model {name}: did you mean {similar[0]}? (fix: {fix})")
    with others_code(
        f"--model {name} is no folder, and its config cannot be had from the hub", own_code
    ):
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)


def shape_of(parameters: float, name: str) -> transformers.LlamaConfig:
    """A model of about so many parameters, in Llama's proportions: its width is 128 x its layers."""
    check(1e6 <= parameters <= 1e13, f"--model {name}: no size of a language model (fix: 7B)")
    for blocks in range(1, 2000):
        width = 128 * blocks
        if 12 * blocks * width**2 + 65536 * width >= parameters:
            break
    return transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=round(width * 8 / 3 / 256 + 0.5) * 256,
        num_hidden_layers=blocks,
        num_attention_heads=blocks,
        num_key_value_heads=blocks,
    )


def positions_of(config: transformers.PretrainedConfig) -> int:
    """The longest row that the model was made for; 0 if its config does not say."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or 0


def strategies(asked: Setting, room: Room, answers: int = 1) -> list[dict]:
    """One row of the table per method, kind of recomputation, and offload. answers: sequences of a row."""
    lora = asked.lora or Lora(lora_rank=16)
    train = asked.train or ("language,projector" if asked.pictures else "")  # "" is of adapters
    methods = [("full", replace(asked, lora=Lora(), quant=Quant(), train=train))]
    quantizations = {"LoRA": "none", "8bit": "8bit", "4bit": "4bit"}
    if asked.lacks == "lora_rank":  # the recipe has no adapters
        quantizations = {}
    for name, quantization in quantizations.items():
        quant = replace(asked.quant, quantization=quantization)
        method = replace(asked, lora=lora, quant=quant)
        with suppress(ConfigError):  # no linear layer of the model can be quantized
            planned_model(method)
            methods.append((name, method))
    rows = []
    offloads = (False,) if asked.optimizer_in_backward else (False, True)
    for (name, method), recompute, offload in itertools.product(methods, RECOMPUTE, offloads):
        setting = replace(
            method,
            activation_checkpointing=recompute,
            activation_offload=asked.activation_offload and recompute != "none",
            cpu_offload=offload,
        )
        need = need_of(setting)
        row = {
            "method": name,
            "levers": levers_of(setting),
            "gpu_bytes": need.device,
            "comfortable_bytes": need.comfortable,
            "host_bytes": need.host * setting.local_ranks,
            "answer": answer_of(setting, need, room),
            "positions": positions_of(setting.config),
            "largest_batch": largest_batch(setting, room),
            "longest": largest_seq_len(setting, room) // answers,
            "parts": need.peak.parts,
        }
        rows.append(row)
    return rows


def about_setting(cfg: Config, need: Need, plan: dict) -> str:
    """The first part of the report: what the setting as given needs. plan: see main."""
    parameters = f"{plan['parameters'] / 1e9:.2f} billion parameters"
    size = f"2 x {cfg.seq_len}" if cfg.answers == 2 else cfg.seq_len
    lines = [
        f"{escaped(cfg.model)}: {parameters}; {cfg.gpus} GPUs of {cfg.gpu_gib:g} GiB",
        f"{cfg.batch_size} x {size} tokens a rank and micro-batch; {cfg.dtype} over {cfg.param_dtype}",
        "",
        "The setting as given, on the fullest rank:",
    ]
    if need.why:
        return "\n".join([*lines, f"  {need.sentence()}"])
    return "\n".join(lines + of_setting(cfg, need, plan))


def about_methods(cfg: Config, plan: dict) -> str:
    """The second part: a table of every method, and a command that fits."""
    rows = [cells(row) for row in plan["strategies"]]
    lines = [
        "",
        "Every method, with recomputing and offload:",
        *aligned([HEAD, *rows]),
        "GPU GiB: what must be there; comfort: with which nothing has to be given back in a step",
        "rows: the largest micro-batch that fits, also tightly; tokens: the longest row; -: nothing does",
    ]
    if any("*" in row[-1] for row in rows):
        lines.append(
            f"*: longer than the {plan['positions']:,} positions that the model was made for"
        )
    lines.append("")
    if plan["command"]:
        lines += recommendation(cfg, plan)
    else:
        lines.append("Nothing fits (fix: more GPUs or memory, or a smaller --seq_len)")
    return "\n".join(lines)


def of_setting(cfg: Config, need: Need, plan: dict) -> list[str]:
    """The lines about the setting as given."""
    ordered = sorted(need.peak.parts.items(), key=lambda part: -part[1])
    sizes = {name: size for name, size in ordered if size >= GIB / 200}
    sizes[f"peak, in the {need.peak.phase}"] = need.peak.total
    sizes["at least, compiled" if cfg.compile else "must be there"] = need.device
    sizes["comfortable"] = need.comfortable
    lines = [f"  {name:22}{size / GIB:9.2f} GiB" for name, size in sizes.items()]
    limit = f" of {cfg.host_memory:g}" if cfg.host_memory else ""
    lines.append(f"  {'host, a machine':22}{plan['host_bytes'] / GIB:9.2f} GiB{limit}")
    lines.append(f"  {'attention':22}   {plan['attention']}")
    sentences = {TIGHT: f"{TIGHT}: {WHY_TIGHT}", TOO_LARGE: TOO_LARGE.upper()}
    lines.append(f"  {sentences.get(plan['answer'], plan['answer'])}")
    if plan["completions"]:
        ranks = f"the other {cfg.generate_ranks}" if cfg.generate_ranks else "the same"
        lines += ["", f"The completions, on {ranks} ranks:", f"  {plan['completions']}"]
    return lines


def aligned(table: list[tuple[str, ...]]) -> list[str]:
    """The lines of a table: the first three columns aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
        right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
        lines.append("  " + "  ".join(left + right))
    return lines


def recommendation(cfg: Config, plan: dict) -> list[str]:
    """The lines with the recommended command, and the host memory that it needs."""
    best = plan["recommended"]
    fits = {TIGHT: "fits, tightly", MAYBE: "may fit, with less than 3 % to spare"}
    lines = [
        f"This {fits.get(best['answer'], 'fits')}, of the first method of which anything does;"
        " flags that change no memory, such as --lr, are not in it:"
    ]
    lines.append(f"  {escaped(plan['command'])}")
    if best["cpu_offload"]:
        host = f"{best['host_bytes'] / GIB:.0f} GiB of host memory a machine"
        limit = "; --host_memory says how much there is"
        if cfg.host_memory:
            limit = f", of {cfg.host_memory:g}"
        lines.append(f"  It offloads, and needs {host}{limit}.")
        if plan["without_offload"]:
            lines.append("Without offload:")
            lines.append(f"  {escaped(plan['without_offload'])}")
        if plan["lighter"] not in ("", plan["without_offload"]):
            rounded = " and weights in bf16, whose small updates are rounded away"
            rounded *= "--param_dtype" in plan["lighter"]
            lines.append(f"Without offload, with moments in 8 bit{rounded}:")
            lines.append(f"  {escaped(plan['lighter'])}")
    return lines


def cells(row: dict) -> tuple[str, ...]:
    """The cells of one row of the table, see HEAD."""
    levers = row["levers"]
    tokens = f"{row['longest']:,}" if row["longest"] else "-"
    if 0 < row["positions"] < row["longest"]:  # longer than the model was made for
        tokens += "*"
    return (
        row["method"],
        levers["activation_checkpointing"],
        "yes" if levers["cpu_offload"] else "no",
        f"{row['gpu_bytes'] / GIB:.1f}",
        f"{row['comfortable_bytes'] / GIB:.1f}",
        IN_TABLE[row["answer"]],
        f"{row['host_bytes'] / GIB:.0f}",
        f"{row['largest_batch']:,}" if row["largest_batch"] else "-",
        tokens,
    )


if __name__ == "__main__":
    with report_errors():
        gc.disable()  # a short run: saves 0.2 s
        main(parse_cli(Config, others=OTHERS))
