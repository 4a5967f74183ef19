"""A bf16 graph computed in fp16, or the other way round; what the graph computes in fp32 stays fp32."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_engines.passes.graph_reading import HALF_TYPES

_TYPE_ATTRIBUTES = ("to", "dtype", "output_datatype", "output_dtype", "softmax_precision")


class RetypeHalfPass(ir.passes.InPlacePass):
    """Types every half-precision value `half`.

    A weight in a file keeps its place there and is only typed anew: whoever loads it converts it. Constants beyond
    the range of fp16 (masks) become its largest finite number.
    """

    def __init__(self, half: ir.DataType) -> None:
        super().__init__()
        if half not in HALF_TYPES:
            raise ValueError(f"{half} is not a half-precision type")
        self.half = half
        self._others = frozenset(HALF_TYPES) - {half}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        modified = False
        for graph in model.graphs():
            for value in (*graph.inputs, *graph.initializers.values()):
                modified |= self._retype(value)
            for node in graph:
                self._retype_attributes(node)
                for output in node.outputs:
                    modified |= self._retype(output)
        return ir.passes.PassResult(model, modified)

    def ensures(self, model: ir.Model) -> None:
        """One half-precision type is left."""
        for graph in model.graphs():
            values = [*graph.inputs, *graph.initializers.values(), *(o for node in graph for o in node.outputs)]
            left = [value.name for value in values if value.dtype in self._others]
            if left:
                raise ir.passes.PostconditionError(f"not {self.half}: {left[:5]}")

    def _retype(self, value: ir.Value) -> bool:
        if value.const_value is not None and value.const_value.dtype in self._others:
            value.const_value = self._tensor(value.const_value)
        if value.dtype not in self._others:
            return False
        value.type = ir.TensorType(self.half)
        return True

    def _tensor(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if isinstance(tensor, ir.ExternalTensor):
            return ir.ExternalTensor(
                tensor.location, tensor.offset, tensor.length, self.half,
                shape=tensor.shape, name=tensor.name, base_dir=tensor.base_dir,
            )  # fmt: skip
        wide = tensor.numpy().astype(np.float32)
        if self.half == ir.DataType.FLOAT16:
            largest = float(np.finfo(np.float16).max)
            wide = np.clip(wide, -largest, largest)
        return ir.Tensor(wide.astype(self.half.numpy()), name=tensor.name)

    def _retype_attributes(self, node: ir.Node) -> None:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in self._others:
                node.attributes[name] = ir.AttrTensor(name, self._tensor(attribute.as_tensor()))
            elif name in _TYPE_ATTRIBUTES and _names_type(attribute, self._others):
                node.attributes[name] = ir.AttrInt64(name, int(self.half))


def _names_type(attribute: ir.Attr, types: frozenset[ir.DataType]) -> bool:
    return attribute.type == ir.AttributeType.INT and attribute.as_int() in types
