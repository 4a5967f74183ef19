"""One buffer of scratch memory for all contexts of all engines: they run one after the other."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from conftest import Make
from pairs import MAIN
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice, RecordingEngine

from dflash_runtime.bundle import Bundle
from dflash_runtime.device import Buffer
from dflash_runtime.device_backend import open_engines
from dflash_runtime.device_engine import EngineProfile
from dflash_runtime.ort_engine import OrtContext

SCRATCH_BYTES = {"target": 1 << 20, "drafter": 3 << 20, "drafter_context": 2 << 20}
"""What these engines say they need; the others, a few kilobytes."""


class GreedyEngine(RecordingEngine):
    """Keeps what its contexts are given."""

    def __init__(self, device: GreedyDevice, path: Path, profiles: Sequence[EngineProfile]) -> None:
        super().__init__(device, path, profiles)
        self.given, self.scratch_bytes = device.given, SCRATCH_BYTES.get(self.kind, 4096)

    def open_context(self, index: int, scratch: Buffer) -> OrtContext:
        self.given.append((self.kind, scratch))
        return super().open_context(index, scratch)


class GreedyDevice(RecordingDevice):
    def __init__(self) -> None:
        super().__init__()
        self.given: list[tuple[str, Buffer]] = []

    def open_engine(self, path: Path, profiles: Sequence[EngineProfile]) -> RecordingEngine:
        return GreedyEngine(self, path, profiles)


@pytest.mark.parametrize("form", BACKENDS)
def test_contexts_share_one_buffer_as_large_as_the_largest_need(exported: Make, tmp_path: Path, form: str) -> None:
    bundle = Bundle.open(shutil.copytree(exported(MAIN), tmp_path / "bundle"))
    write_recorded_engines(bundle, form, [4, 8], 32)
    device = GreedyDevice()
    open_engines(BACKENDS[form], bundle, device, 128)
    kinds = {kind for kind, _ in device.given}
    assert kinds == {*SCRATCH_BYTES, "acceptance", "candidates"} and len(device.given) > 2 * len(kinds)
    assert {buffer for _, buffer in device.given} == {device.given[0][1]}
    assert device.given[0][1].size_bytes == max(SCRATCH_BYTES.values())
    sizes = [entry[1] for entry in device.log if entry[0] == "allocate"]
    assert sizes.count(max(SCRATCH_BYTES.values())) == 1 and not {1 << 20, 2 << 20} & set(sizes)
