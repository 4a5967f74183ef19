"""One product for queries, keys and values where their weights lie side by side, and none merged elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from bare_ort import BareSession
from stored_weights import matrices_then_vectors, store
from test_lowered_attention import CAPACITY, compare, inputs_of, operators
from tiny_graphs import Layer, Sizes, target_model

from dflash_engines.ort_cpu import lower_model

LAYERS = 2


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are stored; ONNX Runtime finds them from here."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def packed(model: ir.Model) -> list[ir.Node]:
    kernels = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    return [node for node in kernels if node.inputs[1] is None and node.inputs[2] is None]


@pytest.mark.parametrize(
    "sizes",
    [Sizes(), Sizes(bias=True), Sizes(layers=(Layer(window=6), Layer())), Sizes(head_dim=24, value_dim=24, bias=True)],
    ids=["plain", "bias", "window", "rotation-outside"],
)
def test_packed_graph_says_the_same(sizes: Sizes, folder: Path) -> None:
    model = target_model(sizes)
    lowered = lower_model(store(model, folder, matrices_then_vectors(model)), "target")
    outside = sizes.head_dim == 24  # a rotation between product and attention
    assert len(packed(lowered)) == (0 if outside else LAYERS)
    assert operators(lowered)["FusedMatMul"] == (7 if outside else 5) * LAYERS + 1
    compare(model, lowered, float("nan"))


def test_packed_weight_is_a_span_of_the_file(folder: Path) -> None:
    model = target_model()
    stored = store(model, folder, matrices_then_vectors(model))
    lowered = lower_model(stored, "target")
    parts = [stored.graph.initializers[f"layers.1.{part}"].const_value for part in "qkv"]
    whole = lowered.graph.initializers["layers.1.q.packed"].const_value
    assert isinstance(whole, ir.ExternalTensor) and isinstance(parts[0], ir.ExternalTensor)
    assert (whole.location, whole.offset) == ("weights.bin", parts[0].offset)
    arrays = [part.numpy() for part in parts if part is not None]
    np.testing.assert_array_equal(whole.numpy(), np.concatenate(arrays))
    assert not {f"layers.1.{part}" for part in "qkv"} & set(lowered.graph.initializers)


def swapped(names: list[str]) -> list[str]:
    return [name.replace(".k", ".?").replace(".v", ".k").replace(".?", ".v") for name in names]


@pytest.mark.parametrize("order", [swapped, sorted], ids=["other-order", "apart"])
def test_weights_in_another_order_stay_three(order: Callable[[list[str]], list[str]], folder: Path) -> None:
    model = target_model()
    lowered = lower_model(store(model, folder, order(matrices_then_vectors(model))), "target")
    assert not packed(lowered)
    compare(model, lowered)


def test_weights_with_a_gap_stay_three(folder: Path) -> None:
    model = target_model()
    assert not packed(lower_model(store(model, folder, matrices_then_vectors(model), gap_bytes=4), "target"))


def test_weights_inside_the_graph_stay_three() -> None:
    assert not packed(lower_model(target_model(), "target"))


def test_biases_apart_leave_three_products(folder: Path) -> None:
    model = target_model(Sizes(bias=True))
    names = matrices_then_vectors(model)
    lowered = lower_model(store(model, folder, sorted(names, key=lambda name: (name.endswith(".bias"), name[-8:]))),
                          "target")
    assert not packed(lowered)
    compare(model, lowered)


def test_norms_between_product_and_attention_leave_three_products(folder: Path) -> None:
    model = target_model(Sizes(head_norms=True))
    lowered = lower_model(store(model, folder, matrices_then_vectors(model)), "target")
    assert not packed(lowered)
    compare(model, lowered)


def test_a_weight_with_another_reader_stays(folder: Path) -> None:
    model = target_model()
    query, output = model.graph.initializers["layers.0.q"], model.graph.initializers["layers.1.q"]
    ir.convenience.replace_all_uses_with(output, query)
    lowered = lower_model(store(model, folder, matrices_then_vectors(model)), "target")
    assert not packed(lowered)
    compare(model, lowered)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_halves_are_bound_by_their_own_names(precision: str, folder: Path) -> None:
    stored = target_model(Sizes(precision=precision))
    stored = store(stored, folder, matrices_then_vectors(stored))
    lowered = lower_model(stored, "target")
    assert not packed(lowered)
    external = [n for n, v in lowered.graph.initializers.items() if isinstance(v.const_value, ir.ExternalTensor)]
    assert set(external) <= set(stored.graph.initializers)


def with_one_projection(model: ir.Model, how: str, columns: tuple[int, ...] = (0, 1, 2)) -> ir.Model:
    """Queries, keys and values of each layer cut from one product; `columns` is their order in it."""
    graph = model.graph
    for layer in range(LAYERS):
        names = [f"layers.{layer}.{part}" for part in "qkv"]
        weights = [graph.initializers[name] for name in names]
        products = [weight.consumers()[0].outputs[0].consumers()[0] for weight in weights]
        arrays = [weight.const_value.numpy() for weight in weights if weight.const_value is not None]
        widths = [len(array) for array in arrays]
        joined = ir.tensor(np.concatenate([arrays[i] for i in columns]), name=f"layers.{layer}.qkv")
        weight = ir.Value(name=joined.name, const_value=joined, shape=ir.Shape(joined.shape), type=weights[0].type)
        graph.register_initializer(weight)
        turn = ir.node("Transpose", [weight], {"perm": [1, 0]})
        turn.outputs[0].type, turn.outputs[0].shape = weight.type, ir.Shape([32, sum(widths)])
        product = ir.node("MatMul", [products[0].inputs[0], turn.outputs[0]])
        whole = product.outputs[0]
        whole.type, whole.shape = weight.type, ir.Shape([1, "S", sum(widths)])
        if how == "split":
            cuts = [ir.node("Split", [whole, constant(graph, [widths[i] for i in columns])], {"axis": -1},
                            num_outputs=3)]
            pieces = dict(zip(columns, cuts[0].outputs, strict=True))
        else:
            ends = np.cumsum([0, *(widths[i] for i in columns)])
            cuts = [
                ir.node("Slice", [whole, *(constant(graph, [int(n)]) for n in (ends[i], ends[i + 1], 2))])
                for i in range(3)
            ]
            pieces = {part: cut.outputs[0] for part, cut in zip(columns, cuts, strict=True)}
        graph.insert_before(products[0], [turn, product, *cuts])
        for part, old in enumerate(products):
            new = pieces[part]
            new.type, new.shape = old.outputs[0].type, old.outputs[0].shape
            ir.convenience.replace_all_uses_with(old.outputs[0], new)
    return model


def constant(graph: ir.Graph, numbers: list[int]) -> ir.Value:
    name = f"constant.{numbers}"
    if name not in graph.initializers:
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        shape, kind = ir.Shape([len(numbers)]), ir.TensorType(tensor.dtype)
        value = ir.Value(name=name, const_value=tensor, shape=shape, type=kind)
        graph.register_initializer(value)
    return graph.initializers[name]


@pytest.mark.parametrize("how", ["split", "slice"])
def test_one_projection_is_not_cut_apart(how: str) -> None:
    model = with_one_projection(target_model(), how)
    lowered = lower_model(model, "target")
    assert len(packed(lowered)) == LAYERS
    assert not operators(lowered)["Split"]
    assert operators(lowered)["Slice"] == 0
    compare(model, lowered)


@pytest.mark.parametrize("how", ["split", "slice"])
def test_one_projection_in_another_order_is_cut(how: str) -> None:
    model = with_one_projection(target_model(), how, columns=(0, 2, 1))
    lowered = lower_model(model, "target")
    assert not packed(lowered)
    compare(model, lowered)


def test_the_check_sees_a_wrong_span(folder: Path) -> None:
    """The comparison above can fail: a span that starts one row late."""
    model = target_model()
    lowered = lower_model(store(model, folder, matrices_then_vectors(model)), "target")
    whole = lowered.graph.initializers["layers.0.q.packed"]
    tensor = whole.const_value
    assert isinstance(tensor, ir.ExternalTensor) and tensor.offset is not None
    whole.const_value = ir.ExternalTensor(
        tensor.location, tensor.offset + 4 * 32, tensor.length, tensor.dtype, shape=tensor.shape, name=tensor.name,
        base_dir=folder,
    )
    inputs = inputs_of(model, 0, 8)
    found = BareSession(lowered, CAPACITY)(**inputs)["logits"]
    assert np.abs(found - BareSession(model, CAPACITY)(**inputs)["logits"]).max() > 1e-2
