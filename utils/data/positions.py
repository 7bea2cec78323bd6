"""Whether rows are longer than the positions that a model knows."""

from torch import nn

from ..run.errors import check, print0

ROPE_SCALES = ("linear", "dynamic", "yarn", "longrope", "su")


def check_positions(model: nn.Module, seq_len: int, *parts) -> None:
    """Refuse rows that a table of learned positions has no place for; warn of rows beyond what rotary
    positions were trained for, and say so where only --seq_len is. parts: Examples or None.

    A pack counts its positions anew with each document, so it is the longest row that counts.
    """
    config = model.config.get_text_config()
    known = known_positions(config)
    table = position_table(model, config)
    if not known or not (table or getattr(config, "rope_parameters", None)):
        return
    longest, where = 0, ""
    for part in parts:
        if part and int(part.lengths.max()) > longest:
            longest = int(part.lengths.max())
            where = part[int(part.lengths.argmax())].where
    row = f"{where} has {longest:,} tokens, and the model {known:,} positions"
    check(longest <= known or not table, f"{row}, learned ones ({table}) (fix: --seq_len {known})")
    if longest > known:
        print0(f"warning: {row} without rope scaling: it has not learned to read that far")
    elif seq_len > known:
        print0(
            f"positions the model has {known:,}, less than --seq_len; the longest row has {longest:,} tokens"
        )


def known_positions(config) -> int:
    """How many tokens the model is made for, scaled rotary positions included; 0 where none are said."""
    known = getattr(config, "max_position_embeddings", None)
    if type(known) is not int or known <= 0:
        return 0
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for kind in kinds:
        if kind.get("rope_type") in ROPE_SCALES:
            original = kind.get("original_max_position_embeddings") or known
            factor = kind.get("factor") or 1.0
            known = max(known, int(original * factor))
    return known


def position_table(model: nn.Module, config) -> str:
    """The name of an embedding of positions, "" where the model has none."""
    words = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        positions = any(part in name.rsplit(".", 1)[-1] for part in ("wpe", "pos"))
        if positions and isinstance(module, nn.Embedding) and module not in words:
            return name
    return ""
