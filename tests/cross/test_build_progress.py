"""How far a build of engines is: TensorRT's progress monitor, as a line with an estimate on a terminal."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pairs import Pair
from shallow_engines import BF16, KINDS

from dflash_engines import tensorrt_build, tensorrt_plan
from dflash_engines.build_process import FinishedBuild, run_build
from dflash_engines.tensorrt_build import BuildOrder, BuildOutcome
from dflash_engines.tensorrt_network import acceptance_network
from dflash_runtime.bundle import Bundle
from dflash_tools import progress
from dflash_tools.engines_command import command

pytest.importorskip("tensorrt_rtx")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_real_builder_says_how_far_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(acceptance_network().onnx)
    shapes = [{"block": [1, rows], "posterior": [1, rows]} for rows in (4, 8)]
    order = BuildOrder("tensorrt-rtx", str(tmp_path / "a.onnx"), shapes, "8.9", None, str(tmp_path / "a.engine"))
    told = list[int]()
    run_build(order, None, told.append)
    assert len(told) > 3 and told == sorted(set(told)) and told[0] > 0 and told[-1] <= 1000


def monitor_of(report: io.StringIO) -> Any:
    return tensorrt_build._make_monitor(SimpleNamespace(IProgressMonitor=object), report)


def shares(report: io.StringIO) -> list[int]:
    return [json.loads(line)["permille"] for line in report.getvalue().splitlines()]


def test_a_step_of_a_phase_is_a_share_of_its_parents_step() -> None:
    report = io.StringIO()
    monitor = monitor_of(report)
    monitor.phase_start("build", None, 4)
    assert monitor.step_complete("build", 0) is True  # False would end the build
    monitor.phase_start("tactics", "build", 10)
    for step in range(5):
        monitor.step_complete("tactics", step)
    monitor.phase_finish("tactics")
    monitor.step_complete("build", 1)
    assert shares(report) == [250, 275, 300, 325, 350, 375, 500]
    monitor.step_complete("tactics", 9)  # a phase that is over
    monitor.step_complete("build", 0)  # it never goes back
    assert shares(report)[-1] == 500


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds that tell of ten steps, each of half a second; what they write is no engine, and is kept for nobody."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    now = iter(range(10**6))

    def run(order: BuildOrder, limit: int | None, tell: Callable[[int], None]) -> FinishedBuild:
        for step in range(10):
            tell(100 * step + 100)
        Path(order.engine_path).write_bytes(b"engine")
        return FinishedBuild(BuildOutcome(None, [0] * len(order.profiles), []), 1, 5.0)

    monkeypatch.setattr(tensorrt_plan, "run_build", run)
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: 0.5 * next(now)))


def run_command(bundle: Bundle, stderr: io.StringIO, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys, "stderr", stderr)
    arguments = [str(bundle.path), "--backend", "tensorrt-rtx", "--compute-capability", "8.9", "--block-size", "8"]
    command.main(arguments, standalone_mode=False)


def test_on_a_terminal_it_is_a_line_with_an_estimate(
    scripted: None, bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    run_command(bundle_of(BF16), shown, monkeypatch)
    kept = [line.rpartition("\x1b[K")[2] for line in shown.getvalue().split("\n")]
    assert [re.sub(r": \d+\.\d s$", "", line) for line in kept] == [*(f"build {kind}" for kind in KINDS), ""]
    states = shown.getvalue().split("\r\x1b[K")
    assert "build target 10 %" in states and "build target 50 %, 2 s left" in states
    assert "build target 100 %" in states


def test_in_a_pipe_it_is_silent(
    scripted: None, bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    piped = io.StringIO()
    run_command(bundle_of(BF16), piped, monkeypatch)
    assert piped.getvalue() == "" and "%" not in capsys.readouterr().out
