"""
Supervised fine-tuning. Every rank builds the model on meta and reads only its own slice of the weights.

    torchrun --nproc_per_node 2 recipes/finetune.py --low_cpu_fsdp
    torchrun --nproc_per_node 8 recipes/finetune.py --model DIR --dataset chat.jsonl --output_dir runs/first
    python recipes/finetune.py --model DIR --dataset chat.jsonl --lora_rank 16 --quantization 8bit

Without --model and --dataset it teaches the tiny model in recipes/tiny a task that it cannot do yet.
The run folder holds config.yaml, metrics.jsonl, checkpoints/ and, at the end, model/ for from_pretrained.
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

from utils.data.batches import GlobalBatches, divide_batch
from utils.data.examples import (
    FormName,
    Rows,
    check_positions,
    load_data,
    longest_row,
    print_data,
    write_bad_rows,
)
from utils.data.tokens import end_of_turn_ids, load_tokenizer, pad_id, print_template_notes
from utils.model.folder import (
    check_vocab,
    find_model,
    open_model,
    quiet_transformers,
    run_facts,
    tokenizer_of,
)
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.loss import add_chunked_loss, eval_loss, settle_chunked_loss, summed_cross_entropy
from utils.model.options import Lora, Quant, check_adapter_flags
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
TINY_VALUES = {"epochs": 3, "batch_size": 16, "lr": 2e-3, "log_every": 40}
BETAS = (0.9, 0.95)  # of AdamW


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the tiny model that comes with the recipes
    tokenizer: str = ""  # folder or Hugging Face id; empty: the model's own
    trust_remote_code: bool = False  # run Python code that comes with the model
    # auto: the model's default; with --packing: varlen (no mask) if the model supports it
    attn: Literal["auto", "sdpa", "varlen", "flash_attention_2", "eager"] = "auto"
    dataset: str = ""  # file, folder, glob or id; several: a.jsonl:0.7,b.csv:0.3; empty: tiny task
    format: FormName = "auto"  # format of the rows; auto: recognized from their keys
    columns: str = ""  # our key=your column: instruction=question,output=answer
    bad_rows: Literal["error", "drop"] = "error"  # drop: skip and list them in OUT/bad_rows.jsonl
    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"  # turns that are trained
    chat_template: str = ""  # FILE, chatml, alpaca or plain; empty: the tokenizer's own
    max_rows: int = 0  # read only the first N rows of each source, held-out ones too; 0: all
    eval_dataset: str = ""  # held-out data, given like --dataset
    eval_share: float = 0.0  # share of --dataset to hold out instead, chosen by row hash
    eval_every: int = 0  # steps between evaluations of held-out rows; 0: only at the end

    # How much
    epochs: int = 1  # passes over the data
    steps: int = 0  # optimizer steps; 0: as many as --epochs needs
    global_batch_size: int = 0  # sequences per optimizer step; 0: batch_size x grad_accum x ranks
    batch_size: int = 1  # sequences per rank and micro-batch
    grad_accum: int = 0  # micro-batches per step; 0: what the global batch needs
    seq_len: int = 2048  # maximum tokens of a row
    too_long: Literal["truncate", "drop", "error"] = "truncate"  # what to do with longer rows
    packing: bool = False  # several documents in one row; batch sizes then count packs
    lr: float = 2e-5  # peak learning rate
    warmup: float = 0.03  # steps of linear warm-up; below 1: a share of all steps
    schedule: Literal["cosine", "linear", "constant"] = "cosine"  # learning rate after the warm-up
    weight_decay: float = 0.01  # not applied to norms and biases
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
    # choose recomputing, offload, resharding and micro-batches to fit; any: also LoRA, 8bit and 4bit
    fit: Literal["", "same", "any"] = field(default="", metadata={"bare": "same"})
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
        check_adapter_flags(self)
        check(
            (self.model and self.dataset) or (TINY / "config.json").exists(),
            "recipes/tiny is not here (fix: --model FOLDER --dataset FILE)",
        )


@releases_output
def main(cfg: Config) -> Path:
    """Fine-tune; returns the run folder."""
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
    source = open_model(cfg.model, world, trust)
    tokenizer_folder = find_model(
        cfg.tokenizer or tokenizer_of(cfg.adapter) or source.folder, world, trust
    )
    with together(world):
        tokenizer = load_tokenizer(tokenizer_folder, cfg.chat_template, trust, source.config)
        check_vocab(tokenizer, source.config.get_text_config().vocab_size)
        dtype = DTYPES[cfg.dtype]
        param_dtype = DTYPES[cfg.param_dtype]
        # varlen is set later: settle_attention asks the model whether it can
        attn = cfg.attn.replace("varlen", "auto")
        model = build_model(source.config, param_dtype, attn, trust)  # on meta
        if cfg.packing or cfg.attn == "varlen":
            from utils.model.attention import check_packing, settle_attention, wants_flat_packs

            attn = settle_attention(model, cfg.attn, world.device, dtype)
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
        examples, held_out = load_data(from_settings(Rows, cfg), tokenizer)
        check_positions(model, examples, held_out)

    # --- plan: sizes, memory and disk; all that fails cheaply has failed after it -----------------
    act("plan")
    with together(world):
        # The flag's, or the checkpoint's; 0: divide_batch computes it.
        given_batch = cfg.global_batch_size or earlier.state.get("global_batch_size", 0)
        # A GPU selects, or compiles, kernels for each length: use few different lengths.
        multiple = math.gcd(cfg.seq_len, 64 if world.on_gpu else 8)
        setting = from_settings(
            Setting,
            cfg,
            config=source.config,
            param_dtype=param_dtype,
            dtype=dtype,
            seq_len=cfg.seq_len if cfg.packing else longest_row(multiple, examples, held_out),
            shards=axes["shard"],
            replicate=world.size // axes["shard"],
            local_ranks=world.local_size,
            gpu=world.on_gpu,
            global_batch_size=given_batch,
            rows=math.ceil(given_batch / world.size) or cfg.batch_size * cfg.grad_accum,
            lora=from_settings(Lora, cfg),
            quant=from_settings(Quant, cfg),
            attn=attn,
            masked=cfg.packing and attn != "varlen",
            repeats_keys=lacks_grouped_kernels(world.device, dtype),
        )
        plan = plan_memory(setting, world, cfg.fit, fitted, cfg.force)
    cfg = replace(cfg, **plan.chosen)
    lora = from_settings(Lora, cfg)
    quant = from_settings(Quant, cfg)
    facts = {
        "seed": cfg.seed,
        "param_dtype": cfg.param_dtype,
        "packing": cfg.packing and cfg.seq_len,
        "optimizer": cfg.optimizer.removeprefix("paged_"),
        **lora.facts(),
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
        Batches = GlobalBatches
        options = (cfg.batch_size, world.rank, world.size, pad_id(tokenizer))
        if cfg.packing:
            from utils.data.packing import PackedBatches

            Batches = PackedBatches
            options += (cfg.seq_len, wants_flat_packs(model))
            if cfg.compile:
                multiple = cfg.seq_len  # each new length would be compiled anew
        loader = Batches(examples, cfg.seed, global_batch, *options)
        loader.multiple = multiple
        if held_out:
            eval_loader = Batches(held_out, cfg.seed, cfg.batch_size * world.size, *options)
            eval_loader.multiple = multiple
        length = examples.lengths.double().mean().item()  # of a row, for the MFU
        steps = cfg.steps or cfg.epochs * loader.per_epoch
        warmup = round(cfg.warmup if cfg.warmup >= 1 else cfg.warmup * steps)
        earlier.check_facts(facts, steps, cfg.allow_new_data)
        disk = estimate_disk(source.weights, steps, cfg, param_dtype)
    check_space(out, 0 if lora else disk, world, counted="checkpoints/*/*")
    print0(f"model     {cfg.model}: {source.sentence()}")
    print_template_notes(tokenizer)
    print_data(cfg.dataset, loader, held_out)
    print0(f"ranks     {mesh_sentence(world, axes)}")
    print0(
        f"batch     {global_batch} {'packs' if cfg.packing else 'rows'}: {world.size} ranks with"
        f" {micro_batches} micro-batches of at most {cfg.batch_size}; {steps} steps, rows of at most"
        f" {cfg.seq_len} tokens"
    )
    print0(
        f"rate      {cfg.lr:g} at its peak, {warmup} steps of warm-up, then {cfg.schedule};"
        f" weight decay {cfg.weight_decay:g}, betas {BETAS}"
        f"{'; with LoRA ten times this --lr is usual' if lora and cfg.lr == Config.lr else ''}"
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
        token_mfu = mfu(flops_per_token(model, length, frozen=bool(lora)), world)
    adapted_names = None  # name in the base -> names in the model with adapters
    if lora:
        from utils.model.lora import adapt, fill_adapters, save_adapter

        with together(world):
            adapters, adapted_names = adapt(model, lora, quant, dtype)
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
        f"compute   {cfg.dtype} over {'frozen' if lora else cfg.param_dtype} weights;"
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
            load_pieces(model, pieces, world.device, cfg.cpu_offload, adapted_names)
        elif unsharded:
            model.to(world.device)  # FSDP2 moves only what it shards
        if lora:
            fill_adapters(model, cfg.adapter, cfg.seed)
    print0(f"weights   in place after {time.monotonic() - started:.1f} s")
    settle_chunked_loss(model, world.device)
    if cfg.packing:
        check_packing(model, world.device)

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
        if held_out and earlier.state.get("eval_left"):  # a signal ended the last evaluation
            log.step(step=first, eval_loss=eval_loss(model, eval_loader, world))
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
                {},  # no further means
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
                held_out_loss = eval_loss(model, eval_loader, world)
                stop = stop_asked()  # a signal ends an evaluation
                if not stop:
                    log.step(step=done, eval_loss=held_out_loss)
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
    result = out / ("adapter" if lora else "model")
    save_dtype = DTYPES[cfg.save_dtype]
    if cfg.save_model and lora:
        saved = save_adapter(result, model, adapters, cfg.model, world, tokenizer, save_dtype)
        print0(f"adapter   {saved}")
    elif cfg.save_model:
        save_model(
            result,
            model,
            pieces,
            world,
            save_dtype=save_dtype,
            tokenizer=tokenizer,
            source=source.folder,
            eos_ids=end_of_turn_ids(tokenizer),
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


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config, without_model=TINY_VALUES))
        stop_distributed()
