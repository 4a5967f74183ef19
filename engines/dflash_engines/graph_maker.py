"""Collects the nodes of a small graph that is written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

OPSET, _IR_VERSION = 20, 10
"""What every TensorRT here takes."""
INT64, FLOAT = ir.DataType.INT64, ir.DataType.FLOAT


class GraphMaker:
    """A graph in the making; calling it adds a node."""

    def __init__(self, name: str) -> None:
        self.graph = ir.Graph([], [], nodes=[], name=name, opset_imports={"": OPSET})

    def __call__(self, operator: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Adds a node and gives its first output."""
        return self.node(operator, *inputs, **attributes)[0]

    def node(self, operator: str, *inputs: ir.Value, outputs: int = 1, **attributes: Any) -> Sequence[ir.Value]:
        """Adds a node and gives its outputs."""
        node = ir.node(operator, inputs, attributes, num_outputs=outputs)
        self.graph.append(node)
        return node.outputs

    def input(self, name: str, shape: Sequence[int | str], dtype: ir.DataType = INT64) -> ir.Value:
        """Adds an input of the graph."""
        value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
        self.graph.inputs.append(value)
        return value

    def output(self, name: str, value: ir.Value, shape: Sequence[int | str], dtype: ir.DataType = INT64) -> None:
        """Makes a value an output of the graph."""
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(dtype)
        self.graph.outputs.append(value)

    def constant(self, values: Any, dtype: Any = np.int64) -> ir.Value:
        """Adds a constant."""
        name = f"constant_{len(self.graph.initializers)}"
        tensor = ir.Tensor(np.array(values, dtype), name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def model(self) -> ir.Model:
        """The finished graph."""
        return ir.Model(self.graph, ir_version=_IR_VERSION)
