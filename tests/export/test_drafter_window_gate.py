"""Drafter windows of thousands of tokens are crossed without running thousands, portable and lowered."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from tiny_models import write_drafter, write_target
from window_edits import widen_window

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_engines.ort_cpu import lower_model
from dflash_export import drafter_gate
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, BuildPlan, plan_build
from dflash_export.drafter_gate import DrafterGate
from dflash_export.parity import PrecisionPasses
from dflash_runtime.bundle import CheckRow, GraphKind, Manifest

WIDTH = 4096
TAPS = (0, 2)
LAYERS: dict[str, dict[str, Any]] = {
    "causal": {"layer_types": ["full_attention", "sliding_attention"]},
    "bidirectional": {"layer_types": ["sliding_attention", "full_attention"], "is_causal": False},
}
PRECISIONS = {"causal": "fp32", "bidirectional": "bf16"}


def _quiet(stage: str, done: int, total: int) -> None: ...


def _lower(model: ir.Model, kind: GraphKind) -> ir.Model:
    return lower_model(model, kind, activations="fp32")


class Built:
    def __init__(self, folder: Path, kind: str) -> None:
        config = write_target(folder / "t", "qwen3", max_position_embeddings=8192)
        facts = {"sliding_window": WIDTH, "max_position_embeddings": 8192, **LAYERS[kind]}
        write_drafter(folder / "d", config, taps=TAPS, **facts)
        options = BuildOptions(str(folder / "t"), str(folder / "d"), max_context_tokens=8192)
        self.plan: BuildPlan = plan_build(dataclasses.replace(options, precision=PRECISIONS[kind]))
        self.root = folder / "b"
        self.root.mkdir()
        self.manifest: Manifest = export_bundle(self.plan, self.root, _quiet)

    def rows(self, root: Path, passes: PrecisionPasses, *, whole_tables: bool = True) -> list[CheckRow]:
        assert self.plan.drafter is not None
        return DrafterGate(root, self.manifest, self.plan.drafter, passes, whole_tables=whole_tables).check(None)


@pytest.fixture(scope="module", params=LAYERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("window"), request.param)


LOWERED = PrecisionPasses(to_fp32, emulate_half, None, _lower)


def test_a_wide_window_is_crossed_and_said(built: Built) -> None:
    rows = built.rows(built.root, LOWERED)
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]
    wide = [row for row in rows if row.tensor.startswith(f"window {WIDTH}")]
    assert {(row.stage, row.tensor.split()[-1]) for row in wide} == {
        (stage, name) for stage in ("portable", "lowered") for name in ("draft_logits", "draft_ids")
    }
    block = built.manifest.drafter.block_size if built.manifest.drafter else 0
    assert {row.covered for row in wide} == {f"window of {WIDTH}: a block of {block} after {WIDTH - 2} given rows"}
    plain = built.rows(built.root, PrecisionPasses(to_fp32, emulate_half))
    assert not [row for row in plain if row.stage == "lowered"]


@pytest.mark.parametrize("pieces", [False, True])
def test_a_drafter_that_is_not_run_whole_is_compared_lowered(
    built: Built, pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pieces:
        monkeypatch.setattr(drafter_gate, "PIECEWISE_PARAMETERS", 0)
    rows = built.rows(built.root, LOWERED, whole_tables=False)
    assert all(row.passed for row in rows), [row for row in rows if not row.passed]
    lowered = {row.tensor for row in rows if row.stage == "lowered"}
    assert {"drafter context", "draft_logits", "draft_ids", f"window {WIDTH} draft_ids"} <= lowered


@pytest.mark.parametrize("change", [1, -1])
def test_a_window_off_by_one_fails(built: Built, tmp_path: Path, change: int) -> None:
    root = Path(shutil.copytree(built.root, tmp_path / "b"))
    model = ir.load(root / "drafter.onnx")
    assert widen_window(model, WIDTH, change)
    ir.save(model, root / "drafter.onnx")
    failed = {(row.stage, row.tensor) for row in built.rows(root, LOWERED) if not row.passed}
    assert failed >= {(stage, f"window {WIDTH} draft_logits") for stage in ("portable", "lowered")}
    assert {tensor for _, tensor in failed} <= {f"window {WIDTH} draft_logits", f"window {WIDTH} draft_ids"}
