"""The table of TensorRT versions, and the check that a graph keeps to it."""

from __future__ import annotations

import itertools
import subprocess
import sys

import onnx_ir as ir
import pytest

from dflash_engines.operator_check import check_attention_inputs, check_graph, check_operators, check_opset
from dflash_engines.tensorrt_versions import (
    FUSED_OPERATORS,
    JETPACKS,
    PRIMITIVE_OPERATORS,
    VERSIONS,
    form_for,
    jetpack_for_l4t,
    lacks_kernels,
    row_for,
)
from dflash_runtime.errors import EngineError


@pytest.mark.parametrize(
    ("flavour", "version", "form"),
    [
        ("tensorrt", "10.3.0", "primitive"),
        ("tensorrt", "10.3.0.30-1+cuda12.5", "primitive"),
        ("tensorrt", "10.13.3.9", "primitive"),
        ("tensorrt", "10.14.1.48", "primitive"),
        ("tensorrt", "10.15.1", "fused"),
        ("tensorrt", "10.16.2.10-1+cuda13.2", "fused"),
        ("tensorrt", "11.1.0", "fused"),
        ("tensorrt-rtx", "1.7.1.116", "fused"),
    ],
)
def test_form_of_each_version(flavour: str, version: str, form: str) -> None:
    assert form_for(flavour, version) == form


@pytest.mark.parametrize(
    ("flavour", "version", "said"),
    [
        ("tensorrt", "8.6.2", "TensorRT 8.6.2 is too old: graphs are written for 10.3 and newer."),
        ("tensorrt", "10.2.0", "TensorRT 10.2.0 is too old"),
        ("tensorrt", "12.0.1", "TensorRT 12.0.1 is newer than this dflash-export knows"),
        ("tensorrt-rtx", "1.4.0.76", "TensorRT-RTX 1.4.0.76 is too old: graphs are written for 1.7 and newer"),
        ("tensorrt-rtx", "2.0", "install TensorRT-RTX 1.x"),
        ("trt", "10.3", "no TensorRT flavour 'trt'. Known: tensorrt, tensorrt-rtx"),
        ("tensorrt", "unknown", "'unknown' is not a version"),
    ],
)
def test_other_versions_are_refused_with_the_way_out(flavour: str, version: str, said: str) -> None:
    with pytest.raises(EngineError) as refused:
        form_for(flavour, version)
    assert said in str(refused.value)


def test_rows_of_a_flavour_leave_no_gap_and_do_not_overlap() -> None:
    for flavour in ("tensorrt", "tensorrt-rtx"):
        rows = sorted((row for row in VERSIONS if row.flavour == flavour), key=lambda row: row.first)
        assert all(earlier.before == later.first for earlier, later in itertools.pairwise(rows))
        assert all(row.first < row.before for row in rows)


def test_operators_of_the_two_forms() -> None:
    absent = {"Attention", "RMSNormalization", "TensorScatter", "RotaryEmbedding"}
    assert not absent & PRIMITIVE_OPERATORS
    assert absent == FUSED_OPERATORS - PRIMITIVE_OPERATORS
    needed = {"MatMul", "Softmax", "Concat", "Gather", "Where", "Cast", "ReduceMean", "Sqrt", "ArgMax", "Range", "Erf"}
    assert needed <= PRIMITIVE_OPERATORS
    assert row_for("tensorrt", "10.3").highest_opset == 20
    assert row_for("tensorrt", "10.15").highest_opset == 24


@pytest.mark.parametrize(
    ("flavour", "version", "gpu", "can"),
    [
        ("tensorrt-rtx", "1.7.1", (8, 9), True),
        ("tensorrt-rtx", "1.7.1", (9, 0), False),
        ("tensorrt-rtx", "1.7.1", (8, 7), False),
        ("tensorrt-rtx", "1.7.1", (11, 0), False),
        ("tensorrt", "10.16.2", (9, 0), True),
        ("tensorrt", "10.3.0", (8, 7), True),
        ("tensorrt", "10.3.0", (12, 0), False),
        ("tensorrt", "10.16.0", (12, 0), True),
        ("tensorrt", "10.16.0", (7, 0), False),
    ],
)
def test_kernels_for_a_gpu(flavour: str, version: str, gpu: tuple[int, int], can: bool) -> None:
    reason = lacks_kernels(flavour, version, gpu)
    assert (reason is None) is can
    assert can or f"compute capability {gpu[0]}.{gpu[1]}" in str(reason)


def test_jetpack_rows() -> None:
    releases = ("36.3.0", "36.4.3", "36.5.0", "38.4.0", "39.2.1")
    told = {l4t: getattr(jetpack_for_l4t(l4t), "name", None) for l4t in releases}
    assert told == {"36.3.0": None, "36.4.3": "6.1/6.2", "36.5.0": "6.1/6.2", "38.4.0": "7.0/7.1", "39.2.1": "7.2"}
    assert [(row.python, row.cuda, row.tensorrt) for row in JETPACKS] == [
        ("3.10", "12.6", "10.3"),
        ("3.12", "13.0", "10.13"),
        ("3.12", "13.2", "10.16"),
    ]
    assert [form_for("tensorrt", row.tensorrt) for row in JETPACKS] == ["primitive", "primitive", "fused"]


def test_the_table_imports_without_onnx() -> None:
    code = (
        "import sys\nfor name in ('onnx_ir', 'onnx', 'ml_dtypes', 'torch'):\n    sys.modules[name] = None\n"
        "import dflash_engines.tensorrt_versions as table\nassert table.form_for('tensorrt', '10.3') == 'primitive'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def graph_of(*nodes: ir.Node, opset: int = 20) -> ir.Model:
    graph = ir.Graph([], [], nodes=nodes, opset_imports={"": opset}, name="graph")
    return ir.Model(graph, ir_version=10)


def value(name: str) -> ir.Value:
    return ir.Value(name=name)


def test_a_graph_that_keeps_to_the_table_passes() -> None:
    check_graph(graph_of(ir.node("MatMul", [value("a"), value("b")])), row_for("tensorrt", "10.3"))
    check_graph(graph_of(ir.node("Attention", [value(n) for n in "qkvm"]), opset=24), row_for("tensorrt", "10.16"))


@pytest.mark.parametrize("operator", ["Attention", "RMSNormalization", "TensorScatter", "RotaryEmbedding"])
def test_a_fused_operator_is_refused_by_10_3_with_its_node(operator: str) -> None:
    nodes = [ir.node("Abs", [value("a")]), ir.node(operator, [value("b")], name="layer.3/it")]
    with pytest.raises(EngineError, match=rf"operator {operator} of node 'layer.3/it' \(1 such nodes"):
        check_graph(graph_of(*nodes), row_for("tensorrt", "10.3"))


def test_an_operator_of_another_domain_is_refused() -> None:
    node = ir.node("GroupQueryAttention", [value("a")], domain="com.microsoft", name="gqa")
    with pytest.raises(EngineError, match=r"com\.microsoft\.GroupQueryAttention of node 'gqa'"):
        check_operators(graph_of(node), FUSED_OPERATORS)


def test_an_operator_inside_a_branch_is_found() -> None:
    branch = ir.Graph([], [], nodes=[ir.node("Unique", [value("x")], name="inner")], name="branch")
    node = ir.node("If", [value("c")], attributes={"then_branch": branch})
    with pytest.raises(EngineError, match="operator Unique of node 'inner'"):
        check_operators(graph_of(node), FUSED_OPERATORS)


def test_a_node_without_a_name_is_named_by_its_output() -> None:
    node = ir.node("Unique", [value("x")], outputs=[value("y")])
    model = graph_of(node)
    node.name = None
    with pytest.raises(EngineError, match="node 'y'"):
        check_operators(model, FUSED_OPERATORS)


def test_a_higher_opset_is_refused() -> None:
    model = graph_of(ir.node("Abs", [value("a")]), opset=24)
    with pytest.raises(EngineError, match="opset 24, this TensorRT takes up to 20"):
        check_opset(model, 20)
    check_opset(model, 24)


def test_a_valid_length_that_tensorrt_would_ignore_is_refused() -> None:
    inputs = [value("q"), value("k"), value("v"), None, None, None, value("length")]
    with pytest.raises(EngineError, match=r"'attend' .* nonpad_kv_seqlen, which TensorRT ignores"):
        check_attention_inputs(graph_of(ir.node("Attention", inputs, name="attend"), opset=24))
    check_attention_inputs(graph_of(ir.node("Attention", inputs[:3], name="attend"), opset=24))
