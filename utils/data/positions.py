"""Whether rows have more tokens than the model has positions."""

from torch import nn

from ..run.errors import check, print0


def check_positions(model: nn.Module, seq_len: int, *parts) -> None:
    """Refuse rows that are longer than a table of learned positions. Warn of rows that are longer than rotary
    positions were trained for, and print a note where only --seq_len is. parts: Examples or None.

    In a pack the positions of each document begin at 0, so the longest row decides.
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
    lengths = f"{where} has {longest:,} tokens, and the model {known:,} positions"
    check(
        longest <= known or not table,
        f"{lengths}, learned ones ({table}) (fix: --seq_len {known})",
    )
    if longest > known:
        print0(f"warning: {lengths} without rope scaling: it was not trained on such lengths")
    elif seq_len > known:
        print0(
            f"positions the model has {known:,}, less than --seq_len; the longest row has {longest:,} tokens"
        )


def known_positions(config) -> int:
    """The most tokens that the model is made for; 0 where unknown, or rotary positions are scaled."""
    rope = getattr(config, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") not in ("default", "llama3")
    return 0 if scaled else getattr(config, "max_position_embeddings", None) or 0


def position_table(model: nn.Module, config) -> str:
    """The name of an embedding of positions, "" where the model has none."""
    token_embeddings = (model.get_input_embeddings(), model.get_output_embeddings())
    for name, module in model.named_modules():
        last_name = name.rsplit(".", 1)[-1]
        is_named_so = "wpe" in last_name or "pos" in last_name
        if is_named_so and isinstance(module, nn.Embedding) and module not in token_embeddings:
            return name
    return ""
