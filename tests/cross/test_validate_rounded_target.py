"""A target that rounds and a drafter in floats: the drafter is held to fp32, its proposals to what the taps bring."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from conftest import Once
from drafter_formats.format_target import TARGET as FORMAT_TARGET
from faults import (
    block_sits_one_position_late,
    context_sits_one_position_late,
    last_slot_is_another_token,
    taps_are_one_layer_late,
    taps_are_swapped,
    window_is_one_narrower,
    window_is_one_wider,
)
from faulty_loops import RUNTIME_FAULTS, RuntimeFault
from pairs import quiet
from planted_faults import Fault, drafter, in_context, in_drafter, in_target, of_pair, scale_channel
from planting import PAIR, manifest, planted, weight
from quantized_planting import export_quantized, one_scale_is_wrong, part
from tiny_models import favour_few_tokens, write_target
from validation_runs import (
    assert_fault_is_named,
    assert_healthy,
    assert_loop_fault_is_named,
    make,
    ort_cpu,
    portable,
    stored,
)

from dflash_engines.ort_cpu import lower_bundle
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, plan_build
from dflash_export.quantization import quantize_options
from dflash_runtime import BundleError
from dflash_runtime.bundle import Bundle
from dflash_tools.portable_reference import portable_reference
from dflash_tools.reference_file import Reference
from dflash_tools.reference_record import INT8_PRODUCTS
from dflash_tools.validate_comparison import EXACT_TOLERANCE, Bounds

PROMPTS = ["sky", "2 + 2"]
TARGET_ALONE = quantize_options("int4", "keep", "keep")


@pytest.fixture(scope="module")
def healthy(once: Once) -> Path:
    return once("rounded-target", lambda folder: export_quantized(folder, PAIR, TARGET_ALONE)) / "bundle"


@pytest.fixture(scope="module")
def reference(healthy: Path, once: Once) -> Reference:
    folder = once("rounded-target-reference", lambda f: make(healthy, f / "r", new_tokens=16, prompts=PROMPTS))
    return stored(folder / "r")


def test_a_healthy_one_passes_every_level(healthy: Path, reference: Reference) -> None:
    assert_healthy(healthy, ort_cpu, reference)
    assert_healthy(healthy, portable, reference)


def test_the_bounds_are_those_of_what_comes_before(reference: Reference) -> None:
    own, bounds = reference.facts.own[INT8_PRODUCTS], Bounds(reference, INT8_PRODUCTS)
    drafters = [value for name, value in own.tensors.items() if not name.startswith("target/")]
    assert drafters and max(drafters) < 1e-6, "on the right taps the drafter has nothing to round"
    assert bounds.allowed("drafter", "draft_logits") < 1.1 * EXACT_TOLERANCE
    for name in ("drafter_context/present.0.key", "drafter_context/present.1.value", "drafter/draft_logits"):
        assert own.state[name] > 1e-3
    assert bounds.margin("drafter") > 0 and bounds.margin("target") > 0


def test_a_bound_without_end_is_refused(reference: Reference) -> None:
    own = reference.facts.own[INT8_PRODUCTS]
    for change in ({"draft_margin": np.inf}, {"state": {**own.state, "drafter_context/present.0.key": np.inf}}):
        endless = {INT8_PRODUCTS: dataclasses.replace(own, **change)}
        facts = dataclasses.replace(reference.facts, own=endless)
        with pytest.raises(BundleError, match="overflows in int8 products at drafter"):
            Bounds(dataclasses.replace(reference, facts=facts), INT8_PRODUCTS)


Q, DOWN = "drafter.layers.0.self_attn.q_proj.weight", "drafter.layers.1.mlp.down_proj.weight"
FAULTS = [
    in_target("taps swapped", 0, "tap", planted(taps_are_swapped), "taps.0", "output of layer 2"),
    in_target("taps one layer late", 0, "tap", planted(taps_are_one_layer_late), "taps.0"),
    in_target("a wrong scale", 1, "MLP", part("model.layers.1.mlp.up_proj.weight", "scales", one_scale_is_wrong)),
    in_context("one number of fc", None, "context", drafter("fc.weight"), "fc"),
    in_context("one number of the drafter's v", 1, "v", drafter("layers.1.self_attn.v_proj.weight")),
    in_context("the context one position late", 0, "rope", planted(context_sits_one_position_late)),
    in_drafter("one number of the drafter's MLP", 1, "MLP", drafter("layers.1.mlp.down_proj.weight")),
    in_drafter("a channel of the drafter's MLP", 1, "MLP", weight(DOWN, scale_channel)),
    in_drafter("a drafter's q two per mille too large", 0, "q", weight(Q, lambda values: values * 1.002)),
    in_drafter("the block one position late", 0, "rope", planted(block_sits_one_position_late)),
    in_drafter("the drafter's window wider", 0, "attention", planted(window_is_one_wider), "", "window"),
    in_drafter("the drafter's window narrower", 0, "attention", planted(window_is_one_narrower)),
    in_drafter("a mask id inside the graph", None, "embedding", planted(last_slot_is_another_token)),
    of_pair("the mask id", "acceptance", "mask id", manifest(lambda d: d["drafter"].update(mask_token_id=510))),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(healthy: Path, reference: Reference, tmp_path: Path, fault: Fault) -> None:
    assert_fault_is_named(healthy, reference, tmp_path, fault)


@pytest.mark.parametrize("fault", RUNTIME_FAULTS, ids=lambda fault: fault.backend.__name__)
def test_a_fault_of_the_loop_is_named(healthy: Path, reference: Reference, fault: RuntimeFault) -> None:
    assert_loop_fault_is_named(healthy, reference, fault)


FORMATS = Path(__file__).parent / "drafter_formats"


@pytest.mark.parametrize("name", ["speculators-reduced", "speculators-dflash2"])
def test_a_drafter_that_does_not_propose_the_likeliest(tmp_path: Path, name: str) -> None:
    """Its proposals are judged by what they are chosen by, in the target's ids; also where graphs are the oracle."""
    write_target(tmp_path / "target", "qwen3", **FORMAT_TARGET)
    favour_few_tokens(tmp_path / "target", 5)
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    rounded = quantize_options("int8", "keep", "keep")
    options = BuildOptions(str(tmp_path / "target"), str(FORMATS / name), quantize=rounded)
    export_bundle(plan_build(options), bundle, quiet)
    lower_bundle(bundle)
    make(bundle, tmp_path / "r", new_tokens=8)
    for reference in (stored(tmp_path / "r"), portable_reference(Bundle.open(bundle, check_files=False), quiet)):
        assert not reference.facts.pair.proposes_likeliest and reference.facts.own[INT8_PRODUCTS].draft_margin > 0
        for index, text in enumerate(reference.facts.texts):
            for number, one in enumerate(text.rounds):
                best = reference.expected(f"text{index}.round{number}_ids")[:, 0]
                scores = reference.expected(f"text{index}.round{number}_logits")
                assert best.tolist() == one.proposed and (scores[:, :1] >= scores).all()
        assert_healthy(bundle, ort_cpu, reference)
