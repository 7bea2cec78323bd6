"""Examples with pictures -> global batches for a vision-language model. Worker processes decode the pictures
ahead of the step.

FSDP needs every rank to run the vision tower in the same micro-batches, and in all micro-batches of a step or
in none, unless gradients are reduced after each. So a micro-batch without pictures gets a blank picture after
the end of its first row, where no trained token attends to it.
"""

import json
import signal
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count
from multiprocessing.connection import Listener

import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from ..run.errors import ConfigError, say
from ..run.signals import begin_child, die_with_parent
from ..run.units import IGNORE
from .batches import Batch, GlobalBatches, collate
from .encode import Rows
from .examples import Example
from .packing import joined
from .pictures import decoded, folder_of, picture_texts, process
from .prompts import Prompt
from .tokens import encode

BLANK = Image.new("RGB", (32, 32))
TYPES = {"mm_token_type_ids", "token_type_ids"}  # names of the input for token types
# (the rows of a micro-batch, whether it gets a blank picture)
Work = tuple[list[int], bool]


@dataclass(eq=False)
class PictureBatches(GlobalBatches):
    """GlobalBatches whose `extra` holds the model's picture inputs, made by its own processor: pixel_values
    and other inputs of the model's family. `extra` is {} if no rank has a picture and the family has no token
    types. Rows are padded on the right. The cost of a row is its tokens plus its patches. If `separates`, a
    step may have more micro-batches, and gradients must be reduced after each.

    source: how the rows were read. processor: see pictures.load_processor. workers: the number of decoding
    processes; 0: this process decodes. ConfigError names the row of a picture that cannot be decoded.
    """

    source: Rows
    processor: object
    workers: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.patches = self.examples.row_sizes[self.examples.rows]
        # Cross-attention models (mllama): tokens before a picture would also attend to padding pictures.
        # So only rows with the same number of pictures share a micro-batch.
        crosses = "aspect_ratio_ids" in blank_inputs(self.processor)
        self.counts = [len(self.sources(i)) if crosses else 0 for i in range(len(self.patches))]
        self.separates = len({*self.counts}) > 1
        self.next_step = None
        self.prepared = None

    def __getitem__(self, work: Work) -> Batch:
        """Make one micro-batch, in a worker process."""
        batch = self.batch(*work)
        # Share it here: if /dev/shm is full, torch's own thread would lose the batch, and the process that
        # trains would wait for it without end.
        tree_map_only(Tensor, Tensor.share_memory_, vars(batch))
        return batch

    def summary(self) -> str:
        """The text that the plan prints, with the number of rows with pictures and of patches."""
        pictured = (self.patches > 0).sum()
        patches = self.patches.sum()
        return f"{super().summary()}; {pictured:,} with pictures of {patches:,} patches of 14 x 14 pixels"

    def largest(self, rows: int) -> Batch:
        """A batch of `rows` copies of the row with the most patches."""
        return self.batch([int(self.patches.argmax())] * rows)

    def costs(self, rows: list) -> Tensor:
        """The tokens and patches of each row, (n,) int64."""
        return super().costs(rows) + self.patches[rows]

    def shares(self, step: int) -> list:
        """As GlobalBatches.shares. If `separates`, the rows of a micro-batch have equally many pictures."""
        shares = [[] for _ in range(self.ranks)]
        rows = self.rows_of(step)
        for count_of_pictures in sorted({self.counts[row] for row in rows}):
            alike = [row for row in rows if self.counts[row] == count_of_pictures]
            for share, micro_batches in zip(shares, self.dealt(alike), strict=True):
                share += micro_batches
        return shares

    def work(self, step: int) -> list[Work]:
        """This rank's micro-batches of a step. Every rank knows which micro-batches of all ranks have
        pictures. The tower runs in all micro-batches of a step or in none, because FSDP2 cannot accumulate
        the gradients of a unit that runs in only some of them. If `separates`, it runs in those in which any
        rank has pictures.
        """
        shares = self.shares(step)
        pictured = [[bool(self.patches[rows].any()) for rows in share] for share in shares]
        # of each micro-batch: whether any rank has a picture in it
        tower_runs = [any(ranks) for ranks in zip(*pictured, strict=True)]
        if not self.separates:
            tower_runs = [any(tower_runs)] * len(tower_runs)
        micro_batches = zip(shares[self.rank], pictured[self.rank], tower_runs, strict=True)
        return [(rows, runs and not has_picture) for rows, has_picture, runs in micro_batches]

    def batches(self, step: int) -> list:
        """As GlobalBatches.batches, made ahead by the workers as long as steps follow each other. If that
        fails, this process makes them from then on, with a warning.
        """
        if not self.workers:
            return [self.batch(*work) for work in self.work(step)]
        try:
            if step != self.next_step:
                self.prepared = None  # ends the workers
                ahead = copy(self)  # a copy, or this object and its workers keep each other alive
                self.prepared = iter(
                    DataLoader(
                        ahead,
                        sampler=chain.from_iterable(map(ahead.work, count(step))),  # without end
                        batch_size=None,
                        num_workers=self.workers,
                        multiprocessing_context="fork",  # workers use no GPU
                        worker_init_fn=begin_worker,
                        generator=torch.Generator(),  # the default generator is that of dropout
                    )
                )
                # Torch's handler raises at a random place when a worker is killed. next() reports it too.
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self.next_step = step + 1
            return [next(self.prepared) for _ in self.work(step)]
        except Exception as error:  # an error of the data, a full /dev/shm, or a worker that died
            self.workers = 0
            self.prepared = None
            batches = self.batches(step)  # an error of the data comes again, and is raised
            say(
                "warning: from now on the process that trains decodes the pictures:"
                f" {' '.join(str(error).splitlines()[-1:])}"
                " (/dev/shm is full: a larger one, in Docker --shm-size 8g; path too long: another TMPDIR)"
            )
            return batches

    def batch(self, rows: list, blank=False) -> Batch:
        """The micro-batch of these rows, or a filler. blank: its first row gets a blank picture."""
        items = self.items(rows) or [self.filler()]
        sources = [self.sources(row) for row in rows] or [[]]
        pictures = [
            decoded_of(of_row, item.where, self.source)
            for of_row, item in zip(sources, items, strict=True)
        ]
        if blank:
            (text,), _ = picture_texts(self.processor, (BLANK.size,))
            ids = torch.tensor(encode(self.processor.tokenizer, text).ids)
            items[0] = joined([items[0], Example(ids, torch.full_like(ids, IGNORE), "blank")])
            pictures[0] = [BLANK]
        batch = collate(items, self.pad_id, self.multiple)
        return replace(batch, extra=inputs_of(self.processor, batch.ids, pictures))

    def sources(self, row: int) -> list[list]:
        """The pictures of a row, from pictures.described."""
        return json.loads(self.examples.details[self.examples.numbers[row]])


def begin_worker(_: int) -> None:
    """Let a worker end with its parent. It ignores all signals but SIGTERM, with which torch ends it."""
    begin_child()
    die_with_parent()
    # To pass batches on, a thread of torch opens such a socket below TMPDIR. If that failed there, the batch
    # would be lost, and the process that trains would wait without end.
    Listener().close()


def decoded_of(pictures: list, where: str, rows: Rows) -> list[Image.Image]:
    """Decode the pictures of a row, from `sized`. ConfigError if one cannot be decoded, or was changed."""
    try:
        return [
            decoded(picture, folder_of(where, rows), rows.image_max_pixels) for picture in pictures
        ]
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def picture_inputs(processor, prompts: list[Prompt], ids: Tensor, rows: Rows) -> dict:
    """The model's further inputs for prompts with ids (B, T), all with the same number of pictures."""
    return inputs_of(
        processor, ids, [decoded_of(prompt.pictures, prompt.where, rows) for prompt in prompts]
    )


@lru_cache(maxsize=4)
def blank_inputs(processor) -> dict:
    """The processor's output for a blank picture."""
    return process(processor, [[BLANK]])


def inputs_of(processor, ids: Tensor, pictures: list[list]) -> dict:
    """The model's further inputs for a batch with ids (B, T). pictures: those of each row."""
    blank = blank_inputs(processor)
    pictured = list(filter(None, pictures))
    extra = process(processor, pictured) if pictured else {}
    extra.pop("input_ids", None)
    for name in TYPES & blank.keys():
        extra[name] = torch.isin(ids, blank["input_ids"][blank[name] == 1]).long()
    if (name := "moe_mm_token_type_ids") in blank:  # ERNIE 4.5's, also of tokens around pictures
        extra[name] = processor.create_moe_mm_token_type_ids(ids)
    if "aspect_ratio_mask" in extra:
        extra["cross_attention_mask"] = cross_attention(processor.image_token_id, ids, extra)
    return extra


def cross_attention(token: int, ids: Tensor, extra: dict) -> Tensor:
    """(B, T, pictures, tiles) int64: the tiles that each token attends to, for cross-attention models."""
    from transformers.models.mllama.processing_mllama import (
        convert_sparse_cross_attention_mask_to_dense,
        get_cross_attention_token_mask,
    )

    mask = convert_sparse_cross_attention_mask_to_dense(
        [get_cross_attention_token_mask(row, token) for row in ids.tolist()],
        num_tiles=extra["aspect_ratio_mask"].sum(-1).tolist(),
        max_num_tiles=extra["aspect_ratio_mask"].shape[-1],
        length=ids.shape[1],
    )
    return torch.from_numpy(mask)
