"""Sizes of the target that the drafters of this folder are made for."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
TARGET: dict[str, Any] = {
    **SIZES,
    "num_hidden_layers": 6,
    "vocab_size": 272,
    "tie_word_embeddings": False,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
"""Over the defaults of a Qwen3 model."""
