from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dflash_runtime import EngineError, Session
from dflash_runtime.bundle import Bundle, write_record
from dflash_runtime.engine_record import ENGINE_RECORD_NAME, engine_folder, open_engine


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))


def test_record_survives_writing(copy: Path) -> None:
    bundle = Bundle.open(copy)
    record = open_engine(bundle, "ort-cpu")
    write_record(engine_folder(bundle, "ort-cpu") / ENGINE_RECORD_NAME, record)
    assert open_engine(bundle, "ort-cpu") == record
    assert not list(copy.rglob("*.partial"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (shutil.rmtree, "There is no engine in"),
        (lambda folder: (folder / "engine.json").unlink(), r"engine\.json is missing"),
        (lambda folder: (folder / "engine.json").write_text("{"), "cannot be read"),
        (lambda folder: edit(folder / "engine.json", lambda r: r.update(schema_version=1)), "version 1.*reads 3"),
        (lambda folder: edit(folder / "engine.json", lambda r: r.update(speed=1)), "unknown keys.*speed"),
        (lambda folder: edit(folder / "engine.json", lambda r: r.pop("upcast")), "lacks the keys.*upcast"),
        (lambda folder: edit(folder / "engine.json", lambda r: r.update(backend="x")), "made for x, not ort-cpu"),
        (lambda folder: (folder / "target.onnx").unlink(), r"target\.onnx is missing"),
        (lambda folder: (folder / "target.onnx").write_bytes(b""), r"target\.onnx is incomplete or altered \(0 bytes"),
        (lambda folder: halve(folder / "drafter.onnx"), r"drafter\.onnx is incomplete"),
        (lambda folder: flip(folder / "drafter.onnx"), r"drafter\.onnx was altered"),
    ],
)
def test_engines_that_cannot_be_used(copy: Path, change: Callable[[Path], Any], words: str) -> None:
    change(copy / "engines" / "ort-cpu")
    with pytest.raises(EngineError, match=words) as error:
        Session.open(copy)
    assert f"dflash-export engines {copy} --backend ort-cpu" in str(error.value)


def halve(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_engine_of_other_graphs(copy: Path, tiny_plain: Path) -> None:
    with (copy / "target.onnx").open("ab") as stream:
        stream.write(b"\x72\x00")  # an empty metadata entry: still a model, another hash
    refresh(copy, "target.onnx")
    now = Bundle.open(copy).manifest.files["target.onnx"].sha256[:12]
    with pytest.raises(EngineError, match=rf"target\.onnx [0-9a-f]{{12}}, the bundle has {now}"):
        Session.open(copy)


def test_drafter_added_after_the_engine(copy: Path) -> None:
    record = copy / "engines" / "ort-cpu" / "engine.json"
    edit(record, lambda r: [r[key].pop(f"drafter{x}.onnx") for key in ("source", "files") for x in ("", "_context")])
    with pytest.raises(EngineError, match=r"does not list drafter\.onnx"):
        Session.open(copy)


def refresh(root: Path, name: str) -> None:
    from dflash_runtime.bundle import file_facts

    manifest = Bundle.open(root, check_files=False).manifest
    files = {**manifest.files, **file_facts(root, [name])}
    write_record(root / "bundle.json", dataclasses.replace(manifest, files=files))


def test_graph_that_onnx_runtime_refuses(copy: Path) -> None:
    from dflash_runtime.bundle import file_facts

    folder = copy / "engines" / "ort-cpu"
    (folder / "drafter.onnx").write_bytes(b"\x08\x0b")
    facts = file_facts(folder, ["drafter.onnx"])["drafter.onnx"]
    edit(folder / "engine.json", lambda r: r["files"].update({"drafter.onnx": dataclasses.asdict(facts)}))
    with pytest.raises(EngineError, match=r"ONNX Runtime .* cannot open"):
        Session.open(copy)
