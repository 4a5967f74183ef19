"""How the passes change a graph: new nodes, named constants, replaced values, dead nodes removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from dflash_runtime.errors import EngineError

MICROSOFT_DOMAIN = "com.microsoft"


def emit(before: ir.Node, op_type: str, inputs: Sequence[ir.Value | None],
         attributes: Mapping[str, Any] | None = None, *, domain: str = "", dtype: ir.DataType | None = None,
         shape: Sequence[int | str | None] | None = None) -> ir.Value:
    """Puts a node with one output in front of `before`.

    Args:
        before: Where in the order of nodes.
        op_type: Operator.
        inputs: Its inputs.
        attributes: Its attributes.
        domain: Domain of the operator.
        dtype: Type of the output; that of the first input by default.
        shape: Shape of the output, where it is known.

    Returns:
        The output.
    """
    node = ir.node(op_type, inputs, attributes, domain=domain)
    insert(before, node)
    output = node.outputs[0]
    first = inputs[0] if inputs else None
    if dtype is None and first is not None:
        dtype = first.dtype
    if dtype is not None:
        output.type = ir.TensorType(dtype)
    output.shape = None if shape is None else ir.Shape(shape)
    return output


def insert(before: ir.Node, node: ir.Node) -> None:
    """Puts `node` in front of `before` and declares its domain."""
    graph = before.graph
    assert graph is not None, "a pass works on nodes of a graph"
    graph.insert_before(before, node)
    if node.domain and node.domain not in graph.opset_imports:
        graph.opset_imports[node.domain] = 1


def add_constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    """A small inline initializer; asked for again by the same name, the same one."""
    known = graph.initializers.get(name)
    if known is not None:
        return known
    value = ir.Value(name=name, shape=ir.Shape(array.shape), const_value=ir.Tensor(array, name=name))
    value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
    graph.register_initializer(value)
    return value


def add_integers(graph: ir.Graph, numbers: Sequence[int]) -> ir.Value:
    """The inline INT64 list `numbers`."""
    text = "_".join(str(n).replace("-", "minus") for n in numbers)
    return add_constant(graph, f"lowered.integers.{text}", np.array(numbers, np.int64))


def replace(old: ir.Value, new: ir.Value) -> None:
    """Makes every reader of `old`, the graph's outputs included, read `new`, which takes name and shape over."""
    name = old.name
    if old.shape is not None:
        new.shape = old.shape
    if old.type is not None:
        new.type = ir.TensorType(old.dtype) if old.dtype is not None else old.type
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    if new.producer() is not None and not new.is_graph_input():
        old.name = None if name is None else f"{name}.replaced"
        new.name = name


def remove_dead_nodes(model: ir.Model) -> None:
    """Removes what nothing reads any more.

    Raises:
        EngineError: nothing would be left.
    """
    common_passes.RemoveUnusedNodesPass()(model)
    if not len(model.graph):
        raise EngineError("Lowering left an empty graph. The portable graph computes nothing; build the bundle again.")
