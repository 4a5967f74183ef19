"""Weights cloned, linked or copied: graphs that every reader takes, bundles that can move, checkpoints left alone."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from conftest import Once
from pairs import MAIN, quiet
from safetensors.torch import load_file, save_file

from dflash_engines.portable_graph import load_portable
from dflash_engines.tensorrt_network import make_network
from dflash_engines.tensorrt_versions import row_for
from dflash_export import weight_links
from dflash_export.tensor_files import TensorPlace
from dflash_runtime import Bundle, GenerationConfig, OutputError, Session
from dflash_tools.pipeline import build

MODES = ("clone", "link", "copy")
PAIR = dataclasses.replace(MAIN, name="main-shards-bf16", precision="bf16", likely_tokens=0)
GRAPHS = ("target.onnx", "drafter_context.onnx", "drafter.onnx")


def _write(folder: Path) -> None:
    """Checkpoints in bf16, the target in two shards behind links, as the hub's cache keeps it."""
    PAIR.write(folder)
    target, blobs = folder / "target", folder / "blobs"
    blobs.mkdir()
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(target / "model.safetensors").items()}
    (target / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, blobs / f"blob{number}", {"format": "pt"})
        (target / file).symlink_to(Path("..") / "blobs" / f"blob{number}")
        weight_map |= dict.fromkeys(part, file)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    drafter = folder / "drafter" / "model.safetensors"
    save_file({n: t.bfloat16().contiguous() for n, t in load_file(drafter).items()}, drafter, {"format": "pt"})


def _cloned(source: Path, copy: Path) -> bool:
    shutil.copyfile(source, copy)
    return True


def _build(folder: Path, mode: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_links, "clone_file", _cloned if mode == "clone" else lambda *_: False)
        wanted = {"clone": "auto", "link": "auto", "copy": "copy"}[mode]
        options = dataclasses.replace(PAIR.options(folder.parent / f"{PAIR.name}-checkpoints"), weights_copy=wanted)
        build(options, folder / "bundle", "ort-cpu", quiet)


@pytest.fixture(scope="module", params=MODES)
def bundle(request: pytest.FixtureRequest, once: Once) -> Path:
    once(f"{PAIR.name}-checkpoints", _write)
    mode: str = request.param
    return once(f"{PAIR.name}-{mode}", lambda folder: _build(folder, mode)) / "bundle"


def _mode(bundle: Path) -> str:
    return bundle.parent.name.rpartition("-")[2]


def _own_bytes(bundle: Path) -> int:
    return sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file() and path.stat().st_nlink == 1)


def _say(bundle: Path) -> list[int]:
    with Session.open(bundle, threads=1) as session:
        return session.generate([5, 17, 3], GenerationConfig(max_new_tokens=16, stop_token_ids=[])).token_ids


def test_every_reader_takes_the_graphs(bundle: Path) -> None:
    weights = Bundle.open(bundle).manifest.weights
    for name in GRAPHS:
        onnx.checker.check_model(str(bundle / name))
        taken = {value.name for value in onnx.load(bundle / name).graph.input} & weights.keys()
        assert bool(taken) == (_mode(bundle) == "link")
        for value in ir.load(bundle / name).graph.initializers.values():
            assert value.const_value is not None
            value.const_value.numpy()


def test_onnx_runtime_takes_weights_by_path_or_by_name(bundle: Path) -> None:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    # ONNX Runtime's CPU has no bf16 products: it reads the graph up to that.
    with pytest.raises(Exception, match=r"NOT_IMPLEMENTED|Could not find an implementation"):
        ort.InferenceSession(str(bundle / "target.onnx"), options, providers=["CPUExecutionProvider"])
    assert len(_say(bundle)) == 16


def test_the_parser_of_tensorrt_rtx_takes_the_networks(bundle: Path) -> None:
    trt: Any = pytest.importorskip("tensorrt_rtx")
    opened, row = Bundle.open(bundle), row_for("tensorrt-rtx", trt.__version__)
    for kind, name in opened.manifest.graph_files().items():
        made = make_network(
            load_portable(opened, name), kind, row, precision="bf16", capacity_rows=176, share_weights=False
        )
        path = bundle / f".{kind}.partial.onnx"  # beside the weights, which it refers to
        try:
            path.write_bytes(made.onnx)
            logger = trt.Logger(trt.Logger.ERROR)
            network = trt.Builder(logger).create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
            parser = trt.OnnxParser(network, logger)
            assert parser.parse_from_file(str(path)), [str(parser.get_error(i)) for i in range(parser.num_errors)]
        finally:
            path.unlink()


def test_only_a_copy_takes_room(bundle: Path) -> None:
    checkpoints = bundle.parents[1] / f"{PAIR.name}-checkpoints"
    weights = sum(path.stat().st_size for path in checkpoints.rglob("*") if path.is_file() and not path.is_symlink())
    if _mode(bundle) == "link":
        assert _own_bytes(bundle) < weights
        linked = [path for path in (bundle / "weights").iterdir() if path.stat().st_nlink > 1]
        assert {path.name for path in linked} == {
            "target-00001-of-00002.safetensors", "target-00002-of-00002.safetensors", "drafter.safetensors",
        }  # fmt: skip
        assert (checkpoints / "blobs" / "blob1").samefile(bundle / "weights" / "target-00001-of-00002.safetensors")
    assert not any(path.is_symlink() for path in bundle.rglob("*"))


MOVES: dict[str, Callable[[Path, Path], list[str]]] = {
    "cp": lambda one, two: ["cp", "-r", str(one), str(two)],
    "tar": lambda one, two: ["sh", "-c", f"tar -C '{one.parent}' -cf - '{one.name}' | tar -C '{two.parent}' -xf -"],
    "rsync": lambda one, two: ["rsync", "-a", f"{one}/", str(two)],
}


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system where there is one: no link leads there."""
    memory = Path("/dev/shm")
    if not (os.access(memory, os.W_OK) and memory.stat().st_dev != tmp_path.stat().st_dev):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        yield Path(folder)


@pytest.mark.parametrize("way", MOVES)
def test_a_moved_bundle_opens(bundle: Path, elsewhere: Path, way: str) -> None:
    if shutil.which(way) is None:
        pytest.skip(f"{way} is not installed")
    moved = elsewhere / "bundle"
    subprocess.run(MOVES[way](bundle, moved), check=True)
    assert all(path.stat().st_nlink == 1 for path in moved.rglob("*") if path.is_file())
    Bundle.open(moved).check_files(full=True)
    for name in GRAPHS:
        onnx.checker.check_model(str(moved / name))
    assert _say(moved) == _say(bundle)


def test_the_checkpoint_is_as_it_was(bundle: Path) -> None:
    """And a bundle outlives it: a link is a name of its own."""
    checkpoints = bundle.parents[1] / f"{PAIR.name}-checkpoints"
    again = bundle.parents[1] / "again"
    if not again.exists():
        _write(again)
    for path in again.rglob("*.safetensors"):
        assert path.read_bytes() == (checkpoints / path.relative_to(again)).read_bytes()


def test_links_that_cannot_be_made(once: Once, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = once(f"{PAIR.name}-checkpoints", _write)

    def refuse(*_: Any) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(weight_links, "clone_file", lambda *_: False)
    options = dataclasses.replace(PAIR.options(checkpoints), weights_copy="link")
    with pytest.raises(OutputError, match=r"cannot be linked into .*: Invalid cross-device link. Choose an --out"):
        build(options, tmp_path / "b", "none", quiet)
    assert list(tmp_path.iterdir()) == []
    places = {"w": TensorPlace(checkpoints / "blobs/blob1", 0, 8, "BF16", (4,))}
    assert weight_links.settle_weights("auto", places, "BF16", tmp_path / "b") == ("copy", "")


def test_projections_stored_apart_are_copied_in_fp32(tmp_path: Path) -> None:
    def place(offset: int) -> TensorPlace:
        return TensorPlace(tmp_path / "f", offset, 16, "F32", (2, 2))

    (tmp_path / "f").write_bytes(bytes(64))
    names = [f"model.layers.0.self_attn.{letter}_proj.weight" for letter in "qkv"]
    side_by_side = {name: place(16 * i) for i, name in enumerate(names)}
    apart = {name: place(16 * (2 - i)) for i, name in enumerate(names)}
    out = tmp_path / "b"
    assert weight_links.settle_weights("auto", side_by_side, "F32", out)[0] in ("clone", "link")
    assert weight_links.settle_weights("auto", apart, "F32", out)[0] == "copy"
    assert weight_links.settle_weights("link", apart, "F32", out)[0] == "link"
    assert weight_links.settle_weights("auto", apart, "BF16", out) == ("copy", "")
