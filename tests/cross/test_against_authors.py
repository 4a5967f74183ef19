"""Our loop on a real bundle against the authors' package: tokens, accepted counts and every proposal of every round.

Accepted counts alone hide faults of the drafter, and tokens hide all of them: each fault planted here must show.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from authors import Authors, Rounds, differences
from conftest import Make
from faults import FAULTS, plant
from pairs import AUTHOR_PAIRS, Pair

from dflash_runtime import GenerationConfig, GenerationResult, Session

PROMPT_LENGTHS = (1, 6, 17, 40)
NEW_TOKENS = 30


def prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(512) for _ in range(length)] for length in PROMPT_LENGTHS]


def ours(bundle: Path, stop: list[int] | None = None) -> list[GenerationResult]:
    """Prompts longer than 16 tokens are prefilled in pieces."""
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, stop_token_ids=stop or [])
    with Session.open(bundle, threads=1, prefill_chunk_tokens=16) as session:
        return [session.generate(prompt, config) for prompt in prompts()]


def compared(found: list[GenerationResult], expected: list[Rounds]) -> list[str]:
    return [words for one, two in zip(found, expected, strict=True) for words in differences(one, two)]


COVERED = {"qwen2", "llama-six-layers"}
"""Nothing in them that no other pair has."""
EACH = [pytest.param(pair, id=pair.name, marks=pytest.mark.slow if pair.name in COVERED else [])
        for pair in AUTHOR_PAIRS]  # fmt: skip


@pytest.mark.parametrize("pair", EACH)
def test_every_round_is_the_authors(exported: Make, pair: Pair) -> None:
    bundle = exported(pair)
    authors = Authors(bundle.parent)
    expected = [authors.run(prompt, NEW_TOKENS) for prompt in prompts()]
    assert compared(ours(bundle), expected) == []
    if pair.likely_tokens:  # the comparison saw acceptance and rejection
        accepted = {n for rounds in expected for n in rounds.acceptance_lengths}
        assert len(accepted) > 1


def test_a_stop_token_inside_a_block(exported: Make) -> None:
    bundle = exported(AUTHOR_PAIRS[1])
    authors = Authors(bundle.parent)
    tokens = authors.run(prompts()[1], NEW_TOKENS).token_ids
    for stop in sorted(set(tokens)):
        expected = [authors.run(prompt, NEW_TOKENS, [stop]) for prompt in prompts()]
        assert compared(ours(bundle, [stop]), expected) == []


@pytest.fixture(scope="module")
def healthy(exported: Make) -> tuple[Path, list[Rounds]]:
    """A bundle whose drafter has a sliding and a full layer, and the authors' rounds for it."""
    bundle = exported(AUTHOR_PAIRS[1])
    authors = Authors(bundle.parent)
    return bundle, [authors.run(prompt, NEW_TOKENS) for prompt in prompts()]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_faults_show(
    healthy: tuple[Path, list[Rounds]], fault: Callable[[Path], None], tmp_path: Path
) -> None:
    bundle, expected = healthy
    copy = shutil.copytree(bundle, tmp_path / "b")
    plant(copy, fault)
    found = compared(ours(copy), expected)
    assert bool(found) == (fault.__name__ != "nothing")
    assert not any(words.startswith("tokens") for words in found)  # which is why tokens alone prove nothing
