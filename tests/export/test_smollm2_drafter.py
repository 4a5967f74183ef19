"""The drafter for SmolLM2-135M-Instruct that ships: found by the target's name, small, and honest about its making."""

from __future__ import annotations

import json
from pathlib import Path

from dflash_export.catalog import CATALOG, shipped_folder
from dflash_export.checkpoint import find_checkpoint
from dflash_export.drafter_config import parse_drafter_config

NAME = "smollm2-135m"
MOST_BYTES = 25_000_000


def shipped() -> Path:
    reference = CATALOG[NAME].drafter
    assert reference is not None
    folder = shipped_folder(reference)
    assert folder is not None
    return folder


def test_the_targets_name_finds_it_without_a_network() -> None:
    found = find_checkpoint(NAME, role="drafter", local_files_only=True)
    assert found.folder == shipped()
    facts = parse_drafter_config(json.loads((shipped() / "config.json").read_text(encoding="utf-8")), "shipped")
    assert facts.num_layers == 3
    assert {place.dtype for place in found.places.values()} == {"BF16"}
    assert not {name for name in found.places if "embed" in name or "lm_head" in name}


def test_it_is_small_and_its_card_says_how_it_was_made() -> None:
    files = [path for path in shipped().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES
    card = (shipped() / "README.md").read_text(encoding="utf-8")
    for word in ("train-drafter", "4-bit", "make-data", "GSM8K", "HumanEval"):
        assert word in card
    assert "/tmp" not in card
