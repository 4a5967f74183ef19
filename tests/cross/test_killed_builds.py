"""A build that is killed leaves no bundle-named folder, and the next one goes on from its remains."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Once
from pairs import MAIN, Pair, quiet

from dflash_export import traced_file
from dflash_export.build_plan import BuildOptions
from dflash_export.layer_gate import LayerGate
from dflash_export.staging import check_output_place, resumable_folder, staged_folder
from dflash_runtime import Bundle, OutputError
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


KILLED = {
    "copied": ("--weights-copy", "copy"),
    "linked": ("--weights-copy", "link"),
    "int4": ("--quantize", "int4", "--precision", "bf16"),
}


SHALLOW = Pair(
    "shallow", "llama", target={"num_hidden_layers": 1}, drafter={"layers": 1, "taps": (0,)}, max_context_tokens=64
)
"""Every stage that a larger pair has, sooner."""


@pytest.mark.parametrize(("moments", "kind", "pair"), [
    (1, "copied", SHALLOW),
    *(pytest.param(20, kind, MAIN, marks=pytest.mark.slow) for kind in KILLED),
])
def test_a_killed_build_goes_on_to_the_same_bytes(
    once: Once, tmp_path: Path, moments: int, kind: str, pair: Pair
) -> None:
    checkpoints = once(f"{pair.name}-checkpoints", pair.write)
    script = Path(__file__).parent / "killed_builds.py"
    command = [sys.executable, str(script), str(checkpoints), str(tmp_path), "--moments", str(moments), *KILLED[kind]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("same=True") == moments


def _interrupted(options: BuildOptions, out: Path, stage: str) -> None:
    """A build that somebody ends with Ctrl-C when `stage` is reported."""

    def stop(name: str, done: int, total: int) -> None:
        if name == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(options, out, "ort-cpu", stop)


@pytest.mark.slow
def test_finished_stages_are_kept_and_another_plan_begins_anew(
    once: Once, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = once(f"{MAIN.name}-checkpoints", MAIN.write)
    options, out = dataclasses.replace(MAIN.options(checkpoints), gate="layers"), tmp_path / "b"
    _interrupted(options, out, "check drafter")
    records = tmp_path / ".b.partial" / "stages"
    assert {"target trace.json", "layer 0.json"} <= {path.name for path in records.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == [".b.partial"]
    monkeypatch.setattr(traced_file, "trace_target", None)
    monkeypatch.setattr(LayerGate, "_check_layer", None)
    report = build(options, out, "ort-cpu", quiet)
    assert "a build of the same that was interrupted is continued" in report.notes
    monkeypatch.undo()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    _interrupted(options, out, "check drafter")
    (records / "strange").touch()
    report = build(dataclasses.replace(options, block_sizes=(4,)), out, "none", quiet)
    assert "an interrupted build of something else lay here and was begun anew" in report.notes
    assert report.manifest.block_sizes == [4]
    assert (out / "target.onnx").read_bytes() == before[out / "target.onnx"]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.slow
def test_damaged_remains_are_not_trusted(once: Once, tmp_path: Path) -> None:
    checkpoints = once(f"{MAIN.name}-checkpoints", MAIN.write)
    options, out = dataclasses.replace(MAIN.options(checkpoints), gate="layers"), tmp_path / "b"
    _interrupted(options, out, "check drafter")
    remains = tmp_path / ".b.partial"
    with (remains / "stages" / "traced target.onnx").open("r+b") as stream:
        stream.write(b"damage")
    with (remains / "bundle" / "weights" / "target.safetensors").open("r+b") as stream:
        stream.seek(-8, 2)
        stream.write(b"damaged!")
    (remains / "bundle" / "tokenizer" / "left behind").touch()
    build(options, out, "ort-cpu", quiet)
    Bundle.open(out).check_files(full=True)
    assert not list(out.rglob("left behind"))


def test_two_builds_of_one_place(once: Once, tmp_path: Path) -> None:
    checkpoints = once(f"{MAIN.name}-checkpoints", MAIN.write)
    out = tmp_path / "b"
    with (
        resumable_folder(out),
        pytest.raises(OutputError, match=r"another process is making .*/b in .*\.b\.partial\. Wait for it"),
    ):
        build(MAIN.options(checkpoints), out, "none", quiet)
    assert list(tmp_path.iterdir()) == []
