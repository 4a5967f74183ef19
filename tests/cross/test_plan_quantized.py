"""What `plan` says int8 and int4 weights take, against bundles that hold them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from pairs import MAIN, quiet

from dflash_engines.acceptance_graph import ACCEPTANCE
from dflash_engines.tensorrt_plan import EngineOptions, EnginePlan
from dflash_engines.tensorrt_versions import row_for
from dflash_export.build import export_bundle
from dflash_export.build_plan import plan_build
from dflash_export.quantization import quantize_options
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import BoundWeight
from dflash_tools import plan_formulas
from dflash_tools.decoder_families import read_model_shape
from dflash_tools.plan_against_measured import given_bytes, plan_shapes, stored_as
from dflash_tools.plan_formulas import Storage, model_bytes

WIDE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "tie_word_embeddings": False}


@pytest.mark.parametrize("layers", ["int4", "int8"])
def test_weights_take_what_the_plan_says(tmp_path: Path, layers: str) -> None:
    pair = dataclasses.replace(MAIN, precision="bf16", target=WIDE, drafter={})
    pair.write(tmp_path)
    options = dataclasses.replace(pair.options(tmp_path), drafter=None)
    options = dataclasses.replace(options, quantize=quantize_options(layers, "keep", "keep", 128))
    (tmp_path / "bundle").mkdir()
    manifest = export_bundle(plan_build(options), tmp_path / "bundle", quiet)
    held = sum(entry.length_bytes for entry in manifest.weights.values())
    shape = read_model_shape(json.loads((tmp_path / "target" / "config.json").read_text()), "target")
    assert held == pytest.approx(model_bytes(shape, Storage(layers, "bf16")), rel=0.03)


@pytest.mark.parametrize(("words", "with_drafter"), [
    pytest.param("int4 int4 int4", True, marks=pytest.mark.slow), ("int4 int8 keep", False),
])  # fmt: skip
def test_engines_hold_and_are_given_what_the_plan_says(
    tmp_path: Path, words: str, with_drafter: bool
) -> None:
    """By the networks the builder is given; what it makes of them is for `test_engine_sizes`."""
    pair = dataclasses.replace(MAIN, precision="bf16", target=WIDE, drafter={})
    pair.write(tmp_path)
    options = pair.options(tmp_path) if with_drafter else dataclasses.replace(pair.options(tmp_path), drafter=None)
    options = dataclasses.replace(options, quantize=quantize_options(*words.split(), 128))
    (tmp_path / "bundle").mkdir()
    export_bundle(plan_build(options), tmp_path / "bundle", quiet)
    bundle = Bundle.open(tmp_path / "bundle", check_files=False)
    plan = EnginePlan(bundle, EngineOptions("tensorrt-rtx"), row_for("tensorrt-rtx", "1.7.1"), "1.7.1", "8.9")
    networks = [plan.network(kind) for kind in plan.kinds if kind != ACCEPTANCE]
    held = sum(part.length_bytes for network in networks for part in network.embedded)
    bound = [BoundWeight(w.input, w.weight, w.dtype) for network in networks for w in network.weight_inputs]
    shape, drafter = plan_shapes(bundle)
    stored = [stored_as(bundle.manifest, role) for role in ("target", "drafter")]
    once, again = plan_formulas.held_bytes(shape, drafter, *stored)
    assert held == once + again and held > 0
    given = given_bytes(bundle.manifest, bound)
    assert plan_formulas.given_bytes(shape, drafter, *stored) == pytest.approx(given, rel=0.01)
