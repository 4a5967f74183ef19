"""What `plan` says quantised weights take, against bundles that hold them and the networks engines are built from."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from pairs import MAIN, quiet
from tiny_models import edit_json, write_target

from dflash_engines.acceptance_graph import ACCEPTANCE
from dflash_engines.candidates_graph import CANDIDATES
from dflash_engines.tensorrt_network import Network
from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan
from dflash_engines.tensorrt_versions import row_for
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import BoundWeight
from dflash_runtime.errors import EngineError
from dflash_tools import weight_bytes
from dflash_tools.bundle_shape import drafter_shape_of_bundle, model_shape_of_bundle
from dflash_tools.cli import main
from dflash_tools.model_shape import DrafterShape, ModelShape
from dflash_tools.plan_against_measured import bound_bytes, plan_shapes, stored_as

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False,
        "num_hidden_layers": 2}  # fmt: skip
CHECKPOINTS = Path(__file__).parent / "quantized_checkpoints"
ROUNDED = [
    # layers, head, drafter, precision, symmetric, group size
    ("keep keep keep", "fp16", True, 32),
    ("keep keep keep", "bf16", True, 32),
    ("int8 keep keep", "bf16", True, 32),
    ("int8 int8 int8", "fp16", True, 32),
    ("int4 keep keep", "bf16", True, 128),
    ("int4 int8 int4", "bf16", True, 32),
    ("int4 int4 int4", "fp16", True, 64),
    ("int4 keep keep", "bf16", False, 32),
    ("int4 int4 int4", "bf16", False, 64),
    ("fp8 keep keep", "bf16", True, 32),
    ("fp8 fp8 fp8", "bf16", True, 32),
    ("keep keep int4", "bf16", True, 32),
]


def _export(folder: Path, options: BuildOptions) -> Bundle:
    (folder / "bundle").mkdir()
    export_bundle(plan_build(options), folder / "bundle", quiet)
    return Bundle.open(folder / "bundle", check_files=False)


def _rounded(folder: Path, words: str, precision: str, symmetric: bool, group_size: int) -> Bundle:
    pair = dataclasses.replace(MAIN, precision=precision, target=WIDE, drafter={"taps": (0,), "layers": 1})
    pair.write(folder)
    layers, head, drafter = words.split()
    quantize = quantize_options(layers, head, drafter, group_size, symmetric=symmetric)
    return _export(folder, dataclasses.replace(pair.options(folder), quantize=quantize))


def _stored_bytes(bundle: Bundle, role: str) -> int:
    entries = bundle.manifest.weights.items()
    return sum(e.length_bytes for n, e in entries if n.startswith("drafter.") == (role == "drafter"))


def _compare(bundle: Bundle) -> None:
    """To the byte: what files hold by the configs and by the manifest, and what engines are given and hold."""
    shape, drafter = plan_shapes(bundle)
    assert drafter is not None
    storage, own = _compare_files(bundle, shape, drafter)
    networks = _networks(bundle)
    held = sum(part.length_bytes for network in networks for part in network.embedded)
    bound = [BoundWeight(w.input, w.weight, w.dtype) for network in networks for w in network.weight_inputs]
    assert sum(weight_bytes.held_bytes(shape, drafter, storage, own)) == held
    assert weight_bytes.given_bytes(shape, drafter, storage, own) == bound_bytes(bundle.manifest, bound)


def _compare_files(bundle: Bundle, shape: ModelShape, drafter: DrafterShape) -> list[weight_bytes.Storage]:
    storage, own = (stored_as(bundle.manifest, role) for role in ("target", "drafter"))
    listed = model_shape_of_bundle(bundle)
    for model, models_drafter in ((shape, drafter), (listed, drafter_shape_of_bundle(bundle, listed))):
        assert weight_bytes.model_bytes(model, storage) == _stored_bytes(bundle, "target")
        assert weight_bytes.drafter_bytes(models_drafter, own) == _stored_bytes(bundle, "drafter")
    return [storage, own]


def _networks(bundle: Bundle) -> list[Network]:
    plan = EnginePlan(bundle, EngineOptions("tensorrt-rtx"), row_for("tensorrt-rtx", "1.7.1"), "1.7.1", "8.9")
    return [plan.network(kind) for kind in plan.kinds if kind not in (ACCEPTANCE, CANDIDATES)]


@pytest.mark.parametrize(("words", "precision", "symmetric", "group_size"), [
    pytest.param(*case, marks=[] if case[0] == "int4 int4 int4" and not case[2] else pytest.mark.slow)
    for case in ROUNDED
])  # fmt: skip
def test_a_build_stores_what_the_plan_says(
    tmp_path: Path, words: str, precision: str, symmetric: bool, group_size: int
) -> None:
    _compare(_rounded(tmp_path, words, precision, symmetric, group_size))


def _plan(target: Path, drafter: Path) -> dict[str, Any]:
    argv = ["plan", "--target", str(target), "--drafter", str(drafter), "--device", "rtx-4090", "--json"]
    done = CliRunner().invoke(main, argv, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    facts: dict[str, Any] = json.loads(done.stdout)
    return facts


PRECISIONS = {"gptq": "fp32", "modelopt-int4": "fp32"}
"""Where a checkpoint's scales are wider than its own floats."""


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=[] if name == "ct-int4-asymmetric" else pytest.mark.slow)
    for name in ("ct-int4-asymmetric", "ct-int4", "ct-int8", "ct-int8-asymmetric", "ct-fp8", "ct-fp8-tensor", "awq",
                 "gptq", "gptq-int8-asymmetric", "modelopt-int4", "modelopt-fp8")
])  # fmt: skip
def test_a_quantised_checkpoint_takes_what_its_config_says(tmp_path: Path, name: str) -> None:
    target = Path(shutil.copytree(CHECKPOINTS / name, tmp_path / "target"))
    bundle = _export(tmp_path, BuildOptions(str(target), None, precision=PRECISIONS.get(name)))
    shape, _ = plan_shapes(bundle)
    storage = stored_as(bundle.manifest, "target")
    assert storage.matrices == bundle.manifest.precision and shape.quantised_as
    assert weight_bytes.model_bytes(shape, storage) == _stored_bytes(bundle, "target")
    assert weight_bytes.model_bytes(model_shape_of_bundle(bundle), storage) == _stored_bytes(bundle, "target")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["drafter-ct-int4", "drafter-awq", "drafter-gptq", "drafter-ct-fp8"])
def test_a_quantised_drafter_takes_what_its_config_says(tmp_path: Path, name: str) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    write_target(target)
    shutil.copytree(CHECKPOINTS / name, drafter)
    if name == "drafter-ct-fp8":  # its fusing matrix is in floats, and its config does not say so
        config = json.loads((drafter / "config.json").read_text())["quantization_config"]
        edit_json(drafter / "config.json", quantization_config={**config, "ignore": ["lm_head", "fc"]})
    precision = "bf16" if "-ct-" in name else "fp16"
    bundle = _export(tmp_path, BuildOptions(str(target), str(drafter), precision=precision))
    facts = _plan(target, drafter)
    assert "as drafter brings it" in facts["stored"]
    if name != "drafter-ct-int4":
        _compare(bundle)
        return
    shape, listed = plan_shapes(bundle)
    assert listed is not None
    _compare_files(bundle, shape, listed)
    assert "fusing matrix" in " ".join(facts["obstacles"])
    with pytest.raises(EngineError, match=r"drafter\.fc\.weight is quantised with zero points"):
        _networks(bundle)
