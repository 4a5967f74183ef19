"""A build that is killed leaves no bundle-named folder, and the next one clears its remains away."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Once
from pairs import MAIN, quiet

from dflash_export.staging import check_output_place, staged_folder
from dflash_runtime import Bundle
from dflash_tools.pipeline import build

STAGED = """
import sys, time
from pathlib import Path
from dflash_export import staging
out, moment = Path(sys.argv[1]), sys.argv[2]
def stop(*args, **options):
    print("here", flush=True)
    time.sleep(60)
if moment == "moved":
    rmtree, staging.shutil.rmtree = staging.shutil.rmtree, stop
if moment == "moving":
    rename = Path.rename
    Path.rename = lambda self, to: stop() if self.name.endswith(".partial") else rename(self, to)
with staging.staged_folder(out) as root:
    (root / "bundle.json").write_text("new")
    if moment == "writing":
        stop()
"""


@pytest.mark.parametrize(("moment", "after"), [("writing", "old"), ("moving", None), ("moved", "new")])
def test_an_older_bundle_survives_whenever_it_is_replaced(tmp_path: Path, moment: str, after: str | None) -> None:
    out = tmp_path / "a bundle"
    with staged_folder(out) as root:
        (root / "bundle.json").write_text("old")
    other = tmp_path / ".a bundle.12.3.partial"  # of a bundle called "a bundle.12"
    other.mkdir()
    child = subprocess.Popen([sys.executable, "-c", STAGED, str(out), moment], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "here\n"
    check_output_place(out, 1)  # a build that is alive is left alone
    assert len(list(tmp_path.iterdir())) >= 3 - (after is None)
    child.send_signal(signal.SIGKILL)
    child.wait()
    manifest = out / "bundle.json"
    assert (manifest.read_text() if manifest.exists() else None) == after
    check_output_place(out, 1)
    assert manifest.read_text() == (after or "old")
    assert {path.name for path in tmp_path.iterdir()} == {out.name, other.name}


def _appears(pattern: str) -> Callable[[Path], bool]:
    return lambda folder: any(folder.glob(f".*.partial/{pattern}"))


MOMENTS = ["weights", "drafter.onnx", "engines/ort-cpu/engine.json"]


@pytest.mark.parametrize(
    "pattern", [pytest.param(m, marks=[pytest.mark.slow] if m != MOMENTS[1] else []) for m in MOMENTS]
)
def test_a_killed_build_leaves_nothing_with_a_name(once: Once, tmp_path: Path, pattern: str) -> None:
    checkpoints = once(f"{MAIN.name}-checkpoints", MAIN.write)
    out = tmp_path / "b"
    command = ["build", "--target", checkpoints / "target", "--drafter", checkpoints / "drafter", "--out", out]
    child = subprocess.Popen(
        [sys.executable, "-m", "dflash_tools.cli", *map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 240
    while not _appears(pattern)(tmp_path) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert child.poll() is None, child.communicate()
    child.kill()
    child.communicate()
    assert [path.name for path in tmp_path.iterdir()] == [f".b.{child.pid}.partial"]
    if pattern == MOMENTS[-1]:
        build(MAIN.options(checkpoints), out, "ort-cpu", quiet)
        Bundle.open(out)
    else:
        with staged_folder(out) as root:
            (root / "bundle.json").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
