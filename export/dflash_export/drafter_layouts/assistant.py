"""The layout of Transformers' DFlash assistants (model type muse_glimmer_assistant, read from version 5.24).

Everything stands at top level; block tokens see each other in every layer. Transformers' own mask shows a sliding
layer one key more at the far edge of its window than z-lab's code for the same drafters; z-lab's is followed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dflash_export.drafter_layouts.layout import Layout
from dflash_runtime.errors import CheckpointError

_MODEL_TYPE = "muse_glimmer_assistant"


def _to_zlab(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key in ("block_size", "layer_types"):
        if config.get(key) is None:
            raise CheckpointError(f"{where} does not state {key}; Transformers always writes it.")
    return {**config, "architectures": ["DFlashDraftModel"], "is_causal": False}


ASSISTANT = Layout(
    name="assistant",
    recognises=lambda config: config.get("model_type") == _MODEL_TYPE,
    to_zlab=_to_zlab,
    unknown_keys=lambda config: [],
    renamed={"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"},
)
