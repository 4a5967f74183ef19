"""Which caches of a drafter hold a window of the context alone, and how many rows that takes."""

from __future__ import annotations

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
    windows = {tensor.input: tensor.window_tokens or draft_window_tokens for tensor in state}
    if call_rows is None:
        return {name: Ring(window, window + block - 1) for name, window in windows.items()
                if window is not None and window + block - 1 < context}  # fmt: skip
    # Before the end is reached, what a query sees and what two blocks on their way may add move to the front: half of
    # the rows at least, so that none is copied onto itself and the copy is seldom.
    widest = max((window for window in windows.values() if window is not None), default=0)
    rows = 2 * (widest - 1) + 3 * call_rows
    small = rows < context + call_rows
    return {name: Ring(window, rows) for name, window in windows.items() if small and window is not None}
