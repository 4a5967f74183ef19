"""Relatives of DFlash that this exporter does not serve, told apart by config keys and tensor names.

They load as plain DFlash with parts silently skipped, and then only acceptance suffers; so they are refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dflash_export.quantized_names import refuse_unexplained_parts
from dflash_runtime.errors import CheckpointError, UnsupportedModelError

PLAIN_ARCHITECTURE, DFLASH2_ARCHITECTURE = "DFlashDraftModel", "DFlash2DraftModel"
_AUTOMODEL = "Qwen3DFlashDraftModel"  # NeMo Automodel's name for the same module and layout
SERVED = "DFlash and DFlash 2 drafters can be exported."

_LAGUNA = "a Laguna drafter (fused qkv_proj, g_proj gate, one norm per tap)"
_EXTRA_HEADS = "a Domino, DSpark or JetSpec drafter (extra heads over the DFlash body)"
_SINKS = "a drafter with attention sinks (attention_sink_bias)"
_ANCHOR = "a drafter whose anchor slot predicts too"

_BY_TENSOR: tuple[tuple[tuple[str, ...], str], ...] = (
    (("markov_", "prefix_gru.", "embed_proj.", "confidence_", "logit_head."), _EXTRA_HEADS),
    (("qkv_proj", ".g_proj", "aux_hidden_norms"), _LAGUNA),
    (("attention_sink_bias", ".sinks"), _SINKS),
    (("mask_hidden", "mask_embedding"), "a drafter with a learned mask embedding"),
)
_DFLASH2_KEYS = ("selector_top_k", "selector_rank", "conv_kernel_size")


def refuse_other_kinds(config: Mapping[str, Any], nested: Mapping[str, Any], where: str) -> str:
    """Refuses a config that describes something else than a DFlash or DFlash 2 drafter.

    Args:
        config: Content of config.json, in z-lab's spelling.
        nested: Its `dflash_config`, {} when absent.
        where: Path of the file, for messages.

    Returns:
        The architecture: `DFlashDraftModel` or `DFlash2DraftModel`.

    Raises:
        UnsupportedModelError: naming the kind.
        CheckpointError: no drafter at all.
    """
    kind = _kind_by_config(config, nested)
    if kind is not None:
        raise UnsupportedModelError(f"{where} describes {kind}. {SERVED}")
    architectures = config.get("architectures") or []
    if architectures and not {PLAIN_ARCHITECTURE, DFLASH2_ARCHITECTURE, _AUTOMODEL} & set(architectures):
        raise UnsupportedModelError(
            f"{where} names the architecture {', '.join(map(str, architectures))}, and a DFlash drafter is a "
            f"{PLAIN_ARCHITECTURE} or {DFLASH2_ARCHITECTURE}. Give the drafter's folder or id, not the target's."
        )
    if not architectures and not nested and "target_layer_ids" not in config:
        raise CheckpointError(
            f"{where} has neither architectures [{PLAIN_ARCHITECTURE!r}] nor a dflash_config; it is no DFlash drafter."
        )
    # Tools that re-save a checkpoint have been seen to write the plain architecture over DFlash 2.
    selects = any(nested.get(key, config.get(key)) is not None for key in _DFLASH2_KEYS)
    return DFLASH2_ARCHITECTURE if selects or DFLASH2_ARCHITECTURE in architectures else PLAIN_ARCHITECTURE


def _kind_by_config(config: Mapping[str, Any], nested: Mapping[str, Any]) -> str | None:
    def value(key: str) -> Any:
        return nested.get(key, config.get(key))

    architectures = " ".join(map(str, config.get("architectures") or []))
    projector = value("projector_type")
    model_type = str(config.get("model_type", ""))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    partial = value("partial_rotary_factor") or (rope.get("partial_rotary_factor") if isinstance(rope, dict) else None)
    kinds: list[tuple[bool, str]] = [
        (projector not in (None, "dflash", "dflash2"), f"a {projector} drafter (dflash_config.projector_type)"),
        (
            "DSparkModel" in architectures and not value("markov_rank") and not value("enable_confidence_head"),
            f"DeepSpec's DFlash, {_ANCHOR} ({architectures})",
        ),
        (any(k in architectures for k in ("Domino", "DSpark", "JetSpec")), _EXTRA_HEADS),
        (bool(value("causal_head")), "a JetSpec drafter (causal_head)"),
        (bool(value("sample_from_anchor")), f"{_ANCHOR} (sample_from_anchor)"),
        (bool(value("shift_label")), f"{_ANCHOR} (shift_label)"),
        ("laguna" in (model_type + architectures).lower(), _LAGUNA),
        (model_type.startswith("gemma4"), "a Gemma 4 shaped drafter (model_type gemma4)"),
        (bool(value("attention_sink_bias")), _SINKS),
        (value("attention_value_scale") not in (None, 1, 1.0), "a drafter with attention_value_scale"),
        (partial not in (None, 1, 1.0), f"a drafter with partial rotary embedding (partial_rotary_factor {partial})"),
        (
            False in (value("is_neox_style"), value("rope_is_neox_style")),
            "a drafter with interleaved rotary embedding (is_neox_style false)",
        ),
    ]
    return next((name for found, name in kinds if found), None)


def refuse_foreign_tensors(names: Collection[str], where: str) -> None:
    """Refuses weights that only another kind of drafter has, whatever its config says.

    Args:
        names: Tensor names of the checkpoint.
        where: The checkpoint, for messages.

    Raises:
        UnsupportedModelError: naming the kind and the tensor.
        CheckpointError: parts of quantised weights that the config does not explain.
    """
    for name in sorted(names):
        for marks, kind in _BY_TENSOR:
            if any(name.startswith(mark) or f".{mark.lstrip('.')}" in f".{name}" for mark in marks):
                raise UnsupportedModelError(f"{where} holds {name}, which belongs to {kind}. {SERVED}")
    refuse_unexplained_parts(names, where)
