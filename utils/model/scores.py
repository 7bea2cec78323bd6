"""A score of each sequence in place of logits: the head of a reward model.

The class is transformers' AutoModelForSequenceClassification with one label. Its own pooling takes the last
token that is not the pad token. This is the wrong token if sequences end with the pad token: if pad is eos,
as in most base models. Here a sequence is scored at its last token by its length, and `settle_pad` chooses a
pad token with which transformers takes the same token
(https://github.com/huggingface/transformers/issues/35352).

B batch, T tokens, D hidden, S sequences.
"""

from types import MethodType

import torch
from torch import nn

from .loss import backbone, documents_by, one_document
from .pieces import Piece, local
from .sharding import plain_name

SCORE = "score.weight"  # (1, D)


def add_scores(model: nn.Module, pad_id: int) -> nn.Module:
    """Make `model(ids, ends=ends)` return a score (S,) in fp32 at each of the positions `ends` (S,) in the
    flattened (B, T). Without ends the model answers as before. pad_id: from settle_pad; saved with the model.
    """
    model.config.get_text_config().pad_token_id = pad_id
    model.forward = MethodType(_scores_at, model)
    return model


def sequence_scores(model: nn.Module, batch) -> torch.Tensor:
    """The score (S,) of each sequence of a PairBatch on the device, in fp32; (0,) for a filler batch.

    Padding is on the right, so causal attention needs no mask.
    """
    rows, length = batch.ids.shape
    begins = torch.arange(0, rows * length, length, device=batch.ids.device)
    return model(batch.ids, ends=begins + batch.mask.sum(1) - 1)[: len(batch.keys)]


def _scores_at(self, input_ids, ends=None, **kwargs):
    if ends is None:
        return type(self).forward(self, input_ids, **kwargs)
    with documents_by(one_document):
        output = backbone(self)(input_ids, use_cache=False, **kwargs)
    hidden = output.last_hidden_state.flatten(0, 1).index_select(0, ends)  # (S, D)
    return self.score(hidden).float().sum(1)  # one label; a view would make FSDP2 warn


@torch.no_grad()
def fill_score(model: nn.Module, pieces: list[Piece], seed: int) -> str:
    """Fill a score head that the checkpoint lacks with N(0, 1 / D), the same on any number of ranks. Returns
    in words where the head comes from. The model must be loaded; pieces: from plan_pieces.
    """
    piece = next(piece for piece in pieces if piece.param == SCORE)
    if piece.info.file:
        return f"from {piece.info.file.name}"
    values = torch.empty(piece.shape)
    generator = torch.Generator().manual_seed(seed)
    values.normal_(std=piece.shape[1] ** -0.5, generator=generator)
    for name, parameter in model.named_parameters():
        if plain_name(name) == SCORE:  # with adapters there are two
            rows = local(parameter)
            rows.copy_(values[: len(rows)])  # (1, D), or none of it
    return f"new, of seed {seed}"


def settle_pad(tokenizer, last_ids: set[int]) -> None:
    """Give the tokenizer a pad token that ends no sequence: its own if it can be, else a special
    one, else the last one of the vocabulary. last_ids: the ids with which sequences end.
    """
    ids = [
        tokenizer.pad_token_id,
        tokenizer.unk_token_id,
        tokenizer.bos_token_id,
        *sorted(tokenizer.added_tokens_decoder),
        *reversed(range(len(tokenizer))),
    ]
    pad = next(token for token in ids if token is not None and token not in last_ids)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)
