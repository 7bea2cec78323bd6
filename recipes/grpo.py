"""
Learning from rewards (GRPO, DAPO, Dr. GRPO): in each step the model samples several completions of each
prompt, and learns from their rewards. Every rank generates and learns in turn; with --generate_ranks, some
ranks only generate and the others only learn.

    torchrun --nproc_per_node 2 recipes/grpo.py
    torchrun --nproc_per_node 8 recipes/grpo.py --model DIR --dataset math.jsonl --rewards number
    torchrun --nproc_per_node 8 recipes/grpo.py --model DIR --dataset a.jsonl --lora_rank 8 --generate_ranks 4

Rows: {"prompt": TEXT or [turn, ...], ...columns}; a last assistant turn becomes the column `answer`.
Without --model and --dataset the tiny model in recipes/tiny/started learns from rewards alone. The run folder
holds config.yaml, metrics.jsonl, samples.jsonl, checkpoints/ and, at the end, model/ for from_pretrained.
"""

import gc
import math
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
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

from utils.data.examples import (
    Rows,
    load_data,
    longest_row,
    print_data,
    write_bad_rows,
)
from utils.data.questions import load_questions
from utils.data.rewards import (
    Rollout,
    RolloutBatch,
    RolloutBatches,
    check_columns,
    parse_rewards,
    reward_all,
    reward_means,
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
from utils.model.log_probs import token_log_probs
from utils.model.loss import add_chunked_loss, settle_chunked_loss
from utils.model.options import Lora, Quant, check_adapter_flags
from utils.model.saving import generation_config, save_model
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
from utils.plan.fit import available_room, estimate_disk, plan_memory
from utils.plan.generation import plan_rollout
from utils.plan.need import Setting, estimate_states
from utils.run.distributed import (
    agree,
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
from utils.train.rollout import (
    Sampling,
    draw_all,
    log_probs_at_start,
    token_means,
    token_sums,
    write_samples,
)
from utils.train.trained_run import frozen_copy, open_reward_model

TINY = HERE / "tiny"
# Values of flags that are not given, if --model is not given either.
TINY_VALUES = {
    "steps": 100,
    "global_batch_size": 16,
    "batch_size": 64,
    "max_new_tokens": 12,
    "lr": 5e-4,
    "log_every": 10,
}
BETAS = (0.9, 0.95)  # of AdamW


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the tiny model that comes with the recipes
    tokenizer: str = ""  # folder or Hugging Face id; empty: the model's own
    trust_remote_code: bool = False  # run Python code that comes with the model
    attn: Literal["auto", "sdpa", "flash_attention_2", "eager"] = "auto"  # auto: model's default
    dataset: str = ""  # file, folder, glob or id; several: a.jsonl:0.7,b.csv:0.3; empty: tiny task
    format: Literal["auto", "completion"] = "auto"  # completion: texts do not become chat turns
    columns: str = ""  # our key=your column: instruction=question,output=answer
    bad_rows: Literal["error", "drop"] = "error"  # drop: skip and list them in OUT/bad_rows.jsonl
    chat_template: str = ""  # FILE, chatml, alpaca or plain; empty: the tokenizer's own
    max_rows: int = 0  # read only the first N rows of each source, held-out ones too; 0: all
    eval_dataset: str = ""  # held-out data, given like --dataset
    eval_share: float = 0.0  # share of --dataset to hold out instead, chosen by row hash
    eval_every: int = 0  # steps between evaluations of held-out rows; 0: only at the end

    # Rewards and loss
    # exact, number, regex:PATTERN, FILE.py:FUNCTION; several with weights: exact,a.py:f:0.5;
    # empty: only the reward model, or exact without one
    rewards: str = ""
    reward_model: str = ""  # folder or id of a reward model, such as OUT/model of reward.py
    reward_model_weight: float = 1.0  # weight of its scores
    group_size: int = 8  # completions per prompt, which are compared with each other
    max_new_tokens: int = 256  # maximum tokens of a completion
    temperature: float = 1.0  # sampling temperature, above 0
    loss: Literal["dapo", "grpo", "dr_grpo"] = "dapo"  # weights of the tokens: see weights_of
    # group: divide advantages by the group's standard deviation; auto: none with dr_grpo
    scale_rewards: Literal["auto", "group", "none"] = "auto"
    clip_low: float = 0.2  # ratios (new / old probability) are clipped below 1 - clip_low
    clip_high: float = 0.28  # and above 1 + clip_high; all are 1 while --epochs_per_rollout is 1
    kl_beta: float = 0.0  # weight of the KL to the model at the start; 0: none
    epochs_per_rollout: int = 1  # optimizer steps with the completions of one rollout
    generate_ranks: int = 0  # number of ranks that only generate; the others train; 0: all do both

    # How much
    epochs: int = 1  # passes over the data
    steps: int = 0  # optimizer steps; 0: as many as --epochs needs
    global_batch_size: int = 8  # prompts per step
    batch_size: int = 1  # completions per rank and micro-batch
    generate_batch_size: int = 64  # completions that a rank generates at a time
    seq_len: int = 2048  # maximum tokens of a prompt with its completion
    too_long: Literal["drop", "error"] = "drop"  # what to do with longer rows
    lr: float = 1e-6  # peak learning rate
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
    force: bool = False  # start even if the plan says that it does not fit
    reshard_after_forward: bool = True  # false: keep layers gathered until backward, like ZeRO-2
    replicate: int = 0  # HSDP: number of copies of the model; 0: ranks / shard
    shard: int = 0  # HSDP: ranks that share one copy; 0: ranks / replicate, or all
    sync_each_microbatch: bool = False  # reduce gradients after each micro-batch: less memory

    # Where
    output_dir: str = ""  # run folder; empty: the next free one in output/
    resume: str = "auto"  # auto: continue a run in --output_dir; none: refuse it; or a checkpoint
    save_every: int = 50  # steps between checkpoints; 0: none
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
        check_training(
            self,
            group_size=2,
            max_new_tokens=1,
            generate_batch_size=1,
            global_batch_size=1,
            epochs_per_rollout=1,
        )
        check(
            self.temperature > 0,
            f"--temperature {self.temperature}: all completions would be alike (fix: 1)",
        )
        check(
            self.reward_model or self.reward_model_weight == 1,
            "--reward_model_weight is for --reward_model (fix: leave it out)",
        )
        check(
            self.max_new_tokens < self.seq_len,
            f"--max_new_tokens {self.max_new_tokens} leaves no prompt in --seq_len {self.seq_len} (fix:"
            " a longer --seq_len)",
        )
        check(
            not (self.kl_beta and self.adapter),
            "--kl_beta: an --adapter that goes on has another start than its base (fix: merge it with"
            " export.py, and give the result as --model)",
        )
        check_adapter_flags(self)
        check(
            (self.model and self.dataset) or (TINY / "config.json").exists(),
            "recipes/tiny is not here (fix: --model FOLDER --dataset FILE)",
        )


@releases_output
def main(cfg: Config) -> Path:
    """Learn from rewards; returns the run folder."""
    quiet_transformers()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed()
    with together(world):
        learners = world.size - cfg.generate_ranks
        axes = mesh_axes(max(1, learners), cfg.replicate, cfg.shard)
        check(
            not (cfg.generate_ranks and "replicate" in axes),
            "--replicate, --shard: learners beside generators share one copy (fix: leave both out)",
        )
        cfg = settle(cfg, world)
    agree(world, asdict(cfg), "flags")
    everyone = world  # all ranks: with --generate_ranks, `world` will be those of one role
    roles, learns = None, True
    if cfg.generate_ranks:
        from utils.train.weight_sync import ask, divide_world, generators_end, plan_weights, serve

        roles = divide_world(world, cfg.generate_ranks)
        learns = roles.learns

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
        param_dtype = DTYPES[cfg.param_dtype] if learns else dtype  # a generator trains nothing
        attn = cfg.attn
        model = build_model(source.config, param_dtype, attn, trust)  # on meta
        pieces = plan_pieces(model, source.weights, source.folder)
    judge, frozen = None, []  # the reward model; it and the reference, which are not trained
    if cfg.reward_model:
        judge = open_reward_model(cfg.reward_model, dtype, world, trust)
        frozen.append(judge.model)
    if cfg.kl_beta and not from_settings(Lora, cfg):
        frozen.append(build_model(source.config, dtype, attn, trust))  # the reference
    out = claim_output(cfg.output_dir, Path(__file__).stem, world, source.folder)
    earlier = Resumed()
    if holds_run(out) or cfg.resume not in ("auto", "none"):
        from utils.train.resume import continue_run

        earlier = continue_run(out, cfg.resume, cfg, world)
    if earlier.finished:
        return out

    # --- data: every row is read, checked and tokenized -------------------------------------------
    act("data")
    with together(world, patient=True):
        rewards = parse_rewards(cfg.rewards)
        rows = from_settings(Rows, cfg, seq_len=cfg.seq_len - cfg.max_new_tokens)  # of a prompt
        examples, held_out = load_data(rows, tokenizer, load=load_questions)
        for part in filter(None, (examples, held_out)):
            check_columns(rewards, part, judge and judge.ids_of)

    # --- plan: sizes, memory and disk; all that fails cheaply has failed after it -----------------
    act("plan")
    with together(world):
        longest = longest_row(1, examples, held_out)
        positions = getattr(source.config.get_text_config(), "max_position_embeddings", math.inf)
        check(
            longest + cfg.max_new_tokens <= positions,
            f"the longest prompt has {longest:,} tokens, and with --max_new_tokens {cfg.max_new_tokens}"
            f" more than the model's {positions:,} positions (fix: less of --max_new_tokens or --seq_len)",
        )
        # A GPU selects, or compiles, kernels for each length: use few different lengths.
        multiple = math.gcd(cfg.seq_len, 64 if world.on_gpu else 8)
        completions = cfg.global_batch_size * cfg.group_size
        micro_batches = math.ceil(math.ceil(completions / learners) / cfg.batch_size)
        setting = from_settings(
            Setting,
            cfg,
            config=source.config,
            param_dtype=DTYPES[cfg.param_dtype],  # of a rank that trains
            dtype=dtype,
            seq_len=math.ceil((longest + cfg.max_new_tokens) / multiple) * multiple,
            shards=axes["shard"],
            replicate=learners // axes["shard"],
            local_ranks=world.local_size,
            gpu=world.on_gpu,
            rows=math.ceil(completions / learners),
            lacks="grad_accum",
            lora=from_settings(Lora, cfg),
            quant=from_settings(Quant, cfg),
            attn=attn,
            frozen_bytes=sum(estimate_states(m, axes["shard"]).weights for m in frozen),
            repeats_keys=lacks_grouped_kernels(world.device, dtype),
        )
        plan = plan_memory(setting, world, force=cfg.force)
        gathers, plan = plan_rollout(
            setting,
            plan,
            available_room(world),
            min(cfg.generate_batch_size, completions),
            longest,
            cfg.max_new_tokens,
            cfg.force,
            cfg.generate_ranks,
        )
    lora = from_settings(Lora, cfg)
    quant = from_settings(Quant, cfg)
    facts = {
        "seed": cfg.seed,
        "param_dtype": cfg.param_dtype,
        "global_batch_size": cfg.global_batch_size,
        "group_size": cfg.group_size,
        "optimizer": cfg.optimizer.removeprefix("paged_"),
        "reward_model": judge.digest if judge else "",
        **lora.facts(),
        **run_facts(source.config, source.weights, examples.fingerprint),
    }
    agree(world, facts, "files")
    with together(world):
        options = (cfg.batch_size, world.rank, learners, pad_id(tokenizer))
        loader = RolloutBatches(examples, cfg.seed, cfg.global_batch_size, *options)
        loader.multiple = multiple
        length = cfg.seq_len  # of a row, for the MFU: the longest, since completions are not known
        steps = cfg.steps or cfg.epochs * loader.per_epoch
        warmup = round(cfg.warmup if cfg.warmup >= 1 else cfg.warmup * steps)
        earlier.check_facts(facts, steps, cfg.allow_new_data)
        disk = estimate_disk(source.weights, steps, cfg, DTYPES[cfg.param_dtype])
    check_space(out, 0 if lora else disk, world, counted="checkpoints/*/*")
    print0(f"model     {cfg.model}: {source.sentence()}")
    print_template_notes(tokenizer)
    print_data(cfg.dataset, loader, held_out)
    print0(f"ranks     {mesh_sentence(world, axes)}")
    print0(
        f"batch     {completions} completions = {cfg.global_batch_size} prompts x {cfg.group_size};"
        f" {learners} ranks with {micro_batches} micro-batches of at most {cfg.batch_size}; {steps} steps;"
        f" loss {cfg.loss}, scale_rewards {cfg.scale_rewards}"
    )
    print0(
        f"rate      {cfg.lr:g} at its peak, {warmup} steps of warm-up, then {cfg.schedule};"
        f" weight decay {cfg.weight_decay:g}, betas {BETAS}"
        f"{'; with LoRA ten times this --lr is usual' if lora and cfg.lr == Config.lr else ''}"
    )
    print0(plan.text, ready=True)
    if roles:
        print0(f"roles     {learners} learn, and the last {cfg.generate_ranks} draw for them")
        world = roles.own  # from here on, only the ranks with the same role
        # generators have no gradients
        axes, micro_batches = (axes, micro_batches) if learns else (mesh_axes(world.size), 0)

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
    with together(everyone, patient=True):  # the files of one machine may be slower
        if cfg.low_cpu_fsdp:
            load_pieces(model, pieces, world.device, cfg.cpu_offload, adapted_names)
        elif unsharded:
            model.to(world.device)  # FSDP2 moves only what it shards
        if lora:
            fill_adapters(model, cfg.adapter, cfg.seed)
    print0(f"weights   in place after {time.monotonic() - started:.1f} s")
    settle_chunked_loss(model, world.device)
    freeze = partial(
        frozen_copy,
        mesh=mesh,
        dtype=dtype,
        device=world.device,
        cpu_offload=cfg.cpu_offload,
    )
    if judge and learns:
        judge.model = freeze(judge.model, judge.pieces)
    # The model at the start; with adapters, the base serves without a copy.
    reference = freeze(frozen[-1], pieces) if cfg.kl_beta and not lora and learns else None
    # On Hopper and later, torch prefers cuDNN, which makes a plan for each length: 23 to 37 ms in reports.
    torch.backends.cuda.enable_cudnn_sdp(False)
    sampling = Sampling(
        max_new_tokens=cfg.max_new_tokens,
        temperature=cfg.temperature,
        end_ids=frozenset(
            generation_config(model, source.folder, end_of_turn_ids(tokenizer))["eos_token_id"]
            or ()
        ),
        pad_id=pad_id(tokenizer),
        batch_size=cfg.generate_batch_size,
    )
    # reward(questions, completions, group_size) -> a dict for each completion; see reward_all.
    reward = partial(
        reward_all,
        rewards,
        tokenizer=tokenizer,
        world=world,
        scores=partial(judge.scores, cfg.batch_size, world) if judge else None,
        weight=cfg.reward_model_weight,
    )
    # draw(prompts, keys, sampling) -> completions; with --generate_ranks, learners ask the generators.
    draw = partial(
        draw_all,
        model=model,
        found=all_units if gathers else [],
        reshard_after_forward=cfg.reshard_after_forward,
        world=world,
    )
    if roles:
        sent_weights = plan_weights(model, roles)
        if not learns:
            serve(draw, model, sent_weights, roles)
            return out
        draw = partial(ask, model=model, weights=sent_weights, roles=roles)

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
        generators_end(roles) if roles else nullcontext(),
        CheckpointSaver(
            out / "checkpoints", cfg.keep, world, cfg.async_save, timeout=2 * cfg.timeout
        ) as saver,
        RunLog(out, steps, first, run, world, token_mfu, cfg) as log,
    ):
        stop_after_step()  # a signal no longer ends the process, but asks for a checkpoint
        if held_out and earlier.state.get("eval_left"):  # a signal came before the evaluation
            log.step(step=first, **evaluate(list(held_out), draw, reward, sampling))
        for step in range(first, steps):
            log.begin()
            set_seed(cfg.seed, step, world)  # for dropout
            begun_at = time.monotonic()
            # Each prompt of global batch `step`, group_size times in a row.
            asked = [examples[row] for row in loader.rows_of(step) for _ in range(cfg.group_size)]
            # (seed, step, prompt, completion) determines the random numbers of a completion: see generate.
            keys = [(cfg.seed, step, *divmod(i, cfg.group_size)) for i in range(len(asked))]
            completions = draw([prompt.ids for prompt in asked], keys, sampling)
            drawn_at = time.monotonic()
            lengths = [len(completion.ids) for completion in completions]
            rewarded = reward(asked, completions, group_size=cfg.group_size)
            advantages = advantages_of(cfg, [row["reward"] for row in rewarded])
            rollouts = [
                Rollout(prompt.ids, drawn.ids, drawn.log_probs, advantage, weight, prompt.where)
                for prompt, drawn, advantage, weight in zip(
                    asked, completions, advantages, weights_of(cfg, lengths), strict=True
                )
                if advantage or cfg.kl_beta  # otherwise there is no gradient
            ]
            batches = loader.share(rollouts)  # this rank's micro-batches
            rewarded_at = time.monotonic()
            if world.rank == 0:
                write_samples(out, step + 1, asked, rewarded, cfg.group_size)
            if step == first and not any(advantages):
                print0(
                    f"warning: step {step + 1} learns nothing from rewards: those of each prompt are equal"
                    f" (fix: if it stays so, compare texts and rewards in {out / 'samples.jsonl'};"
                    " other --rewards, a --model that is sometimes right, a larger --group_size)"
                )
            done_share = max(0.0, (step - warmup) / max(1, steps - warmup))  # 0 during the warm-up
            decay = {
                "constant": 1.0,
                "linear": 1 - done_share,
                "cosine": 0.5 * (1 + math.cos(math.pi * done_share)),
            }
            lr = cfg.lr * min(1.0, (step + 1) / max(1, warmup)) * decay[cfg.schedule]
            for group in optimizer.param_groups:
                group["lr"] = lr
            norms, sums = [], []
            old_log_pis = []  # log pi of the tokens of each micro-batch, before the first update
            for number, batch in enumerate(batches * cfg.epochs_per_rollout, 1):
                last_of_update = number % len(batches) == 0
                model.set_requires_gradient_sync(cfg.sync_each_microbatch or last_of_update)
                model.set_requires_all_reduce(last_of_update or not reduces_once)
                batch = batch.to(world.device)  # batch.ids, batch.labels: (B, T)
                # log pi of each token, (B, T): of the model at the start of the run, of the model as it is,
                # and of the model before the first update of this step
                log_pi_ref = (
                    log_probs_at_start(model, reference, batch, cfg.temperature)
                    if cfg.kl_beta
                    else None
                )
                log_pi = token_log_probs(model, batch, cfg.temperature)
                if number <= len(batches):
                    old_log_pis.append(log_pi.detach())
                log_pi_old = old_log_pis[(number - 1) % len(batches)]
                summed = token_sums(  # (6,)
                    batch, log_pi_old, *policy_loss(cfg, batch, log_pi, log_pi_old, log_pi_ref)
                )
                # world.size undoes FSDP's mean; the weights divide by the sizes of the global batch
                scaler.scale(summed[0] * world.size).backward()
                sums.append(summed.detach())
                if last_of_update:
                    scaler.unscale_(optimizer)
                    grad_norm = clip_gradients(model, cfg.clip_norm)  # (), on the device
                    # 1: this step changes nothing. If the loss is not finite, the gradients are not either.
                    optimizer.found_inf = (~grad_norm.isfinite()).float()
                    scaler.step(optimizer)  # in fp16, all ranks skip it on overflow
                    scaler.update()
                    model.zero_grad()
                    norms.append(grad_norm)
            losses = [summed[0] for summed in sums]
            sums = sum_on_device(torch.stack(sums).sum(0), mesh)
            done = step + 1
            log.add(
                sums[0] / cfg.epochs_per_rollout,
                torch.stack(norms).max(),
                losses,
                batches * cfg.epochs_per_rollout,
                token_means(sums),
                step=done,
                lr=lr,
                **reward_means(rewarded),
                ties=advantages.count(0.0) / len(advantages),
                completion_length=fmean(lengths),
                truncated=fmean(c.ids[-1] not in sampling.end_ids for c in completions),
                trained_tokens=sum(len(rollout.ids) for rollout in rollouts),
                seconds_drawing=drawn_at - begun_at,
                seconds_rewarding=rewarded_at - drawn_at,
                tokens=sum(len(r.prompt) + len(r.ids) for r in rollouts),
            )
            stop = stop_asked(world.group)
            evals = held_out and log.due(done, cfg.eval_every)
            saves = cfg.save_every and log.due(done, cfg.save_every)
            if stop or evals or saves or log.due(done, cfg.log_every):
                log.read()  # the only place that waits for the GPU
            if evals and not stop:
                log.step(step=done, **evaluate(list(held_out), draw, reward, sampling))
                evals = False  # complete, since no signal ends this evaluation
                stop = stop_asked(world.group)
            if step == first:
                set_timeout(cfg.timeout, world.group)  # the first step may compile
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

        print_resume_command(stop, checkpoint, cfg, everyone)
        return out
    set_timeout(group=world.group)

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
    plan.finish(out, world, steps=steps, global_batch_size=cfg.global_batch_size)
    print0(f"finished  {steps} steps; {result if cfg.save_model else out}")
    return out


def evaluate(asked: list, draw, reward, sampling) -> dict[str, float]:
    """The mean rewards of the likeliest completion of each held-out prompt. All learners call it."""
    keys = [(i,) for i in range(len(asked))]
    completions = draw([q.ids for q in asked], keys, sampling._replace(temperature=0.0))
    return reward_means(reward(asked, completions, group_size=1), "eval_")


def advantages_of(cfg: Config, rewards: list[float]) -> list[float]:
    """The advantage of each completion within the group of its prompt. https://arxiv.org/abs/2402.03300;
    without division by the standard deviation: https://arxiv.org/abs/2503.20783.
    """
    # (prompts, group_size)
    groups = torch.tensor(rewards, dtype=torch.float64).view(-1, cfg.group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    if cfg.scale_rewards == "group":
        advantages /= groups.std(1, keepdim=True) + 1e-4
    ties = groups.amax(1, keepdim=True) == groups.amin(1, keepdim=True)
    return advantages.masked_fill(ties, 0.0).flatten().tolist()


def weights_of(cfg: Config, lengths: list[int]) -> list[float]:
    """The weight in the loss of each token of a completion, for all completions, which have these lengths."""
    count = len(lengths)
    divisors = {
        # the mean over completions of their means over tokens: https://arxiv.org/abs/2402.03300
        "grpo": [length * count for length in lengths],
        # the mean over all tokens: https://arxiv.org/abs/2503.14476
        "dapo": [sum(lengths)] * count,
        # a constant divisor, which does not depend on the lengths: https://arxiv.org/abs/2503.20783
        "dr_grpo": [cfg.max_new_tokens * count] * count,
    }
    return [1 / divisor for divisor in divisors[cfg.loss]]


def policy_loss(
    cfg: Config,
    batch: RolloutBatch,
    log_pi: torch.Tensor,
    log_pi_old: torch.Tensor,
    log_pi_ref: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(losses, whether they are clipped, KL) of each token, all (B, T). Other losses go here.

    log_pi, log_pi_old, log_pi_ref: log pi of the tokens (B, T) under the model as it is, before the first
    update of this step, and at the start of the run; 0 where batch.labels are IGNORE, as in all of a filler.
    batch.advantages: (B, 1).
    """
    ratio = torch.exp(log_pi - log_pi_old)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    losses = -torch.min(ratio * batch.advantages, clipped * batch.advantages)
    is_clipped = clipped * batch.advantages < ratio * batch.advantages
    # k3 of http://joschu.net/blog/kl-approx.html, times the ratio as in https://arxiv.org/abs/2512.02556
    kl = (
        torch.zeros_like(log_pi)
        if log_pi_ref is None
        else (torch.exp(log_pi_ref - log_pi) - (log_pi_ref - log_pi) - 1) * ratio
    )
    return losses + cfg.kl_beta * kl, is_clipped, kl


def settle(cfg: Config, world) -> Config:
    """Resolve settings that are empty or auto, and check that needed packages work on this device."""
    default_scale = "none" if cfg.loss == "dr_grpo" else "group"
    cfg = replace(
        cfg,
        model=cfg.model or str(TINY / "started"),
        dataset=cfg.dataset or ("" if cfg.model else str(TINY / "chat.jsonl")),
        rewards=cfg.rewards or ("" if cfg.reward_model else "exact"),
        scale_rewards=default_scale if cfg.scale_rewards == "auto" else cfg.scale_rewards,
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
