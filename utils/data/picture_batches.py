"""Examples with pictures -> the global batches of a vision-language model; pictures are decoded in other
processes, ahead of the step.

FSDP needs every rank to run the vision tower in the same micro-batches, and in all of a step or in none. A
micro-batch without a picture gets a blank one behind the end of its first row: no token that counts sees it.
"""

import json
import os
import signal
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, count

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

from ..run.errors import ConfigError, say
from ..run.signals import CAUGHT, die_with_parent
from ..run.units import IGNORE
from .batches import Batch, GlobalBatches, collate
from .encode import Rows
from .examples import Example
from .packing import joined
from .pictures import decoded, folder_of, process, room_of
from .prompts import Prompt
from .tokens import encode

BLANK = Image.new("RGB", (32, 32))
TYPES = {"mm_token_type_ids", "token_type_ids"}  # names of what says the type of each token
# the rows of a micro-batch, and whether a blank picture comes with them
Work = tuple[list[int], bool]


@dataclass(eq=False)
class PictureBatches(GlobalBatches):
    """GlobalBatches with what the model takes of their pictures, as its own processor gives it: pixel_values
    and what its family has beside them; {} of a family without token types, where no rank has a picture. Rows
    are padded on the right, and cost their tokens and their patches. Where `separates`, a step may have more
    micro-batches.

    source: how the rows were read; processor: see pictures.load_processor; workers: processes that decode, 0:
    this one does. ConfigError names the row of a picture that cannot be decoded.
    """

    source: Rows
    processor: object
    workers: int = 2

    def __post_init__(self):
        super().__post_init__()
        self.patches = self.examples.of_rows(self.examples.row_sizes)
        # Layers for pictures, which a text alone skips: there the tokens before a picture see the padding
        # of pictures too, so only rows with equally many share a micro-batch.
        self.counts = [0] * len(self.patches)
        if "aspect_ratio_ids" in blank_inputs(self.processor):
            self.counts = [len(self.sources(row)) for row in range(len(self.patches))]
        self.separates = len({*self.counts}) > 1
        self.next_step = -1
        self.made: Iterator = iter(())

    def __getitem__(self, work: Work) -> Batch | ConfigError:
        """What a worker does."""
        try:
            return self.batch(*work)
        except ConfigError as error:
            return error

    def summary(self) -> str:
        """What the plan prints: also how many pictures there are."""
        pictured = int((self.patches > 0).sum())
        patches = int(self.patches.sum())
        return f"{super().summary()}; {pictured:,} with pictures of {patches:,} patches of 14 x 14 pixels"

    def largest(self, rows: int) -> Batch:
        """A batch of so many rows, each the one with the most pictures."""
        return self.batch([int(self.patches.argmax())] * rows)

    def costs(self, rows: list[int]) -> Tensor:
        return super().costs(rows) + self.patches[rows]

    def shares(self, step: int) -> list[list[list]]:
        shares: list[list[list]] = [[] for _ in range(self.ranks)]
        rows = self.rows_of(step)
        for number in sorted({self.counts[row] for row in rows}):
            alike = self.dealt([row for row in rows if self.counts[row] == number])
            for share, more in zip(shares, alike, strict=True):
                share += more
        return shares

    def work(self, step: int) -> list[Work]:
        """This rank's micro-batches of a step. Every rank knows what all of them have. A tower runs in all of
        them, or in none: FSDP2 adds no gradients of one micro-batch to those of several.
        """
        shares = self.shares(step)
        pictured = [[bool(self.patches[rows].any()) for rows in share] for share in shares]
        some = [any(ranks) for ranks in zip(*pictured, strict=True)]
        if not self.separates:
            some = [any(some)] * len(some)
        mine = zip(shares[self.rank], pictured[self.rank], some, strict=True)
        return [(rows, anyone and not own) for rows, own, anyone in mine]

    def batches(self, step: int) -> list[Batch]:
        if not self.workers:
            return [self.batch(*work) for work in self.work(step)]
        if step != self.next_step:
            self.made = iter(())  # ends the workers
            ahead = copy(self)  # else this object and its workers would keep each other alive
            self.made = iter(
                DataLoader(
                    ahead,
                    sampler=chain.from_iterable(map(ahead.work, count(step))),  # without end
                    batch_size=None,
                    num_workers=self.workers,
                    multiprocessing_context="fork",  # nothing of a GPU is touched
                    worker_init_fn=begin_worker,
                    generator=torch.Generator(),  # else it draws from the one of dropout
                )
            )
            # torch's handler raises wherever the run is when a worker is killed; next() says it too.
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.next_step = step + 1
        try:
            found = [next(self.made) for _ in self.work(step)]
        except Exception as error:  # a worker was ended, perhaps while it handed a batch over
            say(f"warning: from now on the process that trains decodes the pictures: {error}")
            self.workers = 0
            return self.batches(step)
        for batch in found:
            if isinstance(batch, ConfigError):
                self.made = iter(())
                raise batch
        return found

    def batch(self, rows: list[int], blank: bool = False) -> Batch:
        items = self.items(rows) or [self.filler()]
        sources = [self.sources(row) for row in rows] or [[]]
        pictures = [
            decoded_of(of_row, item.where, self.source)
            for of_row, item in zip(sources, items, strict=True)
        ]
        if blank:
            (text,), _ = room_of(self.processor, (BLANK.size,))
            room = torch.tensor(encode(self.processor.tokenizer, text).ids)
            untrained = Example(room, torch.full_like(room, IGNORE), "blank")
            items[0] = joined([items[0], untrained])
            pictures[0] = [BLANK]
        batch = collate(items, self.pad_id, self.multiple)
        return replace(batch, extra=inputs_of(self.processor, batch.ids, pictures))

    def sources(self, row: int) -> list[list]:
        """[[source, width, height], ...] of the pictures of a row."""
        return json.loads(self.examples.details[self.examples.numbers[row]])


def begin_worker(_: int) -> None:
    """A worker ends with the run, and by no signal but SIGTERM, with which torch ends it."""
    for number in CAUGHT:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    die_with_parent()


def decoded_of(pictures: list, where: str, rows: Rows) -> list[Image.Image]:
    """The pictures of a row, [[source, width, height], ...]. ConfigError: one cannot be decoded."""
    folder, most = folder_of(where, rows), rows.image_max_pixels
    try:
        return [decoded(source, folder, tuple(size), most) for source, *size in pictures]
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def picture_inputs(processor, prompts: list[Prompt], ids: Tensor, rows: Rows) -> dict:
    """What the model takes beside the ids (B, T) of prompts with equally many pictures."""
    pictures = [decoded_of(prompt.pictures, prompt.where, rows) for prompt in prompts]
    return inputs_of(processor, ids, pictures)


@lru_cache(maxsize=4)
def blank_inputs(processor) -> dict[str, Tensor]:
    """What the processor makes of a blank picture."""
    return process(processor, [[BLANK]])


def inputs_of(processor, ids: Tensor, pictures: list[list]) -> dict[str, Tensor]:
    """What a model takes beside the ids (B, T) of a batch, with the pictures of each of its rows."""
    blank, pictured = blank_inputs(processor), list(filter(None, pictures))
    extra = process(processor, pictured) if pictured else {}
    extra.pop("input_ids", None)
    for name in TYPES & blank.keys():
        typed = blank["input_ids"][blank[name] == 1]
        extra[name] = torch.isin(ids, typed).long()
    if "aspect_ratio_mask" in extra:
        extra["cross_attention_mask"] = cross_attention(processor.image_token_id, ids, extra)
    return extra


def cross_attention(token: int, ids: Tensor, extra: dict) -> Tensor:
    """(B, T, pictures, tiles) int64: which tiles a token sees, of models that have layers for that."""
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
