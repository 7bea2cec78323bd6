"""Rows without turns, texts and token ids -> ids and the loss mask; and for pretrain.py rows of any form ->
whole documents: all tokens trained, nothing cut, one end-of-text token after each.
"""

from array import array
from collections import Counter

from .chats import SPELLED, Chat, encode_chat, render_chats
from .formats import Messages, to_messages
from .tokens import IdsAndMask, adds_bos, encode, hidden


def add_document(part, tokenizer, row: dict, where: str, rows, form: str, notes: Counter) -> str:
    """Add a row to `part`, an encode.Part, as one document. Returns the form of the row.

    A conversation is rendered with the chat template. Text and ids are taken unchanged. The document begins
    with a BOS token if the tokenizer adds one, and ends with an end-of-text token if the tokenizer has one;
    neither is added twice. part.row_sizes gets the document's size in UTF-8 bytes, of ids without special
    tokens. ids are stored as uint16 if the tokenizer has at most 65,536 tokens; OverflowError if one of them
    has a larger id. ValueError names what is wrong with the row.
    """
    messages, tools = to_messages(row, form, notes)
    kind = messages[0]["role"]
    text = "".join(message["content"] for message in messages) if kind == "text" else ""
    if text and text == hidden(tokenizer, text):
        text.encode()  # raises for a lone surrogate
        # "fast" has no offsets: half the memory
        ids = tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    elif kind in ("text", "tokens"):
        ids, _ = encode_plain(tokenizer, messages, notes)
    else:
        for message in messages:
            message.pop("weight", None)  # all is trained
        (chat,) = render_chats(tokenizer, messages, tools, "all", notes)
        ids = encode(tokenizer, chat.text).ids
    if kind != "text":
        text = tokenizer.decode(ids, skip_special_tokens=kind == "tokens")
    if not text.strip():
        part.dropped["empty documents"] += 1
        return form
    if adds_bos(tokenizer) and ids[:1] != [tokenizer.bos_token_id]:
        ids = [tokenizer.bos_token_id, *ids]
    eos = tokenizer.eos_token_id
    if eos is not None and ids[-1:] != [eos]:
        ids = [*ids, eos]
    if not part.lengths and len(tokenizer) <= 2**16:
        part.ids = array("H")
    part.add(ids, b"", where)
    part.trained_tokens[-1] = len(ids)
    part.row_sizes.append(len(text.encode()))
    return form


def encode_plain(tokenizer, messages: Messages, notes: Counter) -> IdsAndMask:
    """(ids, mask) of a row without turns: token ids, or texts that are joined without a template.

    A text is trained if its weight is 1. The end-of-text token is trained if the last text is. A token that
    spans the end of one text and the start of the next is trained if the next text is. notes: as for
    render_chats.
    """
    last = messages[-1]
    if last["role"] == "tokens":
        return check_ids(last["content"], len(tokenizer)), last["loss_mask"]
    text = "".join(message["content"] for message in messages)
    spans = [(len(text) - len(last["content"]), len(text), False)] if last["weight"] else []
    safe = hidden(tokenizer, text)
    notes[SPELLED] += safe != text
    ids, mask = encode_chat(tokenizer, Chat(safe, spans))
    if adds_bos(tokenizer):
        ids = [tokenizer.bos_token_id, *ids]
        mask = b"\0" + mask
    if tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
        mask += bytes([last["weight"]])
    return ids, mask


def check_ids(ids: list, vocabulary_size: int) -> list:
    """The ids unchanged. ValueError if one is not in the vocabulary."""
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token < vocabulary_size:
            raise ValueError(
                f"input_ids[{i}]: {str(token)[:40]} is no token; they are 0 to {vocabulary_size - 1}"
            )
    return ids
