"""The types of what a TensorRT builder is given: half precision, and fp32 where the numbers need it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import onnx
import onnx_ir as ir
import pytest
from conftest import Make
from pairs import SHALLOW_PAIRS, Pair

from dflash_engines import tensorrt_build
from dflash_engines.tensorrt_build import BuildOrder
from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan
from dflash_engines.tensorrt_versions import row_for
from dflash_runtime.bundle import Bundle

FORMS = {"fused": ("tensorrt-rtx", "1.7.1"), "primitive": ("tensorrt", "10.3")}
HALF = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
NORMS, ANGLES = ("Pow", "ReduceMean", "Sqrt", "Reciprocal"), ("Cos", "Sin")


def network_of(bundle: Bundle, kind: str, form: str, precision: str) -> tuple[ir.Model, dict[str, str]]:
    """The network and, by name, the dtype of the weights it is given."""
    flavour, version = FORMS[form]
    options = EngineOptions(flavour, "8.9", precision=precision)
    made = EnginePlan(bundle, options, row_for(flavour, version), version, "8.9").network(kind)
    weights = {weight.weight: weight.dtype for weight in made.weight_inputs}
    return ir.serde.from_proto(onnx.ModelProto.FromString(made.onnx)), weights


def check_types(model: ir.Model, half: ir.DataType) -> None:
    """Norms, angles, scores of the primitive form and logits in fp32; one half precision in the rest."""
    for node in model.graph:
        if node.op_type in (*NORMS, *ANGLES, "Softmax"):
            found = {value.dtype for value in (*node.inputs[:1], *node.outputs) if value is not None}
            assert found == {ir.DataType.FLOAT}, f"{node.op_type} {node.name} in {found}"
    types = {value.dtype for node in model.graph for value in node.outputs}
    halves = types & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    assert halves == {half}
    assert {v.dtype for v in model.graph.outputs if str(v.name).endswith("logits")} <= {ir.DataType.FLOAT}


@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pair", SHALLOW_PAIRS, ids=lambda pair: str(pair.precision))
def test_fp32_where_the_numbers_need_it(exported: Make, pair: Pair, form: str, precision: str) -> None:
    """Bundles of either precision, engines in either."""
    bundle = Bundle.open(exported(pair))
    norms = {"target": 4 * 2 + 1, "drafter": 4 * 2 + 1, "drafter_context": 2 + 1}  # of a layer: two, and of q and k
    for kind, count in norms.items():
        model, weights = network_of(bundle, kind, form, precision)
        check_types(model, HALF[precision])
        operators = [node.op_type for node in model.graph]
        assert operators.count("ReduceMean") == count and set(ANGLES) <= set(operators)
        wide = {name for name, dtype in weights.items() if dtype == "F32"}
        fusing = {"drafter.fc.weight", "drafter.hidden_norm.weight"}
        assert wide == (fusing if kind == "drafter_context" else set()), wide
        products = {node.outputs[0].dtype for node in model.graph if node.op_type == "MatMul"}
        assert (ir.DataType.FLOAT in products) == (kind == "drafter_context")  # the fusing one


@pytest.mark.parametrize("operator", ["ReduceMean", "Sin"])
def test_what_rounds_too_early_shows(exported: Make, operator: str) -> None:
    """A planted fault: a norm or an angle in half precision."""
    model, _ = network_of(Bundle.open(exported(SHALLOW_PAIRS[0])), "target", "fused", "bf16")
    node = next(node for node in model.graph if node.op_type == operator)
    node.outputs[0].dtype = ir.DataType.BFLOAT16
    with pytest.raises(AssertionError, match=operator):
        check_types(model, ir.DataType.BFLOAT16)


class AskedForANetworkError(Exception):
    """A network was asked for."""


@pytest.mark.parametrize("knows_the_flag", [True, False])
def test_networks_are_strongly_typed(monkeypatch: pytest.MonkeyPatch, knows_the_flag: bool) -> None:
    """Where a TensorRT makes others too: from 11 on it has no such flag any more."""
    real = pytest.importorskip("tensorrt_rtx")

    class Builder:
        def __init__(self, log: Any) -> None: ...

        def create_network(self, flags: int) -> None:
            raise AskedForANetworkError(flags)

    flags = real.NetworkDefinitionCreationFlag if knows_the_flag else SimpleNamespace()
    trt = SimpleNamespace(Builder=Builder, ILogger=real.ILogger, NetworkDefinitionCreationFlag=flags)
    monkeypatch.setattr(tensorrt_build, "_module", lambda flavour: trt)
    with pytest.raises(AskedForANetworkError) as asked:
        tensorrt_build._build(BuildOrder("tensorrt", "x.onnx", [], None, None, "x.engine"), None)
    strongly = 1 << int(real.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    assert asked.value.args == (strongly if knows_the_flag else 0,)
