"""TensorRT-RTX engines of real tiny pairs, built without a GPU, and everything around them."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
from conftest import Make
from pairs import MAIN, Pair, quiet
from shallow_engines import BF16, FP16, KINDS, options, take_the_form

from dflash_engines import build_process, tensorrt_engines
from dflash_engines.build_process import run_build
from dflash_engines.tensorrt_build import BuildOrder
from dflash_engines.tensorrt_engines import BuiltEngines, build_engines
from dflash_engines.tensorrt_plan import EngineOptions
from dflash_export.parity import require_passed
from dflash_runtime.bundle import Bundle
from dflash_runtime.device_engine import DeviceEngineRecord, check_device_engine, device_tag, engine_folders
from dflash_runtime.errors import EngineError, OutputError, ParityError
from dflash_tools import lowered_check
from dflash_tools.pipeline import build

pytest.importorskip("tensorrt_rtx")
pytestmark = pytest.mark.usefixtures("engines_are_kept")


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_embedded_weights_and_the_other_precision(bundle_of: Callable[[Pair], Bundle]) -> None:
    bundle = bundle_of(BF16)
    shared = build_engines(bundle, options())
    embedded = build_engines(bundle, options(weights_mode="embedded"))
    assert embedded.folder.name == "tensorrt-rtx-sm89-embedded" and shared.folder.name == "tensorrt-rtx-sm89"
    assert all(not engine.weights for engine in embedded.record.engines) and embedded.weight_bytes == 0
    assert embedded.engine_bytes > shared.engine_bytes
    half = build_engines(bundle, options(precision="fp16"))
    pairs = zip(shared.record.engines, half.record.engines, strict=True)
    assert [one.kind for one, other in pairs if one.build_key == other.build_key] == ["acceptance", "candidates"]
    assert half.record.execution_precision == "fp16"
    assert {w.dtype for engine in half.record.engines for w in engine.weights} == {"F16", "F32"}
    with pytest.raises(EngineError, match="keep the bundle's precision, bf16, and fp16 is asked"):
        build_engines(bundle, options(weights_mode="embedded", precision="fp16"))


def test_residuals_in_fp32_on_request(bundle_of: Callable[[Pair], Bundle]) -> None:
    bundle = bundle_of(FP16)
    before = build_engines(bundle, options())
    kept = build_engines(bundle, options(fp32_residuals=True))
    # The drafter's context embeds nothing and has no stream: its engine is the same one.
    assert kept.reused == ["drafter_context", "acceptance", "candidates"]
    assert (before.record.versions.get("residuals"), kept.record.versions["residuals"]) == (None, "fp32")
    assert {w.dtype for w in kept.record.engines[0].weights} == {w.dtype for w in before.record.engines[0].weights}


def test_the_primitive_form(bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    """What TensorRT 10.3 is given: a short context reads a short cache."""
    take_the_form("primitive", monkeypatch)
    bundle = bundle_of(FP16)
    longer = Bundle(bundle.path, dataclasses.replace(bundle.manifest, max_context_tokens=1024 - 16))
    built = build_engines(longer, options())
    assert built.record.form == "primitive"
    target = built.record.engines[0]
    assert {p.capacity_rows for p in target.profiles} == {512, 1024}


def test_what_fits_is_not_built_again(bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = bundle_of(BF16)
    first = build_engines(bundle, options())
    monkeypatch.setattr(build_process.subprocess, "Popen", forbidden)
    again = build_engines(bundle, options(use_cache=False))
    assert again.reused == KINDS and again.record.files == first.record.files
    with pytest.raises(AssertionError, match="nothing is to be built"):
        build_engines(bundle, options(block_sizes=(4,), use_cache=False))
    (first.folder / "drafter.engine").write_bytes(b"damaged")
    with pytest.raises(AssertionError, match="nothing is to be built"):
        build_engines(bundle, options(use_cache=False))


def forbidden(*arguments: Any, **others: Any) -> Any:
    raise AssertionError("nothing is to be built")


def test_a_fine_tune_gets_the_engines_of_its_shape(
    bundle_of: Callable[[Pair], Bundle], exported: Make, tmp_path: Path, empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = build_engines(bundle_of(BF16), options())
    tuned = shutil.copytree(exported(BF16), tmp_path / "tuned")
    weights = tuned / "weights" / "target.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1000:] = bytes(1000)
    weights.write_bytes(data)
    bundle = Bundle.open(tuned, check_files=False)
    monkeypatch.setattr(build_process.subprocess, "Popen", forbidden)
    built = build_engines(bundle, options())
    assert built.reused == KINDS and built.record.files == first.record.files
    cached = next((empty_cache / "dflash-export" / "built-engines").glob("*.engine"))
    cached.write_bytes(b"altered")
    shutil.rmtree(built.folder)
    with pytest.raises(AssertionError, match="nothing is to be built"):
        build_engines(bundle, options())
    assert not list(tuned.rglob("*partial*")) and not built.folder.exists()


def test_a_read_only_bundle_gets_its_engines_in_the_cache(
    bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(BF16)
    real = os.access
    inside = str(bundle.path)
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).startswith(inside) and real(path, mode))
    built = build_engines(bundle, options())
    assert built.folder == engine_folders(bundle, device_tag("tensorrt-rtx", "8.9"))[1]
    assert not (bundle.path / "engines" / "tensorrt-rtx-sm89").exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compute_capability": "9.0"}, "no kernels for compute capability 9.0; it has them for 7.5"),
        ({"compute_capability": "89"}, "'89' is no compute capability"),
        ({"compute_capability": None}, "no NVIDIA GPU to build for. Name one with --compute-capability"),
        ({"block_sizes": (32,)}, r"Block sizes \[32\] do not fit the bundle, which takes 2 to 16"),
        ({"backend": "tensorrt", "compute_capability": "8.7"}, "tensorrt is not installed"),
        ({"max_build_memory_bytes": 60 << 20, "use_cache": False}, "allowed 60 MiB. Allow more with --max-b"),
    ],
)
def test_what_cannot_be_built(
    changes: dict[str, Any], words: str, bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_engines, "compute_capability_here", lambda: None)
    bundle = bundle_of(BF16)
    with pytest.raises(EngineError, match=words):
        build_engines(bundle, options(**changes))
    assert not (bundle.path / "engines" / "tensorrt-rtx-sm89").exists()
    assert not list(bundle.path.rglob("*partial*"))


def test_an_fp32_bundle_is_refused_with_the_way_out(bundle_of: Callable[[Pair], Bundle]) -> None:
    with pytest.raises(EngineError, match=r"fp32 bundle and TensorRT engines .* in fp16 or bf16.*--precision bf16"):
        build_engines(bundle_of(MAIN), options())


def test_build_makes_engines_and_checks_what_they_are_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BF16.write(tmp_path)
    asked = options()
    report = build(BF16.options(tmp_path), tmp_path / "bundle", "ort-cpu", quiet, [asked])
    (built,) = report.engines
    assert built.folder == tmp_path / "bundle" / "engines" / "tensorrt-rtx-sm89"
    assert DeviceEngineRecord.read(built.folder, "") == built.record
    assert {"target logits", "target cache", "drafter draft_ids"} <= {
        row.tensor for row in report.manifest.checks if row.stage == "network" and row.passed
    }
    real = lowered_check.lower_fused

    def shifted(model: ir.Model) -> ir.Model:
        lowered = real(model)
        for node in [node for node in lowered.graph if node.op_type == "LessOrEqual"]:
            node.op_type = "Less"  # a token does not see itself
        return lowered

    monkeypatch.setattr(lowered_check, "lower_fused", shifted)
    with pytest.raises(ParityError, match="network"):
        require_passed(lowered_check.check_fused(Bundle.open(tmp_path / "bundle")))


def test_a_gpu_without_kernels_is_refused_before_any_work(tmp_path: Path) -> None:
    BF16.write(tmp_path)
    for asked, words in (
        (EngineOptions("tensorrt-rtx", "9.0"), "no kernels for compute capability 9.0"),
        (EngineOptions("tensorrt", "8.9"), "tensorrt is not installed"),
    ):
        with pytest.raises(EngineError, match=words):
            build(BF16.options(tmp_path), tmp_path / "bundle", "ort-cpu", forbidden, [asked])


def test_an_engine_that_copies_its_weights_is_refused(
    bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch memory beyond workspaces and intermediate values can only be weights written out again."""
    monkeypatch.setattr(tensorrt_engines, "_COPY_ALLOWANCE_BYTES", 1 << 10)
    bundle = bundle_of(BF16)
    with pytest.raises(EngineError, match="it copies weights on every call"):
        build_engines(bundle, options(use_cache=False))
    assert not (bundle.path / "engines" / "tensorrt-rtx-sm89").exists()


def test_a_build_that_has_no_room_does_not_start(
    bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorrt_engines, "available_bytes", lambda: 300 << 20)
    monkeypatch.setattr(build_process.subprocess, "Popen", forbidden)
    with pytest.raises(EngineError, match=r"target engine takes about 4\d\d MiB and 300 MiB of memory"):
        build_engines(bundle_of(BF16), options(use_cache=False))


def test_paths_nobody_wants(exported: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Embedded weights are found by the parser from the graph's own folder."""
    root = tmp_path / "模型 dir" / "é x" / "-b"
    shutil.copytree(exported(BF16), root)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    built = build_engines(Bundle.open(root), options(weights_mode="embedded", use_cache=False))
    assert DeviceEngineRecord.read(built.folder, "") == built.record
    assert not list(elsewhere.iterdir()) and not list(root.glob(".*"))


def test_a_full_disk_leaves_the_engines_before(
    bundle_of: Callable[[Pair], Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_of(BF16)
    first = build_engines(bundle, options())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensorrt_engines, "write_record", full)
    with pytest.raises(OutputError, match=r"cannot be written to .*: No space left on device"):
        build_engines(bundle, options(precision="fp16"))
    assert DeviceEngineRecord.read(first.folder, "") == first.record
    assert not list((bundle.path / "engines").glob(".partial-*"))


def test_engines_of_something_else_are_refused_with_both_values(bundle_of: Callable[[Pair], Bundle]) -> None:
    bundle = bundle_of(BF16)
    record = build_engines(bundle, options()).record
    fits = {"tensorrt_version": record.tensorrt_version, "compute_capability": "8.9", "remedy": "Run: X"}
    check_device_engine(record, bundle, **fits)
    for change, words in (
        ({"compute_capability": "12.0"}, "made for compute capability 8.9, here is 12.0"),
        ({"tensorrt_version": "1.8"}, f"made for tensorrt-rtx {record.tensorrt_version}, here is 1.8"),
    ):
        with pytest.raises(EngineError, match=f"{words}.*Run: X"):
            check_device_engine(record, bundle, **{**fits, **change})
    other = dataclasses.replace(record, source={**record.source, "target.onnx": "f" * 64})
    with pytest.raises(EngineError, match=r"made from target\.onnx ffffffffffff, the bundle has"):
        check_device_engine(other, bundle, **fits)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "target.engine").unlink(), "target.engine is missing"),
        (lambda folder: (folder / "target.engine").write_bytes(b""), "target.engine is incomplete or altered"),
        (lambda folder: cut_in_half(folder / "target.engine"), "target.engine is incomplete or altered"),
        (lambda folder: flip_a_byte(folder / "target.engine"), "target.engine was altered"),
        (lambda folder: (folder / "engine.json").write_text("{"), "cannot be read"),
        (lambda folder: edit(folder / "engine.json", schema_version=9), "schema version 9, this program reads 3"),
        (lambda folder: (folder / "engine.json").unlink(), "There is no engine in"),
    ],
)
def test_damaged_engines(damage: Callable[[Path], Any], words: str, bundle_of: Callable[[Pair], Bundle]) -> None:
    built: BuiltEngines = build_engines(bundle_of(BF16), options())
    damage(built.folder)
    with pytest.raises(EngineError, match=f"{words}.*Run: X"):
        DeviceEngineRecord.read(built.folder, "Run: X")


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


def test_a_killed_build_leaves_the_engines_before_it(bundle_of: Callable[[Pair], Bundle]) -> None:
    bundle = bundle_of(BF16)
    first = build_engines(bundle, options())
    argv = [sys.executable, "-m", "dflash_tools.cli", "engines", str(bundle.path), "--backend", "tensorrt-rtx"]
    argv += ["--compute-capability", "8.9", "--block-size", "16", "--prefill-chunk", "48"]
    process = subprocess.Popen(argv, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list((bundle.path / "engines").glob(".partial-*/engines")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert DeviceEngineRecord.read(first.folder, "") == first.record
    again = build_engines(bundle, options())
    assert again.reused == KINDS
    assert not list((bundle.path / "engines").glob(".partial-*"))  # the next one clears what a killed one left


def test_a_builder_that_falls_over_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no graph")
    order = BuildOrder("tensorrt-rtx", str(tmp_path / "bad.onnx"), [], "8.9", None, str(tmp_path / "x.engine"))
    with pytest.raises(EngineError, match=r"tensorrt-rtx built no engine from bad\.onnx: its parser refuses the graph"):
        run_build(order, None, lambda done: None)
    real = subprocess.Popen
    crash = [sys.executable, "-c", "import os; print('oh', file=__import__('sys').stderr); os.kill(os.getpid(), 11)"]
    monkeypatch.setattr(build_process.subprocess, "Popen", lambda argv, **rest: real(crash, **rest))
    with pytest.raises(EngineError, match=r"the build process was killed by signal 11 \(last words: oh\)"):
        run_build(order, None, lambda done: None)
    assert not (tmp_path / "x.engine").exists()
