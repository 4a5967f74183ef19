"""Validation of a GPU's engines, on the device made of NumPy: what they hand out, their caches and their words."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Make
from pairs import MAIN, quiet
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_runtime.bundle import Bundle
from dflash_runtime.device_backend import DeviceBackend, open_engines
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

    def loses_the_last(self: Any, new_rows: Iterator[int], call_rows: int, rows: int, slot: int) -> None:
        commit(self, new_rows, call_rows, max(1, rows - 1), slot)

    monkeypatch.setattr(DeviceCaches, "commit", loses_the_last)
    (verdict,) = validated(bundle, "primitive", reference, ("graph",)).verdicts
    assert verdict.first is not None
    assert verdict.notes == ["the fault is the engine's own: it does not show on portable graphs"]
    assert (verdict.first.graph, verdict.first.tensor, verdict.first.seen_on) == ("target", "present.0.key", "engine")


def drops_the_first_row(self: Any, new_rows: Iterator[int], call_rows: int, rows: int, slot: int) -> None:
    """The row of the anchor is not committed in rounds; the others are."""
    if slot == 0 or rows < 2:
        COMMIT(self, new_rows, call_rows, rows, slot)
        return
    sizes = [len(group.members) * group.heads for group in self.groups]
    assert all(sizes)
    later = iter([source + group.row_bytes for group, source in zip(self.groups, new_rows, strict=False)])
    COMMIT(self, later, call_rows, rows - 1, slot + 1)


def forgets_rows_that_move(self: Any, least: int, rows: int, committed_rows: int) -> None:
    """Caches change to another layout and the rows stay where they were."""
    MOVE(self, least, rows, 0)


def appends_every_other_time(self: Any, rows: int, position: int) -> None:
    """A cycle on the device forgets its tap rows now and then: the drafter's rows are those of a rejected block."""
    if self._enqueued % 2 or position < self._position:
        APPEND(self, rows, position)


COMMIT, MOVE, APPEND = DeviceCaches.commit, DeviceCaches._move, DeviceBackend.append_context


@pytest.mark.parametrize(
    ("form", "owner", "name", "fault", "graph"),
    [
        ("primitive", DeviceCaches, "commit", drops_the_first_row, "target"),
        ("primitive", DeviceCaches, "_move", forgets_rows_that_move, "target"),
        ("fused", DeviceBackend, "append_context", appends_every_other_time, "drafter_context"),
    ],
)
def test_the_state_level_reads_what_the_backend_holds(
    bundle: Path, reference: Reference, monkeypatch: pytest.MonkeyPatch, form: str, owner: Any, name: str, fault: Any,
    graph: str,
) -> None:  # fmt: skip
    """Faults of the backend's own bookkeeping: its engines are right, and so is every call on caches of its own."""
    monkeypatch.setattr(owner, name, fault)
    (verdict,) = validated(bundle, form, reference, ("state",)).verdicts
    assert verdict.status == "failed" and verdict.first is not None
    found, text = verdict.first, reference.facts.texts[0]
    assert (found.graph, found.layer, found.part, found.tensor) == (graph, 0, "cached key", "present.0.key")
    row = int(found.where.split()[1])
    assert f"(position {row}) of text 0, after the decode loop" in found.where
    assert row < len(text.ids) + len(text.tokens) - 1
    if name == "commit":
        assert row in {one.position for one in text.rounds}
