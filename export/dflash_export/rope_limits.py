"""Rotary embeddings whose frequencies depend on the text's length, and what a static graph can promise.

`dynamic` (NTK) and `longrope` change their frequencies while a text grows, but cached keys keep the old ones.
A graph with one set of frequencies is exact as long as the text stays in the original range; so the context is
limited to it, and beyond it the model is refused by name.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

_LENGTH_DEPENDENT = ("dynamic", "longrope")


def freeze_rope(model: nn.Module) -> None:
    """Keeps every rotary module at the frequencies of its original range."""
    module: Any
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, str) and _is_length_dependent(kind):
            module.rope_type = "default"
        elif isinstance(kind, dict):
            module.rope_type = {
                layer: "default" if _is_length_dependent(name) else name for layer, name in kind.items()
            }


def exact_context_limit(config: PreTrainedConfig) -> tuple[int, str] | None:
    """Rows up to which fixed frequencies are exact, and the name of the rule; None when there is no limit."""
    parameters = getattr(config, "rope_parameters", None) or {}
    entries: list[dict[str, Any]] = [parameters] if "rope_type" in parameters else [
        entry for entry in parameters.values() if isinstance(entry, dict)
    ]
    limits = []
    for entry in entries:
        kind = str(entry.get("rope_type", "default"))
        if "longrope" in kind:  # the other set of factors beyond the length the model was first trained at
            limits.append((int(entry["original_max_position_embeddings"]), kind))
        elif _is_length_dependent(kind):  # NTK frequencies grow beyond the configured length
            limits.append((int(config.max_position_embeddings), kind))
    return min(limits) if limits else None


def _is_length_dependent(kind: str) -> bool:
    return any(name in kind for name in _LENGTH_DEPENDENT)
