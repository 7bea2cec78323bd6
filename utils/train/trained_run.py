"""Open the result of a training run for another recipe: its settings, the structure that was trained, and its
weights; and shard it. For grpo.py: a reward model, for example from reward.py, that scores completions.
"""

import math
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

from ..model.attention import use_gpu_kernels
from ..model.folder import Source, find_model, open_model, read_header, run_facts, tokenizer_of
from ..model.kinds import add_scores, freeze_parts
from ..model.loading import KINDS, Piece, build_model, load_pieces, plan_pieces
from ..model.loss import add_chunked_loss, settle_chunked_loss
from ..model.options import SHARDS_INTEGERS, Lora, Quant
from ..model.sharding import DTYPES, cast_to, dtypes_as_loaded, plain_name, reshard, units
from ..run.distributed import World, all_gather, together
from ..run.errors import check, differences, others_code, print0
from ..run.files import file_inside
from .checkpoint import checkpoint_tensors
from .resume import REMOVED, check_tensors, damage, named_checkpoint, read_state, read_tensors

# --- models that recipes serve


@dataclass(frozen=True)
class Trained:
    """A base model, and the adapter or checkpoint that goes on top of it. Nothing is loaded yet."""

    name: str  # the base, as the user named it
    source: Source  # the base
    model: nn.Module  # on meta, with adapters if there are any
    pieces: list  # the base's, see plan_pieces
    tokenizer: tuple  # arguments of load_tokenizer
    run: dict  # settings of the checkpoint's run; {} without a checkpoint
    kind: str  # a key of loading.KINDS
    checkpoint: Path | None
    adapter: object  # peft config of the adapter
    # name in the base -> names in the model with adapters, see lora.base_names
    names: dict[str, list[str]] | None
    rules: dict | None  # of init.plan_weights, for the buffers of a new model


def open_trained(
    model: str,
    adapter: str,
    checkpoint: str,
    dtype: str,
    world: World,
    trust_remote_code: bool,
    quantization="none",
    merge=False,
) -> Trained:
    """Open the model that a recipe serves: a base, alone or with a peft folder or a checkpoint on top.

    model: the base; "": the one that the adapter or the run names. dtype: of the parameters; "": that of the
    run. quantization: 8bit or 4bit for the linear layers and experts that the adapter or the run did not
    train. merge: the model without the adapter, which the recipe adds itself. Every rank calls it. Raises
    ConfigError if something is missing or does not fit together.
    """
    path = None
    run = {}
    template = ""
    if checkpoint:
        path = named_checkpoint("--checkpoint", checkpoint, world)
        with together(world):
            damaged = damage(path, world.rank, world.size)
            check(not damaged, f"{damaged} {REMOVED}")
            state = read_state(path)
            run = state.get("config", {})
            for name in "model tokenizer adapter chat_template".split():
                path_in_cwd = Path(state["cwd"], run.get(name, ""))
                is_there = path_in_cwd.is_file if name == "chat_template" else path_in_cwd.is_dir
                if run.get(name) and is_there():  # it may be relative to where the run was started
                    run[name] = str(path_in_cwd)
            # The base may have no template, and the run's own tokenizer one.
            template = "plain" if state.get("template") == "built-in plain" else ""
    tokenizer_name = run.get("tokenizer", "")
    adapter = adapter or run.get("adapter", "")
    with together(world):
        base = model or run.get("model")
        if adapter:
            from ..model.lora import base_of

            base = base or base_of(Path(adapter))
            tokenizer_name = tokenizer_name or tokenizer_of(adapter)
        check(base, "the base model is not known (fix: --model FOLDER)")
    is_new = run.get("init") == "random"  # no file has the base
    if is_new:
        from ..model.init import open_config, plan_weights

        source = open_config(base, world, tokenizer_name, trust_remote_code)
        vars(source.config.get_text_config()).update(state["special_ids"])
    else:
        source = open_model(base, world, trust_remote_code)
    tokenizer_folder = find_model(tokenizer_name or source.folder, world, trust_remote_code)
    config = names = rules = None
    with together(world):
        stored = source.config.dtype or torch.float32  # build_model changes it
        dtype = DTYPES[dtype or run.get("param_dtype", "fp32")]
        kind = kind_of(run, source, adapter)
        built = build_model(source.config, dtype, "auto", trust_remote_code, kind=kind)  # on meta
        if not path:
            built.requires_grad_(False)
        if is_new:
            weights, rules = plan_weights(built, stored)
            for name, parameter in built.named_parameters():
                if parameter.requires_grad:  # the checkpoint has it
                    del rules[name]
            source = source._replace(weights=weights)
        pieces = plan_pieces(built, source.weights, source.folder)
        trained = {name: run[name] for name in Lora().facts() if name in run}
        lora = Lora(**trained | {"adapter": adapter})
        if lora and not merge:
            from ..model.lora import add_adapters

            config = add_adapters(built, lora)
        elif run.get("train"):
            freeze_parts(built, state["train"], dtype)
        if quantization != "none":
            from ..model.quantize import quantize_linears

            check(
                SHARDS_INTEGERS or world.size == 1,
                f"--quantization: torch {torch.__version__} shards no integers (fix: 1 rank, or torch>=2.12)",
            )
            print0(f"quantized {quantize_linears(built, Quant(quantization), dtype)}")
        if config or quantization != "none":
            from ..model.lora import base_names

            names = base_names(built)
        if path:
            check_tensors(
                path, checkpoint_tensors(built), "the --model it was trained from", dtypes=False
            )
            facts = lora.facts() | run_facts(source.config, source.weights, "")
            if changed := differences(facts | state, facts, ["data"]):
                print0(
                    f"warning: {base} is not what the run was trained from, then -> now: {changed}"
                )
    tokenizer = (
        tokenizer_folder,
        run.get("chat_template") or template,
        trust_remote_code,
        source.config,
    )
    return Trained(base, source, built, pieces, tokenizer, run, kind, path, config, names, rules)


def kind_of(run: dict, source: Source, adapter: str) -> str:
    """The kind of model to build, "pictures" or "text". The run decides, if there is one; else the config. If
    the config fits both, weights or an adapter without a vision tower mean text.
    """
    if run:
        check(
            "center_weight" not in run,
            "--checkpoint: it scores and cannot answer (fix: its own run writes the result:"
            " reward.py --resume CHECKPOINT --steps N --output_dir NEW)",
        )
        return "pictures" if "image_dir" in run else "text"
    family = type(source.config)
    of_pictures = family in KINDS["pictures"]._model_mapping
    if of_pictures and family in KINDS["text"]._model_mapping:
        # The picture class of Llama 4 fails in transformers 5.24.
        of_pictures = source.config.model_type != "llama4" and any(
            "vis" in name for name in source.weights
        )
        if of_pictures and adapter:  # in a family's text-only model the layers have other names
            from ..model.lora import PREFIX, TENSORS

            names = read_header(file_inside(Path(adapter), TENSORS))
            of_pictures = not any(name.startswith(f"{PREFIX}model.layers.") for name in names)
    return "pictures" if of_pictures else "text"


def shard_model(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype, cpu_offload=False) -> None:
    """Shard every parameter along dim 0 over the mesh, in place, for inference. On meta this costs nothing.

    Shards keep the dtype of the parameters. They are all-gathered in `dtype`, except for modules that the
    model's family computes in fp32. Inputs of a layer are not cast: some (rotary tables, states) are fp32 on
    purpose, the others have the embedding's dtype. So the logits are bit for bit those of
    from_pretrained(dtype=dtype). cpu_offload keeps the shards on the host.
    """
    offload = CPUOffloadPolicy(mesh.device_type != "cpu") if cpu_offload else OffloadPolicy()
    for unit in units(model, dtype):
        fully_shard(
            unit.modules,
            mesh=mesh,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(
                param_dtype=unit.param_dtype,
                cast_forward_inputs=unit.cast_forward_inputs,
            ),
            offload_policy=offload,
        )


def frozen_copy(
    model: nn.Module,
    pieces: list[Piece],
    mesh: DeviceMesh,
    dtype: torch.dtype,
    device: torch.device,
    cpu_offload: bool,
) -> nn.Module:
    """Shard a model of build_model, on meta, and load it in the compute dtype, for inference only."""
    compute_alone(model.requires_grad_(False), dtype)
    if mesh.size() > 1 or cpu_offload:
        shard_model(model, mesh, dtype, cpu_offload)
    load_pieces(model, pieces, device, cpu_offload)
    if device.type == "cuda":
        use_gpu_kernels(model)
    if hasattr(model, "score"):
        add_scores(model, model.config.get_text_config().pad_token_id)
    else:
        settle_chunked_loss(add_chunked_loss(model), device)
    return model.eval()


def load_trained(trained: Trained, adapter: str, world: World) -> None:
    """Load what open_trained has opened, and set evaluation mode. Call shard_model or compute_alone before.
    adapter: the peft folder, as the user named it; "": none.
    """
    model = trained.model
    pieces = trained.pieces
    if world.on_gpu:
        use_gpu_kernels(model)
    if trained.checkpoint and not trained.adapter:  # the checkpoint has the trained parameters
        state = model.state_dict(keep_vars=True)
        pieces = [piece for piece in pieces if not state[piece.param].requires_grad]
    load_pieces(model, pieces, world.device, names=trained.names)
    if trained.rules:
        from ..model.init import draw_weights

        draw_weights(model, trained.rules, trained.run["seed"])
    if adapter:
        from ..model.lora import load_adapter

        with together(world):
            load_adapter(model, Path(adapter))
    if trained.checkpoint:
        read_tensors(trained.checkpoint, checkpoint_tensors(model))
    model.eval()


def compute_alone(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model on meta, which will not be sharded, to the dtypes of from_pretrained(dtype=dtype)."""
    dtypes = dtypes_as_loaded(model, dtype)
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        cast_to(tensor, dtypes.get(plain_name(name)))


# --- a reward model, which is sharded and never trained


@dataclass
class RewardModel:
    """model: on meta at first; frozen_copy shards it and loads `pieces`. digest: a hash of its weights."""

    model: nn.Module
    pieces: list
    tokenizer: object
    digest: str

    @torch.no_grad()
    def scores(self, batch_size: int, world: World, asked: list, texts: list[str]) -> list[float]:
        """The score of each text as the answer to a question, see questions.Question. All ranks make the
        same call and get all scores. Each rank computes a share of them, batch_size at a time.
        """
        count = len(texts)
        turns = math.ceil(count / world.size)  # equal on each rank: some texts are scored twice
        share = [(i * world.size + world.rank) % count for i in range(turns)]
        scores = {}  # number of a text -> its score
        for start in range(0, turns, batch_size):
            part = share[start : start + batch_size]
            rows = [torch.tensor(self.ids_of(asked[i], texts[i])) for i in part]
            ids = pad_sequence(rows, batch_first=True)  # (B, T), on the right: causal attention
            places = [k * ids.shape[1] + len(row) - 1 for k, row in enumerate(rows)]
            ends = torch.tensor(places, device=world.device)
            values = self.model(ids.to(world.device), ends=ends)
            scores |= zip(part, values.flatten().tolist(), strict=True)
        reshard(self.model)  # without a backward, FSDP2 keeps some units gathered
        for of_rank in all_gather(scores, world):
            scores |= of_rank
        return [scores[i] for i in range(count)]

    def ids_of(self, question, text: str) -> list[int]:
        """The ids of the conversation with its answer, in the model's chat template. Only the last
        tokens are kept, as many as the model has positions.
        """
        turns = [*question.messages, {"role": "assistant", "content": text}]
        render = self.tokenizer.apply_chat_template
        ids = render(turns, tools=question.tools, return_dict=True)["input_ids"]
        return ids[-getattr(self.model.config, "max_position_embeddings", len(ids)) :]


def open_reward_model(
    name: str, dtype: torch.dtype, world: World, trust_remote_code: bool
) -> RewardModel:
    """Open a reward model, with one score per sequence, and its tokenizer. name: a folder or Hugging Face id.
    Every rank calls it. Raises ConfigError if it is another kind of model.
    """
    source = open_model(name, world, trust_remote_code)
    with together(world):
        check(
            source.config.num_labels == 1,
            f"--reward_model {name} has {source.config.num_labels} labels, not one"
            " (fix: a folder that reward.py has made)",
        )
        model = build_model(
            source.config, dtype, trust_remote_code=trust_remote_code, kind="scores"
        )
        pieces = plan_pieces(model, source.weights, source.folder)
        with others_code(
            f"--reward_model {name}: its tokenizer",
            "train it on turns, or with reward.py --chat_template plain",
        ):
            tokenizer = AutoTokenizer.from_pretrained(
                source.folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
            tokenizer.get_chat_template()
        facts = run_facts(source.config, source.weights, "")
    return RewardModel(model, pieces, tokenizer, facts["weights"])
