"""Writes a graph into the bundle, refers it to the bundle's weights, and has the ONNX checker read it back."""

from __future__ import annotations

import os
import tempfile
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
