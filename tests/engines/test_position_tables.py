"""A position table is not read past its end, whatever a call is padded with."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from dflash_engines.passes.position_tables import PositionTablesPass

ROWS = 6


def learned_positions() -> ir.Model:
    """Word rows and position rows, added: GPT-2's way."""
    words, places = (
        ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(ir.DataType.FLOAT),
                 const_value=ir.Tensor(array, name=name))
        for name, array in (("words", np.arange(8, dtype=np.float32).reshape(4, 2)),
                            ("places", 100 * np.arange(2 * ROWS, dtype=np.float32).reshape(ROWS, 2)))
    )  # fmt: skip
    integers = ir.TensorType(ir.DataType.INT64)
    ids = ir.Value(name="input_ids", shape=ir.Shape(["S"]), type=integers)
    position = ir.Value(name="position", shape=ir.Shape([1]), type=integers)
    offsets = ir.Value(name="offsets", shape=ir.Shape(["S"]), type=integers)
    index = ir.node("Add", [position, offsets])
    index.outputs[0].type = integers
    word, place = ir.node("Gather", [words, ids]), ir.node("Gather", [places, index.outputs[0]])
    total = ir.node("Add", [word.outputs[0], place.outputs[0]])
    total.outputs[0].name, total.outputs[0].type = "x", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([ids, position, offsets], total.outputs, nodes=[index, word, place, total],
                     initializers=[words, places], opset_imports={"": 20})  # fmt: skip
    return ir.Model(graph, ir_version=10)


def rows(model: ir.Model, position: int, count: int) -> np.ndarray:
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    given = {"input_ids": np.ones(count, np.int64), "position": np.array([position]), "offsets": np.arange(count)}
    (found,) = session.run(None, given)
    return np.asarray(found)


def test_rows_within_the_table_are_the_same() -> None:
    model = learned_positions()
    bounded = model.clone()
    assert PositionTablesPass()(bounded).modified
    for position, count in ((0, ROWS), (2, 3), (ROWS - 1, 1)):
        assert (rows(bounded, position, count) == rows(model, position, count)).all()


def test_padding_reads_the_last_row() -> None:
    model = learned_positions()
    with pytest.raises(Exception, match="out of data bounds"):
        rows(model, ROWS - 2, 5)
    PositionTablesPass()(model)
    found = rows(model, ROWS - 2, 5)
    assert (found[2:] == found[1]).all() and (found[0] != found[1]).all()


def test_only_indices_that_grow_with_the_position_are_bounded() -> None:
    model = learned_positions()
    PositionTablesPass()(model)
    assert [node.op_type for node in model.graph].count("Min") == 1
