"""A tiny configuration of any causal language model Transformers has, for checks over all of them."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

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

_GRANITE = {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}
# What a class needs beyond the sizes, or a sub-config of it ("Class.field"); None leaves a field at its default.
OVERRIDES: dict[str, dict[str, Any]] = {
    "BltConfig": {"encoder_hash_byte_group_vocab": 64},
    "CohereCompassTextConfig": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    "DbrxConfig": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "DeepseekV4Config": {"o_groups": 2, "o_lora_rank": 16},
    "Dots1Config": {"n_shared_experts": 1},
    "Dots3NoteConfig": {"vision_config": {"adapter_out_dim": 64}, "audio_config": {"adapter_out_dim": 64}},
    "Dots3NoteConfig.text_config": {"layer_types": ["indexed_attention"] * 4, "index_topk": 8},
    "Dots3NoteTextConfig": {"layer_types": ["indexed_attention"] * 4, "index_topk": 8},
    "FalconH1Config": {"mamba_d_ssm": 128},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nConfig.text_config": {"num_kv_shared_layers": 2},
    "Gemma3nTextConfig": {"num_kv_shared_layers": 2},
    "Gemma4AssistantConfig.text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    "Gemma4UnifiedAssistantConfig.text_config": {"hidden_size_per_layer_input": 0},
    "GraniteConfig": _GRANITE,
    "GraniteMoeConfig": _GRANITE,
    "GraniteMoeSWAConfig": _GRANITE,
    "GraniteMoeSharedConfig": _GRANITE,
    "GraniteSWAConfig": _GRANITE,
    "HeliumConfig": {"head_dim": 16},
    "InklingTextConfig": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 32},
    "Inkling2LoopTextConfig": {"unpadded_vocab_size": 500, "swa_head_dim": 32},
    "Inkling2TextConfig": {"unpadded_vocab_size": 500, "swa_head_dim": 32},
    "KimiLinearConfig": {"linear_head_dim": 16, "linear_num_heads": 4},
    "Lfm2Config": {"layer_types": ["conv", "full_attention"] * 2},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"] * 2},
    "LongcatFlashConfig": {"zero_expert_num": 2, "n_routed_experts": 6},
    "RoCBertConfig": {"shape_vocab_size": 64, "pronunciation_vocab_size": 64},
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds_dim": [32, 32], "axial_pos_shape": [16, 32]},
    "XLMConfig": {"emb_dim": 64},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "Zamba2Config": {"layer_types": ["mamba", "hybrid"] * 2},
    "ZambaConfig": {"layers_block_type": ["mamba", "mamba", "hybrid", "mamba"]},
}


def tiny_config(config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """A configuration of `config_class` small enough for a check in seconds."""
    return _tiny(config_class, {}, config_class.__name__)


def _tiny(config_class: type[PreTrainedConfig], defaults: dict[str, Any], key: str) -> PreTrainedConfig:
    fields = {field.name for field in dataclasses.fields(config_class)}
    values: dict[str, Any] = {**defaults, **{name: size for name, size in SIZES.items() if name in fields}}
    if "kv_lora_rank" in fields:  # latent attention makes keys for every head
        values["num_key_value_heads"] = values["num_attention_heads"]
    overrides = OVERRIDES.get(config_class.__name__, {}) | OVERRIDES.get(key, {})
    for name, default in (getattr(config_class, "sub_configs_defaults", None) or {}).items():
        if name in overrides:
            continue
        sub_class: Any = default.config_class
        if sub_class is AutoConfig:
            sub_class = CONFIG_MAPPING[default.model_type]
        values[name] = _tiny(sub_class, default.init_kwargs or {}, f"{key}.{name}")
    values |= overrides
    return config_class(**{name: value for name, value in values.items() if value is not None})
