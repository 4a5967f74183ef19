"""A bf16 checkpoint whose residual leaves the range of fp16 is never exported to fp16; in fp32 it is fine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_target

from dflash_export.build_plan import BuildOptions
from dflash_runtime.errors import ParityError
from dflash_tools.pipeline import build


def _overflowing_target(folder: Path) -> None:
    """The first layer's MLP adds one value times 6e4 to one channel, which leaves the 65,504 of fp16."""
    write_target(folder, "qwen2", dtype=torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    down[5] = 0
    down[5, 7] = 6e4
    save_file(tensors, file, metadata={"format": "pt"})


def test_fp16_is_refused_and_fp32_is_not(tmp_path: Path) -> None:
    _overflowing_target(tmp_path / "t")
    with pytest.raises(ParityError, match=r"are not finite.*--precision bf16 or fp32"):
        build(BuildOptions(str(tmp_path / "t"), precision="fp16"), tmp_path / "half", "none", lambda *_: None)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    report = build(BuildOptions(str(tmp_path / "t"), precision="fp32"), tmp_path / "b", "none", lambda *_: None)
    assert all(row.passed for row in report.manifest.checks)
