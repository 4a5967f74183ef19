"""The table of what quantisation costs: its numbers are those of the bundles, and every engine is in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import Make
from pairs import MAIN

from dflash_runtime.bundle import Bundle
from dflash_runtime.errors import DFlashError
from dflash_tools.quantization_bundles import Quality, build_bundle, measure_quality
from dflash_tools.quantization_table import Row, main, markdown


def test_one_run_says_size_quality_and_speed(built: Make, tmp_path: Path) -> None:
    (tmp_path / "fp32").symlink_to(built(MAIN))
    arguments = ["--model", str(tmp_path), "--drafter", "none", "--work", str(tmp_path), "--kind", "fp32",
                 "--threads", "1", "--tokens", "3", "--rounds", "2", "--num-prompts", "1", "--max-new-tokens", "12",
                 "--without-genai"]  # fmt: skip
    said = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert said.exit_code == 0 and "\n| fp32 | " in said.stdout
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


def test_the_table_is_markdown_and_every_number_is_in_it() -> None:
    quality = Quality(11.2, 855, 1.94, 8, 70)
    rows = [
        Row("fp32", 538_000_000, 20.0, (19.0, 21.0), quality),
        Row("int4", 88_000_000, 5.0, (4.9, 5.2), dataclasses.replace(quality, perplexity=13.5, acceptance_length=1.8)),
        Row("onnxruntime-genai int4", 90_000_000, 5.5, (5.4, 5.6), None),
    ]
    facts = {"threads": 2, "tokens": 64, "rounds": 3, "prompts": "gsm8k", "num_prompts": 6, "max_new_tokens": 96}
    said, blank, *table = markdown(rows, facts)
    assert "2 threads" in said and "6 prompts of gsm8k" in said and blank == ""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    assert len({len(row) for row in cells}) == 1 and set(table[1]) == {"|", "-"}
    assert cells[0][-1] == "tokens a round, block 8"
    assert cells[2] == ["fp32", "538.0 MB", "11.20", "20.00 (19.00 to 21.00)", "50.0", "1.00", "0.28", "1.94"]
    assert cells[3] == ["int4", "88.0 MB", "13.50", "5.00 (4.90 to 5.20)", "200.0", "4.00", "1.10", "1.80"]
    assert cells[4][-1] == "" and cells[4][2] == "" and cells[4][6] == "1.00"
    alone = markdown(rows[:1], facts)[2:]
    assert "genai" not in alone[0] and all(line.count("|") == 8 for line in alone)
