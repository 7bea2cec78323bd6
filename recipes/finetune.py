"""
Supervised fine-tuning. Every rank builds the model on meta and reads only its own slice of the weights.

    torchrun --nproc_per_node 2 recipes/finetune.py --low_cpu_fsdp
    torchrun --nproc_per_node 8 recipes/finetune.py --model DIR --dataset chat.jsonl --output_dir runs/first
    torchrun --nproc_per_node 2 recipes/finetune.py --model DIR --lora_rank 16 --quantization 8bit

Without --model and --dataset it teaches the tiny model in recipes/tiny a task that it cannot do.
The run folder holds config.yaml, metrics.jsonl, checkpoints/ and, at the end, model/ for from_pretrained.
"""

import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch

from utils.data.batches import GlobalBatches
from utils.data.examples import load_data, print_data, write_bad_rows
from utils.data.packing import PackedBatches
from utils.data.positions import check_positions
from utils.data.show_data import show_data, show_masks
from utils.data.tokens import end_of_turn_ids, load_tokenizer, pad_id, print_template_notes
from utils.model.activations import recompute_activations
from utils.model.attention import check_packing, wants_flat_packs
from utils.model.folder import (
    check_vocab,
    find_model,
    open_weights,
    quiet_transformers,
    read_config,
    run_facts,
)
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.loss import (
    add_chunked_loss,
    check_chunked_loss,
    held_out_loss,
    summed_cross_entropy,
)
from utils.model.saving import save_model
from utils.model.sharding import DTYPES, decoder_layers, settle_dtype, shard_model, sync_gradients
from utils.model.verify import check_hashes
from utils.plan.planned import estimate_disk, plan_memory
from utils.run.disk import check_space
from utils.run.distributed import (
    agree,
    all_reduce_sum,
    init_distributed,
    set_timeout,
    stop_distributed,
    together,
)
from utils.run.errors import act, check, fault, print0, report_errors
from utils.run.folder import claim_output, holds_run, releases_output, start_run, write_plan
from utils.run.log import RunLog
from utils.run.memory import peak_memory_bytes
from utils.run.mesh import build_mesh, mesh_axes, mesh_sentence
from utils.run.settings import check_adapter_flags, check_least, divide_global_batch, parse_cli
from utils.run.signals import stop_after_step, stop_asked, stop_at_once, warn_of_grace
from utils.run.units import IGNORE
from utils.train.checkpoint import CheckpointSaver, set_seed
from utils.train.flops import mfu
from utils.train.optim import (
    OptimizerName,
    build_optimizer,
    check_packages,
    clip_gradients,
    learning_rate,
    stop_if_not_finite,
)
from utils.train.profiling import start_profiler
from utils.train.resume import load_checkpoint, previous_run

TINY = Path(__file__).resolve().parent / "tiny"
LORA = "lora_rank lora_alpha lora_targets lora_dropout lora_init use_rslora use_dora modules_to_save".split()
FIXED = ("seed", "param_dtype", "packing", *LORA)  # settings that a resume may not change
QUANTIZED = ("int8_mode", "quantize_head", "keep_experts_16bit")
# for flags left at their defaults
TINY_VALUES = {"epochs": 3, "batch_size": 16, "lr": 2e-3, "log_every": 40}


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the tiny model that comes with the recipes
    tokenizer: str = ""  # folder or Hugging Face id; empty: the model's own
    trust_remote_code: bool = False  # run Python code that comes with the model
    verify: str = ""  # file of SHA-256 sums, as sha256sum writes it, to check the weights' files
    attn: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"  # auto: the model's best
    dataset: str = ""  # file, folder, glob or id; several: a.jsonl:0.7,b.csv:0.3; empty: tiny task
    # of rows
    format: Literal["auto", "chat", "sharegpt", "alpaca", "completion", "text", "tokens"] = "auto"
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
    optimizer: OptimizerName = "adamw"  # 8-bit and paged: bitsandbytes'; 8-bit: 2 bytes, not 8
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
        changed = [n for n in (*LORA, *QUANTIZED) if getattr(self, n) != getattr(Config, n)]
        check_adapter_flags(asdict(self), changed, LORA)
        check(
            not (self.eval_dataset and self.eval_share),
            "--eval_dataset or --eval_share? (fix: give one)",
        )
        here = self.model and self.dataset or (TINY / "config.json").exists()
        check(here, "recipes/tiny is not here (fix: --model FOLDER --dataset FILE)")


@releases_output
def main(cfg: Config) -> Path | None:
    """Fine-tune; returns the run folder, None where there was only something to show."""
    quiet_transformers()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed(alone=cfg.check)

    # --- plan: everything that can fail cheaply fails here ----------------------------------------
    act("plan")
    with together(world):
        axes = mesh_axes(world.ranks, cfg.replicate, cfg.shard)
        cfg = settle(cfg, world)
    agree(world, asdict(cfg), "flags")
    folder = find_model(cfg.model, world, cfg.trust_remote_code)
    other = cfg.tokenizer and find_model(cfg.tokenizer, world, cfg.trust_remote_code)
    with together(world, patient=True):
        config = read_config(folder, cfg.trust_remote_code)
        weights = open_weights(folder)
        if cfg.verify:
            check_hashes({info.file for info in weights.values()}, cfg.verify, world)
        tokenizer = load_tokenizer(other or folder, cfg.chat_template, cfg.trust_remote_code)
        check_vocab(len(tokenizer), config.get_text_config().vocab_size)
        examples, held_out = load_data(vars(cfg), tokenizer, progress=world.rank == 0)
        structure = (config, DTYPES[cfg.param_dtype], cfg.attn, cfg.trust_remote_code)
        model = build_model(*structure)  # on meta
        pieces = plan_pieces(model, weights, folder)  # checkpoint tensor -> its place in the model
        check_positions(model, cfg.seq_len, examples, held_out)
    if cfg.show_masks:
        return show_masks(examples, tokenizer, cfg.show_masks)
    with together(world):
        plan = plan_memory(
            structure, DTYPES[cfg.dtype], axes["shard"], world, vars(cfg), examples, held_out
        )
    cfg = replace(cfg, **plan.chosen)
    lora = bool(cfg.lora_rank or cfg.adapter)
    facts = {n: getattr(cfg, n) for n in FIXED} | run_facts(config, weights, examples.fingerprint)
    agree(world, facts, "files")
    out = claim_output(cfg.output_dir, "finetune", world, folder, watch=not cfg.check)
    checkpoint, state, finished, names = None, {}, 0, None  # names: of what adapters have renamed
    if holds_run(out) or cfg.resume not in ("auto", "none"):
        checkpoint, state, finished = previous_run(cfg, out, facts, world)
    if finished:
        print0(f"{out} is finished: already at step {finished}, nothing to do")
        return out
    with together(world):
        wanted = state.get("global_batch_size") or cfg.global_batch_size
        global_batch, micro_batches = divide_global_batch(
            wanted, cfg.batch_size, cfg.grad_accum, world.ranks
        )
        shares = (cfg.batch_size, world.rank, world.size, pad_id(tokenizer))
        loader = GlobalBatches(examples, cfg.seed, global_batch, *shares)
        if cfg.packing:
            loader = PackedBatches(examples, cfg.seed, global_batch, *shares, cfg.seq_len)
        steps = cfg.steps or cfg.epochs * loader.per_epoch
        disk = 0 if lora else estimate_disk(weights, steps, cfg.save_every, cfg.keep, cfg.optimizer)
    check_space(out, disk, world)
    warmup = cfg.warmup if cfg.warmup >= 0 else round(0.03 * steps)
    print0(f"model     {cfg.model}: {(config.architectures or ['?'])[0]}, {len(weights)} tensors")
    print_template_notes(tokenizer)
    print_data(cfg.dataset, loader.summary(), examples, held_out)
    print0(f"ranks     {mesh_sentence(world, axes)}")
    parts = f"{cfg.batch_size} rows x {world.size} ranks x {micro_batches} micro-batches"
    print0(
        f"batch     {global_batch} = {parts}; {steps} steps, rows of at most {cfg.seq_len} tokens"
    )
    print0(f"rate      {cfg.lr:g} at its peak, {warmup} steps of warm-up, then {cfg.schedule}")
    print0(plan.text, ready=True)

    # --- build: the structure that is trained -----------------------------------------------------
    act("build")
    if not cfg.low_cpu_fsdp and not cfg.check:
        model = build_model(*structure, whole=folder)
    if lora:
        from utils.model.lora import adapt, fill_adapters, save_adapter

        flags = {name: (getattr(cfg, name), getattr(Config, name)) for name in LORA}
        how = {"int8_mode": cfg.int8_mode, "head": cfg.quantize_head}
        how |= {"quantization": cfg.quantization, "keep_experts_16bit": cfg.keep_experts_16bit}
        with together(world):
            adapters, names = adapt(model, cfg.adapter, flags, DTYPES[cfg.dtype], **how)
    if cfg.check:
        return show_data(examples, held_out, loader)
    add_chunked_loss(model)
    if cfg.activation_checkpointing != "none":
        recompute_activations(model, cfg.activation_checkpointing)
    if cfg.compile:
        for layer in decoder_layers(model):
            layer.compile()  # in place; layers are alike, so one compilation serves all
    print0(f"output    {out}{f', continuing from {checkpoint.name}' if checkpoint else ''}")
    over = f"{'frozen' if lora else cfg.param_dtype} weights; attention {model.config._attn_implementation}"
    print0(f"compute   {cfg.dtype} over {over}")

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
    # else it does nothing
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.dtype == "fp16")

    # --- data: which rows this rank sees, and when ------------------------------------------------
    act("data")
    eval_loader = held_out and GlobalBatches(
        held_out, cfg.seed, cfg.batch_size * world.size, *shares
    )

    # --- resume: weights, optimizer and position, exactly -----------------------------------------
    act("resume")
    first, skipped = 0, 0  # skipped: steps in a row that fp16 left out
    if checkpoint:
        first = load_checkpoint(checkpoint, model, optimizer, world)["step"]
        scaler.load_state_dict(state["scaler"] or scaler.state_dict())  # {}: it was not fp16
        warn_of_grace(state["step_seconds"], state["save_seconds"])
    print0(f"starting at step {first} of {steps}")

    # --- train ------------------------------------------------------------------------------------
    act("train")
    model.train()
    saver = CheckpointSaver(out / "checkpoints", cfg.keep, world, cfg.async_save)
    run = start_run(out, cfg, plan.planned) if world.rank == 0 else 0  # the first write
    write_bad_rows(out, world.rank, examples, held_out)
    log = RunLog(
        out if run else None, steps, cfg.log_every, (cfg.tensorboard, cfg.wandb), first, run
    )
    profiler = None
    if cfg.profile:
        profiler = start_profiler(out / "profile", world, first, steps)
    stop_after_step()  # a signal no longer ends the process, but asks for a checkpoint
    for step in range(first, steps):
        started = time.monotonic()
        fault("step", step)
        # so that dropout resumes exactly
        set_seed((cfg.seed * 1_000_003 + step) * world.size + world.rank)
        batches = loader.batches(step)  # this rank's micro-batches of global batch `step`
        trained = all_reduce_sum(sum(int((b.labels != IGNORE).sum()) for b in batches), world)
        losses = []
        for i, batch in enumerate(batches):
            sync_gradients(model, cfg.sync_each_microbatch or i == len(batches) - 1)
            batch = batch.to(world.device, cfg.pin_memory)  # batch.ids, batch.labels: (B, T)
            loss = summed_cross_entropy(model, batch)  # () and never (B, T, V)
            scaler.scale(loss * world.size / trained).backward()  # FSDP averages over ranks
            losses.append(loss.detach())
        loss = all_reduce_sum(torch.stack(losses).sum(), world) / trained
        scaler.unscale_(optimizer)
        grad_norm = clip_gradients(model, cfg.clip_norm)
        peak = peak_memory_bytes(world.device)  # where most is alive
        skipped = skipped + 1 if scaler.is_enabled() and not math.isfinite(grad_norm) else 0
        stop_if_not_finite(step, loss, grad_norm, skipped, losses, batches, world)
        lr = learning_rate(step, steps, cfg.lr, warmup, cfg.schedule)
        for group in optimizer.param_groups:
            group["lr"] = lr
        # in fp16 all ranks skip it together where a gradient is not finite ...
        scaler.step(optimizer)
        scaler.update()  # ... and halve the scale
        optimizer.zero_grad()

        done, seconds = step + 1, time.monotonic() - started
        tokens = all_reduce_sum(sum(int(b.mask.sum()) for b in batches), world)
        log.step(
            step=done, loss=loss, grad_norm=grad_norm, lr=lr, trained_tokens=int(trained), tokens=int(tokens),
            skipped=int(skipped > 0), seconds=seconds, tokens_per_second=tokens / seconds,
            mfu=mfu(model, cfg.seq_len, tokens / seconds, world.device, world.size),
            peak_memory_gib=peak / 2**30,
        )  # fmt: skip
        if profiler:
            profiler.step()
        if held_out and (done == steps or cfg.eval_every and done % cfg.eval_every == 0):
            log.step(step=done, eval_loss=held_out_loss(model, eval_loader, world))
        if step == first:
            set_timeout(cfg.timeout)  # the first step may compile
        if (
            (stop := stop_asked())
            or cfg.save_every
            and (done == steps or done % cfg.save_every == 0)
        ):
            state = {**facts, "epoch": done / loader.per_epoch, "global_batch_size": global_batch}
            state |= {"config": asdict(cfg), "scaler": scaler.state_dict(), "step_seconds": seconds}
            path = saver.save(done, model, optimizer, state)
        if stop:
            saver.close()
            log.close()
            print0(f"stopped   by {stop} after step {done}: {path}; the same command goes on")
            return out
    saver.close()
    log.close()
    set_timeout()

    # --- save: each rank writes its own bytes of the final files ----------------------------------
    act("save")
    if cfg.save_model and lora:
        print0(
            f"adapter   {save_adapter(out / 'adapter', model, adapters, cfg.model, world, tokenizer)}"
        )
    elif cfg.save_model:
        options = {"save_dtype": DTYPES[cfg.save_dtype], "tokenizer": tokenizer, "source": folder}
        save_model(
            out / "model", model, pieces, world, eos_ids=end_of_turn_ids(tokenizer), **options
        )
    measured = plan.compare(world)  # and print both
    write_plan(
        out, plan.planned, {"steps": steps, "global_batch_size": global_batch, **measured}, world
    )
    print0(
        f"finished  {steps} steps; {out / ('adapter' if lora else 'model') if cfg.save_model else out}"
    )
    return out


def settle(cfg: Config, world) -> Config:
    """Replace what is left open by what it means here; check what depends on the device."""
    if not cfg.model:
        open_values = {
            k: v for k, v in TINY_VALUES.items() if getattr(cfg, k) == getattr(Config, k)
        }
        cfg = replace(cfg, model=str(TINY), **open_values)
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
