"""Documents -> an endless stream of tokens (a TokenStream) -> rows of one length, cut from the stream.

Row n of a source is tokens [n (T - 1), n (T - 1) + T) of its stream. The last of its T tokens is the first of
the next row. So each token is predicted exactly once, a document that is cut goes on in the next row, and all
rows are full. The position of a run is one number, the row; it means the same tokens on any number of ranks.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..run.errors import check
from .batches import Batch, GlobalBatches
from .examples import Example, Examples, permutation
from .packing import PackedBatches

PERIOD = 1000  # rows after which each source of a mixture has had exactly its share


class TokenStream:
    """The concatenated tokens of `documents`, (n,) row numbers of `examples`, epoch after epoch. Each epoch
    has a new order, which depends on `key`; with key "" the order never changes.
    """

    def __init__(self, examples: Examples, documents: Tensor, key: str):
        self.examples = examples
        self.documents = documents
        self.key = key
        # Only a row that crosses the end of an epoch needs two of them.
        self.epoch = lru_cache(1)(self.epoch)
        self.lengths = examples.bounds.diff()[documents]
        self.tokens = int(self.lengths.sum())
        self.size_bytes = int(examples.row_sizes[documents].sum())  # UTF-8 bytes of the text

    def epoch(self, number: int) -> tuple:
        """(documents in the order of this epoch, where each ends), both (n,) int64. One epoch is cached."""
        order = torch.arange(len(self.documents))
        if self.key:
            # Not through its cache, which would keep 4 orders: the epoch is cached already.
            order = permutation.__wrapped__(len(order), f"{self.key} {number}")
        return self.documents[order], self.lengths[order].cumsum(0)

    def read(self, first: int, last: int) -> list[Example]:
        """Tokens [first, last) of the stream, as one example per document. The first and the last example may
        be parts of documents.
        """
        examples = []
        while first < last:
            number, begin = divmod(first, self.tokens)
            documents, ends = self.epoch(number)
            i = int(torch.searchsorted(ends, begin, right=True))
            count = min(last - first, int(ends[i]) - begin)
            start = int(self.examples.bounds[documents[i] + 1] - ends[i]) + begin
            ids = self.examples.ids[start : start + count].int()
            examples.append(Example(ids, ids, self.examples.where[documents[i]]))
            first += count
        return examples


@dataclass(eq=False)
class StreamBatches(PackedBatches):
    """GlobalBatches whose rows are `size` tokens of a stream. Each weighted source has its own stream, and
    its share of every 1,000 rows, exact to less than one row.

    document_mask: documents in a row do not attend to each other, and their first tokens are not predicted.
    If false, a row is one text. held_out: all documents once, in their stored order, without weights.
    """

    document_mask: bool = True
    held_out: bool = False

    def __post_init__(self):
        self.multiple = self.size
        super().__post_init__()

    @property
    def weights(self) -> list[float]:
        """The weight of each source of a mixture. Empty if there is only one stream."""
        if self.held_out:
            return []
        return [origin.weight for origin in self.examples.origins if origin.weight]

    @cached_property
    def streams(self) -> list[TokenStream]:
        """One stream, or one for each weighted source. ConfigError for a source without documents."""
        numbers = self.examples.numbers
        if not self.weights:
            return [TokenStream(self.examples, numbers, "" if self.held_out else self.key)]
        streams = []
        for origin in self.examples.origins:
            documents = numbers[(numbers >= origin.first) & (numbers < origin.last)]
            check(
                len(documents),
                f"{origin.name}: no document of it is trained on (fix: more rows, or a smaller --eval_share)",
            )
            streams.append(TokenStream(self.examples, documents, f"{self.key} {len(streams)}"))
        return streams

    @cached_property
    def pattern(self) -> Tensor:
        """(PERIOD,) int64: the index of the stream that each row of a period is read from."""
        ends = torch.tensor([0.0, *(self.weights or [1.0])], dtype=torch.float64).cumsum(0)
        counts = (ends / ends[-1] * PERIOD).round().long().diff()
        check(
            counts.all(),
            f"--dataset: a source has less than 1 of {PERIOD:,} rows (fix: a larger weight)",
        )
        order = permutation(PERIOD, f"{self.key} sources")
        return torch.arange(len(counts)).repeat_interleave(counts)[order]

    def rows(self) -> int:
        """The number of rows that hold the tokens of all documents."""
        return math.ceil((sum(stream.tokens for stream in self.streams) - 1) / (self.size - 1))

    def rows_of(self, step: int) -> range:
        """The numbers of the rows of global batch `step`."""
        first = step * self.global_batch_size
        last = first + self.global_batch_size
        return range(first, min(last, self.rows()) if self.held_out else last)

    def costs(self, rows: range) -> Tensor:
        """All rows cost the same, (n,)."""
        return torch.ones(len(rows))

    def items(self, rows: list) -> list:
        """The documents, whole or in part, in these rows. Without document_mask: each row as one text."""
        examples = []
        for row in rows:
            period, place = divmod(row, PERIOD)
            source = self.pattern[place]
            stream = self.streams[source]
            of_source = self.pattern == source
            # The index of the row among the rows of its stream, x the tokens of a row.
            first = int(period * of_source.sum() + of_source[:place].sum()) * (self.size - 1)
            last = first + self.size
            parts = stream.read(first, min(last, stream.tokens) if self.held_out else last)
            if not self.document_mask:
                ids = torch.cat([part.ids for part in parts])
                parts = [Example(ids, ids, parts[0].where)]
            examples += parts
        return examples

    def batch(self, rows: list) -> Batch:
        if self.document_mask:
            return super().batch([[row] for row in rows])
        return GlobalBatches.batch(self, rows)

    def longest(self) -> int:
        """Tokens of the longest text in a row. Positions begin at 0 in each text."""
        longest = self.examples.lengths.max() if self.document_mask else self.size
        return min(int(longest), self.size)

    def steps(self, tokens: int, epochs: int) -> int:
        """The number of optimizer steps for so many predicted tokens, or, if tokens is 0, so many epochs."""
        rows = tokens / (self.size - 1) if tokens else epochs * self.rows()
        return math.ceil(rows / self.global_batch_size)

    def bits_per_byte(self) -> float:
        """The factor from a loss in nats per predicted token to bits per byte of text."""
        shares = self.pattern.bincount() / PERIOD
        bytes_per_token = 0.0
        for share, stream in zip(shares.tolist(), self.streams, strict=True):
            not_predicted = len(stream.documents) if self.document_mask else 1
            bytes_per_token += share * stream.size_bytes / (stream.tokens - not_predicted)
        return 1 / math.log(2) / bytes_per_token

    def summary(self) -> str:
        """The text that the plan prints."""
        text = f"{self.examples.summary()}; {self.rows():,} rows of {self.size} tokens"
        if self.weights:
            counts = self.pattern.bincount().tolist()
            text += f", of {PERIOD:,} {' + '.join(map(str, counts))} of the sources (below: the documents)"
        return text
