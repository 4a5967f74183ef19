"""A write of rows into a cache as ScatterND.

ONNX Runtime's TensorScatter on CUDA waits for the device on every call to check where it writes, which also rules out
CUDA graphs. ScatterND does not, and it writes in place too.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, integer_attribute
from dflash_engines.passes.graph_writing import add_constant, add_integers, emit, remove_dead_nodes, replace
from dflash_runtime.errors import EngineError


class ScatterRowsPass(ir.passes.InPlacePass):
    """TensorScatter(cache [1, heads, T, D], rows [1, heads, S, D], position) -> ScatterND (0, head, position + s)."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class.

        Raises:
            EngineError: a TensorScatter that is not of the contract's form.
        """
        places: dict[tuple[ir.Value, int], ir.Value] = {}
        scatters = [node for node in model.graph if node.op_type == "TensorScatter"]
        for node in scatters:
            heads, position = _heads_and_position(node)
            if (position, heads) not in places:
                places[position, heads] = _places(scatters[0], heads, position, node.inputs[1])
            cache, rows, _ = node.inputs
            written = emit(node, "ScatterND", [cache, places[position, heads], rows], shape=dims(cache))
            replace(node.outputs[0], written)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(scatters))


def _heads_and_position(node: ir.Node) -> tuple[int, ir.Value]:
    cache, position = dims(node.inputs[0]), node.inputs[2]
    linear = node.attributes.get_string("mode", "linear") == "linear"
    heads = None if cache is None or len(cache) != 4 else cache[1]
    along_rows = linear and integer_attribute(node, "axis", -2) in (2, -2)
    if not isinstance(heads, int) or position is None or not along_rows:
        raise EngineError(
            f"{node.outputs[0].name} is a cache of shape {cache} that is not written linearly along its rows. Build "
            "the bundle again with this version."
        )
    return heads, position


def _places(before: ir.Node, heads: int, position: ir.Value, rows: ir.Value | None) -> ir.Value:
    """INT64 [1, heads, S, 3]: where each row of each head goes."""
    graph = before.graph
    assert graph is not None and rows is not None
    zero, one = (add_constant(graph, f"lowered.number.{n}", np.array(n, np.int64)) for n in (0, 1))
    count = emit(before, "Shape", [rows], {"start": 2, "end": 3}, dtype=ir.DataType.INT64, shape=(1,))
    numbers = emit(before, "Range", [zero, emit(before, "Squeeze", [count], shape=()), one], shape=("S",))
    placed = emit(before, "Add", [numbers, position], shape=("S",))
    column = emit(before, "Reshape", [placed, add_integers(graph, [1, 1, -1, 1])], shape=(1, 1, "S", 1))
    last_axis = add_constant(graph, "lowered.row_axis", np.array([[[[0, 0, 1]]]], np.int64))
    head_numbers = np.zeros((1, heads, 1, 3), np.int64)
    head_numbers[0, :, 0, 1] = np.arange(heads)
    by_head = add_constant(graph, f"lowered.head_numbers.{heads}", head_numbers)
    return emit(before, "Add", [emit(before, "Mul", [column, last_axis]), by_head], shape=(1, heads, "S", 3))
