"""
Answer prompts from a file, or chat in the terminal. One process, or the model cut over all ranks.

    python recipes/generate.py --model DIR --prompts questions.jsonl --output answers.jsonl
    python recipes/generate.py --model DIR --adapter runs/first/adapter --chat --temperature 0.7
    torchrun --nproc_per_node 2 recipes/generate.py --checkpoint runs/first --prompts questions.txt --raw

Prompts are the lines of a .txt file, or the rows of a .jsonl file: {"prompt": "..."} or {"messages": [...]},
of which a last turn of the assistant is left out. Batches, and their random numbers, do not depend on the
number of ranks, so neither do the answers.
"""

import json
import math
import os
import secrets
import select
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch
import transformers

from utils.data.chats import prompt_ids
from utils.data.containers import read_rows
from utils.data.messages import to_messages
from utils.data.tokens import end_of_turn_ids, load_tokenizer, pad_id
from utils.model.folder import check_vocab, find_model, open_weights, read_config, read_json
from utils.model.loading import build_model, load_pieces, plan_pieces
from utils.model.sharding import DTYPES, compute_alone, shard_model
from utils.plan.parts import estimate_generation, needed, plan_parts
from utils.plan.planned import MemoryPlan
from utils.plan.reserve import room
from utils.run.distributed import (
    World,
    broadcast,
    gather,
    init_distributed,
    stop_distributed,
    together,
)
from utils.run.errors import ConfigError, act, check, escaped, others_code, print0, report_errors
from utils.run.files import TEXT_BYTES, open_own, read_small_text
from utils.run.folder import releases_output
from utils.run.mesh import build_mesh
from utils.run.settings import parse_cli
from utils.run.signals import stop_at_once
from utils.train.trained_run import add_run_adapter, check_weights, find_run, load_weights


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the base of --adapter or --checkpoint
    adapter: str = ""  # folder of a LoRA adapter, as peft writes it
    checkpoint: str = ""  # run folder (its newest checkpoint), or one checkpoint of it
    trust_remote_code: bool = False  # run Python code that comes with the model
    prompts: str = ""  # .txt, a prompt a line; or .jsonl rows with "prompt" or "messages"
    chat: bool = False  # talk in the terminal; an empty line or Ctrl-D ends it
    system: str = ""  # what the system turn says
    raw: bool = False  # complete the text as it is, without the chat template

    # How much
    max_new_tokens: int = 256  # longest answer
    temperature: float = 0.0  # 0: always the likeliest token
    top_p: float = 1.0  # draw from the likeliest tokens that have this share
    seed: int = 0  # of the draws
    batch_size: int = 8  # prompts per rank and forward

    # How
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # of compute; auto: bf16 if it can
    force: bool = False  # begin though the plan says that it does not fit

    # Where
    output: str = ""  # .jsonl file for the answers; empty: the terminal

    def __post_init__(self):
        check(
            self.temperature >= 0, f"--temperature {self.temperature} is below 0 (fix: 0, or 0.7)"
        )
        check(0 < self.top_p <= 1, f"--top_p {self.top_p} is no share (fix: above 0, at most 1)")
        idle = self.top_p < 1 and self.temperature == 0
        check(
            not idle,
            f"--top_p {self.top_p}: at --temperature 0 nothing is drawn (fix: --temperature 0.7)",
        )
        for name in ("max_new_tokens", "batch_size"):
            check(
                getattr(self, name) > 0,
                f"--{name} {getattr(self, name)} is too small (fix: at least 1)",
            )
        check(self.chat != bool(self.prompts), "what to answer? (fix: --prompts FILE, or --chat)")
        check(
            not (self.chat and self.output),
            "--output is for --prompts; a chat goes to the terminal",
        )
        check(
            not (self.raw and (self.chat or self.system)),
            "--raw has no turns (fix: no --chat, --system)",
        )
        check(
            not (self.adapter and self.checkpoint), "--adapter and --checkpoint: give one of them"
        )
        some = self.model or self.adapter or self.checkpoint
        check(some, "no --model given (fix: --model FOLDER, or --checkpoint RUN)")


@releases_output
def main(cfg: Config) -> None:
    """Answer, and write or print the answers."""
    transformers.utils.logging.set_verbosity_error()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed()

    # --- plan: everything that can fail cheaply fails here ----------------------------------------
    act("plan")
    trust = cfg.trust_remote_code
    with together(world):
        if cfg.output:
            free = not os.path.lexists(cfg.output)
            check(free, f"--output {cfg.output} exists, and is not overwritten (fix: another name)")
            parent = Path(cfg.output).absolute().parent
            writable = parent.is_dir() and os.access(parent, os.W_OK)
            check(
                writable, f"--output {cfg.output}: {parent} is no folder to write to (fix: another)"
            )
        prompts = read_prompts(Path(cfg.prompts), cfg.raw, cfg.system) if cfg.prompts else []
    checkpoint, run = find_run(cfg.checkpoint, world) if cfg.checkpoint else (None, {})
    with together(world):
        base, tokenizer_of = cfg.model or run.get("model"), run.get("tokenizer")
        if cfg.adapter:
            from utils.model.adapter_file import base_of

            base = base or base_of(Path(cfg.adapter))
            own = (Path(cfg.adapter) / "tokenizer_config.json").exists()
            tokenizer_of = cfg.adapter if own else ""
        check(base, "nothing says which model it is for (fix: --model FOLDER)")
    folder = find_model(base, world, trust)
    tokenizer_folder = find_model(tokenizer_of, world, trust) if tokenizer_of else folder
    with together(world):
        config = read_config(folder, trust)
        weights = open_weights(folder)
        tokenizer = load_tokenizer(tokenizer_folder, run.get("chat_template", ""), trust)
        check_vocab(len(tokenizer), config.get_text_config().vocab_size)
        dtype = compute_dtype(cfg.dtype, world)
        model = build_model(config, dtype, "auto", trust)  # on meta
        pieces, names = plan_pieces(model, weights, folder), None
        settings = generation_settings(cfg, model, folder, tokenizer, world)
        encoded = [encode(cfg, model, tokenizer, prompt) for prompt in prompts]
        if cfg.adapter or run.get("lora_rank") or run.get("adapter"):
            from utils.model.lora import base_names, load_adapter

            add_run_adapter(model, cfg.adapter, run)
            names = base_names(model)
        if cfg.adapter:
            load_adapter(model, Path(cfg.adapter))  # on meta this only checks names and shapes
        if checkpoint:
            check_weights(checkpoint, model)
    encoded = broadcast(world, encoded)
    with together(world):
        plan = plan_memory(cfg, model, dtype, encoded, world)

    # --- shard: every parameter cut over the ranks ------------------------------------------------
    if world.size > 1:
        act("shard")
        shard_model(model, build_mesh(world), dtype)
    else:
        compute_alone(model, dtype)

    # --- load: the first act that costs memory ----------------------------------------------------
    act("load")
    if checkpoint and names is None:  # it holds all that trains, so every parameter
        state = model.state_dict(keep_vars=True)
        pieces = [
            piece for piece in pieces if not isinstance(state[piece.param], torch.nn.Parameter)
        ]
    load_pieces(model, pieces, world.device, names=names)
    if cfg.adapter:
        with together(world):
            load_adapter(model, Path(cfg.adapter))
    if checkpoint:
        load_weights(checkpoint, model)
    model.eval()

    # --- generate ---------------------------------------------------------------------------------
    act("generate")
    if cfg.chat:
        chat(cfg, model, tokenizer, settings, world)
        return
    answers = answer(cfg, model, tokenizer, encoded, settings, world)
    with together(world):
        if world.rank == 0:
            rows = [
                {"prompt": p.said, "answer": text} for p, text in zip(prompts, answers, strict=True)
            ]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            write_new(Path(cfg.output), text) if cfg.output else print0(
                escaped(text[:-1], keep="\n"), ready=True
            )
    plan.compare(world)
    print0(f"finished  {len(answers)} answers{f' in {cfg.output}' if cfg.output else ''}")


def plan_memory(cfg: Config, model, dtype: torch.dtype, encoded: list, world: World) -> MemoryPlan:
    """What the longest batch needs; a chat is planned for as many tokens as one turn and its answer."""
    longest = max(map(len, encoded), default=cfg.max_new_tokens)

    def parts(rows: int) -> dict[str, int]:
        return estimate_generation(model, world.size, dtype, rows, longest, cfg.max_new_tokens)

    rows = 1 if cfg.chat else min(cfg.batch_size, len(encoded))
    there, fewer = room(world)[0], rows
    while fewer and needed(parts(fewer), world)[0] > there:
        fewer //= 2
    more = f"--nproc_per_node {2 * world.size}, on more GPUs, or a smaller --max_new_tokens"
    fix = f"--batch_size {fewer}" if fewer else more
    return plan_parts("generate", parts(rows), world, fix, cfg.force)


def answer(cfg: Config, model, tokenizer, encoded: list, settings: dict, world: World) -> list[str]:
    """The answers, in the order of the prompts, on every rank. Batches are of like lengths, and every rank
    takes part in every forward: one that has no batch left repeats the first, for one token.
    """
    order = sorted(range(len(encoded)), key=lambda i: len(encoded[i]))
    batches = [order[i : i + cfg.batch_size] for i in range(0, len(order), cfg.batch_size)]
    mine: dict[int, str] = {}
    for first in range(0, len(batches), world.size):
        number = first + world.rank
        idle = number >= len(batches)
        batch, limits = (batches[0], {"max_new_tokens": 1}) if idle else (batches[number], {})
        width = max(len(encoded[i]) for i in batch)
        ids = torch.full((len(batch), width), pad_id(tokenizer))  # (B, T), padded on the left
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            ids[row, width - len(encoded[i]) :] = torch.tensor(encoded[i])
            mask[row, width - len(encoded[i]) :] = 1
        torch.manual_seed(cfg.seed + number)
        inputs = {"input_ids": ids.to(world.device), "attention_mask": mask.to(world.device)}
        output = model.generate(**inputs, **settings | limits)[:, width:]
        if not idle:
            mine |= zip(
                batch, tokenizer.batch_decode(output, skip_special_tokens=True), strict=True
            )
    everyone = {i: text for part in gather(world, mine) for i, text in part.items()}
    return [everyone[i] if cfg.raw else everyone[i].strip() for i in range(len(encoded))]


def chat(cfg: Config, model, tokenizer, settings: dict, world: World) -> None:
    """Turns until a line is empty. Every rank computes the same turn; rank 0 reads and prints."""
    heard = {}
    if world.rank == 0:
        heard["streamer"] = EscapedText(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = [{"role": "system", "content": cfg.system}] if cfg.system else []
    print0("an empty line or Ctrl-D ends the chat")
    while line := typed_line(world):
        messages.append({"role": "user", "content": line})
        with together(world):
            ids = encode(cfg, model, tokenizer, Prompt("this chat", messages))
        ids = torch.tensor([ids], device=world.device)  # (1, T)
        torch.manual_seed(cfg.seed + len(messages))
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **heard)
        text = tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True).strip()
        messages.append({"role": "assistant", "content": broadcast(world, text)})


class EscapedText(transformers.TextStreamer):
    """Prints an answer word by word. A model may say control characters, which the terminal would obey."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(escaped(text, keep="\n"), stream_end)


def typed_line(world: World) -> str:
    """What is typed on rank 0, on every rank; "" at the end. The others wait in short collectives: one long
    one would end with the group's timeout.
    """
    if world.rank == 0 and sys.stdin.isatty():
        print("> ", end="", flush=True)
    while True:
        line = None
        if world.rank == 0 and select.select([sys.stdin], [], [], 60)[0]:
            line = b""  # byte by byte: what is buffered, select does not see
            while (byte := os.read(sys.stdin.fileno(), 1)) not in (b"", b"\n"):
                line += byte
            line = line.decode(errors="replace").strip()
        line = broadcast(world, line)
        if line is not None:
            return line


class Prompt(NamedTuple):
    where: str  # it stands
    said: str | list[dict]  # a text, or messages
    tools: list | None = None


def read_prompts(path: Path, raw: bool, system: str) -> list[Prompt]:
    """Every prompt of a file."""
    if path.suffix != ".txt":
        found = [row_prompt(row, raw) for row in read_rows(path)]
    else:
        lines = read_small_text(path, TEXT_BYTES, f"--prompts {path}", "utf-8-sig").splitlines()
        found = [Prompt(f"{path}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
        check(found, f"--prompts {path}: no prompts; a .txt file holds one a line")
    return [with_system(prompt, system) for prompt in found] if system else found


def with_system(prompt: Prompt, system: str) -> Prompt:
    turns = (
        [{"role": "user", "content": prompt.said}] if isinstance(prompt.said, str) else prompt.said
    )
    check(
        turns[0]["role"] != "system",
        f"{prompt.where}: has a system turn, and --system is given too",
    )
    return prompt._replace(said=[{"role": "system", "content": system}, *turns])


def row_prompt(row, raw: bool) -> Prompt:
    """A row's prompt; messages are read as finetune.py reads them, and their tools too."""
    prompt, messages = row.data.get("prompt"), row.data.get("messages")
    if isinstance(prompt, str) and prompt and messages is None:
        return Prompt(row.where, prompt)
    fix = 'a row is {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]}'
    check(isinstance(messages, list) and prompt is None, f"{row.where}: no prompt to answer; {fix}")
    check(
        not raw, f"{row.where}: --raw completes text, and these are messages (fix: without --raw)"
    )
    check(all(isinstance(m, dict) for m in messages), f"{row.where}: a message is no object; {fix}")
    answered = messages and messages[-1].get("role") == "assistant"
    turns = messages if answered else [*messages, {"role": "assistant", "content": "to come"}]
    check(len(turns) > 1, f"{row.where}: no turn to answer; {fix}")
    try:
        turns, tools = to_messages(row.data | {"messages": turns}, "chat")
    except ValueError as error:
        raise ConfigError(f"{row.where}: {error}; {fix}") from None
    return Prompt(row.where, turns[:-1], tools)


def encode(cfg: Config, model, tokenizer, prompt: Prompt) -> list[int]:
    """The ids of a prompt, as the model was trained to see it; ConfigError where the answer would not fit."""
    if cfg.raw:
        ids = tokenizer(prompt.said)["input_ids"]
    else:
        turns = (
            [{"role": "user", "content": prompt.said}]
            if isinstance(prompt.said, str)
            else prompt.said
        )
        try:
            ids = prompt_ids(tokenizer, turns, prompt.tools)
        except ValueError as error:
            raise ConfigError(f"{prompt.where}: {error}") from None
    check(ids, f"{prompt.where}: no token is left of it")
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)
    what = f"{len(ids)} tokens and --max_new_tokens {cfg.max_new_tokens} exceed the model's {limit} positions"
    check(
        len(ids) + cfg.max_new_tokens <= limit,
        f"{prompt.where}: {what} (fix: a shorter prompt or answer)",
    )
    return ids


def compute_dtype(name: str, world: World) -> torch.dtype:
    cuda = world.device.type == "cuda"
    has_bf16 = cuda and torch.cuda.is_bf16_supported(including_emulation=False)
    check(
        name != "bf16" or has_bf16 or not cuda,
        "--dtype bf16: this GPU has none (fix: --dtype fp16)",
    )
    return DTYPES["bf16" if has_bf16 else "fp32"] if name == "auto" else DTYPES[name]


def generation_settings(cfg: Config, model, folder: Path, tokenizer, world: World) -> dict:
    """Options of model.generate. What ends an answer is what the model's folder says, and after a fine-tune
    the end of a turn.
    """
    file = folder / "generation_config.json"
    if file.exists():
        with others_code(str(file), "the generation_config.json that came with the model"):
            model.generation_config = transformers.GenerationConfig.from_dict(read_json(file))
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if (cfg.adapter or cfg.checkpoint) and not cfg.raw:
        ends = [*ends, *end_of_turn_ids(tokenizer)]
    settings = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if cfg.temperature:
        settings = {
            "do_sample": True,
            "temperature": cfg.temperature,
            "top_p": cfg.top_p,
            "top_k": 0,
        }
    settings |= {"eos_token_id": [end for end in ends if end is not None] or None}
    settings |= {"pad_token_id": pad_id(tokenizer), "max_new_tokens": cfg.max_new_tokens}
    return settings | {"use_cache": True, "synced_gpus": world.size > 1}


def write_new(path: Path, text: str) -> None:
    """A file that is complete or absent, and never in the place of another."""
    temporary = path.with_name(f".tmp_{path.name}_{secrets.token_hex(8)}")
    try:
        with open_own(temporary, "x") as file:
            file.write(text)
        check(
            not os.path.lexists(path),
            f"--output {path} came into being meanwhile; {temporary} is ours",
        )
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"--output {path}: {error.strerror}; {temporary} is what was written"
        ) from None


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config))
        stop_distributed()
