"""Lowers portable graphs to the primitive form: opset 20, no Attention, no TensorScatter, caches never written.

For TensorRT 10.3 up to 10.14 (JetPack 6.2, 7.0 and 7.1), which knows no KV update. See
`passes/primitive_attention.py` for the attention and `passes/new_rows.py` for the rows a call hands back.
"""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.operator_check import check_operators, check_opset
from dflash_engines.passes.new_rows import NewRowsPass
from dflash_engines.passes.opset_downgrade import OPSET, OpsetDowngradePass
from dflash_engines.passes.primitive_attention import PrimitiveAttentionPass, SoftmaxPrecision
from dflash_engines.tensorrt_versions import PRIMITIVE_OPERATORS
from dflash_runtime.bundle import GraphKind
from dflash_runtime.errors import EngineError


def lower_primitive(model: ir.Model, kind: GraphKind, softmax_precision: SoftmaxPrecision = "fp32") -> ir.Model:
    """Lowers one portable graph.

    Args:
        model: The portable graph in any precision; left as it is. Weights stay where they are.
        kind: Which of the three graphs it is.
        softmax_precision: "fp32" computes scale, soft cap and softmax of a half-precision graph in fp32; "graph" in
            the graph's own precision.

    Returns:
        A new model with the inputs of the portable one (T >= position is enough: a bucket of the capacity) and its
        outputs except `present`. In place of those, target and drafter_context hand back `new_rows.{g}` for the
        runtime to copy to row `position` of the caches; the block rows of a drafter are scratch and stay inside, and
        drafter_context reads no cache and so has no cache inputs. See `new_rows.read_new_rows`.

    Raises:
        EngineError: a layer attends in a way that cannot be split, or an operator opset 20 or the backend lacks.
    """
    lowered = model.clone()
    kept = [value.name for value in lowered.graph.outputs if not (value.name or "").startswith("present.")]
    for lower in (
        PrimitiveAttentionPass(softmax_precision),
        NewRowsPass(keep=kind != "drafter"),
        OpsetDowngradePass(),
    ):
        lower(lowered)
    _check(lowered, kind, kept)
    check_opset(lowered, OPSET)
    check_operators(lowered, PRIMITIVE_OPERATORS)
    return lowered


def _check(model: ir.Model, kind: GraphKind, kept: list[str | None]) -> None:
    names = [value.name for value in model.graph.outputs]
    new_rows, wanted = names[len(kept) :], "none" if kind == "drafter" else "some"
    problems = []
    if names[: len(kept)] != kept:
        problems.append(f"its outputs are {names}, expected to begin with {kept}")
    if bool(new_rows) != (wanted == "some"):
        problems.append(f"it hands back {new_rows} as new rows, expected {wanted}")
    if problems:
        raise EngineError(f"The {kind} graph has no primitive form: {'; '.join(problems)}. Please report this graph.")
