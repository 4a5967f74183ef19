"""Weights as inputs of the graph: an engine without weights, which every engine on the device can share them with.

A weight comes in the type its readers want. A cast inside the graph would write out a converted copy on every call,
so the cast is dropped and the input has its type; and a tied embedding comes twice, once for its rows and once for
the head, because TensorRT-RTX 1.7.1 copies a weight that is read in two ways (`tests/cross/test_engine_sizes.py`
builds both). Both inputs are bound to the same memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import onnx_ir as ir

from dflash_engines.passes.graph_writing import remove_dead_nodes
from dflash_engines.passes.signed_weights import SIGNED_FILE
from dflash_runtime.weights import FLOAT8_TRANSPOSED, SIGNED_TRANSPOSED

_ROWS_SUFFIX = "#rows"
_SAFETENSORS_NAMES = {
    ir.DataType.FLOAT: "F32",
    ir.DataType.FLOAT16: "F16",
    ir.DataType.BFLOAT16: "BF16",
    ir.DataType.INT8: SIGNED_TRANSPOSED,
    ir.DataType.FLOAT8E4M3FN: FLOAT8_TRANSPOSED,
}


@dataclasses.dataclass(frozen=True)
class WeightInput:
    """One input that takes a weight."""

    input: str
    weight: str
    """Its name in the bundle's index."""
    dtype: str
    """What the input takes, in safetensors' spelling, `I8T` or `F8T`; the weight is converted when it is loaded."""


class WeightInputsPass(ir.passes.InPlacePass):
    """External initializers -> graph inputs; `weight_inputs` lists them after the call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_inputs: list[WeightInput] = []

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        graph = model.graph
        lifted = _weights(graph)
        for value in lifted:
            name = value.name
            assert name is not None
            value.const_value = None
            del graph.initializers[name]
            graph.inputs.append(value)
            for reading in self._by_reading(graph, value):
                if reading.uses():
                    assert reading.name is not None and reading.dtype is not None
                    self.weight_inputs.append(WeightInput(reading.name, name, _SAFETENSORS_NAMES[reading.dtype]))
                else:
                    graph.inputs.remove(reading)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, bool(lifted))

    def ensures(self, model: ir.Model) -> None:
        """No weight is left in the graph."""
        left = [v.name for v in _weights(model.graph)]
        if left:
            raise ir.passes.PostconditionError(f"weights still in the graph: {left[:5]}")

    def _by_reading(self, graph: ir.Graph, value: ir.Value) -> list[ir.Value]:
        """The weight's inputs: itself, one for each other type it is cast to, and one for reading rows."""
        inputs = [value]
        for node in [user for user in value.consumers() if user.op_type == "Cast"]:
            target = node.outputs[0]
            name = f"{value.name}#{_SAFETENSORS_NAMES[target.dtype]}" if target.dtype in _SAFETENSORS_NAMES else None
            if name is None or target.is_graph_output():
                continue
            other = next((known for known in inputs if known.name == name), None)
            if other is None:
                other = _add_input(graph, name, target.dtype, value)
                inputs.append(other)
            ir.convenience.replace_all_uses_with(target, other)
            graph.remove(node, safe=True)
        for whole in list(inputs):
            row_readers = [use for use in whole.uses() if use.node.op_type == "Gather"]
            if row_readers and len(row_readers) < len(whole.uses()):
                rows = _add_input(graph, f"{whole.name}{_ROWS_SUFFIX}", whole.dtype, whole)
                inputs.append(rows)
                for use in row_readers:
                    use.node.replace_input_with(use.idx, rows)
        return inputs


def _weights(graph: ir.Graph) -> list[ir.Value]:
    """Initializers in files, without those an engine embeds in any case."""
    stored = [v for v in graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor)]
    return [v for v in stored if v.const_value.location != SIGNED_FILE]  # type: ignore[union-attr]


def read_weight_inputs(model: ir.Model, weights: Collection[str]) -> list[WeightInput]:
    """The inputs of a model after the pass that take one of `weights`, names of the bundle's index."""
    found = []
    for value in model.graph.inputs:
        name = str(value.name)
        weight = next((n for n in (name, name.removesuffix(_ROWS_SUFFIX)) if n in weights), None)
        weight = weight or name.removesuffix(_ROWS_SUFFIX).rpartition("#")[0]
        if weight in weights and value.dtype is not None:
            found.append(WeightInput(name, weight, _SAFETENSORS_NAMES[value.dtype]))
    return found


def _add_input(graph: ir.Graph, name: str, dtype: ir.DataType | None, like: ir.Value) -> ir.Value:
    assert dtype is not None
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=like.shape)
    graph.inputs.append(value)
    return value
