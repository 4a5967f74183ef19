"""How many rows a drafter's windowed caches take, on the CPU and on a device. A plan asks it too, without any graph."""

from __future__ import annotations

from collections.abc import Sequence


def ring_rows(
    windows: Sequence[int | None], block_size: int, max_context_tokens: int, call_rows: int | None = None
) -> list[int | None]:
    """Rows of each cache of a drafter; None for one that is as long as the context.

    Args:
        windows: What attention over each sees, None for all of the context.
        block_size: The largest, anchor included.
        max_context_tokens: Most rows of a request.
        call_rows: For a device, most tokens of a call: there rows follow one another, and all rings have the same size.
            None for the CPU, where rows go round in a circle.
    """
    if call_rows is None:
        return [None if window is None or window + block_size - 1 >= max_context_tokens else window + block_size - 1
                for window in windows]  # fmt: skip
    # Before the end is reached, what a query sees and what a block on its way may add move to the front. There are so
    # many rows that none is copied onto itself, and that it is seldom.
    widest = max((window for window in windows if window is not None), default=0)
    rows = 2 * (widest - 1) + 3 * call_rows
    return [None if window is None or rows >= max_context_tokens + call_rows else rows for window in windows]
