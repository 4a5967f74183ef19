"""Queries, keys and values that a model computes as one and then cuts apart, left whole."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from dflash_engines.passes.graph_reading import dims, integer_attribute, integers, made_by
from dflash_engines.passes.graph_writing import MICROSOFT_DOMAIN, remove_dead_nodes


class UncutRowsPass(ir.passes.InPlacePass):
    """Three Slice, or a Split, of one value [1, S, N] -> none: GroupQueryAttention reads the value as it is."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """See the class."""
        changed = 0
        for kernel in model.graph:
            parts = kernel.inputs[:3]
            if kernel.op_type != "GroupQueryAttention" or kernel.domain != MICROSOFT_DOMAIN or None in parts:
                continue
            whole = _of_split(parts) or _of_slices(parts)
            if whole is not None:
                for index, value in enumerate((whole, None, None)):
                    kernel.replace_input_with(index, value)
                changed += 1
        remove_dead_nodes(model)
        return ir.passes.PassResult(model, changed > 0)


def _of_split(parts: Sequence[ir.Value | None]) -> ir.Value | None:
    """The value of which `parts` are all pieces, in their order."""
    split = made_by(parts[0], "Split")
    if split is None or list(parts) != list(split.outputs) or len(dims(split.inputs[0]) or ()) != 3:
        return None
    return split.inputs[0] if integer_attribute(split, "axis", 0) in (2, -1) else None


def _of_slices(parts: Sequence[ir.Value | None]) -> ir.Value | None:
    """The value of which `parts` are slices that follow each other from its first column to its last."""
    first = made_by(parts[0], "Slice")
    source = None if first is None else first.inputs[0]
    shape, end = dims(source), 0
    for part in parts:
        cut, width = made_by(part, "Slice"), (dims(part) or [""])[-1]
        if cut is None or cut.inputs[0] is not source or len(cut.inputs) < 4 or not isinstance(width, int):
            return None
        steps = integers(cut.inputs[4]) if len(cut.inputs) > 4 else [1]
        if integers(cut.inputs[1]) != [end] or integers(cut.inputs[3]) not in ([2], [-1]) or steps != [1]:
            return None
        end += width
    return source if shape is not None and len(shape) == 3 and shape[2] == end else None
