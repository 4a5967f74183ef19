"""Data in several places: joined, its taps cached place by place, and what does not belong together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from training_files import few_steps, write_random_answers, write_training_files

from dflash_runtime.errors import CheckpointError
from dflash_tools.training_data import data_record, join_parts, read_parts
from dflash_tools.training_target import FrozenTarget

LIMITS = {"vocab_size": 512, "max_text_tokens": 100}


def place(folder: Path, name: str, seed: int, **made: Any) -> Path:
    """A folder as `make-data --no-taps` leaves it."""
    (folder / name).mkdir()
    write_random_answers(folder / name / "answers.jsonl", 6, seed=seed)
    (folder / name / "data.json").write_text(json.dumps({"target": "x", "template_args": {}, **made}), encoding="utf-8")
    return folder / name


def test_texts_are_joined_and_held_out_over_all(tmp_path: Path) -> None:
    places = (place(tmp_path, "a", 1), place(tmp_path, "b", 2))
    parts = read_parts(places, **LIMITS)
    joined = join_parts(parts, 4)
    assert joined.texts == parts[0].texts + parts[1].texts
    assert len(joined.held_out) == 4
    assert join_parts(parts[::-1], 4).sha256 != joined.sha256 != parts[0].sha256
    assert join_parts(parts[:1], 0).sha256 == parts[0].sha256
    # What is held out of more data was held out before or is new, so nothing trained on is measured on later.
    before = {parts[0].texts[i].prompt_ids for i in join_parts(parts[:1], 4).held_out}
    held = {joined.texts[i].prompt_ids for i in joined.held_out}
    assert held & {text.prompt_ids for text in parts[0].texts} <= before


def test_a_place_given_twice_and_too_little_data_are_refused(tmp_path: Path) -> None:
    a = place(tmp_path, "a", 1)
    with pytest.raises(CheckpointError, match="names a place twice"):
        read_parts((a, tmp_path / "b" / ".." / "a"), **LIMITS)
    with pytest.raises(CheckpointError, match="6 usable texts and 6 are to be held out"):
        join_parts(read_parts((a,), **LIMITS), 6)


def test_answers_in_other_template_arguments_are_refused(tmp_path: Path) -> None:
    a, b = place(tmp_path, "a", 1), place(tmp_path, "b", 2, template_args={"enable_thinking": True})
    assert data_record((a,)) == {"template_args": {}}
    assert data_record((tmp_path / "none.jsonl",)) is None
    with pytest.raises(CheckpointError, match="enable_thinking"):
        data_record((a, b))


def test_each_text_gets_the_taps_of_its_own_place_and_old_taps_are_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_training_files(tmp_path)
    a, b = place(tmp_path, "a", 1), place(tmp_path, "b", 2)
    asked: list[int] = []
    real = FrozenTarget.taps

    def counting(self: FrozenTarget, ids: Any, layer_ids: Any) -> torch.Tensor:
        asked.append(len(ids))
        return real(self, ids, layer_ids)

    monkeypatch.setattr(FrozenTarget, "taps", counting)
    first = few_steps(tmp_path, tmp_path / "first", data=(a,))
    assert len(asked) == 6
    for name in ("taps.bf16", "taps.json"):  # as `make-data` leaves them beside its answers
        (a / name).write_bytes((tmp_path / "first" / "training" / "0" / name).read_bytes())
    both = few_steps(tmp_path, tmp_path / "both", data=(a, b))
    assert len(asked) == 12
    merged = tmp_path / "merged.jsonl"
    merged.write_bytes((a / "answers.jsonl").read_bytes() + (b / "answers.jsonl").read_bytes())
    whole = few_steps(tmp_path, tmp_path / "whole", data=(merged,))
    assert both.history == whole.history  # other taps would give other losses
    assert first.history != both.history
