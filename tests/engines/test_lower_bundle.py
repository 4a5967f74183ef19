"""Engines appear complete or not at all, and are made again only where they no longer fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import onnx_ir as ir
import onnxruntime as ort
import pytest
from small_bundle import GRAPHS, write_manifest, write_small_bundle
from tiny_graphs import Sizes, target_model

from dflash_engines import engine_writing
from dflash_engines.ort_cpu import lower_bundle
from dflash_runtime.bundle import Bundle, write_record
from dflash_runtime.engine_record import ENGINE_RECORD_NAME, open_engine
from dflash_runtime.errors import DFlashError, OutputError


def stamps(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_writes_three_graphs_and_their_record(bundle: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    record = lower_bundle(bundle, lambda *call: calls.append(call))
    assert open_engine(Bundle.open(bundle), "ort-cpu") == record
    assert set(record.files) == set(GRAPHS) == set(record.source)
    assert (record.backend, record.execution_precision, record.upcast) == ("ort-cpu", "fp32", False)
    assert calls == [("lower", 0, 3), ("lower", 1, 3), ("lower", 2, 3)]
    assert [path.name for path in (bundle / "engines").iterdir()] == ["ort-cpu"]


def test_engines_read_the_bundles_own_weights(bundle: Path) -> None:
    lower_bundle(bundle)
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(bundle))
    for name in GRAPHS:
        path = bundle / "engines" / "ort-cpu" / name
        ort.InferenceSession(path.read_bytes(), options, providers=["CPUExecutionProvider"])
        kept = [v.const_value for v in ir.load(path).graph.initializers.values()]
        assert not [t for t in kept if t is not None and t.size > 200 and not isinstance(t, ir.ExternalTensor)]


def test_half_precision_bundle_is_upcast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    record = lower_bundle(write_small_bundle(tmp_path / "bundle", "bf16"))
    assert (record.execution_precision, record.upcast) == ("fp32", True)


def test_a_fitting_engine_is_kept(bundle: Path) -> None:
    first = lower_bundle(bundle)
    before = stamps(bundle / "engines" / "ort-cpu")
    calls: list[str] = []
    assert lower_bundle(bundle, lambda stage, done, total: calls.append(stage)) == first
    assert stamps(bundle / "engines" / "ort-cpu") == before
    assert not calls


def test_a_damaged_engine_is_made_again(bundle: Path) -> None:
    first = lower_bundle(bundle)
    (bundle / "engines" / "ort-cpu" / "target.onnx").write_bytes(b"")
    assert lower_bundle(bundle) == first
    open_engine(Bundle.open(bundle), "ort-cpu")


def test_an_engine_of_another_graph_is_made_again(bundle: Path) -> None:
    first = lower_bundle(bundle)
    ir.save(target_model(Sizes(seed=1)), bundle / "target.onnx", external_data="weights/target.bin")
    write_manifest(bundle, "fp32")
    assert lower_bundle(bundle).source["target.onnx"] != first.source["target.onnx"]


def test_an_engine_made_by_other_versions_is_made_again(bundle: Path) -> None:
    first = lower_bundle(bundle)
    older = dataclasses.replace(first, versions={**first.versions, "onnx-ir": "0.1"})
    write_record(bundle / "engines" / "ort-cpu" / ENGINE_RECORD_NAME, older)
    assert lower_bundle(bundle) == first


@pytest.mark.parametrize("revision", [None, "1"])
def test_an_engine_of_older_passes_is_made_again(bundle: Path, revision: str | None) -> None:
    first = lower_bundle(bundle)
    versions = {name: text for name, text in first.versions.items() if name != "lowering"}
    versions |= {} if revision is None else {"lowering": revision}
    older = dataclasses.replace(first, versions=versions)
    write_record(bundle / "engines" / "ort-cpu" / ENGINE_RECORD_NAME, older)
    assert lower_bundle(bundle) == first


def test_a_full_disk_leaves_the_old_engine(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = lower_bundle(bundle)
    older = dataclasses.replace(first, versions={})
    write_record(bundle / "engines" / "ort-cpu" / ENGINE_RECORD_NAME, older)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine_writing, "file_facts", full)
    with pytest.raises(OutputError, match="No space left"):
        lower_bundle(bundle)
    assert open_engine(Bundle.open(bundle), "ort-cpu") == older
    assert [path.name for path in (bundle / "engines").iterdir()] == ["ort-cpu"]


def test_an_altered_graph_is_not_lowered(bundle: Path) -> None:
    with (bundle / "target.onnx").open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(DFlashError, match=r"target\.onnx"):
        lower_bundle(bundle)
    assert not (bundle / "engines").exists()
