"""What an engine's drafter keeps of the context, in words."""

from __future__ import annotations

from collections.abc import Iterator

from dflash_runtime.engine_record import EngineRecord

DRAFT_WINDOW = "draft_window"
"""What the window given by `--draft-window` is called among the facts of an engine."""


def ring_lines(record: EngineRecord) -> Iterator[str]:
    """One line for its rings and one for a window the user gave; none where its caches hold the whole context."""
    if record.rings:
        sizes = sorted({ring.rows for ring in record.rings.values()})
        rows = ", ".join(f"{size:,}" for size in sizes)
        layers = len({name.rpartition(".")[0] for name in record.rings})
        yield f"{layers} drafter layer(s) keep rings of {rows} rows, whatever the context."
    if (window := record.versions.get(DRAFT_WINDOW)) is not None:
        yield f"Drafter layers with no window of their own see {window} tokens (--draft-window); the text is the same."
