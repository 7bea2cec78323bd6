"""
Show what a run of finetune.py, prefer.py or vision.py would train on and what it would need, without
training: rows with their loss masks, lengths, the global batch, the memory plan. Takes the flags of all
three; --loss selects prefer.py, and --train, or a model without a text-only class, selects vision.py.

    python recipes/preview.py --show 2
    python recipes/preview.py --loss dpo --dataset pairs.jsonl --model DIR
    python recipes/preview.py --model DIR --dataset chat.jsonl --ranks 8 --lora_rank 16
    python recipes/preview.py --model DIR --dataset rows.jsonl --image_dir pictures --train language,projector
    torchrun --nproc_per_node 8 recipes/preview.py --config run.yaml    # the first process does the work

Everything of this that a run checks before it reads weights is checked; flags that change nothing of it,
such as --lr, are named and left out. Exit code 1: the run does not fit.
"""

import gc
import math
import sys
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    gc.disable()  # the imports leave nothing to collect: saves 0.5 s

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # utils/ is beside recipes/

from utils.data.batches import GlobalBatches, divide_batch
from utils.data.examples import (
    FormName,
    Rows,
    check_positions,
    load_data,
    longest_row,
    print_data,
)
from utils.data.tokens import encode, load_tokenizer, pad_id, print_template_notes
from utils.model.folder import (
    check_vocab,
    find_model,
    open_model,
    quiet_transformers,
    tokenizer_of,
)
from utils.model.loading import KINDS, build_model, check_kind, plan_pieces
from utils.model.options import Lora, Quant, check_adapter_flags
from utils.model.sharding import DTYPES, lacks_grouped_kernels, settle_dtype
from utils.plan.fit import plan_memory
from utils.plan.need import Setting
from utils.run.distributed import (
    World,
    device_of,
    env_int,
    mesh_axes,
    mesh_sentence,
    together,
)
from utils.run.errors import ConfigError, act, check, escaped, print0, print_once
from utils.run.settings import convert_settings, from_settings, parse_cli
from utils.run.signals import report_errors, stop_at_once
from utils.run.units import IGNORE

TINY = HERE / "tiny"
# Values of flags that are not given, if --model is not given either.
TINY_VALUES = {"epochs": 3, "batch_size": 16}
TASKS = {"": "rows", "kto": "labels"}  # loss -> task; other losses: pairs
# Flags of the three recipes that do not change what is shown.
OTHERS = """beta label_smoothing margin sft_weight desirable_weight undesirable_weight eval_every lr warmup
schedule weight_decay lr_projector lr_vision workers fit force output_dir resume save_every keep
allow_new_data timeout save_model save_dtype log_every profile tensorboard wandb""".split()


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the tiny model that comes with the recipes
    tokenizer: str = ""  # folder or Hugging Face id; empty: the model's own
    trust_remote_code: bool = False  # run Python code that comes with the model
    # auto: the model's default; with --packing: varlen (no mask) if the model supports it
    attn: Literal["auto", "sdpa", "varlen", "flash_attention_2", "eager"] = "auto"
    dataset: str = ""  # file, folder, glob or id; several: a.jsonl:0.7,b.csv:0.3; empty: tiny task
    image_dir: str = ""  # folder of the pictures; empty: folder of the data file
    image_max_pixels: int = 0  # shrink larger pictures, before the model's processor; 0: never
    format: FormName = "auto"  # format of the rows; auto: recognized from their keys
    columns: str = ""  # our key=your column: instruction=question,output=answer
    bad_rows: Literal["error", "drop"] = "error"  # drop: skip and list them in OUT/bad_rows.jsonl
    # loss of prefer.py: rows are pairs, or answers with labels (kto); empty: rows of finetune.py
    loss: Literal["", "dpo", "ipo", "orpo", "simpo", "kto"] = ""
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"  # turns that are trained
    chat_template: str = ""  # FILE, chatml, alpaca or plain; empty: the tokenizer's own
    max_rows: int = 0  # read only the first N rows of each source, held-out ones too; 0: all
    eval_dataset: str = ""  # held-out data, given like --dataset
    eval_share: float = 0.0  # share of --dataset to hold out instead, chosen by row hash
    # parts to train, of language,projector,vision; empty: language,projector; with LoRA: language
    train: str = ""

    # How much
    show: int = 3  # rows to print with their loss masks
    ranks: int = 0  # plan for this many ranks on one machine; 0: those of torchrun, or 1
    epochs: int = 1  # passes over the data
    steps: int = 0  # optimizer steps; 0: as many as --epochs needs
    global_batch_size: int = 0  # sequences per optimizer step; 0: batch_size x grad_accum x ranks
    batch_size: int = 1  # sequences per rank and micro-batch
    grad_accum: int = 0  # micro-batches per step; 0: what the global batch needs
    seq_len: int = 2048  # maximum tokens of a row
    too_long: Literal["truncate", "drop", "error"] = "truncate"  # what to do with longer rows
    packing: bool = False  # several documents in one row; batch sizes then count packs
    clip_norm: float = 1.0  # maximum gradient norm; 0: no clipping
    seed: int = 0  # random seed: data order, new weights, dropout

    # How
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # compute; auto: bf16 if the GPU has it
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # dtype of weights, gradients, optimizer
    # adamw_8bit: from bitsandbytes, with moments of 2 bytes per weight, not 8
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    # update each weight as soon as its gradient is ready; keeps no gradients; needs --clip_norm 0
    optimizer_in_backward: bool = False
    lora_rank: int = 0  # rank of LoRA adapters, over frozen weights; 0: no LoRA
    lora_alpha: float = 16.0  # LoRA's alpha: adapters are scaled by alpha / rank
    lora_targets: str = "all-linear"  # all-linear, names (q_proj,v_proj), or a regular expression
    lora_dropout: float = 0.0  # dropout on the input of the adapters
    use_rslora: bool = False  # rsLoRA: adapters are scaled by alpha / sqrt(rank)
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

    # Where
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory

    def __post_init__(self):
        convert_settings(self)
        fix = "(fix: --activation_checkpointing full)"
        recomputes = self.activation_checkpointing != "none"
        check(
            recomputes or not self.activation_offload, f"--activation_offload has no inputs {fix}"
        )
        check(
            not (self.packing and self.loss == "kto"),
            "--packing: kto pairs each prompt with another answer (fix: without it)",
        )
        check_adapter_flags(self)


def main(cfg: Config) -> bool:
    """Show rows, lengths and the plan; returns whether the run would fit."""
    quiet_transformers()

    # --- world: one process, which stands for all ranks of the run --------------------------------
    act("world")
    if env_int("RANK"):  # torchrun has started more
        check(
            env_int("LOCAL_RANK") is not None,
            "RANK is set, but torchrun has not started this (fix: unset RANK)",
        )
        sys.exit(0)
    ranks = cfg.ranks or env_int("WORLD_SIZE", 1)
    world = World(rank=0, size=1, local_rank=0, local_size=ranks, device=device_of(0, 1))
    axes = mesh_axes(ranks, cfg.replicate, cfg.shard)
    tiny_model, tiny_rows = TINY, TINY / "chat.jsonl"
    if cfg.train:
        tiny_model, tiny_rows = TINY / "vision", TINY / "vision" / "rows.jsonl"
    elif cfg.loss:
        tiny_rows = TINY / "pairs.jsonl"
    cfg = replace(
        cfg,
        model=cfg.model or str(tiny_model),
        dataset=cfg.dataset or ("" if cfg.model else str(tiny_rows)),
        dtype=settle_dtype(cfg.dtype, world.device),
    )

    # --- folder: the model's ----------------------------------------------------------------------
    act("folder")
    trust = cfg.trust_remote_code
    source = open_model(cfg.model, world, trust)
    tokenizer_folder = find_model(
        cfg.tokenizer or tokenizer_of(cfg.adapter) or source.folder, world, trust
    )
    tokenizer = load_tokenizer(tokenizer_folder, cfg.chat_template, trust, source.config)
    attn = cfg.attn.replace("varlen", "auto")
    kind = "pictures" if cfg.train else "text"
    if type(source.config) in KINDS["pictures"]._model_mapping:
        try:
            check_kind(source.config, "text")
        except ConfigError:  # it has no text-only class, so finetune.py would refuse it
            kind = "pictures"
    if kind == "pictures":
        check(not (cfg.packing or cfg.loss), "vision.py has no --packing and no --loss")
        check(cfg.attn != "varlen", "vision.py has no --attn varlen (fix: leave it out)")
    model = build_model(source.config, DTYPES[cfg.param_dtype], attn, trust, kind=kind)  # on meta
    check_vocab(tokenizer, len(model.get_input_embeddings().weight))
    if cfg.packing or cfg.attn == "varlen":
        from utils.model.attention import settle_attention

        attn = settle_attention(model, cfg.attn, world.device, DTYPES[cfg.dtype])
    plan_pieces(model, source.weights, source.folder)

    # --- data: every row is read, checked and tokenized -------------------------------------------
    act("data")
    with together(world, patient=True):
        lora = from_settings(Lora, cfg)
        rows = from_settings(Rows, cfg, task=TASKS.get(cfg.loss, "pairs"))
        if kind == "pictures":
            from utils.data.picture_batches import PictureBatches
            from utils.data.pictures import load_processor
            from utils.model.kinds import parse_parts
            from utils.plan.pictures import Pictures

            train = cfg.train or ("language" if lora else "language,projector")
            parse_parts(train)
            rows = replace(rows, processor=str(source.folder))
            processor = load_processor(source.folder, tokenizer)
        examples, held_out = load_data(rows, tokenizer)
        parts = [part for part in (examples, held_out) if part]
        if cfg.loss:
            from utils.data.pairs import LabelBatches, PackedPairs, PairBatches, sequences

            parts = [sequences(part) for part in parts]
        check_positions(model, *parts)
    single_rows = None  # for pictures: batches of single rows, to show and to plan with
    picture_settings = {"train": ""}
    if kind == "pictures":
        single_rows = PictureBatches(
            examples,
            seed=0,
            global_batch_size=1,
            batch_size=1,
            rank=0,
            ranks=1,
            pad_id=pad_id(tokenizer),
            source=rows,
            processor=processor,
        )
        if not single_rows.patches.any():  # no row has a picture
            train = "language"
        check(
            lora or "language" in parse_parts(train) or single_rows.patches.all(),
            f"{(single_rows.patches == 0).sum():,} rows have no picture, and the language model is frozen:"
            " they have no gradient (fix: leave them out, or --train language too)",
        )
        picture_settings = {
            "kind": "pictures",
            "train": "" if lora else train,
            "pictures": Pictures(single_rows.largest),
            "separates": single_rows.separates,
            "sync_each_microbatch": cfg.sync_each_microbatch or single_rows.separates,
        }
    if cfg.loss:
        sides = ("desirable", "undesirable") if cfg.loss == "kto" else ("chosen", "rejected")
        show_answers(parts[0], tokenizer, cfg.show, sides)
    else:
        show_masks(examples, tokenizer, cfg.show, single_rows)

    # --- plan: sizes, memory and disk; all that fails cheaply has failed after it -----------------
    act("plan")
    # A GPU selects, or compiles, kernels for each length: use few different lengths.
    multiple = math.gcd(cfg.seq_len, 64 if world.on_gpu else 8)
    with together(world):
        longest = cfg.seq_len if cfg.packing else longest_row(multiple, *parts)
        setting = from_settings(
            Setting,
            cfg,
            config=source.config,
            param_dtype=DTYPES[cfg.param_dtype],
            dtype=DTYPES[cfg.dtype],
            # a pair is planned as one row with the length of its two sequences
            seq_len=longest if cfg.loss in ("", "kto") else 2 * longest,
            shards=axes["shard"],
            replicate=ranks // axes["shard"],
            local_ranks=ranks,
            gpu=world.on_gpu,
            rows=math.ceil(cfg.global_batch_size / ranks) or cfg.batch_size * cfg.grad_accum,
            lora=lora,
            quant=from_settings(Quant, cfg),
            attn=attn,
            masked=cfg.packing and attn != "varlen",
            repeats_keys=lacks_grouped_kernels(world.device, DTYPES[cfg.dtype]),
            **picture_settings,
        )
        plan = plan_memory(setting, world, force=True)
    global_batch, micro_batches = divide_batch(
        cfg.batch_size, cfg.grad_accum, cfg.global_batch_size, ranks
    )
    options = (cfg.batch_size, 0, ranks, pad_id(tokenizer))  # as on rank 0
    if cfg.optimizer_in_backward:
        from utils.train.in_backward import check_in_backward

        check_in_backward(cfg, micro_batches)
    if cfg.loss == "kto":
        text = "--loss kto compares each answer with another of its global batch"
        check(global_batch > 1, f"{text} (fix: --global_batch_size 8)")
        loader = LabelBatches(examples, cfg.seed, global_batch, *options, cfg.seq_len)
    elif cfg.loss and cfg.packing:
        loader = PackedPairs(examples, cfg.seed, global_batch, *options, 2 * cfg.seq_len)
    elif cfg.loss:
        loader = PairBatches(examples, cfg.seed, global_batch, *options)
    elif kind == "pictures":
        loader = PictureBatches(examples, cfg.seed, global_batch, *options, rows, processor)
        if loader.separates:  # not all rows can share a micro-batch, so a step may have more
            micro_batches += 1
    elif cfg.packing:
        from utils.data.packing import PackedBatches

        loader = PackedBatches(examples, cfg.seed, global_batch, *options, cfg.seq_len)
    else:
        loader = GlobalBatches(examples, cfg.seed, global_batch, *options)
    steps = cfg.steps or cfg.epochs * loader.per_epoch
    print0(f"model     {cfg.model}: {source.sentence()}")
    print_template_notes(tokenizer)
    print_data(cfg.dataset, loader, held_out)
    print_lengths(examples, held_out)
    if kind == "pictures":
        adapters = " by adapters" if lora else ""
        print0(f"train     {train}{adapters}; pictures of {source.config.model_type}")
    print0(f"ranks     {mesh_sentence(world._replace(size=ranks), axes)}")
    unit = "packs" if cfg.packing else examples.unit
    print0(
        f"batch     {global_batch} {unit}: {ranks} ranks with {micro_batches} micro-batches of at most"
        f" {cfg.batch_size}; {steps} steps, rows of at most {cfg.seq_len} tokens"
    )
    print0(plan.text, ready=True)
    try:
        plan_memory(setting, world)
    except ConfigError as error:
        print_once(*error.lines)
        return False
    print0(
        "checked   all that a run checks before it reads weights: flags of the plan, files, every row"
    )
    return True


def show_masks(examples, tokenizer, count: int, pictured=None) -> None:
    """Print the first rows with their trained tokens marked. pictured: their PictureBatches, or None."""
    for i in range(min(count, len(examples))):
        item = examples[i]
        rooms = rooms_of(pictured, i, tokenizer) if pictured else []
        print0(f"{escaped(item.where)}\n{marked(item, tokenizer, rooms)}\n", ready=True)


def rooms_of(pictured, row: int, tokenizer) -> list[tuple[str, str]]:
    """(the text of its tokens, the text shown instead) of each picture of a row."""
    from utils.data.pictures import picture_texts

    sizes = tuple(tuple(size) for _, *size, _ in pictured.sources(row))
    texts = picture_texts(pictured.processor, sizes)[0] if sizes else []
    rooms = []
    for text, (width, height) in zip(texts, sizes, strict=True):
        tokens = len(encode(tokenizer, text).ids)
        rooms.append((text, f"[picture {width}x{height}: {tokens:,} tokens]"))
    return rooms


def show_answers(answers, tokenizer, count: int, sides: tuple) -> None:
    """Print the answers of the first rows: both of a pair, or the one with a label; with its side."""
    for i in range(min(2 * count, len(answers))):
        item = answers[i]
        if len(item.ids):  # of an answer with a label, the other side is empty
            print0(f"{escaped(item.where)} {sides[i % 2]}\n{marked(item, tokenizer)}\n", ready=True)


def print_lengths(examples, held_out) -> None:
    """Print the median and the maximum length of the rows."""
    for name, part in (("lengths", examples), ("held out", held_out)):
        if part:
            median, longest = int(part.lengths.median()), int(part.lengths.max())
            print0(
                f"{name:9} {len(part):,} {part.unit}; half have at most {median:,} tokens, all {longest:,}"
            )


def marked(item, tokenizer, rooms=()) -> str:
    """A row as text, with its trained tokens in [[brackets]] and its pictures replaced by `rooms`, from
    rooms_of. Line breaks are kept, other control characters are escaped.
    """
    ids, rooms = iter(item.ids.tolist()), list(rooms)
    text = ""
    for is_trained, run in groupby(item.labels.tolist(), lambda label: label != IGNORE):
        words = tokenizer.decode([next(ids) for _ in run])
        while rooms and rooms[0][0] in words:
            words = words.replace(*rooms.pop(0), 1)
        words = escaped(words, keep="\n")
        text += f"[[{words}]]" if is_trained else words
    return text


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        fits = main(parse_cli(Config, without_model=TINY_VALUES, others=OTHERS))
        sys.exit(0 if fits else 1)
