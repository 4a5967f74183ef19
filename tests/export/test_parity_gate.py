"""The gate passes on healthy bundles, whole and layer by layer, and every planted fault fails it by name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from tiny_models import write_drafter, write_target

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_engines.ort_cpu import lower_model
from dflash_export import drafter_gate, drafter_weights, graph_pieces, layer_reference, piecewise_runner, read_on_use
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, BuildPlan, plan_build
from dflash_export.drafter_gate import DrafterGate
from dflash_export.evidence import TargetEvidence, gate_prompts, gather_target_evidence
from dflash_export.layer_gate import LayerGate
from dflash_export.parity import PrecisionPasses, check_target, require_passed
from dflash_runtime.bundle import CheckRow, Manifest
from dflash_runtime.errors import ParityError

PASSES = PrecisionPasses(to_fp32, emulate_half, lambda model: lower_model(model, "target"))
TAPS = (0, 2)


def _quiet(stage: str, done: int, total: int) -> None: ...


class Built:
    """A bundle with what its gate needs."""

    def __init__(self, root: Path, plan: BuildPlan, manifest: Manifest, evidence: TargetEvidence) -> None:
        self.root, self.plan, self.manifest, self.evidence = root, plan, manifest, evidence

    def target_rows(self, root: Path | None = None) -> list[CheckRow]:
        return check_target(root or self.root, self.manifest, self.evidence, PASSES)

    def layer_rows(self, root: Path | None = None) -> list[CheckRow]:
        target = self.plan.target
        return LayerGate(root or self.root, self.manifest, target.config, target.places, PASSES).check(_quiet)

    def drafter_rows(self, root: Path | None = None, *, whole_tables: bool = True) -> list[CheckRow]:
        assert self.plan.drafter is not None
        gate = DrafterGate(root or self.root, self.manifest, self.plan.drafter, PASSES, whole_tables=whole_tables)
        return gate.check(None)


def _build(folder: Path, precision: str) -> Built:
    config = write_target(
        folder / "t",
        "qwen3",
        use_sliding_window=True,
        sliding_window=16,
        max_window_layers=2,
        tie_word_embeddings=False,
    )
    write_drafter(
        folder / "d", config, taps=TAPS, layer_types=["full_attention", "sliding_attention"], sliding_window=8
    )
    plan = plan_build(BuildOptions(str(folder / "t"), str(folder / "d"), precision=precision))
    root = folder / "b"
    root.mkdir()
    manifest = export_bundle(plan, root, _quiet)
    prompts = gate_prompts(root / "tokenizer" / "tokenizer.json", manifest.target.vocab_size)
    return Built(root, plan, manifest, gather_target_evidence(folder / "t", manifest, prompts))


@pytest.fixture(scope="module")
def fp32(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return _build(tmp_path_factory.mktemp("fp32"), "fp32")


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return _build(tmp_path_factory.mktemp("bf16"), "bf16")


def _failed(rows: list[CheckRow]) -> set[str]:
    return {row.tensor for row in rows if not row.passed}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_healthy_bundles_pass_every_gate(precision: str, request: pytest.FixtureRequest) -> None:
    built: Built = request.getfixturevalue(precision)
    expected = {"portable"} if precision == "fp32" else {"portable", "precision"}
    for rows in (built.target_rows(), built.drafter_rows(), built.drafter_rows(whole_tables=False)):
        require_passed(rows)
        assert {row.stage for row in rows} == expected
    rows = built.layer_rows()
    require_passed(rows)
    assert {row.stage for row in rows} == expected | {"lowered"}


def test_the_layer_gate_covers_first_tapped_and_last_layers_embedding_and_head(fp32: Built) -> None:
    rows = fp32.layer_rows()
    assert {r.tensor for r in rows} == {"embedding", "logits"} | {
        f"layer {i} {part}" for i in (0, 2, 3) for part in ("output", "keys", "values")
    }
    assert "layers 0, 2, 3 of 4" in rows[0].covered


def _poke(name: str, index: tuple[int, ...]) -> Callable[[Built, Path], None]:
    """Adds 0.5 to one stored weight value."""

    def plant(built: Built, root: Path) -> None:
        entry = built.manifest.weights[name]
        offset = entry.offset_bytes + 4 * int(np.ravel_multi_index(index, entry.shape))
        data = np.memmap(root / entry.file, dtype=np.uint8, mode="r+")
        value = data[offset : offset + 4].view(np.float32)
        value += 0.5
        data.flush()

    return plant


def _edit(file: str, change: Callable[[ir.Model], None]) -> Callable[[Built, Path], None]:
    def plant(built: Built, root: Path) -> None:
        model = ir.load(root / file)
        change(model)
        ir.save(model, root / file)

    return plant


def _nodes(model: ir.Model, op_type: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == op_type]


def _scale(model: ir.Model) -> None:
    node = _nodes(model, "Attention")[1]
    node.attributes["scale"] = ir.AttrFloat32("scale", node.attributes["scale"].as_float() * 1.05)


def _bidirectional(model: ir.Model) -> None:
    node = next(n for n in _nodes(model, "Attention") if "is_causal" in n.attributes)
    node.attributes["is_causal"] = ir.AttrInt64("is_causal", 0)


def _rope_constant(model: ir.Model) -> None:
    value = next(v for n, v in model.graph.initializers.items() if "inv_freq" in n or "frequencies" in n)
    assert value.const_value is not None
    array = value.const_value.numpy().copy()
    array[3] *= 1.01
    value.const_value = ir.Tensor(array, name=value.name)


def _window_off_by_one(model: ir.Model) -> None:
    """The window's constant, wherever the tracer put it."""
    found = False
    for node in model.graph:
        if node.op_type not in ("Sub", "Less", "Greater", "Add", "LessOrEqual", "GreaterOrEqual"):
            continue
        for i, value in enumerate(node.inputs):
            constant = None if value is None else ir.convenience.get_const_tensor(value)
            if constant is not None and constant.size == 1 and abs(int(constant.numpy().item())) in (8, 16):
                number = constant.numpy()
                node.replace_input_with(i, _constant(model, number + np.sign(number), node))
                found = True
    assert found


def _constant(model: ir.Model, array: np.ndarray, before: ir.Node) -> ir.Value:
    node = ir.node("Constant", [], {"value": ir.Tensor(np.asarray(array, dtype=np.int64))})
    node.outputs[0].dtype = ir.DataType.INT64
    model.graph.insert_before(before, node)
    return node.outputs[0]


def _swap_taps(model: ir.Model) -> None:
    node = next(v for v in model.graph.outputs if v.name == "taps").producer()
    assert node is not None
    one, two = node.inputs
    node.replace_input_with(0, two)
    node.replace_input_with(1, one)


def _value_rows_shifted(model: ir.Model) -> None:
    """The last layer's values are written one row too far down."""
    node = _nodes(model, "TensorScatter")[-1]
    position = node.inputs[2]
    one = _constant(model, np.array([1]), node)
    shifted = ir.node("Add", [position, one])
    shifted.outputs[0].dtype = ir.DataType.INT64
    model.graph.insert_before(node, shifted)
    node.replace_input_with(2, shifted.outputs[0])


TARGET_FAULTS: dict[str, tuple[Callable[[Built, Path], None], set[str]]] = {
    "one head value": (_poke("lm_head.weight", (300, 5)), {"logits"}),
    "one embedding value": (_poke("model.embed_tokens.weight", (40, 3)), set()),
    "one weight in the middle": (_poke("model.layers.1.mlp.up_proj.weight", (7, 7)), {"taps", "logits"}),
    "one norm value": (_poke("model.layers.3.self_attn.k_norm.weight", (1,)), {"keys"}),
    "attention scale": (_edit("target.onnx", _scale), {"taps", "logits"}),
    "no causality": (_edit("target.onnx", _bidirectional), {"taps"}),
    "rope constant": (_edit("target.onnx", _rope_constant), {"keys"}),
    "window off by one": (_edit("target.onnx", _window_off_by_one), {"logits"}),
    "swapped taps": (_edit("target.onnx", _swap_taps), {"taps"}),
    "shifted rows": (_edit("target.onnx", _value_rows_shifted), {"values"}),
}


@pytest.mark.parametrize("fault", TARGET_FAULTS)
def test_target_faults_fail_and_are_named(fp32: Built, tmp_path: Path, fault: str) -> None:
    plant, expected = TARGET_FAULTS[fault]
    root = Path(shutil.copytree(fp32.root, tmp_path / "b"))
    plant(fp32, root)
    if fault == "one embedding value":
        # Only rows in use can show it in a run; the layer gate reads the table itself.
        row = sorted({t for step in fp32.evidence.steps for t in step.ids})[0]
        _poke("model.embed_tokens.weight", (row, 3))(fp32, root)
    rows = fp32.target_rows(root)
    assert expected <= _failed(rows) and _failed(rows)
    with pytest.raises(ParityError, match=r"parity checks failed: portable .* is allowed"):
        require_passed(rows)


DRAFTER_FAULTS: dict[str, tuple[Callable[[Built, Path], None], set[str]]] = {
    "fc": (_poke("drafter.fc.weight", (3, 9)), {"drafter context", "draft_logits"}),
    "norm": (_poke("drafter.hidden_norm.weight", (3,)), {"drafter context"}),
    "query": (_poke("drafter.layers.1.self_attn.q_proj.weight", (3, 9)), {"draft_logits"}),
    "scale": (_edit("drafter.onnx", _scale), {"draft_logits"}),
    "window off by one": (_edit("drafter.onnx", _window_off_by_one), {"draft_logits"}),
    "context rope": (_edit("drafter_context.onnx", _rope_constant), {"drafter context"}),
    "shifted rows": (_edit("drafter_context.onnx", _value_rows_shifted), {"drafter context"}),
}


@pytest.mark.parametrize("fault", DRAFTER_FAULTS)
def test_drafter_faults_fail_and_are_named(fp32: Built, tmp_path: Path, fault: str) -> None:
    plant, expected = DRAFTER_FAULTS[fault]
    root = Path(shutil.copytree(fp32.root, tmp_path / "b"))
    plant(fp32, root)
    assert expected <= _failed(fp32.drafter_rows(root))


LAYER_FAULTS: dict[str, tuple[Callable[[Built, Path], None], str]] = {
    "tapped layer": (_poke("model.layers.2.mlp.down_proj.weight", (1, 1)), "layer 2 output"),
    "last layer's keys": (_poke("model.layers.3.self_attn.k_proj.weight", (1, 1)), "layer 3 keys"),
    "embedding": (_poke("model.embed_tokens.weight", (510, 1)), "embedding"),
    "head": (_poke("lm_head.weight", (477, 1)), "logits"),
    "final norm": (_poke("model.norm.weight", (1,)), "logits"),
    "rope": (_edit("target.onnx", _rope_constant), "layer 0 keys"),
}


@pytest.mark.parametrize("fault", LAYER_FAULTS)
def test_the_layer_gate_finds_faults_too(fp32: Built, tmp_path: Path, fault: str) -> None:
    plant, expected = LAYER_FAULTS[fault]
    root = Path(shutil.copytree(fp32.root, tmp_path / "b"))
    plant(fp32, root)
    assert expected in _failed(fp32.layer_rows(root))


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits so low that even a tiny model is cut to pieces, its matrices in parts and read when they are used."""
    for module in (graph_pieces, piecewise_runner):
        monkeypatch.setattr(module, "PIECE_ELEMENTS", 1500)
    for module in (layer_reference, drafter_weights):
        monkeypatch.setattr(module, "LARGE_ELEMENTS", 500)
    monkeypatch.setattr(read_on_use, "PART_ELEMENTS", 1500)
    monkeypatch.setattr(drafter_gate, "PIECEWISE_PARAMETERS", 0)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
def test_models_too_large_for_memory_are_compared_in_pieces(
    precision: str, request: pytest.FixtureRequest, small_pieces: None, tmp_path: Path
) -> None:
    built: Built = request.getfixturevalue(precision)
    require_passed(built.layer_rows())
    require_passed(built.drafter_rows())
    if precision == "fp32":
        root = Path(shutil.copytree(built.root, tmp_path / "b"))
        LAYER_FAULTS["tapped layer"][0](built, root)
        DRAFTER_FAULTS["query"][0](built, root)
        assert "layer 2 output" in _failed(built.layer_rows(root))
        assert "draft_logits" in _failed(built.drafter_rows(root))


def test_a_graph_is_cut_where_its_weights_grow(fp32: Built) -> None:
    proto = ir.to_proto(ir.load(fp32.root / "target.onnx"))
    weights = {t.name: t for t in proto.graph.initializer if t.data_location == 1}
    pieces = graph_pieces.cut_graph(proto.graph, weights)
    assert len(pieces) == 1  # all of it is small
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_pieces, "PIECE_ELEMENTS", 5000)
        pieces = graph_pieces.cut_graph(proto.graph, weights)
    assert sum(len(piece.nodes) for piece in pieces) == len(proto.graph.node)
    assert {piece.sliced for piece in pieces} >= {"lm_head.weight", "model.layers.3.mlp.down_proj.weight"}
    for piece in pieces:
        held = {name for name in graph_pieces.reads(piece.nodes) if name in weights}
        assert len(held) == 1 or sum(np.prod(weights[name].dims) for name in held) <= 5000


def test_nothing_checked_means_failed() -> None:
    with pytest.raises(ParityError, match="nothing was checked"):
        require_passed([])
