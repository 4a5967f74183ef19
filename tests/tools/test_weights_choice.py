"""Which weights engines keep: measured where the GPU is at hand, shared where it is not."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest

from dflash_engines.tensorrt_engines import BuiltEngines
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_runtime.errors import EngineError
from dflash_tools.weights_choice import build_faster

OPTIONS = EngineOptions(backend="tensorrt-rtx", compute_capability="8.9")
BUNDLE: Any = types.SimpleNamespace(manifest=types.SimpleNamespace(precision="bf16"))


class Builds:
    """Makes a folder in place of engines."""

    def __init__(self, root: Path, *, precision: str = "bf16", refuses: str | None = None) -> None:
        self.root, self.precision, self.refuses = root, precision, refuses
        self.built: list[str] = []

    def __call__(self, bundle: Any, options: EngineOptions, progress: Any) -> BuiltEngines:
        mode = options.weights_mode
        if mode == self.refuses:
            raise EngineError("Building takes more memory than there is.")
        self.built.append(mode)
        folder = self.root / mode
        folder.mkdir()
        record: Any = types.SimpleNamespace(
            weights_mode=mode, compute_capability=options.compute_capability, execution_precision=self.precision
        )
        return BuiltEngines(record, folder, [], 1.0, 0, 0, 0, ["told before"])


def kept(builds: Builds, ms: dict[str, float], here: str | None = "8.9") -> BuiltEngines:
    built = build_faster(BUNDLE, OPTIONS, build=builds, measure=lambda bundle, backend, mode: ms[mode], here=here)
    assert built.warnings == ["told before"]
    assert [folder.name for folder in builds.root.iterdir()] == [built.record.weights_mode]
    return built


@pytest.mark.parametrize(
    ("shared_ms", "embedded_ms", "mode"), [(10.0, 9.6, "shared"), (10.0, 9.4, "embedded"), (9.0, 10.0, "shared")]
)
def test_embedded_weights_must_be_clearly_faster(
    tmp_path: Path, shared_ms: float, embedded_ms: float, mode: str
) -> None:
    builds = Builds(tmp_path)
    built = kept(builds, {"shared": shared_ms, "embedded": embedded_ms})
    assert built.record.weights_mode == mode and builds.built == ["shared", "embedded"]
    assert f"{shared_ms:.2f} ms with shared and {embedded_ms:.2f} ms with embedded" in built.weights_reason


def test_nothing_is_guessed_without_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = kept(Builds(tmp_path), {}, here="12.0")
    assert other.record.weights_mode == "shared" and "the GPU here is 12.0" in other.weights_reason
    monkeypatch.setattr("dflash_tools.weights_choice.compute_capability_here", lambda: None)
    (tmp_path / "none").mkdir()
    none = kept(Builds(tmp_path / "none"), {}, here=None)
    assert none.record.weights_mode == "shared" and "no GPU here" in none.weights_reason


def test_what_cannot_be_embedded_is_said(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    refused = kept(Builds(tmp_path / "a", refuses="embedded"), {})
    assert refused.record.weights_mode == "shared" and "more memory than there is" in refused.weights_reason
    other = kept(Builds(tmp_path / "b", precision="fp16"), {})
    assert other.record.weights_mode == "shared" and "bf16" in other.weights_reason
