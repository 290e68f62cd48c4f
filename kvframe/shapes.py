"""Shapes of known models, from their public configs. No torch: planning and `list` read them without a model.

A shape is a config class of transformers and its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvframe.errors import ConfigError


@dataclass(frozen=True)
class Shape:
    """Attributes: config_class: name in transformers. values: its keyword arguments. what: one line for tables."""

    config_class: str
    values: dict[str, Any]
    what: str

    def config(self):
        """The transformers config."""
        import transformers

        return getattr(transformers, self.config_class)(**self.values)


def _llama(hidden, inner, layers, heads, kv_heads, vocab, length, theta, **more) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": length,
        "rope_theta": theta,
        "tie_word_embeddings": False,
        **more,
    }


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 500_000.0,
}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT_OSS_TINY = {
    **_llama(64, 64, 4, 8, 2, 512, 4096, 10_000.0, **ENDS),
    "head_dim": 16,
    "sliding_window": 32,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "initializer_range": 0.12,
}

SHAPES: dict[str, Shape] = {
    "tiny": Shape(
        "LlamaConfig",
        _llama(64, 128, 2, 4, 2, 512, 4096, 10_000.0, initializer_range=0.12, **ENDS),
        "2 layers, 4 query and 2 KV heads: tests and demos",
    ),
    "gpt_oss_tiny": Shape("GptOssConfig", GPT_OSS_TINY, "4 layers, windows, learned sinks, experts: tests"),
    "smollm2_135m": Shape(
        "LlamaConfig",
        _llama(576, 1536, 30, 9, 3, 49152, 8192, 100_000.0, tie_word_embeddings=True),
        "SmolLM2 135M",
    ),
    "qwen2_5_0_5b": Shape(
        "Qwen2Config",
        _llama(896, 4864, 24, 14, 2, 151936, 32768, 1_000_000.0, tie_word_embeddings=True, rms_norm_eps=1e-6),
        "Qwen2.5 0.5B",
    ),
    "qwen2_5_7b": Shape(
        "Qwen2Config",
        _llama(3584, 18944, 28, 28, 4, 152064, 32768, 1_000_000.0, rms_norm_eps=1e-6),
        "Qwen2.5 7B",
    ),
    "llama3_2_1b": Shape(
        "LlamaConfig",
        _llama(
            2048, 8192, 16, 32, 8, 128256, 131072, 500_000.0,
            head_dim=64, tie_word_embeddings=True, rope_parameters={**LLAMA3_ROPE, "factor": 32.0},
            bos_token_id=128000, eos_token_id=128001,
        ),
        "Llama 3.2 1B",
    ),
    "llama3_8b": Shape(
        "LlamaConfig",
        _llama(4096, 14336, 32, 32, 8, 128256, 8192, 500_000.0, bos_token_id=128000, eos_token_id=128001),
        "Llama 3 8B",
    ),
    "llama3_70b": Shape(
        "LlamaConfig",
        _llama(8192, 28672, 80, 64, 8, 128256, 8192, 500_000.0, bos_token_id=128000, eos_token_id=128001),
        "Llama 3 70B",
    ),
    "mistral_7b": Shape(
        "MistralConfig",
        _llama(4096, 14336, 32, 32, 8, 32000, 32768, 10_000.0, sliding_window=4096),
        "Mistral 7B v0.1 (window 4096)",
    ),
    "gemma2_2b": Shape(
        "Gemma2Config",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
        },
        "Gemma 2 2B (every second layer: window 4096)",
    ),
    "gemma3_1b": Shape(
        "Gemma3TextConfig",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 262144,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "query_pre_attn_scalar": 256,
        },
        "Gemma 3 1B (one KV head; five of six layers: window 512)",
    ),
    "gemma3_4b": Shape(
        "Gemma3TextConfig",
        {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 256,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
        "Gemma 3 4B, text (five of six layers: window 1024)",
    ),
    "deepseek_v2_lite": Shape(
        "DeepseekV2Config",
        {
            **_llama(2048, 10944, 27, 16, 16, 102400, 163840, 10_000.0, bos_token_id=100000, eos_token_id=100001),
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "topk_method": "greedy",
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 40.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 0.707,
                "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "rope_theta": 10_000.0,
            },
        },
        "DeepSeek V2 Lite (MLA, 64 experts)",
    ),
    "gpt2": Shape("GPT2Config", {}, "GPT-2 124M"),
    "gpt3_175b": Shape(
        "GPT2Config",
        {"n_embd": 12288, "n_layer": 96, "n_head": 96, "n_positions": 2048, "vocab_size": 50257},
        "GPT-3 175B (no grouped heads): for planning",
    ),
}  # fmt: skip


def find(name: str) -> Shape:
    """The shape of that name. Raises: ConfigError listing the names."""
    if name not in SHAPES:
        raise ConfigError(f"model.shape={name!r} does not exist", options=SHAPES, fix="model.shape=tiny")
    return SHAPES[name]
