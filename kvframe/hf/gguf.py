"""One-time conversion of a GGUF file of the llama family into a Hugging Face folder.

Written against the `gguf` package, not against transformers' own loader, which needs `accelerate` and has changed
between the versions that kvframe supports.

llama.cpp stores the rows of the query and key projections in another order (its rotary embedding turns
neighbours `(0, 1), (2, 3), ...` where transformers turns halves `(0, D/2), (1, D/2 + 1), ...`). Per head with D = 6:

    row in the file          0  1  2  3  4  5
    row in transformers      0  3  1  4  2  5
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvframe.errors import ConfigError, MissingPackageError

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
GLOBAL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def read(path: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """`(fields, tensors)`: metadata by GGUF key, and dequantized bf16 tensors by their transformers name.

    Raises: MissingPackageError without the `gguf` package; ConfigError for another architecture.
    """
    reader, fields = _opened(path)
    from gguf.quants import dequantize

    heads, kv_heads = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in reader.tensors:
        data = torch.from_numpy(np.require(dequantize(tensor.data, tensor.tensor_type), requirements="W"))
        parts = tensor.name.split(".")
        if parts[0] == "blk" and parts[2] in ("attn_q", "attn_k"):
            data = half_order(data, heads if parts[2] == "attn_q" else kv_heads)
        tensors[_name(tensor.name)] = data.to(torch.bfloat16).contiguous()
    return fields, tensors


def header(path: Path) -> tuple[dict[str, Any], set[str]]:
    """`(fields, names of the tensors)` as `read` answers them, without the tensors. Errors as there."""
    reader, fields = _opened(path)
    return fields, {_name(tensor.name) for tensor in reader.tensors}


def _opened(path: Path):
    """gguf's reader of the file, and its fields."""
    try:
        from gguf import GGUFReader
    except ImportError:
        raise MissingPackageError(
            f"{path.name} is a GGUF file, and the package gguf is not installed", fix="pip install gguf"
        ) from None
    reader = GGUFReader(str(path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama":
        raise ConfigError(f"{path.name} has architecture {fields['general.architecture']!r}", options=["llama"])
    return reader, fields


def _name(name: str) -> str:
    """A tensor's name in transformers."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"
    return f"{GLOBAL[parts[0]]}.{parts[1]}"


def half_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows `[heads * D, in]` from llama.cpp's order to transformers' (see the module's drawing)."""
    D = weight.shape[0] // heads
    return weight.view(heads, D // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def llama_config(fields: dict[str, Any], tied: bool, eos: list[int]) -> dict[str, Any]:
    """The content of config.json."""
    heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),  # stored in fp32
        "rope_theta": fields["llama.rope.freq_base"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "torch_dtype": "bfloat16",
    }


def bpe_tokenizer(fields: dict[str, Any], individual_digits: bool):
    """The byte-level BPE tokenizer of the file, as transformers' PreTrainedTokenizerFast.

    Args:
        individual_digits: each digit is a word of its own before BPE (the file names this only as
            `tokenizer.ggml.pre`, e.g. "smollm").
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    steps = [pre_tokenizers.Digits(individual_digits=True)] if individual_digits else []
    backend.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    control = 3  # gguf.TokenType.CONTROL
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    name = {role: tokens[fields[f"tokenizer.ggml.{role}_token_id"]] for role in ("bos", "eos", "unknown", "padding")}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=name["bos"],
        eos_token=name["eos"],
        unk_token=name["unknown"],
        pad_token=name["padding"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
