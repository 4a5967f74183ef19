"""Windows of thousands of tokens are crossed without running thousands of tokens, and one row too many is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir
import pytest
from tiny_models import write_target
from window_edits import widen_window

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_engines.ort_cpu import lower_model
from dflash_export.build import export_bundle
from dflash_export.build_plan import BuildOptions, BuildPlan, plan_build
from dflash_export.parity import PrecisionPasses
from dflash_export.window_gate import check_windows
from dflash_runtime.bundle import CheckRow, Manifest

PASSES = PrecisionPasses(to_fp32, emulate_half, lambda model: lower_model(model, "target"))
WIDTH = 4096


def _quiet(stage: str, done: int, total: int) -> None: ...


class Built:
    def __init__(self, folder: Path) -> None:
        write_target(
            folder / "t",
            "qwen3",
            use_sliding_window=True,
            sliding_window=WIDTH,
            max_window_layers=2,
            max_position_embeddings=8192,
        )
        self.plan: BuildPlan = plan_build(BuildOptions(str(folder / "t"), precision="bf16", max_context_tokens=8192))
        self.root = folder / "b"
        self.root.mkdir()
        self.manifest: Manifest = export_bundle(self.plan, self.root, _quiet)

    def rows(self, root: Path, reached_tokens: int = 512) -> list[CheckRow]:
        target = self.plan.target
        return check_windows(
            root, self.manifest, target.config, target.places, PASSES, _quiet, reached_tokens=reached_tokens
        )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return Built(tmp_path_factory.mktemp("window"))


def test_a_wide_window_is_crossed_and_said(built: Built) -> None:
    rows = built.rows(built.root)
    assert {row.stage for row in rows} == {"portable", "lowered"}
    assert all(row.passed for row in rows)
    assert {row.covered for row in rows} == {f"window of {WIDTH}: layer 2, 8 rows after {WIDTH - 2} given ones"}
    assert built.rows(built.root, WIDTH) == []


@pytest.mark.parametrize("change", [1, -1])
def test_a_window_off_by_one_fails(built: Built, tmp_path: Path, change: int) -> None:
    root = Path(shutil.copytree(built.root, tmp_path / "b"))
    model = ir.load(root / "target.onnx")
    assert widen_window(model, WIDTH, change)
    ir.save(model, root / "target.onnx")
    failed = {(row.stage, row.tensor) for row in built.rows(root) if not row.passed}
    assert ("portable", f"window {WIDTH} output") in failed
