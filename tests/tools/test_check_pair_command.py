"""`check-pair`: what it prints, its JSON, and an exit code by severity."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_calls import invoke_here
from tiny_models import edit_json, write_drafter, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "target"
    write_target(folder)
    return folder


@pytest.mark.parametrize(
    ("stated", "code", "verdict"),
    [
        ({}, 0, "This pair fits."),
        ({"taps": (0, 3)}, 0, "This pair fits."),
        ({"mask_token_id": 257}, 3, "This pair works; acceptance probably suffers."),
        ({"mask_token_id": 257, "taps": (0, 9)}, 1, "This pair cannot work."),
        ({"architectures": ["DominoModel"]}, 1, "This pair cannot work."),
    ],
)
def test_the_exit_code_is_the_worst_severity(
    target: Path, tmp_path: Path, stated: dict[str, Any], code: int, verdict: str
) -> None:
    write_drafter(tmp_path / "drafter", **stated)
    done = invoke_here("check-pair", target, tmp_path / "drafter")
    assert done.exit_code == code
    assert done.output.splitlines()[-1] == verdict
    found = json.loads(invoke_here("check-pair", target, tmp_path / "drafter", "--json").output)
    assert found["fits"] is (code != 1)
    assert found["worst"] == {0: None, 1: "error", 3: "warning"}[code] or found["worst"] == "note"


def test_findings_come_worst_first_with_consequence_and_remedy(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", mask_token_id=257, taps=(0, 3), rope_theta=1e6)
    lines = invoke_here("check-pair", target, tmp_path / "drafter").output.splitlines()
    kinds = [line.split()[0] for line in lines if line.startswith(("error", "warning", "note"))]
    assert kinds == ["warning", "warning", "note"]
    at = next(i for i, line in enumerate(lines) if line.startswith("warning"))
    assert lines[at + 1].startswith(" " * 10) and lines[at + 2].startswith(" " * 10)
    assert any("block size 4 (the anchor and 3 proposals)" in line for line in lines)


def test_options_are_looked_at_too(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter", max_position_embeddings=200)
    done = invoke_here("check-pair", target, tmp_path / "drafter", "--max-context", 300, "--block-size", 8)
    assert done.exit_code == 1
    assert "context is 300 tokens" in done.output and "block of 8 tokens" in done.output


def test_what_is_no_checkpoint_is_one_line(target: Path, tmp_path: Path) -> None:
    done = invoke_here("check-pair", target, tmp_path)
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1
    assert "has no config.json" in done.stderr
    assert "Name one" in invoke_here("check-pair", target).stderr


def test_a_target_needs_no_weights(target: Path, tmp_path: Path) -> None:
    write_drafter(tmp_path / "drafter")
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_bytes((target / "config.json").read_bytes())
    edit_json(bare / "config.json", tie_word_embeddings=True)
    assert invoke_here("check-pair", bare, tmp_path / "drafter").exit_code == 0


def test_the_catalogs_own_pair_fits() -> None:
    assert invoke_here("check-pair", "demo").exit_code == 0


@pytest.mark.parametrize("arguments", [("check-pair", "a/b", "c/d"), ("build", "--target", "a/b")])
def test_offline_takes_the_cache_alone(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = invoke_here(*arguments, "--offline")
    assert done.exit_code == 1
    assert "a/b is not in the local Hugging Face cache" in done.stderr
