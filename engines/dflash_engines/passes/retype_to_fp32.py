"""A bf16 or fp16 graph computed in fp32, where a backend has no half-precision kernels."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import HALF_TYPES
from dflash_engines.passes.graph_writing import remove_dead_nodes

_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype")


class RetypeToFp32Pass(ir.passes.InPlacePass):
    """Types every half-precision value FLOAT and drops the casts that no longer do anything.

    A weight kept in a file keeps its location, offset and byte length there but is typed FLOAT: whoever runs the
    graph binds a widened copy by name (`SessionOptions.add_external_initializers`). ONNX Runtime wants a location
    that exists; left unbound, the byte length contradicts the type and the session refuses to open. Inline constants
    are widened here.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        modified = False
        for graph in model.graphs():
            for value in (*graph.inputs, *graph.initializers.values()):
                modified |= _widen_value(value)
            for node in graph:
                widen_attributes(node)
                for output in node.outputs:
                    modified |= _widen_value(output)
        for graph in model.graphs():
            _bypass_casts(graph)
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """No half-precision value is left."""
        for graph in model.graphs():
            values = [*graph.inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs)]
            left = [value.name for value in values if value.dtype in HALF_TYPES]
            if left:
                raise ir.passes.PostconditionError(f"still half precision: {left[:5]}")


def _widen_value(value: ir.Value) -> bool:
    if value.const_value is not None and value.const_value.dtype in HALF_TYPES:
        value.const_value = _widen_tensor(value.const_value)
    if value.dtype not in HALF_TYPES:
        return False
    value.type = ir.TensorType(ir.DataType.FLOAT)
    return True


def _widen_tensor(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location, tensor.offset, tensor.length, ir.DataType.FLOAT,
            shape=tensor.shape, name=tensor.name, base_dir=tensor.base_dir,
        )
    return ir.Tensor(tensor.numpy().astype(np.float32), name=tensor.name)


def widen_attributes(node: ir.Node) -> None:
    """Types tensors and result types among a node's attributes FLOAT where they are half precision."""
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF_TYPES:
            node.attributes[name] = ir.AttrTensor(name, _widen_tensor(attribute.as_tensor()))
        elif name in _TYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.as_int() in HALF_TYPES:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))


def _bypass_casts(graph: ir.Graph) -> None:
    for node in graph:
        source = node.inputs[0] if node.inputs else None
        if node.op_type not in ("Cast", "CastLike") or source is None or source.dtype != ir.DataType.FLOAT:
            continue
        output = node.outputs[0]
        if output.dtype == ir.DataType.FLOAT and not output.is_graph_output():
            ir.convenience.replace_all_uses_with(output, source)
        elif output.dtype == ir.DataType.FLOAT and _may_take_name_of(output, source):
            name, source_name = output.name, source.name
            ir.convenience.replace_all_uses_with(output, source, replace_graph_outputs=True)
            output.name, source.name = source_name and f"{source_name}.cast", name


def _may_take_name_of(output: ir.Value, source: ir.Value) -> bool:
    # An output of the graph keeps its name; the value that takes its place must not have a name of its own to keep.
    free = source.producer() is not None and not source.is_graph_output()
    return free and not (source.name or "").startswith("hidden_states.")
