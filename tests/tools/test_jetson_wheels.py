"""What a board needs, per JetPack; that the wheels exist is asked of the package index by the tool itself."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from dflash_runtime.errors import DFlashError
from dflash_tools import jetson_wheels
from dflash_tools.jetson_wheels import requirements, resolve


@pytest.mark.parametrize(("python", "major"), [("3.10", "<13,>=12.8"), ("3.12", ">=13")])
def test_cuda_bindings_follow_the_cuda_of_the_jetpack(python: str, major: str) -> None:
    needed = requirements("jetson", python)
    assert f"cuda-bindings{major}" in needed
    assert any(one.startswith("tokenizers") for one in needed)
    assert not any(one.startswith(("tensorrt", "torch", "transformers", "onnxruntime")) for one in needed)


def test_an_unknown_extra_is_named() -> None:
    with pytest.raises(DFlashError, match="no extra 'orin'"):
        requirements("orin", "3.10")


def test_a_missing_wheel_is_pips_word(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def refuse(argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        asked.append(argv)
        return subprocess.CompletedProcess(argv, 1, "", "WARNING: x\nERROR: No matching distribution found for foo\n")

    monkeypatch.setattr(jetson_wheels.subprocess, "run", refuse)
    with pytest.raises(DFlashError, match=r"Python 3\.10 on aarch64: ERROR: No matching distribution found for foo"):
        resolve("jetson", "3.10")
    (argv,) = asked
    assert {"--only-binary=:all:", "--dry-run", "manylinux_2_35_aarch64"} <= set(argv)
    assert "manylinux_2_39_aarch64" not in argv
