"""A drafter added later gives the bundle that a build with both would have given, and asks nothing of the target."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from conftest import Make, Once
from pairs import MAIN, quiet

from dflash_export.build_plan import BuildOptions
from dflash_export.graph_runner import GraphRunner
from dflash_runtime import Bundle, CheckpointError, DFlashError, GenerationConfig, PairError, ParityError, Session
from dflash_runtime.bundle import Manifest
from dflash_tools import pipeline
from dflash_tools.pipeline import add_drafter, build

PROMPTS = ([5, 17, 3, 60, 42, 8], [9] * 30)
FREE = GenerationConfig(max_new_tokens=40, stop_token_ids=())


@pytest.fixture(scope="module")
def checkpoints(built: Make) -> Path:
    return built(MAIN).parent


@pytest.fixture(scope="module")
def target_alone(checkpoints: Path, once: Once) -> Path:
    """A bundle whose taps are the default rule's, and whose target's checkpoint is gone."""

    def make(folder: Path) -> None:
        shutil.copytree(checkpoints / "target", folder / "target")
        options = BuildOptions(str(folder / "target"), max_context_tokens=MAIN.max_context_tokens)
        build(options, folder / "bundle", "ort-cpu", quiet)
        shutil.rmtree(folder / "target")

    return once("target-alone", make) / "bundle"


@pytest.fixture(scope="module")
def completed(target_alone: Path, checkpoints: Path, once: Once) -> Path:
    """The same bundle after add-drafter, which was not allowed to trace or read the target."""

    def make(folder: Path) -> None:
        copy = shutil.copytree(target_alone, folder / "bundle")
        with pytest.MonkeyPatch.context() as patch:
            for place in ("dflash_export.traced_file.trace_target", "dflash_export.evidence.TargetReference.load"):
                patch.setattr(place, _not_again)
            report = add_drafter(copy, str(checkpoints / "drafter"), "ort-cpu", quiet)
        assert report.manifest == Bundle.open(copy).manifest

    return once("completed", make) / "bundle"


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _not_again(*args: Any, **options: Any) -> Any:
    raise AssertionError("the target was touched again")


def manifest_of(path: Path) -> Manifest:
    return Bundle.open(path).manifest


def test_the_drafter_decides_the_taps(target_alone: Path, completed: Path) -> None:
    before, after = manifest_of(target_alone), manifest_of(completed)
    assert (before.taps.origin, after.taps.origin) == ("default", "drafter")
    assert (before.taps.layer_ids, after.taps.layer_ids) == ([0, 1, 2, 3], [0, 2])
    assert before.target.graph.outputs != after.target.graph.outputs
    assert all(row.passed for row in after.checks)
    assert {row.tensor for row in after.checks} >= {"logits", "keys", "draft_logits", "block size 16", "plain"}


def test_the_manifest_is_that_of_one_build(built: Make, completed: Path) -> None:
    at_once, later = manifest_of(built(MAIN)), manifest_of(completed)
    for name in ("precision", "max_context_tokens", "block_sizes", "drafter", "taps", "text", "weights"):
        assert getattr(later, name) == getattr(at_once, name), name
    assert later.target.graph == at_once.target.graph
    assert later.files.keys() == at_once.files.keys()
    for name in ("weights/target.safetensors", "weights/drafter.safetensors", "drafter.onnx", "drafter_context.onnx"):
        assert later.files[name] == at_once.files[name], name


def test_tokens_and_proposals_are_those_of_one_build(built: Make, completed: Path) -> None:
    results = []
    for path in (built(MAIN), completed):
        with Session.open(path, threads=1) as session:
            found = [session.generate(prompt, FREE) for prompt in PROMPTS]
            results.append([(r.token_ids, r.proposed_ids, r.acceptance_lengths) for r in found])
    assert results[0] == results[1]


def test_graph_outputs_are_those_of_one_build(built: Make, completed: Path) -> None:
    found = []
    for path in (built(MAIN), completed):
        graph = manifest_of(path).target.graph
        runner = GraphRunner((path / graph.file).read_bytes(), path, graph, 32)
        ids = np.array([PROMPTS[0]])
        found.append(runner.run(input_ids=ids, position=np.array([0]), logit_rows=np.arange(ids.size)))
    assert found[0].keys() == found[1].keys()
    for name, expected in found[0].items():
        np.testing.assert_array_equal(found[1][name], expected, err_msg=name)


def test_a_second_drafter_replaces_the_first(completed: Path, checkpoints: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(completed, tmp_path / "b")
    drafter = shutil.copytree(checkpoints / "drafter", tmp_path / "other")
    _change(drafter, target_layer_ids=[2, 0], block_size=4)
    report = add_drafter(copy, str(drafter), "ort-cpu", quiet, block_sizes=(4, 6))
    assert report.manifest.taps.layer_ids == [2, 0]
    assert report.manifest.block_sizes == [4, 6]
    assert report.manifest.drafter is not None
    assert report.manifest.drafter.name == "other"
    with Session.open(copy, threads=1) as session:
        config = GenerationConfig(max_new_tokens=40, plain=True, stop_token_ids=[])
        plain = session.generate(PROMPTS[0], config).token_ids
        assert session.generate(PROMPTS[0], FREE).token_ids == plain
    assert contents(copy).keys() == contents(completed).keys()


def _change(drafter: Path, **nested: Any) -> None:
    path = drafter / "config.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    data["dflash_config"] |= nested
    path.write_text(json.dumps(data), encoding="utf-8")


@pytest.fixture
def copy(target_alone: Path, tmp_path: Path) -> Path:
    return shutil.copytree(target_alone, tmp_path / "place" / "b")


@pytest.mark.parametrize(
    ("nested", "error", "words"),
    [
        ({"target_layer_ids": [0, 5]}, PairError, r"\[0, 5\].*has 4"),
        ({"mask_token_id": 600}, PairError, "600.*512"),
        ({"target_layer_ids": [0]}, PairError, "128 values and 1 taps"),
        ({"layers": "lost"}, CheckpointError, "no .*safetensors file"),
    ],
)
def test_a_drafter_that_does_not_fit_changes_nothing(
    copy: Path, checkpoints: Path, tmp_path: Path, nested: dict[str, Any], error: type[DFlashError], words: str
) -> None:
    drafter = shutil.copytree(checkpoints / "drafter", tmp_path / "drafter")
    if nested == {"layers": "lost"}:
        (drafter / "model.safetensors").unlink()
    else:
        _change(drafter, **nested)
    before = contents(copy.parent)
    with pytest.raises(error, match=words):
        add_drafter(copy, str(drafter), "ort-cpu", quiet)
    assert contents(copy.parent) == before


def test_a_late_failure_changes_nothing(copy: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new bundle shares the old one's weight files, so this would show a write through a link too."""
    before = contents(copy.parent)
    monkeypatch.setattr(pipeline, "lower_bundle", _no_room)
    with pytest.raises(ParityError, match="no room"):
        add_drafter(copy, str(checkpoints / "drafter"), "ort-cpu", quiet)
    assert contents(copy.parent) == before
    with Session.open(copy, threads=1) as session:
        assert session.generate(PROMPTS[0], FREE).block_size == 1


def _no_room(*args: Any) -> None:
    raise ParityError("no room")


def test_weights_are_not_copied(copy: Path, checkpoints: Path) -> None:
    place = copy / "weights" / "target.safetensors"
    before = place.stat().st_ino
    add_drafter(copy, str(checkpoints / "drafter"), "none", quiet)
    assert place.stat().st_ino == before
    assert place.stat().st_nlink == 1
    assert "hidden_states.4" in {v.name for node in ir.load(copy / "target.onnx").graph for v in node.outputs}
