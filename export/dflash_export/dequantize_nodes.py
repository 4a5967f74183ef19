"""Which weights of a graph can be quantised, and the standard nodes that give a quantised one its values back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from torch import Tensor

from dflash_export.tensor_files import FLOAT8
from dflash_runtime.bundle import QuantizedWeight, WeightEntry
from dflash_runtime.errors import ParityError

_VALUES = {"U4": ir.DataType.UINT4, "U8": ir.DataType.UINT8, FLOAT8: ir.DataType.FLOAT8E4M3FN}
_FLOATS = {"F32": ir.DataType.FLOAT, "F16": ir.DataType.FLOAT16, "BF16": ir.DataType.BFLOAT16}


def linear_weights(model: ir.Model, *, widened: bool = False) -> list[str]:
    """Matrices [out, in] that every reader multiplies by, or picks rows of, in the order of the graph.

    Args:
        model: A graph whose weights are hollow initializers.
        widened: Also those that a graph in half precision multiplies by in fp32.
    """

    def multiplies(node: ir.Node) -> bool:
        readers = list(node.outputs[0].consumers())
        wide = widened and node.op_type == "Cast" and bool(readers) and all(_multiplies(one) for one in readers)
        return wide or _multiplies(node)

    return [
        name
        for name, value in model.graph.initializers.items()
        if value.const_value is None
        and value.shape is not None
        and len(value.shape) == 2
        and any(multiplies(node) for node in value.consumers())
        and all(multiplies(node) or node.op_type == "Gather" for node in value.consumers())
    ]


def _multiplies(node: ir.Node) -> bool:
    """Whether a node transposes a weight for a product."""
    readers = node.outputs[0].consumers()
    return (
        node.op_type == "Transpose"
        and list(node.attributes.get_ints("perm", ())) == [1, 0]
        and bool(readers)
        and all(reader.op_type == "MatMul" and reader.inputs[1] is node.outputs[0] for reader in readers)
    )


def add_dequantize_nodes(
    model: ir.Model, quantized: Mapping[str, QuantizedWeight], entries: Mapping[str, WeightEntry]
) -> None:
    """Puts DequantizeLinear between a graph's quantised weights and their readers.

    The parts are left hollow, like all weights whose data lies in the bundle. Weights that have their node already
    are left alone.

    Args:
        model: A graph whose weights are initializers; changed in place.
        quantized: The bundle's quantised weights.
        entries: Its weight index.
    """
    graph = model.graph
    for name in [n for n in graph.initializers if n in quantized]:
        weight, facts = graph.initializers[name], quantized[name]
        integers = _VALUES[entries[name].dtype]
        if weight.dtype == integers:
            continue
        assert weight.shape is not None
        scale_type = _FLOATS[entries[facts.scales].dtype]
        first = next(node for node in graph if weight in node.inputs)
        result = ir.Value(name=f"{name}.dequantized", shape=weight.shape, type=weight.type)
        ir.convenience.replace_all_uses_with(weight, result)
        scales = _hollow(graph, facts.scales, entries[facts.scales].shape, scale_type)
        zero_points = None
        if entries[name].dtype == FLOAT8:
            pass  # zero is zero
        elif facts.zero_points is None:
            zero_points = _middle(graph, entries[facts.scales].shape, facts.bits)
        else:
            zero_points = _hollow(graph, facts.zero_points, entries[facts.zero_points].shape, integers)
        attributes: dict[str, int] = {"axis": 0}
        if facts.group_size is not None:
            attributes = {"axis": 1, "block_size": facts.group_size}
        if weight.dtype is not None and weight.dtype != scale_type:
            attributes["output_dtype"] = int(weight.dtype)
        weight.type = ir.TensorType(integers)
        inputs = [weight, scales] if zero_points is None else [weight, scales, zero_points]
        node = ir.node("DequantizeLinear", inputs, attributes, outputs=[result])
        graph.insert_before(first, node)


def fold_dequantize_nodes(model: ir.Model, quantized: Mapping[str, QuantizedWeight]) -> ir.Model:
    """Takes DequantizeLinear out of a graph whose quantised weights are given as floats, of the type it would give.

    Args:
        model: Changed in place.
        quantized: The bundle's quantised weights.

    Raises:
        ParityError: a node does not dequantise as the bundle says.
    """
    graph = model.graph
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        weight, scales, result = node.inputs[0], node.inputs[1], node.outputs[0]
        facts = None if weight is None else quantized.get(str(weight.name))
        if weight is None or scales is None or facts is None:
            continue
        group = node.attributes.get_int("block_size", 0) or None
        axis = node.attributes.get_int("axis", 1)
        if group != facts.group_size or axis != int(group is not None) or scales.name != facts.scales:
            raise ParityError(
                f"{weight.name} is dequantised with axis {axis}, groups of {group} and {scales.name}; the bundle says "
                f"groups of {facts.group_size} and {facts.scales}."
            )
        assert isinstance(weight.const_value, ir.ExternalTensor) and result.dtype is not None
        stored = weight.const_value
        weight.const_value = ir.ExternalTensor(
            stored.location, stored.offset, stored.length, result.dtype,
            shape=stored.shape, name=stored.name, base_dir=stored.base_dir,
        )  # fmt: skip
        weight.type = ir.TensorType(result.dtype)
        ir.convenience.replace_all_uses_with(result, weight)
        graph.remove(node, safe=True)
    for unread in [v for v in graph.initializers.values() if not v.uses()]:
        del graph.initializers[str(unread.name)]
    return model


def put_float_rows(model: ir.Model, name: str, rows: Tensor) -> None:
    """Puts some rows of a quantised table, as floats inside the graph, in the place of the dequantised whole.

    Args:
        model: A graph with the table's DequantizeLinear; changed in place.
        name: The table.
        rows: [n, in], converted to the type the graph computes in.
    """
    graph = model.graph
    node = next(node for node in graph if node.op_type == "DequantizeLinear" and node.inputs[0] is not None
                and node.inputs[0].name == name)
    whole = node.outputs[0]
    assert whole.dtype is not None
    tensor = ir.Tensor(rows.float().numpy().astype(whole.dtype.numpy()), name=f"{name}.rows")
    value = ir.Value(name=tensor.name, shape=tensor.shape, type=whole.type, const_value=tensor)
    graph.register_initializer(value)
    ir.convenience.replace_all_uses_with(whole, value)
    graph.remove(node, safe=True)
    for unread in [v for v in graph.initializers.values() if not v.uses()]:
        del graph.initializers[str(unread.name)]


def _hollow(graph: ir.Graph, name: str, shape: list[int], dtype: ir.DataType) -> ir.Value:
    value = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(dtype))
    graph.initializers[name] = value
    return value


def _middle(graph: ir.Graph, shape: list[int], bits: int) -> ir.Value:
    """The zero points of a symmetric weight, made in the graph; made once for each shape."""
    sizes = "x".join(str(size) for size in shape)
    name = f"zero_points.int{bits}.{sizes}"
    known = next((v for node in graph for v in node.outputs if v.name == name), None)
    if known is not None:
        return known
    middle = _constant(graph, f"zero_point.int{bits}", np.array(1 << (bits - 1), np.uint8))
    lengths = _constant(graph, f"zero_points.shape.{sizes}", np.array(shape, np.int64))
    first = graph[0]
    expand = ir.node("Expand", [middle, lengths])
    result = expand.outputs[0]
    result.shape, result.type = ir.Shape(shape), ir.TensorType(ir.DataType.UINT8)
    graph.insert_before(first, expand)
    if bits == 4:
        result.name = f"{name}.bytes"
        cast = ir.node("Cast", [result], {"to": ir.DataType.UINT4})
        result = cast.outputs[0]
        result.shape, result.type = ir.Shape(shape), ir.TensorType(ir.DataType.UINT4)
        graph.insert_before(first, cast)
    result.name = name
    return result


def _constant(graph: ir.Graph, name: str, array: npt.NDArray[Any]) -> ir.Value:
    if name not in graph.initializers:
        tensor = ir.Tensor(array, name=name)
        value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        graph.register_initializer(value)
    return graph.initializers[name]
