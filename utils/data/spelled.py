"""Encoding of texts that spell special tokens, such as "<|im_end|>", as ordinary text."""

import re


def encode_hidden(
    tokenizer, text: str, special_tokens: tuple, marks: re.Pattern
) -> tuple[list[int], list[tuple[int, int]]]:
    """(ids, offsets) of a text. Special tokens that are hidden behind marks are encoded as ordinary text; the
    others stay special tokens. special_tokens: from tokens.special_tokens.

    ValueError if the tokenizer encodes the text between special tokens differently when it is encoded alone.
    """
    special, names, _ = special_tokens
    backend = tokenizer.backend_tokenizer

    def read(shown):
        ids = []
        offsets = []
        backend.encode_special_tokens = True
        begin = 0
        for found in [*special.finditer(text), None]:
            end = found.start() if found else len(text)
            piece = backend.encode(marks.sub(shown, text[begin:end]), add_special_tokens=False)
            ids += piece.ids
            offsets += [(first + begin, last + begin) for first, last in piece.offsets]
            if found:
                ids.append(backend.token_to_id(found[0]))
                offsets.append(found.span())
                begin = found.end()
        return ids, offsets

    def harmless(found):
        return "x" * len(found[0])

    backend.encode_special_tokens = False
    if backend.encode(marks.sub(harmless, text), add_special_tokens=False).ids != read(harmless)[0]:
        raise ValueError(
            "its text spells a special token, which this tokenizer cannot read as text"
        )
    return read(lambda found: names.get(found[0], found[0]))
