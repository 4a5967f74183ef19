"""Rings of a drafter's cache against what lies in their slots: no row that a block sees is ever lost."""

from __future__ import annotations

import random

import pytest

from dflash_runtime.window_rings import Ring, RingRows

BLOCKS = (1, 2, 4, 8)


class Slots:
    """A ring as memory: each slot holds the last row written there, with the number of its writing."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.slots = ring, dict[int, tuple[int, int]]()

    def write(self, rows: range, number: int) -> None:
        for row in rows[-self.ring.rows :]:
            self.slots[row % self.ring.rows] = row, number

    def sees(self, position: int, committed: list[int]) -> bool:
        """Whether every context row that a block at `position` sees is there as it was committed."""
        seen = range(max(0, position - self.ring.window_tokens + 1), position)
        return all(self.slots.get(row % self.ring.rows) == (row, committed[row]) for row in seen)


def lost_rows(rings: list[Ring], seed: int, kept_of: type[RingRows] = RingRows) -> tuple[int, int]:
    """Drafts whose context was not whole, and rows kept, over random turns: each goes on with a part of the text."""
    rng, rows, memories = random.Random(seed), kept_of(rings), [Slots(ring) for ring in rings]
    committed, lost, kept_rows, number = list[int](), 0, 0, 0

    def append(start: int, count: int) -> None:
        rows.wrote(start + count)
        for memory in memories:
            memory.write(range(start, start + count), number)

    for _ in range(40):
        length = len(committed)
        asked = rng.choice([length, rng.randrange(length + 1), max(0, length - rng.randrange(9))])
        kept = rows.keep(asked)
        assert 0 <= kept <= asked
        kept_rows += kept
        del committed[kept:]
        for _ in range(asked - kept + rng.randrange(1, 25)):  # the rest of the prefix, and what is new
            number += 1
            append(len(committed), 1)
            committed.append(number)
        for _ in range(rng.randrange(20)):
            position, block = len(committed), rng.choice(BLOCKS)
            if block > 1:
                number += 1
                append(position, block)  # the draft's own rows: scratch
                lost += not all(memory.sees(position, committed) for memory in memories)
            number += 1
            append(position, block)
            committed += [number] * rng.randint(1, block)
    return lost, kept_rows


def rings(*windows: int, short: int = 0) -> list[Ring]:
    return [Ring(window, window + max(BLOCKS) - 1 - short) for window in windows]


@pytest.mark.parametrize("windows", [(1,), (5,), (16,), (3, 16), (2, 9, 40)], ids=str)
def test_no_row_a_block_sees_is_lost(windows: tuple[int, ...]) -> None:
    for seed in range(20):
        lost, kept = lost_rows(rings(*windows), seed)
        assert lost == 0 and kept > 500


def test_a_ring_one_row_short_shows() -> None:
    assert any(lost_rows(rings(16, short=1), seed)[0] for seed in range(20))


def test_keeping_what_a_ring_has_lost_shows() -> None:
    class KeepsAll(RingRows):
        def keep(self, kept_rows: int) -> int:
            return kept_rows

    assert any(lost_rows(rings(16), seed, KeepsAll)[0] for seed in range(20))


def test_a_prompt_that_goes_on_where_the_ring_ends_runs_nothing_again() -> None:
    rows = RingRows(rings(16))
    rows.wrote(200)
    assert rows.keep(200) == 200
    assert rows.keep(200 - max(BLOCKS)) == 200 - max(BLOCKS)  # as far back as a rejected block goes


def test_further_back_a_window_is_run_again_and_then_nothing_more() -> None:
    rows = RingRows(rings(16))
    rows.wrote(200)
    assert rows.keep(150) == 135
    rows.wrote(150)
    assert rows.keep(150) == 150
    assert rows.keep(149) == 134  # the row before was not run again


def test_a_prefix_shorter_than_the_window_is_run_from_its_first_token() -> None:
    rows = RingRows(rings(16))
    rows.wrote(10)
    assert rows.keep(7) == 7  # the ring has not come round yet
    rows.wrote(40)
    assert rows.keep(7) == 0
    assert rows.keep(0) == 0


def test_without_rings_everything_is_kept() -> None:
    rows = RingRows([])
    rows.wrote(1000)
    assert rows.keep(3) == 3
