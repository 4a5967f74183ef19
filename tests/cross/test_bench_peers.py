"""Peers of `bench` on a real pair: the same words, the same rounds, and acceptance by script on both sides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from conftest import Make
from pairs import AUTHOR_PAIRS

from dflash_tools.bench_command import command

PAIR = AUTHOR_PAIRS[1]


@pytest.fixture(scope="module")
def report(exported: Make, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("dflash")
    folder = tmp_path_factory.mktemp("bench")
    prompts = folder / "p.jsonl"
    prompts.write_text("\n".join(map(json.dumps, ["hello there", "one two three four"])), encoding="utf-8")
    bundle = exported(PAIR)
    arguments = [
        bundle, "--prompts", prompts, "--max-new-tokens", 40, "--threads", 1, "--rounds", 1, "--block-size", 8,
        "--scripted-acceptance", 3, "--against", "dflash", "--against", "transformers",
        "--model", bundle.parent / "target", "--drafter", bundle.parent / "drafter", "--json", folder / "r.json",
    ]  # fmt: skip
    done = CliRunner().invoke(command, [str(a) for a in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads((folder / "r.json").read_text())[0]


def row(report: Any, engine: str, mode: str) -> Any:
    (found,) = [row for row in report["rows"] if (row["engine"], row["mode"]) == (engine, mode)]
    return found


def test_all_engines_say_the_same_words(report: Any) -> None:
    assert [row["engine"] for row in report["rows"]] == ["ours"] * 3 + ["dflash"] * 3 + ["transformers"]
    for found in report["rows"]:
        assert found["same_answers"] == found["answers"] == 2, found["label"]


@pytest.mark.parametrize("mode", ["block 8", "block 8 scripted 3"])
def test_both_loops_have_the_same_rounds(report: Any, mode: str) -> None:
    ours, theirs = row(report, "ours", mode), row(report, "dflash", mode)
    assert ours["acceptance"] == theirs["acceptance"]
    (pair,) = [c for c in report["comparisons"] if c["kind"] == "engine" and c["first"].endswith(mode)]
    assert pair["same_rounds"] == "2 of 2 prompts"


def test_a_script_holds_on_both_sides(report: Any) -> None:
    for engine in ("ours", "dflash"):
        acceptance = row(report, engine, "block 8 scripted 3")["acceptance"]
        assert acceptance["survival"][:3] == [1.0, 1.0, 0.0]
        assert acceptance["histogram"][2] == sum(acceptance["histogram"])


def test_the_drafter_of_another_checkpoint_is_refused(exported: Make, tmp_path: Path) -> None:
    bundle = exported(PAIR)
    target = bundle.parent / "target"
    done = CliRunner().invoke(
        command, [str(bundle), "--against", "dflash", "--model", str(target), "--drafter", str(target)]
    )
    assert done.exit_code == 1
    assert "the bundle's drafter was built from" in done.stderr
