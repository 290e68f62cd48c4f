"""A tiny config of any architecture: its own default config, with every size replaced by a small one.

Names say what a size is (`hidden_size`, `n_embd`, `num_key_value_heads`, `kv_lora_rank`, ...), so one table of patterns
serves all. What it cannot know is in `hints`.

Lists with one entry per layer are cut to a few layers that keep what differs between them. From twelve layers

    layer_types      s s s f s s s f s s s f       (s: sliding, f: full)
    mlp_layer_types  d d m m m m m m m m m m       (d: dense, m: mixture of experts)

these four remain: every pair that differs once, and more from the front until there are enough.

    layers 0 1 2 3   s s s f  with  d d m m
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from kvframe.testing.coverage.hints import HINTS

VOCAB = 256
LAYERS = 4  # enough for two window and two full layers
MOST_LAYERS = 6  # where more kinds of layers differ
POSITIONS = 512
ORIGINAL = 32  # positions before what scales with them begins to
WINDOW = 8
SPECIAL = 240  # ids from here on may be image, audio, ... tokens: prompts stay below
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BASE = ("transformers_version", "architectures", "id2label", "label2id", "dtype", "problem_type")

# The first pattern that matches the whole name decides; a size is never made larger than it is.
SIZES: tuple[tuple[str, int], ...] = (
    (r".*vocab_size|.*hash_byte_group_vocab|vocab_size_per_layer_input|num_centroids", VOCAB),
    (r".*(token_id|token_index)", SPECIAL),
    (r"original_max_position_embeddings|log_scaling_n_floor|floor_scale", ORIGINAL),
    (r".*max_position_embeddings|n_positions|n_ctx|max_.*(seq_len|positions)", POSITIONS),
    (r"context_length|model_max_length|keep_window_size", POSITIONS),
    (r"num_hidden_layers|n_layers?|num_(..coder_)?layers|..coder_layers|depth", LAYERS),
    (r".*(sliding|attention|local).*(window|window_size|window_len|chunk_size)|window_size", WINDOW),
    (r"local_attention|(mamba_)?chunk_size|.*attn_chunk_length", WINDOW),
    (r".*(key_value_heads|kv_heads)|num_query_groups|linear_num_key_heads", 2),
    (r"n_heads?|num_heads|.*attention_heads(_per_layer)?|index.*n_heads", 4),
    (r"linear_num_(value_)?heads|.*mamba.*heads", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts", 2),
    (r"n_group|num_expert_group|mamba_n_groups|n_groups", 2),
    (r"(n_routed_|num_local_|moe_num_|num_)experts|zero_expert_num", 4),
    (r"topk_group|.*shared_experts|first_k_dense_replace|num_dense_layers|max_window_layers", 1),
    (r"rotary_dim|qk_rope_head_dim", 8),
    (r".*head_dim|kv_channels|dim_head|attention_head_size|d_head|d_kv|.*_rank|hc_lowrank", 16),
    (r"d_rel|rel_extent|index.*topk.*|.*state_size|.*d_state|index_block_size", 8),
    (r".*(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|feed_forward_size|prompt_mid_dim)", 96),
    (r"dim_ff|dff|d_inner", 96),
    (r".*(hidden_size|d_model|d_ff|n_embd|emb_dim|embedding_dim|proj_dim|embedding_size|embed_dim)", 64),
    (r"lru_width|dim_model_base", 64),
)


def tiny_config(config_class: type, **options):
    """An instance of `config_class` with small sizes.

    Args:
        options: values that replace all others.
    Raises: whatever the class says of values that do not fit together.
    """
    hints = HINTS.get(config_class.__name__, {})
    return config_class(**(shrunk(defaults(config_class, hints)) | hints | options))


def defaults(config_class: type, hints: Mapping[str, Any]) -> dict[str, Any]:
    """What the class says without arguments (with the hints, where its own default is not valid).

    A number that it computes when none is given is left to it. Not so lists, and the number of KV heads, which would
    be that of all heads.
    """
    try:
        config = config_class()
    except Exception:
        config = config_class(**hints)
    values = {}
    for name, parameter in inspect.signature(config_class).parameters.items():
        held = getattr(config, "attribute_map", {}).get(name, name)
        if name in BASE or held not in vars(config):
            continue
        value = vars(config)[held]
        computed = parameter.default is None and not isinstance(value, list | tuple | dict)
        if not computed or hasattr(value, "to_dict") or "key_value_heads" in name or name in (*ENDS, "sliding_window"):
            values[name] = value
    return values


def shrunk(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same names with small values; configs within are shrunk, too."""
    kept = layers_kept(values)
    found = {name: _value(name, value, kept) for name, value in values.items()}
    found |= {name: True for name in ("is_decoder", "use_sliding_window") if name in found}
    found |= {name: 2 for name, value in found.items() if "key_value_heads" in name and value is None}
    if "sliding_window" in found:
        found["sliding_window"] = WINDOW
        if set(found.get("layer_types") or ()) == {"full_attention"}:  # a window that no layer would have
            found["layer_types"] = ["sliding_attention", "full_attention"] * (len(kept[0]) // 2)
    if isinstance(found.get("kv_lora_rank"), int):  # every query head has keys of its own, made from one latent vector
        found |= {name: found["num_attention_heads"] for name in found if "key_value_heads" in name}
    return found


def _value(name: str, value: Any, kept: tuple[list[int], int] | None):
    if name in ENDS:
        return ENDS[name]
    if hasattr(value, "to_dict"):
        return tiny_config(type(value))
    if isinstance(value, dict):
        return {key: _value(key, item, None) for key, item in value.items()}
    if isinstance(value, list | tuple):
        chosen = [value[i] for i in kept[0]] if kept and len(value) == kept[1] else value
        return type(value)(_value(name, item, None) for item in chosen)
    if kept and name == "num_hidden_layers":
        return len(kept[0])
    return _size(name, value)


def _size(name: str, value: Any):
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    return next((min(value, small) for pattern, small in SIZES if re.fullmatch(pattern, name)), value)


def layers_kept(values: Mapping[str, Any]) -> tuple[list[int], int] | None:
    """`(indices, total)` of the layers that remain; None where the config has no list per layer."""
    total = values.get("num_hidden_layers")
    per_layer = [v for v in values.values() if isinstance(v, list | tuple) and len(v) == total]
    if not isinstance(total, int) or not per_layer:
        return None
    kinds: dict[tuple, int] = {}
    for i, kind in enumerate(zip(*per_layer)):
        kinds.setdefault(kind, i)
    chosen = list(kinds.values())[:MOST_LAYERS]
    rest = [i for i in range(total) if i not in chosen]
    return sorted(chosen + rest[: max(LAYERS - len(chosen), 0)]), total
