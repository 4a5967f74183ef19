"""Checkpoints are read from headers alone, and every kind of damage is named before any work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_target

from dflash_export.tensor_files import read_header, read_tensor_places
from dflash_runtime.errors import CheckpointError


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("模型 dir") / "é x"
    write_target(folder, "llama", max_shard_size="100KB")
    return folder


@pytest.fixture
def copy(sharded: Path, tmp_path: Path) -> Path:
    import shutil

    return Path(shutil.copytree(sharded, tmp_path / "copy"))


def test_every_tensor_is_found_with_its_bytes(sharded: Path) -> None:
    places = read_tensor_places(sharded)
    assert len({p.file.name for p in places.values()}) > 3
    for file in sharded.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            place = places[name]
            assert b"".join(place.chunks(1000)) == tensor.numpy().tobytes()
            assert (place.dtype, place.shape) == ("F32", tuple(tensor.shape))


def test_all_missing_shards_are_listed(copy: Path) -> None:
    shards = sorted(copy.glob("*.safetensors"))
    shards[1].unlink()
    shards[3].unlink()
    with pytest.raises(CheckpointError) as error:
        read_tensor_places(copy)
    assert shards[1].name in str(error.value) and shards[3].name in str(error.value)
    assert f"2 of its {len(shards)}" in str(error.value)


def test_a_truncated_shard_is_named_with_both_sizes(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[2]
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 10)
    with pytest.raises(CheckpointError, match=f"{shard.name} is truncated: it has {size - 10} bytes and needs {size}"):
        read_tensor_places(copy)


def test_a_stale_index_is_named(copy: Path) -> None:
    index = next(copy.glob("*.index.json"))
    data = json.loads(index.read_text())
    data["weight_map"]["model.layers.9.ghost.weight"] = next(iter(data["weight_map"].values()))
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match=r"ghost.*stale"):
        read_tensor_places(copy)


def test_shards_follow_the_index_not_their_names(copy: Path) -> None:
    index = next(copy.glob("*.index.json"))
    text = index.read_text()
    for i, shard in enumerate(sorted(copy.glob("*.safetensors"))):
        text = text.replace(shard.name, f"dflash_draft_model-{i}.safetensors")
        shard.rename(copy / f"dflash_draft_model-{i}.safetensors")
    index.write_text(text)
    assert "model.norm.weight" in read_tensor_places(copy)


def test_an_index_cannot_lead_outside_its_folder(copy: Path) -> None:
    index = next(copy.glob("*.index.json"))
    data = json.loads(index.read_text())
    data["weight_map"]["model.norm.weight"] = "../outside.safetensors"
    index.write_text(json.dumps(data))
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_tensor_places(copy)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 1\n", "Git LFS pointer"),
        (b"", "not a complete safetensors file"),
        (b"\xff" * 64, "not a complete safetensors file"),
        ((16).to_bytes(8, "little") + b"{not json at all", "damaged safetensors header"),
    ],
)
def test_files_that_are_no_safetensors(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        read_tensor_places(tmp_path)


def test_shape_and_bytes_must_agree(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(4, 4)}, file)
    data = file.read_bytes().replace(b"[4,4]", b"[4,5]")
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"shape \[4, 5\] of F32 in 64 bytes"):
        read_header(file)


def test_pickle_weights_are_refused_and_empty_folders_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        read_tensor_places(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="pickle"):
        read_tensor_places(tmp_path)
