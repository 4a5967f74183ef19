"""Rows of a quantised embedding table, dequantised after they are picked: the table is never dequantised whole."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import integer_attribute
from dflash_engines.passes.graph_writing import (
    MICROSOFT_DOMAIN,
    add_constant,
    add_integers,
    emit,
    remove_dead_nodes,
    replace,
)
from dflash_engines.passes.quantized_weights import QuantizedMatrix, as_bytes, find_quantized


class QuantizedRowsPass(ir.passes.InPlacePass):
    """Gather(DequantizeLinear(table), ids) -> com.microsoft GatherBlockQuantized, or plain nodes for 8 bits."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        changed = 0
        for node in list(model.graph):
            table = find_quantized(node.inputs[0]) if node.op_type == "Gather" else None
            if table is None or table.floating or integer_attribute(node, "axis", 0) != 0:
                continue
            rows = _picked_in_groups(node, table) if table.group_size is not None else picked_rows(node, table)
            replace(node.outputs[0], rows)
            changed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed > 0)


def _picked_in_groups(node: ir.Node, table: QuantizedMatrix) -> ir.Value:
    data = as_bytes(table.values, [table.rows, table.columns * table.bits // 8], ".rows")
    inputs: list[ir.Value | None] = [data, node.inputs[1], table.scales]
    if table.zero_points is not None:
        assert table.group_size is not None
        groups = table.columns // table.group_size
        if groups * table.bits % 8:
            raise ValueError(f"{table.values.name} has an odd number of groups and zero points of its own")
        inputs.append(as_bytes(table.zero_points, [table.rows, groups * table.bits // 8], ".bytes"))
    attributes = {"bits": table.bits, "block_size": table.group_size, "gather_axis": 0, "quantize_axis": 1}
    return emit(node, "GatherBlockQuantized", inputs, attributes, domain=MICROSOFT_DOMAIN, dtype=table.scales.dtype)


def picked_rows(node: ir.Node, table: QuantizedMatrix) -> ir.Value:
    """(row - zero point) * scale in standard operators, for a table with one scale a row."""
    graph, kind = node.graph, table.scales.dtype
    assert graph is not None and kind is not None
    picked = emit(node, "Gather", [table.values, node.inputs[1]], {"axis": 0}, dtype=ir.DataType.UINT8)
    wide = emit(node, "Cast", [picked], {"to": kind}, dtype=kind)
    if table.zero_points is None:
        points = add_constant(graph, f"lowered.middle.{kind.name}", np.array(128, np.float32).astype(kind.numpy()))
    else:
        bytes_ = emit(node, "Gather", [table.zero_points, node.inputs[1]], {"axis": 0}, dtype=ir.DataType.UINT8)
        upright = emit(node, "Unsqueeze", [bytes_, add_integers(graph, [-1])])
        points = emit(node, "Cast", [upright], {"to": kind}, dtype=kind)
    centred = emit(node, "Sub", [wide, points], dtype=kind)
    scales = emit(node, "Gather", [table.scales, node.inputs[1]], {"axis": 0}, dtype=kind)
    return emit(node, "Mul", [centred, emit(node, "Unsqueeze", [scales, add_integers(graph, [-1])])], dtype=kind)
