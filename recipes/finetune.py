"""
Supervised fine-tuning. Every rank builds the model on meta and reads only its own slice of the weights.

    torchrun --nproc_per_node 2 recipes/finetune.py --low_cpu_fsdp
    torchrun --nproc_per_node 8 recipes/finetune.py --model DIR --dataset chat.jsonl --output_dir runs/first
    torchrun --nproc_per_node 2 recipes/finetune.py --model DIR --lora_rank 16 --quantization 8bit

Without --model and --dataset it teaches the tiny model in recipes/tiny a task that it cannot do.
The run folder holds config.yaml, metrics.jsonl, checkpoints/ and, at the end, model/ for from_pretrained.
"""

import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch

from utils.data.batches import GlobalBatches
from utils.data.examples import FormName, Rows, load_data, longest_row, print_data, write_bad_rows
from utils.data.packing import PackedBatches
from utils.data.positions import check_positions
from utils.data.show_data import show_data, show_masks
from utils.data.tokens import end_of_turn_ids, load_tokenizer, pad_id, print_template_notes
from utils.model.attention import check_packing, wants_flat_packs
from utils.model.folder import check_vocab, find_model, open_model, quiet_transformers, run_facts
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.loss import add_chunked_loss, check_chunked_loss, eval_loss, summed_cross_entropy
from utils.model.options import Lora, Quant, check_adapter_flags
from utils.model.saving import save_model
from utils.model.sharding import (
    DTYPES,
    decoder_layers,
    recompute_activations,
    settle_dtype,
    shard_model,
)
from utils.plan.fit import estimate_disk, fitted_before, plan_memory
from utils.plan.states import Setting
from utils.run.distributed import (
    agree,
    all_reduce_sum,
    init_distributed,
    set_timeout,
    stop_distributed,
    together,
)
from utils.run.errors import act, check, print0, report_errors
from utils.run.folder import check_space, claim_output, releases_output, start_run, write_plan
from utils.run.log import RunLog
from utils.run.memory import peak_memory_bytes
from utils.run.mesh import build_mesh, data_place, mesh_axes, mesh_sentence
from utils.run.settings import BatchSizes, check_least, parse_cli, pick
from utils.run.signals import stop_after_step, stop_asked, stop_at_once
from utils.run.units import GIB
from utils.train.checkpoint import CheckpointSaver, set_seed
from utils.train.flops import mfu
from utils.train.optim import (
    OptimizerName,
    build_optimizer,
    check_packages,
    learning_rate,
    state_kind,
    stop_if_not_finite,
    take_step,
)
from utils.train.profiling import start_profiler
from utils.train.resume import continue_run, load_checkpoint

TINY = Path(__file__).resolve().parent / "tiny"
TINY_VALUES = {"epochs": 3, "batch_size": 16, "lr": 2e-3, "log_every": 40}  # if not given


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the tiny model that comes with the recipes
    tokenizer: str = ""  # folder or Hugging Face id; empty: the model's own
    trust_remote_code: bool = False  # run Python code that comes with the model
    attn: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"  # auto: the model's best
    dataset: str = ""  # file, folder, glob or id; several: a.jsonl:0.7,b.csv:0.3; empty: tiny task
    format: FormName = "auto"  # of rows
    columns: str = ""  # our keys for the rows' columns: prompt=question,completion=answer
    bad_rows: Literal["error", "drop"] = "error"  # drop: list them in OUT/bad_rows.jsonl
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"  # turns that are trained
    check: bool = False  # check all that needs no weights, print what the data holds, and stop
    show_masks: int = 0  # print so many rows, trained tokens in brackets or colour, and stop
    chat_template: str = ""  # FILE, chatml or alpaca; empty: the tokenizer's own
    max_rows: int = 0  # read only the first rows of each source; 0: all
    eval_dataset: str = ""  # held-out rows, named like --dataset
    eval_share: float = 0.0  # or this share of --dataset, chosen by row hash and never trained on
    eval_every: int = 0  # steps between held-out losses; 0: at the end only

    # How much
    epochs: int = 1  # times through the data
    steps: int = 0  # optimizer steps; 0: whatever --epochs gives
    global_batch_size: int = 0  # sequences per optimizer step; 0: batch_size x grad_accum x ranks
    batch_size: int = 1  # sequences per rank and micro-batch
    grad_accum: int = 0  # micro-batches per step; 0: what the global batch needs
    seq_len: int = 2048  # tokens of a row
    too_long: Literal["truncate", "drop", "error"] = "truncate"  # what becomes of longer ones
    packing: bool = False  # several documents in one row; batch sizes then count packs
    lr: float = 2e-5  # peak learning rate
    warmup: int = -1  # steps of linear warm-up; -1: 3 % of all
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # after the warm-up
    weight_decay: float = 0.01  # not on norms and biases
    clip_norm: float = 1.0  # largest gradient norm; 0: no clipping
    seed: int = 0  # order of the data, dropout

    # How
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of compute; auto: bf16 if it can
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # of weights, gradients, optimizer state
    optimizer: OptimizerName = "adamw"  # 8-bit, of bitsandbytes: moments of 2 bytes a weight, not 8
    lora_rank: int = 0  # train adapters of this rank beside frozen weights; 0: train the weights
    lora_alpha: float = 16.0  # what adapters add counts alpha / rank
    lora_targets: str = "all-linear"  # or names (q_proj,v_proj), or a regular expression
    lora_dropout: float = 0.0  # of what adapters read
    use_rslora: bool = False  # alpha / sqrt(rank) in place of alpha / rank
    use_dora: bool = False  # adapters for directions, and magnitudes that train (DoRA)
    lora_init: str = "default"  # other ways to start need whole weights, and are refused
    modules_to_save: str = ""  # names of modules that train as a whole beside the adapters
    adapter: str = ""  # peft folder of an adapter to continue
    # of what is frozen, in int8 or nf4
    quantization: Literal["none", "8bit", "4bit"] = field(default="none", metadata={"bare": "8bit"})
    int8_mode: Literal["dequant", "llm_int8"] = "dequant"  # llm_int8 also rounds activations
    quantize_head: bool = False  # the head too; the loss then needs full logits
    keep_experts_16bit: bool = False  # quantize a mixture of experts, but not its experts
    low_cpu_fsdp: bool = True  # each rank reads only its own shards; false: the whole model
    activation_checkpointing: Literal["none", "selective", "full"] = "none"  # recompute in backward
    compile: bool = False  # torch.compile for each layer
    cpu_offload: bool = False  # weights, gradients and optimizer on the host
    # choose recomputing, offload, resharding and micro-batches; any: also LoRA, 8bit and 4bit
    fit: Literal["", "same", "any"] = field(default="", metadata={"bare": "same"})
    force: bool = False  # begin though the plan says that it does not fit
    reshard_after_forward: bool = True  # false: keep layers gathered until backward, like ZeRO-2
    replicate: int = 0  # HSDP: so many copies of the model; 0: ranks / shard
    shard: int = 0  # ranks that share one copy; 0: ranks / replicate, or all
    sync_each_microbatch: bool = False  # reduce gradients every micro-batch: less memory
    pin_memory: bool = True  # copy batches to a GPU from page-locked memory; nothing to do on a CPU

    # Where
    output_dir: str = ""  # run folder; empty: the next free output/finetune-NNN
    resume: str = "auto"  # auto: continue what is in --output_dir; none: refuse to; or a checkpoint
    save_every: int = 500  # steps between checkpoints; 0: none
    keep: int = 2  # newest checkpoints that stay; 0: all
    async_save: bool = False  # write checkpoints while training goes on, from a copy in host memory
    allow_new_data: bool = False  # resume though the data changed
    timeout: int = 300  # seconds a rank waits for the others in training; before and after: 600
    save_model: bool = True  # write OUT/model at the end
    save_dtype: Literal["original", "bf16", "fp32"] = "original"  # of OUT/model
    log_every: int = 1  # steps between console lines
    profile: bool = False  # write OUT/profile: a trace of two steps, on CUDA also a memory snapshot
    tensorboard: bool = False  # also log to OUT/tensorboard
    wandb: bool = False  # also log to Weights & Biases

    def __post_init__(self):
        check_least(self, batch_size=1, epochs=1, seq_len=2, warmup=-1, timeout=1)
        check(self.lr > 0, f"--lr {self.lr} trains nothing (fix: --lr 2e-5)")
        check(self.eval_share < 1, f"--eval_share {self.eval_share} trains on nothing (fix: 0.02)")
        check_adapter_flags(pick(Lora, self), pick(Quant, self), self.param_dtype)
        both = self.eval_dataset and self.eval_share
        check(not both, "--eval_dataset or --eval_share? (fix: give one)")
        given = (self.model and self.dataset) or (TINY / "config.json").exists()
        check(given, "recipes/tiny is not here (fix: --model FOLDER --dataset FILE)")


@releases_output
def main(cfg: Config) -> Path | None:
    """Fine-tune; returns the run folder, None where there was only something to show."""
    quiet_transformers()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed(alone=cfg.check)
    with together(world):
        axes = mesh_axes(world.ranks, cfg.replicate, cfg.shard)
        cfg = settle(cfg, world)
    agree(world, asdict(cfg), "flags")

    # --- folder: the model's, the run's, and what an earlier start left there ---------------------
    act("folder")
    trust = cfg.trust_remote_code
    source = open_model(cfg.model, world, trust)
    tokenizer_folder = find_model(cfg.tokenizer, world, trust) if cfg.tokenizer else source.folder
    with together(world):
        tokenizer = load_tokenizer(tokenizer_folder, cfg.chat_template, trust)
        check_vocab(len(tokenizer), source.config.get_text_config().vocab_size)
        structure = (source.config, DTYPES[cfg.param_dtype], cfg.attn, trust)
        model = build_model(*structure)  # on meta
        pieces = plan_pieces(model, source.weights, source.folder)
    if not cfg.show_masks:
        out = claim_output(cfg.output_dir, "finetune", world, source.folder)
        with together(world):
            fitted = fitted_before(out) if cfg.fit else {}  # what --fit found, stays
            cfg = replace(cfg, **fitted)
        earlier = continue_run(out, cfg.resume, cfg, world)
        if earlier.finished:
            print0(f"{out} is finished: already at step {earlier.finished}, nothing to do")
            return out

    # --- data: every row is read, checked and tokenized -------------------------------------------
    act("data")
    with together(world, patient=True):
        examples, held_out = load_data(pick(Rows, cfg), tokenizer, progress=world.rank == 0)
        check_positions(model, cfg.seq_len, examples, held_out)
    if cfg.show_masks:
        return show_masks(examples, tokenizer, cfg.show_masks)

    # --- plan: sizes, memory and disk; all that fails cheaply has failed after it -----------------
    act("plan")
    with together(world):
        setting = Setting(
            config=source.config,
            param_dtype=DTYPES[cfg.param_dtype],
            dtype=DTYPES[cfg.dtype],
            seq_len=longest_row(cfg.seq_len, cfg.packing, examples, held_out),
            shards=axes["shard"],
            replicate=world.ranks // axes["shard"],
            local_ranks=world.local_ranks,
            gpu=world.device.type == "cuda",
            batch_size=cfg.batch_size,
            rows=cfg.global_batch_size // world.ranks or cfg.batch_size * cfg.grad_accum,
            activation_checkpointing=cfg.activation_checkpointing,
            cpu_offload=cfg.cpu_offload,
            reshard_after_forward=cfg.reshard_after_forward,
            lora=pick(Lora, cfg),
            quant=pick(Quant, cfg),
            attn=cfg.attn,
            trust_remote_code=trust,
            packing=cfg.packing,
            optimizer=cfg.optimizer,
            sync_each_microbatch=cfg.sync_each_microbatch,
            low_cpu_fsdp=cfg.low_cpu_fsdp,
            async_save=cfg.async_save,
            compile=cfg.compile,
        )
        plan = plan_memory(setting, world, cfg.fit, bool(fitted), cfg.force)
    cfg = replace(cfg, **plan.chosen)
    lora, quant = pick(Lora, cfg), pick(Quant, cfg)
    facts = {"seed": cfg.seed, "param_dtype": cfg.param_dtype, "packing": cfg.packing}
    facts |= {**lora.flags(), "optimizer": state_kind(cfg.optimizer)}
    facts |= run_facts(source.config, source.weights, examples.fingerprint)
    agree(world, facts, "files")
    with together(world):
        wanted = cfg.global_batch_size or earlier.state.get("global_batch_size", 0)
        earlier.check_facts({**facts, "global_batch_size": wanted}, cfg.allow_new_data)
        sizes = pick(BatchSizes, cfg, global_batch_size=wanted)
        data_rank, data_ranks = data_place(world, axes)
        global_batch, micro_batches = sizes.divide(data_ranks)
        shares = (cfg.batch_size, data_rank, data_ranks, pad_id(tokenizer))
        if cfg.packing:
            loader = PackedBatches(examples, cfg.seed, global_batch, *shares, cfg.seq_len)
        else:
            loader = GlobalBatches(examples, cfg.seed, global_batch, *shares)
        if held_out:
            eval_loader = GlobalBatches(held_out, cfg.seed, cfg.batch_size * data_ranks, *shares)
        steps = cfg.steps or cfg.epochs * loader.per_epoch
        warmup = cfg.warmup if cfg.warmup >= 0 else round(0.03 * steps)
        disk = estimate_disk(source.weights, steps, cfg.save_every, cfg.keep, cfg.optimizer)
    check_space(out, 0 if lora else disk, world)
    print0(f"model     {cfg.model}: {source.sentence()}")
    print_template_notes(tokenizer)
    print_data(cfg.dataset, loader.summary(), examples, held_out)
    print0(f"ranks     {mesh_sentence(world, axes)}")
    text = f"{cfg.batch_size} rows x {data_ranks} ranks x {micro_batches} micro-batches"
    print0(
        f"batch     {global_batch} = {text}; {steps} steps, rows of at most {cfg.seq_len} tokens"
    )
    print0(f"rate      {cfg.lr:g} at its peak, {warmup} steps of warm-up, then {cfg.schedule}")
    print0(plan.text, ready=True)

    # --- build: the structure that is trained -----------------------------------------------------
    act("build")
    if not cfg.low_cpu_fsdp and not cfg.check:
        model = build_model(*structure, whole=source.folder)
    names = None  # of what adapters rename
    if lora:
        from utils.model.lora import adapt, fill_adapters, save_adapter

        with together(world):
            adapters, names = adapt(model, lora, quant, DTYPES[cfg.dtype])
    if cfg.check:
        return show_data(examples, held_out, loader)
    add_chunked_loss(model)
    recompute_activations(model, cfg.activation_checkpointing)
    if cfg.compile:
        for layer in decoder_layers(model):
            layer.compile()  # in place; layers are alike, so one compilation serves all
    checkpoint = earlier.checkpoint
    print0(f"output    {out}{f', continuing from {checkpoint.name}' if checkpoint else ''}")
    precision = f"{cfg.dtype} over {'frozen' if lora else cfg.param_dtype} weights"
    print0(f"compute   {precision}; attention {model.config._attn_implementation}")

    # --- shard: every parameter cut over the ranks ------------------------------------------------
    act("shard")
    mesh = build_mesh(world, axes)  # on GPUs, NCCL begins here
    shard_model(model, mesh, DTYPES[cfg.dtype], cfg.reshard_after_forward, cfg.cpu_offload)

    # --- load: the first act that costs memory ----------------------------------------------------
    act("load")
    started = time.monotonic()
    with together(world):
        if cfg.low_cpu_fsdp:
            load_pieces(model, pieces, world.device, cfg.cpu_offload, names)
        if lora:
            fill_adapters(model, cfg.adapter, cfg.seed)
    print0(f"weights   in place after {time.monotonic() - started:.1f} s")
    if warning := check_chunked_loss(model, world.device):
        print0(f"warning: {warning}")
    if cfg.packing:
        loader.flat = wants_flat_packs(model)
        check_packing(model, 1 if loader.flat else cfg.batch_size, DTYPES[cfg.dtype], world.device)

    # --- optimizer --------------------------------------------------------------------------------
    act("optimizer")
    optimizer = build_optimizer(model, cfg.lr, cfg.weight_decay, cfg.optimizer)
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.dtype == "fp16")

    # --- resume: weights, optimizer and position, exactly -----------------------------------------
    act("resume")
    first = 0
    if checkpoint:
        first = load_checkpoint(checkpoint, model, optimizer, world)["step"]
        scaler.load_state_dict(earlier.state["scaler"] or scaler.state_dict())  # {}: not fp16
    print0(f"starting at step {first} of {steps}")

    # --- train ------------------------------------------------------------------------------------
    act("train")
    model.train()
    run = start_run(out, cfg, plan.planned) if world.rank == 0 else 0  # the first write
    write_bad_rows(out, world.rank, examples, held_out)
    profiler = start_profiler(out / "profile", world, first, steps) if cfg.profile else None
    skipped, stop = 0, ""  # skipped: steps in a row that fp16 left out
    with (
        CheckpointSaver(out / "checkpoints", cfg.keep, world, cfg.async_save) as saver,
        RunLog(out, steps, cfg.log_every, (cfg.tensorboard, cfg.wandb), first, run) as log,
    ):
        stop_after_step()  # a signal no longer ends the process, but asks for a checkpoint
        for step in range(first, steps):
            started = time.monotonic()
            set_seed((cfg.seed * 1_000_003 + step) * world.size + world.rank)  # dropout's
            batches = loader.batches(step)  # this rank's micro-batches of global batch `step`
            trained_tokens = all_reduce_sum(sum(batch.trained_tokens for batch in batches), world)
            losses = []
            for number, batch in enumerate(batches, 1):
                model.set_requires_gradient_sync(cfg.sync_each_microbatch or number == len(batches))
                batch = batch.to(world.device, cfg.pin_memory)  # batch.ids, batch.labels: (B, T)
                loss = summed_cross_entropy(model, batch)  # () and never (B, T, V)
                scaler.scale(loss * world.size / trained_tokens).backward()  # FSDP takes the mean
                losses.append(loss.detach())
            loss = all_reduce_sum(torch.stack(losses).sum(), world) / trained_tokens
            peak_bytes = peak_memory_bytes()  # where most is alive
            lr = learning_rate(step, steps, cfg.lr, warmup, cfg.schedule)
            guard = partial(stop_if_not_finite, step, loss, losses, batches, world)
            norm, skipped = take_step(model, optimizer, scaler, lr, cfg.clip_norm, skipped, guard)
            done, seconds = step + 1, time.monotonic() - started
            tokens = all_reduce_sum(sum(batch.tokens for batch in batches), world)
            log.step(
                step=done,
                loss=loss,
                grad_norm=norm,
                lr=lr,
                trained_tokens=int(trained_tokens),
                tokens=int(tokens),
                skipped=int(skipped > 0),
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                peak_memory_gib=peak_bytes / GIB,
                mfu=mfu(model, cfg.seq_len, tokens / seconds, world.device, world.size),
            )
            if profiler:
                profiler.step()
            if held_out and (done == steps or (cfg.eval_every and done % cfg.eval_every == 0)):
                log.step(step=done, eval_loss=eval_loss(model, eval_loader, world))
            if step == first:
                set_timeout(cfg.timeout)  # the first step may compile
            stop = stop_asked()
            if stop or (cfg.save_every and (done == steps or done % cfg.save_every == 0)):
                state = facts | {"epoch": done / loader.per_epoch, "config": asdict(cfg)}
                state |= {"global_batch_size": global_batch, "scaler": scaler.state_dict()}
                path = saver.save(done, model, optimizer, state | {"step_seconds": seconds})
            if stop:
                break
    if stop:
        print0(f"stopped   by {stop} after step {done}: {path}; the same command goes on")
        return out
    set_timeout()

    # --- save: each rank writes its own bytes of the final files ----------------------------------
    act("save")
    result = out / ("adapter" if lora else "model")
    if cfg.save_model and lora:
        print0(f"adapter   {save_adapter(result, model, adapters, cfg.model, world, tokenizer)}")
    elif cfg.save_model:
        save_model(
            result,
            model,
            pieces,
            world,
            save_dtype=DTYPES[cfg.save_dtype],
            tokenizer=tokenizer,
            source=source.folder,
            eos_ids=end_of_turn_ids(tokenizer),
        )
    measured = plan.compare(world) | {"steps": steps, "global_batch_size": global_batch}
    write_plan(out, plan.planned, measured, world)
    print0(f"finished  {steps} steps; {result if cfg.save_model else out}")
    return out


def settle(cfg: Config, world) -> Config:
    """Replace what is left open by what it means here; check what depends on the device."""
    if not cfg.model:
        values = {k: v for k, v in TINY_VALUES.items() if getattr(cfg, k) == getattr(Config, k)}
        cfg = replace(cfg, model=str(TINY), **values)
    cfg = replace(cfg, dataset=cfg.dataset or str(TINY / "chat.jsonl"))
    if cfg.check:  # the run may be meant for other machines: what it needs is told, and not refused
        cfg = replace(cfg, fit="", force=True)
    cfg = replace(cfg, dtype=settle_dtype(cfg.dtype, world.device))
    check_packages(cfg.attn, cfg.optimizer, cfg.tensorboard, cfg.wandb, cfg.dtype, world.gpu_name)
    return cfg


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config, aliases="foreign_flags"))
        stop_distributed()
