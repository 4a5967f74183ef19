"""Validation of a GPU's engines, on the device made of NumPy: what they hand out, their caches and their words."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make
from pairs import MAIN, quiet
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_runtime.bundle import Bundle
from dflash_runtime.device_backend import open_engines
from dflash_runtime.device_caches import DeviceCaches
from dflash_tools.reference_building import build_reference
from dflash_tools.reference_file import Reference
from dflash_tools.validate_engine import DeviceEngine
from dflash_tools.validate_run import Validation, validate

FORMS = ["fused", "primitive"]


@pytest.fixture(scope="module")
def bundle(exported: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = shutil.copytree(exported(MAIN), tmp_path_factory.mktemp("validated-device") / "bundle")
    for form in FORMS:
        write_recorded_engines(Bundle.open(copy), form, [4, 8, 16], 32, (32, 64) if form == "primitive" else ())
    return copy


@pytest.fixture(scope="module")
def reference(bundle: Path) -> Reference:
    return build_reference(Bundle.open(bundle), None, None, quiet, new_tokens=20, prompts=["sky", "2 + 2"])


def validated(bundle: Path, form: str, reference: Reference, levels: tuple[str, ...]) -> Validation:
    opened = Bundle.open(bundle, check_files=False)
    engine = DeviceEngine(opened, open_engines(BACKENDS[form], opened, RecordingDevice(), 128))
    found = validate(opened, engine, reference, quiet, levels)
    engine.close()
    return found


@pytest.mark.parametrize("form", FORMS)
def test_a_healthy_engine_passes(bundle: Path, reference: Reference, form: str) -> None:
    found = validated(bundle, form, reference, ("graph", "state", "tokens", "acceptance"))
    assert [verdict.first for verdict in found.verdicts] == [None] * 4
    assert found.passed and found.backend == BACKENDS[form]


def weight(bundle: Path, name: str) -> None:
    entry = Bundle.open(bundle, check_files=False).manifest.weights[name]
    with (bundle / entry.file).open("r+b") as stream:
        stream.seek(entry.offset_bytes + 40)
        stream.write(np.float32(1.5).tobytes())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("name", "graph", "layer"),
    [
        ("model.layers.1.self_attn.v_proj.weight", "target", 1),
        ("drafter.fc.weight", "drafter_context", None),
        ("drafter.layers.1.mlp.up_proj.weight", "drafter", 1),
    ],
)
def test_a_fault_is_named(
    bundle: Path, reference: Reference, tmp_path: Path, form: str, name: str, graph: str, layer: int | None
) -> None:
    copy = shutil.copytree(bundle, tmp_path / "b")
    weight(copy, name)
    (verdict,) = validated(copy, form, reference, ("graph",)).verdicts
    assert verdict.first is not None
    assert (verdict.first.graph, verdict.first.layer, verdict.first.tensor) == (graph, layer, name[: -len(".weight")])


def test_a_row_the_device_loses_is_named(
    bundle: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From what the engine hands out alone: no debug engine shows a fault of the device."""
    commit = DeviceCaches.commit

    def loses_the_last(self: Any, new_rows: Sequence[int], call_rows: int, rows: int, position: int) -> None:
        commit(self, new_rows, call_rows, max(1, rows - 1), position)

    monkeypatch.setattr(DeviceCaches, "commit", loses_the_last)
    (verdict,) = validated(bundle, "primitive", reference, ("graph",)).verdicts
    assert verdict.first is not None
    assert verdict.notes == ["the fault is the engine's own: it does not show on portable graphs"]
    assert (verdict.first.graph, verdict.first.tensor, verdict.first.seen_on) == ("target", "present.0.key", "engine")
