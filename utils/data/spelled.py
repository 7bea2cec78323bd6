"""Encoding of texts that spell special tokens, such as "<|im_end|>", as ordinary text."""

import re


def encode_hidden(tokenizer, text: str, special_tokens: tuple, marks: re.Pattern) -> tuple:
    """(ids, offsets) of a text. Special tokens that are hidden behind marks are encoded as ordinary text; the
    others stay special tokens. special_tokens: from tokens.special_tokens.

    ValueError if the tokenizer encodes the text between special tokens differently when it is encoded alone.
    """
    special, names, _ = special_tokens
    backend = tokenizer.backend_tokenizer

    def encoded(replacement):
        """(ids, offsets); `replacement` gives the text for a match of marks."""
        ids = []
        offsets = []
        backend.encode_special_tokens = True
        begin = 0
        for match in [*special.finditer(text), None]:
            end = match.start() if match else len(text)
            piece = backend.encode(
                marks.sub(replacement, text[begin:end]), add_special_tokens=False
            )
            ids += piece.ids
            offsets += [(first + begin, last + begin) for first, last in piece.offsets]
            if match:
                ids.append(backend.token_to_id(match[0]))
                offsets.append(match.span())
                begin = match.end()
        return ids, offsets

    def harmless(match):
        return "x" * len(match[0])

    backend.encode_special_tokens = False
    whole = backend.encode(marks.sub(harmless, text), add_special_tokens=False)
    if whole.ids != encoded(harmless)[0]:
        raise ValueError(
            "its text spells a special token, which this tokenizer cannot read as text"
        )
    return encoded(lambda match: names.get(match[0], match[0]))
