"""Lowers portable graphs for ONNX Runtime on a CPU: `engines/ort-cpu/*.onnx` and their record."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from dflash_engines.passes.constant_reshape import ConstantReshapePass
from dflash_engines.passes.group_query_attention import GroupQueryAttentionPass
from dflash_engines.passes.length_sliced_attention import LengthSlicedAttentionPass
from dflash_engines.passes.retype_to_fp32 import RetypeToFp32Pass
from dflash_engines.passes.rms_norm import FuseRmsNormPass
from dflash_engines.passes.rotary_embedding import FuseRotaryEmbeddingPass
from dflash_engines.passes.transposed_matmul import FuseTransposedMatMulPass
from dflash_runtime.errors import EngineError

GraphKind = Literal["target", "drafter_context", "drafter"]

_CONTRIB_OPERATORS = frozenset({"FusedMatMul", "GroupQueryAttention"})


def lower_model(model: ir.Model, kind: GraphKind, precision: str = "fp32") -> ir.Model:
    """Lowers one portable graph.

    Args:
        model: The portable graph in any precision; left as it is.
        kind: Which of the three graphs it is.
        precision: Precision of execution. ONNX Runtime has no half-precision MatMul on a CPU, so only fp32 is made.

    Returns:
        A new model with the same inputs and outputs, half-precision ones as fp32. Weights stay where they are; half
        weights in files are only typed fp32 and must be bound by name, widened, when a session opens.

    Raises:
        EngineError: a precision this backend does not compute in, or a graph that is not of the contract's form.
    """
    if precision != "fp32":
        raise EngineError(f"ort-cpu computes in fp32, not {precision}. Leave the precision out or ask for fp32.")
    lowered = model.clone()
    interface = _interface(lowered)
    for lower in (
        RetypeToFp32Pass(),
        FuseRmsNormPass(),
        FuseRotaryEmbeddingPass(),
        GroupQueryAttentionPass(),
        LengthSlicedAttentionPass(),
        FuseTransposedMatMulPass(),
        ConstantReshapePass(),
    ):
        before = len(lowered.graph)
        lower(lowered)
        _check(lowered, kind, interface, type(lower).__name__, before)
    return lowered


def _interface(model: ir.Model) -> list[list[str | None]]:
    return [[value.name for value in values] for values in (model.graph.inputs, model.graph.outputs)]


def _check(model: ir.Model, kind: GraphKind, interface: list[list[str | None]], name: str, before: int) -> None:
    """A pass keeps the interface, adds only operators this backend has, and does not grow or empty the graph."""
    count = len(model.graph)
    problems = []
    if _interface(model) != interface:
        problems.append(f"changed the interface from {interface} to {_interface(model)}")
    if count == 0 or count > 2 * before:
        problems.append(f"turned {before} nodes into {count}")
    foreign = sorted({
        f"{node.domain}::{node.op_type}"
        for node in model.graph
        if node.domain and not (node.domain == "com.microsoft" and node.op_type in _CONTRIB_OPERATORS)
    })
    if foreign:
        problems.append(f"left operators ONNX Runtime is not asked to run here: {foreign}")
    if problems:
        raise EngineError(f"{name} failed on the {kind} graph: it {'; '.join(problems)}. Please report this graph.")
