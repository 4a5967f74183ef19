"""The controller of block sizes, on simulated texts with a table of round times as measured on a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from dflash_runtime import GenerationConfig, Session, adaptive
from dflash_runtime.adaptive import BlockSizeController

ROUND_MS = {1: 20.0, 4: 36.0, 8: 44.0, 16: 60.0}
TOKENS = 768


Slowness = Callable[[float], float]
"""Milliseconds into a text -> times as slow as usual the machine is."""


def played(chances: np.ndarray, luck: np.ndarray, choose: Callable[[], int], learn: BlockSizeController | None = None,
           slowness: Slowness = lambda ms: 1.0) -> tuple[float, list[int]]:  # fmt: skip
    """Milliseconds for a text in which the proposal at place n is right when `luck[n] < chances[n]`."""
    place, ms, sizes = 0, 0.0, []
    while place < TOKENS:
        size, right = choose(), 0
        while right < size - 1 and luck[place + right] < chances[place + right]:
            right += 1
        committed = min(right + 1, TOKENS - place)
        round_ms = ROUND_MS[size] * slowness(ms)
        ms += round_ms
        if learn is not None:
            learn.observe(size, committed, round_ms, complete=committed == right + 1)
        sizes.append(size)
        place += committed
    return ms, sizes


def against_fixed(
    chances_of: Callable[[np.random.Generator], np.ndarray], *, informed: bool = True, texts: int = 8,
    believed_ms: Mapping[int, float] | None = None, slowness: Slowness = lambda ms: 1.0, alone: bool = False,
) -> tuple[float, dict[int, float]]:  # fmt: skip
    """Mean milliseconds of a text with the controller, and with each fixed size.

    `alone`: every text has a controller of its own, as where `run` answers one prompt and ends.
    """
    times = {**ROUND_MS, **(believed_ms or {})} if informed else None
    controller = BlockSizeController(list(ROUND_MS), times)
    own, fixed = 0.0, dict.fromkeys(ROUND_MS, 0.0)
    for seed in range(texts):
        rng = np.random.default_rng(seed)
        chances, luck = chances_of(rng), rng.random(TOKENS + 32)
        controller = BlockSizeController(list(ROUND_MS), times) if alone else controller
        controller.begin()
        own += played(chances, luck, controller.choose, controller, slowness)[0] / texts
        for size in fixed:
            fixed[size] += played(chances, luck, lambda size=size: size, None, slowness)[0] / texts
    return own, fixed


def steady(chance: float) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.full(TOKENS + 32, chance)


def parts(*chances: float) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.repeat(chances, -(-(TOKENS + 32) // len(chances)))[: TOKENS + 32]


@pytest.mark.parametrize(("informed", "bound"), [(True, 1.03), (False, 1.05)])
@pytest.mark.parametrize("chance", [0.95, 0.8, 0.6, 0.35, 0.05])
def test_a_steady_text_takes_about_the_time_of_the_best_size(chance: float, informed: bool, bound: float) -> None:
    own, fixed = against_fixed(steady(chance), informed=informed, texts=10)
    assert own < bound * min(fixed.values())


MIXED = [(0.95, 0.1), (0.1, 0.95), (0.1, 0.97, 0.1, 0.97), (0.95, 0.1) * 4]


@pytest.mark.parametrize("chances", MIXED, ids=["code, prose", "prose, code", "quarters", "eighths"])
def test_a_mixed_text_takes_less_than_with_any_one_size(chances: tuple[float, ...]) -> None:
    own, fixed = against_fixed(parts(*chances))
    assert own < min(fixed.values())


def test_a_bursty_text_takes_less_than_with_any_one_size() -> None:
    def bursts(rng: np.random.Generator) -> np.ndarray:
        turns = np.cumsum(rng.random(TOKENS + 32) < 1 / 24) % 2
        return np.where(turns, 0.1, 0.95)

    own, fixed = against_fixed(bursts, texts=12)
    assert own < min(fixed.values())


@pytest.mark.parametrize(("tokens", "informed", "alone"), [
    (256, True, False), (768, True, False), (256, True, True), (256, False, True)])  # fmt: skip
@pytest.mark.parametrize("chances", [(0.0,), (0.2,), (0.35,), (0.9, 0.0) * 32], ids=["0", "0.2", "0.35", "alternating"])
def test_plain_decoding_is_never_beaten_by_much(
    chances: tuple[float, ...], tokens: int, informed: bool, alone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", tokens)
    own, fixed = against_fixed(parts(*chances), informed=informed, alone=alone, texts=12)
    assert own < 1.03 * fixed[1] + 2 * max(ROUND_MS.values())


@pytest.mark.parametrize(("length", "hot"), [(4, 0.8), (16, 0.6), (64, 0.95)])
def test_a_drafter_that_is_right_by_turns_costs_little(
    length: int, hot: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of every length: those the controller could follow, and those that deceive it."""
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 256)
    turns = np.tile([hot, 0.0], TOKENS)

    def chances(rng: np.random.Generator) -> np.ndarray:
        return np.repeat(turns, length)[rng.integers(2 * length) :][: TOKENS + 32]

    own, fixed = against_fixed(chances, alone=True, texts=12)
    assert own < 1.03 * fixed[1] + 2 * max(ROUND_MS.values())


def test_what_is_known_must_get_old_in_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "_FADE_PLAIN", 1.0)
    monkeypatch.setattr(adaptive, "_OLD_ROUNDS", 1e9)
    own, fixed = against_fixed(parts(0.1, 0.95))
    assert own > 0.95 * fixed[1]


@pytest.mark.parametrize("chance", [0.35, 0.2, 0.05])
def test_a_time_measured_while_the_machine_was_busy_is_not_believed_for_ever(
    chance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, fixed = against_fixed(steady(chance), believed_ms={1: 60.0}, texts=10)
    assert own < 1.1 * fixed[1]
    monkeypatch.setattr(adaptive, "_OLD_ROUNDS", 1e9)
    own, fixed = against_fixed(steady(chance), believed_ms={1: 60.0}, texts=10)
    assert own > 1.15 * fixed[1]


SLOW = {
    "at times": lambda ms: 5.0 if int(ms / 200) % 10 == 0 else 1.0,
    "more and more": lambda ms: 1 + min(ms / 4000, 2),
    "by turns": lambda ms: 3.0 if int(ms / 1500) % 2 else 1.0,
}


@pytest.mark.parametrize("chance", [0.95, 0.6, 0.35, 0.05])
@pytest.mark.parametrize("slowness", SLOW.values(), ids=SLOW)
def test_a_machine_that_slows_down_slows_every_size(chance: float, slowness: Slowness) -> None:
    own, fixed = against_fixed(steady(chance), slowness=slowness, texts=10)
    assert own < 1.07 * min(fixed.values())


def test_a_size_that_slows_down_is_left() -> None:
    controller = BlockSizeController([4, 8], {1: 20.0, 4: 30.0, 8: 40.0}, {4: [0.9] * 3, 8: [0.9] * 7})
    assert controller.choose() == 8
    for _ in range(40):
        size = controller.choose()
        controller.observe(size, 4 if size > 1 else 1, {1: 20.0, 4: 30.0, 8: 200.0}[size])
    assert controller.choose() == 4


def test_one_slow_round_changes_little() -> None:
    controller = BlockSizeController([4], {1: 20.0, 4: 30.0})
    controller.observe(4, 4, 3000.0)
    assert controller.expected_ms(4) < 40


def test_what_cut_a_round_is_not_held_against_the_drafter() -> None:
    one, two = (BlockSizeController([8], ROUND_MS) for _ in range(2))
    for _ in range(5):
        one.observe(8, 2, 44.0, complete=False)
        two.observe(8, 2, 44.0)
    assert one.expected_tokens(8)[0] > two.expected_tokens(8)[0] + 0.8


def test_measured_chances_decide_the_first_round() -> None:
    good = BlockSizeController([4, 16], ROUND_MS, {4: [0.95] * 3, 16: [0.95] * 15})
    bad = BlockSizeController([4, 16], ROUND_MS, {4: [0.05] * 3, 16: [0.05] * 15})
    assert (good.choose(), bad.choose()) == (16, 1)


@pytest.fixture
def opened(tiny: Path) -> Iterator[Session]:
    with Session.open(tiny, threads=1) as session:
        yield session


def test_a_session_says_the_same_words_and_which_sizes_it_took(opened: Session) -> None:
    config = GenerationConfig(max_new_tokens=60, stop_token_ids=(), block_size="auto")
    plain = opened.generate([5, 17, 3], GenerationConfig(max_new_tokens=60, stop_token_ids=(), plain=True))
    for _ in range(3):
        result = opened.generate([5, 17, 3], config)
        assert result.token_ids == plain.token_ids
        assert sum(result.rounds_by_block_size.values()) <= 59
        assert set(result.rounds_by_block_size) <= set(range(1, max(opened.bundle.manifest.block_sizes) + 1))
    assert plain.rounds_by_block_size == {1: 59}
