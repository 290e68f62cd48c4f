"""What no rule of `shrink` can know: values of single families, over the generic ones.

Keys are names of config classes. Most make a field small that has a name of its own, or fill one that the class needs
and leaves empty, or turn on what the default leaves off and real checkpoints have (mixed layer types, shared KV).
"""

from __future__ import annotations

from typing import Any

S, F, L = "sliding_attention", "full_attention", "linear_attention"
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MLA_WINDOW = {
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16,
    "swa_head_dim": 32, "swa_qk_nope_head_dim": 24, "swa_v_head_dim": 16,
}  # fmt: skip
DRAFT = {
    "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "sliding_window": 8,
    "layer_types": [S, F], "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
}  # fmt: skip
UNIFIED_DRAFT = {"model_type": "gemma4_unified_text"} | {
    name: value for name, value in DRAFT.items() if name != "model_type" and "per_layer_input" not in name
}

HINTS: dict[str, dict[str, Any]] = {
    "BambaConfig": {"mamba_d_head": 32, "attn_layer_indices": [1, 3]},
    "BltConfig": {"encoder_hash_byte_group_vocab": 256},
    "BltLocalDecoderConfig": {"hidden_size_global": 64},
    "BltLocalEncoderConfig": {"hidden_size_global": 64},
    "CohereCompassTextConfig": {"rope_parameters": {S: {**ROPE, "mrope_section": [4, 2, 2]}, F: None}},
    "DbrxAttentionConfig": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10_000.0},
    "DbrxFFNConfig": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    "DeepseekV2Config": {
        "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy", "num_experts_per_tok": 2,
    },
    "DoryConfig": {"n_input_layers": 1, "n_output_layers": 1},
    "Dots1Config": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
    "Dots3NoteTextConfig": {"head_dim": 32, **MLA_WINDOW},
    "FalconConfig": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "FalconH1Config": {"mamba_d_head": 32, "mamba_d_ssm": 128},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nTextConfig": {
        "layer_types": [S, F, S, F], "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
    },
    "Gemma4TextConfig": {"layer_types": [S, F, S, F], "num_kv_shared_layers": 2, "global_head_dim": 32},
    "Gemma4UnifiedTextConfig": {"layer_types": [S, F, S, F], "num_kv_shared_layers": 2, "global_head_dim": 32},
    "Gemma4AssistantConfig": {"text_config": DRAFT},
    "Gemma4UnifiedAssistantConfig": {"text_config": UNIFIED_DRAFT},
    "GraniteMoeHybridConfig": {"mamba_d_head": 32, "layer_types": [L, F, L, F]},
    "HunYuanDenseV1Config": {"head_dim": 16},
    "HunYuanMoEV1Config": {"head_dim": 16},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2Config": {"num_hidden_layers": 4, "layer_types": ["conv", F, "conv", F], "full_attn_idxs": [1, 3]},
    "Lfm2MoeConfig": {"layer_types": ["conv", F, "conv", F]},
    "LongcatFlashConfig": {"head_dim": 8},
    "Mamba2Config": {"num_heads": 4, "head_dim": 32},
    "MiniMaxM3VLTextConfig": {"layer_types": [F, "minimax_m3_sparse", F, "minimax_m3_sparse"]},
    "MinistralConfig": {"head_dim": 16},
    "NemotronConfig": {"head_dim": 16},
    "NemotronHConfig": {"mamba_num_heads": 4, "mamba_head_dim": 32},
    "Qwen4ExpTextConfig": {
        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16,
        "indexer_compress_ratio": 4, "ngram_vocab_size_base": 100,
    },
    "ReformerConfig": {"axial_pos_shape": (16, 32), "axial_pos_embds_dim": (16, 48)},
    "XmodConfig": {"default_language": "en_XX"},
    "ZambaConfig": {"layers_block_type": [L, L, "hybrid", "hybrid"]},
}  # fmt: skip
