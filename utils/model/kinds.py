"""Kinds of models beside those of plain text: with a score of each sequence in place of logits, for
reward.py; and with pictures beside the text, for vision.py.
"""

from types import MethodType

import torch
from torch import Tensor, nn

from ..run.errors import check, first_five
from .loading import Piece, local_parts
from .loss import backbone, documents_by, one_document
from .sharding import PROJECTOR, cast_to, language_model, plain_name

# --- a score of each sequence: the head of a reward model
#
# The class is transformers' AutoModelForSequenceClassification with one label. Its own pooling takes the last
# token that is not the pad token. This is the wrong token if sequences end with the pad token: if pad is eos,
# as in most base models. Here a sequence is scored at its last token by its length, and `settle_pad` chooses
# a pad token with which transformers takes the same token
# (https://github.com/huggingface/transformers/issues/35352).
#
# B batch, T tokens, D hidden, S sequences, L labels: config.num_labels, 1 for a reward model.

SCORE = "score.weight"  # (L, D)


def add_scores(model: nn.Module, pad_id: int) -> nn.Module:
    """Make `model(ids, ends=ends)` return scores (S, L) in fp32 at the positions `ends` (S,) in the
    flattened (B, T). pad_id: from settle_pad; saved with the model.
    """
    model.config.get_text_config().pad_token_id = pad_id
    model.forward = MethodType(_scores_at, model)
    return model


def sequence_scores(model: nn.Module, batch) -> Tensor:
    """The scores (S, L) of the sequences of a Batch on the device, in fp32; (0, L) for a filler batch.

    Padding is on the right, so causal attention needs no mask.
    """
    rows, length = batch.ids.shape
    begins = torch.arange(0, rows * length, length, device=batch.ids.device)
    scores = model(batch.ids, ends=begins + batch.mask.sum(1) - 1)
    return scores[: 0 if batch.where == ["filler"] else None]


def _scores_at(self, input_ids, ends):
    with documents_by(one_document):
        output = backbone(self)(input_ids, use_cache=False)
    hidden = output.last_hidden_state.flatten(0, 1).index_select(0, ends)  # (S, D)
    return self.score(hidden).float()


@torch.no_grad()
def fill_score(model: nn.Module, pieces: list[Piece], seed: int) -> str:
    """Fill a score head that the checkpoint lacks with N(0, 1 / D), the same on any number of ranks. Returns
    in words where the head comes from. The model must be loaded; pieces: from plan_pieces.
    """
    piece = next(piece for piece in pieces if piece.param == SCORE)
    if piece.info.file:
        return f"from {piece.info.file.name}"
    values = torch.empty(piece.shape)
    values.normal_(std=piece.shape[1] ** -0.5, generator=torch.Generator().manual_seed(seed))
    for name, parameter in model.named_parameters():
        if plain_name(name) == SCORE:  # with adapters there are two
            for begin, rows in local_parts(parameter, piece):
                rows.copy_(values.view(-1)[begin:][: len(rows)])
    return f"new, of seed {seed}"


def settle_pad(tokenizer, last_ids: set[int]) -> None:
    """Give the tokenizer a pad token that ends no sequence: its own if it can be, else a special
    one, else the last one of the vocabulary. last_ids: the ids with which sequences end.
    """
    ids = [
        tokenizer.pad_token_id,
        *sorted(tokenizer.added_tokens_decoder),
        *reversed(range(len(tokenizer))),
    ]
    pad = next(token for token in ids if token is not None and token not in last_ids)
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(pad)


# --- the parts of a model that reads pictures: vision tower, projector, language model

PARTS = "language projector vision".split()


def part_names(model: nn.Module) -> dict:
    """The names of the model's parameters, by part. Embedding and head belong to the language model.
    Parameters outside the language model and the tower belong to the projector, as do those that
    match PROJECTOR; those for sounds, which no row has, to the tower.
    """
    text = [language_model(model), model.get_input_embeddings(), model.get_output_embeddings()]
    of_text = {p for module in text for p in module.parameters()}
    of_tower = set(model.get_encoder("image").parameters())
    names = {part: [] for part in PARTS}
    for name, parameter in model.named_parameters():
        if parameter in of_text:
            part = "language"
        elif (parameter in of_tower or "audio" in name) and not PROJECTOR.search(name):
            part = "vision"
        else:
            part = "projector"
        names[part].append(name)
    return names


def parse_parts(text: str) -> set[str]:
    """The parts of --train language,projector, or ConfigError."""
    parts = {part.strip() for part in text.split(",")}
    unknown = first_five(sorted(parts - {*PARTS}))
    check(not unknown, f"--train {text}: {unknown} is none of {', '.join(PARTS)}")
    return parts


@torch.no_grad()
def freeze_parts(model: nn.Module, train: str, dtype: torch.dtype) -> nn.Module:
    """Freeze all parts that `train` does not name, see parse_parts, in place, and cast them to `dtype`, that
    of the computation.
    """
    names = part_names(model)
    for part in names.keys() - parse_parts(train):
        for name in names[part]:
            cast_to(model.get_parameter(name).requires_grad_(False), dtype)
    return model
