"""
Answer prompts from a file, or chat in the terminal, in one process or with the model sharded over all ranks.

    python recipes/generate.py --model DIR --prompts questions.jsonl --output answers.jsonl
    python recipes/generate.py --model DIR --adapter runs/first/adapter --chat --temperature 0.7
    torchrun --nproc_per_node 2 recipes/generate.py --checkpoint runs/first --prompts questions.txt --raw

Prompts are the lines of a .txt file, or the rows of a .jsonl file: {"prompt": "..."} or {"messages": [...]}.
If the last message is the assistant's, it is left out. For a model that reads pictures, rows have them in the
forms that vision.py trains. Batches and random numbers do not depend on the number of ranks, so neither do
the answers. Answers are written as they come: after a kill, the same command goes on.
"""

import fcntl
import gc
import hashlib
import json
import math
import os
import select
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Literal, NamedTuple, TextIO

if __name__ == "__main__":
    gc.disable()  # the imports leave nothing to collect: saves 0.5 s

sys.path.insert(1, str(Path(__file__).resolve().parent.parent))  # utils/ is beside recipes/

import torch
import transformers
from tqdm import tqdm

from utils.data.encode import Rows
from utils.data.formats import parse_columns, renamed
from utils.data.prompts import Prompt, prompt_ids, texts_of, turns_of
from utils.data.rows import as_object, find_sources
from utils.data.tokens import end_of_turn_ids, load_tokenizer, pad_id
from utils.model.folder import check_vocab, quiet_transformers, read_json
from utils.model.sharding import DTYPES, lacks_grouped_kernels, reshard, settle_dtype
from utils.plan.generation import estimate_generation, plan_generation
from utils.run.distributed import (
    World,
    all_gather,
    broadcast,
    build_mesh,
    init_distributed,
    stop_distributed,
    together,
)
from utils.run.errors import ConfigError, act, check, escaped, others_code, print0
from utils.run.folder import releases_output
from utils.run.settings import convert_settings, parse_cli
from utils.run.signals import report_errors, stop_at_once
from utils.train.rollout import pad_left
from utils.train.trained_run import compute_alone, load_trained, open_trained, shard_model

# Fields of a generation_config.json that ask for something else than one whole answer to each prompt, drawn
# or greedy.
NOT_OURS = (
    "assistant_early_exit",
    "max_time",
    "num_beams",
    "num_return_sequences",
    "prompt_lookup_num_tokens",
    "return_dict_in_generate",
)
KEPT_BATCHES = 64  # batches whose answers are written together
WITHOUT_EFFECT = ("output", "force")  # settings that do not change the answers


@dataclass
class Config:
    # What
    model: str = ""  # folder or Hugging Face id; empty: the base of --adapter or --checkpoint
    adapter: str = ""  # folder of a LoRA adapter, as peft writes it
    checkpoint: str = ""  # run folder (its newest checkpoint), or one checkpoint of it
    trust_remote_code: bool = False  # run Python code that comes with the model
    prompts: str = ""  # .txt with one prompt per line, or .jsonl rows with "prompt" or "messages"
    columns: str = ""  # our key=your column: prompt=question,system=instructions
    image_dir: str = ""  # folder of the pictures; empty: folder of the data file
    image_max_pixels: int = 0  # shrink larger pictures, before the model's processor; 0: never
    chat: bool = False  # talk in the terminal; an empty line or Ctrl-D ends it
    system: str = ""  # text of the system turn
    raw: bool = False  # complete the text as it is, without the chat template

    # How much
    max_new_tokens: int = 256  # maximum tokens of an answer
    temperature: float = 0.0  # sampling temperature; 0: greedy
    top_p: float = 1.0  # sample from the likeliest tokens with this total probability
    seed: int = 0  # random seed of sampling
    batch_size: int = 8  # prompts per rank and forward

    # How
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"  # compute; auto: bf16 if the GPU has it
    quantization: Literal["none", "8bit", "4bit"] = "none"  # of frozen linear layers and experts
    force: bool = False  # start even if the plan says that it does not fit

    # Where
    output: str = ""  # .jsonl file for the answers; empty: the terminal

    def __post_init__(self):
        convert_settings(self, max_new_tokens=1)
        check(
            0 < self.top_p <= 1,
            f"--top_p {self.top_p} is not a share (fix: above 0, at most 1)",
        )
        check(
            self.top_p == 1 or self.temperature > 0,
            f"--top_p {self.top_p}: at --temperature 0 nothing is drawn (fix: --temperature 0.7)",
        )
        check(
            self.chat != bool(self.prompts),
            "what is to be answered? (fix: either --prompts FILE, or --chat)",
        )
        check(
            not self.chat or sys.stdin,
            "--chat: standard input is closed (fix: leave it open, or --prompts FILE)",
        )
        check(
            not (self.chat and self.output),
            "--output is for --prompts; a chat goes to the terminal",
        )
        check(
            not (self.raw and (self.chat or self.system)),
            "--raw has no turns (fix: no --chat, --system)",
        )
        check(
            not (self.adapter and self.checkpoint),
            "--adapter and --checkpoint: give one of them",
        )
        check(
            self.model or self.adapter or self.checkpoint,
            "no --model given (fix: --model FOLDER, or --checkpoint RUN)",
        )


@releases_output
def main(cfg: Config) -> None:
    """Answer, and write or print the answers."""
    quiet_transformers()

    # --- world: who am I, who are the others ------------------------------------------------------
    act("world")
    world = init_distributed()

    # --- plan: everything that can fail cheaply fails here ----------------------------------------
    act("plan")
    prompts: list[Prompt] = []
    with together(world):
        if cfg.output:
            check_output(Path(cfg.output))
    dtype = settle_dtype(cfg.dtype, world.device)
    trained = open_trained(
        cfg.model,
        cfg.adapter,
        cfg.checkpoint,
        dtype,
        world,
        cfg.trust_remote_code,
        cfg.quantization,
    )
    model = trained.model
    with together(world):
        tokenizer = load_tokenizer(*trained.tokenizer)
        check_vocab(tokenizer, len(model.get_input_embeddings().weight))
        rows = Rows(cfg.prompts, 0, image_dir=cfg.image_dir, image_max_pixels=cfg.image_max_pixels)
        processor = read_row = ids_of = pictures = None  # only for a model that reads pictures
        if trained.kind == "pictures":
            from utils.data.pictures import load_processor, picture_prompt, picture_prompt_ids
            from utils.plan.pictures import Pictures

            processor = load_processor(trained.source.folder, tokenizer)
            read_row = partial(picture_prompt, rows=rows)
            ids_of = partial(picture_prompt_ids, processor, tokenizer)
            pictures = Pictures(None)
        check(
            processor or not (cfg.image_dir or cfg.image_max_pixels),
            f"--image_dir, --image_max_pixels: {trained.name} reads no pictures (fix: leave them out)",
        )
        if cfg.prompts:
            prompts = read_prompts(Path(cfg.prompts), cfg.raw, cfg.system, read_row, cfg.columns)
        settings = generation_settings(cfg, model, trained.source.folder, tokenizer, world)
        positions = positions_of(model)
        at_once = KEPT_BATCHES * cfg.batch_size  # prompts whose answers are written together
        unfinished = unfinished_file(cfg, prompts)
        encoded = [
            encode_prompt(tokenizer, prompt, cfg.raw, cfg.max_new_tokens, positions, ids_of)
            for prompt in prompts
        ]
    encoded = broadcast(encoded, world)
    done = 0
    with together(world):
        plan_memory(cfg, model, DTYPES[dtype], encoded, world, pictures)
        if world.rank == 0 and unfinished:
            lock = locked(unfinished)  # noqa: F841 - until the end
            done = count_kept(unfinished, prompts, at_once)
    done = broadcast(done, world)

    # --- shard: every parameter cut over the ranks ------------------------------------------------
    if world.size > 1:
        act("shard")
        shard_model(model, build_mesh(world), DTYPES[dtype])
    else:
        compute_alone(model, DTYPES[dtype])
    # On Hopper and later, torch prefers cuDNN, which makes a plan for each length: 23 to 37 ms in reports.
    torch.backends.cuda.enable_cudnn_sdp(False)
    if lacks_grouped_kernels(world.device, DTYPES[dtype]):
        from utils.model.attention import repeat_grouped_keys

        repeat_grouped_keys()

    # --- load: the first act that costs memory ----------------------------------------------------
    act("load")
    load_trained(trained, cfg.adapter, world)

    # --- generate ---------------------------------------------------------------------------------
    act("generate")
    if cfg.chat:
        chat(cfg, model, tokenizer, settings, world)
        return
    more_inputs = None  # (prompts, ids) -> the inputs of the model that hold pictures
    if processor:
        from utils.data.picture_batches import picture_inputs

        more_inputs = partial(picture_inputs, processor, rows=rows)
    bar = tqdm(
        total=len(prompts),
        initial=done,
        unit=" answers",
        disable=True if world.rank else None,  # None: disabled if not a terminal
    )
    while done < len(prompts):
        # The answers of some batches are written before the next batches are generated.
        asked = range(done, min(done + at_once, len(prompts)))
        texts = answer(cfg, model, tokenizer, prompts, encoded, asked, settings, world, more_inputs)
        lines = []
        for i, text in zip(asked, texts, strict=True):
            row = {"where": prompts[i].where, "prompt": prompts[i].content, "answer": text}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        with together(world):
            if world.rank == 0:
                append_answers("".join(lines), unfinished)
        done = asked.stop
        bar.update(len(asked))
    bar.close()
    if unfinished:
        with together(world):
            if world.rank == 0:
                check_output(Path(cfg.output))  # another process may have made it meanwhile
                os.rename(unfinished, cfg.output)
    place = f" in {cfg.output}" if cfg.output else ""
    print0(f"finished  {len(prompts)} answers{place}")


def plan_memory(
    cfg: Config, model, dtype: torch.dtype, encoded: list, world: World, pictures
) -> None:
    """Check the memory of the longest batch. A chat is planned for one turn and its answer, both of
    --max_new_tokens.
    """
    longest = max((len(ids) for ids in encoded), default=cfg.max_new_tokens)
    rows = 1 if cfg.chat else min(cfg.batch_size, len(encoded))
    lengths = (longest, cfg.max_new_tokens)
    parts = estimate_generation(model, world.size, dtype, rows, *lengths, pictures)
    plan_generation(parts, world, cfg.force)


def answer(
    cfg: Config,
    model,
    tokenizer,
    prompts: list[Prompt],
    encoded: list,
    asked: range,
    settings: dict,
    world: World,
    more_inputs: Callable | None,
) -> list[str]:
    """The answers to the prompts `asked`, in order, on every rank. The prompts of a batch have similar
    lengths and the same number of pictures.

    Every rank takes part in every forward. A rank without a batch repeats another rank's batch for one token.
    more_inputs: makes the inputs that hold pictures, from prompts and their ids; None: there are none.
    """

    def count_pictures(i: int) -> int:
        return len(prompts[i].pictures)

    order = sorted(asked, key=lambda i: (count_pictures(i), len(encoded[i])))
    batches = []
    for _, alike in groupby(order, count_pictures):
        alike = list(alike)
        batches += [alike[i : i + cfg.batch_size] for i in range(0, len(alike), cfg.batch_size)]
    # In each round, all ranks have pictures or none has, because FSDP gathers a tower on all ranks.
    # A round is (its first batch, the end of the batches of its kind): rank r answers batch first + r.
    texts_only = sum(not count_pictures(batch[0]) for batch in batches)
    rounds = [(i, texts_only) for i in range(0, texts_only, world.size)]
    rounds += [(i, len(batches)) for i in range(texts_only, len(batches), world.size)]
    if more_inputs and world.size > 1:
        # generate may call the tower before the model, but FSDP2 must see a forward of the root first
        with torch.no_grad():
            model(torch.tensor([[pad_id(tokenizer)]], device=world.device))
    texts: dict[int, str] = {}  # index of a prompt -> its answer
    for first, end in rounds:
        number = first + world.rank
        idle = number >= end
        batch = batches[first] if idle else batches[number]
        limit = {"max_new_tokens": 1} if idle else {}
        ids, mask = pad_left([encoded[i] for i in batch], pad_id(tokenizer))
        extra = {}
        with together(world):
            if more_inputs:
                extra = more_inputs([prompts[i] for i in batch], ids)
        torch.manual_seed(cfg.seed + asked.start + number)
        output = model.generate(
            input_ids=ids.to(world.device),
            attention_mask=mask.to(world.device),
            **{name: value.to(world.device) for name, value in extra.items()},
            **settings | limit,
        )
        if not idle:
            new_ids = output[:, ids.shape[1] :]
            texts |= zip(batch, texts_of(tokenizer, new_ids.tolist()), strict=True)
    reshard(model)  # until then FSDP2 notes each forward
    for part in all_gather(texts, world):
        texts |= part
    answers = [texts[i] for i in asked]
    return answers if cfg.raw else [text.strip() for text in answers]


def chat(cfg: Config, model, tokenizer, settings: dict, world: World) -> None:
    """Chat until an empty line. Every rank computes the same turns; rank 0 reads and prints."""
    streamer = None
    if world.rank == 0:
        streamer = EscapedText(tokenizer, skip_prompt=True, skip_special_tokens=True)
    messages = []
    if cfg.system:
        messages.append({"role": "system", "content": cfg.system})
    print0("an empty line or Ctrl-D ends the chat")
    while line := typed_line(world):
        messages.append({"role": "user", "content": line})
        with together(world):
            prompt = encode_prompt(tokenizer, Prompt("this chat", messages), False, 0, math.inf)
            positions = positions_of(model)
            free_positions = positions - len(prompt)
            check(
                free_positions > 0,
                f"this chat has {len(prompt)} tokens, and the model {positions} positions"
                " (fix: begin a new one)",
            )
        limit = {"max_new_tokens": min(cfg.max_new_tokens, free_positions)}
        ids = torch.tensor([prompt], device=world.device)  # (1, T)
        mask = torch.ones_like(ids)
        torch.manual_seed(cfg.seed + len(messages))
        output = model.generate(ids, attention_mask=mask, streamer=streamer, **settings | limit)
        (text,) = texts_of(tokenizer, output[:, ids.shape[1] :].tolist())
        messages.append({"role": "assistant", "content": broadcast(text.strip(), world)})


class EscapedText(transformers.TextStreamer):
    """Prints an answer word by word, with control characters escaped, which a terminal would obey."""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        super().on_finalized_text(escaped(text, keep="\n"), stream_end)


def typed_line(world: World) -> str:
    """The next line typed on rank 0, on every rank; "" at the end of the input.

    The other ranks wait in repeated short collectives, because a long one would hit the group's timeout.
    """
    if world.rank == 0 and sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = None
    while line is None:
        if world.rank == 0 and select.select([sys.stdin], [], [], 60)[0]:
            line = read_line()
        line = broadcast(line, world)
    return line


def read_line() -> str:
    """Read a line of standard input, byte by byte: select does not see bytes that Python has buffered."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(sys.stdin.fileno(), 1)
        if not byte:  # the end of the input
            break
        line += byte
    return line.decode(errors="replace").strip()


class Row(NamedTuple):
    where: str
    data: dict


def read_rows(name: str | Path, columns="") -> list[Row]:
    """All rows of the data that a flag names, with columns renamed. ConfigError names the first bad row."""
    rows = []
    wanted = parse_columns(columns)
    found = set()
    for where, value in chain.from_iterable(source.read() for source in find_sources(str(name))):
        try:
            row = as_object(value)
            found |= row.keys()
            rows.append(Row(where, renamed(row, wanted)[0]))
        except ValueError as fault:
            raise ConfigError(f"{where}: {fault}") from None
    for ours, theirs in wanted.items():
        check(theirs in found, f"--columns {ours}={theirs}: no row has {theirs!r}")
    return rows


def read_prompts(
    path: Path, raw: bool, system: str, pictured: Callable | None = None, columns=""
) -> list[Prompt]:
    """The prompts of a file: the lines of a .txt file that are not blank, or the rows of another file.

    raw: prompts are texts to complete, not messages. system: a system turn to put before each prompt; "":
    none. pictured: makes the prompt of a row, for a model that reads pictures. columns: as the flag.
    ConfigError names the file and the line.
    """
    prompts = []
    for row in read_rows(path, columns):
        if not row.where.removesuffix(".gz").endswith((".txt", ".md")):
            prompts.append(prompt_of_row(row, raw, pictured))
            continue
        for number, line in enumerate(row.data["text"].split("\n"), 1):
            if line.strip():
                prompts.append(Prompt(f"{row.where}:{number}", line.rstrip("\r")))
    check(prompts, f"{path}: no rows (fix: a prompt in each line)")
    if not system:
        return prompts
    turn = {"role": "system", "content": system}
    for prompt in prompts:
        check(
            prompt.messages[0]["role"] != "system",
            f"{prompt.where}: has a system turn, and --system is given too",
        )
    return [prompt._replace(content=[turn, *prompt.messages]) for prompt in prompts]


def prompt_of_row(row: Row, raw: bool, pictured: Callable | None) -> Prompt:
    """The prompt of a row. Messages and tools are read as in training; a last answer is left out."""
    has_pictures = row.data.get("image") or row.data.get("images")
    try:
        if pictured and (has_pictures or not isinstance(row.data.get("prompt"), str)):
            prompt = pictured(row)
        else:
            content, tools, _ = turns_of(row.data)
            prompt = Prompt(row.where, content, tools)
    except ValueError as error:
        raise ConfigError(f"{row.where}: {error}") from None
    check(
        not raw or isinstance(prompt.content, str),
        f"{row.where}: these are messages, and --raw completes texts (fix: without --raw)",
    )
    return prompt


def encode_prompt(
    tokenizer, prompt: Prompt, raw: bool, new_tokens: int, positions: float, pictured=None
) -> list[int]:
    """The ids of a prompt in the form used in training, with the generation prompt. raw: only the ids of its
    text. pictured: returns the ids of a prompt with pictures. ConfigError if the prompt and `new_tokens` more
    tokens exceed the model's positions.
    """
    try:
        if raw:
            ids = tokenizer(prompt.content)["input_ids"]
        elif prompt.pictures:
            ids = pictured(prompt)
        else:
            ids = prompt_ids(tokenizer, prompt)
    except ValueError as error:
        raise ConfigError(f"{prompt.where}: {error}") from None
    check(ids, f"{prompt.where}: the prompt has no tokens")
    needed = f"{len(ids)} tokens and --max_new_tokens {new_tokens}"
    check(
        len(ids) + new_tokens <= positions,
        f"{prompt.where}: {needed} exceed the model's {positions} positions"
        " (fix: a shorter prompt or answer)",
    )
    return ids


def positions_of(model) -> float:
    """The maximum number of tokens of a prompt and its answer together."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)


def generation_settings(cfg: Config, model, folder: Path, tokenizer, world: World) -> dict:
    """Options of model.generate. An answer ends with the end tokens of the model folder; with an adapter or a
    checkpoint, and without --raw, also with the end-of-turn token.
    """
    file = folder / "generation_config.json"
    if file.exists():
        with others_code(file, "the generation_config.json that came with the model"):
            model.generation_config = transformers.GenerationConfig.from_dict(read_json(file))
    for name in NOT_OURS:
        setattr(model.generation_config, name, None)
    # The load-balancing loss of mixtures of experts does not work with a cache.
    model.config.get_text_config().output_router_logits = False
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    if (cfg.adapter or cfg.checkpoint) and not cfg.raw:
        ends = [*ends, *end_of_turn_ids(tokenizer)]
    draws = cfg.temperature > 0
    return {
        "do_sample": draws,
        "temperature": cfg.temperature if draws else None,
        "top_p": cfg.top_p if draws else None,
        "top_k": 0 if draws else None,
        "eos_token_id": [end for end in ends if end is not None] or None,
        "pad_token_id": pad_id(tokenizer),
        "max_new_tokens": cfg.max_new_tokens,
        "use_cache": True,
        "synced_gpus": world.size > 1,
        "tokenizer": tokenizer,  # for stop_strings
    }


def check_output(path: Path) -> None:
    """Raise ConfigError if the file exists, or if its folder cannot be written to."""
    exists = os.path.lexists(path)
    check(not exists, f"--output {path} exists, and is not overwritten (fix: another name)")
    parent = path.absolute().parent
    writable = parent.is_dir() and os.access(parent, os.W_OK)
    check(
        writable,
        f"--output {path}: no folder {parent} that can be written to (fix: another folder)",
    )


def unfinished_file(cfg: Config, prompts: list[Prompt]) -> Path | None:
    """The file that holds the answers until the last one is written. Its name has a hash of the settings and
    pictures that determine the answers.
    """
    if not cfg.output:
        return None
    settings = {name: value for name, value in asdict(cfg).items() if name not in WITHOUT_EFFECT}
    settings["pictures"] = [prompt.pictures for prompt in prompts if prompt.pictures]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
    return Path(f"{cfg.output}.{digest[:8]}.unfinished")


def locked(file: Path) -> TextIO:
    """Open a file for appending, and lock it until it is closed. ConfigError if another process has."""
    lock = open(file, "a")  # noqa: SIM115
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"{file}: another process writes it (fix: wait, or another --output)"
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


def count_kept(file: Path, prompts: list[Prompt], at_once: int) -> int:
    """The number of answers that an earlier start wrote; they belong to the first prompts. If a kill cut the
    last `at_once` answers, they are removed, so that the same batches are made again. ConfigError if they
    answer other prompts.
    """
    *lines, _ = file.read_bytes().split(b"\n")  # a kill or a full disk may cut the last one
    lines = lines[: len(lines) // at_once * at_once]
    os.truncate(file, sum(len(line) + 1 for line in lines))
    check(
        len(lines) <= len(prompts),
        f"{file} has {len(lines):,} answers to {len(prompts):,} prompts (fix: remove it)",
    )
    for line, prompt in zip(lines, prompts, strict=False):
        same = json.loads(line)["prompt"] == prompt.content
        check(same, f"{file} has answers to other prompts than {prompt.where} (fix: remove it)")
    if lines:
        print0(f"to go on  after {len(lines):,} answers in {file} (other weights now? remove it)")
    return len(lines)


def append_answers(lines: str, file: Path | None) -> None:
    """Append answers to a file, or print them."""
    if not file:
        print0(escaped(lines[:-1], keep="\n"), ready=True)
        return
    try:
        with open(file, "a", encoding="utf-8") as kept:
            kept.write(lines)
    except OSError as error:
        fix = "make room; the same command goes on"
        raise ConfigError(f"--output: {file}: {error.strerror} (fix: {fix})") from None


if __name__ == "__main__":
    # --- parse: the command line is understood completely, or refused, before anything starts -----
    with report_errors():
        stop_at_once()
        main(parse_cli(Config))
        stop_distributed()
