"""Which caches of a drafter hold a window of the context alone."""

from __future__ import annotations

import onnx_ir as ir

from dflash_engines.passes.cached_attention import find_cached_attention
from dflash_engines.ring_sizes import ring_rows
from dflash_runtime.bundle import Manifest
from dflash_runtime.errors import EngineError
from dflash_runtime.window_rings import Ring

DRAFT_WINDOW = "draft_window"
"""What the window given by the user is called among the versions of a record."""


def drafter_rings(
    manifest: Manifest, drafter: ir.Model | None, draft_window_tokens: int | None = None, call_rows: int | None = None
) -> dict[str, Ring]:
    """Cache input -> ring, for the drafter's caches of which attention sees less than the context.

    Args:
        manifest: Of the bundle.
        drafter: The portable graph that drafts: an engine sees what its layers say.
        draft_window_tokens: Window of the layers that have none.
        call_rows: As of `ring_rows`.

    Raises:
        EngineError: this window is shorter than a block, or does not end before the context; or there is no drafter.
    """
    block, context = max(manifest.block_sizes), manifest.max_context_tokens
    fits = drafter is not None and block <= (draft_window_tokens or block) <= context - block
    if draft_window_tokens is not None and not fits:
        has = "no drafter" if drafter is None else f"blocks of {block} and a context of {context} tokens"
        raise EngineError(
            f"A draft window of {draft_window_tokens} tokens is asked for, and the bundle has {has}. "
            f"Give one from {block} to {context - block} to a bundle with a drafter, or leave it out."
        )
    windows: dict[str, int | None] = {}
    for attention in [] if drafter is None else find_cached_attention(drafter):
        for cache in (attention.key_scatter.inputs[0], attention.value_scatter.inputs[0]):
            if cache is not None:
                windows[str(cache.name)] = attention.window_tokens or draft_window_tokens
    rows = ring_rows(list(windows.values()), block, context, call_rows)
    return {name: Ring(window, size) for (name, window), size in zip(windows.items(), rows, strict=True)
            if window is not None and size is not None}  # fmt: skip
