"""Writes a graph into the bundle, refers it to the bundle's weights, and has the ONNX checker read it back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from dflash_export.dequantize_nodes import add_dequantize_nodes
from dflash_export.weight_store import attach_weights
from dflash_runtime.bundle import QuantizedWeight, WeightEntry


def write_graph(
    model: ir.Model,
    entries: dict[str, WeightEntry],
    root: Path,
    file: str,
    quantized: Mapping[str, QuantizedWeight] | None = None,
) -> None:
    """Writes one graph that refers to the bundle's weights.

    Args:
        model: With hollow initializers under their names in the weight index.
        entries: The weight index.
        root: Bundle folder; weight files are already there.
        file: Name of the graph below it.
        quantized: The weights that are held as small integers; the graph gets the nodes that give their values back.

    Raises:
        CheckpointError: a weight is missing or does not fit.
    """
    add_dequantize_nodes(model, quantized or {}, entries)
    attach_weights(model, entries, root)
    ir.save(model, root / file)
    used = {entries[name].file for name in model.graph.initializers if name in entries}
    if all((root / name).stat().st_nlink == 1 for name in used):
        onnx.checker.check_model(str(root / file))
        return
    # The checker refuses hard links, and until the old bundle goes its weights have two names: it gets empty files
    # of the same size beside a copy of the graph.
    with tempfile.TemporaryDirectory(dir=root, prefix=".check-") as folder:
        for name in used:
            copy = Path(folder) / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.touch()
            os.truncate(copy, (root / name).stat().st_size)
        (Path(folder) / file).write_bytes((root / file).read_bytes())
        onnx.checker.check_model(str(Path(folder) / file))
