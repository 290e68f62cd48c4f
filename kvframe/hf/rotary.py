"""How far a model may go, and whether one request's length changes another one's rotary frequencies."""

from __future__ import annotations

from torch import nn

LENGTHS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx", "seq_length",
    "max_target_positions",
)  # fmt: skip
UNBOUNDED = 1 << 20  # for models that state no longest position


def longest(module: nn.Module) -> tuple[int, list[str]]:
    """`(max_len, notes)`: tokens of the longest request, and why it is less than the model's own length.

    Rotary types "dynamic" and "longrope" choose the frequencies of *all* requests of a step by the longest
    position in it (transformers' `dynamic_rope_update`). Up to the original length they are constant.
    """
    config = module.config.get_text_config() if hasattr(module.config, "get_text_config") else module.config
    stated = next((int(v) for n in LENGTHS if isinstance(v := getattr(config, n, None), int) and v > 0), None)
    max_len, notes = stated or UNBOUNDED, []
    for name, part in module.named_modules():
        kinds = getattr(part, "rope_type", None)
        kinds = kinds if isinstance(kinds, dict) else {None: kinds}
        for layer_type, kind in kinds.items():
            if not isinstance(kind, str) or not ("dynamic" in kind or kind == "longrope"):
                continue
            limit = _original(part, layer_type)
            if limit and limit < max_len:
                notes.append(
                    f"max_len is {limit} instead of {max_len}: rotary type {kind!r} ({name}, {type(part).__name__}) "
                    "changes the frequencies of every request in a step once one of them is longer than that"
                )
                max_len = limit
    return max_len, notes


def _original(part: nn.Module, layer_type: str | None) -> int | None:
    """Positions up to which the frequencies of one rotary module are constant."""
    parameters = getattr(getattr(part, "config", None), "rope_parameters", None) or {}
    if layer_type is not None:
        parameters = parameters.get(layer_type) or {}
    found = parameters.get("original_max_position_embeddings") or getattr(part, "original_max_seq_len", None)
    return int(found) if found else None
