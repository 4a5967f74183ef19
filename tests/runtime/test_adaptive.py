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
MEASURED = [ROUND_MS, {1: 23.5, 4: 33.8, 8: 40.3}, {1: 27.8, 4: 42.2, 8: 54.5}]
"""On CPUs; the last two of SmolLM2-135M and its drafter, on two threads and on one."""
TOKENS = 768


Slowness = Callable[[float], float]
"""Milliseconds into a text -> times as slow as usual the machine is."""
Extra = Callable[[int, int, int], float]
"""Block size, place in the text, plain rounds just before -> milliseconds beyond the table's."""


def nothing(size: int, place: int, plain_rounds: int) -> float:
    return 0.0


def tap_upkeep(size: int, place: int, plain_rounds: int) -> float:
    """Taps of plain rounds wait for the next draft, 128 at most. Measured: 0.7 ms, and 0.045 ms a row, of 27.8."""
    rows = plain_rounds % 128 if size > 1 else 128 * ((plain_rounds + 1) % 128 == 0)
    return ROUND_MS[1] * (0.025 + 0.0016 * rows) if rows else 0.0


def longer_context(size: int, place: int, plain_rounds: int) -> float:
    """Attention over the text so far, which a block reads once as a token does."""
    return 2 * ROUND_MS[1] * place / TOKENS


def played(chances: np.ndarray, luck: np.ndarray, choose: Callable[[], int], learn: BlockSizeController | None = None,
           slowness: Slowness = lambda ms: 1.0, extra: Extra = nothing) -> tuple[float, list[int]]:  # fmt: skip
    """Milliseconds for a text in which the proposal at place n is right when `luck[n] < chances[n]`."""
    place, ms, sizes, plain_rounds = 0, 0.0, list[int](), 0
    while place < TOKENS:
        size, right = choose(), 0
        while right < size - 1 and luck[place + right] < chances[place + right]:
            right += 1
        committed = min(right + 1, TOKENS - place)
        round_ms = (ROUND_MS[size] + extra(size, place, plain_rounds)) * slowness(ms)
        ms += round_ms
        plain_rounds = plain_rounds + 1 if size == 1 else 0
        if learn is not None:
            learn.observe(size, committed, round_ms, complete=committed == right + 1)
        sizes.append(size)
        place += committed
    return ms, sizes


def against_fixed(
    chances_of: Callable[[np.random.Generator], np.ndarray], *, informed: bool = True, texts: int = 8,
    believed_ms: Mapping[int, float] | None = None, slowness: Slowness = lambda ms: 1.0, alone: bool = False,
    extra: Extra = nothing,
) -> tuple[float, dict[int, float]]:  # fmt: skip
    """Mean milliseconds of a text with the controller, and with each fixed size.

    `alone`: every text has a controller of its own, as where `run` answers one prompt and ends. Fixed sizes keep up no
    taps: a drafter is given those of every block anyway, and plain decoding needs none.
    """
    times = {**ROUND_MS, **(believed_ms or {})} if informed else None
    controller = BlockSizeController(list(ROUND_MS), times)
    own, fixed = 0.0, dict.fromkeys(ROUND_MS, 0.0)
    for seed in range(texts):
        rng = np.random.default_rng(seed)
        chances, luck = chances_of(rng), rng.random(TOKENS + 32)
        controller = BlockSizeController(list(ROUND_MS), times) if alone else controller
        controller.begin()
        own += played(chances, luck, controller.choose, controller, slowness, extra)[0] / texts
        others = nothing if extra is tap_upkeep else extra
        for size in fixed:
            fixed[size] += played(chances, luck, lambda size=size: size, None, slowness, others)[0] / texts
    return own, fixed


def steady(chance: float) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.full(TOKENS + 32, chance)


def parts(*chances: float) -> Callable[[np.random.Generator], np.ndarray]:
    return lambda rng: np.repeat(chances, -(-(TOKENS + 32) // len(chances)))[: TOKENS + 32]


@pytest.mark.parametrize(
    ("informed", "alone", "bound"), [(True, False, 1.03), (False, False, 1.05), (True, True, 1.07)]
)
@pytest.mark.parametrize("chance", [0.95, 0.8, 0.6, 0.35, 0.05])
def test_a_steady_text_takes_about_the_time_of_the_best_size(
    chance: float, informed: bool, alone: bool, bound: float
) -> None:
    """A controller that begins anew has to find the size first, in 100 to 200 rounds."""
    own, fixed = against_fixed(steady(chance), informed=informed, alone=alone, texts=10)
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


@pytest.mark.parametrize("table", MEASURED, ids=["a", "two threads", "one thread"])
@pytest.mark.parametrize("chances", [(0.0,), (0.3,), (0.9, 0.0) * 16], ids=["0", "0.3", "alternating"])
def test_so_it_is_with_the_upkeep_of_taps_and_other_tables(
    chances: tuple[float, ...], table: dict[int, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TOKENS", 256)
    monkeypatch.setattr(sys.modules[__name__], "ROUND_MS", table)
    own, fixed = against_fixed(parts(*chances), extra=tap_upkeep, alone=True, texts=16)
    assert own < 1.03 * fixed[1] + 2 * max(table.values())


def test_it_follows_the_length_of_context() -> None:
    """A block costs as much more as a token alone does, so that from some length on it pays."""
    own, fixed = against_fixed(steady(0.35), extra=longer_context, texts=10)
    assert own < 1.03 * min(fixed.values())
    chances, plain_shares = np.full(TOKENS + 32, 0.35), []
    for seed in range(8):
        luck = np.random.default_rng(seed).random(TOKENS + 32)
        controller = BlockSizeController(list(ROUND_MS), ROUND_MS)
        sizes = played(chances, luck, controller.choose, controller, extra=longer_context)[1]
        plain_shares.append([np.mean(np.equal(part, 1)) for part in np.array_split(sizes, 4)])
    first, *_, last = np.mean(plain_shares, axis=0)
    assert first > 0.85 and last < 0.5


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
