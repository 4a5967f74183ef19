"""Zero points as TensorRT can carry them, whose DequantizeLinear takes none: as a small product of their own.

With m the middle of the range, x (s (q - z)) = x (s (q - m)) + x (s (m - z)), and s (m - z) is the same for all inputs
of a group, so the second product needs the sums of x over the groups alone. It is exact, summed in fp32.

Measured with TensorRT-RTX 1.7.1 (three products with matrices of 2048 x 2048, int4 in groups of 128, scratch memory of
an engine): 8 MiB without zero points, 8 MiB so, and 32 MiB with s (m - z) added to the weights or with q - z as int8 in
groups, which both write out the dequantised matrices on every call.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, made_by
from dflash_engines.passes.graph_writing import add_integers, emit, replace
from dflash_engines.passes.quantized_weights import QuantizedMatrix
from dflash_runtime.errors import EngineError


def add_zero_point_products(matrix: QuantizedMatrix) -> ir.Value:
    """Adds the second product to every product with a matrix that has zero points.

    Args:
        matrix: Read by products alone; its DequantizeLinear still takes the zero points.

    Returns:
        A new initializer without data, FLOAT [out, groups], which has to become (middle - zero point) * scale.

    Raises:
        EngineError: the matrix is read by something else than a product.
    """
    graph, name = matrix.node.graph, f"{matrix.values.name}.offsets"
    assert graph is not None
    groups = 1 if matrix.group_size is None else matrix.columns // matrix.group_size
    offsets = ir.Value(name=name, shape=ir.Shape([matrix.rows, groups]), type=ir.TensorType(ir.DataType.FLOAT))
    graph.initializers[name] = offsets
    turned = None
    for product in _products(matrix):
        if turned is None:
            shape = [groups, matrix.rows]
            turned = emit(product, "Transpose", [offsets], {"perm": [1, 0]}, dtype=ir.DataType.FLOAT, shape=shape)
        _add(product, turned, groups)
    return offsets


def _products(matrix: QuantizedMatrix) -> list[ir.Node]:
    """Products with the matrix, in the order of the graph."""
    found = []
    for reader in matrix.node.outputs[0].consumers():
        users = list(reader.outputs[0].consumers())
        plain = reader.op_type == "Transpose" and made_by(reader.inputs[0], "DequantizeLinear") is matrix.node
        if not plain or not all(user.op_type == "MatMul" and user.inputs[1] is reader.outputs[0] for user in users):
            raise EngineError(
                f"{matrix.values.name} is quantised with zero points and read by {reader.op_type}; TensorRT's "
                "DequantizeLinear takes none, and only a product can carry them. Build the bundle with symmetric "
                "weights (without --asymmetric), or run it with --backend ort-cpu."
            )
        found += users
    graph = matrix.node.graph
    return [node for node in graph or () if node in found]


def _add(product: ir.Node, offsets: ir.Value, groups: int) -> None:
    """Product -> product + (sums of x over the groups) offsets, added up in fp32."""
    graph, x, result = product.graph, product.inputs[0], product.outputs[0]
    assert graph is not None and x is not None
    wide, shape = ir.DataType.FLOAT, dims(x)
    if shape is None or result.dtype is None:
        raise EngineError(f"{result.name} has no known shape. Please report this graph.")
    leading = [*shape[:-1], groups]
    x32 = x if x.dtype == wide else emit(product, "Cast", [x], {"to": wide}, dtype=wide, shape=shape)
    split = add_integers(graph, [0] * (len(shape) - 1) + [groups, -1])
    grouped = emit(product, "Reshape", [x32, split], shape=[*leading, None])
    sums = emit(product, "ReduceSum", [grouped, add_integers(graph, [-1])], {"keepdims": 0}, shape=leading)
    second = emit(product, "MatMul", [sums, offsets])
    first = emit(product, "MatMul", product.inputs, dtype=result.dtype)
    first32 = first if first.dtype == wide else emit(product, "Cast", [first], {"to": wide}, dtype=wide)
    total = emit(product, "Add", [first32, second])
    if result.dtype != wide:
        total = emit(product, "Cast", [total], {"to": result.dtype}, dtype=result.dtype)
    replace(result, total)
