"""Runs a primitive graph in ONNX Runtime as a device would: caches in one block, new rows committed after the call."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import onnxruntime as ort

from dflash_engines.passes.new_rows import read_new_rows

Array = npt.NDArray[Any]


def filled_caches(model: ir.Model, capacity: int, fill: float = 0.0) -> dict[str, Array]:
    """The caches of a primitive target or drafter_context graph, those of one shape views of one block."""
    caches: dict[str, Array] = {}
    for rows in read_new_rows(model):
        shape = (len(rows.caches), 1, rows.kv_heads, capacity, rows.row_size)
        caches |= dict(zip(rows.caches, np.full(shape, np.float32(fill)), strict=True))
    return caches


class PrimitiveSession:
    """One primitive graph over `caches`, which the graph itself cannot write."""

    def __init__(self, model: ir.Model, caches: dict[str, Array]) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        data = ir.to_proto(model).SerializeToString()
        self.session = ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        self.new_rows = read_new_rows(model)
        self.caches = caches
        self.read = [value.name for value in model.graph.inputs if value.name in caches]

    def __call__(self, read_rows: int | None = None, **inputs: Array) -> dict[str, Array]:
        """Runs, commits, and returns the outputs with the caches under the names of a portable graph's outputs.

        Args:
            read_rows: Give the graph only so many rows of each cache, a smaller bucket.
            inputs: All inputs but the caches.
        """
        past = {name: np.ascontiguousarray(self.caches[name][:, :, :read_rows]) for name in self.read}
        before = {name: array.copy() for name, array in past.items()}
        names = [value.name for value in self.session.get_outputs()]
        outputs = dict(zip(names, self.session.run(names, {**inputs, **past}), strict=True))
        for name, array in before.items():
            np.testing.assert_array_equal(past[name], array)
        start = int(inputs["position"][0])
        for group in self.new_rows:
            for cache, rows in zip(group.caches, outputs.pop(group.output), strict=True):
                self.caches[cache][0, :, start : start + rows.shape[1]] = rows
        presents = {name.replace("past_key_values.", "present."): array for name, array in self.caches.items()}
        return outputs | presents
