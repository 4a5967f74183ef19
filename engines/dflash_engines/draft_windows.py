"""Which caches of a drafter hold a window of the context alone, and how many rows that takes."""

from __future__ import annotations

from collections.abc import Sequence

from dflash_runtime.bundle import Manifest
from dflash_runtime.errors import EngineError
from dflash_runtime.window_rings import Ring

DRAFT_WINDOW = "draft_window"
"""What the window given by the user is called among the versions of a record."""


def drafter_rings(
    manifest: Manifest, draft_window_tokens: int | None = None, call_rows: int | None = None
) -> dict[str, Ring]:
    """Cache input -> ring, for the drafter's caches of which attention sees less than the context.

    Args:
        manifest: Of the bundle.
        draft_window_tokens: Window of the layers that have none.
        call_rows: For a device, most tokens of a call: there rows follow one another, and all rings have the same size.
            None for the CPU, where rows go round in a circle.

    Raises:
        EngineError: this window is shorter than a block, or does not end before the context; or there is no drafter.
    """
    block, context = max(manifest.block_sizes), manifest.max_context_tokens
    fits = manifest.drafter is not None and block <= (draft_window_tokens or block) <= context - block
    if draft_window_tokens is not None and not fits:
        has = "no drafter" if manifest.drafter is None else f"blocks of {block} and a context of {context} tokens"
        raise EngineError(
            f"A draft window of {draft_window_tokens} tokens is asked for, and the bundle has {has}. "
            f"Give one from {block} to {context - block} to a bundle with a drafter, or leave it out."
        )
    state = [] if manifest.drafter is None else manifest.drafter.context_graph.state
    windows = [tensor.window_tokens or draft_window_tokens for tensor in state]
    rows = ring_rows(windows, block, context, call_rows)
    return {tensor.input: Ring(window, size) for tensor, window, size in zip(state, windows, rows, strict=True)
            if window is not None and size is not None}  # fmt: skip


def ring_rows(
    windows: Sequence[int | None], block_size: int, max_context_tokens: int, call_rows: int | None = None
) -> list[int | None]:
    """Rows of each cache of a drafter; None for one that is as long as the context.

    Args:
        windows: What attention over each sees, None for all of the context.
        block_size: The largest, anchor included.
        max_context_tokens: Most rows of a request.
        call_rows: As of `drafter_rings`.
    """
    if call_rows is None:
        return [None if window is None or window + block_size - 1 >= max_context_tokens else window + block_size - 1
                for window in windows]  # fmt: skip
    # Before the end is reached, what a query sees and what a block on its way may add move to the front. There are so
    # many rows that none is copied onto itself, and that it is seldom.
    widest = max((window for window in windows if window is not None), default=0)
    rows = 2 * (widest - 1) + 3 * call_rows
    return [None if window is None or rows >= max_context_tokens + call_rows else rows for window in windows]
