"""What the TensorRT builder is given, computed by plain ONNX Runtime: it must be the portable graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import Array, BareSession
from test_lowered_attention import CALLS, CAPACITY, DRAFTERS, TARGETS, assert_same, inputs_of
from tiny_graphs import Layer, Sizes, drafter_context_model, drafter_model, target_model

from dflash_engines.fused_form import lower_fused
from dflash_engines.passes.explicit_mask import ExplicitMaskPass
from dflash_engines.passes.flat_matmul import FlatMatMulPass
from dflash_engines.passes.retype_half import RetypeHalfPass
from dflash_engines.passes.weight_inputs import WeightInputsPass
from dflash_engines.tensorrt_network import Network, make_network
from dflash_engines.tensorrt_versions import row_for
from dflash_runtime.errors import EngineError

RTX = row_for("tensorrt-rtx", "1.7.1")
MODELS = {
    **{f"target-{n}": target_model(s) for n, s in TARGETS.items() if not s.softcap},
    **{f"drafter-{n}": drafter_model(s) for n, s in DRAFTERS.items()},
    "context": drafter_context_model(Sizes(head_norms=True)),
}


def stored(model: ir.Model, folder: Path) -> ir.Model:
    """The model with its weights in a file, as a bundle has it."""
    ir.save(model.clone(), folder / "m.onnx", external_data="m.bin", size_threshold_bytes=50)
    return ir.load(folder / "m.onnx")


def fuse(model: ir.Model) -> tuple[ir.Model, dict[str, Array]]:
    """The fused network in fp32, which no TensorRT takes and ONNX Runtime computes exactly; and its weights."""
    weights = {str(v.name): v.const_value.numpy() for v in model.graph.initializers.values() if v.const_value}
    lifting = WeightInputsPass()
    for lower in (ExplicitMaskPass(), FlatMatMulPass(), lifting):
        lower(model)
    return model, {w.input: np.asarray(weights[w.weight]) for w in lifting.weight_inputs}


def compare(model: ir.Model, network: ir.Model, weights: dict[str, Array], fill: float) -> None:
    one, two = BareSession(model, CAPACITY), BareSession(network, CAPACITY, fill=fill)
    for position, rows in CALLS:
        inputs = inputs_of(model, position, rows)
        assert_same(two(**inputs, **weights), one(**inputs), position + rows)


@pytest.mark.parametrize("fill", [0.0, 1e4])
@pytest.mark.parametrize("name", MODELS)
def test_the_network_is_the_portable_graph(name: str, fill: float, tmp_path: Path) -> None:
    network, weights = fuse(stored(MODELS[name], tmp_path))
    assert len(weights) >= 5
    assert not any(isinstance(v.const_value, ir.ExternalTensor) for v in network.graph.initializers.values())
    compare(MODELS[name], network, weights, fill)


@pytest.mark.parametrize("fault", ["after-end", "before-end", "causal"])
def test_a_wrong_mask_shows(fault: str, tmp_path: Path) -> None:
    name = "drafter-bidirectional" if fault == "causal" else "target-causal"
    network, weights = fuse(stored(MODELS[name], tmp_path))
    found = [node for node in network.graph if node.op_type == {"causal": "Or"}.get(fault, "LessOrEqual")]
    assert found
    for node in found:
        if fault == "causal":
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
        elif fault == "before-end":
            node.op_type = "Less"
        else:  # one row too many
            one = ir.node("Add", [node.inputs[1], node.inputs[1]])
            network.graph.insert_before(node, one)
            node.replace_input_with(1, one.outputs[0])
    with pytest.raises(AssertionError):
        compare(MODELS[name], network, weights, fill=3.0)


def test_a_tied_embedding_comes_twice_and_a_cast_weight_in_its_type(tmp_path: Path) -> None:
    lifting = WeightInputsPass()
    model = stored(target_model(Sizes(precision="bf16")), tmp_path)
    lifting(model)
    inputs = {w.input: (w.weight, w.dtype) for w in lifting.weight_inputs}
    assert inputs["embed"] == ("embed", "BF16") and inputs["embed#rows"] == ("embed", "BF16")
    assert {v.name for v in model.graph.inputs} >= set(inputs)
    graph = ir.Graph([], [], nodes=[], name="cast", opset_imports={"": 24})
    weight = ir.Value(name="fc", shape=ir.Shape([4, 8]), type=ir.TensorType(ir.DataType.BFLOAT16))
    weight.const_value = ir.ExternalTensor("w.bin", 0, 64, ir.DataType.BFLOAT16, shape=ir.Shape([4, 8]), name="fc")
    graph.register_initializer(weight)
    cast = ir.node("Cast", [weight], {"to": int(ir.DataType.FLOAT)})
    cast.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    out = ir.node("Neg", cast.outputs)
    out.outputs[0].name = "out"
    graph.extend([cast, out])
    graph.outputs.append(out.outputs[0])
    lifting = WeightInputsPass()
    lifting(ir.Model(graph, ir_version=11))
    assert [(w.input, w.weight, w.dtype) for w in lifting.weight_inputs] == [("fc#F32", "fc", "F32")]
    assert [node.op_type for node in graph] == ["Neg"]


def test_products_are_of_two_matrices(tmp_path: Path) -> None:
    model = stored(target_model(), tmp_path)
    before = sum(node.op_type == "MatMul" for node in model.graph)
    FlatMatMulPass()(model)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert len(products) == before
    assert all(node.inputs[0].producer().op_type == "Squeeze" for node in products)


def test_half_types_change_and_fp32_stays() -> None:
    model = target_model(Sizes(precision="bf16"))
    wide = sum(v.dtype == ir.DataType.FLOAT for node in model.graph for v in node.outputs)
    RetypeHalfPass(ir.DataType.FLOAT16)(model)
    types = [v.dtype for node in model.graph for v in node.outputs]
    assert ir.DataType.BFLOAT16 not in types and types.count(ir.DataType.FLOAT) == wide
    assert {v.dtype for v in model.graph.inputs} == {ir.DataType.INT64, ir.DataType.FLOAT16}
    huge = ir.Model(ir.Graph([], [], nodes=[], name="huge", opset_imports={"": 24}), ir_version=11)
    array = np.array([-3e38, 1.0]).astype(ir.DataType.BFLOAT16.numpy())
    value = ir.Value(name="mask", const_value=ir.Tensor(array, name="mask"), type=ir.TensorType(ir.DataType.BFLOAT16))
    huge.graph.register_initializer(value)
    RetypeHalfPass(ir.DataType.FLOAT16)(huge)
    assert value.const_value is not None and value.const_value.numpy().tolist() == [-65504.0, 1.0]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        (Sizes(), "computes in FLOAT; TensorRT's fused attention takes fp16 and bf16"),
        (Sizes(precision="fp16", softcap=2.0), "layer 0 caps its scores at 2.0, which TensorRT's attention leaves out"),
    ],
)
def test_what_has_no_fused_kernel_is_refused(sizes: Sizes, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        lower_fused(target_model(sizes))


def network_of(sizes: Sizes, folder: Path, seed: int = 0) -> Network:
    folder.mkdir(exist_ok=True)
    model = stored(target_model(Sizes(precision="bf16", layers=sizes.layers, seed=seed)), folder)
    return make_network(model, "target", RTX, precision="fp16", capacity_rows=64, share_weights=True)


def test_fine_tunes_share_a_network_and_other_shapes_do_not(tmp_path: Path) -> None:
    one = network_of(Sizes(), tmp_path / "a")
    assert one.sha256 == network_of(Sizes(), tmp_path / "b", seed=7).sha256
    assert one.sha256 != network_of(Sizes(layers=(Layer(), Layer(window=4))), tmp_path / "c").sha256
    assert one.inputs == {"input_ids": [1, "S"], "logit_rows": ["R"]}


def test_a_precision_without_kernels_is_refused() -> None:
    with pytest.raises(EngineError, match="compute in fp16 or bf16, not fp32"):
        make_network(target_model(), "target", RTX, precision="fp32", capacity_rows=8, share_weights=True)
