"""A tiny configuration of any causal language model Transformers has, for checks over all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedConfig

# Sizes by the name of the field; a class that lacks a field is not given it.
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size": 64,
    "d_model": 64,
    "n_embd": 64,
    "embed_dim": 64,
    "embedding_size": 64,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 128,
    "dense_intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "ffn_hidden_size": 128,
    "decoder_ffn_dim": 128,
    "encoder_ffn_dim": 128,
    "ffn_dim": 128,
    "dff": 128,
    "dim_ff": 128,
    "n_inner": 128,
    "feed_forward_size": 128,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "num_layers": 4,
    "decoder_layers": 4,
    "encoder_layers": 2,
    "num_decoder_layers": 4,
    "num_encoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "global_head_dim": 32,
    "head_dim": 32,
    "dim_head": 16,
    "kv_channels": 16,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "n_ctx": 512,
    "max_seq_len": 512,
    "sliding_window": 16,
    "attention_window_size": 16,
    "sliding_window_size": 16,
    "window_size": 16,
    "local_attention": 16,
    "attention_chunk_size": 16,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "top_k_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "prefix_dense_intermediate_size": 64,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "rotary_dim": 8,
    "query_pre_attn_scalar": 24,
    "index_head_dim": 32,
    "index_n_heads": 2,
    "mamba_d_state": 16,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_mtp_layers": 0,
    "num_nextn_predict_layers": 0,
    "d_kv": 16,
    "attention_dropout": 0.0,
}

# What a class needs beyond the sizes; None as a value leaves the field at its default.
OVERRIDES: dict[str, dict[str, Any]] = {}


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A configuration of `config_class` small enough for a check in seconds.

    Args:
        config_class: Any configuration class of Transformers.
    """
    fields = {field.name for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = {name: size for name, size in SIZES.items() if name in fields}
    for name, sub_class in (getattr(config_class, "sub_configs", None) or {}).items():
        if name in fields and hasattr(sub_class, "model_type"):
            values[name] = tiny_config(sub_class)
    values |= OVERRIDES.get(config_class.__name__, {})
    return config_class(**{name: value for name, value in values.items() if value is not None})
