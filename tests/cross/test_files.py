"""Files land where they belong, under any name, whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from conftest import Make, Once
from pairs import MAIN, quiet

from dflash_runtime import Bundle, GenerationConfig, OutputError, Session
from dflash_tools import pipeline
from dflash_tools.cli import main


@pytest.fixture(scope="module")
def checkpoints(once: Once) -> Path:
    return once(f"{MAIN.name}-checkpoints", MAIN.write)


def tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_paths_of_every_kind(checkpoints: Path, built: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spaces, other alphabets, a leading dash, relative, a slash at the end, a working directory of its own."""
    models, work = tmp_path / "-模型 dir" / "é x", tmp_path / "work"
    shutil.copytree(checkpoints / "target", models / "target")
    shutil.copytree(checkpoints / "drafter", models / "-d r")
    work.mkdir()
    before = tree(tmp_path)
    monkeypatch.chdir(tmp_path)
    arguments = ["build", "--target", "-模型 dir/é x/target/", "--drafter", str(models / "-d r") + "/"]
    done = CliRunner().invoke(main, [*arguments, "--out", "-出力 b/ü/", "--max-context", "160"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    out = tmp_path / "-出力 b" / "ü"
    made = tree(tmp_path) - before
    assert {name.split("/")[0] for name in made} == {"-出力 b"}
    assert {str(Path(name).relative_to("-出力 b/ü")) for name in made} == tree(built(MAIN))
    moved = work / "-ein Bündel 2"
    out.rename(moved)
    monkeypatch.chdir(work)
    for command in (["inspect", "--verify"], ["run", "--ids", "--max-new-tokens", "4"]):
        options = [*command, "--", "-ein Bündel 2/", *(["5,17,3"] if command[0] == "run" else [])]
        done = CliRunner().invoke(main, options, catch_exceptions=False)
        assert done.exit_code == 0, done.stderr
    config = GenerationConfig(max_new_tokens=24, stop_token_ids=[])
    results = []
    for path in (Path("-ein Bündel 2"), built(MAIN)):
        with Session.open(path, threads=1) as session:
            results.append(session.generate([5, 17, 3], config))
    assert results[0].token_ids == results[1].token_ids
    assert results[0].proposed_ids == results[1].proposed_ids


def test_what_travels_with_a_bundle(built: Make) -> None:
    bundle = built(MAIN)
    files = tree(bundle)
    assert files == {
        "bundle.json", "target.onnx", "drafter_context.onnx", "drafter.onnx",
        "weights/target.safetensors", "weights/drafter.safetensors",
        "engines/ort-cpu/engine.json", "engines/ort-cpu/target.onnx", "engines/ort-cpu/drafter_context.onnx",
        "engines/ort-cpu/drafter.onnx", "tokenizer/chat_template.jinja", "tokenizer/generation_config.json",
        "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", "tokenizer/special_tokens_map.json",
    }  # fmt: skip
    stated = Bundle.open(bundle).manifest
    assert stated.files.keys() == {name for name in files if not name.startswith(("engines/", "bundle.json"))}
    assert stated.text.has_chat_template
    weights = sum((bundle / "weights" / name).stat().st_size for name in ("target.safetensors", "drafter.safetensors"))
    checkpoints = [bundle.parent / role / "model.safetensors" for role in ("target", "drafter")]
    assert weights - sum(path.stat().st_size for path in checkpoints) < 20_000  # one copy of everything


def test_graphs_are_code_and_weights_are_data(built: Make) -> None:
    """No graph grows with the model, so none meets the 2 GiB limit of its file format."""
    bundle = built(MAIN)
    for name in ("target.onnx", "drafter_context.onnx", "drafter.onnx"):
        for path, fewest in ((bundle / name, 30), (bundle / "engines" / "ort-cpu" / name, 15)):
            graph = onnx.load(path, load_external_data=False).graph
            assert len(graph.node) >= fewest
            assert sum(len(tensor.raw_data) for tensor in graph.initializer) < 4096
            assert any(tensor.external_data for tensor in graph.initializer)


@pytest.fixture
def older(tmp_path: Path, built: Make) -> Iterator[Path]:
    """An older bundle in the place where a new one is to go; it must be there afterwards, whole."""
    place = tmp_path / "place" / "b"
    shutil.copytree(built(MAIN), place)
    before = tree(place.parent)
    manifest = (place / "bundle.json").read_bytes()
    yield place
    assert tree(place.parent) == before
    assert (place / "bundle.json").read_bytes() == manifest
    Bundle.open(place).check_files(full=True)


@pytest.mark.parametrize("limit_bytes", [10, 50_000])
def test_a_file_that_cannot_grow(
    older: Path, checkpoints: Path, limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limited(*args: Any) -> Any:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
        return export(*args)

    export = pipeline.export_bundle
    monkeypatch.setattr(pipeline, "export_bundle", limited)
    try:
        with pytest.raises(OutputError, match=r"writing .*/place/.* failed"):
            pipeline.build(MAIN.options(checkpoints), older, "ort-cpu", quiet)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("stage", ["export_bundle", "check_portable", "lower_bundle", "write_record"])
def test_a_disk_that_fills_at_any_stage(
    older: Path, checkpoints: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x")

    def exported(plan: Any, root: Path, *_: Any) -> Any:
        shutil.copytree(older, root, dirs_exist_ok=True)
        return Bundle.open(older, check_files=False).manifest

    monkeypatch.setattr(pipeline, "export_bundle", exported)
    monkeypatch.setattr(pipeline, stage, full)
    with pytest.raises(OutputError, match=r"writing .*/place/b failed: No space left on device; .* GB free"):
        pipeline.build(MAIN.options(checkpoints), older, "ort-cpu", quiet)


def test_too_little_room_is_said_before_work(
    older: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil.disk_usage(older)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    monkeypatch.setattr(pipeline, "export_bundle", None)
    with pytest.raises(OutputError, match=r"needs 0\.07 GB and .* has 0\.00 GB free"):
        pipeline.build(MAIN.options(checkpoints), older, "ort-cpu", quiet)


@pytest.mark.parametrize(
    ("reason", "words"), [(errno.EROFS, "Read-only file system"), (errno.EACCES, "Permission denied")]
)
def test_a_read_only_place_is_said_before_work(
    older: Path, checkpoints: Path, reason: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the system says it, whose word does not depend on who runs the tests."""

    def refuse(path: str, mode: int = 0o777) -> None:
        raise OSError(reason, os.strerror(reason), path)

    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(pipeline, "export_bundle", None)
    with pytest.raises(OutputError, match=rf"^.*/place cannot be written \({words}\)\. Choose another --out\.$"):
        pipeline.build(MAIN.options(checkpoints), older, "ort-cpu", quiet)


@pytest.mark.parametrize("kind", ["file", "below a file", "foreign folder", "unwritable"])
def test_places_that_cannot_be_used(
    checkpoints: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("x")
    places = {"file": tmp_path / "file", "below a file": tmp_path / "file" / "b", "foreign folder": tmp_path / "folder"}
    before = tree(tmp_path)
    monkeypatch.setattr(pipeline, "export_bundle", None)
    with pytest.raises(OutputError, match=r"another --out|cannot be written"):
        # Even the superuser cannot make a folder in /proc.
        pipeline.build(MAIN.options(checkpoints), places.get(kind, Path("/proc/b")), "ort-cpu", quiet)
    assert tree(tmp_path) == before


def test_the_manifest_names_no_place_of_the_build(built: Make) -> None:
    """But for where the checkpoints came from and the command line: a bundle can go anywhere."""
    data = json.loads((built(MAIN) / "bundle.json").read_text(encoding="utf-8"))
    for part in ("target", "drafter"):
        del data[part]["source"]
    del data["provenance"]["argv"]
    assert str(built(MAIN).parent.parent) not in json.dumps(data)
