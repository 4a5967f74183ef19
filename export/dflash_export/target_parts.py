"""Pieces of a bundle's target graph that can be run by themselves: one layer, the embedding, the output head.

Quantised weights are given to them as floats, computed from the bundle some rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from dflash_export.dequantize_nodes import fold_dequantize_nodes
from dflash_export.dequantized_weights import dequantized_places
from dflash_export.graph_files import load_graph
from dflash_export.graph_runner import Array
from dflash_export.parity import GraphEdit, PrecisionPasses
from dflash_export.piecewise_runner import PiecewiseRunner
from dflash_export.reference_run import Step
from dflash_export.weight_values import BundleWeights
from dflash_runtime.bundle import Manifest, StateTensor


class TargetParts:
    """Cuts `target.onnx` at its residual stream and runs what is between."""

    def __init__(self, root: Path, manifest: Manifest, passes: PrecisionPasses, capacity: int) -> None:
        """Prepares; nothing is read yet.

        Args:
            root: The bundle.
            manifest: Its manifest.
            passes: Used when the bundle is in half precision.
            capacity: Rows T of the caches.
        """
        self._root, self._manifest, self._passes, self._capacity = root, manifest, passes, capacity
        self._places = dequantized_places(root, manifest)

    def stored_layer(self, index: int) -> ir.Model:
        """One layer as it is in the file."""
        return self._between(
            [f"hidden_states.{index}", f"past_key_values.{index}.key", f"past_key_values.{index}.value"],
            [f"hidden_states.{index + 1}", f"present.{index}.key", f"present.{index}.value"],
        )

    def layer(self, index: int, edit: GraphEdit | None = None) -> ir.Model:
        """One layer computed in fp32, as it is or lowered."""
        model = self._in_fp32(self.stored_layer(index))
        return model if edit is None else edit(model)

    def run_layer(
        self, model: ir.Model, index: int, steps: list[Step], entered: list[Array], caches: Mapping[str, Array]
    ) -> list[dict[str, Array]]:
        """Runs a layer over calls, the cache moving on.

        Args:
            model: From `layer` or `stored_layer`, with an fp32 interface.
            index: Its number.
            steps: The calls.
            entered: Per call what enters the layer [1, S, H].
            caches: By name what the caches hold before the first call; empty where none is given.

        Returns:
            Outputs of each call by name, caches cut to the rows that are valid after it.
        """
        state = self._state(index)
        proto = ir.to_proto(model)
        runner = PiecewiseRunner(proto, BundleWeights(self._root, self._manifest.weights, None, self._places), state)
        pairs = zip(steps, entered, strict=True)
        calls = [self._inputs(proto, step, {f"hidden_states.{index}": residual}) for step, residual in pairs]
        results = runner.run(calls, {tensor.input: caches.get(tensor.input, self._empty(tensor)) for tensor in state})
        for step, outputs in zip(steps, results, strict=True):
            for tensor in state:
                outputs[tensor.output] = outputs[tensor.output][:, :, : step.position + len(step.ids)]
        return results

    def filled_caches(self, index: int, keys: Array, values: Array) -> dict[str, Array]:
        """Caches of a layer whose first rows are given, [1, kv_heads, P, D] each."""
        filled = {}
        for tensor, rows in zip(self._state(index), (keys, values), strict=True):
            filled[tensor.input] = self._empty(tensor)
            filled[tensor.input][:, :, : rows.shape[2]] = rows
        return filled

    def table_parts(self, inputs: list[str], output: str, table_name: str, rows: int) -> list[onnx.ModelProto]:
        """A part in fp32 that has some rows in place of a whole table, as it is and, where there is one, lowered."""
        model = self._in_fp32(self._between(inputs, [output]))
        for node in model.graph:
            for made in node.outputs:
                made.shape = None  # a sliced table makes the traced sizes wrong
        value = model.graph.initializers[table_name]
        entry = self._manifest.weights[table_name]
        shape = ir.Shape([rows, *entry.shape[1:]])
        value.shape = shape
        value.const_value = ir.ExternalTensor(
            entry.file,
            0,
            4 * math.prod(shape.numpy()),
            ir.DataType.FLOAT,
            shape=shape,
            name=table_name,
            base_dir=self._root,
        )
        lower = self._passes.lower
        return [ir.to_proto(part) for part in ([model] if lower is None else [model, lower(model)])]

    def run_table(
        self, model: onnx.ModelProto, table_name: str, table: Array, inputs: dict[str, Array]
    ) -> dict[str, Array]:
        """Runs such a part with the rows given."""
        weights = BundleWeights(self._root, self._manifest.weights, {table_name: table}, self._places)
        return PiecewiseRunner(model, weights, []).run([self._inputs(model, Step(0, [0]), inputs)])[0]

    def _state(self, index: int) -> list[StateTensor]:
        return self._manifest.target.graph.state[2 * index : 2 * index + 2]

    def _in_fp32(self, model: ir.Model) -> ir.Model:
        return model if self._manifest.precision == "fp32" else self._passes.to_fp32(model)

    def _inputs(self, model: onnx.ModelProto, step: Step, given: dict[str, Array]) -> dict[str, Array]:
        offered = {
            "input_ids": np.array([step.ids], dtype=np.int64),
            "position": np.array([step.position], dtype=np.int64),
            "logit_rows": np.arange(len(step.ids), dtype=np.int64),
            **given,
        }
        # The capacity is read off the first layer's cache, whichever layer is run.
        wanted = {value.name for value in model.graph.input}
        offered |= {t.input: self._empty(t) for t in self._manifest.target.graph.state if t.input in wanted}
        return {name: array for name, array in offered.items() if name in wanted}

    def _empty(self, tensor: StateTensor) -> Array:
        shape = [self._capacity if d == "T" else 1 if d == "B" else int(d) for d in tensor.shape]
        return np.zeros(shape, dtype=np.float32)

    def _between(self, inputs: list[str], outputs: list[str]) -> ir.Model:
        """The piece of the graph between named values; position and token ids stay inputs where needed."""
        model = load_graph(self._root, self._manifest.weights, self._manifest.target.graph.file)
        given = set(inputs)
        names = [str(v.name) for v in model.graph.inputs if v.name not in given] + inputs
        graph = ir.convenience.extract(model.graph, names, outputs)
        used = [v for v in graph.inputs if v.uses() or v.name in given]
        graph.inputs.clear()
        graph.inputs.extend(used)
        return fold_dequantize_nodes(ir.Model(graph, ir_version=model.ir_version), self._manifest.quantized)
