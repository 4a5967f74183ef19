"""Work on pieces of a weight, several at a time, each on one thread.

An operation on a megabyte is too short to be shared between threads: waiting for each other they lose what they gain,
and beside another busy program far more. Whole pieces are not.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

_MOST_THREADS = 4
Piece = TypeVar("Piece")
Result = TypeVar("Result")


def map_pieces(function: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
    """Results in the order of the pieces; only a few pieces are in memory at a time.

    Args:
        function: Of torch operations, which run without Python's lock.
        pieces: Read as they are needed.
    """
    workers = min(_MOST_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    before = torch.get_num_threads()
    running = deque[Future[Result]]()
    torch.set_num_threads(1)  # here too: what is done with a result is as short
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            for piece in pieces:
                running.append(pool.submit(function, piece))
                if len(running) > workers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
    finally:
        torch.set_num_threads(before)
