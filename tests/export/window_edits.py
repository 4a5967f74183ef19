"""A planted fault: a graph whose attention window is a little wider or narrower."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def widen_window(model: ir.Model, width: int, change: int) -> int:
    """Changes a window wherever the tracer put it, and the note that lowerings read; returns how many constants."""
    found = 0
    for node in list(model.graph):
        if node.metadata_props.get("dflash.window") == str(width):
            node.metadata_props["dflash.window"] = str(width + change)
        for i, value in enumerate(node.inputs):
            constant = None if value is None else ir.convenience.get_const_tensor(value)
            if constant is not None and constant.size == 1 and abs(constant.numpy().item()) == width:
                number = constant.numpy() + np.sign(constant.numpy()) * change
                made = ir.node("Constant", [], {"value": ir.Tensor(np.asarray(number, dtype=np.int64))})
                model.graph.insert_before(node, made)
                node.replace_input_with(i, made.outputs[0])
                found += 1
    return found
