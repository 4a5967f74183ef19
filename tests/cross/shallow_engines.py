"""TensorRT-RTX engines of the shallow pairs: how tests ask for them, so that what one has built serves the next."""

from __future__ import annotations

from typing import Any

import pytest
from pairs import SHALLOW_PAIRS

from dflash_engines import tensorrt_engines
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_engines.tensorrt_versions import row_for

BF16, FP16 = SHALLOW_PAIRS
KINDS = ["target", "drafter_context", "drafter", "acceptance", "candidates"]


def options(**changes: Any) -> EngineOptions:
    return EngineOptions(**{"backend": "tensorrt-rtx", "compute_capability": "8.9", "prefill_chunk_tokens": 8,
                            "block_sizes": (8,), **changes})


def take_the_form(form: str, patch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX takes the fused form; it also builds what TensorRT 10.3 is given."""
    if form == "primitive":
        patch.setattr(tensorrt_engines, "_installed", lambda backend: (row_for("tensorrt", "10.3"), "10.3"))
