"""Validation of bundles with quantised weights: what is wrong is named, what is healthy passes, also without torch."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from click.testing import CliRunner
from conftest import Once
from pairs import quiet
from planting import PAIR
from quantized_planting import (
    QUANTIZED_FAULTS,
    QuantizedFault,
    export_quantized,
    one_scale_is_wrong,
    part,
    write_gptq_target,
    zero_points_are_shifted,
)
from safetensors.torch import load_file
from tiny_models import write_drafter
from validation_runs import (
    LEVELS,
    TORCH,
    assert_healthy,
    first_failure,
    make,
    ort_cpu,
    portable,
    replay_without,
    stored,
)

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.checkpoint import find_checkpoint, with_imported_weights
from dflash_export.deviation import deviation
from dflash_export.quantization import quantize_options
from dflash_export.quantized_formats.imported_place import ImportedPlace
from dflash_export.quantized_places import quantized_facts
from dflash_runtime import BundleError, PairError
from dflash_runtime.bundle import Bundle
from dflash_tools.cli import main
from dflash_tools.portable_reference import portable_reference
from dflash_tools.reference_building import build_reference
from dflash_tools.reference_file import Reference, add_to_bundle, require_fitting
from dflash_tools.reference_record import INT8_PRODUCTS
from dflash_tools.torch_int8_products import rounded_to_int8
from dflash_tools.torch_loading import PairSource
from dflash_tools.validate_comparison import Bounds
from dflash_tools.validate_run import validate

PROMPTS = ["sky", "2 + 2"]
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(scope="module")
def healthy(once: Once) -> Path:
    return once("quantized-exported", export_quantized) / "bundle"


@pytest.fixture(scope="module")
def reference(healthy: Path, once: Once) -> Reference:
    folder = once("quantized-reference", lambda f: make(healthy, f / "r", new_tokens=10, prompts=PROMPTS))
    return stored(folder / "r")


@pytest.mark.parametrize("engine", [ort_cpu, portable], ids=["ort-cpu", "portable"])
def test_a_healthy_one_passes_every_level(healthy: Path, reference: Reference, engine: Any) -> None:
    assert_healthy(healthy, engine, reference)
    precision = engine(Bundle.open(healthy, check_files=False)).precision
    assert precision == (INT8_PRODUCTS if engine is ort_cpu else "fp32")


@pytest.mark.parametrize("fault", QUANTIZED_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(healthy: Path, reference: Reference, tmp_path: Path, fault: QuantizedFault) -> None:
    bundle = shutil.copytree(healthy, tmp_path / "b")
    fault.change(bundle)
    verdict = first_failure(bundle, ort_cpu, reference)
    assert verdict is not None and verdict.first is not None
    found = verdict.first
    assert (verdict.level, found.graph, found.layer, found.part) == ("graph", fault.graph, fault.layer, fault.part)
    assert fault.tensor in found.tensor and found.deviation > found.allowed and "debug engine" in found.seen_on
    assert "a zero point, the order of nibbles" in found.cause


def test_the_reference_is_the_checkpoints_and_not_the_bundles(healthy: Path, reference: Reference, tmp_path: Path
                                                              ) -> None:
    """Made from a bundle that is wrong already, it says the same."""
    bundle = shutil.copytree(healthy, tmp_path / "b")
    part(UP, "scales", one_scale_is_wrong)(bundle)
    again = build_reference(Bundle.open(bundle, check_files=False), None, None, quiet, new_tokens=10, prompts=PROMPTS)
    assert again.arrays.keys() == reference.arrays.keys()
    assert all(np.array_equal(array, reference.arrays[name]) for name, array in again.arrays.items())


@pytest.mark.parametrize(("block", "columns"), [(32, 96), (16, 48), (64, 64)])
def test_pytorch_rounds_activations_as_the_kernels_do(block: int, columns: int) -> None:
    """The bound rests on it: one product by ONNX Runtime's int8 kernel, against PyTorch on rounded activations."""
    rng = np.random.default_rng(block)
    values = rng.integers(0, 256, (24, columns)).astype(np.uint8)
    scales = (rng.random((24, columns // block)) * 0.01 + 0.001).astype(np.float32)
    given = (rng.standard_normal((1, 5, columns)) * 3).astype(np.float32)
    given[0, 2, :block] = 0
    found = _product(values.reshape(24, -1, block), scales, given)
    weight = (values.reshape(24, -1, block).astype(np.float32) - 128) * scales[..., None]
    rounded = rounded_to_int8(torch.from_numpy(given), block).numpy()
    expected, exact = (x @ weight.reshape(24, columns).T for x in (rounded, given))
    assert deviation(found, expected) < 1e-5 < 1e-3 < deviation(found, exact)


def _product(values: Any, scales: Any, given: Any) -> Any:
    stored = [ir.tensor(array, name=name) for name, array in (("b", values), ("s", scales))]
    weights = [ir.Value(name=t.name, shape=t.shape, type=ir.TensorType(t.dtype), const_value=t) for t in stored]
    x = ir.Value(name="x", shape=ir.Shape(given.shape), type=ir.TensorType(ir.DataType.FLOAT))
    count, blocks, block = values.shape
    attributes = {"K": blocks * block, "N": count, "bits": 8, "block_size": block, "accuracy_level": 4}
    node = ir.node("MatMulNBits", [x, *weights], attributes, domain="com.microsoft")
    node.outputs[0].name, node.outputs[0].type = "y", ir.TensorType(ir.DataType.FLOAT)
    graph = ir.Graph([x], [node.outputs[0]], nodes=[node], initializers=weights, name="g",
                     opset_imports={"": 24, "com.microsoft": 1})  # fmt: skip
    data = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return ort.InferenceSession(data, providers=["CPUExecutionProvider"]).run(None, {"x": given})[0]


def test_an_engine_that_keeps_activations_is_judged_exactly(healthy: Path, reference: Reference, tmp_path: Path
                                                            ) -> None:
    bundle = shutil.copytree(healthy, tmp_path / "b")
    lower_bundle(bundle, activations="fp32")
    assert ort_cpu(Bundle.open(bundle)).precision == "fp32"
    assert_healthy(bundle, ort_cpu, reference)


def test_without_a_reference_the_portable_graphs_say_what_is_right(healthy: Path) -> None:
    """They round as PyTorch does, so that the lowered engine is judged by the same kind of bound."""
    found = portable_reference(Bundle.open(healthy, check_files=False), quiet)
    assert found.facts.own[INT8_PRODUCTS].tensors["target/logits"] > 0.01
    assert_healthy(healthy, ort_cpu, found)


def test_a_reference_of_another_quantisation_is_refused(healthy: Path, reference: Reference) -> None:
    other = dict(reference.facts.quantized)
    del other[UP]
    facts = dataclasses.replace(reference.facts, quantized=other)
    with pytest.raises(BundleError, match=r"for model.layers.1.mlp.up_proj.weight as not quantised, the bundle.*int4"):
        require_fitting(dataclasses.replace(reference, facts=facts), Bundle.open(healthy, check_files=False))
    lacking = dataclasses.replace(reference, facts=dataclasses.replace(reference.facts, own={}))
    with pytest.raises(BundleError, match="deviates in int8 products"):
        Bounds(lacking, INT8_PRODUCTS)


VARIANTS = {
    "int4-groups-of-64-bf16": (("int4", "keep", "int4"), {"group_size": 64}, "bf16", True),
    "int8-fp16": (("int8", "int8", "keep"), {}, "fp16", False),
    "drafter-alone": (("keep", "keep", "int4"), {"symmetric": False}, None, False),
    "target-alone-bf16": (("int4", "keep", "keep"), {"symmetric": False}, "bf16", False),
    "head-alone": (("keep", "int4", "keep"), {}, None, False),
    "head-alone-tied": (("keep", "int8", "keep"), {}, "bf16", True),
    "fp8": (("fp8", "keep", "fp8"), {}, "bf16", False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "fp8" else pytest.mark.slow) for name in VARIANTS]
)
def test_other_healthy_ones_pass(tmp_path: Path, name: str) -> None:
    words, options, precision, tied = VARIANTS[name]
    target = {**PAIR.target, "tie_word_embeddings": tied}
    pair = dataclasses.replace(PAIR, precision=precision, target=target)
    bundle = export_quantized(tmp_path, pair, quantize_options(*words, **options))  # type: ignore[arg-type]
    make(bundle, tmp_path / "r", new_tokens=8, prompts=PROMPTS)
    for engine in (ort_cpu, portable):
        assert_healthy(bundle, engine, stored(tmp_path / "r"))


def test_pytorch_holds_imported_weights_by_the_checkpoints_own_tensors(tmp_path: Path) -> None:
    """No bundle is needed for it: what GPTQ's numbers mean, and the rest as it is stored."""
    write_gptq_target(tmp_path / "target")
    checkpoint = with_imported_weights(find_checkpoint(str(tmp_path / "target"), role="target"))
    imported = {name: one for name, one in checkpoint.places.items() if isinstance(one, ImportedPlace)}
    quantized = {name: quantized_facts(name, 4, 32, False, "GPTQ") for name in imported}
    facts = SimpleNamespace(embedding_weight="model.embed_tokens.weight", head_weight="lm_head.weight")
    manifest: Any = SimpleNamespace(
        precision="fp32", quantized=quantized, weights=dict.fromkeys(checkpoint.places), target=facts
    )
    oracle = PairSource(manifest, checkpoint, None, [0]).load("fp32")
    found = dict(oracle._target.model.named_parameters())
    raw = load_file(tmp_path / "target" / "model.safetensors")
    assert torch.equal(found["lm_head.weight"], raw["lm_head.weight"])
    name = "model.layers.1.self_attn.k_proj"
    words, zeros = (raw[f"{name}.{part}"].numpy().view(np.uint32) for part in ("qweight", "qzeros"))
    for row, column in ((0, 0), (5, 33), (31, 63)):
        value = words[column // 8, row] >> np.uint32(4 * (column % 8)) & np.uint32(15)
        zero = zeros[column // 32, row // 8] >> np.uint32(4 * (row % 8)) & np.uint32(15)
        meant = (float(value) - float(zero)) * float(raw[f"{name}.scales"][column // 32, row])
        assert found[f"{name}.weight"][row, column].item() == pytest.approx(meant)
    other = {**quantized, f"{name}.weight": quantized_facts(f"{name}.weight", 4, 64, False, "GPTQ")}
    manifest.quantized = other
    with pytest.raises(PairError, match=r"k_proj.weight is .*group_size=64.* in the bundle and .*group_size=32"):
        PairSource(manifest, checkpoint, None, [0]).load("fp32")


@pytest.mark.slow
def test_imported_weights_and_a_drafter_quantised_apart(tmp_path: Path) -> None:
    """A GPTQ target, which Transformers cannot load here, beside an int4 drafter of another scheme."""
    write_drafter(tmp_path / "drafter", write_gptq_target(tmp_path / "target"), taps=(0,), block_size=4)
    options = BuildOptions(
        str(tmp_path / "target"), str(tmp_path / "drafter"), precision="fp32", max_context_tokens=96,
        quantize=quantize_options("keep", "keep", "int4"),
    )  # fmt: skip
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    export_bundle(plan_build(options), bundle, quiet)
    lower_bundle(bundle)
    origins = {name[:8]: facts.origin for name, facts in Bundle.open(bundle).manifest.quantized.items()}
    assert origins == {"model.la": "GPTQ", "drafter.": "round-to-nearest"}
    make(bundle, tmp_path / "r", new_tokens=8, prompts=PROMPTS)
    for engine in (ort_cpu, portable):
        assert_healthy(bundle, engine, stored(tmp_path / "r"))
    name = "model.layers.1.self_attn.k_proj.weight"
    part(name, "zero_points", zero_points_are_shifted)(bundle)
    verdict = first_failure(bundle, ort_cpu, stored(tmp_path / "r"))
    assert verdict is not None and verdict.first is not None
    assert (verdict.level, verdict.first.tensor) == ("graph", name.removesuffix(".weight"))


@pytest.mark.parametrize("blocked", [TORCH, [*TORCH, "onnx", "onnx_ir", "onnxscript"]], ids=["torch", "onnx too"])
def test_replay_without_torch(healthy: Path, reference: Reference, tmp_path: Path, blocked: list[str]) -> None:
    bundle = shutil.copytree(healthy, tmp_path / "b")
    add_to_bundle(Bundle.open(bundle, check_files=False), reference)

    code, found = replay_without(blocked, bundle)
    assert code == 0 and found["passed"]
    closer = "onnx_ir" not in blocked
    assert ("through int8 activations alone" in "".join(found["verdicts"][0]["notes"])) == (not closer)
    part("model.layers.0.self_attn.v_proj.weight", "scales", lambda scales: np.roll(scales, 1, axis=0))(bundle)
    _restamp(bundle)
    code, found = replay_without(blocked, bundle)
    first = found["verdicts"][0]["first"]
    assert code == 1 and (first["graph"], first["layer"], first["part"]) == ("target", 0, "v")
    named = "model.layers.0.self_attn.v_proj" if closer else "present.0.value"
    assert first["tensor"] == named


def _restamp(bundle: Path) -> None:
    """Hashes that fit the damaged files: as a faulty exporter would have written them."""
    from dflash_runtime.bundle import file_facts

    data = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    for name, facts in file_facts(bundle, list(data["files"])).items():
        data["files"][name] = dataclasses.asdict(facts)
    (bundle / "bundle.json").write_text(json.dumps(data), encoding="utf-8")


def test_the_commands(healthy: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(healthy, tmp_path / "b")
    runner = CliRunner()
    made = runner.invoke(main, ["reference", str(bundle), "--new-tokens", "6", "--json"])
    assert made.exit_code == 0 and json.loads(made.output)["precisions"] == [INT8_PRODUCTS]
    levels = [word for level in LEVELS for word in ("--level", level)]
    found = runner.invoke(main, ["validate", str(bundle), *levels])
    assert found.exit_code == 0 and "activations in fp32" in found.output


def test_a_whole_validation_says_what_it_computes_in(healthy: Path, reference: Reference) -> None:
    bundle = Bundle.open(healthy, check_files=False)
    found = validate(bundle, ort_cpu(bundle), reference, quiet, ("graph",))
    assert found.precision == INT8_PRODUCTS and found.passed
