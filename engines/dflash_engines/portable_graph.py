"""Reads a bundle's portable graph with its weights, however the graph file refers to them."""

from __future__ import annotations

import onnx_ir as ir

from dflash_runtime.bundle import Bundle

_IR_DTYPES = {
    "F32": ir.DataType.FLOAT,
    "F16": ir.DataType.FLOAT16,
    "BF16": ir.DataType.BFLOAT16,
}


def load_portable(bundle: Bundle, file: str) -> ir.Model:
    """A graph whose weights are initializers that lie in the bundle's files; none of them is read.

    A graph file takes weights that lie in hard-linked files as inputs, by their names in the weight index.

    Args:
        bundle: The bundle.
        file: Name of the graph in it.
    """
    model = ir.load(bundle.file(file))
    graph, weights = model.graph, bundle.manifest.weights
    for value in [value for value in graph.inputs if value.name in weights]:
        graph.inputs.remove(value)
        name = str(value.name)
        entry = weights[name]
        value.const_value = ir.ExternalTensor(
            entry.file, entry.offset_bytes, entry.length_bytes, _IR_DTYPES[entry.dtype],
            shape=ir.Shape(entry.shape), name=name, base_dir=bundle.path,
        )  # fmt: skip
        graph.initializers[name] = value
    return model
