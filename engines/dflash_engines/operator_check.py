"""Says before a build which node a TensorRT would refuse, or would take and ignore."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from dflash_engines.tensorrt_versions import IGNORED_ATTENTION_INPUTS, VersionRow
from dflash_runtime.errors import EngineError


def check_graph(model: ir.Model, row: VersionRow) -> None:
    """Opset, operators and attention inputs of a lowered graph against a row of the version table.

    Raises:
        EngineError: the graph holds what the versions of the row do not take.
    """
    check_opset(model, row.highest_opset)
    check_operators(model, row.operators)
    check_attention_inputs(model)


def check_opset(model: ir.Model, highest_opset: int) -> None:
    """The graph's ONNX opset must not be above `highest_opset`.

    Raises:
        EngineError: the opset is higher, or the graph states none.
    """
    opset = model.opset_imports.get("")
    if opset is None or opset > highest_opset:
        raise EngineError(
            f"The graph is of ONNX opset {opset}, this TensorRT takes up to {highest_opset}. "
            "Lower the bundle again for this TensorRT: dflash-export engines BUNDLE."
        )


def check_operators(model: ir.Model, allowed: Collection[str]) -> None:
    """Every operator of the graph, of its subgraphs and functions, must be of the default domain and in `allowed`.

    Raises:
        EngineError: an operator is not; the message names its node, and counts the others.
    """
    refused = [node for node in _nodes(model) if node.domain not in {"", "ai.onnx"} or node.op_type not in allowed]
    if not refused:
        return
    first, kinds = refused[0], sorted({_operator(node) for node in refused})
    raise EngineError(
        f"This TensorRT does not take the operator {_operator(first)} of node {_name(first)} "
        f"({len(refused)} such nodes; operators {', '.join(kinds)}). "
        "Lower the bundle again for this TensorRT: dflash-export engines BUNDLE."
    )


def check_attention_inputs(model: ir.Model) -> None:
    """No Attention node may rely on an input that TensorRT leaves out: the valid length belongs into the mask.

    Raises:
        EngineError: a node has one; the message names node and input.
    """
    for node in _nodes(model):
        if node.op_type != "Attention" or node.domain not in {"", "ai.onnx"}:
            continue
        for index, name in IGNORED_ATTENTION_INPUTS.items():
            if index < len(node.inputs) and node.inputs[index] is not None:
                raise EngineError(
                    f"Node {_name(node)} (Attention) has the input {name}, which TensorRT ignores: the engine would "
                    "attend to rows past the valid length. Give the valid rows as attn_mask instead."
                )


def _nodes(model: ir.Model) -> list[ir.Node]:
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    nodes = [node for graph in graphs for node in ir.traversal.RecursiveGraphIterator(graph)]
    return [node for node in nodes if not _is_call(model, node)]


def _is_call(model: ir.Model, node: ir.Node) -> bool:
    # A call of a model local function is inlined; what it is made of is checked instead.
    return node.op_identifier() in model.functions


def _operator(node: ir.Node) -> str:
    return node.op_type if node.domain in {"", "ai.onnx"} else f"{node.domain}.{node.op_type}"


def _name(node: ir.Node) -> str:
    outputs = [value.name for value in node.outputs if value.name]
    return repr(node.name or (outputs[0] if outputs else "without a name"))
