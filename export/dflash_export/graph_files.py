"""Writes a graph into the bundle, refers it to the bundle's weights, and has the ONNX checker read it back."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
import onnx_ir as ir

from dflash_export.dequantize_nodes import add_dequantize_nodes
from dflash_export.weight_store import attach_weights, external_weight
from dflash_runtime.bundle import QuantizedWeight, WeightEntry


def write_graph(
    model: ir.Model,
    entries: dict[str, WeightEntry],
    root: Path,
    file: str,
    by_name: Collection[str] = (),
    quantized: Mapping[str, QuantizedWeight] | None = None,
) -> None:
    """Writes one graph that refers to the bundle's weights.

    Args:
        model: With hollow initializers under their names in the weight index.
        entries: The weight index.
        root: Bundle folder; weight files are already there.
        file: Name of the graph below it.
        by_name: Weights that become inputs of the graph in the file, because their files are hard links, and
            onnx.checker, onnx.load and onnx_ir follow no path to one.
        quantized: The weights that are held as small integers; the graph gets the nodes that give their values back.

    Raises:
        CheckpointError: a weight is missing or does not fit.
    """
    add_dequantize_nodes(model, quantized or {}, entries)
    attach_weights(model, entries, root)
    _make_inputs(model.graph, by_name)
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


def _make_inputs(graph: ir.Graph, names: Collection[str]) -> None:
    for name in [name for name in graph.initializers if name in names]:
        value = graph.initializers.pop(name)
        value.const_value = None
        graph.inputs.append(value)


def load_graph(root: Path, entries: Mapping[str, WeightEntry], file: str) -> ir.Model:
    """Reads a graph of the bundle; weights it takes by name refer to their files again.

    Args:
        root: Bundle folder.
        entries: The weight index.
        file: Name of the graph below it.
    """
    model = ir.load(root / file)
    graph = model.graph
    for value in [value for value in graph.inputs if value.name in entries]:
        graph.inputs.remove(value)
        name = str(value.name)
        value.const_value = external_weight(name, entries[name], root)
        graph.initializers[name] = value
    return model


def weights_by_name(root: Path, entries: Mapping[str, WeightEntry], file: str) -> frozenset[str]:
    """The weights a graph file takes as inputs."""
    return frozenset(str(value.name) for value in ir.load(root / file).graph.inputs if value.name in entries)
