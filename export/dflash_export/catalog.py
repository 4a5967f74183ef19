"""Short names for public pairs whose target has dense softmax attention, with what is known about each.

Facts about drafters come from their authors' papers, model cards and published copies of their configs; `check-pair`
compares them with the checkpoint at hand, because repositories have been seen to change under one name. A revision
is pinned where one is known to be right; a bundle records the commit it was made from either way.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

_SHIPPED = "shipped:"


@dataclasses.dataclass(frozen=True)
class KnownDrafter:
    """What its authors say of a published drafter; None where nothing was found."""

    block_size: int | None = None
    target_layer_ids: tuple[int, ...] | None = None
    """0-based, as z-lab counts them."""
    mask_token_id: int | None = None
    thinks: bool | None = None
    """Whether the answers it was trained on were written with thinking on."""


@dataclasses.dataclass(frozen=True)
class CatalogEntry:
    """One target and, where one is published, its drafter."""

    target: str
    """Hugging Face id, or `shipped:` and a folder that is part of this package."""
    drafter: str | None = None
    template_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Chat template arguments the drafter was trained with."""
    note: str = ""
    known: KnownDrafter = KnownDrafter()
    target_revision: str | None = None
    """Commit or tag to take; None for the newest."""
    drafter_revision: str | None = None


_NO_THINKING = {"enable_thinking": False}
_UNPUBLISHED = "nobody has published a DFlash drafter for it"
_QWEN3_TAPS = (1, 9, 17, 25, 33)
_GEMMA_31B = "google/gemma-4-31B-it"

CATALOG: dict[str, CatalogEntry] = {
    "demo": CatalogEntry("shipped:demo/target", "shipped:demo/drafter"),
    "qwen2-7b": CatalogEntry("Qwen/Qwen2-7B-Instruct", note=_UNPUBLISHED),
    "qwen2.5-7b": CatalogEntry("Qwen/Qwen2.5-7B-Instruct", note=_UNPUBLISHED),
    "qwen2.5-1.5b": CatalogEntry("Qwen/Qwen2.5-1.5B-Instruct", note=_UNPUBLISHED),
    "qwen2.5-0.5b": CatalogEntry("Qwen/Qwen2.5-0.5B-Instruct", note=_UNPUBLISHED),
    "qwen3-4b": CatalogEntry(
        "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", _NO_THINKING,
        known=KnownDrafter(16, _QWEN3_TAPS, 151669, thinks=False),
    ),
    "qwen3-4b-dflash2": CatalogEntry("Qwen/Qwen3-4B", "RedHatAI/Qwen3-4B-speculator.dflash2"),
    "qwen3-8b": CatalogEntry(
        "Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", _NO_THINKING,
        known=KnownDrafter(16, _QWEN3_TAPS, 151669, thinks=False),
    ),
    "qwen3-8b-speculators": CatalogEntry("Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash"),
    "qwen3-8b-dflash2": CatalogEntry(
        "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.dflash2", _NO_THINKING,
        known=KnownDrafter(block_size=16, thinks=False),
    ),
    "llama-3.1-8b": CatalogEntry(
        "meta-llama/Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",
        known=KnownDrafter(10, (1, 8, 15, 22, 29)),
    ),
    "gemma-4-12b": CatalogEntry("google/gemma-4-12B-it", "z-lab/gemma4-12B-it-DFlash"),
    "gemma-4-31b": CatalogEntry(
        _GEMMA_31B, "z-lab/gemma-4-31B-it-DFlash", known=KnownDrafter(16, (1, 12, 23, 35, 46, 57), 4)
    ),
    "gemma-4-31b-speculators": CatalogEntry(
        _GEMMA_31B, "RedHatAI/gemma-4-31B-it-speculator.dflash", known=KnownDrafter(thinks=False)
    ),
    "gemma-4-31b-dflash2": CatalogEntry(
        _GEMMA_31B, "RedHatAI/gemma-4-31B-it-speculator.dflash2",
        known=KnownDrafter(8, (0, 16, 28, 46, 58), thinks=True),
    ),
    "smollm2-135m": CatalogEntry("HuggingFaceTB/SmolLM2-135M-Instruct", "shipped:smollm2-135m-instruct/drafter"),
}  # fmt: skip

_RECURRENT = "its linear-attention layers keep a recurrent state, which cannot be rolled back to an earlier token"
_SHARED_KV = "some of its layers read the KV cache of another layer (KV sharing)"
_HYBRIDS = (
    "qwen3.5-4b", "qwen3.5-9b", "qwen3.5-27b", "qwen3.5-35b-a3b", "qwen3.6-27b", "qwen3.6-35b-a3b", "qwen3.8-27b",
    "qwen3-coder-next",
)  # fmt: skip
NOT_SERVED: dict[str, str] = {
    **dict.fromkeys(_HYBRIDS, _RECURRENT),
    **dict.fromkeys(("gemma-4-e2b", "gemma-4-e4b"), _SHARED_KV),
}
"""Targets with a public drafter that are not exported, and why."""


def shipped_folder(reference: str) -> Path | None:
    """Where a checkpoint that comes with this package lies; None for any other reference."""
    if not reference.startswith(_SHIPPED):
        return None
    return Path(__file__).parent / "shipped" / reference.removeprefix(_SHIPPED)


def entry_of_drafter(drafter_id: str) -> CatalogEntry | None:
    """The entry a published drafter stands in, None for any other."""
    return next((entry for entry in CATALOG.values() if entry.drafter == drafter_id), None)


def drafter_template_args(drafter_id: str) -> dict[str, Any]:
    """Template arguments a published drafter was trained with, {} when nothing is known."""
    entry = entry_of_drafter(drafter_id)
    return {} if entry is None else dict(entry.template_args)
