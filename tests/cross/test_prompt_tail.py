"""A prompt is read in chunks, and what is left of it by the smallest profile that covers it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from conftest import Make
from pairs import MAIN
from recorded_engines import BACKENDS, write_recorded_engines
from recording_device import RecordingDevice

from dflash_runtime import GenerationConfig, Session
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_backend import open_engines
from dflash_runtime.device_engine import EngineProfile
from dflash_runtime.device_graph import DeviceGraph

BLOCKS, CHUNK = [4, 8, 16], 32
CALLS = {1: [1], 3: [4], 6: [8], 13: [16], 17: [32], 32: [32], 33: [32, 1], 45: [32, 16], 70: [32, 32, 8]}
"""Tokens of a prompt -> rows of the profiles that read it."""


@pytest.fixture(scope="module")
def bundle(exported: Make, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    copy = Bundle.open(shutil.copytree(exported(MAIN), tmp_path_factory.mktemp("tail") / "bundle"))
    for form in BACKENDS:
        write_recorded_engines(copy, form, BLOCKS, CHUNK)
    return copy


def rows_of(device: RecordingDevice, kind: str) -> list[int]:
    return [entry[1] for entry in device.log if entry[0] == kind]


def check_tails(bundle: Bundle, form: str) -> None:
    """One token is asked for, which the prompt's last row says: nothing but the prompt runs."""
    for tokens, expected in CALLS.items():
        device = RecordingDevice()
        session = Session(bundle, open_engines(BACKENDS[form], bundle, device, CHUNK), None)
        session.generate([*range(tokens)], GenerationConfig(max_new_tokens=1, stop_token_ids=()))
        assert rows_of(device, "target") == expected, f"a prompt of {tokens}"
        assert rows_of(device, "drafter_context") == expected, f"a prompt of {tokens}"
        session.close()


@pytest.mark.parametrize("form", BACKENDS)
def test_the_tail_takes_the_smallest_profile_that_covers_it(bundle: Bundle, form: str) -> None:
    check_tails(bundle, form)


@pytest.mark.parametrize("kind", ["target", "drafter_context"])
def test_a_tail_read_as_a_full_chunk_shows(bundle: Bundle, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: the prompt's profile, whatever is left of it."""
    pick = DeviceGraph.pick

    def largest(self: DeviceGraph, rows: int, logit_rows: int, layout_rows: int) -> EngineProfile:
        return pick(self, CHUNK if self.facts.kind == kind else rows, logit_rows, layout_rows)

    monkeypatch.setattr(DeviceGraph, "pick", largest)
    with pytest.raises(AssertionError, match="a prompt of 1"):
        check_tails(bundle, "fused")


def test_without_a_small_profile_a_larger_one_does(bundle: Bundle, tmp_path: Path) -> None:
    """What was not built cannot be taken: the next larger block reads the tail."""
    copy = Bundle.open(shutil.copytree(bundle.path, tmp_path / "bundle"))
    write_recorded_engines(copy, "fused", [16], CHUNK)
    device = RecordingDevice()
    session = Session(copy, open_engines(BACKENDS["fused"], copy, device, CHUNK), None)
    session.generate([*range(6)], GenerationConfig(max_new_tokens=1, stop_token_ids=()))
    assert rows_of(device, "target") == [16] == rows_of(device, "drafter_context")
