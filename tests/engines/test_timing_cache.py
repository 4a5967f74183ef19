"""Timings are kept from build to build, and what is broken is set aside with a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from dflash_engines.timing_cache import TimingCache


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def timings() -> TimingCache:
    return TimingCache("tensorrt", "10.3.0", "8.7")


def a_build_saves(content: bytes) -> Path:
    first = timings()
    assert first.path is not None and first.warning is None
    first.path.write_bytes(content)
    first.keep()
    return first.path


def test_what_a_build_saved_is_there_for_the_next() -> None:
    path = a_build_saves(b"timings")
    again = timings()
    assert again.path == path and path.read_bytes() == b"timings" and again.warning is None


def test_every_gpu_and_version_has_its_own() -> None:
    path = a_build_saves(b"timings")
    for other in (("tensorrt", "10.3.0", "8.9"), ("tensorrt", "10.16.0", "8.7")):
        assert TimingCache(*other).path != path


@pytest.mark.parametrize("content", [b"", b"timing", b"timingS"])
def test_a_broken_file_is_set_aside_with_a_warning(content: bytes) -> None:
    path = a_build_saves(b"timings")
    path.write_bytes(content)
    again = timings()
    assert again.path == path and not path.exists()
    assert again.warning is not None and str(path) in again.warning
    assert timings().warning is None


def test_a_file_no_build_finished_is_set_aside() -> None:
    path = timings().path
    assert path is not None
    path.write_bytes(b"half of it")
    assert timings().warning is not None and not path.exists()


def test_where_nothing_can_be_written_builds_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = timings()
    assert found.path is None and found.warning is not None
    found.keep()
