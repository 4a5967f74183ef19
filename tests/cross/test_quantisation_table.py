"""The table of what quantisation costs: its numbers are those of the bundles, and every engine is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Make
from pairs import MAIN

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError
from dflash_tools.quantisation_bundles import build_bundle, measure_quality
from dflash_tools.quantisation_table import main


def test_one_run_says_size_quality_and_speed(built: Make, tmp_path: Path) -> None:
    (tmp_path / "fp32").symlink_to(built(MAIN))
    arguments = ["--model", str(tmp_path), "--drafter", "none", "--work", str(tmp_path), "--kind", "fp32",
                 "--threads", "1", "--tokens", "3", "--rounds", "2", "--num-prompts", "1", "--max-new-tokens", "12",
                 "--without-genai"]  # fmt: skip
    done = CliRunner().invoke(main, [*arguments, "--json"], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)["engines"]
    weights = Bundle.open(built(MAIN)).manifest.weights.values()
    assert row["name"] == "fp32" and row["size_bytes"] == sum(entry.length_bytes for entry in weights)
    assert 0 < row["quartiles_ms"][0] <= row["ms_per_token"] <= row["quartiles_ms"][1]
    quality = row["quality"]
    assert quality["perplexity"] > 1 and quality["rounds"] > 0 and quality["block_size"] == 16
    assert 1 <= quality["acceptance_length"] <= 16


def test_messages_and_builds_that_fail_are_said(built: Make, tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match="texts are needed"):
        measure_quality(built(MAIN), [{"role": "user"}], 1, 2, None)
    with pytest.raises(DFlashError, match=r"Building .*/b failed: .*is no target"):
        build_bundle("int4", tmp_path / "nothing", None, tmp_path / "b")
