"""Clones on a file system that has them: an XFS image, where this machine lets one be mounted."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from pairs import MAIN, quiet
from safetensors.torch import load_file, save_file

from dflash_export import weight_links
from dflash_runtime import GenerationConfig, Session
from dflash_tools.pipeline import build

# A table so large that graphs and tokenizer do not count beside it.
PAIR = dataclasses.replace(
    MAIN, name="main-cloned", precision="bf16", likely_tokens=0,
    target={**MAIN.target, "vocab_size": 65536}, drafter={**MAIN.drafter, "vocab_size": 65536},
)  # fmt: skip
IMAGE_BYTES = 320 << 20  # mkfs.xfs makes none below 300 MB; the file has holes


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if shutil.which("mkfs.xfs") is None or os.geteuid() != 0:
        pytest.skip("needs mkfs.xfs and root")
    image, folder = tmp_path / "xfs.img", tmp_path / "mounted"
    with image.open("wb") as stream:
        stream.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", image], check=True)
    folder.mkdir()
    if subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield folder
    subprocess.run(["umount", folder], check=True)


def used_bytes(disk: Path) -> int:
    os.sync()
    status = os.statvfs(disk)
    return (status.f_blocks - status.f_bfree) * status.f_frsize


@pytest.mark.slow
def test_a_bundle_of_clones_takes_no_room(disk: Path) -> None:
    PAIR.write(disk)
    for part in ("target", "drafter"):
        file = disk / part / "model.safetensors"
        tensors = {name: tensor.bfloat16().contiguous() for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    before = used_bytes(disk)
    options = dataclasses.replace(PAIR.options(disk), weights_copy="auto")
    build(options, disk / "bundle", "ort-cpu", quiet)
    weights = sorted((disk / "bundle" / "weights").iterdir())
    assert all(file.stat().st_nlink == 1 for file in weights)
    assert used_bytes(disk) - before < sum(file.stat().st_size for file in weights) // 4
    (disk / "target" / "model.safetensors").unlink()  # the clone is a file of its own
    with Session.open(disk / "bundle", threads=1) as session:
        assert len(session.generate([5, 17, 3], GenerationConfig(max_new_tokens=8, stop_token_ids=[])).token_ids) == 8


@pytest.mark.slow
def test_a_file_can_be_cloned_within_its_disk_only(disk: Path, tmp_path: Path) -> None:
    source = disk / "a"
    source.write_bytes(b"x" * 8192)
    assert weight_links.clone_file(source, disk / "b")
    assert (disk / "b").read_bytes() == source.read_bytes()
    assert not weight_links.clone_file(source, tmp_path / "c")
