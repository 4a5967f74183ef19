"""Pieces worked on side by side come out in their order, few at a time, and one that fails ends the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from dflash_export.piece_threads import map_pieces


def test_results_come_in_order_and_pieces_are_read_as_needed() -> None:
    read, most_waiting = 0, 0

    def pieces() -> Iterator[int]:
        nonlocal read
        for i in range(40):
            read += 1
            yield i

    def work(i: int) -> tuple[int, int]:
        time.sleep(0.002 * (i % 3))
        return i, torch.get_num_threads()

    before = torch.get_num_threads()
    found = []
    for i, threads in map_pieces(work, pieces()):
        found.append(i)
        most_waiting = max(most_waiting, read - len(found))
        assert threads == 1
    assert found == list(range(40))
    assert most_waiting <= 5
    assert torch.get_num_threads() == before


def test_an_error_in_a_piece_is_the_callers() -> None:
    def work(i: int) -> int:
        if i == 3:
            raise ValueError("piece 3")
        return i

    before, running = torch.get_num_threads(), threading.active_count()
    with pytest.raises(ValueError, match="piece 3"):
        list(map_pieces(work, range(10)))
    assert (torch.get_num_threads(), threading.active_count()) == (before, running)
