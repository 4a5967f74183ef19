"""Writes a graph into the bundle, refers it to the bundle's weights, and has the ONNX checker read it back."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from dflash_export.weight_store import attach_weights
from dflash_runtime.bundle import WeightEntry


def write_graph(model: ir.Model, entries: dict[str, WeightEntry], root: Path, file: str) -> None:
    """Writes one graph that refers to the bundle's weights.

    Args:
        model: With hollow initializers under their names in the weight index.
        entries: The weight index.
        root: Bundle folder; weight files are already there.
        file: Name of the graph below it.

    Raises:
        CheckpointError: a weight is missing or does not fit.
    """
    attach_weights(model, entries, root)
    ir.save(model, root / file)
    onnx.checker.check_model(str(root / file))
