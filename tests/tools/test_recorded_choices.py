"""The controller on texts of a real pair, recorded place by place, with round times measured in the same run.

Made by `python -m dflash_tools.block_size_choices BUNDLE --threads 2 --record FILE`: SmolLM2-135M-Instruct with its
shipped drafter, fp32, ort-cpu, two cores.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dflash_tools.recorded_acceptance import RecordedText, compare_choices, join_texts

RECORD = json.loads((Path(__file__).parent / "recorded_acceptance.json").read_text(encoding="utf-8"))
ROUND_MS = {int(size): ms for size, ms in RECORD["round_ms"].items()}
TEXTS = {data["name"]: RecordedText.from_json(data) for data in RECORD["texts"]}
TIMES = 5


BOUNDS = {"counting": 1.05}
"""What is accepted there swings from round to round, so that no size is the best throughout."""


@pytest.mark.parametrize("name", TEXTS)
def test_a_real_text_takes_about_the_time_of_the_best_size(name: str) -> None:
    own, fixed = compare_choices([TEXTS[name]] * TIMES, ROUND_MS)
    assert own < BOUNDS.get(name, 1.03) * min(fixed.values())


def test_texts_of_all_kinds_take_less_than_with_any_one_size() -> None:
    own, fixed = compare_choices(list(TEXTS.values()) * TIMES, ROUND_MS)
    assert own < min(fixed.values())


def test_a_text_of_parts_takes_less_than_with_any_one_size() -> None:
    mixed = join_texts(list(TEXTS.values()), "mixed", 120)
    own, fixed = compare_choices([mixed] * TIMES, ROUND_MS)
    assert own < min(fixed.values())


@pytest.mark.parametrize("name", TEXTS)
def test_plain_decoding_is_never_beaten_by_much(name: str) -> None:
    own, fixed = compare_choices([TEXTS[name]], ROUND_MS)
    assert own < 1.03 * fixed[1] + 2 * max(ROUND_MS.values())
