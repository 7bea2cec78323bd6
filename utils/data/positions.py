"""Whether rows have more tokens than the model has positions."""

import re

from torch import nn

from ..run.errors import check, print0


def check_positions(model: nn.Module, seq_len: int, *parts) -> None:
    """Refuse rows that are longer than a table of learned positions. Warn of rows that are longer than rotary
    positions were trained for, and print a note where only --seq_len is. parts: Examples or None.

    In a pack the positions of each document begin at 0, so the longest row decides.
    """
    config = model.config.get_text_config()
    known = getattr(config, "max_position_embeddings", None) or 0
    rope = getattr(config, "rope_parameters", None) or {}
    if not known or rope.get("rope_type", "default") not in ("default", "llama3"):
        return
    longest, where = 0, ""
    for part in parts:
        if part and int(part.lengths.max()) > longest:
            longest = int(part.lengths.max())
            where = part[int(part.lengths.argmax())].where
    lengths = f"{where} has {longest:,} tokens, and the model {known:,} positions"
    table = next(
        (name for name, _ in model.named_parameters() if re.search("wpe|pos(?!t)", name)), ""
    )
    check(
        longest <= known or not table,
        f"{lengths}, learned ones ({table}) (fix: --seq_len {known})",
    )
    if not rope and not table:
        return
    if longest > known:
        print0(f"warning: {lengths} without rope scaling: it was not trained on such lengths")
    elif seq_len > known:
        print0(
            f"positions the model has {known:,}, less than --seq_len; the longest row has {longest:,} tokens"
        )
