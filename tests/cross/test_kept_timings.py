"""TensorRT times kernels while it builds: a build is given the timings of the one before, for the same GPU and version.

The builder itself is played; that of TensorRT-RTX times kernels when an engine is loaded and is given none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pairs import Pair
from shallow_engines import BF16, options

from dflash_engines import tensorrt_engines, tensorrt_plan
from dflash_engines.build_process import FinishedBuild
from dflash_engines.tensorrt_build import BuildOrder, BuildOutcome
from dflash_engines.tensorrt_engines import BuiltEngines, build_engines
from dflash_engines.tensorrt_versions import row_for
from dflash_runtime.bundle import Bundle


class Builder:
    """Adds a line to the timings, as TensorRT does, and remembers what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[str, bytes] | None] = []

    def __call__(self, order: BuildOrder, limit: int | None, tell: Callable[[int], None]) -> FinishedBuild:
        path = None if order.timing_cache_path is None else Path(order.timing_cache_path)
        held = path.read_bytes() if path is not None and path.exists() else b""
        self.given.append(None if path is None else (path.name, held))
        if path is not None:
            path.write_bytes(held + b"a kernel\n")
        Path(order.engine_path).write_bytes(b"engine")
        return FinishedBuild(BuildOutcome(None, [0] * len(order.profiles), []), 1, 1.0)


@pytest.fixture
def builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builder = Builder()
    monkeypatch.setattr(tensorrt_plan, "run_build", builder)
    return builder


def build_on(capability: str, version: str, bundle: Bundle, backend: str = "tensorrt") -> BuiltEngines:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensorrt_engines, "_installed", lambda name: (row_for(name, version), version))
        patch.setattr(tensorrt_engines, "compute_capability_here", lambda: capability)
        made = options(backend=backend, compute_capability=None, use_cache=False)
        return build_engines(bundle, made)


def test_a_build_goes_on_with_the_timings_of_the_one_before(
    builder: Builder, bundle_of: Callable[[Pair], Bundle], tmp_path: Path
) -> None:
    bundle = bundle_of(BF16)
    first = build_on("8.7", "10.16.2", bundle)
    kept = [given for given in builder.given if given is not None]
    names = {name for name, _ in kept}
    assert len(kept) == 5 and len(names) == 1
    assert [held.count(b"\n") for _, held in kept] == [0, 1, 2, 3, 4] and first.warnings == []
    for capability, version in (("8.9", "10.16.2"), ("8.7", "10.15.1")):
        builder.given.clear()
        build_on(capability, version, bundle)
        other = builder.given[0]
        assert other is not None and other[0] not in names and other[1] == b""


def test_broken_timings_are_ignored_with_a_warning(
    builder: Builder, bundle_of: Callable[[Pair], Bundle], tmp_path: Path
) -> None:
    bundle = bundle_of(BF16)
    build_on("8.7", "10.16.2", bundle)
    (path,) = [path for path in (tmp_path / "cache").rglob("*") if b"a kernel" in _content(path)]
    path.write_bytes(b"half of them")
    builder.given.clear()
    (bundle.path / "engines" / "tensorrt-sm87" / "target.engine").write_bytes(b"")  # it is built again
    again = build_on("8.7", "10.16.2", bundle)
    assert builder.given[0] is not None and builder.given[0][1] == b""
    assert len(again.warnings) == 1 and str(path) in again.warnings[0]


def test_tensorrt_rtx_is_given_none(builder: Builder, bundle_of: Callable[[Pair], Bundle]) -> None:
    build_on("8.9", "1.7.1", bundle_of(BF16), "tensorrt-rtx")
    assert builder.given == [None] * 5


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""
