"""
Pre-training, continued or from scratch, on documents. Every rank reads, or draws, only its own slice of the
weights.

    torchrun --nproc_per_node 2 recipes/pretrain.py
    torchrun --nproc_per_node 8 recipes/pretrain.py --model DIR --dataset texts.jsonl --tokens 2e9
    torchrun --nproc_per_node 8 recipes/pretrain.py --init random --model llama-3.2-1b --tokenizer DIR ...

Without --model it trains the tiny model of recipes/tiny from scratch on the texts there. Rows are cut from an
endless stream of documents: no token is lost, and there is no padding. The run folder holds config.yaml,
metrics.jsonl, checkpoints/ and, at the end, model/ for from_pretrained.
"""

import gc
import math
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

if __name__ == "__main__":
    gc.disable()  # the imports leave nothing to collect: saves 0.5 s

HERE = Path(__file__).resolve().parent
sys.path.insert(1, str(HERE.parent))  # utils/ is beside recipes/

import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from utils.data.batches import divide_batch
from utils.data.examples import (
    FormName,
    Rows,
    check_positions,
    load_data,
    print_data,
    write_bad_rows,
)
from utils.data.stream import StreamBatches
from utils.data.tokens import load_tokenizer, pad_id
from utils.model.folder import check_vocab, find_model, open_model, quiet_transformers, run_facts
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.loss import add_chunked_loss, eval_loss, settle_chunked_loss, summed_cross_entropy
from utils.model.saving import save_model
from utils.model.sharding import (
    DTYPES,
    clip_gradients,
    decoder_layers,
    lacks_grouped_kernels,
    norms_and_biases,
    recompute_activations,
    settle_dtype,
    stored_as_computed,
    units,
)
from utils.plan.fit import estimate_disk, plan_memory
from utils.plan.need import Setting
from utils.run.distributed import (
    agree,
    all_reduce_sum,
    build_mesh,
    init_distributed,
    mesh_axes,
    mesh_sentence,
    set_timeout,
    stop_distributed,
    sum_on_device,
    together,
    use_all_cores,
)
from utils.run.errors import act, check, print0
from utils.run.folder import (
    Resumed,
    check_space,
    claim_output,
    holds_run,
    releases_output,
    start_run,
)
from utils.run.settings import check_settled, check_training, from_settings, parse_cli
from utils.run.signals import report_errors, stop_after_step, stop_asked, stop_at_once
from utils.train.checkpoint import CheckpointSaver, set_seed
from utils.train.log import RunLog

TINY = HERE / "tiny"
# Values of flags that are not given, if --model is not given either.
TINY_VALUES = {
    "init": "random",
    "epochs": 6,
    "seq_len": 128,
    "batch_size": 16,
    "lr": 1e-2,
    "eval_share": 0.05,
    "log_every": 100,
}
BETAS = (0.9, 0.95)  # of AdamW


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the tiny model that comes with the recipes
    # random: new weights, for a folder with config.json or a name in configs/shapes (with --tokenizer)
    init: Literal["model", "random"] = "model"
    tokenizer: str = ""  # folder or Hugging Face id; empty: the model's own
    trust_remote_code: bool = False  # run Python code that comes with the model
    # auto: the model's default; with --document_mask: varlen (no mask) if the model supports it
    attn: Literal["auto", "sdpa", "varlen", "flash_attention_2", "eager"] = "auto"
    dataset: str = ""  # file, folder, glob or id; several: a.jsonl:0.7,b.csv:0.3; empty: tiny task
    format: FormName = "auto"  # format of the rows; auto: recognized from their keys
    columns: str = ""  # our key=your column: instruction=question,output=answer
    bad_rows: Literal["error", "drop"] = "error"  # drop: skip and list them in OUT/bad_rows.jsonl
    chat_template: str = ""  # FILE, chatml, alpaca or plain; empty: the tokenizer's own
    max_rows: int = 0  # read only the first N rows of each source, held-out ones too; 0: all
    eval_dataset: str = ""  # held-out data, given like --dataset
    eval_share: float = 0.0  # share of --dataset to hold out instead, chosen by row hash
    eval_every: int = 0  # steps between evaluations of held-out rows; 0: only at the end

    # How much
    epochs: int = 1  # passes over the data
    steps: int = 0  # optimizer steps; 0: as many as --epochs needs
    tokens: float = 0.0  # length in tokens, such as 2e9; 0: --steps or --epochs
    global_batch_size: int = 0  # sequences per optimizer step; 0: batch_size x grad_accum x ranks
    batch_size: int = 1  # sequences per rank and micro-batch
    grad_accum: int = 0  # micro-batches per step; 0: what the global batch needs
    seq_len: int = 2048  # maximum tokens of a row
    document_mask: bool = True  # tokens attend only to their own document
    lr: float = 3e-4  # peak learning rate
    warmup: float = 0.02  # steps of linear warm-up; below 1: a share of all steps
    # learning rate after the warm-up; wsd: constant, then linear to 0 over --decay_share of the steps
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    decay_share: float = 0.2  # wsd: share of all steps in which the learning rate falls
    weight_decay: float = 0.1  # not applied to norms and biases
    clip_norm: float = 1.0  # maximum gradient norm; 0: no clipping
    seed: int = 0  # random seed: data order, new weights, dropout

    # How
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # compute; auto: bf16 if the GPU has it
    param_dtype: Literal["fp32", "bf16"] = "fp32"  # dtype of weights, gradients, optimizer
    # adamw_8bit: from bitsandbytes, with moments of 2 bytes per weight, not 8
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = "adamw"
    # update each weight as soon as its gradient is ready; keeps no gradients; needs --clip_norm 0
    optimizer_in_backward: bool = False
    low_cpu_fsdp: bool = True  # each rank reads only its own shards; false: the whole model
    # recompute activations in backward; selective: all but matrix products and attention; full: all
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    activation_offload: bool = False  # keep inputs of recomputed layers on the host
    compile: bool = False  # torch.compile for each layer
    cpu_offload: bool = False  # keep weights, gradients and optimizer on the host
    # choose recomputing, offload, resharding and micro-batches to fit
    fit: Literal["", "same"] = field(default="", metadata={"bare": "same"})
    force: bool = False  # start even if the plan says that it does not fit
    reshard_after_forward: bool = True  # false: keep layers gathered until backward, like ZeRO-2
    replicate: int = 0  # HSDP: number of copies of the model; 0: ranks / shard
    shard: int = 0  # HSDP: ranks that share one copy; 0: ranks / replicate, or all
    sync_each_microbatch: bool = False  # reduce gradients after each micro-batch: less memory

    # Where
    output_dir: str = ""  # run folder; empty: the next free one in output/
    resume: str = "auto"  # auto: continue a run in --output_dir; none: refuse it; or a checkpoint
    save_every: int = 500  # steps between checkpoints; 0: none
    keep: int = 2  # number of newest checkpoints to keep; 0: all
    async_save: bool = False  # write checkpoints in the background, from a copy in host memory
    allow_new_data: bool = False  # resume even if the data has changed
    timeout: int = 300  # seconds that ranks wait for each other in a step; twice that in a save
    save_model: bool = True  # write the result at the end
    save_dtype: Literal["original", "bf16", "fp32"] = "original"  # dtype of the result
    log_every: int = 1  # steps between console lines; only these steps wait for the GPU
    profile: bool = False  # write OUT/profile: a trace of two steps, on CUDA also a memory snapshot
    tensorboard: bool = False  # also log to OUT/tensorboard
    wandb: bool = False  # also log to Weights & Biases

    def __post_init__(self):
        check_training(self)
        check(not (self.tokens and self.steps), "--tokens or --steps? (fix: give one)")
        check(self.decay_share <= 1, f"--decay_share {self.decay_share} is a share (fix: 0.2)")
        check(
            self.schedule == "wsd" or self.decay_share == Config.decay_share,
            f"--decay_share has no effect on {self.schedule} (fix: --schedule wsd)",
        )
        check(
            self.low_cpu_fsdp or self.init == "model",
            "--low_cpu_fsdp false reads weights, and --init random has none (fix: leave it out)",
        )
        check(
            (self.model and self.dataset) or (TINY / "config.json").exists(),
            "recipes/tiny is not here (fix: --model FOLDER --dataset FILE)",
        )


@releases_output
def main(cfg: Config) -> Path:
    """Pre-train; returns the run folder."""
    quiet_transformers()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed()
    with together(world):
        axes = mesh_axes(world.size, cfg.replicate, cfg.shard)
        cfg = settle(cfg, world)
    agree(world, asdict(cfg), "flags")

    # --- folder: the model's, the run's, and what an earlier start left there ---------------------
    act("folder")
    trust = cfg.trust_remote_code
    if cfg.init == "random":
        from utils.model.init import draw_weights, open_config, plan_weights

        source = open_config(cfg.model, world, cfg.tokenizer, trust)
    else:
        source = open_model(cfg.model, world, trust)
    tokenizer_folder = find_model(cfg.tokenizer, world, trust) if cfg.tokenizer else source.folder
    with together(world):
        tokenizer = load_tokenizer(tokenizer_folder, cfg.chat_template, trust, source.config)
        special_ids = {}
        if cfg.init == "random":
            special_ids = settle_special_tokens(source.config, tokenizer)
        check_vocab(tokenizer, source.config.get_text_config().vocab_size)
        stored_dtype = source.config.dtype or torch.float32  # build_model changes it
        dtype = DTYPES[cfg.dtype]
        param_dtype = DTYPES[cfg.param_dtype]
        # varlen is set later: settle_attention asks the model whether it can
        attn = cfg.attn.replace("varlen", "auto")
        model = build_model(source.config, param_dtype, attn, trust)  # on meta
        if cfg.document_mask or cfg.attn == "varlen":
            from utils.model.attention import check_packing, settle_attention, wants_flat_packs

            attn = settle_attention(model, cfg.attn, world.device, dtype)
        if cfg.init == "random":
            weights, rules = plan_weights(model, stored_dtype)
            source = source._replace(weights=weights)
        pieces = plan_pieces(model, source.weights, source.folder)
    out = claim_output(cfg.output_dir, Path(__file__).stem, world, source.folder)
    fitted = {}
    if cfg.fit:
        from utils.plan.search import fitted_before

        with together(world):
            fitted = fitted_before(out)  # keep what --fit found at the first start
            cfg = replace(cfg, **fitted)
    earlier = Resumed()
    if holds_run(out) or cfg.resume not in ("auto", "none"):
        from utils.train.resume import continue_run

        earlier = continue_run(out, cfg.resume, cfg, world)
    if earlier.finished:
        return out

    # --- data: every row is read, checked and tokenized -------------------------------------------
    act("data")
    with together(world, patient=True):
        examples, held_out = load_data(from_settings(Rows, cfg, task="documents"), tokenizer)

    # --- plan: sizes, memory and disk; all that fails cheaply has failed after it -----------------
    act("plan")
    with together(world):
        # The flag's, or the checkpoint's; 0: divide_batch computes it.
        given_batch = cfg.global_batch_size or earlier.state.get("global_batch_size", 0)
        setting = from_settings(
            Setting,
            cfg,
            config=source.config,
            param_dtype=param_dtype,
            dtype=dtype,
            shards=axes["shard"],
            replicate=world.size // axes["shard"],
            local_ranks=world.local_size,
            gpu=world.on_gpu,
            global_batch_size=given_batch,
            rows=math.ceil(given_batch / world.size) or cfg.batch_size * cfg.grad_accum,
            lacks="lora_rank",
            attn=attn,
            masked=cfg.document_mask and attn != "varlen",
            repeats_keys=lacks_grouped_kernels(world.device, dtype),
        )
        plan = plan_memory(setting, world, cfg.fit, fitted, cfg.force)
    cfg = replace(cfg, **plan.chosen)
    facts = {
        "seed": cfg.seed,
        "param_dtype": cfg.param_dtype,
        "init": cfg.init,
        "special_ids": special_ids,
        "seq_len": cfg.seq_len,
        "document_mask": cfg.document_mask,
        "mixture": [origin.weight for origin in examples.origins],
        "optimizer": cfg.optimizer.removeprefix("paged_"),
        **run_facts(source.config, source.weights, examples.fingerprint),
    }
    agree(world, facts, "files")
    with together(world):
        global_batch, micro_batches = divide_batch(
            cfg.batch_size, cfg.grad_accum, given_batch or cfg.global_batch_size, world.size
        )
        facts["global_batch_size"] = global_batch
        if cfg.optimizer_in_backward:
            from utils.train.in_backward import check_in_backward

            check_in_backward(cfg, micro_batches)
        flat = cfg.document_mask and wants_flat_packs(model)
        options = (cfg.batch_size, world.rank, world.size, pad_id(tokenizer))
        options += (cfg.seq_len, flat, cfg.document_mask)
        loader = StreamBatches(examples, cfg.seed, global_batch, *options)
        if held_out:
            at_once = cfg.batch_size * world.size
            eval_loader = StreamBatches(held_out, cfg.seed, at_once, *options, held_out=True)
        check_positions(model, examples, longest=loader.longest())
        steps = cfg.steps or loader.steps(cfg.tokens, cfg.epochs)
        warmup = round(cfg.warmup if cfg.warmup >= 1 else cfg.warmup * steps)
        earlier.check_facts(facts, steps, cfg.allow_new_data)
        disk = estimate_disk(source.weights, steps, cfg, param_dtype)
    check_space(out, disk, world, counted="checkpoints/*/*")
    print0(f"model     {cfg.model}: {source.sentence()}")
    print_data(cfg.dataset, loader, held_out)
    if tokenizer.eos_token_id is None:
        print0(
            "warning: no end-of-text token: the model will not end a text (fix: PreTrainedTokenizerFast("
            "tokenizer_file='tokenizer.json', eos_token='<|endoftext|>').save_pretrained(DIR))"
        )
    print0(f"ranks     {mesh_sentence(world, axes)}")
    print0(
        f"batch     {global_batch} rows: {world.size} ranks with {micro_batches} micro-batches of at most"
        f" {cfg.batch_size}; {steps} steps, rows of {cfg.seq_len} tokens"
    )
    print0(
        f"rate      {cfg.lr:g} at its peak, {warmup} steps of warm-up, then {cfg.schedule};"
        f" weight decay {cfg.weight_decay:g}, betas {BETAS}"
    )
    print0(plan.text, ready=True)

    # --- build: the structure that is trained -----------------------------------------------------
    act("build")
    if not cfg.low_cpu_fsdp:
        model = build_model(source.config, param_dtype, attn, trust, read_from=source.folder)
    token_mfu = 0.0  # MFU at one token per second
    if world.on_gpu:
        from utils.model.attention import repeat_grouped_keys, use_gpu_kernels
        from utils.train.profiling import flops_per_token, mfu

        use_gpu_kernels(model)
        if setting.repeats_keys:
            repeat_grouped_keys()
        token_mfu = mfu(flops_per_token(model, cfg.seq_len), world)
    add_chunked_loss(model)
    recompute_activations(model, cfg.activation_checkpointing)
    if cfg.activation_offload:
        from utils.model.activation_offload import offload_inputs

        offload_inputs(model)
    if cfg.compile:
        from utils.model.attention import compile_layers

        compile_layers(model)
    print0(f"output    {out}; --save_every {cfg.save_every}, of {steps} steps")
    print0(
        f"compute   {cfg.dtype} over {cfg.param_dtype} weights;"
        f" attention {model.config._attn_implementation}"
    )

    # --- shard: every parameter cut over the ranks ------------------------------------------------
    act("shard")
    mesh = build_mesh(world, axes)  # on GPUs, NCCL begins here
    # A unit is gathered, used and freed together: each layer, the embedding, the head, and the root with the
    # rest. units() decides, and says why, which are freed after their forward and which their backward needs.
    # The shards keep the parameters' dtype; gradients are reduced in fp32. The modules of a unit share one
    # FSDP state: what is set on the first counts for all.
    all_units = units(model, dtype)
    offload = OffloadPolicy()
    unsharded = set()  # parameters that FSDP2 leaves alone
    if cfg.cpu_offload:
        offload = CPUOffloadPolicy(pin_memory=world.on_gpu)
        if world.on_gpu:
            use_all_cores(world)  # the optimizer computes on the CPU
    elif world.size == 1:  # an all-gather on one rank would only copy
        unsharded = stored_as_computed(
            all_units, micro_batches > 1 and not cfg.sync_each_microbatch
        )
    for unit in all_units:
        fully_shard(
            unit.modules,
            mesh=mesh,
            reshard_after_forward=cfg.reshard_after_forward and unit.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=unit.param_dtype,
                reduce_dtype=torch.float32,
                cast_forward_inputs=unit.cast_forward_inputs,
            ),
            offload_policy=offload,
            ignored_params=unsharded,
        )
        unit.modules[0].set_unshard_in_backward(unit.unshard_in_backward)
    # HSDP with --sync_each_microbatch: the copies all-reduce once a step. Until then FSDP2 keeps the sum of
    # the micro-batches in fp32 on the device. Gradients that are stored in bf16, or on the host, need less
    # memory there: they are all-reduced in each micro-batch.
    reduces_once = cfg.param_dtype == "fp32" and not cfg.cpu_offload
    # The all-gather of the head, often the largest unit, is begun before the last layer computes. FSDP2 alone
    # begins it when the host reaches the head, which is early enough for layers.
    decoder_layers(model)[-1].set_modules_to_forward_prefetch([model.get_output_embeddings()])

    # --- load: the first act that costs memory ----------------------------------------------------
    act("load")
    started = time.monotonic()
    with together(world, patient=True):  # the files of one machine may be slower
        if cfg.low_cpu_fsdp:
            load_pieces(model, pieces, world.device, cfg.cpu_offload)
        elif unsharded:
            model.to(world.device)  # FSDP2 moves only what it shards
        if cfg.init == "random":
            draw_weights(model, rules, cfg.seed)
    print0(f"weights   in place after {time.monotonic() - started:.1f} s")
    settle_chunked_loss(model, world.device)
    if cfg.document_mask:
        check_packing(model, world.device, "--document_mask", "--document_mask false")

    # --- optimizer --------------------------------------------------------------------------------
    act("optimizer")
    trained = [p for p in model.parameters() if p.requires_grad]
    undecayed = norms_and_biases(model)
    groups = [
        {"params": [p for p in trained if p not in undecayed], "weight_decay": cfg.weight_decay},
        {"params": [p for p in trained if p in undecayed], "weight_decay": 0.0},
    ]
    if cfg.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=cfg.lr, betas=BETAS, fused=True)
    else:
        from utils.train.optim_8bit import ShardedAdamW8bit

        paged = cfg.optimizer.startswith("paged")
        optimizer = ShardedAdamW8bit(groups, lr=cfg.lr, betas=BETAS, paged=paged)
    in_backward = None
    if cfg.optimizer_in_backward:
        from utils.train.in_backward import StepInBackward

        in_backward = StepInBackward(optimizer, mesh)
    scaler = torch.amp.GradScaler(world.device.type, enabled=cfg.dtype == "fp16")
    if cfg.cpu_offload:
        scaler.scale(torch.ones(()))  # creates its scale on the CPU, where the gradients are

    # --- resume: weights, optimizer and position, exactly -----------------------------------------
    act("resume")
    first = earlier.load(model, optimizer, scaler, world)
    print0(f"starting at step {first} of {steps}")

    # --- train ------------------------------------------------------------------------------------
    act("train")
    model.train()
    run = start_run(out, cfg, plan.planned, world)  # the first write
    write_bad_rows(out, world.rank, examples, held_out)
    stop = ""
    with (
        CheckpointSaver(
            out / "checkpoints", cfg.keep, world, cfg.async_save, timeout=2 * cfg.timeout
        ) as saver,
        RunLog(out, steps, first, run, world, token_mfu, cfg) as log,
    ):
        eval_left = earlier.state.get("eval_left")  # a signal ended the last evaluation
        if held_out and (eval_left or not first):
            log.step(step=first, **evaluate(model, eval_loader, world))
        stop_after_step()  # a signal no longer ends the process, but asks for a checkpoint
        for step in range(first, steps):
            log.begin()
            set_seed(cfg.seed, step, world)  # for dropout
            batches = loader.batches(step)  # this rank's micro-batches of global batch `step`
            trained_tokens = all_reduce_sum(sum(batch.trained_tokens for batch in batches), world)
            done_share = max(0.0, (step - warmup) / max(1, steps - warmup))  # 0 during the warm-up
            decay = {
                "constant": 1.0,
                "linear": 1 - done_share,
                "wsd": min(1.0, (steps - step) / max(1.0, cfg.decay_share * steps)),
                "cosine": 0.5 * (1 + math.cos(math.pi * done_share)),
            }
            lr = cfg.lr * min(1.0, (step + 1) / max(1, warmup)) * decay[cfg.schedule]
            for group in optimizer.param_groups:
                group["lr"] = lr
            losses = []
            for number, batch in enumerate(batches, 1):
                model.set_requires_gradient_sync(cfg.sync_each_microbatch or number == len(batches))
                model.set_requires_all_reduce(number == len(batches) or not reduces_once)
                batch = batch.to(world.device)  # batch.ids, batch.labels: (B, T)
                loss = summed_cross_entropy(model, batch)  # (); never holds (B, T, V)
                # The mean over the trained tokens of the global batch; world.size undoes FSDP's mean.
                scaler.scale(loss * world.size / trained_tokens).backward()
                losses.append(loss.detach())
            loss = sum_on_device(torch.stack(losses).sum(), mesh) / trained_tokens
            scaler.unscale_(optimizer)
            grad_norm = clip_gradients(model, cfg.clip_norm, in_backward)  # (), on the device
            finite = (loss.to(grad_norm.device) + grad_norm).isfinite()
            # As GradScaler does in fp16: with a 1 here torch's fused AdamW changes nothing, and nobody waits.
            optimizer.found_inf = (~finite).float()
            scaler.step(optimizer)  # in fp16, all ranks skip it if a gradient overflows
            scaler.update()
            model.zero_grad()
            done = step + 1
            log.add(
                loss,
                grad_norm,
                losses,
                batches,
                {"bits_per_byte": loss * loader.bits_per_byte()},
                step=done,
                lr=lr,
                trained_tokens=int(trained_tokens),
            )
            stop = stop_asked()
            evals = held_out and log.due(done, cfg.eval_every)
            saves = cfg.save_every and log.due(done, cfg.save_every)
            if stop or evals or saves or log.due(done, cfg.log_every):
                log.read()  # the only place that waits for the GPU
            if evals and not stop:
                means = evaluate(model, eval_loader, world)
                stop = stop_asked()  # a signal ends an evaluation
                if not stop:
                    log.step(step=done, **means)
            if step == first:
                set_timeout(cfg.timeout)  # the first step may compile
            if saves or stop:
                state = {
                    "epoch": done / loader.per_epoch,
                    "config": asdict(cfg),
                    "template": tokenizer.template_name,
                    "scaler": scaler.state_dict(),
                    "step_seconds": log.seconds,
                    "eval_left": evals and stop,
                }
                checkpoint = saver.save(done, model, optimizer, facts | state)
            if stop:
                break
    if stop:
        from utils.train.resume import print_resume_command

        print_resume_command(stop, checkpoint, cfg, world)
        return out
    set_timeout()  # a save may take longer than a step

    # --- save: each rank writes its own bytes of the final files ----------------------------------
    act("save")
    result = out / "model"
    if cfg.save_model:
        save_model(
            result,
            model,
            pieces,
            world,
            save_dtype=DTYPES[cfg.save_dtype],
            tokenizer=tokenizer,
            source=source.folder,
            eos_ids=[tokenizer.eos_token_id],
        )
    plan.finish(out, world, steps=steps, global_batch_size=global_batch)
    print0(f"finished  {steps} steps; {result if cfg.save_model else out}")
    return out


def settle(cfg: Config, world) -> Config:
    """Resolve settings that are empty or auto, and check that needed packages work on this device."""
    cfg = replace(
        cfg,
        model=cfg.model or str(TINY),
        dataset=cfg.dataset or ("" if cfg.model else str(TINY / "chat.jsonl")),
        dtype=settle_dtype(cfg.dtype, world.device),
    )
    check_settled(cfg, world.gpu_name)
    return cfg


def evaluate(model, loader, world) -> dict[str, float]:
    """The held-out loss in nats per token, and in bits per byte of text. All ranks call it."""
    loss = eval_loss(model, loader, world)
    return {"eval_loss": loss, "eval_bits_per_byte": loss * loader.bits_per_byte()}


def settle_special_tokens(config, tokenizer) -> dict[str, int | None]:
    """Set the ids of the tokenizer's special tokens in a config, and return them: a new model may have any
    tokenizer.
    """
    ids = {
        name: getattr(tokenizer, name) for name in "bos_token_id eos_token_id pad_token_id".split()
    }
    vars(config.get_text_config()).update(ids)
    return ids


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config, without_model=TINY_VALUES))
        stop_distributed()
