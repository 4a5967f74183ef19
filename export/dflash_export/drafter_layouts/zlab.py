"""z-lab's layout, of DFlash (arXiv 2602.06036) and DFlash 2: what `dflash` 0.1.0 loads.

SpecForge 0.2.0 and Model Optimizer 0.47.0 write it too. SpecForge's block size stands at top level. Model Optimizer
always states `dflash_config.causal`, and a window as `dflash_config.use_swa` beside layer types that are all full.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_export.drafter_layouts.layout import Layout

# Some re-saved checkpoints hold the codebooks of DFlash 2 as embedding modules.
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")

KNOWN_KEYS = frozenset(
    {
        "aux_hidden_state_layer_ids", "attention_sink_bias", "attention_value_scale", "block_size", "causal",
        "causal_head", "conv_group_size", "conv_kernel_size", "dflash_query_causal", "draft_vocab_size",
        "eagle_aux_hidden_state_layer_ids", "final_logit_softcapping", "has_embed_tokens", "input_embedding_scale",
        "is_causal", "is_neox_style", "mask_token", "mask_token_id", "num_target_layers", "output_multiplier",
        "partial_rotary_factor", "projector_type", "pure_draft_prefix_len", "rope_is_neox_style", "sample_from_anchor",
        "selector_rank", "selector_top_k", "shift_label", "swa_window_size", "target_hidden_size",
        "target_layer_ids", "use_swa",
    }
)  # fmt: skip
"""Keys of `dflash_config` that are read, or refused by name."""


def _unknown_keys(config: Mapping[str, Any]) -> list[str]:
    nested = config.get("dflash_config")
    keys = nested if isinstance(nested, dict) else {}
    return sorted(f"dflash_config.{key}" for key in keys.keys() - KNOWN_KEYS)


ZLAB = Layout(
    name="z-lab",
    recognises=lambda config: True,
    to_zlab=lambda config, where: dict(config),
    unknown_keys=_unknown_keys,
    renamed={f"{name}.weight": name for name in _CODEBOOKS},
)
