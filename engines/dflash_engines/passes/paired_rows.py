"""Attention over a row alone as attention over two, so that the row says what it says inside a block, bit for bit.

ONNX Runtime's GroupQueryAttention multiplies a single row by other kernels than two and more, and their sums differ in
the last bits. Where the next product rounds its activations to int8, such a bit becomes a step of the rounding, and
another token may follow. Every other operator gives a row the same bits whatever stands beside it, as long as its
products have blocks of few inputs (measured with ONNX Runtime 1.32 on x86 with AVX-512, for 1 to 64 rows).
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, integer_attribute
from dflash_engines.passes.graph_writing import MICROSOFT_DOMAIN, add_integers, emit

_LARGEST_BLOCKS = {4: 32, 8: 64}
"""Bits -> inputs in a block up to which MatMulNBits gives a row the same bits alone and beside others."""
_OTHER_SUMS = frozenset({"Attention", "Conv", "Einsum", "FusedMatMul", "Gemm", "MatMul"})
_ROWS, _LAST, _TOTAL, _TABLES = (0, 1, 2), 5, 6, (7, 8)  # inputs of the kernel
_PAIRED = "paired_rows"


class PairedRowsPass(ir.passes.InPlacePass):
    """GroupQueryAttention of one row gets a row of zeros behind it, whose result is cut off; of more rows none.

    The row of zeros is written to the caches, where the next call overwrites it. A graph that has other reasons to
    give a row alone other bits is left as it is.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        kernels = [node for node in model.graph if _is_kernel(node)]
        if not kernels or not products_give_equal_rows(model):
            return ir.passes.PassResult(model, False)
        added = _added_rows(kernels[0])
        longer: dict[ir.Value, ir.Value] = {}
        for kernel in kernels:
            _pair(kernel, added, longer)
        return ir.passes.PassResult(model, True)


def products_give_equal_rows(model: ir.Model) -> bool:
    """Whether what is rounded to int8 has the same bits for a row alone and in a block, but for attention's kernel.

    So it is where products that round have small blocks, and no other kind of product comes before one of them. The
    head may be of another kind: nothing is rounded behind it.
    """
    differing = set[ir.Value]()
    for node in model.graph:
        reads_differing = any(value in differing for value in node.inputs)
        if node.op_type == "MatMulNBits" and node.domain == MICROSOFT_DOMAIN:
            largest = _LARGEST_BLOCKS.get(integer_attribute(node, "bits", 4), 0)
            if reads_differing or integer_attribute(node, "block_size", 0) > largest:
                return False
        elif reads_differing or node.op_type in _OTHER_SUMS:
            differing.update(node.outputs)
    return True


class _Added(NamedTuple):
    rows: ir.Value
    """Of the call, INT64 [1]."""
    pads: ir.Value
    """Nothing in front, one row behind where the call has one row: INT64 [2]."""
    number: ir.Value
    """How many are added, INT32 [1]."""
    scalar: ir.Value
    """The same, INT32 scalar."""


def _is_kernel(node: ir.Node) -> bool:
    return node.op_type == "GroupQueryAttention" and node.domain == MICROSOFT_DOMAIN


def _added_rows(kernel: ir.Node) -> _Added:
    graph, int32 = kernel.graph, ir.DataType.INT32
    assert graph is not None
    zero, two = add_integers(graph, [0]), add_integers(graph, [2])
    rows = emit(kernel, "Shape", [kernel.inputs[0]], {"start": 1, "end": 2}, dtype=ir.DataType.INT64, shape=(1,))
    added = emit(kernel, "Max", [emit(kernel, "Sub", [two, rows], shape=(1,)), zero], shape=(1,))
    pads = emit(kernel, "Concat", [zero, added], {"axis": 0}, shape=(2,))
    count = emit(kernel, "Cast", [added], {"to": int32}, dtype=int32, shape=(1,))
    return _Added(rows, pads, count, emit(kernel, "Squeeze", [count], shape=()))


def _pair(kernel: ir.Node, added: _Added, longer: dict[ir.Value, ir.Value]) -> None:
    """Lengthens what one kernel reads, and cuts its result.

    Args:
        kernel: The kernel.
        added: What is added.
        longer: What lengths and tables that other kernels read too have become.
    """
    graph = kernel.graph
    assert graph is not None
    for index, value in enumerate(kernel.inputs):
        if value is not None and index in (*_ROWS, _LAST, _TOTAL, *_TABLES):
            if value not in longer:
                longer[value] = _longer(kernel, index, value, added)
            kernel.replace_input_with(index, longer[value])
    output = kernel.outputs[0]
    readers = list(output.uses())
    cut = ir.node("Slice", [output, add_integers(graph, [0]), added.rows, add_integers(graph, [1])])
    graph.insert_after(kernel, cut)
    cut.outputs[0].type, cut.outputs[0].shape = output.type, output.shape
    output.shape = None if output.shape is None else ir.Shape([output.shape[0], _PAIRED, output.shape[2]])
    for reader, index in readers:
        reader.replace_input_with(index, cut.outputs[0])


def _longer(kernel: ir.Node, index: int, value: ir.Value, added: _Added) -> ir.Value:
    """An input of the kernel with the row that is added."""
    if index in (_LAST, _TOTAL):
        return emit(kernel, "Add", [value, added.number if index == _LAST else added.scalar], shape=dims(value))
    graph = kernel.graph
    assert graph is not None
    axis = add_integers(graph, [0 if index in _TABLES else 1])
    return emit(kernel, "Pad", [value, added.pads, None, axis])
