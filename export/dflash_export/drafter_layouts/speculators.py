"""The layout of the library speculators (read from version 0.9.0), for `dflash` and `dflash2`.

The transformer's config is nested. Taps count hidden states, of which the embedding output is number 0. Full layers
see the whole block; sliding ones do unless `sliding_window_non_causal` is false. A reduced vocabulary has a head of
its own, `d2t` with the distance from each of its ids to the target's, and `t2d` that marks the target's ids it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_export.drafter_layouts.layout import Layout
from dflash_export.drafter_layouts.zlab import ZLAB
from dflash_runtime.errors import CheckpointError, UnsupportedModelError

_ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_COPIED = (
    "block_size", "conv_group_size", "conv_kernel_size", "draft_vocab_size", "mask_token_id", "quantization_config",
    "sample_from_anchor", "selector_rank", "selector_top_k", "target_hidden_size",
)  # fmt: skip
_OF_THE_LIBRARY = (
    "architectures", "auto_map", "dtype", "torch_dtype", "speculators_config", "speculators_version",
    "speculators_model_type", "tie_word_embeddings", "transformers_version", "transformer_layer_config",
)  # fmt: skip
_TAPS, _BOTH_WAYS = "aux_hidden_state_layer_ids", "sliding_window_non_causal"


def _to_zlab(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = config["speculators_model_type"]
    if kind not in _ARCHITECTURES:
        raise UnsupportedModelError(
            f"{where} describes a speculators drafter of type {kind}. DFlash and DFlash 2 drafters can be exported."
        )
    body = config.get("transformer_layer_config")
    if not isinstance(body, dict):
        raise CheckpointError(f"{where} has no transformer_layer_config; speculators always writes one.")
    if config.get("block_size") is None:
        raise CheckpointError(f"{where} does not state block_size; speculators always writes it.")
    ids = config.get(_TAPS)
    if isinstance(ids, list) and 0 in ids:
        raise UnsupportedModelError(
            f"{where}: {_TAPS} {ids} taps the embedding output (0), which is not the output of a target layer."
        )
    facts = {key: config[key] for key in _COPIED if config.get(key) is not None}
    both_ways = {"is_causal": False} if config.get(_BOTH_WAYS, kind == "dflash2") else {}
    named = {"architectures": [_ARCHITECTURES[kind]], _TAPS: ids, "made_for": _verifier(config)}
    return {**body, **facts, **both_ways, **named}


def _verifier(config: Mapping[str, Any]) -> Any:
    facts = config.get("speculators_config")
    verifier = facts.get("verifier") if isinstance(facts, dict) else None
    return verifier.get("name_or_path") if isinstance(verifier, dict) else None


def _unknown_keys(config: Mapping[str, Any]) -> list[str]:
    return sorted(config.keys() - {*_COPIED, *_OF_THE_LIBRARY, _TAPS, _BOTH_WAYS})


SPECULATORS = Layout(
    name="speculators",
    recognises=lambda config: "speculators_model_type" in config,
    to_zlab=_to_zlab,
    unknown_keys=_unknown_keys,
    renamed=ZLAB.renamed,
    of_training=frozenset({"verifier_lm_head.weight", "verifier_norm.weight"}),
)
