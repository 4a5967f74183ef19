"""The likeliest tokens of each row of logits as a small graph: most sampled tokens need no more of them on the host."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from dflash_engines.graph_maker import FLOAT, INT64, GraphMaker
from dflash_runtime.device_engine import row_outputs

CANDIDATES = "candidates"
"""The kind of this graph among a device's engines; it is no graph of a bundle."""


def candidates_model(vocab_size: int) -> ir.Model:
    """The graph, in operators of opset 20.

    Inputs:
        logits [1, R, V] fp32.
        temperature [1] fp32, above 0.

    Outputs, see `row_outputs`:
        candidate_ids [1, R, K] int64, candidate_values [1, R, K] fp32: the likeliest first.
        candidate_total [1, R] fp32: the sum of exp((logit - largest) / temperature) over the row; NaN where a logit is
            NaN or infinite.
    """
    graph = GraphMaker(CANDIDATES)
    logits = graph.input("logits", [1, "R", vocab_size], FLOAT)
    temperature = graph.input("temperature", [1], FLOAT)
    ids, values, total = row_outputs(vocab_size)
    count, last = ids.shape[-1], graph.constant([-1])
    best, places = graph.node("TopK", logits, graph.constant([count]), outputs=2, axis=-1, largest=1, sorted=1)
    distance = graph("Sub", logits, graph("ReduceMax", logits, last, keepdims=1))
    powers = graph("Exp", graph("Div", distance, temperature))
    broken = graph("ReduceSum", graph("Mul", logits, graph.constant(0, np.float32)), last, keepdims=0)
    graph.output(ids.name, places, [1, "R", count], INT64)
    graph.output(values.name, best, [1, "R", count], FLOAT)
    graph.output(total.name, graph("Add", graph("ReduceSum", powers, last, keepdims=0), broken), [1, "R"], FLOAT)
    return graph.model()
