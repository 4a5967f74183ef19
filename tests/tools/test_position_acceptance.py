from __future__ import annotations

import random

import pytest

from dflash_tools.position_acceptance import (
    DraftedRound,
    count_positions,
    drafted_rounds,
    expected_tokens,
    histogram,
    survival,
)


def test_rounds_are_cut_out_of_the_answer() -> None:
    rounds = drafted_rounds([9, 1, 2, 3, 4], [3, 1], [[1, 2, 8], [7, 7, 7]])
    assert [done.committed for done in rounds] == [[1, 2, 3], [4]]
    assert [done.accepted for done in rounds] == [2, 0]


def test_counts_by_hand() -> None:
    rounds = [
        DraftedRound([1, 2, 3], [1, 2, 3, 4]),  # all accepted
        DraftedRound([1, 2, 3], [1, 9]),  # one accepted, the second rejected, the third never reached
        DraftedRound([1, 2, 3], [8]),  # none
        DraftedRound([1, 2, 3], [1, 2]),  # the output ended after two accepted ones: of the third nothing is known
    ]
    counts = count_positions(rounds, 4)
    assert counts.reached == [4, 3, 1]
    assert counts.accepted == [3, 2, 1]
    assert survival(counts) == pytest.approx([3 / 4, 3 / 4 * 2 / 3, 3 / 4 * 2 / 3])
    assert expected_tokens(counts) == pytest.approx(1 + 0.75 + 0.5 + 0.5)
    assert histogram(rounds, 4) == [1, 1, 0, 1]  # the cut round is in none


def test_a_shorter_last_block_says_nothing_of_later_positions() -> None:
    counts = count_positions([DraftedRound([1], [1, 2])], 4)
    assert (counts.reached, counts.accepted) == ([1, 0, 0], [1, 0, 0])
    assert survival(counts) == [1.0, 0.0, 0.0]


def test_ends_of_outputs_do_not_bend_the_chances() -> None:
    # Proposals are right with chance 0.8. Answers of 6 tokens cut many rounds; counting a cut round as a rejection, or
    # as a whole one, would show in the chances.
    rng = random.Random(1)
    rounds, wrong = [], []
    for _ in range(4000):
        left = 6
        while left > 0:
            accepted = 0
            while accepted < 3 and rng.random() < 0.8:
                accepted += 1
            committed = [*range(accepted), 99][:left]
            rounds.append(DraftedRound([0, 1, 2], committed))
            wrong.append(min(accepted, left))
            left -= len(committed)
    chances = survival(count_positions(rounds, 4))
    assert chances == pytest.approx([0.8, 0.64, 0.512], abs=0.02)
    naive = sum(n >= 3 for n in wrong) / len(wrong)
    assert abs(naive - 0.512) > 0.03
