"""A bf16 checkpoint whose residual leaves the range of fp16: mended by the fp16 guard, and without it refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import write_target

from dflash_engines.half_precision import emulate_half, to_fp32
from dflash_export.build_plan import BuildOptions
from dflash_export.parity import PrecisionPasses
from dflash_runtime.errors import ParityError
from dflash_tools import pipeline


def _overflowing_target(folder: Path) -> None:
    """The first layer's MLP adds one value times 6e4 to one channel, which leaves the 65,504 of fp16."""
    write_target(folder, "qwen2", dtype=torch.bfloat16)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    down = tensors["model.layers.0.mlp.down_proj.weight"]
    down[5] = 0
    down[5, 7] = 6e4
    save_file(tensors, file, metadata={"format": "pt"})


def test_fp16_is_refused_where_nothing_guards_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _overflowing_target(tmp_path / "t")
    options = BuildOptions(str(tmp_path / "t"), precision="fp16")
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_passes", lambda backend: PrecisionPasses(to_fp32, emulate_half))
        with pytest.raises(ParityError, match=r"are not finite.*--precision bf16 or fp32"):
            pipeline.build(options, tmp_path / "half", "none", lambda *_: None)
    assert [p.name for p in tmp_path.iterdir()] == ["t"]
    report = pipeline.build(options, tmp_path / "guarded", "none", lambda *_: None)
    assert all(row.passed for row in report.manifest.checks)
