"""Tiny models of many architectures, built from configs: nothing is downloaded.

Each is a few layers in fp32 with weights large enough that the two best logits are rarely close. ARCHS must work, and
CHUNKED too, whose masks only the `reference` kernel knows; REFUSED must be refused by the probe or by verification.
"""

from __future__ import annotations

import torch
from torch import nn

VOCAB = 256
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]

# name -> (config class, model class, options over COMMON; None takes an option of COMMON away)
TABLE: dict[str, tuple[str, str, dict]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 8}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": MIXED,
            "sliding_window": 8,
            "query_pre_attn_scalar": 6,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"num_hidden_layers": 4, "layer_types": MIXED, "sliding_window": 8, "query_pre_attn_scalar": 6},
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": MIXED,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 2048,
            "n_inner": 64,
            "vocab_size": VOCAB,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "head_dim": None,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
        },
    ),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            "num_hidden_layers": 4,
            "layer_types": MIXED,
            "sliding_window": 8,
            "num_kv_shared_layers": 2,
            "intermediate_size": [64] * 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            "num_hidden_layers": 4,
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 64,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "no_rope_layers": [1, 1, 1, 0],
            "floor_scale": 16,
        },
    ),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "head_dim": None},
    ),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"n_head": 4, "n_layer": 2}),
    "mpt": ("MptConfig", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 2048}),
    "mamba": ("MambaConfig", "MambaForCausalLM", {"state_size": 4}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 2,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
    ),
}
CHUNKED = ("llama4",)
REFUSED = ("falcon", "bloom", "mpt", "mamba", "lfm2", "qwen3_next")
ARCHS = tuple(name for name in TABLE if name not in (*CHUNKED, *REFUSED))
ONLY_OWN = {"gpt2", "mpt"}  # configs with names of their own for sizes


def tiny_model(arch: str, seed: int = 0, **options) -> nn.Module:
    """A tiny causal LM in fp32, eval mode, with seeded weights.

    Args:
        arch: one of ARCHS, CHUNKED or REFUSED. options: config values that replace the table's.
    Raises: KeyError naming the valid names.
    """
    import transformers

    if arch not in TABLE:
        raise KeyError(f"no tiny model {arch!r}; valid: {', '.join(TABLE)}")
    config_name, model_name, own = TABLE[arch]
    values = {**({} if arch in ONLY_OWN else COMMON), **own, **options}
    config = getattr(transformers, config_name)(**{k: v for k, v in values.items() if v is not None})
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = getattr(transformers, model_name)(config)
    spread(module, seed)
    return module.eval()


def spread(module: nn.Module, seed: int = 0) -> None:
    """Redraws all weights so that signals keep their size through the layers and logits differ clearly.

    Matrices get a standard deviation of `1.2 / sqrt(fan in)`, other parameters (norms, biases, learned sinks)
    move by 0.2 from where they are, or by a fifth of themselves where they are small and not zero. Embeddings have a
    standard deviation of 1.
    """
    draws = torch.Generator().manual_seed(seed)
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=draws, dtype=torch.float32)
            if id(parameter) in tables:
                parameter.copy_(noise)
            elif parameter.dim() >= 2:
                parameter.copy_(noise * (1.2 / max(parameter.shape[-1], 1) ** 0.5))
            else:
                size = float(parameter.nan_to_num_().clamp_(-3, 3).square().mean().sqrt())
                parameter.add_(noise * (0.2 * min(size, 1.0) if size else 0.2))
        for part in module.modules():
            if isinstance(getattr(part, "sinks", None), nn.Parameter):
                part.sinks.copy_(torch.randn(part.sinks.shape, generator=draws) + 1.0)
