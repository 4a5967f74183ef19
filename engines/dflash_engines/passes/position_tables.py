"""Learned position tables end where the context ends, and an engine of fixed shape pads its last call beyond that."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_writing import add_constant, emit


class PositionTablesPass(ir.passes.InPlacePass):
    """Rows past the end of a position table read its last row instead of foreign memory.

    Only padding gets there: no call begins past the context, and what padded rows compute is thrown away.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        modified = False
        for node in list(model.graph):
            rows = _table_rows(node)
            if rows is None or not _depends_on(node.inputs[1], "position"):
                continue
            index = node.inputs[1]
            assert index is not None and index.dtype is not None
            last = add_constant(model.graph, f"lowered.last_row.{rows}", np.array(rows - 1, index.dtype.numpy()))
            node.replace_input_with(1, emit(node, "Min", [index, last], dtype=index.dtype))
            modified = True
        return ir.passes.PassResult(model, modified)


def _table_rows(node: ir.Node) -> int | None:
    table = node.inputs[0] if node.op_type == "Gather" else None
    if table is None or table.producer() is not None or table.shape is None or len(table.shape) != 2:
        return None
    rows = table.shape[0]
    return rows if isinstance(rows, int) and node.attributes.get_int("axis", 0) == 0 else None


def _depends_on(value: ir.Value | None, graph_input: str) -> bool:
    seen: set[ir.Value] = set()
    left = [value]
    while left:
        value = left.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        if value.is_graph_input() and value.name == graph_input:
            return True
        producer = value.producer()
        if producer is not None:
            left.extend(producer.inputs)
    return False
