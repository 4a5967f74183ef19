"""From what the tracer wrote to a graph worth keeping: folded constants, no dead nodes, weights by name."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as passes
from onnxscript import optimizer

from dflash_runtime.errors import UnsupportedModelError


def clean_graph(model: ir.Model, weight_names: dict[str, str]) -> ir.Model:
    """Folds and tidies a traced graph whose weights have no data.

    The hollow weights are lifted to graph inputs while constants are folded, so nothing tries to read them, and
    come back as initializers without data under their final names.

    Args:
        model: What `torch.onnx.export(optimize=False)` gave; changed in place.
        weight_names: Initializer name in the graph -> final name; several may share one (tied weights).

    Returns:
        The same model.

    Raises:
        UnsupportedModelError: a pass emptied the graph or left operators outside the standard domain.
    """
    graph = model.graph
    lifted = _lift_weights(graph, weight_names)
    count_before = sum(1 for _ in graph)
    optimizer.fold_constants(model, onnx_shape_inference=False, input_size_limit=4096, output_size_limit=65536)
    for tidy in (
        passes.IdentityEliminationPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass(),
        passes.ShapeInferencePass(),  # gives the values that folding made the types that later passes read
    ):
        tidy(model)
    _drop_weights(graph, lifted)
    _strip_traces(model)
    _check(model, count_before)
    return model


def _strip_traces(model: ir.Model) -> None:
    """Removes what the tracer noted about its source files, which would carry paths of the building machine."""
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    for node in model.graph:
        node.doc_string = None
        kept = {key: text for key, text in node.metadata_props.items() if key.startswith("dflash.")}
        node.metadata_props.clear()
        node.metadata_props.update(kept)
        values.extend(node.outputs)
    for value in values:
        value.metadata_props.clear()


def _lift_weights(graph: ir.Graph, weight_names: dict[str, str]) -> dict[str, ir.Value]:
    lifted: dict[str, ir.Value] = {}
    for name in list(graph.initializers):
        final = weight_names.get(name)
        if final is None:
            continue
        value = graph.initializers.pop(name)
        if final in lifted:
            value.replace_all_uses_with(lifted[final])
            continue
        value.const_value = None
        value.name = final
        lifted[final] = value
        graph.inputs.append(value)
    return lifted


def _drop_weights(graph: ir.Graph, lifted: dict[str, ir.Value]) -> None:
    kept = [value for value in graph.inputs if value.name not in lifted]
    graph.inputs.clear()
    graph.inputs.extend(kept)
    for name, value in lifted.items():
        if value.uses():
            graph.initializers[name] = value


def _check(model: ir.Model, count_before: int) -> None:
    count = sum(1 for _ in model.graph)
    if count == 0 or count > count_before:
        raise UnsupportedModelError(f"graph clean-up turned {count_before} nodes into {count}")
    foreign = sorted({f"{node.domain}::{node.op_type}" for node in model.graph if node.domain not in ("", "ai.onnx")})
    if foreign or model.functions:
        raise UnsupportedModelError(f"the traced graph uses operators outside the ONNX standard: {foreign}")
